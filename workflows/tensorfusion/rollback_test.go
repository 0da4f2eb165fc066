package tensorfusion

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
)

func TestRollbackInspectsHoldsChecksAndAsks(t *testing.T) {
	i := newInstallation(t)
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		w := h.waits(protocol.WaitApproval, "plan")
		require.Contains(t, w.Found, "to revision 1")
		require.Equal(t, []string{"Acquire", "InspectRevision 1", "Hold nudge=false", "Preflight", "Diff"}, i.log)
		h.answer(protocol.Approve)
	})
	r := h.rollback(rollbackInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, []string{
		"lock", "revision", "hold", "preflight", "plan", "hold-nudge", "backup", "helm",
		"rollout.hypervisor.shared", "rollout.hypervisor.training", "policy", "verify", "receipt", "unlock",
	}, names(r.Stages), "CRDs stay")
	require.Contains(t, i.log, "Hold nudge=true", "2.17 would delete every hypervisor by itself")
	require.Equal(t, 1, i.releases[0].Intent.Chart.Revision)
	require.True(t, i.rolled[0].FixFirst, "broken nodes go first")
	require.Equal(t, asFound, i.policies[0].Before)
	require.Subset(t, r.LeftBehind, notUndone)
}

func TestRollbackPlanOnlyHoldsNothing(t *testing.T) {
	i := newInstallation(t)
	in := rollbackInput()
	in.PlanOnly = true
	r := newHarness(t, i).rollback(in)
	require.Equal(t, protocol.OutcomePlanned, r.Outcome)
	require.Equal(t, []string{"Acquire", "InspectRevision 1", "Preflight", "Diff", "Release"}, i.log)
}

func TestRollbackWithNothingToChangeBringsThePolicyBack(t *testing.T) {
	i := newInstallation(t)
	i.noChange = true
	r := newHarness(t, i).rollback(rollbackInput())
	require.Equal(t, protocol.OutcomeNoChange, r.Outcome)
	require.Contains(t, i.log, "SetPolicy restore")
	require.Equal(t, asFound, i.policies[0].Before)
	require.NotContains(t, i.log, "UpgradeRelease")
}

func TestARollbackThatFoundNothingToChangeSaysThatAutoUpdateStaysOff(t *testing.T) {
	i := newInstallation(t)
	i.noChange, i.policyRefused = true, true
	h := newHarness(t, i)
	h.at(time.Minute, func() { h.answer(protocol.Skip) })
	r := h.rollback(rollbackInput())
	require.Equal(t, protocol.OutcomeNoChange, r.Outcome)
	require.Contains(t, strings.Join(r.LeftBehind, "\n"), "pool tf-shared: auto update stays off")
}

// rejected takes an upgrade to the gate before helm, rejects it and answers
// rollback.
func rejected(h *harness) {
	h.i.forecast = []finding.Finding{{Row: "P11", Object: "4 hypervisor pods", Found: "go"}}
	h.mockRollback()
	h.at(time.Minute, func() {
		h.waits(protocol.WaitApproval, "helm")
		h.answer(protocol.Reject)
	})
	h.at(2*time.Minute, func() {
		require.ElementsMatch(h.t, []string{protocol.Approve, protocol.Rollback, protocol.Abort}, h.waits(protocol.WaitParked, "helm").Answers)
		h.answer(protocol.Rollback)
	})
}

func TestTheAnswerRollbackHandsPolicyAndLeaseOver(t *testing.T) {
	i := newInstallation(t)
	h := newHarness(t, i)
	rejected(h)
	r := h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeRolledBack, r.Outcome)
	require.Len(t, i.rollbacks, 1)
	in := i.rollbacks[0]
	require.Equal(t, 3, in.Revision, "as deployed before the Helm step")
	require.Equal(t, holder, in.Of.Holder)
	require.Equal(t, asFound, in.Of.Policy)
	require.Equal(t, "rollback", in.Of.Parent.Prefix)
	require.Equal(t, "2.16.3", r.Rollback.After["controller"])
	require.Equal(t, []string{"CRDs stay"}, r.LeftBehind, "what the rollback undid is not left behind")
	require.Equal(t, "Release", i.log[len(i.log)-1], "the parent gives its Lease back at the end")
}

func TestAnAbortedRollbackLeavesBothRunsTracesListed(t *testing.T) {
	i := newInstallation(t)
	i.rollbackEnd = protocol.Receipt{Outcome: protocol.OutcomeAborted, LeftBehind: []string{"release tf stands at revision 5 (1.8.6)"}}
	h := newHarness(t, i)
	rejected(h)
	h.at(3*time.Minute, func() {
		require.Contains(t, h.waits(protocol.WaitParked, "rollback").Found, "aborted before its end")
		h.answer(protocol.Abort)
	})
	r := h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	left := strings.Join(r.LeftBehind, "\n")
	require.Contains(t, left, "pool tf-shared: auto update stays off")
	require.Contains(t, left, "revision 5")
}

func TestRollbackBeforeAnythingWasFoundUndoesNothing(t *testing.T) {
	i := newInstallation(t)
	h := newHarness(t, i)
	h.mockRollback()
	h.OnActivity(kube.IdentifyActivity, mock.Anything, mock.Anything).After(time.Minute).Return(kube.IdentifyResult{UID: "uid-prod"}, nil)
	h.at(time.Second, func() { h.answer(protocol.Pause) })
	h.at(2*time.Minute, func() {
		h.waits(protocol.WaitPaused, "preflight")
		h.answer(protocol.Rollback)
	})
	r := h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeRolledBack, r.Outcome, "%+v", r.Ignored)
	require.Empty(t, i.rollbacks, "revision 0 would be the one before the deployed")
}

func TestAChildRollbackKeepsTheParentsLeaseAndPolicy(t *testing.T) {
	i := newInstallation(t)
	h := newHarness(t, i)
	in := rollbackInput()
	was := []tensorfusion.PoolPolicy{{Pool: "tf-shared", AutoClient: true}}
	in.Of = &Answered{Holder: "parent", Policy: was, Parent: protocol.Parent{WorkflowID: "p", RunID: "r", Prefix: "rollback"}}
	h.RegisterWorkflowWithOptions(Rollback, workflow.RegisterOptions{Name: protocol.TensorFusionRollback})
	h.OnSignalExternalWorkflow("default-test-namespace", "p", "r", protocol.SignalReport, mock.Anything).Maybe().Return(nil)
	h.at(time.Minute, func() { h.answer(protocol.Approve) })
	r := h.run(protocol.TensorFusionRollback, in)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.NotContains(t, i.log, "Acquire")
	require.NotContains(t, i.log, "Release")
	require.Equal(t, "parent", i.releases[0].Holder)
	require.Equal(t, was, i.policies[0].Before)
}

// undoing is a rollback that an upgrade answered with before its pools were of
// another template than h1.
func undoing(revision int) RollbackInput {
	in := rollbackInput()
	in.Of = &Answered{
		Holder: "parent", Policy: asFound, Parent: protocol.Parent{WorkflowID: "p", RunID: "r", Prefix: "rollback"},
		Revision: revision, Pools: pools("h1"), Youngest: youngest,
	}
	return in
}

func TestARollbackKeepsTheHostsThatTheUpgradeNeverReached(t *testing.T) {
	unsettled := undoing(1)
	unsettled.Of.Pools = pools("")
	for _, c := range []struct {
		name string
		in   RollbackInput
		now  string // the template once the old controller is back
		kept bool
		warn bool
	}{
		{"the former template is back", undoing(1), "h1", true, false},
		{"the controller makes pods otherwise now", undoing(1), "h2", false, true},
		{"not every host was of its template before", unsettled, "h1", false, false},
		{"another revision than the upgrade left", undoing(2), "h1", false, false},
		{"started alone", rollbackInput(), "h1", false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			i := newInstallation(t)
			i.now = c.now
			i.changes = []tensorfusion.ObjectChange{{Object: "TensorFusionCluster/tensor-fusion"}}
			h := newHarness(t, i)
			h.RegisterWorkflowWithOptions(Rollback, workflow.RegisterOptions{Name: protocol.TensorFusionRollback})
			h.OnSignalExternalWorkflow("default-test-namespace", "p", "r", protocol.SignalReport, mock.Anything).Maybe().Return(nil)
			h.at(time.Minute, func() { h.answer(protocol.Approve) })
			r := h.run(protocol.TensorFusionRollback, c.in)
			require.Equal(t, protocol.OutcomeDone, r.Outcome)
			goal := i.rolled[0].Goal
			require.Equal(t, helmBegan, goal.Since, "what the upgrade replaced is replaced again")
			require.Equal(t, c.kept, goal.Kept.Equal(youngest))
			require.Equal(t, c.kept || c.warn, len(i.undone) > 0, "the hold's change of the template goes with it")
			require.Equal(t, c.warn, strings.Contains(strings.Join(r.Warnings, " "), "every host is replaced"), r.Warnings)
		})
	}
}
