package stage_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/testsuite"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/internal/workflowtest"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

// start is a Monday, 08:00 UTC.
var start = time.Date(2026, time.March, 2, 8, 0, 0, 0, time.UTC)

// world is one run on a clock that skips, and what people do to it.
type world struct {
	t       *testing.T
	env     *testsuite.TestWorkflowEnvironment
	o       stage.Options
	stages  func(r *stage.Run) []stage.Stage
	cleanup func(ctx workflow.Context) error
	journal []string
	updates int
}

func newWorld(t *testing.T, o stage.Options, stages ...stage.Stage) *world {
	w := &world{t: t, o: o, stages: func(*stage.Run) []stage.Stage { return stages }}
	w.o.Kind, w.o.Cluster = "Toy", "east"
	w.env = workflowtest.Environment()
	w.env.SetStartTime(start)
	w.env.SetStartWorkflowOptions(startOptions)
	w.env.RegisterWorkflowWithOptions(w.toy, workflow.RegisterOptions{Name: "Toy"})
	return w
}

func (w *world) toy(ctx workflow.Context) (protocol.Receipt, error) {
	r, err := stage.New(ctx, w.o)
	if err != nil {
		return protocol.Receipt{}, err
	}
	outcome := protocol.OutcomeDone
	err = r.Execute(r.Context(), w.stages(r)...)
	if errors.Is(err, stage.ErrContinueAsNew) {
		err = r.ContinueAsNew("Toy", func(s stage.State) any { return s })
	}
	switch {
	case errors.Is(err, stage.ErrAborted):
		outcome = protocol.OutcomeAborted
	case errors.Is(err, stage.ErrRolledBack):
		outcome = protocol.OutcomeRolledBack
	case err != nil:
		return protocol.Receipt{}, err
	}
	if w.cleanup != nil {
		r.Cleanup("cleanup", "release what the run holds", w.cleanup)
	}
	return r.Close(outcome), nil
}

// note writes the journal: what happened, minutes after the start.
func (w *world) note(ctx workflow.Context, what string) {
	w.journal = append(w.journal, fmt.Sprintf("%s %s", workflow.Now(ctx).Sub(start).Round(time.Second), what))
}

// act returns a Do that writes the journal and takes d.
func (w *world) act(what string, d time.Duration) func(workflow.Context, *stage.Scope) error {
	return func(ctx workflow.Context, s *stage.Scope) error {
		w.note(ctx, what)
		if d == 0 {
			return nil
		}
		if err := workflow.Sleep(ctx, d); err != nil {
			return err
		}
		w.note(ctx, what+" ends")
		return nil
	}
}

func (w *world) at(d time.Duration, do func()) { w.env.RegisterDelayedCallback(do, d) }

func (w *world) signal(verb string, a protocol.Answer) { w.env.SignalWorkflow(verb, a) }

func (w *world) signalAt(d time.Duration, verb string, a protocol.Answer) {
	w.at(d, func() { w.signal(verb, a) })
}

func (w *world) status() protocol.Status {
	v, err := w.env.QueryWorkflow(protocol.QueryStatus)
	require.NoError(w.t, err)
	var s protocol.Status
	require.NoError(w.t, v.Get(&s))
	return s
}

// statusAt fills the status as it is at that moment.
func (w *world) statusAt(d time.Duration) *protocol.Status {
	s := new(protocol.Status)
	w.at(d, func() { *s = w.status() })
	return s
}

// reply is what an Update's sender gets.
type reply struct {
	rejected error // by the validator
	err      error // by the handler
	accepted *protocol.Accepted
	at       time.Duration
}

func (w *world) updateAt(d time.Duration, verb string, a protocol.Answer) *reply {
	out := new(reply)
	w.updates++
	id := fmt.Sprintf("update-%d", w.updates)
	w.at(d, func() {
		w.env.UpdateWorkflow(verb, id, &testsuite.TestUpdateCallback{
			OnAccept: func() {},
			OnReject: func(err error) { out.rejected = err },
			OnComplete: func(v any, err error) {
				out.err, out.at = err, w.env.Now().Sub(start)
				if err == nil {
					acc := v.(protocol.Accepted)
					out.accepted = &acc
				}
			},
		}, a)
	})
	return out
}

// run plays the world to its end.
func (w *world) run() protocol.Receipt {
	w.t.Helper()
	w.env.ExecuteWorkflow("Toy")
	require.True(w.t, w.env.IsWorkflowCompleted(), "the run did not end")
	require.NoError(w.t, w.env.GetWorkflowError())
	var r protocol.Receipt
	require.NoError(w.t, w.env.GetWorkflowResult(&r))
	return r
}

func states(rows []protocol.Stage) map[string]protocol.StageState {
	out := map[string]protocol.StageState{}
	for _, r := range rows {
		out[r.Name] = r.State
	}
	return out
}

func reasons(ignored []protocol.Ignored) []string {
	var out []string
	for _, i := range ignored {
		out = append(out, i.Verb+": "+i.Reason)
	}
	return out
}
