package tensorfusion

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

// Rollback is the workflow TensorFusionRollback. It never calls Helm's
// rollback, which re-applies a stored manifest with its old credentials and
// auto update on: it takes chart and values from the stored revision, puts
// today's credentials in their place and upgrades to that under the hold
// (facts, sections 7 and 14).
func Rollback(ctx workflow.Context, in RollbackInput) (protocol.Receipt, error) {
	if ps := in.Validate(); len(ps) > 0 {
		return protocol.Receipt{}, release.BadInput("plan", ps)
	}
	e, err := open(ctx, rollbackOf(in))
	if err != nil {
		return protocol.Receipt{}, err
	}
	ctx = e.run.Context()
	planning := e.beforeReturning()
	e.announce(planning, e.returning)
	err = e.run.Execute(ctx, planning[0])
	if err == nil && e.locked == nil {
		err = e.run.Execute(ctx, planning[1:]...)
	}
	if err == nil && e.locked == nil && !e.planOnly {
		if e.pre.NoChange { // but this run has held, so the policy comes back
			err = e.run.Execute(ctx, slices.DeleteFunc(e.finishing(), func(s stage.Stage) bool { return s.Name != policyStage })...)
		} else {
			err = e.change(e.returning())
		}
	}
	return e.finish(err)
}

func rollbackOf(in RollbackInput) settings {
	s := settings{
		kind: protocol.TensorFusionRollback, cluster: in.Cluster, release: in.Release,
		intent: tensorfusion.Intent{Chart: tensorfusion.Chart{Revision: in.Revision}},
		policy: in.Policy, validation: in.Validation, acknowledge: in.Acknowledge, floating: in.AcceptFloating,
		windows: in.Windows, maxDuration: in.MaxDuration.D(), limits: in.Limits,
		rollouts: []Rollout{{Component: Hypervisor, Strategy: in.Strategy}},
		fixFirst: true, planOnly: in.PlanOnly,
	}
	if in.Of != nil {
		s.parent, s.undo = &in.Of.Parent, in.Of
		s.rollouts = slices.Concat(in.Of.Rollouts, s.rollouts)
	}
	return s
}

// beforeReturning are the stages up to the plan. It is held before the checks:
// a broken node must not roll on meanwhile.
func (e *engine) beforeReturning() []stage.Stage {
	planning := e.planning()
	stages := []stage.Stage{
		planning[0],
		{Name: "revision", Purpose: "read the stored revision and see which credentials today's replace", Do: e.inspect},
	}
	if !e.planOnly {
		stages = append(stages, stage.Stage{Name: "hold", Purpose: "switch auto update off, so that nothing rolls by itself",
			Mutates: true, Estimate: e.limits.Hold.D(), Do: e.switchOff})
	}
	return append(stages, planning[1:]...)
}

// inspect resolves revision 0 and names the secret values that are substituted.
func (e *engine) inspect(ctx workflow.Context, s *stage.Scope) error {
	var r tensorfusion.RevisionResult
	if err := e.do(ctx, s, tensorfusion.RevisionActivity, "read revision", time.Minute, tensorfusion.RevisionRequest{
		Scope: e.scope, Revision: e.intent.Chart.Revision,
	}, &r); err != nil {
		return err
	}
	e.intent.Chart.Revision = r.Revision
	e.intent.HypervisorImage = r.HypervisorImage
	s.Note("revision %d: chart %s, controller %s, hypervisor %s; today's values stay for: %s", r.Revision,
		r.Versions.Chart, r.Versions.Controller, tagOf(r.HypervisorImage), strings.Join(r.Substituted, ", "))
	return nil
}

// returning are the stages from the plan to the controller: the gate with the
// diff, then as an upgrade without CRDs, which stay (T22).
func (e *engine) returning() []stage.Stage {
	changing := e.changing()
	if e.pre.NeedsNudge {
		// Held, but without the spec change that keeps a 2.17 controller from
		// deleting every hypervisor (facts, section 5): hold once more with it.
		changing[0].Name = "hold-nudge"
	} else {
		changing = changing[1:]
	}
	found := fmt.Sprintf("%d objects change, %d batches, to revision %d (controller %s, hypervisor %s)",
		len(e.plan.Changes), len(e.plan.Batches), e.intent.Chart.Revision, e.pre.Target.Controller, tagOf(e.pre.Target.Hypervisor))
	if len(e.plan.LeftOff) > 0 {
		found += "; stays off: " + forecast(e.plan.LeftOff)
	}
	changing[0].Gate = &stage.Gate{
		Name:  "plan",
		Found: found,
		Why:   "T21: a rollback replaces the controller and re-rolls every node that is not on the old version.",
		Helps: "Read the diff in the plan; approve to go back, reject to stop here. CRDs stay as they are, credentials stay today's.",
	}
	return changing
}

// notUndone lists what a rollback leaves as it is.
var notUndone = []string{
	"CRDs stay at the newer version (T22): removing fields could drop data",
	"credentials stay today's: agent.enrollToken, agent.agentId, greptime.password, cloudVendorCredentials",
	"worker and client pods that restarted meanwhile are not restarted again",
}
