package datastores

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gocql/gocql"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/workflows/protocol"
)

// The template stays as the chart has it, with cassandra-1 a seed: every
// keyspace has its copies before there is a second member, and logins pause
// until two run. Whoever then asks the seed and the third, before the repairs,
// may still be refused or miss a row: what a client met until then is logged, not
// judged.
// The worker dies while a member repairs.
func TestCassandraQuorumFirst(t *testing.T) {
	w := upCassandra(t)
	run := w.Start(cassandraExpandPlan, []string{oneKeyspace, "strategy=quorumFirst"}, "--id", "quorum-first")
	client := w.uses(run, gocql.LocalQuorum)
	w.inARepair(run, "cassandra-1", "system_auth", "cassandra-2")
	w.KillWorker()
	w.signal("cassandra-2", syscall.SIGCONT)
	w.StartWorker()
	var got expanded
	w.finish(run, &got)
	met := client()
	t.Logf("a client met %+v", met)
	require.Equal(t, protocol.OutcomeDone, got.Outcome)
	require.Positive(t, met.NoQuorum, "as long as one of three members runs, nobody is let in")
	require.Positive(t, met.Answers)
	// The one call that repairs all others repairs the roles once more.
	for keyspace, times := range map[string]int{"system_auth": 2, "nvcf_api": 1} {
		require.Equal(t, 3, got.repaired()[keyspace])
		for member := range cassandraMembers {
			pod := fmt.Sprintf("cassandra-%d", member)
			require.Equal(t, times, w.repairsBegun(pod, keyspace), "%s on %s: the repair that the worker did not survive is not run a second time", keyspace, pod)
		}
	}
	w.whole()
	for n := range services {
		for member := range cassandraMembers {
			require.NoError(t, w.readsOne(member, n, w.password(), gocql.LocalQuorum), "service %d on cassandra-%d", n, member)
		}
	}
	w.harmless([]string{"describecluster", "repair", "status"}, run)
	w.Record("cassandra-quorum-first", run)
}

// The guide's order, word by word: the second member is a seed and holds
// nothing of what it takes over. The tokens make it certain that this hides the
// administrator. The window ends once the section has begun, and delays neither
// the section's rest nor the way back. The worker dies while a member leaves.
func TestCassandraGuideLocksOutAndIsRecovered(t *testing.T) {
	w := upCassandra(t)
	parked := w.Start(cassandraExpandPlan, []string{"strategy=guide"}, "--id", "guide-refused")
	w.parks(parked, "cassandra-1")
	w.Answer(protocol.Abort, parked)
	var aborted expanded
	w.finish(parked, &aborted)
	require.Equal(t, protocol.OutcomeAborted, aborted.Outcome)

	window, closes := openFor(30 * time.Second)
	run := w.Start(cassandraExpandPlan, []string{oneKeyspace, "strategy=guide", "acknowledgeSeeds=true", "estimate=1s", window}, "--id", "guide")
	client := w.uses(run, gocql.LocalQuorum)
	at := w.untilRing(run, "the gate recover", func(s protocol.Status) bool {
		require.False(t, s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitWindow, "the section waits for no window")
		return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitApproval
	})
	met := client()
	t.Logf("a client met %+v", met)
	require.Positive(t, met.Missing, "rows that a member took over without having them")
	require.Positive(t, met.Refused, "services whose role was taken over so")
	require.Equal(t, "recover", at.WaitingFor.Stage)
	require.Contains(t, at.WaitingFor.Found, "locked out")
	require.True(t, at.WaitingFor.Since.After(closes), "the window ended at %s, inside the section; the gate is there since %s", closes, at.WaitingFor.Since)
	for member := range cassandraMembers {
		_, err := w.cql(member, "cassandra", w.password())
		require.ErrorContains(t, err, "are incorrect", "the administrator at cassandra-%d", member)
	}

	w.Answer(protocol.Approve, run)
	w.untilRing(run, "the call of a decommission", func(protocol.Status) bool { return w.calls("cassandra-2", "decommission") })
	w.KillWorker()
	w.StartWorker()
	var got expanded
	w.finish(run, &got)
	require.True(t, got.Recovered)
	require.Equal(t, protocol.OutcomeRolledBack, got.Outcome)
	left := strings.Join(got.LeftBehind, "\n")
	for _, told := range []string{"cassandra-2 has left the ring", "cassandra-1 has left the ring", "scale it to 1 and delete their volumes by hand"} {
		require.Contains(t, left, told)
	}
	require.NotContains(t, left, "half done", "what was half done is taken back")
	require.Equal(t, records, w.seen(0))
	for n := range services {
		require.NoError(t, w.readsOne(0, n, w.password(), gocql.LocalQuorum), "service %d", n)
	}
	w.harmless([]string{"decommission", "describecluster", "netstats", "status"}, run)
	w.Record("cassandra-recovered", run)
}

// openFor is the setting of a plan whose only window of the day has begun and
// ends so soon, and when it ends.
func openFor(d time.Duration) (string, time.Time) {
	closes := time.Now().Add(d).UTC()
	opens := closes.Truncate(time.Minute).Add(-2 * time.Minute)
	return fmt.Sprintf(`windows=[{opens: "%d %d * * *", duration: %s, timeZone: UTC}]`, opens.Minute(), opens.Hour(), closes.Sub(opens).Round(time.Second)), closes
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
