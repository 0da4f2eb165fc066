package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/workflows/protocol"
)

const rollWorkers = "rollout.worker.shared.roll"

// sessionsNotAccepted requires that a plan is refused when it does not accept
// that connections lose their sessions.
func (w *world) sessionsNotAccepted(t *testing.T, plan string) {
	text, err := os.ReadFile(plan)
	require.NoError(t, err)
	const accepted = "acknowledgeLostSessions: true"
	require.Contains(t, string(text), accepted)
	file := filepath.Join(w.home, "refused.yaml")
	require.NoError(t, os.WriteFile(file, []byte(strings.Replace(string(text), accepted, "acknowledgeLostSessions: false", 1)), 0o600))
	out, code := w.refit("plan", "-f", file)
	assert.Equal(t, exitBadInput, code, out)
	assert.Contains(t, out, "rollouts[1].workers.acknowledgeLostSessions")
	assert.Empty(t, w.changes())
}

// troubledWorkers takes the roll of the shared pool's workers, which waits for
// its first approval, through nodes without room for them, until there is room
// again.
func (w *world) troubledWorkers(t *testing.T, run string) {
	t.Run("who connects before the approval is asked for anew", func(t *testing.T) {
		w.connect(sample + "-late")
		w.answer(protocol.Approve, run)
		s := w.until(run, "the second question", time.Minute, func(s protocol.Status) bool {
			return s.WaitingFor != nil && strings.Contains(s.WaitingFor.Found, "the list has grown")
		})
		assert.Equal(t, protocol.WaitApproval, s.WaitingFor.Kind)
		assert.Equal(t, rollWorkers, s.WaitingFor.Stage)
		for _, want := range []string{"apps/" + sample + " with 3 connections instead of 2", sample + "-late of pod late-client"} {
			assert.Contains(t, s.WaitingFor.Found, want)
		}
		assert.False(t, w.workerFlag(), "nobody loses a session that was not accepted")
	})

	for _, node := range w.nodesOf("shared") {
		w.cordon(node, true)
	}
	w.loseWorker(sample)
	w.answer(protocol.Approve, run)
	w.poll("the controller's flag", time.Minute, w.workerFlag)
	t.Run("a pause switches the controller's flag off, resume on again", func(t *testing.T) {
		w.answer(protocol.Pause, run)
		s := w.until(run, "the pause", time.Minute, func(s protocol.Status) bool {
			return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitPaused
		})
		assert.Equal(t, rollWorkers, s.WaitingFor.Stage)
		assert.False(t, w.workerFlag())
		w.answer(protocol.Resume, run)
		w.poll("the controller's flag after resume", time.Minute, w.workerFlag)
	})

	t.Run("workers that do not come park the run with the flag off", func(t *testing.T) {
		s := w.untilParked(run)
		assert.Equal(t, rollWorkers, s.WaitingFor.Stage)
		require.NotEmpty(t, s.WaitingFor.Findings)
		assert.Equal(t, "T15", s.WaitingFor.Findings[0].Row)
		for _, want := range []string{"worker rollout of GPUPool/" + samplePool, "TensorFusionWorkload/apps/" + sample, "the flag is off again"} {
			assert.Contains(t, findings(s), want)
		}
		assert.False(t, w.workerFlag())
	})

	t.Run("a retry waits for them, outdated or not", func(t *testing.T) {
		w.answer(protocol.Retry, run)
		w.poll("the controller's flag after retry", time.Minute, w.workerFlag)
	})
	for _, node := range w.nodesOf("shared") {
		w.cordon(node, false)
	}
}

// loseWorker deletes one of a workload's workers, as the drain of its node does.
func (w *world) loseWorker(workload string) {
	w.t.Helper()
	ctx, pods := context.Background(), w.kube.CoreV1().Pods("apps")
	list, err := pods.List(ctx, metav1.ListOptions{LabelSelector: "tensor-fusion.ai/workload=" + workload})
	require.NoError(w.t, err)
	require.NotEmpty(w.t, list.Items)
	require.NoError(w.t, pods.Delete(ctx, list.Items[0].Name, metav1.DeleteOptions{}))
}

// workerFlag is whether the controller may roll the shared pool's workers.
func (w *world) workerFlag() bool {
	w.t.Helper()
	list, err := w.dynamic.Resource(schema.GroupVersionResource{Group: "tensor-fusion.ai", Version: "v1", Resource: "tensorfusionclusters"}).
		List(context.Background(), metav1.ListOptions{})
	require.NoError(w.t, err)
	for _, cluster := range list.Items {
		pools, _, err := unstructured.NestedSlice(cluster.Object, "spec", "gpuPools")
		require.NoError(w.t, err)
		for _, p := range pools {
			pool := p.(map[string]any)
			if pool["name"] != "shared" {
				continue
			}
			on, _, err := unstructured.NestedBool(pool, "specTemplate", "nodeManagerConfig", "nodePoolRollingUpdatePolicy", "autoUpdateWorker")
			require.NoError(w.t, err)
			return on
		}
	}
	w.t.Fatal("no TensorFusionCluster has a pool shared")
	return false
}

// connect adds a session with the shared pool's workers.
func (w *world) connect(name string) {
	w.t.Helper()
	_, err := w.dynamic.Resource(schema.GroupVersionResource{Group: "tensor-fusion.ai", Version: "v1", Resource: "tensorfusionconnections"}).
		Namespace("apps").Create(context.Background(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "tensor-fusion.ai/v1", "kind": "TensorFusionConnection", "metadata": map[string]any{"name": name},
		"spec": map[string]any{"workloadName": sample, "clientPod": "late-client"},
	}}, metav1.CreateOptions{})
	require.NoError(w.t, err)
}

// cordon keeps new workers off a node, or lets them come again.
func (w *world) cordon(node string, off bool) {
	w.t.Helper()
	_, err := w.kube.CoreV1().Nodes().Patch(context.Background(), node, types.MergePatchType,
		fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, off), metav1.PatchOptions{})
	require.NoError(w.t, err)
}
