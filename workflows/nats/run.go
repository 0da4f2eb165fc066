package nats

import (
	"errors"
	"fmt"
	"time"

	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/nats"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// run is what the three workflows have in common.
type run struct {
	*stage.Run
	site   Site
	holder string
	locked error
}

func newRun(ctx workflow.Context, kind string, site Site, windows []window.Spec) (*run, error) {
	site = site.withDefaults()
	s, err := stage.New(ctx, stage.Options{
		Kind: kind, Cluster: site.Target.Cluster, Object: site.Namespace + "/" + site.Release, Parent: site.Parent, Windows: windows,
	})
	if err != nil {
		return nil, err
	}
	if site.Parent == nil { // a child's parent is what people search for
		s.UseSearchAttributes(release.SearchAttributes(s.Context()))
	}
	return &run{Run: s, site: site}, nil
}

// execute runs the stages, under the release's Lease unless a parent holds it,
// and gives it back. The error is the one to close the run with.
func (r *run) execute(stages ...stage.Stage) (protocol.Outcome, error) {
	err := r.stages(stages)
	if r.holder != "" {
		release.GiveBack(r.Run, release.Lock{Scope: r.scope(), Holder: r.holder})
	}
	switch {
	case r.locked != nil:
		return "", r.locked
	case errors.Is(err, stage.ErrAborted):
		return protocol.OutcomeAborted, nil
	case err != nil: // no end of the stages: a defect, which fails the task and not the run
		return "", err
	}
	return protocol.OutcomeDone, nil
}

func (r *run) stages(stages []stage.Stage) error {
	ctx := r.Context()
	r.Announce(stages...)
	if r.site.Parent == nil {
		err := r.Execute(ctx, stage.Stage{Name: "lock", Purpose: "prove which cluster this is and keep every other run off the release", Do: r.lock})
		if err != nil || r.locked != nil {
			return err
		}
	}
	return r.Execute(ctx, stages...)
}

// scope is the release as its Lease is asked for.
func (r *run) scope() tensorfusion.Scope {
	return tensorfusion.Scope{Target: r.site.Target, Release: tensorfusion.Release{Name: r.site.Release, Namespace: r.site.Namespace}}
}

func (r *run) lock(ctx workflow.Context, s *stage.Scope) error {
	l, err := release.Take(ctx, s, r.scope())
	if err != nil {
		return err
	}
	r.site.Target, r.holder, r.locked = l.Scope.Target, l.Holder, l.Refused
	return nil
}

// do runs an activity that looks at the servers until limit; the look that has
// begun by then may take its time.
func (r *run) do(ctx workflow.Context, s *stage.Scope, name, summary string, limit window.Duration, req, out any) error {
	return release.Do(ctx, s, r.site.Target.Cluster, name, summary, limit.D()+acts.LookLimit+time.Minute, req, out)
}

// keep records the evidence of a verdict.
func (r *run) keep(e acts.Evidence) {
	if e.Last != (artifact.Ref{}) {
		r.Artifact(e.Last)
	}
}

// parking is the error of a verdict that did not come out well.
func parking(found []finding.Finding) error {
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
