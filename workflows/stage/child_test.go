package stage_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

// newFamily is a parent whose stage "rollout" runs toy children side by side.
func newFamily(t *testing.T, o stage.Options, stages func(w *world) []stage.Stage, prefixes ...string) *world {
	w := newWorld(t, o)
	w.env.RegisterWorkflowWithOptions(func(ctx workflow.Context, p protocol.Parent) (protocol.Outcome, error) {
		r, err := stage.New(ctx, stage.Options{Kind: "Child", Cluster: "east", Parent: &p})
		if err != nil {
			return "", err
		}
		outcome := protocol.OutcomeDone
		if err := r.Execute(r.Context(), stages(w)...); errors.Is(err, stage.ErrAborted) {
			outcome = protocol.OutcomeAborted
		} else if err != nil {
			return "", err
		}
		w.note(ctx, p.Prefix+" "+string(outcome))
		return r.Close(outcome).Outcome, nil
	}, workflow.RegisterOptions{Name: "Child"})
	return withStages(w, stage.Stage{Name: "rollout", Do: func(ctx workflow.Context, s *stage.Scope) error {
		left := len(prefixes)
		var failed error
		for _, prefix := range prefixes {
			workflow.Go(ctx, func(ctx workflow.Context) {
				var outcome protocol.Outcome
				err := s.Child(ctx, prefix, func(ctx workflow.Context, p protocol.Parent) workflow.ChildWorkflowFuture {
					ctx = workflow.WithChildOptions(ctx, workflow.ChildWorkflowOptions{WorkflowID: "child." + prefix})
					return workflow.ExecuteChildWorkflow(ctx, "Child", p)
				}, &outcome)
				if err != nil {
					failed = err
				}
				left--
			})
		}
		if err := workflow.Await(ctx, func() bool { return left == 0 }); err != nil {
			_ = workflow.Await(s.Run().Context(), func() bool { return left == 0 })
		}
		return failed
	}})
}

func childGate(w *world) []stage.Stage {
	return []stage.Stage{
		{Name: "look", Do: func(ctx workflow.Context, s *stage.Scope) error {
			s.Progress(1, 8, 0)
			s.Current("n1")
			return workflow.Sleep(ctx, m)
		}},
		{Name: "canary", Gate: &stage.Gate{Found: "n1 is proven"}, Do: w.act("roll", 10*m)},
	}
}

func TestParentShowsTheChildsStagesWaitsAndProgress(t *testing.T) {
	w := newFamily(t, stage.Options{}, childGate, "rollout.pool-a")
	waiting := w.statusAt(5 * m)
	w.signalAt(6*m, protocol.Approve, ann("rollout.pool-a.canary"))
	r := w.run()
	require.NotNil(t, waiting.WaitingFor)
	assert.Equal(t, protocol.PhaseGate, waiting.Phase)
	assert.Equal(t, "rollout.pool-a.canary", waiting.WaitingFor.Stage)
	assert.Equal(t, "n1 is proven", waiting.WaitingFor.Found)
	assert.Equal(t, protocol.Progress{Done: 1, Total: 8}, waiting.Progress)
	var names []string
	for _, row := range r.Stages {
		names = append(names, row.Name)
		assert.Equal(t, protocol.Done, row.State, row.Name)
	}
	assert.Equal(t, []string{"rollout", "rollout.pool-a.look", "rollout.pool-a.canary"}, names)
	assert.Empty(t, r.Ignored)
	assert.Equal(t, "ann", r.Stages[2].Answers[0].By)
}

func TestUpdateForAChildCompletesWhenTheChildAcknowledges(t *testing.T) {
	w := newFamily(t, stage.Options{}, childGate, "a", "b")
	vague := w.updateAt(2*m, protocol.Approve, protocol.Answer{By: "ann"})
	wrong := w.updateAt(2*m, protocol.Retry, ann("a.canary"))
	good := w.updateAt(3*m, protocol.Approve, ann("a.canary"))
	twice := w.updateAt(4*m, protocol.Approve, ann("a.canary"))
	w.signalAt(20*m, protocol.Approve, ann("")) // only b waits now
	r := w.run()
	assert.ErrorContains(t, vague.rejected, "2 stages wait (a.canary, b.canary)")
	assert.ErrorContains(t, wrong.rejected, "takes approve, reject, abort")
	assert.ErrorContains(t, twice.rejected, "waits for no answer")
	require.NotNil(t, good.accepted)
	assert.Equal(t, "a.canary", good.accepted.Stage)
	assert.Equal(t, []string{"3m0s roll", "13m0s roll ends", "13m0s a done", "20m0s roll", "30m0s roll ends", "30m0s b done"}, w.journal)
	assert.Empty(t, r.Ignored)
}

func TestChildAnswersDirectlyUnderEitherName(t *testing.T) {
	for _, name := range []string{"canary", "rollout.a.canary"} {
		w := newFamily(t, stage.Options{}, childGate, "rollout.a")
		w.at(5*m, func() {
			require.NoError(t, w.env.SignalWorkflowByID("child.rollout.a", protocol.Approve, ann(name)))
		})
		assert.Equal(t, protocol.OutcomeDone, w.run().Outcome)
	}
}

func childSection(w *world) []stage.Stage {
	return []stage.Stage{
		{Name: "host", Section: true, Do: w.act("host", 10*m)},
		{Name: "next", Do: w.act("next", m)},
	}
}

func TestAbortIsForwardedAndTheChildEndsItsSection(t *testing.T) {
	w := newFamily(t, stage.Options{}, childSection, "a")
	reply := w.updateAt(2*m, protocol.Abort, ann(""))
	during := w.statusAt(3 * m)
	r := w.run()
	require.NotNil(t, reply.accepted)
	assert.Equal(t, "takes effect after the section host", reply.accepted.Effect)
	assert.Equal(t, "host", during.Section)
	assert.Equal(t, protocol.Abort, during.Deferred)
	assert.Equal(t, []string{"0s host", "10m0s host ends", "10m0s a aborted"}, w.journal)
	assert.Equal(t, protocol.OutcomeAborted, r.Outcome)
}

func TestCancelOfTheParentAbortsTheChild(t *testing.T) {
	w := newFamily(t, stage.Options{}, childSection, "a")
	w.at(2*m, w.env.CancelWorkflow)
	assert.Equal(t, protocol.OutcomeAborted, w.run().Outcome)
	assert.Equal(t, []string{"0s host", "10m0s host ends", "10m0s a aborted"}, w.journal)
}

func TestPauseAndResumeReachTheChild(t *testing.T) {
	w := newFamily(t, stage.Options{}, childSection, "a")
	w.signalAt(2*m, protocol.Pause, ann(""))
	held := w.statusAt(15 * m)
	w.signalAt(20*m, protocol.Resume, ann(""))
	r := w.run()
	assert.Equal(t, protocol.PhasePaused, held.Phase)
	assert.Equal(t, "a.next", held.WaitingFor.Stage)
	assert.Equal(t, []string{"0s host", "10m0s host ends", "20m0s next", "21m0s next ends", "21m0s a done"}, w.journal)
	assert.Empty(t, r.Ignored)
}

func TestChildAbortedByItselfParksTheParent(t *testing.T) {
	w := newFamily(t, stage.Options{}, childGate, "a")
	w.at(2*m, func() {
		require.NoError(t, w.env.SignalWorkflowByID("child.a", protocol.Abort, ann("")))
	})
	parked := w.statusAt(3 * m)
	w.signalAt(4*m, protocol.Abort, ann(""))
	w.run()
	require.NotNil(t, parked.WaitingFor)
	assert.Equal(t, "rollout", parked.WaitingFor.Stage)
	assert.Equal(t, "the child run a was aborted by itself", parked.WaitingFor.Found)
}

func TestFailedChildParksTheParent(t *testing.T) {
	w := newWorld(t, stage.Options{})
	w.env.RegisterWorkflowWithOptions(func(workflow.Context, protocol.Parent) error {
		return temporal.NewNonRetryableApplicationError("another run holds the Lease", protocol.Locked, nil)
	}, workflow.RegisterOptions{Name: "Child"})
	withStages(w, stage.Stage{Name: "rollout", Do: func(ctx workflow.Context, s *stage.Scope) error {
		return s.Child(ctx, "a", func(ctx workflow.Context, p protocol.Parent) workflow.ChildWorkflowFuture {
			return workflow.ExecuteChildWorkflow(ctx, "Child", p)
		}, nil)
	}})
	parked := w.statusAt(m)
	w.signalAt(2*m, protocol.Abort, ann(""))
	w.run()
	require.NotNil(t, parked.WaitingFor)
	assert.Contains(t, parked.WaitingFor.Found, "another run holds the Lease")
}

func TestRejectInAChildThenRollbackOfTheParent(t *testing.T) {
	var w *world
	o := stage.Options{Rollback: func(ctx workflow.Context) error { w.note(ctx, "undo"); return nil }}
	w = newFamily(t, o, childGate, "a")
	w.signalAt(2*m, protocol.Reject, ann("a.canary"))
	parked := w.statusAt(3 * m)
	reply := w.updateAt(4*m, protocol.Rollback, ann(""))
	r := w.run()
	assert.Equal(t, protocol.PhaseParked, parked.Phase)
	assert.Contains(t, parked.WaitingFor.Answers, protocol.Rollback)
	require.NotNil(t, reply.accepted)
	assert.Equal(t, protocol.OutcomeRolledBack, r.Outcome)
	assert.Equal(t, []string{"4m0s a aborted", "4m0s undo"}, w.journal)
}
