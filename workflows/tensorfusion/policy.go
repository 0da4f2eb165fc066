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
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

// AcknowledgeOff accepts that auto update stays off wherever the plan leaves
// pods outdated: with the flag on the controller would roll them at once, by
// itself (rules 10 and 23).
const AcknowledgeOff = "policy"

// off is auto update of one component of a GPUPool that can't come back, or may
// not be able to.
type off struct{ component, pool, why string }

func (o off) String() string {
	return fmt.Sprintf("pool %s: auto update of %ss stays off: %s", o.pool, o.component, o.why)
}

// rowOf names the row of a component's rollout.
var rowOf = map[string]string{Hypervisor: "T14", Worker: "T15", Client: "T16"}

func (o off) finding() finding.Finding {
	return finding.Finding{
		Row: rowOf[o.component], Object: "GPUPool/" + o.pool + ", auto update of " + o.component + "s",
		Expected: "a rollout of this plan, or nothing outdated", Found: o.why,
	}
}

func findings(left []off) []finding.Finding {
	var out []finding.Finding
	for _, o := range left {
		out = append(out, o.finding())
	}
	return out
}

// wanted is what the plan asks the policy of a GPUPool to become at the end.
func (e *engine) wanted(pool string) tensorfusion.PoolPolicy {
	i := slices.IndexFunc(e.before, func(p tensorfusion.PoolPolicy) bool { return p.Pool == pool })
	if i < 0 || e.policy == tensorfusion.PolicyKeepOff {
		return tensorfusion.PoolPolicy{Pool: pool}
	}
	p := e.before[i]
	p.AutoHypervisor = p.AutoHypervisor || e.policy == tensorfusion.PolicySeal
	return p
}

// unrolled lists whose auto update the plan asks for although no rollout of it
// takes their outdated pods. Asked before the change it answers for after it,
// as far as the release tells.
func (e *engine) unrolled(ctx workflow.Context, s *stage.Scope, goal tensorfusion.Goal, before bool) ([]off, error) {
	var out []off
	for _, p := range e.pools {
		want := e.wanted(p.Name)
		changes := tensorfusion.Outdated{}
		if before {
			changes = e.outdates(p.Name)
		}
		for _, c := range []struct {
			component string
			on        bool
			outdated  func() (string, error)
		}{
			{Hypervisor, want.AutoHypervisor && p.Nodes > 0, func() (string, error) { return e.outdatedHosts(ctx, s, p, goal, before) }},
			{Worker, want.AutoWorker, func() (string, error) { return e.outdatedWorkers(ctx, s, p, changes.Workers) }},
			{Client, want.AutoClient, func() (string, error) { return e.outdatedClients(ctx, s, p, changes.Clients) }},
		} {
			if !c.on || e.rolls(c.component, p.Name) {
				continue
			}
			why, err := c.outdated()
			if err != nil {
				return nil, err
			}
			if why != "" {
				out = append(out, off{c.component, p.Name, why})
			}
		}
	}
	return out, nil
}

// outdates says what the release makes outdated in a GPUPool.
func (e *engine) outdates(pool string) tensorfusion.Outdated {
	for _, o := range e.diff.Outdated {
		if o.Pool == pool {
			return o
		}
	}
	return tensorfusion.Outdated{}
}

// outdatedHosts: only the new controller shows whether it makes pods in the same
// way, so that before the change its version must be the same, too.
func (e *engine) outdatedHosts(ctx workflow.Context, s *stage.Scope, p tensorfusion.Pool, goal tensorfusion.Goal, before bool) (string, error) {
	hosts, err := e.hosts(ctx, s, p.Name, goal, nil)
	if err != nil {
		return "", err
	}
	n := 0
	for _, h := range hosts {
		if !h.OnTarget {
			n++
		}
	}
	switch from, to := e.pre.Source.Controller, e.pre.Target.Controller; {
	case n > 0:
		return fmt.Sprintf("%d of %d hosts are not of the target", n, len(hosts)), nil
	case before && from != to:
		return fmt.Sprintf("controller %s may make its pods otherwise than %s", to, from), nil
	}
	return "", nil
}

func (e *engine) outdatedWorkers(ctx workflow.Context, s *stage.Scope, p tensorfusion.Pool, changes bool) (string, error) {
	if changes {
		return "the release changes what its workers are made of", nil
	}
	var seen tensorfusion.WorkersResult
	if err := e.do(ctx, s, tensorfusion.WorkersActivity, "workloads of pool "+p.Name, 2*time.Minute,
		tensorfusion.WorkersRequest{Scope: e.scope, Pool: p.Name}, &seen); err != nil {
		return "", err
	}
	n := 0
	for _, w := range seen.Workloads {
		if w.Stale {
			n++
		}
	}
	if n == 0 {
		return "", nil
	}
	return fmt.Sprintf("%d of %d workloads have outdated workers", n, len(seen.Workloads)), nil
}

func (e *engine) outdatedClients(ctx workflow.Context, s *stage.Scope, p tensorfusion.Pool, changes bool) (string, error) {
	if changes {
		return "the release changes what its application pods are injected with", nil
	}
	var seen tensorfusion.ClientsResult
	if err := e.do(ctx, s, tensorfusion.ClientsActivity, "client pods of pool "+p.Name, 2*time.Minute,
		tensorfusion.ClientsRequest{Scope: e.scope, Pool: p.Name}, &seen); err != nil || len(seen.Stale) == 0 {
		return "", err
	}
	return fmt.Sprintf("%d application pods have an outdated injection", len(seen.Stale)), nil
}

// acceptsOff: where auto update can't come back it stays off, without a person
// being asked at the end of the run. The gate of a rollback has shown it.
func (e *engine) acceptsOff() bool {
	return e.kind == protocol.TensorFusionRollback || slices.Contains(e.acknowledge, AcknowledgeOff)
}

// foresee asks about auto update that can't come back while there is still time
// to add a rollout.
func (e *engine) foresee(ctx workflow.Context, s *stage.Scope, goal tensorfusion.Goal) ([]off, error) {
	left, err := e.unrolled(ctx, s, goal, true)
	if err != nil || len(left) == 0 || e.acceptsOff() {
		return left, err
	}
	var names []string
	for _, o := range left {
		names = append(names, fmt.Sprintf("%ss of %s (%s)", o.component, o.pool, o.why))
	}
	return nil, stage.Parking(
		fmt.Sprintf("with policy %s auto update would come back on for what no rollout of the plan takes: %s", e.policy, strings.Join(names, ", ")),
		"The controller would roll it at once, outside every batch and unproven; at the end of the run the policy could not be set.",
		fmt.Sprintf("Abort and start again with a rollout for each, with policy %s, or with %q in acknowledge: then it stays off there, and the receipt lists it.",
			tensorfusion.PolicyKeepOff, AcknowledgeOff),
		[]string{protocol.Retry, protocol.Abort}, findings(left)...)
}

// leave records what a rollout has left outdated, or that it has left nothing.
func (e *engine) leave(t target, why string) {
	e.skipped = slices.DeleteFunc(e.skipped, func(o off) bool { return o.component == t.Component && o.pool == t.pool.Name })
	if why != "" {
		e.skipped = append(e.skipped, off{t.Component, t.pool.Name, why})
	}
}

// restorable is the policy as found, less what stays off. A pool that is left
// out altogether stays off in every mode.
func (e *engine) restorable(left []off) []tensorfusion.PoolPolicy {
	var out []tensorfusion.PoolPolicy
	for _, p := range e.before {
		sealed := e.policy == tensorfusion.PolicySeal
		for _, o := range left {
			switch {
			case o.pool != p.Pool:
			case o.component == Hypervisor:
				p.AutoHypervisor, sealed = false, false
			case o.component == Worker:
				p.AutoWorker = false
			default:
				p.AutoClient = false
			}
		}
		if sealed || e.policy != tensorfusion.PolicySeal {
			out = append(out, p)
		}
	}
	return out
}

func (e *engine) setPolicy(ctx workflow.Context, s *stage.Scope) error {
	left := slices.Clone(e.skipped)
	if e.acceptsOff() {
		more, err := e.unrolled(ctx, s, e.goal, false)
		if err != nil {
			return err
		}
		left = append(left, more...)
	}
	var r tensorfusion.PolicyResult
	if err := e.do(ctx, s, tensorfusion.PolicyActivity, "policy "+e.policy, 5*time.Minute, tensorfusion.PolicyRequest{
		Scope: e.scope, Mode: e.policy, Before: e.restorable(left), Goal: e.goal, Limit: 5 * time.Minute,
	}, &r); err != nil {
		return err
	}
	e.restored, e.outage, e.off = e.policy != tensorfusion.PolicyKeepOff, false, left
	e.notePolicy(s, r.After)
	err := e.drift(ctx, s, "policy")
	if err == nil {
		return nil
	}
	// Parked with the flags on, the controller would go on by itself.
	e.restored = false
	if _, herr := release.Hold(ctx, s, "switch auto update off again", tensorfusion.HoldRequest{
		Scope: e.scope, Limit: e.limits.Hold.D(), Assert: true,
	}); herr != nil {
		return herr
	}
	return err
}

// notePolicy shows the policy as it stands, and what the run has not known
// before.
func (e *engine) notePolicy(s *stage.Scope, now []tensorfusion.PoolPolicy) {
	parts := make([]string, len(now))
	for i, p := range now {
		parts[i] = fmt.Sprintf("pool %s hypervisor=%t worker=%t client=%t", p.Pool, p.AutoHypervisor, p.AutoWorker, p.AutoClient)
		if !slices.ContainsFunc(e.before, func(b tensorfusion.PoolPolicy) bool { return b.Pool == p.Pool }) {
			e.run.Warn(fmt.Sprintf("pool %s came during the run and was held like the others: its auto update is off", p.Pool))
		}
	}
	s.Note("%s: auto update in %s", e.policy, strings.Join(parts, "; "))
}
