package vgpu

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// real is the applier with the writer of the product on the kernel's files.
func (k *kernel) real() Applier {
	return Applier{Root: k.root, Driver: nvml.Setters{}, Writer: Sysfs{k.root}}
}

// holds is the type that a virtual function holds.
func (k *kernel) holds(vf string) string {
	text, err := os.ReadFile(k.path(vendorFile(vf)))
	require.NoError(k.t, err)
	return strings.TrimSpace(string(text))
}

// The kernel is not known to refuse the release of a function in use.
func TestAMachineStartedBetweenThePlanAndTheReleaseKeepsItsGPU(t *testing.T) {
	k, _ := newKernel(t, Vendor, 4)
	require.NoError(t, k.EnableVFs(t.Context(), k.pci))
	require.NoError(t, k.set(k.vf(0), "1002"))
	a := k.real()
	a.Progress = func(step string) {
		require.Contains(t, step, "release H100-20C")
		k.attach(4711, k.vf(0), k.group(k.vf(0)))
	}
	r, err := a.Apply(t.Context(), entry(map[string]int{}), node)
	require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "stop the virtual machine")
	require.Empty(t, r.Actions)
	require.Equal(t, "1002", k.holds(k.vf(0)))

	k.detach(4711, k.vf(0))
	require.NoError(t, os.RemoveAll(k.path("proc")))
	require.ErrorIs(t, Sysfs{k.root}.SetVF(t.Context(), k.vf(0), freeVF, "1002"), syscall.EACCES, "who can't see has not seen that it is free")
	require.Equal(t, "1002", k.holds(k.vf(0)))

	require.NoError(t, os.MkdirAll(k.path("proc"), 0o755))
	require.NoError(t, Sysfs{k.root}.SetVF(t.Context(), k.vf(0), freeVF, "1002"))
	// A plain file keeps the rest of what stood there.
	require.True(t, strings.HasPrefix(k.holds(k.vf(0)), freeVF), "once nobody has it open it is released")
}

func TestAFunctionThatAnotherHasTakenSinceThePlanIsNotOverwritten(t *testing.T) {
	k, _ := newKernel(t, Vendor, 4)
	require.NoError(t, k.EnableVFs(t.Context(), k.pci))
	w := Sysfs{k.root}
	require.NoError(t, k.set(k.vf(0), "1003"))
	require.ErrorIs(t, w.SetVF(t.Context(), k.vf(0), "1002", freeVF), syscall.ESTALE)
	require.ErrorIs(t, w.SetVF(t.Context(), k.vf(0), freeVF, "1002"), syscall.ESTALE)
	require.Equal(t, "1003", k.holds(k.vf(0)))
	require.NoError(t, w.SetVF(t.Context(), k.vf(0), "1003", freeVF), "an earlier try, whose reply was lost")

	// Apply plans again: what another has made since is looked at like anything.
	k, _ = newKernel(t, Vendor, 4)
	require.NoError(t, k.EnableVFs(t.Context(), k.pci))
	a, steps := k.applier(), 0
	a.Progress = func(string) {
		if steps++; steps == 1 {
			require.NoError(t, k.set(k.vf(0), "1003"))
		}
	}
	r, err := a.Apply(t.Context(), entry(map[string]int{"H100-20C": 1}), node)
	require.NoError(t, err)
	var did []string
	for _, action := range r.Actions {
		did = append(did, action.What)
	}
	require.Equal(t, []string{"release H100-40C on " + k.vf(0), "create H100-20C on " + k.vf(0)}, did)
}
