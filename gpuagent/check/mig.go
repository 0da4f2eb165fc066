package check

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/nvml"
)

func migMode(c *cell) {
	declared := c.in.Expect.MIG
	if c.d.MIGMode.Code == nvml.NotSupported && declared != nil && declared.Enabled {
		c.fail(gpu.Fatal, "MIG on", "the GPU cannot do MIG", "the plan declares MIG for a card that has none: correct the plan")
		return
	}
	mode, ok := neededIf(c, declared != nil && declared.Enabled, c.d.MIGMode, "MIG is declared")
	if !ok {
		return
	}
	found, settled := c.settled(mode)
	switch {
	case !settled:
	case declared != nil && declared.Enabled != (mode.Current == 1):
		c.fail(gpu.Reset, onOff(declared.Enabled), found, "apply the declared layout: refit-gpuagent mig apply -f FILE")
	case declared == nil:
		c.equalBase(gpu.Reset, found, "MIG mode is lost at a reboot of Hopper and newer: set it again (refit-gpuagent mig apply -f FILE)")
	default:
		c.pass("%s", found)
	}
}

func migModeReading(d *nvml.Device) (string, bool) {
	return text(d.MIGMode, func(p nvml.Pair) string { return onOff(p.Current == 1) })
}

// migLayout: the instances are the declared ones, or those of the baseline, and
// each has its compute instance.
func migLayout(c *cell) {
	declared := c.in.Expect.MIG
	if declared != nil && declared.ModeOnly {
		c.skip("the instances belong to TensorFusion")
		return
	}
	// Why a GPU that cannot do MIG has no instances is told by its mode.
	must := declared != nil && declared.Enabled && c.d.MIGMode.Code != nvml.NotSupported
	instances, ok := neededIf(c, must, c.d.Instances, "MIG is declared")
	if !ok {
		return
	}
	for _, i := range instances {
		if len(i.Compute) == 0 {
			c.fail(gpu.Reset, "a compute instance in every GPU instance", fmt.Sprintf("none in %s at %d", i.Profile, i.Start), "repair it: refit-gpuagent mig apply -f FILE")
			return
		}
	}
	found := layout(instances)
	if declared != nil {
		if want := counts(declared.Devices); want != countInstances(instances) {
			c.fail(gpu.Reset, want, countInstances(instances), "apply the declared layout: refit-gpuagent mig apply -f FILE")
			return
		}
		c.pass("%s", found)
		return
	}
	c.equalBase(gpu.Reset, found, "instances are lost at a reboot or a reload of the driver: create them again (refit-gpuagent mig apply -f FILE)")
}

func migLayoutReading(d *nvml.Device) (string, bool) {
	return text(d.Instances, func(i nvml.Instances) string { return layout(i) })
}

// layout writes each instance with its place, and with its parts where it is
// divided: 3g.40gb@4, 3g.40gb@0 as 1c.3g.40gb+2c.3g.40gb.
func layout(instances nvml.Instances) string {
	var words []string
	for _, i := range instances {
		word := fmt.Sprintf("%s@%d", i.Profile, i.Start)
		if !slices.Equal(i.Compute, []string{i.Profile}) {
			word += " as " + strings.Join(slices.Sorted(slices.Values(i.Compute)), "+")
		}
		words = append(words, word)
	}
	return list(words)
}

// countInstances counts as a declaration does: by compute instance, each of
// which is a MIG device.
func countInstances(instances nvml.Instances) string {
	n := map[string]int{}
	for _, i := range instances {
		for _, profile := range i.Compute {
			n[profile]++
		}
	}
	return counts(n)
}

// A whole instance may be written with its compute part: 3c.3g.40gb is 3g.40gb.
func counts(declared map[string]int) string {
	n := map[string]int{}
	for name, count := range declared {
		name = strings.TrimPrefix(name, "MIG ")
		if part, whole, ok := strings.Cut(name, "c."); ok && strings.HasPrefix(whole, part+"g.") {
			name = whole
		}
		n[name] += count
	}
	var words []string
	for _, profile := range slices.Sorted(maps.Keys(n)) {
		if n[profile] > 0 {
			words = append(words, fmt.Sprintf("%dx %s", n[profile], profile))
		}
	}
	return list(words)
}
