package e2e

import (
	"context"
	"fmt"
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
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/refit-run/refit/workflows/protocol"
)

// A host of this test takes readyAfter from delete to Ready; the worker dies
// within the first inHost of it, and the loop looks at least once a look.
const (
	readyAfter = 6 * time.Second
	inHost     = 4 * time.Second
	look       = 250 * time.Millisecond
)

// beginsWith are the activities with which short stages begin. The server knows
// the pending one without a worker: a query finds nobody while the worker
// starts, and a stage of half a second is over when it is answered.
var beginsWith = map[string]string{
	"lease.Acquire": "lock", "tensorfusion.Preflight": "preflight", "tensorfusion.Diff": "plan", "tensorfusion.Hold": "hold",
	"tensorfusion.Backup": "backup", "tensorfusion.ApplyCRDs": "crds", "tensorfusion.UpgradeRelease": "helm",
	"tensorfusion.SetPolicy": "policy", "tensorfusion.Verify": "verify", "tensorfusion.WriteReceipt": "receipt", "lease.Release": "unlock",
}

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

	run := w.start(append(quickPlan, "rollouts[0].strategy.gates=none")...)
	stages := map[string]bool{}
	kill := func(where string) {
		t.Logf("kill -9 %s", where)
		w.killWorker()
		w.startWorker()
	}
	at := func(stage string) {
		if stage != "" && !stages[stage] {
			stages[stage] = true
			kill("at the beginning of stage " + stage)
		}
	}
	var last protocol.Status
	err := wait.PollUntilContextTimeout(context.Background(), 10*time.Millisecond, 10*time.Minute, true, func(context.Context) (bool, error) {
		for node, away := range o.awayNow() {
			if due := points[node]; len(due) > 0 && away >= due[0] {
				points[node] = due[1:]
				kill(fmt.Sprintf("%s into host %s", away.Round(time.Millisecond), node))
			}
		}
		at(w.pendingStage(run))
		s, err := w.statusWithin(run, look)
		if err != nil {
			return false, nil
		}
		last = s
		if s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked {
			return false, assert.AnError
		}
		if s.Phase == protocol.PhaseDone || s.Phase == protocol.PhaseAborted {
			return true, nil
		}
		at(s.Stage)
		return false, nil
	})
	require.NoError(t, err, "last status: %+v", last)
	undisturbed(t, w.receipt(run))
	assert.Equal(t, 4, o.deletions(), "every node exactly once, however often the worker died")
	assert.Empty(t, o.violations(1, 2))
	for node, left := range points {
		assert.Empty(t, left, "points inside host %s at which the worker was not killed", node)
	}
	for _, stage := range upgradeStages {
		assert.True(t, stages[stage], "no kill at the beginning of stage %s", stage)
	}
	w.replay(run)
}

// pendingStage is the stage whose first activity waits or runs now, "" when
// none does.
func (w *world) pendingStage(run string) string {
	ctx, cancel := context.WithTimeout(context.Background(), look)
	defer cancel()
	d, err := w.temporal.DescribeWorkflowExecution(ctx, run, "")
	if err != nil {
		return ""
	}
	if len(d.PendingActivities) > 0 {
		return beginsWith[d.PendingActivities[0].ActivityType.GetName()]
	}
	for _, child := range d.PendingChildren {
		if w.atItsFirstActivity(ctx, child.WorkflowId) {
			return strings.TrimPrefix(child.WorkflowId, run+".") + ".plan"
		}
	}
	return ""
}

// atItsFirstActivity: a rollout begins by observing its pool, for its plan.
func (w *world) atItsFirstActivity(ctx context.Context, run string) bool {
	d, err := w.temporal.DescribeWorkflowExecution(ctx, run, "")
	if err != nil || len(d.PendingActivities) == 0 {
		return false
	}
	scheduled := 0
	for events := w.temporal.GetWorkflowHistory(ctx, run, "", false, enums.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT); events.HasNext(); {
		e, err := events.Next()
		if err != nil {
			return false
		}
		if e.EventType == enums.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED {
			scheduled++
		}
	}
	return scheduled == 1
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
