package openbao

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"

	acts "github.com/refit-run/refit/activities/openbao"

	"github.com/refit-run/refit/workflows/protocol"
)

func TestAnAbortBetweenTwoMembersSaysWhichRunWhat(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	s.after = func() { h.At(0, func() { h.Answer(protocol.Pause) }) }
	h.At(time.Hour, func() { h.Answer(protocol.Abort) })
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.Equal(t, "2.6.2 (nvcf-openbao:2.6.2-nv-1.3.4)", out.Before["openbao-server-1"])
	require.Equal(t, "2.6.3 (nvcf-openbao:2.6.3-nv-1.3.7)", out.After["openbao-server-1"])
	require.Equal(t, "2.6.2 (nvcf-openbao:2.6.2-nv-1.3.4)", out.After["openbao-server-0"])
	require.Equal(t, []string{"a cluster of two templates: openbao-server-1 of the present one, openbao-server-0, openbao-server-2 of an older one; start again to finish"}, out.LeftBehind)
}

func TestAnAbortAfterTheStepDownNamesTheNewLeader(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	h.OnActivity(acts.StepDownActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.StepDownRequest) (acts.StepDownResult, error) {
		h.At(0, func() { h.Answer(protocol.Abort) })
		return s.stepDown(ctx, r)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.Equal(t, "openbao-server-1", out.Active)
	require.Len(t, out.LeftBehind, 1)
	require.Contains(t, out.LeftBehind[0], "openbao-server-0 of an older one")
}

func TestAnAbortWhileAMemberIsSealedShowsItAsItIs(t *testing.T) {
	s := newSystem()
	s.after = func() { s.sealed = "openbao-server-1" }
	h := newHarness(t, s)
	h.At(time.Hour, func() { h.Answer(protocol.Abort) })
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, "2.6.3 (nvcf-openbao:2.6.3-nv-1.3.7)", out.After["openbao-server-1"])
}

func TestTheDecisionForThisProcedureIsRecordedOrItsLackIsWarnedOf(t *testing.T) {
	in := replacement()
	in.Acknowledge = []string{AcknowledgeStandard}
	var out ReplaceResult
	newHarness(t, newSystem()).Run(protocol.OpenBaoReplace, in, &out)
	require.Equal(t, []string{"N159"}, out.Acknowledged)
	require.NotContains(t, out.Warnings, standard)

	newHarness(t, newSystem()).Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Contains(t, out.Warnings, standard)
}

func TestTheSnapshotThatThePlanNamesIsInTheReceiptOrItsLackIsWarnedOf(t *testing.T) {
	in := replacement()
	in.Snapshot = "file:///store/openbao.snap"
	var out ReplaceResult
	newHarness(t, newSystem()).Run(protocol.OpenBaoReplace, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.NotContains(t, out.Warnings, unsaved)
	var urls []string
	for _, a := range out.Artifacts {
		urls = append(urls, a.URL)
	}
	require.Contains(t, urls, in.Snapshot)

	newHarness(t, newSystem()).Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Contains(t, out.Warnings, unsaved)
}
