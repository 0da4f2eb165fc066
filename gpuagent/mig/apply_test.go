package mig

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// host is a fake host of one H100 (80 GB); MIG mode on where said.
func host(t *testing.T, on bool, state ...string) *fakes.Host {
	t.Helper()
	h := fakes.NewHost(t)
	require.NoError(t, h.Set(append([]string{"gpus", "1", "model", "h100"}, state...)...))
	if on {
		require.NoError(t, h.Set("gpu.0.mig.current", "1", "gpu.0.mig.pending", "1"))
	}
	return h
}

func apply(t *testing.T, a Applier, devices map[string]int, o Options) (setup.Report, error) {
	t.Helper()
	if a.Host == nil {
		a.Host = nvml.Setters{}
	}
	return a.Apply(t.Context(), entry(true, devices), o)
}

func done(r setup.Report) []string {
	var out []string
	for _, a := range r.Actions {
		out = append(out, a.What)
	}
	return out
}

var mixed = map[string]int{"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}

func TestALayoutIsMadeThroughTheDriverAndASecondRunDoesNothing(t *testing.T) {
	host(t, false)
	r, err := apply(t, Applier{}, mixed, Options{})
	require.NoError(t, err)
	require.Equal(t, "switch MIG mode on", r.Actions[0].What)
	require.Len(t, r.Actions, 9)
	require.Len(t, r.Devices, 4)
	for _, d := range r.Devices {
		require.True(t, strings.HasPrefix(d.UUID, "MIG-"), d.UUID)
	}

	again, err := apply(t, Applier{Host: ReadOnly{nvml.Setters{}}}, mixed, Options{})
	require.NoError(t, err, "a host that refuses every change is asked for none")
	require.Empty(t, again.Actions)
	require.Equal(t, r.Devices, again.Devices, "the MIG devices keep their UUIDs")
}

func TestWhatIsWantedAlreadyKeepsItsUUIDWhenTheRestChanges(t *testing.T) {
	host(t, true)
	before, err := apply(t, Applier{}, map[string]int{"3g.40gb": 1, "1g.10gb": 3}, Options{})
	require.NoError(t, err)
	after, err := apply(t, Applier{}, map[string]int{"3g.40gb": 1, "2g.20gb": 1}, Options{})
	require.NoError(t, err)
	kept := func(r setup.Report) string {
		for _, d := range r.Devices {
			if d.MemoryBytes > 30<<30 {
				return d.UUID
			}
		}
		return ""
	}
	require.NotEmpty(t, kept(before))
	require.Equal(t, kept(before), kept(after))
}

func TestASetUpEndedFromOutsideAtAnyStepIsRepairedByTheNextRun(t *testing.T) {
	h := host(t, true)
	// A run that is ended after each step, so also between a GPU instance and
	// its compute instance.
	for runs := 0; ; runs++ {
		require.Less(t, runs, 20)
		ctx, kill := context.WithCancel(t.Context())
		steps := 0
		a := Applier{Host: nvml.Setters{}, Progress: func(string) {
			if steps++; steps == 2 {
				kill()
			}
		}}
		_, err := a.Apply(ctx, entry(true, mixed), Options{})
		kill()
		if err == nil {
			break
		}
		require.ErrorIs(t, err, context.Canceled)
	}
	text, err := os.ReadFile(h.StateFile())
	require.NoError(t, err)
	require.Equal(t, 4, strings.Count(string(text), "gpu.0.gi."))
	require.Equal(t, 4, strings.Count(string(text), "gpu.0.ci."))
}

func TestAHalfMadeInstanceIsRepairedFirst(t *testing.T) {
	host(t, true, "gpu.0.gi.3", "9:4:4")
	r, err := apply(t, Applier{}, mixed, Options{})
	require.NoError(t, err)
	require.Equal(t, "create the missing compute instance 3g.40gb in GPU instance 3 (3g.40gb at 4)", r.Actions[0].What)
	require.Len(t, r.Actions, 7)
}

func TestAForeignInstanceGoesOnlyWhenItIsIdle(t *testing.T) {
	h := host(t, true, "gpu.0.gi.1", "0:0:8", "gpu.0.ci.1.0", "4:0:7", "gpu.0.processes.compute", "4711:100:1:0")
	r, err := apply(t, Applier{}, mixed, Options{})
	require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "has 1 client")
	require.Empty(t, r.Actions)

	require.NoError(t, h.Set("gpu.0.processes.compute", ""))
	r, err = apply(t, Applier{}, mixed, Options{})
	require.NoError(t, err)
	require.Contains(t, done(r), "remove GPU instance 1 (7g.80gb at 0)")
}

// It is looked at like any other: gone when it is idle, told when it is not.
func TestAForeignInstanceMadeSinceThePlanIsPlannedFor(t *testing.T) {
	for client, want := range map[string]string{"": "remove GPU instance 1 (2g.20gb at 0)", "4711:100:1:0": "1 client"} {
		h := host(t, true)
		steps := 0
		r, err := apply(t, Applier{Progress: func(string) {
			if steps++; steps == 1 {
				require.NoError(t, h.Set("gpu.0.gi.1", "14:0:2", "gpu.0.ci.1.0", "1:0:2", "gpu.0.processes.compute", client))
			}
		}}, map[string]int{"7g.80gb": 1}, Options{})
		if client == "" {
			require.NoError(t, err)
			require.Contains(t, done(r), want)
			continue
		}
		require.Equal(t, setup.Wait, setup.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, want)
		require.Empty(t, r.Actions)
	}
}

// Once there are instances the driver hides row remapping: plan and apply
// refuse before, in the same words.
func TestBadRowsAreRefusedByPlanAndApplyAlike(t *testing.T) {
	for key, says := range map[string]string{"gpu.0.remap.failed": "return the card", "gpu.0.remap.pending": "waits for a reset"} {
		for name, on := range map[string]bool{"the mode is off": false, "the mode is on, nothing made": true} {
			t.Run(key+", "+name, func(t *testing.T) {
				// Clients block too, but waiting for them mends no row.
				h := host(t, on, key, "1", "gpu.0.processes.compute", "4711:100")
				before, err := os.ReadFile(h.StateFile())
				require.NoError(t, err)
				planned, err := Preview(t.Context(), nvml.Setters{}, entry(true, mixed), Options{})
				require.Equal(t, setup.Stop, setup.ClassOf(err), "%v", err)
				require.ErrorContains(t, err, "memory rows in order before MIG instances hide them")
				require.ErrorContains(t, err, says)
				require.NotEmpty(t, planned.Actions, "the plan is told all the same")
				r, refused := apply(t, Applier{}, mixed, Options{})
				require.EqualError(t, refused, err.Error())
				require.Empty(t, r.Actions)
				after, err := os.ReadFile(h.StateFile())
				require.NoError(t, err)
				require.Equal(t, string(before), string(after))
			})
		}
	}
	t.Run("the command", func(t *testing.T) {
		host(t, false, "gpu.0.remap.failed", "1")
		out, _, end, code := newPerson(t, "{devices: all, mig-enabled: true, mig-devices: {7g.80gb: 1}}").types("plan")
		require.Equal(t, setup.ExitError, code)
		require.Contains(t, out, "switch MIG mode on")
		require.Contains(t, end, "return the card")
	})
	t.Run("what waiting does not mend is told before what it does", func(t *testing.T) {
		host(t, false, "gpus", "2", "gpu.0.processes.compute", "4711:100", "gpu.1.remap.failed", "1")
		_, err := apply(t, Applier{}, mixed, Options{})
		require.ErrorContains(t, err, "return the card")
	})
	t.Run("a GPU of which no instance is made keeps its rows to itself", func(t *testing.T) {
		host(t, false, "gpu.0.remap.failed", "1")
		r, err := Applier{Host: nvml.Setters{}}.Apply(t.Context(), entry(false, nil), Options{})
		require.NoError(t, err)
		require.Empty(t, r.Actions)
	})
}

func TestAfterARebootTheLayoutIsMadeAgain(t *testing.T) {
	h := host(t, true)
	_, err := apply(t, Applier{}, mixed, Options{})
	require.NoError(t, err)
	require.NoError(t, h.Reboot())
	r, err := apply(t, Applier{}, mixed, Options{})
	require.NoError(t, err)
	require.Len(t, r.Devices, 4)
	require.Equal(t, "switch MIG mode on", r.Actions[0].What, "Hopper forgets the mode")
}

func TestWhatTheDriverRefusesIsClassed(t *testing.T) {
	for name, c := range map[string]struct {
		key, value string
		class      setup.Class
		says       string
	}{
		"no room":          {"gpu.0.fail.nvmlDeviceCreateGpuInstanceWithPlacement", "23", setup.Stop, "no room"},
		"not root":         {"not.root", "1", setup.Stop, "as root"},
		"lost":             {"gpu.0.fail.nvmlDeviceGetMigMode", "15", setup.Stop, "left the bus"},
		"reset required":   {"gpu.0.fail.nvmlDeviceCreateGpuInstanceWithPlacement", "16", setup.Stop, "must be reset"},
		"busy":             {"gpu.0.fail.nvmlGpuInstanceCreateComputeInstance", "19", setup.Wait, "clients"},
		"driver internals": {"gpu.0.fail.nvmlGpuInstanceCreateComputeInstance", "999", setup.Retry, "UNKNOWN"},
		"not loaded":       {"module.driver", "none", setup.Stop, "kernel module"},
		"half an upgrade":  {"module.driver", "570.00.01", setup.Stop, "driver upgrade"},
		"crash":            {"crash.nvmlDeviceCreateGpuInstanceWithPlacement", "1", setup.Stop, "ended the child"},
	} {
		t.Run(name, func(t *testing.T) {
			host(t, true, c.key, c.value)
			_, err := apply(t, Applier{}, mixed, Options{})
			require.Equal(t, c.class, setup.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, c.says)
		})
	}
	t.Run("no library", func(t *testing.T) {
		require.NoError(t, host(t, true).RemoveLibraries())
		_, err := apply(t, Applier{}, mixed, Options{})
		require.ErrorContains(t, err, "driver's libraries")
	})
	t.Run("an old library", func(t *testing.T) {
		require.NoError(t, host(t, true).Swap(fakes.Without("nvmlDeviceCreateGpuInstanceWithPlacement")))
		_, err := apply(t, Applier{}, mixed, Options{})
		require.ErrorContains(t, err, "nvmlDeviceCreateGpuInstanceWithPlacement")
	})
}

func TestACreationThatFailsAtAnyCallIsFinishedByTheNextRun(t *testing.T) {
	for function, done := range map[string]func(k int) int{
		// A GPU instance and its compute instance are made before the next.
		"nvmlDeviceCreateGpuInstanceWithPlacement": func(k int) int { return 2 * (k - 1) },
		"nvmlGpuInstanceCreateComputeInstance":     func(k int) int { return 2*k - 1 },
	} {
		for k := 1; k <= 4; k++ {
			t.Run(fmt.Sprintf("%s, call %d", function, k), func(t *testing.T) {
				h := host(t, true, "gpu.0.fail."+function, fmt.Sprintf("999@%d", k))
				r, err := apply(t, Applier{}, mixed, Options{})
				require.Error(t, err)
				require.Len(t, r.Actions, done(k), "what was done is told beside the error")
				made, err := nvml.Setters{}.ReadMIG(t.Context())
				require.NoError(t, err)
				r, err = apply(t, Applier{}, mixed, Options{})
				require.NoError(t, err)
				require.Len(t, r.Actions, 8-done(k), "nothing is made twice")
				if done(k)%2 == 1 {
					require.Contains(t, r.Actions[0].What, "missing compute instance", "what is half made comes first")
				}
				require.Len(t, r.Devices, 4)
				require.Subset(t, r.Devices, made.GPUs[0].Devices)
				fault, err := h.Get("gpu.0.fail." + function)
				require.NoError(t, err)
				require.Empty(t, fault)
			})
		}
	}
}

func TestAReadOnlyHostIsPlannedAndNeverChanged(t *testing.T) {
	h := host(t, true)
	before, err := os.ReadFile(h.StateFile())
	require.NoError(t, err)
	r, err := Preview(t.Context(), nvml.Setters{}, entry(true, mixed), Options{})
	require.NoError(t, err)
	require.Len(t, r.Actions, 8)
	_, err = apply(t, Applier{Host: ReadOnly{nvml.Setters{}}}, mixed, Options{})
	require.ErrorIs(t, err, setup.ErrRefused)
	after, err := os.ReadFile(h.StateFile())
	require.NoError(t, err)
	require.Equal(t, string(before), string(after))
}
