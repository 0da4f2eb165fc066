package e2e

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	enums "go.temporal.io/api/enums/v1"

	"github.com/refit-run/refit/workflows/protocol"
)

// A host of this test takes readyAfter from delete to Ready, and validates for
// its GPUs.
const (
	readyAfter = 8 * time.Second
	validates  = 2 * time.Second
	// killsRun is the run's name, known before it begins.
	killsRun = "kills"
	// looksEvery is how often the world is looked at from outside.
	looksEvery = 20 * time.Millisecond
)

// TestKills kills the worker with -9 at every stage boundary and at five seeded
// points inside a host. Beside it another world, alike, is upgraded without a
// disturbance: both receipts must be the same, and every node be replaced
// exactly once. It takes six minutes, for the server waits up to 10 s for what
// each of the 25 dead workers had in hand.
func TestKills(t *testing.T) {
	t.Parallel()
	alike := []string{"--pools", "shared=2,training=2", "--ready-after", readyAfter.String(), "--validate-takes", validates.String()}
	undisturbed := up(t, alike...)
	undisturbed.startKillsRun()
	w := up(t, alike...)
	o := observe(t, w)
	seed := uint64(20260301)
	if s := os.Getenv("REFIT_TEST_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		require.NoError(t, err, "REFIT_TEST_SEED")
		seed = n
	}
	left := pointsInHosts(rand.New(rand.NewPCG(seed, 1)), w, o)
	t.Logf("seed %d: %q", seed, slices.Sorted(maps.Keys(left)))
	for _, stage := range upgradeStages {
		left[stage] = nil
	}

	b := w.hold(killsRun)
	kill := func(where string) {
		t.Logf("kill -9: %s", where)
		delete(left, where)
		w.killWorker()
		w.startWorker("TEMPORAL_ADDRESS=" + b.address)
	}
	kill("before the run, to go through the boundaries")
	w.startKillsRun()
	look := time.NewTicker(looksEvery)
	defer look.Stop()
	asks := time.NewTicker(time.Second)
	defer asks.Stop()
	for open := true; open; {
		select {
		case <-asks.C:
			open = w.open(killsRun)
		case at := <-b.reached:
			_, wanted := left[at]
			if wanted {
				kill(at)
			}
			b.passed <- !wanted
		case <-look.C:
		}
		for point, due := range left {
			if due != nil && due() {
				kill(point)
			}
		}
	}
	assert.Empty(t, slices.Sorted(maps.Keys(left)), "here the worker was not killed")
	r := w.receipt(killsRun)
	assert.Empty(t, strings.Join(differences(t, undisturbed.receipt(killsRun), r), "\n"), "from the receipt of the undisturbed run")
	assert.Equal(t, 4, o.deletions(), "every node exactly once, however often the worker died")
	assert.Empty(t, o.violations(turns(r)))
	w.replay(killsRun)
}

// startKillsRun begins the run that is the same in both worlds.
func (w *world) startKillsRun() {
	w.t.Helper()
	out, code := w.refit("start", "-f", "examples/tensorfusion-upgrade.yaml", "--id", killsRun,
		"--set", quickPlan[0], "--set", "rollouts[0].strategy.gates=none")
	require.Zero(w.t, code, out)
}

// pointsInHosts draws one point of each part of a host's turn: before its
// delete, soon and long after it while the pod is away, while its successor is
// proven, and while the GPUs are validated. The last four are on four hosts. A point is what the
// boundaries hold under that name, or due by what is seen from outside.
func pointsInHosts(rnd *rand.Rand, w *world, o *observer) map[string]func() bool {
	shared, training := w.nodesOf("shared"), w.nodesOf("training")
	require.Len(w.t, shared, 2)
	require.Len(w.t, training, 2)
	type batch struct{ stage, host string }
	batches := []batch{
		{"rollout.hypervisor.shared.canary", shared[0]}, {"rollout.hypervisor.shared.batch-1", shared[1]},
		{"rollout.hypervisor.training.canary", training[0]}, {"rollout.hypervisor.training.batch-1", training[1]},
	}
	early := batches[rnd.IntN(len(batches))]
	rnd.Shuffle(len(batches), func(i, j int) { batches[i], batches[j] = batches[j], batches[i] })
	points := map[string]func() bool{}
	held := func(at batch, moments ...string) { points[moments[rnd.IntN(len(moments))]+at.stage] = nil }
	away := func(at batch, from, to time.Duration) {
		after := from + time.Duration(rnd.Int64N(int64(to-from)))
		points[fmt.Sprintf("%s after the delete, batch %s", after.Round(time.Millisecond), at.stage)] = func() bool { return o.awayNow(at.host) >= after }
	}
	held(early, baselineAsked, replaceNext)
	away(batches[0], 0, readyAfter/2)
	away(batches[1], readyAfter/2, readyAfter)
	if rnd.IntN(2) == 0 {
		points["Ready again, batch "+batches[2].stage] = func() bool { return o.back(batches[2].host) }
	} else {
		held(batches[2], proofUntold)
	}
	held(batches[3], validationAsked, verdictUntold)
	return points
}

// open reports whether the run is still at work. It ends the test when it
// parks, or is not done in time.
func (w *world) open(run string) bool {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	d, err := w.temporal.DescribeWorkflowExecution(ctx, run, "")
	require.NoError(w.t, err)
	info := d.WorkflowExecutionInfo
	phase := info.GetSearchAttributes().GetIndexedFields()[protocol.AttrPhase].GetData()
	require.NotContains(w.t, string(phase), string(protocol.PhaseParked), "the run must not park")
	require.Less(w.t, time.Since(info.GetStartTime().AsTime()), 10*time.Minute, "the run must end")
	return info.GetStatus() == enums.WORKFLOW_EXECUTION_STATUS_RUNNING
}

// upgradeStages are those of the example plan, in order.
var upgradeStages = []string{
	"lock", "preflight", "plan", "hold", "backup", "crds", "helm",
	"rollout.hypervisor.shared", "rollout.hypervisor.shared.plan", "rollout.hypervisor.shared.canary", "rollout.hypervisor.shared.batch-1",
	"rollout.hypervisor.training", "rollout.hypervisor.training.plan", "rollout.hypervisor.training.canary", "rollout.hypervisor.training.batch-1",
	"policy", "verify", "receipt", "unlock",
}
