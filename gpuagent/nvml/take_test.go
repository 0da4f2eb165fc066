package nvml

import (
	"context"
	"os"
	"testing"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/fakes"
)

func TestMain(m *testing.M) {
	if child.Main() {
		return
	}
	os.Exit(m.Run())
}

func TestASnapshotHoldsWhatTheDriverShows(t *testing.T) {
	h := fakes.NewHost(t)
	require.NoError(t, h.Set("gpus", "2", "gpu.1.temperature", "unsupported", "gpu.1.serial", "42", "gpu.1.power.enforced", "500000", "gpu.1.nvlink.3.recovery", "5"))
	s, err := Take(context.Background(), time.Minute)
	require.NoError(t, err)
	require.Equal(t, Success, s.Init)
	require.Equal(t, fakes.DefaultDriver, s.Driver.Value)
	require.Len(t, s.Devices, 2)
	d := s.Devices[1]
	require.Equal(t, h.UUID(1), d.UUID.Value)
	require.Equal(t, "42", d.Serial.Value)
	require.Equal(t, "0000:11:00.0", d.PCI.Value)
	require.False(t, d.Temperature.OK())
	require.Equal(t, Pair{16, 16}, d.PCIeWidth.Value)
	require.Len(t, d.Links, 18)
	require.Equal(t, 2, d.Links[3].Remote.Value, "a switch")
	require.Equal(t, 5, d.PCIeGenCard.Value)
	require.Equal(t, Power{Enforced: Reading[uint64]{Value: 500_000}, Default: Reading[uint64]{Value: 700_000},
		Bounds: Reading[Bounds]{Value: Bounds{Least: 200_000, Most: 700_000}}}, d.Power)
	require.Equal(t, uint64(5), d.Links[3].Recovery.Value)
	require.Equal(t, uint64(26562), d.Links[3].Speed.Value)
	require.Equal(t, 3, d.Fabric.Value.Version)
	require.Len(t, d.Peers, 1)
	require.Equal(t, h.UUID(0), d.Peers[0].UUID)
}

func TestNVLink5CountersAreReadWhereTheLinksHaveThem(t *testing.T) {
	h := fakes.NewHost(t)
	require.NoError(t, h.Set("gpus", "2", "gpu.1.nvlink.generation", "5",
		"gpu.1.field.206.3", "2", "gpu.1.field.212.3", "1", "gpu.1.field.221.3", "4", "gpu.1.field.214.3", "1", "gpu.1.field.220.3", "511"))
	s, err := Take(context.Background(), time.Minute)
	require.NoError(t, err)
	require.Equal(t, NotSupported, s.Devices[0].Links[17].Five.Code)
	require.True(t, s.Devices[0].Links[17].Replay.OK())
	five := s.Devices[1].Links
	require.Equal(t, NotSupported, five[3].Replay.Code)
	require.Equal(t, Link5{Errors: 7, Recoveries: 1, EffectiveRate: 511}, five[3].Five.Value)
	require.True(t, five[17].Five.OK())
}

func TestAnOlderFormOfACallIsAskedWhereTheNewerIsMissing(t *testing.T) {
	h := fakes.NewHost(t, fakes.Without("nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons"))
	require.NoError(t, h.Set("gpus", "1"))
	s, err := Take(context.Background(), time.Minute)
	require.NoError(t, err)
	d := s.Devices[0]
	require.True(t, d.Fabric.OK() && d.Fabric.Value.Version == 1, "%+v", d.Fabric)
	require.True(t, d.Memory.OK())
	require.NotZero(t, d.Memory.Value.Total)
	require.True(t, d.Throttle.OK(), "%+v", d.Throttle)

	// A library may have the name and not this version of the call.
	for _, code := range []string{"13x1", "25x1"} {
		h := fakes.NewHost(t)
		require.NoError(t, h.Set("gpus", "1", "gpu.0.fail.nvmlDeviceGetMemoryInfo", code))
		s, err := Take(context.Background(), time.Minute)
		require.NoError(t, err)
		require.True(t, s.Devices[0].Memory.OK(), "%+v", s.Devices[0].Memory)
	}
}

func TestTheWatchSeesWhatHappensWhileItRuns(t *testing.T) {
	h := fakes.NewHost(t)
	require.NoError(t, h.Set("gpus", "1", "gpu.0.event", "8:31", "gpu.0.throttle", "8", "gpu.0.field.176", "4"))
	stop := make(chan struct{})
	timer := time.AfterFunc(time.Second, func() {
		if err := h.Set("gpu.0.field.176", "6", "gpu.0.pcie.replay", "1"); err != nil {
			t.Error(err)
		}
		close(stop)
	})
	defer timer.Stop()
	o, err := Watch(context.Background(), time.Minute, stop)
	require.NoError(t, err)
	require.Equal(t, []LiveXid{{UUID: h.UUID(0), Kind: "xid", Xid: 31}}, o.Xids)
	require.Positive(t, o.Samples)
	require.Equal(t, o.Samples, o.Devices[0].Throttled)
	require.Equal(t, uint64(8), o.Devices[0].Reasons)
	require.Equal(t, uint64(2), o.Devices[0].PCIeErrors.Value)
	require.Equal(t, uint64(1), o.Devices[0].Replays.Value)
}

func TestAListOfProcessesThatFailsIsNoEmptyList(t *testing.T) {
	h := fakes.NewHost(t)
	for _, kind := range []string{"Compute", "Graphics", "MPSCompute"} {
		function := "gpu.0.fail.nvmlDeviceGet" + kind + "RunningProcesses"
		require.NoError(t, h.Set("gpus", "1", function, "999"))
		s, err := Take(context.Background(), time.Minute)
		require.NoError(t, err)
		require.Equal(t, Unknown, s.Devices[0].Processes.Code, kind)
		require.NoError(t, h.Set(function, ""))
	}
	require.NoError(t, h.Set("gpu.0.processes.mps", "unsupported"))
	s, err := Take(context.Background(), time.Minute)
	require.NoError(t, err)
	require.True(t, s.Devices[0].Processes.OK())
	require.Equal(t, []string{"mps"}, s.Devices[0].Unlisted)
}

func TestThermalLimitsAndChipLinksAreReadByTheirFields(t *testing.T) {
	h := fakes.NewHost(t)
	require.NoError(t, h.Set("gpus", "2", "gpu.1.field.170", "2", "gpu.1.field.171.0", "1", "gpu.1.field.171.1", "0", "gpu.1.field.172", "45000",
		"gpu.1.field.231.0", "1", "gpu.1.field.232.1", "2", "gpu.1.field.233", "0"))
	s, err := Take(context.Background(), time.Minute)
	require.NoError(t, err)
	require.Equal(t, NotSupported, s.Devices[0].C2CLinks.Code)
	d := s.Devices[1]
	require.Equal(t, -2, d.Limits.Slowdown.Value, "signed")
	require.Equal(t, -8, d.Limits.Shutdown.Value)
	require.True(t, d.Limits.GPU.OK() && d.Limits.Memory.OK())
	require.Len(t, d.C2CLinks.Value, 2)
	require.True(t, d.C2CLinks.Value[0].Up.Value)
	require.True(t, d.C2CLinks.Value[1].Up.OK() && !d.C2CLinks.Value[1].Up.Value)
	require.Equal(t, uint64(45000), d.C2CLinks.Value[1].Bandwidth.Value)
	require.Equal(t, uint64(3), d.C2CErrors.Value, "those of both links")
}

func TestAFieldThatTheDriverIsOlderThanIsOneItDoesNotHave(t *testing.T) {
	h := fakes.NewHost(t)
	require.NoError(t, h.Set("gpus", "1", "field.230", "unknown", "field.215", "unknown"))
	s, err := Take(context.Background(), time.Minute)
	require.NoError(t, err)
	require.True(t, s.Devices[0].Recovery.Absent(), "%+v", s.Devices[0].Recovery)
}

func TestOneGPUThatRefusesItsEventsLeavesTheOthersHeard(t *testing.T) {
	for _, function := range []string{"nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes"} {
		t.Run(function, func(t *testing.T) {
			h := fakes.NewHost(t)
			require.NoError(t, h.Set("gpus", "3", "gpu.1.fail."+function, "999", "gpu.2.event", "8:79"))
			stop := make(chan struct{})
			timer := time.AfterFunc(time.Second, func() { close(stop) })
			defer timer.Stop()
			o, err := Watch(context.Background(), time.Minute, stop)
			require.NoError(t, err)
			require.Equal(t, []LiveXid{{UUID: h.UUID(2), Kind: "xid", Xid: 79}}, o.Xids)
			require.True(t, o.Events.OK())
			require.True(t, o.Devices[0].Events.OK() && o.Devices[2].Events.OK())
			require.Equal(t, Unknown, o.Devices[1].Events.Code)
		})
	}
}

func TestACounterThatFellWasReset(t *testing.T) {
	require.Equal(t, uint64(2), Growth(3, 5))
	require.Equal(t, uint64(4), Growth(9, 4))
}

func TestAFieldIsReadByItsType(t *testing.T) {
	v := gonvml.FieldValue{Value: [8]byte{1, 2, 3, 4, 5, 6, 7, 8}}
	for kind, want := range map[gonvml.ValueType]uint64{
		gonvml.VALUE_TYPE_UNSIGNED_SHORT: 0x0201, gonvml.VALUE_TYPE_UNSIGNED_INT: 0x04030201, gonvml.VALUE_TYPE_UNSIGNED_LONG_LONG: 0x0807060504030201,
	} {
		v.ValueType = uint32(kind)
		require.Equal(t, want, number(v))
	}
}
