package gpunode

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/node"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

const (
	// callLimit is the deadline of a few questions to the API server.
	callLimit = time.Minute
	// baselineLimit is generous: NVML answers within seconds, a driver that is
	// initialising within half a minute.
	baselineLimit = time.Minute
	// busyLimit is how long an agent that is at work for somebody else is waited
	// for; a validation at level standard takes ten minutes at most.
	busyLimit = 15 * time.Minute
	// lookAgain is when a host that was taken is asked again.
	lookAgain = time.Minute
	// A run of a rollout asks for so long, and so often.
	unattendedPatience = 2 * time.Minute
	unattendedAgain    = 30 * time.Second
	// slack lets the agent's own deadline come first, with its reason.
	slack = 30 * time.Second
	// leaseNamespace holds the Lease of the node: a node has no namespace of
	// its own, and this one is there in every cluster.
	leaseNamespace = "kube-system"
)

// run is one GPUNode.
type run struct {
	*stage.Run
	in     Input
	holder string
	locked error
	uid    string // of the Node
	// cordoned: the cordon is ours. begun: the set-up of the host may have
	// changed, by this run or by the one that left its cordon. proven: the host
	// is as it has to be.
	cordoned, begun, proven bool
	baseline                *gpu.Baseline
	changedMIG              bool
	left                    []string // left behind on purpose
	out                     Result
}

// GPUNode prepares and proves one host. Whatever becomes of the run, foreign
// automation gets the node back as it had it; a cordon of ours is undone only
// when the host is proven, or when nothing was begun and nothing bad was found.
func GPUNode(ctx workflow.Context, in Input) (Result, error) {
	if problems := in.Validate(); len(problems) > 0 {
		return Result{}, release.BadInput("input", problems)
	}
	in = in.withDefaults()
	s, err := stage.New(ctx, stage.Options{
		Kind: protocol.GPUNode, Cluster: in.Target.Cluster, Object: in.Node, Parent: in.Parent, Windows: in.Windows,
		Unattended: in.Unattended,
	})
	if err != nil {
		return Result{}, err
	}
	r := &run{Run: s, in: in, baseline: in.Baseline, out: Result{Node: in.Node}}
	ctx = s.Context()
	if in.Parent == nil && !in.Unattended { // another run speaks for it otherwise
		s.UseSearchAttributes(release.SearchAttributes(ctx))
	}
	err = r.execute(ctx)
	if r.locked != nil {
		return Result{}, r.locked
	}
	return r.close(err)
}

// close turns the end of the stages into the result. Whatever is no end of
// them is a defect and fails the workflow task, not the run. A run that no
// other one speaks for stores its record.
func (r *run) close(err error) (Result, error) {
	outcome := protocol.OutcomeDone
	var failed *stage.Failed
	switch {
	case errors.As(err, &failed):
		outcome = protocol.OutcomeAborted
		why := stage.Explain(failed.Cause)
		r.out.Failure = &finding.Finding{
			Object: "Node/" + r.in.Node, Expected: "stage " + failed.Stage + " done", Found: why.Found, Why: why.Why, Next: why.Helps,
		}
	case errors.Is(err, stage.ErrAborted):
		outcome = protocol.OutcomeAborted
	case err != nil:
		r.restore()
		r.unlock()
		return Result{}, err
	case r.in.PlanOnly:
		outcome = protocol.OutcomePlanned
	}
	r.restore()
	if r.holder != "" && !r.in.PlanOnly && r.in.Parent == nil && !r.in.Unattended {
		stored := r.with(r.Receipt(outcome))
		release.Record[any]{Run: r.Run, Scope: r.scope(), Key: release.Key(r.Context()), Receipt: func() any { return stored }}.Close("receipt")
	}
	r.unlock()
	return r.with(r.Close(outcome)), nil
}

// with is the result with the sequencer's receipt.
func (r *run) with(receipt protocol.Receipt) Result {
	receipt.LeftBehind = append(slices.Clone(r.left), receipt.LeftBehind...)
	receipt.Plan = planned(r.out.Planned)
	out := r.out
	out.Receipt = receipt
	return out
}

func (r *run) execute(ctx workflow.Context) error {
	if err := r.Execute(ctx, stage.Stage{Name: "lock", Purpose: "prove which cluster this is and keep every other run off the node", Do: r.lock}); err != nil || r.locked != nil {
		return err
	}
	var stages []stage.Stage
	if r.in.Prepare != nil {
		stages = append(stages, stage.Stage{Name: "plan", Purpose: "ask the agent what it would do", Do: r.plan})
	}
	if r.in.PlanOnly {
		return r.Execute(ctx, stages...)
	}
	stages = append(stages, stage.Stage{Name: "keep-off", Purpose: "tell foreign automation to keep off the node", Mutates: true, Do: r.keepOff})
	if r.in.Cordon {
		stages = append(stages, stage.Stage{Name: "cordon", Purpose: "keep new pods off the node", Mutates: true, Do: r.cordon})
	}
	if r.in.Baseline == nil {
		stages = append(stages, stage.Stage{Name: "baseline", Purpose: "record the GPUs as they are", Skippable: true, Do: r.takeBaseline})
	}
	if p := r.in.Prepare; p != nil {
		stages = append(stages, stage.Stage{Name: prepareStage, Purpose: "bring MIG and vGPU to what is declared", Mutates: true, Do: r.prepare})
	}
	stages = append(stages, stage.Stage{Name: "validate", Purpose: "prove that the GPUs compute", Do: r.validate})
	if r.in.Cordon {
		stages = append(stages, stage.Stage{Name: "uncordon", Purpose: "let pods onto the proven node", Do: r.uncordon})
	}
	return r.Execute(ctx, stages...)
}

// scope makes the node's Lease out of what takes that of a release: they lock
// in the same way.
func scope(target kube.Target, name string) tensorfusion.Scope {
	return tensorfusion.Scope{Target: target, Release: tensorfusion.Release{Name: "gpunode-" + name, Namespace: leaseNamespace}}
}

func (r *run) scope() tensorfusion.Scope { return scope(r.in.Target, r.in.Node) }

func (r *run) lock(ctx workflow.Context, s *stage.Scope) error {
	l, err := release.Take(ctx, s, r.scope())
	if err != nil {
		return err
	}
	r.in.Target, r.holder, r.locked = l.Scope.Target, l.Holder, l.Refused
	return nil
}

func (r *run) request() node.Request {
	return request(r.scope(), r.in.Node, r.uid, r.holder)
}

func request(s tensorfusion.Scope, name, uid, holder string) node.Request {
	return node.Request{Target: s.Target, Node: name, UID: uid,
		Lease: lease.Held{Namespace: s.Release.Namespace, Release: s.Release.Name, Holder: holder}}
}

func (r *run) onNode(ctx workflow.Context, s *stage.Scope, name, summary string) (node.Result, error) {
	var out node.Result
	err := release.Do(ctx, s, r.in.Target.Cluster, name, summary+" "+r.in.Node, callLimit, r.request(), &out)
	return out, err
}

// ask runs an activity of the host's agent.
func (r *run) ask(ctx workflow.Context, s *stage.Scope, name, summary string, limit time.Duration, req, out any) error {
	retries := &temporal.RetryPolicy{
		InitialInterval: 2 * time.Second, BackoffCoefficient: 2, MaximumInterval: 10 * time.Second, MaximumAttempts: 5,
	}
	if name == gpu.PrepareActivity {
		// A second attempt does not know what the first has done, so one that was
		// refused is asked again by patient alone.
		retries.NonRetryableErrorTypes = []string{string(finding.Wait)}
	}
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		StartToCloseTimeout: limit + slack,
		HeartbeatTimeout:    release.Heartbeat,
		WaitForCancellation: true,
		Summary:             summary + " " + r.in.Node,
		RetryPolicy:         retries,
	})
	return s.Activity(ctx, gpu.TaskQueue(r.in.Target.Cluster, r.in.Node), out, name, req)
}

// boot is the boot that the Node object is of now.
func (r *run) boot(ctx workflow.Context, s *stage.Scope) (string, error) {
	out, err := r.onNode(ctx, s, node.ObserveActivity, "look at")
	if err == nil {
		r.uid = out.UID
	}
	return out.BootID, err
}

// patient does again what found the host taken, until limit has passed: a GPU
// in use, an agent that is at work, a Node object of the boot before. Pause and
// abort take effect in between. A run of a rollout waits two minutes, because
// its host has its turn in a window.
func (r *run) patient(ctx workflow.Context, s *stage.Scope, limit time.Duration, do func() error) error {
	again := lookAgain
	if r.in.Unattended {
		limit, again = min(limit, unattendedPatience), unattendedAgain
	}
	until := workflow.Now(ctx).Add(limit)
	for {
		err := do()
		f, class, ok := finding.Of(err)
		if !ok || class != finding.Wait || !workflow.Now(ctx).Add(again).Before(until) {
			return err
		}
		if err := s.Sleep(ctx, again, fmt.Sprintf("%s: %s; waiting", f.Object, f.Found)); err != nil {
			return err
		}
	}
}

// restore undoes at the end of any run what kept others off.
func (r *run) restore() {
	last := func(name, purpose, activity string) {
		r.Cleanup(name, purpose, func(ctx workflow.Context) error {
			return release.Last(ctx, r.in.Target.Cluster, activity, purpose+" "+r.in.Node, r.request(), nil)
		})
	}
	switch {
	case r.cordoned && (r.proven || !r.begun && r.out.Validation == nil):
		last("undo-cordon", "undo our cordon of", node.UncordonActivity)
	case r.cordoned:
		r.left = append(r.left, cordonStays(r.in.Node))
	}
	if r.holder != "" && !r.in.PlanOnly { // also what an earlier run was ended before it could
		last("give-back", "give foreign automation back", node.GiveBackActivity)
	}
}

func (r *run) unlock() {
	if r.holder != "" {
		release.GiveBack(r.Run, release.Lock{Scope: r.scope(), Holder: r.holder})
	}
}
