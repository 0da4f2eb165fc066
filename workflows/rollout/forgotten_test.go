package rollout

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/node"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
)

// A GPUNode was terminated: nobody has told foreign automation since that the
// node is its again.
func TestARolloutGivesForeignAutomationBackWhatAnEndedRunKeptItOff(t *testing.T) {
	n := newNodes(t, 3)
	n.kept["gpu-2"], n.kept["gpu-3"], n.lockedBy["gpu-3"] = true, true, true
	n.cordoned["gpu-2"] = true
	var asked []node.Request
	h := newHarness(t, n.cluster, map[string]any{
		"lease.Acquire": n.acquire,
		node.GiveBackActivity: func(_ context.Context, r node.Request) (node.Result, error) {
			n.do(func() { asked = append(asked, r); delete(n.kept, r.Node); n.say("give back %s", r.Node) })
			return node.Result{Changed: true, Before: "true", Inherited: n.cordoned[r.Node]}, nil
		},
	})
	r := h.run(input(plan.Strategy{Gates: plan.GateNone}))
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, each(3, tensorfusion.OutcomeReplaced), outcomes(r))
	require.Equal(t, map[string]bool{"gpu-3": true}, n.kept, "the run that is at work on it keeps its node")
	require.Len(t, asked, 1)
	require.Equal(t, "gpunode-gpu-2", asked[0].Lease.Release)
	require.NotEmpty(t, asked[0].Lease.Holder, "another GPUNode that takes the node meanwhile is not disturbed")
	at := strings.Join(n.log, "\n")
	require.Less(t, strings.Index(at, "give back gpu-2\nlease given back"), strings.Index(at, "replace [gpu-1]"), at)
	require.Contains(t, names(r.Stages), "rollout.hypervisor.shared.give-back")
	warnings := strings.Join(r.Warnings, "\n")
	require.Contains(t, warnings, "as it was before a run that was ended by force (true)")
	require.Contains(t, warnings, "Node gpu-2 stays cordoned")
	require.True(t, n.cordoned["gpu-2"], "nothing proves its set-up")

	again := newHarness(t, newCluster(t, 1)).run(input(plan.Strategy{Gates: plan.GateNone}))
	require.NotContains(t, names(again.Stages), "rollout.hypervisor.shared.give-back", "nothing was forgotten")
}

func TestANodeThatCanNotBeGivenBackHoldsNoOtherUp(t *testing.T) {
	n := newNodes(t, 2)
	n.kept["gpu-1"], n.kept["gpu-2"] = true, true
	h := newHarness(t, n.cluster, map[string]any{
		"lease.Acquire": n.acquire,
		node.GiveBackActivity: func(_ context.Context, r node.Request) (node.Result, error) {
			if r.Node == "gpu-1" {
				return node.Result{}, finding.Finding{Object: "node gpu-1", Found: "the API server refuses it"}.Error(finding.Stop)
			}
			n.do(func() { delete(n.kept, r.Node) })
			return node.Result{Changed: true, Before: "true"}, nil
		},
	})
	h.at(time.Hour, func() {
		w := h.waits(protocol.WaitParked, "rollout.hypervisor.shared.give-back")
		require.Contains(t, w.Found, "the API server refuses it")
		require.Equal(t, map[string]bool{"gpu-1": true}, n.kept)
		require.Equal(t, 2, strings.Count(strings.Join(n.log, "\n"), "lease given back"), "a GPUNode of the host can still have it")
		h.signal(protocol.Skip, protocol.Answer{})
	})
	require.Equal(t, protocol.OutcomeDone, h.run(input(plan.Strategy{Gates: plan.GateNone})).Outcome)
}
