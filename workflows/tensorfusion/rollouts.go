package tensorfusion

import (
	"fmt"
	"slices"
	"strings"
	"time"

	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// shownHosts is how many hosts of a batch a plan names.
const shownHosts = 20

// target is one rollout of one component over one pool.
type target struct {
	Rollout
	pool tensorfusion.Pool
}

// name is the prefix of the child's stages: rollout.hypervisor.shared.
func (t target) name() string { return "rollout." + t.Component + "." + t.pool.Entry }

// targets resolves the plan's rollouts to the pools that have GPU nodes (a
// pool without nodes performs no rollout, T17), in the plan's order.
func (e *engine) targets() ([]target, error) {
	var ts []target
	for _, r := range e.rollouts {
		for _, name := range r.Pools {
			if !slices.ContainsFunc(e.pre.Pools, func(p tensorfusion.Pool) bool { return p.Entry == name }) {
				return nil, stage.Parking(
					fmt.Sprintf("the plan rolls pool %q, which spec.gpuPools does not hold", name),
					"The nodes it means would stay on the old version.",
					"Abort, correct rollouts[].pools (known: "+entries(e.pre.Pools)+") and start again.",
					[]string{protocol.Retry, protocol.Abort})
			}
		}
		for _, p := range e.pre.Pools {
			if p.Nodes == 0 || len(r.Pools) > 0 && !slices.Contains(r.Pools, p.Entry) {
				continue
			}
			t := target{r, p}
			if i := slices.IndexFunc(ts, func(o target) bool { return o.name() == t.name() }); i >= 0 {
				return nil, stage.Parking(
					fmt.Sprintf("%s would be rolled twice: entry %q stands for GPUPool %s and GPUPool %s", t.name(), p.Entry, ts[i].pool.Name, p.Name),
					"Stages and runs are named by the entry: two of one name can't be told apart.",
					"Abort, give the two pools different names in spec.gpuPools and start again.",
					[]string{protocol.Retry, protocol.Abort})
			}
			ts = append(ts, t)
		}
	}
	return ts, nil
}

func entries(pools []tensorfusion.Pool) string {
	names := make([]string, len(pools))
	for i, p := range pools {
		names[i] = p.Entry
	}
	return strings.Join(names, ", ")
}

// layout shows the batches of every rollout, from the hosts as they are now.
func (e *engine) layout(ctx workflow.Context, s *stage.Scope) ([]protocol.PlannedBatch, error) {
	ts, err := e.targets()
	if err != nil {
		return nil, err
	}
	goal := e.goal
	if e.templatesChange() { // no pod that is there now is of the new template
		goal.Since = workflow.Now(ctx)
	}
	if e.keepsHosts() { // but of the one that comes back
		goal.Kept = e.undo.Youngest
	}
	var out []protocol.PlannedBatch
	for _, t := range ts {
		if t.Component != Hypervisor {
			out = append(out, protocol.PlannedBatch{Stage: t.name(), Total: 0})
			continue
		}
		var seen tensorfusion.PoolObservation
		if err := e.do(ctx, s, tensorfusion.ObservePoolActivity, "hosts of pool "+t.pool.Name, 2*time.Minute, tensorfusion.ObservePoolRequest{
			Scope: e.scope, Pool: t.pool.Name, Goal: goal, LabelKeys: t.Strategy.Labels(),
		}, &seen); err != nil {
			return nil, err
		}
		l, err := plan.Build(t.Strategy.WithDefaults(), rollout.PlannerHosts(seen.Hosts), e.fixFirst)
		if err != nil {
			return nil, stage.Parking(fmt.Sprintf("pool %s can't be rolled as planned: %v", t.pool.Entry, err),
				"The strategy does not fit the hosts that are there.",
				"Abort, correct rollouts[].strategy and start again.", []string{protocol.Retry, protocol.Abort})
		}
		for _, b := range l.Batches {
			out = append(out, protocol.PlannedBatch{
				Stage: t.name() + "." + b.Name, Total: len(b.Hosts), Hosts: b.Hosts[:min(len(b.Hosts), shownHosts)],
			})
		}
	}
	return out, nil
}

// templatesChange: the release changes what hypervisor pods are made of, beyond
// what a Goal names.
func (e *engine) templatesChange() bool {
	return slices.ContainsFunc(e.diff.Changes, func(c tensorfusion.ObjectChange) bool {
		return strings.HasPrefix(c.Object, "TensorFusionCluster/") || strings.HasPrefix(c.Object, "ProviderConfig/")
	})
}

// withNodes leaves out the pools without GPU nodes: they have no pod, and the
// controller never calls them settled (T17).
func withNodes(pools []tensorfusion.Pool) []tensorfusion.Pool {
	return slices.DeleteFunc(slices.Clone(pools), func(p tensorfusion.Pool) bool { return p.Nodes == 0 })
}

// sameTemplates: every pod was of its pool's template before the change, and the
// controller that now leads makes them in the same way.
func sameTemplates(before, now []tensorfusion.Pool) bool {
	before = withNodes(before)
	return len(before) > 0 && !slices.ContainsFunc(before, func(p tensorfusion.Pool) bool {
		return !p.Settled || !slices.ContainsFunc(now, func(n tensorfusion.Pool) bool {
			return n.Name == p.Name && n.Hash == p.Hash
		})
	})
}

// rolloutStages is one stage per rollout and pool; the child adds its batches.
func (e *engine) rolloutStages() []stage.Stage {
	ts, err := e.targets()
	if err != nil {
		return nil // showPlan has parked on it before any stage of this list ran
	}
	stages := make([]stage.Stage, len(ts))
	for i, t := range ts {
		stages[i] = stage.Stage{
			Name: t.name(), Purpose: purpose(t), Mutates: true,
			Do: func(ctx workflow.Context, s *stage.Scope) error { return e.roll(ctx, s, t) },
		}
	}
	return stages
}

func purpose(t target) string {
	switch t.Component {
	case Worker:
		return "let the controller roll the workers of pool " + t.pool.Entry + ", watched"
	case Client:
		return "evict the application pods of pool " + t.pool.Entry + " whose injection is outdated"
	default:
		return "replace and prove the hypervisors of pool " + t.pool.Entry
	}
}

// roll runs the child and takes its rows over.
func (e *engine) roll(ctx workflow.Context, s *stage.Scope, t target) error {
	if err := e.assertHold(ctx, s, t.name()); err != nil {
		return err
	}
	var result rollout.Result
	err := s.Child(ctx, t.name(), func(ctx workflow.Context, parent protocol.Parent) workflow.ChildWorkflowFuture {
		ctx = workflow.WithChildOptions(ctx, workflow.ChildWorkflowOptions{
			WorkflowID:          workflow.GetInfo(ctx).WorkflowExecution.ID + "." + t.name(),
			TaskQueue:           protocol.TaskQueue,
			ParentClosePolicy:   enums.PARENT_CLOSE_POLICY_TERMINATE,
			WaitForCancellation: true,
			StaticSummary:       purpose(t),
		})
		return workflow.ExecuteChildWorkflow(ctx, protocol.Rollout, rollout.Input{
			Scope: e.scope, Component: t.Component, Pool: t.pool.Name, Entry: t.pool.Entry,
			Strategy: t.Strategy, Goal: e.goal, Validation: e.validation.Mode, Level: e.validation.Level, Expect: expectOf(e.validation.Expect, t.pool),
			Windows: e.windows, Prepare: t.Prepare, Workers: t.Workers, Clients: t.Clients, FixFirst: e.fixFirst, Parent: &parent,
			Deadline: e.run.Deadline(), MaxDuration: window.Duration(e.maxDuration),
		})
	}, &result)
	if result.Outcome != "" { // an aborted rollout has hosts behind it too
		e.take(t, result)
	}
	e.left = append(e.left, result.LeftBehind...)
	for _, w := range result.Warnings {
		e.run.Warn(w)
	}
	for _, f := range result.Drift {
		e.run.Warn(f.String())
	}
	if err != nil {
		return err
	}
	s.Note("%s", summary(t, result))
	return e.drift(ctx, s, t.name())
}

// expectOf fills the pool's port in.
func expectOf(declared *gpu.Expect, p tensorfusion.Pool) *gpu.Expect {
	if declared == nil || declared.TensorFusion == nil || declared.TensorFusion.Port != 0 {
		return declared
	}
	out, host := *declared, *declared.TensorFusion
	host.Port = int(p.Port)
	out.TensorFusion = &host
	return &out
}

// take merges a rollout's rows into the run.
func (e *engine) take(t target, r rollout.Result) {
	switch t.Component {
	case Worker:
		e.touchedWorkers = true
		e.rolled.Workers = union(e.rolled.Workers, t.pool.Name)
		return
	case Client:
		e.rolled.Clients = union(e.rolled.Clients, t.pool.Name)
		for _, p := range r.LeftClients {
			e.rolled.Left = union(e.rolled.Left, p.Namespace+"/"+p.Name)
		}
		return
	}
	for _, h := range r.Hosts {
		e.record(h)
		if h.Outcome != rollout.OutcomeLeft && h.Outcome != rollout.OutcomeGone {
			e.touched = append(e.touched, h.Name)
		}
		if proven := h.Outcome == tensorfusion.OutcomeReplaced || h.Outcome == tensorfusion.OutcomeAlready; proven && e.canary[t.pool.Name] == "" {
			e.canary[t.pool.Name] = h.Name
		}
	}
	e.rolled.Hypervisors = union(e.rolled.Hypervisors, t.pool.Name)
}

func union(names []string, name string) []string {
	if slices.Contains(names, name) {
		return names
	}
	return append(names, name)
}

// record keeps one row per host. A rollout that ran again finds on target what
// its first run replaced.
func (e *engine) record(h rollout.HostRow) {
	i := slices.IndexFunc(e.rows, func(r rollout.HostRow) bool { return r.Name == h.Name })
	switch {
	case i < 0:
		e.rows = append(e.rows, h)
	case h.Outcome != tensorfusion.OutcomeAlready:
		e.rows[i] = h
	}
}

func summary(t target, r rollout.Result) string {
	if t.Component != Hypervisor {
		return fmt.Sprintf("%d of %d done", r.Progress.Done, r.Progress.Total)
	}
	counts := map[string]int{}
	for _, h := range r.Hosts {
		counts[h.Outcome]++
	}
	parts := []string{fmt.Sprintf("%d hosts replaced and proven", counts[tensorfusion.OutcomeReplaced])}
	for _, o := range []struct{ outcome, text string }{
		{tensorfusion.OutcomeAlready, "already on target"},
		{tensorfusion.OutcomeFailed, "failed within the budget"},
		{rollout.OutcomeUnproven, "unproven"},
		{rollout.OutcomeLeft, "left as they were"},
		{rollout.OutcomeGone, "gone from the pool"},
	} {
		if n := counts[o.outcome]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, o.text))
		}
	}
	return strings.Join(parts, ", ")
}

// forecast is the one-line form of what the controller will do by itself.
func forecast(fs []finding.Finding) string {
	parts := make([]string, len(fs))
	for i, f := range fs {
		parts[i] = f.Object + " (" + f.Found + ")"
	}
	return strings.Join(parts, ", ")
}

// forecastsWorkers: the controller is going to replace workers by itself.
func forecastsWorkers(fs []finding.Finding) bool {
	return slices.ContainsFunc(fs, func(f finding.Finding) bool { return strings.HasPrefix(f.Object, "TensorFusionWorkload/") })
}

// tagOf shows an image by its tag or digest.
func tagOf(image string) string {
	if i := strings.LastIndexAny(image, ":@"); i >= 0 && !strings.Contains(image[i:], "/") {
		return image[i+1:]
	}
	return image
}
