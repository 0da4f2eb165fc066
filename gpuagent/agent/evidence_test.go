package agent

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/fakes"
)

// resultLimit bounds what one host leaves in a history, twice as much as eight
// equal GPUs need.
const resultLimit = 32 << 10

func TestAResultKeepsWhatWasMeasuredAndStaysSmall(t *testing.T) {
	w := newWorld(t)
	w.set("gpus", "8")
	for i := 2; i < 8; i++ {
		require.NoError(t, w.tree.AddGPU(i))
	}
	b := w.baseline()
	r := w.validate(gpu.ValidateRequest{Level: gpu.Standard, Baseline: b})
	require.Equal(t, gpu.Pass, r.Verdict, "failing: %q", failing(r))
	require.Len(t, r.Proofs, 8)
	for i, p := range r.Proofs {
		require.Equal(t, w.gpus.UUID(i), p.Device)
		require.Equal(t, p.WantedMiB, p.TestedMiB)
		require.Greater(t, p.TestedMiB, uint64(10_000), "a quarter of what is free")
		require.GreaterOrEqual(t, p.Patterns, 3)
		require.NotNil(t, p.Bandwidth)
		require.Greater(t, min(p.Bandwidth.DeviceToDevice, p.Bandwidth.HostToDevice, p.Bandwidth.DeviceToHost), 0.0)
	}
	require.Contains(t, r.Found, gpu.Found{Name: "driver version", Found: fakes.DefaultDriver})
	require.Contains(t, r.Found, gpu.Found{Name: "PCIe width", Found: "x16", Devices: 8})
	for _, kept := range []any{b, r} {
		text, err := json.Marshal(kept)
		require.NoError(t, err)
		require.Less(t, len(text), resultLimit)
		t.Logf("%T of 8 GPUs: %d bytes", kept, len(text))
	}
}

func TestADriverThatIsAnotherThanInTheBaselineIsUnfitUnlessThePlanDeclaresIt(t *testing.T) {
	w := newWorld(t)
	b := w.baseline()
	require.NoError(t, w.gpus.Swap(fakes.Driver("590.1.2")))
	require.NoError(t, w.tree.Driver("590.1.2"))
	r := w.quick(b)
	requireRow(t, r, "driver version", "590.1.2", gpu.Fatal)
	require.Equal(t, gpu.Unfit, r.Verdict)
	r = w.validate(gpu.ValidateRequest{Baseline: b, Expect: &gpu.Expect{SharedMemoryMiB: 4, Driver: "590.1.2"}})
	require.Equal(t, gpu.Pass, r.Verdict, "failing: %q", failing(r))
}

func TestAnAnswerThatAnUpgradeTookAwayIsAWarning(t *testing.T) {
	w := newWorld(t)
	b := w.baseline()
	w.set("gpu.1.fail.nvmlDeviceGetSramEccErrorStatus", "3")
	require.Equal(t, gpu.Pass, w.quick(nil).Verdict)
	r := w.quick(b)
	requireRow(t, r, "SRAM errors", "not supported", gpu.Warn)
	require.Equal(t, gpu.Degraded, r.Verdict)
}

func TestAGPUOfWhichTooLittleCouldBeTestedIsNotProven(t *testing.T) {
	w := newWorld(t)
	w.set("gpu.1.cuda.free.mib", "1000", "gpu.1.cuda.alloc.mib", "150")
	r := w.validate(gpu.ValidateRequest{Level: gpu.Standard})
	requireRow(t, r, "memory tested", "250 MiB were to be tested", gpu.Fatal)
	require.Equal(t, gpu.Unproven, r.Verdict)
	at := slices.IndexFunc(r.Proofs, func(p gpu.Proof) bool { return p.Device == w.gpus.UUID(1) })
	require.Equal(t, uint64(250), r.Proofs[at].WantedMiB)
	require.Less(t, r.Proofs[at].TestedMiB, uint64(150))

	w.set("gpu.1.cuda.free.mib", "30", "gpu.1.cuda.alloc.mib", "")
	r = w.validate(gpu.ValidateRequest{Level: gpu.Quick, Expect: &gpu.Expect{}})
	requireRow(t, r, "memory tested", "only", gpu.Warn)
	require.Equal(t, gpu.Degraded, r.Verdict, "beside tenants it is a warning")
}

// A named pipe that nobody writes to holds its reader as a file of sysfs does
// whose driver hangs.
func TestAFileOfTheHostThatHangsHoldsAChildAndNotTheAgent(t *testing.T) {
	w := newWorld(t)
	b := w.baseline()
	version := filepath.Join(w.tree.Root, "sys/module/nvidia/version")
	require.NoError(t, os.Remove(version))
	require.NoError(t, unix.Mkfifo(version, 0o600))
	r := w.validate(gpu.ValidateRequest{Level: gpu.Quick, Baseline: b, Deadline: 10 * time.Second})
	requireRow(t, r, "host", "during the kernel modules", gpu.Fatal)
	require.Equal(t, gpu.Unproven, r.Verdict, "failing: %q", failing(r))
	require.Empty(t, failing(r), "what was not read is taken for absent nowhere")
	require.NoError(t, os.Remove(version))
	require.NoError(t, w.tree.Driver(fakes.DefaultDriver))
	require.Equal(t, gpu.Pass, w.quick(b).Verdict, "the agent lives on")
}
