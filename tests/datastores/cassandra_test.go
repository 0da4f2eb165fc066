package datastores

import (
	"strings"
	"testing"

	"github.com/gocql/gocql"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/tests/sandbox"
	"github.com/refit-run/refit/workflows/protocol"
)

const (
	cassandraBackupPlan      = "examples/cassandra-backup.yaml"
	cassandraExpandPlan      = "examples/cassandra-expand.yaml"
	cassandraLedgerPlan      = "examples/cassandra-ledger.yaml"
	cassandraReplicationPlan = "examples/cassandra-replication.yaml"
)

// oneKeyspace keeps a test short: each is repaired member by member.
const oneKeyspace = "keyspaces=[nvcf_api]"

// TestCassandra goes from one real member to three, and meets there what may
// go wrong with three.
func TestCassandra(t *testing.T) {
	w := upCassandra(t)
	if !w.through(t, []step{
		{"a snapshot that is there counts as done", (*world).cassandraBackup},
		{"a migration left half done waits for a person", (*world).cassandraLedger},
		{"bootstrap loses no row and refuses nobody", (*world).cassandraBootstrap},
		{"what has three copies is neither altered nor repaired, and an absent keyspace is told", (*world).cassandraReplicated},
		{"a data centre of another name, or a hostile one, stops before any ALTER", (*world).cassandraOtherDataCentre},
		{"members that disagree on the schema are waited for", (*world).cassandraDisagrees},
		{"a member that dies in the middle of a repair leaves none undone", (*world).cassandraDiesInARepair},
		{"a member that refuses the login stops the run", (*world).cassandraRefusedOnOne},
	}) {
		return
	}
	w.harmless([]string{"describecluster", "flush", "listsnapshots", "repair", "snapshot", "status", "tablestats"}, "ledger", "bootstrap", "replicated", "dies", "refused")
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
	require.NoError(w.t, w.asAdmin(0, "CREATE INDEX by_body ON nvct_api.records (body)")) // has a table of its own, and no snapshot of its own
	for _, again := range []bool{false, true} {
		run := w.Start(cassandraBackupPlan, []string{"copied=a test needs no copy"})
		var out backedUp
		w.finish(run, &out)
		require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
		require.Equal(w.t, 1, out.Members)
		require.Len(w.t, out.Snapshots, 1)
		require.Equal(w.t, again, out.Snapshots[0].Already)
		if again {
			w.Record("cassandra-backup", run)
		}
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

// cassandraLedger reads what the migrations have recorded, on the one member.
func (w *world) cassandraLedger() {
	require.NoError(w.t, w.asAdmin(0, "INSERT INTO schema_migrations.nvct_api (version, dirty) VALUES (13, true)"))
	run := w.Start(cassandraLedgerPlan, []string{"expect=[{keyspace: nvcf_api, version: 12}]"}, "--id", "ledger")
	require.Contains(w.t, w.parks(run, "ledger of nvct_api").Found, "dirty at version 13")
	require.NoError(w.t, w.asAdmin(0, "DELETE FROM schema_migrations.nvct_api WHERE version = 13"))
	w.Answer(protocol.Retry, run)
	var out struct {
		protocol.Receipt
		Entries []struct{} `json:"entries"`
	}
	w.finish(run, &out)
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	require.Len(w.t, out.Entries, 7)
	w.Record("cassandra-ledger", run)

	ahead := w.Start(cassandraLedgerPlan, []string{"expect=[{keyspace: nvcf_api, version: 13}]"})
	require.Contains(w.t, w.parks(ahead, "ledger of nvcf_api").Found, "expected version 13, found 12")
	w.Answer(protocol.Abort, ahead)
	w.finish(ahead, &out)
}

func (w *world) cassandraBootstrap() {
	w.inZones()
	out, code := w.Refit("plan", "-f", cassandraExpandPlan, "--exit-code")
	require.Equal(w.t, sandbox.ExitChanges, code, out)
	require.Contains(w.t, out, "CASSANDRA_SEEDS")
	require.Contains(w.t, out, "scale to 3")
	require.Contains(w.t, out, "add the rule that spreads members over zones")

	run := w.Start(cassandraExpandPlan, []string{oneKeyspace}, "--id", "bootstrap")
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
	require.Equal(w.t, map[string]int{"system_auth": 3, "nvcf_api": 3}, got.repaired())
	w.whole()
	set := w.statefulSet(cassandraSystem)
	require.Len(w.t, set.Spec.Template.Spec.TopologySpreadConstraints, 1)
	require.Equal(w.t, corev1.LabelTopologyZone, set.Spec.Template.Spec.TopologySpreadConstraints[0].TopologyKey)
	require.Contains(w.t, strings.Join(got.Warnings, "\n"), "N138", "all members are on one node, and preferred only warns")
	w.Record("cassandra-bootstrap", run)

	var again expanded
	w.finish(w.Start(cassandraExpandPlan, []string{"savedMembers=3"}, "--id", "bootstrap-again"), &again)
	require.Equal(w.t, protocol.OutcomeNoChange, again.Outcome)
}
