package lease_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	commonpb "go.temporal.io/api/common/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/tests/temporaltest"
)

const queue = "chain"

// keeper takes the Lease in its chain's first run and keeps it until it is
// told to end; "anew" makes it continue as new.
func keeper(ctx workflow.Context, r lease.AcquireRequest) error {
	if r.Holder == "" {
		ctx := workflow.WithActivityOptions(ctx, workflow.ActivityOptions{StartToCloseTimeout: time.Minute})
		var got lease.AcquireResult
		if err := workflow.ExecuteActivity(ctx, lease.AcquireActivity, r).Get(ctx, &got); err != nil {
			return err
		}
		r.Holder = got.Holder
	}
	if err := workflow.SetQueryHandler(ctx, "holder", func() (string, error) { return r.Holder, nil }); err != nil {
		return err
	}
	workflow.GetSignalChannel(ctx, "anew").Receive(ctx, nil)
	return workflow.NewContinueAsNewError(ctx, keeper, r)
}

// chain is one workflow on a real Temporal server that holds the Lease.
type chain struct {
	*bench
	t      *testing.T
	client client.Client
	id     string
	first  string
}

func startChain(t *testing.T) *chain {
	binary := temporaltest.Binary()
	if binary == "" {
		t.Skip(temporaltest.Missing)
	}
	b := newBench(t, "")
	_, temporal := temporaltest.Start(t, binary)
	b.activities.Temporal = temporal
	w := worker.New(temporal, queue, worker.Options{})
	w.RegisterWorkflow(keeper)
	w.RegisterActivityWithOptions(b.activities.Acquire, activity.RegisterOptions{Name: lease.AcquireActivity})
	require.NoError(t, w.Start())
	t.Cleanup(w.Stop)
	c := &chain{bench: b, t: t, client: temporal, id: "Rollout.prod.tf"}
	c.first = c.start()
	require.Equal(t, c.first, c.holder().RunID)
	return c
}

func (c *chain) start() string {
	run, err := c.client.ExecuteWorkflow(c.t.Context(), client.StartWorkflowOptions{ID: c.id, TaskQueue: queue}, keeper, c.request)
	require.NoError(c.t, err)
	return run.GetRunID()
}

// holder asks the chain's newest run which holder it knows, once it has one.
func (c *chain) holder() lease.Owner {
	var text string
	require.Eventually(c.t, func() bool {
		value, err := c.client.QueryWorkflow(c.t.Context(), c.id, "", "holder")
		return err == nil && value.Get(&text) == nil
	}, 20*time.Second, 50*time.Millisecond)
	o, ok := lease.ParseOwner(text)
	require.True(c.t, ok, text)
	return o
}

// newest is the chain's newest run, once it is not the former one.
func (c *chain) newest(former string) (run string) {
	require.Eventually(c.t, func() bool {
		d, err := c.client.DescribeWorkflowExecution(c.t.Context(), c.id, "")
		if err != nil {
			return false
		}
		run = d.GetWorkflowExecutionInfo().GetExecution().GetRunId()
		return run != former
	}, 20*time.Second, 50*time.Millisecond)
	return run
}

func (c *chain) terminate() {
	require.NoError(c.t, c.client.TerminateWorkflow(c.t.Context(), c.id, "", "a test's"))
}

// other is another run's try, given up after a second of waiting.
func (c *chain) other() error {
	o := c.holder()
	o.WorkflowID, o.RunID = "upgrade.prod.tf", "run-1"
	return c.try(o)
}

func (c *chain) try(o lease.Owner) error {
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Second)
	defer cancel()
	_, err := c.activities.Acquire(ctx, c.as(o.String()))
	return err
}

func TestAChainThatContinuedAsNewHoldsTheLeaseUntilItsNewestRunCloses(t *testing.T) {
	c := startChain(t)
	owner := c.holder()
	require.NoError(t, c.client.SignalWorkflow(t.Context(), c.id, "", "anew", nil))
	second := c.newest(c.first)
	requireLocked(t, c.other(), second, "Running")

	c.terminate()
	other := lease.Owner{TemporalCluster: owner.TemporalCluster, Namespace: owner.Namespace, WorkflowID: "upgrade.prod.tf", RunID: "run-1"}
	require.ErrorIs(t, c.try(other), context.DeadlineExceeded, "not refused any more, but it waits the margin out")

	// The same workflow id starts again: not the owner, and it waits as well.
	c.request.Holder = owner.String() // this run only shows itself
	third := c.start()
	require.NotEqual(t, c.first, third)
	require.ErrorIs(t, c.try(other), context.DeadlineExceeded)
	require.NoError(t, c.verify(t, owner.String()))
}

func TestAResetRunStillHoldsTheLease(t *testing.T) {
	c := startChain(t)
	owner := c.holder()
	// To before the Lease was taken: the reset run takes it again.
	reply, err := c.client.ResetWorkflowExecution(t.Context(), &workflowservice.ResetWorkflowExecutionRequest{
		Namespace: owner.Namespace, WorkflowExecution: &commonpb.WorkflowExecution{WorkflowId: c.id, RunId: c.first},
		RequestId: "a-test", Reason: "a test's", WorkflowTaskFinishEventId: 4,
	})
	require.NoError(t, err)
	require.Equal(t, reply.GetRunId(), c.newest(c.first))
	require.Equal(t, owner, c.holder(), "the reset run is the same owner")
	requireLocked(t, c.other(), reply.GetRunId(), "Running")
	require.NoError(t, c.verify(t, owner.String()))
}
