package cassandra

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// theSection names what nothing interrupts, in status and receipt.
const theSection = "expansion"

// expand is the stage of that name. A window that ends inside the section does
// not stop it; pause and abort take effect after it.
func (e *expand) expand(ctx workflow.Context, s *stage.Scope) error {
	if e.recovering {
		return e.takeBack(ctx, s)
	}
	e.locked = nil
	err := s.Section(ctx, theSection, e.estimate(), func(ctx workflow.Context) error { return e.section(ctx, s) })
	if e.locked == nil || err == nil || errors.Is(err, stage.ErrAborted) {
		return err
	}
	return e.recover(ctx, s)
}

// whole says whether the section goes on until each keyspace has its copies and
// its repairs: but for members that this run has seen bootstrap, a row is hidden
// from the scale, or from the first ALTER, until then.
func (e *expand) whole() bool { return e.in.Strategy != Bootstrap || e.resumed }

// estimate is how long the section takes, where the plan does not say it.
func (e *expand) estimate() time.Duration {
	keyspaces := 0
	if e.whole() {
		keyspaces = len(e.every()) - 1 // without system_auth
	}
	return datastore.Or(e.in.Estimate, defaultEstimate+window.Duration(time.Duration(keyspaces)*perKeyspace)).D()
}

// section is what nothing interrupts. It may run again from its beginning.
func (e *expand) section(ctx workflow.Context, s *stage.Scope) error {
	if e.begun && !e.scaled {
		if err := e.lookAgain(ctx, s); err != nil {
			return err
		}
	}
	e.begun = true
	if !e.scaled {
		if err := e.prepare(ctx, s); err != nil {
			return err
		}
		e.prepared = true
		var got acts.ScaleResult
		req := acts.ScaleRequest{Place: e.place(), UID: e.survey.UID, Seeds: e.narrowed()}
		if e.in.Strategy == Guide { // all that keeps its order safe; the survey's may be days old
			req.Login = &e.login
		}
		err := e.Do(ctx, s, acts.ScaleActivity, fmt.Sprintf("scale Cassandra to %d members", acts.TargetMembers), window.Duration(0), req, &got)
		if err != nil {
			return err
		}
		e.scaled = true
	}
	e.Warn(fmt.Sprintf("apply no stack any more that gives Cassandra one replica (cassandra.replicaCount): Helm would scale StatefulSet %s back to it, and members that go take their copies along", e.members.StatefulSet))
	if err := e.run.look(ctx, s, acts.TargetMembers, "N137", e.limits.Join); err != nil {
		return err
	}
	e.date(workflow.Now(ctx))
	if !e.authDone {
		if err := e.raiseAuth(ctx, s); err != nil {
			return err
		}
		e.authDone = true
	}
	if err := e.letIn(ctx, s); err != nil || !e.whole() {
		return err
	}
	e.names = e.every()[1:] // system_auth has its copies
	for _, k := range e.ring.Keyspaces {
		if len(k.Factors) > 0 && !k.Raisable(e.ring.DataCenter) && !slices.Contains(e.names, k.Name) {
			e.Warn(fmt.Sprintf("keyspace %s is neither raised nor repaired: rows that a new member took over can be missing until somebody raises it by hand and repairs it", k))
		}
	}
	return e.bring(ctx, s)
}

// lookAgain sees whether there are three members since the section was begun: by
// a scale whose reply was lost, or by a hand.
func (e *expand) lookAgain(ctx workflow.Context, s *stage.Scope) error {
	now, err := e.surveyed(ctx, s)
	if err != nil || now.UID != e.survey.UID || now.Replicas != acts.TargetMembers {
		return err // whatever else there is, the steps before the scale tell it
	}
	if seeds := e.narrowed(); seeds != "" && e.prepared && now.Seeds == seeds { // they could do nothing but bootstrap
		e.scaled = true
	} else {
		e.goOn()
	}
	s.Note("scaled to %d meanwhile: going on from there", now.Replicas)
	return nil
}

// narrowed is the list of seeds with which new members bootstrap, where they are
// to.
func (e *expand) narrowed() string {
	if e.in.Strategy != Bootstrap {
		return ""
	}
	return e.survey.Narrowed
}

// goOn takes up an expansion whose scale this run has no part in: what was raised
// may not be repaired.
func (e *expand) goOn() { e.scaled, e.resumed, e.always = true, true, true }

// patches tells what this run changes in the pod template, before it does: nobody
// may hear of the change's end.
func (e *expand) patches(what string) {
	e.Warn(what)
	if !slices.Contains(e.patched, what) {
		e.patched = append(e.patched, what)
	}
}

// prepare is what a strategy does before the scale.
func (e *expand) prepare(ctx workflow.Context, s *stage.Scope) error {
	if e.in.Strategy == QuorumFirst {
		return e.raiseFirst(ctx, s)
	}
	narrow := e.in.Strategy == Bootstrap
	if !e.survey.Rule && !narrow {
		e.Warn("N134: no rule spreads the members over zones: " + e.survey.NoRule)
		return nil
	}
	if narrow && e.survey.Seeds != e.survey.Narrowed {
		e.patches(fmt.Sprintf("this run has CASSANDRA_SEEDS of StatefulSet %s name %s alone; the chart's next apply undoes it", e.members.StatefulSet, e.survey.Narrowed))
	}
	if e.survey.Rule && e.survey.NewRule {
		e.patches(fmt.Sprintf("this run adds the rule that spreads members over zones to the pod template of StatefulSet %s", e.members.StatefulSet))
	}
	var got acts.TemplateResult
	err := e.Do(ctx, s, acts.TemplateActivity, "patch the pod template, which restarts the member once", e.limits.Rollout, acts.TemplateRequest{
		Place: e.place(), UID: e.survey.UID, Mode: e.in.Mode, Rule: e.survey.Rule, Narrow: narrow, Seeds: e.survey.Seeds, Limit: e.limits.Rollout.D(),
	}, &got)
	if err != nil {
		return err
	}
	e.Keep(got.Evidence)
	if !e.survey.Rule {
		e.Warn("N134: no rule spreads the members over zones: " + e.survey.NoRule)
	}
	return e.run.look(ctx, s, 1, "N135", e.limits.Rollout)
}

// raiseFirst raises every keyspace before the scale. The members' own
// description, which needs no login, says how each was before, and what was
// raised where nobody heard of the end: a second raise can't tell, because
// nobody logs in any more.
func (e *expand) raiseFirst(ctx workflow.Context, s *stage.Scope) error {
	if err := e.run.look(ctx, s, 1, "N84", e.limits.Join); err != nil {
		return err
	}
	if e.before == nil {
		e.before = e.ring.Keyspaces
	}
	if e.authRaised() {
		e.oweRaised()
		return nil
	}
	got, err := e.raise(ctx, s, e.names, acts.TargetMembers, true, false)
	if err != nil {
		lost := e.run.look(ctx, s, 1, "N84", e.limits.Join)
		if e.oweRaised(); lost == nil && e.authRaised() { // the last of them: the whole raise is done
			return nil
		}
		return err
	}
	e.plan, e.center = got.Plan, got.DataCenter
	e.owe(append(slices.Clone(got.Raise), got.Already...))
	return nil
}

// raiseAuth raises system_auth and repairs it. Where it has its copies already,
// by quorumFirst before the scale or by a raise whose end was lost, nobody asks
// for a login: it may be refused until the repair. What was raised is to be
// repaired from now on, when the members that take the copies are there.
func (e *expand) raiseAuth(ctx workflow.Context, s *stage.Scope) error {
	if e.authRaised() && e.debt(acts.AuthKeyspace, acts.TargetMembers) == nil {
		e.oweRaised()
		e.date(workflow.Now(ctx))
	}
	for i := range e.owed { // the members' description proves what no reply has told
		if d := &e.owed[i]; d.keyspace == acts.AuthKeyspace && e.auth().Copies() >= d.copies {
			e.proven(d)
			d.agreed = true
			return e.one(ctx, s, acts.AuthKeyspace, e.atOnce)
		}
	}
	in, err := e.logins(ctx, s)
	if err != nil {
		return err
	}
	if in.LockedOut() { // one member that refuses is what the repair is for
		e.locked = &in
		return datastore.Parking(in.Findings)
	}
	// The one copy of a role may lie on a member that holds none of its two: then
	// no repair of two copies brings it, and nobody can ask for the third.
	return e.one(ctx, s, acts.AuthKeyspace, e.atOnce || e.resumed && e.auth().Copies() <= 1)
}

// oweRaised owes the repairs of what has its copies as the members describe it:
// of system_auth, and with quorumFirst of every keyspace, because an earlier run
// may have raised them.
func (e *expand) oweRaised() {
	var raised []acts.Keyspace
	for _, k := range e.ring.Keyspaces {
		if (k.Name == acts.AuthKeyspace || e.in.Strategy == QuorumFirst) && k.Raised(e.survey.DataCenter, acts.TargetMembers) {
			raised = append(raised, k)
		}
	}
	e.owe(raised)
}

// owe records keyspaces that have their copies and no repair since, and how
// those that this run has raised were before. The first time counts: a run that
// is retried need not repeat what was repaired since then.
func (e *expand) owe(raised []acts.Keyspace) {
	for _, k := range raised {
		if e.debt(k.Name, acts.TargetMembers) == nil {
			d := debt{keyspace: k.Name, copies: acts.TargetMembers, raised: true, agreed: true}
			for _, b := range e.before {
				if b.Name == k.Name && !b.Raised(e.survey.DataCenter, acts.TargetMembers) {
					d.before = []acts.Keyspace{b}
				}
			}
			e.owed = append(e.owed, d)
			e.proven(&e.owed[len(e.owed)-1])
		}
	}
}

// date says that the members that take the copies are there: a repair that
// counts begins from now on.
func (e *expand) date(now time.Time) {
	for i := range e.owed {
		if e.owed[i].since.IsZero() {
			e.owed[i].since = now
		}
	}
}

// letIn proves the login on every member (N143).
func (e *expand) letIn(ctx workflow.Context, s *stage.Scope) error {
	got, err := e.logins(ctx, s)
	if err != nil {
		return err
	}
	if got.OK {
		s.Note("%d members let %s in", len(got.Accepted), e.login.User)
		return nil
	}
	if got.LockedOut() {
		e.locked = &got
	}
	return datastore.Parking(got.Findings)
}
