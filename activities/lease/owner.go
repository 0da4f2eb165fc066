package lease

import (
	"context"
	"fmt"
	"time"

	commonpb "go.temporal.io/api/common/v1"
	"go.temporal.io/api/enums/v1"
	workflowpb "go.temporal.io/api/workflow/v1"
	"go.temporal.io/api/workflowservice/v1"
)

// ownerState is what Temporal knows of the chain of runs that holds a Lease.
type ownerState struct {
	// run is the chain's newest run, as far as Temporal still tells.
	run    string
	status enums.WorkflowExecutionStatus
	// ended is when the chain had closed at the latest.
	ended time.Time
}

// closed reports that no run of the chain can be at work. A newest run that
// continued as new has a successor, even when Temporal does not show it.
func (o ownerState) closed() bool {
	switch o.status {
	case enums.WORKFLOW_EXECUTION_STATUS_COMPLETED, enums.WORKFLOW_EXECUTION_STATUS_FAILED, enums.WORKFLOW_EXECUTION_STATUS_CANCELED,
		enums.WORKFLOW_EXECUTION_STATUS_TERMINATED, enums.WORKFLOW_EXECUTION_STATUS_TIMED_OUT:
		return true
	}
	return false
}

// ownerOf follows an owner to the newest run of its chain. The run in the
// holder is no measure: it closes when it continues as new or is reset, and
// its chain works on.
func (a *Activities) ownerOf(ctx context.Context, o Owner) (ownerState, error) {
	newest, first, err := a.describe(ctx, o, "")
	if err != nil {
		return ownerState{}, err
	}
	state := ownerState{run: newest.GetExecution().GetRunId(), status: newest.GetStatus(), ended: newest.GetCloseTime().AsTime()}
	if first == o.RunID {
		return state, nil
	}
	// Either the holder names a later run of this chain, or another chain has
	// begun under the same id.
	named, chain, err := a.describe(ctx, o, o.RunID)
	if err != nil || chain == first {
		return state, err
	}
	// One run of a workflow id is open at a time: whatever run was the last of
	// the owner's chain, it had closed when the other chain began.
	state.run, state.status, state.ended = o.RunID, named.GetStatus(), newest.GetStartTime().AsTime()
	if state.status == enums.WORKFLOW_EXECUTION_STATUS_CONTINUED_AS_NEW {
		state.status = enums.WORKFLOW_EXECUTION_STATUS_COMPLETED
	}
	return state, nil
}

// describe asks for a run of the owner's workflow, the newest when run is
// empty, and for the first run of its chain.
func (a *Activities) describe(ctx context.Context, o Owner, run string) (*workflowpb.WorkflowExecutionInfo, string, error) {
	reply, err := a.Temporal.WorkflowService().DescribeWorkflowExecution(ctx, &workflowservice.DescribeWorkflowExecutionRequest{
		Namespace: o.Namespace, Execution: &commonpb.WorkflowExecution{WorkflowId: o.WorkflowID, RunId: run},
	})
	if err != nil {
		return nil, "", err
	}
	info := reply.GetWorkflowExecutionInfo()
	first, err := a.firstRun(ctx, o.Namespace, o.WorkflowID, info.GetExecution().GetRunId())
	return info, first, err
}

// firstRun reads which run began the chain of a run from its first event,
// which a reset copies; older servers have it nowhere else.
func (a *Activities) firstRun(ctx context.Context, namespace, workflow, run string) (string, error) {
	reply, err := a.Temporal.WorkflowService().GetWorkflowExecutionHistory(ctx, &workflowservice.GetWorkflowExecutionHistoryRequest{
		Namespace: namespace, Execution: &commonpb.WorkflowExecution{WorkflowId: workflow, RunId: run}, MaximumPageSize: 1,
	})
	if err != nil {
		return "", err
	}
	events := reply.GetHistory().GetEvents()
	if len(events) == 0 || events[0].GetWorkflowExecutionStartedEventAttributes().GetFirstExecutionRunId() == "" {
		return "", fmt.Errorf("the history of run %s does not begin with a start that names the first run", run)
	}
	return events[0].GetWorkflowExecutionStartedEventAttributes().GetFirstExecutionRunId(), nil
}
