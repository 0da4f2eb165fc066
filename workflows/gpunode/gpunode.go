package gpunode

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
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
	// held: the foreign automation may have been told to keep off.
	held bool
	// cordoned: the cordon is ours. begun: the set-up of the host may have
	// changed. proven: the host is as it has to be.
	cordoned, begun, proven bool
	baseline                *gpu.Baseline
	changedMIG              bool
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
	})
	if err != nil {
		return Result{}, err
	}
	r := &run{Run: s, in: in, baseline: in.Baseline, out: Result{Node: in.Node}}
	ctx = s.Context()
	if in.Parent == nil {
		s.UseSearchAttributes(release.SearchAttributes(ctx))
	}
	err = r.execute(ctx)
	r.giveBack()
	if r.locked != nil {
		return Result{}, r.locked
	}
	r.out.Outcome = protocol.OutcomeDone
	switch {
	case errors.Is(err, stage.ErrAborted):
		r.out.Outcome = protocol.OutcomeAborted
	case err != nil:
		return Result{}, err
	case in.PlanOnly:
		r.out.Outcome = protocol.OutcomePlanned
	}
	receipt := r.Close(r.out.Outcome)
	r.out.Stages, r.out.Warnings = receipt.Stages, receipt.Warnings
	r.out.LeftBehind = append(r.out.LeftBehind, receipt.LeftBehind...)
	return r.out, nil
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
		stages = append(stages, stage.Stage{Name: "prepare", Purpose: "bring MIG and vGPU to what is declared", Mutates: true, Section: true,
			Estimate: p.Limit.D(), Do: r.prepare})
	}
	stages = append(stages, stage.Stage{Name: "validate", Purpose: "prove that the GPUs compute", Do: r.validate})
	if r.in.Cordon {
		stages = append(stages, stage.Stage{Name: "uncordon", Purpose: "let pods onto the proven node", Do: r.uncordon})
	}
	return r.Execute(ctx, stages...)
}

// scope makes the node's Lease out of what takes that of a release: they lock
// in the same way.
func (r *run) scope() tensorfusion.Scope {
	return tensorfusion.Scope{Target: r.in.Target, Release: tensorfusion.Release{Name: "gpunode-" + r.in.Node, Namespace: leaseNamespace}}
}

func (r *run) lock(ctx workflow.Context, s *stage.Scope) error {
	l, err := release.Take(ctx, s, r.scope())
	if err != nil {
		return err
	}
	r.in.Target, r.holder, r.locked = l.Scope.Target, l.Holder, l.Refused
	return nil
}

func (r *run) request() node.Request {
	return node.Request{Target: r.in.Target, Node: r.in.Node, UID: r.uid}
}

func (r *run) onNode(ctx workflow.Context, s *stage.Scope, name, summary string) (node.Result, error) {
	var out node.Result
	err := release.Do(ctx, s, r.in.Target.Cluster, name, summary+" "+r.in.Node, callLimit, r.request(), &out)
	return out, err
}

// ask runs an activity of the host's agent.
func (r *run) ask(ctx workflow.Context, s *stage.Scope, name, summary string, limit time.Duration, req, out any) error {
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		StartToCloseTimeout: limit + slack,
		HeartbeatTimeout:    release.Heartbeat,
		WaitForCancellation: true,
		Summary:             summary + " " + r.in.Node,
		RetryPolicy: &temporal.RetryPolicy{
			InitialInterval: 2 * time.Second, BackoffCoefficient: 2, MaximumInterval: 10 * time.Second, MaximumAttempts: 5,
		},
	})
	return s.Activity(ctx, gpu.TaskQueue(r.in.Target.Cluster, r.in.Node), out, name, req)
}

func (r *run) prepareRequest(planOnly bool) gpu.PrepareRequest {
	p := r.in.Prepare
	return gpu.PrepareRequest{Node: r.in.Node, MIG: p.MIG, VGPU: p.VGPU, PlanOnly: planOnly, Deadline: p.Limit.D()}
}

func (r *run) plan(ctx workflow.Context, s *stage.Scope) error {
	var out gpu.PrepareResult
	err := r.ask(ctx, s, gpu.PrepareActivity, "plan the set-up of", callLimit, r.prepareRequest(true), &out)
	if f, class, ok := finding.Of(err); ok && class == finding.Wait && !r.in.PlanOnly {
		// Busy now, before the node is cordoned, is no reason to stop.
		s.Note("busy now: %s", f.Found)
		return nil
	}
	if err != nil {
		return err
	}
	r.out.Planned = &out
	s.Note("%s", words(out.Actions))
	return nil
}

// words is a list of actions in one line.
func words(actions []gpu.Action) string {
	if len(actions) == 0 {
		return "nothing to do"
	}
	list := make([]string, len(actions))
	for i, a := range actions {
		list[i] = a.Device + " " + a.What
	}
	return fmt.Sprintf("%d actions: %s", len(actions), strings.Join(list, "; "))
}

func (r *run) keepOff(ctx workflow.Context, s *stage.Scope) error {
	r.held = true // also when only the reply is lost
	out, err := r.onNode(ctx, s, node.KeepOffActivity, "keep foreign automation off")
	if err != nil {
		return err
	}
	r.uid = out.UID
	s.Note("label %s=false (before: %s)", node.ManagedLabel, out.Before)
	return nil
}

func (r *run) cordon(ctx workflow.Context, s *stage.Scope) error {
	r.cordoned = true
	out, err := r.onNode(ctx, s, node.CordonActivity, "cordon")
	if err != nil {
		return err
	}
	if out.Foreign {
		r.cordoned = false
		r.Warn(fmt.Sprintf("Node %s was cordoned by somebody else: it stays so after this run", r.in.Node))
	}
	return nil
}

func (r *run) takeBaseline(ctx workflow.Context, s *stage.Scope) error {
	var b gpu.Baseline
	if err := r.ask(ctx, s, gpu.BaselineActivity, "baseline of", baselineLimit, gpu.BaselineRequest{Node: r.in.Node}, &b); err != nil {
		return err
	}
	r.baseline = &b
	s.Note("%d GPUs, driver %s", len(b.Devices), b.Driver)
	return nil
}

func (r *run) prepare(ctx workflow.Context, s *stage.Scope) error {
	r.begun = true
	var out gpu.PrepareResult
	err := r.ask(ctx, s, gpu.PrepareActivity, "prepare", r.in.Prepare.Limit.D(), r.prepareRequest(false), &out)
	if err != nil {
		// What was done before is not told: take it that modes have changed.
		r.changedMIG = r.changedMIG || r.in.Prepare.MIG != nil
		return err
	}
	r.changedMIG = r.changedMIG || out.ChangedMIG()
	if before := r.out.Prepared; before != nil {
		out.Actions = append(before.Actions, out.Actions...)
	}
	r.out.Prepared = &out
	s.Note("%s", words(out.Actions))
	if len(out.Needs) == 0 {
		return nil
	}
	var found []finding.Finding
	kinds := map[string]bool{}
	for _, n := range out.Needs {
		found = append(found, finding.Finding{Object: "GPU " + n.Device, Expected: "no " + n.Kind + " needed", Found: n.Why})
		kinds[n.Kind] = true
	}
	helps := "reset the GPU (nvidia-smi --gpu-reset, with no client on it) or reboot the host, then answer retry: the set-up goes on from there"
	if kinds[gpu.NeedsReboot] {
		helps = "reboot the host, then answer retry: the set-up goes on from there"
	}
	return stage.Parking(fmt.Sprintf("node %s: %s", r.in.Node, out.Needs[0].Why),
		"the host is not as declared before that; the plan does not allow it, or it did not help", helps, nil, found...)
}

func (r *run) validate(ctx workflow.Context, s *stage.Scope) error {
	// A person who repairs the host most likely reboots it, which takes MIG
	// instances and vGPUs away: bring them back before it is judged again.
	if r.out.Validation != nil && r.in.Prepare != nil {
		if err := r.prepare(ctx, s); err != nil {
			return err
		}
	}
	limit := r.in.validationLimit()
	baseline := r.baseline
	if baseline != nil && r.changedMIG {
		b := baseline.WithoutMIG()
		baseline = &b
	}
	var out gpu.Result
	err := r.ask(ctx, s, gpu.ValidateActivity, "validate", limit, gpu.ValidateRequest{
		Node: r.in.Node, Level: r.in.Level, Baseline: baseline, Deadline: limit, Expect: r.in.Expect,
	}, &out)
	if err != nil {
		return err
	}
	r.out.Validation = &out
	s.Note("verdict %s, %d rows passed", out.Verdict, out.Passed)
	switch {
	case out.Verdict == gpu.Pass:
		r.proven = true
		return nil
	case out.Verdict == gpu.Degraded && !r.in.Strict:
		r.proven = true
		r.Warn(fmt.Sprintf("Node %s is degraded: %s", r.in.Node, failed(out)[0]))
		return nil
	}
	helps := "repair the host, then answer retry: it is validated again"
	if out.Verdict == gpu.ResetNeeded {
		helps = "reset the GPU or reboot the host, then answer retry"
	}
	found := failed(out)
	return stage.Parking(fmt.Sprintf("node %s: verdict %s: %s", r.in.Node, out.Verdict, found[0]),
		"a host that is not proven must take no workload: it stays as it is now", helps, nil, found...)
}

// failed are the rows that did not pass, at least one.
func failed(r gpu.Result) []finding.Finding {
	var out []finding.Finding
	for _, c := range r.Checks {
		if c.OK || c.Severity == gpu.Info {
			continue
		}
		f := finding.Finding{Object: strings.TrimSpace(c.Name + " " + c.Device), Expected: c.Expected, Found: c.Found, Next: c.Hint}
		if c.Skipped != "" {
			f.Found = "not answered: " + c.Skipped
		}
		out = append(out, f)
	}
	if len(out) == 0 {
		out = append(out, finding.Finding{Object: "verdict", Found: string(r.Verdict) + " without a row that says why", Next: "look at the agent's log on the host"})
	}
	return out
}

func (r *run) uncordon(ctx workflow.Context, s *stage.Scope) error {
	if !r.cordoned {
		s.Note("the cordon is somebody else's: left")
		return nil
	}
	if _, err := r.onNode(ctx, s, node.UncordonActivity, "uncordon"); err != nil {
		return err
	}
	r.cordoned = false
	return nil
}

// giveBack undoes at the end of any run what kept others off.
func (r *run) giveBack() {
	last := func(name, purpose, activity string) {
		r.Cleanup(name, purpose, func(ctx workflow.Context) error {
			return release.Last(ctx, r.in.Target.Cluster, activity, purpose+" "+r.in.Node, r.request(), nil)
		})
	}
	switch {
	case r.cordoned && (r.proven || !r.begun && r.out.Validation == nil):
		last("undo-cordon", "undo our cordon of", node.UncordonActivity)
	case r.cordoned:
		r.out.LeftBehind = append(r.out.LeftBehind, fmt.Sprintf(
			"Node %s stays cordoned: the host is not proven; start another run, or prove it and kubectl uncordon it", r.in.Node))
	}
	if r.held {
		last("give-back", "give foreign automation back", node.GiveBackActivity)
	}
	if r.holder != "" {
		release.GiveBack(r.Run, release.Lock{Scope: r.scope(), Holder: r.holder})
	}
}
