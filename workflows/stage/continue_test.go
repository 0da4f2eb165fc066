package stage_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

// part is a Do that works through batches and continues as new after two.
func part(w *world, from int) func(workflow.Context, *stage.Scope) error {
	return func(ctx workflow.Context, s *stage.Scope) error {
		for batch := from; batch < 4; batch++ {
			if batch == from+2 && s.Run().ShouldContinueAsNew() {
				return stage.ErrContinueAsNew
			}
			w.note(ctx, "batch")
			s.Progress(batch+1, 4, 0)
			if err := workflow.Sleep(ctx, m); err != nil {
				return err
			}
		}
		return nil
	}
}

func parts(w *world, from int) *world {
	return withStages(w,
		stage.Stage{Name: "first", Gate: &stage.Gate{}, Do: w.act("first", 0)},
		stage.Stage{Name: "batches", Do: part(w, from)},
		stage.Stage{Name: "last", Do: w.act("last", 0)})
}

func TestContinuedRunGoesOnWhereItWas(t *testing.T) {
	w := parts(newWorld(t, stage.Options{}), 0)
	w.env.SetContinueAsNewSuggested(true)
	w.signalAt(m, protocol.Approve, ann("first"))
	w.signalAt(2*m, protocol.Retry, ann("first")) // fits nothing
	w.signalAt(2*m, protocol.Pause, ann(""))
	w.env.ExecuteWorkflow("Toy")
	var can *workflow.ContinueAsNewError
	require.ErrorAs(t, w.env.GetWorkflowError(), &can)
	var state stage.State
	require.NoError(t, converter.GetDefaultDataConverter().FromPayloads(can.Input, &state))
	require.NotNil(t, state.Paused)

	next := parts(newWorld(t, stage.Options{Resume: &state}), 2)
	held := next.statusAt(2 * m)
	next.signalAt(5*m, protocol.Resume, ann(""))
	r := next.run()
	assert.Equal(t, protocol.PhasePaused, held.Phase)
	assert.Equal(t, []string{"5m0s batch", "6m0s batch", "7m0s last"}, next.journal)
	assert.Equal(t, protocol.Progress{Done: 4, Total: 4}, r.Progress)
	assert.Equal(t, start, r.Started.UTC())
	assert.Len(t, r.Ignored, 1)
	assert.Equal(t, "ann", r.Stages[0].Answers[0].By)
	assert.Equal(t, 1, r.Stages[1].Attempts)
}

func TestAbortInTheLastMomentWinsOverContinueAsNew(t *testing.T) {
	// A report to the parent that takes long keeps the run open for a moment.
	w := parts(newWorld(t, stage.Options{Parent: &protocol.Parent{WorkflowID: "up", RunID: "1", Prefix: "a"}}), 0)
	w.env.OnSignalExternalWorkflow(mock.Anything, "up", "1", protocol.SignalReport, mock.Anything).Return(nil).After(50 * time.Second)
	w.env.SetContinueAsNewSuggested(true)
	w.signalAt(m, protocol.Approve, ann("first"))
	w.signalAt(3*m+5*time.Second, protocol.Abort, ann(""))
	r := w.run()
	assert.Equal(t, protocol.OutcomeAborted, r.Outcome)
	assert.Equal(t, []string{"1m0s first", "1m0s batch", "2m0s batch"}, w.journal)
}

func TestShortHistoryDoesNotContinueAsNew(t *testing.T) {
	w := parts(newWorld(t, stage.Options{}), 0)
	w.signalAt(m, protocol.Approve, ann("first"))
	assert.Equal(t, protocol.OutcomeDone, w.run().Outcome)
}
