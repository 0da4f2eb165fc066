package run

import (
	"context"
	"fmt"
	"strings"
	"time"

	commonpb "go.temporal.io/api/common/v1"
	enumspb "go.temporal.io/api/enums/v1"
	workflowpb "go.temporal.io/api/workflow/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/converter"

	"github.com/refit-run/refit/workflows/protocol"
)

// Run is one workflow run as the server lists it.
type Run struct {
	WorkflowID string     `json:"workflowID"`
	RunID      string     `json:"runID"`
	Kind       string     `json:"kind"`
	State      string     `json:"state"` // open, completed, failed, terminated, canceled, timedOut
	Phase      string     `json:"phase,omitempty"`
	WaitingFor string     `json:"waitingFor,omitempty"`
	Cluster    string     `json:"cluster,omitempty"`
	Started    time.Time  `json:"started"`
	Closed     *time.Time `json:"closed,omitempty"`
}

// Open tells whether the run has not closed yet.
func (r Run) Open() bool { return r.State == "open" }

// Kinds are the workflow types that people start or meet on their own.
var Kinds = []string{
	protocol.TensorFusionUpgrade, protocol.TensorFusionRollback, protocol.Rollout, protocol.GPUNode,
	protocol.NATSDrain, protocol.NATSReplicas, protocol.NATSRoll,
	protocol.CassandraBackup, protocol.CassandraExpand, protocol.CassandraReplication, protocol.CassandraLedger,
	protocol.OpenBaoSnapshot, protocol.OpenBaoReplace,
}

// List returns runs, newest first; with all=false only open ones. Runs that
// another run started are left out: their parent speaks for them.
func List(ctx context.Context, c *Connection, all bool, limit int) ([]Run, error) {
	query := "WorkflowType IN ('" + strings.Join(Kinds, "','") + "')"
	if !all {
		query += " AND ExecutionStatus = 'Running'"
	}
	var out []Run
	var page []byte
	for {
		resp, err := c.ListWorkflow(ctx, &workflowservice.ListWorkflowExecutionsRequest{
			Namespace: c.Namespace, Query: query, NextPageToken: page,
		})
		if err != nil {
			return nil, fmt.Errorf("list runs in namespace %s: %w", c.Namespace, err)
		}
		for _, info := range resp.Executions {
			if child(info) {
				continue
			}
			out = append(out, fromInfo(info))
			if len(out) == limit {
				return out, nil
			}
		}
		if page = resp.NextPageToken; len(page) == 0 {
			return out, nil
		}
	}
}

// child tells a run that another run started. Older servers list the root but
// not the parent.
func child(info *workflowpb.WorkflowExecutionInfo) bool {
	if info.ParentExecution.GetWorkflowId() != "" {
		return true
	}
	root := info.RootExecution
	return root.GetRunId() != "" && root.GetWorkflowId() != info.Execution.GetWorkflowId()
}

// Find resolves what a person typed: a workflow ID, or nothing when exactly
// one run is open.
func Find(ctx context.Context, c *Connection, id string) (Run, error) {
	if id != "" {
		return Describe(ctx, c, id)
	}
	open, err := List(ctx, c, false, 0)
	if err != nil {
		return Run{}, err
	}
	switch len(open) {
	case 1:
		return open[0], nil
	case 0:
		return Run{}, &Unknown{fmt.Sprintf("no run is open in namespace %s at %s: name a closed one (refit list --all), or start one with `refit start PLAN`", c.Namespace, c.Address)}
	}
	ids := make([]string, len(open))
	for i, r := range open {
		ids[i] = r.WorkflowID
	}
	return Run{}, &Unknown{fmt.Sprintf("%d runs are open, name one of them: %s", len(open), strings.Join(ids, ", "))}
}

// Describe reads the latest run of a workflow ID.
func Describe(ctx context.Context, c *Connection, id string) (Run, error) {
	resp, err := c.DescribeWorkflowExecution(ctx, id, "")
	if notFound(err) {
		return Run{}, &Unknown{fmt.Sprintf("run %q is not known in namespace %s at %s; see `refit list --all`", id, c.Namespace, c.Address)}
	}
	if err != nil {
		return Run{}, fmt.Errorf("describe run %s: %w", id, err)
	}
	return fromInfo(resp.WorkflowExecutionInfo), nil
}

var states = map[enumspb.WorkflowExecutionStatus]string{
	enumspb.WORKFLOW_EXECUTION_STATUS_RUNNING:          "open",
	enumspb.WORKFLOW_EXECUTION_STATUS_PAUSED:           "open",
	enumspb.WORKFLOW_EXECUTION_STATUS_CONTINUED_AS_NEW: "continued",
	enumspb.WORKFLOW_EXECUTION_STATUS_COMPLETED:        "completed",
	enumspb.WORKFLOW_EXECUTION_STATUS_FAILED:           "failed",
	enumspb.WORKFLOW_EXECUTION_STATUS_TERMINATED:       "terminated",
	enumspb.WORKFLOW_EXECUTION_STATUS_CANCELED:         "canceled",
	enumspb.WORKFLOW_EXECUTION_STATUS_TIMED_OUT:        "timedOut",
}

func fromInfo(info *workflowpb.WorkflowExecutionInfo) Run {
	r := Run{
		WorkflowID: info.Execution.GetWorkflowId(),
		RunID:      info.Execution.GetRunId(),
		Kind:       info.Type.GetName(),
		State:      states[info.Status],
		Started:    info.StartTime.AsTime(),
	}
	if info.CloseTime != nil {
		t := info.CloseTime.AsTime()
		r.Closed = &t
	}
	fields := info.SearchAttributes.GetIndexedFields()
	r.Phase = keyword(fields[protocol.AttrPhase])
	r.WaitingFor = keyword(fields[protocol.AttrWaitingFor])
	r.Cluster = keyword(fields[protocol.AttrCluster])
	return r
}

// keyword reads a Keyword attribute; absent ones are "": without `refit setup`
// the list is just less telling.
func keyword(p *commonpb.Payload) string {
	var s string
	if p == nil || converter.GetDefaultDataConverter().FromPayload(p, &s) != nil {
		return ""
	}
	return s
}

// Polled tells whether the process with that pid on this host polls the
// workflow task queue. The server remembers pollers for minutes, so only the
// pid in the identity tells a live worker from its predecessor.
func Polled(ctx context.Context, c *Connection, pid int) (bool, error) {
	resp, err := c.DescribeTaskQueue(ctx, protocol.TaskQueue, enumspb.TASK_QUEUE_TYPE_WORKFLOW)
	if err != nil {
		return false, fmt.Errorf("describe task queue %s: %w", protocol.TaskQueue, err)
	}
	for _, p := range resp.Pollers {
		if strings.HasPrefix(p.Identity, fmt.Sprintf("%d@", pid)) {
			return true, nil
		}
	}
	return false, nil
}
