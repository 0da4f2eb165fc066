package tensorfusion

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/node"
)

// The users that the activities of this package's tests run as: one with the
// worker's ClusterRole alone, one that may also do what Helm does with the test
// chart's kinds.
const (
	workerUser     = "fake-refit-worker"
	workerHelmUser = "fake-refit-worker-with-helm"
)

// datastoreRules are what the runs on datastores use and an upgrade does not.
// tests/datastores runs its workers with the shipped role.
var datastoreRules = []rbacv1.PolicyRule{
	rule("", "pods/exec", "get", "create"), // by WebSocket, by SPDY
	rule("", "persistentvolumeclaims", "list"),
	rule("apps", "statefulsets", "patch"),
	rule("apps", "statefulsets/scale", "patch"),
}

// chartRules are what the test chart's objects need on top.
var chartRules = []rbacv1.PolicyRule{
	rule(apiGroup, "tensorfusionclusters", "get", "create", "patch"),
	rule("apps", "deployments", "get", "create", "patch"),
	rule("", "configmaps", "get", "create", "patch"),
	rule("", "secrets", "get", "create", "patch"),
}

// manifest reads deploy/worker/rbac.yaml strictly: a misspelt field would be a
// right that nobody has.
func manifest(t *testing.T) (role rbacv1.ClusterRole, binding rbacv1.ClusterRoleBinding, account corev1.ServiceAccount) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "deploy", "worker", "rbac.yaml"))
	require.NoError(t, err)
	for _, doc := range bytes.Split(text, []byte("\n---\n")) {
		var kind metav1.TypeMeta
		require.NoError(t, yaml.Unmarshal(doc, &kind))
		into := map[string]any{"Namespace": &corev1.Namespace{}, "ServiceAccount": &account, "ClusterRole": &role, "ClusterRoleBinding": &binding}[kind.Kind]
		require.NotNil(t, into, "document of kind %q: say here what it may contain", kind.Kind)
		require.NoError(t, yaml.UnmarshalStrict(doc, into))
	}
	return role, binding, account
}

func sortedRights(rules []rbacv1.PolicyRule) []string {
	var out []string
	for _, r := range rights(rules) {
		out = append(out, r.String())
	}
	slices.Sort(out)
	return out
}

// granted are the users that have their rights by now.
var granted = map[string]bool{}

// grant gives the rules to a user, and waits until the API server knows.
func grant(t *testing.T, user string, rules []rbacv1.PolicyRule) {
	t.Helper()
	if granted[user] {
		return
	}
	admin := apiservertest.Shared(t).Client(t)
	for _, u := range toUnstructured(t,
		&rbacv1.ClusterRole{TypeMeta: metav1.TypeMeta{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole"}, ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: rules},
		&rbacv1.ClusterRoleBinding{
			TypeMeta: metav1.TypeMeta{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRoleBinding"}, ObjectMeta: metav1.ObjectMeta{Name: user},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
		}) {
		_, err := admin.Apply(t.Context(), u, "test", true, false)
		require.NoError(t, err)
	}
	c, err := kube.NewClient(as(t, user))
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		missing, err := denied(t.Context(), c, demands(rules))
		return err == nil && len(missing) == 0
	}, 20*time.Second, 50*time.Millisecond)
	granted[user] = true
}

func toUnstructured(t *testing.T, objects ...any) (out []*unstructured.Unstructured) {
	t.Helper()
	for _, o := range objects {
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
		require.NoError(t, err)
		out = append(out, &unstructured.Unstructured{Object: content})
	}
	return out
}

// as is the configuration of a user of the test server.
func as(t *testing.T, user string) *rest.Config {
	t.Helper()
	config := rest.CopyConfig(apiservertest.Shared(t).Config(t))
	config.Impersonate = rest.ImpersonationConfig{UserName: user}
	return config
}

// clustersAs maps a name to the test server, reached as a user.
func clustersAs(t *testing.T, cluster, user string) *kube.Clusters {
	t.Helper()
	server := apiservertest.Shared(t)
	config, err := clientcmd.LoadFromFile(server.Kubeconfig)
	require.NoError(t, err)
	config.AuthInfos[config.Contexts[server.ContextName].AuthInfo].Impersonate = user
	file := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, clientcmd.WriteToFile(*config, file))
	clusters, err := kube.Parse(fmt.Sprintf("%s=%s#%s", cluster, file, server.ContextName))
	require.NoError(t, err)
	return clusters
}

// asWorker is the configuration that every activity of newWorld runs with.
func asWorker(t *testing.T) *rest.Config {
	t.Helper()
	role, _, _ := manifest(t)
	grant(t, workerUser, role.Rules)
	return as(t, workerUser)
}

// workerClusters are what every activity of install runs with.
func workerClusters(t *testing.T, cluster string) *kube.Clusters {
	t.Helper()
	role, _, _ := manifest(t)
	grant(t, workerHelmUser, append(role.Rules, chartRules...))
	return clustersAs(t, cluster, workerHelmUser)
}

func TestTheShippedClusterRoleGrantsExactlyWhatIsAskedFor(t *testing.T) {
	role, binding, account := manifest(t)
	assert.Equal(t, sortedRights(append(slices.Clone(needed), datastoreRules...)), sortedRights(role.Rules))
	assert.Equal(t, role.Name, binding.RoleRef.Name)
	require.Len(t, binding.Subjects, 1)
	assert.Equal(t, account.Name, binding.Subjects[0].Name)
	assert.Equal(t, account.Namespace, binding.Subjects[0].Namespace)
	assert.Empty(t, role.AggregationRule)
	for _, r := range role.Rules {
		assert.NotContains(t, r.Verbs, "*")
		assert.NotContains(t, r.APIGroups, "*")
	}
}

func TestAWorkerWithTheShippedRoleLacksNothingAndAMissingRightIsNamed(t *testing.T) {
	role, _, _ := manifest(t)
	c, err := kube.NewClient(asWorker(t))
	require.NoError(t, err)
	missing, err := denied(t.Context(), c, demands(append(slices.Clone(needed), datastoreRules...)))
	require.NoError(t, err)
	assert.Empty(t, missing)

	for _, lost := range []right{{"", "pods/eviction", "create"}, {"coordination.k8s.io", "leases", "delete"}} {
		user := strings.ReplaceAll("fake-worker-without-"+lost.resource, "/", "-")
		rules := slices.Clone(role.Rules)
		for i, r := range rules {
			if r.APIGroups[0] == lost.group && r.Resources[0] == lost.resource {
				rules[i].Verbs = slices.DeleteFunc(slices.Clone(r.Verbs), func(v string) bool { return v == lost.verb })
			}
		}
		rules = slices.DeleteFunc(rules, func(r rbacv1.PolicyRule) bool { return len(r.Verbs) == 0 })
		grant(t, user, rules)
		c, err := kube.NewClient(as(t, user))
		require.NoError(t, err)
		missing, err := denied(t.Context(), c, demands(needed))
		require.NoError(t, err)
		assert.Equal(t, []string{lost.String()}, missing)
	}
}

func TestThePreflightNamesTheRightsThatTheChartNeeds(t *testing.T) {
	i := install(t)
	i.emptyRegistry()
	denials := func() (out []string) {
		o, err := i.activities.Preflight(t.Context(), PreflightRequest{Scope: i.scope, Intent: i.intent()})
		require.NoError(t, err)
		for _, c := range o.Checks {
			for _, f := range c.Findings {
				if c.Row == "T03" {
					out = append(out, f.Expected)
				}
			}
		}
		return out
	}
	assert.Empty(t, denials())

	asWorker(t)
	i.activities.Clusters = clustersAs(t, "test", workerUser)
	got := denials()
	in := " in namespace " + i.scope.Release.Namespace
	assert.Contains(t, got, "may create deployments in group apps"+in)
	assert.Contains(t, got, "may get configmaps in group core"+in)
	assert.Contains(t, got, "may create tensorfusionclusters in group "+apiGroup)
	assert.NotContains(t, got, "may patch deployments in group apps"+in, "the worker's own role has it")
}

func TestRightsOfRolesHooksAndRemovedObjectsAreAskedFor(t *testing.T) {
	c := apiservertest.Shared(t).Client(t)
	object := func(version, kind, namespace string, content map[string]any) *unstructured.Unstructured {
		u := &unstructured.Unstructured{Object: map[string]any{}}
		maps.Copy(u.Object, content)
		u.SetAPIVersion(version)
		u.SetKind(kind)
		u.SetNamespace(namespace)
		u.SetName("x")
		return u
	}
	type objects = []*unstructured.Unstructured
	r := &resolved{rendered: &helm.Rendered{
		Objects: objects{
			object("rbac.authorization.k8s.io/v1", "ClusterRole", "", nil),
			object("rbac.authorization.k8s.io/v1", "RoleBinding", "other", map[string]any{"roleRef": map[string]any{"kind": "Role", "name": "r"}}),
			object("v1", "ConfigMap", "", nil),
			object("nowhere.test/v1", "Unknown", "", nil),
		},
		Hooks: objects{object("batch/v1", "Job", "", nil)},
	}}
	got, err := r.chartRights(c, "here", objects{object("v1", "ConfigMap", "", nil), object("v1", "Service", "", nil)})
	require.NoError(t, err)
	var text []string
	for _, d := range got {
		text = append(text, d.String())
	}
	for _, want := range []string{
		"escalate clusterroles in group rbac.authorization.k8s.io",
		"bind roles in group rbac.authorization.k8s.io in namespace other",
		"create rolebindings in group rbac.authorization.k8s.io in namespace other",
		"patch configmaps in group core in namespace here",
		"delete services in group core in namespace here",
		"watch jobs in group batch in namespace here",
	} {
		assert.Contains(t, text, want)
	}
	assert.NotContains(t, text, "delete configmaps in group core in namespace here", "it stays")
	assert.NotContains(t, text, "patch services in group core in namespace here")
}

// TestTheShippedRoleIsEnoughBesideTheInstallation covers the activities whose
// own tests stand in other packages, and the ways to a pod.
func TestTheShippedRoleIsEnoughBesideTheInstallation(t *testing.T) {
	w := newWorld(t, "a")
	server := apiservertest.Shared(t)
	clusters, target := clustersAs(t, "test", workerUser), server.Target(t, "test")

	locks := &lease.Activities{Clusters: clusters}
	request := lease.AcquireRequest{Target: target, Namespace: w.scope.Release.Namespace, Release: "tf", Holder: "test/default/w/run-1"}
	_, err := locks.Acquire(t.Context(), request)
	require.NoError(t, err)
	_, err = lease.ClaimEngine(t.Context(), w.client.Typed, request.Namespace, request.Release, request.Holder, "engine")
	require.NoError(t, err)
	released, err := locks.Release(t.Context(), request)
	require.NoError(t, err)
	require.True(t, released.Released)

	nodes := &node.Activities{Clusters: clusters}
	on := node.Request{Target: target, Node: w.node("a")}
	for _, act := range []func(context.Context, node.Request) (node.Result, error){nodes.KeepOff, nodes.Cordon, nodes.Uncordon, nodes.GiveBack} {
		out, err := act(t.Context(), on)
		require.NoError(t, err)
		require.True(t, out.Changed)
	}

	// No kubelet runs here: what counts is that the API server lets us ask.
	require.NoError(t, w.makePod(t.Context(), w.node("a"), w.podPrefix, oldHypervisor))
	pods, err := w.client.Members(t.Context(), w.scope.Release.Namespace, "", "tensor-fusion-hypervisor")
	require.NoError(t, err)
	require.NotEmpty(t, pods.Pods)
	pod := pods.Pods[0]
	_, err = w.client.PodLogTail(t.Context(), pod.Namespace, pod.Name, "tensor-fusion-hypervisor", 1, false)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "forbidden")
	_, err = w.client.DialPod(t.Context(), pod.Namespace, pod.Name, 1)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "forbidden")
	_, err = w.client.Typed.CoreV1().Services("default").Get(t.Context(), "kubernetes", metav1.GetOptions{})
	require.NoError(t, err)
}
