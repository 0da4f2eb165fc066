package rollout

import (
	"errors"
	"fmt"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/activities/visibility"
	"github.com/refit-run/refit/workflows/protocol"
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
		return Result{}, badInput(problems)
	}
	in = in.withDefaults()
	options := stage.Options{
		Kind: protocol.Rollout, Cluster: in.Scope.Target.Cluster,
		Object: in.Scope.Release.Namespace + "/" + in.Scope.Release.Name,
		Parent: in.Parent, Windows: in.Windows, MaxDuration: in.Strategy.MaxDuration.D(),
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
		s.UseSearchAttributes(searchAttributes(ctx))
	}
	err = r.execute(ctx, d)
	if errors.Is(err, stage.ErrContinueAsNew) {
		// An abort that arrives meanwhile wins over continuing as new.
		if err = r.continueAsNew(d); !errors.Is(err, stage.ErrAborted) {
			return Result{}, err
		}
	}
	if r.in.Parent == nil && r.holder != "" {
		s.Cleanup("unlock", "give the release's Lease back", r.unlock)
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
// them is a defect and fails the workflow task, not the run.
func (r *run) close(d driver, err error) (Result, error) {
	out := Result{Outcome: protocol.OutcomeDone}
	switch {
	case errors.Is(err, stage.ErrAborted):
		out.Outcome = protocol.OutcomeAborted
	case err != nil:
		return Result{}, err
	}
	d.fill(&out)
	receipt := r.Close(out.Outcome)
	out.Progress, out.Stages = receipt.Progress, receipt.Stages
	out.Warnings, out.LeftBehind = receipt.Warnings, receipt.LeftBehind
	return out, nil
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

// do runs one activity of the cluster and waits for it, and for its queue to
// have a worker; limit is the activity's own deadline.
func (r *run) do(ctx workflow.Context, s *stage.Scope, name, summary string, limit time.Duration, req, out any) error {
	return s.Activity(r.cluster(ctx, summary, limit), protocol.ClusterQueue(r.in.Scope.Target.Cluster), out, name, req)
}

// cluster is the context of an activity of the cluster.
func (r *run) cluster(ctx workflow.Context, summary string, limit time.Duration) workflow.Context {
	return workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		TaskQueue:           protocol.ClusterQueue(r.in.Scope.Target.Cluster),
		StartToCloseTimeout: limit + 30*time.Second,
		HeartbeatTimeout:    heartbeat,
		WaitForCancellation: true,
		Summary:             summary,
		RetryPolicy:         retries(),
	})
}

// lock records the cluster's identity and takes the Lease. A Lease in another
// run's hand closes the run as Locked: waiting behind it would be a surprise.
func (r *run) lock(ctx workflow.Context, s *stage.Scope) error {
	var id kube.IdentifyResult
	name := r.in.Scope.Target.Cluster
	if err := r.do(ctx, s, kube.IdentifyActivity, "identify cluster "+name, time.Minute,
		kube.IdentifyRequest{Cluster: name}, &id); err != nil {
		return err
	}
	r.in.Scope.Target.UID = id.UID
	release := r.in.Scope.Release
	var got lease.AcquireResult
	err := r.do(ctx, s, lease.AcquireActivity, "take the Lease of "+release.Name, time.Minute,
		lease.AcquireRequest{Target: r.in.Scope.Target, Namespace: release.Namespace, Release: release.Name}, &got)
	var app *temporal.ApplicationError
	if errors.As(err, &app) && app.Type() == protocol.Locked {
		r.locked = temporal.NewNonRetryableApplicationError(app.Message(), protocol.Locked, nil)
		return nil
	}
	if err != nil {
		return err
	}
	r.holder = got.Holder
	s.Note("cluster %s (uid %s), Lease refit-%s taken", name, id.UID, release.Name)
	if got.TookOverFrom != "" {
		r.Warn("Took the Lease over from " + got.TookOverFrom + ", which is closed.")
	}
	return nil
}

func (r *run) unlock(ctx workflow.Context) error {
	release := r.in.Scope.Release
	ctx = workflow.WithScheduleToStartTimeout(r.cluster(ctx, "give the Lease of "+release.Name+" back", time.Minute), agentMissing)
	return workflow.ExecuteActivity(ctx, lease.ReleaseActivity,
		lease.ReleaseRequest{Target: r.in.Scope.Target, Namespace: release.Namespace, Release: release.Name, Holder: r.holder}).Get(ctx, nil)
}

func (r *run) hold(ctx workflow.Context, s *stage.Scope) error {
	var out tensorfusion.HoldResult
	if err := r.do(ctx, s, tensorfusion.HoldActivity, "hold auto update", holdLimit,
		tensorfusion.HoldRequest{Scope: r.in.Scope, Limit: holdLimit}, &out); err != nil {
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
