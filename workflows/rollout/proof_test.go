package rollout

import (
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
	in.Expect = &gpu.Expect{Driver: "580.95.05", TensorFusion: &gpu.TensorFusionHost{Port: 8001}}
	require.Equal(t, protocol.OutcomeDone, newHarness(t, c).run(in).Outcome)
	require.Equal(t, in.Expect, c.expected["gpu-1"])
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
