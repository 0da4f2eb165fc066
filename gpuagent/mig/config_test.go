package mig

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/setup"
)

const twoLayouts = `
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  mixed:
    - devices: [0, 1]
      device-filter: ["0x233010DE", "0x233110DE"]
      mig-enabled: true
      mig-devices:
        1g.10gb: 2
        1c.3g.40gb: 3
    - devices: [2]
      device-filter: "0x233010DE"
      mig-enabled: true
      mig-devices: {1g.10gb+me: 1}
`

func TestAFileOfMigPartedIsRead(t *testing.T) {
	entries, err := Parse([]byte(twoLayouts), "mixed")
	require.NoError(t, err)
	require.Len(t, entries, 2)
	require.Equal(t, map[string]int{"1g.10gb": 2, "1c.3g.40gb": 3}, entries[0].MIGDevices)
	require.True(t, entries[0].Takes(1, 0x233110DE))
	require.False(t, entries[0].Takes(1, 0x20B010DE), "another model is filtered out")
	require.False(t, entries[0].Takes(2, 0x233010DE))

	entries, err = Parse([]byte(twoLayouts), "all-disabled")
	require.NoError(t, err)
	require.True(t, entries[0].Takes(7, 0))
	require.False(t, *entries[0].Enabled)
}

func TestABadFileIsRefusedWithWhatIsWrong(t *testing.T) {
	layout := func(entry string) string { return "version: v1\nmig-configs:\n  a:\n    - " + entry + "\n" }
	for name, c := range map[string]struct{ text, says string }{
		"not YAML":                   {"\t{", "mig-parted's format"},
		"empty":                      {"", "expected"},
		"unknown key at the top":     {"version: v1\nmig-config: {}\n", "mig-config"},
		"unknown key in an entry":    {layout("{devices: all, mig-enabled: true, mig-devices: {}, mig-device: {}}"), "mig-device"},
		"a key twice":                {layout("{devices: all, mig-enabled: true, mig-enabled: true, mig-devices: {}}"), "mig-enabled"},
		"another version":            {"version: v2\nmig-configs: {a: [{devices: all, mig-enabled: false}]}\n", `"v2"`},
		"no version":                 {"mig-configs: {a: [{devices: all, mig-enabled: false}]}\n", "version"},
		"no layout":                  {"version: v1\n", "at least one layout"},
		"an empty label":             {"version: v1\nmig-configs: {\"\": [{devices: all, mig-enabled: false}]}\n", "label"},
		"a layout without entries":   {"version: v1\nmig-configs: {a: []}\n", "at least one entry"},
		"no devices":                 {layout("{mig-enabled: false}"), "devices is missing"},
		"a word for devices":         {layout("{devices: some, mig-enabled: false}"), `"some"`},
		"a negative index":           {layout("{devices: [-1], mig-enabled: false}"), "-1"},
		"an index twice":             {layout("{devices: [1, 1], mig-enabled: false}"), "1 twice"},
		"no mig-enabled":             {layout("{devices: all}"), "mig-enabled is missing"},
		"enabled without devices":    {layout("{devices: all, mig-enabled: true}"), "mig-devices is missing"},
		"disabled with devices":      {layout("{devices: all, mig-enabled: false, mig-devices: {1g.10gb: 1}}"), "mig-enabled is false"},
		"no profile":                 {layout("{devices: all, mig-enabled: true, mig-devices: {big: 1}}"), `"big"`},
		"a negative count":           {layout("{devices: all, mig-enabled: true, mig-devices: {1g.10gb: -1}}"), "-1 of 1g.10gb"},
		"a filter that is no PCI id": {layout("{devices: all, device-filter: H100, mig-enabled: false}"), `"H100"`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(c.text), "")
			require.ErrorIs(t, err, setup.ErrBadLayout)
			require.ErrorContains(t, err, c.says)
			require.Equal(t, setup.Stop, setup.ClassOf(err))
		})
	}
}

func TestALabelIsAskedForWhereTheFileHoldsSeveral(t *testing.T) {
	_, err := Parse([]byte(twoLayouts), "")
	require.ErrorContains(t, err, "all-disabled, mixed")
	_, err = Parse([]byte(twoLayouts), "other")
	require.ErrorContains(t, err, `"other"`)
	_, err = Parse([]byte("version: v1\nmig-configs: {one: [{devices: all, mig-enabled: false}]}\n"), "")
	require.NoError(t, err)
}
