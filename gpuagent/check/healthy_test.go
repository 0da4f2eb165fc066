package check

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/cuda"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/nvml"
)

const (
	driver   = "580.95.05"
	first    = "GPU-00000000-0000-4000-8000-000000000000"
	second   = "GPU-00000000-0000-4000-8000-000000000001"
	thisBoot = "boot-1"
	thisNode = "gpu-01"
)

func is[T any](v T) nvml.Reading[T] { return nvml.Reading[T]{Value: v} }

func code[T any](c nvml.Code) nvml.Reading[T] { return nvml.Reading[T]{Code: c} }

// healthyGPU is an H100 on an NVSwitch board.
func healthyGPU(index int, uuid, peer string) nvml.Device {
	link := nvml.Link{Up: is(true), Remote: is(2), Speed: is(uint64(26562)), Replay: is(uint64(0)), Recovery: is(uint64(0)), CRC: is(uint64(0)), Five: code[nvml.Link5](nvml.NotSupported)}
	return nvml.Device{
		Index: index, UUID: is(uuid), Serial: is("165000000000" + string(rune('1'+index))), Name: is("NVIDIA H100 80GB HBM3"), VBIOS: is("96.00.00.00.01"),
		PCI: is("0000:1" + string(rune('0'+index)) + ":00.0"), Minor: is(index), Architecture: is(9), VGPUHost: is(false),
		Recovery: is(uint64(0)), PCIeWidth: is(nvml.Pair{Current: 16, Other: 16}), PCIeGen: is(nvml.Pair{Current: 1, Other: 5}), PCIeGenCard: is(5),
		PCIeReplay: is(uint64(3)), PCIeFatal: is(uint64(0)), PCIeErrors: is(uint64(0)),
		ECCMode: is(nvml.Pair{Current: 1, Other: 1}), ECCVolatile: is(uint64(0)), ECCAggregate: is(uint64(2)), SRAMOver: is(false),
		Remap: is(nvml.Remap{}), RemapNone: is(uint64(0)), Unrepairable: is(false), RepairWaits: is(false),
		RetiredWaits: code[bool](nvml.NotSupported), Retired: code[nvml.Retired](nvml.NotSupported),
		InfoROM: is("G520.0200.00.05"), InfoROMValid: is(true), Throttle: is(uint64(1)), Temperature: is(40), Slowdown: is(87),
		Margin: nvml.Reading[int]{Missing: "nvmlDeviceGetMarginTemperature"},
		Limits: nvml.Limits{Shutdown: is(-8), Slowdown: is(-2), Memory: is(0), GPU: is(0)}, MemoryTemp: is(45), MemoryMax: is(95),
		PowerLimit: is(uint64(700000)),
		Power:      nvml.Power{Enforced: is(uint64(700000)), Default: is(uint64(700000)), Bounds: is(nvml.Bounds{Least: 200000, Most: 700000})}, Persistence: is(true), ComputeMode: is(0),
		LinkCount: is(uint64(18)), Links: slices.Repeat([]nvml.Link{link}, 18),
		Fabric:  is(nvml.Fabric{Version: 3, State: 3, Health: 0x1aa, Summary: 1}),
		Peers:   []nvml.Peer{{UUID: peer, NVLink: is(0), Read: is(0), Write: is(0), Topology: is(10)}},
		MIGMode: is(nvml.Pair{}), Instances: is(nvml.Instances(nil)), Processes: is([]nvml.Process{}),
		Memory: is(nvml.Memory{Total: 81559 << 20, Used: 300 << 20}), GSPVersion: is(driver), GSPEnabled: is(true),
		C2C: code[bool](nvml.NotSupported), C2CLinks: code[[]nvml.C2CLink](nvml.NotSupported), C2CErrors: code[uint64](nvml.NotSupported),
	}
}

func healthySnapshot() nvml.Snapshot {
	return nvml.Snapshot{Driver: is(driver), CUDA: is(13000), Count: is(2), ConfCompute: is(uint64(0)), ConfReady: is(uint64(0)),
		Devices: []nvml.Device{healthyGPU(0, first, second), healthyGPU(1, second, first)}}
}

// healthy is a host of two GPUs with everything declared and a baseline of the
// same boot.
func healthy() *Input {
	booted := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s := healthySnapshot()
	s.Library = "/usr/lib64/libnvidia-ml.so." + driver
	b := &gpu.Baseline{Node: thisNode, BootID: thisBoot, Driver: driver, Readings: HostReadings(&s)}
	for i := range s.Devices {
		b.Devices = append(b.Devices, gpu.Device{UUID: s.Devices[i].UUID.Value, Readings: Readings(&s.Devices[i])})
	}
	in := &Input{
		Level: gpu.Standard, NVML: s, Baseline: b,
		Host: host.Snapshot{
			BootID: thisBoot, Booted: booted, Module: driver, Proc: driver, Modules: []string{"nvidia", "nvidia_modeset", "nvidia_uvm"},
			PCIVisible: true, PCI: []host.PCIDevice{{Address: "0000:10:00.0"}, {Address: "0000:11:00.0"}},
			Nodes:  []host.Node{{Path: "/dev/nvidiactl", Wanted: "nvidia", Exists: true, Char: true, Major: 195}},
			Majors: map[string]int{"nvidia": 195},
			Libraries: []host.Library{
				{Name: "libcuda.so.1", Path: "/usr/lib64/libcuda.so.1", Version: driver},
				{Name: "libnvidia-ml.so.1", Path: "/usr/lib64/libnvidia-ml.so.1", Version: driver},
			},
			Services: []host.Service{{Name: "nvidia-fabricmanager", Visible: true, Active: true, Version: driver}},
			Log:      host.KernelLog{Visible: true, Last: 10, Loaded: 5 * time.Second},
			TensorFusion: &host.TensorFusion{
				Toolkit: booted.Add(time.Minute), Run: true, Accelerator: "/run/tensor-fusion/lib/libaccelerator_nvidia.so",
				Shm:        host.Mount{Mounted: true, Type: "tmpfs", Options: []string{"rw", "nosuid", "nodev"}, SizeKiB: 1 << 20, Mode: 0o777, FreeKiB: 1 << 19},
				Pods:       []host.PodState{{Pod: "team/app", Layout: 2}},
				Hypervisor: host.Hypervisor{UUIDs: []string{strings.ToLower(first), strings.ToLower(second)}},
				Process:    &host.Process{PID: 4711},
				Transport:  host.Segment{Exists: true, Regular: true},
				Kubelet:    map[string]bool{"device-plugins": true, "pod-resources": true},
			},
		},
		Watch: &nvml.Observation{Took: 2 * time.Second, Samples: 20, Events: is(true), Devices: []nvml.Watched{
			{UUID: first, Events: is(true), PCIeGen: is(nvml.Pair{Current: 5, Other: 5}), Replays: is(uint64(0)), CRC: is(uint64(0))},
			{UUID: second, Events: is(true), PCIeGen: is(nvml.Pair{Current: 5, Other: 5}), Replays: is(uint64(0)), CRC: is(uint64(0))},
		}},
		Proofs: []Proof{proof(first), proof(second)},
		Expect: gpu.Expect{
			Driver: driver, CUDA: "12.4", GPUs: 2, NVLinks: 18, Fabric: true, Services: []string{"nvidia-fabricmanager"}, Persistence: true,
			PowerLimitWatts: 700, MIG: &gpu.ExpectMIG{},
			TensorFusion: &gpu.TensorFusionHost{Port: 8000, Toolkit: true, Pods: []string{"team/app"}, Limiter: "/run/tensor-fusion/lib/limiter.so", LimitMiB: 1024},
		},
	}
	return in
}

func proof(uuid string) Proof {
	return Proof{GPU: uuid, Result: cuda.Result{Verdict: cuda.Pass, UUID: uuid, Library: "/usr/lib64/libcuda.so." + driver, TestedBytes: 64 << 20, Patterns: 3,
		Bandwidth: cuda.Bandwidth{DeviceToDevice: 1300, HostToDevice: 50, DeviceToHost: 50},
		Limit:     &cuda.LimitResult{Verdict: cuda.Pass, Refused: true, Found: "refused"}}}
}

func failed(checks []gpu.Check) []gpu.Check {
	var out []gpu.Check
	for _, c := range checks {
		if !c.OK && c.Skipped == "" && c.Severity != gpu.Info {
			out = append(out, c)
		}
	}
	return out
}

func TestAHealthyHostPassesEveryRow(t *testing.T) {
	in := healthy()
	in.Level = gpu.Stress
	checks := Evaluate(*in)
	require.Empty(t, failed(checks))
	require.Equal(t, gpu.Pass, gpu.VerdictOf(checks, 0))
	var rows, answeredRows []string
	for _, r := range append(slices.Clone(hostRows), gpuRows...) {
		rows = append(rows, r.name)
	}
	for _, c := range checks {
		answeredRows = append(answeredRows, c.Name)
	}
	for _, r := range rows {
		require.Contains(t, answeredRows, r, "every row is in the result, passed or skipped")
	}
}
