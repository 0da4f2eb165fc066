package nvml

import (
	"fmt"
	"slices"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

func (d device) mig(to *Device) {
	to.MIGMode = get(d, func() (Pair, gonvml.Return) {
		current, pending, ret := d.GetMigMode()
		return Pair{current, pending}, ret
	}, "nvmlDeviceGetMigMode")
	to.Instances = then(to.MIGMode, func(Pair) Instances { return nil })
	if !to.MIGMode.OK() || to.MIGMode.Value.Current != gonvml.DEVICE_MIG_ENABLE {
		return
	}
	to.MIGDevices = d.migDevices()
	to.Instances = d.gpuInstances()
}

func (d device) migDevices() []MIGDevice {
	var devices []MIGDevice
	most := get(d, d.GetMaxMigDeviceCount, "nvmlDeviceGetMaxMigDeviceCount")
	for i := range most.Value {
		h := get(d, func() (gonvml.Device, gonvml.Return) { return d.GetMigDeviceHandleByIndex(i) }, "nvmlDeviceGetMigDeviceHandleByIndex")
		if !h.OK() {
			continue
		}
		dev := device{Device: h.Value, library: d.library, scope: d.scope}
		devices = append(devices, MIGDevice{
			UUID: get(dev, dev.GetUUID, "nvmlDeviceGetUUID").Value,
			Name: get(dev, dev.GetName, "nvmlDeviceGetName").Value,
		})
	}
	return devices
}

func (d device) gpuInstances() Reading[Instances] {
	out := Reading[Instances]{Value: Instances{}}
	for p := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		profile := get(d, func() (gonvml.GpuInstanceProfileInfo, gonvml.Return) { return d.GetGpuInstanceProfileInfo(p) },
			"nvmlDeviceGetGpuInstanceProfileInfo")
		if !profile.OK() || profile.Value.InstanceCount == 0 {
			continue
		}
		list := get(d, func() ([]gonvml.GpuInstance, gonvml.Return) { return d.GetGpuInstances(&profile.Value) }, "nvmlDeviceGetGpuInstances")
		if !list.OK() {
			return Reading[Instances]{Code: list.Code, Missing: list.Missing}
		}
		for _, gi := range list.Value {
			info := get(d, gi.GetInfo, "nvmlGpuInstanceGetInfo")
			if !info.OK() {
				return Reading[Instances]{Code: info.Code, Missing: info.Missing}
			}
			out.Value = append(out.Value, Instance{
				Profile: d.profileName(p, profile.Value), ProfileID: int(profile.Value.Id), ID: int(info.Value.Id),
				Start: int(info.Value.Placement.Start), Size: int(info.Value.Placement.Size), Compute: d.computeInstances(gi),
			})
		}
	}
	slices.SortFunc(out.Value, func(a, b Instance) int { return a.Start - b.Start })
	return out
}

func (d device) computeInstances(gi gonvml.GpuInstance) int {
	n := 0
	for p := range gonvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		profile := get(d, func() (gonvml.ComputeInstanceProfileInfo, gonvml.Return) {
			return gi.GetComputeInstanceProfileInfo(p, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		}, "nvmlGpuInstanceGetComputeInstanceProfileInfo")
		if !profile.OK() || profile.Value.InstanceCount == 0 {
			continue
		}
		n += len(get(d, func() ([]gonvml.ComputeInstance, gonvml.Return) { return gi.GetComputeInstances(&profile.Value) },
			"nvmlGpuInstanceGetComputeInstances").Value)
	}
	return n
}

// profileName is the driver's own name where it gives one, like 1g.10gb.
func (d device) profileName(p int, info gonvml.GpuInstanceProfileInfo) string {
	if d.has("nvmlDeviceGetGpuInstanceProfileInfoV") == "" {
		named := get(d, d.GetGpuInstanceProfileInfoV(p).V2, "nvmlDeviceGetGpuInstanceProfileInfoV")
		if name := strings.TrimPrefix(text(named.Value.Name[:]), "MIG "); named.OK() && name != "" {
			return name
		}
	}
	return fmt.Sprintf("profile-%d", info.Id)
}
