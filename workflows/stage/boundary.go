package stage

import (
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/window"
)

// need is what a boundary asks of the windows; nil asks nothing.
type need struct {
	what     string        // the section or stage that wants to start
	estimate time.Duration // it must stay open for so long
}

func (s *Scope) need() *need {
	if !s.stage.Mutates {
		return nil
	}
	return &need{what: s.stage.Name}
}

// boundary is the safe boundary: it returns nil when the run may go on now,
// and ErrAborted when it must stop. Meanwhile it holds while the run is
// paused, over its max duration, or outside a window.
func (r *Run) boundary(ctx workflow.Context, s *Scope, n *need) error {
	for {
		now := workflow.Now(ctx)
		var err error
		switch {
		case r.stopping != "" || r.aborted:
			return ErrAborted
		case r.paused:
			err = r.hold(ctx, r.pausedWait(s), 0, func() bool { return !r.paused })
		case r.overdue:
			err = r.await(ctx, func() bool { return !r.overdue })
		case !r.deadline.IsZero() && !r.rolling && now.After(r.deadline):
			err = r.parkOverdue(ctx, s)
		case n == nil || len(r.o.Windows) == 0:
			return nil
		default:
			if err := r.windows.extend(ctx, r.o.Windows); err != nil {
				return err
			}
			if window.Fits(r.windows.Open, now, n.estimate) {
				return nil
			}
			err = r.holdForWindow(ctx, s, n, now)
		}
		if err != nil {
			return err
		}
	}
}

func (r *Run) pausedWait(s *Scope) *wait {
	w := &wait{row: s.row}
	w.Kind, w.Stage = protocol.WaitPaused, r.rows[s.row].Name
	w.Found = "the run is paused" + byAndComment(r.pausedBy)
	w.Answers = r.answers(protocol.Resume)
	return w
}

func (r *Run) parkOverdue(ctx workflow.Context, s *Scope) error {
	r.overdue = true
	defer func() { r.overdue = false }()
	w := &wait{row: s.row}
	w.Kind, w.Stage = protocol.WaitParked, r.rows[s.row].Name
	w.Found = fmt.Sprintf("the run has taken longer than its max duration of %s", r.o.MaxDuration)
	w.Why = "somebody planned for less: what follows may collide with other work"
	w.Helps = fmt.Sprintf("retry goes on and allows another %s", r.o.MaxDuration)
	w.Answers = r.answers(protocol.Retry)
	if err := r.hold(ctx, w, 0, nil); err != nil {
		return err
	}
	r.deadline = workflow.Now(ctx).Add(r.o.MaxDuration)
	return nil
}

func (r *Run) holdForWindow(ctx workflow.Context, s *Scope, n *need, now time.Time) error {
	w := &wait{row: s.row}
	w.Stage = r.rows[s.row].Name
	next, ok := window.Next(r.windows.Open, now, n.estimate)
	if !ok {
		next, ok = nextFitting(ctx, r.o.Windows, n.estimate)
	}
	if !ok {
		w.Kind = protocol.WaitParked
		w.Found = fmt.Sprintf("%s needs %s, and no window of the plan before %s is open for as long",
			n.what, n.estimate, now.Add(searchHorizon).Format(time.DateOnly))
		w.Why = "nothing that changes the cluster starts where it would not end within the window"
		w.Helps = "abort, and start again with longer windows or smaller steps"
		w.Answers = r.answers(protocol.Retry)
		return r.hold(ctx, w, 0, nil)
	}
	w.Kind = protocol.WaitWindow
	w.Until = &next.Start
	w.Found = fmt.Sprintf("outside the windows of the plan; the next opens at %s", next.Start.Format(time.RFC3339))
	if window.Open(r.windows.Open, now) {
		w.Found = fmt.Sprintf("%s needs %s, more than is left of this window; the next opens at %s",
			n.what, n.estimate, next.Start.Format(time.RFC3339))
	}
	w.Answers = append([]string{protocol.Pause}, r.answers()...)
	return r.hold(ctx, w, next.Start.Sub(now), func() bool { return r.paused })
}

// hold makes the run wait until the wait is answered, until holds, or after
// timeout (0 = none). ErrAborted means that the run must stop. A wait is over
// by timeout when nil is returned, taken is "" and until does not hold.
func (r *Run) hold(ctx workflow.Context, w *wait, timeout time.Duration, until func() bool) error {
	w.Since = workflow.Now(ctx)
	w.Stage = r.uniqueWait(w)
	r.waits = append(r.waits, w)
	r.showRow(w.row)
	r.changed()
	over := func() bool {
		return w.taken != "" || r.stopping != "" || r.aborted || until != nil && until()
	}
	var err error
	if timeout > 0 {
		_, err = workflow.AwaitWithOptions(ctx, workflow.AwaitOptions{
			Timeout:      timeout,
			TimerOptions: workflow.TimerOptions{Summary: clip(w.Stage+": "+w.Kind, maxSummary)},
		}, over)
	} else {
		err = workflow.Await(ctx, over)
	}
	r.waits = slices.DeleteFunc(r.waits, func(o *wait) bool { return o == w })
	r.showRow(w.row)
	if r.stopping != "" || r.aborted {
		err = ErrAborted
	}
	r.changed()
	return err
}

// await is hold without showing anything.
func (r *Run) await(ctx workflow.Context, until func() bool) error {
	err := workflow.Await(ctx, func() bool { return until() || r.stopping != "" || r.aborted })
	if r.stopping != "" || r.aborted {
		return ErrAborted
	}
	return err
}

// uniqueWait keeps answers unambiguous when coroutines of one stage park or
// ask under the same name.
func (r *Run) uniqueWait(w *wait) string {
	if !answerable(w.Waiting) {
		return w.Stage
	}
	name := w.Stage
	for n := 2; slices.ContainsFunc(r.waits, func(o *wait) bool { return o.Stage == name && answerable(o.Waiting) }); n++ {
		name = fmt.Sprintf("%s.%d", w.Stage, n)
	}
	return name
}

// showRow sets the state of a row at work from what waits in it.
func (r *Run) showRow(row int) {
	state := protocol.Pending
	if r.rows[row].Attempts > 0 {
		state = protocol.Running
	}
	most := -1
	for _, w := range r.waits {
		if u := urgency(w.Kind); w.row == row && (most < 0 || u < most) {
			most, state = u, stateOf(w.Kind)
		}
	}
	r.rows[row].State = state
}

func stateOf(kind string) protocol.StageState {
	switch kind {
	case protocol.WaitApproval:
		return protocol.WaitingForGate
	case protocol.WaitWindow:
		return protocol.WaitingForWindow
	case protocol.WaitPaused:
		return protocol.Paused
	case protocol.WaitQueue:
		return protocol.Running
	}
	return protocol.Parked
}
