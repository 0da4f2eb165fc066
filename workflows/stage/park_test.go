package stage_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

// failing fails with the errors given, one per attempt, then succeeds.
func failing(w *world, errs ...error) func(workflow.Context, *stage.Scope) error {
	n := 0
	return func(ctx workflow.Context, _ *stage.Scope) error {
		w.note(ctx, "try")
		if n++; n <= len(errs) {
			return errs[n-1]
		}
		return nil
	}
}

func TestParkedStageIsRetried(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "verify", Do: failing(w,
		stage.Parking("3 pods are Pending", "GPUs are missing", "free a node", nil))})
	parked := w.statusAt(m)
	skip := w.updateAt(2*m, protocol.Skip, ann("verify"))
	w.signalAt(3*m, protocol.Retry, ann("verify"))
	r := w.run()
	require.NotNil(t, parked.WaitingFor)
	assert.Equal(t, protocol.Parked, parked.Stages[0].State)
	assert.Equal(t, "3 pods are Pending", parked.WaitingFor.Found)
	assert.Equal(t, "GPUs are missing", parked.WaitingFor.Why)
	assert.Equal(t, "free a node", parked.WaitingFor.Helps)
	assert.Equal(t, []string{"retry", "abort"}, parked.WaitingFor.Answers)
	assert.ErrorContains(t, skip.rejected, "takes retry, abort")
	assert.Equal(t, []string{"0s try", "3m0s try"}, w.journal)
	assert.Equal(t, 2, r.Stages[0].Attempts)
}

func TestAnUnattendedRunEndsWhereItWouldPark(t *testing.T) {
	w := newWorld(t, stage.Options{Unattended: true})
	withStages(w,
		stage.Stage{Name: "verify", Do: failing(w, stage.Parking("3 pods are Pending", "GPUs are missing", "free a node", nil))},
		stage.Stage{Name: "next", Do: w.act("next", 0)})
	w.cleanup = func(ctx workflow.Context) error { w.note(ctx, "cleanup"); return nil }
	r := w.run()
	assert.Equal(t, protocol.OutcomeAborted, r.Outcome)
	assert.Equal(t, []string{"0s try", "0s cleanup"}, w.journal)
	assert.Equal(t, "3 pods are Pending", r.Stages[0].Note)
	assert.Equal(t, protocol.Aborted, r.Stages[0].State)

	cause := stage.Parking("3 pods are Pending", "", "free a node", nil)
	failed := &stage.Failed{Stage: "verify", Cause: cause}
	assert.ErrorIs(t, failed, stage.ErrAborted)
	assert.Equal(t, "free a node", stage.Explain(failed).Helps)
}

func TestSkipOnlyWhereTheStageAllowsIt(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w,
		stage.Stage{Name: "optional", Skippable: true, Do: failing(w, errors.New("boom"))},
		stage.Stage{Name: "next", Do: w.act("next", 0)})
	parked := w.statusAt(m)
	w.signalAt(2*m, protocol.Skip, ann("optional"))
	r := w.run()
	assert.Equal(t, []string{"retry", "skip", "abort"}, parked.WaitingFor.Answers)
	assert.Equal(t, protocol.Skipped, r.Stages[0].State)
	assert.Equal(t, []string{"0s try", "2m0s next"}, w.journal)
}

func TestParkingChoosesItsAnswers(t *testing.T) {
	w := newWorld(t, stage.Options{Rollback: func(workflow.Context) error { return nil }})
	withStages(w, stage.Stage{Name: "s", Do: failing(w, stage.Parking("x", "", "", []string{protocol.Skip}))})
	parked := w.statusAt(m)
	w.signalAt(2*m, protocol.Skip, ann("s"))
	w.run()
	assert.Equal(t, []string{"skip", "rollback", "abort"}, parked.WaitingFor.Answers)
}

func TestFindingOfAnActivityBecomesTheParkingText(t *testing.T) {
	w := newWorld(t, stage.Options{})
	f := finding.Finding{
		Row: "T07", Object: "CRD gpupools", Expected: "v1 stored", Found: "v1beta1",
		Why: "old objects would be lost", Next: "migrate them",
	}
	w.env.RegisterActivityWithOptions(func(context.Context) error { return f.Error(finding.Stop) }, activity.RegisterOptions{Name: "check"})
	withStages(w, stage.Stage{Name: "crds", Do: func(ctx workflow.Context, s *stage.Scope) error {
		ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{StartToCloseTimeout: m})
		return s.Activity(ctx, protocol.ClusterQueue("east"), nil, "check")
	}})
	parked := w.statusAt(m)
	w.signalAt(2*m, protocol.Abort, ann(""))
	w.run()
	require.NotNil(t, parked.WaitingFor)
	assert.Equal(t, "T07: CRD gpupools: expected v1 stored, found v1beta1", parked.WaitingFor.Found)
	assert.Equal(t, "old objects would be lost", parked.WaitingFor.Why)
	assert.Equal(t, "migrate them", parked.WaitingFor.Helps)
	assert.Equal(t, []finding.Finding{f}, parked.WaitingFor.Findings)
}

func TestFindingsOfAParkingAreBounded(t *testing.T) {
	many := make([]finding.Finding, 30)
	assert.Len(t, stage.Explain(stage.Parking("x", "", "", nil, many...)).Findings, 20)
}

func TestAbortActsAtOnceWhileParkedInsideASection(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "member", Section: true, Do: failing(w, errors.New("the pod does not come back"))})
	parked := w.statusAt(m)
	w.signalAt(2*m, protocol.Abort, ann(""))
	r := w.run()
	assert.Contains(t, parked.WaitingFor.Why, "left half done: member")
	assert.Equal(t, start.Add(2*m), r.Ended.UTC())
	assert.Equal(t, []string{"member is half done: the pod does not come back"}, r.LeftBehind)
}

func TestSectionRepairedByRetryIsNotLeftBehind(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "member", Section: true, Do: failing(w, errors.New("x"))})
	w.signalAt(2*m, protocol.Retry, ann(""))
	assert.Empty(t, w.run().LeftBehind)
}

func TestAbortIsDeferredToTheEndOfASection(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "host", Section: true, Do: w.act("host", 10*m)},
		stage.Stage{Name: "next", Do: w.act("next", 0)})
	reply := w.updateAt(2*m, protocol.Abort, ann(""))
	during := w.statusAt(3 * m)
	r := w.run()
	require.NotNil(t, reply.accepted)
	assert.Equal(t, "takes effect after the section host", reply.accepted.Effect)
	assert.Equal(t, "host", during.Section)
	assert.Equal(t, protocol.Abort, during.Deferred)
	assert.Equal(t, []string{"0s host", "10m0s host ends"}, w.journal)
	assert.Equal(t, protocol.OutcomeAborted, r.Outcome)
	assert.Empty(t, r.LeftBehind)
}

func TestPauseIsDeferredToTheEndOfASection(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "hosts", Do: func(ctx workflow.Context, s *stage.Scope) error {
		for _, host := range []string{"n1", "n2"} {
			if err := s.Section(ctx, host, 0, func(ctx workflow.Context) error { return w.act(host, 10*m)(ctx, s) }); err != nil {
				return err
			}
		}
		return nil
	}})
	w.signalAt(2*m, protocol.Pause, ann(""))
	during := w.statusAt(3 * m)
	w.signalAt(30*m, protocol.Resume, ann(""))
	w.run()
	assert.Equal(t, protocol.Pause, during.Deferred)
	assert.Equal(t, []string{"0s n1", "10m0s n1 ends", "30m0s n2", "40m0s n2 ends"}, w.journal)
}

func TestAbortStopsOtherCoroutinesAtOnceAndWaitsForSections(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "batch", Do: func(ctx workflow.Context, s *stage.Scope) error {
		workflow.Go(ctx, func(ctx workflow.Context) {
			_ = s.Section(ctx, "n1", 0, func(ctx workflow.Context) error { return w.act("n1", 10*m)(ctx, s) })
		})
		err := s.Sleep(ctx, h, "soak")
		w.note(ctx, "soak stopped")
		return err
	}})
	w.signalAt(2*m, protocol.Abort, ann(""))
	r := w.run()
	assert.Equal(t, []string{"0s n1", "2m0s soak stopped", "10m0s n1 ends"}, w.journal)
	assert.Equal(t, start.Add(10*m), r.Ended.UTC())
}

func TestCancelMeansAbortAndClosesCompleted(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "host", Section: true, Do: w.act("host", 10*m)},
		stage.Stage{Name: "next", Do: w.act("next", 0)})
	cleaned := false
	w.cleanup = func(ctx workflow.Context) error { cleaned = true; return workflow.Sleep(ctx, time.Second) }
	w.at(2*m, w.env.CancelWorkflow)
	r := w.run()
	assert.Equal(t, protocol.OutcomeAborted, r.Outcome)
	assert.Equal(t, []string{"0s host", "10m0s host ends"}, w.journal)
	assert.True(t, cleaned)
	assert.Contains(t, r.Stages[0].Answers[0].Comment, "cancelled")
}

func TestGateInsideASectionIsAMistake(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "s", Section: true, Do: func(ctx workflow.Context, s *stage.Scope) error {
		return s.Gate(ctx, stage.Gate{Name: "g"})
	}})
	parked := w.statusAt(m)
	w.signalAt(2*m, protocol.Abort, ann(""))
	w.run()
	assert.Contains(t, parked.WaitingFor.Found, "inside an unbreakable section")
}

func TestTwoStagesOfOneNameAreRefused(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "a", Do: w.act("a", 0)}, stage.Stage{Name: "a", Do: w.act("a", 0)})
	w.env.ExecuteWorkflow("Toy")
	assert.ErrorContains(t, w.env.GetWorkflowError(), "already has a stage of that name")
}

func TestExplainNamesTheActivity(t *testing.T) {
	w := newWorld(t, stage.Options{})
	w.env.RegisterActivityWithOptions(func(context.Context) error {
		return temporal.NewNonRetryableApplicationError("connection refused", "net", nil)
	}, activity.RegisterOptions{Name: "probe"})
	withStages(w, stage.Stage{Name: "s", Do: func(ctx workflow.Context, s *stage.Scope) error {
		ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{StartToCloseTimeout: m})
		return s.Activity(ctx, "cluster/east", nil, "probe")
	}})
	parked := w.statusAt(m)
	w.signalAt(2*m, protocol.Abort, ann(""))
	w.run()
	assert.Equal(t, "probe: connection refused", parked.WaitingFor.Found)
}
