package cassandra

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// perDecommission is how long the data of one new member takes to stream back.
const perDecommission = 30 * time.Minute

// recover is the way out when no member lets the administrator in. With one
// copy of everything the new members give back what they took over, and the
// first one is alone again: nobody but a person decides that. With more copies
// of the roles that would leave fewer members than a login needs.
func (e *expand) recover(ctx workflow.Context, s *stage.Scope) error {
	if err := e.run.look(ctx, s, acts.TargetMembers, "N137", e.limits.Join); err != nil {
		return err
	}
	if more := acts.AskMore(e.ring.Keyspaces, e.names); len(more) > 0 {
		return e.mend(ctx, more[0])
	}
	e.hosts = e.ring.Hosts
	last, before := e.pod(acts.TargetMembers-1), e.pod(acts.TargetMembers-2)
	err := s.Gate(ctx, stage.Gate{
		Name:  "recover",
		Found: "the administrator is locked out: " + evidence.InWords(e.locked.Findings),
		Why: fmt.Sprintf("the rows of the roles may lie in ranges that a new member took over without them; a password that is not the administrator's looks the same. %s and the keyspaces of this run have one copy. Approve asks for the login once more, and "+
			"where it is still refused runs nodetool decommission --force on %s, then on %s: they give the ranges back, and %s serves all rows and logins as before", acts.AuthKeyspace, last, before, e.pod(0)),
		Helps: fmt.Sprintf("make sure that nobody has run nodetool cleanup on %s, and that the password in the plan is the administrator's; approve to go back to one member. "+
			"Where the login was mended by other means, approve too: the expansion goes on, and nobody leaves", e.pod(0)),
	})
	if err != nil {
		return err
	}
	e.recovering = true
	return e.takeBack(ctx, s)
}

// mend is what is offered instead where members may not be taken out: a retry
// repairs the roles again, which needs no login.
func (e *expand) mend(ctx workflow.Context, more acts.Keyspace) error {
	found := fmt.Sprintf("the administrator is locked out, and keyspace %s has more than one copy: %s", more, evidence.InWords(e.locked.Findings))
	why := "members that are taken out would leave fewer than a quorum of the copies: nobody could log in any more, nor ask for fewer copies"
	copies := e.auth().Copies()
	if copies < 2 {
		return stage.Parking(found, why, "see that the password in the plan is the administrator's, then retry; otherwise restore by the reviewed procedure", nil, e.locked.Findings...)
	}
	e.authDone = false
	e.owed = slices.DeleteFunc(e.owed, func(d debt) bool { return d.keyspace == acts.AuthKeyspace })
	e.owed = append(e.owed, debt{keyspace: acts.AuthKeyspace, copies: min(copies, acts.TargetMembers), since: workflow.Now(ctx), raised: true, agreed: true, everywhere: true})
	return stage.Parking(found, why, fmt.Sprintf("see that the password in the plan is the administrator's; retry repairs %s in full on every member, which needs no login, and asks for the login again. "+
		"If it is still refused then, restore by the reviewed procedure", acts.AuthKeyspace), nil, e.locked.Findings...)
}

// errMended ends the way back before anybody has left.
var errMended = errors.New("the administrator is let in again")

// takeBack is what the gate allows; a member that has left already is passed
// over. No window delays it: whoever has approved it has decided that. It is
// the other end of the expansion's section.
func (e *expand) takeBack(ctx workflow.Context, s *stage.Scope) error {
	err := s.SectionNow(ctx, theSection, func(ctx workflow.Context) error { return e.leave(ctx, s) })
	if errors.Is(err, errMended) {
		return e.expand(ctx, s)
	}
	return err
}

func (e *expand) leave(ctx workflow.Context, s *stage.Scope) error {
	if !e.leaving {
		now, err := e.logins(ctx, s)
		if err != nil {
			return err
		}
		if !now.LockedOut() { // it was mended, or was passing
			e.recovering = false
			return errMended
		}
		e.leaving = true
	}
	last, before := e.pod(acts.TargetMembers-1), e.pod(acts.TargetMembers-2)
	for _, pod := range []string{last, before} {
		s.Current(pod)
		e.asked = pod
		var got acts.DecommissionResult
		err := e.Do(ctx, s, acts.DecommissionActivity, "decommission "+pod, window.Duration(2*perDecommission),
			acts.DecommissionRequest{Place: e.place(), Pod: pod, HostID: e.hosts[pod], Keyspaces: e.names, Limit: perDecommission}, &got)
		if err != nil {
			return err
		}
		e.Keep(got.Evidence)
		if !slices.Contains(e.gone, pod) {
			e.gone = append(e.gone, pod)
		}
	}
	s.Current()
	var got acts.LoginsResult
	err := e.Do(ctx, s, acts.LoginsActivity, "log in to "+e.pod(0)+" as "+e.login.User, e.limits.Login,
		acts.LoginsRequest{Place: e.place(), Login: e.login, Pod: e.pod(0), Limit: e.limits.Login.D()}, &got)
	if err != nil {
		return err
	}
	if !got.OK {
		return datastore.Parking(got.Findings)
	}
	e.recovered, e.owed = true, nil // one copy of everything, as proven before each left
	s.Note("%s serves alone again", e.pod(0))
	return nil
}

// leftByRecovery lists what a way back has left for a person, who alone scales
// down and deletes volumes; with one that was not ended, how to end it by hand,
// because no other run gets over a ring that lacks a member.
func (e *expand) leftByRecovery() []string {
	if !e.leaving {
		return nil
	}
	const leave = "nodetool decommission --force"
	var out []string
	last, before := e.pod(acts.TargetMembers-1), e.pod(acts.TargetMembers-2)
	for _, pod := range []string{last, before} {
		switch {
		case slices.Contains(e.gone, pod):
			out = append(out, pod+" has left the ring; its pod and its volume stay")
		case pod == e.asked:
			out = append(out, fmt.Sprintf("%s was told to leave the ring, and nothing proves that it has: where nodetool status on %s shows it still, run %s in its pod", pod, e.pod(0), leave))
		default:
			out = append(out, fmt.Sprintf("%s still holds ranges, and rows in them are hidden: once %s has left, run %s in its pod", pod, last, leave))
		}
	}
	out = append(out, fmt.Sprintf("StatefulSet %s asks for %d members: once %s and %s have left, scale it to 1 and delete their volumes by hand before the next try, or their pods can't join again",
		e.members.StatefulSet, acts.TargetMembers, last, before))
	if !e.recovered {
		out = append(out, fmt.Sprintf("nothing proves that %s lets %s in: log in there once both have left", e.pod(0), e.login.User))
	}
	return append(out, e.patched...)
}
