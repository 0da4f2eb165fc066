package nats

import (
	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/nats"

	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

// Roll checks NATS before or after a roll of its servers. The roll itself is
// Helm's: this run never changes the StatefulSet, a pod or a stream.
func Roll(ctx workflow.Context, in RollInput) (RollResult, error) {
	if problems := in.Validate(); len(problems) > 0 {
		return RollResult{}, release.BadInput("input", problems)
	}
	r, err := newRun(ctx, protocol.NATSRoll, in.Site, nil)
	if err != nil {
		return RollResult{}, err
	}
	out := RollResult{Phase: in.Phase}
	check := stage.Stage{Name: "save", Purpose: "prove that nothing is left in the memory streams with one replica, and save the list of all streams",
		Do: func(ctx workflow.Context, s *stage.Scope) error { return r.save(ctx, s, in, &out) }}
	if in.Phase == After {
		// What a roll has lost is lost: a person may decide to go on all the same.
		check = stage.Stage{Name: "compare", Purpose: "prove that every server has recovered and every stream is as it was", Skippable: true,
			Do: func(ctx workflow.Context, s *stage.Scope) error { return r.compare(ctx, s, in, &out) }}
	}
	outcome, err := r.Through(check)
	if err != nil {
		return RollResult{}, err
	}
	out.Receipt = r.Close(outcome)
	return out, nil
}

func (r *run) save(ctx workflow.Context, s *stage.Scope, in RollInput, out *RollResult) error {
	limit := datastore.Or(in.Limit, defaultDrain)
	var got acts.SaveResult
	err := r.Do(ctx, s, acts.SaveActivity, "save the streams of "+r.Site.Namespace, limit,
		acts.DrainRequest{Place: r.place(), Limit: limit.D(), Held: r.held}, &got)
	if err != nil {
		return err
	}
	r.held = got.Held
	r.Keep(got.Evidence)
	if !got.OK {
		return datastore.Parking(got.Findings)
	}
	out.Saved = got.List
	r.Artifact(got.List)
	s.Note("%d streams saved as %s", got.Streams, got.List.URL)
	return nil
}

func (r *run) compare(ctx workflow.Context, s *stage.Scope, in RollInput, out *RollResult) error {
	limit := datastore.Or(in.Limit, defaultSettle)
	var got acts.CompareResult
	err := r.Do(ctx, s, acts.CompareActivity, "compare the streams of "+r.Site.Namespace, limit,
		acts.CompareRequest{Place: r.place(), List: in.Saved, Limit: limit.D()}, &got)
	if err != nil {
		return err
	}
	r.Keep(got.Evidence)
	out.Emptied = got.Emptied
	for _, name := range got.Emptied {
		r.Warn("stream " + name + " came back empty: it has one copy, in memory. It was empty when the list was saved; what was published from then on until its server restarted is lost")
	}
	if !got.OK {
		return datastore.Parking(got.Findings)
	}
	s.Note("%d streams as before the roll, %d of them emptied", got.Streams, len(got.Emptied))
	return nil
}
