package agent

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/fakes"
)

// Whatever keeps the probe from a pass makes the host unfit. A fault of GPU 1
// leaves GPU 0 proven.
func TestAFaultThatOnlyTheProbeMeetsMakesTheHostUnfit(t *testing.T) {
	for _, f := range []struct {
		what, key, value, found string
		proven                  int // GPUs that are proven all the same
	}{
		{"no device", "fail.cuInit", "100", "no_device during init: cuInit: CUDA_ERROR_NO_DEVICE (100)", 0},
		{"fabric manager", "fail.cuInit", "802", "not_ready during init: cuInit: CUDA_ERROR_SYSTEM_NOT_READY (802)", 0},
		{"half an upgrade", "fail.cuInit", "803", "mismatch during init: cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", 0},
		{"crash", "crash.cuInit", "1", "crash during init", 0},
		{"out of memory", "gpu.1.cuda.free.mib", "1", "CUDA_ERROR_OUT_OF_MEMORY (2)", 1},
		{"JIT", "gpu.1.cuda.jit.fault", "1", "compiler: ptxas", 1},
		{"launch failed", "gpu.1.cuda.fault.kernel", "1", "CUDA_ERROR_LAUNCH_FAILED (719)", 1},
		{"crash in the launch", "gpu.1.crash.cuLaunchKernel", "1", "crash during kernel", 1},
	} {
		t.Run(f.what, func(t *testing.T) {
			w := newWorld(t)
			w.set(f.key, f.value)
			r := w.quick(nil)
			requireRow(t, r, "CUDA call", f.found, gpu.Fatal)
			require.Equal(t, gpu.Unfit, r.Verdict)
			require.Len(t, r.Proofs, f.proven, "failing: %q", failing(r))
		})
	}
	t.Run("missing symbol", func(t *testing.T) {
		w := newWorld(t, fakes.Without("cuLaunchKernel"))
		r := w.quick(nil)
		requireRow(t, r, "CUDA call", "libcuda has no function cuLaunchKernel", gpu.Fatal)
		require.Equal(t, gpu.Unfit, r.Verdict)
	})
	t.Run("no library", func(t *testing.T) {
		w := newWorld(t)
		require.NoError(t, os.Remove(filepath.Join(w.gpus.Lib(), fakes.CUDA)))
		r := w.quick(nil)
		requireRow(t, r, "CUDA call", "no_library during dlopen", gpu.Fatal)
		require.Equal(t, gpu.Unfit, r.Verdict)
	})
}

func TestADriverThatHoldsEndsOrDelaysItsOwnStartIsTold(t *testing.T) {
	for _, f := range []struct {
		what, key, found string
		deadline         time.Duration
	}{
		{"abort", "crash.nvmlInit", "crashed", 0},
		{"hang", "hang.nvmlInit", "gave no reply", 3 * time.Second},
	} {
		t.Run(f.what, func(t *testing.T) {
			w := newWorld(t)
			w.set(f.key, "1")
			r := w.validate(gpu.ValidateRequest{Level: gpu.Quick, Deadline: f.deadline})
			requireRow(t, r, "library and driver", f.found, gpu.Fatal)
			requireRow(t, r, "library and driver", "nvmlInit", gpu.Fatal)
			require.Equal(t, gpu.Unfit, r.Verdict)
			w.set(f.key, "")
			require.Equal(t, gpu.Pass, w.quick(nil).Verdict, "the agent lives on")
		})
	}
	t.Run("slow calls within the deadline", func(t *testing.T) {
		w := newWorld(t)
		w.set("slow.nvmlInit", "300", "slow.nvmlDeviceGetTemperature", "300", "slow.cuInit", "300")
		began := time.Now()
		require.Equal(t, gpu.Pass, w.quick(nil).Verdict)
		require.Greater(t, time.Since(began), 900*time.Millisecond, "they were slow")
	})
}

// The second run of the probe, as a workload of a TensorFusion host meets it.
func TestTheLimiterOfATensorFusionHostIsProvenOnEveryGPU(t *testing.T) {
	for _, f := range []struct {
		what, limit, found string
		holds              bool
	}{
		{"in force", "64", "128 MiB were refused, the limit is 64 MiB", true},
		{"loaded and not in force", "", "128 MiB were granted, the limit is 64 MiB", false},
	} {
		t.Run(f.what, func(t *testing.T) {
			w := newWorld(t)
			t.Setenv("REFIT_FAKE_LIMIT_MIB", f.limit)
			checks, r, err := w.agent.Examine(context.Background(), gpu.ValidateRequest{Node: node, Level: gpu.Quick, Expect: &gpu.Expect{
				SharedMemoryMiB: 4, TensorFusion: &gpu.TensorFusionHost{Port: 8000, Limiter: w.gpus.Limiter(), LimitMiB: 64}}}, func(string) {})
			require.NoError(t, err)
			var limits []gpu.Check
			for _, c := range checks {
				if c.Name == "vGPU limit" {
					limits = append(limits, c)
				}
			}
			require.Len(t, limits, 2)
			for i, c := range limits {
				require.Equal(t, w.gpus.UUID(i), c.Device)
				require.Equal(t, f.found, c.Found)
				require.Equal(t, f.holds, c.OK)
				require.Equal(t, gpu.Fatal, c.Severity)
			}
			require.False(t, slices.ContainsFunc(checks, func(c gpu.Check) bool { return c.Name == "CUDA call" && !c.OK }), "the plain run is not limited")
			require.Len(t, r.Proofs, 2)
		})
	}
}
