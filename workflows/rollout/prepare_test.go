package rollout

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/node"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

// nodes is a cluster whose hosts are prepared: Node objects, and agents that
// make a layout.
type nodes struct {
	*cluster
	cordoned map[string]bool
	laidOut  map[string]bool
	busy     map[string]bool // refused before the first step
	broken   map[string]bool // fails in the middle
	lockedBy map[string]bool // another run works on the node
	modeOnly bool            // as asked last
	most     int             // nodes cordoned at a time
	takes    time.Duration   // of one answer of the agent
}

func newNodes(t *testing.T, n int) *nodes {
	return &nodes{cluster: newCluster(t, n), cordoned: map[string]bool{},
		laidOut: map[string]bool{}, busy: map[string]bool{}, broken: map[string]bool{}, lockedBy: map[string]bool{}}
}

func (n *nodes) keepOff(_ context.Context, r node.Request) (node.Result, error) {
	n.do(func() { n.kept[r.Node] = true })
	return node.Result{UID: "uid-" + r.Node}, nil
}

func (n *nodes) giveBack(_ context.Context, r node.Request) (node.Result, error) {
	n.do(func() { delete(n.kept, r.Node) })
	return node.Result{}, nil
}

func (n *nodes) cordon(_ context.Context, r node.Request) (node.Result, error) {
	n.do(func() { n.cordoned[r.Node] = true; n.most = max(n.most, len(n.cordoned)) })
	return node.Result{}, nil
}

func (n *nodes) uncordon(_ context.Context, r node.Request) (node.Result, error) {
	n.do(func() { delete(n.cordoned, r.Node) })
	return node.Result{}, nil
}

func (n *nodes) lay(_ context.Context, r gpu.PrepareRequest) (gpu.PrepareResult, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.modeOnly = r.MIG.ModeOnly
	var out gpu.PrepareResult
	if n.busy[r.Node] {
		f := finding.Finding{Object: "GPU GPU-" + r.Node, Expected: "no client", Found: "2 clients", Next: "stop them, then answer retry"}
		return out, temporal.NewApplicationErrorWithOptions(f.String(), string(finding.Wait), temporal.ApplicationErrorOptions{
			NonRetryable: true, Details: []any{f, gpu.SetUpFailure{Untouched: true}}})
	}
	if n.broken[r.Node] && !r.PlanOnly {
		return out, finding.Finding{Object: "GPU GPU-" + r.Node, Found: "left the bus"}.Error(finding.Stop)
	}
	if !n.laidOut[r.Node] {
		out.Actions = []gpu.Action{{System: "mig", Device: "GPU-" + r.Node, What: "create GPU instance 7g.80gb at 0"}}
	}
	if !r.PlanOnly {
		n.say("prepare %s", r.Node)
		n.laidOut[r.Node] = true
	}
	return out, nil
}

func (n *nodes) whose(context.Context, tensorfusion.TenantsRequest) (tensorfusion.TenantsResult, error) {
	return tensorfusion.TenantsResult{}, nil
}

func (n *nodes) acquire(_ context.Context, r lease.AcquireRequest) (lease.AcquireResult, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.lockedBy[strings.TrimPrefix(r.Release, "gpunode-")] {
		return lease.AcquireResult{}, temporal.NewNonRetryableApplicationError("the Lease is held by GPUNode.prod.gpu-1", protocol.Locked, nil)
	}
	return lease.AcquireResult{Holder: "me"}, nil
}

func prepareHarness(t *testing.T, n *nodes) *harness {
	h := newHarness(t, n.cluster, map[string]any{
		node.ObserveActivity: func(context.Context, node.Request) (node.Result, error) { return node.Result{}, nil },
		node.KeepOffActivity: n.keepOff, node.GiveBackActivity: n.giveBack,
		node.CordonActivity: n.cordon, node.UncordonActivity: n.uncordon,
		gpu.PrepareActivity: n.lay, lease.AcquireActivity: n.acquire, tensorfusion.TenantsActivity: n.whose,
	})
	h.RegisterWorkflowWithOptions(gpunode.GPUNode, workflow.RegisterOptions{Name: protocol.GPUNode})
	h.OnActivity(gpu.PrepareActivity, mock.Anything, mock.Anything).AfterFn(func() time.Duration { return n.takes }).Return(n.lay)
	return h
}

func preparing(s plan.Strategy) Input {
	in := input(s)
	in.Prepare = &gpunode.Prepare{MIG: &gpu.MIGRequest{Config: "version: v1"}}
	return in
}

func inTwos() plan.Strategy {
	return plan.Strategy{Batch: plan.Amount{Count: 4}, MaxUnavailable: plan.Amount{Count: 2}, Gates: plan.GateNone}
}

func TestHostsArePreparedAndProvenBeforeTheirPodsAreReplaced(t *testing.T) {
	n := newNodes(t, 5)
	n.takes = time.Minute // so that two set-ups that may run at a time do
	r := prepareHarness(t, n).run(preparing(inTwos()))
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, each(5, tensorfusion.OutcomeReplaced), outcomes(r))
	for _, row := range r.Hosts {
		require.Equal(t, "1 action", row.Prepared)
		require.Equal(t, 2, n.validated[row.Name], "after the set-up, and after the replacement")
	}
	at := map[string]int{}
	for i, line := range n.log {
		at[line] = i
	}
	require.Less(t, at["prepare gpu-2"], at["replace [gpu-2 gpu-3]"])
	require.Less(t, at["prepare gpu-3"], at["replace [gpu-2 gpu-3]"])
	require.Greater(t, at["prepare gpu-4"], at["replace [gpu-2 gpu-3]"], "the next wave is left alone until then")
	require.Equal(t, 2, n.most, "as many nodes at a time as may be away")
	require.Empty(t, n.cordoned)
	require.Empty(t, n.kept)
	require.Empty(t, r.LeftBehind)
	require.Contains(t, r.Stages[4].Note, "4 prepared, 4 replaced")
}

// A layout laid over partitions that belong to tenants would take their GPUs
// away, whatever the plan says.
func TestTenantsPartitionsAreNotTouchedWhateverThePlanSays(t *testing.T) {
	for _, tenants := range []bool{false, true} {
		n := newNodes(t, 1)
		n.tenants = tenants
		require.Equal(t, protocol.OutcomeDone, prepareHarness(t, n).run(preparing(plan.Strategy{})).Outcome)
		require.Equal(t, tenants, n.modeOnly)
	}
}

func TestAHostThatCanNotBePreparedParksUntouchedAndNamesItsRun(t *testing.T) {
	n := newNodes(t, 2)
	n.busy["gpu-1"] = true
	h := prepareHarness(t, n)
	h.at(time.Hour, func() {
		w := h.waits(protocol.WaitParked, canary)
		require.Contains(t, w.Found, "a canary's failure always parks")
		f := w.Findings[0]
		require.Contains(t, f.Object, "set-up of host gpu-1 (run ")
		require.Contains(t, f.Object, canary+".1.1.prepare.gpu-1)")
		require.Equal(t, "stage prepare: GPU GPU-gpu-1: expected no client, found 2 clients", f.Found)
		require.Contains(t, f.Next, "stop them, then answer retry")
		require.Zero(t, n.deleted["gpu-1"])
		require.Empty(t, n.cordoned, "nothing was begun")
		require.Empty(t, n.kept)
		n.do(func() { delete(n.busy, "gpu-1") })
		h.signal(protocol.Retry, protocol.Answer{By: "ann"})
	})
	r := h.run(preparing(plan.Strategy{Gates: plan.GateNone}))
	require.Equal(t, each(2, tensorfusion.OutcomeReplaced), outcomes(r))
	require.Empty(t, n.cordoned)
	require.Empty(t, r.LeftBehind)
}

func TestAFailedSetUpCountsAgainstTheBudgetAndIsListed(t *testing.T) {
	n := newNodes(t, 5)
	n.broken["gpu-2"], n.lockedBy["gpu-4"] = true, true
	s := inTwos()
	s.Budget = plan.Budget{Total: plan.Amount{Count: 2}}
	r := prepareHarness(t, n).run(preparing(s))
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, with(with(each(5, tensorfusion.OutcomeReplaced), "gpu-2", tensorfusion.OutcomeFailed), "gpu-4", tensorfusion.OutcomeFailed), outcomes(r))
	require.Equal(t, protocol.Progress{Done: 3, Total: 5, Failed: 2}, r.Progress)
	require.Zero(t, n.deleted["gpu-2"]+n.deleted["gpu-4"])
	require.Contains(t, strings.Join(r.LeftBehind, "\n"), "Node gpu-2 stays cordoned")
	require.NotContains(t, strings.Join(r.LeftBehind, "\n"), "gpu-4", "the other run's node was not touched")
	for _, row := range r.Hosts {
		if row.Name == "gpu-4" {
			require.Contains(t, row.Failure.Found, "held by GPUNode.prod.gpu-1")
		}
	}

	n = newNodes(t, 5)
	n.broken["gpu-2"], n.broken["gpu-3"] = true, true
	h := prepareHarness(t, n)
	h.at(time.Hour, func() {
		require.Contains(t, h.waits(protocol.WaitParked, batch1).Found, "the budget is 1")
		h.signal(protocol.Abort, protocol.Answer{})
	})
	s.Budget = plan.Budget{Total: plan.Amount{Count: 1}}
	r = h.run(preparing(s))
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Len(t, r.LeftBehind, 4, "%v", r.LeftBehind) // of each host: the cordon, and the set-up that is half done
}

func TestASetUpRunThatWasEndedByForceIsNotTakenForAnOrdinaryEnd(t *testing.T) {
	n := newNodes(t, 2)
	h := prepareHarness(t, n)
	h.OnWorkflow(protocol.GPUNode, mock.Anything, mock.Anything).Return(func(_ workflow.Context, in gpunode.Input) (gpunode.Result, error) {
		if in.Node == "gpu-2" {
			return gpunode.Result{}, errors.New("terminated")
		}
		return gpunode.Result{Receipt: protocol.Receipt{Outcome: protocol.OutcomeDone}}, nil
	})
	in := preparing(plan.Strategy{Gates: plan.GateNone, Budget: plan.Budget{Total: plan.Amount{Count: 1}}})
	r := h.run(in)
	require.Equal(t, protocol.Progress{Done: 1, Total: 2, Failed: 1}, r.Progress)
	require.Zero(t, n.deleted["gpu-2"])
	require.Len(t, r.LeftBehind, 1)
	require.Contains(t, r.LeftBehind[0], "look whether Node gpu-2 is cordoned and foreign automation kept off it")
}

func TestAbortAndPauseWaitForAHostThatIsBeingPrepared(t *testing.T) {
	n := newNodes(t, 4)
	n.takes = 10 * time.Minute
	h := prepareHarness(t, n)
	h.at(15*time.Minute, func() { h.signal(protocol.Pause, protocol.Answer{By: "ann"}) })
	h.at(16*time.Minute, func() {
		require.Equal(t, protocol.Pause, h.status().Deferred)
		require.True(t, n.kept["gpu-1"])
	})
	h.at(3*time.Hour, func() {
		h.waits(protocol.WaitPaused, batch1)
		require.Equal(t, []string{"[gpu-1]"}, n.replaced(), "the canary's turn went to its end")
		h.signal(protocol.Resume, protocol.Answer{By: "ann"})
	})
	h.at(3*time.Hour+15*time.Minute, func() {
		require.True(t, n.cordoned["gpu-2"])
		h.signal(protocol.Abort, protocol.Answer{By: "ann"})
	})
	r := h.run(preparing(plan.Strategy{Batch: plan.Amount{Count: 1}, Gates: plan.GateNone}))
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Equal(t, each(2, tensorfusion.OutcomeReplaced), outcomes(r))
	require.Empty(t, n.cordoned)
	require.Empty(t, n.kept)
	require.Empty(t, r.LeftBehind)
}

func TestAHostIsNotBegunWhenItsSetUpDoesNotFitTheWindow(t *testing.T) {
	n := newNodes(t, 1)
	h := prepareHarness(t, n)
	h.at(time.Hour, func() {
		require.Contains(t, h.waits(protocol.WaitParked, canary).Found, "wave of canary needs 2h")
		require.Empty(t, n.cordoned)
		h.signal(protocol.Abort, protocol.Answer{})
	})
	in := preparing(plan.Strategy{})
	limit := minutes(120)
	in.Prepare.Limit = &limit
	in.Windows = []window.Spec{{Opens: "0 8 * * *", Duration: minutes(60)}}
	require.Equal(t, protocol.OutcomeAborted, h.run(in).Outcome)
}

func TestAWaveOfManyHostsIsPreparedInSmallerShards(t *testing.T) {
	n := newNodes(t, 71)
	r := prepareHarness(t, n).run(preparing(plan.Strategy{Batch: plan.Amount{Count: 70}, Gates: plan.GateNone}))
	require.Equal(t, each(71, tensorfusion.OutcomeReplaced), outcomes(r))
	require.Equal(t, 2, n.maxAway)
}

func TestHostsOnTargetHaveNoTurnAndAreNamed(t *testing.T) {
	n := newNodes(t, 3)
	n.renew("gpu-2")
	r := prepareHarness(t, n).run(preparing(plan.Strategy{Gates: plan.GateNone}))
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.False(t, n.laidOut["gpu-2"])
	require.Contains(t, strings.Join(r.Warnings, "\n"), "1 host came on target without a turn in this rollout and had no set-up: gpu-2")
}

func TestASetUpThatCanNotBeCarriedOutIsRefused(t *testing.T) {
	never := window.Duration(0)
	in := preparing(plan.Strategy{})
	in.Prepare = &gpunode.Prepare{Limit: &never}
	h := newHarness(t, newCluster(t, 1))
	h.ExecuteWorkflow(protocol.Rollout, in)
	var app *temporal.ApplicationError
	require.True(t, errors.As(h.GetWorkflowError(), &app))
	for _, want := range []string{"2 problems", "prepare declares neither", "prepare.limit is 0s"} {
		require.Contains(t, app.Message(), want)
	}

	in = workerInput()
	in.Prepare = preparing(plan.Strategy{}).Prepare
	h = newHarness(t, newCluster(t, 1))
	h.ExecuteWorkflow(protocol.Rollout, in)
	require.True(t, errors.As(h.GetWorkflowError(), &app))
	require.Contains(t, app.Message(), `prepare is set for component "worker"`)
}
