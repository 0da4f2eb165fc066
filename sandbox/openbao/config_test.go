package openbao

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// chartFile is a configuration of the form that the chart writes.
const chartFile = `
ui = true # not for this double
disable_standby_reads = true
listener "tcp" {
  tls_disable = 1
  address = "127.0.0.9:8200"
  cluster_address = "127.0.0.9:8201"
  // Enable unauthenticated metrics access (necessary for Prometheus Operator)
  telemetry { unauthenticated_metrics_access = "true" }
}
seal "shamir" {}
storage "raft" {
  path = "PATH"
  retry_join {
    leader_api_addr = "http://openbao-server-0.openbao-server-internal:8200"
  }
  retry_join { leader_api_addr = "http://openbao-server-1.openbao-server-internal:8200" }
}
service_registration "kubernetes" {}
`

func written(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "bao.hcl")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func environment(values map[string]string) func(string) string {
	return func(name string) string { return values[name] }
}

func TestConfigurationOfTheChartIsRead(t *testing.T) {
	dir := t.TempDir()
	c, err := LoadConfig(written(t, chartFile), environment(map[string]string{
		"BAO_RAFT_NODE_ID": "openbao-server-1", "BAO_RAFT_PATH": dir, "VAULT_API_ADDR": "http://127.0.0.9:8200",
		"BAO_CLUSTER_ADDR": "https://openbao-server-1.openbao-server-internal:8201",
	}))
	require.NoError(t, err)
	require.Equal(t, Config{
		NodeID: "openbao-server-1", Path: dir, Listen: "127.0.0.9:8200", ClusterListen: "127.0.0.9:8201",
		APIAddr: "http://127.0.0.9:8200", ClusterAddr: "https://openbao-server-1.openbao-server-internal:8201", ClusterName: defaultClusterName,
		Join:       []string{"http://openbao-server-0.openbao-server-internal:8200", "http://openbao-server-1.openbao-server-internal:8200"},
		Multiplier: defaultMultiplier,
	}, c)
	require.Equal(t, "openbao-server-1.openbao-server-internal:8201", c.raftAddress())
}

func TestConfigurationThatCannotWorkIsRefused(t *testing.T) {
	dir := t.TempDir()
	storage := "storage \"raft\" {\n path = \"" + dir + "\"\n node_id = \"a\"\n}\n"
	const listener, address = "listener \"tcp\" {\n tls_disable = true\n}\n", "cluster_addr = \"https://a:8201\"\n"
	_, err := LoadConfig(written(t, listener+storage+address), environment(nil))
	require.NoError(t, err)
	for says, text := range map[string]string{
		"storage \"raft\"": listener + address, "listener": storage + address, "tls_disable": "listener \"tcp\" {}\n" + storage + address,
		"cluster_addr": listener + storage, "seal": listener + storage + address + "seal \"transit\" {}\n", "line 3": "a = 1\nb {\n c = =\n}\n",
		"expected }": "a {\n", "performance_multiplier": listener + address + "storage \"raft\" {\n performance_multiplier = 99\n}\n",
		"folder": listener + address + "storage \"raft\" {\n path = \"/nonexistent\"\n node_id = \"a\"\n}\n",
	} {
		_, err := LoadConfig(written(t, text), environment(nil))
		require.ErrorContains(t, err, says)
	}
}

func TestVersionIsTheCoreOfATag(t *testing.T) {
	for tag, want := range map[string]Version{"2.6.3-nv-1.3.7": "2.6.3", "2.5.5": "2.5.5", "v2.6.1": "2.6.1"} {
		v, err := ParseVersion(tag)
		require.NoError(t, err)
		require.Equal(t, want, v)
	}
	for _, tag := range []string{"", "latest", "2.7.0", "2.6", "1.2.3-nv-1"} {
		_, err := ParseVersion(tag)
		require.Error(t, err, tag)
	}
	require.True(t, Version("2.5.5").old())
	require.False(t, Version("2.6.3").old())
}
