package vgpu

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/setup"
)

func entry(types map[string]int) []Entry {
	return []Entry{{Selector: setup.Selector{Devices: &setup.Devices{All: true}}, VGPUDevices: types}}
}

func done(r setup.Report) []string {
	var out []string
	for _, a := range r.Actions {
		out = append(out, a.What)
	}
	return out
}

var node = Options{Node: "gpu-1"}

func apply(t *testing.T, k *kernel, types map[string]int, o Options) setup.Report {
	t.Helper()
	r, err := k.applier().Apply(t.Context(), entry(types), o)
	require.NoError(t, err)
	return r
}

func TestVirtualGPUsAreMadeInTheExactOrderAndASecondRunDoesNothing(t *testing.T) {
	yes := true
	o := Options{Node: "gpu-1", Scheduler: "fixed-share", Heterogeneous: &yes}
	t.Run("vendor VFIO", func(t *testing.T) {
		k, _ := newKernel(t, Vendor, 4)
		r := apply(t, k, map[string]int{"H100-40C": 2}, o)
		require.Equal(t, []string{
			"switch heterogeneous vGPUs on", "set the scheduler to fixed-share (is best-effort)", "switch its 4 virtual functions on",
			"create H100-40C on " + k.vf(0), "create H100-40C on " + k.vf(1),
		}, done(r))
		require.Equal(t, []string{"sriov-manage " + k.pci, vendorFile(k.vf(0)) + "=1003", vendorFile(k.vf(1)) + "=1003"}, k.writes)
		require.Len(t, r.Devices, 2)
		require.Empty(t, apply(t, k, map[string]int{"H100-40C": 2}, o).Actions)
	})
	t.Run("mdev on virtual functions", func(t *testing.T) {
		k, _ := newKernel(t, MDev, 4)
		r := apply(t, k, map[string]int{"H100-20C": 3}, node)
		require.Len(t, r.Actions, 4)
		for n, d := range r.Devices {
			require.Equal(t, ID("gpu-1", k.pci, "H100-20C", n), d.UUID)
		}
		require.Empty(t, apply(t, k, map[string]int{"H100-20C": 3}, node).Actions)
	})
	t.Run("mdev on the physical function", func(t *testing.T) {
		k, _ := newKernel(t, MDev, 0)
		r := apply(t, k, map[string]int{"H100-20C": 4}, node)
		require.Len(t, r.Actions, 4)
		require.Empty(t, apply(t, k, map[string]int{"H100-20C": 4}, node).Actions)
	})
}

func TestTheIDsAreDeterministicAndDifferByNode(t *testing.T) {
	require.Equal(t, ID("a", "0000:01:00.0", "H100-10C", 0), ID("a", "0000:01:00.0", "H100-10C", 0))
	seen := map[string]bool{}
	for _, n := range []string{"a", "b"} {
		for k := range 3 {
			seen[ID(n, "0000:01:00.0", "H100-10C", k)] = true
		}
	}
	require.Len(t, seen, 6)
	// Another build must find what this one made.
	require.Equal(t, "227ade0d-3675-5297-a30d-54517cb79dc6", ID("gpu-1", "0000:01:00.0", "H100-10C", 0))
}

func TestVirtualFunctionsThatWereLeftHalfOnAreSwitchedOnAgain(t *testing.T) {
	for _, framework := range []string{Vendor, MDev} {
		t.Run(framework, func(t *testing.T) {
			k, _ := newKernel(t, framework, 4)
			k.cutOff = true
			_, err := k.applier().Apply(t.Context(), entry(map[string]int{"H100-20C": 1}), node)
			require.Equal(t, setup.Retry, setup.ClassOf(err), "%v", err)
			r := apply(t, k, map[string]int{"H100-20C": 1}, node)
			require.Equal(t, "switch its 4 virtual functions on", r.Actions[0].What)
			require.Len(t, r.Devices, 1)
		})
	}
}

func TestAnotherLayoutReleasesTheSurplusFirst(t *testing.T) {
	for _, framework := range []string{Vendor, MDev} {
		t.Run(framework, func(t *testing.T) {
			k, _ := newKernel(t, framework, 4)
			apply(t, k, map[string]int{"H100-40C": 2}, node)
			preview, err := k.applier().Preview(t.Context(), entry(map[string]int{"H100-20C": 4}), node)
			require.NoError(t, err)
			require.Len(t, preview.Actions, 6)
			r := apply(t, k, map[string]int{"H100-20C": 4}, node)
			require.Len(t, r.Actions, 6)
			require.Contains(t, r.Actions[0].What, "release H100-40C")
			require.Contains(t, r.Actions[1].What, "release H100-40C")
			require.Len(t, r.Devices, 4)
			require.Empty(t, apply(t, k, map[string]int{}, node).Devices)
		})
	}
}

func TestWhatAVirtualMachineUsesIsNeitherReleasedNorReplaced(t *testing.T) {
	t.Run("vendor VFIO: never written to", func(t *testing.T) {
		k, _ := newKernel(t, Vendor, 4)
		apply(t, k, map[string]int{"H100-20C": 2}, node)
		k.attach(900, k.vf(1), k.group(k.vf(1)))
		k.writes = nil
		_, err := k.applier().Apply(t.Context(), entry(map[string]int{"H100-40C": 1}), node)
		require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
		require.Empty(t, k.writes)

		r := apply(t, k, map[string]int{"H100-20C": 1}, node)
		require.Equal(t, []string{"release H100-20C on " + k.vf(0)}, done(r), "of equals the idle one goes")
	})
	t.Run("vendor VFIO by character device", func(t *testing.T) {
		k, _ := newKernel(t, Vendor, 4)
		apply(t, k, map[string]int{"H100-20C": 1}, node)
		require.NoError(t, os.MkdirAll(k.path(k.device(k.vf(0))+"/vfio-dev/vfio3"), 0o755))
		k.attach(900, k.vf(0), "devices/vfio3")
		_, err := k.applier().Apply(t.Context(), entry(map[string]int{}), node)
		require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
	})
	t.Run("vendor VFIO, blind", func(t *testing.T) {
		k, _ := newKernel(t, Vendor, 4)
		apply(t, k, map[string]int{"H100-20C": 1}, node)
		require.NoError(t, os.RemoveAll(k.path("proc")))
		k.writes = nil
		_, err := k.applier().Apply(t.Context(), entry(map[string]int{}), node)
		require.Equal(t, setup.Stop, setup.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, "processes visible")
		require.Empty(t, k.writes)
	})
	t.Run("mdev: the kernel says so", func(t *testing.T) {
		k, _ := newKernel(t, MDev, 4)
		r := apply(t, k, map[string]int{"H100-20C": 1}, node)
		k.open[r.Devices[0].UUID] = true // by a process that we can't see
		_, err := k.applier().Apply(t.Context(), entry(map[string]int{}), node)
		require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
		delete(k.open, r.Devices[0].UUID)
		require.Empty(t, apply(t, k, map[string]int{}, node).Devices)
	})
}

func TestOfEqualDevicesTheOneThatRefitMadeStays(t *testing.T) {
	k, _ := newKernel(t, MDev, 4)
	require.NoError(t, k.EnableVFs(t.Context(), k.pci))
	const foreign = "11111111-1111-4111-8111-111111111111"
	require.NoError(t, k.create(k.vf(0), foreign, 1002))
	require.NoError(t, k.create(k.vf(1), ID("gpu-1", k.pci, "H100-20C", 0), 1002))
	r := apply(t, k, map[string]int{"H100-20C": 1}, node)
	require.Equal(t, []string{"release H100-20C " + foreign + " on " + k.vf(0)}, done(r))
}

func TestProtectedOnesStay(t *testing.T) {
	for name, c := range map[string]struct {
		framework string
		protected func(k *kernel, made []gpu.Device) string
	}{
		"a virtual function":                        {Vendor, func(k *kernel, _ []gpu.Device) string { return k.vf(1) }},
		"a virtual function, in capitals":           {Vendor, func(k *kernel, _ []gpu.Device) string { return strings.ToUpper(k.vf(1)) }},
		"a virtual function with a mediated device": {MDev, func(k *kernel, _ []gpu.Device) string { return k.vf(1) }},
		"a mediated device":                         {MDev, func(_ *kernel, made []gpu.Device) string { return made[1].UUID }},
		"a mediated device, in capitals":            {MDev, func(_ *kernel, made []gpu.Device) string { return strings.ToUpper(made[1].UUID) }},
	} {
		t.Run(name, func(t *testing.T) {
			k, _ := newKernel(t, c.framework, 4)
			made := apply(t, k, map[string]int{"H100-20C": 2}, node).Devices
			o := Options{Node: "gpu-1", Protected: []string{c.protected(k, made)}}
			r := apply(t, k, map[string]int{}, o)
			require.Len(t, r.Actions, 1)
			require.Equal(t, made[1:], r.Devices, "the other one went")
			require.Contains(t, r.Notes[0], "is surplus and protected: it stays")
			require.Empty(t, apply(t, k, map[string]int{"H100-20C": 1}, o).Actions, "it counts for one that is wanted")
		})
	}
}

func TestASetUpEndedFromOutsideAtAnyStepIsFinishedByTheNextRun(t *testing.T) {
	for _, framework := range []string{Vendor, MDev} {
		t.Run(framework, func(t *testing.T) {
			k, _ := newKernel(t, framework, 4)
			for runs := 0; ; runs++ {
				require.Less(t, runs, 10)
				ctx, kill := context.WithCancel(t.Context())
				a := k.applier()
				a.Progress = func(string) { kill() } // the step is taken, its result is not seen
				_, err := a.Apply(ctx, entry(map[string]int{"H100-20C": 3}), node)
				kill()
				if err == nil {
					break
				}
				require.ErrorIs(t, err, context.Canceled)
				if runs == 0 && framework == Vendor {
					require.Equal(t, []string{"sriov-manage " + k.pci}, k.writes)
				}
			}
			n := 0
			for _, slot := range k.made {
				n += len(slot)
			}
			require.Equal(t, 3, n)
		})
	}
}

func TestModesAreSetOnlyWhileNoVirtualGPUIsActive(t *testing.T) {
	k, h := newKernel(t, Vendor, 4)
	require.NoError(t, h.Set("vgpu.active", "1"))
	_, err := k.applier().Apply(t.Context(), entry(map[string]int{}), Options{Node: "gpu-1", Scheduler: "equal-share"})
	require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
	require.NoError(t, h.Set("vgpu.active", "0"))
	r := apply(t, k, map[string]int{}, Options{Node: "gpu-1", Scheduler: "equal-share"})
	require.Len(t, r.Actions, 1)
	policy, err := h.Get("gpu.0.vgpu.scheduler.policy")
	require.NoError(t, err)
	require.Equal(t, "2", policy)
}

func TestAnImpossibleLayoutIsRefusedBeforeAnythingIsTouched(t *testing.T) {
	for name, c := range map[string]struct {
		types map[string]int
		set   []string
		o     Options
		says  string
	}{
		"no type of this GPU":           {map[string]int{"L40S-12Q": 1}, nil, node, "H100-10C"},
		"more than virtual functions":   {map[string]int{"H100-10C": 5}, nil, node, "at most 4"},
		"MIG-backed without MIG":        {map[string]int{"H100-1-10C": 1}, nil, node, "MIG mode on"},
		"time-sliced in MIG mode":       {map[string]int{"H100-10C": 1}, []string{"gpu.0.mig.current", "1"}, node, "MIG mode off"},
		"no vGPU host":                  {map[string]int{"H100-10C": 1}, []string{"vgpu.virtualization", "0"}, node, "host vGPU mode"},
		"a scheduler nobody knows":      {map[string]int{}, nil, Options{Scheduler: "fair"}, `"fair"`},
		"heterogeneous in MIG mode":     {map[string]int{}, []string{"gpu.0.mig.current", "1"}, Options{Heterogeneous: ptr(true)}, "heterogeneous"},
		"scheduler of a driver without": {map[string]int{}, []string{"fail.nvmlDeviceGetVgpuSchedulerState", "3"}, Options{Scheduler: "equal-share"}, "without a vGPU scheduler"},
	} {
		t.Run(name, func(t *testing.T) {
			k, h := newKernel(t, Vendor, 4)
			if len(c.set) > 0 {
				require.NoError(t, h.Set(c.set...))
			}
			_, err := k.applier().Apply(t.Context(), entry(c.types), c.o)
			require.ErrorIs(t, err, setup.ErrBadLayout)
			require.ErrorContains(t, err, c.says)
			require.Empty(t, k.writes)
		})
	}
	t.Run("a type that does not fit beside the others", func(t *testing.T) {
		k, _ := newKernel(t, Vendor, 4)
		_, err := k.applier().Apply(t.Context(), entry(map[string]int{"H100-80C": 2}), node)
		require.ErrorContains(t, err, "room for H100-80C")
		require.Equal(t, setup.Stop, setup.ClassOf(err))
	})
	t.Run("a bare CUDA host with nothing declared", func(t *testing.T) {
		k, h := newKernel(t, Vendor, 4)
		require.NoError(t, h.Set("vgpu.virtualization", "0"))
		require.Empty(t, apply(t, k, map[string]int{}, node).Actions)
	})
	t.Run("somebody else's number of virtual functions", func(t *testing.T) {
		k, _ := newKernel(t, Vendor, 4)
		require.NoError(t, k.EnableVFs(t.Context(), k.pci))
		k.file(k.device(k.pci)+"/sriov_numvfs", "2")
		_, err := k.applier().Apply(t.Context(), entry(map[string]int{"H100-10C": 1}), node)
		require.ErrorContains(t, err, "another number")
	})
}

func ptr[T any](v T) *T { return &v }

func TestAReadOnlyHostIsPlannedAndNeverChanged(t *testing.T) {
	k, _ := newKernel(t, Vendor, 4)
	a := k.applier()
	a.Writer = ReadOnly{}
	r, err := a.Preview(t.Context(), entry(map[string]int{"H100-40C": 2}), node)
	require.NoError(t, err)
	require.Equal(t, []string{"switch its 4 virtual functions on", "create 2 x H100-40C on them"}, done(r))
	_, err = a.Apply(t.Context(), entry(map[string]int{"H100-40C": 2}), node)
	require.ErrorIs(t, err, setup.ErrRefused)
}
