package run

import (
	"context"
	"errors"
	"fmt"

	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/sdk/client"

	"github.com/refit-run/refit/workflows/protocol"
)

// Request asks for a new run.
type Request struct {
	ID    string
	Kind  string
	Input any
	// Summary and Details are what the Temporal UI shows above the run.
	Summary string
	Details string
}

// summaryLimit is the server's limit for a summary, detailsLimit that for
// details, both in bytes.
const (
	summaryLimit = 400
	detailsLimit = 20000
)

// Start starts the run. An open run with the same ID refuses it: two runs of
// the same object at once would only meet again at the release's lock.
func Start(ctx context.Context, c *Connection, r Request) (Run, error) {
	handle, err := c.ExecuteWorkflow(ctx, client.StartWorkflowOptions{
		ID:                                       r.ID,
		TaskQueue:                                protocol.TaskQueue,
		WorkflowIDConflictPolicy:                 enumspb.WORKFLOW_ID_CONFLICT_POLICY_FAIL,
		WorkflowIDReusePolicy:                    enumspb.WORKFLOW_ID_REUSE_POLICY_ALLOW_DUPLICATE,
		WorkflowExecutionErrorWhenAlreadyStarted: true,
		StaticSummary:                            cut(r.Summary, summaryLimit),
		StaticDetails:                            cut(r.Details, detailsLimit),
	}, r.Kind, r.Input)
	var started *serviceerror.WorkflowExecutionAlreadyStarted
	if errors.As(err, &started) {
		open := ""
		if o, err := Observe(ctx, c, r.ID); err == nil {
			open = ", open since " + o.Run.Started.Local().Format("2006-01-02 15:04:05")
			if o.Status != nil {
				open += ", " + string(o.Status.Phase)
			}
		}
		return Run{}, &Refused{fmt.Sprintf("run %s is open already (run ID %s%s): follow it with `refit watch %s`, or end it with `refit abort %s`",
			r.ID, started.RunId, open, r.ID, r.ID)}
	}
	if err != nil {
		return Run{}, fmt.Errorf("start %s: %w", r.ID, err)
	}
	return Run{WorkflowID: handle.GetID(), RunID: handle.GetRunID(), Kind: r.Kind, State: "open"}, nil
}

// cut shortens s to limit bytes at a rune's boundary.
func cut(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	end := limit - len("…")
	for end > 0 && s[end]&0xC0 == 0x80 {
		end--
	}
	return s[:end] + "…"
}
