package rollout

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
)

func TestBadInputClosesWithEveryProblem(t *testing.T) {
	in := input(plan.Strategy{Batch: plan.Amount{Percent: 200}, Approvers: -1})
	in.Scope.Release.Name = ""
	in.Goal.PodName = ""
	h := newHarness(t, newCluster(t, 1))
	h.ExecuteWorkflow(protocol.Rollout, in)
	var app *temporal.ApplicationError
	require.True(t, errors.As(h.GetWorkflowError(), &app))
	require.Equal(t, protocol.BadInput, app.Type())
	for _, want := range []string{"4 problems", "scope.release", "strategy.batch.percent", "strategy.approvers", "goal.podName"} {
		require.Contains(t, app.Message(), want)
	}
}
