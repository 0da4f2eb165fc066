package check

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/cuda"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// fault is one thing that is wrong on an otherwise healthy host, and what the
// named row must then say. A severity of "" is a skip.
type fault struct {
	what     string
	make     func(in *Input, d *nvml.Device)
	row      string
	severity gpu.Severity
	found    string
	verdict  gpu.Verdict
}

func (f fault) run(t *testing.T) {
	in := healthy()
	f.make(in, &in.NVML.Devices[0])
	checks := Evaluate(*in)
	var row []gpu.Check
	for _, c := range checks {
		if c.Name == f.row && !c.OK && (c.Device == "" || c.Device != second) {
			row = append(row, c)
		}
	}
	require.NotEmpty(t, row, "row %s must not pass; failed: %+v", f.row, failed(checks))
	if f.severity == "" {
		require.NotEmpty(t, row[0].Skipped)
		require.Equal(t, gpu.Info, row[0].Severity)
		require.Contains(t, row[0].Skipped, f.found)
	} else {
		require.Equal(t, f.severity, row[0].Severity, "%+v", row)
		require.Contains(t, row[0].Found+row[0].Skipped, f.found)
		require.NotEmpty(t, row[0].Hint)
	}
	require.Equal(t, f.verdict, gpu.VerdictOf(checks, 0), "failed: %+v", failed(checks))
	// One fault, one row: nothing else may be blamed.
	for _, c := range failed(checks) {
		require.Equal(t, f.row, c.Name, "another row failed too: %+v", c)
	}
}

const unfit, degraded, reset, unproven, pass = gpu.Unfit, gpu.Degraded, gpu.ResetNeeded, gpu.Unproven, gpu.Pass

var hostFaults = []fault{
	{"library absent", func(in *Input, _ *nvml.Device) { in.NVML = nvml.Snapshot{Init: nvml.LibraryNotFound} }, rowLibrary, gpu.Fatal, "LIBRARY_NOT_FOUND", unfit},
	{"driver not loaded", func(in *Input, _ *nvml.Device) { in.NVML = nvml.Snapshot{Init: nvml.DriverNotLoaded} }, rowLibrary, gpu.Fatal, "driver not loaded", unfit},
	{"versions of library and module differ", func(in *Input, _ *nvml.Device) { in.NVML = nvml.Snapshot{Init: nvml.VersionMismatch} }, rowLibrary, gpu.Fatal, "version mismatch", unfit},
	{"another code of Init", func(in *Input, _ *nvml.Device) { in.NVML = nvml.Snapshot{Init: nvml.Unknown} }, rowLibrary, gpu.Fatal, "UNKNOWN", unfit},
	{"the child that reads did not answer", func(in *Input, _ *nvml.Device) { in.NVML, in.Trouble = nvml.Snapshot{}, "child ended with status 127" }, rowLibrary, gpu.Fatal, "127", unfit},
	{"kernel module of another version", func(in *Input, _ *nvml.Device) {
		in.Host.Module, in.Host.Libraries = "570.1.2", nil
		in.NVML.Library, in.Proofs[0].Library, in.Proofs[1].Library = "", "", ""
	}, "driver version", gpu.Fatal, "570.1.2", unfit},
	{"the module reports another version", func(in *Input, _ *nvml.Device) { in.Host.Proc = "570.1.2" }, "driver version", gpu.Fatal, "570.1.2", unfit},
	{"the target was not installed", func(in *Input, _ *nvml.Device) { in.Expect.Driver = "600.0.1" }, "driver version", gpu.Fatal, driver, unfit},
	{"the driver is another than in the baseline", func(in *Input, _ *nvml.Device) { in.Expect.Driver, in.Baseline.Driver = "", "570.1.2" }, "driver version", gpu.Fatal, driver, unfit},
	{"version of the driver no longer told", func(in *Input, _ *nvml.Device) {
		in.Expect.Driver, in.NVML.Driver, in.Expect.Services = "", code[string](nvml.NotSupported), nil
		in.Host.Services = nil
	}, "driver version", gpu.Warn, "not supported", degraded},
	{"version of the driver declared and not told", func(in *Input, _ *nvml.Device) {
		in.NVML.Driver, in.Expect.Services, in.Host.Services = code[string](nvml.NotSupported), nil, nil
	}, "driver version", gpu.Fatal, "a version is declared", unproven},
	{"CUDA version no longer told", func(in *Input, _ *nvml.Device) { in.Expect.CUDA, in.NVML.CUDA = "", code[int](nvml.NotSupported) }, "CUDA version", gpu.Warn, "not supported", degraded},
	{"sysfs hidden", func(in *Input, _ *nvml.Device) { in.Host.Module = "" }, "driver version", "", "not visible", pass},
	{"user-space library of another version", func(in *Input, _ *nvml.Device) { in.Host.Libraries[0].Version = "570.1.2" }, "user-space libraries", gpu.Fatal, "570.1.2", unfit},
	{"user-space library absent", func(in *Input, _ *nvml.Device) {
		in.Host.Libraries[0].Path, in.Proofs[0].Library, in.Proofs[1].Library = "", "", ""
	}, "user-space libraries", gpu.Fatal, "not in the loader's path", unfit},
	{"user-space library in a place of its own", func(in *Input, _ *nvml.Device) { in.Host.Libraries[0].Path = "" }, "user-space libraries", "", "loaded by the agent all the same: libcuda.so.1", pass},
	{"NVML of another version loaded", func(in *Input, _ *nvml.Device) { in.NVML.Library = "/usr/lib64/libnvidia-ml.so.570.1.2" }, "user-space libraries", gpu.Fatal, "570.1.2 (loaded by the agent: /usr/lib64/libnvidia-ml.so.570.1.2)", unfit},
	{"libcuda of another version loaded", func(in *Input, _ *nvml.Device) { in.Proofs[1].Library = "/usr/lib64/libcuda.so.570.1.2" }, "user-space libraries", gpu.Fatal, "570.1.2 (loaded by the agent: /usr/lib64/libcuda.so.570.1.2)", unfit},
	{"libcuda replaced while it was loaded", func(in *Input, _ *nvml.Device) { in.Proofs[0].Library = "/usr/lib64/libcuda.so.570.1.2 (deleted)" }, "user-space libraries", gpu.Fatal, "(deleted)", unfit},
	{"a library without a version in its name", func(in *Input, _ *nvml.Device) { in.NVML.Library = "/opt/libnvidia-ml.so.1" }, "user-space libraries", "", "/opt/libnvidia-ml.so.1: its name carries no version", pass},
	{"CUDA too old", func(in *Input, _ *nvml.Device) { in.Expect.CUDA = "13.1" }, "CUDA version", gpu.Fatal, "13.0", unfit},
	{"CUDA version that is none", func(in *Input, _ *nvml.Device) { in.Expect.CUDA = "new" }, "CUDA version", gpu.Fatal, "no version", unproven},
	{"a GPU is on the bus and not in NVML", func(in *Input, _ *nvml.Device) {
		in.Host.PCI = append(in.Host.PCI, host.PCIDevice{Address: "0000:12:00.0"})
	}, "device count", gpu.Fatal, "2 by NVML", unfit},
	{"fewer GPUs than declared", func(in *Input, _ *nvml.Device) { in.Expect.GPUs = 8 }, "device count", gpu.Fatal, "2 by NVML", unfit},
	{"PCI bus hidden", func(in *Input, _ *nvml.Device) { in.Host.PCIVisible = false }, "device count", "", "not visible", pass},
	{"baseline of other GPUs", func(in *Input, _ *nvml.Device) {
		for i := range in.Baseline.Devices {
			in.Baseline.Devices[i].UUID += "-other"
		}
	}, "device set", gpu.Fatal, first, unfit},
	{"service not running", func(in *Input, _ *nvml.Device) { in.Host.Services[0].Active = false }, "fabric services", gpu.Fatal, "not running", unfit},
	{"fabric manager of another version", func(in *Input, _ *nvml.Device) { in.Host.Services[0].Version = "570.1.2" }, "fabric services", gpu.Fatal, "570.1.2", unfit},
	{"version of the driver not answered", func(in *Input, _ *nvml.Device) {
		in.Expect.Driver, in.NVML.Driver = "", nvml.Reading[string]{Missing: "nvmlSystemGetDriverVersion"}
		in.Baseline = nil
	}, "fabric services", "", "driver's own", pass},
	{"version of the fabric manager hidden", func(in *Input, _ *nvml.Device) { in.Host.Services[0].Version = "" }, "fabric services", "", "not visible: version", pass},
	{"systemd hidden", func(in *Input, _ *nvml.Device) { in.Host.Services[0] = host.Service{Name: "nvidia-fabricmanager"} }, "fabric services", gpu.Fatal, "not visible", unproven},
	{"kernel log hidden", func(in *Input, _ *nvml.Device) { in.Host.Log = host.KernelLog{Why: "permission denied"} }, rowXidHistory, gpu.Fatal, "not visible", unproven},
	{"kernel log overwritten", func(in *Input, _ *nvml.Device) { in.Host.Log.Lost = true }, rowXidHistory, gpu.Fatal, "overwritten", unproven},
	{"malformed Xid line", func(in *Input, _ *nvml.Device) { in.Host.Log.Unreadable = []string{"NVRM: Xid garbage"} }, rowXidHistory, gpu.Warn, "garbage", degraded},
	{"confidential computing not ready", func(in *Input, _ *nvml.Device) {
		in.NVML.ConfCompute, in.Baseline.Readings[rowConfCompute] = is(uint64(1)), "on"
	}, rowConfCompute, gpu.Fatal, "not ready", unfit},
	{"ready state of confidential computing not answered", func(in *Input, _ *nvml.Device) {
		in.NVML.ConfCompute, in.Baseline.Readings[rowConfCompute], in.NVML.ConfReady = is(uint64(1)), "on", code[uint64](nvml.NotSupported)
	}, rowConfCompute, gpu.Fatal, "is on, and not supported", unproven},
	{"confidential computing switched", func(in *Input, _ *nvml.Device) { in.NVML.ConfCompute, in.NVML.ConfReady = is(uint64(1)), is(uint64(1)) }, rowConfCompute, gpu.Fatal, "on", unfit},
	{"device file absent", func(in *Input, _ *nvml.Device) { in.Host.Nodes[0].Exists = false }, "device files", gpu.Fatal, "no such file", unfit},
	{"device file of a service that is not here", func(in *Input, _ *nvml.Device) { in.Host.Nodes[0].Exists, in.Host.Nodes[0].Optional = false, true }, "device files", "", "its service", pass},
	{"device file is a plain file", func(in *Input, _ *nvml.Device) { in.Host.Nodes[0].Char = false }, "device files", gpu.Fatal, "another kind", unfit},
	{"device file of another driver", func(in *Input, _ *nvml.Device) { in.Host.Nodes[0].Major = 240 }, "device files", gpu.Fatal, "240", unfit},
	{"number of a GPU's device file not told", func(_ *Input, d *nvml.Device) { d.Minor = code[int](nvml.NotSupported) }, "device files", gpu.Warn, "not supported", degraded},
	{"number of a GPU's device file fails", func(_ *Input, d *nvml.Device) { d.Minor = code[int](nvml.Unknown) }, "device files", gpu.Fatal, "UNKNOWN", unfit},
	{"major numbers hidden", func(in *Input, _ *nvml.Device) { in.Host.Majors = nil }, "device files", gpu.Fatal, "/proc/devices", unproven},
	{"a live Xid", func(in *Input, _ *nvml.Device) { in.Watch.Xids = []nvml.LiveXid{{UUID: first, Kind: "xid", Xid: 79}} }, "Xid live", gpu.Fatal, "79", unfit},
	{"a live double-bit error", func(in *Input, _ *nvml.Device) { in.Watch.Xids = []nvml.LiveXid{{UUID: first, Kind: "doubleBitECC"}} }, "Xid live", gpu.Fatal, "double-bit", unfit},
	{"no events on this host", func(in *Input, _ *nvml.Device) { in.Watch.Events = code[bool](nvml.NotSupported) }, "Xid live", "", "not supported", pass},
	{"no events of one GPU", func(in *Input, _ *nvml.Device) { in.Watch.Devices[0].Events = code[bool](nvml.NotSupported) }, "Xid live", "", "not supported", pass},
	{"one GPU refuses its events", func(in *Input, _ *nvml.Device) { in.Watch.Devices[0].Events = code[bool](nvml.GPUIsLost) }, "Xid live", gpu.Fatal, "GPU_IS_LOST", unfit},
	{"the child that watches is wedged", watchEnds(child.Wedged{PID: 7, State: "D"}), "Xid live", gpu.Fatal, "SIGKILL", unfit},
	{"the child that watches was held", watchEnds(fmt.Errorf("watch: %w", child.Timeout{After: time.Second})), "Xid live", gpu.Fatal, "no reply", unfit},
	{"the child that watches crashed", watchEnds(child.Crash{Signal: "SIGSEGV"}), "Xid live", gpu.Fatal, "SIGSEGV", unfit},
	{"the child that watches could not be started", watchEnds(errors.New("no processes left")), "Xid live", gpu.Warn, "no processes", degraded},
	{"nvidia_uvm not loaded", func(in *Input, _ *nvml.Device) { in.Host.Modules = []string{"nvidia"} }, "TensorFusion modules", gpu.Fatal, "nvidia_uvm", unfit},
	{"toolkit-ready is stale", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Toolkit = in.Host.Booted.Add(time.Second) }, "TensorFusion toolkit", gpu.Fatal, "2026", unfit},
	{"toolkit-ready, and the log does not tell when the driver came up", func(in *Input, _ *nvml.Device) { in.Host.Log.Loaded = 0 }, "TensorFusion toolkit", gpu.Fatal, "not in the kernel log", unproven},
	{"toolkit-ready of an earlier boot, whenever the driver came up", func(in *Input, _ *nvml.Device) {
		in.Host.Log.Loaded, in.Host.TensorFusion.Toolkit = 0, in.Host.Booted.Add(-time.Second)
	}, "TensorFusion toolkit", gpu.Fatal, "2025", unfit},
	{"toolkit-ready on a host whose boot is not known", func(in *Input, _ *nvml.Device) { in.Host.Booted = time.Time{} }, "TensorFusion toolkit", gpu.Fatal, "not in the kernel log", unproven},
	{"toolkit-ready absent", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Toolkit = time.Time{} }, "TensorFusion toolkit", gpu.Fatal, "no such file", unfit},
	{"toolkit-ready absent, and not declared", func(in *Input, _ *nvml.Device) {
		in.Host.TensorFusion.Toolkit, in.Expect.TensorFusion.Toolkit = time.Time{}, false
	}, "TensorFusion toolkit", "", "none is declared", pass},
	{"no directory of TensorFusion", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Run = false }, "TensorFusion provider", gpu.Fatal, "no such directory", unfit},
	{"provider library absent", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Accelerator = "" }, "TensorFusion provider", gpu.Fatal, "not found", unfit},
	{"shared memory of the wrong size", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Shm.SizeKiB = 64 << 10 }, "TensorFusion shared memory", gpu.Warn, "64 MiB", degraded},
	{"shared memory is no tmpfs", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Shm.Type = "ext4" }, "TensorFusion shared memory", gpu.Fatal, "ext4", unfit},
	{"shared memory not mounted", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Shm = host.Mount{} }, "TensorFusion shared memory", gpu.Fatal, "nothing mounted", unfit},
	{"shared memory with suid", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Shm.Options = []string{"rw", "nodev"} }, "TensorFusion shared memory", gpu.Fatal, "nosuid", unfit},
	{"shared memory of another mode", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Shm.Mode = 0o755 }, "TensorFusion shared memory", gpu.Fatal, "0755", unfit},
	{"shared memory full", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Shm.FreeKiB = 1 }, "TensorFusion shared memory", gpu.Warn, "0 MiB", degraded},
	{"state of an unknown layout", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Pods[0].Layout = 0 }, "TensorFusion pod state", gpu.Fatal, "team/app", unfit},
	{"state of a pod that is gone", func(in *Input, _ *nvml.Device) { in.Expect.TensorFusion.Pods = []string{} }, "TensorFusion pod state", gpu.Warn, "stale", degraded},
	{"live pods not given", func(in *Input, _ *nvml.Device) { in.Expect.TensorFusion.Pods = nil }, "TensorFusion pod state", "", "not given", pass},
	{"hypervisor of another user", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Process.UID = 1000 }, "TensorFusion hypervisor", gpu.Warn, "user 1000", degraded},
	{"hypervisor without privilege", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Process.Lacks = 1 << 21 }, "TensorFusion hypervisor", gpu.Warn, "0x200000", degraded},
	{"hypervisor's process not seen", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Process = nil }, "TensorFusion hypervisor", "", "not visible", pass},
	{"transport segment of another kind", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Transport.Regular = false }, "TensorFusion transport", gpu.Warn, "another kind", degraded},
	{"no transport segment", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Transport = host.Segment{} }, "TensorFusion transport", "", "no /dev/shm/tf_shm", pass},
	{"kubelet's sockets not reachable", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Kubelet["pod-resources"] = false }, "TensorFusion kubelet", gpu.Fatal, "not reachable", unfit},
	{"hypervisor does not answer", func(in *Input, _ *nvml.Device) { in.Host.TensorFusion.Hypervisor = host.Hypervisor{Error: "refused"} }, "TensorFusion devices", gpu.Fatal, "refused", unfit},
	{"hypervisor lists one GPU less", func(in *Input, _ *nvml.Device) {
		in.Host.TensorFusion.Hypervisor.UUIDs = in.Host.TensorFusion.Hypervisor.UUIDs[1:]
	}, "TensorFusion devices", gpu.Fatal, "not listed", unfit},
}

func watchEnds(err error) func(*Input, *nvml.Device) {
	return func(in *Input, _ *nvml.Device) { in.Watch, in.WatchTrouble = nil, err }
}

func TestEachFaultOfTheHostIsNamedByItsRowAndNoOther(t *testing.T) {
	for _, f := range hostFaults {
		t.Run(f.what, f.run)
	}
}

func TestABaselineOfAnEarlierBootIsNoticedAndJudgedFromTheBootOn(t *testing.T) {
	in := healthy()
	in.Baseline.BootID = "boot-0"
	in.NVML.Devices[0].Links = append([]nvml.Link(nil), in.NVML.Devices[0].Links...)
	checks := Evaluate(*in)
	require.Empty(t, failed(checks))
	require.Equal(t, pass, gpu.VerdictOf(checks, 0), "a reboot is part of an upgrade")
	var noticed bool
	for _, c := range checks {
		noticed = noticed || c.Name == "baseline" && !c.OK && c.Severity == gpu.Info && c.Hint != ""
	}
	require.True(t, noticed)
	in.NVML.Devices[0].Links[0].Replay = is(uint64(1))
	require.Equal(t, unfit, gpu.VerdictOf(Evaluate(*in), 0), "what a counter holds after a reboot is new")
}

func TestTheProbesVerdictsAreTakenOver(t *testing.T) {
	for v, want := range map[cuda.Verdict]gpu.Verdict{
		cuda.NoLibrary: unfit, cuda.NoDevice: unfit, cuda.NotReady: unfit, cuda.Mismatch: unfit, cuda.Fail: unfit, cuda.Crash: unfit,
		cuda.Timeout: unfit, cuda.Wedged: unfit,
	} {
		in := healthy()
		in.Proofs[0].Result = cuda.Result{Verdict: v, UUID: first, Stage: "kernel", Error: "what was found"}
		in.Expect.TensorFusion.Limiter = ""
		checks := Evaluate(*in)
		require.Equal(t, want, gpu.VerdictOf(checks, 0), "%s", v)
		require.Len(t, failed(checks), 1)
		require.Equal(t, rowCUDA, failed(checks)[0].Name)
		require.Contains(t, failed(checks)[0].Found, string(v))
	}
}
