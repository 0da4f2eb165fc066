package main

import (
	"encoding/json"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
)

// The command as a canary pod runs it: what to prove is in its environment, the
// verdict goes to a file and to standard output.
func TestTheProbeWritesItsVerdictAndEndsWithIt(t *testing.T) {
	w := newWorld(t)
	t.Setenv("REFIT_PROBE_GPU_COUNT", "1")
	t.Setenv("REFIT_PROBE_VRAM_LIMIT", "64Mi")
	t.Setenv("LD_PRELOAD", w.gpus.Limiter())
	t.Setenv("REFIT_FAKE_LIMIT_MIB", "64")
	file := filepath.Join(t.TempDir(), "termination-log")
	probe := func(want int, args ...string) (r gpu.Result) {
		t.Helper()
		code, out := invoke(append([]string{"probe", "--output", file, "--memory", "4"}, args...)...)
		require.Equal(t, want, code, out)
		require.JSONEq(t, out, read(t, file), "the same at both places")
		require.NoError(t, json.Unmarshal([]byte(out), &r))
		require.Equal(t, node, r.Node)
		return r
	}
	r := probe(0, "--copies")
	require.Equal(t, gpu.Pass, r.Verdict)
	require.Len(t, r.Proofs, 1)
	require.Equal(t, w.gpus.UUID(0), r.Proofs[0].Device)
	require.Positive(t, r.Proofs[0].Bandwidth.DeviceToDevice)

	require.Equal(t, gpu.Unfit, probe(1, "--count", "2").Verdict, "another number of devices than asked for")
	t.Setenv("REFIT_FAKE_LIMIT_MIB", "4096")
	require.Equal(t, gpu.Unfit, probe(1, "--limit", "128Mi").Verdict, "a limit above the one asked for")
	require.NoError(t, w.gpus.Set("gpu.0.cuda.bad.result", "1"))
	r = probe(1)
	require.Equal(t, gpu.Unfit, r.Verdict)
	require.Empty(t, r.Proofs)
	require.Contains(t, r.Checks[0].Found, "wrong result")

	code, out := invoke("probe", "--output", filepath.Join(t.TempDir(), "none", "log"))
	require.Equal(t, 1, code, "a verdict that cannot be told counts for nothing")
	require.NotEmpty(t, out)
	for _, args := range [][]string{{"--limit", "much"}, {"--count", "x"}, {"extra"}} {
		code, _ = invoke(append([]string{"probe"}, args...)...)
		require.Equal(t, 2, code, "%q", args)
	}
	t.Setenv("REFIT_PROBE_GPU_COUNT", "none")
	code, _ = invoke("probe")
	require.Equal(t, 2, code)
}
