package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/starter/run"
	"github.com/refit-run/refit/starter/view"
	"github.com/refit-run/refit/workflows/protocol"
)

// mode says when watching ends before the run does.
type mode struct {
	follow    bool
	untilGate bool
}

func (m *mode) flags(c *cobra.Command) {
	c.Flags().BoolVar(&m.follow, "follow", false, "watch until the run closes, through approvals and parkings")
	c.Flags().BoolVar(&m.untilGate, "until-gate", false, "watch until the run closes, parks or waits for approval")
}

func (m mode) check() error {
	if m.follow && m.untilGate {
		return usage{errors.New("--follow and --until-gate exclude each other: give one of them")}
	}
	return nil
}

func (a *App) watchCommand() *cobra.Command {
	var m mode
	c := &cobra.Command{
		Use:               "watch [RUN]",
		Short:             "Watch a run until it closes or waits for an answer",
		Args:              atMost(1, "at most one run"),
		ValidArgsFunction: a.completeRuns,
		RunE: func(c *cobra.Command, args []string) error {
			if err := m.check(); err != nil {
				return err
			}
			conn, r, err := a.find(c.Context(), first(args))
			if err != nil {
				return err
			}
			defer conn.Close()
			return a.watch(c.Context(), conn, r, m)
		},
	}
	m.flags(c)
	return c
}

// watch follows the run, prints how it stands at the end and returns the exit
// code that says so.
func (a *App) watch(ctx context.Context, c *run.Connection, r run.Run, m mode) error {
	w := watcher{app: a, conn: c, run: r, through: m.follow}
	o, err := w.follow(ctx)
	if err != nil {
		return err
	}
	if o.Run.Open() {
		if a.output == "table" {
			io.WriteString(a.Out, "\n"+a.waiting(c, o.Run, *o.Status.WaitingFor, a.options()))
		}
		return exit{waitCode(o.Status)}
	}
	switch {
	case a.output != "table":
		a.stream(o)
	case o.Receipt != nil:
		io.WriteString(a.Out, view.Closed(*o.Receipt, a.options()))
	}
	if o.Receipt == nil {
		return failure(o)
	}
	if code := closedCode(o); code != ExitDone {
		return exit{code}
	}
	return nil
}

// waitCode is the exit code of an open run by what it waits for.
func waitCode(s *protocol.Status) int {
	if s == nil || s.WaitingFor == nil {
		return ExitDone
	}
	switch s.WaitingFor.Kind {
	case protocol.WaitApproval:
		return ExitGate
	case protocol.WaitParked:
		return ExitParked
	}
	return ExitDone
}

// closedCode is the exit code of a closed run. A run that was rolled back did
// not do what was asked, so it counts as aborted.
func closedCode(o run.Observation) int {
	if o.Receipt != nil {
		switch o.Receipt.Outcome {
		case protocol.OutcomeAborted, protocol.OutcomeRolledBack:
			return ExitAborted
		}
		return ExitDone
	}
	switch o.Failure.Type {
	case protocol.BadInput:
		return ExitInput
	case protocol.Locked:
		return ExitRefused
	case "Canceled":
		return ExitAborted
	}
	return ExitError
}

// failure is a run that closed without a receipt, as an error with its code.
func failure(o run.Observation) error {
	text := fmt.Errorf("run %s closed as %s: %s", o.Run.WorkflowID, o.Failure.Type, o.Failure.Message)
	switch closedCode(o) {
	case ExitInput:
		return usage{text}
	case ExitRefused:
		return &run.Refused{Reason: text.Error()}
	case ExitAborted:
		return coded{ExitAborted, text}
	}
	return text
}

// watcher polls one run and shows what changes.
type watcher struct {
	app  *App
	conn *run.Connection
	run  run.Run
	// through goes on when the run waits for an answer.
	through bool
	// quiet shows nothing but that nobody works on the run, and gives up on it
	// when that has lasted.
	quiet bool

	before   *protocol.Status
	screen   screen
	silent   time.Time
	reported bool
}

const (
	// pollEvery is how often the run is asked: a person sees progress as
	// live, and a run of 10,000 hosts is not slowed by it.
	pollEvery = time.Second
	// patience is how long a server or worker may be away before it is said,
	// and before watching gives up on a server.
	silenceTold = 10 * time.Second
	patience    = 2 * time.Minute
)

// errNobody ends a quiet watch of a run that no worker takes up.
var errNobody = errors.New("nobody works on it")

// follow watches until the run closes or waits for an answer.
func (w *watcher) follow(ctx context.Context) (run.Observation, error) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var lost time.Time
	for {
		o, err := w.observe(ctx)
		var unknown *run.Unknown
		switch {
		case ctx.Err() != nil:
			return o, ctx.Err()
		case errors.As(err, &unknown):
			return o, err
		case err != nil:
			if lost.IsZero() {
				lost = time.Now()
			}
			if time.Since(lost) > patience {
				return o, err
			}
		default:
			lost = time.Time{}
			w.show(o)
			if w.quiet && !w.silent.IsZero() && time.Since(w.silent) > w.app.patience() {
				return o, errNobody
			}
			if !o.Run.Open() || !w.through && waitCode(o.Status) != ExitDone {
				return o, nil
			}
		}
		select {
		case <-ctx.Done():
			return o, ctx.Err()
		case <-tick.C:
		}
	}
}

// observe bounds one look at the run, so that a server that hangs is noticed.
func (w *watcher) observe(ctx context.Context) (run.Observation, error) {
	limited, cancel := context.WithTimeout(ctx, silenceTold)
	defer cancel()
	return run.Observe(limited, w.conn, w.run.WorkflowID)
}

func (w *watcher) show(o run.Observation) {
	a := w.app
	if o.Status == nil {
		w.tell(o.Silent)
		return
	}
	if w.quiet {
		if wait := o.Status.WaitingFor; wait != nil && wait.Kind == protocol.WaitQueue {
			w.tell(wait.Found + ": is the cluster's name right, and does its worker run?")
			return
		}
		w.silent = time.Time{}
		return
	}
	w.silent, w.reported = time.Time{}, false
	changed := w.before == nil || !reflect.DeepEqual(*w.before, *o.Status)
	switch {
	case a.output != "table":
		if changed {
			a.stream(o)
		}
	case a.terminal():
		v := a.options()
		text := view.Status(o.Run.WorkflowID, *o.Status, v)
		if w.through && waitCode(o.Status) != ExitDone {
			text += "\n" + a.waiting(w.conn, o.Run, *o.Status.WaitingFor, v)
		}
		_, height := a.Size()
		w.screen.draw(a.Out, text, height)
	default:
		for _, line := range view.Changes(w.before, *o.Status, a.options()) {
			fmt.Fprintln(a.Out, line)
		}
		if changed && w.through && waitCode(o.Status) != ExitDone && !sameWait(w.before, o.Status) {
			io.WriteString(a.Out, a.waiting(w.conn, o.Run, *o.Status.WaitingFor, a.options()))
		}
	}
	w.before = o.Status
}

func sameWait(before, now *protocol.Status) bool {
	return before != nil && reflect.DeepEqual(before.WaitingFor, now.WaitingFor)
}

// tell says once that nobody answers, when it has lasted.
func (w *watcher) tell(why string) {
	if why == "" {
		return
	}
	if w.silent.IsZero() {
		w.silent = time.Now()
	}
	if !w.reported && time.Since(w.silent) >= silenceTold {
		w.reported = true
		fmt.Fprintln(w.app.Err, "refit:", why)
	}
}

// stream writes one observation as one JSON line or YAML document.
func (a *App) stream(o run.Observation) {
	if a.output == "json" {
		if doc, err := json.Marshal(o); err == nil {
			fmt.Fprintln(a.Out, string(doc))
		}
		return
	}
	io.WriteString(a.Out, "---\n")
	_ = a.print(o, nil)
}

// screen redraws a block of text in place.
type screen struct{ lines int }

func (s *screen) draw(out io.Writer, text string, height int) {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	// The end says what happens now; a taller block would scroll and could
	// not be drawn over.
	if height > 1 && len(lines) > height-1 {
		lines = lines[len(lines)-(height-1):]
	}
	if s.lines > 0 {
		fmt.Fprintf(out, "\x1b[%dA", s.lines)
	}
	fmt.Fprintf(out, "\x1b[J%s\n", strings.Join(lines, "\n"))
	s.lines = len(lines)
}
