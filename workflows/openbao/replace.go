package openbao

import (
	"fmt"
	"time"

	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/openbao"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

const (
	// attempts is how often leadership is asked to move before a person looks.
	attempts = 3
	// movesAllowed is how often, for each member, the plan may be overtaken by
	// what happens in the cluster, as by a leader that moves by itself: more is
	// no upgrade's business but a cluster that is not well.
	movesAllowed = 2
)

// injected is what the guide leaves to the operator (N169).
const injected = "A newer injector changes only new pods: services that the core stage rolls get the new agent. Roll any other injected workload by its own procedure, " +
	"one service at a time, and check its authentication and its rendered secrets"

// standard is the decision that the plan does not say was made (N159).
const standard = "N159: nobody has acknowledged in the plan that plugin registration, policies and PKI are as the chart sets them up: where they were customised, use the OpenBao patch upgrade runbook"

// unsaved is the gate that the plan does not name (N104).
const unsaved = "N104: the plan names no Raft snapshot (snapshot), so nothing has proven that one was taken before"

// replacing is one OpenBaoReplace.
type replacing struct {
	*run
	in   ReplaceInput
	want acts.Want
	// first is what the first survey saw, last what was seen last.
	first acts.SurveyResult
	last  acts.State
	// open is a step that was begun and is not proven: it is finished before
	// anything else is decided. committed, begun and resumed belong to it:
	// whether something may have been changed already, and whether that was in
	// a section before, which nothing has held to a window since.
	open           acts.Step
	committed      uint64
	begun, resumed bool
	// lead is the member, by its pod's UID, that was asked to step down so often.
	lead     string
	asked    int
	approved bool
	done     int
	moves    int
}

// Replace replaces every stale member: standbys first, one at a time, then
// leadership moves and the former active member is the last (N158-N168). What
// comes next is decided anew from what is seen, after every step.
func Replace(ctx workflow.Context, in ReplaceInput) (ReplaceResult, error) {
	if problems := in.Validate(); len(problems) > 0 {
		return ReplaceResult{}, release.BadInput("input", problems)
	}
	in = in.withDefaults()
	shared, err := newRun(ctx, protocol.OpenBaoReplace, in.Site, in.Windows)
	if err != nil {
		return ReplaceResult{}, err
	}
	r := &replacing{run: shared, in: in, want: acts.Want{Image: in.Image, Version: in.Version, Members: in.Members}}
	r.PlanOnly = in.PlanOnly
	stages := []stage.Stage{{Name: "survey", Purpose: "refuse what this procedure does not cover, wait for the cluster to be whole, find the stale members", Do: r.begin}}
	if !in.PlanOnly {
		stages = append(stages,
			stage.Stage{Name: "replace", Purpose: "replace the stale members one at a time, standbys first, the active one last", Mutates: true, Do: r.replace},
			stage.Stage{Name: "verify", Purpose: "prove that every member is of the target, unsealed, of the same cluster, and one of them active", Do: r.verify})
	}
	outcome, err := r.Through(stages...)
	if err != nil {
		return ReplaceResult{}, err
	}
	if outcome == protocol.OutcomeDone {
		switch {
		case in.PlanOnly:
			outcome = protocol.OutcomePlanned
		case len(r.first.Steps) == 0 && r.done == 0:
			outcome = protocol.OutcomeNoChange
		}
	}
	receipt := r.Close(outcome, r.complete)
	return ReplaceResult{Receipt: receipt, ClusterID: r.want.ClusterID, Active: r.last.Active, Images: r.last.Images}, nil
}

// survey looks at the cluster until it is whole; a snapshot that is named must
// be stored.
func (r *replacing) survey(ctx workflow.Context, s *stage.Scope, snapshot string) (acts.SurveyResult, error) {
	var got acts.SurveyResult
	err := r.Do(ctx, s, acts.SurveyActivity, "find what is stale and who is active", r.in.Limit,
		acts.SurveyRequest{Place: r.place(), Want: r.want, Limit: r.in.Limit.D(), Snapshot: snapshot}, &got)
	if err != nil {
		return got, err
	}
	r.Keep(got.Evidence)
	r.saw(got.State)
	if len(got.Findings) > 0 {
		return got, datastore.Parking(got.Findings)
	}
	return got, nil
}

func (r *replacing) begin(ctx workflow.Context, s *stage.Scope) error {
	got, err := r.survey(ctx, s, r.in.Snapshot)
	if err != nil {
		return err
	}
	r.first, r.want.ClusterID = got, got.ClusterID
	note := fmt.Sprintf("cluster %s, %s active, %d steps", got.ClusterID, got.Active, len(got.Steps))
	if r.in.Snapshot != "" {
		r.Artifact(got.Snapshot)
		note += ", Raft snapshot of " + got.Taken.Format(time.RFC3339)
	} else if len(got.Steps) > 0 {
		r.Warn(unsaved)
	}
	s.Note("%s", note)
	if len(got.Steps) > 0 && len(r.in.Acknowledge) == 0 {
		r.Warn(standard)
	}
	return nil
}

func (r *replacing) replace(ctx workflow.Context, s *stage.Scope) error {
	for {
		if r.open.Act == "" {
			if err := s.Safe(ctx); err != nil {
				return err
			}
			got, err := r.survey(ctx, s, "")
			if err != nil {
				return err
			}
			s.Progress(r.done, r.done+len(got.Steps), 0)
			if got.Step.Act == acts.Done {
				s.Note("%d steps done", r.done)
				return nil
			}
			if err := r.approve(ctx, s, got); err != nil {
				return err
			}
			r.open, r.committed, r.begun = got.Step, got.Committed, false
		}
		r.resumed = r.begun
		if err := r.finish(ctx, s); err != nil {
			return err
		}
	}
}

// approve asks a person before leadership moves, once, where the plan says so.
func (r *replacing) approve(ctx workflow.Context, s *stage.Scope, got acts.SurveyResult) error {
	if got.Step.Act != acts.StepDown || !r.in.ApproveStepDown || r.approved {
		return nil
	}
	err := s.Gate(ctx, stage.Gate{
		Name:  "step-down",
		Found: fmt.Sprintf("every standby runs %s; %s, still of the old template, is active", r.want.Version, got.Active),
		Why:   "while leadership moves, for about a second, nothing is written; services retry",
		Helps: "see that the services log in and read as before; after the approval a standby takes over and the former active member is replaced",
	})
	r.approved = err == nil
	return err
}

// finish does the open step as one unbreakable section, or what is left of it.
func (r *replacing) finish(ctx workflow.Context, s *stage.Scope) error {
	step := r.open
	s.Current(step.String())
	act, estimate := r.member, r.memberLimit()
	if step.Act == acts.StepDown {
		act, estimate = r.leader, attempts*r.leaderLimit()
	}
	// What stops a step before it has touched anything is no half-done section.
	var untouched error
	var over bool
	err := s.Section(ctx, step.String(), estimate.D(), func(ctx workflow.Context) error {
		done, err := act(ctx, s, step, &untouched)
		over = done
		return err
	})
	if over || untouched != nil {
		r.open = acts.Step{}
	}
	if err != nil {
		return err
	}
	return untouched
}

// beginWithin is how long after its section has begun a step may begin: by then
// the looks before it are over, the last of them too. Later, as after hours
// without a worker, neither the window nor what people have said since would be
// asked: it is planned anew.
const beginWithin = acts.RecheckLimit + acts.LookLimit

// beginBy is when the open step may begin at the latest; never, where a section
// before has begun it: there it is only brought to its end.
func (r *replacing) beginBy(ctx workflow.Context) time.Time {
	if r.resumed {
		return time.Time{}
	}
	return workflow.Now(ctx).Add(beginWithin)
}

// memberLimit and leaderLimit are how long an activity may take: the looks
// before, the act, the looks after.
func (r *replacing) memberLimit() window.Duration {
	return window.Duration(beginWithin) + r.in.DeleteLimit + r.in.ReadyLimit + calmAfter(r.in.Limit)
}

func (r *replacing) leaderLimit() window.Duration {
	return window.Duration(beginWithin) + calmAfter(r.in.TransferLimit)
}

// calmAfter adds the calm to a limit that its proof must fit: it takes its
// time, however short the plan's limit.
func calmAfter(limit window.Duration) window.Duration { return limit + window.Duration(acts.StableFor) }

// do runs an activity of a step. One that had to be scheduled again may have
// been begun by a worker that died, and the new one knows nothing of it.
func (r *replacing) do(ctx workflow.Context, s *stage.Scope, name, summary string, limit window.Duration, req, out any) error {
	before := s.Unanswered()
	err := r.Do(ctx, s, name, summary, limit, req, out)
	r.begun = r.begun || s.Unanswered() > before
	return err
}

// failed sorts the error of an activity: one that came before anything was
// changed, in this call and all before, leaves nothing half done.
func (r *replacing) failed(err error, untouched *error) error {
	if acts.Untouched(err) && !r.begun {
		*untouched = err
		return nil
	}
	r.begun = true
	return err
}

// member replaces one standby; done tells that the step is over, also because
// it is not the next one any more.
func (r *replacing) member(ctx workflow.Context, s *stage.Scope, step acts.Step, untouched *error) (done bool, err error) {
	var got acts.ReplaceResult
	err = r.do(ctx, s, acts.ReplaceActivity, step.String(), r.memberLimit(), acts.ReplaceRequest{
		Place: r.place(), Want: r.want, Pod: step.Pod, UID: step.UID, Committed: r.committed, BeginBy: r.beginBy(ctx),
		Limit: calmAfter(r.in.Limit).D(), Delete: r.in.DeleteLimit.D(), Ready: r.in.ReadyLimit.D(),
	}, &got)
	if err != nil {
		return false, r.failed(err, untouched)
	}
	r.Keep(got.Evidence)
	r.saw(got.State)
	r.begun = r.begun || got.Touched
	switch {
	case got.OK:
		r.done++
		s.Note("%s is back on %s", step.Pod, got.Version)
		return true, nil
	case got.Anew != "":
		r.done++
		*untouched = r.moved(s, step, got.Anew)
		return true, nil
	case got.Moved != "":
		*untouched = r.moved(s, step, got.Moved)
		return true, nil
	case !got.Touched:
		*untouched = datastore.Parking(got.Findings)
		return false, nil
	}
	return false, datastore.Parking(got.Findings)
}

// leader moves leadership away from the last stale member. Each attempt finds
// the active member anew, and all count, also those before the plan was made
// anew.
func (r *replacing) leader(ctx workflow.Context, s *stage.Scope, step acts.Step, untouched *error) (done bool, err error) {
	if r.lead != step.UID {
		r.lead, r.asked = step.UID, 0
	}
	var found []finding.Finding
	for r.asked < attempts {
		var got acts.StepDownResult
		err := r.do(ctx, s, acts.StepDownActivity, fmt.Sprintf("%s, attempt %d", step, r.asked+1), r.leaderLimit(),
			acts.StepDownRequest{Place: r.place(), Want: r.want, Pod: step.Pod, UID: step.UID, Committed: r.committed, BeginBy: r.beginBy(ctx),
				Limit: calmAfter(r.in.Limit).D(), Transfer: calmAfter(r.in.TransferLimit).D()}, &got)
		if err != nil {
			return false, r.failed(err, untouched)
		}
		r.Keep(got.Evidence)
		r.saw(got.State)
		r.begun = r.begun || got.Sent
		switch {
		case got.OK:
			r.done++
			s.Note("%s leads", got.Active)
			return true, nil
		case got.Moved != "":
			*untouched = r.moved(s, step, got.Moved)
			return true, nil
		case !r.begun:
			*untouched = datastore.Parking(got.Findings)
			return false, nil
		case !got.Sent: // refused, after an attempt that was none
			return false, datastore.Parking(got.Findings)
		}
		r.asked++
		found = got.Findings
		s.Note("attempt %d of %d to move leadership, of no effect: %s", r.asked, attempts, replied(got.Reply))
	}
	r.asked = 0 // the attempts that a person's retry has
	return false, datastore.Parking(found)
}

// replied is what a member said to its step-down, in words: a try that has
// found it sent by the one before has heard nothing.
func replied(reply string) string {
	if reply == "" {
		return "its reply is lost with the worker that asked"
	}
	return fmt.Sprintf("answered with %q", reply)
}

// moved counts how often the plan was overtaken; an error says that it is too
// often.
func (r *replacing) moved(s *stage.Scope, step acts.Step, what string) error {
	r.moves++
	s.Note("planned anew: %s", what)
	if allowed := movesAllowed * r.in.Members; r.moves > allowed {
		r.moves = 0
		return stage.Parking(fmt.Sprintf("OpenBao: what was planned was overtaken more than %d times, last the %s: %s", allowed, step, what),
			"a cluster that does not hold still is not replaced member by member",
			"look at the load, the disks and the network of the members, who changes the template, and whether the worker is slow or its clock wrong, then retry", nil)
	}
	return nil
}

func (r *replacing) verify(ctx workflow.Context, s *stage.Scope) error {
	got, err := r.survey(ctx, s, "")
	if err != nil {
		return err
	}
	if got.Step.Act != acts.Done {
		return stage.Parking(fmt.Sprintf("N168: OpenBao: expected no stale member, found that the next step would be the %s", got.Step),
			"somebody changed the template after the members were replaced", "abort, and start again with the image of the new template", nil)
	}
	s.Note("%d members on %s, %s active, cluster %s", len(got.Versions), r.want.Version, got.Active, got.ClusterID)
	if r.done > 0 {
		r.Warn(injected)
	}
	return nil
}
