package tensorfusion

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

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

// A worker that crashes and comes back for ever is change, not progress.
func TestAWorkerThatFlapsDoesNotKeepAStalledRolloutAlive(t *testing.T) {
	w := newWorld(t)
	w.workload()
	w.poolStatus(map[string]any{"workerConfigSynced": false, "workerUpdateProgress": int64(20)})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	w.flap(ctx)
	_, err := rollWorkers(ctx, w.client, w.workersRequest(2*time.Second))
	require.NoError(t, ctx.Err(), "only the test's own deadline has ended it")
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	assert.Equal(t, finding.Stop, class)
	assert.Equal(t, "within 2s", f.Expected)
	assert.False(t, w.policy().AutoWorker)
}

// flap lets the worker of the workload become ready and fail again until ctx ends.
func (w *world) flap(ctx context.Context) {
	ended := make(chan struct{})
	w.t.Cleanup(func() { <-ended })
	workloads := w.admin.Dynamic.Resource(workloadsGVR).Namespace(w.scope.Release.Namespace)
	go func() {
		defer close(ended)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for n := int64(0); ; n = 1 - n {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			u, err := workloads.Get(ctx, "llm", metav1.GetOptions{})
			if err != nil {
				continue
			}
			u.Object["status"] = map[string]any{"workerCount": int64(1), "readyWorkers": n, "podTemplateHash": "w"}
			_, _ = workloads.UpdateStatus(ctx, u, metav1.UpdateOptions{})
		}
	}()
}

func TestStepsForwardAreToldFromMereChange(t *testing.T) {
	type step struct {
		percent, open int
		forward       bool
	}
	for name, steps := range map[string][]step{
		"each batch outdates its workers, which are replaced one by one": {
			{0, 0, false}, {0, 2, false}, {0, 1, true}, {0, 0, true}, {50, 0, true}, {50, 2, false}, {50, 1, true}, {50, 0, true}, {100, 0, true},
		},
		"a worker flaps":                     {{20, 1, false}, {20, 0, true}, {20, 1, false}, {20, 0, false}, {20, 1, false}, {20, 0, false}},
		"a worker flaps while others roll":   {{20, 5, false}, {20, 4, true}, {20, 5, false}, {20, 4, false}, {20, 3, true}, {20, 4, false}, {20, 3, false}},
		"the percentage flaps":               {{20, 1, false}, {40, 1, true}, {20, 1, false}, {40, 1, false}, {60, 1, true}},
		"100 of the rollout before is stale": {{100, 0, false}, {100, 0, false}, {0, 4, false}, {25, 4, true}, {50, 4, true}, {100, 4, true}},
	} {
		t.Run(name, func(t *testing.T) {
			var seen advance
			for i, s := range steps {
				assert.Equal(t, s.forward, seen.moved(s.percent, s.open), "step %d: %+v", i+1, s)
			}
		})
	}
}

// T27: 0 % would become one batch of everything.
func TestZeroPercentIsRefused(t *testing.T) {
	_, err := rollWorkers(t.Context(), nil, WorkersRequest{})
	f, _, ok := finding.Of(err)
	require.True(t, ok)
	assert.Equal(t, "T27", f.Row)
}
