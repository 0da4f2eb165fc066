package vgpu

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/setup"
)

// Options of a plan.
type Options struct {
	// Node is part of the ids of mediated devices, so that two hosts never
	// make the same.
	Node string
	// Scheduler is the policy, empty to leave it; Heterogeneous nil leaves that.
	Scheduler     string
	Heterogeneous *bool
	// Protected names virtual functions and mediated devices that are never
	// released.
	Protected []string
}

// protects reports whether the slot or the device in it is protected. Sysfs
// writes both in small letters, a person may not.
func (o Options) protects(d placed) bool {
	return slices.ContainsFunc(o.Protected, func(name string) bool {
		return strings.EqualFold(name, d.slot) || d.device.UUID != "" && strings.EqualFold(name, d.device.UUID)
	})
}

// Kinds of Act, in the order in which they are done.
const (
	SetHeterogeneous = "heterogeneous"
	SetScheduler     = "scheduler"
	EnableVFs        = "enableVFs"
	Release          = "release"
	Create           = "create"
)

// Act is one change. Later marks one that is known to come but not yet where.
type Act struct {
	Kind   string
	GPU    string
	Slot   string
	Type   Type
	Device string
	// Was is what the virtual function holds until then.
	Was       string
	Enable    bool
	Scheduler string
	Later     bool
}

// Step is one change, and how a person reads it.
type Step struct {
	Act  Act
	What string
}

// GPUPlan is what one GPU takes to be as declared.
type GPUPlan struct {
	GPU     GPU
	Steps   []Step
	Blocked *setup.Failure
	Notes   []string

	want map[string]int
}

// Plan is the plan of every selected GPU. A layout that can never be is an
// error, before anything was touched.
func Plan(entries []Entry, h Host, o Options) ([]GPUPlan, error) {
	if err := CheckScheduler(o.Scheduler); err != nil {
		return nil, err
	}
	want, err := resolve(entries, h.GPUs)
	if err != nil {
		return nil, err
	}
	var out []GPUPlan
	for _, g := range h.GPUs {
		if types, selected := want[g.UUID]; selected {
			p := GPUPlan{GPU: g, want: types}
			if err := p.plan(h, o); err != nil {
				return nil, err
			}
			out = append(out, p)
		}
	}
	return out, nil
}

func (p *GPUPlan) plan(h Host, o Options) error {
	g := p.GPU
	if !g.Host {
		if len(p.want) == 0 {
			return nil
		}
		return setup.Bad("GPU "+g.PCI, "a vGPU host driver", "none: the GPU is not in host vGPU mode", "install NVIDIA's vGPU manager, or leave this GPU out of the layout")
	}
	if len(p.want) > 0 {
		if err := p.manager(h.Manager); err != nil {
			return err
		}
	}
	if err := p.possible(); err != nil {
		return err
	}
	if err := p.modes(o); err != nil {
		return err
	}
	if p.functions() {
		for _, name := range slices.Sorted(maps.Keys(p.want)) {
			p.add(Act{Kind: Create, Later: true}, "create %d x %s on them", p.want[name], name)
		}
		return nil
	}
	return p.types(h, o)
}

func (p *GPUPlan) add(a Act, format string, args ...any) {
	a.GPU = p.GPU.UUID
	p.Steps = append(p.Steps, Step{a, fmt.Sprintf(format, args...)})
}

func (p *GPUPlan) bad(expected, found, next string) error {
	return setup.Bad("GPU "+p.GPU.PCI, expected, found, next)
}

func (p *GPUPlan) block(expected, found, why, next string) {
	p.Blocked = &setup.Failure{Class: setup.Wait, Object: "GPU " + p.GPU.PCI, Expected: expected, Found: found, Why: why, Next: next}
}

// manager refuses to make virtual GPUs that nobody would serve: without its
// modules and units a write may hang, or make what no machine can start with.
func (p *GPUPlan) manager(m host.VGPUManager) error {
	modules := []string{"nvidia"}
	if p.GPU.Framework == MDev {
		modules = append(modules, "nvidia_vgpu_vfio")
	}
	stopped := func(expected, found, next string) error {
		return &setup.Failure{Class: setup.Stop, Object: "vGPU manager of GPU " + p.GPU.PCI, Expected: expected, Found: found, Next: next}
	}
	for _, name := range modules {
		if m.ModulesVisible && !slices.Contains(m.Modules, name) {
			return stopped("module "+name, "it is not loaded", "load it (modprobe "+name+"); it comes with NVIDIA's vGPU manager")
		}
	}
	if m.Mgr.Visible && !m.Mgr.Active {
		return stopped("service "+host.VGPUMgr, "no process of it", "start it (systemctl start "+host.VGPUMgr+"), and look at its log when it does not stay")
	}
	if m.Daemon.Visible && !m.Daemon.Active {
		p.Notes = append(p.Notes, fmt.Sprintf("GPU %s: no process of %s; where it has failed, rather than ended, types are missing", p.GPU.PCI, host.VGPUDaemon))
	}
	if !m.ModulesVisible || !m.Mgr.Visible {
		p.Notes = append(p.Notes, fmt.Sprintf("GPU %s: whether the vGPU manager is loaded and at work is not visible here", p.GPU.PCI))
	}
	return nil
}

// possible refuses what this GPU can never be.
func (p *GPUPlan) possible() error {
	g := p.GPU
	if len(p.want) > 0 && g.Framework == "" {
		return p.bad("mdev or vendor VFIO", "neither", "look at the log of the vGPU manager (nvidia-vgpud, nvidia-vgpu-mgr) and at the kernel's")
	}
	if g.TotalVFs > 0 && g.NumVFs > 0 && g.NumVFs < g.TotalVFs && len(p.want) > 0 {
		return p.bad(fmt.Sprintf("sriov_numvfs %d or 0", g.TotalVFs), fmt.Sprint(g.NumVFs), "somebody has set another number: release its virtual functions, then go on")
	}
	known := p.known()
	total := 0
	for _, name := range slices.Sorted(maps.Keys(p.want)) {
		total += p.want[name]
		if mig := migBacked.MatchString(name); mig != g.MIG {
			return p.bad(fmt.Sprintf("MIG mode %s for type %s", onOff(mig), name), onOff(g.MIG), "set the GPU's MIG mode first, with a MIG layout")
		}
		// With MIG a driver may name a type only once its instance is there.
		if len(known) > 0 && !g.MIG && !known[name] {
			return p.bad("one of the types "+strings.Join(slices.Sorted(maps.Keys(known)), ", "), name, "this GPU does not offer the type: correct the layout")
		}
	}
	room := g.TotalVFs
	if room > 0 && total > room {
		return p.bad(fmt.Sprintf("at most %d virtual GPUs, one for each virtual function", room), fmt.Sprint(total), "correct the layout")
	}
	return nil
}

func (p *GPUPlan) known() map[string]bool {
	out := map[string]bool{}
	for _, name := range p.GPU.Types {
		out[bare(name)] = true
	}
	for _, s := range p.GPU.Slots {
		for _, t := range s.Types {
			out[t.Name] = true
		}
		for _, d := range s.Devices {
			out[d.Type] = true
		}
	}
	return out
}

// modes adds what the driver takes only while no vGPU is active.
func (p *GPUPlan) modes(o Options) error {
	g := p.GPU
	if o.Heterogeneous != nil && (g.Heterogeneous == nil || *g.Heterogeneous != *o.Heterogeneous) {
		switch {
		case g.Heterogeneous == nil && *o.Heterogeneous:
			return p.bad("heterogeneous vGPUs", "a GPU, driver or mode without them", "leave it out")
		case g.Heterogeneous != nil:
			p.add(Act{Kind: SetHeterogeneous, Enable: *o.Heterogeneous}, "switch heterogeneous vGPUs %s", onOff(*o.Heterogeneous))
		}
	}
	if o.Scheduler != "" && g.Scheduler != o.Scheduler {
		if g.Scheduler == "" {
			return p.bad("scheduler "+o.Scheduler, "a GPU or mode without a vGPU scheduler", "leave it out")
		}
		p.add(Act{Kind: SetScheduler, Scheduler: o.Scheduler}, "set the scheduler to %s (is %s)", o.Scheduler, g.Scheduler)
	}
	if len(p.Steps) > 0 && g.Active > 0 {
		p.block("no active vGPU", fmt.Sprintf("%d", g.Active), "the driver changes these modes only then", "stop the virtual machines of this GPU, then go on")
	}
	return nil
}

// functions switches the virtual functions on; true when all else comes after.
func (p *GPUPlan) functions() bool {
	g := p.GPU
	if len(p.want) == 0 || g.TotalVFs == 0 || g.NumVFs == g.TotalVFs && g.Framework != Hidden {
		return false
	}
	p.add(Act{Kind: EnableVFs}, "switch its %d virtual functions on", g.TotalVFs)
	return true
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

// namespace of the ids of mediated devices.
var namespace = uuid.NewSHA1(uuid.NameSpaceDNS, []byte("vgpu.refit.run"))

// ID is the id of a mediated device: the same for the same place in the same
// layout, so that a retry finds what an earlier try made.
func ID(node, pci, typ string, ordinal int) string {
	return uuid.NewSHA1(namespace, fmt.Appendf(nil, "%s/%s/%s/%d", node, pci, typ, ordinal)).String()
}
