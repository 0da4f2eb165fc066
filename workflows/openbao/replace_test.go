package openbao

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"

	acts "github.com/refit-run/refit/activities/openbao"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/window"
)

func TestStandbysAreReplacedFirstAndTheFormerActiveLast(t *testing.T) {
	s := newSystem()
	var out ReplaceResult
	newHarness(t, s).Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "delete openbao-server-1", "openbao-server-1 proven", "delete openbao-server-2", "openbao-server-2 proven",
		"step-down of openbao-server-0", "openbao-server-1 leads", "delete openbao-server-0", "openbao-server-0 proven", "unlock"}, s.log)
	require.Equal(t, "openbao-server-1", out.Active)
	require.Equal(t, "c1", out.ClusterID)
	require.Equal(t, "2.6.2 (nvcf-openbao:2.6.2-nv-1.3.4)", out.Before["openbao-server-0"])
	require.Equal(t, "2.6.3 (nvcf-openbao:2.6.3-nv-1.3.7)", out.After["openbao-server-0"])
	require.Equal(t, protocol.Progress{Done: 4, Total: 4}, out.Progress)
	require.Subset(t, out.Warnings, []string{standard, injected})
	require.Empty(t, out.LeftBehind)
}

func TestAPlanNamesTheStepsAndTouchesNothing(t *testing.T) {
	s := newSystem()
	in := replacement()
	in.PlanOnly = true
	var out ReplaceResult
	newHarness(t, s).Run(protocol.OpenBaoReplace, in, &out)
	require.Equal(t, protocol.OutcomePlanned, out.Outcome)
	require.Equal(t, []string{"lock", "unlock"}, s.log)
	require.Equal(t, []protocol.PlannedChange{
		{Action: "replace", Object: "OpenBao member openbao-server-1"}, {Action: "replace", Object: "OpenBao member openbao-server-2"},
		{Action: "step down", Object: "OpenBao member openbao-server-0"}, {Action: "replace", Object: "OpenBao member openbao-server-0"},
	}, out.Plan.Changes)
}

func TestASecondRunProvesAndChangesNothing(t *testing.T) {
	s := newSystem()
	for i := range s.view.Members {
		s.view.Members[i].Revision, s.view.Members[i].Version = "new", "2.6.3"
	}
	var out ReplaceResult
	newHarness(t, s).Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeNoChange, out.Outcome)
	require.Equal(t, []string{"lock", "unlock"}, s.log)
	require.NotContains(t, out.Warnings, injected)
}

func TestWhatIsRefusedParksBeforeAnythingIsTouched(t *testing.T) {
	s := newSystem()
	s.refuse = "RollingUpdate"
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		w := h.Waits("survey")
		require.Equal(t, "N161: StatefulSet openbao-server: expected update strategy OnDelete, found RollingUpdate", w.Found)
		require.Equal(t, []string{protocol.Retry, protocol.Abort}, w.Answers, "there is no way around it")
		h.Answer(protocol.Abort)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.Equal(t, []string{"lock", "survey finds RollingUpdate", "unlock"}, s.log)
	require.Len(t, out.After, 3)
	require.Equal(t, out.After, out.Before, "nothing was touched")
	require.Empty(t, out.LeftBehind)
}

func TestAStandbyThatStaysSealedParksWithTheRunbookAndNoOtherIsTouched(t *testing.T) {
	s := newSystem()
	s.after = func() { s.sealed = "openbao-server-1" }
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		w := h.Waits("replace")
		require.Contains(t, w.Found, "Ready and sealed")
		require.Contains(t, w.Helps, "runbook")
		require.Contains(t, w.Why, "left half done: replacement of openbao-server-1")
		require.NotContains(t, w.Answers, protocol.Skip)
		h.Answer(protocol.Retry)
	})
	h.At(2*time.Hour, func() {
		require.Contains(t, h.Waits("replace").Found, "Ready and sealed")
		s.do(func() { s.sealed = "" })
		h.Answer(protocol.Retry)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "delete openbao-server-1", "openbao-server-1 not proven: Ready and sealed", "openbao-server-1 not proven: Ready and sealed",
		"openbao-server-1 proven", "delete openbao-server-2"}, s.log[:6], "it is proven, not deleted again, before the next one goes")
	require.Empty(t, out.LeftBehind)
}

func TestAnAbortWhileAMemberIsSealedListsWhatIsHalfDone(t *testing.T) {
	s := newSystem()
	s.after = func() { s.sealed = "openbao-server-1" }
	h := newHarness(t, s)
	h.At(time.Hour, func() { h.Answer(protocol.Abort) })
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.Len(t, out.LeftBehind, 1)
	require.Contains(t, out.LeftBehind[0], "replacement of openbao-server-1 is half done")
	require.Equal(t, "unlock", s.log[len(s.log)-1])
}

func TestTheOrderIsDecidedAnewWhenLeadershipMovesWithADeletion(t *testing.T) {
	s := newSystem()
	s.after = func() { s.lead(2) }
	var out ReplaceResult
	newHarness(t, s).Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "delete openbao-server-1", "openbao-server-1 proven", "delete openbao-server-0", "openbao-server-0 proven",
		"step-down of openbao-server-2", "openbao-server-0 leads", "delete openbao-server-2", "openbao-server-2 proven", "unlock"}, s.log)
}

func TestNoStepDownIsNeededWhenANewMemberHasTakenOverByItself(t *testing.T) {
	s := newSystem()
	s.after = func() { s.lead(1) }
	var out ReplaceResult
	newHarness(t, s).Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.NotContains(t, s.log, "step-down of openbao-server-0")
}

func TestALeaderThatNeverHoldsStillParks(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	// Between the survey and the deletion it moves to the very member.
	moved := 0
	h.OnActivity(acts.ReplaceActivity, mock.Anything, mock.Anything).Return(func(_ context.Context, r acts.ReplaceRequest) (acts.ReplaceResult, error) {
		moved++
		return acts.ReplaceResult{Moved: r.Pod + " has become active"}, nil
	})
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("replace").Found, "what was planned was overtaken more than 6 times, last the replacement of openbao-server-1: openbao-server-1 has become active")
		h.Answer(protocol.Abort)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, 7, moved)
	require.Empty(t, out.LeftBehind, "nothing was touched")
}

func TestASecondMemberThatIsDownIsWaitedForBeforeTheNextIsDeleted(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	s.after = func() { s.down = "openbao-server-0" } // while the first one is replaced
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("replace").Found, "OpenBao member openbao-server-0: expected an answer")
		s.do(func() { s.down = "" })
		h.Answer(protocol.Retry)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "delete openbao-server-1", "openbao-server-1 not proven: connection refused", "openbao-server-1 proven", "delete openbao-server-2"}, s.log[:5])
}

func TestWhatStopsAStepBeforeItHasBegunIsNotHalfDone(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	once := true
	h.OnActivity(acts.ReplaceActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.ReplaceRequest) (acts.ReplaceResult, error) {
		if once {
			once = false
			return acts.ReplaceResult{Findings: []finding.Finding{{Row: "N89", Object: "OpenBao member openbao-server-2", Expected: "an answer", Found: "no route"}}}, nil
		}
		return s.replace(ctx, r)
	})
	h.At(time.Hour, func() {
		w := h.Waits("replace")
		require.Contains(t, w.Found, "no route")
		require.NotContains(t, w.Why, "half done")
		h.Answer(protocol.Retry)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}

func TestAStepDownThatWasNotSentIsNotHalfDone(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	blocked := true
	h.OnActivity(acts.StepDownActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.StepDownRequest) (acts.StepDownResult, error) {
		if blocked {
			return acts.StepDownResult{Findings: []finding.Finding{{Row: "N163", Object: "OpenBao member openbao-server-2", Expected: "unsealed", Found: "sealed"}}}, nil
		}
		return s.stepDown(ctx, r)
	})
	h.At(time.Hour, func() {
		w := h.Waits("replace")
		require.Contains(t, w.Found, "expected unsealed, found sealed")
		require.NotContains(t, w.Why, "half done")
		blocked = false
		h.Answer(protocol.Retry)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}

func TestAStepDownWithoutEffectIsAskedThriceThenAPerson(t *testing.T) {
	s := newSystem()
	s.deaf = 3
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		w := h.Waits("replace")
		require.Contains(t, w.Found, "N166: OpenBao: expected a member of version 2.6.3 active, found openbao-server-0 is")
		require.Contains(t, w.Why, "step-down of openbao-server-0")
		h.Answer(protocol.Retry)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	deaf := "step-down of openbao-server-0 without effect"
	require.Equal(t, []string{deaf, deaf, deaf, "step-down of openbao-server-0 not begun: late", "step-down of openbao-server-0", "openbao-server-1 leads"}, s.log[5:11],
		"what the retry finds is no half-done step-down: it is planned anew, within the windows")
}

func TestALostReplyIsNoSecondStepDown(t *testing.T) {
	s := newSystem()
	s.lost = 1
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("replace").Found, "the reply is lost")
		h.Answer(protocol.Retry)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"step-down of openbao-server-0", "openbao-server-1 leads", "delete openbao-server-0"}, s.log[5:8])
	require.Empty(t, out.LeftBehind)
}

func TestAWorkerLostAfterTheDeletionIsNoSecondDeletion(t *testing.T) {
	s := newSystem()
	s.worn = 1
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("replace").Why, "half done: replacement of openbao-server-1")
		h.Answer(protocol.Retry)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "delete openbao-server-1", "openbao-server-1 proven", "delete openbao-server-2"}, s.log[:4])
}

func TestThePlanMayAskAPersonBeforeLeadershipMoves(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		w := h.Waits("step-down")
		require.Equal(t, protocol.WaitApproval, w.Kind)
		require.Contains(t, w.Found, "openbao-server-0, still of the old template, is active")
		require.Equal(t, "openbao-server-2 proven", s.log[len(s.log)-1])
		h.Answer(protocol.Approve)
	})
	in := replacement()
	in.ApproveStepDown = true
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}

func TestAMemberIsReplacedOnlyWhereItsLimitsFitTheWindow(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	in := replacement()
	in.Windows = []window.Spec{{Opens: "0 * * * *", Duration: window.Duration(50 * time.Minute)}}
	h.SetStartTime(time.Date(2026, 1, 1, 0, 45, 0, 0, time.UTC)) // five minutes are left, and a replacement may take thirteen
	h.At(5*time.Minute, func() {
		w := h.Waits("replace")
		require.Equal(t, protocol.WaitWindow, w.Kind)
		require.Equal(t, []string{"lock"}, s.log)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}

func TestAPauseHoldsBetweenTwoMembers(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	s.after = func() { h.At(0, func() { h.Answer(protocol.Pause) }) }
	h.At(time.Hour, func() {
		require.Equal(t, protocol.PhasePaused, h.Status().Phase)
		require.Equal(t, "openbao-server-1 proven", s.log[len(s.log)-1], "a member is never left half done")
		h.Answer(protocol.Resume)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}

func TestAChangedTemplateIsNoticedAtTheEnd(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	surveys := 0
	h.OnActivity(acts.SurveyActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.SurveyRequest) (acts.SurveyResult, error) {
		if surveys++; surveys == 7 { // one at the start, one before each of four steps, one that finds nothing stale
			s.do(func() { s.view.Set.Revision = "newer" })
		}
		return s.survey(ctx, r)
	})
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("verify").Found, "N168: OpenBao: expected no stale member, found that the next step would be the replacement of openbao-server-0")
		h.Answer(protocol.Abort)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
}

func TestAnotherRunOnTheReleaseClosesTheRunAsLocked(t *testing.T) {
	h := newHarness(t, &system{locked: true})
	h.ExecuteWorkflow(protocol.OpenBaoReplace, replacement())
	var app *temporal.ApplicationError
	require.ErrorAs(t, h.GetWorkflowError(), &app)
	require.Equal(t, protocol.Locked, app.Type())
}

func TestAChildRunLeavesTheLeaseToItsParentAndReports(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	reports := 0
	h.OnSignalExternalWorkflow(mock.Anything, "parent", "", protocol.SignalReport, mock.Anything).Return(func(string, string, string, string, any) error {
		reports++
		return nil
	})
	in := replacement()
	in.Target.UID, in.Holder, in.Parent = "uid-prod", "me", &protocol.Parent{WorkflowID: "parent", Prefix: "openbao"} // the parent's name in the Lease
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, in, &out)
	require.Equal(t, "delete openbao-server-1", s.log[0])
	require.NotContains(t, s.log, "unlock")
	require.Positive(t, reports)
}
