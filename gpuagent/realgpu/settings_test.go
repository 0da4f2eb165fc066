package realgpu

import (
	"fmt"
	"maps"
	"slices"

	"github.com/refit-run/refit/gpuagent/nvml"
)

// The settings that only a setter changes.
const (
	migMode, instances, powerLimit, persistence, computeMode = "MIG mode", "MIG instances", "power limit", "persistence mode", "compute mode"
)

var settingNames = []string{migMode, instances, powerLimit, persistence, computeMode}

// settings are those of each GPU, by UUID.
type settings map[string]map[string]string

func settingsOf(s nvml.Snapshot) settings {
	out := settings{}
	for _, d := range s.Devices {
		out[d.UUID.Value] = map[string]string{
			migMode: write(d.MIGMode, func(p nvml.Pair) string {
				return fmt.Sprintf("%s, pending %s", onOff(p.Current == 1), onOff(p.Other == 1))
			}),
			instances:   write(d.Instances, describe),
			powerLimit:  write(d.PowerLimit, func(n uint64) string { return fmt.Sprintf("%g W", float64(n)/1000) }),
			persistence: write(d.Persistence, onOff),
			computeMode: write(d.ComputeMode, func(n int) string { return fmt.Sprint(n) }),
		}
	}
	return out
}

func describe(i nvml.Instances) string {
	if len(i) == 0 {
		return "none"
	}
	text := ""
	for _, one := range i {
		text += fmt.Sprintf("%s (id %d) at %d with compute instances %v; ", one.Profile, one.ID, one.Start, one.Compute)
	}
	return text
}

func write[T any](r nvml.Reading[T], text func(T) string) string {
	if code, missing := r.Why(); missing != "" {
		return "no " + missing
	} else if code != nvml.Success {
		return code.String()
	}
	return text(r.Value)
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

// changes are the settings that are not as they were.
func (before settings) changes(after settings) []string {
	var out []string
	for _, uuid := range slices.Sorted(maps.Keys(before)) {
		if after[uuid] == nil {
			out = append(out, fmt.Sprintf("GPU %s: gone", uuid))
			continue
		}
		for _, name := range settingNames {
			if b, a := before[uuid][name], after[uuid][name]; a != b {
				out = append(out, fmt.Sprintf("GPU %s: %s: %s before, %s after", uuid, name, b, a))
			}
		}
	}
	for uuid := range after {
		if before[uuid] == nil {
			out = append(out, fmt.Sprintf("GPU %s: new", uuid))
		}
	}
	return out
}
