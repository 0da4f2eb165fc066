package datastore

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/internal/workflowtest"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

const kind = "Check"

// check is a run on a datastore that a person lets go on.
func check(ctx workflow.Context, in input) (protocol.Receipt, error) {
	r, err := New(ctx, Options{Kind: kind, Site: in.Site})
	if err != nil {
		return protocol.Receipt{}, err
	}
	r.PlanOnly = in.PlanOnly
	outcome, err := r.Through(stage.Stage{Name: "check", Purpose: "look", Do: func(ctx workflow.Context, s *stage.Scope) error {
		return s.Gate(ctx, stage.Gate{Found: "a datastore"})
	}})
	if err != nil {
		return protocol.Receipt{}, err
	}
	if in.PlanOnly && outcome == protocol.OutcomeDone {
		outcome = protocol.OutcomePlanned
	}
	return r.Close(outcome, func(receipt *protocol.Receipt) {
		receipt.After = map[string]string{"db-0": "2.0"}
		receipt.Plan = &protocol.Plan{Changes: []protocol.PlannedChange{{Action: "replace", Object: "db-0"}}}
	}), nil
}

type input struct {
	Site     Site
	PlanOnly bool
}

// world is what the cluster and the artifact store have been asked for.
type world struct {
	log      []string
	stored   []tensorfusion.ReceiptRequest
	unstored error
}

func (w *world) write(_ context.Context, r tensorfusion.ReceiptRequest) (tensorfusion.ReceiptResult, error) {
	w.log = append(w.log, "receipt")
	if w.unstored != nil {
		return tensorfusion.ReceiptResult{}, w.unstored
	}
	w.stored = append(w.stored, r)
	return tensorfusion.ReceiptResult{Artifact: artifact.Ref{Name: "receipt.json", URL: "file:///run/receipt.json"}}, nil
}

// run takes a run to its end, which the answer brings.
func (w *world) run(t *testing.T, in input, answer string) (out protocol.Receipt) {
	h := workflowtest.New(t, workflowtest.Release{Name: "db", Namespace: "db-system", Say: func(what string) { w.log = append(w.log, what) }},
		map[string]any{kind: check}, map[string]any{tensorfusion.ReceiptActivity: w.write})
	h.OnSignalExternalWorkflow(mock.Anything, mock.Anything, mock.Anything, mock.Anything, mock.Anything).Return(nil)
	h.At(time.Hour, func() { h.Answer(answer) })
	h.Run(kind, in, &out)
	return out
}

func alone() input {
	return input{Site: Site{Target: kube.Target{Cluster: "prod"}, Namespace: "db-system", Release: "db"}}
}

func TestARunThatWasStartedAloneStoresItsReceiptUnderTheLease(t *testing.T) {
	for answer, outcome := range map[string]protocol.Outcome{protocol.Approve: protocol.OutcomeDone, protocol.Abort: protocol.OutcomeAborted} {
		var w world
		out := w.run(t, alone(), answer)
		require.Equal(t, outcome, out.Outcome)
		require.Equal(t, []string{"lock", "receipt", "unlock"}, w.log, answer)
		require.Equal(t, tensorfusion.Scope{
			Target: kube.Target{Cluster: "prod", UID: "uid-prod"}, Release: tensorfusion.Release{Name: "db", Namespace: "db-system"},
		}, w.stored[0].Scope, "the record of a run that has lost its Lease is kept too")
		require.Equal(t, out.RunID, w.stored[0].Key)
		require.Equal(t, []artifact.Ref{{Name: "receipt.json", URL: "file:///run/receipt.json"}}, out.Artifacts)

		var stored protocol.Receipt
		require.NoError(t, json.Unmarshal(w.stored[0].JSON, &stored))
		require.Equal(t, outcome, stored.Outcome)
		require.Equal(t, "ann", stored.Stages[1].Answers[0].By, "who approved")
		require.Equal(t, out.After, stored.After, "what only the run's workflow knows is in it")
		require.Equal(t, out.Plan, stored.Plan)
		require.Len(t, out.PlanDigest, 64)
		require.Equal(t, out.PlanDigest, stored.PlanDigest)
		require.Equal(t, out.PlanDigest, out.Plan.Digest)
	}
}

func TestAReceiptThatCanNotBeStoredKeepsNoRunFromItsEnd(t *testing.T) {
	w := world{unstored: finding.Finding{Object: "artifact store", Found: "no space left"}.Error(finding.Stop)}
	out := w.run(t, alone(), protocol.Approve)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "receipt", "unlock"}, w.log)
	require.Len(t, out.Warnings, 2, "the test's namespace has no search attributes")
	require.Contains(t, out.Warnings[1], "could not be stored: artifact store: no space left")
	require.Empty(t, out.Artifacts)
}

func TestAPlanLeavesNoReceiptInTheCluster(t *testing.T) {
	in := alone()
	in.PlanOnly = true
	for answer, outcome := range map[string]protocol.Outcome{protocol.Approve: protocol.OutcomePlanned, protocol.Abort: protocol.OutcomeAborted} {
		var w world
		out := w.run(t, in, answer)
		require.Equal(t, outcome, out.Outcome)
		require.Equal(t, []string{"lock", "unlock"}, w.log)
		require.NotEmpty(t, out.PlanDigest)
	}
}

func TestTheReceiptOfAChildIsItsParents(t *testing.T) {
	in := alone()
	in.Site.Target.UID, in.Site.Holder, in.Site.Parent = "uid-prod", "parent", &protocol.Parent{WorkflowID: "upgrade", Prefix: "nats"}
	var w world
	out := w.run(t, in, protocol.Approve)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Empty(t, w.log)
}
