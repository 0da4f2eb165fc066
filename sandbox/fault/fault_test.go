package fault

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/refit-run/refit/sandbox/kwok"
)

const namespace = "tensor-fusion-sys"

func TestTableIsUsable(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range Table() {
		require.False(t, seen[f.Name], "%s twice", f.Name)
		seen[f.Name] = true
		require.NotEmpty(t, f.Does, f.Name)
		require.NotNil(t, f.apply, f.Name)
	}
}

func TestWrongNamesAndArgumentsAreRefused(t *testing.T) {
	for _, call := range [][]string{
		{"nonsense"}, {"gpu-fails"}, {"gpu-fails", "a", "b"}, {"canary-verdict", "perhaps"},
		{"apiserver-down", "soon"}, {"slow-image", "-1s"}, {"pdb-blocks", "apps", "no-value"},
	} {
		require.Error(t, Inject(t.Context(), &Targets{}, call[0], call[1:]), strings.Join(call, " "))
	}
}

func TestNodeNeverReadyMarksTheNode(t *testing.T) {
	kube := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n0"}})
	targets := &Targets{Kube: kube}
	require.NoError(t, Inject(t.Context(), targets, "node-never-ready", []string{"n0"}))
	n, err := kube.CoreV1().Nodes().Get(t.Context(), "n0", metav1.GetOptions{})
	require.NoError(t, err)
	require.Contains(t, n.Annotations, kwok.NotReady)
	require.Error(t, Inject(t.Context(), targets, "node-never-ready", []string{"n1"}))
	require.NoError(t, healNodes(t.Context(), targets))
	n, err = kube.CoreV1().Nodes().Get(t.Context(), "n0", metav1.GetOptions{})
	require.NoError(t, err)
	require.NotContains(t, n.Annotations, kwok.NotReady)
}

func TestPDBAllowsNoEviction(t *testing.T) {
	kube := fake.NewClientset()
	require.NoError(t, Inject(t.Context(), &Targets{Kube: kube}, "pdb-blocks", []string{"apps", "app=web"}))
	list, err := kube.PolicyV1().PodDisruptionBudgets("apps").List(t.Context(), metav1.ListOptions{LabelSelector: Label})
	require.NoError(t, err)
	require.Len(t, list.Items, 1)
	require.Equal(t, "0", list.Items[0].Spec.MaxUnavailable.String())
	require.Equal(t, map[string]string{"app": "web"}, list.Items[0].Spec.Selector.MatchLabels)
}

func TestControllerRestartAlsoEndsTheProcess(t *testing.T) {
	ended := 0
	targets := &Targets{Kube: fake.NewClientset(), Namespace: namespace, RestartController: func(context.Context) error { ended++; return nil }}
	require.NoError(t, Inject(t.Context(), targets, "controller-restart", nil))
	require.Equal(t, 1, ended)
}

func TestAutoUpdateOnFindsThePoolByName(t *testing.T) {
	pool := func(name string) any {
		policy := map[string]any{"autoUpdateHypervisor": false, "batchPercentage": int64(20)}
		return map[string]any{"name": name, "specTemplate": map[string]any{"nodeManagerConfig": map[string]any{"nodePoolRollingUpdatePolicy": policy}}}
	}
	tfc := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "tensor-fusion.ai/v1", "kind": "TensorFusionCluster", "metadata": map[string]any{"name": "tensor-fusion"},
		"spec": map[string]any{"gpuPools": []any{pool("shared"), pool("training")}},
	}}
	client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
		map[schema.GroupVersionResource]string{clusters: "TensorFusionClusterList"}, tfc)
	targets := &Targets{Dynamic: client}
	require.NoError(t, Inject(t.Context(), targets, "auto-update-on", []string{"tensor-fusion-training"}))
	got, err := client.Resource(clusters).Get(t.Context(), "tensor-fusion", metav1.GetOptions{})
	require.NoError(t, err)
	pools, _, err := unstructured.NestedSlice(got.Object, "spec", "gpuPools")
	require.NoError(t, err)
	for i, want := range []bool{false, true} {
		on, _, err := unstructured.NestedBool(pools[i].(map[string]any), "specTemplate", "nodeManagerConfig", "nodePoolRollingUpdatePolicy", "autoUpdateHypervisor")
		require.NoError(t, err)
		require.Equal(t, want, on)
	}
	require.Error(t, Inject(t.Context(), targets, "auto-update-on", []string{"nowhere"}))
}
