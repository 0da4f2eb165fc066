package nvml

import (
	"context"

	"github.com/refit-run/refit/activities/gpu"
)

// MIGHost is the MIG side of a host.
type MIGHost struct {
	GPUs []MIGGPU `json:"gpus"`
}

// MIGGPU is one GPU: its mode, what it offers and what is made of it.
type MIGGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	// PCI is the address as sysfs writes it, PCIID device<<16|vendor.
	PCI   string `json:"pci"`
	PCIID uint32 `json:"pciID"`
	// Supported is false on a GPU, or in a guest, without MIG.
	Supported bool `json:"supported"`
	Current   bool `json:"current"`
	Pending   bool `json:"pending"`
	// Remap is the state of row remapping; the driver hides it while there are
	// instances, so it is judged before the first one is made.
	Remap Reading[Remap] `json:"remap"`
	// Processes are the clients of the GPU, in all instances together.
	Processes int           `json:"processes"`
	Profiles  []MIGProfile  `json:"profiles,omitempty"`
	Instances []MIGInstance `json:"instances,omitempty"`
	Devices   []gpu.Device  `json:"devices,omitempty"`
}

// BadRows says what row remapping keeps the first instance of the GPU from
// being made, empty when nothing does or it cannot be told.
func (g MIGGPU) BadRows() string {
	switch r := g.Remap; {
	case !r.OK() || len(g.Instances) > 0:
		return ""
	case r.Value.Failure:
		return "a memory row could not be remapped: return the card"
	case r.Value.Pending:
		return "a row remapping waits for a reset of the GPU"
	}
	return ""
}

// MIGProfile is a kind of GPU instance that the GPU offers.
type MIGProfile struct {
	// Constant is NVML's index of the profile, ID the driver's own number.
	Constant int    `json:"constant"`
	ID       uint32 `json:"id"`
	// Name is the whole profile (3g.40gb), Compute the names of its parts by
	// compute slices (1: 1c.3g.40gb, 3: 3g.40gb).
	Name       string         `json:"name"`
	Compute    map[int]string `json:"compute"`
	Slices     int            `json:"slices"`
	Max        int            `json:"max"`
	Placements []MIGPlacement `json:"placements,omitempty"`
}

// MIGPlacement is a stretch of memory slices.
type MIGPlacement struct {
	Start int `json:"start"`
	Size  int `json:"size"`
}

func (p MIGPlacement) overlaps(o MIGPlacement) bool {
	return p.Start < o.Start+o.Size && o.Start < p.Start+p.Size
}

// MIGInstance is a GPU instance.
type MIGInstance struct {
	ID        uint32               `json:"id"`
	ProfileID uint32               `json:"profileID"`
	Placement MIGPlacement         `json:"placement"`
	Compute   []MIGComputeInstance `json:"compute,omitempty"`
	Processes int                  `json:"processes,omitempty"`
}

// MIGComputeInstance is a compute instance of a GPU instance.
type MIGComputeInstance struct {
	ID     uint32 `json:"id"`
	Slices int    `json:"slices"`
}

// Kinds of MIGAct.
const (
	MIGSetMode        = "mode"
	MIGCreateGPU      = "createGPU"
	MIGCreateCompute  = "createCompute"
	MIGDestroyCompute = "destroyCompute"
	MIGDestroyGPU     = "destroyGPU"
)

// MIGAct is one change. The instance is named by id, profile and placement:
// the driver gives ids out again.
type MIGAct struct {
	UUID   string `json:"uuid"`
	Kind   string `json:"kind"`
	Enable bool   `json:"enable,omitempty"`
	// Lost are the instances that the plan knows to go with the mode. With any
	// other there the mode is not switched off.
	Lost     []MIGInstance `json:"lost,omitempty"`
	Constant int           `json:"constant,omitempty"`
	// Instance is what is acted on; of createGPU only profile and placement.
	Instance MIGInstance `json:"instance"`
	Compute  uint32      `json:"compute,omitempty"`
	Slices   int         `json:"slices,omitempty"`
	// Want is how many compute instances of Slices there are to be afterwards.
	Want int `json:"want,omitempty"`
}

// Activations of a change of mode.
const (
	ActivationIdle  = "idle"  // pending until the GPU is idle
	ActivationReset = "reset" // pending until a reset or reboot
)

// MIGOutcome is the GPU after a change.
type MIGOutcome struct {
	Activation string `json:"activation,omitempty"`
	// Already: the world was so before, nothing was called.
	Already bool `json:"already,omitempty"`
	// Stale: the world was not as the act takes it to be, nothing was called.
	// Plan again from GPU.
	Stale bool   `json:"stale,omitempty"`
	GPU   MIGGPU `json:"gpu"`
}

// ReadMIG observes every GPU.
func (s Setters) ReadMIG(ctx context.Context) (MIGHost, error) {
	var out MIGHost
	err := s.call(ctx, migReadChild, "", setupRead, struct{}{}, &out)
	return out, err
}

// ActMIG observes, compares, makes one change and observes again.
func (s Setters) ActMIG(ctx context.Context, a MIGAct) (MIGOutcome, error) {
	var out MIGOutcome
	err := s.call(ctx, migActChild, a.UUID, setupAct, a, &out)
	return out, err
}
