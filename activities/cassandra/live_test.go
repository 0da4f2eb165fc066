//go:build linux

package cassandra

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/secret"
)

const within = 4 * time.Minute

// cql runs statements as the administrator on a member.
func (r *ring) cql(i int, statements ...string) {
	r.t.Helper()
	c, err := r.acts.open(r.t.Context(), r.place)
	require.NoError(r.t, err)
	defer c.close()
	pod, err := c.pod(r.t.Context(), fmt.Sprintf("cassandra-%d", i))
	require.NoError(r.t, err)
	s, err := c.login(r.t.Context(), pod, r.admin)
	require.NoError(r.t, err)
	defer s.Close()
	for _, text := range statements {
		require.NoError(r.t, s.statement(r.t.Context(), text))
	}
}

// count is the number of rows that a member shows of ks.t by itself.
func (r *ring) count(i int, keyspace string) int {
	r.t.Helper()
	c, err := r.acts.open(r.t.Context(), r.place)
	require.NoError(r.t, err)
	defer c.close()
	pod, err := c.pod(r.t.Context(), fmt.Sprintf("cassandra-%d", i))
	require.NoError(r.t, err)
	s, err := c.login(r.t.Context(), pod, r.admin)
	require.NoError(r.t, err)
	defer s.Close()
	rows, err := s.rows(r.t.Context(), "SELECT id FROM "+keyspace+".t")
	require.NoError(r.t, err)
	return len(rows)
}

// lets demands that every member lets the administrator in, again and again:
// which copies a member asks is chance.
func (r *ring) lets(when string) {
	r.t.Helper()
	for range 5 {
		out, err := r.acts.Logins(r.t.Context(), LoginsRequest{Place: r.place, Login: r.admin, Limit: time.Millisecond})
		require.NoError(r.t, err)
		require.True(r.t, out.OK, "%s: %v", when, out.Findings)
	}
}

func (r *ring) repair(i, copies int, since time.Time, keyspaces ...string) (RepairResult, error) {
	return r.acts.Repair(r.t.Context(), RepairRequest{Place: r.place, Login: r.admin, Pod: fmt.Sprintf("cassandra-%d", i), Keyspaces: keyspaces, Copies: copies, Since: since, Limit: within})
}

// TestARealClusterIsExpandedRaisedRepairedAndTakenBack goes the whole way on
// real members. Its parts need each other, and a member takes long to start.
func TestARealClusterIsExpandedRaisedRepairedAndTakenBack(t *testing.T) {
	r := newRing(t)
	ctx := t.Context()
	statements := []string{
		"CREATE KEYSPACE nvcf_api WITH replication = {'class': 'NetworkTopologyStrategy', 'dc1': '1'}", "CREATE TABLE nvcf_api.t (id int PRIMARY KEY)",
		"CREATE KEYSPACE schema_migrations WITH replication = {'class': 'SimpleStrategy', 'replication_factor': '1'}",
		"CREATE TABLE schema_migrations.nvcf_api (version bigint PRIMARY KEY, dirty boolean)", "INSERT INTO schema_migrations.nvcf_api (version, dirty) VALUES (42, true)",
	}
	const rows = 60
	for i := range rows {
		statements = append(statements, fmt.Sprintf("INSERT INTO nvcf_api.t (id) VALUES (%d)", i))
	}
	r.cql(0, statements...)
	names := []string{"nvcf_api", "nvct_api"}

	t.Run("one member is whole, and is not three", func(t *testing.T) {
		one, err := r.acts.Ring(ctx, RingRequest{Place: r.place, Limit: within})
		require.NoError(t, err)
		require.True(t, one.OK, one.Findings)
		require.Equal(t, "dc1", one.DataCenter)
		three, err := r.acts.Ring(ctx, RingRequest{Place: r.place, Want: 3, Row: "N137", Limit: time.Millisecond})
		require.NoError(t, err)
		require.False(t, three.OK)
		require.Equal(t, "N137", three.Findings[0].Row)
	})
	t.Run("a wrong password is refused, without a word of it", func(t *testing.T) {
		wrong := Login{Password: secret.Reference{Secret: "cassandra-admin", Key: "wrong"}}
		out, err := r.acts.Logins(ctx, LoginsRequest{Place: r.place, Login: wrong, Limit: within})
		require.NoError(t, err)
		require.True(t, out.LockedOut())
		require.Equal(t, "N143", out.Findings[0].Row)
		require.Contains(t, out.Findings[0].Next, "do not upgrade")
		require.NotContains(t, fmt.Sprint(out), "fake-wrong-password")
	})
	t.Run("a snapshot is taken once", func(t *testing.T) {
		request := SnapshotRequest{Place: r.place, Pod: "cassandra-0", Tag: "pre-1-1-5", Limit: within}
		first, err := r.acts.Snapshot(ctx, request)
		require.NoError(t, err)
		require.False(t, first.Already)
		second, err := r.acts.Snapshot(ctx, request)
		require.NoError(t, err)
		require.True(t, second.Already)
		require.Equal(t, first.Tables, second.Tables)
		r.cql(0, "CREATE TABLE nvcf_api.later (id int PRIMARY KEY)")
		_, err = r.acts.Snapshot(ctx, request)
		require.ErrorContains(t, err, "nvcf_api/later is missing")
	})
	t.Run("a dirty ledger is for a person", func(t *testing.T) {
		out, err := r.acts.Ledger(ctx, LedgerRequest{Place: r.place, Login: r.admin, Keyspaces: names, Limit: within})
		require.NoError(t, err)
		require.False(t, out.OK)
		require.Contains(t, out.Findings[0].Found, "dirty at version 42")
		require.Equal(t, []string{"nvct_api"}, out.Absent)
	})

	for i := 1; i < 3; i++ {
		r.join(i)
		assert.Equal(t, rows, r.count(i, "nvcf_api"), "member %d bootstraps and hides nothing", i)
	}
	out, err := r.acts.Ring(ctx, RingRequest{Place: r.place, Want: 3, Limit: within})
	require.NoError(t, err)
	require.True(t, out.OK, out.Findings)

	plan, err := r.acts.Raise(ctx, RaiseRequest{Place: r.place, Login: r.admin, Keyspaces: names, Factor: 3, PlanOnly: true, Limit: within})
	require.NoError(t, err)
	require.Len(t, plan.Raise, 1)
	require.Equal(t, []string{"nvct_api"}, plan.Absent)
	require.Equal(t, "schema_migrations", plan.Outside[0].Name)
	require.Greater(t, plan.Before.Entries, len(plan.Raise)+len(plan.Outside), "how every keyspace was replicated is kept (N185)")
	// Two copies first: a quorum of two reads both, one of which is whole.
	raised, err := r.acts.Raise(ctx, RaiseRequest{Place: r.place, Login: r.admin, Keyspaces: append(names, AuthKeyspace), Factor: 2, Limit: within})
	require.NoError(t, err)
	require.Len(t, raised.Raise, 2)
	r.lets("with two copies, one of them empty")
	for i := range 2 {
		out, err := r.repair(i, 2, raised.At, AuthKeyspace, "nvcf_api")
		require.NoError(t, err)
		require.Equal(t, "nodetool", out.Repairs[1].By)
	}
	raised, err = r.acts.Raise(ctx, RaiseRequest{Place: r.place, Login: r.admin, Keyspaces: append(names, AuthKeyspace), Factor: 3, Limit: within})
	require.NoError(t, err)
	require.Len(t, raised.Raise, 2)
	r.lets("with three copies, two of them whole")
	t.Run("a repair whose end nobody heard is found in the history", func(t *testing.T) {
		r.mu.Lock()
		r.lost, r.ran = "repair --full nvcf_api", nil
		r.mu.Unlock()
		out, err := r.repair(0, 3, raised.At, AuthKeyspace, "nvcf_api")
		require.NoError(t, err)
		require.Equal(t, "nodetool", out.Repairs[0].By)
		require.Equal(t, "history", out.Repairs[1].By)
		require.Equal(t, 1, out.Repairs[1].Attempts)
		require.Equal(t, []string{"cassandra-0 repair --full system_auth", "cassandra-0 repair --full nvcf_api"}, r.ran)
	})
	t.Run("the others' repairs do not stand for a member's own", func(t *testing.T) {
		for i := 1; i < 3; i++ {
			out, err := r.repair(i, 3, raised.At, AuthKeyspace, "nvcf_api")
			require.NoError(t, err)
			require.Equal(t, "nodetool", out.Repairs[0].By)
			again, err := r.repair(i, 3, raised.At, AuthKeyspace, "nvcf_api")
			require.NoError(t, err)
			require.Equal(t, "history", again.Repairs[1].By)
		}
	})
	t.Run("what is raised is not altered again", func(t *testing.T) {
		again, err := r.acts.Raise(ctx, RaiseRequest{Place: r.place, Login: r.admin, Keyspaces: append(names, AuthKeyspace), Factor: 3, Limit: within})
		require.NoError(t, err)
		require.Empty(t, again.Raise)
	})
	t.Run("every member lets the administrator in", func(t *testing.T) {
		out, err := r.acts.Logins(ctx, LoginsRequest{Place: r.place, Login: r.admin, Limit: within})
		require.NoError(t, err)
		require.Len(t, out.Accepted, 3)
	})
	t.Run("a dead member is seen, and fails a repair", func(t *testing.T) {
		r.kill(2)
		out, err := r.acts.Ring(ctx, RingRequest{Place: r.place, Limit: time.Millisecond})
		require.NoError(t, err)
		require.False(t, out.OK, "whatever the others' tables say")
		require.True(t, slices.ContainsFunc(out.Findings, func(f finding.Finding) bool { return f.Object == "Cassandra member cassandra-2" }))
		_, err = r.repair(0, 3, time.Now().Add(time.Minute), "nvcf_api")
		require.ErrorContains(t, err, "nodetool repair --full nvcf_api on cassandra-0: expected exit code 0")
		r.start(2)
		out, err = r.acts.Ring(ctx, RingRequest{Place: r.place, Limit: within})
		require.NoError(t, err)
		require.True(t, out.OK, out.Findings)
	})
	t.Run("joined members can be taken out again, and rows stay", func(t *testing.T) {
		ring, err := r.acts.Ring(ctx, RingRequest{Place: r.place, Limit: within})
		require.NoError(t, err)
		_, err = r.acts.Decommission(ctx, DecommissionRequest{Place: r.place, Pod: "cassandra-2", HostID: ring.Hosts["cassandra-2"], Limit: within})
		require.ErrorContains(t, err, "expected one copy", "with three copies two members fewer are no quorum")
		for _, k := range AskMore(ring.Keyspaces, names) {
			r.cql(0, alter(k.Name, "dc1", 1))
		}
		for i := 2; i > 0; i-- {
			request := DecommissionRequest{Place: r.place, Pod: fmt.Sprintf("cassandra-%d", i), HostID: ring.Hosts[fmt.Sprintf("cassandra-%d", i)], Keyspaces: names, Limit: within}
			out, err := r.acts.Decommission(ctx, request)
			require.NoError(t, err)
			require.False(t, out.Already)
			out, err = r.acts.Decommission(ctx, request)
			require.NoError(t, err)
			require.True(t, out.Already)
		}
		require.Equal(t, rows, r.count(0, "nvcf_api"))
		_, err = r.acts.Decommission(ctx, DecommissionRequest{Place: r.place, Pod: "cassandra-0", Limit: within})
		require.ErrorContains(t, err, "expected one that has joined, found the first")
	})
}

// TestNobodyLogsInBetweenTheRaiseAndTheSecondMember is what quorumFirst relies
// on, and what it must bear.
func TestNobodyLogsInBetweenTheRaiseAndTheSecondMember(t *testing.T) {
	r := newRing(t)
	ctx := t.Context()
	r.cql(0, "CREATE KEYSPACE nvcf_api WITH replication = {'class': 'NetworkTopologyStrategy', 'dc1': '1'}")
	// Once the last statement has an effect the member may not even answer to
	// who has logged in: that is told at once, without waiting for a quorum.
	began := time.Now()
	if _, err := r.acts.Raise(ctx, RaiseRequest{Place: r.place, Login: r.admin, All: true, Factor: 3, Limit: within}); err != nil {
		require.ErrorContains(t, err, "nobody is let in any more")
	}
	one, err := r.acts.Ring(ctx, RingRequest{Place: r.place, Limit: within})
	require.NoError(t, err)
	for _, k := range one.Keyspaces {
		require.True(t, k.local() || k.Raised("dc1", 3), "%s, as the member describes it without a login", k)
	}
	require.Eventually(t, func() bool { // roles are remembered for two seconds
		locked, err := r.acts.Logins(ctx, LoginsRequest{Place: r.place, Login: r.admin, Limit: time.Millisecond})
		return err == nil && !locked.OK && assert.Empty(t, locked.Refused, "a missing quorum is no refusal")
	}, time.Minute, 500*time.Millisecond)
	_, err = r.acts.Raise(ctx, RaiseRequest{Place: r.place, Login: r.admin, All: true, Factor: 3, Limit: within})
	require.ErrorContains(t, err, "nobody is let in any more")
	require.Less(t, time.Since(began), within)
	r.join(1)
	out, err := r.acts.Logins(ctx, LoginsRequest{Place: r.place, Login: r.admin, Pod: "cassandra-0", Limit: within})
	require.NoError(t, err)
	require.True(t, out.OK, out.Findings)
}

// TestASeedThatJoinsLocksTheAdministratorOutUntilItIsTakenOut is the guide's
// order, with tokens that make its trap certain: the second member takes over
// nearly all ranges.
func TestASeedThatJoinsLocksTheAdministratorOutUntilItIsTakenOut(t *testing.T) {
	r := newRing(t, func(r *ring) {
		r.seeds = r.addresses[0] + "," + r.addresses[1]
		r.tokens = [3]string{"num_tokens: 1\ninitial_token: -9223372036854775000", "num_tokens: 1\ninitial_token: 9223372036854775000", ""}
	})
	ctx := t.Context()
	r.cql(0, "CREATE KEYSPACE nvcf_api WITH replication = {'class': 'NetworkTopologyStrategy', 'dc1': '1'}", "CREATE TABLE nvcf_api.t (id int PRIMARY KEY)",
		"INSERT INTO nvcf_api.t (id) VALUES (1)", "ALTER ROLE cassandra WITH PASSWORD = 'fake-changed-password'")
	// A member that finds no role makes the default one, with its well-known
	// password: only another one shows that the row is hidden.
	r.admin = Login{Password: secret.Reference{Secret: "cassandra-admin", Key: "changed"}}
	r.join(1)
	ring, err := r.acts.Ring(ctx, RingRequest{Place: r.place, Limit: within})
	require.NoError(t, err)
	require.True(t, ring.OK, "all members are up: %v", ring.Findings)
	locked, err := r.acts.Logins(ctx, LoginsRequest{Place: r.place, Login: r.admin, Limit: within})
	require.NoError(t, err)
	require.True(t, locked.LockedOut(), "%+v", locked)
	_, err = r.acts.Decommission(ctx, DecommissionRequest{Place: r.place, Pod: "cassandra-1", HostID: ring.Hosts["cassandra-1"], Limit: within})
	require.NoError(t, err)
	back, err := r.acts.Logins(ctx, LoginsRequest{Place: r.place, Login: r.admin, Pod: "cassandra-0", Limit: within})
	require.NoError(t, err)
	require.True(t, back.OK, back.Findings)
	require.Equal(t, 1, r.count(0, "nvcf_api"))
}
