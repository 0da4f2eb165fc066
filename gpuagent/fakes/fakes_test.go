package fakes_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/fakes"
)

// The functions below run in children, against the real binding.
func init() {
	child.Register("test.answers", answers)
	child.Register("test.mig", migScript)
	child.Register("test.unguarded", func(context.Context, json.RawMessage) (any, error) {
		return on(0, func(d nvml.Device) (string, nvml.Return) {
			_, _, _, _, ret := d.GetRemappedRows()
			return "", ret
		}), nil
	})
}

func TestMain(m *testing.M) {
	if child.Main() {
		return
	}
	os.Exit(m.Run())
}

// answer is what one call gave.
type answer struct {
	Code  nvml.Return
	Value string
}

func on(gpu int, call func(nvml.Device) (string, nvml.Return)) answer {
	if ret := nvml.Init(); ret != nvml.SUCCESS {
		return answer{Code: ret}
	}
	defer nvml.Shutdown()
	d, ret := nvml.DeviceGetHandleByIndex(gpu)
	if ret != nvml.SUCCESS {
		return answer{Code: ret, Value: "handle"}
	}
	value, ret := call(d)
	return answer{ret, value}
}

// getters is one call for each row of the validation table, by the name in the
// state file's faults.
var getters = map[string]func(nvml.Device) (string, nvml.Return){
	"nvmlDeviceGetName":                            text(nvml.Device.GetName),
	"nvmlDeviceGetUUID":                            text(nvml.Device.GetUUID),
	"nvmlDeviceGetSerial":                          text(nvml.Device.GetSerial),
	"nvmlDeviceGetVbiosVersion":                    text(nvml.Device.GetVbiosVersion),
	"nvmlDeviceGetInforomImageVersion":             text(nvml.Device.GetInforomImageVersion),
	"nvmlDeviceGetGspFirmwareVersion":              text(nvml.Device.GetGspFirmwareVersion),
	"nvmlDeviceGetMinorNumber":                     text(nvml.Device.GetMinorNumber),
	"nvmlDeviceGetPciInfo":                         text(nvml.Device.GetPciInfo),
	"nvmlDeviceGetArchitecture":                    text(nvml.Device.GetArchitecture),
	"nvmlDeviceGetMemoryInfo":                      text(nvml.Device.GetMemoryInfo),
	"nvmlDeviceGetCurrPcieLinkWidth":               text(nvml.Device.GetCurrPcieLinkWidth),
	"nvmlDeviceGetMaxPcieLinkWidth":                text(nvml.Device.GetMaxPcieLinkWidth),
	"nvmlDeviceGetCurrPcieLinkGeneration":          text(nvml.Device.GetCurrPcieLinkGeneration),
	"nvmlDeviceGetMaxPcieLinkGeneration":           text(nvml.Device.GetMaxPcieLinkGeneration),
	"nvmlDeviceGetGpuMaxPcieLinkGeneration":        text(nvml.Device.GetGpuMaxPcieLinkGeneration),
	"nvmlDeviceGetPcieReplayCounter":               text(nvml.Device.GetPcieReplayCounter),
	"nvmlDeviceGetSramEccErrorStatus":              text(nvml.Device.GetSramEccErrorStatus),
	"nvmlDeviceGetRemappedRows_v2":                 text(nvml.Device.GetRemappedRows_v2),
	"nvmlDeviceGetRowRemapperHistogram":            text(nvml.Device.GetRowRemapperHistogram),
	"nvmlDeviceGetUnrepairableMemoryFlag_v1":       text(nvml.Device.GetUnrepairableMemoryFlag_v1),
	"nvmlDeviceGetRepairStatus":                    text(nvml.Device.GetRepairStatus),
	"nvmlDeviceGetRetiredPagesPendingStatus":       text(nvml.Device.GetRetiredPagesPendingStatus),
	"nvmlDeviceGetCurrentClocksEventReasons":       text(nvml.Device.GetCurrentClocksEventReasons),
	"nvmlDeviceGetMarginTemperature":               text(nvml.Device.GetMarginTemperature),
	"nvmlDeviceGetPowerUsage":                      text(nvml.Device.GetPowerUsage),
	"nvmlDeviceGetPowerManagementLimit":            text(nvml.Device.GetPowerManagementLimit),
	"nvmlDeviceGetEnforcedPowerLimit":              text(nvml.Device.GetEnforcedPowerLimit),
	"nvmlDeviceGetPowerManagementDefaultLimit":     text(nvml.Device.GetPowerManagementDefaultLimit),
	"nvmlDeviceGetPersistenceMode":                 text(nvml.Device.GetPersistenceMode),
	"nvmlDeviceGetComputeMode":                     text(nvml.Device.GetComputeMode),
	"nvmlDeviceGetComputeRunningProcesses":         text(nvml.Device.GetComputeRunningProcesses),
	"nvmlDeviceGetGraphicsRunningProcesses":        text(nvml.Device.GetGraphicsRunningProcesses),
	"nvmlDeviceGetMPSComputeRunningProcesses":      text(nvml.Device.GetMPSComputeRunningProcesses),
	"nvmlDeviceGetGpuFabricInfo":                   text(nvml.Device.GetGpuFabricInfo),
	"nvmlDeviceGetSupportedEventTypes":             text(nvml.Device.GetSupportedEventTypes),
	"nvmlDeviceGetVirtualizationMode":              text(nvml.Device.GetVirtualizationMode),
	"nvmlDeviceGetMaxMigDeviceCount":               text(nvml.Device.GetMaxMigDeviceCount),
	"nvmlDeviceValidateInforom":                    func(d nvml.Device) (string, nvml.Return) { return "", d.ValidateInforom() },
	"nvmlDeviceGetEccMode":                         two(nvml.Device.GetEccMode),
	"nvmlDeviceGetMigMode":                         two(nvml.Device.GetMigMode),
	"nvmlDeviceGetGspFirmwareMode":                 two(nvml.Device.GetGspFirmwareMode),
	"nvmlDeviceGetPowerManagementLimitConstraints": two(nvml.Device.GetPowerManagementLimitConstraints),
	"nvmlDeviceGetMemoryInfo_v2":                   text(nvml.Device.GetMemoryInfo_v2),
	"nvmlDeviceGetTotalEccErrors": func(d nvml.Device) (string, nvml.Return) {
		v, ret := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
		return fmt.Sprint(v), ret
	},
	"nvmlDeviceGetTemperature": func(d nvml.Device) (string, nvml.Return) {
		v, ret := d.GetTemperature(nvml.TEMPERATURE_GPU)
		return fmt.Sprint(v), ret
	},
	"nvmlDeviceGetTemperatureThreshold": func(d nvml.Device) (string, nvml.Return) {
		v, ret := d.GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SLOWDOWN)
		return fmt.Sprint(v), ret
	},
	"nvmlDeviceGetGpuFabricInfoV": func(d nvml.Device) (string, nvml.Return) {
		v, ret := d.GetGpuFabricInfoV().V3()
		return fmt.Sprint(v.State, v.Status, v.HealthMask, v.HealthSummary), ret
	},
	"nvmlDeviceGetNvLinkState": func(d nvml.Device) (string, nvml.Return) {
		v, ret := d.GetNvLinkState(17)
		return fmt.Sprint(v), ret
	},
	"nvmlDeviceGetNvLinkRemoteDeviceType": func(d nvml.Device) (string, nvml.Return) {
		v, ret := d.GetNvLinkRemoteDeviceType(17)
		return fmt.Sprint(v), ret
	},
	"nvmlDeviceGetNvLinkErrorCounter": func(d nvml.Device) (string, nvml.Return) {
		v, ret := d.GetNvLinkErrorCounter(3, nvml.NVLINK_ERROR_DL_REPLAY)
		return fmt.Sprint(v), ret
	},
	"nvmlDeviceGetP2PStatus": func(d nvml.Device) (string, nvml.Return) {
		v, ret := d.GetP2PStatus(d, nvml.P2P_CAPS_INDEX_NVLINK)
		return fmt.Sprint(v), ret
	},
	"nvmlDeviceGetTopologyCommonAncestor": func(d nvml.Device) (string, nvml.Return) {
		v, ret := d.GetTopologyCommonAncestor(d)
		return fmt.Sprint(v), ret
	},
	"nvmlDeviceGetFieldValues": func(d nvml.Device) (string, nvml.Return) {
		v := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}, {FieldId: nvml.FI_DEV_NVLINK_GET_SPEED, ScopeId: 4}}
		ret := d.GetFieldValues(v)
		return fmt.Sprint(v[0].Value[0], v[0].NvmlReturn, int(v[1].Value[1])<<8|int(v[1].Value[0])), ret
	},
	"nvmlDeviceGetGpuInstanceProfileInfoV": func(d nvml.Device) (string, nvml.Return) {
		v, ret := d.GetGpuInstanceProfileInfoV(nvml.GPU_INSTANCE_PROFILE_3_SLICE).V3()
		return fmt.Sprint(v.Id, v.SliceCount, v.InstanceCount), ret
	},
}

func text[T any](call func(nvml.Device) (T, nvml.Return)) func(nvml.Device) (string, nvml.Return) {
	return func(d nvml.Device) (string, nvml.Return) {
		v, ret := call(d)
		return fmt.Sprint(v), ret
	}
}

func two[A, B any](call func(nvml.Device) (A, B, nvml.Return)) func(nvml.Device) (string, nvml.Return) {
	return func(d nvml.Device) (string, nvml.Return) {
		a, b, ret := call(d)
		return fmt.Sprint(a, b), ret
	}
}

// answers makes the calls named, or all of them, on GPU 0.
func answers(_ context.Context, raw json.RawMessage) (any, error) {
	var names []string
	if err := json.Unmarshal(raw, &names); err != nil {
		return nil, err
	}
	out := map[string]answer{}
	for name, call := range getters {
		if len(names) == 0 || slices.Contains(names, name) {
			out[name] = on(0, call)
		}
	}
	return out, nil
}

func ask(t *testing.T, names ...string) map[string]answer {
	t.Helper()
	out := map[string]answer{}
	if err := child.Run(t.Context(), child.Spec{Name: "test.answers", Request: names, Timeout: 20 * time.Second, Reply: &out}); err != nil {
		t.Fatal(err)
	}
	return out
}

func set(t *testing.T, h *fakes.Host, pairs ...string) {
	t.Helper()
	if err := h.Set(pairs...); err != nil {
		t.Fatal(err)
	}
}

func TestAHealthyBoardAnswersEveryRowOfTheTable(t *testing.T) {
	fakes.NewHost(t)
	for name, a := range ask(t) {
		if a.Code != nvml.SUCCESS {
			t.Errorf("%s: code %d (a struct version of the binding that the fake does not know is 25)", name, a.Code)
		}
	}
}

// Each value sits at the end of its struct or arrives through a conversion: a
// layout that differs from the published one would show.
func TestValuesArriveWhereTheBindingLooksForThem(t *testing.T) {
	h := fakes.NewHost(t)
	set(t, h, "recovery", "4", "nvlink.4.speed", "20000", "sram.threshold", "1", "remap.failed", "7", "remap.banks.none", "5", "repair.tpc", "1",
		"fabric.summary", "2", "fabric.mask", "0x2aa", "gpu.0.temperature", "95", "temperature", "50", "temperature.margin", "-3",
		"ecc.pending", "0", "ecc.volatile.uncorrected", "12", "nvlink.17.up", "0", "nvlink.17.remote", "1", "nvlink.3.replay", "9",
		"processes.compute", "4711:512:2:1,4712:4", "unrepairable", "1", "memory.used.mib", "100", "p2p.0.2", "4")
	got := ask(t)
	for name, want := range map[string]string{
		"nvmlDeviceGetFieldValues":               "4 0 20000",
		"nvmlDeviceGetRowRemapperHistogram":      "{2555 0 0 0 5}",
		"nvmlDeviceGetRemappedRows_v2":           "{0 0 0 0 0 7}",
		"nvmlDeviceGetGpuFabricInfoV":            "3 0 682 2",
		"nvmlDeviceGetTemperature":               "95",
		"nvmlDeviceGetEccMode":                   "1 0",
		"nvmlDeviceGetTotalEccErrors":            "12",
		"nvmlDeviceGetNvLinkState":               "0",
		"nvmlDeviceGetNvLinkRemoteDeviceType":    "1",
		"nvmlDeviceGetNvLinkErrorCounter":        "9",
		"nvmlDeviceGetUnrepairableMemoryFlag_v1": "{1}",
		"nvmlDeviceGetP2PStatus":                 "4",
		"nvmlDeviceGetComputeRunningProcesses":   "[{4711 536870912 2 1} {4712 4194304 4294967295 4294967295}]",
		"nvmlDeviceGetGpuInstanceProfileInfoV":   "9 3 2",
	} {
		if got[name].Value != want {
			t.Errorf("%s: %q, want %q", name, got[name].Value, want)
		}
	}
}

func TestInitSaysWhatIsWrongWithTheDriver(t *testing.T) {
	for _, c := range []struct {
		name  string
		state []string
		want  nvml.Return
	}{
		{"module not loaded", []string{"module.driver", "none"}, nvml.ERROR_DRIVER_NOT_LOADED},
		{"module of another version", []string{"module.driver", "570.1"}, nvml.ERROR_LIB_RM_VERSION_MISMATCH},
		{"planned", []string{"fail.nvmlInit", "999"}, nvml.ERROR_UNKNOWN},
	} {
		h := fakes.NewHost(t)
		set(t, h, c.state...)
		if got := ask(t, "nvmlDeviceGetName")["nvmlDeviceGetName"]; got.Code != c.want {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
	h := fakes.NewHost(t)
	if err := h.RemoveLibraries(); err != nil {
		t.Fatal(err)
	}
	if got := ask(t, "nvmlDeviceGetName")["nvmlDeviceGetName"]; got.Code != nvml.ERROR_LIBRARY_NOT_FOUND {
		t.Errorf("no library: %+v", got)
	}
}

func TestFaultsOfOneFunctionAreCounted(t *testing.T) {
	h := fakes.NewHost(t)
	const f = "nvmlDeviceGetTemperature"
	codes := func(plan string) []nvml.Return {
		set(t, h, "gpu.0.fail."+f, plan)
		var out []nvml.Return
		for range 4 {
			out = append(out, ask(t, f)[f].Code)
		}
		return out
	}
	for plan, want := range map[string][]nvml.Return{
		"999": {999, 999, 999, 999}, "19x2": {19, 19, 0, 0}, "23@3": {0, 0, 23, 0}, "": {0, 0, 0, 0},
	} {
		if got := codes(plan); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", plan, got, want)
		}
	}
	set(t, h, "gpu.0.fail."+f, "", "lost", "getter")
	if got := ask(t, f)[f]; got.Code != nvml.ERROR_GPU_IS_LOST || got.Value == "handle" {
		t.Errorf("lost in a getter: %+v", got)
	}
	set(t, h, "lost", "handle")
	if got := ask(t, f)[f]; got.Code != nvml.ERROR_GPU_IS_LOST || got.Value != "handle" {
		t.Errorf("lost at the handle: %+v", got)
	}
	set(t, h, "lost", "", "temperature", "unsupported")
	if got := ask(t, f)[f]; got.Code != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("unsupported: %+v", got)
	}
}

func TestHangsAndCrashesHappenInTheChild(t *testing.T) {
	h := fakes.NewHost(t)
	set(t, h, "hang.nvmlDeviceGetName", "1")
	run := func(timeout time.Duration) error {
		return child.Run(t.Context(), child.Spec{Name: "test.answers", Request: []string{"nvmlDeviceGetName"}, Timeout: timeout})
	}
	var timeout child.Timeout
	if err := run(300 * time.Millisecond); !errors.As(err, &timeout) {
		t.Errorf("hang: %v", err)
	}
	set(t, h, "hang.nvmlDeviceGetName", "", "crash.nvmlDeviceGetName", "1")
	var crash child.Crash
	if err := run(20 * time.Second); !errors.As(err, &crash) {
		t.Errorf("crash: %v", err)
	}
}

func TestAMissingSymbolEndsAnUnguardedProcess(t *testing.T) {
	fakes.NewHost(t, fakes.Without("nvmlDeviceGetRemappedRows"))
	var exit child.Exit
	err := child.Run(t.Context(), child.Spec{Name: "test.unguarded", Timeout: 20 * time.Second})
	if !errors.As(err, &exit) || exit.Code != child.MissingSymbol {
		t.Fatalf("%v", err)
	}
}

func TestAProcessStartedAfterAnUpgradeSeesTheNewLibrary(t *testing.T) {
	h := fakes.NewHost(t)
	if err := h.Swap(fakes.Driver("590.44.01")); err != nil {
		t.Fatal(err)
	}
	if got := ask(t, "nvmlDeviceGetGspFirmwareVersion")["nvmlDeviceGetGspFirmwareVersion"]; got.Value != "590.44.01" {
		t.Fatalf("%+v", got)
	}
}

func TestAFunctionThatDoesNotExistCannotBeLeftOut(t *testing.T) {
	fakes.NewHost(t)
	if err := fakes.Build(t.TempDir(), fakes.Without("nvmlDeviceGetWeather")); err == nil {
		t.Fatal("built")
	}
}
