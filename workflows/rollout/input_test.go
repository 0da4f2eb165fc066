package rollout

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/tensorfusion"
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

// Started alone, nobody else has accepted that no GPU call proves the hosts.
func TestARolloutAloneWithoutValidationMustBeAcknowledgedAndSaysSo(t *testing.T) {
	for _, mode := range []string{ValidateNone, ValidateCanaryJob} {
		in := input(plan.Strategy{Gates: plan.GateNone, Canary: &plan.Canary{}})
		in.Validation = mode
		h := newHarness(t, newCluster(t, 2))
		h.ExecuteWorkflow(protocol.Rollout, in)
		var app *temporal.ApplicationError
		require.True(t, errors.As(h.GetWorkflowError(), &app), mode)
		require.Equal(t, protocol.BadInput, app.Type())
		require.Contains(t, app.Message(), "validation is "+mode)
		require.Contains(t, app.Message(), `add "validation" to acknowledge`)

		in.Acknowledge = []string{AcknowledgeValidation}
		r := newHarness(t, newCluster(t, 2)).run(in)
		require.Equal(t, each(2, tensorfusion.OutcomeReplaced), outcomes(r))
		said := r.Warnings[len(r.Warnings)-1]
		require.Contains(t, said, "validation is "+mode)
		require.Contains(t, said, "2 of pool shared")

		in.Component = Client // validates nothing, so there is nothing to accept
		in.Acknowledge = nil
		require.Empty(t, in.Validate())
	}
	in := input(plan.Strategy{})
	require.Empty(t, in.Validate())
	in.Acknowledge = []string{"T20"}
	require.Equal(t, "acknowledge[0]", in.Validate()[0].Path)
	in.Acknowledge, in.Validation, in.Parent = nil, ValidateNone, &protocol.Parent{}
	require.Empty(t, in.Validate(), "the run that starts it was asked")
}

// T27: an explicit 0 is refused. It must not become the default, and what is
// left out must.
func TestZerosAreRefusedAndWhatIsLeftOutTakesItsDefault(t *testing.T) {
	for options, path := range map[string]string{
		`"workers":{"acknowledgeLostSessions":true,"batchPercentage":0}`:    "workers.batchPercentage",
		`"workers":{"acknowledgeLostSessions":true,"batchPercentage":-1}`:   "workers.batchPercentage",
		`"workers":{"acknowledgeLostSessions":true,"batchPercentage":150}`:  "workers.batchPercentage",
		`"workers":{"acknowledgeLostSessions":true,"stall":"0s"}`:           "workers.stall",
		`"workers":{"acknowledgeLostSessions":true,"batchInterval":"0s"}`:   "workers.batchInterval",
		`"workers":{"acknowledgeLostSessions":true,"batchInterval":"-30s"}`: "workers.batchInterval",
		`"workers":{}`:                      "workers.acknowledgeLostSessions",
		`"clients":{"perOwner":0}`:          "clients.perOwner",
		`"clients":{"perOwner":-2}`:         "clients.perOwner",
		`"clients":{"limit":"0s"}`:          "clients.limit",
		`"clients":{"leave":["web"]}`:       "clients.leave[0]",
		`"clients":{"leave":["a/b/c","/"]}`: "clients.leave[1]",
	} {
		in := input(plan.Strategy{})
		in.Component = options[1:7]
		require.NoError(t, json.Unmarshal([]byte("{"+options+"}"), &in))
		ps := in.Validate()
		require.Len(t, ps, 1, options)
		require.Equal(t, path, ps[0].Path)
	}
	in := workerInput()
	require.Empty(t, in.Validate())
	w := in.withDefaults().Workers
	require.EqualValues(t, 20, *w.BatchPercentage)
	require.Equal(t, 10*time.Minute, w.Stall.D())
	require.Zero(t, *w.BatchInterval, "the pool's own")
	in.Component, in.Workers = Client, nil
	require.Empty(t, in.Validate())
	require.Equal(t, 1, *in.withDefaults().Clients.PerOwner)
	require.Equal(t, 10*time.Minute, in.withDefaults().Clients.Limit.D())
}

// Workers and clients go by a strategy too: its approvers and its duration.
func TestTheStrategyOfEveryComponentIsChecked(t *testing.T) {
	for _, component := range []string{Hypervisor, Worker, Client} {
		in := workerInput()
		in.Component, in.Strategy = component, plan.Strategy{Approvers: -1}
		ps := in.Validate()
		require.Len(t, ps, 1)
		require.Equal(t, "strategy.approvers", ps[0].Path)
	}
}
