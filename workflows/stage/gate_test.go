package stage_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

var startOptions = client.StartWorkflowOptions{ID: "toy.east.all", TaskQueue: protocol.TaskQueue}

const m = time.Minute

func ann(stage string) protocol.Answer { return protocol.Answer{Stage: stage, By: "ann"} }

func gated(w *world, g stage.Gate) stage.Stage {
	return stage.Stage{Name: "canary", Gate: &g, Do: w.act("roll", m)}
}

func withStages(w *world, stages ...stage.Stage) *world {
	w.stages = func(*stage.Run) []stage.Stage { return stages }
	return w
}

func TestGateHoldsUntilApprovedByUpdate(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, gated(w, stage.Gate{Found: "one node is proven", Why: "99 follow", Helps: "look at the canary"}))
	during := w.statusAt(5 * m)
	reply := w.updateAt(10*m, protocol.Approve, protocol.Answer{Stage: "canary", By: "ann", Comment: "looks good"})
	receipt := w.run()

	assert.Equal(t, []string{"10m0s roll", "11m0s roll ends"}, w.journal)
	assert.Equal(t, protocol.PhaseGate, during.Phase)
	assert.Equal(t, protocol.WaitingForGate, during.Stages[0].State)
	require.NotNil(t, during.WaitingFor)
	assert.Equal(t, "canary", during.WaitingFor.Stage)
	assert.Equal(t, "one node is proven", during.WaitingFor.Found)
	assert.Equal(t, []string{"approve", "reject", "abort"}, during.WaitingFor.Answers)
	require.NotNil(t, reply.accepted)
	assert.Equal(t, protocol.Accepted{Verb: "approve", Stage: "canary", Effect: "in effect"}, *reply.accepted)
	assert.Equal(t, "looks good", receipt.Stages[0].Answers[0].Comment)
	assert.Equal(t, protocol.OutcomeDone, receipt.Outcome)
}

func TestAnswersThatDoNotFit(t *testing.T) {
	cases := []struct {
		name, verb string
		answer     protocol.Answer
		at         time.Duration
		reason     string
	}{
		{"approve before the gate", protocol.Approve, ann("canary"), m, "stage canary is pending and waits for no answer"},
		{"approve twice", protocol.Approve, ann("canary"), 21 * m, "stage canary is running and waits for no answer"},
		{"unknown stage", protocol.Approve, ann("canray"), 15 * m, `there is no stage "canray"`},
		{"retry at a gate", protocol.Retry, ann("canary"), 15 * m, "takes approve, reject, abort"},
		{"nothing waits", protocol.Approve, protocol.Answer{}, 2 * m, "no stage waits for an answer"},
		{"resume without pause", protocol.Resume, protocol.Answer{}, 2 * m, "the run is not paused"},
		{"rollback where there is none", protocol.Rollback, protocol.Answer{}, 15 * m, "this run has no rollback"},
	}
	for _, c := range cases {
		build := func(t *testing.T) *world {
			w := newWorld(t, stage.Options{})
			return withStages(w,
				stage.Stage{Name: "first", Do: w.act("first", 10*m)},
				stage.Stage{Name: "canary", Gate: &stage.Gate{}, Do: w.act("roll", 10*m)})
		}
		t.Run(c.name+" is refused by Update", func(t *testing.T) {
			w := build(t)
			reply := w.updateAt(c.at, c.verb, c.answer)
			w.signalAt(20*m, protocol.Approve, ann("canary"))
			receipt := w.run()
			require.Error(t, reply.rejected)
			assert.Contains(t, reply.rejected.Error(), c.reason)
			assert.Empty(t, receipt.Ignored)
		})
		t.Run(c.name+" is recorded by signal and not kept", func(t *testing.T) {
			w := build(t)
			w.signalAt(c.at, c.verb, c.answer)
			w.signalAt(20*m, protocol.Approve, ann("canary"))
			receipt := w.run()
			require.Len(t, receipt.Ignored, 1)
			assert.Contains(t, receipt.Ignored[0].Reason, c.reason)
			assert.Equal(t, []string{"0s first", "10m0s first ends", "20m0s roll", "30m0s roll ends"}, w.journal)
		})
	}
}

func TestStageMayBeLeftOutWhenExactlyOneWaits(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, gated(w, stage.Gate{}))
	w.signalAt(5*m, protocol.Approve, protocol.Answer{By: "ann"})
	assert.Empty(t, w.run().Ignored)
}

func TestStageLeftOutIsAmbiguousWhenSeveralWait(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "pools", Do: func(ctx workflow.Context, s *stage.Scope) error {
		done := 0
		for _, name := range []string{"pools.a", "pools.b"} {
			workflow.Go(ctx, func(ctx workflow.Context) {
				if s.Gate(ctx, stage.Gate{Name: name}) == nil {
					w.note(ctx, name)
				}
				done++
			})
		}
		return workflow.Await(ctx, func() bool { return done == 2 })
	}})
	both := w.statusAt(m)
	vague := w.updateAt(2*m, protocol.Approve, protocol.Answer{By: "ann"})
	w.signalAt(3*m, protocol.Approve, ann("pools.b"))
	w.signalAt(4*m, protocol.Approve, protocol.Answer{By: "ann"})
	w.run()
	assert.Equal(t, "pools.a", both.WaitingFor.Stage)
	assert.Equal(t, "pools.b", both.AlsoWaiting[0].Stage)
	require.Error(t, vague.rejected)
	assert.Contains(t, vague.rejected.Error(), "2 stages wait (pools.a, pools.b): name one")
	assert.Equal(t, []string{"3m0s pools.b", "4m0s pools.a"}, w.journal)
}

func TestSeveralApproversMustDiffer(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, gated(w, stage.Gate{Approvers: 2}))
	nobody := w.updateAt(1*m, protocol.Approve, protocol.Answer{Stage: "canary"})
	w.signalAt(2*m, protocol.Approve, ann("canary"))
	again := w.updateAt(3*m, protocol.Approve, protocol.Answer{Stage: "canary", By: " Ann "})
	half := w.statusAt(4 * m)
	w.signalAt(5*m, protocol.Approve, protocol.Answer{Stage: "canary", By: "bob"})
	w.run()
	assert.ErrorContains(t, nobody.rejected, "say who approves")
	assert.ErrorContains(t, again.rejected, "approved stage canary already; 1 of 2 approvals given")
	assert.Equal(t, []string{"ann"}, half.WaitingFor.Approvals)
	assert.Equal(t, 2, half.WaitingFor.Needed)
	assert.Equal(t, "5m0s roll", w.journal[0])
}

func TestRejectParksAndApproveLiftsIt(t *testing.T) {
	w := newWorld(t, stage.Options{Rollback: func(workflow.Context) error { return nil }})
	withStages(w, gated(w, stage.Gate{}))
	w.signalAt(1*m, protocol.Reject, protocol.Answer{Stage: "canary", By: "bob", Comment: "too hot"})
	parked := w.statusAt(2 * m)
	retry := w.updateAt(3*m, protocol.Retry, ann("canary"))
	w.signalAt(4*m, protocol.Approve, ann("canary"))
	w.run()
	assert.Equal(t, protocol.PhaseParked, parked.Phase)
	assert.Equal(t, []string{"approve", "rollback", "abort"}, parked.WaitingFor.Answers)
	assert.Equal(t, "rejected by bob: too hot", parked.WaitingFor.Found)
	assert.Error(t, retry.rejected)
	assert.Equal(t, "4m0s roll", w.journal[0])
}

// A run on a datastore has no way back that could be offered.
func TestRejectOffersOnlyWhatTheRunTakes(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, gated(w, stage.Gate{}))
	w.signalAt(1*m, protocol.Reject, ann("canary"))
	parked := w.statusAt(2 * m)
	w.signalAt(3*m, protocol.Abort, ann(""))
	w.run()
	assert.Equal(t, []string{"approve", "abort"}, parked.WaitingFor.Answers)
	assert.Equal(t, "approve to go on after all, or abort", parked.WaitingFor.Helps)
}

func TestRejectThenRollbackRunsIt(t *testing.T) {
	var w *world
	w = newWorld(t, stage.Options{Rollback: func(ctx workflow.Context) error {
		w.note(ctx, "undo")
		stage.ScopeOf(ctx).Note("all is as before")
		return nil
	}})
	withStages(w, gated(w, stage.Gate{}), stage.Stage{Name: "never", Do: w.act("never", 0)})
	w.signalAt(1*m, protocol.Reject, ann(""))
	w.signalAt(2*m, protocol.Rollback, ann(""))
	receipt := w.run()
	assert.Equal(t, protocol.OutcomeRolledBack, receipt.Outcome)
	assert.Equal(t, []string{"2m0s undo"}, w.journal)
	assert.Equal(t, map[string]protocol.StageState{
		"canary": protocol.Aborted, "never": protocol.Pending, "rollback": protocol.Done,
	}, states(receipt.Stages))
	assert.Equal(t, "all is as before", receipt.Stages[2].Note)
}

func TestFailedRollbackParksAndIsRetried(t *testing.T) {
	tries := 0
	w := newWorld(t, stage.Options{Rollback: func(workflow.Context) error {
		if tries++; tries == 1 {
			return stage.Parking("the old chart is gone", "", "", nil)
		}
		return nil
	}})
	withStages(w, gated(w, stage.Gate{}))
	w.signalAt(1*m, protocol.Rollback, ann(""))
	parked := w.statusAt(2 * m)
	w.signalAt(3*m, protocol.Retry, ann("rollback"))
	assert.Equal(t, protocol.OutcomeRolledBack, w.run().Outcome)
	assert.Equal(t, []string{"retry", "abort"}, parked.WaitingFor.Answers)
	assert.Equal(t, "the old chart is gone", parked.WaitingFor.Found)
}

func TestRollbackIsRefusedWhileTheRunWorks(t *testing.T) {
	w := newWorld(t, stage.Options{Rollback: func(workflow.Context) error { return nil }})
	withStages(w, stage.Stage{Name: "work", Do: w.act("work", 10*m)})
	reply := w.updateAt(m, protocol.Rollback, ann(""))
	w.run()
	assert.ErrorContains(t, reply.rejected, "pause it first")
}

func TestGateThatNobodyAnswersParks(t *testing.T) {
	w := newWorld(t, stage.Options{})
	until := start.Add(30 * m)
	withStages(w, gated(w, stage.Gate{Found: "one node is proven", Until: &until}))
	parked := w.statusAt(31 * m)
	w.signalAt(40*m, protocol.Approve, ann("canary"))
	w.run()
	assert.Equal(t, protocol.WaitParked, parked.WaitingFor.Kind)
	assert.Contains(t, parked.WaitingFor.Found, "nobody answered until 2026-03-02T08:30:00Z")
	assert.Equal(t, "40m0s roll", w.journal[0])
}

func TestIgnoredKeepsTheNewestFifty(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "work", Do: w.act("work", 10*m)})
	for i := range 70 {
		w.signalAt(m+time.Duration(i)*time.Second, protocol.Approve, protocol.Answer{Stage: fmt.Sprintf("s%d", i)})
	}
	ignored := w.run().Ignored
	require.Len(t, ignored, 50)
	assert.Equal(t, "s20", ignored[0].Stage)
	assert.Equal(t, "s69", ignored[49].Stage)
}
