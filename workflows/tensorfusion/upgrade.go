package tensorfusion

import (
	"slices"

	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

// Upgrade is the workflow TensorFusionUpgrade: hold, back up, CRDs, Helm
// release, rollouts, policy, verify, receipt (TensorFusion guide, 'Upgrade
// Components'; facts of the T and P rows).
func Upgrade(ctx workflow.Context, in UpgradeInput) (protocol.Receipt, error) {
	if ps := in.Validate(); len(ps) > 0 {
		return protocol.Receipt{}, release.BadInput("plan", ps)
	}
	isolation := in.IsolationPolicy
	if isolation == "" {
		isolation = "static"
	}
	var e *engine
	e, err := open(ctx, settings{
		kind: protocol.TensorFusionUpgrade, cluster: in.Cluster, release: in.Release,
		intent: tensorfusion.Intent{
			Chart: in.Chart, Values: in.Values, HypervisorImage: in.HypervisorImage, IsolationPolicy: isolation,
		},
		policy: in.Policy, validation: in.Validation, acknowledge: in.Acknowledge, floating: in.AcceptFloating,
		windows: in.Windows, maxDuration: in.MaxDuration.D(), limits: in.Limits, rollouts: in.Rollouts,
		planOnly: in.PlanOnly,
		rollback: func(ctx workflow.Context) error { return e.answerRollback(ctx, in) },
	})
	if err != nil {
		return protocol.Receipt{}, err
	}
	return e.walk()
}

// walk runs the planning stages, then those that change the cluster.
func (e *engine) walk() (protocol.Receipt, error) {
	ctx := e.run.Context()
	planning := e.planning()
	e.announce(planning, e.changing)
	err := e.run.Execute(ctx, planning[0])
	if err == nil && e.locked == nil {
		err = e.run.Execute(ctx, planning[1:]...)
	}
	if err == nil && e.locked == nil && !e.planOnly && !e.pre.NoChange {
		err = e.change(e.changing())
	}
	return e.finish(err)
}

// change runs the stages up to the new controller, then those that follow from
// what it shows.
func (e *engine) change(first []stage.Stage) error {
	if err := e.run.Execute(e.run.Context(), first...); err != nil {
		return err
	}
	return e.run.Execute(e.run.Context(), e.finishing()...)
}

// announce shows what comes: the rollouts of a plan that names no pools are
// known once the preflight has seen them.
func (e *engine) announce(planning []stage.Stage, changing func() []stage.Stage) {
	e.coming = func() {
		if e.planOnly {
			e.run.Announce(planning...)
			return
		}
		e.run.Announce(slices.Concat(planning, changing(), e.finishing())...)
	}
	e.coming()
}

// answerRollback runs TensorFusionRollback as a child, under this run's Lease
// and to the revision found before the Helm step.
func (e *engine) answerRollback(ctx workflow.Context, in UpgradeInput) error {
	s := stage.ScopeOf(ctx)
	if e.pre.Source.Revision == 0 { // the preflight comes before every change
		s.Note("nothing had been changed yet")
		return nil
	}
	const prefix = "rollback"
	var receipt protocol.Receipt
	err := s.Child(ctx, prefix, func(ctx workflow.Context, parent protocol.Parent) workflow.ChildWorkflowFuture {
		ctx = workflow.WithChildOptions(ctx, workflow.ChildWorkflowOptions{
			WorkflowID:          workflow.GetInfo(ctx).WorkflowExecution.ID + "." + prefix,
			TaskQueue:           protocol.TaskQueue,
			ParentClosePolicy:   enums.PARENT_CLOSE_POLICY_TERMINATE,
			WaitForCancellation: true,
			StaticSummary:       "return to the release as it was before",
		})
		back := RollbackInput{
			Cluster: in.Cluster, Release: in.Release, Revision: e.pre.Source.Revision,
			Policy: in.Policy, Validation: in.Validation, Acknowledge: in.Acknowledge, AcceptFloating: in.AcceptFloating,
			Limits: in.Limits, // and no windows: who answers rollback wants it now
			Of: &Answered{
				Holder: e.holder, Policy: e.before, Parent: parent,
				Revision: e.pre.Source.Revision, Pools: e.pre.Pools, Youngest: e.pre.Snapshot.Youngest,
			},
		}
		for _, r := range in.Rollouts { // what holds of one pool, such as its canary's name, need not hold of another
			switch {
			case r.Component != Hypervisor:
			case len(r.Pools) == 0:
				back.Strategy = r.Strategy
			default:
				back.Of.Rollouts = append(back.Of.Rollouts, Rollout{Component: Hypervisor, Pools: r.Pools, Strategy: r.Strategy})
			}
		}
		return workflow.ExecuteChildWorkflow(ctx, protocol.TensorFusionRollback, back)
	}, &receipt)
	if err != nil {
		return err
	}
	e.child = &receipt
	if receipt.Outcome == protocol.OutcomeAborted {
		if e.run.Stopping() {
			return stage.ErrAborted
		}
		return stage.Parking("the rollback was aborted before its end", "The release may stand between two versions.",
			"retry begins the rollback again: it goes on from what it finds. abort leaves everything as it is and lists it.",
			[]string{protocol.Retry, protocol.Abort})
	}
	if receipt.Outcome == protocol.OutcomeNoChange {
		s.Note("the release had not been changed; auto update is as the plan says")
		return nil
	}
	s.Note("rolled back to controller %s, hypervisor %s", tagOf(receipt.After["controller"]), tagOf(receipt.After["hypervisor"]))
	return nil
}
