package cassandra

import (
	"fmt"
	"slices"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/workflows/protocol"
)

// startAgain is how an expansion that was aborted is ended.
const startAgain = "start again with savedMembers: 1, which goes on from here"

// close ends the run, and says what an expansion that stops half way leaves
// behind besides repairs that are owed.
func (e *expand) close(outcome protocol.Outcome, plan *protocol.Plan) protocol.Receipt {
	return e.copies.close(outcome, plan, func(r *protocol.Receipt) {
		r.LeftBehind = append(r.LeftBehind, e.leftByRecovery()...)
		if outcome == protocol.OutcomeAborted && !e.leaving {
			r.LeftBehind = append(r.LeftBehind, e.leftUndone()...)
		}
	})
}

// leftUndone is what an abort has left of the way to three members.
func (e *expand) leftUndone() []string {
	var left []string
	if !e.scaled {
		left = append(left, e.patched...)
		if e.in.Strategy == QuorumFirst && (e.authRaised() || e.debt(acts.AuthKeyspace, acts.TargetMembers) != nil) {
			left = append(left, fmt.Sprintf("%s asks for %d copies and one member runs: nobody can log in until a second one does. Start again at once with strategy %s and savedMembers: 1",
				acts.AuthKeyspace, acts.TargetMembers, QuorumFirst))
		}
		return left
	}
	if e.in.Strategy == QuorumFirst && !e.authDone {
		left = append(left, fmt.Sprintf("%s asks for %d copies: where fewer than two members run nobody can log in; bring a second one up at once", acts.AuthKeyspace, acts.TargetMembers))
	}
	for _, name := range e.every() {
		at := slices.IndexFunc(e.ring.Keyspaces, func(k acts.Keyspace) bool { return k.Name == name })
		switch {
		case slices.Contains(e.complete, name), slices.ContainsFunc(e.owed, func(d debt) bool { return d.keyspace == name }):
			continue
		case at < 0 && len(e.ring.Keyspaces) > 0: // not installed
			continue
		case at >= 0 && !e.whole() && e.ring.Keyspaces[at].Raised(e.ring.DataCenter, acts.TargetMembers):
			continue
		}
		what := fmt.Sprintf("has fewer than %d copies over %d members: losing one can make its rows unavailable", acts.TargetMembers, acts.TargetMembers)
		if e.whole() {
			what = "is not repaired since members joined that may have taken over rows without having them: reads can miss rows"
		}
		left = append(left, fmt.Sprintf("keyspace %s %s; %s", name, what, startAgain))
	}
	return left
}

// every is each keyspace that such an end is about: system_auth, those of the
// plan, and, where the section goes on to the last repair, all that are no
// member's own.
func (e *expand) every() []string {
	out := append([]string{acts.AuthKeyspace}, e.names...)
	if !e.whole() {
		return out
	}
	for _, k := range e.ring.Keyspaces {
		if k.Raisable(e.ring.DataCenter) && !slices.Contains(out, k.Name) {
			out = append(out, k.Name)
		}
	}
	return out
}
