package cassandrad

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/sandbox/procnode/pod"
)

func environment(dir string) map[string]string {
	return map[string]string{
		pod.IPVariable: "127.64.0.9", pod.HostsVariable: filepath.Join(dir, "hosts"), "HOSTNAME": "cassandra-1",
		"VOLUME_data": filepath.Join(dir, "data"), "VOLUME_conf": dir,
		SeedsVariable: "cassandra-0.a,cassandra-1.a", DCVariable: DataCenter, ClusterVariable: Cluster,
	}
}

func TestConfigurationIsThatOfThePodsEnvironment(t *testing.T) {
	dir := t.TempDir()
	env := environment(dir)
	m, err := memberOf(func(name string) string { return env[name] })
	require.NoError(t, err)
	require.NoError(t, m.initialise())
	require.NoError(t, m.configure())
	text, err := os.ReadFile(filepath.Join(dir, "cassandra.yaml"))
	require.NoError(t, err)
	for _, line := range []string{
		"cluster_name: nvcf\n", `- seeds: "cassandra-0.a,cassandra-1.a"`, "listen_address: 127.64.0.9\n", "rpc_address: 127.64.0.9\n",
		"class_name: PasswordAuthenticator", `data_file_directories: ["` + filepath.Join(dir, "data", "data") + `"]`, `initial_token: "` + tokens(1) + `"`,
	} {
		require.Contains(t, string(text), line)
	}
	rack, err := os.ReadFile(filepath.Join(dir, "cassandra-rackdc.properties"))
	require.NoError(t, err)
	require.Equal(t, "dc=ncp\nrack=rack1\n", string(rack))
	require.FileExists(t, filepath.Join(dir, "logback.xml"))
}

func TestMemberWithoutItsEnvironmentIsRefused(t *testing.T) {
	for _, name := range []string{pod.IPVariable, "VOLUME_data", "VOLUME_conf", SeedsVariable, DCVariable, ClusterVariable} {
		env := environment(t.TempDir())
		delete(env, name)
		_, err := memberOf(func(name string) string { return env[name] })
		require.ErrorContains(t, err, strings.TrimPrefix(name, "VOLUME_"))
	}
	env := environment(t.TempDir())
	env["HOSTNAME"] = "somebody"
	_, err := memberOf(func(name string) string { return env[name] })
	require.ErrorContains(t, err, "cassandra-0")
}

func TestThreeMembersShareTheRingEvenly(t *testing.T) {
	const ring = float64(1<<63) * 2
	owned := map[int]float64{}
	seen := map[int64]int{}
	for ordinal := range 3 {
		list := strings.Split(tokens(ordinal), ",")
		require.Len(t, list, tokenCount)
		for _, text := range list {
			token, err := strconv.ParseInt(text, 10, 64)
			require.NoError(t, err)
			require.NotContains(t, seen, token)
			seen[token] = ordinal
		}
	}
	for token, ordinal := range seen {
		nearest := ring
		for other := range seen {
			if d := float64(token) - float64(other); d > 0 && d < nearest {
				nearest = d
			} else if d < 0 && d+ring < nearest {
				nearest = d + ring
			}
		}
		owned[ordinal] += nearest / ring
	}
	for ordinal := range 3 {
		require.InDelta(t, 1.0/3, owned[ordinal], 0.01)
	}
	require.Empty(t, tokens(3), "a fourth chooses its own")
}

func TestPreparedDataIsTheFirstMembersAlone(t *testing.T) {
	prepared := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(prepared, "data", "system"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(prepared, "data", "system", "table"), []byte("prepared"), 0o600))
	for _, c := range []struct {
		name    string
		ordinal int
		dc      string
		takes   bool
	}{{"first", 0, DataCenter, true}, {"second", 1, DataCenter, false}, {"another data centre", 0, "dc1", false}} {
		m := member{data: t.TempDir(), ordinal: c.ordinal, dc: c.dc}
		file := filepath.Join(m.data, "data", "system", "table")
		require.NoError(t, m.adopt(prepared), c.name)
		if !c.takes {
			require.NoFileExists(t, file, c.name)
			continue
		}
		require.FileExists(t, file, c.name)
		require.NoError(t, os.WriteFile(file, []byte("its own"), 0o600))
		require.NoError(t, m.adopt(prepared))
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, "its own", string(text), "what a member has is left alone")
	}
}

// nodetool asks the member of the container that it is called in.
func TestNodetoolAsksTheContainersOwnMember(t *testing.T) {
	dir := t.TempDir()
	java := filepath.Join(dir, "it's java")
	require.NoError(t, os.WriteFile(java, []byte("#!/bin/sh\nprintf '%s\\n' \"$@\"\n"), 0o755))
	require.NoError(t, Home{dir: filepath.Join(dir, "home"), java: java}.Tools(dir))
	run := exec.Command(filepath.Join(dir, "nodetool"), "repair", "--full", "a b")
	run.Env = []string{"PATH=" + os.Getenv("PATH"), pod.IPVariable + "=127.64.0.9", "VOLUME_conf=/conf", "VOLUME_data=/data"}
	out, err := run.Output()
	require.NoError(t, err)
	require.Contains(t, string(out), "org.apache.cassandra.tools.NodeTool\n-h\n127.64.0.9\n-p\n7199\nrepair\n--full\na b\n")
	require.Contains(t, string(out), filepath.Join(dir, "home", "lib", "*"))
	require.Contains(t, string(out), "-Dcassandra.config=file:///conf/cassandra.yaml\n")
}

func TestMissingJarsAreNamedWithTheRemedy(t *testing.T) {
	t.Setenv(HomeVariable, t.TempDir())
	_, err := Find()
	require.ErrorIs(t, err, ErrNoJars)
	require.ErrorContains(t, err, "make cassandra")
}
