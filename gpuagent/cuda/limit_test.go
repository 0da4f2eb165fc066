package cuda

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/fakes"
)

func TestThePlainProbeIsNotAnsweredByAPreloadedLimiter(t *testing.T) {
	h := host(t)
	// A limiter that refuses everything would fail the probe if it stayed.
	t.Setenv("LD_PRELOAD", h.Limiter())
	t.Setenv("REFIT_FAKE_LIMIT_MIB", "1")
	if r := mustProbe(t, Options{UUID: h.UUID(0), Env: []string{"LD_PRELOAD=" + h.Limiter()}}); r.Verdict != Pass {
		t.Fatalf("%+v", r)
	}
}

func TestTheLimitedRunProvesThatTheLimitHolds(t *testing.T) {
	h := host(t)
	limited := func(bytes uint64) Result {
		return mustProbe(t, Options{UUID: h.UUID(0), Limit: &Limit{Preload: h.Limiter(), Bytes: bytes}})
	}
	t.Setenv("REFIT_FAKE_LIMIT_MIB", "64")
	if r := limited(64 << 20); r.Limit == nil || !r.Limit.Refused || r.Limit.Verdict != Pass {
		t.Fatalf("in force: %+v %+v", r, r.Limit)
	}
	t.Setenv("REFIT_FAKE_LIMIT_MIB", "")
	r := limited(64 << 20)
	if r.Limit == nil || r.Limit.Refused || !strings.Contains(r.Limit.Found, "128 MiB were granted") {
		t.Fatalf("not in force: %+v", r.Limit)
	}
	checks := r.Checks()
	if c := checks[len(checks)-1]; c.Name != LimitCheck || c.OK || c.Severity != gpu.Fatal {
		t.Fatalf("%+v", c)
	}
	set(t, h, "cuda.free.mib", "256")
	// 256 MiB are free: a refusal of more would be the driver's own.
	if r := limited(512 << 20); r.Limit == nil || r.Limit.Skipped == "" || r.Limit.Refused {
		t.Fatalf("not provable: %+v", r.Limit)
	}
	// Work that does not fit below the limit fails in its own stage.
	t.Setenv("REFIT_FAKE_LIMIT_MIB", "1")
	if r := limited(64 << 20); r.Limit == nil || r.Limit.Verdict != Fail || r.Limit.Refused {
		t.Fatalf("limit too tight: %+v", r.Limit)
	}
}

func TestALimitOfNothingIsRefusedBeforeAnythingRuns(t *testing.T) {
	h := host(t)
	if r, err := Probe(t.Context(), Options{UUID: h.UUID(0), Limit: &Limit{Preload: h.Limiter()}}); err == nil || r.Verdict != "" || !strings.Contains(err.Error(), "0 bytes") {
		t.Fatalf("%+v %v", r, err)
	}
}

func TestAnInterposedLibraryIsNotTakenForTheDriver(t *testing.T) {
	h := host(t)
	other := filepath.Join(t.TempDir(), "libcuda.so.1")
	b, err := os.ReadFile(filepath.Join(h.Lib(), "libcuda.so.1"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(other, b, 0o755); err != nil {
		t.Fatal(err)
	}
	if r := mustProbe(t, Options{UUID: h.UUID(0), Library: other}); r.Verdict != Pass || r.Library != other {
		t.Fatalf("by path: %+v", r)
	}
	preloaded := filepath.Join(h.Lib(), "libcuda.so.1")
	r := mustProbe(t, Options{UUID: h.UUID(0), Library: other, Preload: preloaded})
	if r.Verdict != Fail || r.Stage != "dlopen" || !strings.Contains(r.Error, "another library stands in the driver's place") {
		t.Fatalf("interposed: %+v", r)
	}
}

func TestTheCanaryWritesItsVerdictToTheTerminationMessage(t *testing.T) {
	h := host(t, "gpus", "1")
	t.Setenv("LD_PRELOAD", h.Limiter())
	t.Setenv("REFIT_FAKE_LIMIT_MIB", "64")
	file := filepath.Join(t.TempDir(), "termination-log")
	run := func() (int, gpu.Result, string) {
		t.Helper()
		env := map[string]string{countVariable: "1", limitVariable: "64Mi", nodeVariable: "node-a"}
		j, err := FromEnvironment(func(k string) string { return env[k] })
		if err != nil {
			t.Fatal(err)
		}
		j.Output, j.Probe.MemoryMiB = file, 4
		var stdout, stderr bytes.Buffer
		code := Main(t.Context(), j, &stdout, &stderr)
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatalf("%v; %s", err, stderr.String())
		}
		var r gpu.Result
		if err := json.Unmarshal(b, &r); err != nil {
			t.Fatal(err)
		}
		return code, r, stdout.String()
	}
	code, r, printed := run()
	if code != 0 || r.Verdict != gpu.Pass || len(r.Devices) != 1 || r.Passed != 4 || r.Node != "node-a" || len(r.Checks) != 0 {
		t.Fatalf("exit %d: %+v", code, r)
	}
	if len(r.Proofs) != 1 || r.Proofs[0] != (gpu.Proof{Device: h.UUID(0), TestedMiB: 4, WantedMiB: 4, Patterns: 3}) {
		t.Fatalf("what was measured: %+v", r.Proofs)
	}
	if !slices.Contains(r.Found, gpu.Found{Name: LimitCheck, Found: "128 MiB were refused, the limit is 64 MiB", Devices: 1}) {
		t.Fatalf("what was found: %+v", r.Found)
	}
	if !strings.Contains(printed, `"verdict":"pass"`) {
		t.Fatalf("printed %s", printed)
	}
	// A limiter that is injected but not in force.
	t.Setenv("REFIT_FAKE_LIMIT_MIB", "")
	if code, r, _ := run(); code != 1 || r.Verdict != gpu.Unfit || r.Checks[0].Name != LimitCheck {
		t.Fatalf("no limit: exit %d: %+v", code, r)
	}
	t.Setenv("REFIT_FAKE_LIMIT_MIB", "64")
	set(t, h, "cuda.bad.word", "9")
	if code, r, _ := run(); code != 1 || r.Verdict != gpu.Unfit || len(r.Checks) == 0 {
		t.Fatalf("exit %d: %+v", code, r)
	}
	set(t, h, "cuda.bad.word", "", "gpus", "2")
	if code, r, _ := run(); code != 1 || r.Verdict != gpu.Unfit || len(r.Devices) != 2 || r.Checks[0].Name != "device count" {
		t.Fatalf("two devices in the pod: exit %d: %+v", code, r)
	}
	set(t, h, "gpus", "1", "cuda.free.mib", "100")
	t.Setenv("REFIT_FAKE_LIMIT_MIB", "")
	if code, r, _ := run(); code != 1 || r.Verdict != gpu.Unproven {
		t.Fatalf("a limit that cannot be proven: exit %d: %+v", code, r)
	}
}

// The path that a workload takes: the pod does not say which device it has.
func TestAMIGDeviceOfAPodIsNamedAsOne(t *testing.T) {
	for name, c := range map[string]struct {
		without []string
		profile string // 99 is none that CUDA's name of the device could tell
	}{
		"by its name and its GPU's": {nil, "9"}, "by its GPU's": {nil, "99"}, "by its name": {[]string{"cuDeviceGetUuid"}, "9"},
	} {
		t.Run(name, func(t *testing.T) {
			h := fakes.NewHost(t, fakes.Without(c.without...))
			set(t, h, "gpus", "1", "gpu.0.mig.current", "1", "gpu.0.gi.1", c.profile+":0:4", "gpu.0.ci.1.0", "2:0:3")
			r, err := Job{Probe: Options{MemoryMiB: 4}, Count: 1}.Run(t.Context())
			if err != nil || r.Verdict != gpu.Pass || len(r.Proofs) != 1 || r.Proofs[0].Device != h.MIGUUID(0, 1, 0) || r.Devices[0].UUID != h.MIGUUID(0, 1, 0) {
				t.Fatalf("%+v %v", r, err)
			}
			if named := r.Devices[0].Model == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"; named != (c.profile == "9") {
				t.Fatalf("model %q", r.Devices[0].Model)
			}
		})
	}
	h := host(t, "gpus", "1")
	if r, err := (Job{Probe: Options{MemoryMiB: 4}}).Run(t.Context()); err != nil || r.Devices[0].UUID != h.UUID(0) {
		t.Fatalf("a whole GPU: %+v %v", r, err)
	}
}

func TestAVerdictAlwaysFitsTheTerminationMessage(t *testing.T) {
	fitting := func(checks, devices int) gpu.Result {
		t.Helper()
		r := gpu.Result{Verdict: gpu.Unfit}
		for i := range devices {
			uuid := fmt.Sprintf("MIG-00000000-0000-5000-8000-%012x", i)
			r.Devices = append(r.Devices, gpu.Device{UUID: uuid, Model: "NVIDIA H100 80GB HBM3 MIG 1g.10gb", MemoryBytes: 10 << 30})
			r.Proofs = append(r.Proofs, gpu.Proof{Device: uuid, TestedMiB: 64, WantedMiB: 64, Patterns: 3})
			r.Found = append(r.Found, gpu.Found{Name: MemoryCheck, Found: fmt.Sprint(strings.Repeat("y", 200), i), Devices: 1})
		}
		for range checks {
			r.Checks = append(r.Checks, gpu.Check{Name: CallCheck, Severity: gpu.Fatal, Found: strings.Repeat("x", 900), Hint: hints[Fail]})
		}
		text, err := message(r)
		var back gpu.Result
		if err != nil || len(text) > terminationLimit || json.Unmarshal(text, &back) != nil || back.Verdict != gpu.Unfit || len(back.Devices) != devices {
			t.Fatalf("%d checks, %d devices: %d bytes, %v", checks, devices, len(text), err)
		}
		return back
	}
	if r := fitting(1, 1); len(r.Found) != 1 || len(r.Proofs) != 1 || len(r.Checks[0].Found) != 900 {
		t.Fatalf("what fits stays whole: %+v", r)
	}
	if r := fitting(1, 10); len(r.Found) != 0 || len(r.Proofs) != 10 || len(r.Checks) != 1 {
		t.Fatalf("what passed goes before what was measured: %+v", r)
	}
	if r := fitting(5, 14); len(r.Proofs) != 0 || len(r.Checks) != 5 {
		t.Fatalf("what was measured goes before what failed: %+v", r)
	}
	if r := fitting(30, 1); len(r.Checks) < 2 {
		t.Fatalf("as much of what failed stays as fits: %+v", r)
	}
}

func TestSizesAreReadAsKubernetesWritesThem(t *testing.T) {
	for text, want := range map[string]uint64{"2Gi": 2 << 30, "512Mi": 512 << 20, "1.5Gi": 3 << 29, "2G": 2e9, "1024": 1024} {
		if got, err := quantity(text); err != nil || got != want {
			t.Errorf("%s: %d %v", text, got, err)
		}
	}
	for _, text := range []string{"Gi", "-1", "2Xi", "two"} {
		if got, err := quantity(text); err == nil {
			t.Errorf("%s: %d", text, got)
		}
	}
}
