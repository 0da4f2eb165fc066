package tensorfusion

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// beforeHelm is the snapshot right before the Helm step.
func (i *installation) beforeHelm() Snapshot {
	i.t.Helper()
	out, err := i.activities.CheckDrift(i.t.Context(), DriftRequest{Scope: i.scope, Allocations: true})
	require.NoError(i.t, err)
	mustHide(i.t, out, oldToken)
	return out.Snapshot
}

// troubles are what T10 says of the neighbours, by object.
func (i *installation) troubles(r *resolved, before Snapshot, from int) map[string]string {
	i.t.Helper()
	out := map[string]string{}
	for _, n := range i.neighbours(r, before, from) {
		if n.Trouble != "" {
			out[n.Object] += n.Trouble
		}
	}
	return out
}

func (i *installation) neighbours(r *resolved, before Snapshot, from int, told ...string) []Neighbour {
	i.t.Helper()
	target, err := r.targetSide()
	require.NoError(i.t, err)
	c, err := i.activities.connect(i.t.Context(), i.scope)
	require.NoError(i.t, err)
	o, err := observeController(i.t.Context(), c, ControllerRequest{Scope: i.scope, Snapshot: before, FromRevision: from, Told: told}, r, target)
	require.NoError(i.t, err)
	return o.Neighbours
}

func (i *installation) edit(resource, name, patch string) {
	i.t.Helper()
	var err error
	options := metav1.PatchOptions{FieldManager: "somebody"}
	switch namespace := i.scope.Release.Namespace; resource {
	case "configmaps":
		_, err = i.admin.Typed.CoreV1().ConfigMaps(namespace).Patch(i.t.Context(), name, types.MergePatchType, []byte(patch), options)
	case "deployments":
		_, err = i.admin.Typed.AppsV1().Deployments(namespace).Patch(i.t.Context(), name, types.StrategicMergePatchType, []byte(patch), options)
	default:
		_, err = i.admin.Dynamic.Resource(clustersGVR).Patch(i.t.Context(), name, types.JSONPatchType, []byte(patch), options)
	}
	require.NoError(i.t, err)
}

func TestAfterTheHelmStepNothingIsLeftOfItAndNothingBesideItHasChanged(t *testing.T) {
	i := controlled(t)
	namespace := i.scope.Release.Namespace
	rules, config := "ConfigMap/"+namespace+"/tensor-fusion-sys-rules", "ConfigMap/"+namespace+"/tensor-fusion-sys-config"
	// What Helm puts back is in the plan's diff.
	i.edit("configmaps", "tensor-fusion-sys-config", `{"data":{"config.yaml":"by hand"}}`)
	before := i.beforeHelm()
	assert.Contains(t, before.Objects, rules)
	assert.NotContains(t, before.Objects, config)
	intent := i.intent()
	r, err := i.activities.resolve(t.Context(), i.client, i.scope, intent)
	require.NoError(t, err)
	_, err = i.release(r.intent, 1)
	require.NoError(t, err)
	require.Empty(t, i.troubles(r, before, 1))

	i.edit("configmaps", "tensor-fusion-sys-rules", `{"data":{"extra.yaml":"GPUCold: 5"}}`)
	found := i.troubles(r, before, 1)
	require.Len(t, found, 1)
	assert.Contains(t, found[rules], "changed since right before the Helm step")
	assert.Contains(t, found[rules], "last written by somebody at "+time.Now().UTC().Format("2006-01-02"))
	i.edit("configmaps", "tensor-fusion-sys-rules", `{"data":{"extra.yaml":null}}`)
	require.Empty(t, i.troubles(r, before, 1), "put back")

	i.edit("deployments", "tensor-fusion-sys-controller", `{"spec":{"minReadySeconds":1,"template":{"spec":{"containers":[{"name":"controller","image":"registry.test/operator:by-hand"}]}}}}`)
	found = i.troubles(r, before, 1)
	require.Len(t, found, 1)
	assert.Contains(t, found["Deployment/"+namespace+"/tensor-fusion-sys-controller"], "not what revision 2 says")
	assert.Contains(t, fmt.Sprint(found), "registry.test/operator:2.17.0")
	assert.NotContains(t, fmt.Sprint(found), oldToken)
	require.Empty(t, i.troubles(r, before, 2), "Helm had nothing to do")
	told := toldOf(i.neighbours(r, before, 1))
	require.Len(t, told, 1)
	require.Empty(t, toldOf(i.neighbours(r, before, 1, told...)), "a person has been told of it")
	i.edit("deployments", "tensor-fusion-sys-controller", `{"spec":{"template":{"spec":{"containers":[{"name":"controller","image":"registry.test/operator:by-another"}]}}}}`)
	require.Len(t, toldOf(i.neighbours(r, before, 1, told...)), 1, "but not of this")

	require.NoError(t, i.admin.Typed.CoreV1().ConfigMaps(namespace).Delete(t.Context(), "tensor-fusion-sys-rules", metav1.DeleteOptions{}))
	assert.Contains(t, i.troubles(r, before, 1)[rules], "deleted since")
}

func TestAClusterThatTheHelmStepLeavesAloneIsComparedButForWhatTheRunSets(t *testing.T) {
	i := controlled(t)
	object := "TensorFusionCluster/" + i.cluster
	intent := i.intent()
	intent.HypervisorImage = oldHypervisor // as rendered before
	intent.Values.Inline = map[string]any{"dynamicConfig": map[string]any{"metricsTTL": "7d"}}
	// The first revision of a run pins the flags: only the next leaves the cluster alone.
	r, err := i.activities.resolve(t.Context(), i.client, i.scope, intent)
	require.NoError(t, err)
	_, err = i.release(r.intent, 1)
	require.NoError(t, err)
	intent.Values.Inline = map[string]any{"dynamicConfig": map[string]any{"metricsTTL": "8d"}}
	if r, err = i.activities.resolve(t.Context(), i.client, i.scope, intent); err != nil {
		t.Fatal(err)
	}
	_, err = hold(t.Context(), i.client, HoldRequest{Scope: i.scope, Limit: holdLimit, Nudge: true})
	require.NoError(t, err)
	before := i.beforeHelm()
	require.Contains(t, before.Objects, object)
	_, err = i.release(r.intent, 2)
	require.NoError(t, err)
	_, err = hold(t.Context(), i.client, HoldRequest{Scope: i.scope, Limit: holdLimit, Assert: true, Undo: []PoolPolicy{{Pool: i.pool}}})
	require.NoError(t, err)
	require.Empty(t, nudgeOf(i.entry()))
	require.Empty(t, i.troubles(r, before, 2), "the hold's own change")
	i.edit("tensorfusionclusters", i.cluster, `[{"op":"add","path":"/spec/gpuPools/0/specTemplate/capacityConfig","value":{"warmResources":{"vram":"1Gi"}}}]`)
	found := i.troubles(r, before, 2)
	require.Len(t, found, 1)
	assert.Contains(t, found[object], "last written by somebody")
}

func (i *installation) entry() PoolEntry {
	i.t.Helper()
	clusters, err := readClusters(i.t.Context(), i.admin)
	require.NoError(i.t, err)
	return entriesOf(clusters)[i.pool]
}

// grantController gives the controller's ServiceAccount a ClusterRole.
func (i *installation) grantController(role string) {
	i.t.Helper()
	namespace := i.scope.Release.Namespace
	_, err := i.admin.Typed.RbacV1().ClusterRoleBindings().Create(i.t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role + "-" + namespace},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: namespace, Name: "default"}},
	}, metav1.CreateOptions{})
	require.NoError(i.t, err)
}

func TestTheRightsOfTheLiveControllerAreAskedForWhateverGrantsThem(t *testing.T) {
	i := install(t)
	r, err := i.activities.resolve(t.Context(), i.client, i.scope, i.intent())
	require.NoError(t, err)
	target, err := r.targetSide()
	require.NoError(t, err)
	missing := func() []string {
		out, err := lacking(t.Context(), i.client, i.scope.Release.Namespace, target.CRDs)
		require.NoError(t, err)
		return out
	}
	all := missing()
	for _, want := range []string{
		"watch schedulingconfigtemplates in group " + apiGroup, // a kind of the target's CRDs
		"update gpunodes/status in group " + apiGroup,
		"delete pods in group core",
		"update leases in group coordination.k8s.io in namespace " + i.scope.Release.Namespace,
	} {
		assert.Contains(t, all, want)
	}
	// An extra role does as well as the chart's, and patch as well as update.
	role := "fake-status-writer-" + i.scope.Release.Namespace
	_, err = i.admin.Typed.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: role}, Rules: []rbacv1.PolicyRule{rule(apiGroup, "gpunodes/status", "patch")},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	i.grantController(role)
	require.Eventually(t, func() bool { return len(missing()) == len(all)-1 }, 20*time.Second, 50*time.Millisecond)
	assert.NotContains(t, missing(), "update gpunodes/status in group "+apiGroup)
	i.grantController("cluster-admin")
	require.Eventually(t, func() bool { return len(missing()) == 0 }, 20*time.Second, 50*time.Millisecond)
}
