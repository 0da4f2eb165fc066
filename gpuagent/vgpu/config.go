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

// Parse reads a file and chooses one of its layouts: the one named, or the
// only one.
func Parse(text []byte, label string) ([]Entry, error) {
	var f file
	if err := setup.Decode(text, &f); err != nil {
		return nil, setup.Bad("vGPU layout", "a file in vgpu-device-manager's format", err.Error(), "correct the file")
	}
	if f.Version != setup.Version {
		return nil, setup.Bad("vGPU layout", "version: "+setup.Version, fmt.Sprintf("version: %q", f.Version), "correct the file")
	}
	if len(f.Configs) == 0 {
		return nil, setup.Bad("vGPU layout", "at least one layout under vgpu-configs", "none", "correct the file")
	}
	for _, name := range slices.Sorted(maps.Keys(f.Configs)) {
		if name == "" {
			return nil, setup.Bad("vGPU layout", "a label for each layout", "an empty one", "name the layout")
		}
		if len(f.Configs[name]) == 0 {
			return nil, setup.Bad("vGPU layout "+name, "at least one entry", "none", "correct the file")
		}
		for i, e := range f.Configs[name] {
			if err := e.check(); err != nil {
				return nil, setup.Bad(fmt.Sprintf("vGPU layout %s, entry %d", name, i+1), "", err.Error(), "correct the file")
			}
		}
	}
	return setup.Pick("vGPU layout", f.Configs, label)
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

// resolve gives each GPU its types. GPUs that no entry selects are left alone.
func resolve(entries []Entry, gpus []GPU) (map[string]map[string]int, error) {
	out := map[string]map[string]int{}
	for i, e := range entries {
		object := fmt.Sprintf("vGPU layout, entry %d", i+1)
		if missing := e.Missing(len(gpus)); len(missing) > 0 {
			return nil, setup.Bad(object, fmt.Sprintf("indices below %d", len(gpus)), strings.Trim(fmt.Sprint(missing), "[]"),
				"the host has fewer GPUs than the layout names: correct it, or find the lost GPU")
		}
		for _, g := range gpus {
			if !e.Takes(g.Index, g.PCIID) {
				continue
			}
			if _, twice := out[g.UUID]; twice {
				return nil, setup.Bad(object, "each GPU in one entry", fmt.Sprintf("GPU %d (%s) is selected by an earlier one too", g.Index, g.PCI), "correct the file")
			}
			types := map[string]int{}
			for name, count := range e.VGPUDevices {
				if count > 0 {
					types[name] = count
				}
			}
			out[g.UUID] = types
		}
	}
	return out, nil
}

// CheckScheduler refuses a policy that nobody knows.
func CheckScheduler(name string) error {
	if _, known := nvml.VGPUSchedulers[name]; name == "" || known {
		return nil
	}
	return setup.Bad("vGPU scheduler", strings.Join(slices.Sorted(maps.Keys(nvml.VGPUSchedulers)), ", "), fmt.Sprintf("%q", name), "name one of them")
}
