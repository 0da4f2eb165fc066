package datastores

import (
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/gocql/gocql"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/workflows/protocol"
)

// ringLong skips what takes real members many minutes unless it is asked for.
func ringLong(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("REFIT_TEST_LONG") == "" {
		t.Skip(what + ": runs with REFIT_TEST_LONG=1")
	}
}

// untilRing waits for a condition with the patience that members need.
func (w *world) untilRing(run, what string, cond func(protocol.Status) bool) protocol.Status {
	w.t.Helper()
	return w.Until(run, what, ringLimit, func(s protocol.Status) bool {
		if cond(s) {
			return true
		}
		if s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked {
			w.t.Fatalf("parked instead of %s: %+v", what, *s.WaitingFor)
		}
		return false
	})
}

// asked is true when a person is asked.
func asked(s protocol.Status) bool {
	return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitApproval
}

// The template stays as the chart has it, with cassandra-1 a seed: every
// keyspace has its copies before there is a second member, and logins pause
// until two run. Whoever then asks the seed and the third, before the repairs,
// may still be refused or miss a row: what a client met is logged, not judged.
// The worker dies while a member repairs.
func TestCassandraQuorumFirst(t *testing.T) {
	ringLong(t, "the strategy quorumFirst with a client, and a worker killed in the middle of a repair")
	w := upCassandra(t)
	run := w.Start(cassandraExpandPlan, []string{twoKeyspaces, "strategy=quorumFirst"}, "--id", "quorum-first")
	client := w.uses(run, gocql.LocalQuorum)
	w.untilRing(run, "a repair on cassandra-1", func(s protocol.Status) bool { return slices.Contains(s.Current, "cassandra-1") })
	w.KillWorker()
	w.StartWorker()
	var got expanded
	w.finish(run, &got)
	met := client()
	t.Logf("a client met %+v", met)
	require.Equal(t, protocol.OutcomeDone, got.Outcome)
	require.Positive(t, met.NoQuorum, "as long as one of three members runs, nobody is let in")
	require.Positive(t, met.Answers)
	require.Equal(t, 3, got.repaired()["system_auth"])
	require.Equal(t, 3, got.repaired()["nvcf_api"])
	for _, keyspace := range []string{"system_auth", "nvcf_api"} {
		require.Equal(t, []int{1, 1, 1}, slices.Collect(maps.Values(w.repairs(keyspace))), "%s: the repair that the worker did not survive is not run a second time", keyspace)
	}
	w.whole()
	w.Record("cassandra-quorum-first", run)
}

// The guide's order, word by word: the second member is a seed and holds
// nothing of what it takes over.
func TestCassandraGuideLocksOutAndIsRecovered(t *testing.T) {
	ringLong(t, "the guide's literal order and the way back from it")
	w := upCassandra(t)
	parked := w.Start(cassandraExpandPlan, []string{"strategy=guide"}, "--id", "guide-refused")
	w.parks(parked, "cassandra-1")
	w.Answer(protocol.Abort, parked)
	var aborted expanded
	w.finish(parked, &aborted)
	require.Equal(t, protocol.OutcomeAborted, aborted.Outcome)

	run := w.Start(cassandraExpandPlan, []string{twoKeyspaces, "strategy=guide", "acknowledgeSeeds=true"}, "--id", "guide")
	at := w.untilRing(run, "the gate recover", asked)
	require.Equal(t, "recover", at.WaitingFor.Stage)
	require.Contains(t, at.WaitingFor.Found, "locked out")
	for member := range cassandraMembers {
		_, err := w.cql(member, "cassandra", w.password())
		require.ErrorContains(t, err, "are incorrect", "the administrator at cassandra-%d", member)
		_, err = w.cql(member, "service_00", w.password())
		require.ErrorContains(t, err, "are incorrect", "a service at cassandra-%d", member)
	}
	w.Answer(protocol.Approve, run)
	var got expanded
	w.finish(run, &got)
	require.True(t, got.Recovered)
	require.Equal(t, protocol.OutcomeRolledBack, got.Outcome)
	require.Equal(t, records, w.seen(0))
	db, err := w.cql(0, "service_00", w.password())
	require.NoError(t, err)
	db.Close()
	w.Record("cassandra-recovered", run)
}

// cassandraRefusedOnOne goes on with three members. Two of them remember the
// administrator's old password, which the plan still names; the third asks the
// table.
func (w *world) cassandraRefusedOnOne() {
	ringLong(w.t, "a member that refuses the login")
	for _, member := range []string{"cassandra-0", "cassandra-1"} {
		w.nodetool(member, "setauthcacheconfig", "--cache-name", "CredentialsCache", "--validity-period", "3600000", "--update-interval", "3600000", "--disable-active-update")
	}
	for member := range 2 {
		require.NoError(w.t, w.asAdmin(member, "SELECT release_version FROM system.local", new(string)))
	}
	require.NoError(w.t, w.asAdmin(2, "ALTER ROLE cassandra WITH PASSWORD = 'another-not-a-secret'"))
	run := w.Start(cassandraExpandPlan, []string{twoKeyspaces}, "--id", "refused")
	parked := w.parks(run, "login of cassandra on cassandra-2")
	require.Contains(w.t, parked.Found, "N143")
	require.Contains(w.t, parked.Helps, "do not upgrade")
	db, err := w.cql(2, "cassandra", "another-not-a-secret")
	require.NoError(w.t, err)
	defer db.Close()
	require.NoError(w.t, db.Query("ALTER ROLE cassandra WITH PASSWORD = '"+w.password()+"'").Exec())
	w.Answer(protocol.Retry, run)
	var got expanded
	w.finish(run, &got)
	require.Equal(w.t, protocol.OutcomeDone, got.Outcome)
}
