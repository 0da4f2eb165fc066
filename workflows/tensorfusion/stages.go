package tensorfusion

import (
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

// planning are the stages that change nothing in the cluster but the Lease.
func (e *engine) planning() []stage.Stage {
	return []stage.Stage{
		{Name: "lock", Purpose: "prove which cluster this is and keep every other run off the release", Do: e.lock},
		{Name: "preflight", Purpose: "check everything that can be checked before anything is touched", Do: e.preflight},
		{Name: "plan", Purpose: "show what will change, in which order", Do: e.showPlan},
	}
}

// preflight runs rows T01-T05, T17, T22-T24, P01-P03, P05, P06, P08, P09, P14.
func (e *engine) preflight(ctx workflow.Context, s *stage.Scope) error {
	if e.locked != nil {
		return nil
	}
	if err := e.settled(ctx, s); err != nil {
		return err
	}
	if err := blocked("not every requirement is met", "An upgrade from this state could fail half way.", e.pre.Checks); err != nil {
		return err
	}
	if err := e.aim(e.pre.Pools); err != nil {
		return err
	}
	e.intent = e.pre.Intent
	e.snapshot = e.pre.Snapshot
	e.goal = e.pre.Goal
	if e.before == nil {
		e.before = e.pre.Policy
	}
	e.coming()
	nodes := 0
	for _, p := range e.pre.Pools {
		nodes += p.Nodes
	}
	s.Note("controller %s -> %s, hypervisor %s -> %s; %d pools, %d GPU nodes, %d GPUs; %d checks met",
		e.pre.Source.Controller, e.pre.Target.Controller, tagOf(e.pre.Source.Hypervisor), tagOf(e.pre.Target.Hypervisor),
		len(e.pre.Pools), nodes, e.snapshot.GPUs, met(e.pre.Checks))
	if e.pre.Database != "" {
		s.Note("%s", e.pre.Database)
	}
	return nil
}

// A check of class wait rests before it runs again, at first as long as a
// controller's own batch takes, later longer: each look costs eleven events,
// and a driver upgrade takes hours.
const (
	recheckFirst = 3 * time.Second
	recheckLast  = time.Minute
)

// settled runs the preflight until nothing is open that settles by itself (an
// own rollout of the controller, a driver upgrade), at most for Limits.Settle.
func (e *engine) settled(ctx workflow.Context, s *stage.Scope) error {
	until := workflow.Now(ctx).Add(e.limits.Settle.D())
	for rest := recheckFirst; ; rest = min(2*rest, recheckLast) {
		e.pre = tensorfusion.PreflightResult{}
		if err := e.do(ctx, s, tensorfusion.PreflightActivity, "preflight of "+e.release.Name, 5*time.Minute,
			tensorfusion.PreflightRequest{
				Scope: e.scope, Intent: e.intent, Acknowledged: e.acknowledge, AcceptedFloating: e.floating, Policy: e.policy,
			}, &e.pre); err != nil {
			return err
		}
		waits := settling(e.pre.Checks)
		if waits == "" || !workflow.Now(ctx).Before(until) {
			return nil
		}
		if err := s.Sleep(ctx, rest, "waiting for "+waits); err != nil {
			return err
		}
	}
}

// settling names the open checks of class wait, "" when there is none or when
// another class stands open too.
func settling(checks []tensorfusion.Check) string {
	var open []finding.Finding
	for _, c := range checks {
		switch {
		case c.OK || c.Acknowledged:
		case c.Class != finding.Wait:
			return ""
		default:
			open = append(open, c.Findings...)
		}
	}
	return rowsOf(open)
}

func met(checks []tensorfusion.Check) (n int) {
	for _, c := range checks {
		if c.OK {
			n++
		}
	}
	return n
}

// policyStage also ends a rollback that finds nothing to change.
const policyStage = "policy"

// changing are the stages up to the new controller, in the guide's order.
func (e *engine) changing() []stage.Stage {
	stages := []stage.Stage{
		{Name: "hold", Purpose: "switch auto update off under the old controller, so that nothing rolls by itself",
			Mutates: true, Estimate: e.limits.Hold.D(), Do: e.hold},
		{Name: "backup", Purpose: "save values, custom resources, Secrets and the release, encrypted and verified",
			Mutates: true, Estimate: time.Minute, Do: e.backup},
	}
	if e.intent.Chart.Revision == 0 {
		stages = append(stages, stage.Stage{Name: "crds", Purpose: "apply the target chart's CRDs, which Helm never upgrades",
			Mutates: true, Estimate: time.Minute, Do: e.crds})
	}
	helm := stage.Stage{Name: "helm", Purpose: "upgrade the release with auto update kept off, then prove the controller",
		Mutates: true, Section: true, Estimate: e.limits.Release.D() + 2*e.limits.Controller.D() + lookTime + 2*e.limits.Hold.D(), Do: e.helm}
	if len(e.diff.Forecast) > 0 {
		helm.Gate = &stage.Gate{
			Name:  "helm",
			Found: fmt.Sprintf("the new controller will roll by itself: %s", forecast(e.diff.Forecast)),
			Why:   "P11: this starts with the Helm step and follows no batches of ours.",
			Helps: "Approve when the named workloads may be interrupted now; reject to stop before the Helm step.",
		}
	}
	return append(stages, helm)
}

// finishing are the stages under the new controller: the rollouts of the pools
// that it shows, and what follows them.
func (e *engine) finishing() []stage.Stage {
	return append(e.rolloutStages(),
		stage.Stage{Name: policyStage, Purpose: "set the auto-update policy as the plan says, now that every pod is proven",
			Mutates: true, Skippable: true, Estimate: time.Minute, Do: e.setPolicy},
		stage.Stage{Name: "verify", Purpose: "prove phases, hypervisors, inventory and a real CUDA call per pool",
			Mutates: true, Estimate: e.limits.Verify.D(), Do: e.verify},
		stage.Stage{Name: "receipt", Purpose: "store the record of the run", Do: e.storeReceipt},
	)
}

func (e *engine) hold(ctx workflow.Context, s *stage.Scope) error {
	if err := e.switchOff(ctx, s); err != nil {
		return err
	}
	return e.drift(ctx, s, "hold")
}

// switchOff holds and keeps the policy as it was found first.
func (e *engine) switchOff(ctx workflow.Context, s *stage.Scope) error {
	r, err := release.Hold(ctx, s, "hold auto update", tensorfusion.HoldRequest{
		Scope: e.scope, Limit: e.limits.Hold.D(), Nudge: e.pre.NeedsNudge, Outage: e.acceptsOutage(),
	})
	if err != nil {
		return err
	}
	if !e.held && len(r.Before) > 0 {
		e.before = r.Before
	}
	if e.undo != nil {
		e.before = e.undo.Policy
	}
	e.held = true
	if r.Unheld != "" {
		e.unheld(s, "hold", r.Unheld)
		return nil
	}
	s.Note("auto update off in %d pools, seen by every GPUPool after %s", len(r.Before), r.Waited.Round(100*time.Millisecond))
	return nil
}

// acceptsOutage: the plan goes on without a hold that can't be had.
func (e *engine) acceptsOutage() bool { return slices.Contains(e.acknowledge, "P10") }

// unheld goes on without the hold, as acknowledged: from here on until every
// host is proven, the hypervisors that the controller replaces by itself are no
// drift.
func (e *engine) unheld(s *stage.Scope, at, found string) {
	e.outage = true
	why := fmt.Sprintf("P10: at %s the hold could not be had (%s): every hypervisor may be replaced at once, as the plan acknowledges", at, found)
	s.Note("%s", why)
	e.run.Warn(why)
}

// assertHold proves before a dangerous step that nobody switched auto update
// on again. Before the rollouts the hold must be had: a new controller leads.
func (e *engine) assertHold(ctx workflow.Context, s *stage.Scope, before string) error {
	r, err := release.Hold(ctx, s, "check the hold before "+before, tensorfusion.HoldRequest{
		Scope: e.scope, Limit: e.limits.Hold.D(), Assert: true, Outage: e.acceptsOutage() && !e.led,
	})
	if err != nil {
		return err
	}
	if r.Unheld != "" {
		e.unheld(s, before, r.Unheld)
	}
	if len(r.Broken) == 0 {
		return nil
	}
	return stage.Parking("auto update had been switched on again before "+before+"; it is off again",
		"P10: the controller rolls nodes outside every batch while the flag is true.",
		"Find out who set it (kubectl get tensorfusioncluster -o yaml --show-managed-fields, audit log), then retry.",
		[]string{protocol.Retry, protocol.Abort, protocol.Rollback}, r.Broken...)
}

func (e *engine) backup(ctx workflow.Context, s *stage.Scope) error {
	var r tensorfusion.BackupResult
	if err := e.do(ctx, s, tensorfusion.BackupActivity, "back up "+e.release.Name, 10*time.Minute, tensorfusion.BackupRequest{
		Scope: e.scope, Key: release.Key(ctx),
	}, &r); err != nil {
		return err
	}
	objects := 0
	for _, a := range r.Artifacts {
		e.run.Artifact(a)
		objects += a.Entries
	}
	s.Note("%d artifacts with %d objects, encrypted, counts equal to live", len(r.Artifacts), objects)
	return e.drift(ctx, s, "backup")
}

func (e *engine) crds(ctx workflow.Context, s *stage.Scope) error {
	if err := e.assertHold(ctx, s, "the CRDs"); err != nil {
		return err
	}
	var r tensorfusion.CRDsResult
	if err := e.do(ctx, s, tensorfusion.ApplyCRDsActivity, "apply CRDs", 2*time.Minute, tensorfusion.CRDsRequest{
		Scope: e.scope, Intent: e.intent, Limit: 2 * time.Minute,
	}, &r); err != nil {
		return err
	}
	s.Note("%d CRDs applied and Established", len(r.Applied))
	return e.drift(ctx, s, "crds")
}

func (e *engine) helm(ctx workflow.Context, s *stage.Scope) error {
	if err := e.assertHold(ctx, s, "the Helm step"); err != nil {
		return err
	}
	if err := e.drift(ctx, s, "the wait for the Helm step"); err != nil {
		return err
	}
	if forecastsWorkers(e.diff.Forecast) { // and the gate was approved
		e.forecastWorkers = true
		for _, p := range e.pre.Pools {
			e.rolled.Completed = union(e.rolled.Completed, p.Name)
		}
	}
	if err := e.do(ctx, s, tensorfusion.ReleaseActivity, "helm upgrade "+e.release.Name, e.limits.Release.D(), tensorfusion.ReleaseRequest{
		Scope: e.scope, Intent: e.intent, FromRevision: e.pre.Source.Revision, Holder: e.holder, Limit: e.limits.Release.D(),
	}, &e.upgraded); err != nil {
		return err
	}
	// What a run before this one has rolled to the same revision is not rolled
	// again.
	e.goal.Since = e.upgraded.Deployed
	returning, err := e.undoNudge(ctx, s)
	if err != nil {
		return err
	}
	c, err := e.awaitController(ctx, s, returning)
	if err == nil && e.mayHaveToLook(c.Pools) {
		if err = s.Sleep(ctx, lookTime, "the new controller looks at every pool"); err == nil {
			c, err = e.awaitController(ctx, s, returning)
		}
	}
	if err != nil {
		return err
	}
	e.led = true
	e.snapshot.AfterHelm()
	if err := e.aimAgain(c.Pools); err != nil {
		return err
	}
	switch {
	case !e.templatesChange() && sameTemplates(e.pre.Pools, c.Pools):
		e.goal.Since = time.Time{} // a pod of a template that did not change is proven whatever its age
	case returning != nil && sameTemplates(returning, c.Pools):
		e.goal.Kept = e.undo.Youngest
	case returning != nil:
		e.run.Warn("the controller shows another hypervisor template than before the upgrade: every host is replaced, also those that the upgrade had not reached")
	}
	s.Note("revision %d (%s), controller %s with %d replicas, leader %s", e.upgraded.Revision, e.upgraded.Chart, tagOf(c.Image), c.Replicas, c.Leader)
	if err := e.assertHold(ctx, s, "the rollouts"); err != nil {
		return err
	}
	return e.drift(ctx, s, "helm")
}

func (e *engine) awaitController(ctx workflow.Context, s *stage.Scope, returning []tensorfusion.Pool) (tensorfusion.ControllerResult, error) {
	var c tensorfusion.ControllerResult
	if err := e.do(ctx, s, tensorfusion.AwaitControllerActivity, "wait for the controller", e.limits.Controller.D()+2*time.Minute, tensorfusion.ControllerRequest{
		Scope: e.scope, Intent: e.intent, Snapshot: e.snapshot, FromRevision: e.pre.Source.Revision, Limit: e.limits.Controller.D(), Return: returning, Told: e.told,
	}, &c); err != nil {
		return c, err
	}
	e.snapshot.Objects, e.told = c.Objects, append(e.told, c.Told...) // who answers retry has been told what changed
	return c, blocked("the new controller is not sound", "Rolling nodes under it could lose allocations or admissions.", c.Checks)
}

// lookTime is how long a new leader takes to look at every pool; until then they
// show what the controller before it stored.
const lookTime = 10 * time.Second

// mayHaveToLook: believed too early, what the pools show would leave everything
// as it is. That is so of workers and clients, and where another version than
// before leads and every host would be proven whatever its age.
func (e *engine) mayHaveToLook(now []tensorfusion.Pool) bool {
	return slices.ContainsFunc(e.targets, func(t target) bool { return t.Component != Hypervisor }) ||
		e.pre.Source.Controller != e.pre.Target.Controller && !e.templatesChange() && sameTemplates(e.pre.Pools, now)
}

// undoNudge takes back what the undone upgrade's hold changed in the hypervisor
// template, and returns the pools as they were when hosts of before that change
// may stay as they are; nil when none may.
func (e *engine) undoNudge(ctx workflow.Context, s *stage.Scope) ([]tensorfusion.Pool, error) {
	if !e.keepsHosts() {
		return nil, nil
	}
	_, err := release.Hold(ctx, s, "take the hold's change of the hypervisor template back", tensorfusion.HoldRequest{
		Scope: e.scope, Limit: e.limits.Hold.D(), Assert: true, Undo: e.before,
	})
	return withNodes(e.undo.Pools), err
}

// keepsHosts: the revision that comes back is the one the undone upgrade left,
// and then every pod was of its pool's template.
func (e *engine) keepsHosts() bool {
	return e.undo != nil && e.undo.Revision == e.intent.Chart.Revision && allSettled(e.undo.Pools)
}
