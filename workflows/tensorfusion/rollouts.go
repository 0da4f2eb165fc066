package tensorfusion

import (
	"fmt"
	"slices"
	"strings"

	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// target is one rollout of one component over one pool.
type target struct {
	Rollout
	pool tensorfusion.Pool
}

// name is the prefix of the child's stages: rollout.hypervisor.shared.
func (t target) name() string { return "rollout." + t.Component + "." + t.pool.Entry }

// aim resolves the plan's rollouts to those of the pools that have GPU nodes (a
// pool without nodes performs no rollout, T17), in the plan's order. It is done
// with what the preflight sees and, because a gate or a window may have taken
// days, once more when the new controller leads: a node that joins later is made
// of the new template.
func (e *engine) aim(pools []tensorfusion.Pool) error {
	var ts []target
	for _, r := range e.rollouts {
		for _, name := range r.Pools {
			if e.undo == nil && !slices.ContainsFunc(pools, func(p tensorfusion.Pool) bool { return p.Entry == name }) {
				return stage.Parking(
					fmt.Sprintf("the plan rolls pool %q, which spec.gpuPools does not hold", name),
					"The nodes it means would stay on the old version.",
					"Bring the entry back and answer retry; or abort, correct rollouts[].pools (known: "+entries(pools)+") and start again.",
					[]string{protocol.Retry, protocol.Abort})
			}
		}
		for _, p := range pools {
			if p.Nodes == 0 || !e.means(r, p.Entry) {
				continue
			}
			t := target{r, p}
			if i := slices.IndexFunc(ts, func(o target) bool { return o.name() == t.name() }); i >= 0 {
				return stage.Parking(
					fmt.Sprintf("%s would be rolled twice: entry %q stands for GPUPool %s and GPUPool %s", t.name(), p.Entry, ts[i].pool.Name, p.Name),
					"Stages and runs are named by the entry: two of one name can't be told apart.",
					"Give the two pools different names in spec.gpuPools, then answer retry.",
					[]string{protocol.Retry, protocol.Abort})
			}
			ts = append(ts, t)
		}
	}
	e.pools, e.targets = pools, ts
	return nil
}

// aimAgain takes the pools as the new controller shows them, and says what has
// changed since the plan.
func (e *engine) aimAgain(pools []tensorfusion.Pool) error {
	planned := e.targets
	if err := e.aim(pools); err != nil {
		return err
	}
	without := func(ts, others []target) []target {
		return slices.DeleteFunc(slices.Clone(ts), func(t target) bool {
			return slices.ContainsFunc(others, func(o target) bool { return o.name() == t.name() })
		})
	}
	for _, t := range without(e.targets, planned) {
		e.run.Warn(fmt.Sprintf("pool %s has %d GPU nodes and had none at the plan: %s follows, too", t.pool.Entry, t.pool.Nodes, t.name()))
	}
	for _, t := range without(planned, e.targets) {
		e.run.Warn(fmt.Sprintf("pool %s has no GPU nodes any more: nothing is left of %s", t.pool.Entry, t.name()))
	}
	e.coming()
	return nil
}

// means reports whether a rollout is for the pool: for those that it names, or,
// when it names none, for every pool that no other rollout of its component
// names.
func (e *engine) means(r Rollout, entry string) bool {
	if len(r.Pools) > 0 {
		return slices.Contains(r.Pools, entry)
	}
	return !slices.ContainsFunc(e.rollouts, func(o Rollout) bool {
		return o.Component == r.Component && slices.Contains(o.Pools, entry)
	})
}

// rolls reports whether a rollout of the component takes the GPUPool.
func (e *engine) rolls(component, pool string) bool {
	return slices.ContainsFunc(e.targets, func(t target) bool { return t.Component == component && t.pool.Name == pool })
}

func entries(pools []tensorfusion.Pool) string {
	names := make([]string, len(pools))
	for i, p := range pools {
		names[i] = p.Entry
	}
	return strings.Join(names, ", ")
}

// rolloutStages is one stage per rollout and pool; the child adds its batches.
func (e *engine) rolloutStages() []stage.Stage {
	stages := make([]stage.Stage, len(e.targets))
	for i, t := range e.targets {
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
			Strategy: t.Strategy, Goal: e.goal, Validation: e.validation.Mode, Level: e.validation.Level, Expect: e.validation.Expect,
			Windows: e.windows, Prepare: t.Prepare, Workers: t.Workers, Clients: t.Clients, FixFirst: e.fixFirst, Parent: &parent,
			Deadline: e.run.Deadline(), MaxDuration: window.Duration(e.maxDuration),
		})
	}, &result)
	if result.Outcome != "" { // an aborted rollout has hosts behind it too
		e.take(t, result)
	}
	for _, l := range result.LeftBehind {
		e.left = union(e.left, l)
	}
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
		e.leave(t, counted("application pods with an outdated injection", len(r.LeftClients)))
		return
	}
	if len(r.Hosts) == 0 {
		return // the pool has lost its nodes
	}
	e.record(r.Hosts)
	delete(e.canary, t.pool.Name) // it may have broken since an earlier run of the rollout
	left := 0
	for _, h := range r.Hosts {
		if h.Outcome != rollout.OutcomeLeft && h.Outcome != rollout.OutcomeGone {
			e.touched = append(e.touched, h.Name)
		}
		if h.Outcome == rollout.OutcomeLeft {
			e.rolled.LeftHosts = append(e.rolled.LeftHosts, h.Name)
			left++
		}
		if proven := h.Outcome == tensorfusion.OutcomeReplaced || h.Outcome == tensorfusion.OutcomeAlready; proven && e.canary[t.pool.Name] == "" {
			e.canary[t.pool.Name] = h.Name
		}
	}
	e.rolled.Hypervisors = union(e.rolled.Hypervisors, t.pool.Name)
	e.leave(t, counted("hosts left as they are", left))
}

// counted is empty for none.
func counted(what string, n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("%s: %d", what, n)
}

func union(names []string, name string) []string {
	if slices.Contains(names, name) {
		return names
	}
	return append(names, name)
}

// record keeps one row per host, and forgets what an earlier run of the rollout
// left. A rollout that ran again finds on target what its first run replaced.
func (e *engine) record(rows []rollout.HostRow) {
	at := make(map[string]int, len(e.rows)+len(rows)) // thousands
	for i, r := range e.rows {
		at[r.Name] = i
	}
	for _, h := range rows {
		i, known := at[h.Name]
		switch {
		case !known:
			at[h.Name] = len(e.rows)
			e.rows = append(e.rows, h)
		case h.Outcome != tensorfusion.OutcomeAlready:
			e.rows[i] = h
		}
	}
	again := make(map[string]bool, len(rows))
	for _, h := range rows {
		again[h.Name] = true
	}
	e.rolled.LeftHosts = slices.DeleteFunc(e.rolled.LeftHosts, func(name string) bool { return again[name] })
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

// tagOf shows an image by its tag or digest.
func tagOf(image string) string {
	if i := strings.LastIndexAny(image, ":@"); i >= 0 && !strings.Contains(image[i:], "/") {
		return image[i+1:]
	}
	return image
}
