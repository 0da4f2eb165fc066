package gpunode

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/workflows/protocol"
)

func TestABusyGPUIsWaitedForAsLongAsTheSetUpMayTake(t *testing.T) {
	h := &host{busy: true}
	w := newHarness(t, h)
	w.at(10*time.Minute, func() {
		s := w.status()
		require.Nil(t, s.WaitingFor, "nobody is asked")
		require.Empty(t, s.Section, "an abort would act at once")
		i := slices.IndexFunc(s.Stages, func(s protocol.Stage) bool { return s.Name == "prepare" })
		require.Contains(t, s.Stages[i].Note, "GPU GPU-1: 2 clients; waiting")
		h.do(func() { h.busy = false })
	})
	r := w.run(input())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)

	h = &host{busy: true}
	w = newHarness(t, h)
	w.at(10*time.Minute, func() { w.SignalWorkflow(protocol.Abort, retry()) })
	require.Equal(t, protocol.OutcomeAborted, w.run(input()).Outcome)
	asked := len(h.prepared)
	require.Greater(t, asked, 5)
	require.Less(t, asked, 15, "an abort ends the wait")
}

func TestAnAgentOfAnotherBootThanTheNodesIsNotAskedToSetItUp(t *testing.T) {
	h := &host{boot: "old", booted: "new"} // the kubelet has not reported the new boot yet
	w := newHarness(t, h)
	w.at(5*time.Minute, func() {
		require.NotContains(t, h.log, "baseline")
		h.do(func() { h.boot = "new" })
	})
	require.Equal(t, protocol.OutcomeDone, w.run(input()).Outcome)
	require.Equal(t, "new", h.prepared[len(h.prepared)-1].NodeBootID)
	require.Greater(t, h.baselined, 2)

	h = &host{boot: "new", booted: "of another machine"}
	w = newHarness(t, h)
	w.at(time.Hour, func() {
		require.Contains(t, w.waits("baseline").Found, "of another machine")
		w.SignalWorkflow(protocol.Abort, retry())
	})
	require.Equal(t, protocol.OutcomeAborted, w.run(input()).Outcome)
	require.NotContains(t, h.log, "prepare")
}

func TestWhatOnlyTheClusterKnowsOfTensorFusionIsFilledIn(t *testing.T) {
	h := &host{port: 8001}
	in := input()
	in.Expect = &gpu.Expect{TensorFusion: &gpu.TensorFusionHost{}}
	newHarness(t, h).run(in)
	told := h.validated[0].Expect.TensorFusion
	require.Equal(t, 8001, told.Port)
	require.NotNil(t, told.Pods, "no client pod is an answer")

	in.Expect.TensorFusion = &gpu.TensorFusionHost{Port: 9000, Pods: []string{"team/app"}}
	h = &host{port: 8001}
	newHarness(t, h).run(in)
	require.Equal(t, in.Expect, h.validated[0].Expect, "what the plan says stands")
}

func TestABusyHostParksOnlyOnceItIsCordoned(t *testing.T) {
	h := &host{busy: true}
	w := newHarness(t, h)
	w.at(time.Hour, func() {
		require.Contains(t, w.waits("prepare").Found, "2 clients")
		require.Equal(t, "us", h.cordoned)
		h.do(func() { h.busy = false })
		w.SignalWorkflow(protocol.Retry, retry())
	})
	require.Equal(t, protocol.OutcomeDone, w.run(input()).Outcome)
}

// Another request is at work on the host: the agent asks to come again.
func TestATakenHostIsAskedAgainAndWhatWasRefusedHasNotBegun(t *testing.T) {
	h := &host{taken: 3}
	require.Equal(t, protocol.OutcomeDone, newHarness(t, h).run(input()).Outcome)
	require.Len(t, h.prepared, 5, "the plan, three refusals and the set-up")

	h = &host{taken: 1000}
	w := newHarness(t, h)
	w.at(10*time.Minute, func() { w.SignalWorkflow(protocol.Abort, retry()) })
	r := w.run(input())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Greater(t, len(h.prepared), 5)
	require.Empty(t, h.cordoned)
	require.Empty(t, r.LeftBehind)

	// A run of a rollout can't wait for long, but for one that ends soon it does.
	in := input()
	in.Unattended = true
	h = &host{taken: 3}
	require.Equal(t, protocol.OutcomeDone, newHarness(t, h).run(in).Outcome)
}
