package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/workflows/protocol"
)

// TestIsolation has two sandboxes that are alike but for the UID of their
// namespace kube-system, and a cluster name that leads to the wrong one in the
// middle of a run; then to the right one, on a way that loses a reply.
func TestIsolation(t *testing.T) {
	t.Parallel()
	w := up(t)
	o := observe(t, w)
	other := up(t, "--pools", "shared=1,training=1")
	require.NotEqual(t, w.systemUID(), other.systemUID())
	other.killWorker()

	run := w.start(quickPlan...)
	w.untilGate(run)
	w.killWorker()
	ours, theirs := len(w.writes()), len(other.writes())
	require.NotZero(t, ours, "the audit log must show what the worker wrote before the gate")
	w.startWorker("REFIT_CLUSTERS=" + other.vars["REFIT_CLUSTERS"])

	t.Run("another cluster under the same name: parked, nothing written", func(t *testing.T) {
		w.answer(protocol.Approve, run)
		s := w.untilParked(run)
		text := s.WaitingFor.Found + findings(s)
		assert.Contains(t, text, w.systemUID(), "the cluster of the run")
		assert.Contains(t, text, other.systemUID(), "the cluster that was reached")
		// Retrying with the wrong cluster must park again, not write.
		w.answer(protocol.Retry, run)
		w.until(run, "parking again", time.Minute, func(now protocol.Status) bool {
			return now.WaitingFor != nil && now.WaitingFor.Kind == protocol.WaitParked && now.WaitingFor.Since.After(s.WaitingFor.Since)
		})
		w.killWorker()
		assert.Empty(t, w.writes()[ours:], "writes to the run's cluster")
		assert.Empty(t, other.writes()[theirs:], "writes to the other cluster")
		assert.Equal(t, 1, o.deletions())
	})

	t.Run("the reply to a delete is lost: the pod is deleted once", func(t *testing.T) {
		way := w.loseReply()
		w.startWorker("REFIT_CLUSTERS=" + way.clusters)
		w.answer(protocol.Retry, run)
		assert.Equal(t, "rollout.hypervisor.training.canary", w.untilGate(run).WaitingFor.Stage)
		require.NotEmpty(t, way.pod(), "no delete went by")
		deletes := slices.DeleteFunc(w.writes()[ours:], func(l string) bool {
			return !strings.HasPrefix(l, "delete pods/ tensor-fusion-sys/"+way.pod()+": ")
		})
		assert.Equal(t, []string{"delete pods/ tensor-fusion-sys/" + way.pod() + ": 200"}, deletes)
		assert.Equal(t, 3, o.deletions(), "both hosts of the first pool and the second canary")
	})
	r := w.approveAll(run)
	assert.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.Equal(t, 4, o.deletions())
	assert.Empty(t, o.violations(turns(r)))
	assert.Empty(t, other.writes()[theirs:], "writes to the other cluster")
	w.replay(run)

	w.neverWritesPools()

	t.Run("T13 over an undisturbed upgrade", func(t *testing.T) {
		long(t, "an upgrade of the other sandbox, for its audit log alone")
		other.startWorker()
		run := other.start(append(quickPlan, "rollouts[0].strategy.gates=none")...)
		r := other.approveAll(run)
		require.Equal(t, protocol.OutcomeDone, r.Outcome)
		other.neverWritesPools()
	})
}

// systemUID is what tells one cluster from another.
func (w *world) systemUID() string {
	w.t.Helper()
	ns, err := w.kube.CoreV1().Namespaces().Get(context.Background(), metav1.NamespaceSystem, metav1.GetOptions{})
	require.NoError(w.t, err)
	return string(ns.UID)
}

// neverWritesPools is row T13: an upgrade that ran to its end wrote its policy
// to the TensorFusionCluster, and nothing to a GPUPool.
func (w *world) neverWritesPools() {
	w.t.Helper()
	var pools, clusters []string
	for _, write := range w.writes() {
		switch {
		case strings.Contains(write, " gpupools/"):
			pools = append(pools, write)
		case strings.Contains(write, " tensorfusionclusters/"):
			clusters = append(clusters, write)
		}
	}
	assert.Empty(w.t, pools, "T13")
	assert.GreaterOrEqual(w.t, len(clusters), 2, "hold and restore are in the audit log: %v", w.writes())
}

// writes lists what the worker's user wrote or tried to, dry runs left out, in
// the order of the API server's audit log.
func (w *world) writes() []string {
	w.t.Helper()
	log, err := os.ReadFile(w.vars["REFIT_SANDBOX_AUDIT_LOG"])
	require.NoError(w.t, err)
	whole := log[:bytes.LastIndexByte(log, '\n')+1] // the last line may be on its way
	var out []string
	for line := range bytes.Lines(whole) {
		var e struct {
			Verb       string `json:"verb"`
			RequestURI string `json:"requestURI"`
			User       struct {
				Username string `json:"username"`
			} `json:"user"`
			ObjectRef struct {
				Resource, Subresource, Namespace, Name string
			} `json:"objectRef"`
			ResponseStatus struct {
				Code int `json:"code"`
			} `json:"responseStatus"`
		}
		require.NoError(w.t, json.Unmarshal(line, &e), string(line))
		if e.User.Username != "refit-worker" || strings.Contains(e.RequestURI, "dryRun=All") ||
			!slices.Contains([]string{"create", "update", "patch", "delete", "deletecollection"}, e.Verb) {
			continue
		}
		r := e.ObjectRef
		out = append(out, fmt.Sprintf("%s %s/%s %s/%s: %d", e.Verb, r.Resource, r.Subresource, r.Namespace, r.Name, e.ResponseStatus.Code))
	}
	return out
}
