package mig

import (
	"context"
	"fmt"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// Host reads and changes the MIG side of a host. nvml.Setters is the real one.
type Host interface {
	ReadMIG(ctx context.Context) (nvml.MIGHost, error)
	ActMIG(ctx context.Context, a nvml.MIGAct) (nvml.MIGOutcome, error)
}

// ReadOnly is a Host that refuses every change: for GPUs that somebody else
// answers for.
type ReadOnly struct{ Host }

// ActMIG refuses.
func (ReadOnly) ActMIG(_ context.Context, a nvml.MIGAct) (nvml.MIGOutcome, error) {
	return nvml.MIGOutcome{}, fmt.Errorf("%w: %s on GPU %s: this run only reads", setup.ErrRefused, a.Kind, a.UUID)
}

// Applier brings a host to a layout.
type Applier struct {
	Host Host
	// Reset resets the GPUs at the PCI addresses given; nil where the plan
	// does not allow it, then the need is reported.
	Reset func(ctx context.Context, pci ...string) error
	// Progress hears of every step before it is taken.
	Progress func(step string)
}

// Preview is what Apply would do now. What would keep Apply from it is an error
// beside the report: a GPU that is busy, or whose memory rows are not in order.
func Preview(ctx context.Context, h Host, entries []Entry, o Options) (setup.Report, error) {
	plans, err := observe(ctx, h, entries, o)
	if err != nil {
		return setup.Report{}, err
	}
	var r setup.Report
	for _, p := range plans {
		for _, s := range p.Steps {
			r.Actions = append(r.Actions, action(p, s))
		}
		r.Notes = append(r.Notes, p.Notes...)
		r.Devices = append(r.Devices, p.GPU.Devices...)
	}
	return r, blocked(plans)
}

func observe(ctx context.Context, h Host, entries []Entry, o Options) ([]GPUPlan, error) {
	host, err := h.ReadMIG(ctx)
	if err != nil {
		return nil, setup.Explain(err, "MIG state of the host")
	}
	return Plan(entries, host, o)
}

// blocked is why nothing may be done on the host: what waiting does not mend
// before what it does.
func blocked(plans []GPUPlan) error {
	var first *setup.Failure
	for _, p := range plans {
		if p.Blocked != nil && (first == nil || first.Class == setup.Wait && p.Blocked.Class != setup.Wait) {
			first = p.Blocked
		}
	}
	if first == nil {
		return nil
	}
	return first
}

func action(p GPUPlan, s Step) gpu.Action {
	return gpu.Action{System: "mig", Device: p.GPU.UUID, What: s.What}
}

// Apply brings every selected GPU to the layout. Nothing is touched when one
// of them cannot be, or is busy. It may be ended at any point and run again:
// each step is compared with the world before it is taken. The report tells
// what was done also when an error is returned.
func (a Applier) Apply(ctx context.Context, entries []Entry, o Options) (setup.Report, error) {
	var r setup.Report
	plans, err := observe(ctx, a.Host, entries, o)
	if err != nil {
		return r, err
	}
	if err := blocked(plans); err != nil {
		return r, err
	}
	for _, p := range plans {
		if err := a.gpu(ctx, p, o, &r); err != nil {
			return r, err
		}
	}
	return r, nil
}

// stepsPerGPU bounds the loop: eight instances removed and made anew, each
// with up to seven compute instances, are below it.
const stepsPerGPU = 200

func (a Applier) gpu(ctx context.Context, p GPUPlan, o Options, r *setup.Report) error {
	reset := false
	for range stepsPerGPU {
		if p.Blocked != nil {
			return p.Blocked
		}
		if len(p.Steps) == 0 {
			r.Notes = append(r.Notes, p.Notes...)
			r.Devices = append(r.Devices, p.GPU.Devices...)
			return nil
		}
		s := p.Steps[0]
		if a.Progress != nil {
			a.Progress(p.GPU.UUID + ": " + s.What)
		}
		out, err := a.Host.ActMIG(ctx, s.Act)
		if err != nil {
			return setup.Explain(err, fmt.Sprintf("GPU %s: %s", p.GPU.UUID, s.What))
		}
		if !out.Already && !out.Stale {
			r.Actions = append(r.Actions, action(p, s))
		}
		out.GPU.Index = p.GPU.Index
		switch out.Activation {
		case nvml.ActivationIdle:
			p.block("the mode is pending until the GPU is idle")
			continue
		case nvml.ActivationReset:
			if p.GPU = out.GPU; a.Reset != nil && !p.mayReset(o) {
				continue
			}
			if a.Reset == nil || reset {
				r.Needs = append(r.Needs, need(p.GPU, reset))
				return nil
			}
			reset = true
			out.GPU, err = a.reset(ctx, p, r)
			if err != nil && (ctx.Err() != nil || setup.ClassOf(err) == setup.Wait) {
				// Ended from outside, by an abort or a deadline, or kept off by a
				// client: that is no proof against the reset, and the next run
				// tries it again.
				return setup.Explain(err, "GPU "+p.GPU.UUID)
			}
			if err != nil {
				r.Needs = append(r.Needs, need(p.GPU, true))
				r.Notes = append(r.Notes, err.Error())
				return nil
			}
		}
		if p, err = planGPU(out.GPU, p.want, o); err != nil {
			return err
		}
	}
	return &setup.Failure{Class: setup.Stop, Object: "GPU " + p.GPU.UUID, Expected: "the layout", Found: fmt.Sprintf("still not after %d steps", stepsPerGPU),
		Next: "something else changes this GPU: stop it, then go on"}
}

func need(g nvml.MIGGPU, afterReset bool) gpu.Need {
	if afterReset {
		return gpu.Need{Kind: gpu.NeedsReboot, Device: g.UUID, Why: "the MIG mode is still pending after a reset of the GPU was tried"}
	}
	return gpu.Need{Kind: gpu.NeedsReset, Device: g.UUID,
		Why: "the MIG mode is pending until the GPU is reset or the host rebooted; calling again does not help"}
}

// reset resets one GPU and reads it again. A client that keeps it off is an
// error of class Wait.
func (a Applier) reset(ctx context.Context, p GPUPlan, r *setup.Report) (nvml.MIGGPU, error) {
	if a.Progress != nil {
		a.Progress(p.GPU.UUID + ": reset")
	}
	if err := a.Reset(ctx, p.GPU.PCI); err != nil {
		if now, unread := a.again(ctx, p); unread == nil && now.Processes > 0 {
			p.block(clients(now.Processes))
			return now, p.Blocked
		}
		return p.GPU, fmt.Errorf("reset of GPU %s: %w", p.GPU.UUID, err)
	}
	r.Actions = append(r.Actions, gpu.Action{System: "mig", Device: p.GPU.UUID, What: "reset the GPU"})
	return a.again(ctx, p)
}

// again reads the GPU once more.
func (a Applier) again(ctx context.Context, p GPUPlan) (nvml.MIGGPU, error) {
	host, err := a.Host.ReadMIG(ctx)
	if err != nil {
		return p.GPU, err
	}
	for _, g := range host.GPUs {
		if g.UUID == p.GPU.UUID {
			return g, nil
		}
	}
	return p.GPU, fmt.Errorf("GPU %s did not come back after its reset", p.GPU.UUID)
}
