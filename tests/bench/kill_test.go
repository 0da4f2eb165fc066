package bench

import (
	"context"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	enums "go.temporal.io/api/enums/v1"
	workflowpb "go.temporal.io/api/workflow/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/refit-run/refit/workflows/protocol"
)

// replaceActivity is the one that a kill in the middle of a batch interrupts.
const replaceActivity = "tensorfusion.ReplaceHypervisors"

// backToWork starts another upgrade, kills the worker with -9 in the middle of
// its first full batch, starts a new one at once as a supervisor would, and
// measures from the kill until the interrupted activity runs again. The run is
// aborted then: the rest of it would tell nothing.
func (w *world) backToWork(image string) time.Duration {
	w.b.Helper()
	run := w.start(image)
	shard, before := w.replacing(run, 0)
	w.killWorker()
	killed := time.Now()
	w.startWorker()
	again, after := w.replacing(run, before.Attempt+1)
	back := time.Since(killed)
	require.Equal(w.b, shard, again, "the same child goes on")
	require.NotEqual(w.b, before.LastWorkerIdentity, after.LastWorkerIdentity, "another process works on it")
	out, code := w.refit("abort", run, "--by", "bench")
	require.Zero(w.b, code, out)
	w.receipt(run)
	return back
}

// replacing waits until the activity runs, in the given attempt or a later
// one, in a child of the first full batch.
func (w *world) replacing(run string, attempt int32) (child string, found *workflowpb.PendingActivityInfo) {
	w.b.Helper()
	prefix := run + ".rollout.hypervisor." + pool + "."
	parked := ""
	err := wait.PollUntilContextTimeout(context.Background(), 100*time.Millisecond, 10*time.Minute, true, func(ctx context.Context) (bool, error) {
		if child == "" {
			open, err := w.temporal.ListOpenWorkflow(ctx, &workflowservice.ListOpenWorkflowExecutionsRequest{
				Namespace: client.DefaultNamespace, MaximumPageSize: 100,
			})
			if err != nil {
				return false, nil // the server is asked again
			}
			for _, e := range open.Executions {
				if id := e.Execution.WorkflowId; strings.HasPrefix(id, prefix) && strings.Contains(id, "batch-1") {
					child = id
				}
			}
			if child == "" {
				parked = w.parked(ctx, run)
				return parked != "", nil
			}
		}
		d, err := w.temporal.DescribeWorkflowExecution(ctx, child, "")
		if err != nil {
			return false, nil
		}
		for _, p := range d.PendingActivities {
			if p.ActivityType.Name == replaceActivity && p.State == enums.PENDING_ACTIVITY_STATE_STARTED &&
				p.Attempt >= attempt && p.HeartbeatDetails != nil {
				found = p
				return true, nil
			}
		}
		return false, nil
	})
	require.Empty(w.b, parked, "the run parked instead of replacing")
	require.NoError(w.b, err, "the replacement of batch-1 of %s in attempt %d", run, attempt)
	return child, found
}

// parked is what a parked run found, empty while it goes on.
func (w *world) parked(ctx context.Context, run string) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	v, err := w.temporal.QueryWorkflow(ctx, run, "", protocol.QueryStatus)
	if err != nil {
		return "" // a run that has just begun, or a worker that is busy
	}
	var s protocol.Status
	if v.Get(&s) != nil || s.WaitingFor == nil || s.WaitingFor.Kind != protocol.WaitParked {
		return ""
	}
	return s.WaitingFor.Found
}
