package nvml

import (
	"context"
	"testing"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/fakes"
)

func halves(t *testing.T, more ...string) *fakes.Host {
	h := fakes.NewHost(t)
	require.NoError(t, h.Set(append([]string{"gpus", "1", "gpu.0.mig.current", "1", "gpu.0.mig.pending", "1",
		"gpu.0.gi.1", "9:0:4", "gpu.0.ci.1.0", "2:0:3", "gpu.0.gi.2", "9:4:4", "gpu.0.ci.2.0", "0:0:1", "gpu.0.ci.2.1", "1:1:2"}, more...)...))
	return h
}

// One reader serves both, so a layout has the names of its declaration.
func TestInstancesAreNamedAsTheSetUpNamesThem(t *testing.T) {
	h := halves(t)
	s, err := Take(context.Background(), time.Minute)
	require.NoError(t, err)
	d := s.Devices[0]
	require.Equal(t, Instances{
		{Profile: "3g.40gb", ID: 1, Start: 0, Size: 4, Compute: []string{"3g.40gb"}},
		{Profile: "3g.40gb", ID: 2, Start: 4, Size: 4, Compute: []string{"1c.3g.40gb", "2c.3g.40gb"}},
	}, d.Instances.Value)
	require.Equal(t, []string{h.MIGUUID(0, 1, 0), h.MIGUUID(0, 2, 0), h.MIGUUID(0, 2, 1)}, d.CUDADevices())
}

// An error on the way is no empty list: that would read as nothing to prove.
func TestWhatCannotBeReadOfMIGIsSaid(t *testing.T) {
	for _, c := range []struct {
		fail, code         string
		instances, devices Code
	}{
		{"nvmlDeviceGetMaxMigDeviceCount", "4", Success, NoPermission},
		{"nvmlDeviceGetMigDeviceHandleByIndex", "4", Success, NoPermission},
		{"nvmlDeviceGetMigDeviceHandleByIndex", "999@2", Success, Unknown},
		{"nvmlDeviceGetUUID", "999@2", Success, Unknown}, // the first is the GPU's own
		{"nvmlDeviceGetGpuInstances", "4", NoPermission, Success},
		{"nvmlDeviceGetGpuInstanceProfileInfo", "999", Unknown, Success},
		{"nvmlGpuInstanceGetInfo", "999", Unknown, Success},
		{"nvmlGpuInstanceGetComputeInstanceProfileInfo", "999", Unknown, Success},
		{"nvmlGpuInstanceGetComputeInstances", "999", Unknown, Success},
		{"nvmlComputeInstanceGetInfo", "999", Unknown, Success},
		{"nvmlDeviceGetMemoryInfo", "999", Unknown, Success},
	} {
		t.Run(c.fail, func(t *testing.T) {
			halves(t, "gpu.0.fail."+c.fail, c.code)
			s, err := Take(context.Background(), time.Minute)
			require.NoError(t, err)
			require.Equal(t, c.instances, s.Devices[0].Instances.Code)
			require.Equal(t, c.devices, s.Devices[0].MIGDevices.Code)
		})
	}
	t.Run("a library without the call", func(t *testing.T) {
		h := halves(t)
		require.NoError(t, h.Swap(fakes.Without("nvmlDeviceGetMaxMigDeviceCount", "nvmlGpuInstanceGetComputeInstances")))
		s, err := Take(context.Background(), time.Minute)
		require.NoError(t, err)
		require.Equal(t, "nvmlDeviceGetMaxMigDeviceCount", s.Devices[0].MIGDevices.Missing)
		require.Equal(t, "nvmlGpuInstanceGetComputeInstances", s.Devices[0].Instances.Missing)
	})
}

// Row remapping is hidden once there are instances: this is the last moment.
func TestTheFirstInstanceIsNotMadeOverBadRows(t *testing.T) {
	h := fakes.NewHost(t)
	require.NoError(t, h.Set("gpus", "1", "model", "h100", "gpu.0.mig.current", "1", "gpu.0.mig.pending", "1"))
	create := func(start int) error {
		_, err := Setters{}.ActMIG(context.Background(), MIGAct{UUID: h.UUID(0), Kind: MIGCreateGPU, Constant: gonvml.GPU_INSTANCE_PROFILE_1_SLICE,
			Instance: MIGInstance{ProfileID: 19, Placement: MIGPlacement{start, 1}}})
		return err
	}
	for _, key := range []string{"gpu.0.remap.failed", "gpu.0.remap.pending"} {
		require.NoError(t, h.Set(key, "1"))
		err := create(0)
		require.True(t, Answered(err, ResetRequired), "%v", err)
		require.ErrorContains(t, err, "row")
		made, err := h.Get("gpu.0.gi.1")
		require.NoError(t, err)
		require.Empty(t, made)
		require.NoError(t, h.Set(key, ""))
	}
	require.NoError(t, create(0))
	require.NoError(t, h.Set("gpu.0.remap.failed", "1"))
	require.NoError(t, create(1), "with an instance the driver does not tell")
}
