package cassandra

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/workflows/internal/workflowtest"
	"github.com/refit-run/refit/workflows/protocol"
)

// scales has a scale meet harm after it is done, the first time.
func scales(h *workflowtest.Run, s *system, harm error) {
	h.OnActivity(acts.ScaleActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.ScaleRequest) (acts.ScaleResult, error) {
		out, err := s.scale(ctx, r)
		if harm != nil {
			err, harm = harm, nil
		}
		return out, err
	})
}

// templates has a patch of the pod template meet harm after it is made, the
// first time.
func templates(h *workflowtest.Run, s *system, harm error) {
	h.OnActivity(acts.TemplateActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.TemplateRequest) (acts.TemplateResult, error) {
		out, err := s.template(ctx, r)
		if harm != nil {
			err, harm = harm, nil
		}
		return out, err
	})
}

var (
	lostReply = finding.Finding{Object: "worker", Found: "it died with the reply"}.Error(finding.Stop)
	noRollout = finding.Finding{Row: "N135", Object: "StatefulSet/cassandra-system/cassandra", Expected: "rolled out within 10m0s", Found: "cassandra-0 is not replaced yet"}.Error(finding.Stop)
)

func TestAScaleWhoseReplyIsLostIsNotWaitedForWithOneMember(t *testing.T) {
	for _, strategy := range []string{Bootstrap, QuorumFirst, Guide} {
		s := newSystem(1)
		h := newHarness(t, s)
		scales(h, s, lostReply)
		h.At(time.Hour, func() {
			require.Contains(t, h.Waits("expand").Found, "it died with the reply", strategy)
			s.do(func() { s.log = nil })
			h.Answer(protocol.Retry)
		})
		in := expansion()
		in.Strategy, in.AcknowledgeSeeds = strategy, strategy == Guide
		var out ExpandResult
		h.Run(protocol.CassandraExpand, in, &out)
		require.Equal(t, protocol.OutcomeDone, out.Outcome, strategy)
		require.Equal(t, []string{"survey", "ring 3"}, s.log[:2], strategy)
		require.NotContains(t, s.log, "scale uid-sts", strategy)
		require.Equal(t, strategy == Bootstrap, slices.Contains(s.log, "raise [system_auth] to 2"), "%s: members of this run's own bootstrap hold their rows", strategy)
	}
}

// Whoever applies the chart again puts the seeds back, and may scale with it: a
// seed joins without its rows.
func TestMembersThatJoinedWithTheSeedsPutBackAreNotTakenForBootstrapped(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	scales(h, s, lostReply)
	s.absentServices = []string{"nvcf/misspelt"}
	h.At(time.Hour, func() {
		h.Waits("expand")
		s.do(func() { s.log, s.seeds = nil, "cassandra-0.h,cassandra-1.h" })
		h.Answer(protocol.Retry)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, "cassandra-0.h", s.scaledWith, "the scale itself is refused with other seeds")
	require.Contains(t, strings.Join(out.Warnings, "\n"), "N146: nvcf/misspelt is not there")
	require.Equal(t, []string{"survey", "ring 3"}, s.log[:2])
	require.NotContains(t, s.log, "raise [system_auth] to 2", "the two copies could be the two empty ones")
}

func TestAHandThatScalesWhileTheRunIsParkedIsFollowed(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	templates(h, s, noRollout)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("expand").Found, "N135")
		s.do(func() { s.log, s.members = nil, 3 })
		h.Answer(protocol.Retry)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"survey", "ring 3"}, s.log[:2])
	require.NotContains(t, s.log, "raise [system_auth] to 2", "nothing proves that what has joined holds rows")
	require.Contains(t, strings.Join(s.log, "\n"), "raise [system_auth")
}

func TestAPatchWhoseReplyIsLostIsMadeOnceMoreAndTheRunGoesOn(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	templates(h, s, lostReply)
	h.At(time.Hour, func() {
		h.Waits("expand")
		s.do(func() { s.log = nil })
		h.Answer(protocol.Retry)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"survey", "template rule=true narrow=true uid-sts", "ring 1", "scale uid-sts", "ring 3"}, s.log[:5])
}

func TestAPatchThatDidNotRollOutIsToldWhereTheRunIsAborted(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	templates(h, s, noRollout)
	h.At(time.Hour, func() {
		h.Waits("expand")
		h.Answer(protocol.Abort)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	for _, told := range [][]string{out.Warnings, out.LeftBehind} {
		require.Contains(t, strings.Join(told, "\n"), "CASSANDRA_SEEDS of StatefulSet cassandra name cassandra-0.h alone")
		require.Contains(t, strings.Join(told, "\n"), "the rule that spreads members over zones")
	}
	require.NotContains(t, strings.Join(out.Warnings, "\n"), "one replica", "nothing was scaled")
}

func TestWhoeverScalesIsToldNotToApplyTheFormerStack(t *testing.T) {
	for _, members := range []int{1, 3} {
		var out ExpandResult
		newHarness(t, newSystem(members)).Run(protocol.CassandraExpand, expansion(), &out)
		require.Equal(t, protocol.OutcomeDone, out.Outcome)
		require.Contains(t, strings.Join(out.Warnings, "\n"), "apply no stack any more that gives Cassandra one replica")
	}
}

func TestAPlanOfAnExpansionThatAnotherRunHasBegunNamesEveryKeyspace(t *testing.T) {
	in := expansion()
	in.PlanOnly, in.Keyspaces = true, []string{"nvcf_api", "sis_api"}
	var out ExpandResult
	newHarness(t, newSystem(3)).Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomePlanned, out.Outcome)
	var objects []string
	for _, c := range out.Plan.Changes {
		objects = append(objects, c.Object)
	}
	require.Equal(t, []string{"keyspace system_auth", "keyspace nvcf_api", "keyspace sis_api", "every other keyspace that is no member's own"}, objects)
}

func TestAPlanLeavesOutARuleThatTheTemplateHas(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	surveys(h, s, func(out *acts.SurveyResult) { out.Ruled, out.NewRule = true, false })
	in := expansion()
	in.PlanOnly = true
	var out ExpandResult
	h.Run(protocol.CassandraExpand, in, &out)
	for _, c := range out.Plan.Changes {
		require.NotContains(t, c.Action, "rule")
	}
}
