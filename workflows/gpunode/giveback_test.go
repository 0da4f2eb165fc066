package gpunode

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/workflows/protocol"
)

func TestAnAbortGivesForeignAutomationBackAndLeavesAnUnprovenHostCordoned(t *testing.T) {
	h := &host{verdict: gpu.Unfit}
	w := newHarness(t, h)
	w.at(time.Hour, func() { w.SignalWorkflow(protocol.Abort, retry()) })
	r := w.run(input())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Equal(t, "us", h.cordoned)
	require.Empty(t, h.label)
	require.Len(t, r.LeftBehind, 1)
	require.Contains(t, r.LeftBehind[0], "stays cordoned")
}

func TestAnAbortBeforeAnythingWasBegunUndoesTheCordon(t *testing.T) {
	h := &host{silent: true}
	w := newHarness(t, h)
	w.at(time.Hour, func() {
		require.Contains(t, w.waits("baseline").Found, "gpu/prod/gpu-1")
		w.SignalWorkflow(protocol.Abort, retry())
	})
	r := w.run(input())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Empty(t, h.cordoned)
	require.Empty(t, h.label)
	require.Empty(t, r.LeftBehind)
}

// A refusal is not a beginning: GPUs in use, another request at work, another boot.
func TestASetUpThatWasRefusedBeforeItsFirstStepHasNotBegun(t *testing.T) {
	for name, c := range map[string]struct {
		h    *host
		left int
	}{
		"refused":       {&host{busy: true}, 0},
		"in the middle": {&host{breaks: true}, 2}, // the set-up, and the cordon
	} {
		t.Run(name, func(t *testing.T) {
			w := newHarness(t, c.h)
			w.at(time.Hour, func() {
				w.waits("prepare")
				require.Equal(t, "us", c.h.cordoned)
				w.SignalWorkflow(protocol.Abort, retry())
			})
			r := w.run(input())
			require.Equal(t, protocol.OutcomeAborted, r.Outcome)
			require.Len(t, r.LeftBehind, c.left)
			require.Equal(t, c.left == 0, c.h.cordoned == "", "what was not touched is not kept from its pods")
			require.Empty(t, c.h.label)
		})
	}

	h := &host{busy: true}
	w := newHarness(t, h)
	w.at(10*time.Minute, func() { h.do(func() { h.busy, h.layout = false, true }) })
	require.Equal(t, protocol.OutcomeDone, w.run(input()).Outcome)
	require.Contains(t, h.validated[0].Baseline.Devices[0].Readings, "MIG layout", "no mode has changed, so it is compared in full")
}

// The first attempt may have done everything: the second one finds nothing to do,
// and the host has been touched all the same.
func TestASetUpWhoseReplyWasLostHasBegun(t *testing.T) {
	h := &host{resumed: true, mute: true}
	w := newHarness(t, h)
	w.at(time.Hour, func() {
		w.waits("validate")
		w.SignalWorkflow(protocol.Abort, retry())
	})
	r := w.run(input())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Equal(t, "us", h.cordoned, "nothing has proven the host")
	require.Contains(t, strings.Join(r.LeftBehind, "\n"), "stays cordoned")
}

// An earlier run has cordoned the node and ended without proving the host: an
// abort of this one must not put it into use.
func TestACordonThatAnEarlierRunHasLeftIsUndoneOnlyByAProof(t *testing.T) {
	h := &host{cordoned: "us", inherited: true, silent: true}
	w := newHarness(t, h)
	w.at(time.Hour, func() {
		w.waits("baseline")
		w.SignalWorkflow(protocol.Abort, retry())
	})
	r := w.run(input())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Equal(t, "us", h.cordoned)
	require.Contains(t, strings.Join(r.LeftBehind, "\n"), "stays cordoned")

	h = &host{cordoned: "us", inherited: true}
	require.Equal(t, protocol.OutcomeDone, newHarness(t, h).run(input()).Outcome)
	require.Empty(t, h.cordoned)
}

// The run before was terminated: its label is given back even by one that comes
// to nothing of its own.
func TestAnyRunGivesBackWhatAnEarlierOneWasEndedBefore(t *testing.T) {
	h := &host{label: "ours", silentPlan: true}
	w := newHarness(t, h)
	w.at(time.Hour, func() {
		w.waits("plan")
		w.SignalWorkflow(protocol.Abort, retry())
	})
	require.Equal(t, protocol.OutcomeAborted, w.run(input()).Outcome)
	require.NotContains(t, h.log, "keep off")
	require.Empty(t, h.label)
}

func TestAForeignCordonStays(t *testing.T) {
	h := &host{cordoned: "them"}
	r := newHarness(t, h).run(input())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, "them", h.cordoned)
	require.NotContains(t, h.log, "uncordon")
	require.Contains(t, r.Warnings[len(r.Warnings)-1], "somebody else")
}
