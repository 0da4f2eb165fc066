package cassandra

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/kube"
)

// recorded is what nodetool of a real Apache Cassandra 5.0.9 has printed.
func recorded(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	require.NoError(t, err)
	return string(text)
}

func TestStatusIsReadMemberByMember(t *testing.T) {
	ring, err := parseStatus(recorded(t, "status-3.txt"))
	require.NoError(t, err)
	require.Len(t, ring, 3)
	require.Equal(t, Neighbour{DataCenter: "dc1", State: "UN", Address: "127.0.2.13", HostID: "0b3f7510-1ab4-488a-8826-403a2dcb2a6a", Rack: "rack3"}, ring[0])

	ring, err = parseStatus(recorded(t, "status-joining.txt"))
	require.NoError(t, err)
	require.Equal(t, "UJ", ring[1].State, "a member that joins owns nothing yet: its line has a question mark")

	// With one token a member the columns are others.
	ring, err = parseStatus("Datacenter: dc1\n===============\n" +
		"--  Address     Load        Owns (effective)  Host ID                               Token                 Rack\n" +
		"UN  127.0.0.11  136.23 KiB  0.0%              6df9418b-84a5-4159-8560-5d8d97e0c3f3  -9223372036854775000  rack0\n" +
		"UN  127.0.0.12  30.88 KiB   100.0%            f8c02d3c-4cb4-4995-8352-c824c68f7eb5  9223372036854775000   rack1\n")
	require.NoError(t, err)
	require.Len(t, ring, 2)
	require.Equal(t, Neighbour{DataCenter: "dc1", State: "UN", Address: "127.0.0.12", HostID: "f8c02d3c-4cb4-4995-8352-c824c68f7eb5", Rack: "rack1"}, ring[1])

	_, err = parseStatus("error: connection refused")
	require.ErrorContains(t, err, "no member in the output")
}

func TestADescriptionHasSchemaVersionsAndReplication(t *testing.T) {
	d, err := parseDescription(recorded(t, "describecluster-3.txt"))
	require.NoError(t, err)
	require.Equal(t, []SchemaVersion{{Version: "d03783d7-b468-3c1a-82f1-8e30b2edde8b", Members: []string{"127.0.2.11", "127.0.2.12", "127.0.2.13"}}}, d.Versions)
	require.Len(t, d.Keyspaces, 5)
	require.Equal(t, "system_auth SimpleStrategy {replication_factor=1}", d.Keyspaces[1].String())
	require.True(t, d.Keyspaces[0].local())

	d, err = parseDescription(recorded(t, "describecluster-left.txt"))
	require.NoError(t, err)
	require.Equal(t, "UNREACHABLE", d.Versions[0].Version, "so does a member that has left see the others")
	_, err = parseDescription("error: connection refused")
	require.ErrorContains(t, err, "no schema version")
}

func TestASnapshotHoldsWhatTheMemberHas(t *testing.T) {
	held := parseSnapshots(recorded(t, "listsnapshots.txt"), "pre-1-1-5")
	tables, err := parseTables(recorded(t, "tablestats.json"))
	require.NoError(t, err)
	require.Len(t, tables, 48)
	require.Equal(t, tables, held, "empty tables are in a snapshot too")
	require.Empty(t, parseSnapshots(recorded(t, "listsnapshots.txt"), "pre-1-1"), "a tag is a whole word")

	noisy, err := parseTables("12:00:00 DEBUG something {}\n" + recorded(t, "tablestats.json"))
	require.NoError(t, err)
	require.Equal(t, tables, noisy)
	indexed, err := parseTables(`{"total_number_of_tables": 2, "ks": {"tables": {"t": {}, "t.by_name": {}}}}`)
	require.NoError(t, err)
	require.Equal(t, []string{"ks/t"}, indexed, "an index has a table of its own, and no snapshot of its own")
	_, err = parseTables("error")
	require.Error(t, err)
}

func TestTheComplaintIsToldWithoutTheStackTrace(t *testing.T) {
	f := failed("cassandra-0", kube.Exit{Code: 2, Stderr: recorded(t, "snapshot-exists.txt")}, "snapshot", "-t", "pre-1-1-5")
	require.Equal(t, "2: error: Snapshot pre-1-1-5 already exists.", f.Found)
	require.Equal(t, "nodetool snapshot -t pre-1-1-5 on cassandra-0", f.Object)
	require.Equal(t, "1: nodetool: Keyspace [absent] does not exist.", failed("p", kube.Exit{Code: 1, Stdout: recorded(t, "repair-absent.txt")}).Found)
	require.Equal(t, "137: no word of explanation", failed("p", kube.Exit{Code: 137}).Found)
}

func TestTagsAndNamesThatCouldBeMoreAreRefused(t *testing.T) {
	for _, tag := range []string{"", "-t", "a b", "a/b", "a;b", strings.Repeat("x", 101)} {
		require.False(t, ValidTag(tag), tag)
	}
	require.True(t, ValidTag("pre-1-1-5"))
	for _, name := range []string{"", "Nvcf", "a-b", "a b", "a;DROP KEYSPACE b", `"a"`, strings.Repeat("x", 49)} {
		require.False(t, ValidKeyspace(name), name)
	}
	for _, name := range []string{"", "dc'", "dc1': '3', 'x", "dc 1", "dc;1", "dc\n1"} {
		require.ErrorContains(t, ValidDataCenter(name), "N139", name)
	}
	require.NoError(t, ValidDataCenter("NCP_eu-1"))
}
