package agent

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/setup"
)

func TestTwoRequestsAtOnceAreServedOneAfterTheOther(t *testing.T) {
	w := newWorld(t)
	release, err := w.agent.turn.take(context.Background(), "set-up")
	require.NoError(t, err)
	var waiting sync.WaitGroup
	var mu sync.Mutex
	var steps []int // of which request each step was
	verdicts, errs := make([]gpu.Verdict, 2), make([]error, 2)
	for i := range verdicts {
		waiting.Go(func() {
			req := gpu.ValidateRequest{Node: node, Level: gpu.Standard, Expect: &gpu.Expect{SharedMemoryMiB: 4}}
			_, r, err := w.agent.Examine(context.Background(), req, func(string) {
				mu.Lock()
				defer mu.Unlock()
				steps = append(steps, i)
			})
			verdicts[i], errs[i] = r.Verdict, err
		})
	}
	release()
	waiting.Wait()
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, []gpu.Verdict{gpu.Pass, gpu.Pass}, verdicts)
	require.Len(t, slices.Compact(steps), 2, "the steps of the two do not mix")

	release, err = w.agent.turn.take(context.Background(), "set-up")
	require.NoError(t, err)
	defer release()
	gone := errors.New("the caller went away")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(gone)
	_, err = w.agent.Validate(ctx, gpu.ValidateRequest{Node: node})
	require.ErrorIs(t, err, gone, "a request that waits can be given up")
}

// The time that Temporal gives a request runs while it waits, so that a long wait
// would leave none to serve it.
func TestARequestThatWaitsTooLongForItsTurnIsSentBackToComeAgain(t *testing.T) {
	w := newWorld(t)
	w.agent.turn.patience = time.Millisecond
	release, err := w.agent.turn.take(context.Background(), "validation at level stress")
	require.NoError(t, err)
	_, validate := w.agent.Validate(context.Background(), gpu.ValidateRequest{Node: node})
	_, baseline := w.agent.Baseline(context.Background(), gpu.BaselineRequest{Node: node})
	_, prepare := w.agent.Prepare(context.Background(), gpu.PrepareRequest{Node: node})
	for _, err := range []error{validate, baseline, prepare} {
		f, class, ok := finding.Of(err)
		require.True(t, ok, "%v", err)
		require.Equal(t, finding.Wait, class)
		require.Contains(t, f.Found, "a validation at level stress is at work since")
		var app *temporal.ApplicationError
		require.ErrorAs(t, err, &app)
		require.False(t, app.NonRetryable())
		require.Equal(t, turnAgain, app.NextRetryDelay())
	}
	release()
	require.Equal(t, gpu.Pass, w.quick(nil).Verdict)
}

func TestAValidationWaitsForAPersonsCommandAtTheHost(t *testing.T) {
	w := newWorld(t)
	unlock, err := setup.Lock(t.Context(), w.tree.Root)
	require.NoError(t, err)
	_, err = w.agent.Validate(context.Background(), gpu.ValidateRequest{Node: node})
	f, class, ok := finding.Of(err)
	require.True(t, ok, "%v", err)
	require.Equal(t, finding.Wait, class)
	require.Equal(t, "one is at work", f.Found)
	unlock()
	require.Equal(t, gpu.Pass, w.quick(nil).Verdict)
}

func TestARequestForABootThatThisHostIsNotInIsSentBack(t *testing.T) {
	w := newWorld(t)
	const other = "00000000-0000-4000-8000-0000000000ff"
	here := w.agent.Host.BootID()
	_, validate := w.agent.Validate(context.Background(), gpu.ValidateRequest{Node: node, NodeBootID: other})
	_, baseline := w.agent.Baseline(context.Background(), gpu.BaselineRequest{Node: node, NodeBootID: other})
	_, prepare := w.agent.Prepare(context.Background(), gpu.PrepareRequest{Node: node, NodeBootID: other})
	for _, err := range []error{validate, baseline, prepare} {
		f, class, ok := finding.Of(err)
		require.True(t, ok, "%v", err)
		require.Equal(t, finding.Wait, class)
		require.Equal(t, other+", as the Node object says", f.Expected)
		require.Contains(t, f.Found, here)
		require.Contains(t, f.Next, "NODE_NAME")
	}
	require.Equal(t, gpu.Pass, w.validate(gpu.ValidateRequest{NodeBootID: here}).Verdict)
}

// What was refused before its first step leaves the host as it was, which a
// caller that has cordoned it wants to know.
func TestASetUpSaysWhetherItWasRefusedBeforeItsFirstStep(t *testing.T) {
	layout := &gpu.MIGRequest{Config: twoHalves}
	for name, c := range map[string]struct {
		set       []string
		boot      string
		untouched bool
	}{
		"GPU in use":           {set: []string{"gpu.1.processes.compute", "4711:100"}, untouched: true},
		"another boot":         {boot: "00000000-0000-4000-8000-0000000000ff", untouched: true},
		"driver in the middle": {set: []string{"fail.nvmlDeviceSetMigMode", "999"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.set(c.set...)
			_, err := w.agent.Prepare(context.Background(), gpu.PrepareRequest{Node: node, NodeBootID: c.boot, MIG: layout})
			require.Error(t, err)
			require.Equal(t, c.untouched, gpu.Untouched(err))
		})
	}
	t.Run("another request at work", func(t *testing.T) {
		w := newWorld(t)
		w.agent.turn.patience = time.Millisecond
		release, err := w.agent.turn.take(context.Background(), "validation")
		require.NoError(t, err)
		defer release()
		_, err = w.agent.Prepare(context.Background(), gpu.PrepareRequest{Node: node, MIG: layout})
		require.True(t, gpu.Untouched(err))
	})
	t.Run("a second attempt, which does not know what the first has done", func(t *testing.T) {
		w := newWorld(t)
		attempts := 0
		var suite testsuite.WorkflowTestSuite
		env := suite.NewTestWorkflowEnvironment()
		env.RegisterActivityWithOptions(func(ctx context.Context, req gpu.PrepareRequest) (gpu.PrepareResult, error) {
			if attempts++; attempts == 1 {
				return gpu.PrepareResult{}, errors.New("this agent was killed")
			}
			return w.agent.Prepare(ctx, req)
		}, activity.RegisterOptions{Name: gpu.PrepareActivity})
		env.ExecuteWorkflow(func(ctx workflow.Context) error {
			ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{StartToCloseTimeout: time.Minute})
			return workflow.ExecuteActivity(ctx, gpu.PrepareActivity, gpu.PrepareRequest{Node: "gpu-02", MIG: layout}).Get(ctx, nil)
		})
		err := env.GetWorkflowError()
		require.Equal(t, 2, attempts)
		require.ErrorContains(t, err, "gpu-02")
		require.False(t, gpu.Untouched(err))
	})
}
