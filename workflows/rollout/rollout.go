package rollout

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/stage"
)

// holdLimit is how long the pools may take to show the held policy: the
// controller copies it within seconds, a leader change takes 15.
const holdLimit = 2 * time.Minute

// State is what a rollout carries through continue-as-new.
type State struct {
	Stage  stage.State `json:"stage"`
	Holder string      `json:"holder,omitempty"`
	Layout plan.Layout `json:"layout"`
	Plan   plan.State  `json:"plan"`
	// Rows of the hosts that were taken, by name.
	Rows map[string]HostRow `json:"rows,omitempty"`
	// Waves counts the waves so far, Longest is the longest of them.
	Waves   int               `json:"waves,omitempty"`
	Longest time.Duration     `json:"longest,omitempty"`
	Drift   []finding.Finding `json:"drift,omitempty"`
	// Again: the last attempt of the current batch ended in a parking.
	Again bool `json:"again,omitempty"`
	// Warned counts the hosts that passed with a warning.
	Warned int `json:"warned,omitempty"`
}

// run is one Rollout, of any component.
type run struct {
	*stage.Run
	in     Input
	holder string
	locked error
}

// driver rolls one component.
type driver interface {
	// roll executes the stages of the rollout.
	roll(ctx workflow.Context) error
	// fill writes the driver's part of the result.
	fill(*Result)
	// state adds the driver's part of what is carried over.
	state(*State)
}

// Rollout takes one component over the hosts of one pool. Started alone it
// takes the release's Lease and holds auto update first; as a child it relies
// on its parent for both.
func Rollout(ctx workflow.Context, in Input) (Result, error) {
	if problems := in.Validate(); len(problems) > 0 {
		return Result{}, release.BadInput("rollout's input", problems)
	}
	in = in.withDefaults()
	options := stage.Options{
		Kind: protocol.Rollout, Cluster: in.Scope.Target.Cluster,
		Object: in.Scope.Release.Namespace + "/" + in.Scope.Release.Name,
		Parent: in.Parent, Windows: in.Windows, MaxDuration: in.Strategy.MaxDuration.D(), Deadline: in.Deadline,
	}
	if options.MaxDuration == 0 {
		options.MaxDuration = in.MaxDuration.D()
	}
	if in.Resume != nil {
		options.Resume = &in.Resume.Stage
	}
	s, err := stage.New(ctx, options)
	if err != nil {
		return Result{}, err
	}
	r := &run{Run: s, in: in}
	d := r.driver()
	if in.Resume != nil {
		r.holder = in.Resume.Holder
	}
	ctx = s.Context()
	if in.Parent == nil { // a child reports upwards, and its parent is what people search for
		s.UseSearchAttributes(release.SearchAttributes(ctx))
	}
	err = r.execute(ctx, d)
	if errors.Is(err, stage.ErrContinueAsNew) {
		// An abort that arrives meanwhile wins over continuing as new.
		if err = r.continueAsNew(d); !errors.Is(err, stage.ErrAborted) {
			return Result{}, err
		}
	}
	if r.locked != nil {
		return Result{}, r.locked
	}
	return r.close(d, err)
}

func (r *run) driver() driver {
	switch r.in.Component {
	case Worker:
		return &workers{run: r}
	case Client:
		return &clients{run: r}
	}
	return newHypervisors(r)
}

func (r *run) execute(ctx workflow.Context, d driver) error {
	if r.in.Parent == nil && r.in.Resume == nil {
		err := r.Execute(ctx,
			stage.Stage{Name: "lock", Purpose: "prove which cluster this is and keep every other run off the release", Do: r.lock},
			stage.Stage{Name: "hold", Purpose: "switch auto update off, so that nothing rolls by itself", Mutates: true, Estimate: holdLimit, Do: r.hold})
		if err != nil || r.locked != nil {
			return err
		}
	}
	return d.roll(ctx)
}

// close turns the end of the stages into the result. Whatever is no end of
// them is a defect and fails the workflow task, not the run. A run that was
// started alone stores its record and gives the Lease back.
func (r *run) close(d driver, err error) (Result, error) {
	out := Result{Outcome: protocol.OutcomeDone}
	switch {
	case errors.Is(err, stage.ErrAborted):
		out.Outcome = protocol.OutcomeAborted
	case err != nil:
		r.giveBack()
		return Result{}, err
	}
	d.fill(&out)
	r.warnUnproven(out.Hosts)
	if r.holder != "" {
		release.Record[HostRow]{Run: r.Run, Scope: r.in.Scope, Key: release.Key(r.Context()), Rows: out.Hosts, Receipt: func() any {
			stored := out.with(r.Receipt(out.Outcome))
			stored.Hosts = nil
			return stored
		}}.Close("receipt")
	}
	r.giveBack()
	return out.with(r.Close(out.Outcome)), nil
}

// giveBack gives back the Lease that a run has taken which was started alone.
func (r *run) giveBack() {
	if r.holder != "" {
		release.GiveBack(r.Run, release.Lock{Scope: r.in.Scope, Holder: r.holder})
	}
}

// with is the result with what the sequencer knows of the run.
func (out Result) with(receipt protocol.Receipt) Result {
	out.Kind, out.Cluster, out.Object = receipt.Kind, receipt.Cluster, receipt.Object
	out.WorkflowID, out.RunID = receipt.WorkflowID, receipt.RunID
	out.Started, out.Ended, out.Ignored = receipt.Started, receipt.Ended, receipt.Ignored
	out.Progress, out.Stages, out.Artifacts = receipt.Progress, receipt.Stages, receipt.Artifacts
	out.Warnings, out.LeftBehind = receipt.Warnings, append(slices.Clone(out.LeftBehind), receipt.LeftBehind...)
	return out
}

func (r *run) continueAsNew(d driver) error {
	next := r.in
	next.Resume = &State{Holder: r.holder}
	d.state(next.Resume)
	return r.ContinueAsNew(protocol.Rollout, func(carried stage.State) any {
		next.Resume.Stage = carried
		return next
	})
}

// name is a stage's name: the parent puts its prefix before it; alone the
// rollout does so itself, so that people type the same in both cases.
func (r *run) name(part string) string {
	if r.in.Parent != nil {
		return part
	}
	return "rollout." + r.in.Component + "." + r.in.Entry + "." + part
}

// do runs one activity of the cluster; limit is the activity's own deadline.
func (r *run) do(ctx workflow.Context, s *stage.Scope, name, summary string, limit time.Duration, req, out any) error {
	return release.Do(ctx, s, r.in.Scope.Target.Cluster, name, summary, limit, req, out)
}

func (r *run) lock(ctx workflow.Context, s *stage.Scope) error {
	l, err := release.Take(ctx, s, r.in.Scope)
	if err != nil {
		return err
	}
	r.in.Scope, r.holder, r.locked = l.Scope, l.Holder, l.Refused
	return nil
}

func (r *run) hold(ctx workflow.Context, s *stage.Scope) error {
	out, err := release.Hold(ctx, s, "hold auto update", tensorfusion.HoldRequest{Scope: r.in.Scope, Limit: holdLimit})
	if err != nil {
		return err
	}
	s.Note("auto update off in %d pools", len(out.Before))
	for _, p := range out.Before {
		if p.AutoHypervisor || p.AutoWorker || p.AutoClient {
			r.Warn(fmt.Sprintf("pool %s: auto update was on (hypervisor=%t worker=%t client=%t) and stays off after this rollout",
				p.Pool, p.AutoHypervisor, p.AutoWorker, p.AutoClient))
		}
	}
	return nil
}
