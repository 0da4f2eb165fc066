package datastores

import (
	"testing"

	"github.com/gocql/gocql"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/tests/sandbox"
	"github.com/refit-run/refit/workflows/protocol"
)

const (
	cassandraBackupPlan = "examples/cassandra-backup.yaml"
	cassandraExpandPlan = "examples/cassandra-expand.yaml"
)

// twoKeyspaces keeps a test short: each keyspace is repaired three times.
const twoKeyspaces = "keyspaces=[nvcf_api, nvct_api]"

// TestCassandra goes from one real member to three.
func TestCassandra(t *testing.T) {
	w := upCassandra(t)
	for _, test := range []struct {
		behaviour string
		run       func(w *world)
	}{
		{"a snapshot that is there counts as done", (*world).cassandraBackup},
		{"bootstrap loses no row and refuses nobody", (*world).cassandraBootstrap},
		{"a member that refuses the login stops the run", (*world).cassandraRefusedOnOne},
	} {
		if !t.Run(test.behaviour, func(t *testing.T) { test.run(w.in(t)) }) {
			return // the next one would find what this one has left
		}
	}
}

// backedUp is the result of a CassandraBackup.
type backedUp struct {
	protocol.Receipt
	Members   int `json:"members"`
	Snapshots []struct {
		Pod     string `json:"pod"`
		Already bool   `json:"already"`
	} `json:"snapshots"`
}

func (w *world) cassandraBackup() {
	for _, again := range []bool{false, true} {
		var out backedUp
		w.finish(w.Start(cassandraBackupPlan, []string{"copied=a test needs no copy"}), &out)
		require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
		require.Equal(w.t, 1, out.Members)
		require.Len(w.t, out.Snapshots, 1)
		require.Equal(w.t, again, out.Snapshots[0].Already)
	}
}

// expanded is the result of a CassandraExpand.
type expanded struct {
	protocol.Receipt
	Raised []struct {
		Name string `json:"name"`
	} `json:"raised"`
	Repairs []struct {
		Pod      string `json:"pod"`
		Keyspace string `json:"keyspace"`
		By       string `json:"by"`
	} `json:"repairs"`
	Recovered bool `json:"recovered"`
}

// repaired counts the members that have repaired each keyspace.
func (e expanded) repaired() map[string]int {
	members := map[string]map[string]bool{}
	for _, r := range e.Repairs {
		if members[r.Keyspace] == nil {
			members[r.Keyspace] = map[string]bool{}
		}
		members[r.Keyspace][r.Pod] = true
	}
	out := map[string]int{}
	for keyspace, pods := range members {
		out[keyspace] = len(pods)
	}
	return out
}

func (w *world) cassandraBootstrap() {
	out, code := w.Refit("plan", "-f", cassandraExpandPlan, "--exit-code")
	require.Equal(w.t, sandbox.ExitChanges, code, out)
	require.Contains(w.t, out, "CASSANDRA_SEEDS")
	require.Contains(w.t, out, "scale to 3")

	run := w.Start(cassandraExpandPlan, []string{twoKeyspaces}, "--id", "bootstrap")
	client := w.uses(run, gocql.LocalQuorum)
	var got expanded
	w.finish(run, &got)
	met := client()
	w.t.Logf("a client met %+v", met)
	require.Equal(w.t, protocol.OutcomeDone, got.Outcome)
	require.Zero(w.t, met.Refused, met.First)
	require.Zero(w.t, met.Missing, met.First)
	require.Zero(w.t, met.NoQuorum)
	require.Greater(w.t, met.Answers, 20, "the client has worked")
	require.Equal(w.t, map[string]int{"system_auth": 3, "nvcf_api": 3, "nvct_api": 3}, got.repaired())
	w.whole()
	w.Record("cassandra-bootstrap", run)

	var again expanded
	w.finish(w.Start(cassandraExpandPlan, []string{"savedMembers=3"}, "--id", "bootstrap-again"), &again)
	require.Equal(w.t, protocol.OutcomeNoChange, again.Outcome)
}
