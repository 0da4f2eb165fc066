package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/refit-run/refit/workflows/protocol"
)

// TestTakeover ends two runs from outside, each in the middle of a host: one
// with the UI's Cancel, one with Terminate. The third run finishes what they
// began and sets the policy back to what it was before the first.
func TestTakeover(t *testing.T) {
	t.Parallel()
	w := up(t)
	o := observe(t, w)
	shared := w.nodesOf("shared")
	require.Len(t, shared, 2)
	before := w.autoUpdates()
	require.Contains(t, fmt.Sprint(before), "hypervisor=true", "the sandbox must begin with auto update on: nothing could be restored otherwise")
	var first []turn
	ungated := append(quickPlan, "rollouts[0].strategy.gates=none")
	ctx := context.Background()

	t.Run("Cancel in the middle of a host means abort after it", func(t *testing.T) {
		w.fault("hypervisor-never-ready", shared[0])
		run := w.start(ungated...)
		w.midHost(run, shared[0])
		require.NoError(t, w.temporal.CancelWorkflow(ctx, run, ""))
		s := w.until(run, "the abort's acceptance within the host's section", time.Minute, func(s protocol.Status) bool {
			return s.Deferred != "" && s.Section != ""
		})
		assert.Equal(t, protocol.Abort, s.Deferred)
		w.fault("clear")

		r := w.receipt(run)
		first = turns(r)
		assert.Equal(t, protocol.OutcomeAborted, r.Outcome)
		left := strings.Join(r.LeftBehind, "\n")
		for pool, was := range before {
			assert.Contains(t, left, fmt.Sprintf("pool %s: auto update stays off (it was %s)", pool, was))
		}
		assert.Contains(t, left, "release tensor-fusion-sys stands at revision 2")
		assert.Contains(t, left, "1 nodes run the", "the canary was finished before the abort took effect")
		pods := w.hypervisors()[shared[0]]
		require.Len(t, pods, 1)
		assert.Contains(t, pods[0], newImage+" Running")
		assert.Equal(t, 1, o.deletions(), "nothing starts after the section")
		_, held := w.leaseHolder()
		assert.False(t, held, "the Lease is given back")
		for pool, is := range w.autoUpdates() {
			assert.Equal(t, "hypervisor=false, worker=false, client=false", is, pool)
		}
		w.replay(run)
	})

	w.fault("hypervisor-never-ready", shared[1])
	half := turn{name: "the canary of the terminated run", hosts: shared[1:], from: time.Now()}
	terminated := w.start(ungated...)
	w.midHost(terminated, shared[1])
	require.NoError(t, w.temporal.TerminateWorkflow(ctx, terminated, "", "terminated by a test"))
	half.to = time.Now()
	holder, held := w.leaseHolder()
	require.True(t, held, "a terminated run can't give its Lease back")
	require.Contains(t, holder, terminated)

	next := w.start(append(ungated, "policy=restore")...)
	s := w.untilParked(next)
	assert.Contains(t, strings.Join(s.Warnings, "\n"), "Took the Lease over from "+holder)
	assert.Contains(t, findings(s), "P14: GPUNode/"+shared[1], "the host that was left half done is named")
	w.fault("clear")
	w.poll("the repair of "+shared[1], time.Minute, func() bool { return w.gpuNodePhase(shared[1]) == "Running" })
	w.answer(protocol.Retry, next)
	r := w.approveAll(next)
	assert.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.Equal(t, newImage, r.After["hypervisor"])
	assert.Equal(t, before, w.autoUpdates(), "the policy is what it was before the first run's hold")
	assert.Equal(t, 4, o.deletions(), "three runs, every node exactly once")
	assert.Empty(t, o.violations(slices.Concat(first, []turn{half}, turns(r))))
	for node, pods := range w.hypervisors() {
		require.Len(t, pods, 1, node)
		assert.Contains(t, pods[0], newImage+" Running")
	}
	_, held = w.leaseHolder()
	assert.False(t, held, "the Lease is given back")
	w.replay(next)
}

// autoUpdates maps each GPUPool to the flags that its TensorFusionCluster
// holds for it, as the receipt writes them.
func (w *world) autoUpdates() map[string]string {
	w.t.Helper()
	list, err := w.dynamic.Resource(schema.GroupVersionResource{
		Group: "tensor-fusion.ai", Version: "v1", Resource: "tensorfusionclusters",
	}).List(context.Background(), metav1.ListOptions{})
	require.NoError(w.t, err)
	out := map[string]string{}
	for _, c := range list.Items {
		pools, _, err := unstructured.NestedSlice(c.Object, "spec", "gpuPools")
		require.NoError(w.t, err)
		for _, p := range pools {
			pool := p.(map[string]any)
			flag := func(name string) bool {
				on, _, err := unstructured.NestedBool(pool, "specTemplate", "nodeManagerConfig", "nodePoolRollingUpdatePolicy", name)
				require.NoError(w.t, err)
				return on
			}
			out[c.GetName()+"-"+pool["name"].(string)] = fmt.Sprintf("hypervisor=%t, worker=%t, client=%t",
				flag("autoUpdateHypervisor"), flag("autoUpdateWorker"), flag("autoUpdateClient"))
		}
	}
	require.NotEmpty(w.t, out)
	return out
}

// gpuNodePhase is the phase that the controller gives a host.
func (w *world) gpuNodePhase(node string) string {
	w.t.Helper()
	n, err := w.dynamic.Resource(schema.GroupVersionResource{
		Group: "tensor-fusion.ai", Version: "v1", Resource: "gpunodes",
	}).Get(context.Background(), node, metav1.GetOptions{})
	require.NoError(w.t, err)
	phase, _, err := unstructured.NestedString(n.Object, "status", "phase")
	require.NoError(w.t, err)
	return phase
}

// leaseHolder is who holds the release, false when nobody does.
func (w *world) leaseHolder() (string, bool) {
	w.t.Helper()
	l, err := w.kube.CoordinationV1().Leases("tensor-fusion-sys").Get(context.Background(), "refit-tensor-fusion-sys", metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "", false
	}
	require.NoError(w.t, err)
	require.NotNil(w.t, l.Spec.HolderIdentity)
	return *l.Spec.HolderIdentity, *l.Spec.HolderIdentity != ""
}
