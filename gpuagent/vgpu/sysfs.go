package vgpu

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// Frameworks by which a host driver offers virtual GPUs.
const (
	MDev   = "mdev"
	Vendor = "vendor-vfio"
	// Hidden: a vGPU host whose virtual functions are off, or on without the
	// driver (sriov-manage was cut off), shows neither.
	Hidden = "hidden until the virtual functions are on"
)

// Host is the vGPU side of a host.
type Host struct {
	GPUs []GPU
	// Blind: the open files of other processes cannot be seen, so that a
	// function in use looks free.
	Blind bool
	// Manager is what of the vGPU manager is loaded and at work.
	Manager host.VGPUManager
}

// GPU is one physical function.
type GPU struct {
	nvml.VGPUGPU
	// Framework is empty where the GPU offers no virtual GPUs.
	Framework        string
	TotalVFs, NumVFs int
	Slots            []Slot
}

// Slot is where a virtual GPU can be: a virtual function, or with mdev on
// older GPUs the physical function, which then holds several.
type Slot struct {
	PCI      string
	Physical bool
	Types    []Type
	Devices  []Device
}

// Type is a vGPU type that can be made in a slot now.
type Type struct {
	ID, Name string
	// Available is how many; 1 where the framework only says that it can be.
	Available int
}

// Device is a virtual GPU. UUID is empty with vendor VFIO, where the slot is
// the device.
type Device struct {
	UUID, Type string
	// Number is what the virtual function of the vendor's VFIO driver holds.
	Number string
	// Open: a process, most likely a virtual machine, has it open.
	Open bool
}

// observe reads the tree in the child that Read started.
func observe(root string, told nvml.VGPUHost) (Host, error) {
	t := tree{root: root}
	out := Host{Manager: host.Host{Root: root}.VGPUManager()}
	child.Stage("the scan of %s", t.path("proc"))
	out.Blind = t.scan()
	for _, n := range told.GPUs {
		g := GPU{VGPUGPU: n}
		if g.Host {
			if err := t.gpu(&g); err != nil {
				return out, err
			}
		}
		out.GPUs = append(out.GPUs, g)
	}
	slices.SortFunc(out.GPUs, func(a, b GPU) int { return strings.Compare(a.PCI, b.PCI) })
	for i := range out.GPUs { // the order of the file's indices: by PCI address
		out.GPUs[i].Index = i
	}
	return out, nil
}

// tree is the host's file system under a root.
type tree struct {
	root string
	open map[string]bool // files of /dev/vfio that some process has open
}

func (t *tree) path(parts ...string) string {
	return filepath.Join(append([]string{t.root}, parts...)...)
}

const (
	pciDevices  = "sys/bus/pci/devices"
	mdevBus     = "sys/class/mdev_bus"
	mdevDevices = "sys/bus/mdev/devices"
)

func (t *tree) gpu(g *GPU) error {
	pf := t.path(pciDevices, g.PCI)
	if _, err := stat(pf); err != nil {
		return fmt.Errorf("GPU %s: %w", g.PCI, err)
	}
	g.TotalVFs, g.NumVFs = number(filepath.Join(pf, "sriov_totalvfs")), number(filepath.Join(pf, "sriov_numvfs"))
	if !g.SRIOV && g.NumVFs == 0 {
		g.TotalVFs = 0 // this GPU's driver has no use for them
	}
	slots := []Slot{{PCI: g.PCI, Physical: true}}
	for k := range g.NumVFs {
		link, err := os.Readlink(filepath.Join(pf, "virtfn"+strconv.Itoa(k)))
		if err != nil {
			return fmt.Errorf("virtual function %d of GPU %s: %w", k, g.PCI, err)
		}
		slots = append(slots, Slot{PCI: filepath.Base(link)})
	}
	for _, s := range slots {
		if present(t.path(mdevBus, s.PCI)) {
			g.Framework = MDev
			if err := t.mdev(&s); err != nil {
				return err
			}
			g.Slots = append(g.Slots, s)
		}
	}
	if g.Framework == MDev {
		return t.mdevs(g)
	}
	for _, s := range slots[1:] {
		if present(t.path(pciDevices, s.PCI, "nvidia/current_vgpu_type")) {
			g.Framework = Vendor
			if err := t.vendor(&s, g.Types); err != nil {
				return err
			}
			g.Slots = append(g.Slots, s)
		}
	}
	driver, _ := os.Readlink(filepath.Join(pf, "driver"))
	if g.Framework == "" && g.SRIOV && g.TotalVFs > 0 && filepath.Base(driver) == "nvidia" {
		g.Framework = Hidden
	}
	return nil
}

// mdev reads what an mdev parent can hold.
func (t *tree) mdev(s *Slot) error {
	dir := t.path(mdevBus, s.PCI, "mdev_supported_types")
	ids, err := list(dir)
	if err != nil {
		return fmt.Errorf("mdev types of %s: %w", s.PCI, err)
	}
	for _, id := range ids {
		name, err := line(filepath.Join(dir, id.Name(), "name"))
		if err != nil {
			return fmt.Errorf("mdev type %s of %s: %w", id.Name(), s.PCI, err)
		}
		s.Types = append(s.Types, Type{ID: id.Name(), Name: bare(name), Available: number(filepath.Join(dir, id.Name(), "available_instances"))})
	}
	return nil
}

// mdevs finds the mediated devices of a GPU's parents.
func (t *tree) mdevs(g *GPU) error {
	devices, err := list(t.path(mdevDevices))
	if err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("mediated devices: %w", err)
	}
	for _, d := range devices {
		dir, err := filepath.EvalSymlinks(t.path(mdevDevices, d.Name()))
		if os.IsNotExist(err) {
			continue // removed meanwhile
		}
		if err != nil {
			return fmt.Errorf("mediated device %s: %w", d.Name(), err)
		}
		at := slices.IndexFunc(g.Slots, func(s Slot) bool { return s.PCI == filepath.Base(filepath.Dir(dir)) })
		if at < 0 {
			continue
		}
		name, err := line(filepath.Join(dir, "mdev_type/name"))
		if err != nil {
			return fmt.Errorf("type of mediated device %s: %w", d.Name(), err)
		}
		g.Slots[at].Devices = append(g.Slots[at].Devices, Device{UUID: d.Name(), Type: bare(name), Open: t.inUse(dir)})
	}
	return nil
}

// vendor reads a virtual function of the vendor's VFIO driver. Types in use
// vanish from its table, so names come from NVML first.
func (t *tree) vendor(s *Slot, names map[uint32]string) error {
	dir := t.path(pciDevices, s.PCI)
	current, err := line(filepath.Join(dir, "nvidia/current_vgpu_type"))
	if err != nil {
		return fmt.Errorf("vGPU type of %s: %w", s.PCI, err)
	}
	table, err := text(filepath.Join(dir, "nvidia/creatable_vgpu_types"))
	if err != nil {
		return fmt.Errorf("creatable vGPU types of %s: %w", s.PCI, err)
	}
	s.Types = creatable(table)
	if current == "0" {
		return nil
	}
	name := "type " + current
	if n, err := strconv.ParseUint(current, 10, 32); err == nil && names[uint32(n)] != "" {
		name = bare(names[uint32(n)])
	} else if at := slices.IndexFunc(s.Types, func(t Type) bool { return t.ID == current }); at >= 0 {
		name = s.Types[at].Name
	}
	s.Devices = []Device{{Type: name, Number: current, Open: t.inUse(dir)}}
	return nil
}

// creatable reads the table of numbers and names; its head has no number.
func creatable(table string) []Type {
	var out []Type
	for row := range strings.Lines(table) {
		id, name, ok := strings.Cut(row, ":")
		id, name = strings.TrimSpace(id), strings.TrimSpace(name)
		if _, err := strconv.ParseUint(id, 10, 32); ok && err == nil && name != "" {
			out = append(out, Type{ID: id, Name: bare(name), Available: 1})
		}
	}
	return out
}

// What follows touches the driver's files; each says so before, because the
// driver may never answer.

func stat(path string) (os.FileInfo, error) {
	child.Stage("the look at %s", path)
	return os.Stat(path)
}

func list(dir string) ([]os.DirEntry, error) {
	child.Stage("the listing of %s", dir)
	return os.ReadDir(dir)
}

func text(path string) (string, error) {
	child.Stage("the read of %s", path)
	b, err := os.ReadFile(path)
	return string(b), err
}

func present(path string) bool {
	_, err := stat(path)
	return err == nil
}

func line(path string) (string, error) {
	all, err := text(path)
	return strings.TrimSpace(all), err
}

// number is 0 where there is no file or no number in it.
func number(path string) int {
	digits, _ := line(path)
	n, _ := strconv.Atoi(digits)
	return n
}
