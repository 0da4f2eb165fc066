package nvml

import (
	"fmt"
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/refit-run/refit/gpuagent/child"
)

// actMIG is one change with the state of this moment as its precondition:
// whoever asked may have looked long ago, or has asked before without getting
// the reply.
func actMIG(s *session, a MIGAct) (MIGOutcome, error) {
	d, err := s.byUUID(a.UUID)
	if err != nil {
		return MIGOutcome{}, err
	}
	before, err := s.migGPU(d)
	if err != nil {
		return MIGOutcome{}, err
	}
	if !before.Supported {
		return MIGOutcome{}, failed(gonvml.ERROR_NOT_SUPPORTED, "MIG on %s", a.UUID)
	}
	child.Stage("%s on %s", a.Kind, a.UUID)
	var out MIGOutcome
	switch a.Kind {
	case MIGSetMode:
		out, err = setMode(d, before, a)
	case MIGCreateGPU:
		out, err = createGPU(d, before, a)
	case MIGCreateCompute:
		out, err = createCompute(d, before, a)
	case MIGDestroyCompute, MIGDestroyGPU:
		out, err = destroy(d, before, a)
	default:
		return out, fmt.Errorf("MIG change %q is unknown: agent and child differ", a.Kind)
	}
	if err != nil {
		return out, err
	}
	// A change of mode may leave the old handle dead.
	if d, err = s.byUUID(a.UUID); err != nil {
		return out, err
	}
	out.GPU, err = s.migGPU(d)
	return out, err
}

func setMode(d gonvml.Device, before MIGGPU, a MIGAct) (MIGOutcome, error) {
	if before.Current == a.Enable && before.Pending == a.Enable {
		return MIGOutcome{Already: true}, nil
	}
	if !a.Enable && slices.ContainsFunc(before.Instances, func(i MIGInstance) bool { return find(a.Lost, i) == nil }) {
		return MIGOutcome{Stale: true}, nil
	}
	if before.Current != a.Enable && before.Processes > 0 {
		return MIGOutcome{}, failed(gonvml.ERROR_IN_USE, "change the MIG mode of %s, which has %d clients", a.UUID, before.Processes)
	}
	mode := gonvml.DEVICE_MIG_DISABLE
	if a.Enable {
		mode = gonvml.DEVICE_MIG_ENABLE
	}
	activation, ret := d.SetMigMode(mode)
	if err := failed(ret, "set the MIG mode of %s", a.UUID); err != nil {
		return MIGOutcome{}, err
	}
	switch activation {
	case gonvml.SUCCESS:
		return MIGOutcome{}, nil
	case gonvml.ERROR_IN_USE:
		return MIGOutcome{Activation: ActivationIdle}, nil
	case gonvml.ERROR_RESET_REQUIRED:
		return MIGOutcome{Activation: ActivationReset}, nil
	}
	return MIGOutcome{}, failed(activation, "activate the MIG mode of %s", a.UUID)
}

func createGPU(d gonvml.Device, before MIGGPU, a MIGAct) (MIGOutcome, error) {
	at := a.Instance.Placement
	for _, i := range before.Instances {
		if i.ProfileID == a.Instance.ProfileID && i.Placement == at {
			return MIGOutcome{Already: true}, nil
		}
		if i.Placement.overlaps(at) {
			return MIGOutcome{Stale: true}, nil // somebody else's, made since the plan
		}
	}
	if bad := before.BadRows(); bad != "" {
		return MIGOutcome{}, &Failure{Op: "create the first GPU instance of " + a.UUID, Code: ResetRequired, Found: bad}
	}
	info, ret := d.GetGpuInstanceProfileInfo(a.Constant)
	if err := failed(ret, "GPU instance profile %d of %s", a.Constant, a.UUID); err != nil {
		return MIGOutcome{}, err
	}
	if info.Id != a.Instance.ProfileID {
		return MIGOutcome{}, fmt.Errorf("GPU %s: profile %d is now %d and was %d: plan again", a.UUID, a.Constant, info.Id, a.Instance.ProfileID)
	}
	_, ret = d.CreateGpuInstanceWithPlacement(&info, &gonvml.GpuInstancePlacement{Start: uint32(at.Start), Size: uint32(at.Size)})
	return MIGOutcome{}, failed(ret, "create a GPU instance at %d of %s", at.Start, a.UUID)
}

// find is the instance named, nil when it is gone or another one has its id.
func find(among []MIGInstance, want MIGInstance) *MIGInstance {
	for _, i := range among {
		if i.ID == want.ID && i.ProfileID == want.ProfileID && i.Placement == want.Placement {
			return &i
		}
	}
	return nil
}

func createCompute(d gonvml.Device, before MIGGPU, a MIGAct) (MIGOutcome, error) {
	i := find(before.Instances, a.Instance)
	if i == nil {
		return MIGOutcome{Stale: true}, nil
	}
	have := 0
	for _, c := range i.Compute {
		if c.Slices == a.Slices {
			have++
		}
	}
	if have >= a.Want {
		return MIGOutcome{Already: true}, nil
	}
	gi, ret := d.GetGpuInstanceById(int(i.ID))
	if err := failed(ret, "GPU instance %d of %s", i.ID, a.UUID); err != nil {
		return MIGOutcome{}, err
	}
	for _, c := range computeConstants {
		if c.slices != a.Slices {
			continue
		}
		info, ret := gi.GetComputeInstanceProfileInfo(c.constant, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		if ret != gonvml.SUCCESS || info.InstanceCount == 0 {
			continue
		}
		_, ret = gi.CreateComputeInstance(&info)
		return MIGOutcome{}, failed(ret, "create a compute instance of %d slices in GPU instance %d of %s", a.Slices, i.ID, a.UUID)
	}
	return MIGOutcome{}, failed(gonvml.ERROR_NOT_SUPPORTED, "a compute instance of %d slices in GPU instance %d of %s", a.Slices, i.ID, a.UUID)
}

func destroy(d gonvml.Device, before MIGGPU, a MIGAct) (MIGOutcome, error) {
	i := find(before.Instances, a.Instance)
	if i == nil {
		return MIGOutcome{Already: true}, nil
	}
	if i.Processes > 0 {
		return MIGOutcome{}, failed(gonvml.ERROR_IN_USE, "remove GPU instance %d of %s, which has %d clients", i.ID, a.UUID, i.Processes)
	}
	gi, ret := d.GetGpuInstanceById(int(i.ID))
	if ret == gonvml.ERROR_NOT_FOUND {
		return MIGOutcome{Already: true}, nil
	}
	if err := failed(ret, "GPU instance %d of %s", i.ID, a.UUID); err != nil {
		return MIGOutcome{}, err
	}
	if a.Kind == MIGDestroyGPU {
		ret = gi.Destroy()
	} else {
		var ci gonvml.ComputeInstance
		if ci, ret = gi.GetComputeInstanceById(int(a.Compute)); ret == gonvml.SUCCESS {
			ret = ci.Destroy()
		}
	}
	if ret == gonvml.ERROR_NOT_FOUND {
		return MIGOutcome{Already: true}, nil
	}
	return MIGOutcome{}, failed(ret, "%s of GPU instance %d of %s", a.Kind, i.ID, a.UUID)
}
