// Package mig brings the GPUs of a host to a declared MIG layout. The layout
// is a file in mig-parted's format; what is to be done is a pure function of
// it and of what the driver reports (Plan); Apply takes the first step of the
// plan, looks again, and ends when there is none. It must not call NVML: reads
// and changes go through Host, which gpuagent/nvml implements in child
// processes.
package mig

import (
	"fmt"

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

// kind is what messages call a layout.
const kind = "MIG layout"

// Parse reads a file and chooses one of its layouts: the one named, or the
// only one.
func Parse(text []byte, label string) ([]Entry, error) {
	var f file
	if err := setup.Decode(text, &f); err != nil {
		return nil, setup.Bad(kind, "a file in mig-parted's format", err.Error(), "correct the file")
	}
	format := nvlib.New(nil)
	return setup.Layouts(kind, "mig-configs", f.Version, f.Configs, func(e Entry) error { return e.check(format) }, label)
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

// resolve gives each GPU its layout.
func resolve(entries []Entry, host nvml.MIGHost) (map[string]wanted, error) {
	var gpus []setup.GPU
	for _, g := range host.GPUs {
		gpus = append(gpus, setup.GPU{Index: g.Index, PCIID: g.PCIID, UUID: g.UUID, Name: g.UUID})
	}
	selected, err := setup.Assign(kind, entries, gpus)
	out := map[string]wanted{}
	for uuid, e := range selected {
		out[uuid] = wanted{*e.Enabled, e.MIGDevices}
	}
	return out, err
}
