package cassandra

import (
	"context"
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

// surveys changes what each survey finds.
func surveys(h *workflowtest.Run, s *system, change func(*acts.SurveyResult)) {
	h.OnActivity(acts.SurveyActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.SurveyRequest) (acts.SurveyResult, error) {
		out, err := s.survey(ctx, r)
		s.do(func() { change(&out) })
		return out, err
	})
}

func TestVolumesThatAnEarlierScaleDownHasLeftParkBeforeAnythingIsChanged(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	old := []string{"data-cassandra-1"}
	surveys(h, s, func(out *acts.SurveyResult) { out.OldVolumes = old })
	h.At(time.Hour, func() {
		w := h.Waits("survey")
		require.Contains(t, w.Found, "found data-cassandra-1")
		require.Contains(t, w.Why, "tokens of before")
		s.do(func() {
			require.Equal(t, []string{"lock", "survey"}, s.log)
			old = nil
		})
		h.Answer(protocol.Retry)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}

func TestEveryChangeCarriesTheLeaseOfTheRun(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	var place acts.Place
	h.OnActivity(acts.ScaleActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.ScaleRequest) (acts.ScaleResult, error) {
		place = r.Place
		return s.scale(ctx, r)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, "me", place.Holder)
	require.Equal(t, "cassandra", place.Release)
}

func TestQuorumFirstTellsThatItAddsNoZoneRule(t *testing.T) {
	in := expansion()
	in.Strategy = QuorumFirst
	var out ExpandResult
	newHarness(t, newSystem(1)).Run(protocol.CassandraExpand, in, &out)
	require.Contains(t, strings.Join(out.Warnings, "\n"), "N133: strategy quorumFirst")

	s := newSystem(1)
	h := newHarness(t, s)
	in.Mode = acts.ModeEnforced
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("survey").Found, "N133: pod template of StatefulSet cassandra")
		s.do(func() { require.Equal(t, []string{"lock", "survey"}, s.log) })
		h.Answer(protocol.Abort)
	})
	h.Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)

	s = newSystem(1)
	h = newHarness(t, s)
	surveys(h, s, func(out *acts.SurveyResult) { out.Ruled = true })
	h.Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome, "the chart has brought the rule")
	require.NotContains(t, strings.Join(out.Warnings, "\n"), "N133")
}

func TestMembersInZonesThatNobodyKnowsAreNotCalledApart(t *testing.T) {
	unknown := []finding.Finding{{Row: "N138", Object: "zones of the members of Cassandra", Found: "none for cassandra-2"}}
	for _, mode := range []string{acts.ModePreferred, acts.ModeEnforced} {
		s := newSystem(1)
		h := newHarness(t, s)
		surveys(h, s, func(out *acts.SurveyResult) { out.Unzoned = unknown })
		asked := false
		if mode == acts.ModeEnforced {
			h.At(time.Hour, func() {
				require.Contains(t, h.Waits("zones").Found, "none for cassandra-2")
				asked = true
				h.Answer(protocol.Abort)
			})
		}
		in := expansion()
		in.Mode = mode
		var out ExpandResult
		h.Run(protocol.CassandraExpand, in, &out)
		require.Equal(t, mode == acts.ModeEnforced, asked)
		if mode == acts.ModePreferred {
			require.Equal(t, protocol.OutcomeDone, out.Outcome)
			require.Contains(t, strings.Join(out.Warnings, "\n"), "none for cassandra-2")
		}
	}
}
