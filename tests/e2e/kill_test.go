package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	enums "go.temporal.io/api/enums/v1"

	"github.com/refit-run/refit/workflows/protocol"
)

// A host of this test takes readyAfter from delete to Ready; the worker dies
// within the first inHost of it.
const (
	readyAfter = 8 * time.Second
	inHost     = 4 * time.Second
	// killsRun is the run's name, known before it begins.
	killsRun = "kills"
)

// TestKills kills the worker with -9 at every stage boundary and at five seeded
// points inside a host. The run must end as an undisturbed one: same receipt,
// every node replaced exactly once.
func TestKills(t *testing.T) {
	t.Parallel()
	w := up(t, "--pools", "shared=2,training=2", "--ready-after", readyAfter.String())
	o := observe(t, w)
	seed := uint64(20260301)
	if s := os.Getenv("REFIT_TEST_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		require.NoError(t, err, "REFIT_TEST_SEED")
		seed = n
	}
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	points := map[string][]time.Duration{} // node -> how long after its delete
	nodes := append(w.nodesOf("shared"), w.nodesOf("training")...)
	require.Len(t, nodes, 4)
	for _, node := range append(nodes, nodes[rnd.IntN(4)]) {
		points[node] = append(points[node], time.Duration(rnd.Int64N(int64(inHost))))
		slices.Sort(points[node])
	}

	b := w.hold(killsRun)
	kill := func(where string) {
		t.Logf("kill -9 %s", where)
		w.killWorker()
		w.startWorker("TEMPORAL_ADDRESS=" + b.address)
	}
	kill("before the run, to go through the boundaries")
	out, code := w.refit("start", "-f", "examples/tensorfusion-upgrade.yaml", "--id", killsRun,
		"--set", quickPlan[0], "--set", "rollouts[0].strategy.gates=none")
	require.Zero(t, code, out)
	stages := map[string]bool{}
	for looked := time.Now(); ; {
		if time.Since(looked) > time.Second {
			if !w.open(killsRun) {
				break
			}
			looked = time.Now()
		}
		select {
		case stage := <-b.reached:
			if !stages[stage] {
				stages[stage] = true
				kill("at the beginning of stage " + stage)
			}
			b.passed <- struct{}{}
		case <-time.After(20 * time.Millisecond):
		}
		for node, away := range o.awayNow() {
			if due := points[node]; len(due) > 0 && away >= due[0] {
				points[node] = due[1:]
				kill(fmt.Sprintf("%s into host %s", away.Round(time.Millisecond), node))
			}
		}
	}
	undisturbed(t, w.receipt(killsRun))
	assert.Equal(t, 4, o.deletions(), "every node exactly once, however often the worker died")
	assert.Empty(t, o.violations(1, 2))
	for node, left := range points {
		assert.Empty(t, left, "points inside host %s at which the worker was not killed", node)
	}
	for _, stage := range upgradeStages {
		assert.True(t, stages[stage], "no kill at the beginning of stage %s", stage)
	}
	w.replay(killsRun)
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

// undisturbed requires the receipt of an upgrade that nothing happened to, but
// for its times and people: TestUpgrade holds it for one that really was.
func undisturbed(t *testing.T, r protocol.Receipt) {
	t.Helper()
	var stages []string
	for _, s := range r.Stages {
		stages = append(stages, s.Name)
		assert.Equal(t, protocol.Done, s.State, s.Name)
	}
	assert.Equal(t, upgradeStages, stages)
	assert.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.Equal(t, map[string]string{"chart": "1.8.6", "controller": "2.16.3", "hypervisor": oldImage}, r.Before)
	assert.Equal(t, map[string]string{"chart": "1.8.7", "controller": "2.17.0", "hypervisor": newImage}, r.After)
	assert.Equal(t, protocol.Progress{Done: 4, Total: 4}, r.Progress)
	assert.Empty(t, r.Ignored)
	assert.Empty(t, r.LeftBehind)
	assert.Empty(t, r.Warnings)
	assert.Nil(t, r.Rollback)
}
