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

	var first string
	t.Run("whatever is missing is named before anything is touched", func(t *testing.T) {
		w.killWorker()
		w.startWorker("REFIT_AGE_RECIPIENTS=")
		w.fault("greptime-down")
		w.fault("image-missing", newImage)
		first = w.start(quickPlan...)
		s := w.untilParked(first)
		assert.Equal(t, "preflight", s.WaitingFor.Stage)
		rows := map[string]string{}
		for _, f := range s.WaitingFor.Findings {
			rows[f.Row] += f.String()
		}
		assert.Contains(t, rows["T06"], "recipient")
		assert.Contains(t, rows["P02"], "GreptimeDB 127.0.0.1:")
		assert.Contains(t, rows["P02"], "bring the database back before the controller restarts")
		assert.Contains(t, rows["P09"], "image "+newImage)
		assert.Contains(t, rows["P09"], "check the tag")
		assert.Zero(t, o.deletions())
		assert.Empty(t, w.changes(), "the Lease alone is written")
	})

	t.Run("a retry after the repair goes on, past a slow registry too", func(t *testing.T) {
		w.killWorker()
		w.startWorker()
		w.fault("clear")
		w.fault("slow-image", slowly.String())
		w.answer(protocol.Retry, first)
		began := time.Now()
		s := w.until(first, "the end of the preflight", 2*time.Minute, func(s protocol.Status) bool {
			return strings.Contains(noteOf(s, "preflight"), "GreptimeDB 127.0.0.1:")
		})
		assert.Contains(t, noteOf(s, "preflight"), "answered a login and a query")
		assert.Greater(t, time.Since(began), 2*slowly, "the chart and the images are asked for")
		w.untilGate(first) // fails when the run parks
		w.fault("clear")
	})
	if t.Failed() {
		t.FailNow()
	}

	t.Run("two upgrades of one release: the second closes as Locked", func(t *testing.T) {
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
		run := w.start(append(quickPlan, "rollouts[0].strategy.hostTimeout=30s", "rollouts[0].strategy.budget={}",
			// The controller itself would delete a crashing pod after each sixth crash.
			"values.inline.dynamicConfig.hypervisorMaxCrashCount=0")...)

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
		})
		t.Run("a hypervisor in a crash loop parks with its state, and goes on after its repair", func(t *testing.T) {
			node, before := w.nodesOf("training")[1], o.deletions()
			w.fault("hypervisor-crash-loop", node)
			w.answer(protocol.Retry, run)
			s := w.until(run, "parking on the crash loop", 3*time.Minute, func(s protocol.Status) bool {
				return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked && strings.Contains(findings(s), "CrashLoopBackOff")
			})
			require.Len(t, s.WaitingFor.Findings, 1)
			f := s.WaitingFor.Findings[0]
			assert.Equal(t, "T25", f.Row)
			assert.Contains(t, f.Object, node)
			assert.Contains(t, f.Found, "after 30s")
			assert.Contains(t, f.Next, "the hypervisor exits: read its log")
			assert.Equal(t, before+1, o.deletions(), "the old pod, and not the crashing one again and again")
			w.fault("clear")
			w.answer(protocol.Retry, run)
		})
		r := w.approveAll(run)
		assert.Equal(t, protocol.OutcomeDone, r.Outcome)
		batches := turns(r)
		assert.Empty(t, o.violations(slices.Concat(batches, batches)), "a retry replaces once more what is broken still, and nothing else")
		w.replay(run)
	})
}

// slowly is how long a registry may take for an answer that nobody misses.
const slowly = 2 * time.Second

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
