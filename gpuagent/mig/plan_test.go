package mig

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// h100 is an empty H100 in MIG mode, as the facts model it.
func h100() nvml.MIGGPU {
	g := nvml.MIGGPU{UUID: "GPU-1", PCI: "0000:01:00.0", PCIID: 0x233010DE, Supported: true, Current: true, Pending: true}
	for _, p := range []struct {
		constant, id, slices, memory, most int
		name                               string
		starts                             []int
	}{
		{0, 19, 1, 1, 7, "1g.10gb", []int{0, 1, 2, 3, 4, 5, 6}},
		{1, 14, 2, 2, 3, "2g.20gb", []int{0, 2, 4}},
		{2, 9, 3, 4, 2, "3g.40gb", []int{0, 4}},
		{3, 5, 4, 4, 1, "4g.40gb", []int{0}},
		{4, 0, 7, 8, 1, "7g.80gb", []int{0}},
		{7, 20, 1, 1, 1, "1g.10gb+me", []int{0, 1, 2, 3, 4, 5, 6}},
		{9, 15, 1, 2, 4, "1g.20gb", []int{0, 2, 4, 6}},
	} {
		offer := nvml.MIGProfile{Constant: p.constant, ID: uint32(p.id), Name: p.name, Slices: p.slices, Max: p.most, Compute: map[int]string{p.slices: p.name}}
		for c := 1; c < p.slices; c++ {
			offer.Compute[c] = fmt.Sprintf("%dc.%s", c, p.name)
		}
		for _, s := range p.starts {
			offer.Placements = append(offer.Placements, nvml.MIGPlacement{Start: s, Size: p.memory})
		}
		g.Profiles = append(g.Profiles, offer)
	}
	return g
}

// with puts an instance on the GPU: profile name, place, compute instances by
// slices, clients.
func with(g nvml.MIGGPU, name string, start, clients int, compute ...int) nvml.MIGGPU {
	at, _ := offered(g, name)
	p := g.Profiles[at]
	i := nvml.MIGInstance{ID: uint32(len(g.Instances) + 1), ProfileID: p.ID, Processes: clients,
		Placement: nvml.MIGPlacement{Start: start, Size: p.Placements[0].Size}}
	for n, size := range compute {
		i.Compute = append(i.Compute, nvml.MIGComputeInstance{ID: uint32(n), Slices: size})
	}
	g.Instances = append(g.Instances, i)
	g.Processes += clients
	return g
}

func entry(enabled bool, devices map[string]int) []Entry {
	return []Entry{{Selector: setup.Selector{Devices: &setup.Devices{All: true}}, Enabled: &enabled, MIGDevices: devices}}
}

func plan(t *testing.T, g nvml.MIGGPU, devices map[string]int) GPUPlan {
	t.Helper()
	plans, err := Plan(entry(true, devices), nvml.MIGHost{GPUs: []nvml.MIGGPU{g}}, Options{})
	require.NoError(t, err)
	require.Len(t, plans, 1)
	return plans[0]
}

func words(p GPUPlan) []string {
	var out []string
	for _, s := range p.Steps {
		out = append(out, s.What)
	}
	return out
}

func TestPlacementIsExactWhereFirstFitFails(t *testing.T) {
	p := plan(t, h100(), map[string]int{"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2})
	at := map[string][]int{}
	used := uint64(0)
	for _, s := range p.Steps {
		if s.Act.Kind == nvml.MIGCreateGPU {
			require.Zero(t, used&bits(s.Act.Instance.Placement), "instances overlap")
			used |= bits(s.Act.Instance.Placement)
			at[strings.Fields(s.What)[3]] = append(at[strings.Fields(s.What)[3]], s.Act.Instance.Placement.Start)
		}
	}
	require.Equal(t, map[string][]int{"3g.40gb": {4}, "2g.20gb": {0}, "1g.10gb": {2, 3}}, at)
}

func TestALayoutThatIsThereIsNotTouched(t *testing.T) {
	g := with(with(h100(), "3g.40gb", 4, 2, 3), "3g.40gb", 0, 0, 1, 1, 1)
	p := plan(t, g, map[string]int{"3g.40gb": 1, "1c.3g.40gb": 3})
	require.Empty(t, p.Steps)
	require.Nil(t, p.Blocked)
}

func TestRepairComesFirstThenSurplusThenWhatIsMissing(t *testing.T) {
	g := with(with(h100(), "2g.20gb", 0, 0, 2), "1g.10gb", 4, 0)
	require.Equal(t, []string{
		"create the missing compute instance 1g.10gb in GPU instance 2 (1g.10gb at 4)",
		"remove compute instance 0 of GPU instance 1 (2g.20gb at 0)",
		"remove GPU instance 1 (2g.20gb at 0)",
		"create GPU instance 3g.40gb at 0",
		"create compute instance 3g.40gb in it",
	}, words(plan(t, g, map[string]int{"1g.10gb": 1, "3g.40gb": 1})))
}

func TestPartsShareInstancesTheLargestFirst(t *testing.T) {
	p := plan(t, h100(), map[string]int{"1c.3g.40gb": 2, "2c.3g.40gb": 1})
	require.Equal(t, []string{
		"create GPU instance 3g.40gb at 0", "create compute instance 2c.3g.40gb in it", "create compute instance 1c.3g.40gb in it",
		"create GPU instance 3g.40gb at 4", "create compute instance 1c.3g.40gb in it",
	}, words(p))
}

// mig-parted takes 3c.3g.40gb for 3g.40gb.
func TestAPartThatIsTheWholeIsTheInstanceItself(t *testing.T) {
	g := with(h100(), "3g.40gb", 0, 0, 3)
	require.Equal(t, []string{"create GPU instance 3g.40gb at 4", "create compute instance 3g.40gb in it"},
		words(plan(t, g, map[string]int{"3g.40gb": 1, "3c.3g.40gb": 1})))
}

func TestSurplusInUseBlocksAndNothingIsRemoved(t *testing.T) {
	g := with(with(h100(), "1g.10gb", 0, 3, 1), "1g.10gb", 1, 0, 1)
	p := plan(t, g, map[string]int{"2g.20gb": 1})
	require.NotNil(t, p.Blocked)
	require.Equal(t, setup.Wait, p.Blocked.Class)
	require.Contains(t, p.Blocked.Found, "3 clients")
}

func TestOfEqualInstancesTheIdleOneGoes(t *testing.T) {
	g := with(with(h100(), "1g.10gb", 0, 0, 1), "1g.10gb", 1, 5, 1)
	p := plan(t, g, map[string]int{"1g.10gb": 1})
	require.Nil(t, p.Blocked)
	require.Contains(t, words(p), "remove GPU instance 1 (1g.10gb at 0)")
	require.Len(t, p.Steps, 2)
}

func TestAroundFragmentsIdleInstancesAreMadeAnewAndBusyOnesStay(t *testing.T) {
	// Two 1g in the middle of each half: no 3g fits beside them.
	fragments := with(with(h100(), "1g.10gb", 1, 0, 1), "1g.10gb", 5, 0, 1)
	want := map[string]int{"3g.40gb": 1, "1g.10gb": 2}
	p := plan(t, fragments, want)
	require.Nil(t, p.Blocked)
	require.Equal(t, nvml.MIGDestroyCompute, p.Steps[0].Act.Kind)

	oneBusy := with(with(h100(), "1g.10gb", 1, 1, 1), "1g.10gb", 5, 0, 1)
	p = plan(t, oneBusy, want)
	require.Nil(t, p.Blocked)
	require.NotContains(t, words(p), "remove GPU instance 1 (1g.10gb at 1)")
	require.Contains(t, words(p), "create GPU instance 3g.40gb at 4")

	allBusy := with(with(h100(), "1g.10gb", 1, 1, 1), "1g.10gb", 5, 1, 1)
	p = plan(t, allBusy, want)
	require.NotNil(t, p.Blocked)
	require.Contains(t, p.Blocked.Found, "only once its busy instances are gone")
}

func TestAnImpossibleLayoutIsRefusedBeforeAnythingIsTouched(t *testing.T) {
	off := h100()
	off.Current, off.Pending = false, false
	dark := h100()
	dark.Current, dark.Pending = false, false
	for i := range dark.Profiles {
		dark.Profiles[i].Placements = nil
	}
	for name, c := range map[string]struct {
		gpu  nvml.MIGGPU
		want map[string]int
		says string
	}{
		"over capacity":              {h100(), map[string]int{"1g.10gb": 8}, "8 x 1g.10gb does not"},
		"fits by slices, not places": {h100(), map[string]int{"3g.40gb": 2, "1g.10gb": 1}, "not even on an empty GPU"},
		"one media engine only":      {h100(), map[string]int{"1g.10gb+me": 2}, "2 x 1g.10gb+me"},
		"a profile of another board": {h100(), map[string]int{"1g.5gb": 1}, "1g.5gb"},
		"mode off, places known":     {off, map[string]int{"4g.40gb": 2}, "2 x 4g.40gb"},
		"mode off, places unknown":   {dark, map[string]int{"7g.80gb": 2}, "2 x 7g.80gb"},
		"no MIG on this GPU":         {nvml.MIGGPU{UUID: "GPU-1"}, map[string]int{}, "without it"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Plan(entry(true, c.want), nvml.MIGHost{GPUs: []nvml.MIGGPU{c.gpu}}, Options{})
			require.ErrorIs(t, err, setup.ErrBadLayout)
			require.ErrorContains(t, err, c.says)
		})
	}
	_, err := Plan(entry(false, nil), nvml.MIGHost{GPUs: []nvml.MIGGPU{{UUID: "GPU-1"}}}, Options{})
	require.NoError(t, err, "a GPU without MIG is as declared when MIG is not wanted")
}

func TestOneLayoutCannotClaimAGPUTwiceOrOneThatIsNotThere(t *testing.T) {
	host := nvml.MIGHost{GPUs: []nvml.MIGGPU{h100()}}
	twice := append(entry(true, map[string]int{}), entry(false, nil)...)
	_, err := Plan(twice, host, Options{})
	require.ErrorContains(t, err, "selected by an earlier one")
	absent := entry(true, map[string]int{})
	absent[0].Devices = &setup.Devices{Indices: []int{0, 3}}
	_, err = Plan(absent, host, Options{})
	require.ErrorContains(t, err, "fewer GPUs")
}

func TestTheModeIsPlannedByWhatIsCurrentAndPending(t *testing.T) {
	for name, c := range map[string]struct {
		current, pending, want bool
		clients                int
		says                   string
		blocked                bool
	}{
		"on":                    {false, false, true, 0, "switch MIG mode on", false},
		"off":                   {true, true, false, 0, "switch MIG mode off", false},
		"on is pending":         {false, true, true, 0, "switch MIG mode on", false},
		"off is pending, kept":  {true, false, true, 0, "switch MIG mode on again", false},
		"busy":                  {false, false, true, 2, "switch MIG mode on", true},
		"kept while it is busy": {true, false, true, 2, "again", false},
	} {
		t.Run(name, func(t *testing.T) {
			g := h100()
			g.Current, g.Pending, g.Processes = c.current, c.pending, c.clients
			plans, err := Plan(entry(c.want, map[string]int{}), nvml.MIGHost{GPUs: []nvml.MIGGPU{g}}, Options{})
			require.NoError(t, err)
			require.Contains(t, plans[0].Steps[0].What, c.says)
			require.Equal(t, c.blocked, plans[0].Blocked != nil)
		})
	}
}

func TestInAPartitionedPoolOnlyTheModeIsSet(t *testing.T) {
	g := with(h100(), "1g.10gb", 0, 1, 1)
	plans, err := Plan(entry(true, map[string]int{"7g.80gb": 1}), nvml.MIGHost{GPUs: []nvml.MIGGPU{g}}, Options{ModeOnly: true})
	require.NoError(t, err)
	require.Empty(t, plans[0].Steps, "a tenant's partition is no surplus")
	require.Nil(t, plans[0].Blocked)
	require.Contains(t, plans[0].Notes[0], "mode only")
}

// take does to the state what the driver does, with the driver's rules.
func take(t *testing.T, g nvml.MIGGPU, a nvml.MIGAct) nvml.MIGGPU {
	g.Instances = append([]nvml.MIGInstance(nil), g.Instances...)
	at := -1
	for i, x := range g.Instances {
		if x.ID == a.Instance.ID && a.Kind != nvml.MIGCreateGPU {
			at = i
		}
	}
	switch a.Kind {
	case nvml.MIGCreateGPU:
		id := uint32(1)
		for _, x := range g.Instances {
			require.Zero(t, bits(x.Placement)&bits(a.Instance.Placement), "INSUFFICIENT_RESOURCES")
			id = max(id, x.ID+1)
		}
		a.Instance.ID = id
		g.Instances = append(g.Instances, a.Instance)
	case nvml.MIGCreateCompute:
		i := g.Instances[at]
		i.Compute = append(append([]nvml.MIGComputeInstance(nil), i.Compute...), nvml.MIGComputeInstance{ID: uint32(len(i.Compute)), Slices: a.Slices})
		g.Instances[at] = i
	case nvml.MIGDestroyCompute:
		require.Zero(t, g.Instances[at].Processes, "IN_USE")
		var left []nvml.MIGComputeInstance
		for _, c := range g.Instances[at].Compute {
			if c.ID != a.Compute {
				left = append(left, c)
			}
		}
		g.Instances[at].Compute = left
	case nvml.MIGDestroyGPU:
		require.Empty(t, g.Instances[at].Compute, "IN_USE")
		g.Instances = append(g.Instances[:at], g.Instances[at+1:]...)
	}
	return g
}

func TestAnyStateReachesAnyLayoutThatFitsAndStaysThere(t *testing.T) {
	names := []string{"1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "1g.20gb", "1g.10gb+me", "1c.3g.40gb", "1c.2g.20gb", "7g.80gb"}
	reached := 0
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 1))
		random := func() map[string]int {
			out := map[string]int{}
			for range 1 + r.IntN(3) {
				out[names[r.IntN(len(names))]] = 1 + r.IntN(3)
			}
			return out
		}
		g := h100()
		for round := range 2 { // the first layout is the second one's past
			want := random()
			for step := 0; ; step++ {
				require.Less(t, step, 100, "seed %d does not end", seed)
				plans, err := Plan(entry(true, want), nvml.MIGHost{GPUs: []nvml.MIGGPU{g}}, Options{})
				if err != nil {
					require.Zero(t, step, "seed %d: refused after something was done: %v", seed, err)
					break
				}
				if len(plans[0].Steps) == 0 {
					reached += round
					break
				}
				require.Nil(t, plans[0].Blocked)
				g = take(t, g, plans[0].Steps[0].Act)
			}
		}
	}
	require.Greater(t, reached, 50)
}

// In a partitioned pool every instance is a tenant's, with a process or
// without: to switch the mode off would remove it.
func TestInAPartitionedPoolTheModeStaysOnWhileThereAreInstances(t *testing.T) {
	modes := func(g nvml.MIGGPU, enabled bool) GPUPlan {
		t.Helper()
		plans, err := Plan(entry(enabled, nil), nvml.MIGHost{GPUs: []nvml.MIGGPU{g}}, Options{ModeOnly: true})
		require.NoError(t, err)
		return plans[0]
	}
	idle, half, busy := with(h100(), "3g.40gb", 0, 0, 3), with(h100(), "1g.10gb", 2, 0), with(h100(), "3g.40gb", 0, 2, 3)
	pending := idle
	pending.Pending = false
	for name, g := range map[string]nvml.MIGGPU{"idle": idle, "without compute instance": half, "busy": busy, "off is pending": pending} {
		p := modes(g, false)
		require.NotNil(t, p.Blocked, name)
		require.Equal(t, setup.Wait, p.Blocked.Class, name)
		require.Contains(t, p.Blocked.Error(), "belong to TensorFusion", name)
		require.Nil(t, modes(g, true).Blocked, "on changes nothing of it")
	}
	empty := modes(h100(), false)
	require.Nil(t, empty.Blocked)
	require.Equal(t, []string{"switch MIG mode off"}, words(empty))
}
