package mig

import (
	"cmp"
	"slices"

	"github.com/refit-run/refit/gpuagent/nvml"
)

// place finds a placement for each group beside what is fixed, by trying them
// all: the driver's own first fit, largest first, misses layouts that fit
// (3g + 2g + 2 x 1g). It returns nil, false when there is none. The order of
// the result is the order of want; the same input gives the same answer, also
// when a part of the answer has been made already.
func place(g nvml.MIGGPU, fixed []nvml.MIGInstance, want []group) ([]nvml.MIGPlacement, bool) {
	if !enough(g, fixed, want) {
		return nil, false
	}
	used := uint64(0)
	for _, i := range fixed {
		used |= bits(i.Placement)
	}
	// The ones with the fewest places first: a dead end shows early.
	order := make([]int, len(want))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		pa, pb := want[a].profile, want[b].profile
		return cmp.Or(cmp.Compare(len(pa.Placements), len(pb.Placements)), cmp.Compare(pb.Slices, pa.Slices), cmp.Compare(pa.Constant, pb.Constant))
	})
	out := make([]nvml.MIGPlacement, len(want))
	var try func(k int, used uint64) bool
	try = func(k int, used uint64) bool {
		if k == len(order) {
			return true
		}
		for _, at := range want[order[k]].profile.Placements {
			if used&bits(at) == 0 {
				out[order[k]] = at
				if try(k+1, used|bits(at)) {
					return true
				}
			}
		}
		return false
	}
	return out, try(0, used)
}

// enough is the part of the question that needs no placements: how many of
// each profile there may be, and how many compute slices there are.
func enough(g nvml.MIGGPU, fixed []nvml.MIGInstance, want []group) bool {
	most, slicesUsed, count := 0, 0, map[uint32]int{}
	for _, p := range g.Profiles {
		most = max(most, p.Slices)
		for _, i := range fixed {
			if p.ID == i.ProfileID {
				slicesUsed += p.Slices
				count[p.ID]++
			}
		}
	}
	for _, w := range want {
		slicesUsed += w.profile.Slices
		if count[w.profile.ID]++; count[w.profile.ID] > w.profile.Max {
			return false
		}
	}
	return slicesUsed <= most
}

func bits(p nvml.MIGPlacement) uint64 { return (1<<p.Size - 1) << p.Start }
