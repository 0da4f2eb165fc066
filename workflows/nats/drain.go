package nats

import (
	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/nats"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

// leastStreams is how many memory streams with one replica NATSDrain must have
// seen (N127).
const leastStreams = 1

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
	limit := or(in.Limit, defaultDrain)
	var out DrainResult
	outcome, err := r.execute(stage.Stage{Name: "drain", Purpose: "wait until the memory streams with one replica are empty, on every server",
		Do: func(ctx workflow.Context, s *stage.Scope) error {
			var got acts.DrainResult
			err := r.do(ctx, s, acts.DrainActivity, "wait until NATS in "+r.site.Namespace+" is drained", limit,
				acts.DrainRequest{Place: r.site.place(), Least: leastStreams, Limit: limit.D()}, &got)
			if err != nil {
				return err
			}
			out.Verdict = got.Drained
			r.keep(got.Evidence)
			s.Note("%d memory streams with one replica, %d messages, after %d looks", got.Seen, got.Messages, got.Evidence.Looks)
			if !got.OK {
				return parking(got.Findings)
			}
			return nil
		}})
	if err != nil {
		return DrainResult{}, err
	}
	out.Receipt = r.Close(outcome)
	return out, nil
}
