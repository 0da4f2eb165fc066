package nats

import (
	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/nats"

	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

// leastStreams is how many memory streams with one replica NATSDrain must have
// seen (N127).
const leastStreams = 1

// callers is the part of the drain that people do (N120-N123, N130).
var callers = stage.Gate{
	Found: "NATS is drained once its callers have stopped",
	Why:   "new work keeps the queues from getting empty, and what is in them when NATS restarts is lost (N120)",
	Helps: "stop new requests and task submissions at their callers; read the queue status of every affected function and version until all are 0 (N122); " +
		"record the running tasks (N123); both keys, the one with scope queue_details and the one with list_tasks, must have worked for that (N121); recover stuck deployments and retained creation messages (N130). Then approve, with a comment that says where this is recorded",
}

// Drain waits until the memory streams with one replica are empty, because a
// restart of NATS loses what is in them (N103, N124-N128). It only reads:
// nothing is ever discarded to get there. It belongs before every apply or
// retry of the dependency stage, and before NATSReplicas: raised streams are
// not what it asks about.
func Drain(ctx workflow.Context, in DrainInput) (DrainResult, error) {
	if problems := in.Validate(); len(problems) > 0 {
		return DrainResult{}, release.BadInput("input", problems)
	}
	r, err := newRun(ctx, protocol.NATSDrain, in.Site, nil)
	if err != nil {
		return DrainResult{}, err
	}
	limit := datastore.Or(in.Limit, defaultDrain)
	var out DrainResult
	var ask *stage.Gate
	if in.AskCallers {
		ask = &callers
	}
	outcome, err := r.Through(stage.Stage{Name: "drain", Gate: ask, Purpose: "wait until the memory streams with one replica are empty, on every server",
		Do: func(ctx workflow.Context, s *stage.Scope) error {
			var got acts.DrainResult
			err := r.Do(ctx, s, acts.DrainActivity, "wait until NATS in "+r.Site.Namespace+" is drained", limit,
				acts.DrainRequest{Place: r.place(), Least: leastStreams, Limit: limit.D(), Held: r.held}, &got)
			if err != nil {
				return err
			}
			out.Verdict, r.held = got.Drained, got.Held
			r.Keep(got.Evidence)
			s.Note("%d memory streams with one replica, %d messages, after %d looks", got.Seen, got.Messages, got.Evidence.Looks)
			if !got.OK {
				return datastore.Parking(got.Findings)
			}
			return nil
		}})
	if err != nil {
		return DrainResult{}, err
	}
	out.Receipt = r.Close(outcome)
	return out, nil
}
