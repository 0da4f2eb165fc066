package check

import (
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/cuda"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// Names of rows that other code speaks of.
const (
	rowHost        = "host"
	rowLibrary     = "library and driver"
	rowIdentity    = "identity"
	rowConfCompute = "confidential computing"
	rowCUDAVersion = "CUDA version"
	rowXidHistory  = "Xid history"
	rowCUDA        = cuda.CallCheck
	rowStress      = "stress time"
)

// hostRows are the rows that concern the host as a whole.
var hostRows []row

// gpuRows are the rows of each GPU, in the order of the validation table.
var gpuRows []row

func init() {
	hostRows = []row{
		{name: rowLibrary, level: gpu.Quick, severity: gpu.Fatal, check: libraryAndDriver},
		{name: "alone", level: gpu.Quick, severity: gpu.Warn, check: alone},
		{name: rowHost, level: gpu.Quick, severity: gpu.Fatal, check: hostRead},
		{name: "baseline", level: gpu.Quick, severity: gpu.Info, check: baselineBoot},
		{name: "driver version", level: gpu.Quick, severity: gpu.Fatal, needsDriver: true, check: driverVersion},
		{name: "user-space libraries", level: gpu.Quick, severity: gpu.Fatal, needsDriver: true, needsHost: true, check: userSpaceLibraries},
		{name: rowCUDAVersion, level: gpu.Quick, severity: gpu.Fatal, needsDriver: true, check: cudaVersion},
		{name: "device count", level: gpu.Quick, severity: gpu.Fatal, needsDriver: true, check: deviceCount},
		{name: "device set", level: gpu.Quick, severity: gpu.Fatal, needsDriver: true, check: deviceSet},
		{name: "fabric services", level: gpu.Quick, severity: gpu.Fatal, needsHost: true, check: fabricServices},
		{name: rowXidHistory, level: gpu.Quick, severity: gpu.Fatal, needsHost: true, check: xidHistory},
		{name: "Xid live", level: gpu.Quick, severity: gpu.Warn, needsDriver: true, check: xidLive},
		{name: rowConfCompute, level: gpu.Quick, severity: gpu.Fatal, why: "it is off", needsDriver: true, check: confidentialComputing},
		{name: "device files", level: gpu.Quick, severity: gpu.Fatal, needsDriver: true, needsHost: true, check: deviceFiles, reading: minorReading},
		{name: "TensorFusion modules", level: gpu.Quick, severity: gpu.Fatal, needsHost: true, check: tensorFusionModules},
		{name: "TensorFusion toolkit", level: gpu.Quick, severity: gpu.Fatal, needsHost: true, check: tensorFusionToolkit},
		{name: "TensorFusion provider", level: gpu.Quick, severity: gpu.Fatal, needsHost: true, check: tensorFusionProvider},
		{name: "TensorFusion shared memory", level: gpu.Quick, severity: gpu.Fatal, needsHost: true, check: tensorFusionShm},
		{name: "TensorFusion pod state", level: gpu.Quick, severity: gpu.Fatal, needsHost: true, check: tensorFusionPods},
		{name: "TensorFusion hypervisor", level: gpu.Quick, severity: gpu.Warn, needsHost: true, check: tensorFusionHypervisor},
		{name: "TensorFusion transport", level: gpu.Quick, severity: gpu.Warn, needsHost: true, check: tensorFusionTransport},
		{name: "TensorFusion kubelet", level: gpu.Quick, severity: gpu.Fatal, needsHost: true, check: tensorFusionKubelet},
		{name: "TensorFusion devices", level: gpu.Quick, severity: gpu.Fatal, needsDriver: true, needsHost: true, check: tensorFusionDevices},
	}
	gpuRows = []row{
		{name: rowIdentity, level: gpu.Quick, severity: gpu.Fatal, check: identity, reading: identityReading},
		{name: "VBIOS", level: gpu.Quick, severity: gpu.Warn, check: vbios, reading: vbiosReading},
		{name: "serial", level: gpu.Quick, severity: gpu.Warn, why: "a consumer board", check: serial, reading: serialReading},
		{name: "recovery action", level: gpu.Quick, severity: gpu.Fatal, why: "an older driver; ECC, remap and Xid rows stand alone", check: recoveryAction, reading: recoveryReading},
		{name: "PCIe width", level: gpu.Quick, severity: gpu.Fatal, why: "a guest, or a GPU on C2C only", check: pcieWidth, reading: pcieWidthReading},
		{name: "PCIe generation", level: gpu.Quick, severity: gpu.Warn, why: "a guest, or a GPU on C2C only", check: pcieGeneration, reading: pcieGenerationReading},
		{name: "PCIe errors", level: gpu.Quick, severity: gpu.Warn, why: "no counter", check: pcieErrors, reading: pcieErrorsReading, counter: true,
			parts: parts{partPCIeFatal: func(d *nvml.Device) bool { return d.PCIeFatal.OK() }, partPCIeReplays: func(d *nvml.Device) bool { return d.PCIeReplay.OK() },
				partPCIeOther: func(d *nvml.Device) bool { return d.PCIeErrors.OK() }}},
		{name: "ECC mode", level: gpu.Quick, severity: gpu.Reset, why: "no ECC", check: eccMode, reading: eccModeReading},
		{name: "ECC volatile", level: gpu.Quick, severity: gpu.Fatal, why: "ECC is off or absent", check: eccVolatile, reading: eccVolatileReading},
		{name: "SRAM errors", level: gpu.Quick, severity: gpu.Fatal, why: "ECC is off, or an older GPU", check: sramErrors, reading: sramReading},
		{name: "ECC aggregate", level: gpu.Quick, severity: gpu.Warn, why: "ECC is off or absent", check: eccAggregate, reading: eccAggregateReading},
		{name: "row remap", level: gpu.Quick, severity: gpu.Fatal, why: "MIG instances exist, or an older GPU", check: rowRemap, reading: rowRemapReading},
		{name: "row remap reserve", level: gpu.Quick, severity: gpu.Warn, why: "MIG instances exist, or an older GPU", check: rowRemapReserve, reading: rowRemapReserveReading},
		{name: "unrepairable memory", level: gpu.Quick, severity: gpu.Fatal, why: "an older GPU", check: unrepairableMemory, reading: unrepairableReading},
		{name: "memory repair", level: gpu.Quick, severity: gpu.Fatal, why: "an older GPU", check: memoryRepair, reading: memoryRepairReading},
		{name: "retired pages", level: gpu.Quick, severity: gpu.Warn, why: "row remap stands in its place", check: retiredPages, reading: retiredReading,
			parts: parts{partRetiredWaits: func(d *nvml.Device) bool { return d.RetiredWaits.OK() }}},
		{name: "InfoROM", level: gpu.Quick, severity: gpu.Warn, why: "none is fitted", check: infoROM, reading: infoROMReading,
			parts: parts{partInfoROMImage: func(d *nvml.Device) bool { return d.InfoROM.OK() }}},
		{name: "throttle", level: gpu.Quick, severity: gpu.Warn, why: "no such reading", check: throttle, reading: throttleReading},
		{name: "temperature", level: gpu.Quick, severity: gpu.Warn, why: "no such sensor", check: temperature, reading: temperatureReading,
			parts: parts{partSlowdown: func(d *nvml.Device) bool { return d.Limits.Slowdown.OK() }}},
		{name: "memory temperature", level: gpu.Quick, severity: gpu.Warn, why: "no sensor at the memory", check: memoryTemperature, reading: memoryTemperatureReading},
		{name: "power limit", level: gpu.Quick, severity: gpu.Warn, why: "a board without control", check: powerLimit, reading: powerLimitReading,
			parts: parts{partEnforced: func(d *nvml.Device) bool { return d.Power.Enforced.OK() }}},
		{name: "persistence mode", level: gpu.Quick, severity: gpu.Warn, why: "no such mode", check: persistenceMode, reading: persistenceReading},
		{name: "compute mode", level: gpu.Quick, severity: gpu.Fatal, check: computeMode, reading: computeModeReading},
		{name: "NVLink up", level: gpu.Quick, severity: gpu.Fatal, why: "a PCIe card", check: nvlinkUp, reading: nvlinkUpReading},
		{name: "NVLink speed", level: gpu.Quick, severity: gpu.Warn, why: "no such reading", check: nvlinkSpeed, reading: nvlinkSpeedReading},
		{name: "NVLink errors", level: gpu.Quick, severity: gpu.Fatal, why: "a counter of another generation", check: nvlinkErrors, reading: nvlinkErrorsReading, counter: true},
		{name: "NVLink 5 errors", level: gpu.Quick, severity: gpu.Warn, why: "links of another generation", check: nvlink5Errors, reading: nvlink5Reading, counter: true},
		{name: "NVLink CRC", level: gpu.Quick, severity: gpu.Warn, why: "a counter of another generation", check: nvlinkCRC, reading: nvlinkCRCReading},
		{name: "fabric", level: gpu.Quick, severity: gpu.Fatal, why: "no NVSwitch fabric", check: fabric, reading: fabricReading},
		{name: "P2P", level: gpu.Quick, severity: gpu.Warn, why: "no peer access", check: peers, reading: peersReading},
		{name: "MIG mode", level: gpu.Quick, severity: gpu.Reset, why: "not MIG capable", check: migMode, reading: migModeReading},
		{name: "MIG layout", level: gpu.Quick, severity: gpu.Reset, why: "not MIG capable", check: migLayout, reading: migLayoutReading},
		{name: "processes", level: gpu.Standard, severity: gpu.Reset, why: "no such list", check: processes, reading: processesReading,
			parts: parts{partProcesses("graphics"): lists("graphics"), partProcesses("mps"): lists("mps")}},
		{name: "memory in use", level: gpu.Standard, severity: gpu.Warn, check: memoryInUse},
		{name: "memory total", level: gpu.Quick, severity: gpu.Warn, check: memoryTotal, reading: memoryTotalReading},
		{name: "GSP", level: gpu.Quick, severity: gpu.Warn, why: "GSP is off", check: gsp, reading: gspReading,
			parts: parts{partGSPVersion: func(d *nvml.Device) bool { return d.GSPVersion.OK() }}},
		{name: "C2C", level: gpu.Quick, severity: gpu.Warn, why: "no C2C", check: c2c, reading: c2cReading},
		{name: "C2C links", level: gpu.Quick, severity: gpu.Warn, why: "no C2C", check: c2cLinks, reading: c2cLinksReading,
			parts: parts{partC2CBandwidth: func(d *nvml.Device) bool { return len(d.C2CLinks.Value) > 0 && d.C2CLinks.Value[0].Bandwidth.OK() }}},
		{name: "C2C errors", level: gpu.Quick, severity: gpu.Warn, why: "no C2C", check: c2cErrors, reading: c2cErrorsReading, counter: true},
		{name: rowCUDA, level: gpu.Quick, severity: gpu.Fatal, check: cudaCall},
		{name: cuda.MemoryCheck, level: gpu.Quick, severity: gpu.Fatal, check: memoryTested},
		{name: rowStress, level: gpu.Stress, severity: gpu.Fatal, check: stressTime},
		{name: cuda.LimitCheck, level: gpu.Quick, severity: gpu.Fatal, check: vgpuLimit},
		{name: cuda.BandwidthCheck, level: gpu.Standard, severity: gpu.Warn, check: bandwidth},
	}
}

// Rows are the names of the rows that a level answers: those of the host, and
// those of each GPU.
func Rows(level gpu.Level) (host, device []string) {
	names := func(rows []row) []string {
		var out []string
		for _, r := range rows {
			if covers(level, r.level) {
				out = append(out, r.name)
			}
		}
		return out
	}
	return names(hostRows), names(gpuRows)
}
