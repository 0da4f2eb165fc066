package tensorfusion

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// settings are what an upgrade and a rollback have in common.
type settings struct {
	kind        string
	cluster     string
	release     tensorfusion.Release
	intent      tensorfusion.Intent
	policy      string
	validation  Validation
	acknowledge []string
	floating    []string
	windows     []window.Spec
	maxDuration time.Duration
	limits      Limits
	rollouts    []Rollout
	fixFirst    bool
	planOnly    bool
	parent      *protocol.Parent
	rollback    func(ctx workflow.Context) error
	undo        *Answered // the upgrade that is undone by this run, its child
}

// engine walks one release from what it is to what the intent says. Its fields
// are the run's whole state; stages fill them in order.
type engine struct {
	settings
	run     *stage.Run
	scope   tensorfusion.Scope
	holder  string
	started time.Time
	locked  error

	pre      tensorfusion.PreflightResult
	pools    []tensorfusion.Pool // as last seen
	targets  []target            // the plan's rollouts over those
	diff     tensorfusion.DiffResult
	told     []string // what a person knows of the release's objects and has let pass
	plan     protocol.Plan
	before   []tensorfusion.PoolPolicy // policy as found, restored at the end
	held     bool
	outage   bool // the hold could not be had: the controller may replace every hypervisor (P10)
	led      bool // the new controller is proven
	upgraded tensorfusion.ReleaseResult
	snapshot tensorfusion.Snapshot
	goal     tensorfusion.Goal
	touched  []string // nodes whose hypervisor a batch replaced since the last comparison
	left     []string // what rollouts left half done
	// Workers were replaced by this run since the last comparison; or are being
	// replaced by the controller, as forecast, until it is done.
	touchedWorkers, forecastWorkers bool
	rows                            []rollout.HostRow
	rolled                          tensorfusion.Rolled // pools that rollouts went through
	canary                          map[string]string
	probes                          []protocol.Probe
	after                           tensorfusion.Versions
	skipped                         []off // what rollouts left outdated, as a person or the plan decided
	restored                        bool
	off                             []off // what the policy as restored leaves off
	child                           *protocol.Receipt
	coming                          func() // announces the stages that are known by now
}

// open starts the sequencer of the run.
func open(ctx workflow.Context, s settings) (*engine, error) {
	e := &engine{settings: s, started: workflow.Now(ctx), canary: map[string]string{}}
	e.limits = e.limits.WithDefaults()
	e.validation = e.validation.WithDefaults()
	if e.policy == "" {
		e.policy = tensorfusion.PolicyRestore
	}
	e.scope = tensorfusion.Scope{Target: kube.Target{Cluster: s.cluster}, Release: s.release}
	run, err := stage.New(ctx, stage.Options{
		Kind: s.kind, Cluster: s.cluster, Object: s.release.Namespace + "/" + s.release.Name,
		Parent: s.parent, Windows: s.windows, MaxDuration: s.maxDuration,
		Rollback: s.rollback,
	})
	if err != nil {
		return nil, err
	}
	e.run = run
	if s.parent == nil { // a child reports upwards, and its parent is what people search for
		run.UseSearchAttributes(release.SearchAttributes(run.Context()))
	}
	return e, nil
}

// do runs one activity of the cluster; limit is the activity's own deadline.
func (e *engine) do(ctx workflow.Context, s *stage.Scope, name, summary string, limit time.Duration, req, out any) error {
	return release.Do(ctx, s, e.cluster, name, summary, limit, req, out)
}

// lock takes the Lease; the rollback that answers an upgrade relies on its
// parent's.
func (e *engine) lock(ctx workflow.Context, s *stage.Scope) error {
	if e.undo != nil {
		var err error
		e.holder = e.undo.Holder
		e.scope, err = release.Identify(ctx, s, e.scope)
		e.scope.Holder = e.holder
		return err
	}
	l, err := release.Take(ctx, s, e.scope)
	if err != nil {
		return err
	}
	e.scope, e.holder, e.locked = l.Scope, l.Holder, l.Refused
	return nil
}

// unlock gives the Lease back, unless it is the parent's.
func (e *engine) unlock() {
	if e.holder != "" && e.undo == nil {
		release.GiveBack(e.run, release.Lock{Scope: e.scope, Holder: e.holder})
	}
}

// blocked parks on every check that is not met and not acknowledged.
func blocked(found, why string, checks []tensorfusion.Check) error {
	var open []finding.Finding
	for _, c := range checks {
		if !c.OK && !c.Acknowledged {
			open = append(open, c.Findings...)
		}
	}
	if len(open) == 0 {
		return nil
	}
	return stage.Parking(fmt.Sprintf("%s: %s", found, rowsOf(open)), why,
		"Resolve each finding, then answer retry: every check runs again from the start.",
		[]string{protocol.Retry, protocol.Abort}, open...)
}

// rowsOf lists the rows of the findings in short.
func rowsOf(fs []finding.Finding) string {
	var rows []string
	for _, f := range fs {
		rows = append(rows, f.Row+" "+f.Object)
	}
	return strings.Join(slices.Compact(rows), ", ")
}

// drift parks when something changed that no batch planned (P12, P14), and
// remembers the world as it now is.
func (e *engine) drift(ctx workflow.Context, s *stage.Scope, after string) error {
	var r tensorfusion.DriftResult
	if err := e.do(ctx, s, tensorfusion.DriftActivity, "compare UIDs after "+after, time.Minute, tensorfusion.DriftRequest{
		Scope: e.scope, Snapshot: e.snapshot, Planned: e.planned(), PlannedWorkers: e.touchedWorkers || e.forecastWorkers, Allocations: e.upgraded.Revision == 0,
	}, &r); err != nil {
		return err
	}
	// From here on what the run replaced must stay as it is, too.
	e.snapshot, e.touched, e.touchedWorkers = r.Snapshot, nil, false
	if len(r.Findings) == 0 {
		return nil
	}
	return stage.Parking(
		fmt.Sprintf("after %s, %d objects had changed that no batch of this run touched", after, len(r.Findings)),
		"P12: something else replaces pods here. Going on would roll nodes that nobody watches.",
		"Find out who did it (events, audit log); check that auto update is still off. retry takes the present state as the new reference.",
		[]string{protocol.Retry, protocol.Abort, protocol.Rollback}, r.Findings...)
}

// planned are the nodes whose hypervisor may have changed since the last
// comparison.
func (e *engine) planned() []string {
	if e.outage {
		return workflow.DeterministicKeys(e.snapshot.Hypervisors)
	}
	return e.touched
}
