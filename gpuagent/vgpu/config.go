// Package vgpu sets up NVIDIA vGPU on a virtualisation host: virtual
// functions, the vGPU type of each, scheduler policy. The layout is a file in
// vgpu-device-manager's format; what is to be done is a pure function of it
// and of what sysfs and the driver report (Plan); Apply takes the first step,
// looks again, and ends when there is none. Reads come from a tree under an
// injected root, writes go through Writer. It must not call NVML: gpuagent/nvml
// does, in child processes.
package vgpu

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// file is vgpu-device-manager's format.
type file struct {
	Version string             `json:"version"`
	Configs map[string][]Entry `json:"vgpu-configs"`
}

// Entry declares the GPUs that it selects.
type Entry struct {
	setup.Selector
	// VGPUDevices counts the virtual GPUs by type; empty means none.
	VGPUDevices map[string]int `json:"vgpu-devices"`
}

// typeName is a vGPU type: A100-40C, or MIG-backed A100-1-5CME.
var typeName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9 -]*-[0-9]+[ABCQ](ME|NOME|MEALL|GFX)?$`)

// migBacked is a type that lives in a GPU instance: the number of slices
// stands before the memory.
var migBacked = regexp.MustCompile(`-[0-9]+-[0-9]+[ABCQ](ME|NOME|MEALL|GFX)?$`)

// kind is what messages call a layout.
const kind = "vGPU layout"

// Parse reads a file and chooses one of its layouts: the one named, or the
// only one.
func Parse(text []byte, label string) ([]Entry, error) {
	var f file
	if err := setup.Decode(text, &f); err != nil {
		return nil, setup.Bad(kind, "a file in vgpu-device-manager's format", err.Error(), "correct the file")
	}
	return setup.Layouts(kind, "vgpu-configs", f.Version, f.Configs, Entry.check, label)
}

func (e Entry) check() error {
	switch {
	case e.Devices == nil:
		return fmt.Errorf(`devices is missing: want "all" or a list of indices`)
	case e.VGPUDevices == nil:
		return fmt.Errorf("vgpu-devices is missing: want a map of types to counts, {} for none")
	}
	mig := 0
	for name, count := range e.VGPUDevices {
		if !typeName.MatchString(name) {
			return fmt.Errorf("vgpu-devices: %q is no vGPU type: want one like A100-40C or A100-1-5C", name)
		}
		if count < 0 {
			return fmt.Errorf("vgpu-devices: %d of %s: want 0 or more", count, name)
		}
		if migBacked.MatchString(name) {
			mig++
		}
	}
	if mig > 0 && mig < len(e.VGPUDevices) {
		return fmt.Errorf("vgpu-devices mixes MIG-backed and time-sliced types: a GPU is in one mode at a time")
	}
	return nil
}

// bare is a type's name without the brand that the driver puts before it.
func bare(name string) string {
	for _, brand := range []string{"NVIDIA ", "GRID "} {
		name = strings.TrimPrefix(name, brand)
	}
	return name
}

// resolve gives each GPU its types.
func resolve(entries []Entry, gpus []GPU) (map[string]map[string]int, error) {
	var known []setup.GPU
	for _, g := range gpus {
		known = append(known, setup.GPU{Index: g.Index, PCIID: g.PCIID, UUID: g.UUID, Name: g.PCI})
	}
	selected, err := setup.Assign(kind, entries, known)
	out := map[string]map[string]int{}
	for uuid, e := range selected {
		out[uuid] = map[string]int{}
		for name, count := range e.VGPUDevices {
			if count > 0 {
				out[uuid][name] = count
			}
		}
	}
	return out, err
}

// CheckScheduler refuses a policy that nobody knows.
func CheckScheduler(name string) error {
	if _, known := nvml.VGPUSchedulers[name]; name == "" || known {
		return nil
	}
	return setup.Bad("vGPU scheduler", strings.Join(slices.Sorted(maps.Keys(nvml.VGPUSchedulers)), ", "), fmt.Sprintf("%q", name), "name one of them")
}
