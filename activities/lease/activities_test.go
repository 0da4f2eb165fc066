package lease_test

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/api/enums/v1"
	"go.temporal.io/api/serviceerror"
	workflowpb "go.temporal.io/api/workflow/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
)

func TestMain(m *testing.M) { os.Exit(apiservertest.Main(m)) }

// temporalServer answers the two questions that a Lease asks of Temporal.
type temporalServer struct {
	workflowservice.WorkflowServiceClient
	id     string
	status enums.WorkflowExecutionStatus // unspecified: not found
	closed time.Time
	// onDescribe runs before each answer.
	onDescribe func()
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

func (s *temporalServer) DescribeWorkflowExecution(_ context.Context, r *workflowservice.DescribeWorkflowExecutionRequest, _ ...grpc.CallOption) (*workflowservice.DescribeWorkflowExecutionResponse, error) {
	if s.onDescribe != nil {
		s.onDescribe()
	}
	if s.status == enums.WORKFLOW_EXECUTION_STATUS_UNSPECIFIED {
		return nil, serviceerror.NewNotFound("no execution " + r.GetExecution().GetRunId())
	}
	info := &workflowpb.WorkflowExecutionInfo{Status: s.status}
	if !s.closed.IsZero() {
		info.CloseTime = timestamppb.New(s.closed)
	}
	return &workflowservice.DescribeWorkflowExecutionResponse{WorkflowExecutionInfo: info}, nil
}

type bench struct {
	activities *lease.Activities
	temporal   *temporalServer
	kube       *kube.Client
	request    lease.AcquireRequest
}

func newBench(t *testing.T, holder string) *bench {
	server := apiservertest.Shared(t)
	b := &bench{temporal: &temporalServer{id: "temporal-a"}, kube: server.Client(t)}
	b.activities = &lease.Activities{Clusters: server.Clusters(t, "prod"), Temporal: temporalClient{server: b.temporal}}
	b.request = lease.AcquireRequest{Target: server.Target(t, "prod"), Namespace: server.Namespace(t), Release: "tf", Holder: holder}
	return b
}

// as is the same request by another run.
func (b *bench) as(holder string) lease.AcquireRequest {
	r := b.request
	r.Holder = holder
	return r
}

// verify asks whether the holder has the Lease.
func (b *bench) verify(t *testing.T, holder string) error {
	return lease.Verify(t.Context(), b.kube.Typed, b.request.Namespace, "tf", holder, "")
}

// age moves the recorded renewal into the past.
func (b *bench) age(t *testing.T, d time.Duration) {
	leases := b.kube.Typed.CoordinationV1().Leases(b.request.Namespace)
	l, err := leases.Get(t.Context(), lease.Name("tf"), metav1.GetOptions{})
	require.NoError(t, err)
	past := metav1.NewMicroTime(time.Now().Add(-d))
	l.Spec.RenewTime = &past
	_, err = leases.Update(t.Context(), l, metav1.UpdateOptions{})
	require.NoError(t, err)
}

func holder(temporal, workflow, run string) string {
	return lease.Owner{TemporalCluster: temporal, Namespace: "default", WorkflowID: workflow, RunID: run}.String()
}

var (
	first  = holder("temporal-a", "upgrade.prod.tf", "run-1")
	second = holder("temporal-a", "upgrade.prod.tf", "run-2")
)

func requireLocked(t *testing.T, err error, words ...string) {
	t.Helper()
	f, ok := lease.LockedFinding(err)
	require.True(t, ok, "expected Locked, found %v", err)
	for _, word := range words {
		require.Contains(t, f.String(), word)
	}
	require.NotEmpty(t, f.Next, "what to do")
}

func TestAcquireTwiceAndReleaseTwiceAreHarmless(t *testing.T) {
	b := newBench(t, first)
	for range 2 { // the reply to the first one was lost
		got, err := b.activities.Acquire(t.Context(), b.request)
		require.NoError(t, err)
		require.Equal(t, lease.AcquireResult{Holder: first}, got)
	}
	require.NoError(t, b.verify(t, first))
	released, err := b.activities.Release(t.Context(), b.request)
	require.NoError(t, err)
	require.True(t, released.Released)
	released, err = b.activities.Release(t.Context(), b.request)
	require.NoError(t, err)
	require.Equal(t, lease.ReleaseResult{}, released)
	requireLocked(t, b.verify(t, first), "no Lease")
}

func TestOneOfManyGetsTheLease(t *testing.T) {
	b := newBench(t, first)
	b.temporal.status = enums.WORKFLOW_EXECUTION_STATUS_RUNNING
	var wg sync.WaitGroup
	results := make(chan error, 8)
	for i := range 8 {
		wg.Go(func() {
			_, err := b.activities.Acquire(t.Context(), b.as(holder("temporal-a", "w", fmt.Sprint(i))))
			results <- err
		})
	}
	wg.Wait()
	close(results)
	won := 0
	for err := range results {
		if err == nil {
			won++
			continue
		}
		requireLocked(t, err)
	}
	require.Equal(t, 1, won)
}

func TestTakeoverRules(t *testing.T) {
	const enough = lease.HeartbeatMargin + time.Second
	for _, c := range []struct {
		name   string
		former string
		status enums.WorkflowExecutionStatus
		locked []string // words of the refusal; none: taken over
	}{
		{"a running owner", first, enums.WORKFLOW_EXECUTION_STATUS_RUNNING, []string{"upgrade.prod.tf", "run-1", "Running", "refit abort"}},
		{"a terminated owner", first, enums.WORKFLOW_EXECUTION_STATUS_TERMINATED, nil},
		{"a failed owner", first, enums.WORKFLOW_EXECUTION_STATUS_FAILED, nil},
		{"our own chain, continued as new", first, enums.WORKFLOW_EXECUTION_STATUS_CONTINUED_AS_NEW, nil},
		{"another chain, continued as new", holder("temporal-a", "other", "run-1"), enums.WORKFLOW_EXECUTION_STATUS_CONTINUED_AS_NEW, []string{"newer run"}},
		{"an owner that Temporal does not know", first, enums.WORKFLOW_EXECUTION_STATUS_UNSPECIFIED, []string{"no execution run-1", "delete lease refit-tf"}},
		{"an owner in another Temporal", holder("temporal-b", "upgrade.prod.tf", "run-1"), enums.WORKFLOW_EXECUTION_STATUS_COMPLETED, []string{"another Temporal cluster", "temporal-b"}},
		{"somebody who is no run", "kubectl", enums.WORKFLOW_EXECUTION_STATUS_COMPLETED, []string{"kubectl", "no run of Refit"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, second)
			_, err := b.activities.Acquire(t.Context(), b.as(c.former))
			require.NoError(t, err)
			b.temporal.status, b.temporal.closed = c.status, time.Now().Add(-enough)
			b.age(t, enough)
			for range 2 {
				got, err := b.activities.Acquire(t.Context(), b.request)
				if c.locked != nil {
					requireLocked(t, err, c.locked...)
					continue
				}
				require.NoError(t, err)
				require.Equal(t, lease.AcquireResult{Holder: second, TookOverFrom: c.former}, got)
			}
			// The former owner finds out, and can't give away what is not its own.
			err = b.verify(t, c.former)
			if c.locked == nil {
				requireLocked(t, err, second)
				released, err := b.activities.Release(t.Context(), b.as(c.former))
				require.NoError(t, err)
				require.Equal(t, lease.ReleaseResult{Holder: second}, released)
			} else {
				require.NoError(t, err)
			}
		})
	}
}

func TestTakeoverWaitsForTheLastHeartbeat(t *testing.T) {
	b := newBench(t, second)
	_, err := b.activities.Acquire(t.Context(), b.as(first))
	require.NoError(t, err)
	// It closed all but 300 ms of the margin ago.
	b.temporal.status, b.temporal.closed = enums.WORKFLOW_EXECUTION_STATUS_TERMINATED, time.Now().Add(300*time.Millisecond-lease.HeartbeatMargin)
	b.age(t, time.Minute)
	asked := 0
	b.temporal.onDescribe = func() { asked++ }
	got, err := b.activities.Acquire(t.Context(), b.request)
	require.NoError(t, err)
	require.Equal(t, first, got.TookOverFrom)
	require.GreaterOrEqual(t, asked, 2, "it must look again after the wait")

	// Cancelled while it waits, it takes nothing.
	ctx, cancel := context.WithCancel(t.Context())
	b.temporal.closed = time.Now()
	b.temporal.onDescribe = cancel
	_, err = b.activities.Acquire(ctx, b.as(first))
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, b.verify(t, b.request.Holder))
}

func TestOtherClusterIsNeverLocked(t *testing.T) {
	b := newBench(t, first)
	b.request.Target.UID = "another-uid"
	_, err := b.activities.Acquire(t.Context(), b.request)
	_, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class)
	list, err := b.kube.Typed.CoordinationV1().Leases(b.request.Namespace).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	require.Empty(t, list.Items)
}

func TestEngineClaimFencesTheFormerEngine(t *testing.T) {
	b := newBench(t, first)
	_, err := b.activities.Acquire(t.Context(), b.request)
	require.NoError(t, err)
	claim := func(engine string) string {
		former, err := lease.ClaimEngine(t.Context(), b.kube.Typed, b.request.Namespace, "tf", first, engine)
		require.NoError(t, err)
		return former
	}
	verify := func(holder, engine string) error {
		return lease.Verify(t.Context(), b.kube.Typed, b.request.Namespace, "tf", holder, engine)
	}
	require.Empty(t, claim("engine-1"))
	require.NoError(t, verify(first, "engine-1"))
	require.Equal(t, "engine-1", claim("engine-2"))
	requireLocked(t, verify(first, "engine-1"), "another attempt")
	require.NoError(t, verify(first, "engine-2"))
	requireLocked(t, verify(second, "engine-2"), first)
	_, err = lease.ClaimEngine(t.Context(), b.kube.Typed, b.request.Namespace, "tf", second, "engine-3")
	requireLocked(t, err, first)
	require.NoError(t, verify(first, "engine-2"), "a refused claim changes nothing")
}

func TestHolderOfAnActivityNamesItsRun(t *testing.T) {
	b := newBench(t, "")
	var suite testsuite.WorkflowTestSuite
	env := suite.NewTestActivityEnvironment()
	env.RegisterActivity(b.activities.Acquire)
	value, err := env.ExecuteActivity(b.activities.Acquire, b.request)
	require.NoError(t, err)
	var got lease.AcquireResult
	require.NoError(t, value.Get(&got))
	owner, ok := lease.ParseOwner(got.Holder)
	require.True(t, ok, got.Holder)
	require.Equal(t, "temporal-a", owner.TemporalCluster)
	require.NotEmpty(t, owner.RunID)
}

func TestParseOwner(t *testing.T) {
	for text, want := range map[string]lease.Owner{
		"c/ns/wf/run":      {TemporalCluster: "c", Namespace: "ns", WorkflowID: "wf", RunID: "run"},
		"c/ns/wf/part/run": {TemporalCluster: "c", Namespace: "ns", WorkflowID: "wf/part", RunID: "run"},
	} {
		got, ok := lease.ParseOwner(text)
		require.True(t, ok)
		require.Equal(t, want, got)
		require.Equal(t, text, got.String())
	}
	for _, text := range []string{"", "kubectl", "a/b/c", "a//c/d", "a/b/c/"} {
		_, ok := lease.ParseOwner(text)
		require.False(t, ok, text)
	}
}
