package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/converter"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/workflows/protocol"
)

// Boots of hosts that were rebooted by a test.
const (
	secondBoot = "00000000-0000-4000-8000-00000000beef"
	thirdBoot  = "00000000-0000-4000-8000-00000000cafe"
)

// reboots starts another boot of the host; its kubelet tells by kubeletReports.
func (h gpuHost) reboots(t *testing.T, boot string) {
	t.Helper()
	require.NoError(t, h.tree.Reboot(boot))
}

func (h gpuHost) kubeletReports(t *testing.T, boot string) {
	t.Helper()
	_, err := h.w.kube.CoreV1().Nodes().Patch(context.Background(), h.node, types.MergePatchType,
		fmt.Appendf(nil, `{"status":{"nodeInfo":{"bootID":%q}}}`, boot), metav1.PatchOptions{}, "status")
	require.NoError(t, err)
}

// env leads a program to the host, under the name of a node.
func (h gpuHost) env(node string) []string {
	return append(h.gpus.Env(), "REFIT_HOST_ROOT="+h.tree.Root, "NODE_NAME="+node)
}

// atTheHost runs a command of a person there.
func (h gpuHost) atTheHost(args ...string) (string, int) {
	return h.w.run("env", append(append(h.env(h.node), "refit-gpuagent"), args...)...)
}

// proof writes the plan file of a GPUNode that only validates.
func (h gpuHost) proof(t *testing.T, more string) string {
	t.Helper()
	path := filepath.Join(h.w.home, h.node+"-proof.yaml")
	require.NoError(t, os.WriteFile(path, fmt.Appendf(nil, "kind: GPUNode\ntarget: {cluster: sandbox}\nnode: %s\nlevel: quick\n%s", h.node, more), 0o600))
	return path
}

// waitsFor waits until the run says at a stage what it waits for by itself.
func (w *world) waitsFor(run, stage, what string) {
	w.t.Helper()
	w.until(run, what+" at "+stage, 2*time.Minute, func(s protocol.Status) bool {
		for _, row := range s.Stages {
			if row.Name == stage && strings.Contains(row.Note, what) {
				return s.WaitingFor == nil
			}
		}
		return false
	})
}

// wrongName has an agent of another machine take the name of the host.
func (w *world) wrongName(t *testing.T, h, other gpuHost) {
	w.fault("agents-stop", h.node)
	bin := os.Getenv("REFIT_BIN")
	if bin == "" {
		bin = filepath.Join(root, "bin")
	}
	impostor := exec.Command(filepath.Join(bin, "refit-gpuagent"), "run")
	impostor.Env = append(append(os.Environ(), other.env(h.node)...), "REFIT_CLUSTER=sandbox", "TEMPORAL_ADDRESS="+w.vars["TEMPORAL_ADDRESS"])
	require.NoError(t, impostor.Start())
	end := func() { _ = impostor.Process.Kill(); _ = impostor.Wait() }
	defer end()
	run := w.startFile(h.proof(t, ""))
	w.waitsFor(run, "baseline", "boot of node "+h.node)
	end()
	w.fault("agents-start", h.node)
	r := w.ended(t, run)
	require.Equal(t, protocol.OutcomeDone, r.Outcome, "%+v", r.Receipt)
	uuid, err := h.gpus.Get("gpu.0.uuid")
	require.NoError(t, err)
	assert.Equal(t, uuid, r.Validation.Devices[0].UUID, "the host's own agent has proven it")
	w.replay(run)
}

// otherBaselines gives a run what was recorded elsewhere, and before a reboot.
func (w *world) otherBaselines(t *testing.T, h, other gpuHost) {
	out, code := h.atTheHost("baseline")
	require.Zero(t, code, out)
	var b gpu.Baseline
	require.NoError(t, json.Unmarshal([]byte(out), &b), out)
	require.Equal(t, h.node, b.Node)
	line, err := json.Marshal(b)
	require.NoError(t, err)
	given := "baseline: " + string(line) + "\n"
	said, code := w.refit("start", "-f", other.proof(t, given))
	assert.Equal(t, exitBadInput, code, said)
	assert.Contains(t, said, "baseline.node")

	require.NoError(t, h.tree.Log("[   99.000000] NVRM: Xid (PCI:0000:10:00): 79, pid=1, GPU has fallen off the bus."))
	h.reboots(t, thirdBoot)
	h.kubeletReports(t, thirdBoot)
	r := w.ended(t, w.startFile(h.proof(t, given)))
	require.Equal(t, protocol.OutcomeDone, r.Outcome, "%+v", r.Receipt)
	assert.Equal(t, gpu.Pass, r.Validation.Verdict, "the log of the boot before does not count: %+v", r.Validation.Checks)
	assert.Equal(t, thirdBoot, r.Validation.BootID)
	assert.Contains(t, fmt.Sprint(r.Validation.Checks), "the host was rebooted since the baseline", "and that is told")
}

// twoRequests has a run, a person and a rollout ask for a host that is being set
// up.
func (w *world) twoRequests(t *testing.T, h gpuHost) {
	plan := h.plan(t, layout, true)
	run := h.midSetUp(t, plan, "slow", "75000") // longer than all that follows
	out, code := w.refit("start", "-f", plan, "--id", "another", "--follow")
	assert.Equal(t, exitRefused, code, out)
	assert.Contains(t, out, run, "who works on the node is named")
	out, code = h.atTheHost("check")
	assert.Equal(t, exitParked, code, out)
	assert.Contains(t, out, "one is at work")

	// Every host is on target, so the rollout asks the agents alone.
	rollout := w.startFile(w.rollout(t, ""))
	w.poll("the agent to send the rollout's request back", 2*time.Minute, func() bool { return w.sentBack(rollout, h.node, "a set-up is at work since") })
	require.Len(t, gpuInstance.FindAllString(h.state(t), -1), 1, "the set-up is where it was")
	h.goOn(t)
	r := w.ended(t, run)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	w.recorded(t, "kube-system", r.RunID)
	h.isSetUp(t)
	r = w.ended(t, rollout)
	require.Equal(t, protocol.OutcomeNoChange, r.Outcome, "%+v", r.Receipt)
	w.recorded(t, "tensor-fusion-sys", r.RunID)
	proven := map[string]gpu.Verdict{}
	for _, v := range w.validations(rollout) {
		proven[v.Node] = v.Verdict
	}
	assert.Equal(t, gpu.Pass, proven[h.node], "it came again after the set-up")
	w.replay(rollout)
	require.NoError(t, h.gpus.Reboot(), "the layout is gone for what follows")
}

// recorded requires the record of a run that nobody else speaks for.
func (w *world) recorded(t *testing.T, namespace, run string) {
	t.Helper()
	cm, err := w.kube.CoreV1().ConfigMaps(namespace).Get(t.Context(), "refit-receipt-"+run, metav1.GetOptions{})
	require.NoError(t, err)
	require.Contains(t, cm.Data["receipt.json"], run)
	require.NotEmpty(t, cm.Data["artifact"])
}

// rollout writes the plan file of a Rollout of the hypervisors that run.
func (w *world) rollout(t *testing.T, more string) string {
	t.Helper()
	pods, err := w.kube.CoreV1().Pods("tensor-fusion-sys").List(context.Background(), metav1.ListOptions{LabelSelector: "tensor-fusion.ai/component=hypervisor"})
	require.NoError(t, err)
	require.NotEmpty(t, pods.Items)
	p := pods.Items[0]
	path := filepath.Join(w.home, "rollout.yaml")
	require.NoError(t, os.WriteFile(path, fmt.Appendf(nil, `kind: Rollout
scope:
  target: {cluster: sandbox}
  release: {name: tensor-fusion-sys, namespace: tensor-fusion-sys}
component: hypervisor
pool: %s
entry: shared
goal: {hypervisorImage: %q, podName: %s}
%s`, samplePool, p.Spec.Containers[0].Image, strings.TrimSuffix(p.Name, p.Spec.NodeName), more), 0o600))
	return path
}

// sentBack reports whether a request of the run, or of a child, that is still
// open was refused by the agent of the node with these words.
func (w *world) sentBack(run, node, words string) bool {
	w.t.Helper()
	ctx := context.Background()
	for id := range w.histories(run) {
		workflowID, runID, _ := strings.Cut(id, "/")
		d, err := w.temporal.DescribeWorkflowExecution(ctx, workflowID, runID)
		require.NoError(w.t, err)
		for _, a := range d.GetPendingActivities() {
			if a.GetAttempt() > 1 && strings.Contains(a.GetLastFailure().GetMessage(), words) {
				return true
			}
		}
	}
	return false
}

// forgotten has a rollout find what a terminated run could not give back. The
// rollout asks for the host's TensorFusion, which the fake host has none of.
func (w *world) forgotten(t *testing.T, h gpuHost) {
	run := w.sandbox.Start(w.rollout(t, "expect: {tensorFusion: {}}\n"), nil, "--id", "forgotten")
	s := w.untilParked(run)
	assert.Equal(t, "rollout.hypervisor.shared.proof", s.WaitingFor.Stage)
	assert.Contains(t, findings(s), "TensorFusion")
	n := h.object(t)
	assert.Equal(t, "true", n.Labels[managedLabel], "foreign automation has its node back")
	assert.True(t, n.Spec.Unschedulable, "nothing proves the set-up that was begun")
	warnings := strings.Join(s.Warnings, "\n")
	assert.Contains(t, warnings, "as it was before a run that was ended by force (true)")
	assert.Contains(t, warnings, "Node "+h.node+" stays cordoned")
	w.answer(protocol.Abort, run)
	require.Equal(t, protocol.OutcomeAborted, w.receipt(run).Outcome)

	asked := map[string]gpu.ValidateRequest{}
	for _, history := range w.histories(run) {
		for _, e := range history.Events {
			a := e.GetActivityTaskScheduledEventAttributes()
			if a.GetActivityType().GetName() != gpu.ValidateActivity {
				continue
			}
			var req gpu.ValidateRequest
			require.NoError(t, converter.GetDefaultDataConverter().FromPayloads(a.GetInput(), &req))
			asked[req.Node] = req
		}
	}
	require.Len(t, asked, 4)
	for node, req := range asked {
		known, err := w.kube.CoreV1().Nodes().Get(context.Background(), node, metav1.GetOptions{})
		require.NoError(t, err)
		assert.Equal(t, known.Status.NodeInfo.BootID, req.NodeBootID, node)
		assert.NotEmpty(t, req.NodeBootID, node)
		assert.NotZero(t, req.Expect.TensorFusion.Port, "the pool's")
		assert.NotNil(t, req.Expect.TensorFusion.Pods, "no client pod is an answer")
	}
	w.replay(run)
}
