package agent

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/mig"
	"github.com/refit-run/refit/gpuagent/setup"
	"github.com/refit-run/refit/gpuagent/vgpu"
)

// Preparer is the activity gpu.Prepare of one node.
type Preparer struct {
	Node string
	// Root is the host's root as this process sees it.
	Root    string
	Setters Setters
}

// NewPreparer is the real one.
func NewPreparer(node, root string) *Preparer {
	return &Preparer{Node: node, Root: root, Setters: NewSetters(root)}
}

// Prepare brings the host to what is declared: MIG first, because MIG-backed
// vGPU types live in its instances. It is harmless to run again, whatever
// became of the run before. step hears of each step before it is taken.
func (p *Preparer) Prepare(ctx context.Context, req gpu.PrepareRequest, step func(string)) (gpu.PrepareResult, error) {
	begun := false
	out, err := p.prepare(ctx, req, func(what string) { begun = true; step(what) })
	out.Resumed = again(ctx)
	return out, asSetUpError(ctx, err, begun)
}

// again reports that an earlier attempt of the request was cut off: what that one
// did is not known here.
func again(ctx context.Context) bool {
	return activity.IsActivity(ctx) && activity.GetInfo(ctx).Attempt > 1
}

// asSetUpError is asActivityError of a set-up, which tells whether it had begun.
func asSetUpError(ctx context.Context, err error, begun bool) error {
	return asActivityError(err, gpu.SetUpFailure{Untouched: !begun && !again(ctx)})
}

func (p *Preparer) prepare(ctx context.Context, req gpu.PrepareRequest, step func(string)) (gpu.PrepareResult, error) {
	h := host.Host{Root: p.Root}
	out := gpu.PrepareResult{Node: p.Node, BootID: h.BootID()}
	if err := own(p.Node, h, req.Node, req.NodeBootID); err != nil {
		return out, err
	}
	if req.Deadline > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, req.Deadline)
		defer cancel()
	}
	// Both layouts are read before either is acted on.
	layouts, err := parse(req)
	if err != nil {
		return out, err
	}
	run := func(ctx context.Context) (setup.Report, error) { return p.apply(ctx, req, layouts, step) }
	var r setup.Report
	if req.PlanOnly {
		r, err = run(ctx)
	} else {
		r, err = setup.Locked(ctx, p.Root, run)
	}
	out.Actions, out.Needs, out.Devices, out.Notes = r.Actions, r.Needs, r.Devices, r.Notes
	return out, err
}

// layouts are the parsed declarations of a request.
type layouts struct {
	mig  []mig.Entry
	vgpu []vgpu.Entry
}

func parse(req gpu.PrepareRequest) (layouts, error) {
	var out layouts
	var err error
	if m := req.MIG; m != nil {
		if out.mig, err = mig.Parse([]byte(m.Config), m.Label); err != nil {
			return out, err
		}
	}
	if v := req.VGPU; v != nil {
		if out.vgpu, err = vgpu.Parse([]byte(v.Config), v.Label); err != nil {
			return out, err
		}
		return out, vgpu.CheckScheduler(v.Scheduler)
	}
	return out, nil
}

func (p *Preparer) apply(ctx context.Context, req gpu.PrepareRequest, l layouts, progress func(string)) (setup.Report, error) {
	var all setup.Report
	add := func(r setup.Report, err error) error {
		all.Actions, all.Needs = append(all.Actions, r.Actions...), append(all.Needs, r.Needs...)
		all.Devices, all.Notes = append(all.Devices, r.Devices...), append(all.Notes, r.Notes...)
		return err
	}
	if m := req.MIG; m != nil {
		o := mig.Options{ModeOnly: m.ModeOnly}
		a := mig.Applier{Host: p.Setters, Progress: progress}
		if m.AllowReset {
			a.Reset = p.Setters.Reset
		}
		do := func() (setup.Report, error) { return a.Apply(ctx, l.mig, o) }
		if req.PlanOnly {
			do = func() (setup.Report, error) { return mig.Preview(ctx, p.Setters, l.mig, o) }
		}
		// A GPU that waits for a reset is not yet what the vGPU types need.
		if err := add(do()); err != nil || len(all.Needs) > 0 {
			return all, err
		}
	}
	if v := req.VGPU; v != nil && req.PlanOnly && len(all.Actions) > 0 {
		// The types may ask for instances that are not there before the set-up.
		all.Notes = append(all.Notes, "virtual GPUs are planned once MIG is as declared: the types are checked then")
		return all, nil
	}
	if v := req.VGPU; v != nil {
		a := vgpu.Applier{Root: p.Root, Driver: p.Setters, Writer: p.Setters, Progress: progress}
		o := vgpu.Options{Node: p.Node, Scheduler: v.Scheduler, Heterogeneous: v.Heterogeneous, Protected: v.Protected}
		do := a.Apply
		if req.PlanOnly {
			do = a.Preview
		}
		if err := add(do(ctx, l.vgpu, o)); err != nil {
			return all, err
		}
	}
	return all, nil
}

// asActivityError gives an error the class by which the workflow decides, with
// the failure as the first of its details.
func asActivityError(err error, more ...any) error {
	var f *setup.Failure
	if !errors.As(err, &f) {
		return err
	}
	return temporal.NewApplicationErrorWithOptions(f.Error(), string(f.Class), temporal.ApplicationErrorOptions{
		NonRetryable: f.Class != setup.Retry && f.Again == 0, NextRetryDelay: f.Again, Details: append([]any{*f}, more...),
	})
}

// heartbeat tells Temporal every second which step the activity is at.
type heartbeat struct {
	mu         sync.Mutex
	step       string
	quit, done chan struct{}
}

const heartbeatEvery = time.Second

func newHeartbeat(ctx context.Context) *heartbeat {
	h := &heartbeat{step: "observe", quit: make(chan struct{}), done: make(chan struct{})}
	if !activity.IsActivity(ctx) {
		close(h.done)
		return h
	}
	go func() {
		defer close(h.done)
		tick := time.NewTicker(heartbeatEvery)
		defer tick.Stop()
		for {
			h.mu.Lock()
			step := h.step
			h.mu.Unlock()
			activity.RecordHeartbeat(ctx, step)
			select {
			case <-h.quit:
				return
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return h
}

func (h *heartbeat) set(step string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.step = step
}

func (h *heartbeat) stop() {
	close(h.quit)
	<-h.done
}
