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
	"go.temporal.io/sdk/testsuite"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
)

func TestMain(m *testing.M) { os.Exit(apiservertest.Main(m)) }

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
	for i := range 8 {
		b.temporal.runs = append(b.temporal.runs, temporalRun{workflow: "w", run: fmt.Sprint(i), status: enums.WORKFLOW_EXECUTION_STATUS_RUNNING})
	}
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

// passed is a while that a takeover need not wait for any more.
const passed = lease.HeartbeatMargin + time.Second

func TestTakeoverRules(t *testing.T) {
	const (
		workflow = "upgrade.prod.tf"
		running  = enums.WORKFLOW_EXECUTION_STATUS_RUNNING
		anew     = enums.WORKFLOW_EXECUTION_STATUS_CONTINUED_AS_NEW
		killed   = enums.WORKFLOW_EXECUTION_STATUS_TERMINATED
	)
	ago := time.Now().Add(-passed)
	for _, c := range []struct {
		name   string
		former string
		runs   []temporalRun
		locked []string // words of the refusal; none: taken over
	}{
		{"a running owner", first, []temporalRun{{workflow: workflow, run: "run-1", status: running}},
			[]string{workflow, "run-1", "Running", "refit abort"}},
		{"a terminated owner", first, []temporalRun{{workflow: workflow, run: "run-1", status: killed, closed: ago}}, nil},
		{"a failed owner", first, []temporalRun{{workflow: workflow, run: "run-1", status: enums.WORKFLOW_EXECUTION_STATUS_FAILED, closed: ago}}, nil},
		{"an owner that works on as a newer run", first, []temporalRun{
			{workflow: workflow, run: "run-1", status: anew, closed: ago},
			{workflow: workflow, run: "run-1b", first: "run-1", status: running},
		}, []string{workflow, "run-1b", "Running", "refit abort"}},
		{"an owner terminated after it continued as new", first, []temporalRun{
			{workflow: workflow, run: "run-1", status: anew, closed: ago.Add(-time.Hour)},
			{workflow: workflow, run: "run-1b", first: "run-1", status: anew, closed: ago.Add(-time.Minute)},
			{workflow: workflow, run: "run-1c", first: "run-1", status: killed, closed: ago},
		}, nil},
		{"an owner whose first run Temporal has forgotten", first, []temporalRun{
			{workflow: workflow, run: "run-1c", first: "run-1", status: killed, closed: ago},
		}, nil},
		{"an owner that works on after a reset", first, []temporalRun{
			{workflow: workflow, run: "run-1", status: killed, closed: ago},
			{workflow: workflow, run: "run-1r", first: "run-1", status: running},
		}, []string{"run-1r", "Running"}},
		{"an owner named by a later run of its chain", holder("temporal-a", workflow, "run-1b"), []temporalRun{
			{workflow: workflow, run: "run-1b", first: "run-1", status: killed, closed: ago},
			{workflow: workflow, run: "run-1c", first: "run-1", status: running},
		}, []string{"run-1c", "Running"}},
		{"a closed owner whose workflow id runs again", first, []temporalRun{
			{workflow: workflow, run: "run-1", status: killed, closed: ago},
			{workflow: workflow, run: "run-2", status: running, started: ago},
		}, nil},
		{"a closed chain whose workflow id runs again", first, []temporalRun{
			{workflow: workflow, run: "run-1", status: anew, closed: ago},
			{workflow: workflow, run: "run-1b", first: "run-1", status: killed, closed: ago},
			{workflow: workflow, run: "run-2", status: running, started: ago},
		}, nil},
		{"an owner whose newest run Temporal does not show", first, []temporalRun{{workflow: workflow, run: "run-1", status: anew, closed: ago}},
			[]string{"ContinuedAsNew"}},
		{"an owner in a state unheard of", first, []temporalRun{{workflow: workflow, run: "run-1", status: 99, closed: ago}}, []string{"which is"}},
		{"an owner that Temporal does not know", first, nil, []string{"no execution", "delete lease refit-tf"}},
		{"an owner forgotten for another chain", first, []temporalRun{{workflow: workflow, run: "run-2", status: running, started: ago}},
			[]string{"no execution", "run-1", "delete lease refit-tf"}},
		{"an owner in another Temporal", holder("temporal-b", workflow, "run-1"), nil, []string{"another Temporal cluster", "temporal-b"}},
		{"somebody who is no run", "kubectl", nil, []string{"kubectl", "no run of Refit"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, second)
			_, err := b.activities.Acquire(t.Context(), b.as(c.former))
			require.NoError(t, err)
			b.temporal.runs = c.runs
			b.age(t, passed)
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
	const workflow = "upgrade.prod.tf"
	// Closed, or closed at the latest, all but 300 ms of the margin ago.
	almost := func() time.Time { return time.Now().Add(300*time.Millisecond - lease.HeartbeatMargin) }
	long := time.Now().Add(-time.Hour)
	for _, c := range []struct {
		name string
		runs func() []temporalRun
	}{
		{"of one run", func() []temporalRun {
			return []temporalRun{{workflow: workflow, run: "run-1", status: enums.WORKFLOW_EXECUTION_STATUS_TERMINATED, closed: almost()}}
		}},
		{"of a chain's newest run", func() []temporalRun {
			return []temporalRun{
				{workflow: workflow, run: "run-1", status: enums.WORKFLOW_EXECUTION_STATUS_CONTINUED_AS_NEW, closed: long},
				{workflow: workflow, run: "run-1b", first: "run-1", status: enums.WORKFLOW_EXECUTION_STATUS_TERMINATED, closed: almost()},
			}
		}},
		{"when the same workflow id starts again", func() []temporalRun {
			return []temporalRun{
				{workflow: workflow, run: "run-1", status: enums.WORKFLOW_EXECUTION_STATUS_CONTINUED_AS_NEW, closed: long},
				{workflow: workflow, run: "run-2", status: enums.WORKFLOW_EXECUTION_STATUS_RUNNING, started: almost()},
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, second)
			_, err := b.activities.Acquire(t.Context(), b.as(first))
			require.NoError(t, err)
			b.age(t, time.Minute)
			b.temporal.runs = c.runs()
			began := time.Now()
			got, err := b.activities.Acquire(t.Context(), b.request)
			require.NoError(t, err)
			require.Equal(t, first, got.TookOverFrom)
			require.GreaterOrEqual(t, time.Since(began), 200*time.Millisecond, "it must wait the margin out")
		})
	}
}

func TestTakeoverLooksAgainAfterTheWait(t *testing.T) {
	b := newBench(t, second)
	_, err := b.activities.Acquire(t.Context(), b.as(first))
	require.NoError(t, err)
	b.age(t, time.Minute)
	closed := temporalRun{workflow: "upgrade.prod.tf", run: "run-1", status: enums.WORKFLOW_EXECUTION_STATUS_TERMINATED, closed: time.Now().Add(300*time.Millisecond - lease.HeartbeatMargin)}
	b.temporal.runs = []temporalRun{closed}
	asked := 0
	b.temporal.onDescribe = func() {
		// A person resets the run while we wait.
		if asked++; asked == 2 {
			b.temporal.runs = append(b.temporal.runs, temporalRun{workflow: "upgrade.prod.tf", run: "run-1r", first: "run-1", status: enums.WORKFLOW_EXECUTION_STATUS_RUNNING})
		}
	}
	_, err = b.activities.Acquire(t.Context(), b.request)
	requireLocked(t, err, "run-1r")
	require.NoError(t, b.verify(t, first))
}

func TestCancelledTakeoverTakesNothing(t *testing.T) {
	b := newBench(t, second)
	_, err := b.activities.Acquire(t.Context(), b.as(first))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	b.temporal.runs = []temporalRun{{workflow: "upgrade.prod.tf", run: "run-1", status: enums.WORKFLOW_EXECUTION_STATUS_TERMINATED, closed: time.Now()}}
	b.temporal.onDescribe = cancel
	_, err = b.activities.Acquire(ctx, b.request)
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, b.verify(t, first))
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

func TestHolderOfAnActivityNamesTheFirstRunOfItsChain(t *testing.T) {
	b := newBench(t, "")
	// The ids that the SDK's test environment gives to an activity's workflow.
	b.temporal.runs = []temporalRun{{workflow: "default-test-workflow-id", run: "default-test-run-id", first: "run-1", status: enums.WORKFLOW_EXECUTION_STATUS_RUNNING}}
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
	require.Equal(t, "default-test-workflow-id", owner.WorkflowID)
	require.Equal(t, "run-1", owner.RunID)
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
