package check

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/nvml"
)

func TestADriverThatWasUpgradedAsDeclaredIsNotHeldAgainstItsBaseline(t *testing.T) {
	in := healthy()
	in.Baseline.Driver = "570.1.2"
	require.Equal(t, pass, gpu.VerdictOf(Evaluate(*in), 0), "the plan declares the driver that is there")
}

// unjudged are the readings that no row judges here: they name or describe a
// GPU, are judged under load, or with MIG on.
var unjudged = map[string]bool{"Name": true, "PCI": true, "Architecture": true, "VGPUHost": true, "PCIeGen": true, "PCIeGenCard": true, "MIGDevices": true}

// readingsOf calls do with each reading of a GPU that has an answer.
func readingsOf(t *testing.T, do func(name string)) {
	d := healthyGPU(0, first, second)
	v := reflect.ValueOf(d)
	seen := 0
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		code := v.Field(i)
		if code.Kind() != reflect.Struct || !code.FieldByName("Code").IsValid() || unjudged[name] {
			continue
		}
		if code.FieldByName("Code").Int() == int64(nvml.Success) && code.FieldByName("Missing").String() == "" {
			seen++
			do(name)
		}
	}
	require.Greater(t, seen, 20)
}

func TestWhatTheBaselineHadAndTheDriverNoLongerGivesIsNeverGood(t *testing.T) {
	for _, boot := range []string{thisBoot, "boot-0"} {
		readingsOf(t, func(name string) {
			t.Run(boot+" "+name, func(t *testing.T) {
				in := healthy()
				in.Expect = gpu.Expect{}
				in.Baseline.BootID = boot
				reading := reflect.ValueOf(&in.NVML.Devices[0]).Elem().FieldByName(name)
				reading.SetZero()
				reading.FieldByName("Code").SetInt(int64(nvml.NotSupported))
				require.NotEqual(t, pass, gpu.VerdictOf(Evaluate(*in), 0))
			})
		})
	}
}

func TestASensorThatReadsNothingAnyMoreIsAWarning(t *testing.T) {
	in := healthy()
	in.NVML.Devices[0].MemoryTemp = is(0)
	bad := failed(Evaluate(*in))
	require.Equal(t, []string{"memory temperature"}, names(bad))
	require.Equal(t, "45 °C, as in the baseline", bad[0].Expected)
}

func TestWhatIsReadUnderLoadIsMissedThere(t *testing.T) {
	for row, forget := range map[string]func(w *nvml.Watched){
		"PCIe generation": func(w *nvml.Watched) { w.PCIeGen = code[nvml.Pair](nvml.NotSupported) },
		"NVLink CRC":      func(w *nvml.Watched) { w.CRC = code[uint64](nvml.NotSupported) },
	} {
		in := healthy()
		forget(&in.Watch.Devices[0])
		require.Equal(t, []string{row}, names(failed(Evaluate(*in))))
	}
}

func TestAHostThatCouldNotBeReadIsUnprovenAndNothingOfItIsTakenForAbsent(t *testing.T) {
	in := healthy()
	in.Host, in.HostTrouble = host.Snapshot{BootID: thisBoot}, "child host.read gave no reply"
	checks := Evaluate(*in)
	require.Empty(t, failed(checks))
	require.Equal(t, unproven, gpu.VerdictOf(checks, 0))
	var open []string
	for _, c := range checks {
		if c.Skipped != "" && c.Severity == gpu.Fatal {
			open = append(open, c.Name+": "+c.Skipped)
		}
	}
	require.Equal(t, []string{"host: child host.read gave no reply"}, open, "one row tells it for all")
}
