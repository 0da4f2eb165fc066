// Package release is what every run on one Helm release has in common: how it
// calls activities of the release's cluster, takes the release's Lease and
// gives it back, holds auto update, and refuses bad input. It must not know
// what the run then does to the release.
package release

import (
	"fmt"
	"strings"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/visibility"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/stage"
)

// Heartbeat is how soon the death of a worker is noticed (design, contract 6).
const Heartbeat = 5 * time.Second

const (
	// attempts bounds the retries of what fails at once: with the intervals
	// below they span about ten minutes, so an API server that restarts is
	// waited for and one that stays away parks the run.
	attempts = 45
	// patience bounds all attempts of one activity together, beside its own
	// limit and with its time in the queue: attempts that each run into their
	// deadline would otherwise go on for hours.
	patience = 15 * time.Minute
	// slack lets the activity's own deadline come first, with its reason.
	slack = 30 * time.Second
	// lastWait is how long an activity of the run's end lies in a queue that
	// nobody polls.
	lastWait = 10 * time.Minute
)

// Retries is the policy for what is harmless to run again.
func Retries() *temporal.RetryPolicy {
	return &temporal.RetryPolicy{
		InitialInterval: time.Second, BackoffCoefficient: 1.6, MaximumInterval: 15 * time.Second, MaximumAttempts: attempts,
	}
}

// Do runs one activity of the cluster and waits for it, and for its queue to
// have a worker; limit is the activity's own deadline.
func Do(ctx workflow.Context, s *stage.Scope, cluster, name, summary string, limit time.Duration, req, out any) error {
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		StartToCloseTimeout:    limit + slack,
		ScheduleToCloseTimeout: limit + slack + patience,
		HeartbeatTimeout:       Heartbeat,
		WaitForCancellation:    true,
		Summary:                summary,
		RetryPolicy:            Retries(),
	})
	return s.Activity(ctx, protocol.ClusterQueue(cluster), out, name, req)
}

// Last runs an activity of the run's end: nobody may be there to answer, so it
// does not wait for a worker for ever.
func Last(ctx workflow.Context, cluster, name, summary string, req, out any) error {
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		TaskQueue:              protocol.ClusterQueue(cluster),
		StartToCloseTimeout:    time.Minute,
		ScheduleToStartTimeout: lastWait,
		HeartbeatTimeout:       Heartbeat,
		Summary:                summary,
		RetryPolicy:            Retries(),
	})
	return workflow.ExecuteActivity(ctx, name, req).Get(ctx, out)
}

// SearchAttributes asks once whether upserting those of the protocol is safe.
func SearchAttributes(ctx workflow.Context) bool {
	ctx = workflow.WithLocalActivityOptions(ctx, workflow.LocalActivityOptions{
		StartToCloseTimeout: 5 * time.Second,
		RetryPolicy:         &temporal.RetryPolicy{MaximumAttempts: 2},
	})
	var r visibility.Result
	err := workflow.ExecuteLocalActivity(ctx, visibility.InstalledActivity, visibility.Request{Names: []string{
		protocol.AttrCluster, protocol.AttrKind, protocol.AttrPhase, protocol.AttrWaitingFor,
	}}).Get(ctx, &r)
	return err == nil && r.Installed
}

// BadInput closes the run at once, with every problem of its input and the
// JSON path of each.
func BadInput(input string, ps []plan.Problem) error {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return temporal.NewNonRetryableApplicationError(
		fmt.Sprintf("the %s has %s: %s", input, counted(len(ps)), strings.Join(lines, "; ")), protocol.BadInput, nil, ps)
}

func counted(n int) string {
	if n == 1 {
		return "1 problem"
	}
	return fmt.Sprintf("%d problems", n)
}
