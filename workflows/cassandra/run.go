package cassandra

import (
	"fmt"
	"time"

	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// run is what the four workflows have in common.
type run struct {
	*datastore.Run
	members acts.Members
	login   acts.Login
	limits  Limits
	// ring is what the last look at the members found, at seen by the run's
	// clock.
	ring acts.Ring
	seen time.Time
}

// justNow is how old a look may be for a statement to rely on it.
const justNow = time.Minute

func newRun(ctx workflow.Context, kind string, site Site, login acts.Login, limits Limits, windows []window.Spec) (*run, error) {
	site = site.withDefaults()
	shared, err := datastore.New(ctx, datastore.Options{Kind: kind, Site: site.Site, Windows: windows, Look: acts.LookLimit})
	if err != nil {
		return nil, err
	}
	return &run{Run: shared, members: site.Members, login: login.WithDefaults(), limits: limits.withDefaults()}, nil
}

func (r *run) place() acts.Place {
	return acts.Place{Target: r.Site.Target, Namespace: r.Site.Namespace, Members: r.members, Release: r.Site.Release, Holder: r.Site.Holder}
}

// pod is the name of a member by its ordinal.
func (r *run) pod(ordinal int) string { return fmt.Sprintf("%s-%d", r.members.StatefulSet, ordinal) }

// look waits until all members see all members up; want 0 is as many as the
// StatefulSet asks for.
func (r *run) look(ctx workflow.Context, s *stage.Scope, want int, row string, limit window.Duration) error {
	var got acts.RingResult
	if err := r.Do(ctx, s, acts.RingActivity, "see that all members of Cassandra in "+r.Site.Namespace+" are up", limit,
		acts.RingRequest{Place: r.place(), Want: want, Row: row, Limit: limit.D()}, &got); err != nil {
		return err
	}
	r.ring = got.Ring
	r.Keep(got.Evidence)
	if !got.OK {
		return datastore.Parking(got.Findings)
	}
	r.seen = workflow.Now(ctx)
	s.Note("%d members up in %s, schema %s", len(got.Members), got.DataCenter, got.Schema)
	return nil
}

// logins asks every member whether it lets the administrator in.
func (r *run) logins(ctx workflow.Context, s *stage.Scope) (acts.LoginsResult, error) {
	var got acts.LoginsResult
	err := r.Do(ctx, s, acts.LoginsActivity, "log in to every member as "+r.login.User, r.limits.Login,
		acts.LoginsRequest{Place: r.place(), Login: r.login, Limit: r.limits.Login.D()}, &got)
	if err == nil {
		r.Keep(got.Evidence)
	}
	return got, err
}

// raise brings keyspaces to so many copies, or with planOnly says which.
func (r *run) raise(ctx workflow.Context, s *stage.Scope, names []string, factor int, all, planOnly bool) (acts.RaiseResult, error) {
	summary := fmt.Sprintf("raise %v to %d copies", names, factor)
	switch {
	case planOnly:
		summary = "read how the keyspaces are replicated"
	case all:
		summary = fmt.Sprintf("raise every keyspace to %d copies", factor)
	}
	var got acts.RaiseResult
	err := r.Do(ctx, s, acts.RaiseActivity, summary, r.limits.Login+window.Duration(10*time.Minute), acts.RaiseRequest{
		Place: r.place(), Login: r.login, Keyspaces: names, All: all, Factor: factor, PlanOnly: planOnly, Limit: r.limits.Login.D(),
		Seen: workflow.Now(ctx).Sub(r.seen) < justNow,
	}, &got)
	if err == nil && got.Before != (artifact.Ref{}) {
		r.Artifact(got.Before)
	}
	return got, err
}

// repair repairs the keyspaces of debts of one number of copies in full, one
// member after the other. With fewer copies than members as many members reach
// every range.
func (r *run) repair(ctx workflow.Context, s *stage.Scope, debts []debt) ([]acts.Repair, error) {
	req := acts.RepairRequest{Place: r.place(), Login: r.login, Copies: debts[0].copies, Limit: r.limits.Repair.D()}
	members := req.Copies
	for _, d := range debts {
		req.Keyspaces = append(req.Keyspaces, d.keyspace)
		if d.since.After(req.Since) {
			req.Since = d.since
		}
		if d.everywhere {
			members = acts.TargetMembers
		}
	}
	req.Alone = acts.Alone(r.ring.Keyspaces, req.Keyspaces)
	var out []acts.Repair
	for ordinal := range members {
		req.Pod = r.pod(ordinal)
		s.Current(req.Pod)
		var got acts.RepairResult
		err := r.Do(ctx, s, acts.RepairActivity, fmt.Sprintf("repair %s on %s", list(req.Keyspaces), req.Pod), window.Duration(acts.RepairLimit(len(req.Keyspaces), req.Limit)), req, &got)
		if err != nil {
			return out, err
		}
		r.Keep(got.Evidence)
		out = append(out, got.Repairs...)
	}
	s.Current()
	return out, nil
}
