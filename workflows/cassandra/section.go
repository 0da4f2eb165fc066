package cassandra

import (
	"errors"
	"fmt"
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
	err := s.Section(ctx, theSection, datastore.Or(e.in.Estimate, defaultEstimate).D(), func(ctx workflow.Context) error { return e.section(ctx, s) })
	if e.locked == nil || err == nil || errors.Is(err, stage.ErrAborted) {
		return err
	}
	return e.recover(ctx, s)
}

// section is what nothing interrupts. It may run again from its beginning.
func (e *expand) section(ctx workflow.Context, s *stage.Scope) error {
	if !e.scaled {
		if err := e.prepare(ctx, s); err != nil {
			return err
		}
		var got acts.ScaleResult
		err := e.Do(ctx, s, acts.ScaleActivity, fmt.Sprintf("scale Cassandra to %d members", acts.TargetMembers), window.Duration(0),
			acts.ScaleRequest{Place: e.place(), UID: e.survey.UID}, &got)
		if err != nil {
			return err
		}
		e.scaled = true
	}
	if err := e.run.look(ctx, s, acts.TargetMembers, "N137", e.limits.Join); err != nil {
		return err
	}
	if !e.authDone {
		if err := e.raiseAuth(ctx, s); err != nil {
			return err
		}
		e.authDone = true
	}
	return e.letIn(ctx, s)
}

// prepare is what a strategy does before the scale.
func (e *expand) prepare(ctx workflow.Context, s *stage.Scope) error {
	if e.in.Strategy == QuorumFirst {
		// A raise whose end was lost can't be repeated: nobody logs in any more.
		if err := e.run.look(ctx, s, 1, "N84", e.limits.Join); err != nil {
			return err
		}
		if e.quorumRaised = e.quorumRaised || e.authRaised(); e.quorumRaised {
			return nil
		}
		got, err := e.raise(ctx, s, e.names, acts.TargetMembers, true, false)
		if err != nil {
			// Where its end only was lost nobody logs in any more: the members' own
			// description says so, and a second one mends it.
			if lost := e.run.look(ctx, s, 1, "N84", e.limits.Join); lost != nil || !e.authRaised() {
				return err
			}
			e.quorumRaised = true
			return nil
		}
		e.quorumRaised = true
		e.plan, e.center = got.Plan, got.DataCenter
		return nil
	}
	narrow := e.in.Strategy == Bootstrap
	if !e.survey.Rule && !narrow {
		e.Warn("N134: no rule spreads the members over zones: " + e.survey.NoRule)
		return nil
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
	if got.Changed && narrow {
		e.Warn(fmt.Sprintf("CASSANDRA_SEEDS of StatefulSet %s names %s alone now; the chart's next apply undoes it", e.members.StatefulSet, e.survey.Narrowed))
	}
	return e.run.look(ctx, s, 1, "N135", e.limits.Rollout)
}

// raiseAuth raises system_auth and repairs it. Where it has its copies already,
// by quorumFirst before the scale or by a raise whose end was lost, nobody asks
// for a login: it may be refused until the repair. What was raised is to be
// repaired from now on, when the members that take the copies are there.
func (e *expand) raiseAuth(ctx workflow.Context, s *stage.Scope) error {
	if e.authRaised() && e.debt(acts.AuthKeyspace, acts.TargetMembers) == nil {
		e.oweRaised(workflow.Now(ctx))
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

// oweRaised owes the repairs of system_auth, and with quorumFirst of all that
// have their copies as the members describe them: an earlier run may have
// raised them.
func (e *expand) oweRaised(now time.Time) {
	e.owed = append(e.owed, debt{keyspace: acts.AuthKeyspace, copies: acts.TargetMembers, since: now, raised: true, agreed: true})
	if e.in.Strategy != QuorumFirst {
		return
	}
	var raised []acts.Keyspace
	for _, k := range e.ring.Keyspaces {
		if k.Name != acts.AuthKeyspace && k.Raised(e.survey.DataCenter, acts.TargetMembers) {
			raised = append(raised, k)
		}
	}
	e.owe(raised, now)
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
