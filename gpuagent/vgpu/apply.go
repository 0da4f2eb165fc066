package vgpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// Driver is the part of a vGPU host that NVML knows. nvml.Setters is the real
// one.
type Driver interface {
	ReadVGPU(ctx context.Context) (nvml.VGPUHost, error)
	ActVGPU(ctx context.Context, a nvml.VGPUAct) (nvml.VGPUGPU, error)
}

// Applier brings a host to a layout.
type Applier struct {
	Root   string
	Driver Driver
	Writer Writer
	// Progress hears of every step before it is taken.
	Progress func(step string)
}

func (a Applier) ask(ctx context.Context) (nvml.VGPUHost, error) {
	told, err := a.Driver.ReadVGPU(ctx)
	return told, setup.Explain(err, stateOfHost)
}

func (a Applier) read(ctx context.Context, told nvml.VGPUHost) (Host, error) {
	h, err := Read(ctx, a.Root, told)
	return h, setup.Explain(err, stateOfHost)
}

const stateOfHost = "vGPU state of the host"

// Preview is what Apply would do now. A GPU that is busy is an error of class
// Wait, beside the report.
func (a Applier) Preview(ctx context.Context, entries []Entry, o Options) (setup.Report, error) {
	var r setup.Report
	told, err := a.ask(ctx)
	if err != nil {
		return r, err
	}
	h, err := a.read(ctx, told)
	if err != nil {
		return r, err
	}
	plans, err := Plan(entries, h, o)
	if err != nil {
		return r, err
	}
	for _, p := range plans {
		for _, s := range p.Steps {
			r.Actions = append(r.Actions, action(p, s))
		}
		p.tell(&r)
	}
	return r, blocked(plans)
}

func action(p GPUPlan, s Step) gpu.Action {
	return gpu.Action{System: "vgpu", Device: p.GPU.PCI, What: s.What}
}

// tell adds what is there to a report.
func (p GPUPlan) tell(r *setup.Report) {
	r.Notes = append(r.Notes, p.Notes...)
	for _, s := range p.GPU.Slots {
		for _, d := range s.Devices {
			id := d.UUID
			if id == "" {
				id = s.PCI
			}
			r.Devices = append(r.Devices, gpu.Device{UUID: id, Model: d.Type})
		}
	}
}

func blocked(plans []GPUPlan) error {
	for _, p := range plans {
		if p.Blocked != nil {
			return p.Blocked
		}
	}
	return nil
}

// stepsPerHost bounds the loop: sixteen GPUs with 32 virtual functions each,
// all released and made anew, are below it.
const stepsPerHost = 2000

// Apply brings every selected GPU to the layout. Nothing is touched when one
// of them cannot be, or is busy. It may be ended at any point and run again.
// The report tells what was done also when an error is returned.
func (a Applier) Apply(ctx context.Context, entries []Entry, o Options) (setup.Report, error) {
	var r setup.Report
	told, err := a.ask(ctx)
	if err != nil {
		return r, err
	}
	h, err := a.read(ctx, told)
	if err != nil {
		return r, err
	}
	for range stepsPerHost {
		if err := ctx.Err(); err != nil {
			return r, err
		}
		plans, err := Plan(entries, h, o)
		if err != nil {
			return r, err
		}
		if err := blocked(plans); err != nil {
			return r, err
		}
		p, s, found := first(plans)
		if !found {
			for _, p := range plans {
				p.tell(&r)
			}
			return r, nil
		}
		if a.Progress != nil {
			a.Progress(p.GPU.PCI + ": " + s.What)
		}
		err = a.act(ctx, p, s)
		// Another has changed the function since it was read: plan again.
		stale := errors.Is(err, syscall.ESTALE)
		if err != nil && !stale {
			return r, err
		}
		if !stale {
			r.Actions = append(r.Actions, action(p, s))
		}
		if s.Act.Kind != Create && s.Act.Kind != Release {
			if told, err = a.ask(ctx); err != nil {
				return r, err
			}
		}
		if h, err = a.read(ctx, told); err != nil {
			return r, err
		}
		if err := prove(h, p, s); err != nil && !stale {
			return r, err
		}
	}
	return r, &setup.Failure{Class: setup.Stop, Object: "vGPU layout", Expected: "the layout", Found: fmt.Sprintf("still not after %d steps", stepsPerHost),
		Next: "something else changes these GPUs: stop it, then go on"}
}

func first(plans []GPUPlan) (GPUPlan, Step, bool) {
	for _, p := range plans {
		if len(p.Steps) > 0 {
			return p, p.Steps[0], true
		}
	}
	return GPUPlan{}, Step{}, false
}

// act takes one step. What the kernel says of a thing that is as it should be
// (exists, is gone) is no error: prove looks at it.
func (a Applier) act(ctx context.Context, p GPUPlan, s Step) error {
	object := fmt.Sprintf("GPU %s: %s", p.GPU.PCI, s.What)
	mdev := p.GPU.Framework == MDev
	var err error
	switch act := s.Act; act.Kind {
	case SetHeterogeneous:
		_, err = a.Driver.ActVGPU(ctx, nvml.VGPUAct{UUID: act.GPU, Kind: nvml.VGPUSetHeterogeneous, Enable: act.Enable})
		return setup.Explain(err, object)
	case SetScheduler:
		_, err = a.Driver.ActVGPU(ctx, nvml.VGPUAct{UUID: act.GPU, Kind: nvml.VGPUSetScheduler, Scheduler: act.Scheduler})
		return setup.Explain(err, object)
	case EnableVFs:
		err = a.Writer.EnableVFs(ctx, p.GPU.PCI)
	case Release:
		if mdev {
			if err = a.Writer.Write(ctx, mdevDevices+"/"+act.Device+"/remove", "1"); errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENODEV) {
				err = nil
			}
		} else {
			err = a.Writer.SetVF(ctx, act.Slot, freeVF, act.Was)
		}
	case Create:
		if mdev {
			path := fmt.Sprintf("%s/%s/mdev_supported_types/%s/create", mdevBus, act.Slot, act.Type.ID)
			if err = a.Writer.Write(ctx, path, act.Device); errors.Is(err, syscall.EEXIST) {
				err = nil
			}
		} else {
			err = a.Writer.SetVF(ctx, act.Slot, act.Type.ID, act.Was)
		}
	}
	if err != nil {
		return explain(err, object)
	}
	return nil
}

func vendorFile(vf string) string { return pciDevices + "/" + vf + "/nvidia/current_vgpu_type" }

// prove looks whether a step had its effect: a write that the kernel took
// without doing it would be taken for ever.
func prove(h Host, p GPUPlan, s Step) error {
	for _, g := range h.GPUs {
		if g.UUID == p.GPU.UUID && s.Act.done(g) {
			return nil
		}
	}
	return &setup.Failure{Class: setup.Stop, Object: "GPU " + p.GPU.PCI, Expected: s.What, Found: "the write was taken, and nothing has changed",
		Next: "look at the kernel log and at the log of nvidia-vgpu-mgr"}
}

func (act Act) done(g GPU) bool {
	switch act.Kind {
	case SetHeterogeneous:
		return g.Heterogeneous != nil && *g.Heterogeneous == act.Enable
	case SetScheduler:
		return g.Scheduler == act.Scheduler
	case EnableVFs:
		return g.NumVFs == g.TotalVFs && g.Framework != Hidden
	}
	for _, s := range g.Slots {
		if s.PCI != act.Slot {
			continue
		}
		for _, d := range s.Devices {
			if d.UUID == act.Device {
				return act.Kind == Create && d.Type == act.Type.Name
			}
		}
	}
	return act.Kind == Release
}
