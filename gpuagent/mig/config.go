// Package mig brings the GPUs of a host to a declared MIG layout. The layout
// is a file in mig-parted's format; what is to be done is a pure function of
// it and of what the driver reports (Plan); Apply takes the first step of the
// plan, looks again, and ends when there is none. It must not call NVML: reads
// and changes go through Host, which gpuagent/nvml implements in child
// processes.
package mig

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	nvlib "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"

	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// file is mig-parted's format.
type file struct {
	Version string             `json:"version"`
	Configs map[string][]Entry `json:"mig-configs"`
}

// Entry declares the GPUs that it selects.
type Entry struct {
	setup.Selector
	Enabled *bool `json:"mig-enabled"`
	// MIGDevices counts the MIG devices by profile.
	MIGDevices map[string]int `json:"mig-devices,omitempty"`
}

// Parse reads a file and chooses one of its layouts: the one named, or the
// only one. All layouts must be valid: a file with a mistake in it is not
// half used.
func Parse(text []byte, label string) ([]Entry, error) {
	var f file
	if err := setup.Decode(text, &f); err != nil {
		return nil, setup.Bad("MIG layout", "a file in mig-parted's format", err.Error(), "correct the file")
	}
	if f.Version != setup.Version {
		return nil, setup.Bad("MIG layout", "version: "+setup.Version, fmt.Sprintf("version: %q", f.Version), "correct the file")
	}
	if len(f.Configs) == 0 {
		return nil, setup.Bad("MIG layout", "at least one layout under mig-configs", "none", "correct the file")
	}
	format := nvlib.New(nil)
	for _, name := range slices.Sorted(maps.Keys(f.Configs)) {
		if name == "" {
			return nil, setup.Bad("MIG layout", "a label for each layout", "an empty one", "name the layout")
		}
		if len(f.Configs[name]) == 0 {
			return nil, setup.Bad("MIG layout "+name, "at least one entry", "none", "correct the file")
		}
		for i, e := range f.Configs[name] {
			if err := e.check(format); err != nil {
				return nil, setup.Bad(fmt.Sprintf("MIG layout %s, entry %d", name, i+1), "", err.Error(), "correct the file")
			}
		}
	}
	return setup.Pick("MIG layout", f.Configs, label)
}

func (e Entry) check(format nvlib.Interface) error {
	switch {
	case e.Devices == nil:
		return fmt.Errorf(`devices is missing: want "all" or a list of indices`)
	case e.Enabled == nil:
		return fmt.Errorf("mig-enabled is missing: want true or false")
	case *e.Enabled && e.MIGDevices == nil:
		return fmt.Errorf("mig-devices is missing: want a map of profiles to counts, {} for none")
	case !*e.Enabled && len(e.MIGDevices) > 0:
		return fmt.Errorf("mig-devices is given, but mig-enabled is false: want one of both")
	}
	for profile, count := range e.MIGDevices {
		if err := format.AssertValidMigProfileFormat(profile); err != nil {
			return fmt.Errorf("mig-devices: profile %q: %w", profile, err)
		}
		if count < 0 {
			return fmt.Errorf("mig-devices: %d of %s: want 0 or more", count, profile)
		}
	}
	return nil
}

// wanted is the layout of one GPU.
type wanted struct {
	enabled bool
	devices map[string]int
}

// resolve gives each GPU its entry. GPUs that no entry selects are left alone.
func resolve(entries []Entry, host nvml.MIGHost) (map[string]wanted, error) {
	out := map[string]wanted{}
	for i, e := range entries {
		if missing := e.Missing(len(host.GPUs)); len(missing) > 0 {
			return nil, setup.Bad(fmt.Sprintf("MIG layout, entry %d", i+1), fmt.Sprintf("indices below %d", len(host.GPUs)),
				strings.Trim(fmt.Sprint(missing), "[]"), "the host has fewer GPUs than the layout names: correct it, or find the lost GPU")
		}
		for _, g := range host.GPUs {
			if !e.Takes(g.Index, g.PCIID) {
				continue
			}
			if _, twice := out[g.UUID]; twice {
				return nil, setup.Bad(fmt.Sprintf("MIG layout, entry %d", i+1), "each GPU in one entry",
					fmt.Sprintf("GPU %d (%s) is selected by an earlier one too", g.Index, g.UUID), "correct the file")
			}
			out[g.UUID] = wanted{*e.Enabled, e.MIGDevices}
		}
	}
	return out, nil
}
