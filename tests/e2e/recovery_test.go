package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/workflows/protocol"
)

// TestRecovery takes one upgrade through the death of everything around it:
// Helm, the API server, Temporal, the controller. Between them people answer
// twice, for the wrong stage, and pause. The run must neither park nor handle
// a host twice; only a canary Job without a good verdict stops it.
func TestRecovery(t *testing.T) {
	t.Parallel()
	w := up(t, "--lease", "15s") // as the real controller's
	o := observe(t, w)
	shared, training := w.nodesOf("shared"), w.nodesOf("training")
	require.Len(t, shared, 2)
	require.Len(t, training, 2)
	w.fault("hypervisor-never-ready", shared[0]) // holds the run in the middle of the canary

	run := w.start("rollouts[0].strategy.soakCanary=6s", "rollouts[0].strategy.hostTimeout=5m")
	w.fault("helm-kill", "10m")
	w.midHost(run, shared[0])
	t.Run("Helm killed in the middle: the release is deployed by the next try", func(t *testing.T) {
		revisions := w.revisions()
		assert.Equal(t, map[string]string{"1": "superseded", "2": "failed", "3": "deployed"}, revisions)
	})

	t.Run("the API server away for 30 s in the middle of a host", func(t *testing.T) {
		w.fault("apiserver-down", "30s")
		began := time.Now()
		_, err := w.kube.Discovery().ServerVersion()
		require.Error(t, err, "the API server must be away")
		w.poll("the API server's return", 2*time.Minute, func() bool {
			_, err := w.kube.Discovery().ServerVersion()
			return err == nil
		})
		require.Greater(t, time.Since(began), 25*time.Second)
	})
	// The watches of the sandbox's components take up to a minute to come back.
	// Meanwhile the host is still away, and the others die.
	w.midHost(run, shared[0])
	t.Run("Temporal killed in the middle of a host", func(t *testing.T) { w.killTemporal() })
	w.midHost(run, shared[0])
	t.Run("the controller restarts in the middle of a host", func(t *testing.T) {
		before := w.controllerPods()
		w.fault("controller-restart")
		w.poll("new controller pods", 2*time.Minute, func() bool {
			now := w.controllerPods()
			for uid := range now {
				if before[uid] {
					return false
				}
			}
			return len(now) > 0
		})
	})
	w.fault("clear")
	s := w.untilGate(run) // fails when the run parks
	const gate = "rollout.hypervisor.shared.canary"
	require.Equal(t, gate, s.WaitingFor.Stage)
	assert.Equal(t, 1, o.deletions(), "the canary once, however often its replacement was tried")

	t.Run("Temporal killed at the gate", func(t *testing.T) {
		w.killTemporal()
		assert.Equal(t, gate, w.untilGate(run).WaitingFor.Stage)
	})
	t.Run("a signal for a stage that does not wait is recorded", func(t *testing.T) {
		w.signal(run, protocol.Approve, "backup", "carl")
		assert.Contains(t, w.untilIgnored(run, "carl").Reason, "backup is done")
	})
	ours := turn{name: "the fault", hosts: shared[1:], from: time.Now()}
	t.Run("a hypervisor replaced outside a batch counts as progress", func(t *testing.T) {
		w.fault("hypervisor-replaced", shared[1])
		w.poll("the replaced hypervisor on the new version", time.Minute, func() bool {
			pods := w.hypervisors()[shared[1]]
			return o.deletions() == 2 && len(pods) == 1 && strings.HasSuffix(pods[0], newImage+" Running")
		})
		ours.to = time.Now()
	})
	t.Run("approve twice: the second is refused, and ignored as a signal", func(t *testing.T) {
		w.fault("hypervisor-never-ready", training[0])
		w.answer(protocol.Approve, run, "--stage", gate)
		out, code := w.refit("approve", run, "--stage", gate, "--by", "bob")
		assert.Equal(t, exitRefused, code, out)
		assert.Contains(t, out, gate)
		w.signal(run, protocol.Approve, gate, "bob")
		assert.Contains(t, w.untilIgnored(run, "bob").Reason, gate)
	})

	w.midHost(run, training[0])
	w.fault("clear")
	t.Run("a pause during the soak holds at its end", func(t *testing.T) {
		const canary = "rollout.hypervisor.training.canary"
		var ends time.Time
		w.until(rolloutOf(run, training[0]), "the soak of "+canary, 2*time.Minute, func(s protocol.Status) bool {
			_, until, soaking := strings.Cut(noteOf(s, "canary"), "watch it for 6s until ")
			if soaking {
				var err error
				ends, err = time.Parse(time.RFC3339, until)
				require.NoError(t, err, until)
			}
			return soaking
		})
		// A signal is there at once; a process that answers could come too late.
		require.NoError(t, w.temporal.SignalWorkflow(context.Background(), run, "", protocol.Pause, protocol.Answer{By: "ann"}))
		s := w.until(run, "the pause", time.Minute, func(s protocol.Status) bool {
			require.False(t, s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitApproval, "the gate came in spite of the pause")
			return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitPaused
		})
		assert.Equal(t, canary, s.WaitingFor.Stage)
		assert.False(t, s.WaitingFor.Since.Before(ends), "paused at %s, the soak ends at %s", s.WaitingFor.Since, ends)
		w.answer(protocol.Resume, run)
		assert.Equal(t, canary, w.untilGate(run).WaitingFor.Stage)
	})
	t.Run("the canary Job's verdict decides", func(t *testing.T) {
		for _, c := range []struct{ name, fault, found string }{
			{"complete without a verdict", "canary-verdict missing", "no termination message"},
			{"a wrong result", "canary-verdict wrong", "CUDA call: kernel result 42"},
			{"a memory limit that does not hold", "limit-not-enforced", "vGPU limit: an allocation above the vram limit fails"},
		} {
			t.Run(c.name, func(t *testing.T) {
				w.fault(strings.Fields(c.fault)...)
				s, err := w.status(run)
				require.NoError(t, err)
				if s.Phase == protocol.PhaseGate {
					w.answer(protocol.Approve, run)
				} else {
					w.answer(protocol.Retry, run)
				}
				s = w.until(run, "parking on "+c.name, 2*time.Minute, func(s protocol.Status) bool {
					return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked && strings.Contains(findings(s), c.found)
				})
				assert.Equal(t, "verify", s.WaitingFor.Stage)
				require.NotEmpty(t, s.WaitingFor.Findings)
				assert.Equal(t, "T20", s.WaitingFor.Findings[0].Row)
			})
		}
		w.fault("canary-verdict", "ok")
		w.answer(protocol.Retry, run)
	})

	r := w.approveAll(run)
	assert.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.Equal(t, newImage, r.After["hypervisor"])
	assert.Equal(t, protocol.Progress{Done: 4, Total: 4}, r.Progress)
	assert.Len(t, r.Ignored, 2)
	assert.Len(t, r.Probes, 2, "the last answer of each pool's canary Job")
	for _, p := range r.Probes {
		assert.Equal(t, gpu.Pass, p.Result.Verdict)
		assert.Equal(t, p.Node, p.Result.Node)
		assert.NotEmpty(t, p.Result.Proofs)
	}
	assert.Equal(t, 4, o.deletions(), "every node exactly once")
	assert.Empty(t, o.violations(append(turns(r), ours)))
	w.replay(run)
}

// revisions maps the release's revisions to their states.
func (w *world) revisions() map[string]string {
	w.t.Helper()
	list, err := w.kube.CoreV1().Secrets("tensor-fusion-sys").List(context.Background(), metav1.ListOptions{LabelSelector: "owner=helm,name=tensor-fusion-sys"})
	require.NoError(w.t, err)
	out := map[string]string{}
	for _, s := range list.Items {
		out[s.Labels["version"]] = s.Labels["status"]
	}
	return out
}

// rolloutOf is the child run that takes the hypervisors of a node's pool. What
// it is doing just now reaches its parent's status seconds later.
func rolloutOf(run, node string) string {
	pool, _, _ := strings.Cut(node, "-")
	return run + ".rollout.hypervisor." + pool
}

// midHost waits until the run stands in the middle of a host on which fault
// hypervisor-never-ready is in force: the former pod is gone, the next one is
// there and not Ready.
func (w *world) midHost(run, node string) {
	w.t.Helper()
	w.poll("the middle of host "+node, 3*time.Minute, func() bool {
		s, err := w.status(run)
		if err == nil && s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked {
			w.t.Fatalf("parked instead of replacing %s: %s\n%s", node, s.WaitingFor.Found, findings(s))
		}
		s, err = w.status(rolloutOf(run, node))
		if err != nil || s.Section == "" {
			return false
		}
		pods, err := w.kube.CoreV1().Pods("tensor-fusion-sys").List(context.Background(), metav1.ListOptions{
			LabelSelector: "tensor-fusion.ai/component=hypervisor", FieldSelector: "spec.nodeName=" + node,
		})
		return err == nil && len(pods.Items) == 1 && pods.Items[0].Spec.Containers[0].Image == newImage && !isReady(&pods.Items[0])
	})
}

// killTemporal kills the server with -9 and waits until it serves again.
func (w *world) killTemporal() {
	w.t.Helper()
	before := w.restarts("temporal")
	w.fault("temporal-kill")
	w.poll("Temporal's return", time.Minute, func() bool {
		_, err := w.temporal.CheckHealth(context.Background(), nil)
		return err == nil && w.restarts("temporal") > before
	})
}

// restarts counts how often the sandbox had to start a component again.
func (w *world) restarts(component string) int { return w.component(component).Restarts }

// component is a process of the sandbox.
type component struct {
	Name     string `json:"name"`
	PID      int    `json:"pid"`
	Restarts int    `json:"restarts"`
}

func (w *world) component(name string) component {
	w.t.Helper()
	out, code := w.run("refit-sandbox", "status", "--name", w.name, "-o", "json")
	require.Zero(w.t, code, out)
	var s struct {
		Components []component `json:"components"`
	}
	require.NoError(w.t, json.Unmarshal([]byte(out), &s), out)
	for _, c := range s.Components {
		if c.Name == name {
			return c
		}
	}
	w.t.Fatalf("the sandbox has no component %q: %s", name, out)
	return component{}
}

// controllerPods are the UIDs of the controller's pods.
func (w *world) controllerPods() map[string]bool {
	w.t.Helper()
	pods, err := w.kube.CoreV1().Pods("tensor-fusion-sys").List(context.Background(), metav1.ListOptions{LabelSelector: "tensor-fusion.ai/component=operator"})
	require.NoError(w.t, err)
	out := map[string]bool{}
	for _, p := range pods.Items {
		out[string(p.UID)] = true
	}
	return out
}

// signal sends an answer as a raw signal with the temporal command line.
func (w *world) signal(run, verb, stage, by string) {
	w.t.Helper()
	input, err := json.Marshal(protocol.Answer{Stage: stage, By: by})
	require.NoError(w.t, err)
	out, code := w.run("temporal", "workflow", "signal", "--workflow-id", run, "--name", verb, "--input", string(input))
	require.Zero(w.t, code, out)
}

// untilIgnored waits until an answer by that person is recorded as ignored.
func (w *world) untilIgnored(run, by string) (found protocol.Ignored) {
	w.t.Helper()
	w.until(run, "an ignored answer by "+by, time.Minute, func(s protocol.Status) bool {
		for _, i := range s.Ignored {
			if i.By == by {
				found = i
				return true
			}
		}
		return false
	})
	return found
}

// noteOf is a stage's line of evidence.
func noteOf(s protocol.Status, stage string) string {
	for _, row := range s.Stages {
		if row.Name == stage {
			return row.Note
		}
	}
	return ""
}

// poll waits until cond holds.
func (w *world) poll(what string, limit time.Duration, cond func() bool) {
	w.t.Helper()
	err := wait.PollUntilContextTimeout(context.Background(), 20*time.Millisecond, limit, true, func(context.Context) (bool, error) { return cond(), nil })
	require.NoError(w.t, err, fmt.Sprintf("%s did not happen within %s", what, limit))
}
