package mig

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// group is one GPU instance as declared: its profile, and how many compute
// instances of which size it holds.
type group struct {
	profile nvml.MIGProfile
	compute map[int]int
}

// groups turns declared MIG devices into GPU instances. Parts of an instance
// (1c.3g.40gb) share instances, the largest first, as mig-parted packs them.
func groups(g nvml.MIGGPU, devices map[string]int) ([]group, error) {
	var out []group
	parts := map[int][]int{} // by profile: the sizes of its parts
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		at, slices := offered(g, name)
		if at < 0 {
			return nil, setup.Bad("GPU "+g.UUID, "one of the profiles "+offer(g), name, "this GPU does not offer the profile: correct the layout")
		}
		p := g.Profiles[at]
		for range devices[name] {
			if slices == p.Slices {
				out = append(out, group{p, map[int]int{slices: 1}})
			} else {
				parts[at] = append(parts[at], slices)
			}
		}
	}
	for _, at := range slices.Sorted(maps.Keys(parts)) {
		out = append(out, pack(g.Profiles[at], parts[at])...)
	}
	return out, nil
}

func offered(g nvml.MIGGPU, name string) (at, slices int) {
	for i, p := range g.Profiles {
		for n, part := range p.Compute {
			if part == name || n == p.Slices && fmt.Sprintf("%dc.%s", n, part) == name {
				return i, n
			}
		}
	}
	return -1, 0
}

func offer(g nvml.MIGGPU) string {
	var names []string
	for _, p := range g.Profiles {
		names = append(names, p.Name)
	}
	return strings.Join(names, ", ")
}

func pack(p nvml.MIGProfile, sizes []int) []group {
	slices.SortFunc(sizes, func(a, b int) int { return cmp.Compare(b, a) })
	var out []group
	var room []int
	for _, size := range sizes {
		at := slices.IndexFunc(room, func(r int) bool { return r >= size })
		if at < 0 {
			out, room = append(out, group{p, map[int]int{}}), append(room, p.Slices)
			at = len(out) - 1
		}
		out[at].compute[size]++
		room[at] -= size
	}
	return out
}

// kept is an instance that stays, with the group that it is.
type kept struct {
	instance nvml.MIGInstance
	group    group
}

// missing are the sizes of the compute instances that it lacks, largest first.
func (k kept) missing() []int {
	have := sizes(k.instance)
	var out []int
	for _, size := range slices.Sorted(maps.Keys(k.group.compute)) {
		for range k.group.compute[size] - have[size] {
			out = append(out, size)
		}
	}
	slices.Reverse(out)
	return out
}

func sizes(i nvml.MIGInstance) map[int]int {
	out := map[int]int{}
	for _, c := range i.Compute {
		out[c.Slices]++
	}
	return out
}

// match decides which instances stay: as they are first, then those that lack
// compute instances only; among equals the busy ones, so that what has to go
// is idle where that is possible.
func match(instances []nvml.MIGInstance, want []group) (keep []kept, surplus []nvml.MIGInstance, create []group) {
	order := slices.Clone(instances)
	slices.SortFunc(order, func(a, b nvml.MIGInstance) int {
		return cmp.Or(cmp.Compare(b.Processes, a.Processes), cmp.Compare(len(b.Compute), len(a.Compute)), cmp.Compare(a.ID, b.ID))
	})
	create = slices.Clone(want)
	taken := map[uint32]bool{}
	for _, fits := range []func(have, want map[int]int) bool{maps.Equal[map[int]int, map[int]int], within} {
		for _, i := range order {
			if taken[i.ID] {
				continue
			}
			at := slices.IndexFunc(create, func(g group) bool { return g.profile.ID == i.ProfileID && fits(sizes(i), g.compute) })
			if at < 0 {
				continue
			}
			taken[i.ID] = true
			keep = append(keep, kept{i, create[at]})
			create = slices.Delete(create, at, at+1)
		}
	}
	for _, i := range order {
		if !taken[i.ID] {
			surplus = append(surplus, i)
		}
	}
	return keep, surplus, create
}

func within(have, want map[int]int) bool {
	for size, n := range have {
		if n > want[size] {
			return false
		}
	}
	return true
}

// named is an instance as a person knows it.
func named(g nvml.MIGGPU, i nvml.MIGInstance) string {
	name := fmt.Sprintf("profile %d", i.ProfileID)
	for _, p := range g.Profiles {
		if p.ID == i.ProfileID {
			name = p.Name
		}
	}
	return fmt.Sprintf("GPU instance %d (%s at %d)", i.ID, name, i.Placement.Start)
}
