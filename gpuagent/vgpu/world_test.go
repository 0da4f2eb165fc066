package vgpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/nvml"
)

func TestMain(m *testing.M) {
	if child.Main() {
		return
	}
	os.Exit(m.Run())
}

// types of the fake driver library, by number, with their share of the GPU.
var types = []struct {
	id, gib int
	name    string
}{{1001, 10, "H100-10C"}, {1002, 20, "H100-20C"}, {1003, 40, "H100-40C"}, {1004, 80, "H100-80C"}}

// kernel is a sysfs tree of one GPU that behaves as the vGPU manager's driver
// does: it takes writes, refuses what is busy, full or not a type, and shows
// in its files what is left.
type kernel struct {
	t         require.TestingT
	root, pci string
	framework string
	vfs       int // 0: mdev on the physical function
	// made holds what is in each slot: a type's number, with mdev by UUID.
	made map[string]map[string]int
	// open slots or mdevs are in use by a virtual machine.
	open   map[string]bool
	faults map[string]error // by the end of a path, once each
	writes []string
	// deaf: writes are taken and do nothing. cutOff: the next sriov-manage ends
	// when the functions are there and their driver is not.
	deaf, cutOff bool
}

// newKernel is a host whose virtual functions are off.
func newKernel(t *testing.T, framework string, vfs int) (*kernel, *fakes.Host) {
	t.Helper()
	h := fakes.NewHost(t)
	require.NoError(t, h.Set("gpus", "1", "model", "h100", "vgpu.virtualization", "3", "gpu.0.pci", "00000000:3B:00.0"))
	told, err := nvml.Setters{}.ReadVGPU(t.Context())
	require.NoError(t, err)
	k := &kernel{t: t, root: t.TempDir(), pci: told.GPUs[0].PCI, framework: framework, vfs: vfs,
		made: map[string]map[string]int{}, open: map[string]bool{}, faults: map[string]error{}}
	k.file(k.device(k.pci)+"/vendor", "0x10de")
	k.link(k.device(k.pci)+"/driver", "../../../bus/pci/drivers/nvidia")
	k.link("sys/bus/pci/devices/"+k.pci, "../../../devices/pci/"+k.pci)
	k.file("proc/modules", "nvidia_vgpu_vfio 1 0 - Live 0x0\nnvidia 1 2 - Live 0x0")
	for _, unit := range []string{host.VGPUDaemon, host.VGPUMgr} {
		k.unit(unit, "4711")
	}
	if vfs == 0 {
		require.NoError(t, h.Set("vgpu.sriov", "0"))
		k.slot(k.pci)
		return k, h
	}
	k.file(k.device(k.pci)+"/sriov_totalvfs", strconv.Itoa(vfs))
	k.file(k.device(k.pci)+"/sriov_numvfs", "0")
	return k, h
}

func (k *kernel) path(p string) string     { return filepath.Join(k.root, p) }
func (k *kernel) device(pci string) string { return "sys/devices/pci/" + pci }
func (k *kernel) vf(n int) string          { return fmt.Sprintf("%s.%d", strings.TrimSuffix(k.pci, ".0"), n+1) }

func (k *kernel) file(path, text string) {
	require.NoError(k.t, os.MkdirAll(filepath.Dir(k.path(path)), 0o755))
	require.NoError(k.t, os.WriteFile(k.path(path), []byte(text+"\n"), 0o644))
}

// unit is a systemd unit with the processes named.
func (k *kernel) unit(name, processes string) {
	k.file("sys/fs/cgroup/system.slice/"+name+".service/cgroup.procs", processes)
}

func (k *kernel) link(path, target string) {
	if is, err := os.Readlink(k.path(path)); err == nil && is == target {
		return
	}
	require.NoError(k.t, os.MkdirAll(filepath.Dir(k.path(path)), 0o755))
	require.NoError(k.t, os.Symlink(target, k.path(path)))
}

// EnableVFs is sriov-manage.
func (k *kernel) EnableVFs(_ context.Context, pci string) error {
	k.writes = append(k.writes, "sriov-manage "+pci)
	if err := k.fault("sriov-manage"); err != nil {
		return err
	}
	k.file(k.device(pci)+"/sriov_numvfs", strconv.Itoa(k.vfs))
	for n := range k.vfs {
		k.link("sys/bus/pci/devices/"+k.vf(n), "../../../devices/pci/"+k.vf(n))
		k.link(k.device(pci)+"/virtfn"+strconv.Itoa(n), "../"+k.vf(n))
		if !k.cutOff {
			k.slot(k.vf(n))
		}
	}
	if k.cutOff {
		k.cutOff = false
		return errors.New("signal: killed")
	}
	return nil
}

func (k *kernel) slot(pci string) {
	k.made[pci] = map[string]int{}
	k.link(k.device(pci)+"/iommu_group", "../../../kernel/iommu_groups/"+strconv.Itoa(100+len(k.made)))
	if k.framework == MDev {
		k.link("sys/class/mdev_bus/"+pci, "../../devices/pci/"+pci)
	}
	k.show()
}

// left is what is free on the GPU, in GiB; a GPU holds vGPUs of one size.
func (k *kernel) left() (gib, size int) {
	gib = 80
	for _, slot := range k.made {
		for _, id := range slot {
			size = types[id-1001].gib
			gib -= size
		}
	}
	return gib, size
}

// show writes the files anew.
func (k *kernel) show() {
	gib, size := k.left()
	for pci, slot := range k.made {
		table, current := "ID    : vGPU Name\n", 0
		for _, id := range slot {
			current = id
		}
		for _, typ := range types {
			n := gib / typ.gib
			if size != 0 && typ.gib != size || pci != k.pci && len(slot) > 0 {
				n = 0
			}
			if pci != k.pci {
				n = min(n, 1)
			}
			if k.framework == MDev {
				dir := fmt.Sprintf("%s/mdev_supported_types/nvidia-%d", k.device(pci), typ.id)
				k.file(dir+"/name", "GRID "+typ.name)
				k.file(dir+"/available_instances", strconv.Itoa(n))
				k.file(dir+"/create", "")
			} else if n > 0 {
				table += fmt.Sprintf("%d   : NVIDIA %s\n", typ.id, typ.name)
			}
		}
		if k.framework == Vendor {
			k.file(k.device(pci)+"/nvidia/current_vgpu_type", strconv.Itoa(current))
			k.file(k.device(pci)+"/nvidia/creatable_vgpu_types", table)
		}
	}
}

func (k *kernel) fault(path string) error {
	for end, err := range k.faults {
		if strings.HasSuffix(path, end) {
			delete(k.faults, end)
			return err
		}
	}
	return nil
}

// Write is a write to sysfs.
func (k *kernel) Write(_ context.Context, path, value string) error {
	k.writes = append(k.writes, path+"="+value)
	if err := k.fault(path); err != nil || k.deaf {
		return err
	}
	parts := strings.Split(path, "/")
	switch filepath.Base(path) {
	case "create":
		id, _ := strconv.Atoi(strings.TrimPrefix(parts[len(parts)-2], "nvidia-"))
		return k.create(parts[3], value, id)
	case "remove":
		return k.remove(parts[4])
	case "current_vgpu_type":
		return k.set(parts[4], value)
	}
	return syscall.EINVAL
}

// SetVF is a write to sysfs with the look before it.
func (k *kernel) SetVF(ctx context.Context, vf, value, was string) error {
	switch k.holds(vf) {
	case value:
		return nil
	case was:
		return k.Write(ctx, vendorFile(vf), value)
	}
	return syscall.ESTALE
}

func (k *kernel) create(pci, id string, typ int) error {
	if _, err := uuid.Parse(id); err != nil {
		return syscall.EINVAL
	}
	if _, err := os.Lstat(k.path(mdevDevices + "/" + id)); err == nil {
		return syscall.EEXIST
	}
	gib, size := k.left()
	if want := types[typ-1001].gib; gib < want || size != 0 && size != want {
		return syscall.EINVAL
	}
	k.made[pci][id] = typ
	dir := k.device(pci) + "/" + id
	k.file(dir+"/remove", "")
	k.link(dir+"/mdev_type", fmt.Sprintf("../mdev_supported_types/nvidia-%d", typ))
	k.link(mdevDevices+"/"+id, "../../../devices/pci/"+pci+"/"+id)
	k.link(dir+"/iommu_group", "../../../../kernel/iommu_groups/"+id[:8])
	k.show()
	return nil
}

func (k *kernel) remove(id string) error {
	for pci, slot := range k.made {
		if _, there := slot[id]; !there {
			continue
		}
		if k.open[id] {
			return syscall.EBUSY
		}
		delete(slot, id)
		require.NoError(k.t, os.Remove(k.path(mdevDevices+"/"+id)))
		require.NoError(k.t, os.RemoveAll(k.path(k.device(pci)+"/"+id)))
		k.show()
		return nil
	}
	return syscall.ENOENT
}

func (k *kernel) set(vf, value string) error {
	id, err := strconv.Atoi(value)
	if err != nil {
		return syscall.EINVAL
	}
	if k.open[vf] {
		return syscall.EBUSY
	}
	if id == 0 {
		delete(k.made[vf], vf)
		k.show()
		return nil
	}
	gib, size := k.left()
	at := slices.IndexFunc(types, func(t struct {
		id, gib int
		name    string
	}) bool {
		return t.id == id
	})
	if at < 0 || len(k.made[vf]) > 0 || gib < types[at].gib || size != 0 && size != types[at].gib {
		return syscall.EINVAL
	}
	k.made[vf][vf] = id
	k.show()
	return nil
}

// attach lets a virtual machine open a device, as the host's /proc shows it.
func (k *kernel) attach(pid int, name, group string) {
	k.open[name] = true
	k.link(fmt.Sprintf("proc/%d/fd/7", pid), "/dev/vfio/"+group)
}

func (k *kernel) detach(pid int, name string) {
	delete(k.open, name)
	require.NoError(k.t, os.RemoveAll(k.path(fmt.Sprintf("proc/%d", pid))))
}

func (k *kernel) applier() Applier {
	return Applier{Root: k.root, Driver: nvml.Setters{}, Writer: k}
}

// group is the IOMMU group of a virtual function.
func (k *kernel) group(vf string) string {
	target, err := os.Readlink(k.path(k.device(vf) + "/iommu_group"))
	require.NoError(k.t, err)
	return filepath.Base(target)
}
