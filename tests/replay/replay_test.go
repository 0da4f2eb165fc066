// Package replay replays recorded histories of real runs with today's workflow
// code: a worker of another build must go the way that an open run has gone
// already. Record them anew with `make record-histories`.
package replay

import (
	"compress/gzip"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/history/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/log"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	refit "github.com/refit-run/refit/worker"
	"github.com/refit-run/refit/workflows/protocol"
)

func load(t *testing.T, path string) *history.History {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	text, err := gzip.NewReader(f)
	require.NoError(t, err)
	h, err := client.HistoryFromJSON(text, client.HistoryJSONOptions{})
	require.NoError(t, err)
	require.NotEmpty(t, h.Events)
	return h
}

// started is what the first event says: workflow type and execution. The code
// names children, artifacts and objects by it.
func started(t *testing.T, h *history.History) (string, workflow.Execution) {
	t.Helper()
	a := h.Events[0].GetWorkflowExecutionStartedEventAttributes()
	require.NotNil(t, a, "the first event starts no workflow")
	return a.GetWorkflowType().GetName(), workflow.Execution{ID: a.GetWorkflowId(), RunID: a.GetOriginalExecutionRunId()}
}

func recordings(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob("testdata/*/*.json.gz")
	require.NoError(t, err)
	require.NotEmpty(t, paths, "make record-histories writes them")
	return paths
}

func TestRecordedRunsReplay(t *testing.T) {
	for _, path := range recordings(t) {
		t.Run(path, func(t *testing.T) {
			h := load(t, path)
			_, execution := started(t, h)
			r := worker.NewWorkflowReplayer()
			refit.RegisterWorkflows(r)
			assert.NoError(t, r.ReplayWorkflowHistoryWithOptions(nil, h, worker.ReplayWorkflowHistoryOptions{OriginalExecution: execution}))
		})
	}
}

// TestTheRecordingsHoldEveryKindOfRun keeps a new recording from losing what
// an old one proved.
func TestTheRecordingsHoldEveryKindOfRun(t *testing.T) {
	kinds, verbs, components := map[string]bool{}, map[string]bool{}, map[string]bool{}
	continued := false
	for _, path := range recordings(t) {
		h := load(t, path)
		kind, _ := started(t, h)
		kinds[kind] = true
		first := h.Events[0].GetWorkflowExecutionStartedEventAttributes()
		continued = continued || first.GetContinuedExecutionRunId() != ""
		if kind == protocol.Rollout {
			var in struct{ Component string }
			require.NoError(t, converter.GetDefaultDataConverter().FromPayload(first.GetInput().GetPayloads()[0], &in))
			components[in.Component] = true
		}
		for _, e := range h.Events {
			if e.EventType == enums.EVENT_TYPE_WORKFLOW_EXECUTION_UPDATE_ACCEPTED {
				verbs[e.GetWorkflowExecutionUpdateAcceptedEventAttributes().GetAcceptedRequest().GetInput().GetName()] = true
			}
		}
	}
	for _, kind := range []string{
		protocol.TensorFusionUpgrade, protocol.TensorFusionRollback, protocol.Rollout, protocol.RolloutShard, protocol.GPUNode,
		protocol.NATSDrain, protocol.NATSReplicas, protocol.NATSRoll,
		protocol.CassandraBackup, protocol.CassandraExpand, protocol.CassandraReplication, protocol.CassandraLedger,
	} {
		assert.True(t, kinds[kind], "no run of %s is recorded", kind)
	}
	for _, verb := range []string{protocol.Approve, protocol.Reject, protocol.Rollback, protocol.Abort, protocol.Retry, protocol.Skip, protocol.Pause, protocol.Resume} {
		assert.True(t, verbs[verb], "no recorded run was answered with %s", verb)
	}
	for _, component := range []string{"hypervisor", "worker", "client"} {
		assert.True(t, components[component], "no rollout of component %s is recorded", component)
	}
	assert.True(t, continued, "no recorded run continued as new")
}

// TestAnotherOrderOfStepsIsNoticed keeps the replay honest: with one of its
// activities taken out, a history must not pass.
func TestAnotherOrderOfStepsIsNoticed(t *testing.T) {
	for _, path := range recordings(t) {
		h := load(t, path)
		kind, execution := started(t, h)
		if kind != protocol.TensorFusionUpgrade {
			continue
		}
		for _, e := range h.Events {
			if a := e.GetActivityTaskScheduledEventAttributes(); a != nil {
				a.ActivityType.Name = "another"
				break
			}
		}
		r := worker.NewWorkflowReplayer()
		refit.RegisterWorkflows(r)
		silent := log.NewStructuredLogger(slog.New(slog.DiscardHandler))
		assert.Error(t, r.ReplayWorkflowHistoryWithOptions(silent, h, worker.ReplayWorkflowHistoryOptions{OriginalExecution: execution}))
		return
	}
	t.Fatal("no upgrade is recorded")
}
