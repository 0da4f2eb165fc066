package check

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/cuda"
	"github.com/refit-run/refit/gpuagent/nvml"
)

var gpuFaults = []fault{
	{"GPU lost at the handle", func(_ *Input, d *nvml.Device) { d.Handle = nvml.GPUIsLost }, rowIdentity, gpu.Fatal, "GPU_IS_LOST", unfit},
	{"GPU needs a reset at the handle", func(_ *Input, d *nvml.Device) { d.Handle = nvml.ResetRequired }, rowIdentity, gpu.Reset, "RESET_REQUIRED", reset},
	{"VBIOS changed", func(_ *Input, d *nvml.Device) { d.VBIOS = is("97.0") }, "VBIOS", gpu.Warn, "97.0", degraded},
	{"card exchanged", func(_ *Input, d *nvml.Device) { d.Serial = is("1") }, "serial", gpu.Warn, "1", degraded},
	{"recovery 1", recovery(1), "recovery action", gpu.Reset, "GPU_RESET", reset},
	{"recovery 2", recovery(2), "recovery action", gpu.Fatal, "NODE_REBOOT", unfit},
	{"recovery 3", recovery(3), "recovery action", gpu.Warn, "DRAIN_P2P", degraded},
	{"recovery 4", recovery(4), "recovery action", gpu.Reset, "DRAIN_AND_RESET", reset},
	{"recovery 5", recovery(5), "recovery action", gpu.Fatal, "IMEX", unfit},
	{"recovery 6", recovery(6), "recovery action", gpu.Fatal, "BUS_RESET", unfit},
	{"recovery 7", recovery(7), "recovery action", gpu.Fatal, "SYSTEM_REBOOT", unfit},
	{"recovery 99", recovery(99), "recovery action", gpu.Fatal, "unknown", unfit},
	{"recovery on an older driver", func(in *Input, d *nvml.Device) { in.Baseline, d.Recovery = nil, code[uint64](nvml.NotSupported) }, "recovery action", "", "older driver", pass},
	{"PCIe lanes lost", func(_ *Input, d *nvml.Device) { d.PCIeWidth = is(nvml.Pair{Current: 8, Other: 16}) }, "PCIe width", gpu.Fatal, "x8", unfit},
	{"PCIe lanes other than before", func(_ *Input, d *nvml.Device) { d.PCIeWidth = is(nvml.Pair{Current: 8, Other: 8}) }, "PCIe width", gpu.Fatal, "x8", unfit},
	{"PCIe slow under load", func(in *Input, _ *nvml.Device) { in.Watch.Devices[0].PCIeGen = is(nvml.Pair{Current: 3, Other: 5}) }, "PCIe generation", gpu.Warn, "3", degraded},
	{"PCIe not observed under load", func(in *Input, _ *nvml.Device) { in.Watch = nil }, "PCIe generation", "", "not observed", pass},
	{"PCIe replays", func(_ *Input, d *nvml.Device) { d.PCIeReplay = is(uint64(4)) }, "PCIe errors", gpu.Warn, "1 new", degraded},
	{"PCIe replays during the probe", func(in *Input, _ *nvml.Device) { in.Baseline = nil; in.Watch.Devices[0].Replays = is(uint64(2)) }, "PCIe errors", gpu.Warn, "2 new", degraded},
	{"other PCIe errors", func(_ *Input, d *nvml.Device) { d.PCIeErrors = is(uint64(7)) }, "PCIe errors", gpu.Warn, "7 new", degraded},
	{"fatal PCIe error", func(_ *Input, d *nvml.Device) { d.PCIeFatal = is(uint64(1)) }, "PCIe errors", gpu.Fatal, "1", unfit},
	{"fatal PCIe errors not counted", func(_ *Input, d *nvml.Device) { d.PCIeFatal = code[uint64](nvml.NotSupported) }, "PCIe errors", gpu.Warn, "fatal errors: not supported", degraded},
	{"other PCIe errors no longer counted", func(_ *Input, d *nvml.Device) { d.PCIeErrors = code[uint64](nvml.NotSupported) }, "PCIe errors", gpu.Warn, "other errors", degraded},
	{"other PCIe errors counted by the new driver only", func(in *Input, d *nvml.Device) {
		d.PCIeErrors, in.Watch.Devices[0].PCIeErrors = is(uint64(700)), code[uint64](nvml.NotSupported)
		in.Baseline.Devices[0].Readings["PCIe errors"] = "3/-"
	}, "PCIe errors", "", "other errors during the probe", pass},
	{"other PCIe errors during the probe", func(in *Input, _ *nvml.Device) {
		in.Baseline, in.Watch.Devices[0].PCIeErrors = nil, is(uint64(4))
	}, "PCIe errors", gpu.Warn, "4 new", degraded},
	{"other PCIe errors where replays are not counted", func(in *Input, d *nvml.Device) {
		d.PCIeReplay, d.PCIeErrors = code[uint64](nvml.NotSupported), is(uint64(9))
		in.Baseline.Devices[0].Readings = Readings(d)
		d.PCIeErrors = is(uint64(12))
	}, "PCIe errors", "", "replays: not supported", degraded},
	{"PCIe errors with nothing to compare", func(in *Input, _ *nvml.Device) { in.Baseline, in.Watch = nil, nil }, "PCIe errors", "", "neither a baseline", pass},
	{"replays not read during the probe", func(in *Input, _ *nvml.Device) {
		in.Baseline, in.Watch.Devices[0].Replays = nil, code[uint64](nvml.NotSupported)
	}, "PCIe errors", "", "not supported", pass},
	{"ECC change pending", func(_ *Input, d *nvml.Device) { d.ECCMode = is(nvml.Pair{Current: 1}) }, "ECC mode", gpu.Reset, "off after a reset", reset},
	{"ECC switched off", func(_ *Input, d *nvml.Device) { d.ECCMode = is(nvml.Pair{}) }, "ECC mode", gpu.Reset, "off", reset},
	{"ECC error", func(_ *Input, d *nvml.Device) { d.ECCVolatile = is(uint64(1)) }, "ECC volatile", gpu.Fatal, "1", unfit},
	{"SRAM threshold", func(_ *Input, d *nvml.Device) { d.SRAMOver = is(true) }, "SRAM errors", gpu.Fatal, "exceeded", unfit},
	{"SRAM status only for root", func(_ *Input, d *nvml.Device) { d.SRAMOver = code[bool](nvml.NoPermission) }, "SRAM errors", gpu.Fatal, "no permission", unproven},
	{"SRAM status by another version of the call", func(in *Input, d *nvml.Device) { in.Baseline, d.SRAMOver = nil, code[bool](nvml.ArgumentVersion) }, "SRAM errors", "", "another version", pass},
	{"ECC errors over the life", func(_ *Input, d *nvml.Device) { d.ECCAggregate = is(uint64(3)) }, "ECC aggregate", gpu.Warn, "3", degraded},
	{"remap failed", remap(nvml.Remap{Failure: true}), "row remap", gpu.Fatal, "could not", unfit},
	{"remap pending", remap(nvml.Remap{Pending: true}), "row remap", gpu.Reset, "waits", reset},
	{"too many remaps", remap(nvml.Remap{Uncorrectable: 513}), "row remap", gpu.Fatal, "513", unfit},
	{"banks without spare rows", func(_ *Input, d *nvml.Device) { d.RemapNone = is(uint64(1)) }, "row remap reserve", gpu.Warn, "1 banks", degraded},
	{"unrepairable memory", func(_ *Input, d *nvml.Device) { d.Unrepairable = is(true) }, "unrepairable memory", gpu.Fatal, "unrepairable", unfit},
	{"repair pending", func(_ *Input, d *nvml.Device) { d.RepairWaits = is(true) }, "memory repair", gpu.Fatal, "pending", unfit},
	{"page retirement pending", func(_ *Input, d *nvml.Device) { d.Retired, d.RetiredWaits = is(nvml.Retired{}), is(true) }, "retired pages", gpu.Warn, "waits", degraded},
	{"pending retirement not answered", func(_ *Input, d *nvml.Device) { d.Retired = is(nvml.Retired{}) }, "retired pages", "", "pending retirement: not supported", pass},
	{"too many retired pages", func(_ *Input, d *nvml.Device) { d.Retired, d.RetiredWaits = is(nvml.Retired{SingleBit: 63}), is(false) }, "retired pages", gpu.Warn, "63", degraded},
	{"too many for double-bit errors", func(_ *Input, d *nvml.Device) { d.Retired, d.RetiredWaits = is(nvml.Retired{DoubleBit: 16}), is(false) }, "retired pages", gpu.Warn, "16", degraded},
	{"InfoROM that cannot be validated, now as before", func(in *Input, d *nvml.Device) {
		d.InfoROMValid = code[bool](nvml.NotSupported)
		in.Baseline.Devices[0].Readings = Readings(d)
	}, "InfoROM", "", "none is fitted", pass},
	{"InfoROM's image no longer told", func(_ *Input, d *nvml.Device) { d.InfoROM = code[string](nvml.NotSupported) }, "InfoROM", gpu.Warn, "version of its image", degraded},
	{"InfoROM corrupted", func(_ *Input, d *nvml.Device) { d.InfoROMValid = code[bool](nvml.CorruptedInfoROM) }, "InfoROM", gpu.Warn, "CORRUPTED", degraded},
	{"throttled now", func(_ *Input, d *nvml.Device) { d.Throttle = is(uint64(0x40)) }, "throttle", gpu.Warn, "hardware thermal", degraded},
	{"throttled in some samples", throttled(3), "throttle", gpu.Warn, "power brake", degraded},
	{"throttled in every sample", throttled(20), "throttle", gpu.Fatal, "every sample", unfit},
	{"throttle not read in a sample", func(in *Input, _ *nvml.Device) { in.Watch.Devices[0].Unread = 2 }, "throttle", "", "2 of 20", pass},
	{"hot", func(_ *Input, d *nvml.Device) { d.Temperature = is(85) }, "temperature", gpu.Warn, "85", degraded},
	{"margin gone", func(_ *Input, d *nvml.Device) { d.Margin = is(2) }, "temperature", gpu.Warn, "4 °C", degraded},
	{"margin gone to a slowdown above the point where it slows", func(_ *Input, d *nvml.Device) { d.Margin, d.Limits.Slowdown = is(9), is(6) }, "temperature", gpu.Warn, "3 °C", degraded},
	{"limit of the slowdown not told", func(_ *Input, d *nvml.Device) { d.Margin, d.Limits.Slowdown = is(9), code[int](nvml.NotSupported) }, "temperature", gpu.Warn, "limit of the slowdown", degraded},
	{"memory hot", func(_ *Input, d *nvml.Device) { d.MemoryTemp = is(95) }, "memory temperature", gpu.Warn, "95", degraded},
	{"power limit lost", func(_ *Input, d *nvml.Device) { d.PowerLimit = is(uint64(500000)) }, "power limit", gpu.Warn, "500 W", degraded},
	{"power limit other than before", func(in *Input, d *nvml.Device) { in.Expect.PowerLimitWatts, d.PowerLimit = 0, is(uint64(500000)) }, "power limit", gpu.Warn, "500 W", degraded},
	{"power limit that is not in force", func(_ *Input, d *nvml.Device) { d.Power.Enforced = is(uint64(450000)) }, "power limit", gpu.Warn, "700 W, 450 W in force", degraded},
	{"power limit no longer in force", func(in *Input, d *nvml.Device) { in.Expect.PowerLimitWatts, d.Power.Enforced = 0, is(uint64(450000)) }, "power limit", gpu.Warn, "450 W in force", degraded},
	{"power limit beyond the board", func(in *Input, _ *nvml.Device) { in.Expect.PowerLimitWatts = 900 }, "power limit", gpu.Warn, "700 W", degraded},
	{"power limit in force no longer told", func(_ *Input, d *nvml.Device) { d.Power.Enforced = code[uint64](nvml.NotSupported) }, "power limit", gpu.Warn, "limit in force: not supported", degraded},
	{"persistence lost", func(_ *Input, d *nvml.Device) { d.Persistence = is(false) }, "persistence mode", gpu.Warn, "off", degraded},
	{"compute prohibited", func(_ *Input, d *nvml.Device) { d.ComputeMode = is(2) }, "compute mode", gpu.Fatal, "PROHIBITED", unfit},
	{"compute exclusive, not before", func(_ *Input, d *nvml.Device) { d.ComputeMode = is(3) }, "compute mode", gpu.Fatal, "EXCLUSIVE", unfit},
	{"link down", func(_ *Input, d *nvml.Device) { d.Links[4].Up = is(false) }, "NVLink up", gpu.Fatal, "down: 4", unfit},
	{"no link connected, now as before", func(in *Input, d *nvml.Device) {
		in.Expect.NVLinks = 0
		unplug(d)
		in.Baseline.Devices[0].Readings = Readings(d)
	}, "NVLink up", "", "no link is connected", pass},
	{"no link connected any more", func(in *Input, d *nvml.Device) { in.Expect.NVLinks = 0; unplug(d) }, "NVLink up", gpu.Fatal, "down: 0, 1", unfit},
	{"no link connected, though declared", func(_ *Input, d *nvml.Device) { unplug(d) }, "NVLink up", gpu.Fatal, "down: 0, 1", unfit},
	{"links missing", func(_ *Input, d *nvml.Device) { d.LinkCount, d.Links = is(uint64(12)), d.Links[:12] }, "NVLink up", gpu.Fatal, "12 links", unfit},
	{"more links than this agent knows", func(in *Input, d *nvml.Device) { in.Expect.NVLinks, d.LinkCount = 0, is(uint64(36)) }, "NVLink up", gpu.Fatal, "counts 36 links", unproven},
	{"number of links not answered, though declared", func(_ *Input, d *nvml.Device) {
		d.LinkCount = nvml.Reading[uint64]{Missing: "nvmlDeviceGetFieldValues"}
	}, "NVLink up", gpu.Fatal, "NVLink is declared", unproven},
	{"number of links by another version, though declared", func(_ *Input, d *nvml.Device) { d.LinkCount = code[uint64](nvml.FunctionNotFound) }, "NVLink up", gpu.Fatal, "NVLink is declared", unproven},
	{"link slow", func(_ *Input, d *nvml.Device) { d.Links[0].Speed = is(uint64(1)) }, "NVLink speed", gpu.Warn, "1, 26562", degraded},
	{"link replays", func(_ *Input, d *nvml.Device) { d.Links[0].Replay = is(uint64(1)) }, "NVLink errors", gpu.Fatal, "1 new", unfit},
	{"link recoveries", func(_ *Input, d *nvml.Device) { d.Links[0].Recovery = is(uint64(1)) }, "NVLink errors", gpu.Fatal, "1 new", unfit},
	{"CRC errors", func(in *Input, _ *nvml.Device) { in.Watch.Devices[0].CRC = is(uint64(200)) }, "NVLink CRC", gpu.Warn, "100", degraded},
	{"fabric not started", fabricIs(nvml.Fabric{Version: 3, State: 1}), "fabric", gpu.Fatal, "NOT_STARTED", unfit},
	{"fabric still coming up", fabricIs(nvml.Fabric{Version: 3, State: 2}), "fabric", gpu.Fatal, "IN_PROGRESS", unfit},
	{"fabric completed with an error", fabricIs(nvml.Fabric{Version: 3, State: 3, Status: nvml.Unknown, Summary: 1}), "fabric", gpu.Fatal, "UNKNOWN", unfit},
	{"fabric unhealthy", fabricIs(nvml.Fabric{Version: 3, State: 3, Summary: 2, Health: 0x10}), "fabric", gpu.Fatal, "unhealthy route", unfit},
	{"fabric limited", fabricIs(nvml.Fabric{Version: 3, State: 3, Summary: 3, Health: 0x1}), "fabric", gpu.Warn, "degraded bandwidth", degraded},
	{"fabric wrongly configured", fabricIs(nvml.Fabric{Version: 2, State: 3, Health: 0x200}), "fabric", gpu.Fatal, "wrong configuration", unfit},
	{"no fabric though declared", func(_ *Input, d *nvml.Device) { d.Fabric = code[nvml.Fabric](nvml.NotSupported) }, "fabric", gpu.Fatal, "no fabric", unfit},
	{"fabric not answered, though declared", func(_ *Input, d *nvml.Device) {
		d.Fabric = nvml.Reading[nvml.Fabric]{Missing: "nvmlDeviceGetGpuFabricInfo"}
	}, "fabric", gpu.Fatal, "a fabric is declared", unproven},
	{"fabric by another version, though declared", func(_ *Input, d *nvml.Device) { d.Fabric = code[nvml.Fabric](nvml.FunctionNotFound) }, "fabric", gpu.Fatal, "a fabric is declared", unproven},
	{"peer's NVLink not read", func(_ *Input, d *nvml.Device) { d.Peers[0].NVLink = code[int](nvml.Unknown) }, "P2P", gpu.Warn, "UNKNOWN", degraded},
	{"peer's write access not read", func(_ *Input, d *nvml.Device) { d.Peers[0].Write = code[int](nvml.Unknown) }, "P2P", gpu.Warn, "UNKNOWN", degraded},
	{"path to the peer not read", func(_ *Input, d *nvml.Device) { d.Peers[0].Topology = code[int](nvml.NotSupported) }, "P2P", gpu.Warn, "not supported", degraded},
	{"peer access changed", func(_ *Input, d *nvml.Device) { d.Peers[0].NVLink = is(1) }, "P2P", gpu.Warn, "1/0/0", degraded},
	{"MIG change pending", func(_ *Input, d *nvml.Device) { d.MIGMode = is(nvml.Pair{Other: 1}) }, "MIG mode", gpu.Reset, "on after a reset", reset},
	{"MIG mode lost", func(in *Input, _ *nvml.Device) {
		in.Expect.MIG = &gpu.ExpectMIG{Enabled: true, ModeOnly: true}
		enable(&in.NVML.Devices[1])
	}, "MIG mode", gpu.Reset, "off", reset},
	{"a process on a drained GPU", func(_ *Input, d *nvml.Device) { d.Processes = is([]nvml.Process{{PID: 42, Kind: "compute"}}) }, "processes", gpu.Reset, "42", reset},
	{"graphics processes not listed", func(_ *Input, d *nvml.Device) { d.Unlisted = []string{"graphics"} }, "processes", gpu.Warn, "graphics", degraded},
	{"memory in use", func(_ *Input, d *nvml.Device) { d.Memory = is(nvml.Memory{Total: 81559 << 20, Used: 9 << 30}) }, "memory in use", gpu.Warn, "9216 MiB", degraded},
	{"memory lost", func(_ *Input, d *nvml.Device) { d.Memory = is(nvml.Memory{Total: 40 << 30}) }, "memory total", gpu.Warn, "42949672960", degraded},
	{"GSP firmware of another driver", func(_ *Input, d *nvml.Device) { d.GSPVersion = is("570.1.2") }, "GSP", gpu.Warn, "570.1.2", degraded},
	{"GSP mode no longer told", func(_ *Input, d *nvml.Device) { d.GSPEnabled = code[bool](nvml.NotSupported) }, "GSP", gpu.Warn, "not supported", degraded},
	{"GSP mode not told, firmware of another driver", func(_ *Input, d *nvml.Device) {
		d.GSPEnabled, d.GSPVersion = code[bool](nvml.NotSupported), is("570.1.2")
	}, "GSP", gpu.Warn, "570.1.2", degraded},
	{"GSP switched off", func(_ *Input, d *nvml.Device) { d.GSPEnabled = is(false) }, "GSP", gpu.Warn, "off", degraded},
	{"C2C lost", func(in *Input, d *nvml.Device) { d.C2C = is(false); in.Baseline.Devices[0].Readings["C2C"] = "on" }, "C2C", gpu.Warn, "off", degraded},
	{"C2C link down", c2cOf(nvml.C2CLink{Up: is(true)}, nvml.C2CLink{Up: is(false)}), "C2C links", gpu.Warn, "down: 1", degraded},
	{"C2C link without a state", c2cOf(nvml.C2CLink{Up: code[bool](nvml.NotSupported)}), "C2C links", gpu.Warn, "link 0", pass},
	{"C2C links of another speed", func(in *Input, d *nvml.Device) {
		c2cOf(nvml.C2CLink{Up: is(true), Bandwidth: is(uint64(100))})(in, d)
		in.Baseline.Devices[0].Readings["C2C links"] = "1 links of at most 200 MB/s"
	}, "C2C links", gpu.Warn, "100 MB/s", degraded},
	{"C2C links gone", func(in *Input, d *nvml.Device) {
		c2cOf()(in, d)
		in.Baseline.Devices[0].Readings["C2C links"] = "10 links of at most 200 MB/s"
	}, "C2C links", gpu.Warn, "no C2C", degraded},
	{"C2C errors", func(in *Input, d *nvml.Device) {
		d.C2CErrors = is(uint64(1))
		in.Baseline.Devices[0].Readings = Readings(d)
		d.C2CErrors = is(uint64(5))
	}, "C2C errors", gpu.Warn, "4 new", degraded},
	{"C2C errors since the reboot", func(in *Input, d *nvml.Device) { in.Baseline.BootID, d.C2CErrors = "boot-0", is(uint64(5)) }, "C2C errors", gpu.Warn, "5 errors", degraded},
	{"the probe did not run", func(in *Input, _ *nvml.Device) { in.Proofs = in.Proofs[1:]; in.Expect.TensorFusion.Limiter = "" }, rowCUDA, gpu.Fatal, "did not run", unproven},
	{"the limiter does not hold", func(in *Input, _ *nvml.Device) { in.Proofs[0].Limit = &cuda.LimitResult{Found: "2 GiB given"} }, "vGPU limit", gpu.Fatal, "2 GiB", unfit},
	{"slow copies", func(in *Input, _ *nvml.Device) { in.Proofs[0].Slow = []string{"host to device 2.0 GB/s of 40.0"} }, "bandwidth", gpu.Warn, "2.0 GB/s", degraded},
}

func recovery(n uint64) func(*Input, *nvml.Device) {
	return func(_ *Input, d *nvml.Device) { d.Recovery = is(n) }
}

func unplug(d *nvml.Device) {
	for i := range d.Links {
		d.Links[i].Up = is(false)
	}
}

func remap(r nvml.Remap) func(*Input, *nvml.Device) {
	return func(_ *Input, d *nvml.Device) { d.Remap = is(r) }
}

func fabricIs(f nvml.Fabric) func(*Input, *nvml.Device) {
	return func(_ *Input, d *nvml.Device) { d.Fabric = is(f) }
}

func throttled(samples int) func(*Input, *nvml.Device) {
	return func(in *Input, _ *nvml.Device) {
		in.Watch.Devices[0].Throttled, in.Watch.Devices[0].Reasons = samples, 0x80
	}
}

func c2cOf(links ...nvml.C2CLink) func(*Input, *nvml.Device) {
	return func(_ *Input, d *nvml.Device) { d.C2CLinks = is(links) }
}

func enable(d *nvml.Device) { d.MIGMode = is(nvml.Pair{Current: 1, Other: 1}) }

func TestEachFaultOfAGPUIsNamedByItsRowAndNoOther(t *testing.T) {
	for _, f := range gpuFaults {
		t.Run(f.what, f.run)
	}
}

func TestNotSupportedIsASkipByNameAndAWarningWhereTheBaselineHadAValue(t *testing.T) {
	in := healthy()
	d := &in.NVML.Devices[0]
	d.ECCVolatile = code[uint64](nvml.NotSupported)
	checks := failed(Evaluate(*in))
	require.Len(t, checks, 1)
	require.Equal(t, "ECC volatile", checks[0].Name)
	require.Equal(t, gpu.Warn, checks[0].Severity)

	in.Baseline = nil
	in.Watch.Devices[0].Replays = is(uint64(0))
	all := Evaluate(*in)
	require.Empty(t, failed(all))
	for _, c := range all {
		if c.Name == "ECC volatile" && c.Device == first {
			require.False(t, c.OK)
			require.Contains(t, c.Skipped, "not supported: ECC is off")
		}
	}
}

func TestAMissingSymbolIsASkipThatNamesIt(t *testing.T) {
	in := healthy()
	in.Baseline = nil
	in.NVML.Devices[0].SRAMOver = nvml.Reading[bool]{Missing: "nvmlDeviceGetSramEccErrorStatus"}
	checks := Evaluate(*in)
	require.Empty(t, failed(checks))
	require.Contains(t, skips(checks), "SRAM errors: the driver's library has no nvmlDeviceGetSramEccErrorStatus")
}

func skips(checks []gpu.Check) []string {
	var out []string
	for _, c := range checks {
		if c.Skipped != "" {
			out = append(out, c.Name+": "+c.Skipped)
		}
	}
	return out
}

func TestALostGPUIsFatalInWhateverRowItShows(t *testing.T) {
	in := healthy()
	in.NVML.Devices[0].Temperature = code[int](nvml.GPUIsLost)
	checks := failed(Evaluate(*in))
	require.Len(t, checks, 1)
	require.Equal(t, gpu.Fatal, checks[0].Severity)
	require.Equal(t, "GPU_IS_LOST", checks[0].Found)
}

// generation5 makes the links of a GPU those of NVLink 5, with what link 3 has
// counted.
func generation5(d *nvml.Device, five nvml.Link5) {
	d.Links = slices.Clone(d.Links)
	for i := range d.Links {
		l := &d.Links[i]
		l.Replay, l.Recovery, l.CRC = code[uint64](nvml.NotSupported), code[uint64](nvml.NotSupported), code[uint64](nvml.NotSupported)
		l.Five = is(nvml.Link5{EffectiveRate: 0xff})
	}
	d.Links[3].Five = is(five)
}

func TestNVLink5IsJudgedByItsOwnCounters(t *testing.T) {
	for _, c := range []struct {
		what     string
		now      nvml.Link5
		row      string
		severity gpu.Severity
	}{
		{"nothing new", nvml.Link5{Errors: 7, Recoveries: 1}, "", ""},
		{"a recovery", nvml.Link5{Errors: 7, Recoveries: 2}, "NVLink errors", gpu.Fatal},
		{"bad packets", nvml.Link5{Errors: 9, Recoveries: 1}, "NVLink 5 errors", gpu.Warn},
	} {
		t.Run(c.what, func(t *testing.T) {
			in := healthy()
			generation5(&in.NVML.Devices[0], nvml.Link5{Errors: 7, Recoveries: 1})
			in.Baseline.Devices[0].Readings = Readings(&in.NVML.Devices[0])
			generation5(&in.NVML.Devices[0], c.now)
			bad := failed(Evaluate(*in))
			if c.row == "" {
				require.Empty(t, bad)
				return
			}
			require.Equal(t, []string{c.row}, names(bad))
			require.Equal(t, c.severity, bad[0].Severity)
		})
	}
	in := healthy()
	require.Contains(t, skips(Evaluate(*in)), "NVLink 5 errors: not supported: links of another generation")
}

// A firmware that is off has no version to tell: that is no loss at every check.
func TestAGSPThatIsOffAsBeforeIsFine(t *testing.T) {
	in := healthy()
	for i := range in.NVML.Devices {
		d := &in.NVML.Devices[i]
		d.GSPEnabled, d.GSPVersion = is(false), code[string](nvml.NotSupported)
		in.Baseline.Devices[i].Readings = Readings(d)
	}
	require.Empty(t, failed(Evaluate(*in)))

	in = healthy()
	in.NVML.Devices[0].GSPEnabled, in.NVML.Devices[0].GSPVersion = is(false), code[string](nvml.NotSupported)
	bad := failed(Evaluate(*in))
	require.Len(t, bad, 1)
	require.Equal(t, "off", bad[0].Found, "what was switched off is told, not that it has no version now")
}

func TestABadPCIeLinkIsOneWarningWhereverItCounts(t *testing.T) {
	in := healthy()
	in.NVML.Devices[0].PCIeReplay, in.NVML.Devices[0].PCIeErrors = is(uint64(5)), is(uint64(7))
	bad := failed(Evaluate(*in))
	require.Len(t, bad, 1)
	require.Equal(t, "2 new replays since the baseline, 5 in all; 7 new other errors since the baseline, 7 in all", bad[0].Found)
}

func TestAPassingRowSaysWhatElseTheDriverTells(t *testing.T) {
	in := healthy()
	in.Watch.Devices[0].PCIeGen, in.NVML.Devices[0].PCIeGenCard = is(nvml.Pair{Current: 4, Other: 4}), is(5)
	found := map[string]string{}
	for _, c := range Evaluate(*in) {
		if c.Device == first && c.OK {
			found[c.Name] = c.Found
		}
	}
	require.Equal(t, "generation 4, the most of its slot; the card alone has 5", found["PCIe generation"])
	require.Equal(t, "700 W; 700 W by default, 200 W to 700 W can be set", found["power limit"])
	require.Equal(t, "18 links up, to switches", found["NVLink up"])
	require.Equal(t, "no new replays since the baseline, 3 in all; no new other errors since the baseline, 0 in all", found["PCIe errors"])
}

// A stress that was cut proves what it did, not what the plan asked for.
func TestAStressShorterThanThePlansTimeIsNotProven(t *testing.T) {
	in := healthy()
	in.Level, in.Soak = gpu.Stress, 10*time.Minute
	in.Proofs[0].Soaked, in.Proofs[1].Soaked = 8*time.Minute, 10*time.Minute
	checks := Evaluate(*in)
	require.Empty(t, failed(checks))
	require.Contains(t, skips(checks), "stress time: 8m0s of the plan's 10m0s: the deadline came before")
	require.Equal(t, unproven, gpu.VerdictOf(checks, 0))
	require.Equal(t, 480, Figures(in.Proofs)[0].SoakedSeconds)
	in.Proofs[0].Soaked = 10 * time.Minute
	require.Equal(t, pass, gpu.VerdictOf(Evaluate(*in), 0))
	in.Proofs[0].Verdict = cuda.Timeout
	require.Contains(t, skips(Evaluate(*in)), "stress time: no probe that passed: see CUDA call")
}

func names(checks []gpu.Check) []string {
	var out []string
	for _, c := range checks {
		out = append(out, c.Name)
	}
	return out
}

// What was not read must not be kept as a zero that a later reading exceeds.
func TestABaselineKeepsOnlyWhatWasRead(t *testing.T) {
	unread := code[uint64](nvml.Unknown)
	for row, forget := range map[string]func(d *nvml.Device){
		"NVLink up":     func(d *nvml.Device) { d.Links[17].Up = code[bool](nvml.Unknown) },
		"NVLink speed":  func(d *nvml.Device) { d.Links[17].Speed = unread },
		"NVLink errors": func(d *nvml.Device) { d.Links[17].Recovery = unread },
		"P2P":           func(d *nvml.Device) { d.Peers[0].Topology = code[int](nvml.Unknown) },
		"PCIe errors":   func(d *nvml.Device) { d.PCIeReplay, d.PCIeErrors = unread, unread },
		"C2C links":     func(d *nvml.Device) { d.C2CLinks = code[[]nvml.C2CLink](nvml.Unknown) },
	} {
		d := healthyGPU(0, first, second)
		d.C2CLinks = is([]nvml.C2CLink{{Up: is(true)}})
		require.Contains(t, Readings(&d), row)
		forget(&d)
		require.NotContains(t, Readings(&d), row)
	}
	d := healthyGPU(0, first, second)
	d.PCIeErrors = unread
	require.Equal(t, "3/-", Readings(&d)["PCIe errors"])
	d.PCIeReplay = unread
	d.PCIeErrors = is(uint64(4))
	require.Equal(t, "-/4", Readings(&d)["PCIe errors"])
}
