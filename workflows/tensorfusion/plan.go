package tensorfusion

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/stage"
)

// shownHosts is how many hosts of a batch a plan names.
const shownHosts = 20

// showPlan renders the diff, forecasts what the new controller rolls by itself
// (P11) and fixes the plan's digest.
func (e *engine) showPlan(ctx workflow.Context, s *stage.Scope) error {
	if e.locked != nil {
		return nil
	}
	e.diff = tensorfusion.DiffResult{} // of an attempt before: what is empty now is left out of the answer
	if err := e.do(ctx, s, tensorfusion.DiffActivity, "diff of "+e.release.Name, 5*time.Minute,
		tensorfusion.DiffRequest{Scope: e.scope, Intent: e.intent, AcceptedFloating: e.floating, Acknowledged: e.acknowledge}, &e.diff); err != nil {
		return err
	}
	if err := blocked("the upgrade would change what must not change", "Helm would carry it out without asking.", e.diff.Checks); err != nil {
		return err
	}
	if e.diff.Artifact.URL != "" {
		e.run.Artifact(e.diff.Artifact)
	}
	p := protocol.Plan{
		From: versions(e.pre.Source), To: versions(e.pre.Target),
		Diff: e.diff.Text, Forecast: e.diff.Forecast,
	}
	for _, c := range e.diff.Changes {
		p.Changes = append(p.Changes, protocol.PlannedChange(c))
	}
	for _, c := range append(e.pre.Checks, e.diff.Checks...) {
		if c.Acknowledged {
			p.Accepted = append(p.Accepted, c.Row)
		}
	}
	goal := e.plannedGoal(ctx)
	var err error
	if p.Batches, err = e.layout(ctx, s, goal); err != nil {
		return err
	}
	if e.pre.NoChange {
		if err := e.stillOutdated(ctx, s); err != nil {
			return err
		}
	}
	if !e.pre.NoChange {
		left, err := e.foresee(ctx, s, goal)
		if err != nil {
			return err
		}
		if p.LeftOff = findings(left); len(left) > 0 && e.kind == protocol.TensorFusionUpgrade {
			p.Accepted = append(p.Accepted, AcknowledgeOff)
		}
	}
	p.Digest = protocol.DigestOf(struct {
		Intent any
		Plan   any
	}{e.intent, p})
	e.plan = p
	if len(e.targets) == 0 {
		e.run.Warn("no pool that the plan rolls has GPU nodes: nothing but the release changes")
	}
	s.Note("%d objects change, %d batches; plan %s", len(p.Changes), len(p.Batches), p.Digest[:12])
	return nil
}

// stillOutdated looks for pods that the plan's rollouts of workers and clients
// would replace in a release that needs no change: those are work, too.
func (e *engine) stillOutdated(ctx workflow.Context, s *stage.Scope) error {
	for _, t := range e.targets {
		var why string
		var err error
		switch t.Component {
		case Worker:
			why, err = e.outdatedWorkers(ctx, s, t.pool, false)
		case Client:
			why, err = e.outdatedClients(ctx, s, t.pool, false)
		}
		if err != nil {
			return err
		}
		if why != "" {
			e.pre.NoChange = false
			return nil
		}
	}
	return nil
}

func versions(v tensorfusion.Versions) map[string]string {
	return map[string]string{"chart": v.Chart, "controller": v.Controller, "hypervisor": v.Hypervisor}
}

// hosts judges the hosts of a GPUPool against the goal.
func (e *engine) hosts(ctx workflow.Context, s *stage.Scope, pool string, goal tensorfusion.Goal, labels []string) ([]tensorfusion.Host, error) {
	var seen tensorfusion.PoolObservation
	err := e.do(ctx, s, tensorfusion.ObservePoolActivity, "hosts of pool "+pool, 2*time.Minute, tensorfusion.ObservePoolRequest{
		Scope: e.scope, Pool: pool, Goal: goal, LabelKeys: labels,
	}, &seen)
	return seen.Hosts, err
}

// plannedGoal is what will prove a host after the change, as far as that is
// known before it.
func (e *engine) plannedGoal(ctx workflow.Context) tensorfusion.Goal {
	goal := e.goal
	// No pod that is there now is of the new template, or none can be told to be.
	if e.templatesChange() || len(e.diff.Changes) > 0 && !allSettled(e.pre.Pools) {
		goal.Since = workflow.Now(ctx)
	}
	if e.keepsHosts() { // but of the one that comes back
		goal.Kept = e.undo.Youngest
	}
	return goal
}

// layout shows the batches of every rollout, from the hosts as they are now.
func (e *engine) layout(ctx workflow.Context, s *stage.Scope, goal tensorfusion.Goal) ([]protocol.PlannedBatch, error) {
	var out []protocol.PlannedBatch
	for _, t := range e.targets {
		if t.Component != Hypervisor {
			out = append(out, protocol.PlannedBatch{Stage: t.name(), Total: 0})
			continue
		}
		hosts, err := e.hosts(ctx, s, t.pool.Name, goal, t.Strategy.Labels())
		if err != nil {
			return nil, err
		}
		l, err := plan.Build(t.Strategy.WithDefaults(), rollout.PlannerHosts(hosts), e.fixFirst)
		if err != nil {
			return nil, stage.Parking(fmt.Sprintf("pool %s can't be rolled as planned: %v", t.pool.Entry, err),
				"The strategy does not fit the hosts that are there.",
				"Abort, correct rollouts[].strategy and start again; or change the pool and answer retry.", []string{protocol.Retry, protocol.Abort})
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
	return allSettled(before) && !slices.ContainsFunc(withNodes(before), func(p tensorfusion.Pool) bool {
		return !slices.ContainsFunc(now, func(n tensorfusion.Pool) bool {
			return n.Name == p.Name && n.Hash == p.Hash
		})
	})
}

// allSettled: there are pods, and every one is of its pool's template.
func allSettled(pools []tensorfusion.Pool) bool {
	pools = withNodes(pools)
	return len(pools) > 0 && !slices.ContainsFunc(pools, func(p tensorfusion.Pool) bool { return !p.Settled })
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
