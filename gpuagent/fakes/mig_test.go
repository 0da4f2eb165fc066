package fakes_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/fakes"
)

// migScript runs lines on GPU 0 and answers each with a code and what is there:
//
//	mode 1 | create ID [START] | compute GI | destroy GI | destroy GI/CI | remap | list | devices | capacity ID
func migScript(_ context.Context, raw json.RawMessage) (any, error) {
	var lines []string
	if err := json.Unmarshal(raw, &lines); err != nil {
		return nil, err
	}
	var out []string
	for _, line := range lines {
		out = append(out, migLine(line))
	}
	return out, nil
}

func migLine(line string) string {
	a := on(0, func(d nvml.Device) (string, nvml.Return) {
		word := strings.Fields(line)
		number := func(i int) (n int) {
			fmt.Sscan(word[i], &n)
			return n
		}
		switch word[0] {
		case "mode":
			activation, ret := d.SetMigMode(number(1))
			return fmt.Sprint(int(activation)), ret
		case "create":
			info := nvml.GpuInstanceProfileInfo{Id: uint32(number(1))}
			if len(word) == 2 {
				_, ret := d.CreateGpuInstance(&info)
				return "", ret
			}
			places, ret := d.GetGpuInstancePossiblePlacements(&info)
			if ret != nvml.SUCCESS {
				return "", ret
			}
			_, ret = d.CreateGpuInstanceWithPlacement(&info, &nvml.GpuInstancePlacement{Start: uint32(number(2)), Size: places[0].Size})
			return "", ret
		case "compute":
			gi, ret := d.GetGpuInstanceById(number(1))
			if ret != nvml.SUCCESS {
				return "", ret
			}
			info, _ := gi.GetInfo()
			constant := map[uint32]int{19: 0, 14: 1, 9: 2, 5: 3, 0: 4, 15: 0}[info.ProfileId]
			profile, ret := gi.GetComputeInstanceProfileInfo(constant, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
			if ret != nvml.SUCCESS {
				return "", ret
			}
			_, ret = gi.CreateComputeInstance(&profile)
			return "", ret
		case "destroy":
			gi, ret := d.GetGpuInstanceById(number(1))
			if ret != nvml.SUCCESS {
				return "", ret
			}
			if len(word) == 2 {
				return "", gi.Destroy()
			}
			ci, ret := gi.GetComputeInstanceById(number(2))
			if ret != nvml.SUCCESS {
				return "", ret
			}
			return "", ci.Destroy()
		case "capacity":
			n, ret := d.GetGpuInstanceRemainingCapacity(&nvml.GpuInstanceProfileInfo{Id: uint32(number(1))})
			return fmt.Sprint(n), ret
		case "remap":
			_, _, _, _, ret := d.GetRemappedRows()
			return "", ret
		case "list":
			return instances(d), nvml.SUCCESS
		case "devices":
			var names []string
			for i := range 7 {
				if m, ret := d.GetMigDeviceHandleByIndex(i); ret == nvml.SUCCESS {
					uuid, _ := m.GetUUID()
					names = append(names, uuid)
				}
			}
			return strings.Join(names, " "), nvml.SUCCESS
		}
		return "what?", nvml.ERROR_UNKNOWN
	})
	return strings.TrimSpace(fmt.Sprint(int(a.Code), " ", a.Value))
}

// instances lists profile@start of every GPU instance.
func instances(d nvml.Device) string {
	var out []string
	for constant := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		profile, ret := d.GetGpuInstanceProfileInfo(constant)
		if ret != nvml.SUCCESS {
			continue
		}
		list, ret := d.GetGpuInstances(&profile)
		if ret != nvml.SUCCESS {
			continue
		}
		for _, gi := range list {
			info, _ := gi.GetInfo()
			out = append(out, fmt.Sprintf("%d@%d", info.ProfileId, info.Placement.Start))
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func script(t *testing.T, lines ...string) []string {
	t.Helper()
	var out []string
	if err := child.Run(t.Context(), child.Spec{Name: "test.mig", Request: lines, Timeout: 20 * time.Second, Reply: &out}); err != nil {
		t.Fatal(err)
	}
	return out
}

func expect(t *testing.T, pairs ...string) {
	t.Helper()
	var lines []string
	for i := 0; i < len(pairs); i += 2 {
		lines = append(lines, pairs[i])
	}
	for i, got := range script(t, lines...) {
		if got != pairs[2*i+1] {
			t.Errorf("%s: %q, want %q", pairs[2*i], got, pairs[2*i+1])
		}
	}
}

func migHost(t *testing.T, pairs ...string) *fakes.Host {
	t.Helper()
	h := fakes.NewHost(t)
	set(t, h, append([]string{"gpus", "1", "gpu.0.mig.current", "1"}, pairs...)...)
	return h
}

// The driver takes the first free place: largest first ends in
// INSUFFICIENT_RESOURCES where an exact placement fits.
func TestPlacesAreAsScarceAsOnABoard(t *testing.T) {
	migHost(t)
	expect(t, "create 9", "0", "create 14", "0", "create 19", "0", "create 19", "23", "list", "0 14@4 19@6 9@0")
	migHost(t)
	expect(t, "create 9 4", "0", "create 14 0", "0", "create 19 2", "0", "create 19 3", "0", "list", "0 14@0 19@2 19@3 9@4",
		"create 19 4", "23", "create 14 1", "2", "create 777", "2", "capacity 19", "0 0")
}

func TestSevenSmallInstancesFillABoard(t *testing.T) {
	migHost(t)
	var pairs []string
	for range 7 {
		pairs = append(pairs, "create 19", "0")
	}
	expect(t, append(pairs, "create 19", "23", "capacity 14", "0 0")...)
}

func TestAnInstanceInUseIsKept(t *testing.T) {
	h := migHost(t)
	expect(t, "create 9", "0", "compute 1", "0", "destroy 1", "19", "devices", "0 "+h.MIGUUID(0, 1, 0), "remap", "3")
	set(t, h, "gpu.0.processes.compute", "99:10:1:0")
	expect(t, "destroy 1 0", "19")
	set(t, h, "gpu.0.processes.compute", "")
	expect(t, "destroy 1 0", "0", "destroy 1", "0", "destroy 1", "6", "remap", "0")
}

func TestTheModeFollowsTheRulesOfActivation(t *testing.T) {
	h := fakes.NewHost(t)
	set(t, h, "gpus", "1", "gpu.0.processes.compute", "99:10")
	expect(t, "create 19", "3", "mode 1", "0 19")
	set(t, h, "gpu.0.processes.compute", "", "gpu.0.mig.needs.reset", "1")
	expect(t, "mode 1", "0 16", "create 19", "3")
	if err := h.ResetGPU(0); err != nil {
		t.Fatal(err)
	}
	expect(t, "create 19", "0", "mode 0", "0 0", "list", "0")
	set(t, h, "not.root", "1")
	expect(t, "mode 1", "4 0")
	set(t, h, "not.root", "", "mig", "unsupported")
	expect(t, "mode 1", "3 0")
	set(t, h, "mig", "", "fail.mig.activation", "19x1")
	expect(t, "mode 1", "0 19", "mode 1", "0 0")
}

func TestARebootDropsInstancesAndOnHopperTheMode(t *testing.T) {
	for model, after := range map[string]string{"h100": "3", "a100": "0"} {
		h := migHost(t, "gpu.0.model", model, "gpu.0.mig.pending", "1")
		expect(t, "create 19", "0")
		if err := h.Reboot(); err != nil {
			t.Fatal(err)
		}
		expect(t, "list", "0", "create 19", after)
	}
}

func TestAPlannedFaultHitsTheKthCreation(t *testing.T) {
	migHost(t, "fail.nvmlDeviceCreateGpuInstance", "999@2")
	expect(t, "create 19", "0", "create 19", "999", "create 19", "0")
}
