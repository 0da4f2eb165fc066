package nvml

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/refit-run/refit/gpuagent/child"
)

const snapshotChild = "nvml.snapshot"

func init() {
	child.Register(snapshotChild, func(context.Context, json.RawMessage) (any, error) { return take(), nil })
}

// Take reads a snapshot in a child process. An error is one of the child
// package and means that the library ended, crashed or held the child.
func Take(ctx context.Context, timeout time.Duration) (Snapshot, error) {
	var s Snapshot
	err := child.Run(ctx, child.Spec{Name: snapshotChild, Timeout: timeout, Reply: &s})
	return s, err
}

// take runs in the child.
func take() Snapshot {
	lib, code := open()
	s := Snapshot{Init: code, Library: mapped()}
	if code != Success {
		return s
	}
	defer lib.Shutdown()
	s.Driver = ask(lib, "host", lib.SystemGetDriverVersion, "nvmlSystemGetDriverVersion")
	s.CUDA = ask(lib, "host", lib.SystemGetCudaDriverVersion_v2, "nvmlSystemGetCudaDriverVersion_v2")
	s.ConfCompute = ask(lib, "host", func() (uint64, gonvml.Return) {
		state, ret := lib.SystemGetConfComputeState()
		return uint64(state.CcFeature), ret
	}, "nvmlSystemGetConfComputeState")
	s.ConfReady = ask(lib, "host", func() (uint64, gonvml.Return) {
		ready, ret := lib.SystemGetConfComputeGpusReadyState()
		return uint64(ready), ret
	}, "nvmlSystemGetConfComputeGpusReadyState")
	s.Count = ask(lib, "host", lib.DeviceGetCount, "nvmlDeviceGetCount_v2", "nvmlDeviceGetCount")
	var handles []device
	for i := range s.Count.Value {
		h := ask(lib, gpuScope(i), func() (gonvml.Device, gonvml.Return) { return lib.DeviceGetHandleByIndex(i) },
			"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex")
		d := Device{Index: i, Handle: h.Code}
		if h.Missing != "" {
			d.Handle = FunctionNotFound
		}
		if d.Handle == Success {
			dev := device{Device: h.Value, library: lib, scope: gpuScope(i)}
			dev.read(&d)
			handles = append(handles, dev)
		} else {
			handles = append(handles, device{})
		}
		s.Devices = append(s.Devices, d)
	}
	for i := range s.Devices {
		if s.Devices[i].Handle == Success {
			s.Devices[i].Peers = handles[i].peers(handles, s.Devices)
		}
	}
	return s
}

// mapped is the file that stands for NVML in this process; empty when none does.
func mapped() string {
	// Whoever cannot tell has no answer to the one row that asks.
	found, _ := child.Mapped("libnvidia-ml.so")
	return strings.Join(found, ", ")
}

func gpuScope(i int) string { return fmt.Sprintf("GPU %d", i) }

// device is one handle with the library it came from.
type device struct {
	gonvml.Device
	library
	scope string
}

// get makes a guarded call on the device.
func get[T any](d device, call func() (T, gonvml.Return), symbols ...string) Reading[T] {
	return ask(d.library, d.scope, call, symbols...)
}

func (d device) read(to *Device) {
	d.identity(to)
	d.health(to)
	d.memory(to)
	d.limits(to)
	d.links(to)
	d.mig(to)
}

func (d device) identity(to *Device) {
	to.UUID = get(d, func() (string, gonvml.Return) {
		uuid, ret := d.GetUUID()
		// A GPU is known by its UUID in all that follows: none is no answer.
		if ret == gonvml.SUCCESS && uuid == "" {
			ret = gonvml.ERROR_UNKNOWN
		}
		return uuid, ret
	}, "nvmlDeviceGetUUID")
	to.Serial = get(d, d.GetSerial, "nvmlDeviceGetSerial")
	to.Name = get(d, d.GetName, "nvmlDeviceGetName")
	to.VBIOS = get(d, d.GetVbiosVersion, "nvmlDeviceGetVbiosVersion")
	to.Minor = get(d, d.GetMinorNumber, "nvmlDeviceGetMinorNumber")
	to.PCI = then(get(d, d.GetPciInfo, "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"),
		func(p gonvml.PciInfo) string { return fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device) })
	to.Architecture = then(get(d, d.GetArchitecture, "nvmlDeviceGetArchitecture"),
		func(a gonvml.DeviceArchitecture) int { return int(a) })
	to.VGPUHost = then(get(d, d.GetVirtualizationMode, "nvmlDeviceGetVirtualizationMode"),
		func(m gonvml.GpuVirtualizationMode) bool { return m == gonvml.GPU_VIRTUALIZATION_MODE_HOST_VGPU })
}

func (d device) health(to *Device) {
	to.Recovery = d.field(fieldRecoveryAction, 0)
	to.PCIeWidth = pair(get(d, d.GetCurrPcieLinkWidth, "nvmlDeviceGetCurrPcieLinkWidth"),
		get(d, d.GetMaxPcieLinkWidth, "nvmlDeviceGetMaxPcieLinkWidth"))
	to.PCIeGen = d.pcieGeneration()
	to.PCIeGenCard = get(d, d.GetGpuMaxPcieLinkGeneration, "nvmlDeviceGetGpuMaxPcieLinkGeneration")
	to.PCIeReplay = d.replay()
	to.PCIeFatal = d.field(fieldPCIeFatal, 0)
	to.PCIeErrors = d.pcieErrors()
	to.Throttle = d.throttle()
	to.InfoROM = get(d, d.GetInforomImageVersion, "nvmlDeviceGetInforomImageVersion")
	to.InfoROMValid = get(d, func() (bool, gonvml.Return) {
		ret := d.ValidateInforom()
		return ret == gonvml.SUCCESS, ret
	}, "nvmlDeviceValidateInforom")
	to.GSPVersion = get(d, d.GetGspFirmwareVersion, "nvmlDeviceGetGspFirmwareVersion")
	to.GSPEnabled = get(d, func() (bool, gonvml.Return) {
		enabled, _, ret := d.GetGspFirmwareMode()
		return enabled, ret
	}, "nvmlDeviceGetGspFirmwareMode")
}

func (d device) pcieGeneration() Reading[Pair] {
	return pair(get(d, d.GetCurrPcieLinkGeneration, "nvmlDeviceGetCurrPcieLinkGeneration"),
		get(d, d.GetMaxPcieLinkGeneration, "nvmlDeviceGetMaxPcieLinkGeneration"))
}

func (d device) replay() Reading[uint64] {
	return then(get(d, d.GetPcieReplayCounter, "nvmlDeviceGetPcieReplayCounter"), func(n int) uint64 { return uint64(n) })
}

// throttle asks by the newer name first; both give the same bits.
func (d device) throttle() Reading[uint64] {
	r := get(d, d.GetCurrentClocksEventReasons, "nvmlDeviceGetCurrentClocksEventReasons")
	if r.Missing != "" {
		r = get(d, d.GetCurrentClocksThrottleReasons, "nvmlDeviceGetCurrentClocksThrottleReasons")
	}
	return r
}

func (d device) peers(all []device, devices []Device) []Peer {
	var peers []Peer
	for i, other := range all {
		if i == d.index(devices) || devices[i].Handle != Success {
			continue
		}
		status := func(kind gonvml.GpuP2PCapsIndex) Reading[int] {
			return then(get(d, func() (gonvml.GpuP2PStatus, gonvml.Return) { return d.GetP2PStatus(other.Device, kind) },
				"nvmlDeviceGetP2PStatus"), func(s gonvml.GpuP2PStatus) int { return int(s) })
		}
		peers = append(peers, Peer{
			UUID: devices[i].UUID.Value, NVLink: status(gonvml.P2P_CAPS_INDEX_NVLINK),
			Read: status(gonvml.P2P_CAPS_INDEX_READ), Write: status(gonvml.P2P_CAPS_INDEX_WRITE),
			Topology: then(get(d, func() (gonvml.GpuTopologyLevel, gonvml.Return) { return d.GetTopologyCommonAncestor(other.Device) },
				"nvmlDeviceGetTopologyCommonAncestor"), func(l gonvml.GpuTopologyLevel) int { return int(l) }),
		})
	}
	return peers
}

func (d device) index(devices []Device) int {
	for i := range devices {
		if gpuScope(devices[i].Index) == d.scope {
			return i
		}
	}
	return -1
}
