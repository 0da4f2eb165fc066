package gpu

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"go.temporal.io/sdk/temporal"
)

// PrepareActivity sets a host's GPUs up as declared: MIG layout, vGPU types.
const PrepareActivity = "gpu.Prepare"

// PrepareRequest asks the agent of Node to bring its GPUs to what is declared.
// What is not declared is left alone: a nil MIG touches neither mode nor
// instances.
type PrepareRequest struct {
	Node string `json:"node"`
	// NodeBootID is the boot that the cluster's Node object is of; an agent that
	// runs in another is none of this node now. Empty is not compared.
	NodeBootID string       `json:"nodeBootID,omitempty"`
	MIG        *MIGRequest  `json:"mig,omitempty"`
	VGPU       *VGPURequest `json:"vgpu,omitempty"`
	// PlanOnly reports the actions and takes none.
	PlanOnly bool          `json:"planOnly,omitempty"`
	Deadline time.Duration `json:"deadline,omitempty"`
}

// MIGRequest is a declared MIG layout.
type MIGRequest struct {
	// Config is the text of a file in mig-parted's format, Label the layout in
	// it; Label may be left out where the file holds exactly one.
	Config string `json:"config"`
	Label  string `json:"label,omitempty"`
	// ModeOnly sets the mode and never touches instances. It is a must on hosts
	// of TensorFusion's partitioned pools, where the instances are tenants.
	ModeOnly bool `json:"modeOnly,omitempty"`
	// AllowReset lets the agent reset the GPUs whose change of mode asks for
	// it; without it the need is reported. A reboot is never done by the agent.
	AllowReset bool `json:"allowReset,omitempty"`
}

// VGPURequest is a declared set of virtual GPUs.
type VGPURequest struct {
	// Config is the text of a file in vgpu-device-manager's format, Label the
	// layout in it.
	Config string `json:"config"`
	Label  string `json:"label,omitempty"`
	// Scheduler is best-effort, equal-share or fixed-share; empty leaves the
	// driver's policy as it is.
	Scheduler string `json:"scheduler,omitempty" jsonschema:"enum=best-effort,enum=equal-share,enum=fixed-share"`
	// Heterogeneous allows vGPUs of several sizes on one GPU; nil leaves it.
	Heterogeneous *bool `json:"heterogeneous,omitempty"`
	// Protected are PCI addresses of virtual functions and UUIDs of mediated
	// devices that are never released.
	Protected []string `json:"protected,omitempty"`
}

// Action is one step that was taken, or is going to be.
type Action struct {
	// System is mig or vgpu, Device the GPU (UUID or PCI address).
	System string `json:"system"`
	Device string `json:"device"`
	What   string `json:"what"`
}

// Needs of a host that the agent reports instead of meeting them.
const (
	NeedsReset  = "reset"
	NeedsReboot = "reboot"
)

// Need is something that must happen before the host is as declared.
type Need struct {
	// Kind is reset or reboot.
	Kind   string `json:"kind"`
	Device string `json:"device"`
	Why    string `json:"why"`
}

// PrepareResult is what was done. Without Needs the host is as declared, or
// with PlanOnly would be after Actions.
type PrepareResult struct {
	Node    string   `json:"node"`
	BootID  string   `json:"bootID"`
	Actions []Action `json:"actions,omitempty"`
	Needs   []Need   `json:"needs,omitempty"`
	// Devices are the MIG devices and virtual GPUs that are there now.
	Devices []Device `json:"devices,omitempty"`
	// Notes say what was left alone, and why.
	Notes []string `json:"notes,omitempty"`
	// Resumed: an attempt of this request before this one was cut off and may
	// have changed the host; its steps are not among Actions.
	Resumed bool `json:"resumed,omitempty"`
}

// MIGReadings are the rows of a baseline that a change of the MIG set-up
// changes with it.
//
// The NVLinks are among them: those of an A100 on a baseboard are off while it is
// in MIG mode (NVIDIA Fabric Manager, "Interoperability with MIG").
var MIGReadings = []string{
	"MIG mode", "MIG layout", "row remap", "row remap reserve", "memory total", "P2P",
	"NVLink up", "NVLink speed", "NVLink errors",
}

// WithoutMIG is the baseline for a host whose MIG set-up was changed on
// purpose: what a change of it changes is not compared.
func (b Baseline) WithoutMIG() Baseline {
	devices := make([]Device, len(b.Devices))
	for i, d := range b.Devices {
		devices[i] = d
		devices[i].Readings = maps.Clone(d.Readings)
		for _, name := range MIGReadings {
			delete(devices[i].Readings, name)
		}
	}
	b.Devices = devices
	return b
}

// Begun reports whether the set-up touched the host, or may have.
func (r PrepareResult) Begun() bool { return r.Resumed || len(r.Actions)+len(r.Needs) > 0 }

// ChangedMIG reports whether the set-up changed MIG modes or instances, or may
// have, where its request declares MIG.
func (r PrepareResult) ChangedMIG() bool {
	return r.Resumed || slices.ContainsFunc(r.Actions, func(a Action) bool { return a.System == "mig" })
}

// SetUpFailure stands in the details of an error of PrepareActivity, after the
// finding.
type SetUpFailure struct {
	// Untouched: the set-up was refused before its first step, in its first
	// attempt.
	Untouched bool `json:"untouched,omitempty"`
}

// Untouched reports whether an error of PrepareActivity says that nothing of the
// host was changed. One that does not tell may have changed something.
func Untouched(err error) bool {
	var app *temporal.ApplicationError
	if !errors.As(err, &app) || !app.HasDetails() {
		return false
	}
	// Of any type: see finding.Details.
	var first, second any
	if app.Details(&first, &second) != nil {
		return false
	}
	data, err := json.Marshal(second)
	var f SetUpFailure
	return err == nil && json.Unmarshal(data, &f) == nil && f.Untouched
}
