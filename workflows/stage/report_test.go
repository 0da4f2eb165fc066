package stage_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

// reports records what a run signals to its parent.
func reports(w *world) *[]protocol.Report {
	var out []protocol.Report
	w.o.Parent = &protocol.Parent{WorkflowID: "up", RunID: "1", Prefix: "rollout.a"}
	w.env.OnSignalExternalWorkflow(mock.Anything, "up", "1", protocol.SignalReport, mock.Anything).
		Return(func(_, _, _, _ string, arg any) error {
			out = append(out, arg.(protocol.Report))
			return nil
		})
	return &out
}

func TestProgressIsReportedSparingly(t *testing.T) {
	w := newWorld(t, stage.Options{})
	sent := reports(w)
	withStages(w, stage.Stage{Name: "hosts", Do: func(ctx workflow.Context, s *stage.Scope) error {
		for i := range 120 {
			s.Progress(i+1, 120, 0)
			if err := workflow.Sleep(ctx, time.Second); err != nil {
				return err
			}
		}
		return workflow.Sleep(ctx, 10*m)
	}})
	w.run()
	assert.LessOrEqual(t, len(*sent), 12, "120 changes in two minutes")
	assert.Equal(t, protocol.Progress{Done: 120, Total: 120}, (*sent)[len(*sent)-2].Status.Progress, "the last change does not wait for the end")
	assert.Equal(t, protocol.PhaseDone, (*sent)[len(*sent)-1].Status.Phase)
}

func TestForwardedAnswersAreAcknowledged(t *testing.T) {
	w := newWorld(t, stage.Options{})
	sent := reports(w)
	withStages(w, gated(w, stage.Gate{}))
	w.signalAt(m, protocol.Retry, protocol.Answer{Stage: "canary", ID: "p/1"})
	w.signalAt(2*m, protocol.Approve, protocol.Answer{Stage: "canary", ID: "p/2"})
	r := w.run()
	acked := (*sent)[len(*sent)-1].Acked
	require.Len(t, acked, 2)
	assert.Equal(t, "p/1", acked[0].ID)
	assert.Contains(t, acked[0].Reason, "takes approve, reject, abort")
	assert.Equal(t, protocol.Ack{ID: "p/2"}, acked[1])
	assert.Empty(t, r.Ignored, "the parent records what its child refuses")
}

func TestRunGoesOnWhenItsParentIsGone(t *testing.T) {
	w := newWorld(t, stage.Options{Parent: &protocol.Parent{WorkflowID: "up", RunID: "1", Prefix: "a"}})
	w.env.OnSignalExternalWorkflow(mock.Anything, mock.Anything, mock.Anything, mock.Anything, mock.Anything).
		Return(errors.New("not found")).Once()
	withStages(w, stage.Stage{Name: "one", Do: w.act("one", m)}, stage.Stage{Name: "two", Do: w.act("two", m)})
	assert.Equal(t, protocol.OutcomeDone, w.run().Outcome)
}

var (
	phaseKey   = temporal.NewSearchAttributeKeyKeyword(protocol.AttrPhase)
	waitingKey = temporal.NewSearchAttributeKeyKeyword(protocol.AttrWaitingFor)
	clusterKey = temporal.NewSearchAttributeKeyKeyword(protocol.AttrCluster)
	kindKey    = temporal.NewSearchAttributeKeyKeyword(protocol.AttrKind)
)

func TestSearchAttributesFollowThePhase(t *testing.T) {
	w := newWorld(t, stage.Options{HasSearchAttributes: true})
	withStages(w, gated(w, stage.Gate{}))
	w.env.OnUpsertTypedSearchAttributes(temporal.NewSearchAttributes(
		phaseKey.ValueSet("running"), clusterKey.ValueSet("east"), kindKey.ValueSet("Toy"))).Return(nil).Once()
	w.env.OnUpsertTypedSearchAttributes(temporal.NewSearchAttributes(
		phaseKey.ValueSet("waitingForApproval"), waitingKey.ValueSet("approval"))).Return(nil).Once()
	w.env.OnUpsertTypedSearchAttributes(temporal.NewSearchAttributes(
		phaseKey.ValueSet("running"), waitingKey.ValueUnset())).Return(nil).Once()
	w.env.OnUpsertTypedSearchAttributes(temporal.NewSearchAttributes(
		phaseKey.ValueSet("done"))).Return(nil).Once()
	w.signalAt(m, protocol.Approve, ann(""))
	w.run()
	w.env.AssertExpectations(t)
}

func TestWithoutSearchAttributesTheRunWarnsAndGoesOn(t *testing.T) {
	w := newWorld(t, stage.Options{})
	w.stages = func(r *stage.Run) []stage.Stage {
		r.UseSearchAttributes(false)
		return []stage.Stage{{Name: "one", Do: w.act("one", m)}}
	}
	r := w.run()
	require.Len(t, r.Warnings, 1)
	assert.Contains(t, r.Warnings[0], "refit setup")
}
