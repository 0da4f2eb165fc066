package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/gpuagent/nvml"
)

func TestAFaultOfAGPUIsFoundThroughTheRealBinding(t *testing.T) {
	for _, f := range []struct {
		what     string
		state    []string
		row      string
		severity gpu.Severity
		found    string
		verdict  gpu.Verdict
	}{
		{"lost in a getter", []string{"gpu.1.lost", "getter"}, "identity", gpu.Fatal, "GPU_IS_LOST", gpu.Unfit},
		{"lost at the handle", []string{"gpu.1.lost", "handle"}, "identity", gpu.Fatal, "GPU_IS_LOST", gpu.Unfit},
		{"driver-internal error", []string{"gpu.1.fail.nvmlDeviceGetComputeMode", "999"}, "compute mode", gpu.Fatal, "UNKNOWN", gpu.Unfit},
		{"ECC error", []string{"gpu.1.ecc.volatile.uncorrected", "1"}, "ECC volatile", gpu.Fatal, "1", gpu.Unfit},
		{"ECC error over the life", []string{"gpu.1.ecc.aggregate.uncorrected", "9"}, "ECC aggregate", gpu.Warn, "9", gpu.Degraded},
		{"ECC change pending", []string{"gpu.1.ecc.pending", "0"}, "ECC mode", gpu.Reset, "off", gpu.ResetNeeded},
		{"SRAM threshold", []string{"gpu.1.sram.threshold", "1"}, "SRAM errors", gpu.Fatal, "exceeded", gpu.Unfit},
		{"remap pending", []string{"gpu.1.remap.pending", "1"}, "row remap", gpu.Reset, "waits", gpu.ResetNeeded},
		{"remap failed", []string{"gpu.1.remap.failed", "1"}, "row remap", gpu.Fatal, "could not", gpu.Unfit},
		{"recovery action", []string{"gpu.1.recovery", "2"}, "recovery action", gpu.Fatal, "NODE_REBOOT", gpu.Unfit},
		{"unknown recovery action", []string{"gpu.1.recovery", "99"}, "recovery action", gpu.Fatal, "99", gpu.Unfit},
		{"PCIe width", []string{"gpu.1.pcie.width", "8"}, "PCIe width", gpu.Fatal, "x8", gpu.Unfit},
		{"PCIe replays", []string{"gpu.1.pcie.replay", "50"}, "PCIe errors", gpu.Warn, "50 new", gpu.Degraded},
		{"bad packets on PCIe", []string{"gpu.1.field.176", "3"}, "PCIe errors", gpu.Warn, "3 new", gpu.Degraded},
		{"fatal PCIe error", []string{"gpu.1.field.180", "1"}, "PCIe errors", gpu.Fatal, "1", gpu.Unfit},
		{"PCIe slow under load", []string{"gpu.1.pcie.gen", "3"}, "PCIe generation", gpu.Warn, "3", gpu.Degraded},
		{"banks without spare rows", []string{"gpu.1.remap.banks.none", "2"}, "row remap reserve", gpu.Warn, "2 banks", gpu.Degraded},
		{"unrepairable memory", []string{"gpu.1.unrepairable", "1"}, "unrepairable memory", gpu.Fatal, "unrepairable", gpu.Unfit},
		{"channel repair pending", []string{"gpu.1.repair.channel", "1"}, "memory repair", gpu.Fatal, "pending", gpu.Unfit},
		{"InfoROM corrupted", []string{"gpu.1.fail.nvmlDeviceValidateInforom", "14"}, "InfoROM", gpu.Warn, "CORRUPTED_INFOROM", gpu.Degraded},
		{"hot", []string{"gpu.1.temperature.margin", "2"}, "temperature", gpu.Warn, "4 °C", gpu.Degraded},
		{"memory hot", []string{"gpu.1.temperature.memory", "104"}, "memory temperature", gpu.Warn, "104 °C", gpu.Degraded},
		{"power limit not in force", []string{"gpu.1.power.enforced", "300000"}, "power limit", gpu.Warn, "300 W in force", gpu.Degraded},
		{"fabric completed with an error", []string{"gpu.1.fabric.status", "999"}, "fabric", gpu.Fatal, "UNKNOWN", gpu.Unfit},
		{"unhealthy route of the fabric", []string{"gpu.1.fabric.mask", "410"}, "fabric", gpu.Fatal, "unhealthy route", gpu.Unfit},
		{"fabric of limited capacity", []string{"gpu.1.fabric.summary", "3"}, "fabric", gpu.Warn, "limited", gpu.Degraded},
		{"links slower", []string{"gpu.1.nvlink.speed", "12500"}, "NVLink speed", gpu.Warn, "12500", gpu.Degraded},
		{"peer access lost", []string{"gpu.1.p2p.0.0", "1"}, "P2P", gpu.Warn, "/1/", gpu.Degraded},
		{"MIG change pending", []string{"gpu.1.mig.pending", "1"}, "MIG mode", gpu.Reset, "on after a reset", gpu.ResetNeeded},
		{"firmware of another driver", []string{"gpu.1.gsp.version", "570.1.2"}, "GSP", gpu.Warn, "570.1.2", gpu.Degraded},
		{"firmware switched off", []string{"gpu.1.gsp.mode", "0"}, "GSP", gpu.Warn, "off", gpu.Degraded},
		{"card exchanged", []string{"gpu.1.serial", "7"}, "serial", gpu.Warn, "7", gpu.Degraded},
		{"memory lost", []string{"gpu.1.memory.total.mib", "40960"}, "memory total", gpu.Warn, "42949672960", gpu.Degraded},
		{"double-bit error under load", []string{"gpu.1.event", "2:0"}, "Xid live", gpu.Fatal, "double-bit", gpu.Unfit},
		{"throttle", []string{"gpu.1.throttle", "64"}, "throttle", gpu.Fatal, "hardware thermal", gpu.Unfit},
		{"power limit", []string{"gpu.1.power.limit", "400000"}, "power limit", gpu.Warn, "400 W", gpu.Degraded},
		{"compute mode", []string{"gpu.1.compute.mode", "2"}, "compute mode", gpu.Fatal, "PROHIBITED", gpu.Unfit},
		{"link down", []string{"gpu.1.nvlink.3.up", "0"}, "NVLink up", gpu.Fatal, "down: 3", gpu.Unfit},
		{"link replay", []string{"gpu.1.nvlink.3.replay", "2"}, "NVLink errors", gpu.Fatal, "2 new", gpu.Unfit},
		{"recovery of an NVLink 5 link", []string{"gpu.1.nvlink.generation", "5", "gpu.1.field.215.3", "1"}, "NVLink errors", gpu.Fatal, "1 new", gpu.Unfit},
		{"fabric not started", []string{"gpu.1.fabric.state", "1"}, "fabric", gpu.Fatal, "NOT_STARTED", gpu.Unfit},
		{"VBIOS changed", []string{"gpu.1.vbios", "1.2.3"}, "VBIOS", gpu.Warn, "1.2.3", gpu.Degraded},
		{"UUID changed", []string{"gpu.1.uuid", "GPU-00000000-0000-4000-8000-00000000ffff"}, "device set", gpu.Fatal, "missing", gpu.Unfit},
		{"count short by one", []string{"gpus", "1"}, "device count", gpu.Fatal, "1 by NVML", gpu.Unfit},
		{"confidential computing not ready", []string{"cc.feature", "1", "cc.ready", "0"}, "confidential computing", gpu.Fatal, "not ready", gpu.Unfit},
		{"live Xid", []string{"gpu.1.event", "8:79"}, "Xid live", gpu.Fatal, "Xid 79", gpu.Unfit},
		{"wrong result", []string{"gpu.1.cuda.bad.result", "1"}, "CUDA call", gpu.Fatal, "fail", gpu.Unfit},
		{"bad memory word", []string{"gpu.1.cuda.bad.word", "7"}, "CUDA call", gpu.Fatal, "fail", gpu.Unfit},
	} {
		t.Run(f.what, func(t *testing.T) {
			w := newWorld(t)
			b := w.baseline()
			w.set(f.state...)
			r := w.quick(b)
			requireRow(t, r, f.row, f.found, f.severity)
			require.Equal(t, f.verdict, r.Verdict, "failing: %q", failing(r))
		})
	}
}

func TestAHostWithoutDriverSaysWhatIsMissing(t *testing.T) {
	t.Run("library absent", func(t *testing.T) {
		w := newWorld(t)
		require.NoError(t, w.gpus.RemoveLibraries())
		r := w.quick(nil)
		requireRow(t, r, "library and driver", "LIBRARY_NOT_FOUND", gpu.Fatal)
		require.Equal(t, gpu.Unfit, r.Verdict)
		found, err := State(context.Background(), time.Minute)
		require.NoError(t, err)
		require.Contains(t, found, "no driver library")
		_, err = w.agent.Baseline(context.Background(), gpu.BaselineRequest{Node: node})
		require.ErrorContains(t, err, "refit-gpuagent check")
	})
	t.Run("driver not loaded", func(t *testing.T) {
		w := newWorld(t)
		w.set("module.driver", "none")
		requireRow(t, w.quick(nil), "library and driver", "driver not loaded", gpu.Fatal)
	})
	t.Run("version mismatch", func(t *testing.T) {
		w := newWorld(t)
		w.set("module.driver", "570.1.2")
		requireRow(t, w.quick(nil), "library and driver", "version mismatch", gpu.Fatal)
	})
}

func TestALibraryThatLacksFunctionsIsReadWithoutThem(t *testing.T) {
	w := newWorld(t, fakes.Without("nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetFieldValues", "nvmlDeviceGetMemoryInfo_v2"))
	r := w.quick(nil)
	require.Empty(t, failing(r))
	require.Equal(t, gpu.Pass, r.Verdict)
	var missing []string
	for _, c := range r.Checks {
		if strings.Contains(c.Skipped, "nvmlDeviceGetSramEccErrorStatus") {
			missing = append(missing, c.Name)
		}
	}
	require.NotEmpty(t, missing, "the rows are skipped by name")
}

func TestALibraryThatEndsHoldsOrCrashesTheChildIsAVerdict(t *testing.T) {
	for _, f := range []struct{ what, key, found string }{
		{"crash", "gpu.1.crash.nvmlDeviceGetTemperature", "crashed"},
		{"hang", "gpu.1.hang.nvmlDeviceGetTemperature", "gave no reply"},
	} {
		t.Run(f.what, func(t *testing.T) {
			w := newWorld(t)
			w.set(f.key, "1")
			r := w.validate(gpu.ValidateRequest{Level: gpu.Quick, Deadline: 4 * time.Second})
			requireRow(t, r, "library and driver", f.found, gpu.Fatal)
			requireRow(t, r, "library and driver", "GPU 1 nvmlDeviceGetTemperature", gpu.Fatal)
			require.Equal(t, gpu.Unfit, r.Verdict)
			w.set(f.key, "")
			require.Equal(t, gpu.Pass, w.quick(nil).Verdict, "the agent lives on")
		})
	}
}

func TestAHangInTheKernelLaunchIsKilledAndTheOtherGPUIsStillProven(t *testing.T) {
	w := newWorld(t)
	w.set("gpu.1.cuda.hang.kernel", "1")
	r := w.validate(gpu.ValidateRequest{Level: gpu.Quick, Deadline: 12 * time.Second})
	requireRow(t, r, "CUDA call", "timeout", gpu.Fatal)
	require.Equal(t, gpu.Unfit, r.Verdict, "failing: %q", failing(r))
	require.Len(t, failing(r), 1)
}

// At level standard the GPUs are probed one after the other.
func TestAProbeThatHangsLeavesHalfOfTheTimeToTheOtherGPUs(t *testing.T) {
	const limit = 100 * time.Second
	v := &validation{req: gpu.ValidateRequest{Level: gpu.Standard}, limit: limit, deadline: time.Now().Add(limit)}
	require.Less(t, v.options(target{}, 2).Timeout, limit/2)
	require.Greater(t, v.options(target{}, 1).Timeout, limit*3/4, "the last one has what is left")
	v.req.Level = gpu.Quick
	require.Greater(t, v.options(target{}, 2).Timeout, limit*3/4, "at level quick they run together")
}

// Lost between the first reading and the second: the probe meets it, or only
// the second reading does.
func TestAGPUThatIsLostInTheMiddleIsUnfit(t *testing.T) {
	for _, when := range []string{"probe", "read the driver again"} {
		t.Run(when, func(t *testing.T) {
			w := newWorld(t)
			b := w.baseline()
			_, r, err := w.agent.Examine(context.Background(), gpu.ValidateRequest{Node: node, Level: gpu.Quick, Baseline: b}, func(s string) {
				if strings.HasPrefix(s, when) {
					require.NoError(t, w.gpus.Set("gpu.1.lost", "handle"))
				}
			})
			require.NoError(t, err)
			require.Equal(t, gpu.Unfit, r.Verdict)
			w.set("gpu.1.lost", "")
			require.Equal(t, gpu.Pass, w.quick(b).Verdict)
		})
	}
}

// A child that survives its kill is told also when the time was over by then:
// only a reading that the deadline cut short is passed over.
func TestADriverThatHoldsTheSecondReadingIsNotPassedOver(t *testing.T) {
	before, after := nvml.Snapshot{Driver: nvml.Reading[string]{Value: "before"}}, nvml.Snapshot{Driver: nvml.Reading[string]{Value: "after"}}
	for _, c := range []struct {
		err     error
		driver  string
		trouble string
	}{
		{nil, "after", ""},
		{fmt.Errorf("child nvml.snapshot: %w", errDeadline), "before", ""},
		{child.Wedged{PID: 7, State: "D", WChan: "rm_ioctl"}, "after", "is wedged: process 7 survives SIGKILL in state D, wchan rm_ioctl"},
		{child.Timeout{After: time.Second}, "after", "gave no reply"},
		{child.Crash{Signal: "SIGSEGV"}, "after", "crashed"},
	} {
		s, trouble := readings(before, after, c.err)
		require.Equal(t, c.driver, s.Driver.Value)
		require.Contains(t, trouble, c.trouble)
		require.Equal(t, c.trouble == "", trouble == "")
	}
}

func TestAReplacedLibraryIsSeenByTheNextRequest(t *testing.T) {
	w := newWorld(t)
	require.Equal(t, fakes.DefaultDriver, w.baseline().Driver)
	require.NoError(t, w.gpus.Swap(fakes.Driver("590.1.2")))
	require.NoError(t, w.tree.Driver("590.1.2"))
	r := w.quick(nil)
	require.Equal(t, "590.1.2", r.Driver)
	require.Equal(t, gpu.Pass, r.Verdict, "failing: %q", failing(r))
}

func TestTheKernelLogIsReadFromTheBaselineOn(t *testing.T) {
	w := newWorld(t)
	const xid = "[   10.000000] NVRM: Xid (PCI:0000:11:00): 79, pid='<unknown>', GPU has fallen off the bus."
	require.NoError(t, w.tree.Log(xid))
	b := w.baseline()
	require.Equal(t, gpu.Pass, w.quick(b).Verdict, "what was before the baseline is not judged")
	require.NoError(t, w.tree.Log(xid, "[   11.000000] NVRM: Xid nonsense"))
	r := w.quick(b)
	requireRow(t, r, "Xid history", "Xid 79, 1 times", gpu.Fatal)
	requireRow(t, r, "Xid history", "nonsense", gpu.Warn)
	require.NoError(t, w.tree.Log(xid, "[   11.000000] NVRM: Xid (PCI:0000:10:00 GPU-I:05): 95, Uncontained: LTC TAG"))
	r = w.quick(b)
	requireRow(t, r, "Xid history", "GPU-I:05", gpu.Fatal)
	require.Equal(t, gpu.Unfit, r.Verdict, "an error of a tenant's instance is one of its GPU")

	require.NoError(t, w.tree.Reboot("00000000-0000-4000-8000-000000000002"))
	r = w.quick(b)
	require.Equal(t, gpu.Pass, r.Verdict, "failing: %q", failing(r))
	var noticed bool
	for _, c := range r.Checks {
		noticed = noticed || c.Name == "baseline" && strings.Contains(c.Hint, "rebooted")
	}
	require.True(t, noticed, "a baseline of another boot is noticed")
	require.NoError(t, w.tree.Log(xid))
	requireRow(t, w.quick(b), "Xid history", "Xid 79", gpu.Fatal)
}

func TestARequestForAnotherNodeOrWithItsBaselineIsRefused(t *testing.T) {
	w := newWorld(t)
	b := w.baseline()
	_, err := w.agent.Validate(context.Background(), gpu.ValidateRequest{Node: "gpu-02", Level: gpu.Quick})
	requireStop(t, err, "gpu-02")
	_, err = w.agent.Baseline(context.Background(), gpu.BaselineRequest{Node: "gpu-02"})
	requireStop(t, err, "gpu-02")
	b.Node = "gpu-02"
	_, err = w.agent.Validate(context.Background(), gpu.ValidateRequest{Node: node, Level: gpu.Quick, Baseline: b})
	requireStop(t, err, "gpu-02")
	_, err = w.agent.Validate(context.Background(), gpu.ValidateRequest{Node: node, Level: "deep"})
	requireStop(t, err, "quick, standard or stress")
}

func requireStop(t *testing.T, err error, text string) {
	t.Helper()
	var app *temporal.ApplicationError
	require.ErrorAs(t, err, &app)
	require.Equal(t, "stop", app.Type())
	require.True(t, app.NonRetryable())
	require.ErrorContains(t, err, text)
}

func TestARequestThatIsCancelledEndsItsChildrenAndRunsAgain(t *testing.T) {
	for _, step := range []string{"read the driver", "probe", "read the driver again", "read the host"} {
		t.Run(step, func(t *testing.T) {
			w := newWorld(t)
			aborted := errors.New("aborted")
			ctx, cancel := context.WithCancelCause(context.Background())
			var once sync.Once
			_, _, err := w.agent.Examine(ctx, gpu.ValidateRequest{Node: node, Level: gpu.Quick}, func(s string) {
				if s == step || step == "probe" && strings.HasPrefix(s, step) {
					once.Do(func() { cancel(aborted) })
				}
			})
			if step != "read the host" { // by then nothing is left to end
				require.ErrorIs(t, err, aborted)
			}
			require.Equal(t, gpu.Pass, w.quick(nil).Verdict)
		})
	}
}

func TestAGPUThatIsNotReadyYetIsLookedAtAgain(t *testing.T) {
	for _, c := range []struct{ fault, step string }{
		{"gpu.1.fail.nvmlDeviceGetHandleByIndex", "wait for the GPUs"}, {"fail.nvmlInit", "wait for the driver"},
	} {
		w := newWorld(t)
		w.set(c.fault, "27x1")
		var steps []string
		_, r, err := w.agent.Examine(context.Background(), gpu.ValidateRequest{Node: node, Level: gpu.Quick}, func(s string) {
			if strings.HasPrefix(s, "wait") { // the probes tell their steps at the same time, later
				steps = append(steps, s)
			}
		})
		require.NoError(t, err)
		require.Equal(t, []string{c.step}, steps)
		require.Equal(t, gpu.Pass, r.Verdict)
		w.set(c.fault, "27x1")
		require.Len(t, w.baseline().Devices, 2)
	}
}

func TestAFabricThatComesUpIsWaitedForHalfOfTheTime(t *testing.T) {
	w := newWorld(t)
	w.set("gpu.1.fabric.state", "2")
	var mu sync.Mutex // the probes tell their steps at the same time
	var steps []string
	_, _, err := w.agent.Examine(context.Background(), gpu.ValidateRequest{Node: node, Level: gpu.Quick}, func(s string) {
		mu.Lock()
		defer mu.Unlock()
		steps = append(steps, s)
		if s == "wait for the fabric" {
			w.set("gpu.1.fabric.state", "3")
		}
	})
	require.NoError(t, err)
	require.Contains(t, steps, "wait for the fabric")
}

func TestMIGDevicesAreProvenOneByOne(t *testing.T) {
	w := newWorld(t)
	w.set("gpu.1.mig.current", "1", "gpu.1.mig.pending", "1", "gpu.1.gi.1", "9:0:4", "gpu.1.ci.1.0", "2:0:3")
	s, err := nvml.Take(context.Background(), time.Minute)
	require.NoError(t, err)
	require.Len(t, s.Devices[1].Instances.Value, 1)
	require.Len(t, s.Devices[1].Instances.Value[0].Compute, 1)
	require.Len(t, s.Devices[1].MIGDevices.Value, 1)
	checks, r, err := w.agent.Examine(context.Background(), gpu.ValidateRequest{Node: node, Level: gpu.Quick}, func(string) {})
	require.NoError(t, err)
	require.Equal(t, gpu.Pass, r.Verdict, "%+v", checks)
	var proven []string
	for _, c := range checks {
		if c.Name == "CUDA call" && c.OK {
			proven = append(proven, c.Device)
		}
	}
	require.Equal(t, []string{w.gpus.UUID(0), w.gpus.MIGUUID(1, 1, 0)}, proven)

	// A MIG device that the driver does not give is not passed over, and no other
	// device is probed in its place.
	for code, want := range map[string]gpu.Verdict{"999": gpu.Unfit, "6": gpu.Unproven, "4": gpu.Unproven} {
		w.set("gpu.1.fail.nvmlDeviceGetMigDeviceHandleByIndex", code)
		require.Equal(t, want, w.quick(nil).Verdict, "code %s", code)
	}
}

func TestADriverThatHoldsTheWatchIsUnfit(t *testing.T) {
	w := newWorld(t)
	w.set("hang.nvmlEventSetCreate", "1")
	r := w.validate(gpu.ValidateRequest{Level: gpu.Quick, Deadline: 6 * time.Second})
	requireRow(t, r, "Xid live", "nvmlEventSetCreate", gpu.Fatal)
	require.Equal(t, gpu.Unfit, r.Verdict)
}

func TestALimiterWithoutALimitIsBadInput(t *testing.T) {
	w := newWorld(t)
	_, err := w.agent.Validate(context.Background(), gpu.ValidateRequest{Node: node, Expect: &gpu.Expect{
		TensorFusion: &gpu.TensorFusionHost{Port: 8000, Limiter: w.gpus.Limiter()}}})
	requireStop(t, err, "limitMiB")
}

func TestTheLibraryIsNeverMappedIntoTheAgent(t *testing.T) {
	w := newWorld(t)
	require.Equal(t, gpu.Pass, w.quick(nil).Verdict)
	maps, err := os.ReadFile(filepath.Join("/proc/self/maps"))
	require.NoError(t, err)
	require.NotContains(t, string(maps), fakes.NVML)
	require.NotContains(t, string(maps), fakes.CUDA)
	var late child.Timeout
	w.set("hang.nvmlInit", "1")
	_, err = nvml.Take(context.Background(), time.Second)
	require.ErrorAs(t, err, &late)
	require.Equal(t, "nvmlInit_v2", late.Stage)
}
