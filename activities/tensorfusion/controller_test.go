package tensorfusion

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
)

func TestTheLeaderIsAReadyPodWithALiveLease(t *testing.T) {
	at := time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC)
	held := func(holder string, age time.Duration) *coordinationv1.Lease {
		return &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &holder, LeaseDurationSeconds: pointer(int32(15)), RenewTime: &metav1.MicroTime{Time: at.Add(-age)},
		}}
	}
	a := provenPod("x")
	a.Name = "controller-a"
	sick := a
	sick.Name, sick.Status = "controller-b", corev1.PodStatus{}
	pods := []corev1.Pod{a, sick}
	for _, tc := range []struct {
		world   string
		lease   *coordinationv1.Lease
		leader  string
		trouble string
	}{
		{"live", held("controller-a_0123", time.Second), "controller-a", ""},
		{"no lease", nil, "", "nobody holds"},
		{"expired", held("controller-a_0123", time.Minute), "", "not renewed"},
		{"holder gone", held("controller-z_0123", time.Second), "", "no pod of the controller"},
		{"holder not Ready", held("controller-b_0123", time.Second), "", "not Ready"},
	} {
		t.Run(tc.world, func(t *testing.T) {
			leader, trouble := leaderOf(tc.lease, pods, at)
			assert.Equal(t, tc.leader, leader)
			assert.Contains(t, trouble, tc.trouble)
			assert.Equal(t, tc.trouble == "", trouble == "")
		})
	}
}

func TestARolloutIsCompleteOnlyWithoutOldReplicas(t *testing.T) {
	assert.Empty(t, rolloutOf(2, 2, 2, 2, 2, 2))
	assert.Contains(t, rolloutOf(3, 2, 2, 2, 2, 2), "has not seen")
	assert.Contains(t, rolloutOf(2, 2, 2, 1, 2, 2), "updated")
	assert.Contains(t, rolloutOf(2, 2, 2, 2, 2, 3), "old replicas")
	assert.Contains(t, rolloutOf(2, 2, 2, 2, 1, 2), "available")
}

// T12: the controller mounts its configuration by subPath, so a ConfigMap that
// changes alone never reaches it.
func TestOnlyAChangeOfMountedConfigurationAloneNeedsARestart(t *testing.T) {
	objects := func(image, ttl string) []*unstructured.Unstructured {
		out, err := helm.Objects(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: c, labels: {tensor-fusion.ai/component: operator}}
spec: {template: {spec: {containers: [{name: controller, image: "` + image + `"}], volumes: [{name: c, configMap: {name: cfg}}]}}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: cfg}
data: {config.yaml: "` + ttl + `"}
`)
		require.NoError(t, err)
		return out
	}
	assert.True(t, onlyConfigChanged(objects("a", "30d"), objects("a", "7d")))
	assert.False(t, onlyConfigChanged(objects("a", "30d"), objects("a", "30d")))
	assert.False(t, onlyConfigChanged(objects("a", "30d"), objects("b", "7d")), "the new pods read it anyway")
}

// runController plays Deployment controller, kubelet and leader: every
// generation is rolled out at once.
func (i *installation) runController() {
	i.t.Helper()
	namespace := i.scope.Release.Namespace
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "tensor-fusion-sys-controller-1", Labels: map[string]string{"app": "controller"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "controller", Image: "x"}}},
	}
	made, err := i.admin.Typed.CoreV1().Pods(namespace).Create(i.t.Context(), pod, metav1.CreateOptions{})
	require.NoError(i.t, err)
	made.Status = provenPod("x").Status
	_, err = i.admin.Typed.CoreV1().Pods(namespace).UpdateStatus(i.t.Context(), made, metav1.UpdateOptions{})
	require.NoError(i.t, err)
	_, err = i.admin.Typed.CoordinationV1().Leases(namespace).Create(i.t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: leaderLease},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: pointer(made.Name + "_0123"), LeaseDurationSeconds: pointer(int32(3600)), RenewTime: &metav1.MicroTime{Time: time.Now()},
		},
	}, metav1.CreateOptions{})
	require.NoError(i.t, err)
	i.background(func(objects kube.Objects) {
		for _, u := range objects[0] {
			d, err := decode[appsv1.Deployment](u)
			if err != nil || d.Status.ObservedGeneration == d.Generation {
				continue
			}
			n := desired(d.Spec.Replicas)
			d.Status = appsv1.DeploymentStatus{ObservedGeneration: d.Generation, Replicas: n, UpdatedReplicas: n, ReadyReplicas: n, AvailableReplicas: n}
			_, _ = i.admin.Typed.AppsV1().Deployments(namespace).UpdateStatus(i.t.Context(), &d, metav1.UpdateOptions{})
		}
	}, kube.Selection{Resource: deploymentsGVR, Namespace: namespace})
}

// controlled is an installation whose controller runs, with every right, and
// whose policy is held.
func controlled(t *testing.T) *installation {
	t.Helper()
	i := install(t)
	i.world.control()
	i.runController()
	i.grantController("cluster-admin")
	_, err := hold(t.Context(), i.client, HoldRequest{Scope: i.scope, Limit: holdLimit})
	require.NoError(t, err)
	return i
}

func TestTheControllerIsAwaitedAndRestartedOnlyForConfiguration(t *testing.T) {
	i := controlled(t)
	upgrade := func(intent Intent, from int) ControllerResult {
		t.Helper()
		r, err := i.activities.resolve(t.Context(), i.client, i.scope, intent)
		require.NoError(t, err)
		before := i.beforeHelm()
		_, err = i.release(r.intent, from)
		require.NoError(t, err)
		var out ControllerResult
		for range 2 { // a lost reply must not restart it again
			out, err = i.activities.AwaitController(t.Context(), ControllerRequest{
				Scope: i.scope, Intent: r.intent, Snapshot: before, FromRevision: from, Limit: time.Minute,
			})
			require.NoError(t, err)
			blocking, _ := blockingOf(out.Checks)
			assert.Empty(t, blocking)
		}
		return out
	}
	intent := i.intent()
	first := upgrade(intent, 1)
	assert.False(t, first.Restarted)
	assert.Equal(t, "registry.test/operator:2.17.0", first.Image)
	assert.Equal(t, "tensor-fusion-sys-controller-1", first.Leader)

	intent.Values.Inline = map[string]any{"dynamicConfig": map[string]any{"metricsTTL": "7d"}}
	second := upgrade(intent, 2)
	assert.True(t, second.Restarted)
	d, err := controllerDeployment(t.Context(), i.admin, i.scope.Release.Namespace)
	require.NoError(t, err)
	assert.NotEmpty(t, d.Spec.Template.Annotations[annotationRestarted])
	assert.LessOrEqual(t, d.Generation, int64(3), "created, upgraded, restarted once")
}

func TestOnlyWhatMaySettleIsAskedAgain(t *testing.T) {
	open := func(row string, class finding.Class) Check { return Check{Row: row, Class: class} }
	sound := Check{Row: "T08", OK: true}
	assert.False(t, waiting([]Check{sound}))
	assert.True(t, waiting([]Check{sound, open("P06", finding.Wait)}))
	assert.True(t, waiting([]Check{sound, open("P06", finding.Wait), open("P13", finding.Stop)}), "a new leader still reads its allocations")
	assert.False(t, waiting([]Check{open("P06", finding.Wait), open("T23", finding.Stop)}))
}
