package check

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// divide puts every GPU of a host in MIG mode with these instances, with a
// MIG device and a proof for each compute instance.
func divide(in *Input, instances ...nvml.Instance) {
	in.Proofs = nil
	for i := range in.NVML.Devices {
		d := &in.NVML.Devices[i]
		enable(d)
		d.Remap, d.RemapNone = code[nvml.Remap](nvml.NotSupported), code[uint64](nvml.NotSupported)
		d.Instances = is(append(nvml.Instances(nil), instances...))
		var devices []nvml.MIGDevice
		for _, one := range instances {
			for range one.Compute {
				uuid := fmt.Sprintf("MIG-%d-%d", i, len(devices))
				devices = append(devices, nvml.MIGDevice{UUID: uuid})
				in.Proofs = append(in.Proofs, Proof{GPU: d.UUID.Value, Result: proof(uuid).Result})
			}
		}
		d.MIGDevices = is(devices)
	}
}

func whole(profile string, start int) nvml.Instance {
	return nvml.Instance{Profile: profile, Start: start, Compute: []string{profile}}
}

// mixed is a host whose GPUs are divided as declared.
func mixed() *Input {
	in := healthy()
	in.Expect.MIG = &gpu.ExpectMIG{Enabled: true, Devices: map[string]int{"3g.40gb": 1, "1g.10gb": 2}}
	divide(in, whole("1g.10gb", 2), whole("1g.10gb", 3), whole("3g.40gb", 4))
	return in
}

func TestWithMIGInstancesTheRemapRowsAreSkippedAndEachMIGDeviceIsProven(t *testing.T) {
	in := mixed()
	checks := Evaluate(*in)
	require.Empty(t, failed(checks))
	require.Equal(t, pass, gpu.VerdictOf(checks, 0))
	require.Contains(t, skips(checks), "row remap: not supported: MIG instances exist")

	in.Expect.MIG.Devices = map[string]int{"3g.40gb": 1, "1g.10gb": 1}
	require.Equal(t, []string{"MIG layout", "MIG layout"}, names(failed(Evaluate(*in))), "one instance more than declared")
	in.Expect.MIG.ModeOnly = true
	require.Empty(t, failed(Evaluate(*in)), "the instances of a partitioned pool are not ours")
}

func TestAHalfMadeInstanceIsNotTheLayout(t *testing.T) {
	in := mixed()
	in.NVML.Devices[0].Instances.Value[0].Compute = nil
	in.NVML.Devices[0].MIGDevices.Value = in.NVML.Devices[0].MIGDevices.Value[1:]
	require.Equal(t, []string{"MIG layout"}, names(failed(Evaluate(*in))))
}

// A declaration names parts of an instance as the set-up does.
func TestADividedInstanceIsTheLayoutThatDeclaresItsParts(t *testing.T) {
	in := healthy()
	parts := nvml.Instance{Profile: "3g.40gb", Start: 4, Compute: []string{"2c.3g.40gb", "1c.3g.40gb"}}
	divide(in, whole("3g.40gb", 0), parts)
	in.Expect.MIG = &gpu.ExpectMIG{Enabled: true, Devices: map[string]int{"3g.40gb": 1, "1c.3g.40gb": 1, "2c.3g.40gb": 1}}
	require.Empty(t, failed(Evaluate(*in)))
	in.Expect.MIG.Devices = map[string]int{"3g.40gb": 2}
	require.Equal(t, []string{"MIG layout", "MIG layout"}, names(failed(Evaluate(*in))), "not two whole ones")

	in.Expect.MIG = nil
	in.Baseline.Devices[0].Readings, in.Baseline.Devices[1].Readings = Readings(&in.NVML.Devices[0]), Readings(&in.NVML.Devices[1])
	require.Empty(t, failed(Evaluate(*in)))
	in.NVML.Devices[0].Instances.Value[1].Compute = []string{"1c.3g.40gb", "1c.3g.40gb"}
	require.Equal(t, []string{"MIG layout"}, names(failed(Evaluate(*in))), "a baseline knows the parts too")
}

func TestEveryMIGDeviceNeedsItsOwnProof(t *testing.T) {
	in := mixed()
	in.Proofs = in.Proofs[1:]
	checks := Evaluate(*in)
	require.Empty(t, failed(checks))
	require.Equal(t, unproven, gpu.VerdictOf(checks, 0))
	var open []string
	for _, c := range checks {
		if c.Skipped != "" && c.Severity == gpu.Fatal {
			open = append(open, c.Name+" of "+c.Device)
		}
	}
	require.Equal(t, []string{"CUDA call of MIG-0-0", "vGPU limit of MIG-0-0"}, open)
}

func TestMIGDevicesThatAreNotToldAreNotProven(t *testing.T) {
	for _, c := range []struct {
		what    string
		make    func(d *nvml.Device)
		found   string
		verdict gpu.Verdict
	}{
		{"fewer than there are compute instances", func(d *nvml.Device) { d.MIGDevices.Value = d.MIGDevices.Value[1:] }, "3 compute instances and gives 2", unproven},
		{"none at all", func(d *nvml.Device) { d.MIGDevices.Value = nil }, "3 compute instances and gives 0", unproven},
		{"list not supported", func(d *nvml.Device) { d.MIGDevices = code[[]nvml.MIGDevice](nvml.NotSupported) }, "MIG is on", unproven},
		{"list refused", func(d *nvml.Device) { d.MIGDevices = code[[]nvml.MIGDevice](nvml.NoPermission) }, "no permission", unproven},
		{"list fails", func(d *nvml.Device) { d.MIGDevices = code[[]nvml.MIGDevice](nvml.Unknown) }, "UNKNOWN", unfit},
		{"instances missing in the library", func(d *nvml.Device) { d.Instances = nvml.Reading[nvml.Instances]{Missing: "nvmlDeviceGetGpuInstances"} }, "nvmlDeviceGetGpuInstances", unproven},
	} {
		t.Run(c.what, func(t *testing.T) {
			in := mixed()
			c.make(&in.NVML.Devices[0])
			checks := Evaluate(*in)
			require.Equal(t, c.verdict, gpu.VerdictOf(checks, 0), "%+v", failed(checks))
			var said string
			for _, k := range checks {
				if k.Name == rowCUDA && !k.OK && k.Severity == gpu.Fatal {
					said += k.Found + k.Skipped
				}
			}
			require.Contains(t, said, c.found)
		})
	}
}

func TestADeclaredMIGThatTheDriverDoesNotTellIsOpen(t *testing.T) {
	for _, r := range []nvml.Reading[nvml.Pair]{{Missing: "nvmlDeviceGetMigMode"}, {Code: nvml.FunctionNotFound}} {
		in := healthy()
		in.Expect.MIG = &gpu.ExpectMIG{Enabled: true, ModeOnly: true}
		in.Baseline = nil
		for i := range in.NVML.Devices {
			in.NVML.Devices[i].MIGMode = r
		}
		checks := Evaluate(*in)
		require.Empty(t, failed(checks))
		require.Equal(t, unproven, gpu.VerdictOf(checks, 0))
		in.Expect.MIG = &gpu.ExpectMIG{}
		require.Equal(t, pass, gpu.VerdictOf(Evaluate(*in), 0), "a driver that does not know MIG is not in that mode")
	}
}

func TestMIGWithoutInstancesIsNoFailureOfTheProbe(t *testing.T) {
	in := healthy()
	in.Expect.MIG, in.Proofs = &gpu.ExpectMIG{Enabled: true}, nil
	enable(&in.NVML.Devices[0])
	enable(&in.NVML.Devices[1])
	checks := Evaluate(*in)
	require.Empty(t, failed(checks))
	require.Equal(t, pass, gpu.VerdictOf(checks, 0))
}

// The NVLinks of an A100 on a baseboard are off while it is in MIG mode.
func TestLinksThatMIGModeSwitchesOffAreNoFault(t *testing.T) {
	in := healthy()
	d := &in.NVML.Devices[0]
	unplug(d)
	d.MIGMode = is(nvml.Pair{Current: 1, Other: 1})
	up := func() string {
		for _, c := range Evaluate(*in) {
			if c.Name == "NVLink up" && c.Device == d.UUID.Value {
				return string(c.Severity) + c.Skipped
			}
		}
		return "no row"
	}
	require.Contains(t, up(), string(gpu.Fatal), "some were up in this mode before")
	without := in.Baseline.WithoutMIG()
	in.Baseline = &without
	require.Contains(t, up(), "in MIG mode no link is on")
	in.Baseline = nil
	require.Contains(t, up(), "in MIG mode no link is on", "declared or not")
}

func TestADeclaredInstanceMayBeWrittenWithItsComputePart(t *testing.T) {
	require.Equal(t, counts(map[string]int{"3g.40gb": 2, "1c.3g.40gb": 1}), counts(map[string]int{"3c.3g.40gb": 1, "MIG 3g.40gb": 1, "1c.3g.40gb": 1}))
	require.Equal(t, "1x 7g.80gb", counts(map[string]int{"7c.7g.80gb": 1}))
}
