package fault

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOnlyTheHelmProcessOfThisSandboxIsFound(t *testing.T) {
	proc := t.TempDir()
	process := func(pid, cmdline, environ string) {
		folder := filepath.Join(proc, pid)
		require.NoError(t, os.MkdirAll(folder, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(folder, "cmdline"), []byte(cmdline), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(folder, "environ"), []byte(environ), 0o600))
	}
	const ours = "TEMPORAL_ADDRESS=127.0.0.1:20001"
	process("11", "refit-worker\x00", ours+"\x00")
	process("12", "/proc/self/exe\x00helm-child\x00", "A=b\x00TEMPORAL_ADDRESS=127.0.0.1:200011\x00")
	require.Zero(t, helmProcess(proc, ours))
	process("13", "/proc/self/exe\x00helm-child\x00", "A=b\x00"+ours+"\x00")
	require.Equal(t, 13, helmProcess(proc, ours))
	process("13", "/proc/self/exe\x00helm-child\x00", ours+"\x00A=b\x00")
	require.Equal(t, 13, helmProcess(proc, ours), "the first variable counts too")
}

func TestHelmKillLiesInWaitAndGivesUpInSilence(t *testing.T) {
	var later func(context.Context) error
	targets := &Targets{TemporalAddress: "127.0.0.1:1", After: func(_ time.Duration, f func(context.Context) error) { later = f }}
	require.NoError(t, Inject(t.Context(), targets, "helm-kill", []string{"100ms"}))
	require.NoError(t, later(t.Context()), "a fault that never came about must not end the sandbox")
	require.Error(t, Inject(t.Context(), targets, "helm-kill", []string{"soon"}))
}
