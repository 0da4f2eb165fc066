package tensorfusion

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/internal/apiservertest"
)

// hypervisorIn makes a hypervisor pod of this isolation mode on a node.
func (w *world) hypervisorIn(node, mode string) {
	w.t.Helper()
	pod := provenPod(node)
	pod.ObjectMeta = metav1.ObjectMeta{Name: w.podPrefix + node, Namespace: w.scope.Release.Namespace, Labels: map[string]string{labelComponent: componentHypervisor}}
	pod.Spec.Containers[0].Args = []string{"--isolation-mode=" + mode}
	_, err := w.admin.Typed.CoreV1().Pods(pod.Namespace).Create(w.t.Context(), &pod, metav1.CreateOptions{})
	require.NoError(w.t, err)
}

func TestATenantsPartitionsAreKnownByAnythingThatTellsTheIsolationMode(t *testing.T) {
	merge := func(w *world, resource, name, patch string, sub ...string) {
		w.t.Helper()
		_, err := w.admin.Dynamic.Resource(tensorFusion(resource)).Patch(w.t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, sub...)
		require.NoError(w.t, err)
	}
	pool := func(w *world, config map[string]any) {
		w.create("gpupools", w.pool, map[string]any{"spec": map[string]any{"nodeManagerConfig": config}})
	}
	rules := []any{map[string]any{"mode": "partitioned", "selector": map[string]any{}}}
	for name, c := range map[string]struct {
		make func(w *world, node string)
		why  string // empty: not partitioned
	}{
		"nothing says so": {func(w *world, node string) {
			w.hypervisorIn(node, "soft")
			pool(w, map[string]any{"defaultIsolationMode": "soft"})
		}, ""},
		"the label of older lines": {func(w *world, node string) {
			merge(w, "gpunodes", node, fmt.Sprintf(`{"metadata":{"labels":{%q:"partitioned"}}}`, labelIsolation))
		}, "GPUNode/"},
		"a GPU": {func(w *world, node string) {
			merge(w, "gpus", "gpu-0."+node, `{"status":{"isolationMode":"partitioned"}}`, "status")
		}, "status.isolationMode"},
		"a GPU's mode of now": {func(w *world, node string) {
			merge(w, "gpus", "gpu-0."+node, `{"status":{"activeIsolationMode":"partitioned"}}`, "status")
		}, "status.activeIsolationMode"},
		"the hypervisor": {func(w *world, node string) { w.hypervisorIn(node, "partitioned") }, "hypervisor Pod"},
		"the pool": {func(w *world, node string) {
			w.hypervisorIn(node, "soft")
			pool(w, map[string]any{"defaultIsolationMode": "partitioned"})
		}, "defaultIsolationMode"},
		"a rule, and no hypervisor": {func(w *world, node string) {
			pool(w, map[string]any{"defaultIsolationMode": "soft", "isolationModeRules": rules})
		}, "has a rule"},
		"a rule of the pool's others": {func(w *world, node string) {
			w.hypervisorIn(node, "soft")
			pool(w, map[string]any{"isolationModeRules": rules})
		}, ""},
		"a default that a rule changed": {func(w *world, node string) {
			w.hypervisorIn(node, "soft")
			pool(w, map[string]any{"defaultIsolationMode": "partitioned", "isolationModeRules": []any{map[string]any{"mode": "soft"}}})
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "a")
			c.make(w, w.node("a"))
			server := apiservertest.Shared(t)
			a := &Activities{Clusters: clustersAs(t, "test", workerUser)}
			out, err := a.Tenants(t.Context(), TenantsRequest{Target: server.Target(t, "test"), Node: w.node("a")})
			require.NoError(t, err, "the worker's own rights are enough")
			require.Equal(t, c.why != "", out.Partitioned, out.Why)
			require.Contains(t, out.Why, c.why)
		})
	}
}

func TestANodeOutsideTensorFusionHasNoTenants(t *testing.T) {
	w := newWorld(t)
	server := apiservertest.Shared(t)
	_, err := w.admin.Typed.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.node("plain")}}, metav1.CreateOptions{})
	require.NoError(t, err)
	a := &Activities{Clusters: clustersAs(t, "test", workerUser)}
	out, err := a.Tenants(t.Context(), TenantsRequest{Target: server.Target(t, "test"), Node: w.node("plain")})
	require.NoError(t, err)
	require.Equal(t, TenantsResult{}, out)
	none, err := namedBy(t.Context(), w.client, tensorFusion("unheardof"), metav1.ListOptions{})
	require.NoError(t, err, "a cluster without TensorFusion does not know its kinds")
	require.Empty(t, none)
}
