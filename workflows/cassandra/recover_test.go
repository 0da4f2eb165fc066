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
	"github.com/refit-run/refit/workflows/window"
)

func TestALockedOutAdministratorComesBackByApprovalOnly(t *testing.T) {
	s := newSystem(1)
	s.lockOut = true
	in := expansion()
	in.Strategy, in.AcknowledgeSeeds = Guide, true
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		w := h.Waits("recover")
		require.Equal(t, protocol.WaitApproval, w.Kind)
		require.Contains(t, w.Found, "locked out")
		require.Contains(t, w.Why, "decommission --force")
		require.NotContains(t, w.Answers, protocol.Skip)
		s.do(func() { require.NotContains(t, s.log, "decommission cassandra-2") })
		h.SignalWorkflow(protocol.Approve, protocol.Answer{Stage: "recover", By: "ann"})
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeRolledBack, out.Outcome)
	require.True(t, out.Recovered)
	require.Equal(t, []string{
		"cassandra-2 has left the ring; its pod and its volume stay", "cassandra-1 has left the ring; its pod and its volume stay",
		"StatefulSet cassandra asks for 3 members: once cassandra-2 and cassandra-1 have left, scale it to 1 and delete their volumes by hand before the next try, or their pods can't join again",
		"this run adds the rule that spreads members over zones to the pod template of StatefulSet cassandra",
	}, out.LeftBehind, "the expansion is taken back, not half done")
	require.Equal(t, []string{"logins ", "decommission cassandra-2", "decommission cassandra-1", "logins cassandra-0", "unlock"}, s.log[len(s.log)-5:])
	require.NotContains(t, s.log, "raise [system_auth] to 3")
}

// wayBack is a run of the guide's order that is locked out and has approved the
// way back; it meets what decommission says.
func wayBack(t *testing.T, s *system, decommission func(r acts.DecommissionRequest) error) (*workflowtest.Run, ExpandInput) {
	s.lockOut = true
	in := expansion()
	in.Strategy, in.AcknowledgeSeeds = Guide, true
	h := newHarness(t, s)
	h.OnActivity(acts.DecommissionActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.DecommissionRequest) (acts.DecommissionResult, error) {
		if err := decommission(r); err != nil {
			return acts.DecommissionResult{}, err
		}
		return s.decommission(ctx, r)
	})
	h.At(time.Hour, func() { h.SignalWorkflow(protocol.Approve, protocol.Answer{Stage: "recover", By: "ann"}) })
	return h, in
}

func TestAWayBackThatIsAbortedSaysWhoHasLeftAndHowToEndIt(t *testing.T) {
	for fails, want := range map[string][]string{
		"cassandra-1": {"cassandra-2 has left the ring", "cassandra-1 was told to leave the ring, and nothing proves that it has"},
		"cassandra-2": {"cassandra-2 was told to leave the ring", "cassandra-1 still holds ranges, and rows in them are hidden: once cassandra-2 has left, run nodetool decommission --force in its pod"},
	} {
		s := newSystem(1)
		h, in := wayBack(t, s, func(r acts.DecommissionRequest) error {
			if r.Pod == fails {
				return finding.Finding{Object: "nodetool decommission --force on " + r.Pod, Found: "it is still in the ring"}.Error(finding.Stop)
			}
			return nil
		})
		h.At(2*time.Hour, func() { h.Answer(protocol.Abort) })
		var out ExpandResult
		h.Run(protocol.CassandraExpand, in, &out)
		require.Equal(t, protocol.OutcomeAborted, out.Outcome)
		left := strings.Join(out.LeftBehind, "\n")
		for _, line := range append(want, "scale it to 1", "nothing proves that cassandra-0 lets cassandra in", "the rule that spreads members") {
			require.Contains(t, left, line)
		}
	}
}

func TestADecommissionWhoseReplyIsLostIsPassedOver(t *testing.T) {
	s := newSystem(1)
	lost := false
	h, in := wayBack(t, s, func(r acts.DecommissionRequest) error {
		if r.Pod != "cassandra-2" || lost {
			return nil
		}
		lost = true
		s.do(func() { s.left = append(s.left, r.Pod) })
		return finding.Finding{Object: "worker", Found: "it died"}.Error(finding.Stop)
	})
	h.At(2*time.Hour, func() { h.Answer(protocol.Retry) })
	var out ExpandResult
	h.Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeRolledBack, out.Outcome)
	require.Equal(t, []string{"cassandra-2", "cassandra-1"}, s.left)
	require.Contains(t, out.LeftBehind, "cassandra-2 has left the ring; its pod and its volume stay")
}

func TestNobodyIsTakenOutOnceTheRolesHaveMoreCopies(t *testing.T) {
	for name, c := range map[string]struct {
		members, factor int
		strategy        string
		// refusedAt is with how many copies all refuse.
		refusedAt int
	}{
		"raised and repaired by this run": {1, 1, Bootstrap, 3},
		"raised before the scale":         {1, 1, QuorumFirst, 3},
		"raised half way by another run":  {3, 2, Bootstrap, 2},
	} {
		s := newSystem(c.members)
		s.factors[acts.AuthKeyspace] = c.factor
		out := true
		s.refuse = func() bool { return out && s.members == 3 && s.factors[acts.AuthKeyspace] == c.refusedAt }
		in := expansion()
		in.Strategy = c.strategy
		h := newHarness(t, s)
		h.At(time.Hour, func() {
			w := h.Waits("expand")
			require.Equal(t, protocol.WaitParked, w.Kind, name)
			require.Contains(t, w.Found, "more than one copy", name)
			require.Contains(t, w.Helps, "repairs system_auth in full on every member", name)
			s.do(func() {
				s.log = nil
				s.repaired = func() { out = false }
			})
			h.Answer(protocol.Retry)
		})
		var result ExpandResult
		h.Run(protocol.CassandraExpand, in, &result)
		require.Equal(t, protocol.OutcomeDone, result.Outcome, name)
		require.Equal(t, "ring 3", s.log[0], name)
		require.Equal(t, []string{"repair [system_auth] on cassandra-0", "repair [system_auth] on cassandra-1", "repair [system_auth] on cassandra-2"}, s.log[1:4], name)
		require.NotContains(t, s.log, "decommission cassandra-2", name)
	}
}

func TestApplicationKeyspacesWithMoreCopiesForbidTheWayBackToo(t *testing.T) {
	s := newSystem(3)
	s.factors["nvcf_api"] = 3
	s.lockOut = true
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("expand").Found, "keyspace nvcf_api NetworkTopologyStrategy {ncp=3} has more than one copy")
		h.Answer(protocol.Abort)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.NotContains(t, s.log, "decommission cassandra-2")
}

func TestALoginThatIsMendedBeforeTheApprovalLetsTheExpansionGoOn(t *testing.T) {
	s := newSystem(1)
	s.lockOut = true
	in := expansion()
	in.Strategy, in.AcknowledgeSeeds = Guide, true
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Equal(t, protocol.WaitApproval, h.Waits("recover").Kind)
		s.do(func() { s.lockOut = false })
		h.SignalWorkflow(protocol.Approve, protocol.Answer{Stage: "recover", By: "ann"})
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.NotContains(t, s.log, "decommission cassandra-2")
	require.Empty(t, out.LeftBehind)
}

func TestNeitherTheApprovedWayBackNorAHalfDoneSectionWaitsForAWindow(t *testing.T) {
	start := time.Date(2026, 1, 5, 1, 0, 0, 0, time.UTC)
	windows := []window.Spec{{Opens: "0 1 * * *", Duration: window.Duration(3 * time.Hour), TimeZone: "UTC"}}

	s := newSystem(1)
	s.lockOut = true
	in := expansion()
	in.Strategy, in.AcknowledgeSeeds, in.Windows = Guide, true, windows
	h := newHarness(t, s)
	h.SetStartTime(start)
	h.At(5*time.Hour, func() { h.SignalWorkflow(protocol.Approve, protocol.Answer{Stage: "recover", By: "ann"}) })
	var out ExpandResult
	h.Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeRolledBack, out.Outcome)
	require.Less(t, out.Ended.Sub(start), 6*time.Hour)

	s = newSystem(1)
	in = expansion()
	in.Windows = windows
	h = newHarness(t, s)
	h.SetStartTime(start)
	s.scaled = func() { s.down = "cassandra-2" }
	h.At(5*time.Hour, func() {
		s.do(func() { s.down = "" })
		h.Answer(protocol.Retry)
	})
	h.At(6*time.Hour, func() {
		s.do(func() {
			require.Equal(t, []string{"logins ", "plan 7 keyspaces"}, s.log[len(s.log)-2:], "the section went to its end")
		})
		require.Equal(t, protocol.WaitWindow, h.Status().WaitingFor.Kind, "the keyspaces wait")
	})
	h.Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}
