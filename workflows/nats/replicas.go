package nats

import (
	"fmt"
	"slices"

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
	// planned are the streams of the first look that were to be raised, left
	// those that still are, and streams all whose copies are to be proven.
	planned, left, streams []acts.Record
	// raised are those whose configuration is raised, proven or not; unsure is
	// one whose raise ended without a result: it may have been sent.
	raised []acts.Record
	unsure string
	// parked: an attempt has ended without success. Streams may have gone since.
	parked bool
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
	r.PlanOnly = in.PlanOnly
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
		case len(r.planned) == 0:
			outcome = protocol.OutcomeNoChange
		}
	}
	if r.unsure != "" {
		r.Warn(r.unsure + " was being raised when the run ended: it may have three replicas")
	}
	receipt := r.Close(outcome, func(receipt *protocol.Receipt) { receipt.Plan = planned(r.planned) })
	return ReplicasResult{Receipt: receipt, Raised: r.raised}, nil
}

func (r *raise) look(ctx workflow.Context, s *stage.Scope) error {
	got, err := r.listed(ctx, s)
	if err != nil {
		return err
	}
	if len(got.Unknown) > 0 {
		return datastore.Parking(got.Unknown)
	}
	r.planned, r.left, r.streams = got.Raise, slices.Clone(got.Raise), slices.Concat(got.Raise, got.Already)
	s.Note("%d streams to raise, %d have three replicas, %d left by the plan", len(got.Raise), len(got.Already), got.Left)
	return nil
}

func (r *raise) listed(ctx workflow.Context, s *stage.Scope) (acts.ListResult, error) {
	var got acts.ListResult
	err := r.Do(ctx, s, acts.ListActivity, "list the streams of "+r.Site.Namespace, r.limit, acts.ListRequest{
		Place: r.place(), Logins: r.in.Logins, Leave: r.in.Leave, Limit: r.limit.D(),
	}, &got)
	if err != nil {
		return got, err
	}
	r.Keep(got.Evidence)
	if len(got.Findings) > 0 {
		return got, datastore.Parking(got.Findings)
	}
	return got, nil
}

// anew lists the streams again after a parking: one that its service has
// deleted, or made anew, meanwhile would be waited for for ever, and so would
// the messages of one that is not raised yet and was emptied by a restart.
func (r *raise) anew(ctx workflow.Context, s *stage.Scope) error {
	if !r.parked {
		return nil
	}
	got, err := r.listed(ctx, s)
	if err != nil {
		return err
	}
	now := slices.Concat(got.Raise, got.Already)
	gone := func(b acts.Record) bool {
		return !slices.ContainsFunc(now, func(n acts.Record) bool { return same(n, b) && n.Created.Equal(b.Created) })
	}
	for _, b := range r.streams {
		if gone(b) {
			r.Warn(b.String() + " was deleted, or made anew, while the run went on: nothing is proven of it. If it is there, start again to raise it")
		}
	}
	r.streams = slices.DeleteFunc(slices.Clone(r.streams), gone)
	r.left = slices.DeleteFunc(slices.Clone(r.left), gone)
	if !slices.ContainsFunc(r.left, func(b acts.Record) bool { return b.String() == r.unsure }) {
		r.unsure = ""
	}
	for _, b := range slices.Clone(r.left) {
		i := slices.IndexFunc(got.Raise, func(n acts.Record) bool { return same(n, b) })
		if i < 0 {
			continue // raised by now: what it held before is proven
		}
		now := got.Raise[i]
		if f, lost := acts.Lost(b, acts.Stream{Account: b.Account, Name: b.Name, Created: now.Created, State: now.State}); lost && b.State.Messages > 0 {
			r.Warn(f.Object + ": expected " + f.Expected + ", found " + f.Found + ", before it was raised. It is raised as it is; publishers may have to send the messages again")
		}
		r.rebase(now)
	}
	return nil
}

// rebase takes a newer record of a stream for what its copies must hold.
func (r *raise) rebase(now acts.Record) {
	for _, list := range [][]acts.Record{r.left, r.streams} {
		for i := range list {
			if same(list[i], now) {
				list[i].State = now.State
			}
		}
	}
}

func same(a, b acts.Record) bool { return a.AccountID == b.AccountID && a.Name == b.Name }

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

func (r *raise) raise(ctx workflow.Context, s *stage.Scope) (err error) {
	defer func() { r.parked = err != nil }()
	if err := r.anew(ctx, s); err != nil {
		return err
	}
	total := len(r.planned)
	for len(r.left) > 0 {
		if err := s.Safe(ctx); err != nil {
			return err
		}
		stream := r.left[0]
		s.Current(stream.String())
		s.Progress(total-len(r.left), total, 0)
		var got acts.RaiseResult
		err := r.Do(ctx, s, acts.RaiseActivity, "raise "+stream.String(), r.limit, acts.RaiseRequest{
			Place: r.place(), Logins: r.in.Logins, Stream: stream, Limit: r.limit.D(),
		}, &got)
		if err != nil {
			r.unsure = stream.String()
			return err
		}
		r.unsure = ""
		r.Keep(got.Evidence)
		r.rebase(got.Before)
		known := slices.ContainsFunc(r.raised, func(b acts.Record) bool { return same(b, stream) })
		if got.Changed && !known {
			r.raised = append(r.raised, got.Before)
		}
		if !got.OK {
			return datastore.Parking(got.Findings)
		}
		r.left = r.left[1:]
	}
	s.Progress(total, total, 0)
	s.Note("%d streams raised", len(r.raised))
	return nil
}

func (r *raise) settle(ctx workflow.Context, s *stage.Scope) (err error) {
	defer func() { r.parked = err != nil }()
	if err := r.anew(ctx, s); err != nil {
		return err
	}
	if len(r.streams) == 0 {
		s.Note("there is no stream")
		return nil
	}
	// The calm itself takes its time, however short the plan's limit.
	limit := r.limit + window.Duration(acts.StableFor)
	var got acts.SettleResult
	err = r.Do(ctx, s, acts.SettleActivity, fmt.Sprintf("prove the replicas of %d streams", len(r.streams)), limit,
		acts.SettleRequest{Place: r.place(), Streams: r.streams, Limit: limit.D()}, &got)
	if err != nil {
		return err
	}
	r.Keep(got.Evidence)
	if !got.OK {
		return datastore.Parking(got.Findings)
	}
	s.Note("%d streams with a leader and current replicas for %s", len(r.streams), acts.StableFor)
	return nil
}
