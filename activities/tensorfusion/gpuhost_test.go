package tensorfusion

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/internal/apiservertest"
)

func TestAHostsPoolTellsThePortAndTheClusterItsClientPods(t *testing.T) {
	w := newWorld(t, "a", "b")
	w.create("gpupools", w.pool, map[string]any{"spec": map[string]any{"componentConfig": map[string]any{"hypervisor": map[string]any{"portNumber": int64(8123)}}}})
	pod := func(name, node string, phase corev1.PodPhase, labels map[string]string) {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name + "-" + w.node("x"), Namespace: w.scope.Release.Namespace, Labels: labels},
			Spec: corev1.PodSpec{NodeName: w.node(node), Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
		made, err := w.admin.Typed.CoreV1().Pods(p.Namespace).Create(t.Context(), p, metav1.CreateOptions{})
		require.NoError(t, err)
		made.Status.Phase = phase
		_, err = w.admin.Typed.CoreV1().Pods(p.Namespace).UpdateStatus(t.Context(), made, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	client := map[string]string{labelEnabled: "true", labelGPUPool: w.pool}
	pod("lives", "a", corev1.PodRunning, client)
	pod("starts", "a", corev1.PodPending, client)
	pod("ended", "a", corev1.PodSucceeded, client)
	pod("elsewhere", "b", corev1.PodRunning, client)
	pod("no-client", "a", corev1.PodRunning, nil)

	a := &Activities{Clusters: clustersAs(t, "test", workerUser)}
	ask := func(nodes ...string) map[string]GPUHost {
		out, err := a.GPUHosts(t.Context(), GPUHostsRequest{Target: apiservertest.Shared(t).Target(t, "test"), Nodes: nodes})
		require.NoError(t, err, "the worker's own rights are enough")
		return out.Hosts
	}
	at := w.scope.Release.Namespace + "/"
	first := GPUHost{Port: 8123, Pods: []string{at + "lives-" + w.node("x"), at + "starts-" + w.node("x")}}
	require.Equal(t, map[string]GPUHost{w.node("a"): first}, ask(w.node("a")))
	require.Equal(t, map[string]GPUHost{"no-such-node": {Pods: []string{}}}, ask("no-such-node"))
	require.Equal(t, map[string]GPUHost{
		w.node("a"): first, w.node("b"): {Port: 8123, Pods: []string{at + "elsewhere-" + w.node("x")}}, "no-such-node": {Pods: []string{}},
	}, ask(w.node("a"), w.node("b"), "no-such-node"), "many at once")
}
