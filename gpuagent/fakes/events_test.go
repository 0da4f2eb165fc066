package fakes_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/fakes"
)

func init() {
	child.Register("test.event", func(context.Context, json.RawMessage) (any, error) {
		return on(0, func(d nvml.Device) (string, nvml.Return) {
			events, ret := nvml.EventSetCreate()
			if ret != nvml.SUCCESS {
				return "create", ret
			}
			defer events.Free()
			if ret := d.RegisterEvents(nvml.EventTypeXidCriticalError, events); ret != nvml.SUCCESS {
				return "register", ret
			}
			e, ret := events.Wait(20)
			return fmt.Sprint(e.EventType, e.EventData), ret
		}), nil
	})
	child.Register("test.vgpu", func(context.Context, json.RawMessage) (any, error) {
		return on(0, func(d nvml.Device) (string, nvml.Return) {
			types, ret := d.GetSupportedVgpus()
			if ret != nvml.SUCCESS {
				return "supported", ret
			}
			name, ret := types[0].GetName()
			if ret != nvml.SUCCESS {
				return "name", ret
			}
			size, ret := types[0].GetFramebufferSize()
			if ret != nvml.SUCCESS {
				return "size", ret
			}
			mode, ret := d.GetVgpuHeterogeneousMode()
			if ret != nvml.SUCCESS {
				return "heterogeneous", ret
			}
			mode.Mode = 1
			ret = d.SetVgpuHeterogeneousMode(mode)
			return fmt.Sprint(len(types), " ", name, " ", size>>20), ret
		}), nil
	})
}

func single(t *testing.T, name string) answer {
	t.Helper()
	var a answer
	if err := child.Run(t.Context(), child.Spec{Name: name, Timeout: 20 * time.Second, Reply: &a}); err != nil {
		t.Fatal(err)
	}
	return a
}

func TestAnEventIsDeliveredOnce(t *testing.T) {
	h := fakes.NewHost(t)
	set(t, h, "gpu.0.event", "8:79")
	if a := single(t, "test.event"); a.Code != nvml.SUCCESS || a.Value != "8 79" {
		t.Errorf("first: %+v", a)
	}
	if a := single(t, "test.event"); a.Code != nvml.ERROR_TIMEOUT {
		t.Errorf("second: %+v", a)
	}
	set(t, h, "events", "unsupported")
	if a := single(t, "test.event"); a.Code != nvml.ERROR_NOT_SUPPORTED || a.Value != "register" {
		t.Errorf("unsupported: %+v", a)
	}
}

func TestVGPUAnswersOnAHostDriverOnlyAndRefusesWhileInUse(t *testing.T) {
	h := fakes.NewHost(t)
	if a := single(t, "test.vgpu"); a.Code != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("bare driver: %+v", a)
	}
	set(t, h, "vgpu.virtualization", "3")
	if a := single(t, "test.vgpu"); a.Code != nvml.SUCCESS || a.Value != "4 NVIDIA H100-10C 10240" {
		t.Errorf("host driver: %+v", a)
	}
	set(t, h, "vgpu.active", "1")
	if a := single(t, "test.vgpu"); a.Code != nvml.ERROR_IN_USE {
		t.Errorf("in use: %+v", a)
	}
}
