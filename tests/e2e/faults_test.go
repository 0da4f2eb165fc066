package e2e

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/refit-run/refit/workflows/protocol"
)

// TestFaults takes one installation through what goes wrong at night. The
// cases share a sandbox: each leaves it as the next one needs it.
func TestFaults(t *testing.T) {
	t.Parallel()
	w := up(t)
	o := observe(t, w)
	nodes := w.nodesOf("shared")
	require.Len(t, nodes, 2)

	t.Run("without age recipients nothing is touched", func(t *testing.T) {
		w.killWorker()
		w.startWorker("REFIT_AGE_RECIPIENTS=")
		run := w.start(quickPlan...)
		s := w.untilParked(run)
		assert.Contains(t, s.WaitingFor.Found+findings(s), "recipient")
		w.answer(protocol.Abort, run)
		assert.Equal(t, protocol.OutcomeAborted, w.receipt(run).Outcome)
		assert.Zero(t, o.deletions())
		w.killWorker()
		w.startWorker()
	})

	t.Run("two upgrades of one release: the second closes as Locked", func(t *testing.T) {
		first := w.start(quickPlan...)
		w.untilGate(first)
		out, code := w.refit("start", "-f", "examples/tensorfusion-upgrade.yaml", "--id", "second", "--follow")
		assert.Equal(t, exitRefused, code, out)
		assert.Contains(t, out, first)

		t.Run("reject at the canary's gate, then rollback", func(t *testing.T) {
			w.answer(protocol.Reject, first, "--comment", "latency is up")
			s := w.untilParked(first)
			assert.ElementsMatch(t, []string{"approve", "rollback", "abort"}, s.WaitingFor.Answers)
			w.answer(protocol.Rollback, first)
			r := w.approveAll(first)
			assert.Equal(t, protocol.OutcomeRolledBack, r.Outcome)
			require.NotNil(t, r.Rollback)
			for node, pods := range w.hypervisors() {
				require.Len(t, pods, 1, node)
				assert.NotContains(t, pods[0], newImage)
			}
			assert.Equal(t, 2, o.deletions(), "the canary there and back; the hosts that the upgrade never reached stay as they were")
			w.replay(first)
		})
	})

	t.Run("a node that never gets Ready is over the budget and parks, and goes on after its repair", func(t *testing.T) {
		o.reset()
		w.fault("hypervisor-never-ready", nodes[1])
		run := w.start(append(quickPlan, "rollouts[0].strategy.hostTimeout=30s", "rollouts[0].strategy.budget={}")...)

		w.untilGate(run)
		t.Run("auto update switched on by someone is put back and reported", func(t *testing.T) {
			w.fault("auto-update-on", "shared")
			w.answer(protocol.Approve, run)
			s := w.untilParked(run)
			assert.Contains(t, findings(s), "put back to false")
			assert.Equal(t, 1, o.deletions(), "the canary's alone")
			w.answer(protocol.Retry, run)
		})
		s := w.parkedOn(run, nodes[1])
		assert.Contains(t, s.WaitingFor.Found, "1 host failed in batch-1, its budget is 0: "+nodes[1])
		assert.Equal(t, 2, o.deletions(), "nothing goes on past the budget")
		w.fault("clear")

		t.Run("a bad GPU verdict parks", func(t *testing.T) {
			canary := w.nodesOf("training")[0]
			w.fault("gpu-fails", canary)
			w.answer(protocol.Retry, run)
			w.parkedOn(run, canary)
			w.fault("gpu-repaired", canary)
			w.answer(protocol.Retry, run)
		})
		t.Run("a Node that never gets Ready is not touched, parks, and its repair goes on", func(t *testing.T) {
			node := w.nodesOf("training")[1]
			const gate = "rollout.hypervisor.training.canary"
			w.until(run, "the gate after the canary of training", 3*time.Minute, func(s protocol.Status) bool {
				return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitApproval && s.WaitingFor.Stage == gate
			})
			w.fault("node-never-ready", node)
			w.untilNode(node, corev1.ConditionFalse)
			before := o.deletions()
			w.answer(protocol.Approve, run, "--stage", gate)
			s := w.parkedOn(run, node)
			assert.Contains(t, findings(s), "not Ready")
			assert.Contains(t, s.WaitingFor.Found, "its budget is 0")
			assert.Equal(t, before, o.deletions(), "its hypervisor still serves what runs there")
			w.fault("clear")
			w.untilNode(node, corev1.ConditionTrue)
			w.answer(protocol.Retry, run)
		})
		r := w.approveAll(run)
		assert.Equal(t, protocol.OutcomeDone, r.Outcome)
	})
}

// untilNode waits until the Node's Ready condition is that.
func (w *world) untilNode(name string, want corev1.ConditionStatus) {
	w.t.Helper()
	err := wait.PollUntilContextTimeout(context.Background(), 200*time.Millisecond, 2*time.Minute, true, func(ctx context.Context) (bool, error) {
		n, err := w.kube.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady && c.Status == want }), nil
	})
	require.NoError(w.t, err, "Node/%s does not become Ready=%s", name, want)
}

// parkedOn waits until the run parks because of that node.
func (w *world) parkedOn(run, node string) protocol.Status {
	w.t.Helper()
	return w.until(run, "parking on "+node, 3*time.Minute, func(s protocol.Status) bool {
		return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked && strings.Contains(findings(s), node)
	})
}

// findings is the text of everything a parking lists.
func findings(s protocol.Status) string {
	var b strings.Builder
	if s.WaitingFor != nil {
		for _, f := range s.WaitingFor.Findings {
			b.WriteString(f.String() + "\n")
		}
	}
	return b.String()
}

// nodesOf lists a pool's nodes by name.
func (w *world) nodesOf(pool string) []string {
	w.t.Helper()
	list, err := w.kube.CoreV1().Nodes().List(context.Background(), metav1.ListOptions{LabelSelector: "refit.sandbox/pool=" + pool})
	require.NoError(w.t, err)
	var names []string
	for _, n := range list.Items {
		names = append(names, n.Name)
	}
	return names
}
