package tensorfusion

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

// The caches fill in any order, and only the GPUNode and the pod wake the
// devices: whoever finds the others missing looks again.
func TestDevicesWaitForThePoolAndTheNode(t *testing.T) {
	const name, namespace = "shared-000", "tensor-fusion-sys"
	d, err := New(Options{Config: &rest.Config{Host: "http://127.0.0.1:0"}, Namespace: namespace, Release: namespace})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.api.Close()); require.NoError(t, d.closeWebhook()) })
	node := newObject("GPUNode", name, nil)
	node.SetLabels(map[string]string{machine.PoolLabelPrefix + "pool": "true"})
	require.NoError(t, d.caches.custom[nodeResource].GetStore().Add(node))

	requeue, err := d.reconcileDevices(t.Context(), name)
	require.NoError(t, err)
	require.Zero(t, requeue, "without a hypervisor there is nothing to wait for: its pod wakes the queue")

	require.NoError(t, d.caches.pods.GetStore().Add(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: machine.Newest.HypervisorName(name)},
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}))
	requeue, err = d.reconcileDevices(t.Context(), name)
	require.NoError(t, err)
	require.Positive(t, requeue, "neither Node nor pool are known")

	require.NoError(t, d.caches.nodes.GetStore().Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	requeue, err = d.reconcileDevices(t.Context(), name)
	require.NoError(t, err)
	require.Positive(t, requeue, "the pool is not known")
}
