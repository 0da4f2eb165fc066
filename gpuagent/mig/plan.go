package mig

import (
	"fmt"
	"slices"

	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// Options of a plan.
type Options struct {
	// ModeOnly sets the mode and touches no instance: those of a TensorFusion
	// partitioned pool belong to tenants. A GPU that has some keeps its mode,
	// because they would go with it.
	ModeOnly bool
}

// Step is one change, and how a person reads it.
type Step struct {
	Act  nvml.MIGAct
	What string
}

// GPUPlan is what one GPU takes to be as declared. Steps is what is known
// now: Apply takes the first one and plans again.
type GPUPlan struct {
	GPU   nvml.MIGGPU
	Steps []Step
	// Blocked is why nothing may be done now although something is to do.
	Blocked *setup.Failure
	Notes   []string

	want wanted
}

// Plan is the plan of every selected GPU, in the host's order. A layout that
// can never be is an error, before anything was touched.
func Plan(entries []Entry, host nvml.MIGHost, o Options) ([]GPUPlan, error) {
	want, err := resolve(entries, host)
	if err != nil {
		return nil, err
	}
	var out []GPUPlan
	for _, g := range host.GPUs {
		w, selected := want[g.UUID]
		if !selected {
			continue
		}
		p, err := planGPU(g, w, o)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

func planGPU(g nvml.MIGGPU, w wanted, o Options) (GPUPlan, error) {
	p, err := stepsOf(g, w, o)
	if err == nil {
		p.judgeRows()
	}
	return p, err
}

func stepsOf(g nvml.MIGGPU, w wanted, o Options) (GPUPlan, error) {
	p := GPUPlan{GPU: g, want: w}
	if !g.Supported {
		if w.enabled {
			return p, setup.Bad("GPU "+g.UUID, "MIG, as the layout says", "a GPU, driver or guest without it", "leave this GPU out of the layout")
		}
		return p, nil
	}
	if g.Current != w.enabled || g.Pending != w.enabled {
		p.mode(w.enabled)
		if o.ModeOnly && len(g.Instances) > 0 && !w.enabled {
			p.tenants("switch MIG mode off")
		}
	}
	switch {
	case !w.enabled:
		return p, nil
	case o.ModeOnly:
		if len(w.devices) > 0 {
			p.Notes = append(p.Notes, fmt.Sprintf("GPU %s: mode only, its instances belong to TensorFusion: the declared MIG devices are not made", g.UUID))
		}
		return p, nil
	}
	return p.layout(w.devices)
}

// mode adds the change of mode.
func (p *GPUPlan) mode(enable bool) {
	g := p.GPU
	what := "switch MIG mode off"
	switch {
	case enable:
		what = "switch MIG mode on"
	case len(g.Instances) > 0:
		what += fmt.Sprintf("; its %d GPU instances go with it", len(g.Instances))
	}
	if g.Current == enable {
		what += " again: it is so, but the other is pending"
	}
	p.Steps = append(p.Steps, Step{Act: nvml.MIGAct{UUID: g.UUID, Kind: nvml.MIGSetMode, Enable: enable, Lost: g.Instances}, What: what})
	if g.Current != enable && g.Processes > 0 {
		p.block(clients(g.Processes))
	}
}

// judgeRows blocks a GPU whose memory rows are not in order before MIG
// instances are made on it, by us or, in mode only, by whoever owns the
// partitions: from then on the driver no longer tells, and no validation would
// see it. It comes before every other reason: waiting does not mend it.
func (p *GPUPlan) judgeRows() {
	makes := slices.ContainsFunc(p.Steps, func(s Step) bool {
		return s.Act.Kind == nvml.MIGCreateGPU || s.Act.Kind == nvml.MIGSetMode && s.Act.Enable
	})
	if bad := p.GPU.BadRows(); bad != "" && makes {
		p.Blocked = &setup.Failure{Class: setup.Stop, Object: "GPU " + p.GPU.UUID, Expected: "memory rows in order before MIG instances hide them", Found: bad,
			Why: "the driver does not tell the state of row remapping while MIG instances exist", Next: "drain the host and reset the GPU, or reboot it; return the card if it stays"}
	}
}

// tenants blocks what would take instances that are not ours to remove.
func (p *GPUPlan) tenants(what string) {
	p.Blocked = &setup.Failure{
		Class: setup.Wait, Object: "GPU " + p.GPU.UUID, Expected: "no GPU instance, to " + what,
		Found: fmt.Sprintf("%d, which belong to TensorFusion in a pool whose mode alone is ours", len(p.GPU.Instances)),
		Why:   "they are partitions of tenants, with a process or without, and would be gone",
		Next:  "end the workloads of the pool so that TensorFusion removes its partitions, then go on; or leave this GPU out of the layout",
	}
}

// mayReset blocks a reset that would take the GPU from somebody.
func (p *GPUPlan) mayReset(o Options) bool {
	switch g := p.GPU; {
	case o.ModeOnly && len(g.Instances) > 0:
		p.tenants("reset the GPU")
	case g.Processes > 0:
		p.block(clients(g.Processes))
	}
	return p.Blocked == nil
}

func (p *GPUPlan) block(found string) {
	p.Blocked = &setup.Failure{
		Class: setup.Wait, Object: "GPU " + p.GPU.UUID, Expected: "no client, so that it can be changed", Found: found,
		Why: "a change would take the GPU away from them", Next: "drain the GPU (workloads, device plugin, DCGM, hypervisor), then go on",
	}
}

// layout adds what makes the instances those declared: repair first, then
// surplus, then what is missing.
func (p GPUPlan) layout(devices map[string]int) (GPUPlan, error) {
	g := p.GPU
	if len(g.Profiles) == 0 && !g.Current {
		p.later()
		return p, nil
	}
	want, err := groups(g, devices)
	if err != nil {
		return p, err
	}
	impossible := setup.Bad("GPU "+g.UUID, "a layout that fits", describe(want)+" does not, not even on an empty GPU", "correct the layout")
	if !g.Current && slices.ContainsFunc(g.Profiles, func(p nvml.MIGProfile) bool { return len(p.Placements) == 0 }) {
		if !enough(g, nil, want) {
			return p, impossible
		}
		p.later()
		return p, nil
	}
	keep, surplus, create := match(g.Instances, want)
	places, fits := place(g, instances(keep), create)
	if !fits {
		// Around what stays there is no room. Idle instances can be made anew
		// elsewhere; a busy one cannot.
		if _, fits := place(g, nil, want); !fits {
			return p, impossible
		}
		var busy []nvml.MIGInstance
		for _, i := range g.Instances {
			if i.Processes > 0 {
				busy = append(busy, i)
			}
		}
		keep, _, create = match(busy, want)
		surplus = without(g.Instances, keep)
		if places, fits = place(g, instances(keep), create); !fits {
			p.removals(surplus)
			p.block(describe(want) + " fits on this GPU only once its busy instances are gone")
			return p, nil
		}
	}
	p.repairs(keep)
	p.removals(surplus)
	for i, c := range create {
		p.creation(c, places[i])
	}
	return p, nil
}

// later notes that the driver tells placements only in MIG mode.
func (p *GPUPlan) later() {
	p.Notes = append(p.Notes, fmt.Sprintf("GPU %s tells its placements only in MIG mode: the instances are planned once that is on", p.GPU.UUID))
}

func (p *GPUPlan) repairs(keep []kept) {
	for _, k := range keep {
		have := sizes(k.instance)
		for _, size := range k.missing() {
			have[size]++
			p.Steps = append(p.Steps, Step{
				Act: nvml.MIGAct{UUID: p.GPU.UUID, Kind: nvml.MIGCreateCompute, Instance: k.instance, Slices: size, Want: have[size]},
				What: fmt.Sprintf("create the missing compute instance %s in %s",
					k.group.profile.Compute[size], named(p.GPU, k.instance)),
			})
		}
	}
}

func (p *GPUPlan) removals(surplus []nvml.MIGInstance) {
	for _, i := range surplus {
		if i.Processes > 0 {
			p.block(fmt.Sprintf("%s is surplus and has %s", named(p.GPU, i), clients(i.Processes)))
		}
		for _, c := range i.Compute {
			p.Steps = append(p.Steps, Step{
				Act:  nvml.MIGAct{UUID: p.GPU.UUID, Kind: nvml.MIGDestroyCompute, Instance: i, Compute: c.ID},
				What: fmt.Sprintf("remove compute instance %d of %s", c.ID, named(p.GPU, i)),
			})
		}
		p.Steps = append(p.Steps, Step{
			Act:  nvml.MIGAct{UUID: p.GPU.UUID, Kind: nvml.MIGDestroyGPU, Instance: i},
			What: "remove " + named(p.GPU, i),
		})
	}
}

// creation adds a GPU instance with its compute instances. The id is the
// driver's to give, so only the first step can be taken as it stands.
func (p *GPUPlan) creation(c group, at nvml.MIGPlacement) {
	i := nvml.MIGInstance{ProfileID: c.profile.ID, Placement: at}
	p.Steps = append(p.Steps, Step{
		Act:  nvml.MIGAct{UUID: p.GPU.UUID, Kind: nvml.MIGCreateGPU, Constant: c.profile.Constant, Instance: i},
		What: fmt.Sprintf("create GPU instance %s at %d", c.profile.Name, at.Start),
	})
	for n, size := range (kept{i, c}).missing() {
		p.Steps = append(p.Steps, Step{
			Act:  nvml.MIGAct{UUID: p.GPU.UUID, Kind: nvml.MIGCreateCompute, Instance: i, Slices: size, Want: n + 1},
			What: fmt.Sprintf("create compute instance %s in it", c.profile.Compute[size]),
		})
	}
}

func clients(n int) string {
	if n == 1 {
		return "1 client"
	}
	return fmt.Sprintf("%d clients", n)
}

func instances(keep []kept) []nvml.MIGInstance {
	var out []nvml.MIGInstance
	for _, k := range keep {
		out = append(out, k.instance)
	}
	return out
}

func without(all []nvml.MIGInstance, keep []kept) []nvml.MIGInstance {
	stays := map[uint32]bool{}
	for _, k := range keep {
		stays[k.instance.ID] = true
	}
	var out []nvml.MIGInstance
	for _, i := range all {
		if !stays[i.ID] {
			out = append(out, i)
		}
	}
	return out
}

// describe is a layout in words: 3g.40gb + 2 x 1g.10gb.
func describe(want []group) string {
	text, last, n := "", "", 0
	flush := func() {
		if n == 0 {
			return
		}
		if text != "" {
			text += " + "
		}
		if n > 1 {
			text += fmt.Sprintf("%d x ", n)
		}
		text += last
	}
	for _, g := range want {
		if g.profile.Name != last {
			flush()
			last, n = g.profile.Name, 0
		}
		n++
	}
	flush()
	return text
}
