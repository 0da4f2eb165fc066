package lease_test

import (
	"cmp"
	"context"
	"slices"
	"time"

	commonpb "go.temporal.io/api/common/v1"
	"go.temporal.io/api/enums/v1"
	historypb "go.temporal.io/api/history/v1"
	"go.temporal.io/api/serviceerror"
	workflowpb "go.temporal.io/api/workflow/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// temporalServer answers the questions that a Lease asks of Temporal.
type temporalServer struct {
	workflowservice.WorkflowServiceClient
	id string
	// runs of every workflow, the newest last.
	runs []temporalRun
	// onDescribe runs before each answer.
	onDescribe func()
}

// temporalRun is one run; its chain begins with itself unless first is set.
type temporalRun struct {
	workflow, run, first string
	status               enums.WorkflowExecutionStatus
	started, closed      time.Time
}

// temporalClient is a client of it.
type temporalClient struct {
	client.Client
	server *temporalServer
}

func (c temporalClient) WorkflowService() workflowservice.WorkflowServiceClient { return c.server }

func (s *temporalServer) GetClusterInfo(context.Context, *workflowservice.GetClusterInfoRequest, ...grpc.CallOption) (*workflowservice.GetClusterInfoResponse, error) {
	return &workflowservice.GetClusterInfoResponse{ClusterId: s.id}, nil
}

// find is the named run, or the workflow's newest.
func (s *temporalServer) find(e *commonpb.WorkflowExecution) (temporalRun, error) {
	for _, r := range slices.Backward(s.runs) {
		if r.workflow == e.GetWorkflowId() && (e.GetRunId() == "" || e.GetRunId() == r.run) {
			return r, nil
		}
	}
	return temporalRun{}, serviceerror.NewNotFound("no execution " + e.GetWorkflowId() + " " + e.GetRunId())
}

func (s *temporalServer) DescribeWorkflowExecution(_ context.Context, r *workflowservice.DescribeWorkflowExecutionRequest, _ ...grpc.CallOption) (*workflowservice.DescribeWorkflowExecutionResponse, error) {
	if s.onDescribe != nil {
		s.onDescribe()
	}
	found, err := s.find(r.GetExecution())
	if err != nil {
		return nil, err
	}
	info := &workflowpb.WorkflowExecutionInfo{
		Execution: &commonpb.WorkflowExecution{WorkflowId: found.workflow, RunId: found.run},
		Status:    found.status, StartTime: timestamppb.New(found.started),
	}
	if !found.closed.IsZero() {
		info.CloseTime = timestamppb.New(found.closed)
	}
	return &workflowservice.DescribeWorkflowExecutionResponse{WorkflowExecutionInfo: info}, nil
}

func (s *temporalServer) GetWorkflowExecutionHistory(_ context.Context, r *workflowservice.GetWorkflowExecutionHistoryRequest, _ ...grpc.CallOption) (*workflowservice.GetWorkflowExecutionHistoryResponse, error) {
	found, err := s.find(r.GetExecution())
	if err != nil {
		return nil, err
	}
	return &workflowservice.GetWorkflowExecutionHistoryResponse{History: &historypb.History{Events: []*historypb.HistoryEvent{{
		EventType: enums.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED,
		Attributes: &historypb.HistoryEvent_WorkflowExecutionStartedEventAttributes{
			WorkflowExecutionStartedEventAttributes: &historypb.WorkflowExecutionStartedEventAttributes{FirstExecutionRunId: cmp.Or(found.first, found.run)},
		},
	}}}}, nil
}
