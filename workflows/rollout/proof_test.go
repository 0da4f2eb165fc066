package rollout

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
)

func TestBadVerdictIsNotForgottenByRetry(t *testing.T) {
	c := newCluster(t, 2)
	c.verdict["gpu-1"] = gpu.ResetNeeded
	c.lost["gpu-1"] = true
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		w := h.waits(protocol.WaitParked, canary)
		require.Contains(t, w.Findings[0].String(), "verdict resetNeeded: cuda-memory of GPU-gpu-1: expected no error, found error 2")
		h.signal(protocol.Retry, protocol.Answer{}) // nothing was repaired; the pod looks fine
	})
	h.at(2*time.Hour, func() {
		h.waits(protocol.WaitParked, canary)
		require.Equal(t, 2, c.validated["gpu-1"])
		require.Equal(t, 1, c.deleted["gpu-1"], "the new pod is on target: it is validated, not replaced again")
		b := c.baselines["gpu-1"]
		require.Len(t, b.Devices, 1, "the GPU seen before the first attempt is still asked for")
		require.Equal(t, "0", b.Readings["xids"], "and every reading of then")
		require.Zero(t, b.KernelLog.Sequence, "the log is read from then on")
		c.do(func() { delete(c.verdict, "gpu-1") })
		h.signal(protocol.Retry, protocol.Answer{})
	})
	h.at(3*time.Hour, func() { h.signal(protocol.Approve, approve()) })
	r := h.run(input(plan.Strategy{}))
	require.Equal(t, gpu.Pass, r.Hosts[0].Verdict)
	require.Equal(t, protocol.Progress{Done: 2, Total: 2}, r.Progress)
	for _, row := range r.Hosts {
		require.Nil(t, row.Baseline, "baselines are no part of the result")
	}
}

func TestWhatThePlanExpectsOfAHostReachesItsAgent(t *testing.T) {
	c := newCluster(t, 1)
	in := input(plan.Strategy{})
	in.Expect = &gpu.Expect{Driver: "580.95.05", TensorFusion: &gpu.TensorFusionHost{Port: 8001, Pods: []string{"team/app"}}}
	require.Equal(t, protocol.OutcomeDone, newHarness(t, c).run(in).Outcome)
	require.Equal(t, in.Expect, c.expected["gpu-1"])
	require.NotContains(t, c.log, "ask of [gpu-1]", "the plan leaves nothing out")
}

func TestWhatOnlyTheClusterKnowsOfTensorFusionIsAskedOnceForAllHostsOfAWave(t *testing.T) {
	c := newCluster(t, 3)
	for i, name := range c.names {
		c.known[name] = tensorfusion.GPUHost{Port: 8100 + i, Pods: []string{"team/on-" + name}}
	}
	in := input(plan.Strategy{Gates: plan.GateNone, Batch: plan.Amount{Count: 2}, MaxUnavailable: plan.Amount{Count: 2}})
	in.Expect = &gpu.Expect{TensorFusion: &gpu.TensorFusionHost{ShmMiB: 2048}}
	require.Equal(t, protocol.OutcomeDone, newHarness(t, c).run(in).Outcome)
	for i, name := range c.names {
		require.Equal(t, &gpu.TensorFusionHost{ShmMiB: 2048, Port: 8100 + i, Pods: []string{"team/on-" + name}}, c.expected[name].TensorFusion)
	}
	at := slices.Index(c.log, "ask of [gpu-2 gpu-3]")
	require.Greater(t, at, slices.Index(c.log, "replace [gpu-2 gpu-3]"), "pods that live when the agents look")

	c = newCluster(t, 1)
	c.untold = finding.Finding{Object: "cluster prod", Expected: "uid a", Found: "uid b"}.Error(finding.Stop)
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		f := h.waits(protocol.WaitParked, canary).Findings[0]
		require.Contains(t, f.String(), "cluster prod: expected uid a, found uid b")
		require.Contains(t, f.Why, "nothing proves that its GPUs compute")
		c.do(func() { c.untold = nil })
		h.signal(protocol.Retry, protocol.Answer{})
	})
	require.Equal(t, protocol.OutcomeDone, h.run(in).Outcome)
	require.Len(t, slices.DeleteFunc(c.log, func(l string) bool { return l != "ask of [gpu-1]" }), 2)
	require.Equal(t, "0", c.baselines["gpu-1"].Readings["xids"], "the baseline of before is not lost")
}

// The agent of another machine, or of a boot that the Node object is not of, must
// not speak for the host.
func TestAnAgentOfAnotherBootThanTheNodesDoesNotSpeakForTheHost(t *testing.T) {
	c := newCluster(t, 1)
	c.boots["gpu-1"], c.booted["gpu-1"] = "boot-1", "boot-of-another-machine"
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		f := h.waits(protocol.WaitParked, canary).Findings[0]
		require.Contains(t, f.String(), "boot of node gpu-1: expected boot-1, found boot-of-another-machine")
		require.Zero(t, c.deleted["gpu-1"], "no baseline, so the pod is not touched")
		c.do(func() { c.booted["gpu-1"] = "boot-1"; c.stuck["gpu-1"] = true })
		h.signal(protocol.Retry, protocol.Answer{})
	})
	h.at(2*time.Hour, func() {
		h.waits(protocol.WaitParked, canary)
		require.Equal(t, 1, c.deleted["gpu-1"])
		// The host is rebooted: its agent is there before its kubelet tells.
		c.do(func() { c.booted["gpu-1"] = "boot-2"; delete(c.stuck, "gpu-1"); c.pods["gpu-1"].notReady = "" })
		h.signal(protocol.Retry, protocol.Answer{})
	})
	h.at(3*time.Hour, func() {
		f := h.waits(protocol.WaitParked, canary).Findings[0]
		require.Contains(t, f.String(), "expected boot-1, found boot-2")
		require.Zero(t, c.validated["gpu-1"])
		c.do(func() { c.boots["gpu-1"] = "boot-2" })
		h.signal(protocol.Retry, protocol.Answer{})
	})
	r := h.run(input(plan.Strategy{Gates: plan.GateNone}))
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, 1, c.validated["gpu-1"])
	require.Equal(t, 1, c.deleted["gpu-1"])
	require.Equal(t, "0", c.baselines["gpu-1"].Readings["xids"], "it is compared with what was before the first attempt")

	c = newCluster(t, 1)
	c.boots["gpu-1"], c.booted["gpu-1"] = "boot-1", "boot-1"
	c.reboots["gpu-1"] = "boot-2"
	require.Equal(t, protocol.OutcomeDone, newHarness(t, c).run(input(plan.Strategy{})).Outcome, "a reboot within the host's turn that its kubelet has told")
	require.Equal(t, 1, c.validated["gpu-1"])
}

func TestDegradedIsAWarningUnlessStrict(t *testing.T) {
	c := newCluster(t, 1)
	c.verdict["gpu-1"] = gpu.Degraded
	r := newHarness(t, c).run(input(plan.Strategy{}))
	require.Equal(t, protocol.Progress{Done: 1, Total: 1}, r.Progress)
	require.Contains(t, r.Warnings, "host gpu-1: degraded: cuda-memory of GPU-gpu-1: expected no error, found error 2")

	c = newCluster(t, 1)
	c.verdict["gpu-1"] = gpu.Degraded
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		h.waits(protocol.WaitParked, canary)
		h.signal(protocol.Abort, protocol.Answer{})
	})
	in := input(plan.Strategy{})
	in.Strict = true
	require.Equal(t, protocol.OutcomeAborted, h.run(in).Outcome)
}

func TestProvenHostThatBreaksDuringTheSoakParks(t *testing.T) {
	c := newCluster(t, 2)
	h := newHarness(t, c)
	h.at(10*time.Minute, func() { c.do(func() { c.pods["gpu-1"].notReady = "GPU is missing" }) })
	h.at(time.Hour, func() {
		w := h.waits(protocol.WaitParked, canary)
		require.Contains(t, w.Findings[0].String(), "broke after it was on target: GPU is missing")
		h.signal(protocol.Abort, protocol.Answer{})
	})
	r := h.run(input(plan.Strategy{SoakCanary: minutes(30)}))
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Equal(t, map[string]string{"gpu-1": tensorfusion.OutcomeFailed}, outcomes(r))
}

func TestHostWithoutAgentFailsUntouchedAndNamesTheQueue(t *testing.T) {
	c := newCluster(t, 2)
	c.silent["gpu-1"] = true
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		w := h.waits(protocol.WaitParked, canary)
		require.Contains(t, w.Findings[0].Expected, "gpu/prod/gpu-1")
		require.Contains(t, w.Findings[0].Found, "nobody polled it for 2m0s")
		require.Zero(t, c.deleted["gpu-1"])
		c.do(func() { delete(c.silent, "gpu-1") })
		h.signal(protocol.Retry, protocol.Answer{})
	})
	h.at(2*time.Hour, func() { h.signal(protocol.Approve, approve()) })
	require.Equal(t, each(2, tensorfusion.OutcomeReplaced), outcomes(h.run(input(plan.Strategy{}))))
}

func TestHostsOfAFailedShardAreValidatedWhenTheyAreFoundOnTarget(t *testing.T) {
	c := newCluster(t, 2)
	c.breakShard = finding.Finding{Object: "cluster prod", Expected: "uid a", Found: "uid b"}.Error(finding.Stop)
	h := newHarness(t, c)
	h.at(time.Hour, func() {
		w := h.waits(protocol.WaitParked, canary)
		require.Contains(t, w.Found, "cluster prod: expected uid a, found uid b")
		require.Zero(t, c.validated["gpu-1"])
		h.signal(protocol.Retry, protocol.Answer{})
	})
	h.at(2*time.Hour, func() { h.signal(protocol.Approve, approve()) })
	r := h.run(input(plan.Strategy{}))
	require.Equal(t, 1, c.validated["gpu-1"])
	require.Equal(t, 1, c.deleted["gpu-1"])
	require.Equal(t, gpu.Pass, r.Hosts[0].Verdict)
}

func TestHostsOnTargetWithoutAVerdictAreValidatedAndParkWhenItIsBad(t *testing.T) {
	c := newCluster(t, 3)
	c.renew("gpu-2")
	c.verdict["gpu-2"] = gpu.Unfit
	h := newHarness(t, c)
	proof := "rollout.hypervisor.shared.proof"
	h.at(time.Hour, func() { h.signal(protocol.Approve, approve()) })
	h.at(2*time.Hour, func() {
		w := h.waits(protocol.WaitParked, proof)
		require.Contains(t, w.Findings[0].String(), "gpu-2")
		c.do(func() { delete(c.verdict, "gpu-2") })
		h.signal(protocol.Retry, protocol.Answer{})
	})
	r := h.run(input(plan.Strategy{}))
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, with(each(3, tensorfusion.OutcomeReplaced), "gpu-2", tensorfusion.OutcomeAlready), outcomes(r))
	require.Zero(t, c.deleted["gpu-2"])
	require.Equal(t, 2, c.validated["gpu-2"])
	for _, row := range r.Hosts {
		require.Equal(t, gpu.Pass, row.Verdict, row.Name)
	}
}

func TestTheGravestCheckIsNamedFirst(t *testing.T) {
	r := gpu.Result{Verdict: gpu.Unfit, Checks: []gpu.Check{
		{Name: "libraries", Severity: gpu.Info, Skipped: "not visible"},
		{Name: "ECC", Severity: gpu.Warn, Expected: "0", Found: "1"},
		{Name: "passed", Severity: gpu.Fatal, OK: true},
		{Name: "inventory", Device: "GPU-1", Severity: gpu.Fatal, Expected: "there", Found: "lost"},
	}}
	require.Equal(t, "inventory of GPU-1: expected there, found lost; ECC: expected 0, found 1", failures(r))
	r.Verdict = gpu.Unproven
	require.Contains(t, failures(r), "libraries not answered: not visible")
	require.Equal(t, "the agent named no check", failures(gpu.Result{Verdict: gpu.Unfit}))
}
