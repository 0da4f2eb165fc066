package e2e

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/history/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	refit "github.com/refit-run/refit/worker"
	"github.com/refit-run/refit/workflows/protocol"
)

// quickPlan makes the example plan quick: two nodes a pool, no soak.
var quickPlan = []string{"rollouts[0].strategy.soakCanary=1s"}

const (
	oldImage = "registry.refit.local/tensorfusion/tensor-fusion-hypervisor:2.15.0"
	newImage = "registry.refit.local/tensorfusion/tensor-fusion-hypervisor:2.17.0"
)

// TestUpgrade is the main job: from chart 1.8.6 to 1.8.7 (2.16 to 2.17, where
// the new controller would delete every hypervisor by itself), gate after the
// canary, receipt. Then the same plan again changes nothing, an upgrade of the
// controller image alone rolls no node, and a rollback brings the old version
// back in batches with today's credentials.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	w := up(t, "--lease", "15s") // as the real controller's
	o := observe(t, w)
	planted := append(w.plantedSecrets(), w.plantInTheOpen()...)
	require.Greater(t, len(planted), 8)
	values, inValues := w.plantInValues()
	planted = append(planted, inValues...)
	plan := append(values, quickPlan...)

	t.Run("the plan shows that a secret value changes, and not which", func(t *testing.T) {
		show := []string{"plan", "-f", "examples/tensorfusion-upgrade.yaml"}
		for _, set := range plan {
			show = append(show, "--set", set)
		}
		out := w.inEveryFormat(show...)
		assert.Contains(t, out, "tensor-fusion-operator:2.17.0")
		assert.Contains(t, out, "webhookUrl: ********", "a secret value changes: where is told, what is not")
	})
	run := w.start(plan...)
	s := w.untilGate(run)
	w.readEverything(run)
	assert.Equal(t, "rollout.hypervisor.shared.canary", s.WaitingFor.Stage)
	assert.Equal(t, protocol.PhaseGate, s.Phase)
	assert.Equal(t, 1, o.deletions(), "only the canary is replaced before the gate")

	t.Run("a stage that does not wait can't be approved", func(t *testing.T) {
		out, code := w.refit("approve", run, "--stage", "backup", "--by", "ann")
		assert.Equal(t, exitRefused, code, out)
		assert.Contains(t, out, "backup")
	})
	t.Run("the printed commands work verbatim", func(t *testing.T) {
		out, code := w.refit("status", run, "--exit-code")
		require.Equal(t, exitGate, code, out)
		line := commandLine(out, "temporal workflow update execute")
		require.NotEmpty(t, line, out)
		out, code = w.run("bash", "-c", line)
		require.Zero(t, code, "%s\n%s", line, out)
	})
	w.until(run, "the second pool", 2*time.Minute, func(s protocol.Status) bool {
		return s.WaitingFor != nil && s.WaitingFor.Stage == "rollout.hypervisor.training.canary"
	})
	t.Run("refit approve as printed works verbatim", func(t *testing.T) {
		out, _ := w.refit("status", run)
		line := commandLine(out, "refit approve")
		require.NotEmpty(t, line, out)
		out, code := w.run("bash", "-c", line)
		require.Zero(t, code, "%s\n%s", line, out)
	})
	r := w.approveAll(run)
	asPlanned(t, r)
	assert.Empty(t, o.violations(turns(r)))
	assert.Equal(t, 4, o.deletions(), "every node exactly once")
	for node, pods := range w.hypervisors() {
		require.Len(t, pods, 1, node)
		assert.Contains(t, pods[0], newImage)
	}
	w.searchSecrets(run, planted)
	w.replay(run)

	t.Run("the same plan again changes nothing", func(t *testing.T) {
		o.reset()
		again := w.start(plan...)
		r := w.approveAll(again)
		assert.Equal(t, protocol.OutcomeNoChange, r.Outcome)
		assert.Zero(t, o.deletions())
	})

	t.Run("rollback", func(t *testing.T) {
		o.reset()
		out, code := w.refit("start", "-f", "examples/tensorfusion-rollback.yaml", "-o", "json")
		require.Zero(t, code, out)
		var started struct {
			WorkflowID string `json:"workflowID"`
		}
		require.NoError(t, json.Unmarshal([]byte(out), &started), out)
		r := w.approveAll(started.WorkflowID)
		assert.Equal(t, protocol.OutcomeDone, r.Outcome)
		assert.Equal(t, "2.16.3", r.After["controller"])
		assert.Empty(t, o.violations(turns(r)))
		assert.Equal(t, 4, o.deletions())
		w.searchSecrets(started.WorkflowID, planted)
		w.replay(started.WorkflowID)
	})
}

// asPlanned requires the receipt of the example's upgrade.
func asPlanned(t *testing.T, r protocol.Receipt) {
	t.Helper()
	var stages []string
	for _, s := range r.Stages {
		stages = append(stages, s.Name)
		assert.Equal(t, protocol.Done, s.State, s.Name)
	}
	assert.Equal(t, upgradeStages, stages)
	assert.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.Equal(t, map[string]string{"chart": "1.8.6", "controller": "2.16.3", "hypervisor": oldImage}, r.Before)
	assert.Equal(t, map[string]string{"chart": "1.8.7", "controller": "2.17.0", "hypervisor": newImage}, r.After)
	assert.Equal(t, protocol.Progress{Done: 4, Total: 4}, r.Progress)
	assert.Empty(t, r.Ignored)
	assert.Empty(t, r.LeftBehind)
	assert.Empty(t, r.Warnings)
	assert.Nil(t, r.Rollback)
}

// commandLine finds a printed command.
func commandLine(out, prefix string) string {
	for _, l := range strings.Split(out, "\n") {
		if i := strings.Index(l, prefix); i >= 0 {
			return strings.TrimSpace(l[i:])
		}
	}
	return ""
}

// histories exports the run's history and those of every child, by workflow ID.
func (w *world) histories(run string) map[string]*history.History {
	w.t.Helper()
	ctx := context.Background()
	list, err := w.temporal.ListWorkflow(ctx, &workflowservice.ListWorkflowExecutionsRequest{
		Namespace: client.DefaultNamespace, PageSize: 1000,
	})
	require.NoError(w.t, err)
	out := map[string]*history.History{}
	for _, e := range list.Executions {
		id := e.Execution.WorkflowId
		if id != run && !strings.HasPrefix(id, run+".") {
			continue
		}
		h := &history.History{}
		it := w.temporal.GetWorkflowHistory(ctx, id, e.Execution.RunId, false, enums.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT)
		for it.HasNext() {
			ev, err := it.Next()
			require.NoError(w.t, err)
			h.Events = append(h.Events, ev)
		}
		out[id+"/"+e.Execution.RunId] = h
	}
	require.NotEmpty(w.t, out)
	return out
}

// replay proves that today's workflow code goes the recorded way again.
func (w *world) replay(run string) {
	w.t.Helper()
	for id, h := range w.histories(run) {
		r := worker.NewWorkflowReplayer()
		refit.RegisterWorkflows(r)
		workflowID, runID, _ := strings.Cut(id, "/")
		err := r.ReplayWorkflowHistoryWithOptions(nil, h, worker.ReplayWorkflowHistoryOptions{
			OriginalExecution: workflow.Execution{ID: workflowID, RunID: runID},
		})
		assert.NoError(w.t, err, "replay of %s", id)
	}
}
