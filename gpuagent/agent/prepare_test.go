package agent

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/testsuite"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/setup"
)

const twoHalves = "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}]}\n"

func (w *world) prepare(m gpu.MIGRequest) (gpu.PrepareResult, error) {
	return w.agent.Prepare(context.Background(), gpu.PrepareRequest{Node: node, MIG: &m})
}

func TestAHostIsPreparedThenProvenAgainstTheBaselineOfBefore(t *testing.T) {
	w := newWorld(t)
	before := w.baseline()
	r, err := w.prepare(gpu.MIGRequest{Config: twoHalves})
	require.NoError(t, err)
	require.True(t, r.ChangedMIG())
	require.Len(t, r.Devices, 4)
	require.NotEmpty(t, r.BootID)

	again, err := w.prepare(gpu.MIGRequest{Config: twoHalves})
	require.NoError(t, err)
	require.False(t, again.ChangedMIG())
	require.Equal(t, r.Devices, again.Devices)

	without := before.WithoutMIG()
	require.Empty(t, failing(w.quick(&without)))
	require.NotEmpty(t, failing(w.quick(before)), "the whole baseline sees the change")
}

func TestWhatMIGChangesIsNamedAsTheRowsOfTheBaselineAre(t *testing.T) {
	readings := newWorld(t).baseline().Devices[0].Readings
	for _, name := range gpu.MIGReadings {
		require.Contains(t, readings, name)
	}
}

func TestAPlanIsToldAndNothingIsChanged(t *testing.T) {
	w := newWorld(t)
	out, err := w.agent.Prepare(context.Background(), gpu.PrepareRequest{Node: node, PlanOnly: true, MIG: &gpu.MIGRequest{Config: twoHalves}})
	require.NoError(t, err)
	require.Len(t, out.Actions, 2)
	mode, err := w.gpus.Get("gpu.0.mig.current")
	require.NoError(t, err)
	require.Empty(t, mode)
}

// resetter is a host whose GPU is reset by a function.
type resetter struct {
	Setters
	reset func() error
}

func (r resetter) Reset(context.Context, ...string) error { return r.reset() }

// Types that need MIG can't be judged before MIG is there.
func TestAPlanOfMIGAndVirtualGPUsTellsWhatItCanNotKnowYet(t *testing.T) {
	w := newWorld(t)
	out, err := w.agent.Prepare(context.Background(), gpu.PrepareRequest{
		Node: node, PlanOnly: true, MIG: &gpu.MIGRequest{Config: twoHalves},
		VGPU: &gpu.VGPURequest{Config: "version: v1\nvgpu-configs: {a: [{devices: all, vgpu-devices: {\"H100-3-40C\": 2}}]}\n"},
	})
	require.NoError(t, err)
	require.NotEmpty(t, out.Actions)
	require.Contains(t, out.Notes, "virtual GPUs are planned once MIG is as declared: the types are checked then")
}

// An agent that is killed after its last step has changed MIG all the same: the
// next attempt finds nothing to do, and the baseline of before still does not fit.
func TestAnAttemptAfterOneThatWasCutOffDoesNotTakeMIGForUnchanged(t *testing.T) {
	w := newWorld(t)
	before := w.baseline()
	attempts := 0
	var suite testsuite.WorkflowTestSuite
	env := suite.NewTestWorkflowEnvironment()
	env.RegisterActivityWithOptions(func(ctx context.Context, req gpu.PrepareRequest) (gpu.PrepareResult, error) {
		out, err := w.agent.Prepare(ctx, req)
		if attempts++; attempts == 1 {
			require.NoError(t, err)
			require.False(t, out.Resumed)
			return gpu.PrepareResult{}, errors.New("the reply was lost")
		}
		return out, err
	}, activity.RegisterOptions{Name: gpu.PrepareActivity})
	env.ExecuteWorkflow(func(ctx workflow.Context) (gpu.PrepareResult, error) {
		var out gpu.PrepareResult
		ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{StartToCloseTimeout: time.Minute})
		err := workflow.ExecuteActivity(ctx, gpu.PrepareActivity, gpu.PrepareRequest{Node: node, MIG: &gpu.MIGRequest{Config: twoHalves}}).Get(ctx, &out)
		return out, err
	})
	var out gpu.PrepareResult
	require.NoError(t, env.GetWorkflowResult(&out))
	require.Equal(t, 2, attempts)
	require.Empty(t, out.Actions)
	require.True(t, out.ChangedMIG())
	without := before.WithoutMIG()
	require.Empty(t, failing(w.quick(&without)))
}

func TestAResetIsDoneOnlyWhereThePlanAllowsIt(t *testing.T) {
	w := newWorld(t)
	w.set("gpus", "1", "gpu.0.mig.needs.reset", "1")
	resets := 0
	w.agent.Preparer.Setters = resetter{w.agent.Preparer.Setters, func() error {
		resets++
		return w.gpus.ResetGPU(0)
	}}
	r, err := w.prepare(gpu.MIGRequest{Config: twoHalves})
	require.NoError(t, err)
	require.Equal(t, gpu.NeedsReset, r.Needs[0].Kind)
	require.Zero(t, resets)
	r, err = w.prepare(gpu.MIGRequest{Config: twoHalves, AllowReset: true})
	require.NoError(t, err)
	require.Empty(t, r.Needs)
	require.Equal(t, 1, resets)
	require.Len(t, r.Devices, 2)
}

func TestBadRequestsAreClassedForTheWorkflow(t *testing.T) {
	good := &gpu.MIGRequest{Config: twoHalves}
	for name, c := range map[string]struct {
		req   gpu.PrepareRequest
		set   []string
		class finding.Class
		says  string
	}{
		"another node":   {gpu.PrepareRequest{Node: "gpu-02", MIG: good}, nil, finding.Stop, "gpu-02"},
		"unknown key":    {gpu.PrepareRequest{Node: node, MIG: &gpu.MIGRequest{Config: "version: v1\nmig: {}\n"}}, nil, finding.Stop, "mig"},
		"vGPU file":      {gpu.PrepareRequest{Node: node, MIG: good, VGPU: &gpu.VGPURequest{Config: twoHalves}}, nil, finding.Stop, "mig-configs"},
		"scheduler":      {gpu.PrepareRequest{Node: node, VGPU: &gpu.VGPURequest{Config: "version: v1\nvgpu-configs: {a: [{devices: all, vgpu-devices: {}}]}\n", Scheduler: "x"}}, nil, finding.Stop, `"x"`},
		"impossible":     {gpu.PrepareRequest{Node: node, MIG: &gpu.MIGRequest{Config: "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 3}}]}\n"}}, nil, finding.Stop, "3 x 3g.40gb"},
		"busy":           {gpu.PrepareRequest{Node: node, MIG: good}, []string{"gpu.1.processes.compute", "4711:100"}, finding.Wait, "1 client"},
		"no driver":      {gpu.PrepareRequest{Node: node, MIG: good}, []string{"module.driver", "none"}, finding.Stop, "kernel module"},
		"driver inside":  {gpu.PrepareRequest{Node: node, MIG: good}, []string{"fail.nvmlDeviceSetMigMode", "999"}, finding.Retry, "UNKNOWN"},
		"lost meanwhile": {gpu.PrepareRequest{Node: node, MIG: good}, []string{"fail.nvmlDeviceSetMigMode", "15"}, finding.Stop, "left the bus"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if len(c.set) > 0 {
				w.set(c.set...)
			}
			out, err := w.agent.Prepare(context.Background(), c.req)
			f, class, ok := finding.Of(err)
			require.True(t, ok, "%v", err)
			require.Equal(t, c.class, class)
			require.Contains(t, f.String(), c.says)
			require.Empty(t, out.Actions)
		})
	}
}

// Once there are instances the driver hides row remapping, from us and from
// every validation after.
func TestBadRowsKeepAGPUFromBeingDivided(t *testing.T) {
	for _, key := range []string{"gpu.1.remap.failed", "gpu.1.remap.pending"} {
		w := newWorld(t)
		w.set(key, "1")
		for _, req := range []gpu.PrepareRequest{
			{Node: node, MIG: &gpu.MIGRequest{Config: twoHalves}},
			{Node: node, MIG: &gpu.MIGRequest{Config: twoHalves, ModeOnly: true}},
			{Node: node, MIG: &gpu.MIGRequest{Config: twoHalves}, PlanOnly: true},
		} {
			out, err := w.agent.Prepare(context.Background(), req)
			f, class, ok := finding.Of(err)
			require.True(t, ok, "%v", err)
			require.Equal(t, finding.Stop, class)
			require.Contains(t, f.String(), "row")
			require.Contains(t, f.String(), w.gpus.UUID(1))
			require.Equal(t, req.PlanOnly, len(out.Actions) > 0, "a plan is still told")
		}
		mode, err := w.gpus.Get("gpu.0.mig.current")
		require.NoError(t, err)
		require.Empty(t, mode, "the other GPU is not touched either")
		w.set(key, "")
		_, err = w.prepare(gpu.MIGRequest{Config: twoHalves})
		require.NoError(t, err)
	}
}

func TestTwoPreparationsAtOnceEndInOneLayout(t *testing.T) {
	w := newWorld(t)
	var group sync.WaitGroup
	results, errs := make([]gpu.PrepareResult, 2), make([]error, 2)
	for i := range results {
		group.Go(func() { results[i], errs[i] = w.prepare(gpu.MIGRequest{Config: twoHalves}) })
	}
	group.Wait()
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, results[0].Devices, results[1].Devices)
	require.NotEqual(t, len(results[0].Actions) == 0, len(results[1].Actions) == 0, "one did it, the other found it done")

	unlock, err := setup.Lock(t.Context(), w.tree.Root)
	require.NoError(t, err)
	defer unlock()
	_, err = w.prepare(gpu.MIGRequest{Config: twoHalves})
	_, class, ok := finding.Of(err)
	require.True(t, ok)
	require.Equal(t, finding.Wait, class, "a person's command at the host is at work")
}
