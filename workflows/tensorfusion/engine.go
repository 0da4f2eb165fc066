package tensorfusion

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/activities/visibility"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// heartbeat is how soon a dead worker is noticed (design, contract 6).
const heartbeat = 5 * time.Second

// attempts bounds the retries of one activity: with the intervals below they
// span about ten minutes, so an API server that restarts is waited for and one
// that stays away parks the run.
const attempts = 45

// settings are what an upgrade and a rollback have in common.
type settings struct {
	kind         string
	cluster      string
	release      tensorfusion.Release
	intent       tensorfusion.Intent
	policy       string
	validation   Validation
	acknowledge  []string
	floating     []string
	windows      []window.Spec
	maxDuration  time.Duration
	limits       Limits
	rollouts     []Rollout
	fixFirst     bool
	planOnly     bool
	parent       *protocol.Parent
	rollback     func(ctx workflow.Context) error
	holderOf     string                    // the parent's Lease holder, when it is the parent's
	policyBefore []tensorfusion.PoolPolicy // as found before the parent's hold
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
	diff     tensorfusion.DiffResult
	plan     protocol.Plan
	before   []tensorfusion.PoolPolicy // policy as found, restored at the end
	held     bool
	upgraded tensorfusion.ReleaseResult
	snapshot tensorfusion.Snapshot
	goal     tensorfusion.Goal
	touched  []string // nodes whose hypervisor a batch replaced
	workers  bool     // workers were rolled
	rows     []rollout.HostRow
	rolled   []string // GPUPools that a rollout went through
	canary   map[string]string
	after    tensorfusion.Versions
	restored bool
	child    *protocol.Receipt
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
		run.UseSearchAttributes(searchAttributes(run.Context()))
	}
	return e, nil
}

// searchAttributes asks once whether upserting them is safe.
func searchAttributes(ctx workflow.Context) bool {
	ctx = workflow.WithLocalActivityOptions(ctx, workflow.LocalActivityOptions{
		StartToCloseTimeout: 5 * time.Second,
		RetryPolicy:         &temporal.RetryPolicy{MaximumAttempts: 2},
	})
	var r visibility.Result
	err := workflow.ExecuteLocalActivity(ctx, visibility.InstalledActivity, visibility.Request{Names: []string{
		protocol.AttrCluster, protocol.AttrKind, protocol.AttrPhase, protocol.AttrWaitingFor,
	}}).Get(ctx, &r)
	return err == nil && r.Installed
}

// do runs one activity of the cluster: limit is the activity's own deadline.
func (e *engine) do(ctx workflow.Context, s *stage.Scope, name, summary string, limit time.Duration, req, out any) error {
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		StartToCloseTimeout: limit + 30*time.Second,
		HeartbeatTimeout:    heartbeat,
		WaitForCancellation: true,
		Summary:             summary,
		RetryPolicy: &temporal.RetryPolicy{
			InitialInterval: time.Second, BackoffCoefficient: 1.6, MaximumInterval: 15 * time.Second,
			MaximumAttempts: attempts,
		},
	})
	return s.Activity(ctx, protocol.ClusterQueue(e.cluster), out, name, req)
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

// lock records the cluster's identity and takes the Lease. A Lease in another
// run's hand closes the run as Locked: waiting behind it would be a surprise.
func (e *engine) lock(ctx workflow.Context, s *stage.Scope) error {
	var id kube.IdentifyResult
	if err := e.do(ctx, s, kube.IdentifyActivity, "identify cluster "+e.cluster, time.Minute,
		kube.IdentifyRequest{Cluster: e.cluster}, &id); err != nil {
		return err
	}
	e.scope.Target.UID = id.UID
	if e.holderOf != "" {
		e.holder = e.holderOf
		s.Note("cluster %s (Kubernetes %s); the upgrade's Lease is kept", e.cluster, id.Version)
		return nil
	}
	var got lease.AcquireResult
	err := e.do(ctx, s, lease.AcquireActivity, "take the Lease of "+e.release.Name, time.Minute,
		lease.AcquireRequest{Target: e.scope.Target, Namespace: e.release.Namespace, Release: e.release.Name}, &got)
	var app *temporal.ApplicationError
	if errors.As(err, &app) && app.Type() == protocol.Locked {
		e.locked = temporal.NewNonRetryableApplicationError(app.Message(), protocol.Locked, nil)
		s.Note("%s", app.Message())
		return nil
	}
	if err != nil {
		return err
	}
	e.holder = got.Holder
	s.Note("cluster %s (Kubernetes %s, uid %s), Lease refit-%s taken", e.cluster, id.Version, id.UID, e.release.Name)
	if got.TookOverFrom != "" {
		s.Note("Lease taken over from the closed run %s", got.TookOverFrom)
		e.run.Warn("Took the Lease over from " + got.TookOverFrom + ", which is closed: what it left is found and finished by the stages below.")
	}
	return nil
}

// unlock gives the Lease back. A failure is listed among what is left behind:
// the next run takes a closed run's Lease over.
func (e *engine) unlock() {
	if e.holder == "" || e.holderOf != "" {
		return
	}
	e.run.Cleanup("unlock", "give the Lease of the release back", func(ctx workflow.Context) error {
		return e.last(ctx, lease.ReleaseActivity, "give the Lease of "+e.release.Name+" back", lease.ReleaseRequest{
			Target: e.scope.Target, Namespace: e.release.Namespace, Release: e.release.Name, Holder: e.holder,
		}, nil)
	})
}

// last runs an activity of the run's end: nobody may be there to answer, so it
// does not wait for a worker for ever.
func (e *engine) last(ctx workflow.Context, name, summary string, req, out any) error {
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		TaskQueue: protocol.ClusterQueue(e.cluster), StartToCloseTimeout: time.Minute,
		ScheduleToStartTimeout: 10 * time.Minute, HeartbeatTimeout: heartbeat, Summary: summary,
		RetryPolicy: &temporal.RetryPolicy{InitialInterval: time.Second, MaximumInterval: 15 * time.Second, MaximumAttempts: attempts},
	})
	return workflow.ExecuteActivity(ctx, name, req).Get(ctx, out)
}

// drift parks when something changed that no batch planned (P12, P14), and
// remembers the world as it now is.
func (e *engine) drift(ctx workflow.Context, s *stage.Scope, after string) error {
	var r tensorfusion.DriftResult
	if err := e.do(ctx, s, tensorfusion.DriftActivity, "compare UIDs after "+after, time.Minute, tensorfusion.DriftRequest{
		Scope: e.scope, Snapshot: e.snapshot, Planned: e.touched, PlannedWorkers: e.workers,
	}, &r); err != nil {
		return err
	}
	e.snapshot = r.Snapshot
	if len(r.Findings) == 0 {
		return nil
	}
	return stage.Parking(
		fmt.Sprintf("after %s, %d objects had changed that no batch of this run touched", after, len(r.Findings)),
		"P12: something else replaces pods here. Going on would roll nodes that nobody watches.",
		"Find out who did it (events, audit log); check that auto update is still off. retry takes the present state as the new reference.",
		[]string{protocol.Retry, protocol.Abort, protocol.Rollback}, r.Findings...)
}

// digestOf is the SHA-256 of a value's canonical JSON (struct fields in their
// order, map keys sorted).
func digestOf(v any) (string, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// badInput closes the run at once, with every problem and its JSON path.
func badInput(ps []plan.Problem) error {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.Path + " " + p.Message
	}
	return temporal.NewNonRetryableApplicationError(
		fmt.Sprintf("the plan has %d problems: %s", len(ps), strings.Join(lines, "; ")), protocol.BadInput, nil, ps)
}
