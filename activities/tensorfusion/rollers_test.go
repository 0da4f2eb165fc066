package tensorfusion

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// namespaced makes a namespaced TensorFusion object in the world's namespace.
func (w *world) namespaced(plural, name string, content map[string]any) {
	w.t.Helper()
	u := &unstructured.Unstructured{Object: content}
	u.SetAPIVersion(apiGroup + "/" + apiVersion)
	u.SetKind(kinds[plural])
	u.SetName(name)
	status := content["status"]
	r := w.admin.Dynamic.Resource(tensorFusion(plural)).Namespace(w.scope.Release.Namespace)
	made, err := r.Create(w.t.Context(), u, metav1.CreateOptions{})
	require.NoError(w.t, err)
	if status != nil {
		made.Object["status"] = status
		_, err = r.UpdateStatus(w.t.Context(), made, metav1.UpdateOptions{})
		require.NoError(w.t, err)
	}
}

// poolStatus writes the GPUPool, which the real controller derives.
func (w *world) poolStatus(components map[string]any) {
	w.t.Helper()
	pools := w.admin.Dynamic.Resource(poolsGVR)
	pool, err := pools.Get(w.t.Context(), w.pool, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		w.create("gpupools", w.pool, map[string]any{"spec": map[string]any{}})
		pool, err = pools.Get(w.t.Context(), w.pool, metav1.GetOptions{})
	}
	require.NoError(w.t, err)
	pool.Object["status"] = map[string]any{"componentStatus": components}
	_, err = pools.UpdateStatus(w.t.Context(), pool, metav1.UpdateOptions{})
	require.NoError(w.t, err)
}

func (w *world) workload() {
	w.namespaced("tensorfusionworkloads", "llm", map[string]any{
		"metadata": map[string]any{"labels": map[string]any{labelGPUPool: w.pool}},
		"spec":     map[string]any{"replicas": int64(1)},
		"status":   map[string]any{"workerCount": int64(1), "readyWorkers": int64(1), "podTemplateHash": "w"},
	})
	w.namespaced("tensorfusionconnections", "llm-conn", map[string]any{"spec": map[string]any{"workloadName": "llm", "clientPod": "app-1"}})
}

func (w *world) workersRequest(stall time.Duration) WorkersRequest {
	return WorkersRequest{Scope: w.scope, Pool: w.pool, BatchPercentage: 50, BatchInterval: 5 * time.Second, Stall: stall}
}

func TestWorkersAreListedWithTheSessionsTheyCarry(t *testing.T) {
	w := newWorld(t)
	w.workload()
	w.poolStatus(map[string]any{"workerConfigSynced": false})
	out, err := observeWorkers(t.Context(), w.client, w.workersRequest(0))
	require.NoError(t, err)
	require.Len(t, out.Workloads, 1)
	assert.True(t, out.Workloads[0].Stale)
	assert.Equal(t, []string{"llm-conn of pod app-1"}, out.Workloads[0].Connections)
}

func TestWorkersRollUnderTheFlagWhichGoesOffAgain(t *testing.T) {
	w := newWorld(t)
	w.workload()
	w.poolStatus(map[string]any{"workerConfigSynced": false})
	var seen PoolPolicy
	w.background(func(objects kube.Objects) {
		for _, u := range objects[0] {
			fc, err := decode[FusionCluster](u)
			if err != nil || fc.Name != w.cluster {
				continue
			}
			if p := policyOf(fc.Name, fc.Spec.GPUPools[0]); p.AutoWorker {
				seen = p
				w.poolStatus(map[string]any{"workerConfigSynced": true, "workerUpdateProgress": int64(100)})
			}
		}
	}, kube.Selection{Resource: clustersGVR})
	_, err := rollWorkers(t.Context(), w.client, w.workersRequest(20*time.Second))
	require.NoError(t, err)
	assert.Equal(t, int32(50), seen.BatchPercentage)
	assert.Equal(t, "5s", seen.BatchInterval)
	assert.False(t, w.policy().AutoWorker)
}

func TestAStalledWorkerRolloutIsStopped(t *testing.T) {
	w := newWorld(t)
	w.workload()
	w.poolStatus(map[string]any{"workerConfigSynced": false})
	_, err := rollWorkers(t.Context(), w.client, w.workersRequest(time.Second))
	f, _, ok := finding.Of(err)
	require.True(t, ok)
	assert.Contains(t, f.Next, "the flag is off again")
	assert.False(t, w.policy().AutoWorker)
}

// T27: 0 % would become one batch of everything.
func TestZeroPercentIsRefused(t *testing.T) {
	_, err := rollWorkers(t.Context(), nil, WorkersRequest{})
	f, _, ok := finding.Of(err)
	require.True(t, ok)
	assert.Equal(t, "T27", f.Row)
}

// app is a Deployment-like owner: a ReplicaSet that this double keeps at its
// number of pods, new ones with the current injection.
func (w *world) app(name string, replicas int) {
	w.t.Helper()
	namespace := w.scope.Release.Namespace
	labels := map[string]string{"app": name}
	rs, err := w.admin.Typed.AppsV1().ReplicaSets(namespace).Create(w.t.Context(), &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.ReplicaSetSpec{
			Replicas: pointer(int32(replicas)), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "x"}}}},
		},
	}, metav1.CreateOptions{})
	require.NoError(w.t, err)
	for i := range replicas {
		require.NoError(w.t, w.clientPod(w.t.Context(), fmt.Sprintf("%s-old-%d", name, i), name, "old", rs))
	}
	n := 0
	w.background(func(objects kube.Objects) {
		for range replicas - len(objects[0]) {
			n++
			_ = w.clientPod(w.t.Context(), fmt.Sprintf("%s-new-%d", name, n), name, "new", rs)
		}
	}, kube.Selection{Resource: podsGVR, Namespace: namespace, Labels: "app=" + name})
}

func (w *world) clientPod(ctx context.Context, name, app, hash string, rs *appsv1.ReplicaSet) error {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": app, labelEnabled: "true", labelGPUPool: w.pool, labelTemplateHash: hash}},
		Spec:       corev1.PodSpec{TerminationGracePeriodSeconds: pointer(int64(0)), Containers: []corev1.Container{{Name: "c", Image: "x"}}},
	}
	if rs != nil {
		pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(rs, appsv1.SchemeGroupVersion.WithKind("ReplicaSet"))}
	}
	pods := w.admin.Typed.CoreV1().Pods(w.scope.Release.Namespace)
	made, err := pods.Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	made.Status = provenPod("x").Status
	_, err = pods.UpdateStatus(ctx, made, metav1.UpdateOptions{})
	return err
}

func (w *world) evict(limit time.Duration, leave ...string) (ClientsResult, error) {
	e := newEviction(w.client, ClientsRequest{Scope: w.scope, Pool: w.pool, PerOwner: 1, Leave: leave, Limit: limit})
	return e.run(w.t.Context())
}

func TestStaleClientsAreEvictedOneByOneAndBarePodsAreLeft(t *testing.T) {
	w := newWorld(t)
	w.poolStatus(map[string]any{"client": "new"})
	w.app("web", 3)
	require.NoError(t, w.clientPod(t.Context(), "bare", "bare", "old", nil))
	out, err := w.evict(20 * time.Second)
	require.NoError(t, err)
	assert.Equal(t, 3, out.Evicted)
	require.Len(t, out.Left, 1)
	assert.Equal(t, "bare", out.Left[0].Name)
	assert.Equal(t, leftBare, out.Left[0].Left)
}

func TestOwnersThatThePlanNamesAreLeft(t *testing.T) {
	w := newWorld(t)
	w.poolStatus(map[string]any{"client": "new"})
	w.app("web", 1)
	out, err := w.evict(20*time.Second, "ReplicaSet/"+w.scope.Release.Namespace+"/web")
	require.NoError(t, err)
	assert.Zero(t, out.Evicted)
	require.Len(t, out.Left, 1)
	assert.Equal(t, leftByPlan, out.Left[0].Left)
}

func TestABudgetThatRefusesIsNamed(t *testing.T) {
	w := newWorld(t)
	w.poolStatus(map[string]any{"client": "new"})
	w.app("web", 2)
	_, err := w.admin.Typed.PolicyV1().PodDisruptionBudgets(w.scope.Release.Namespace).Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "keep-web"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: pointer(intstr.FromInt32(2)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
		},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = w.evict(2 * time.Second)
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	assert.Equal(t, finding.Wait, class)
	assert.Contains(t, f.Found, "keep-web")
}
