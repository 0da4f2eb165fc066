package nvml

import (
	"context"
	"fmt"
	"reflect"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/refit-run/refit/gpuagent/child"
)

// VGPUHost is what NVML tells of a vGPU host. Types are made in sysfs, not
// here: NVML names them and holds modes and the scheduler.
type VGPUHost struct {
	GPUs []VGPUGPU `json:"gpus"`
}

// VGPUGPU is one GPU.
type VGPUGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	PCI   string `json:"pci"`
	PCIID uint32 `json:"pciID"`
	// Host: the vGPU manager drives this GPU; SRIOV: by virtual functions.
	Host  bool `json:"host"`
	SRIOV bool `json:"sriov,omitempty"`
	// MIG: the GPU is in MIG mode, so its types are MIG-backed.
	MIG bool `json:"mig,omitempty"`
	// Heterogeneous and Scheduler are nil and empty where the GPU has none.
	Heterogeneous *bool  `json:"heterogeneous,omitempty"`
	Scheduler     string `json:"scheduler,omitempty"`
	// Active counts the vGPUs that virtual machines use now.
	Active int `json:"active,omitempty"`
	// Types are the names of the vGPU types by number.
	Types map[uint32]string `json:"types,omitempty"`
}

// Kinds of VGPUAct.
const (
	VGPUSetHeterogeneous = "heterogeneous"
	VGPUSetScheduler     = "scheduler"
)

// VGPUAct is one change.
type VGPUAct struct {
	UUID      string `json:"uuid"`
	Kind      string `json:"kind"`
	Enable    bool   `json:"enable,omitempty"`
	Scheduler string `json:"scheduler,omitempty"`
}

// VGPUSchedulers are the scheduler policies by the names that plans use.
var VGPUSchedulers = map[string]uint32{
	"best-effort": gonvml.VGPU_SCHEDULER_POLICY_BEST_EFFORT,
	"equal-share": gonvml.VGPU_SCHEDULER_POLICY_EQUAL_SHARE,
	"fixed-share": gonvml.VGPU_SCHEDULER_POLICY_FIXED_SHARE,
}

// ReadVGPU observes every GPU.
func (s Setters) ReadVGPU(ctx context.Context) (VGPUHost, error) {
	var out VGPUHost
	err := s.call(ctx, vgpuReadChild, "", setupRead, struct{}{}, &out)
	return out, err
}

// ActVGPU observes, compares, makes one change and observes again.
func (s Setters) ActVGPU(ctx context.Context, a VGPUAct) (VGPUGPU, error) {
	var out VGPUGPU
	err := s.call(ctx, vgpuActChild, a.UUID, setupAct, a, &out)
	return out, err
}

func readVGPU(s *session, _ struct{}) (VGPUHost, error) {
	var out VGPUHost
	err := s.each(func(i int, d gonvml.Device) error {
		g, err := s.vgpuGPU(d)
		g.Index = i
		out.GPUs = append(out.GPUs, g)
		return err
	})
	return out, err
}

func (s *session) vgpuGPU(d gonvml.Device) (g VGPUGPU, err error) {
	if g.UUID, g.PCI, g.PCIID, err = identity(d); err != nil {
		return g, err
	}
	child.Stage("read vGPU state of %s", g.UUID)
	if s.has("nvmlDeviceGetVirtualizationMode") != nil {
		return g, nil
	}
	mode, ret := d.GetVirtualizationMode()
	if ret == gonvml.ERROR_NOT_SUPPORTED {
		return g, nil
	}
	if err := failed(ret, "virtualization mode of %s", g.UUID); err != nil {
		return g, err
	}
	if g.Host = mode == gonvml.GPU_VIRTUALIZATION_MODE_HOST_VGPU; !g.Host {
		return g, nil
	}
	if s.has("nvmlDeviceGetHostVgpuMode") == nil {
		kind, ret := d.GetHostVgpuMode()
		g.SRIOV = ret == gonvml.SUCCESS && kind == gonvml.HOST_VGPU_MODE_SRIOV
	}
	if s.has("nvmlDeviceGetMigMode") == nil {
		current, _, ret := d.GetMigMode()
		g.MIG = ret == gonvml.SUCCESS && current == gonvml.DEVICE_MIG_ENABLE
	}
	if s.has("nvmlDeviceGetVgpuHeterogeneousMode") == nil {
		if m, ret := d.GetVgpuHeterogeneousMode(); ret == gonvml.SUCCESS {
			on := m.Mode != 0
			g.Heterogeneous = &on
		}
	}
	if s.has("nvmlDeviceGetVgpuSchedulerState") == nil {
		if state, ret := d.GetVgpuSchedulerState(); ret == gonvml.SUCCESS {
			g.Scheduler = fmt.Sprintf("policy %d", state.SchedulerPolicy)
			for name, policy := range VGPUSchedulers {
				if policy == state.SchedulerPolicy {
					g.Scheduler = name
				}
			}
		}
	}
	return g, s.vgpuTypes(d, &g)
}

func (s *session) vgpuTypes(d gonvml.Device, g *VGPUGPU) error {
	if s.has("nvmlDeviceGetActiveVgpus") == nil {
		active, ret := d.GetActiveVgpus()
		if ret != gonvml.ERROR_NOT_SUPPORTED {
			if err := failed(ret, "active vGPUs of %s", g.UUID); err != nil {
				return err
			}
		}
		g.Active = len(active)
	}
	if s.has("nvmlDeviceGetSupportedVgpus", "nvmlVgpuTypeGetName") != nil {
		return nil
	}
	types, ret := d.GetSupportedVgpus()
	if ret == gonvml.ERROR_NOT_SUPPORTED {
		return nil
	}
	if err := failed(ret, "vGPU types of %s", g.UUID); err != nil {
		return err
	}
	g.Types = map[uint32]string{}
	for _, t := range types {
		name, ret := t.GetName()
		if err := failed(ret, "name of a vGPU type of %s", g.UUID); err != nil {
			return err
		}
		g.Types[typeNumber(t)] = name
	}
	return nil
}

func actVGPU(s *session, a VGPUAct) (VGPUGPU, error) {
	d, err := s.byUUID(a.UUID)
	if err != nil {
		return VGPUGPU{}, err
	}
	before, err := s.vgpuGPU(d)
	if err != nil {
		return before, err
	}
	child.Stage("%s on %s", a.Kind, a.UUID)
	switch a.Kind {
	case VGPUSetHeterogeneous:
		if before.Heterogeneous != nil && *before.Heterogeneous == a.Enable {
			return before, nil
		}
		if err := s.has("nvmlDeviceSetVgpuHeterogeneousMode"); err != nil {
			return before, err
		}
		mode := gonvml.VgpuHeterogeneousMode{}
		if a.Enable {
			mode.Mode = 1
		}
		err = failed(d.SetVgpuHeterogeneousMode(mode), "set the heterogeneous mode of %s", a.UUID)
	case VGPUSetScheduler:
		if before.Scheduler == a.Scheduler {
			return before, nil
		}
		policy, known := VGPUSchedulers[a.Scheduler]
		if !known {
			return before, fmt.Errorf("vGPU scheduler %q is unknown: agent and child differ", a.Scheduler)
		}
		if err := s.has("nvmlDeviceSetVgpuSchedulerState"); err != nil {
			return before, err
		}
		// Parameters of zero are the driver's defaults.
		err = failed(d.SetVgpuSchedulerState(&gonvml.VgpuSchedulerSetState{SchedulerPolicy: policy}), "set the scheduler of %s", a.UUID)
	default:
		err = fmt.Errorf("vGPU change %q is unknown: agent and child differ", a.Kind)
	}
	if err != nil {
		return before, err
	}
	return s.vgpuGPU(d)
}

// typeNumber is the number by which sysfs knows a type: the binding hides it
// in an unexported integer type.
func typeNumber(t gonvml.VgpuTypeId) uint32 { return uint32(reflect.ValueOf(t).Uint()) }
