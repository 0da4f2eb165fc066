package rollout

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/stage"
)

const upgrade = "upgrade"

// parent is the least run that has a Rollout as its child.
func parent(ctx workflow.Context, in Input) (Result, error) {
	run, err := stage.New(ctx, stage.Options{Kind: upgrade, Cluster: "prod", Object: "o"})
	if err != nil {
		return Result{}, err
	}
	const prefix = "rollout.hypervisor.shared"
	var out Result
	err = run.Execute(run.Context(), stage.Stage{Name: prefix, Mutates: true, Do: func(ctx workflow.Context, s *stage.Scope) error {
		return s.Child(ctx, prefix, func(ctx workflow.Context, p protocol.Parent) workflow.ChildWorkflowFuture {
			in.Parent = &p
			return workflow.ExecuteChildWorkflow(ctx, protocol.Rollout, in)
		}, &out)
	}})
	if err == nil {
		run.Close(protocol.OutcomeDone)
	}
	return out, err
}

func TestAsAChildItsStagesAndAnswersGoThroughTheParent(t *testing.T) {
	c := newCluster(t, 3)
	h := newHarness(t, c)
	h.RegisterWorkflowWithOptions(parent, workflow.RegisterOptions{Name: upgrade})
	h.at(time.Hour, func() {
		h.waits(protocol.WaitApproval, canary)
		require.Equal(t, protocol.Progress{Done: 1, Total: 3}, h.status().Progress)
		h.signal(protocol.Approve, approve())
	})
	in := input(plan.Strategy{Batch: plan.Amount{Count: 2}})
	in.Scope.Target.UID = "uid-prod"
	h.ExecuteWorkflow(upgrade, in)
	require.NoError(t, h.GetWorkflowError())
	var r Result
	require.NoError(t, h.GetWorkflowResult(&r))
	require.Equal(t, each(3, tensorfusion.OutcomeReplaced), outcomes(r))
	require.Equal(t, []string{"plan", "canary", "batch-1"}, names(r.Stages))
	require.NotContains(t, c.log, "lease taken", "the parent holds the Lease")
}

// An autoscaler may take the last node away while other pools are rolled.
func TestAPoolThatHasLostItsNodesIsNothingToDoForAChildAndAParkingAlone(t *testing.T) {
	h := newHarness(t, newCluster(t, 0))
	h.RegisterWorkflowWithOptions(parent, workflow.RegisterOptions{Name: upgrade})
	in := input(plan.Strategy{})
	in.Scope.Target.UID = "uid-prod"
	h.ExecuteWorkflow(upgrade, in)
	require.NoError(t, h.GetWorkflowError())
	var r Result
	require.NoError(t, h.GetWorkflowResult(&r))
	require.Equal(t, protocol.OutcomeNoChange, r.Outcome)
	require.Equal(t, []string{"pool shared has no GPU nodes any more: nothing is left to roll"}, r.Warnings)

	h = newHarness(t, newCluster(t, 0))
	h.at(time.Minute, func() {
		require.Contains(t, h.waits(protocol.WaitParked, "rollout.hypervisor.shared.plan").Found, "the pool has no hosts")
		h.signal(protocol.Abort, protocol.Answer{})
	})
	require.Equal(t, protocol.OutcomeAborted, h.run(input(plan.Strategy{})).Outcome)
}
