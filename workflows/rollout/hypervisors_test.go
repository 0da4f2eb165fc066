package rollout

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

const (
	canary = "rollout.hypervisor.shared.canary"
	batch1 = "rollout.hypervisor.shared.batch-1"
	batch2 = "rollout.hypervisor.shared.batch-2"
)

func approve() protocol.Answer { return protocol.Answer{Stage: canary, By: "ann"} }

func minutes(n int) window.Duration { return window.Duration(time.Duration(n) * time.Minute) }

func TestCanaryGateThenBatchesInWaves(t *testing.T) {
	c := newCluster(t, 7)
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		w := h.waits(protocol.WaitApproval, canary)
		require.Contains(t, w.Found, "1 replaced")
		require.Equal(t, protocol.Progress{Done: 1, Total: 7}, h.status().Progress)
		require.Equal(t, []string{"[gpu-1]"}, c.replaced(), "nothing goes on before the gate")
		h.signal(protocol.Approve, approve())
	})
	r := h.run(input(plan.Strategy{Batch: plan.Amount{Count: 3}, MaxUnavailable: plan.Amount{Count: 2}, SoakCanary: minutes(20)}))

	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, []string{"[gpu-1]", "[gpu-2 gpu-3]", "[gpu-4]", "[gpu-5 gpu-6]", "[gpu-7]"}, c.replaced())
	require.Equal(t, each(7, tensorfusion.OutcomeReplaced), outcomes(r))
	require.Equal(t, protocol.Progress{Done: 7, Total: 7}, r.Progress)
	require.Equal(t, []string{"lock", "hold", "rollout.hypervisor.shared.plan", canary, batch1, batch2, "receipt", "unlock"}, names(r.Stages))
	require.Equal(t, []string{"record stored", "lease given back"}, c.log[len(c.log)-2:])
	require.Equal(t, gpu.Pass, r.Hosts[0].Verdict)
	require.Equal(t, "gpu-1-0", r.Hosts[0].OldUID)
	require.Equal(t, "gpu-1-1", r.Hosts[0].NewUID)

	var receipt protocol.Receipt // what the command line reads
	require.NoError(t, h.GetWorkflowResult(&receipt))
	require.Equal(t, protocol.Rollout, receipt.Kind)
	require.Equal(t, "tensor-fusion-sys/tensor-fusion-sys", receipt.Object)
	require.NotEmpty(t, receipt.WorkflowID)
	require.True(t, receipt.Ended.After(receipt.Started))
	require.Equal(t, []string{"hosts.json", "receipt.json"}, []string{receipt.Artifacts[0].Name, receipt.Artifacts[1].Name})

	var stored Result
	var rows []HostRow
	require.NoError(t, json.Unmarshal(c.stored[0].JSON, &stored))
	require.NoError(t, json.Unmarshal(c.stored[0].Hosts, &rows))
	require.Equal(t, r.RunID, c.stored[0].Key)
	require.Equal(t, r.Hosts, rows)
	require.Equal(t, protocol.OutcomeDone, stored.Outcome)
	require.Equal(t, r.Progress, stored.Progress)
	require.Equal(t, "ann", stored.Stages[3].Answers[0].By)
	require.Empty(t, stored.Hosts, "the ConfigMap has no room for them")
}

func TestCanaryFailureParksAndRetrySucceedsAfterRepair(t *testing.T) {
	c := newCluster(t, 3)
	c.stuck["gpu-1"] = true
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		w := h.waits(protocol.WaitParked, canary)
		require.Contains(t, w.Found, "a canary's failure always parks")
		require.NotContains(t, w.Answers, protocol.Skip)
		require.Equal(t, "GPUNode/gpu-1", w.Findings[0].Object)
		c.do(func() { delete(c.stuck, "gpu-1") })
		h.signal(protocol.Retry, protocol.Answer{By: "ann"})
	})
	h.at(2*time.Hour, func() { h.signal(protocol.Approve, approve()) })
	r := h.run(input(plan.Strategy{Batch: plan.Amount{Count: 5}, Budget: plan.Budget{Total: plan.Amount{Count: 3}}}))
	require.Equal(t, each(3, tensorfusion.OutcomeReplaced), outcomes(r))
	require.Equal(t, 2, c.deleted["gpu-1"])
	require.Nil(t, r.Hosts[0].Failure)
}

func TestBudgetToleratesThenParks(t *testing.T) {
	c := newCluster(t, 7)
	c.stuck["gpu-2"], c.stuck["gpu-4"] = true, true
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		w := h.waits(protocol.WaitParked, batch2)
		require.Contains(t, w.Found, "2 hosts failed in all, the budget is 1: gpu-2, gpu-4")
		require.Equal(t, []string{"[gpu-1]", "[gpu-2 gpu-3]", "[gpu-4 gpu-5]"}, c.replaced())
		require.Equal(t, protocol.Progress{Done: 3, Total: 7, Failed: 2}, h.status().Progress)
		c.do(func() { delete(c.stuck, "gpu-4") })
		h.signal(protocol.Retry, protocol.Answer{Stage: batch2})
	})
	in := input(plan.Strategy{Batch: plan.Amount{Count: 2}, Budget: plan.Budget{Total: plan.Amount{Count: 1}}, Gates: plan.GateNone})
	r := h.run(in)
	require.Equal(t, with(each(7, tensorfusion.OutcomeReplaced), "gpu-2", tensorfusion.OutcomeFailed), outcomes(r))
	require.Equal(t, protocol.Progress{Done: 6, Total: 7, Failed: 1}, r.Progress)
}

func TestSkippedBatchIsLeftAndSaidSo(t *testing.T) {
	c := newCluster(t, 5)
	c.stuck["gpu-2"] = true
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		h.waits(protocol.WaitParked, batch1)
		h.signal(protocol.Skip, protocol.Answer{Stage: batch1, By: "ann"})
	})
	r := h.run(input(plan.Strategy{Batch: plan.Amount{Count: 2}, MaxUnavailable: plan.Amount{Count: 1}, Gates: plan.GateNone}))
	want := with(with(each(5, tensorfusion.OutcomeReplaced), "gpu-2", OutcomeLeft), "gpu-3", OutcomeLeft)
	require.Equal(t, want, outcomes(r))
	require.Equal(t, protocol.Skipped, states(r.Stages)[batch1])
	require.Zero(t, c.deleted["gpu-3"])
}

func TestSpontaneousReplacementIsProgress(t *testing.T) {
	c := newCluster(t, 4)
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		h.waits(protocol.WaitApproval, canary)
		c.do(func() { c.renew("gpu-3"); c.pods["gpu-4"].uid = "gpu-4-by-hand" })
		h.signal(protocol.Approve, approve())
	})
	r := h.run(input(plan.Strategy{Batch: plan.Amount{Count: 3}}))
	require.Equal(t, with(each(4, tensorfusion.OutcomeReplaced), "gpu-3", tensorfusion.OutcomeAlready), outcomes(r))
	require.Zero(t, c.deleted["gpu-3"])
	require.Equal(t, 1, c.validated["gpu-3"], "its agent has to prove it all the same")
	require.Equal(t, 1, c.deleted["gpu-4"], "another pod that is not on target is the new target")
}

func TestFlagFlippedIsPutBackAndParks(t *testing.T) {
	c := newCluster(t, 3)
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		c.do(func() { c.flag = true })
		h.signal(protocol.Approve, approve())
	})
	h.at(2*time.Hour, func() {
		w := h.waits(protocol.WaitParked, batch1)
		require.Contains(t, w.Found, "autoUpdateHypervisor=true")
		require.False(t, c.flag)
		require.Equal(t, []string{"[gpu-1]"}, c.replaced())
		h.signal(protocol.Retry, protocol.Answer{})
	})
	r := h.run(input(plan.Strategy{Batch: plan.Amount{Count: 3}}))
	require.Equal(t, each(3, tensorfusion.OutcomeReplaced), outcomes(r))
	require.Len(t, r.Drift, 1)
}

func TestPauseHoldsBetweenWaves(t *testing.T) {
	c := newCluster(t, 3)
	c.took = 10 * time.Minute
	h := newHarness(t, c)
	h.at(15*time.Minute, func() {
		h.signal(protocol.Pause, protocol.Answer{By: "ann"})
	})
	h.at(16*time.Minute, func() { require.Equal(t, "wave of batch-1", h.status().Section) })
	h.at(2*time.Hour, func() {
		h.waits(protocol.WaitPaused, batch1)
		require.Equal(t, []string{"[gpu-1]", "[gpu-2]"}, c.replaced(), "the wave in progress ended, the next did not begin")
		h.signal(protocol.Resume, protocol.Answer{By: "ann"})
	})
	in := input(plan.Strategy{Batch: plan.Amount{Count: 2}, MaxUnavailable: plan.Amount{Count: 1}, Gates: plan.GateNone})
	require.Equal(t, each(3, tensorfusion.OutcomeReplaced), outcomes(h.run(in)))
}

func TestAWaveAfterALongWaitLooksAgainFirst(t *testing.T) {
	c := newCluster(t, 3)
	c.took = 10 * time.Minute
	h := newHarness(t, c)
	h.at(15*time.Minute, func() { h.signal(protocol.Pause, protocol.Answer{By: "ann"}) })
	h.at(9*time.Hour, func() {
		h.waits(protocol.WaitPaused, batch1)
		c.do(func() { c.flag = true }) // by day, while nobody of ours looked
		h.signal(protocol.Resume, protocol.Answer{By: "ann"})
	})
	h.at(10*time.Hour, func() {
		w := h.waits(protocol.WaitParked, batch1)
		require.Contains(t, w.Found, "autoUpdateHypervisor=true")
		require.Equal(t, []string{"[gpu-1]", "[gpu-2]"}, c.replaced(), "nothing was deleted on the word of yesterday")
		h.signal(protocol.Retry, protocol.Answer{})
	})
	in := input(plan.Strategy{Batch: plan.Amount{Count: 2}, MaxUnavailable: plan.Amount{Count: 1}, Gates: plan.GateNone})
	require.Equal(t, each(3, tensorfusion.OutcomeReplaced), outcomes(h.run(in)))
}

func TestWindowClosesInTheMiddleOfABatch(t *testing.T) {
	c := newCluster(t, 3)
	c.took = 25 * time.Minute
	h := newHarness(t, c) // starts at 08:00, the window is open until 09:00
	h.at(2*time.Hour, func() {
		w := h.waits(protocol.WaitWindow, batch1)
		require.Equal(t, time.Date(2026, 11, 3, 8, 0, 0, 0, time.UTC), w.Until.UTC())
		require.Equal(t, []string{"[gpu-1]", "[gpu-2]"}, c.replaced())
	})
	in := input(plan.Strategy{Batch: plan.Amount{Count: 2}, MaxUnavailable: plan.Amount{Count: 1}, Gates: plan.GateNone, HostTimeout: minutes(30)})
	in.Windows = []window.Spec{{Opens: "0 8 * * *", Duration: minutes(60)}}
	require.Equal(t, each(3, tensorfusion.OutcomeReplaced), outcomes(h.run(in)))
	require.True(t, h.Now().After(time.Date(2026, 11, 3, 8, 0, 0, 0, time.UTC)))
}

func TestAbortInsideAWaveWaitsForItsEnd(t *testing.T) {
	c := newCluster(t, 4)
	c.took = 10 * time.Minute
	h := newHarness(t, c)
	h.at(12*time.Minute, func() { h.signal(protocol.Abort, protocol.Answer{By: "ann"}) })
	h.at(13*time.Minute, func() {
		require.Equal(t, protocol.Abort, h.status().Deferred)
		require.Equal(t, 1, c.away)
	})
	r := h.run(input(plan.Strategy{Batch: plan.Amount{Count: 2}, Gates: plan.GateNone}))
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	want := each(3, tensorfusion.OutcomeReplaced) // proven to the end; gpu-4 was never touched
	require.Equal(t, want, outcomes(r))
	require.Equal(t, []string{"record stored", "lease given back"}, c.log[len(c.log)-2:])
	require.Empty(t, r.LeftBehind)
}

func TestRejectedGateParksAndAbortEndsIt(t *testing.T) {
	c := newCluster(t, 3)
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		h.signal(protocol.Reject, protocol.Answer{Stage: canary, By: "ann", Comment: "latency doubled"})
	})
	h.at(2*time.Hour, func() {
		w := h.waits(protocol.WaitParked, canary)
		require.Contains(t, w.Found, "latency doubled")
		h.signal(protocol.Abort, protocol.Answer{})
	})
	r := h.run(input(plan.Strategy{}))
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Equal(t, []string{"[gpu-1]"}, c.replaced())
}

func TestEverythingOnTargetIsNoChange(t *testing.T) {
	c := newCluster(t, 3)
	for _, n := range c.names {
		c.renew(n)
	}
	r := newHarness(t, c).run(input(plan.Strategy{}))
	require.Equal(t, protocol.OutcomeNoChange, r.Outcome)
	require.Equal(t, each(3, tensorfusion.OutcomeAlready), outcomes(r))
	require.Empty(t, c.deleted)
	require.Equal(t, map[string]int{"gpu-1": 1, "gpu-2": 1, "gpu-3": 1}, c.validated, "on target is not proven")
}

func TestFleetContinuesAsNewBetweenBatchesAndKeepsItsRecord(t *testing.T) {
	c := newCluster(t, 450)
	c.stuck["gpu-7"] = true
	in := input(plan.Strategy{Batch: plan.Amount{Count: 230}, Gates: plan.GateNone, Budget: plan.Budget{Total: plan.Amount{Count: 2}}})
	runs := 0
	for {
		runs++
		require.Less(t, runs, 5)
		h := newHarness(t, c)
		h.ExecuteWorkflow(protocol.Rollout, in)
		next, again := h.continued()
		if again {
			in = next
			continue
		}
		require.NoError(t, h.GetWorkflowError())
		var r Result
		require.NoError(t, h.GetWorkflowResult(&r))
		require.Equal(t, with(each(450, tensorfusion.OutcomeReplaced), "gpu-7", tensorfusion.OutcomeFailed), outcomes(r))
		require.Equal(t, protocol.Progress{Done: 449, Total: 450, Failed: 1}, r.Progress)
		require.Equal(t, []string{"lock", "hold", "rollout.hypervisor.shared.plan", canary, batch1, batch2, "receipt", "unlock"}, names(r.Stages))
		break
	}
	require.Equal(t, 2, runs)
	require.Len(t, c.replaced(), 1+2+2, "batches of 230 and 219 hosts are two shards each")
	require.Equal(t, 2, c.maxAway, "the shards of a wave run at once")
}

func TestStrategyThatDoesNotFitThePoolParksBeforeAnythingIsTouched(t *testing.T) {
	c := newCluster(t, 2)
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		w := h.waits(protocol.WaitParked, "rollout.hypervisor.shared.plan")
		require.Contains(t, w.Found, "canary.count is 3, more than the pool's 2 hosts")
		h.signal(protocol.Abort, protocol.Answer{})
	})
	require.Equal(t, protocol.OutcomeAborted, h.run(input(plan.Strategy{Canary: &plan.Canary{Count: 3}})).Outcome)
	require.Empty(t, c.replaced())
}

func TestTheParentsDeadlineParksTheRolloutBetweenItsBatches(t *testing.T) {
	c := newCluster(t, 4)
	h := newHarness(t, c)
	in := input(plan.Strategy{Batch: plan.Amount{Count: 1}, SoakBatch: window.Duration(10 * time.Minute), Gates: plan.GateNone})
	in.Deadline, in.MaxDuration = h.Now().Add(5*time.Minute), window.Duration(time.Hour)
	h.at(30*time.Minute, func() {
		require.Contains(t, h.status().WaitingFor.Found, "max duration of 1h")
		require.Less(t, len(c.deleted), 4)
		h.signal(protocol.Retry, protocol.Answer{})
	})
	require.Equal(t, protocol.OutcomeDone, h.run(in).Outcome)
}
