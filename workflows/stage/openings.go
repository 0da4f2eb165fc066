package stage

import (
	"errors"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/window"
)

// How far windows are expanded: usually two weeks, known again when less than
// one is left; windows that open rarely (once a year) are looked for in more
// than a year. At most maxOpenings are recorded at a time, because they go
// into history.
const (
	horizon       = 14 * 24 * time.Hour
	known         = 7 * 24 * time.Hour
	farHorizon    = 400 * 24 * time.Hour
	searchHorizon = 92 * 24 * time.Hour // for one long enough among many short ones
	maxOpenings   = 200
)

// openings are the plan's windows as recorded in history.
type openings struct {
	Open  []window.Interval `json:"open,omitempty"`
	Until time.Time         `json:"until,omitzero"` // known up to here
	Error string            `json:"error,omitempty"`
}

// extend expands the windows anew when little of them lies ahead. The result
// is recorded: time-zone rules differ between machines and change.
func (o *openings) extend(ctx workflow.Context, specs []window.Spec) error {
	now := workflow.Now(ctx)
	ahead := 0
	for _, in := range o.Open {
		if in.Start.After(now) {
			ahead++
		}
	}
	if ahead >= 2 || now.Add(known).Before(o.Until) {
		return nil
	}
	var next openings
	err := workflow.SideEffectWithOptions(ctx, workflow.SideEffectOptions{Summary: "expand maintenance windows"},
		func(workflow.Context) any { return expand(specs, now) }).Get(&next)
	if err != nil {
		return err
	}
	if next.Error != "" {
		return errors.New(next.Error)
	}
	*o = next
	return nil
}

func expand(specs []window.Spec, now time.Time) openings {
	until := now.Add(horizon)
	found, err := window.Expand(specs, now, until)
	if err != nil {
		return openings{Error: err.Error()}
	}
	if n := len(found); n < 2 && (n == 0 || found[0].End.Before(until)) {
		until = now.Add(farHorizon)
		if found, err = window.Expand(specs, now, until); err != nil {
			return openings{Error: err.Error()}
		}
	}
	if len(found) > maxOpenings {
		until = found[maxOpenings].Start
		found = found[:maxOpenings]
	}
	return openings{Open: found, Until: until}
}

// nextFitting looks beyond the recorded openings for one that is long enough.
func nextFitting(ctx workflow.Context, specs []window.Spec, estimate time.Duration) (window.Interval, bool) {
	now := workflow.Now(ctx)
	var found openings
	err := workflow.SideEffectWithOptions(ctx, workflow.SideEffectOptions{Summary: "find a long enough window"},
		func(workflow.Context) any {
			all, err := window.Expand(specs, now, now.Add(searchHorizon))
			if err != nil {
				return openings{Error: err.Error()}
			}
			if in, ok := window.Next(all, now, estimate); ok {
				return openings{Open: []window.Interval{in}}
			}
			return openings{}
		}).Get(&found)
	if err != nil || len(found.Open) == 0 {
		return window.Interval{}, false
	}
	return found.Open[0], true
}
