package cassandra

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	acts "github.com/refit-run/refit/activities/cassandra"

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
	require.Empty(t, out.LeftBehind, "the expansion is taken back, not half done")
	require.Equal(t, []string{"logins ", "decommission cassandra-2", "decommission cassandra-1", "logins cassandra-0", "unlock"}, s.log[len(s.log)-5:])
	require.NotContains(t, s.log, "raise [system_auth] to 3")
	require.Contains(t, out.Warnings[len(out.Warnings)-1], "scale it to 1")
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
	windows := []window.Spec{{Opens: "0 1 * * *", Duration: window.Duration(2 * time.Hour), TimeZone: "UTC"}}

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
