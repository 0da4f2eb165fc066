package nats

import (
	"fmt"

	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/nats"

	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// raise is one NATSReplicas.
type raise struct {
	*run
	in    ReplicasInput
	limit window.Duration
	list  acts.ListResult
	// done counts the streams of the list that are raised.
	done int
}

// Replicas raises every stream to three replicas, one after the other, and
// proves that the copies are there and stay (N189-N191).
func Replicas(ctx workflow.Context, in ReplicasInput) (ReplicasResult, error) {
	if problems := in.Validate(); len(problems) > 0 {
		return ReplicasResult{}, release.BadInput("input", problems)
	}
	shared, err := newRun(ctx, protocol.NATSReplicas, in.Site, in.Windows)
	if err != nil {
		return ReplicasResult{}, err
	}
	r := &raise{run: shared, in: in, limit: datastore.Or(in.Limit, defaultSettle)}
	stages := []stage.Stage{{Name: "list", Purpose: "find the streams with fewer than three replicas and prove that each can be raised", Do: r.look}}
	if !in.PlanOnly {
		stages = append(stages,
			stage.Stage{Name: "raise", Purpose: "raise them to three, one after the other", Mutates: true, Do: r.raise},
			stage.Stage{Name: "settle", Purpose: "prove that every copy is current, nothing was lost and no leader changes", Do: r.settle})
	}
	outcome, err := r.Through(stages...)
	if err != nil {
		return ReplicasResult{}, err
	}
	if outcome == protocol.OutcomeDone {
		switch {
		case in.PlanOnly:
			outcome = protocol.OutcomePlanned
		case len(r.list.Raise) == 0:
			outcome = protocol.OutcomeNoChange
		}
	}
	receipt := r.Close(outcome)
	receipt.Plan = planned(r.list.Raise)
	return ReplicasResult{Receipt: receipt, Raised: r.list.Raise[:r.done]}, nil
}

func (r *raise) look(ctx workflow.Context, s *stage.Scope) error {
	var got acts.ListResult
	err := r.Do(ctx, s, acts.ListActivity, "list the streams of "+r.Site.Namespace, r.limit, acts.ListRequest{
		Place: r.place(), Logins: r.in.Logins, Leave: r.in.Leave, Limit: r.limit.D(),
	}, &got)
	if err != nil {
		return err
	}
	r.Keep(got.Evidence)
	if len(got.Findings) > 0 {
		return datastore.Parking(got.Findings)
	}
	r.list = got
	s.Note("%d streams to raise, %d have three replicas, %d left by the plan", len(got.Raise), len(got.Already), got.Left)
	return nil
}

// planned is the list as the command line and the receipt show it.
func planned(list []acts.Record) *protocol.Plan {
	p := &protocol.Plan{}
	for _, s := range list {
		p.Changes = append(p.Changes, protocol.PlannedChange{
			Action: fmt.Sprintf("raise from %d to %d replicas", s.Replicas, acts.TargetReplicas), Object: s.String(),
		})
	}
	return p
}

func (r *raise) raise(ctx workflow.Context, s *stage.Scope) error {
	for r.done < len(r.list.Raise) {
		if err := s.Safe(ctx); err != nil {
			return err
		}
		stream := r.list.Raise[r.done]
		s.Current(stream.String())
		s.Progress(r.done, len(r.list.Raise), 0)
		var got acts.RaiseResult
		err := r.Do(ctx, s, acts.RaiseActivity, "raise "+stream.String(), r.limit, acts.RaiseRequest{
			Place: r.place(), Logins: r.in.Logins, Stream: stream, Limit: r.limit.D(),
		}, &got)
		if err != nil {
			return err
		}
		r.Keep(got.Evidence)
		if !got.OK {
			return datastore.Parking(got.Findings)
		}
		r.done++
	}
	s.Progress(r.done, len(r.list.Raise), 0)
	s.Note("%d streams raised", r.done)
	return nil
}

func (r *raise) settle(ctx workflow.Context, s *stage.Scope) error {
	streams := append(append([]acts.Record{}, r.list.Raise...), r.list.Already...)
	if len(streams) == 0 {
		s.Note("there is no stream")
		return nil
	}
	// The calm itself takes its time, however short the plan's limit.
	limit := r.limit + window.Duration(acts.StableFor)
	var got acts.SettleResult
	err := r.Do(ctx, s, acts.SettleActivity, fmt.Sprintf("prove the replicas of %d streams", len(streams)), limit,
		acts.SettleRequest{Place: r.place(), Streams: streams, Limit: limit.D()}, &got)
	if err != nil {
		return err
	}
	r.Keep(got.Evidence)
	if !got.OK {
		return datastore.Parking(got.Findings)
	}
	s.Note("%d streams with a leader and current replicas for %s", len(streams), acts.StableFor)
	return nil
}
