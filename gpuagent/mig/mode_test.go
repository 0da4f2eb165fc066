package mig

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

func TestInAPartitionedPoolNoTenantsPartitionIsLostWithTheMode(t *testing.T) {
	off := entry(false, nil)
	h := host(t, true, "gpu.0.gi.1", "9:0:4", "gpu.0.ci.1.0", "2:0:3")
	before, err := os.ReadFile(h.StateFile())
	require.NoError(t, err)
	_, err = Applier{Host: nvml.Setters{}}.Apply(t.Context(), off, Options{ModeOnly: true})
	require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
	after, err := os.ReadFile(h.StateFile())
	require.NoError(t, err)
	require.Equal(t, string(before), string(after))

	t.Run("one made between the plan and the switch", func(t *testing.T) {
		h := host(t, true)
		made := func(string) { require.NoError(t, h.Set("gpu.0.gi.1", "9:0:4", "gpu.0.ci.1.0", "2:0:3")) }
		r, err := Applier{Host: nvml.Setters{}, Progress: made}.Apply(t.Context(), off, Options{ModeOnly: true})
		require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, "to switch MIG mode off")
		require.Empty(t, r.Actions)
		partition, err := h.Get("gpu.0.gi.1")
		require.NoError(t, err)
		require.Equal(t, "9:0:4", partition)
		pending, err := h.Get("gpu.0.mig.pending")
		require.NoError(t, err)
		require.Equal(t, "1", pending, "the driver was not asked for another mode")
	})
	t.Run("one made between the switch and the reset", func(t *testing.T) {
		h := host(t, true, "gpu.0.mig.needs.reset", "1")
		a := Applier{Host: meanwhile{func() { require.NoError(t, h.Set("gpu.0.gi.1", "9:0:4")) }},
			Reset: func(context.Context, ...string) error { t.Error("the GPU was reset"); return nil }}
		_, err := a.Apply(t.Context(), off, Options{ModeOnly: true})
		require.ErrorContains(t, err, "to reset the GPU")
	})
}

// meanwhile is a host to which something happens right after each change.
type meanwhile struct{ happens func() }

func (m meanwhile) ReadMIG(ctx context.Context) (nvml.MIGHost, error) {
	return nvml.Setters{}.ReadMIG(ctx)
}

func (m meanwhile) ActMIG(ctx context.Context, a nvml.MIGAct) (nvml.MIGOutcome, error) {
	out, err := nvml.Setters{}.ActMIG(ctx, a)
	if err != nil {
		return out, err
	}
	m.happens()
	now, err := m.ReadMIG(ctx)
	out.GPU = now.GPUs[out.GPU.Index]
	return out, err
}

// Outside a partitioned pool idle instances go with the mode, but only those
// that the action named.
func TestAnInstanceThatComesBeforeTheModeGoesIsNamedFirst(t *testing.T) {
	h := host(t, true, "gpu.0.gi.1", "9:0:4")
	steps := 0
	r, err := Applier{Host: nvml.Setters{}, Progress: func(string) {
		if steps++; steps == 1 {
			require.NoError(t, h.Set("gpu.0.gi.2", "9:4:4"))
		}
	}}.Apply(t.Context(), entry(false, nil), Options{})
	require.NoError(t, err)
	require.Equal(t, []string{"switch MIG mode off; its 2 GPU instances go with it"}, done(r))
}

func TestInAPartitionedPoolTheDriverIsAskedForTheModeOnly(t *testing.T) {
	h := host(t, false)
	r, err := apply(t, Applier{}, mixed, Options{ModeOnly: true})
	require.NoError(t, err)
	require.Equal(t, []string{"switch MIG mode on"}, done(r))
	require.NoError(t, h.Set("gpu.0.gi.1", "19:0:1", "gpu.0.ci.1.0", "0:0:1"))
	r, err = apply(t, Applier{}, mixed, Options{ModeOnly: true})
	require.NoError(t, err)
	require.Empty(t, r.Actions)
}

func TestABusyGPUKeepsItsMode(t *testing.T) {
	h := host(t, false, "gpu.0.processes.compute", "4711:100")
	_, err := apply(t, Applier{}, mixed, Options{})
	require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
	mode, err := h.Get("gpu.0.mig.pending")
	require.NoError(t, err)
	require.Empty(t, mode, "SetMigMode was not called")
}

func TestAModeThatWaitsForIdlenessIsAskedForAgain(t *testing.T) {
	h := host(t, false, "gpu.0.fail.mig.activation", "19x3")
	for range 3 {
		r, err := apply(t, Applier{}, mixed, Options{})
		require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
		require.Equal(t, []string{"switch MIG mode on"}, done(r))
		pending, err := h.Get("gpu.0.mig.pending")
		require.NoError(t, err)
		require.Equal(t, "1", pending)
	}
	r, err := apply(t, Applier{}, mixed, Options{})
	require.NoError(t, err)
	require.Equal(t, "switch MIG mode on", r.Actions[0].What)
}

func TestAResetIsReportedAndDoneOnlyWhereThePlanAllowsIt(t *testing.T) {
	h := host(t, false, "gpu.0.mig.needs.reset", "1")
	r, err := apply(t, Applier{}, mixed, Options{})
	require.NoError(t, err)
	require.Len(t, r.Needs, 1)
	require.Equal(t, gpu.NeedsReset, r.Needs[0].Kind)
	require.Len(t, r.Actions, 1, "the mode is pending, no instance was made")

	// A reset that does not help ends in a need for a reboot, not in a loop.
	r, err = apply(t, Applier{Reset: func(context.Context, ...string) error { return errors.New("GPU is in use") }}, mixed, Options{})
	require.NoError(t, err)
	require.Equal(t, gpu.NeedsReboot, r.Needs[0].Kind)

	resets := 0
	r, err = apply(t, Applier{Reset: func(_ context.Context, pci ...string) error {
		resets++
		require.Len(t, pci, 1)
		return h.ResetGPU(0)
	}}, mixed, Options{})
	require.NoError(t, err)
	require.Equal(t, 1, resets)
	require.Empty(t, r.Needs)
	require.Len(t, r.Devices, 4)
}

// Between the change of mode and the reset a client may have come.
func TestAGPUInUseIsNotReset(t *testing.T) {
	const client = "gpu.0.processes.compute"
	h := host(t, false, "gpu.0.mig.needs.reset", "1")
	never := func(context.Context, ...string) error { t.Error("the GPU was reset"); return nil }
	a := Applier{Host: meanwhile{func() { require.NoError(t, h.Set(client, "4711:100")) }}, Reset: never}
	r, err := apply(t, a, mixed, Options{})
	require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "found 1 client; drain the GPU")
	require.Equal(t, []string{"switch MIG mode on"}, done(r))
	require.Empty(t, r.Needs)

	// It may come after that look, too: then the reset refuses.
	require.NoError(t, h.Set(client, ""))
	refused := func(context.Context, ...string) error {
		require.NoError(t, h.Set(client, "4711:100"))
		return errors.New("in use by another client")
	}
	r, err = apply(t, Applier{Reset: refused}, mixed, Options{})
	require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
	require.Empty(t, r.Needs, "nobody is sent to reboot the host")
}

func TestAResetThatIsEndedFromOutsideIsNoneThatDidNotHelp(t *testing.T) {
	host(t, false, "gpu.0.mig.needs.reset", "1")
	tools := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(tools, "nvidia-smi"), []byte("#!/bin/sh\nexec sleep 1000\n"), 0o755))
	t.Setenv("PATH", tools+":"+os.Getenv("PATH"))
	ctx, abort := context.WithCancel(t.Context())
	defer abort()
	r, err := Applier{Host: nvml.Setters{}, Reset: Reset, Progress: func(step string) {
		if strings.HasSuffix(step, ": reset") {
			abort()
		}
	}}.Apply(ctx, entry(true, mixed), Options{})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, setup.Retry, setup.ClassOf(err))
	require.Empty(t, r.Needs, "nobody is sent to reboot the host")
}
