package check

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/host"
)

func TestEveryNumberOfTheXidTableHasItsSeverity(t *testing.T) {
	for severity, numbers := range map[gpu.Severity][]int{
		gpu.Fatal: {46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 144, 145, 146, 149, 150, 151, 155, 158, 167, 168, 169},
		gpu.Reset: {156},
		gpu.Info:  {154},
		gpu.Warn: {13, 31, 32, 43, 45, 68, 69, 80, 37, 38, 66, 67, 39, 40, 41, 70, 71, 72, 75, 76, 77, 85, 54, 63, 78, 92, 93, 94,
			121, 137, 157, 42, 56, 57, 58, 61, 73, 147, 148, 999},
	} {
		for _, n := range numbers {
			x := judge(n, "", nil, false)
			require.Equal(t, severity, x.severity, "Xid %d", n)
			require.NotEmpty(t, x.meaning)
			require.NotEmpty(t, x.action)
		}
	}
}

func TestAnXidIsJudgedByWhoRaisedItAndOnWhatGPU(t *testing.T) {
	d := healthyGPU(0, first, second)
	require.Equal(t, gpu.Fatal, judge(31, "", &d, true).severity, "our own probe")
	require.Equal(t, gpu.Fatal, judge(39, "", &d, true).severity, "a copy engine under our own probe")
	require.Equal(t, gpu.Warn, judge(63, "", &d, true).severity, "no error of an application")
	require.Equal(t, gpu.Warn, judge(78, "", &d, false).severity)
	d.VGPUHost = is(true)
	require.Equal(t, gpu.Fatal, judge(78, "", &d, false).severity, "a vGPU host")
	require.Contains(t, judge(93, "", &d, false).meaning, "without meaning", "newer than Volta")
	d.Architecture = is(voltaArch)
	require.Contains(t, judge(93, "", &d, false).meaning, "InfoROM")
	require.Equal(t, gpu.Warn, judge(145, "RLW_REMAP Nonfatal XC0 i0 Link 00", &d, false).severity)
	require.Equal(t, gpu.Fatal, judge(147, "TREX Fatal XC0 i0", &d, false).severity)
}

// Driver and catalogue name the GPU; which of its tenants has the error is in the
// words.
func TestAnErrorOfAMIGInstanceIsThatOfItsGPUAndNamesTheInstance(t *testing.T) {
	in := healthy()
	in.Host.Log.Xids = []host.Xid{{PCI: "0000:10:00.0", Instance: "GPU-I:05", Number: 95, Text: "Uncontained"}, {PCI: "0000:10:00.0", Instance: "GPU-I:03", Number: 95}}
	in.Host.Log.Unreadable = []string{"NVRM: Xid a", "NVRM: Xid b"}
	bad := failed(Evaluate(*in))
	require.Len(t, bad, 3)
	require.Equal(t, "2 of an unknown form, the first: NVRM: Xid a", bad[0].Found, "a log full of them makes one row")
	require.Equal(t, first, bad[1].Device)
	require.Equal(t, gpu.Fatal, bad[1].Severity)
	require.Equal(t, "Xid 95, 1 times: uncontained memory error (GPU-I:05 Uncontained)", bad[1].Found)
	require.Contains(t, bad[2].Found, "(GPU-I:03)")
}

func TestTheKernelLogNamesTheGPUAndOneLineStandsForMany(t *testing.T) {
	in := healthy()
	in.Host.Log.Xids = []host.Xid{
		{PCI: "0000:10:00.0", Number: 31, Text: "pid=7, name=python"}, {PCI: "0000:10:00.0", Number: 31, Text: "pid=8, name=python"},
		{PCI: "0000:10:00.0", Number: 31, Text: "pid=9, name=refit-gpu-child"},
		{PCI: "0000:99:00.0", Number: 13, Text: "another card"},
	}
	checks := failed(Evaluate(*in))
	require.Len(t, checks, 3)
	require.Equal(t, first, checks[0].Device)
	require.Equal(t, gpu.Warn, checks[0].Severity)
	require.Contains(t, checks[0].Found, "2 times")
	require.Equal(t, gpu.Fatal, checks[1].Severity, "raised by our own child")
	require.Equal(t, "0000:99:00.0", checks[2].Device)
	require.Contains(t, checks[2].Found, "not here")
}
