package tensorfusion

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

func TestUpgradeGoesThroughItsStagesInTheGuidesOrder(t *testing.T) {
	i := newInstallation(t)
	h := newHarness(t, i)
	r := h.upgrade(upgradeInput())
	require.Equal(t, []string{
		"lock", "preflight", "plan", "hold", "backup", "crds", "helm",
		"rollout.hypervisor.shared", "rollout.hypervisor.training", "policy", "verify", "receipt", "unlock",
	}, names(r.Stages))
	require.Equal(t, []string{
		"Acquire", "Preflight", "Diff",
		"Hold nudge=true", "CheckDrift",
		"Backup", "CheckDrift",
		"Hold assert", "ApplyCRDs", "CheckDrift",
		"Hold assert", "CheckDrift", "UpgradeRelease", "AwaitController", "Hold assert", "CheckDrift",
		"Hold assert", "rollout hypervisor shared", "CheckDrift",
		"Hold assert", "rollout hypervisor training", "CheckDrift",
		"SetPolicy restore", "CheckDrift",
		"Verify tf-shared,tf-training", "RunCanaryJob tf-shared shared-1", "RunCanaryJob tf-training training-1",
		"WriteReceipt", "Release",
	}, i.log)
	require.Equal(t, asFound, i.policies[0].Before, "the policy as found before the hold comes back")
	require.Equal(t, holder, i.releases[0].Holder)
	require.Equal(t, 3, i.releases[0].FromRevision)
}

func TestReceiptHoldsWhatProvesTheRun(t *testing.T) {
	i := newInstallation(t)
	r := newHarness(t, i).upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, "2.16.3", r.Before["controller"])
	require.Equal(t, "2.17.0", r.After["controller"])
	require.Equal(t, []string{"T04"}, r.Acknowledged)
	require.NotNil(t, r.Plan)
	require.Equal(t, r.PlanDigest, r.Plan.Digest)
	require.Len(t, r.Plan.Batches, 4, "canary and batch of both pools")
	require.Empty(t, r.LeftBehind)
	require.Len(t, r.Artifacts, 4, "diff, backup, receipt, its rows per host")
	stored := i.stored()
	require.Equal(t, r.PlanDigest, stored.PlanDigest)
	require.Nil(t, stored.Plan, "its diff is an artifact of its own")
	require.JSONEq(t, `[{"name":"shared-1","outcome":"replaced"},{"name":"training-1","outcome":"replaced"}]`, string(i.receipts[0].Hosts))
}

var proven = gpu.Result{Verdict: gpu.Pass, Proofs: []gpu.Proof{{Device: "GPU-1", Patterns: 3}}}

func (i *installation) probe(_ context.Context, r tensorfusion.CanaryJobRequest) (tensorfusion.CanaryJobResult, error) {
	i.record(tensorfusion.CanaryJobActivity, r.Pool, r.Node)
	out := tensorfusion.CanaryJobResult{Node: r.Node, Result: proven}
	if len(i.probes) > 0 {
		out.Result, i.probes = i.probes[0], i.probes[1:]
		out.Checks = []tensorfusion.Check{unmet("T20", finding.Stop)}
	}
	return out, nil
}

func TestTheReceiptHoldsTheLastAnswerOfEachPoolsProbe(t *testing.T) {
	i := newInstallation(t)
	bad := gpu.Result{Verdict: gpu.Unfit, Checks: []gpu.Check{{Name: "vGPU limit", Found: "granted"}}}
	i.probes = []gpu.Result{bad}
	h := newHarness(t, i)
	h.at(time.Hour, func() { h.answer(protocol.Retry) })
	r := h.upgrade(upgradeInput())
	require.Equal(t, []protocol.Probe{
		{Pool: "tf-shared", Node: "shared-1", Result: proven},
		{Pool: "tf-training", Node: "training-1", Result: proven},
	}, r.Probes)
	require.Equal(t, r.Probes, i.stored().Probes, "in the stored one too")

	i = newInstallation(t)
	i.probes = []gpu.Result{bad}
	h = newHarness(t, i)
	h.at(time.Hour, func() { h.answer(protocol.Abort) })
	r = h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Equal(t, []protocol.Probe{{Pool: "tf-shared", Node: "shared-1", Result: bad}}, r.Probes)
}

func TestComingStagesArePendingFromTheStart(t *testing.T) {
	i := newInstallation(t)
	i.checks = [][]tensorfusion.Check{{unmet("T05", finding.Stop)}, {{Row: "T05", OK: true}}}
	i.forecast = []finding.Finding{{Row: "P11", Object: "4 hypervisor pods", Found: "go"}}
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		require.Equal(t, []string{"lock", "preflight", "plan", "hold", "backup", "crds", "helm", "policy", "verify", "receipt"}, names(h.status().Stages))
		h.answer(protocol.Retry)
	})
	h.at(2*time.Minute, func() { // the preflight has seen the pools
		s := h.status()
		require.Equal(t, "helm", s.Stage)
		require.Equal(t, []string{"rollout.hypervisor.shared", "rollout.hypervisor.training", "policy", "verify", "receipt"}, names(s.Stages)[7:])
		h.answer(protocol.Abort)
	})
	r := h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
}

func TestBadInputClosesAtOnceWithEveryPath(t *testing.T) {
	i := newInstallation(t)
	h := newHarness(t, i)
	in := upgradeInput()
	in.Cluster, in.HypervisorImage, in.Policy = "", "", "sometimes"
	in.Values.Inline = map[string]any{"greptime": map[string]any{"password": "fake-0000"}}
	in.Rollouts = []Rollout{{Component: Hypervisor, Strategy: plan.Strategy{Batch: plan.Amount{Percent: 200}}}, {Component: Worker}}
	h.ExecuteWorkflow(protocol.TensorFusionUpgrade, in)
	var app *temporal.ApplicationError
	require.ErrorAs(t, h.GetWorkflowError(), &app)
	require.Equal(t, protocol.BadInput, app.Type())
	for _, path := range []string{"cluster", "hypervisorImage", "policy", "values.inline.greptime.password", "rollouts[0].strategy.batch", "rollouts[1].workers.acknowledgeLostSessions"} {
		assert.Contains(t, app.Message(), path)
	}
	require.NotContains(t, app.Message(), "fake-0000")
	require.Empty(t, i.log)
}

func TestALeaseInOtherHandsClosesAsLocked(t *testing.T) {
	i := newInstallation(t)
	i.taken = true
	h := newHarness(t, i)
	h.ExecuteWorkflow(protocol.TensorFusionUpgrade, upgradeInput())
	var app *temporal.ApplicationError
	require.ErrorAs(t, h.GetWorkflowError(), &app)
	require.Equal(t, protocol.Locked, app.Type())
	require.Contains(t, app.Message(), "held by run other")
	require.Equal(t, []string{"Acquire"}, i.log, "nothing else is asked, and nobody's Lease is given back")
}

func TestPlanOnlyStopsAfterThePlanAndNoChangeToo(t *testing.T) {
	in := upgradeInput()
	in.PlanOnly = true
	for _, c := range []struct {
		in       UpgradeInput
		noChange bool
		want     protocol.Outcome
	}{{in, false, protocol.OutcomePlanned}, {upgradeInput(), true, protocol.OutcomeNoChange}} {
		i := newInstallation(t)
		i.noChange = c.noChange
		r := newHarness(t, i).upgrade(c.in)
		require.Equal(t, c.want, r.Outcome)
		require.Equal(t, []string{"lock", "preflight", "plan", "unlock"}, names(r.Stages))
		require.Equal(t, []string{"Acquire", "Preflight", "Diff", "Release"}, i.log)
		require.NotEmpty(t, r.PlanDigest)
	}
}

func TestPreflightWaitsForWhatSettlesByItself(t *testing.T) {
	i := newInstallation(t)
	waiting := []tensorfusion.Check{unmet("P03", finding.Wait)}
	i.checks = [][]tensorfusion.Check{waiting, waiting, {{Row: "P03", OK: true}}}
	require.Equal(t, protocol.OutcomeDone, newHarness(t, i).upgrade(upgradeInput()).Outcome)
	require.Equal(t, 3, strings.Count(strings.Join(i.log, "\n"), "Preflight"))
}

func TestPreflightParksWhenNothingSettlesInTime(t *testing.T) {
	i := newInstallation(t)
	i.checks = [][]tensorfusion.Check{{unmet("P03", finding.Wait)}}
	h := newHarness(t, i)
	h.at(4*time.Minute, func() { require.Nil(t, h.status().WaitingFor) })
	h.at(6*time.Minute, func() {
		require.Contains(t, h.waits(protocol.WaitParked, "preflight").Found, "P03 object of P03")
		h.answer(protocol.Abort)
	})
	r := h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Empty(t, r.LeftBehind)
}

func TestAnOpenCheckParksAtOnceAndRetryRunsAllAgain(t *testing.T) {
	i := newInstallation(t)
	i.checks = [][]tensorfusion.Check{
		{unmet("T05", finding.Stop), {Row: "T04", Acknowledged: true, Findings: []finding.Finding{{Row: "T04"}}}},
		{{Row: "T05", OK: true}},
	}
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		w := h.waits(protocol.WaitParked, "preflight")
		require.Len(t, w.Findings, 1, "what the plan acknowledges does not park")
		require.Contains(t, w.Answers, protocol.Retry)
		require.NotContains(t, w.Answers, protocol.Skip)
		h.answer(protocol.Retry)
	})
	require.Equal(t, protocol.OutcomeDone, h.upgrade(upgradeInput()).Outcome)
}

func TestDriftParksAndRetryTakesTheNewReference(t *testing.T) {
	i := newInstallation(t)
	i.drift["5"] = []finding.Finding{{Row: "P12", Object: "hypervisor of gpu-1", Found: "another UID"}} // after helm
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		w := h.waits(protocol.WaitParked, "helm")
		require.Contains(t, w.Found, "after helm, 1 objects had changed")
		require.Contains(t, w.Answers, protocol.Rollback)
		h.answer(protocol.Retry)
	})
	require.Equal(t, protocol.OutcomeDone, h.upgrade(upgradeInput()).Outcome)
	require.Equal(t, "seen-4", i.drifts[4].Snapshot.Hypervisors["gpu-1"])
}

func TestABrokenHoldParksBeforeTheStep(t *testing.T) {
	i := newInstallation(t)
	i.broken = []finding.Finding{{Row: "P10", Object: "pool shared", Found: "put back to false"}}
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		require.Contains(t, h.waits(protocol.WaitParked, "crds").Found, "auto update had been switched on again before the CRDs")
		require.NotContains(t, i.log, "ApplyCRDs")
		h.answer(protocol.Retry)
	})
	require.Equal(t, protocol.OutcomeDone, h.upgrade(upgradeInput()).Outcome)
}

func TestWhatTheControllerRollsByItselfIsAskedForBeforeHelm(t *testing.T) {
	i := newInstallation(t)
	i.forecast = []finding.Finding{{Row: "P11", Object: "TensorFusionWorkload/apps/chat", Found: "its 2 workers are deleted together"}}
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		require.Contains(t, h.waits(protocol.WaitApproval, "helm").Found, "TensorFusionWorkload/apps/chat")
		require.NotContains(t, i.log, "UpgradeRelease")
		require.Contains(t, i.log, "ApplyCRDs")
		h.answer(protocol.Approve)
	})
	require.Equal(t, protocol.OutcomeDone, h.upgrade(upgradeInput()).Outcome)
	require.False(t, i.drifts[3].PlannedWorkers, "before the Helm step no worker may change")
	require.True(t, i.drifts[3].Allocations, "the last count before the controller restarts")
	require.True(t, i.drifts[4].PlannedWorkers, "after it they change as approved")
	require.False(t, i.drifts[4].Allocations)
}

func TestAbortListsWhatIsLeftBehind(t *testing.T) {
	i := newInstallation(t)
	i.drift["6"] = []finding.Finding{{Row: "P12", Object: "hypervisor of gpu-1", Found: "another UID"}} // after the first pool
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		h.waits(protocol.WaitParked, "rollout.hypervisor.shared")
		h.answer(protocol.Abort)
	})
	r := h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	left := strings.Join(r.LeftBehind, "\n")
	for _, want := range []string{
		"pool tf-shared: auto update stays off (it was hypervisor=true, worker=false, client=false)", "pool tf-training",
		"release tf stands at revision 4", "1 nodes run the hypervisor of the plan",
	} {
		assert.Contains(t, left, want)
	}
	require.Equal(t, []string{"closing-receipt", "unlock"}, names(r.Stages)[len(r.Stages)-2:])
	require.Equal(t, protocol.OutcomeAborted, i.stored().Outcome)
	require.Empty(t, i.policies, "auto update stays off")
}

func TestARolloutThatRunsAgainKeepsOneRowPerHost(t *testing.T) {
	i := newInstallation(t)
	i.drift["6"] = []finding.Finding{{Row: "P12", Object: "worker Pod/apps/x", Found: "gone"}}
	h := newHarness(t, i)
	h.at(time.Minute, func() { h.answer(protocol.Retry) })
	require.Equal(t, protocol.OutcomeDone, h.upgrade(upgradeInput()).Outcome)
	require.Len(t, i.rolled, 3)
	require.Equal(t, 1, strings.Count(string(i.receipts[0].Hosts), "shared-1"))
}

func TestPodsOfAnUnchangedTemplateAreProvenWhateverTheirAge(t *testing.T) {
	for _, c := range []struct {
		name          string
		template, now string
		changes       []tensorfusion.ObjectChange
		younger       bool
	}{
		{"only the controller's image changes", "h1", "h1", nil, false},
		{"the new controller makes pods otherwise", "h1", "h2", nil, true},
		{"some pods may be of an older template", "", "h1", nil, true},
		{"the cluster's object changes", "h1", "h1", []tensorfusion.ObjectChange{{Object: "TensorFusionCluster/tensor-fusion"}}, true},
		{"the provider changes", "h1", "h1", []tensorfusion.ObjectChange{{Object: "ProviderConfig/nvidia"}}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			i := newInstallation(t)
			i.template, i.now, i.changes = c.template, c.now, c.changes
			newHarness(t, i).upgrade(upgradeInput())
			require.Equal(t, c.younger, !i.rolled[0].Goal.Since.IsZero())
			known := c.template == "" || len(c.changes) > 0 // what the new controller does is not
			require.Equal(t, known, !i.planned[0].Goal.Since.IsZero(), "the plan shows the batches that will be")
		})
	}
}

func TestDriftAfterThePolicyParksWithAutoUpdateOff(t *testing.T) {
	i := newInstallation(t)
	i.drift["8"] = []finding.Finding{{Row: "P12", Object: "hypervisor of gpu-1", Found: "another UID"}} // the controller's work
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		h.waits(protocol.WaitParked, "policy")
		require.Equal(t, "Hold assert", i.log[len(i.log)-1], "the flags go off before anybody is asked")
		h.answer(protocol.Retry)
	})
	r := h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Len(t, i.policies, 2)
	require.Empty(t, r.LeftBehind)
}

func TestASkippedPolicyLeavesAutoUpdateOffAndSaysSo(t *testing.T) {
	i := newInstallation(t)
	i.policyRefused = true
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		require.Contains(t, h.waits(protocol.WaitParked, "policy").Answers, protocol.Skip)
		h.answer(protocol.Skip)
	})
	r := h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.NotEmpty(t, r.LeftBehind)
	require.Contains(t, r.LeftBehind[0], "auto update stays off")
}

// A host that a batch has replaced may not be replaced once more by something
// else, least of all when the policy comes back.
func TestWhatTheRunReplacedIsComparedFromThenOn(t *testing.T) {
	i := newInstallation(t)
	in := upgradeInput()
	in.Rollouts = append(in.Rollouts, Rollout{Component: Worker, Workers: &rollout.WorkerOptions{AcknowledgeLostSessions: true}})
	require.Equal(t, protocol.OutcomeDone, newHarness(t, i).upgrade(in).Outcome)
	var planned []string
	var workers []bool
	for _, d := range i.drifts {
		planned = append(planned, strings.Join(d.Planned, " "))
		workers = append(workers, d.PlannedWorkers)
	}
	// hold, backup, crds, before and after helm, two pools, their workers, policy
	require.Equal(t, []string{"", "", "", "", "", "shared-1", "training-1", "", "", ""}, planned)
	require.Equal(t, []bool{false, false, false, false, false, false, false, true, true, false}, workers)
}

func TestTheRunsMaxDurationHoldsForItsRollouts(t *testing.T) {
	i := newInstallation(t)
	in := upgradeInput()
	in.MaxDuration = window.Duration(2 * time.Hour)
	require.Equal(t, protocol.OutcomeDone, newHarness(t, i).upgrade(in).Outcome)
	require.Equal(t, time.Date(2026, 11, 2, 10, 0, 0, 0, time.UTC), i.rolled[0].Deadline.UTC())
	require.Equal(t, in.MaxDuration, i.rolled[0].MaxDuration)
}

func TestTheProbesNameFitsWhateverThePoolIsCalled(t *testing.T) {
	run := "0194b7c2-0000-0000-0000-000000000000"
	require.Equal(t, "0194b7c2-tf-shared", probeKey(run, "tf-shared"))
	long := strings.Repeat("a", 60)
	require.LessOrEqual(t, len(probeKey(run, long+"-1")), 40)
	require.NotEqual(t, probeKey(run, long+"-1"), probeKey(run, long+"-2"))
}
