package stage_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

func onQueue(w *world, queue string) stage.Stage {
	w.env.RegisterActivityWithOptions(func(context.Context) error { return nil }, activity.RegisterOptions{Name: "probe"})
	return stage.Stage{Name: "probe", Do: func(ctx workflow.Context, s *stage.Scope) error {
		ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
			StartToCloseTimeout: h, RetryPolicy: &temporal.RetryPolicy{MaximumAttempts: 1},
		})
		err := s.Activity(ctx, queue, nil, "probe")
		if err == nil {
			w.note(ctx, "probed")
		}
		return err
	}}
}

func neverStarted() error {
	return temporal.NewTimeoutError(enumspb.TIMEOUT_TYPE_SCHEDULE_TO_START, nil)
}

func TestNobodyPollsAnAgentsQueueParksAndNamesIt(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, onQueue(w, "gpu/east/n7"))
	w.env.OnActivity("probe", mock.Anything).Return(neverStarted()).After(2 * m).Once()
	w.env.OnActivity("probe", mock.Anything).Return(nil)
	parked := w.statusAt(3 * m)
	w.signalAt(4*m, protocol.Retry, ann("probe"))
	w.run()
	require.NotNil(t, parked.WaitingFor)
	assert.Equal(t, protocol.PhaseParked, parked.Phase)
	assert.Contains(t, parked.WaitingFor.Found, "no worker polls the task queue gpu/east/n7")
	assert.Equal(t, []string{"4m0s probed"}, w.journal)
}

func TestNobodyPollsAClusterQueueWaitsAndSaysSo(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, onQueue(w, "cluster/east"))
	w.env.OnActivity("probe", mock.Anything).Return(neverStarted()).After(2 * m).Once()
	w.env.OnActivity("probe", mock.Anything).Return(neverStarted()).After(5 * m).Once()
	w.env.OnActivity("probe", mock.Anything).Return(nil).After(20 * m).Once()
	before := w.statusAt(m)
	waiting := w.statusAt(4 * m)
	started := w.statusAt(15 * m)
	w.run()
	assert.Nil(t, before.WaitingFor)
	require.NotNil(t, waiting.WaitingFor)
	assert.Equal(t, protocol.WaitQueue, waiting.WaitingFor.Kind)
	assert.Equal(t, protocol.PhaseRunning, waiting.Phase)
	assert.Contains(t, waiting.WaitingFor.Found, "cluster/east")
	assert.Equal(t, start, waiting.WaitingFor.Since.UTC())
	assert.Nil(t, started.WaitingFor, "a try that outlives its time in the queue has started")
	assert.Equal(t, []string{"27m0s probed"}, w.journal)
}

func TestAbortEndsTheWaitForAQueue(t *testing.T) {
	for _, section := range []bool{false, true} {
		w := newWorld(t, stage.Options{})
		st := onQueue(w, "cluster/east")
		st.Section = section
		withStages(w, st)
		w.env.OnActivity("probe", mock.Anything).Return(neverStarted()).After(2 * m).Once()
		w.env.OnActivity("probe", mock.Anything).Return(neverStarted()).After(5 * m)
		w.signalAt(3*m, protocol.Abort, ann(""))
		r := w.run()
		assert.Equal(t, protocol.OutcomeAborted, r.Outcome)
		assert.LessOrEqual(t, r.Ended.Sub(start), 7*m+time.Second, "section: %v", section)
	}
}

func TestAbortOutsideASectionCancelsTheActivity(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, onQueue(w, "cluster/east"))
	w.env.OnActivity("probe", mock.Anything).Return(nil).After(h)
	w.signalAt(3*m, protocol.Abort, ann(""))
	r := w.run()
	assert.Equal(t, protocol.OutcomeAborted, r.Outcome)
	assert.Equal(t, start.Add(3*m), r.Ended.UTC())
}
