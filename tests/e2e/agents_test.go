package e2e

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.temporal.io/api/history/v1"
	"go.temporal.io/sdk/converter"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/workflows/protocol"
)

// TestUpgradeWithRealAgents upgrades nodes that run refit-gpuagent itself, on
// fake driver libraries: an agent that is away for two minutes parks the run
// before its host is touched, a host that is rebooted after its baseline is
// proven in the boot that its Node is of, a GPU that the driver loses then parks
// the run with the agent's words, and every host is proven by the agent's own
// table of checks.
func TestUpgradeWithRealAgents(t *testing.T) {
	t.Parallel()
	w := up(t, "--agents", "real", "--gpus", "2")
	out, code := w.run("refit-sandbox", "status", "--name", w.name)
	require.Zero(t, code, out)
	require.Contains(t, out, "4 real")
	o := observe(t, w)
	node := w.nodesOf("shared")[0]
	w.fault("agents-stop", node)
	run := w.start(quickPlan...)
	t.Run("nobody polls the queue of a host", func(t *testing.T) { w.nobodyPolls(t, run, node, o) })
	w.fault("hypervisor-never-ready", node) // until the GPU is broken
	w.fault("agents-start", node)
	w.answer(protocol.Retry, run)
	w.midHost(run, node)
	h := w.gpuHost(node)
	h.reboots(t, secondBoot)
	w.letReady(node)
	s := w.untilParked(run)
	assert.Contains(t, findings(s), "boot of node "+node, "the agent of a boot that the Node is not of does not prove it")
	assert.Contains(t, findings(s), secondBoot)
	h.kubeletReports(t, secondBoot)
	w.fault("gpu-fails", node)
	w.answer(protocol.Retry, run)
	s = w.untilParked(run)
	assert.Equal(t, "rollout.hypervisor.shared.canary", s.WaitingFor.Stage)
	assert.Contains(t, findings(s), node)
	assert.Contains(t, findings(s), "verdict "+string(gpu.Unfit))
	assert.Contains(t, findings(s), "expected the GPUs of the baseline, found missing: GPU-", "the agent's words")

	w.fault("gpu-repaired", node)
	w.answer("retry", run)
	r := w.approveAll(run)
	assert.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.Equal(t, 4, o.deletions(), "every host once, for all the retries")
	assert.Empty(t, o.violations(turns(r)))
	for _, stage := range r.Stages {
		// The first pool's canary was proven by its retry.
		if strings.HasPrefix(stage.Name, "rollout.hypervisor.training.") && stage.Name != "rollout.hypervisor.training.plan" {
			assert.Contains(t, stage.Note, "proven by the agents", stage.Name)
		}
	}
	proven, booted := map[string]bool{}, map[string]string{}
	for _, v := range w.validations(run) {
		assert.Equal(t, fakes.DefaultDriver, v.Driver, "the driver that the agent read")
		if v.Verdict == gpu.Pass {
			proven[v.Node], booted[v.Node] = true, v.BootID
			assert.Len(t, v.Devices, 2, v.Node)
			assert.Greater(t, v.Passed, 50, "%s: the whole table was checked", v.Node)
		}
	}
	assert.Len(t, proven, 4, "every host has verdict pass")
	assert.Equal(t, secondBoot, booted[node], "this one was rebooted between its baseline and its proof")
	w.replay(run)
}

// nobodyPolls waits until the run parks because the canary's agent is away, and
// requires that it had its time, is named and left its host alone.
func (w *world) nobodyPolls(t *testing.T, run, canary string, o *observer) {
	var began time.Time
	w.until(run, "the canary's section", 3*time.Minute, func(s protocol.Status) bool {
		began = time.Now()
		return s.Section != ""
	})
	s := w.untilParked(run)
	took := time.Since(began)
	assert.Less(t, took, 150*time.Second)
	assert.Greater(t, took, 110*time.Second, "an agent that restarts has 2 minutes")
	assert.Contains(t, findings(s), "gpu/sandbox/"+canary, "the queue is named")
	assert.Contains(t, findings(s), "start refit-gpuagent on the host", "and what helps")
	assert.Zero(t, o.deletions(), "without a baseline the pod is not touched")
}

// letReady ends fault hypervisor-never-ready for the pod that is there: clear
// would repair the host as well.
func (w *world) letReady(node string) {
	w.t.Helper()
	ctx, pods := context.Background(), w.kube.CoreV1().Pods("tensor-fusion-sys")
	list, err := pods.List(ctx, metav1.ListOptions{LabelSelector: "tensor-fusion.ai/component=hypervisor", FieldSelector: "spec.nodeName=" + node})
	require.NoError(w.t, err)
	require.Len(w.t, list.Items, 1)
	_, err = pods.Patch(ctx, list.Items[0].Name, types.MergePatchType, []byte(`{"metadata":{"annotations":{"refit.sandbox/hold":null}}}`), metav1.PatchOptions{})
	require.NoError(w.t, err)
}

// validations are the answers of the agents that the run's histories hold.
func (w *world) validations(run string) []gpu.Result {
	w.t.Helper()
	var all []gpu.Result
	for _, h := range w.histories(run) {
		names := map[int64]string{}
		for _, e := range h.Events {
			if a := e.GetActivityTaskScheduledEventAttributes(); a != nil {
				names[e.GetEventId()] = a.GetActivityType().GetName()
			}
			all = append(all, w.validation(e, names)...)
		}
	}
	require.NotEmpty(w.t, all)
	return all
}

func (w *world) validation(e *history.HistoryEvent, names map[int64]string) []gpu.Result {
	w.t.Helper()
	a := e.GetActivityTaskCompletedEventAttributes()
	if a == nil || names[a.GetScheduledEventId()] != gpu.ValidateActivity {
		return nil
	}
	var r gpu.Result
	require.NoError(w.t, converter.GetDefaultDataConverter().FromPayloads(a.GetResult(), &r))
	return []gpu.Result{r}
}
