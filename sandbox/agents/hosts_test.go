package agents

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/sandbox/kwok"
	"github.com/refit-run/refit/sandbox/tensorfusion"
)

func made(t *testing.T, dir string, nodes ...string) Hosts {
	t.Helper()
	hosts, err := MakeHosts(dir, nodes, 2)
	require.NoError(t, err)
	return hosts
}

func value(t *testing.T, h *fakeHost, key string) string {
	t.Helper()
	v, err := h.gpus.Get(key)
	require.NoError(t, err)
	return v
}

func TestFakeHostShowsTheDoublesGPUs(t *testing.T) {
	hosts := made(t, t.TempDir(), node, "training-000")
	require.Equal(t, "2", value(t, hosts[node], "gpus"))
	for i, key := range []string{"gpu.0.uuid", "gpu.1.uuid"} {
		got := value(t, hosts[node], key)
		require.Equal(t, "GPU-"+tensorfusion.DeviceUUID(node, i)[len("gpu-"):], got)
		require.NotEqual(t, got, value(t, hosts["training-000"], key), "every node has GPUs of its own")
	}
	boot, err := os.ReadFile(filepath.Join(hosts[node].root, "proc/sys/kernel/random/boot_id"))
	require.NoError(t, err)
	require.Equal(t, kwok.BootID(node), strings.TrimSpace(string(boot)))
	real, err := filepath.EvalSymlinks(filepath.Join(hosts[node].gpus.Lib(), fakes.CUDA))
	require.NoError(t, err)
	require.Equal(t, "libcuda.so."+fakes.DefaultDriver, filepath.Base(real))
	require.NotEqual(t, hosts[node].env(), hosts["training-000"].env(), "an agent finds its own host")
}

func TestFaultIsInTheHostsStateUntilRepaired(t *testing.T) {
	hosts := made(t, t.TempDir(), node, "training-000")
	r := NewReal(RealOptions{Cluster: "sandbox", Hosts: hosts})
	require.NoError(t, r.Break(node))
	require.Equal(t, "getter", value(t, hosts[node], lostGPU))
	require.Empty(t, value(t, hosts["training-000"], lostGPU))
	require.NoError(t, r.Repair(node))
	require.Empty(t, value(t, hosts[node], lostGPU))
	require.ErrorContains(t, r.Break("elsewhere"), "elsewhere")
	require.ErrorContains(t, r.StopNode("elsewhere"), "elsewhere")
	require.ErrorContains(t, r.StartNode(t.Context(), "elsewhere"), "elsewhere")
}

func TestHostsAreHealthyAfterARestartOfTheSandbox(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "agents")
	require.NoError(t, made(t, dir, node)[node].setBroken(true))
	require.Empty(t, value(t, made(t, dir, node)[node], lostGPU))
}

func TestMoreGPUsThanTheLibrariesShowAreRefused(t *testing.T) {
	for _, gpus := range []int{0, MaxFakeGPUs + 1} {
		_, err := MakeHosts(t.TempDir(), []string{node}, gpus)
		require.ErrorContains(t, err, "1 to 16")
	}
}
