package rollout

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
)

const (
	roll  = "rollout.worker.shared.roll"
	evict = "rollout.client.shared.evict"
)

// workload is the world of the driver `controller`.
type workload struct {
	*cluster
	stale   bool
	stalled bool
	missing int // workers of team-a/chat that do not come
	// chat are those connected to the outdated workload team-a/chat, idle says
	// that the other one is outdated too.
	chat []string
	idle bool
}

func (w *workload) observeWorkers(context.Context, tensorfusion.WorkersRequest) (tensorfusion.WorkersResult, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return tensorfusion.WorkersResult{Workloads: []tensorfusion.Workload{
		{Namespace: "team-a", Name: "chat", Replicas: 2, Ready: 2 - w.missing, Stale: w.stale, Connections: slices.Clone(w.chat)},
		{Namespace: "team-b", Name: "idle", Replicas: 1, Ready: 1, Stale: w.idle},
	}}, nil
}

// rollWorkers switches the flag on and is through at once, or stalls, or
// watches until it is stopped.
func (w *workload) rollWorkers(ctx context.Context, r tensorfusion.WorkersRequest) (tensorfusion.WorkersResult, error) {
	require.EqualValues(w.t, 20, r.BatchPercentage)
	w.do(func() { w.flag = true; w.say("flag on") })
	if w.stalled {
		return tensorfusion.WorkersResult{}, finding.Finding{Row: "T15", Object: "GPUPool/tf-shared", Expected: "progress", Found: "none for 10m0s"}.Error(finding.Stop)
	}
	w.do(func() { w.stale, w.idle, w.missing = false, false, 0; w.say("rolled") })
	return w.observeWorkers(ctx, r)
}

func newWorkload(t *testing.T) (*workload, *harness) {
	w := &workload{cluster: newCluster(t, 1), stale: true, chat: []string{"team-a/chat-0", "team-a/chat-1"}}
	return w, newHarness(t, w.cluster, map[string]any{
		tensorfusion.WorkersActivity: w.observeWorkers, tensorfusion.RollWorkersActivity: w.rollWorkers,
	})
}

func workerInput() Input {
	in := input(plan.Strategy{Approvers: 2})
	in.Component, in.Workers = Worker, &WorkerOptions{AcknowledgeLostSessions: true}
	return in
}

func TestWorkersAreRolledByTheControllerAfterAGateThatListsSessions(t *testing.T) {
	w, h := newWorkload(t)
	h.at(time.Hour, func() {
		g := h.waits(protocol.WaitApproval, roll)
		require.Contains(t, g.Found, "1 workloads lose their GPU sessions: team-a/chat (2 workers): team-a/chat-0, team-a/chat-1")
		require.Equal(t, 2, g.Needed)
		require.False(t, w.flag)
		h.signal(protocol.Approve, protocol.Answer{By: "ann"})
	})
	h.at(2*time.Hour, func() { h.signal(protocol.Approve, protocol.Answer{By: "bob"}) })
	r := h.run(workerInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, protocol.Progress{Done: 1, Total: 1}, r.Progress)
	require.False(t, w.flag, "auto update is off again")
}

// The approval is for the sessions that were listed: what has come since is
// asked for, until nothing has.
func TestSessionsThatCameSinceTheApprovalAreAskedForAnew(t *testing.T) {
	w, h := newWorkload(t)
	in := workerInput()
	in.Strategy.Approvers = 1
	asked := 0
	approve := func(found string, meanwhile func()) func() {
		return func() {
			asked++
			require.Contains(t, h.waits(protocol.WaitApproval, roll).Found, found)
			require.NotContains(t, w.log, "flag on", "nobody loses a session that was not accepted")
			w.do(meanwhile)
			h.signal(protocol.Approve, protocol.Answer{By: "ann"})
		}
	}
	h.at(time.Hour, approve("1 workloads lose", func() { w.chat = append(w.chat, "team-a/chat-2") }))
	h.at(2*time.Hour, approve("the list has grown (team-a/chat with 3 connections instead of 2): 1 workloads lose their GPU sessions: team-a/chat (2 workers): team-a/chat-0, team-a/chat-1, team-a/chat-2",
		func() { w.idle = true }))
	h.at(3*time.Hour, approve("the list has grown (team-b/idle with 0 connections): 2 workloads lose", func() {
		w.chat = []string{"team-a/chat-3"} // fewer, and another one
	}))
	require.Equal(t, protocol.OutcomeDone, h.run(in).Outcome)
	require.Equal(t, 3, asked)
	require.Contains(t, w.log, "flag on")
}

// retried is a roll that stalls after its approval; repair comes before the retry.
func retried(t *testing.T, repair func(*workload)) (*workload, *harness, Input) {
	w, h := newWorkload(t)
	w.stalled = true
	in := workerInput()
	in.Strategy.Approvers = 1
	h.at(time.Hour, func() { h.signal(protocol.Approve, protocol.Answer{By: "ann"}) })
	h.at(2*time.Hour, func() {
		h.waits(protocol.WaitParked, roll)
		w.do(func() { repair(w) })
		h.signal(protocol.Retry, protocol.Answer{})
	})
	return w, h, in
}

// A repair before a retry takes its time too.
func TestSessionsThatCameBeforeARetryAreAskedForAnew(t *testing.T) {
	w, h, in := retried(t, func(w *workload) { w.stalled = false; w.idle = true })
	asked := false
	h.at(3*time.Hour, func() {
		asked = true
		require.Contains(t, h.waits(protocol.WaitApproval, roll).Found, "team-b/idle with 0 connections")
		require.NotContains(t, w.log, "rolled")
		h.signal(protocol.Approve, protocol.Answer{By: "ann"})
	})
	require.Equal(t, protocol.OutcomeDone, h.run(in).Outcome)
	require.True(t, asked)
}

func TestWorkersThatSomebodyElseRolledMeanwhileAreLeft(t *testing.T) {
	w, h := newWorkload(t)
	in := workerInput()
	in.Strategy.Approvers = 1
	h.at(time.Hour, func() {
		w.do(func() { w.stale = false })
		h.signal(protocol.Approve, protocol.Answer{By: "ann"})
	})
	h.run(in)
	require.NotContains(t, w.log, "flag on")
}

func TestWorkersThatStallParkWithTheFlagOffAndGoOnAfterRetry(t *testing.T) {
	w, h := newWorkload(t)
	w.stalled = true
	in := workerInput()
	in.Strategy.Approvers = 1
	h.at(time.Hour, func() { h.signal(protocol.Approve, protocol.Answer{By: "ann"}) })
	h.at(2*time.Hour, func() {
		require.Contains(t, h.waits(protocol.WaitParked, roll).Found, "none for 10m0s")
		require.False(t, w.flag)
		w.do(func() { w.stalled = false })
		h.signal(protocol.Retry, protocol.Answer{})
	})
	require.Equal(t, protocol.OutcomeDone, h.run(in).Outcome)
}

// The controller calls its roll complete as soon as every workload has its new
// template, whether the new workers run or not.
func TestARetryWaitsForWorkersThatAreNewButNotReady(t *testing.T) {
	w, h, in := retried(t, func(w *workload) { w.stale, w.stalled, w.missing = false, false, 1 })
	r := h.run(in)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, protocol.Progress{Done: 1, Total: 1}, r.Progress)
	require.Contains(t, w.log, "rolled", "the retry watched until they were ready")
}

func TestPauseStopsTheControllersRollAndResumeGoesOn(t *testing.T) {
	w, h := newWorkload(t)
	in := workerInput()
	in.Strategy.Approvers = 1
	calls := 0
	h.OnActivity(tensorfusion.RollWorkersActivity, mock.Anything, mock.Anything).After(time.Hour).Return(
		func(ctx context.Context, r tensorfusion.WorkersRequest) (tensorfusion.WorkersResult, error) {
			if calls++; calls == 1 { // stopped: the suite calls it all the same
				return tensorfusion.WorkersResult{}, ctx.Err()
			}
			return w.rollWorkers(ctx, r)
		})
	h.at(time.Hour, func() { h.signal(protocol.Approve, protocol.Answer{By: "ann"}) })
	h.at(time.Hour+5*time.Minute, func() { w.do(func() { w.flag = true }) })
	h.at(time.Hour+10*time.Minute, func() { h.signal(protocol.Pause, protocol.Answer{By: "ann"}) })
	h.at(3*time.Hour, func() {
		h.waits(protocol.WaitPaused, roll)
		require.False(t, w.flag, "the controller rolls nothing while the run is paused")
		require.True(t, w.stale)
		h.signal(protocol.Resume, protocol.Answer{By: "ann"})
	})
	require.Equal(t, protocol.OutcomeDone, h.run(in).Outcome)
	require.False(t, w.stale)
}

func TestWorkersWithoutStaleWorkloadsChangeNothing(t *testing.T) {
	w, h := newWorkload(t)
	w.stale = false
	require.Equal(t, protocol.OutcomeNoChange, h.run(workerInput()).Outcome)
}

func TestWorkersAreRefusedUnlessLostSessionsAreAcknowledged(t *testing.T) {
	_, h := newWorkload(t)
	in := workerInput()
	in.Workers = nil
	h.ExecuteWorkflow(protocol.Rollout, in)
	var app *temporal.ApplicationError
	require.ErrorAs(t, h.GetWorkflowError(), &app)
	require.Equal(t, protocol.BadInput, app.Type())
	require.Contains(t, app.Message(), "workers.acknowledgeLostSessions")
}

func TestClientsAreEvictedAndTheLeftOnesListed(t *testing.T) {
	blocked := true
	left := []tensorfusion.ClientPod{{Namespace: "team-a", Name: "shell", Left: "bare pod: nothing would make it again"}}
	observe := func(_ context.Context, r tensorfusion.ClientsRequest) (tensorfusion.ClientsResult, error) {
		require.Equal(t, 1, r.PerOwner)
		return tensorfusion.ClientsResult{Stale: []tensorfusion.ClientPod{
			{Namespace: "team-a", Name: "web-1", Owner: "ReplicaSet/team-a/web"}}, Left: left}, nil
	}
	act := func(context.Context, tensorfusion.ClientsRequest) (tensorfusion.ClientsResult, error) {
		if blocked {
			return tensorfusion.ClientsResult{}, finding.Finding{Row: "T16", Object: "Pod/team-a/web-1", Found: "eviction blocked by PodDisruptionBudget team-a/web"}.Error(finding.Wait)
		}
		return tensorfusion.ClientsResult{Evicted: 1, Left: left}, nil
	}
	h := newHarness(t, newCluster(t, 1), map[string]any{tensorfusion.ClientsActivity: observe, tensorfusion.EvictClientsActivity: act})
	h.at(time.Hour, func() {
		require.Contains(t, h.waits(protocol.WaitParked, evict).Found, "PodDisruptionBudget team-a/web")
		blocked = false
		h.signal(protocol.Retry, protocol.Answer{})
	})
	in := input(plan.Strategy{})
	in.Component = Client
	r := h.run(in)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Contains(t, r.Warnings, "pod team-a/shell keeps its outdated injection: bare pod: nothing would make it again")
}

// Who skips the eviction has decided to leave the pods: they are listed like
// those that the plan leaves, so that the run can end.
func TestClientsWhoseEvictionIsSkippedAreListedAsLeft(t *testing.T) {
	observe := func(context.Context, tensorfusion.ClientsRequest) (tensorfusion.ClientsResult, error) {
		return tensorfusion.ClientsResult{Stale: []tensorfusion.ClientPod{{Namespace: "team-a", Name: "web-1", Owner: "ReplicaSet/team-a/web"}}}, nil
	}
	act := func(context.Context, tensorfusion.ClientsRequest) (tensorfusion.ClientsResult, error) {
		return tensorfusion.ClientsResult{}, finding.Finding{Row: "T16", Object: "Pod/team-a/web-1", Found: "eviction blocked"}.Error(finding.Stop)
	}
	h := newHarness(t, newCluster(t, 1), map[string]any{tensorfusion.ClientsActivity: observe, tensorfusion.EvictClientsActivity: act})
	h.at(time.Hour, func() { h.signal(protocol.Skip, protocol.Answer{}) })
	in := input(plan.Strategy{})
	in.Component = Client
	r := h.run(in)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Len(t, r.LeftClients, 1)
	require.Equal(t, "web-1", r.LeftClients[0].Name)
	require.Contains(t, r.Warnings, "pod team-a/web-1 keeps its outdated injection: the eviction was skipped")
}
