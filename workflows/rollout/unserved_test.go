package rollout

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
)

// A wave whose activity nobody takes up waits in its shards: the rollout says
// for which queue and since when, until a worker is there.
func TestAWaveThatNoWorkerTakesUpNamesTheQueue(t *testing.T) {
	c := newCluster(t, 3)
	c.unpolled, c.took = 2, 10*time.Minute // two tries go by; the third is taken up
	h := newHarness(t, c)
	h.at(15*time.Minute, func() {
		w := h.waits(protocol.WaitQueue, canary)
		require.Contains(t, w.Found, "task queue cluster/prod")
	})
	h.at(29*time.Minute, func() {
		require.Nil(t, h.status().WaitingFor, "the third try outlived its time in the queue: it has started")
	})
	r := h.run(input(plan.Strategy{Batch: plan.Amount{Count: 2}, Gates: plan.GateNone}))
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, each(3, tensorfusion.OutcomeReplaced), outcomes(r))
}

// A try that goes on at once leaves nothing behind on the status.
func TestAQueueThatIsServedAgainIsNamedNoMore(t *testing.T) {
	c := newCluster(t, 2)
	c.unpolled, c.took = 1, time.Minute
	h := newHarness(t, c)
	seen := false
	h.at(90*time.Second, func() { seen = h.waits(protocol.WaitQueue, canary).Kind != "" })
	h.at(150*time.Second, func() { require.Nil(t, h.status().WaitingFor) })
	r := h.run(input(plan.Strategy{Batch: plan.Amount{Count: 1}, Gates: plan.GateNone}))
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.True(t, seen)
}
