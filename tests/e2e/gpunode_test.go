package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/gpuagent/host/hosttest"
	"github.com/refit-run/refit/workflows/protocol"
)

// TestGPUNode prepares and proves hosts through the binaries: the real agent of
// each node on fake driver libraries, with the tool nvidia-smi of a test.
func TestGPUNode(t *testing.T) {
	t.Parallel()
	w := up(t, "--agents", "real", "--gpus", "2", "--pools", "shared=4")
	w.tool("nvidia-smi", nvidiaSMI)
	nodes := w.nodesOf("shared")
	require.Len(t, nodes, 4)
	t.Run("the plan tells, the run parks until a person has reset the GPUs", func(t *testing.T) { w.resetByHand(t, w.gpuHost(nodes[0])) })
	t.Run("a bad verdict parks, says why and keeps the node cordoned", func(t *testing.T) { w.badVerdict(t, w.gpuHost(nodes[0])) })
	t.Run("instances of TensorFusion's tenants are spared, whatever the plan says", func(t *testing.T) { w.tenantsSpared(t, w.gpuHost(nodes[0])) })
	t.Run("a reset that does not help needs a reboot", func(t *testing.T) { w.rebootNeeded(t, w.gpuHost(nodes[1])) })
	t.Run("an agent of another machine is not taken for the host's", func(t *testing.T) { w.wrongName(t, w.gpuHost(nodes[1]), w.gpuHost(nodes[2])) })
	t.Run("a baseline of another host is refused, one of another boot is compared", func(t *testing.T) {
		w.otherBaselines(t, w.gpuHost(nodes[0]), w.gpuHost(nodes[1]))
	})
	t.Run("an agent killed in the middle of a set-up is finished by the next", func(t *testing.T) { w.agentKilled(t, w.gpuHost(nodes[2])) })
	t.Run("two requests at once are served one after the other", func(t *testing.T) { w.twoRequests(t, w.gpuHost(nodes[3])) })
	t.Run("after Terminate the next run takes over and gives all back", func(t *testing.T) { w.terminatedSetUp(t, w.gpuHost(nodes[3])) })
}

// nvidiaSMI resets the fake GPUs of the agent that calls it, unless the file
// refuse stands beside their state. It is told PCI addresses, which a state
// file does not name: it resets them all.
const nvidiaSMI = `#!/bin/sh
cd "$(dirname "$REFIT_FAKE_GPU_STATE")" || exit 1
[ ! -e refuse ] || { echo "In use by another client" >&2; exit 1; }
sed -i -e 's/mig\.pending=/mig.current=/' -e '/mig\.needs\.reset=/d' gpu.state
echo "GPU was successfully reset."
`

func (w *world) resetByHand(t *testing.T, h gpuHost) {
	h.needsReset(t)
	h.label(t, "true")
	before := h.state(t)
	plan := h.plan(t, layout, false)

	out, code := w.refit("plan", "-f", plan, "--exit-code")
	require.Equal(t, exitChanges, code, out)
	assert.Equal(t, 2, strings.Count(out, "switch MIG mode on"), out)
	assert.Equal(t, before, h.state(t), "a plan changes nothing on the host")
	n := h.object(t)
	assert.False(t, n.Spec.Unschedulable)
	assert.Equal(t, "true", n.Labels[managedLabel])

	run := w.startFile(plan)
	s := w.untilParked(run)
	assert.Equal(t, "prepare", s.WaitingFor.Stage)
	assert.Contains(t, s.WaitingFor.Found, "pending until the GPU is reset")
	assert.Contains(t, s.WaitingFor.Helps, "reset the GPU")
	assert.NotContains(t, s.WaitingFor.Answers, protocol.Skip)
	n = h.object(t)
	assert.True(t, n.Spec.Unschedulable, "no pod comes while the host is half set up")
	assert.Equal(t, "false", n.Labels[managedLabel], "foreign automation is kept off while the run is parked")

	for i := range 2 {
		require.NoError(t, h.gpus.ResetGPU(i))
	}
	w.answer(protocol.Retry, run)
	r := w.ended(t, run)
	require.Equal(t, protocol.OutcomeDone, r.Outcome, "%+v", r.Receipt)
	h.isSetUp(t)
	assert.Equal(t, gpu.Pass, r.Validation.Verdict)
	require.NotNil(t, r.Prepared)
	assert.Contains(t, fmt.Sprint(r.Prepared.Actions), "create GPU instance 3g.40gb")
	assert.Empty(t, r.LeftBehind)
	h.givenBack(t, "true")
	w.replay(run)

	after := h.state(t)
	again := w.ended(t, w.startFile(plan))
	require.Equal(t, protocol.OutcomeDone, again.Outcome, "%+v", again.Receipt)
	assert.Empty(t, again.Prepared.Actions, "nothing is touched when already right")
	assert.Equal(t, after, h.state(t))
	out, code = w.refit("plan", "-f", plan, "--exit-code")
	assert.Zero(t, code, out)
}

func (w *world) badVerdict(t *testing.T, h gpuHost) {
	require.NoError(t, h.gpus.Set("gpu.1.cuda.bad.result", "1"))
	plan := h.plan(t, layout, false)
	run := w.startFile(plan)
	s := w.untilParked(run)
	assert.Equal(t, "validate", s.WaitingFor.Stage)
	assert.Contains(t, s.WaitingFor.Found, "verdict "+string(gpu.Unfit))
	assert.Contains(t, findings(s), "CUDA call")
	assert.Contains(t, findings(s), "wrong result")
	assert.NotContains(t, s.WaitingFor.Answers, protocol.Skip, "there is no way around the proof")
	out, code := w.refit("status", run)
	require.Zero(t, code, out)
	assert.Contains(t, out, "verdict "+string(gpu.Unfit), "a person reads why")

	w.answer(protocol.Abort, run)
	r := w.ended(t, run)
	assert.Equal(t, protocol.OutcomeAborted, r.Outcome)
	assert.Contains(t, strings.Join(r.LeftBehind, "\n"), "Node "+h.node+" stays cordoned, because the host is not proven")
	n := h.object(t)
	assert.True(t, n.Spec.Unschedulable)
	assert.Equal(t, "true", n.Labels[managedLabel], "foreign automation has its node back")
	w.replay(run)

	require.NoError(t, h.gpus.Set("gpu.1.cuda.bad.result", ""))
	r = w.ended(t, w.startFile(plan))
	require.Equal(t, protocol.OutcomeDone, r.Outcome, "%+v", r.Receipt)
	h.givenBack(t, "true")
}

func (w *world) tenantsSpared(t *testing.T, h gpuHost) {
	before := h.state(t)
	require.Regexp(t, gpuInstance, before, "the host has instances")
	_, err := w.dynamic.Resource(schema.GroupVersionResource{Group: "tensor-fusion.ai", Version: "v1", Resource: "gpunodes"}).Patch(
		context.Background(), h.node, types.MergePatchType, []byte(`{"metadata":{"labels":{"tensor-fusion.ai/isolationMode":"partitioned"}}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	r := w.ended(t, w.startFile(h.plan(t, map[string]int{"7g.80gb": 1}, false)))
	require.Equal(t, protocol.OutcomeDone, r.Outcome, "%+v", r.Receipt)
	assert.Contains(t, strings.Join(r.Warnings, "\n"), "the MIG mode alone is set")
	assert.Empty(t, r.Prepared.Actions)
	assert.Equal(t, before, h.state(t))
}

func (w *world) rebootNeeded(t *testing.T, h gpuHost) {
	h.needsReset(t)
	refuse := filepath.Join(h.gpus.Lib(), "refuse")
	require.NoError(t, os.WriteFile(refuse, nil, 0o600))
	run := w.startFile(h.plan(t, layout, true))
	s := w.untilParked(run)
	assert.Equal(t, "prepare", s.WaitingFor.Stage)
	assert.Contains(t, s.WaitingFor.Helps, "reboot the host")
	assert.Contains(t, findings(s), "no "+gpu.NeedsReboot+" needed")

	require.NoError(t, os.Remove(refuse))
	require.NoError(t, h.gpus.Reboot())
	h.reboots(t, secondBoot)
	w.answer(protocol.Retry, run)
	w.waitsFor(run, "prepare", secondBoot)
	assert.NotRegexp(t, gpuInstance, h.state(t), "an agent of a boot that the Node is not of sets nothing up")
	h.kubeletReports(t, secondBoot)
	r := w.ended(t, run)
	require.Equal(t, protocol.OutcomeDone, r.Outcome, "%+v", r.Receipt)
	h.isSetUp(t)
	h.givenBack(t, "")
	w.replay(run)
}

func (w *world) agentKilled(t *testing.T, h gpuHost) {
	h.needsReset(t)
	run := h.midSetUp(t, h.plan(t, layout, true), "hang", "1")
	killed := w.component("gpuagent-" + h.node)
	require.NotZero(t, killed.PID)
	p, err := os.FindProcess(killed.PID)
	require.NoError(t, err)
	require.NoError(t, p.Kill())
	h.goOn(t)
	r := w.ended(t, run)
	require.Equal(t, protocol.OutcomeDone, r.Outcome, "%+v", r.Receipt)
	assert.Greater(t, w.component("gpuagent-"+h.node).Restarts, killed.Restarts, "the agent that ended the set-up is another one")
	assert.Equal(t, gpu.Pass, r.Validation.Verdict)
	assert.Contains(t, fmt.Sprint(r.Prepared.Actions), "create the missing compute instance", "the half made instance was repaired, not made anew")
	h.isSetUp(t)
	h.givenBack(t, "")
	w.replay(run)
}

func (w *world) terminatedSetUp(t *testing.T, h gpuHost) {
	h.label(t, "true")
	plan := h.plan(t, layout, true)
	run := h.midSetUp(t, plan, "hang", "1")
	require.NoError(t, w.temporal.TerminateWorkflow(context.Background(), run, "", "terminated by a test"))
	n := h.object(t)
	assert.True(t, n.Spec.Unschedulable)
	assert.Equal(t, "false", n.Labels[managedLabel], "nobody could give it back")
	l, err := w.kube.CoordinationV1().Leases("kube-system").Get(context.Background(), "refit-gpunode-"+h.node, metav1.GetOptions{})
	require.NoError(t, err)
	require.NotNil(t, l.Spec.HolderIdentity)
	require.Contains(t, *l.Spec.HolderIdentity, run)
	h.goOn(t)

	t.Run("a rollout gives the label back at least", func(t *testing.T) { w.forgotten(t, h) })
	next := w.startFile(plan)
	r := w.ended(t, next)
	require.Equal(t, protocol.OutcomeDone, r.Outcome, "%+v", r.Receipt)
	h.isSetUp(t)
	h.givenBack(t, "true")
	w.replay(next)
}

// managedLabel is what NVSentinel reads.
const managedLabel = "k8saas.nvidia.com/ManagedByNVSentinel"

// layout is what every GPU of a host is to become.
var layout = map[string]int{"3g.40gb": 1, "1g.10gb": 2}

// driverIDs are the driver's own numbers of these profiles on the fake H100.
var driverIDs = map[string]string{"3g.40gb": "9", "1g.10gb": "19"}

// gpuHost is a node with its fake driver and file tree.
type gpuHost struct {
	w    *world
	node string
	gpus fakes.Host
	tree hosttest.Tree
}

func (w *world) gpuHost(node string) gpuHost {
	dir := filepath.Join(w.home, w.name, "agents", node)
	return gpuHost{w: w, node: node, gpus: fakes.Host{Dir: dir}, tree: hosttest.Tree{Root: filepath.Join(dir, "host")}}
}

func (h gpuHost) needsReset(t *testing.T) {
	t.Helper()
	require.NoError(t, h.gpus.Set("gpu.0.mig.needs.reset", "1", "gpu.1.mig.needs.reset", "1"))
}

// state is what the driver keeps of the host, in a fixed order.
func (h gpuHost) state(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(h.gpus.StateFile())
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// plan writes the plan file of a GPUNode with this layout on every GPU.
func (h gpuHost) plan(t *testing.T, devices map[string]int, allowReset bool) string {
	t.Helper()
	var list []string
	for _, profile := range slices.Sorted(maps.Keys(devices)) {
		list = append(list, fmt.Sprintf("%s: %d", profile, devices[profile]))
	}
	path := filepath.Join(h.w.home, h.node+".yaml")
	require.NoError(t, os.WriteFile(path, fmt.Appendf(nil, `kind: GPUNode
target: {cluster: sandbox}
node: %s
cordon: true
prepare:
  mig:
    allowReset: %t
    config: |
      version: v1
      mig-configs: {a: [{devices: all, mig-enabled: true, mig-devices: {%s}}]}
`, h.node, allowReset, strings.Join(list, ", ")), 0o600))
	return path
}

func (h gpuHost) object(t *testing.T) *corev1.Node {
	t.Helper()
	n, err := h.w.kube.CoreV1().Nodes().Get(context.Background(), h.node, metav1.GetOptions{})
	require.NoError(t, err)
	return n
}

// label gives the node to foreign automation, or takes it away.
func (h gpuHost) label(t *testing.T, value string) {
	t.Helper()
	_, err := h.w.kube.CoreV1().Nodes().Patch(context.Background(), h.node, types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, managedLabel, value), metav1.PatchOptions{})
	require.NoError(t, err)
}

// givenBack requires the node as it was before all runs: with this label, or
// without it, taking pods, without a trace of ours and without a Lease.
func (h gpuHost) givenBack(t *testing.T, label string) {
	t.Helper()
	n := h.object(t)
	assert.False(t, n.Spec.Unschedulable, "the proven node takes pods")
	is, set := n.Labels[managedLabel]
	assert.Equal(t, label, is, "foreign automation has its node back")
	assert.Equal(t, label != "", set)
	for key := range n.Annotations {
		assert.False(t, strings.HasPrefix(key, "refit.run/"), key)
	}
	leases, err := h.w.kube.CoordinationV1().Leases("kube-system").List(context.Background(), metav1.ListOptions{})
	require.NoError(t, err)
	for _, l := range leases.Items {
		assert.NotEqual(t, "refit-gpunode-"+h.node, l.Name, "the Lease is given back")
	}
}

// gpuInstance is one in the driver's state: GPU, instance, profile.
var gpuInstance = regexp.MustCompile(`(?m)^gpu\.(\d+)\.gi\.(\d+)=(\d+):`)

// isSetUp requires the layout on both GPUs as the driver has it, each instance
// with its one compute instance.
func (h gpuHost) isSetUp(t *testing.T) {
	t.Helper()
	state, have := h.state(t), map[string][]string{}
	for _, gi := range gpuInstance.FindAllStringSubmatch(state, -1) {
		have[gi[1]] = append(have[gi[1]], gi[3])
		compute := fmt.Sprintf(`(?m)^gpu\.%s\.ci\.%s\.`, gi[1], gi[2])
		assert.Len(t, regexp.MustCompile(compute).FindAllString(state, -1), 1, "compute instances of %s", gi[0])
	}
	var want []string
	for profile, n := range layout {
		want = append(want, slices.Repeat([]string{driverIDs[profile]}, n)...)
	}
	for _, g := range []string{"0", "1"} {
		assert.ElementsMatch(t, want, have[g], "GPU %s", g)
	}
}

// heldCall is the call of the driver in which a set-up is held up: hanging it
// never returns, slow it does after so many milliseconds.
const heldCall = "nvmlGpuInstanceCreateComputeInstance"

// midSetUp starts the plan and returns when the agent stands between a GPU
// instance and its compute instance, held there by a fault; goOn lets later
// calls through.
func (h gpuHost) midSetUp(t *testing.T, plan, fault, value string) (run string) {
	t.Helper()
	require.NoError(t, h.gpus.Set(fault+"."+heldCall, value))
	run = h.w.startFile(plan)
	h.w.poll("a half made MIG instance on "+h.node, 2*time.Minute, func() bool { return gpuInstance.MatchString(h.state(t)) })
	require.Len(t, gpuInstance.FindAllString(h.state(t), -1), 1)
	require.NotContains(t, h.state(t), ".ci.")
	return run
}

func (h gpuHost) goOn(t *testing.T) {
	t.Helper()
	require.NoError(t, h.gpus.Set("hang."+heldCall, "", "slow."+heldCall, ""))
}

// hostResult is the result of a GPUNode.
type hostResult struct {
	protocol.Receipt
	Prepared   *gpu.PrepareResult `json:"prepared"`
	Validation *gpu.Result        `json:"validation"`
}

// ended waits for the end of a GPUNode; one that parks fails the test with its
// words.
func (w *world) ended(t *testing.T, run string) hostResult {
	t.Helper()
	w.poll("the end of "+run, 4*time.Minute, func() bool {
		s, err := w.status(run)
		if err == nil && s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked {
			t.Fatalf("%s parked: %s\n%s", run, s.WaitingFor.Found, findings(s))
		}
		return err == nil && (s.Phase == protocol.PhaseDone || s.Phase == protocol.PhaseAborted)
	})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var raw json.RawMessage
	require.NoError(t, w.temporal.GetWorkflow(ctx, run, "").Get(ctx, &raw))
	var r hostResult
	require.NoError(t, json.Unmarshal(raw, &r))
	return r
}
