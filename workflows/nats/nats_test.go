package nats

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"

	acts "github.com/refit-run/refit/activities/nats"

	"github.com/refit-run/refit/activities/secret"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

func TestADrainedSystemIsProvenUnderTheLease(t *testing.T) {
	s := &system{}
	var out DrainResult
	newHarness(t, s).Run(protocol.NATSDrain, DrainInput{Site: site()}, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "drain nats-system least 1 for 30m0s", "unlock"}, s.log)
	require.True(t, out.Verdict.OK)
	require.Len(t, out.Artifacts, 2, "the look, and the receipt")
}

func TestMessagesThatNeverDrainParkWithTheirStreamAndEachAttemptIsFresh(t *testing.T) {
	s := &system{messages: 7}
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		w := h.Waits("drain")
		require.Equal(t, "N127: stream NVCF/requests: expected 0 messages, found 7 messages", w.Found)
		require.Equal(t, []string{protocol.Retry, protocol.Abort}, w.Answers, "there is no way around the proof, and none that discards")
		s.do(func() { s.messages, s.down = 0, "nats-1" })
		h.Answer(protocol.Retry)
	})
	h.At(2*time.Hour, func() {
		require.Contains(t, h.Waits("drain").Found, "NATS server nats-1", "what was drained an hour ago proves nothing now")
		s.do(func() { s.down = "" })
		h.Answer(protocol.Retry)
	})
	var out DrainResult
	h.Run(protocol.NATSDrain, DrainInput{Site: site()}, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	var kept []string
	for _, a := range out.Artifacts {
		kept = append(kept, a.Name)
	}
	require.Equal(t, []string{"look-1.json", "look-2.json", "look-3.json", "receipt.json"}, kept)
	require.Equal(t, []int{0, 1, 0}, s.held, "what an attempt has seen tells the next whether it was worked off or lost")
}

func TestADrainThatAsksWaitsForAPersonAndRecordsWhoConfirmed(t *testing.T) {
	s := &system{}
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Equal(t, protocol.WaitApproval, h.Waits("drain").Kind)
		require.Equal(t, []string{"lock"}, s.log, "no server is asked before")
		h.Answer(protocol.Approve)
	})
	var out DrainResult
	h.Run(protocol.NATSDrain, DrainInput{Site: site(), AskCallers: true}, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	drain := out.Stages[1]
	require.Equal(t, "drain", drain.Name)
	require.Equal(t, "ann", drain.Answers[0].By)
}

func TestAnAbortedDrainGivesTheLeaseBack(t *testing.T) {
	s := &system{messages: 7}
	h := newHarness(t, s)
	h.At(time.Hour, func() { h.Answer(protocol.Abort) })
	var out DrainResult
	h.Run(protocol.NATSDrain, DrainInput{Site: site()}, &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.EqualValues(t, 7, out.Verdict.Messages)
	require.Equal(t, "unlock", s.log[len(s.log)-1])
}

func TestAnotherRunOnTheReleaseClosesTheRunAsLocked(t *testing.T) {
	h := newHarness(t, &system{locked: true})
	h.ExecuteWorkflow(protocol.NATSDrain, DrainInput{Site: site()})
	var app *temporal.ApplicationError
	require.ErrorAs(t, h.GetWorkflowError(), &app)
	require.Equal(t, protocol.Locked, app.Type())
}

func TestAChildRunLeavesTheLeaseToItsParentAndReports(t *testing.T) {
	s := &system{}
	h := newHarness(t, s)
	reports := 0
	h.OnSignalExternalWorkflow(mock.Anything, "parent", "", protocol.SignalReport, mock.Anything).Return(func(string, string, string, string, any) error {
		reports++
		return nil
	})
	in := DrainInput{Site: site()}
	in.Target.UID, in.Holder, in.Parent = "uid-prod", "me", &protocol.Parent{WorkflowID: "parent", Prefix: "nats.drain"}
	var out DrainResult
	h.Run(protocol.NATSDrain, in, &out)
	require.Equal(t, []string{"drain nats-system least 1 for 30m0s"}, s.log)
	require.Positive(t, reports)
}

func replicated() *system {
	return &system{names: []string{"requests", "events", "icms"}, replicas: map[string]int{"requests": 1, "events": 1, "icms": 3}}
}

func replicas() ReplicasInput {
	return ReplicasInput{Site: site(), Logins: []acts.Login{{Account: "NVCF", NKey: &secret.Reference{Secret: "nats-nkeys", Key: "user.key"}}}}
}

func TestStreamsAreRaisedOneByOneAndAllAreProven(t *testing.T) {
	s := replicated()
	var out ReplicasResult
	newHarness(t, s).Run(protocol.NATSReplicas, replicas(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "list", "raise requests", "raise events", "settle 3 for 5m10s", "unlock"}, s.log)
	require.Len(t, out.Raised, 2)
	require.Equal(t, 1, out.Raised[0].Replicas, "as it was before")
	require.Equal(t, protocol.Progress{Done: 2, Total: 2}, out.Progress)
}

func TestAPlanNamesTheStreamsAndRaisesNone(t *testing.T) {
	s := replicated()
	in := replicas()
	in.PlanOnly = true
	var out ReplicasResult
	newHarness(t, s).Run(protocol.NATSReplicas, in, &out)
	require.Equal(t, protocol.OutcomePlanned, out.Outcome)
	require.Equal(t, []string{"lock", "list", "unlock"}, s.log)
	require.Equal(t, []protocol.PlannedChange{
		{Action: "raise from 1 to 3 replicas", Object: "stream NVCF/requests"}, {Action: "raise from 1 to 3 replicas", Object: "stream NVCF/events"},
	}, out.Plan.Changes)
}

func TestASecondRunProvesAndChangesNothing(t *testing.T) {
	s := replicated()
	s.replicas = map[string]int{"requests": 3, "events": 3, "icms": 3}
	var out ReplicasResult
	newHarness(t, s).Run(protocol.NATSReplicas, replicas(), &out)
	require.Equal(t, protocol.OutcomeNoChange, out.Outcome)
	require.Equal(t, []string{"lock", "list", "settle 3 for 5m10s", "unlock"}, s.log, "an earlier run may have ended before the proof")
}

func TestAServerDownDuringTheRaiseParksAndTheRaiseGoesOnWhereItWas(t *testing.T) {
	s := replicated()
	h := newHarness(t, s)
	in := replicas()
	in.Windows = []window.Spec{{Opens: "0 * * * *", Duration: window.Duration(50 * time.Minute)}}
	h.SetStartTime(time.Date(2026, 1, 1, 0, 55, 0, 0, time.UTC))
	h.At(time.Minute, func() {
		require.Equal(t, protocol.WaitWindow, h.Waits("raise").Kind, "nothing is changed outside a window")
		s.do(func() { s.down = "nats-2" })
	})
	h.At(10*time.Minute, func() {
		w := h.Waits("raise")
		require.Contains(t, w.Found, "NATS server nats-2")
		s.do(func() { s.down, s.flapping = "", true })
		h.Answer(protocol.Retry)
	})
	h.At(20*time.Minute, func() {
		w := h.Waits("settle")
		require.Contains(t, w.Found, "found for 1.2s")
		require.NotContains(t, w.Answers, protocol.Skip)
		s.do(func() { s.flapping = false })
		h.Answer(protocol.Retry)
	})
	var out ReplicasResult
	h.Run(protocol.NATSReplicas, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "list", "raise requests refused", "list", "raise requests", "raise events", "settle 3 for 5m10s", "list", "settle 3 for 5m10s", "unlock"}, s.log)
}

func TestAStreamThatWasRaisedAndNotProvenIsInTheReceiptOfAnAbort(t *testing.T) {
	s := replicated()
	s.behind = "events"
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("raise").Found, "it is behind")
		h.Answer(protocol.Abort)
	})
	var out ReplicasResult
	h.Run(protocol.NATSReplicas, replicas(), &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.Len(t, out.Raised, 2)
	require.Equal(t, "events", out.Raised[1].Name)
}

func TestAStreamWhoseRaiseHasNoResultIsInTheReceiptOfAnAbort(t *testing.T) {
	s := replicated()
	h := newHarness(t, s)
	s.interrupted, s.aborted = "events", func() { h.Answer(protocol.Abort) }
	var out ReplicasResult
	h.Run(protocol.NATSReplicas, replicas(), &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.Len(t, out.Raised, 1)
	require.Contains(t, out.Warnings, "stream NVCF/events was being raised when the run ended: it may have three replicas")

	// A later try has its result: then there is nothing to warn of.
	s = replicated()
	h = newHarness(t, s)
	s.interrupted, s.aborted = "events", func() {}
	h.At(time.Hour, func() {
		h.Waits("raise")
		s.do(func() { s.interrupted, s.replicas["events"] = "", 1 })
		h.Answer(protocol.Retry)
	})
	h.Run(protocol.NATSReplicas, replicas(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Len(t, out.Raised, 2)
	require.NotContains(t, strings.Join(out.Warnings, "\n"), "NVCF/events")
}

func TestAStreamThatARestartEmptiesBeforeItsRaiseIsToldAndRaisedAsItIs(t *testing.T) {
	s := replicated()
	held := acts.State{Messages: 4, FirstSeq: 1, LastSeq: 4}
	s.states = map[string]acts.State{"requests": {FirstSeq: 8, LastSeq: 7}, "events": held, "icms": held}
	h := newHarness(t, s)
	in := replicas()
	in.Windows = []window.Spec{{Opens: "0 * * * *", Duration: window.Duration(50 * time.Minute)}}
	h.SetStartTime(time.Date(2026, 1, 1, 0, 55, 0, 0, time.UTC))
	h.At(time.Minute, func() {
		require.Equal(t, protocol.WaitWindow, h.Waits("raise").Kind)
		s.do(func() { s.states["requests"], s.states["events"] = acts.State{}, acts.State{} })
	})
	h.At(10*time.Minute, func() {
		require.Contains(t, h.Waits("raise").Found, "messages are gone")
		h.Answer(protocol.Retry)
	})
	var out ReplicasResult
	h.Run(protocol.NATSReplicas, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Len(t, out.Raised, 2)
	told := strings.Join(out.Warnings, "\n")
	require.Contains(t, told, "stream NVCF/events: expected nothing lost of 4 messages")
	require.NotContains(t, told, "NVCF/requests", "nothing was in it")
}

func TestANameInLeaveThatNoStreamHasParksBeforeAnythingIsRaised(t *testing.T) {
	s := replicated()
	s.unknown = []string{"NVCF/typo"}
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Equal(t, "N189: stream NVCF/typo in leave: expected a stream of that name, found none on any server", h.Waits("list").Found)
		h.Answer(protocol.Abort)
	})
	var out ReplicasResult
	in := replicas()
	in.Leave = s.unknown
	h.Run(protocol.NATSReplicas, in, &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.NotContains(t, s.log, "raise requests")
}

func TestAStreamThatItsServiceDeletesMeanwhileIsReportedAndNotWaitedForForEver(t *testing.T) {
	for _, stage := range []string{"raise", "settle"} {
		s := replicated()
		h := newHarness(t, s)
		if stage == "raise" {
			s.behind = "requests"
		} else {
			s.flapping = true
		}
		h.At(time.Hour, func() {
			h.Waits(stage)
			s.do(func() { s.names, s.behind, s.flapping = []string{"events", "icms"}, "", false })
			h.Answer(protocol.Retry)
		})
		var out ReplicasResult
		h.Run(protocol.NATSReplicas, replicas(), &out)
		require.Equal(t, protocol.OutcomeDone, out.Outcome)
		require.Equal(t, "settle 2 for 5m10s", s.log[len(s.log)-2])
		require.Contains(t, out.Warnings[len(out.Warnings)-1], "stream NVCF/requests was deleted, or made anew")
	}
}

func TestAMissingLoginParksBeforeAnythingIsRaised(t *testing.T) {
	s := replicated()
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("list").Found, "N190: stream NVCF/requests: expected a login into account NVCF")
		h.Answer(protocol.Abort)
	})
	in := replicas()
	in.Logins = nil
	var out ReplicasResult
	h.Run(protocol.NATSReplicas, in, &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.Empty(t, out.Raised)
	require.Equal(t, 1, s.replicas["requests"])
}

func TestARollIsFramedByASavedListAndItsComparison(t *testing.T) {
	s := replicated()
	s.messages = 2
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("save").Found, "2 messages")
		require.NotContains(t, h.Waits("save").Answers, protocol.Skip)
		s.do(func() { s.messages = 0 })
		h.Answer(protocol.Retry)
	})
	var before RollResult
	h.Run(protocol.NATSRoll, RollInput{Site: site(), Phase: Before}, &before)
	require.Equal(t, "file:///streams.json", before.Saved.URL)

	s.log, s.emptied, s.lost = nil, []string{"NVCF/requests"}, []string{"events"}
	h = newHarness(t, s)
	h.At(time.Hour, func() {
		w := h.Waits("compare")
		require.Equal(t, "stream NVCF/events: expected as before the roll, found no server lists it", w.Found)
		require.Contains(t, w.Answers, protocol.Skip, "what is lost is lost: a person decides")
		s.do(func() { s.lost = nil })
		h.Answer(protocol.Retry)
	})
	var after RollResult
	h.Run(protocol.NATSRoll, RollInput{Site: site(), Phase: After, Saved: before.Saved.URL}, &after)
	require.Equal(t, protocol.OutcomeDone, after.Outcome)
	require.Equal(t, []string{"lock", "compare with file:///streams.json", "compare with file:///streams.json", "unlock"}, s.log)
	require.Equal(t, []string{"NVCF/requests"}, after.Emptied)
	require.Contains(t, after.Warnings[len(after.Warnings)-1], "NVCF/requests came back empty: it has one copy, in memory. It was empty when the list was saved; "+
		"what was published from then on until its server restarted is lost")
}

func TestBadInputIsRefusedWithThePathOfEachFault(t *testing.T) {
	child := site()
	child.Holder, child.Parent = "me", &protocol.Parent{WorkflowID: "p"}
	for want, in := range map[string]interface {
		Validate() []plan.Problem
	}{
		"target.cluster is missing":                   DrainInput{},
		"target.uid is missing":                       DrainInput{Site: child},
		"limit is -1m0s":                              DrainInput{Site: site(), Limit: window.Duration(-time.Minute)},
		"servers.monitorPort is 70000":                DrainInput{Site: Site{Site: site().Site, Servers: acts.Servers{MonitorPort: 70000}}},
		`phase is ""`:                                 RollInput{Site: site()},
		"saved is missing":                            RollInput{Site: site(), Phase: After},
		"saved is set for the phase before":           RollInput{Site: site(), Phase: Before, Saved: "x"},
		"logins[0].account is missing":                ReplicasInput{Site: site(), Logins: []acts.Login{{NKey: &secret.Reference{File: "f"}}}},
		`logins[1].account is "A" a second time`:      ReplicasInput{Site: site(), Logins: []acts.Login{login("A"), login("A")}},
		"logins[0] names nkey and creds, or neither":  ReplicasInput{Site: site(), Logins: []acts.Login{{Account: "A"}}},
		"logins[0].nkey names 2 places":               ReplicasInput{Site: site(), Logins: []acts.Login{{Account: "A", NKey: &secret.Reference{File: "f", Variable: "V"}}}},
		"logins[0].creds.key is missing":              ReplicasInput{Site: site(), Logins: []acts.Login{{Account: "A", Creds: &secret.Reference{Secret: "s"}}}},
		"logins[0].creds.key is set without secret":   ReplicasInput{Site: site(), Logins: []acts.Login{{Account: "A", Creds: &secret.Reference{File: "f", Key: "k"}}}},
		`leave[0] is "requests": want ACCOUNT/STREAM`: ReplicasInput{Site: site(), Leave: []string{"requests"}},
		"windows[0]":                                  ReplicasInput{Site: site(), Windows: []window.Spec{{Opens: "never"}}},
	} {
		ps := in.Validate()
		require.Len(t, ps, 1, want)
		require.Contains(t, ps[0].String(), want)
	}
	require.Empty(t, replicas().Validate())

	h := newHarness(t, &system{})
	h.ExecuteWorkflow(protocol.NATSRoll, RollInput{Site: site()})
	var app *temporal.ApplicationError
	require.ErrorAs(t, h.GetWorkflowError(), &app)
	require.Equal(t, protocol.BadInput, app.Type())
}

func login(account string) acts.Login {
	return acts.Login{Account: account, Creds: &secret.Reference{File: "f"}}
}
