package vgpu

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/setup"
)

func TestAFileOfVGPUDeviceManagerIsRead(t *testing.T) {
	entries, err := Parse([]byte(`
version: v1
vgpu-configs:
  default:
    - devices: [0]
      vgpu-devices: {"A100-40C": 1}
    - device-filter: "0x20B510DE"
      devices: all
      vgpu-devices: {"A100-1-5CME": 3, "RTX6000-Ada-1-5C": 0}
`), "")
	require.NoError(t, err)
	require.Len(t, entries, 2)
	require.True(t, entries[1].Takes(3, 0x20B510DE))
	require.False(t, entries[1].Takes(3, 0x233010DE))
	require.Equal(t, "A100-40C", bare("NVIDIA A100-40C"))
	require.Equal(t, "A100-40C", bare("GRID A100-40C"))
}

func TestABadFileIsRefusedWithWhatIsWrong(t *testing.T) {
	layout := func(entry string) string { return "version: v1\nvgpu-configs:\n  a:\n    - " + entry + "\n" }
	for name, c := range map[string]struct{ text, says string }{
		"unknown key":          {layout("{devices: all, vgpu-devices: {}, scheduler: x}"), "scheduler"},
		"a file for MIG":       {"version: v1\nmig-configs: {}\n", "mig-configs"},
		"another version":      {"version: v3\nvgpu-configs: {a: [{devices: all, vgpu-devices: {}}]}\n", `"v3"`},
		"no layout":            {"version: v1\n", "at least one layout"},
		"no devices":           {layout("{vgpu-devices: {}}"), "devices is missing"},
		"no types":             {layout("{devices: all}"), "vgpu-devices is missing"},
		"not a type":           {layout("{devices: all, vgpu-devices: {40C: 1}}"), `"40C"`},
		"a type of no series":  {layout("{devices: all, vgpu-devices: {A100-40X: 1}}"), "no vGPU type"},
		"a negative count":     {layout("{devices: all, vgpu-devices: {A100-40C: -1}}"), "-1 of A100-40C"},
		"both kinds of type":   {layout("{devices: all, vgpu-devices: {A100-40C: 1, A100-1-5C: 1}}"), "mixes"},
		"an empty label":       {"version: v1\nvgpu-configs: {\"\": [{devices: all, vgpu-devices: {}}]}\n", "label"},
		"not a filter":         {layout("{devices: all, device-filter: 7, vgpu-devices: {}}"), "device-filter"},
		"a layout of no entry": {"version: v1\nvgpu-configs: {a: []}\n", "at least one entry"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(c.text), "")
			require.ErrorIs(t, err, setup.ErrBadLayout)
			require.ErrorContains(t, err, c.says)
		})
	}
}
