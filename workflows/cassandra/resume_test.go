package cassandra

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/workflows/protocol"
)

func TestAnExpansionThatAnotherRunHasBegunIsFinished(t *testing.T) {
	s := newSystem(3)
	s.factors["nvcf_api"] = 3
	var out ExpandResult
	newHarness(t, s).Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "survey", "ring 3", "logins ", "raise [system_auth] to 3", "ring 3"}, s.log[:6],
		"at once: with two copies both may be empty, and nobody could ask for the third")
	require.True(t, repairs(s.log, "nvcf_api", "cassandra-0"), "nobody knows whether the other run had repaired it")
}

func TestARaiseOfTheRolesWhoseEndWasLostIsRepairedWithoutALogin(t *testing.T) {
	s := newSystem(3)
	s.factors[acts.AuthKeyspace] = 3
	s.lockOut = true // until the repair
	s.repaired = func() { s.lockOut = false }
	var out ExpandResult
	newHarness(t, s).Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "survey", "ring 3", "repair [system_auth] on cassandra-0"}, s.log[:4])
}

func TestTwoCopiesThatNobodyHasProvenAreRepairedBeforeTheThird(t *testing.T) {
	s := newSystem(3)
	s.factors[acts.AuthKeyspace] = 2
	var out ExpandResult
	newHarness(t, s).Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"raise [system_auth] to 2", "ring 3", "repair [system_auth] on cassandra-0", "repair [system_auth] on cassandra-1", "raise [system_auth] to 3"}, s.log[4:9])
}

func TestARingOfSeedsIsNotLockedOutByASecondEmptyCopy(t *testing.T) {
	for _, strategy := range []string{Bootstrap, QuorumFirst} {
		s := newSystem(3)
		s.refuse = func() bool { return s.factors[acts.AuthKeyspace] == 2 } // both copies lie on the members that streamed nothing
		in := expansion()
		in.Strategy = strategy
		var out ExpandResult
		newHarness(t, s).Run(protocol.CassandraExpand, in, &out)
		require.Equal(t, protocol.OutcomeDone, out.Outcome, strategy)
		require.NotContains(t, s.log, "raise [system_auth] to 2", strategy)
	}
}

func TestARaiseThatIsToldAsFailedIsRepairedAllTheSame(t *testing.T) {
	s := newSystem(3)
	s.factors["nvcf_api"] = 2
	s.lostRaise = "nvcf_api"
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("keyspaces").Found, "the connection broke")
		require.Equal(t, 3, s.factors["nvcf_api"])
		s.do(func() { s.log = nil })
		h.Answer(protocol.Retry)
	})
	var out ReplicationResult
	h.Run(protocol.CassandraReplication, replicationInput(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"plan 7 keyspaces", "raise [nvcf_api sis_api] to 3", "ring 3", "repair [nvcf_api sis_api] on cassandra-0", "repair [nvcf_api sis_api] on cassandra-1", "repair [nvcf_api sis_api] on cassandra-2"}, s.log[:6])
	require.Contains(t, out.Raised, acts.Keyspace{Name: "nvcf_api", Class: "NetworkTopologyStrategy", Factors: []acts.Factor{{DataCenter: "ncp", Factor: "2"}}}, "as it was before")
}

func TestARaiseOfTheRolesIsProvenByTheMembersWhereItsReplyIsLost(t *testing.T) {
	s := newSystem(3)
	s.lostRaise = acts.AuthKeyspace
	unrepaired := true
	s.refuse = func() bool { return s.factors[acts.AuthKeyspace] == 3 && unrepaired }
	s.repaired = func() { unrepaired = false }
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("expand").Found, "the connection broke")
		s.do(func() { s.log = nil })
		h.Answer(protocol.Retry)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"ring 3", "repair [system_auth] on cassandra-0"}, s.log[:2], "no login is needed for it")
}

func TestQuorumFirstGoesOnWhereTheReplyOfItsRaiseIsLost(t *testing.T) {
	s := newSystem(1)
	s.lostRaise = acts.AuthKeyspace // the last of them: nobody logs in any more
	in := expansion()
	in.Strategy = QuorumFirst
	var out ExpandResult
	newHarness(t, s).Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"ring 1", "scale uid-sts"}, between(append(s.log, "end"), "raise all to 3", "end")[:2])
	require.True(t, repairs(s.log, "nvcf_api", "cassandra-2"))
}

func TestTheRepairWaitsForOneSchemaAfterTheRaise(t *testing.T) {
	s := newSystem(3)
	h := newHarness(t, s)
	s.factors["sis_api"] = 3
	s.altered = func() { s.schemas = 2 }
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("keyspaces").Found, "N187: schema of Cassandra")
		s.do(func() {
			require.False(t, repairs(s.log, "nvcf_api", "cassandra-0"))
			s.schemas, s.altered = 1, nil
		})
		h.Answer(protocol.Retry)
	})
	var out ReplicationResult
	h.Run(protocol.CassandraReplication, replicationInput(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Len(t, out.Repairs, 5)
}

func TestThreeMembersOfWhomNobodyHasRecordedTheNumberAreNotCalledFinished(t *testing.T) {
	in := expansion()
	in.SavedMembers = 0
	for _, factor := range []int{1, 3} { // three copies that nobody has repaired look like three that somebody has
		s := newSystem(3)
		for name := range s.factors {
			s.factors[name] = factor
		}
		h := newHarness(t, s)
		h.At(time.Hour, func() {
			w := h.Waits("survey")
			require.Contains(t, w.Found, "savedMembers: expected the number that the backup has recorded")
			require.Contains(t, w.Helps, "savedMembers: 1")
			require.Contains(t, w.Helps, "savedMembers: 3")
			h.Answer(protocol.Abort)
		})
		var out ExpandResult
		h.Run(protocol.CassandraExpand, in, &out)
		require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	}
}
