// Package nvml reads everything the validation asks of the driver, through
// NVIDIA's NVML, into plain structs. The calls run in a child process only
// (gpuagent/child); Take and Watch are what the agent calls.
//
// Every call is guarded by a look-up of its symbol: a function that the
// installed driver lacks would end the process. No call follows a failed Init.
package nvml

import (
	"strconv"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Code is NVML's return code; its constants are NVML's.
type Code int

// Codes that a validation decides on.
const (
	Success          = Code(gonvml.SUCCESS)
	NotSupported     = Code(gonvml.ERROR_NOT_SUPPORTED)
	NoPermission     = Code(gonvml.ERROR_NO_PERMISSION)
	DriverNotLoaded  = Code(gonvml.ERROR_DRIVER_NOT_LOADED)
	LibraryNotFound  = Code(gonvml.ERROR_LIBRARY_NOT_FOUND)
	FunctionNotFound = Code(gonvml.ERROR_FUNCTION_NOT_FOUND)
	GPUIsLost        = Code(gonvml.ERROR_GPU_IS_LOST)
	ResetRequired    = Code(gonvml.ERROR_RESET_REQUIRED)
	VersionMismatch  = Code(gonvml.ERROR_LIB_RM_VERSION_MISMATCH)
	ArgumentVersion  = Code(gonvml.ERROR_ARGUMENT_VERSION_MISMATCH)
	NotReady         = Code(gonvml.ERROR_NOT_READY)
	CorruptedInfoROM = Code(gonvml.ERROR_CORRUPTED_INFOROM)
	Unknown          = Code(gonvml.ERROR_UNKNOWN)
)

var codeNames = map[Code]string{
	Success: "SUCCESS", 1: "UNINITIALIZED", 2: "INVALID_ARGUMENT", NotSupported: "NOT_SUPPORTED",
	NoPermission: "NO_PERMISSION", NotFound: "NOT_FOUND", 7: "INSUFFICIENT_SIZE", DriverNotLoaded: "DRIVER_NOT_LOADED",
	10: "TIMEOUT", LibraryNotFound: "LIBRARY_NOT_FOUND", FunctionNotFound: "FUNCTION_NOT_FOUND",
	CorruptedInfoROM: "CORRUPTED_INFOROM", GPUIsLost: "GPU_IS_LOST", ResetRequired: "RESET_REQUIRED",
	VersionMismatch: "LIB_RM_VERSION_MISMATCH", InUse: "IN_USE", InsufficientResources: "INSUFFICIENT_RESOURCES",
	ArgumentVersion: "ARGUMENT_VERSION_MISMATCH",
	NotReady:        "NOT_READY", InvalidState: "INVALID_STATE", Unknown: "UNKNOWN",
}

// String is the name of a code in the published API. The library is not asked:
// after a failed Init a call of it would end the process.
func (c Code) String() string {
	if s, ok := codeNames[c]; ok {
		return s
	}
	return "code " + strconv.Itoa(int(c))
}

// otherVersion reports a driver that knows the call by another version only,
// older or newer than the one that was made.
func (c Code) otherVersion() bool { return c == FunctionNotFound || c == ArgumentVersion }

// Reading is one answer of the driver: a value, or why there is none.
type Reading[T any] struct {
	Value T    `json:"value"`
	Code  Code `json:"code,omitempty"`
	// Missing names the symbol that the installed library lacks.
	Missing string `json:"missing,omitempty"`
}

// OK reports whether there is a value.
func (r Reading[T]) OK() bool { return r.Code == Success && r.Missing == "" }

// Why is the code and the missing symbol of a reading without a value.
func (r Reading[T]) Why() (Code, string) { return r.Code, r.Missing }

// Absent reports that this GPU or this driver has no such thing, as against
// one that did not answer.
func (r Reading[T]) Absent() bool {
	return r.Missing != "" || r.Code == NotSupported || r.Code.otherVersion()
}

// Snapshot is the driver's whole answer.
type Snapshot struct {
	Init Code `json:"init"`
	// Library is the file that answered, as the loader of the child found it.
	Library string          `json:"library,omitempty"`
	Driver  Reading[string] `json:"driver"`
	// CUDA is 1000*major + 10*minor.
	CUDA  Reading[int] `json:"cuda"`
	Count Reading[int] `json:"count"`
	// ConfCompute is 1 when confidential computing is on, ConfReady when the
	// GPUs then accept work.
	ConfCompute Reading[uint64] `json:"confCompute"`
	ConfReady   Reading[uint64] `json:"confReady"`
	Devices     []Device        `json:"devices"`
}

// Pair is a current value with its pending or greatest one.
type Pair struct {
	Current int `json:"current"`
	Other   int `json:"other"`
}

// Device is one GPU.
type Device struct {
	Index int `json:"index"`
	// Handle is the answer to the request for the device itself; nothing else
	// is read when it is not Success.
	Handle       Code            `json:"handle,omitempty"`
	UUID         Reading[string] `json:"uuid"`
	Serial       Reading[string] `json:"serial"`
	Name         Reading[string] `json:"name"`
	VBIOS        Reading[string] `json:"vbios"`
	PCI          Reading[string] `json:"pci"`
	Minor        Reading[int]    `json:"minor"`
	Architecture Reading[int]    `json:"architecture"`
	VGPUHost     Reading[bool]   `json:"vgpuHost"`

	Recovery  Reading[uint64] `json:"recovery"`
	PCIeWidth Reading[Pair]   `json:"pcieWidth"`
	PCIeGen   Reading[Pair]   `json:"pcieGen"`
	// PCIeGenCard is the greatest generation of the card alone, whatever its slot.
	PCIeGenCard Reading[int]    `json:"pcieGenCard"`
	PCIeReplay  Reading[uint64] `json:"pcieReplay"`
	PCIeFatal   Reading[uint64] `json:"pcieFatal"`
	PCIeErrors  Reading[uint64] `json:"pcieErrors"`

	ECCMode      Reading[Pair]        `json:"eccMode"`
	ECCVolatile  Reading[uint64]      `json:"eccVolatile"`
	ECCAggregate Reading[uint64]      `json:"eccAggregate"`
	SRAMOver     Reading[bool]        `json:"sramOver"`
	Remap        Reading[Remap]       `json:"remap"`
	RemapNone    Reading[uint64]      `json:"remapNone"`
	Unrepairable Reading[bool]        `json:"unrepairable"`
	RepairWaits  Reading[bool]        `json:"repairWaits"`
	RetiredWaits Reading[bool]        `json:"retiredWaits"`
	Retired      Reading[Retired]     `json:"retired"`
	InfoROM      Reading[string]      `json:"infoROM"`
	InfoROMValid Reading[bool]        `json:"infoROMValid"`
	Throttle     Reading[uint64]      `json:"throttle"`
	Temperature  Reading[int]         `json:"temperature"`
	Slowdown     Reading[int]         `json:"slowdown"`
	Margin       Reading[int]         `json:"margin"`
	Limits       Limits               `json:"limits"`
	MemoryTemp   Reading[int]         `json:"memoryTemp"`
	MemoryMax    Reading[int]         `json:"memoryMax"`
	PowerLimit   Reading[uint64]      `json:"powerLimit"` // milliwatts, as all power
	Power        Power                `json:"power"`
	Persistence  Reading[bool]        `json:"persistence"`
	ComputeMode  Reading[int]         `json:"computeMode"`
	LinkCount    Reading[uint64]      `json:"linkCount"`
	Links        []Link               `json:"links,omitempty"`
	Fabric       Reading[Fabric]      `json:"fabric"`
	Peers        []Peer               `json:"peers,omitempty"`
	MIGMode      Reading[Pair]        `json:"migMode"`
	Instances    Reading[Instances]   `json:"instances"`
	MIGDevices   Reading[[]MIGDevice] `json:"migDevices"`
	Processes    Reading[[]Process]   `json:"processes"`
	// Unlisted are the kinds of processes that the driver lists on no GPU of
	// this kind.
	Unlisted   []string           `json:"unlisted,omitempty"`
	Memory     Reading[Memory]    `json:"memory"`
	GSPVersion Reading[string]    `json:"gspVersion"`
	GSPEnabled Reading[bool]      `json:"gspEnabled"`
	C2C        Reading[bool]      `json:"c2c"`
	C2CLinks   Reading[[]C2CLink] `json:"c2cLinks"`
	C2CErrors  Reading[uint64]    `json:"c2cErrors"`
}

// MIGOn reports whether the GPU is in MIG mode now.
func (d *Device) MIGOn() bool { return d.MIGMode.OK() && d.MIGMode.Value.Current == 1 }

// CUDADevices are the UUIDs of what CUDA can use of the GPU, as far as they
// were read: the GPU itself, or its MIG devices.
func (d *Device) CUDADevices() []string {
	var out []string
	switch {
	case d.MIGOn():
		for _, m := range d.MIGDevices.Value {
			out = append(out, m.UUID)
		}
	case d.UUID.OK():
		out = append(out, d.UUID.Value)
	}
	return out
}

// Remap is the state of memory row remapping.
type Remap struct {
	Correctable   int  `json:"correctable"`
	Uncorrectable int  `json:"uncorrectable"`
	Pending       bool `json:"pending,omitempty"`
	Failure       bool `json:"failure,omitempty"`
}

// Limits are temperatures as margins to the one at which the GPU begins to slow
// down: those of a shutdown and a slowdown lie below 0.
type Limits struct {
	Shutdown Reading[int] `json:"shutdown"`
	Slowdown Reading[int] `json:"slowdown"`
	Memory   Reading[int] `json:"memory"`
	GPU      Reading[int] `json:"gpu"`
}

// Power are limits beside the one that is set: the one in force once every
// limiter is counted, that of a driver just loaded, and the board's bounds.
type Power struct {
	Enforced Reading[uint64] `json:"enforced"`
	Default  Reading[uint64] `json:"default"`
	Bounds   Reading[Bounds] `json:"bounds"`
}

// Bounds are the least and the greatest value that can be set.
type Bounds struct {
	Least uint64 `json:"least"`
	Most  uint64 `json:"most"`
}

// C2CLink is one link between the chips of a Grace system; Bandwidth is the
// most it can do, in MB/s.
type C2CLink struct {
	Up        Reading[bool]   `json:"up"`
	Bandwidth Reading[uint64] `json:"bandwidth"`
}

// Retired counts memory pages taken out of use, by cause.
type Retired struct {
	SingleBit int `json:"singleBit"`
	DoubleBit int `json:"doubleBit"`
}

// Link is one NVLink.
type Link struct {
	Up       Reading[bool]   `json:"up"`
	Remote   Reading[int]    `json:"remote"` // what is at its other end, as NVML numbers it
	Speed    Reading[uint64] `json:"speed"`  // MB/s
	Replay   Reading[uint64] `json:"replay"`
	Recovery Reading[uint64] `json:"recovery"`
	CRC      Reading[uint64] `json:"crc"`
	// Five has what NVLink 5 counts instead of replay, recovery and CRC.
	Five Reading[Link5] `json:"five"`
}

// Link5 are the counters of one NVLink 5 link. The rates are bit error rates as
// the driver packs them: mantissa and negative exponent.
type Link5 struct {
	Errors        uint64 `json:"errors"`
	Recoveries    uint64 `json:"recoveries"`
	EffectiveRate uint64 `json:"effectiveRate"`
	SymbolRate    uint64 `json:"symbolRate"`
}

// Fabric is the NVSwitch fabric as the GPU sees it; Version says which form of
// the call answered: 2 has the health mask, 3 the summary.
type Fabric struct {
	Version int    `json:"version"`
	State   int    `json:"state"`
	Status  Code   `json:"status"`
	Health  uint32 `json:"health,omitempty"`
	Summary int    `json:"summary,omitempty"`
}

// Peer is the path to another GPU of the host.
type Peer struct {
	UUID     string       `json:"uuid"`
	NVLink   Reading[int] `json:"nvlink"`
	Read     Reading[int] `json:"read"`
	Write    Reading[int] `json:"write"`
	Topology Reading[int] `json:"topology"`
}

// Instances are the MIG GPU instances of a device.
type Instances []Instance

// Instance is one GPU instance; Compute are the profiles of its compute
// instances: its own when one has all of it, else a part like 1c.3g.40gb.
type Instance struct {
	Profile string   `json:"profile"`
	ID      int      `json:"id"`
	Start   int      `json:"start"`
	Size    int      `json:"size"`
	Compute []string `json:"compute,omitempty"`
}

// MIGDevice is what CUDA sees of a MIG-enabled GPU.
type MIGDevice struct {
	UUID string `json:"uuid"`
	Name string `json:"name"`
}

// Process holds the GPU open.
type Process struct {
	PID  int    `json:"pid"`
	Kind string `json:"kind"` // compute, graphics or mps
}

// Memory is in bytes.
type Memory struct {
	Total uint64 `json:"total"`
	Used  uint64 `json:"used"`
}
