package cassandra

import (
	"fmt"
	"time"

	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

const (
	defaultEstimate = window.Duration(45 * time.Minute)
	// authWindow is how much of the services' logs is looked at (N146).
	authWindow = 10 * time.Minute
)

// expand is one CassandraExpand.
type expand struct {
	copies
	in     ExpandInput
	survey acts.SurveyResult
	// needless says why nothing is to be done.
	needless string

	// before is how all keyspaces were before quorumFirst has raised them.
	before []acts.Keyspace
	// What was done already, for a section that is retried: scaled; authDone,
	// system_auth raised and repaired.
	scaled   bool
	authDone bool
	// begun: the section was; prepared: what comes before the scale was done and
	// proven with one member; patched is what of the pod template this run has
	// changed, or may have.
	begun, prepared bool
	patched         []string
	// resumed: the members were scaled before this run began, and nothing proves
	// that the new ones hold what they took over.
	resumed bool
	// locked is what the members said when none let the administrator in, hosts
	// who they were in the ring then.
	locked *acts.LoginsResult
	hosts  map[string]string
	// recovering: somebody has approved the way back; leaving: the first member
	// was told to leave; recovered: the way back is gone.
	recovering, leaving, recovered bool
	// asked is the member that was told to leave last, gone are those that have.
	asked string
	gone  []string
}

// Expand brings a single member to three (N131-N146). What lies between the
// scale and the last proof of a login is one section that nothing interrupts:
// while it runs, rows and logins may depend on members that hold neither. Unless
// this run has seen the members bootstrap it ends with the last keyspace's
// repair.
func Expand(ctx workflow.Context, in ExpandInput) (ExpandResult, error) {
	if problems := in.Validate(); len(problems) > 0 {
		return ExpandResult{}, release.BadInput("input", problems)
	}
	if in.Strategy == "" {
		in.Strategy = Bootstrap
	}
	if len(in.Services) == 0 {
		in.Services = []acts.Service{{Namespace: "nvcf", Deployment: "nvcf-api"}}
	}
	shared, err := newRun(ctx, protocol.CassandraExpand, in.Site, in.Login, in.Limits, in.Windows)
	if err != nil {
		return ExpandResult{}, err
	}
	shared.PlanOnly = in.PlanOnly
	if in.Mode == acts.ModeNone {
		return ExpandResult{Receipt: skipped(shared.Run, "N131: the mode is none: a single member stays")}, nil
	}
	e := &expand{copies: copies{run: shared, names: keyspaces(in.Keyspaces), atOnce: in.Strategy == Guide, always: in.Strategy == Guide}, in: in}
	outcome, err := e.Through(e.stages()...)
	if err != nil {
		return ExpandResult{}, err
	}
	if outcome == protocol.OutcomeDone {
		switch {
		case e.recovered:
			outcome = protocol.OutcomeRolledBack
		case e.needless != "":
			outcome = protocol.OutcomeNoChange
		case in.PlanOnly:
			outcome = protocol.OutcomePlanned
		}
	}
	out := ExpandResult{Raised: e.raised, Repairs: e.repairs, Absent: e.plan.Absent, Outside: e.plan.Outside, Recovered: e.recovered}
	var plan *protocol.Plan
	if in.PlanOnly && e.needless == "" {
		plan = e.planned()
	}
	out.Receipt = e.close(outcome, plan)
	return out, nil
}

func (e *expand) stages() []stage.Stage {
	out := []stage.Stage{{Name: "survey", Purpose: "see what there is, and whether the expansion can go its way", Do: e.look}}
	if e.in.PlanOnly {
		return out
	}
	needed := func(do func(workflow.Context, *stage.Scope) error) func(workflow.Context, *stage.Scope) error {
		return func(ctx workflow.Context, s *stage.Scope) error {
			switch {
			case e.needless != "":
				s.Note("left out: %s", e.needless)
				return nil
			case e.recovered:
				s.Note("left out: the new members were taken out again")
				return nil
			}
			return do(ctx, s)
		}
	}
	return append(out,
		stage.Stage{Name: "expand", Purpose: "three members, system_auth raised and repaired, the administrator let in by each", Do: needed(e.expand)},
		stage.Stage{Name: "keyspaces", Purpose: "raise the keyspaces to three copies and repair them, one member after the other", Do: needed(e.bring)}, // each step that the section has left waits for a window
		stage.Stage{Name: "authentication", Purpose: "see that no service is refused a login any more", Do: needed(e.authentication)},
		stage.Stage{Name: "zones", Purpose: "see that no two members share a zone", Do: needed(e.zones)})
}

// look decides by the saved number of members (N131) and proves before
// anything is touched what the strategy needs.
func (e *expand) look(ctx workflow.Context, s *stage.Scope) error {
	var err error
	if e.survey, err = e.surveyed(ctx, s); err != nil {
		return err
	}
	saved, live := e.in.SavedMembers, e.survey.Replicas
	if saved == 0 {
		if saved = live; live == acts.TargetMembers {
			return stage.Parking(fmt.Sprintf("N131: savedMembers: expected the number that the backup has recorded, found none, with %d members live", live),
				"an expansion that has stopped half way looks like this, with three copies of everything too: nothing proves that they were repaired since the members joined",
				fmt.Sprintf("abort, and start again: with savedMembers: 1 where one was there before, which finishes the expansion and repairs everything; with savedMembers: %d where there were as many, which changes nothing", live), nil)
		}
	}
	if saved != 1 {
		e.needless = fmt.Sprintf("N131: %d members were there before, %d are live: only a single one is expanded", saved, live)
		e.Warn(e.needless)
		s.Note("%s", e.needless)
		return nil
	}
	if live != 1 && live != acts.TargetMembers {
		return stage.Parking(fmt.Sprintf("N136: StatefulSet %s: expected 1 or %d members, found %d", e.members.StatefulSet, acts.TargetMembers, live),
			"somebody scales it by other means", "find out who; Refit never scales down", nil)
	}
	if err := e.strategyFits(); err != nil {
		return err
	}
	if live == acts.TargetMembers { // an earlier run has come so far
		e.goOn()
		s.Note("scaled to %d by an earlier run: going on from there", live)
		return nil
	}
	if old := e.survey.OldVolume(e.Site.Namespace); len(old) > 0 {
		return datastore.Parking(old)
	}
	if err := e.spreads(); err != nil {
		return err
	}
	if err := e.run.look(ctx, s, 1, "N84", e.limits.Join); err != nil {
		return err
	}
	if e.in.Strategy == QuorumFirst && e.authRaised() {
		s.Note("system_auth asks for %d copies already: logins are refused until a second member runs", acts.TargetMembers)
		return nil
	}
	return e.proveLogin(ctx, s)
}

// proveLogin: without the administrator the statements that end the expansion
// can't be run.
func (e *expand) proveLogin(ctx workflow.Context, s *stage.Scope) error {
	got, err := e.logins(ctx, s)
	if err != nil {
		return err
	}
	if !got.OK {
		return datastore.Parking(got.Findings)
	}
	return e.check(ctx, s)
}

func (e *expand) surveyed(ctx workflow.Context, s *stage.Scope) (acts.SurveyResult, error) {
	var out acts.SurveyResult
	err := e.Do(ctx, s, acts.SurveyActivity, "survey Cassandra in "+e.Site.Namespace, window.Duration(time.Minute),
		acts.SurveyRequest{Place: e.place(), Mode: e.in.Mode}, &out)
	if err == nil {
		e.Keep(out.Evidence)
	}
	return out, err
}

// authRaised says whether the members' own description shows system_auth with
// its copies: it is raised last, when no keyspace is left.
func (e *expand) authRaised() bool { return e.auth().Raised(e.survey.DataCenter, acts.TargetMembers) }

// auth is system_auth as the members have described it last.
func (e *expand) auth() acts.Keyspace {
	for _, k := range e.ring.Keyspaces {
		if k.Name == acts.AuthKeyspace {
			return k
		}
	}
	return acts.Keyspace{}
}

func (e *expand) strategyFits() error {
	sv := e.survey
	switch {
	case e.in.Strategy == Bootstrap && sv.Narrowed == "":
		return stage.Parking(fmt.Sprintf("CASSANDRA_SEEDS of StatefulSet %s: expected a list that names %s, found %q", e.members.StatefulSet, e.pod(0), sv.Seeds),
			"a new member that is its own seed takes over rows without having them", "choose strategy quorumFirst, which leaves the pod template alone", nil)
	case e.in.Strategy == Guide && len(sv.JoiningSeeds) > 0 && !e.in.AcknowledgeSeeds:
		return stage.Parking(fmt.Sprintf("CASSANDRA_SEEDS of StatefulSet %s: expected %s alone, found %s too", e.members.StatefulSet, e.pod(0), list(sv.JoiningSeeds)),
			"a seed does not bootstrap: in the guide's order rows go missing and logins are refused until the repairs, the administrator's perhaps too",
			"choose strategy bootstrap or quorumFirst; or acknowledge it in the plan (acknowledgeSeeds)", nil)
	}
	return nil
}

// spreads tells that quorumFirst, which leaves the pod template alone, leaves
// out the rule that spreads the members too (N133). A volume stays where its
// member first starts, so that under enforced the rule can't come later.
func (e *expand) spreads() error {
	sv := e.survey
	switch {
	case e.in.Strategy != QuorumFirst || sv.Ruled:
	case !sv.Rule:
		e.Warn("N134: no rule spreads the members over zones: " + sv.NoRule)
	case e.in.Mode == acts.ModeEnforced:
		return stage.Parking(fmt.Sprintf("N133: pod template of StatefulSet %s: expected a rule that spreads the members over zones, found none", e.members.StatefulSet),
			"strategy quorumFirst leaves the template alone; members that share a zone stay there with their volumes",
			"add the rule with the chart and retry, or choose strategy bootstrap, which adds it, or mode preferred", nil)
	default:
		e.Warn("N133: strategy quorumFirst leaves the pod template alone: no rule spreads the members over zones")
	}
	return nil
}

// planned is what would be done.
func (e *expand) planned() *protocol.Plan {
	p := &protocol.Plan{}
	add := func(object, action string) {
		p.Changes = append(p.Changes, protocol.PlannedChange{Action: action, Object: object})
	}
	set := "StatefulSet " + e.members.StatefulSet
	if !e.scaled && e.in.Strategy != QuorumFirst {
		if e.survey.Rule && e.survey.NewRule {
			add(set, "add the rule that spreads members over zones")
		}
		if e.in.Strategy == Bootstrap && e.survey.Seeds != e.survey.Narrowed {
			add(set, "leave "+e.survey.Narrowed+" alone in CASSANDRA_SEEDS")
		}
	}
	if !e.scaled && e.in.Strategy == QuorumFirst {
		add("every keyspace", fmt.Sprintf("raise to %d copies before the scale", acts.TargetMembers))
	}
	if !e.scaled {
		add(set, fmt.Sprintf("scale to %d", acts.TargetMembers))
	}
	add("keyspace "+acts.AuthKeyspace, fmt.Sprintf("raise to %d copies and repair on every member", acts.TargetMembers))
	if e.resumed { // nobody has logged in to read how they are replicated
		action := fmt.Sprintf("raise where it has fewer than %d copies, and repair on every member", acts.TargetMembers)
		for _, name := range e.names {
			add("keyspace "+name, action)
		}
		add("every other keyspace that is no member's own", action)
		return p
	}
	p.Changes = append(p.Changes, e.copies.planned().Changes...)
	return p
}

// authentication counts refused logins in the services' logs (N146).
func (e *expand) authentication(ctx workflow.Context, s *stage.Scope) error {
	var got acts.AuthErrorsResult
	err := e.Do(ctx, s, acts.AuthErrorsActivity, "see that no service is refused a login", e.limits.Authentication,
		acts.AuthErrorsRequest{Place: e.place(), Services: e.in.Services, Within: authWindow, Limit: e.limits.Authentication.D()}, &got)
	if err != nil {
		return err
	}
	e.Keep(got.Evidence)
	if !got.OK {
		return datastore.Parking(got.Findings)
	}
	for _, absent := range got.Absent {
		e.Warn("N146: " + absent + " is not there: nobody's log says whether it is let in")
	}
	if got.Pods == 0 {
		e.Warn("N146: no pod of the services named in the plan runs: nobody's log says whether logins are accepted")
	}
	s.Note("no refused login in %s of the logs of %d pods", authWindow, got.Pods)
	return nil
}

// zones proves N138; it comes last because a volume can't be moved, and the
// copies must not wait for whoever decides about that.
func (e *expand) zones(ctx workflow.Context, s *stage.Scope) error {
	now, err := e.surveyed(ctx, s)
	if err != nil {
		return err
	}
	found := append(now.Shared, now.Unzoned...)
	switch {
	case len(found) == 0:
		s.Note("no two members share a zone")
	case e.in.Mode == acts.ModeEnforced:
		return datastore.Parking(found)
	default:
		for _, f := range found {
			e.Warn(f.String())
		}
	}
	return nil
}
