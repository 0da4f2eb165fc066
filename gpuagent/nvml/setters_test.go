package nvml

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/fakes"
)

// Whoever asks may have looked long ago, and the driver gives ids out again: it
// is asked for a change only where the world is as the change takes it to be.
func TestADriverIsNotAskedForAChangeThatTheWorldNoLongerFits(t *testing.T) {
	const gpu = "GPU-00000000-0000-4000-8000-000000000000"
	client := []string{"gpu.0.processes.compute", "4711:100:1:0"}
	first := MIGInstance{ID: 1, ProfileID: 9, Placement: MIGPlacement{0, 4}}
	another := MIGInstance{ID: 1, ProfileID: 9, Placement: MIGPlacement{4, 4}}
	for name, c := range map[string]struct {
		act   MIGAct
		state []string
		code  Code // 0: no error, then the act is
		stale bool // to be planned again, or done already
	}{
		"the mode is so":                    {MIGAct{Kind: MIGSetMode, Enable: true}, nil, 0, false},
		"the mode, a client has come":       {MIGAct{Kind: MIGSetMode, Lost: []MIGInstance{first, {ID: 2, ProfileID: 9, Placement: MIGPlacement{4, 4}}}}, client, InUse, false},
		"an instance that is there":         {MIGAct{Kind: MIGCreateGPU, Constant: 2, Instance: MIGInstance{ProfileID: 9, Placement: MIGPlacement{4, 4}}}, nil, 0, false},
		"compute instances enough":          {MIGAct{Kind: MIGCreateCompute, Instance: first, Slices: 3, Want: 1}, nil, 0, false},
		"compute in another of the same id": {MIGAct{Kind: MIGCreateCompute, Instance: another, Slices: 3, Want: 2}, nil, 0, true},
		"a place that another has taken":    {MIGAct{Kind: MIGCreateGPU, Constant: 1, Instance: MIGInstance{ProfileID: 14, Placement: MIGPlacement{2, 2}}}, nil, 0, true},
		"another of the same id to remove":  {MIGAct{Kind: MIGDestroyGPU, Instance: another}, nil, 0, false},
		"compute of another of the same id": {MIGAct{Kind: MIGDestroyCompute, Instance: another}, nil, 0, false},
		"an instance, a client has come":    {MIGAct{Kind: MIGDestroyCompute, Instance: first}, client, InUse, false},
	} {
		t.Run(name, func(t *testing.T) {
			h := halves(t, c.state...)
			for _, f := range []string{"DeviceSetMigMode", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceCreateComputeInstance", "GpuInstanceDestroy", "ComputeInstanceDestroy"} {
				require.NoError(t, h.Set("crash.nvml"+f, "1"))
			}
			before, err := os.ReadFile(h.StateFile())
			require.NoError(t, err)
			c.act.UUID = gpu
			out, err := Setters{}.ActMIG(t.Context(), c.act)
			if c.code == 0 {
				require.NoError(t, err)
				require.Equal(t, c.stale, out.Stale)
				require.Equal(t, !c.stale, out.Already)
				require.Len(t, out.GPU.Instances, 2)
			} else {
				require.True(t, Answered(err, c.code), "%v", err)
			}
			after, err := os.ReadFile(h.StateFile())
			require.NoError(t, err)
			require.Equal(t, string(before), string(after))
		})
	}
	t.Run("compute that is gone", func(t *testing.T) {
		halves(t)
		out, err := Setters{}.ActMIG(t.Context(), MIGAct{UUID: gpu, Kind: MIGDestroyCompute, Instance: first, Compute: 7})
		require.NoError(t, err)
		require.True(t, out.Already)
	})
}

func TestADriverIsNotAskedForAModeOfVGPUsThatIsSet(t *testing.T) {
	h := fakes.NewHost(t)
	require.NoError(t, h.Set("gpus", "1", "model", "h100", "vgpu.virtualization", "3", "vgpu.active", "1",
		"gpu.0.vgpu.heterogeneous", "1", "gpu.0.vgpu.scheduler.policy", "3"))
	for _, a := range []VGPUAct{{Kind: VGPUSetHeterogeneous, Enable: true}, {Kind: VGPUSetScheduler, Scheduler: "fixed-share"}} {
		a.UUID = h.UUID(0)
		_, err := Setters{}.ActVGPU(t.Context(), a)
		require.NoError(t, err, "while a machine runs it would refuse")
	}
	for _, a := range []VGPUAct{{Kind: VGPUSetHeterogeneous}, {Kind: VGPUSetScheduler, Scheduler: "equal-share"}} {
		a.UUID = h.UUID(0)
		_, err := Setters{}.ActVGPU(t.Context(), a)
		require.True(t, Answered(err, InUse), "%v", err)
	}
}
