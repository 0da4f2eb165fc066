package nvml

import (
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/child"
)

var migSymbols = []string{
	"nvmlDeviceGetMigMode", "nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement",
}

func readMIG(s *session, _ struct{}) (MIGHost, error) {
	if err := s.has("nvmlDeviceGetMigMode"); err != nil {
		// A driver of before MIG: no GPU of it can be in that mode.
		var out MIGHost
		err := s.each(func(i int, d gonvml.Device) error {
			g := MIGGPU{Index: i}
			var err error
			g.UUID, g.PCI, g.PCIID, err = identity(d)
			out.GPUs = append(out.GPUs, g)
			return err
		})
		return out, err
	}
	var out MIGHost
	err := s.each(func(i int, d gonvml.Device) error {
		g, err := s.migGPU(d)
		g.Index = i
		out.GPUs = append(out.GPUs, g)
		return err
	})
	return out, err
}

func (s *session) migGPU(d gonvml.Device) (g MIGGPU, err error) {
	if g.UUID, g.PCI, g.PCIID, err = identity(d); err != nil {
		return g, err
	}
	child.Stage("read MIG of %s", g.UUID)
	current, pending, ret := d.GetMigMode()
	if ret == gonvml.ERROR_NOT_SUPPORTED {
		return g, nil
	}
	if err := failed(ret, "MIG mode of %s", g.UUID); err != nil {
		return g, err
	}
	g.Supported, g.Current, g.Pending = true, current == gonvml.DEVICE_MIG_ENABLE, pending == gonvml.DEVICE_MIG_ENABLE
	if err := s.has(slices.Concat(migSymbols, migInstanceSymbols, migDeviceSymbols)...); err != nil {
		return g, err
	}
	clients, err := s.clients(d, g.UUID)
	if err != nil {
		return g, err
	}
	memory, ret := d.GetMemoryInfo()
	if err := failed(ret, "memory of %s", g.UUID); err != nil {
		return g, err
	}
	if g.Profiles, err = s.migProfiles(d, g.UUID, memory.Total); err != nil {
		return g, err
	}
	if g.Current {
		if g.Instances, err = readInstances(d, g.UUID); err != nil {
			return g, err
		}
		if err := s.migDevices(d, &g, clients); err != nil {
			return g, err
		}
	}
	if err := s.has(remapSymbol); err == nil {
		g.Remap = remapOf(d)
	} else {
		g.Remap.Missing = remapSymbol
	}
	g.Processes = len(clients)
	for i := range g.Instances {
		for _, of := range clients {
			if of == g.Instances[i].ID {
				g.Instances[i].Processes++
			}
		}
	}
	return g, nil
}

const remapSymbol = "nvmlDeviceGetRemappedRows"

func remapOf(d gonvml.Device) Reading[Remap] {
	correctable, uncorrectable, pending, failure, ret := d.GetRemappedRows()
	return Reading[Remap]{Value: Remap{correctable, uncorrectable, pending, failure}, Code: Code(ret)}
}

// clients are the processes on a device with the GPU instance of each. A
// driver that cannot list compute processes is an error, not an idle GPU.
func (s *session) clients(d gonvml.Device, uuid string) (map[uint32]uint32, error) {
	out := map[uint32]uint32{}
	for i, kind := range []struct {
		name string
		list func() ([]gonvml.ProcessInfo, gonvml.Return)
	}{
		{"nvmlDeviceGetComputeRunningProcesses", d.GetComputeRunningProcesses},
		{"nvmlDeviceGetGraphicsRunningProcesses", d.GetGraphicsRunningProcesses},
		{"nvmlDeviceGetMPSComputeRunningProcesses", d.GetMPSComputeRunningProcesses},
	} {
		if err := s.hasVersion(kind.name, 3); err != nil {
			if i == 0 {
				return nil, err
			}
			continue
		}
		list, ret := kind.list()
		if ret == gonvml.ERROR_NOT_SUPPORTED && i > 0 {
			continue
		}
		if err := failed(ret, "processes of %s", uuid); err != nil {
			return nil, err
		}
		for _, p := range list {
			out[p.Pid] = p.GpuInstanceId
		}
	}
	return out, nil
}

// migProfiles lists what the GPU offers. Before MIG mode is on a driver may
// keep the placements, or all of it, to itself.
func (s *session) migProfiles(d gonvml.Device, uuid string, memory uint64) ([]MIGProfile, error) {
	var out []MIGProfile
	for constant := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := d.GetGpuInstanceProfileInfo(constant)
		if ret != gonvml.SUCCESS || info.InstanceCount == 0 {
			continue // not of this GPU
		}
		p := s.named(constant, info, memory)
		if p.Name == "" {
			continue // newer than this build knows: it can be neither declared nor made
		}
		places, ret := d.GetGpuInstancePossiblePlacements(&info)
		if ret == gonvml.ERROR_NOT_SUPPORTED {
			out = append(out, p) // not told before MIG mode is on
			continue
		}
		if err := failed(ret, "placements of %s on %s", p.Name, uuid); err != nil {
			return nil, err
		}
		for _, at := range places {
			p.Placements = append(p.Placements, MIGPlacement{int(at.Start), int(at.Size)})
		}
		out = append(out, p)
	}
	return out, nil
}

// named is a profile without its placements. Its name is empty where it is
// newer than this build knows.
func (s *session) named(constant int, info gonvml.GpuInstanceProfileInfo, memory uint64) MIGProfile {
	p := MIGProfile{Constant: constant, ID: info.Id, Max: int(info.InstanceCount), Compute: map[int]string{}}
	for _, c := range computeConstants {
		name, err := s.profiles.NewMigProfile(constant, c.constant, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, info.MemorySizeMB, memory)
		if err != nil || c.slices > name.GetInfo().G {
			continue
		}
		p.Slices = name.GetInfo().G
		if p.Compute[c.slices] = name.String(); c.slices == p.Slices {
			p.Name = name.String()
		}
	}
	return p
}

// computeConstants are NVML's compute instance profiles with their slices;
// where two have as many, the GPU instance knows which one it offers.
var computeConstants = []struct{ constant, slices int }{
	{gonvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 1}, {gonvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 2},
	{gonvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 3}, {gonvml.COMPUTE_INSTANCE_PROFILE_4_SLICE, 4},
	{gonvml.COMPUTE_INSTANCE_PROFILE_6_SLICE, 6}, {gonvml.COMPUTE_INSTANCE_PROFILE_7_SLICE, 7},
	{gonvml.COMPUTE_INSTANCE_PROFILE_8_SLICE, 8}, {gonvml.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1, 1},
	{gonvml.COMPUTE_INSTANCE_PROFILE_7_SLICE_NVL, 7},
}

// migDevices lists the MIG devices and adds their clients: some drivers show
// those only to who asks the MIG device itself.
func (s *session) migDevices(d gonvml.Device, g *MIGGPU, clients map[uint32]uint32) error {
	made, err := migHandles(d, g.UUID)
	if err != nil {
		return err
	}
	for _, m := range made {
		dev := gpu.Device{UUID: m.uuid}
		if name, ret := m.GetName(); ret == gonvml.SUCCESS {
			dev.Model = name
		}
		if memory, ret := m.GetMemoryInfo(); ret == gonvml.SUCCESS {
			dev.MemoryBytes = memory.Total
		}
		g.Devices = append(g.Devices, dev)
		own, err := s.clients(m, m.uuid)
		if err != nil {
			return err
		}
		if instance, ret := m.GetGpuInstanceId(); ret == gonvml.SUCCESS {
			for pid := range own {
				clients[pid] = uint32(instance)
			}
		}
	}
	return nil
}
