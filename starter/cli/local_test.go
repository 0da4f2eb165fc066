package cli_test

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/starter/cli"
	"github.com/refit-run/refit/starter/local"
)

// host is a user's machine on which `refit up` is typed.
type host struct {
	getenv func(string) string
	ports  []string
}

func newHost(t *testing.T) host {
	needWorld(t)
	bin := t.TempDir()
	own, err := os.Executable()
	require.NoError(t, err)
	require.NoError(t, os.Symlink(own, filepath.Join(bin, "refit-worker")))
	require.NoError(t, os.Symlink(world.temporal, filepath.Join(bin, "temporal")))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	ports := freePorts(2)
	h := host{
		getenv: environment(t, "TEMPORAL_ADDRESS="),
		ports:  []string{"--port", ports[0], "--ui-port", ports[1]},
	}
	t.Cleanup(func() {
		got := h.refit(t, "down")
		require.Equal(t, cli.ExitDone, got.code, got.err)
	})
	return h
}

func (h host) refit(t *testing.T, args ...string) outcome {
	t.Helper()
	if args[0] == "up" {
		args = append(args, h.ports...)
	}
	return refitWith(t, h.getenv, nil, args...)
}

func (h host) up(t *testing.T, args ...string) local.State {
	t.Helper()
	got := h.refit(t, append([]string{"up", "-o", "json"}, args...)...)
	require.Equal(t, cli.ExitDone, got.code, got.err)
	var s local.State
	require.NoError(t, json.Unmarshal([]byte(got.out), &s))
	return s
}

func kubeconfig(t *testing.T) string {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(file, []byte("apiVersion: v1\nkind: Config\n"), 0o600))
	return file
}

func TestUpIsFoundAgainAndDownLosesNoRun(t *testing.T) {
	h := newHost(t)
	file := kubeconfig(t)
	first := h.up(t, "--cluster", "lab="+file+"#one")
	require.Equal(t, "lab="+file+"#one", first.Clusters)
	require.FileExists(t, first.Identity)
	require.Equal(t, first, h.up(t), "a second up changes nothing")

	plan, id := planFile(t, "gate")
	require.Equal(t, cli.ExitGate, h.refit(t, "start", plan, "--until-gate").code)
	waiting := h.refit(t, "status", id)
	require.Contains(t, waiting.out, first.UI+"/namespaces/default/workflows/"+id, "the UI that up started is known")

	down := h.refit(t, "down")
	require.Equal(t, cli.ExitDone, down.code, down.err)
	require.Contains(t, down.out, "Temporal stopped")
	_, err := net.Dial("tcp", first.Address)
	require.Error(t, err, "nothing listens any more")
	require.Contains(t, h.refit(t, "down").out, "does not run")

	second := h.up(t)
	require.NotEqual(t, first.Server, second.Server)
	require.Equal(t, first.Clusters, second.Clusters, "the clusters are remembered")
	require.Equal(t, cli.ExitDone, h.refit(t, "approve", id).code)
	require.Equal(t, cli.ExitDone, h.refit(t, "watch", id).code)
}

func TestUpStartsAgainWhatWasKilled(t *testing.T) {
	h := newHost(t)
	first := h.up(t)
	plan, id := planFile(t, "gate")
	require.Equal(t, cli.ExitGate, h.refit(t, "start", plan, "--until-gate").code)
	require.NoError(t, syscall.Kill(first.Server.Pid, syscall.SIGKILL))
	require.NoError(t, syscall.Kill(first.Worker.Pid, syscall.SIGKILL))
	require.Eventually(t, func() bool { return !first.Running() }, waitLimit, waitStep)
	second := h.up(t)
	require.NotEqual(t, first.Server, second.Server)
	require.NotEqual(t, first.Worker, second.Worker)
	require.Equal(t, cli.ExitGate, h.refit(t, "watch", id).code)
}

func TestOtherClustersRestartTheWorkerAlone(t *testing.T) {
	h := newHost(t)
	file := kubeconfig(t)
	first := h.up(t, "--cluster", "lab="+file+"#one")
	second := h.up(t, "--cluster", "lab="+file+"#two")
	require.Equal(t, first.Server, second.Server)
	require.NotEqual(t, first.Worker, second.Worker)
}

func TestUpSaysWhatIsWrong(t *testing.T) {
	h := newHost(t)
	file := kubeconfig(t)
	for _, c := range []struct{ cluster, text string }{
		{"lab", "want NAME=KUBECONFIG#CONTEXT"},
		{"lab=" + file, "want NAME=KUBECONFIG#CONTEXT"},
		{"lab=/does/not/exist#one", "no such file"},
		{"broken=" + file + "#one", "cluster broken: no such context"},
	} {
		got := h.refit(t, "up", "--cluster", c.cluster)
		require.Equal(t, cli.ExitError, got.code)
		require.Contains(t, got.err, c.text)
	}
	require.Equal(t, cli.ExitDone, h.refit(t, "down").code)

	taken, err := net.Listen("tcp", "127.0.0.1:"+h.ports[1])
	require.NoError(t, err)
	defer taken.Close()
	got := h.refit(t, "up")
	require.Equal(t, cli.ExitError, got.code)
	require.Contains(t, got.err, "port "+h.ports[1]+" is taken")

	t.Setenv("PATH", t.TempDir())
	missing := h.refit(t, "up")
	require.Contains(t, missing.err, "program temporal: expected in")
}
