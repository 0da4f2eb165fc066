package nvml

import (
	"errors"
	"fmt"
	"slices"

	nvlib "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

func (d device) mig(to *Device) {
	to.MIGMode = get(d, func() (Pair, gonvml.Return) {
		current, pending, ret := d.GetMigMode()
		return Pair{current, pending}, ret
	}, "nvmlDeviceGetMigMode")
	to.Instances = then(to.MIGMode, func(Pair) Instances { return nil })
	to.MIGDevices = then(to.MIGMode, func(Pair) []MIGDevice { return nil })
	if !to.MIGOn() {
		return
	}
	to.MIGDevices = readAll(d, d.migDevices, migDeviceSymbols)
	// A profile is named by its share of the board's memory.
	if to.Instances = then(to.Memory, func(Memory) Instances { return nil }); to.Memory.OK() {
		to.Instances = readAll(d, func() (Instances, error) { return d.instances(to.Memory.Value.Total) }, migInstanceSymbols)
	}
}

// What reading instances and MIG devices calls.
var (
	migInstanceSymbols = []string{
		"nvmlDeviceGetGpuInstances", "nvmlDeviceGetGpuInstanceProfileInfo", "nvmlGpuInstanceGetInfo",
		"nvmlGpuInstanceGetComputeInstanceProfileInfo", "nvmlGpuInstanceGetComputeInstances", "nvmlComputeInstanceGetInfo_v2",
	}
	migDeviceSymbols = []string{"nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetUUID"}
)

// readAll turns an answer that takes several functions, all of them, into a
// reading.
func readAll[T any](d device, read func() (T, error), symbols []string) Reading[T] {
	for _, s := range symbols {
		if missing := d.has(s); missing != "" {
			return Reading[T]{Missing: missing}
		}
	}
	return get(d, func() (T, gonvml.Return) {
		value, err := read()
		var refused *Failure
		switch {
		case errors.As(err, &refused):
			return value, gonvml.Return(refused.Code)
		case err != nil:
			return value, gonvml.ERROR_UNKNOWN
		}
		return value, gonvml.SUCCESS
	}, symbols[0])
}

func (d device) migDevices() ([]MIGDevice, error) {
	made, err := migHandles(d.Device, d.scope)
	var out []MIGDevice
	for _, m := range made {
		out = append(out, MIGDevice{UUID: m.uuid, Name: get(device{Device: m.Device, library: d.library, scope: d.scope}, m.GetName, "nvmlDeviceGetName").Value})
	}
	return out, err
}

// migHandle is a MIG device with the UUID that CUDA knows it by.
type migHandle struct {
	gonvml.Device
	uuid string
}

// migHandles opens the MIG devices of a GPU: every one of them, or an error. A
// device without a UUID is an error too: CUDA would take any device for it.
func migHandles(d gonvml.Device, of string) ([]migHandle, error) {
	most, ret := d.GetMaxMigDeviceCount()
	if err := failed(ret, "MIG devices of %s", of); err != nil {
		return nil, err
	}
	var out []migHandle
	for i := range most {
		m, ret := d.GetMigDeviceHandleByIndex(i)
		// The places of a GPU are not filled without gaps.
		if ret == gonvml.ERROR_NOT_FOUND || ret == gonvml.ERROR_INVALID_ARGUMENT {
			continue
		}
		if err := failed(ret, "MIG device %d of %s", i, of); err != nil {
			return nil, err
		}
		uuid, ret := m.GetUUID()
		if ret == gonvml.SUCCESS && uuid == "" {
			ret = gonvml.ERROR_UNKNOWN
		}
		if err := failed(ret, "UUID of MIG device %d of %s", i, of); err != nil {
			return nil, err
		}
		out = append(out, migHandle{m, uuid})
	}
	return out, nil
}

// instances are read and named as the set-up does, so that a layout means the
// same to both.
func (d device) instances(memory uint64) (Instances, error) {
	s := &session{lib: d.library.Interface, profiles: nvlib.New(d.library.Interface)}
	offered := map[uint32]MIGProfile{}
	for constant := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		if info, ret := d.GetGpuInstanceProfileInfo(constant); ret == gonvml.SUCCESS && info.InstanceCount > 0 {
			offered[info.Id] = s.named(constant, info, memory)
		}
	}
	made, err := readInstances(d.Device, d.scope)
	out := Instances{}
	for _, i := range made {
		p := offered[i.ProfileID]
		one := Instance{Profile: p.Name, ID: int(i.ID), Start: i.Placement.Start, Size: i.Placement.Size}
		if p.Name == "" {
			one.Profile = fmt.Sprintf("profile-%d", i.ProfileID) // newer than this build knows
		}
		for _, c := range i.Compute {
			name := p.Compute[c.Slices]
			if name == "" {
				name = fmt.Sprintf("%dc.%s", c.Slices, one.Profile)
			}
			one.Compute = append(one.Compute, name)
		}
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b Instance) int { return a.Start - b.Start })
	return out, err
}

// readInstances lists all that is there, also of profiles that this build does
// not know: they take room.
func readInstances(d gonvml.Device, of string) ([]MIGInstance, error) {
	var out []MIGInstance
	for constant := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := d.GetGpuInstanceProfileInfo(constant)
		if notOffered(ret) || ret == gonvml.SUCCESS && info.InstanceCount == 0 {
			continue
		}
		if err := failed(ret, "GPU instance profile %d of %s", constant, of); err != nil {
			return nil, err
		}
		list, ret := d.GetGpuInstances(&info)
		if err := failed(ret, "GPU instances of %s", of); err != nil {
			return nil, err
		}
		for _, gi := range list {
			about, ret := gi.GetInfo()
			if err := failed(ret, "a GPU instance of %s", of); err != nil {
				return nil, err
			}
			if slices.ContainsFunc(out, func(i MIGInstance) bool { return i.ID == about.Id }) {
				continue
			}
			i := MIGInstance{ID: about.Id, ProfileID: about.ProfileId,
				Placement: MIGPlacement{int(about.Placement.Start), int(about.Placement.Size)}}
			if i.Compute, ret = computeInstances(gi); ret != gonvml.SUCCESS {
				return nil, failed(ret, "compute instances of GPU instance %d of %s", i.ID, of)
			}
			out = append(out, i)
		}
	}
	return out, nil
}

// notOffered tells a profile that this GPU or driver does not have from one
// that could not be read.
func notOffered(ret gonvml.Return) bool {
	return ret == gonvml.ERROR_NOT_SUPPORTED || ret == gonvml.ERROR_INVALID_ARGUMENT
}

func computeInstances(gi gonvml.GpuInstance) ([]MIGComputeInstance, gonvml.Return) {
	var out []MIGComputeInstance
	for _, c := range computeConstants {
		info, ret := gi.GetComputeInstanceProfileInfo(c.constant, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		if notOffered(ret) || ret == gonvml.SUCCESS && info.InstanceCount == 0 {
			continue
		}
		if ret != gonvml.SUCCESS {
			return nil, ret
		}
		list, ret := gi.GetComputeInstances(&info)
		if ret != gonvml.SUCCESS {
			return nil, ret
		}
		for _, ci := range list {
			about, ret := ci.GetInfo()
			if ret != gonvml.SUCCESS {
				return nil, ret
			}
			if !slices.ContainsFunc(out, func(o MIGComputeInstance) bool { return o.ID == about.Id }) {
				out = append(out, MIGComputeInstance{ID: about.Id, Slices: c.slices})
			}
		}
	}
	return out, gonvml.SUCCESS
}
