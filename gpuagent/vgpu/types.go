package vgpu

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/refit-run/refit/gpuagent/setup"
)

// placed is a virtual GPU with its slot.
type placed struct {
	slot   string
	device Device
}

func (d placed) name() string {
	if d.device.UUID != "" {
		return fmt.Sprintf("%s %s on %s", d.device.Type, d.device.UUID, d.slot)
	}
	return fmt.Sprintf("%s on %s", d.device.Type, d.slot)
}

// types adds what makes the virtual GPUs those declared: surplus goes first,
// because the driver offers a type only while there is room for it.
func (p *GPUPlan) types(h Host, o Options) error {
	surplus, missing := p.compare(h, o)
	freed := 0
	for _, d := range surplus {
		switch {
		case o.protects(d):
			p.Notes = append(p.Notes, fmt.Sprintf("%s is surplus and protected: it stays", d.name()))
			continue
		case d.device.Open:
			p.block("surplus that nobody uses", d.name()+" is open", "releasing it would take the GPU from its virtual machine", "stop the virtual machine, then go on")
		case h.Blind && d.device.UUID == "":
			// The kernel refuses to remove an mdev in use; of a virtual
			// function it is not known that it does.
			p.block("sight of the host's processes", "open files of some are hidden", d.name()+" may be in use", "run as root, with the host's processes visible")
			p.Blocked.Class = setup.Stop
		}
		freed++
		p.add(Act{Kind: Release, Slot: d.slot, Device: d.device.UUID, Was: d.device.Number}, "release %s", d.name())
	}
	return p.create(missing, freed, h, o)
}

// compare splits the virtual GPUs into those that stay and those that are too
// many, and counts what is missing. Of equals those in use stay, then ours.
func (p *GPUPlan) compare(h Host, o Options) (surplus []placed, missing map[string]int) {
	var have []placed
	for _, s := range p.GPU.Slots {
		for _, d := range s.Devices {
			have = append(have, placed{s.PCI, d})
		}
	}
	weight := func(d placed) int {
		w := 0
		if d.device.Open {
			w += 2
		}
		if o.protects(d) {
			w += 2
		}
		for k := range p.want[d.device.Type] {
			if d.device.UUID == ID(o.Node, p.GPU.PCI, d.device.Type, k) {
				w++
			}
		}
		return w
	}
	slices.SortStableFunc(have, func(a, b placed) int { return cmp.Compare(weight(b), weight(a)) })
	missing = maps.Clone(p.want)
	for _, d := range have {
		if missing[d.device.Type] > 0 {
			missing[d.device.Type]--
			continue
		}
		surplus = append(surplus, d)
	}
	return surplus, missing
}

// create adds what is missing. Where surplus goes first, the places of the
// rest are known only then.
func (p *GPUPlan) create(missing map[string]int, freed int, h Host, o Options) error {
	used, taken := map[string]int{}, map[string]bool{}
	for _, g := range h.GPUs {
		for _, s := range g.Slots {
			for _, d := range s.Devices {
				taken[d.UUID] = true
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		for range missing[name] {
			s, t, found := p.free(name, used)
			if !found {
				if freed == 0 {
					return p.bad("room for "+name, "creatable now: "+p.creatable(used), "correct the layout: the driver offers no more of this type beside the others")
				}
				p.add(Act{Kind: Create, Later: true}, "create %s where there is room then", name)
				continue
			}
			used[s.PCI]++
			a := Act{Kind: Create, Slot: s.PCI, Type: t, Was: freeVF}
			if p.GPU.Framework == MDev {
				k := 0
				for taken[ID(o.Node, p.GPU.PCI, name, k)] {
					k++
				}
				a.Device = ID(o.Node, p.GPU.PCI, name, k)
				taken[a.Device] = true
			}
			p.add(a, "create %s on %s", strings.TrimSpace(name+" "+a.Device), s.PCI)
		}
	}
	return nil
}

// free is the first slot that takes a type; used counts what the plan has put
// there already.
func (p *GPUPlan) free(name string, used map[string]int) (Slot, Type, bool) {
	for _, s := range p.GPU.Slots {
		if !s.Physical && len(s.Devices)+used[s.PCI] > 0 {
			continue
		}
		for _, t := range s.Types {
			if t.Name == name && t.Available > used[s.PCI] {
				return s, t, true
			}
		}
	}
	return Slot{}, Type{}, false
}

func (p *GPUPlan) creatable(used map[string]int) string {
	names := map[string]bool{}
	for _, s := range p.GPU.Slots {
		for _, t := range s.Types {
			if _, _, ok := p.free(t.Name, used); ok {
				names[t.Name] = true
			}
		}
	}
	if len(names) == 0 {
		return "nothing"
	}
	return strings.Join(slices.Sorted(maps.Keys(names)), ", ")
}
