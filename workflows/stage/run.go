// Package stage runs a workflow as a sequence of stages. It alone owns the
// state machine of a run: pause, windows, gates, parking, answers, abort,
// rollback, unbreakable sections, status and reports to a parent run. It must
// not know what a stage does, and does no I/O of its own.
//
// Answers that arrive within one workflow task are taken in the order of
// verbsByWeight, so that the one that stops the most wins.
package stage

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/window"
)

// What Execute and the blocking methods of Scope return beside nil. A stage
// that gets ErrAborted from a Scope method returns it at once.
var (
	ErrAborted    = errors.New("the run was aborted")
	ErrRolledBack = errors.New("the run was rolled back")
	// ErrContinueAsNew is returned by a Do that wants the run continued as
	// new; the workflow then returns Run.ContinueAsNew.
	ErrContinueAsNew = errors.New("the run continues as new")
)

// Failed is what Execute returns for an unattended run: the stage that could
// not go on, and why. It is an ErrAborted too: the run was ended before its
// end, by itself.
type Failed struct {
	Stage string
	Cause error
}

func (f *Failed) Error() string { return "stage " + f.Stage + ": " + f.Cause.Error() }

// Unwrap makes it an ErrAborted with a cause.
func (f *Failed) Unwrap() []error { return []error{ErrAborted, f.Cause} }

// Options of a run.
type Options struct {
	Kind, Cluster, Object string
	// Parent makes the run report upwards.
	Parent *protocol.Parent
	// Windows limit when mutating stages start; none means always.
	Windows []window.Spec
	// MaxDuration parks the run at its next safe boundary once exceeded,
	// waiting for people included; retry extends it by as much. 0 = none.
	MaxDuration time.Duration
	// Deadline is when the parent's own MaxDuration ends; the earlier counts.
	Deadline time.Time
	// Rollback undoes the run; nil refuses the verb. It runs as a stage named
	// "rollback": its failure parks, ScopeOf(ctx) gives its Scope.
	Rollback func(ctx workflow.Context) error
	// Unattended: nobody looks at the run, whoever started it waits for its end
	// only. A stage that can't go on ends it with Failed instead of parking.
	Unattended bool
	// Resume is the state of the run that continued as new.
	Resume *State
	// HasSearchAttributes says that the search attributes of the protocol
	// exist; upserting absent ones would fail the workflow task for ever.
	HasSearchAttributes bool
}

// Run is one run of the sequencer.
type Run struct {
	ctx     workflow.Context
	o       Options
	info    *workflow.Info
	rows    []protocol.Stage
	current int              // index in rows, -1 before the first stage
	resumed []string         // rows of the run before that no Execute has named yet
	coming  []protocol.Stage // announced, not given to Execute yet

	waits    []*wait
	sections []string
	halfDone []HalfDone

	leftBehind []string
	children   []*child
	paused     bool
	pausedBy   protocol.Given
	stopping   string // abort or rollback, once accepted
	rolling    bool   // the rollback runs
	undone     bool   // the rollback has ended
	aborted    bool
	final      protocol.Phase
	cancel     workflow.CancelFunc // of the running stage

	progress  protocol.Progress
	eta       *time.Time
	hosts     []string
	ignored   []protocol.Ignored
	warnings  []string
	artifacts []artifact.Ref
	started   time.Time
	deadline  time.Time // zero: none
	overdue   bool      // a coroutine is parked on the deadline

	windows openings
	search  searched
	details string
	report  reporting
	acked   []protocol.Ack
	sent    int // number of answers forwarded, for their IDs
	pending []forwarded
}

// Deadline is when the run parks for having taken too long; zero when it never
// does.
func (r *Run) Deadline() time.Time { return r.deadline }

// New sets a run up: signals, Updates, query, watcher for the UI's Cancel. It
// must be the first thing that a workflow does: an Update that arrives with
// the start is refused as unknown if the workflow blocks before.
func New(ctx workflow.Context, o Options) (*Run, error) {
	r := &Run{o: o, info: workflow.GetInfo(ctx), current: -1, started: workflow.Now(ctx)}
	r.ctx, _ = workflow.NewDisconnectedContext(ctx)
	if o.MaxDuration > 0 {
		r.deadline = r.started.Add(o.MaxDuration)
	}
	if !o.Deadline.IsZero() && (r.deadline.IsZero() || o.Deadline.Before(r.deadline)) {
		r.deadline = o.Deadline
	}
	if o.Resume != nil {
		r.restore(*o.Resume)
	}
	if err := workflow.SetQueryHandlerWithOptions(ctx, protocol.QueryStatus, func() (protocol.Status, error) {
		return r.Status(), nil
	}, workflow.QueryHandlerOptions{Description: "Where the run is, what it waits for and which answers it takes"}); err != nil {
		return nil, err
	}
	if err := r.listen(ctx); err != nil {
		return nil, err
	}
	if len(o.Windows) > 0 {
		if err := r.windows.extend(r.ctx, o.Windows); err != nil {
			return nil, temporal.NewNonRetryableApplicationError(err.Error(), protocol.BadInput, nil)
		}
	}
	if o.Parent != nil {
		workflow.Go(r.ctx, r.reportUpwards)
	}
	r.search.enabled = o.HasSearchAttributes
	r.changed()
	return r, nil
}

// UseSearchAttributes tells the run whether they exist, for a workflow that
// finds out only after New (from a local activity): without them it warns.
func (r *Run) UseSearchAttributes(exist bool) {
	r.search.enabled = exist
	if exist {
		r.changed()
		return
	}
	r.Warn("the search attributes " + strings.Join([]string{
		protocol.AttrCluster, protocol.AttrKind, protocol.AttrPhase, protocol.AttrWaitingFor,
	}, ", ") + " do not exist in this namespace: the run can't be found by them until `refit setup` has made them")
}

// Context is what all work of the run uses: the UI's Cancel does not cancel
// it, because Cancel means abort.
func (r *Run) Context() workflow.Context { return r.ctx }

// Warn records a warning for status and receipt, once.
func (r *Run) Warn(warning string) {
	for _, w := range r.warnings {
		if w == warning {
			return
		}
	}
	r.warnings = append(r.warnings, warning)
	r.changed()
}

// Artifact records a stored artifact for status and receipt.
func (r *Run) Artifact(ref artifact.Ref) {
	r.artifacts = append(r.artifacts, ref)
	r.changed()
}

// LeftBehind lists the sections that were left half done and the cleanups that
// failed, for the receipt. What child runs left behind is in their results.
func (r *Run) LeftBehind() []string {
	out := slices.Clone(r.leftBehind)
	for _, h := range r.halfDone {
		out = append(out, fmt.Sprintf("%s is half done: %s", h.Section, h.Why))
	}
	return out
}

// Stopping reports whether abort or rollback was accepted.
func (r *Run) Stopping() bool { return r.stopping != "" || r.aborted }

// Receipt fills what the sequencer knows; the workflow adds plan digest,
// versions and what else it left behind.
func (r *Run) Receipt(outcome protocol.Outcome) protocol.Receipt {
	s := r.Status()
	return protocol.Receipt{
		Kind: r.o.Kind, Cluster: r.o.Cluster, Object: r.o.Object,
		WorkflowID: r.info.WorkflowExecution.ID, RunID: r.info.WorkflowExecution.RunID,
		Outcome: outcome, Started: r.started, Ended: workflow.Now(r.ctx),
		Stages: s.Stages, Progress: s.Progress, Ignored: s.Ignored, Warnings: s.Warnings,
		LeftBehind: r.LeftBehind(), Artifacts: s.Artifacts,
	}
}

// Close ends the run: status shows the outcome, the parent has heard of it,
// every Update has its reply. The workflow returns after it without blocking.
func (r *Run) Close(outcome protocol.Outcome) protocol.Receipt {
	switch outcome {
	case protocol.OutcomeAborted:
		r.final = protocol.PhaseAborted
	case protocol.OutcomeRolledBack:
		r.final = protocol.PhaseRolledBack
	default:
		r.final = protocol.PhaseDone
	}
	r.coming = nil // a run without a Cleanup ends here
	r.changed()
	r.settle()
	return r.Receipt(outcome)
}

// settle waits until nobody waits for this run: the parent has the last
// report, Updates are answered, signals are read.
func (r *Run) settle() {
	r.drain()
	for {
		r.report.due = r.report.due || r.report.stale
		_ = workflow.Await(r.ctx, func() bool {
			return !r.report.due && !r.report.sending && workflow.AllHandlersFinished(r.ctx)
		}) // r.ctx is never cancelled
		if !r.drain() {
			return
		}
	}
}
