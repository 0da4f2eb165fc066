package datastore

import (
	"errors"
	"fmt"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// Run is one run on a datastore's release.
type Run struct {
	*stage.Run
	// Site is complete, and names the cluster by its UID and the Lease's holder
	// once a run that was started alone has taken the Lease.
	Site Site
	// PlanOnly: the run changes nothing, so that its receipt is its result alone.
	PlanOnly bool
	// TookOver: the Lease was a closed run's, which may have left something half
	// done.
	TookOver bool
	look     time.Duration
	holder   string
	locked   error
}

// Options of a run.
type Options struct {
	Kind string
	Site Site
	// Windows limit when stages that change something start; none means always.
	Windows []window.Spec
	// Look is how long one look at the members may take (Run.Do).
	Look time.Duration
}

// New sets the run up; it must be the first thing that a workflow does, after
// it has refused bad input.
func New(ctx workflow.Context, o Options) (*Run, error) {
	s, err := stage.New(ctx, stage.Options{
		Kind: o.Kind, Cluster: o.Site.Target.Cluster, Object: o.Site.Namespace + "/" + o.Site.Release, Parent: o.Site.Parent, Windows: o.Windows,
	})
	if err != nil {
		return nil, err
	}
	if o.Site.Parent == nil { // a child's parent is what people search for
		s.UseSearchAttributes(release.SearchAttributes(s.Context()))
	}
	return &Run{Run: s, Site: o.Site, look: o.Look}, nil
}

// Through runs the stages to their end, under the release's Lease unless a
// parent holds it; Close gives it back. The error is the one to return instead.
func (r *Run) Through(stages ...stage.Stage) (protocol.Outcome, error) {
	err := r.underLease(stages)
	switch {
	case r.locked != nil:
		return "", r.locked
	case errors.Is(err, stage.ErrAborted):
		return protocol.OutcomeAborted, nil
	case err != nil: // no end of the stages: a defect, which fails the task and not the run
		r.giveBack()
		return "", err
	}
	return protocol.OutcomeDone, nil
}

// Close ends the run; complete adds to its receipt what the sequencer does not
// know, and is called for each receipt that is made. While a run that was
// started alone still holds its Lease, its receipt is stored.
func (r *Run) Close(outcome protocol.Outcome, complete ...func(*protocol.Receipt)) protocol.Receipt {
	completed := func(receipt protocol.Receipt) protocol.Receipt {
		for _, f := range complete {
			f(&receipt)
		}
		if receipt.Plan != nil {
			receipt.Plan.Digest = ""
			receipt.PlanDigest = protocol.DigestOf(receipt.Plan)
			receipt.Plan.Digest = receipt.PlanDigest
		}
		return receipt
	}
	if r.holder != "" && !r.PlanOnly {
		receipt := completed(r.Receipt(outcome))
		release.Record[any]{Run: r.Run, Scope: r.scope(), Key: release.Key(r.Context()), Receipt: func() any { return receipt }}.Close("receipt")
	}
	r.giveBack()
	return completed(r.Run.Close(outcome))
}

func (r *Run) giveBack() {
	if r.holder != "" {
		release.GiveBack(r.Run, release.Lock{Scope: r.scope(), Holder: r.holder})
	}
}

func (r *Run) underLease(stages []stage.Stage) error {
	ctx := r.Context()
	r.Announce(stages...)
	if r.Site.Parent == nil {
		err := r.Execute(ctx, stage.Stage{Name: "lock", Purpose: "prove which cluster this is and keep every other run off the release", Do: r.lock})
		if err != nil || r.locked != nil {
			return err
		}
	}
	return r.Execute(ctx, stages...)
}

// scope is the release as its Lease is asked for.
func (r *Run) scope() tensorfusion.Scope {
	return tensorfusion.Scope{Target: r.Site.Target, Release: tensorfusion.Release{Name: r.Site.Release, Namespace: r.Site.Namespace}}
}

func (r *Run) lock(ctx workflow.Context, s *stage.Scope) error {
	l, err := release.Take(ctx, s, r.scope())
	if err != nil {
		return err
	}
	r.Site.Target, r.Site.Holder, r.holder, r.locked = l.Scope.Target, l.Holder, l.Holder, l.Refused
	r.TookOver = l.TookOverFrom != ""
	return nil
}

// Do runs an activity that looks at the members until limit; the look that has
// begun by then may take its time.
func (r *Run) Do(ctx workflow.Context, s *stage.Scope, name, summary string, limit window.Duration, req, out any) error {
	return release.Do(ctx, s, r.Site.Target.Cluster, name, summary, limit.D()+r.look+time.Minute, req, out)
}

// Keep records the evidence of a verdict.
func (r *Run) Keep(e evidence.Trail) {
	if e.Last != (artifact.Ref{}) {
		r.Artifact(e.Last)
	}
}

// Parking is the error of a verdict that did not come out well.
func Parking(found []finding.Finding) error {
	if len(found) == 0 {
		return errors.New("a verdict without a reason: look at the evidence")
	}
	first := found[0]
	text := first.Object + ": found " + first.Found
	if first.Expected != "" {
		text = fmt.Sprintf("%s: expected %s, found %s", first.Object, first.Expected, first.Found)
	}
	if first.Row != "" {
		text = first.Row + ": " + text
	}
	if n := len(found) - 1; n > 0 {
		text += fmt.Sprintf("; and %d more", n)
	}
	return stage.Parking(text, first.Why, first.Next, nil, found...)
}
