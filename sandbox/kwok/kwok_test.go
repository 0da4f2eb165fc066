package kwok

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/sandbox/folder"
)

func documents(t *testing.T, readyAfter time.Duration) map[string]map[string]any {
	t.Helper()
	text, err := render(12345, readyAfter)
	require.NoError(t, err)
	byName := map[string]map[string]any{}
	for _, doc := range strings.Split(text, "\n---\n") {
		var object map[string]any
		require.NoError(t, yaml.UnmarshalStrict([]byte(doc), &object), doc)
		meta, _ := object["metadata"].(map[string]any)
		name, _ := meta["name"].(string)
		byName[name] = object
	}
	return byName
}

func TestHypervisorsTakeTheirTimeAndOtherPodsDoNot(t *testing.T) {
	docs := documents(t, 10*time.Second)
	delay := func(name string) any {
		return docs[name]["spec"].(map[string]any)["delay"].(map[string]any)["durationMilliseconds"]
	}
	require.EqualValues(t, 0, delay("pod-ready"))
	require.EqualValues(t, 10000, delay("hypervisor-ready"))
	require.Equal(t, docs["pod-ready"]["spec"].(map[string]any)["next"], docs["hypervisor-ready"]["spec"].(map[string]any)["next"])
}

// Left at their default of 0, kwok reports to be healthy and does nothing.
func TestParallelismIsSet(t *testing.T) {
	options := documents(t, 0)[""]["options"].(map[string]any)
	for _, key := range []string{"nodeLeaseParallelism", "podPlayStageParallelism", "nodePlayStageParallelism", "podsOnNodeSyncParallelism"} {
		require.Greater(t, options[key], float64(0), key)
	}
}

func TestEveryAnnotationIsUsedByAStage(t *testing.T) {
	for _, annotation := range []string{NotReady, ReadyAfter, Hold, CrashLoop} {
		require.Contains(t, stages, `"`+annotation+`"`)
	}
}

func TestNodesCarryTheirPoolAndAddress(t *testing.T) {
	pools := []folder.Pool{{Name: "shared", Nodes: 2}, {Name: "training", Nodes: 1}}
	kube := fake.NewClientset()
	require.NoError(t, CreateNodes(t.Context(), kube, pools, folder.Ports{Block: 3}))
	require.NoError(t, CreateNodes(t.Context(), kube, pools, folder.Ports{Block: 3}), "nodes that exist are left alone")
	list, err := kube.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{LabelSelector: GPULabel + "=true"})
	require.NoError(t, err)
	require.Len(t, list.Items, 3)
	addresses, err := Addresses(pools, folder.Ports{Block: 3})
	require.NoError(t, err)
	for _, n := range list.Items {
		require.Equal(t, "fake", n.Annotations[NodeAnnotation])
		require.True(t, strings.HasPrefix(n.Name, n.Labels[PoolLabel]))
		require.Equal(t, n.Name, addresses[n.Status.Addresses[0].Address])
		require.Equal(t, BootID(n.Name), n.Status.NodeInfo.BootID)
	}
	all, err := kube.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	require.Len(t, all.Items, 3+systemNodes)
}
