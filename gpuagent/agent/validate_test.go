package agent

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/duration"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/gpuagent/nvml"
)

func TestAHealthyHostPassesEveryLevelAgainstItsBaseline(t *testing.T) {
	w := newWorld(t)
	b := w.baseline()
	require.Len(t, b.Devices, 2)
	for _, level := range []gpu.Level{gpu.Quick, gpu.Standard} {
		r := w.validate(gpu.ValidateRequest{Level: level, Baseline: b})
		require.Empty(t, failing(r), "level %s", level)
		require.Equal(t, gpu.Pass, r.Verdict, "level %s: %+v", level, r.Checks)
		require.Greater(t, r.Passed, 50)
		require.Len(t, r.Devices, 2)
	}
}

// installed makes the fake libraries what an installer leaves: links to files
// with the driver's version in their names.
func (w *world) installed(version string) {
	w.t.Helper()
	for _, name := range []string{fakes.NVML, fakes.CUDA} {
		link, file := filepath.Join(w.gpus.Lib(), name), strings.TrimSuffix(name, "1")+version
		require.NoError(w.t, os.Rename(link, filepath.Join(w.gpus.Lib(), file)))
		require.NoError(w.t, os.Symlink(file, link))
	}
}

func TestTheLibrariesAreJudgedWhereTheyWereReadAndAsTheChildrenLoadedThem(t *testing.T) {
	rows := func(w *world) (out []gpu.Check) {
		checks, _, err := w.agent.Examine(context.Background(), gpu.ValidateRequest{Node: node, Level: gpu.Quick}, func(string) {})
		require.NoError(t, err)
		for _, c := range checks {
			if c.Name == "user-space libraries" {
				out = append(out, c)
			}
		}
		return out
	}
	// files are those of the host, loaded those that the children get.
	upgraded := func(files, loaded string) *world {
		w := newWorld(t)
		w.installed(loaded)
		for _, name := range []string{fakes.NVML, fakes.CUDA} {
			file := strings.TrimSuffix(name, "1") + files
			require.NoError(t, w.tree.Write("usr/lib64/"+file, ""))
			require.NoError(t, os.Symlink(file, filepath.Join(w.tree.Root, "usr/lib64", name)))
		}
		return w
	}
	w := upgraded(fakes.DefaultDriver, fakes.DefaultDriver)
	said := ""
	for _, c := range rows(w) {
		require.True(t, c.OK, "%+v", c)
		said += c.Found + "\n"
	}
	for _, name := range []string{"libnvidia-ml.so", "libcuda.so"} {
		require.Contains(t, said, "(file "+filepath.Join(w.tree.Root, "usr/lib64", name+".1")+")", "what stands on the host's disk")
		require.Contains(t, said, "(loaded by the agent: "+filepath.Join(w.gpus.Lib(), name+"."+fakes.DefaultDriver)+")", "what answered")
	}
	for what, c := range map[string]struct{ files, loaded, found, hint string }{
		"the host was upgraded under a container": {fakes.DefaultDriver, "570.1.2", "570.1.2 (loaded by the agent: ", "restart its pod"},
		"the host's next containers get others":   {"570.1.2", fakes.DefaultDriver, "570.1.2 (file ", "half done"},
	} {
		t.Run(what, func(t *testing.T) {
			failed := 0
			for _, row := range rows(upgraded(c.files, c.loaded)) {
				if strings.Contains(row.Found, c.found) {
					failed++
					require.Equal(t, gpu.Fatal, row.Severity)
					require.False(t, row.OK)
					require.Contains(t, row.Hint, c.hint)
				}
			}
			require.Equal(t, 2, failed)
		})
	}
}

// A function that is not guarded by a look-up, as one of those that every driver
// has: the dynamic loader ends the process.
func TestALibraryWithoutAFunctionThatEveryDriverHasEndsTheChildOnly(t *testing.T) {
	w := newWorld(t, fakes.Without("nvmlShutdown"))
	r := w.quick(nil)
	requireRow(t, r, "library and driver", "status 127", gpu.Fatal)
	requireRow(t, r, "library and driver", "nvmlShutdown", gpu.Fatal)
	require.Equal(t, gpu.Unfit, r.Verdict)
	require.NoError(t, w.gpus.Swap())
	require.Equal(t, gpu.Pass, w.quick(nil).Verdict, "the agent lives on")
}

func TestWhatAnUpgradeMayReorderIsNotHeldAgainstTheBaseline(t *testing.T) {
	w := newWorld(t)
	b := w.baseline()
	w.set("gpu.0.minor", "1", "gpu.1.minor", "0", "gpu.0.uuid", w.gpus.UUID(1), "gpu.1.uuid", w.gpus.UUID(0),
		"gpu.0.serial", "1650023000001", "gpu.1.serial", "1650023000000", "gpu.0.pci", "0000:11:00.0", "gpu.1.pci", "0000:10:00.0")
	r := w.quick(b)
	require.Equal(t, gpu.Pass, r.Verdict, "failing: %q", failing(r))
}

func TestOnADrainedHostProcessesAndTheirMemoryAreFound(t *testing.T) {
	w := newWorld(t)
	w.set("gpu.1.processes.graphics", "4711:100", "gpu.0.memory.used.mib", "9000")
	r := w.validate(gpu.ValidateRequest{Level: gpu.Standard})
	requireRow(t, r, "processes", "4711 (graphics)", gpu.Reset)
	requireRow(t, r, "memory in use", "9000 MiB", gpu.Warn)
	require.Equal(t, gpu.ResetNeeded, r.Verdict)
	require.Empty(t, failing(w.quick(nil)), "beside tenants nobody asks")
}

// The plan's minutes are what a soak takes, however many: a deadline only cuts
// what could not end before it.
func TestAStressKeepsAtItForThePlansTime(t *testing.T) {
	for _, soak := range []time.Duration{time.Minute, 10 * time.Minute, 2 * time.Hour, 24 * time.Hour} {
		v := validation{req: gpu.ValidateRequest{Level: gpu.Stress}, expect: gpu.Expect{StressFor: duration.Duration(soak)}, deadline: time.Now().Add(soak + standardLimit)}
		require.Equal(t, soak, v.options(target{}, 1).Soak)
	}
	v := validation{req: gpu.ValidateRequest{Level: gpu.Stress}, expect: gpu.Expect{StressFor: duration.Duration(time.Hour)}, deadline: time.Now().Add(time.Minute)}
	require.Less(t, v.options(target{}, 1).Soak, time.Minute)
}

func TestAStressThatItsDeadlineCutsShortIsUnprovenAndSaysSo(t *testing.T) {
	w := newWorld(t)
	w.set("gpus", "1", "gpu.0.cuda.free.mib", "128", "gpu.0.cuda.piece.mib", "4") // small copies are over sooner
	require.NoError(t, w.tree.Remove("sys/bus/pci/devices/0000:11:00.0"))
	stress := func(soak, deadline time.Duration) gpu.Result {
		return w.validate(gpu.ValidateRequest{Level: gpu.Stress, Deadline: deadline, Expect: &gpu.Expect{StressFor: duration.Duration(soak)}})
	}
	r := stress(time.Minute, 6*time.Second)
	requireRow(t, r, "stress time", "of the plan's 1m0s", gpu.Fatal)
	require.Equal(t, gpu.Unproven, r.Verdict, "failing: %q", failing(r))
	r = stress(time.Second, 0)
	require.Equal(t, gpu.Pass, r.Verdict, "failing: %q", failing(r))
	require.Equal(t, 1, r.Proofs[0].SoakedSeconds)
}

func TestAHypervisorWithoutADeclaredPortIsAskedOnThePoolsDefault(t *testing.T) {
	for declared, want := range map[int]int{0: 8000, 8001: 8001} {
		expect := &gpu.Expect{TensorFusion: &gpu.TensorFusionHost{Port: declared}}
		v := newValidation(&Agent{}, gpu.ValidateRequest{Expect: expect}, time.Minute, nil)
		require.Equal(t, want, v.hostOptions(&nvml.Snapshot{}).TensorFusion.Port)
		require.Equal(t, declared, expect.TensorFusion.Port, "the request is left as it is")
	}
}
