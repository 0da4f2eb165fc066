package tensorfusion

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/kube"
)

// T27: a rollout of the controller's is slowed down on the TensorFusionCluster.
// The run does not write there while it watches, and brings the user's batches
// back at its end.
func TestBatchesThatSomebodyChangesMeanwhileHoldUntilTheRolloutEnds(t *testing.T) {
	w := newWorld(t)
	w.workload()
	w.poolStatus(map[string]any{"workerConfigSynced": false})
	found := w.policy()
	change := func(build func(*clusterPatch)) {
		require.NoError(t, patchClusters(t.Context(), w.client, func(b *clusterPatch) error {
			if b.cluster.Name == w.cluster {
				build(b)
			}
			return nil
		}))
	}
	change(func(b *clusterPatch) { // as a hold records it
		note, err := json.Marshal([]PoolPolicy{found})
		require.NoError(t, err)
		b.annotate(annotationPolicyBefore, string(note))
	})
	var atTheEnd PoolPolicy
	steps := 0
	w.background(func(objects kube.Objects) {
		p := w.policy()
		switch {
		case steps == 0 && p.AutoWorker:
			change(func(b *clusterPatch) {
				p.BatchPercentage, p.BatchInterval = 10, "5m"
				b.set(0, p)
			})
			w.poolStatus(map[string]any{"workerConfigSynced": false, "workerUpdateProgress": int64(10)})
			steps++
		case steps == 1 && len(objects[0]) > 0:
			atTheEnd = p
			w.poolStatus(map[string]any{"workerConfigSynced": true, "workerUpdateProgress": int64(100)})
			steps++
		}
	}, kube.Selection{Resource: clustersGVR}, kube.Selection{Resource: poolsGVR, Name: w.pool})
	_, err := rollWorkers(t.Context(), w.client, w.workersRequest(20*time.Second))
	require.NoError(t, err)
	assert.Equal(t, int32(10), atTheEnd.BatchPercentage)
	assert.Equal(t, "5m", atTheEnd.BatchInterval)
	assert.True(t, atTheEnd.AutoWorker)
	now := w.policy()
	assert.Equal(t, found.BatchPercentage, now.BatchPercentage)
	assert.Equal(t, found.BatchInterval, now.BatchInterval)
	assert.False(t, now.AutoWorker)
}
