package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/fakes"
)

func TestMain(m *testing.M) {
	if child.Main() {
		return
	}
	os.Exit(m.Run())
}

// host is a fake host with one key set.
func host(t *testing.T, pairs ...string) *fakes.Host {
	t.Helper()
	h := fakes.NewHost(t)
	set(t, h, pairs...)
	return h
}

func set(t *testing.T, h *fakes.Host, pairs ...string) {
	t.Helper()
	if err := h.Set(pairs...); err != nil {
		t.Fatal(err)
	}
}

func mustProbe(t *testing.T, o Options) Result {
	t.Helper()
	if o.MemoryMiB == 0 && o.MemoryShare == 0 {
		o.MemoryMiB = 4
	}
	if o.Timeout == 0 {
		o.Timeout = 20 * time.Second
	}
	r, err := Probe(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestAHealthyGPUPassesEveryStage(t *testing.T) {
	h := host(t)
	r := mustProbe(t, Options{UUID: h.UUID(3), Copies: true})
	if r.Verdict != Pass || r.UUID != h.UUID(3) || r.Devices != 1 || r.PTX != "7.0/sm_80" || r.CUDA != 13000 || r.Processors != 132 {
		t.Fatalf("%+v", r)
	}
	if r.TestedBytes != 4<<20 || r.Patterns != 3 || r.Bandwidth.DeviceToDevice <= 0 || r.Bandwidth.HostToDevice <= 0 || r.Bandwidth.DeviceToHost <= 0 {
		t.Fatalf("memory or copies not measured: %+v", r)
	}
	if want := filepath.Join(h.Lib(), fakes.CUDA); r.Library != want {
		t.Fatalf("mapped %q, want %q", r.Library, want)
	}
	if r.PCI != "0000:13:00.0" || !r.ECC {
		t.Fatalf("identity: %+v", r)
	}
}

// Every verdict of the facts is reached through the real purego calls; wedged
// is tested apart, because SIGKILL cannot be blocked from user space.
func TestVerdicts(t *testing.T) {
	cases := []struct {
		name  string
		state []string
		want  Verdict
		stage string
		code  int
		says  string
	}{
		{"no device answers", []string{"fail.cuInit", "100"}, NoDevice, "init", 100, "CUDA_ERROR_NO_DEVICE"},
		{"the GPU fell off the bus", []string{"gpu.0.lost", "handle"}, NoDevice, "init", 100, "NO_DEVICE"},
		{"the module is not loaded", []string{"module.driver", "none"}, NoDevice, "init", 100, ""},
		{"the fabric is not up", []string{"fabric.state", "2"}, NotReady, "init", 802, "CUDA_ERROR_SYSTEM_NOT_READY"},
		{"the upgrade is half done", []string{"module.driver", "570.0"}, Mismatch, "init", 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
		{"compute mode prohibits contexts", []string{"compute.mode", "2"}, Fail, "context", 46, "DEVICE_UNAVAILABLE"},
		{"the JIT refuses", []string{"cuda.jit.fault", "1"}, Fail, "jit", 218, "compiler: ptxas"},
		{"the driver is too old for the text", []string{"cuda.version", "10020"}, Fail, "jit", 222, "UNSUPPORTED_PTX_VERSION"},
		{"a kernel faults", []string{"cuda.fault.kernel", "1"}, Fail, "kernel", 719, "cuStreamSynchronize after probe_fma"},
		{"a launch is refused", []string{"fail.cuLaunchKernel", "719"}, Fail, "kernel", 719, "cuLaunchKernel probe_fma"},
		{"a kernel computes wrongly", []string{"cuda.bad.result", "1"}, Fail, "kernel", 0, "wrong result: element 12345"},
		{"one memory word flips", []string{"cuda.bad.word", "777"}, Fail, "memory", 0, "1 bad words, one at byte 3108"},
		{"the device agrees with itself and is wrong", []string{"cuda.consistent.flaw", "1"}, Fail, "memory", 0, "on the host"},
		{"memory runs out", []string{"cuda.free.mib", "9"}, Fail, "memory", 2, "9 MiB of device memory were free"},
		{"an unknown error", []string{"fail.cuMemAlloc", "12345"}, Fail, "kernel", 12345, "no name"},
		{"a copy fails", []string{"fail.cuMemcpyDtoDAsync", "719"}, Fail, "bandwidth", 719, "cuMemcpyDtoDAsync"},
		{"the library crashes", []string{"crash.cuInit", "1"}, Crash, "init", 0, "crash"},
		{"init hangs", []string{"hang.cuInit", "1"}, Timeout, "init", 0, "no reply"},
		{"a kernel never ends", []string{"cuda.hang.kernel", "1"}, Timeout, "kernel", 0, "no reply"},
		{"the launch itself hangs", []string{"hang.cuLaunchKernel", "1"}, Timeout, "kernel", 0, "no reply"},
	}
	for _, c := range cases {
		t.Run(strings.ReplaceAll(c.name, " ", "_"), func(t *testing.T) {
			h := host(t, c.state...)
			o := Options{UUID: h.UUID(0), Copies: true}
			if c.want == Timeout {
				o.Timeout = 500 * time.Millisecond
			}
			r := mustProbe(t, o)
			if r.Verdict != c.want || r.Stage != c.stage || r.Code != c.code || !strings.Contains(r.Error, c.says) {
				t.Fatalf("got %s in %s, code %d: %s", r.Verdict, r.Stage, r.Code, r.Error)
			}
			call := r.Checks()[0]
			if call.OK || call.Hint == "" || !strings.Contains(call.Found, string(c.want)) {
				t.Fatalf("check: %+v", call)
			}
		})
	}
}

func TestAHostWithoutTheLibraryIsNamed(t *testing.T) {
	h := host(t)
	if err := h.RemoveLibraries(); err != nil {
		t.Fatal(err)
	}
	if r := mustProbe(t, Options{UUID: h.UUID(0)}); r.Verdict != NoLibrary {
		t.Fatalf("%+v", r)
	}
}

func TestAMissingSymbolIsAVerdictNotAnExit(t *testing.T) {
	h := fakes.NewHost(t, fakes.Without("cuLaunchKernel"))
	r := mustProbe(t, Options{UUID: h.UUID(0)})
	if r.Verdict != Fail || r.Stage != "dlopen" || !strings.Contains(r.Error, "cuLaunchKernel") {
		t.Fatalf("%+v", r)
	}
}

func TestTheOlderNameOfAFunctionIsUsedWhereTheNewerIsMissing(t *testing.T) {
	h := fakes.NewHost(t, fakes.Without("cuDeviceGetUuid_v2"))
	if r := mustProbe(t, Options{UUID: h.UUID(1)}); r.Verdict != Pass || r.UUID != h.UUID(1) {
		t.Fatalf("%+v", r)
	}
}

func TestAReplacedLibraryIsSeenByTheNextProbe(t *testing.T) {
	h := host(t, "module.driver", "590.10")
	if r := mustProbe(t, Options{UUID: h.UUID(0)}); r.Verdict != Mismatch {
		t.Fatalf("before: %+v", r)
	}
	if err := h.Swap(fakes.Driver("590.10")); err != nil {
		t.Fatal(err)
	}
	if r := mustProbe(t, Options{UUID: h.UUID(0)}); r.Verdict != Pass {
		t.Fatalf("after: %+v", r)
	}
}

func TestAnUnknownUUIDIsNoDevice(t *testing.T) {
	host(t)
	if r := mustProbe(t, Options{UUID: "GPU-ffffffff-0000-0000-0000-000000000000"}); r.Verdict != NoDevice {
		t.Fatalf("%+v", r)
	}
}

func TestMIGDevicesAreProvenByUUID(t *testing.T) {
	h := host(t, "gpu.2.mig.current", "1", "gpu.2.gi.1", "9:0:4", "gpu.2.ci.1.0", "2:0:3", "gpu.2.gi.2", "19:4:1", "gpu.2.ci.2.0", "0:0:1")
	for gi, processors := range map[int]int{1: 49, 2: 16} {
		uuid := h.MIGUUID(2, gi, 0)
		r := mustProbe(t, Options{UUID: uuid})
		if r.Verdict != Pass || r.UUID != uuid || r.Processors != processors {
			t.Fatalf("%s: %+v", uuid, r)
		}
	}
	legacy := fmt.Sprintf("MIG-%s/1/0", h.UUID(2))
	if r := mustProbe(t, Options{UUID: legacy}); r.Verdict != Pass || r.UUID != h.MIGUUID(2, 1, 0) {
		t.Fatalf("legacy name: %+v", r)
	}
	// MIG mode without instances leaves CUDA no device.
	set(t, h, "gpu.5.mig.current", "1")
	if r := mustProbe(t, Options{UUID: h.UUID(5)}); r.Verdict != NoDevice {
		t.Fatalf("no instances: %+v", r)
	}
}

func TestEachArchitectureGetsTextThatItsDriverReads(t *testing.T) {
	h := host(t, "model", "t4", "cuda.version", "10020")
	if r := mustProbe(t, Options{UUID: h.UUID(0)}); r.Verdict != Pass || r.PTX != "6.3/sm_75" {
		t.Fatalf("%+v", r)
	}
	for cc, want := range map[[2]int]string{{5, 2}: "6.0/sm_50", {7, 0}: "6.0/sm_70", {7, 5}: "6.3/sm_75", {9, 0}: "7.0/sm_80", {12, 0}: "7.0/sm_80"} {
		if _, got := ptxFor(cc[0], cc[1]); got != want {
			t.Errorf("%v: %s, want %s", cc, got, want)
		}
	}
}

func row(t *testing.T, r Result, name string) gpu.Check {
	t.Helper()
	for _, c := range r.Checks() {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no row %s in %+v", name, r.Checks())
	return gpu.Check{}
}

func TestASharedGPUIsTestedWithWhatIsFreeAndSaysHowMuchThatWas(t *testing.T) {
	h := host(t, "cuda.free.mib", "40")
	r := mustProbe(t, Options{UUID: h.UUID(0), MemoryMiB: 64})
	if r.Verdict != Pass || r.TestedBytes >= 40<<20 || r.TestedBytes < 24<<20 || r.WantedBytes != 64<<20 {
		t.Fatalf("%+v", r)
	}
	c := row(t, r, MemoryCheck)
	if c.OK || c.Severity != gpu.Warn || c.Expected != "64 MiB" || c.Hint == "" {
		t.Fatalf("beside tenants less than asked for is a warning: %+v", c)
	}
	if v := gpu.VerdictOf(r.Checks(), 0); v != gpu.Degraded {
		t.Fatalf("verdict %s", v)
	}
}

// Between the look at what is free and the patterns another program takes some.
func TestADrainedGPUOfWhichTooLittleCouldBeTestedIsUnproven(t *testing.T) {
	h := host(t, "cuda.free.mib", "1000", "cuda.alloc.mib", "400")
	r := mustProbe(t, Options{UUID: h.UUID(0), MemoryShare: 0.9, Copies: true})
	if r.Verdict != Pass || r.WantedBytes != 900<<20 || r.TestedBytes >= 400<<20 || r.TestedBytes < 380<<20 {
		t.Fatalf("all that could be had is tested, in pieces: %+v", r)
	}
	c := row(t, r, MemoryCheck)
	if c.OK || !strings.Contains(c.Skipped, "900 MiB were to be tested") {
		t.Fatalf("%+v", c)
	}
	if v := gpu.VerdictOf(r.Checks(), 0); v != gpu.Unproven {
		t.Fatalf("verdict %s", v)
	}
}

func TestMemoryThatCannotBeHadInOnePieceIsTestedInSeveral(t *testing.T) {
	h := host(t, "cuda.free.mib", "1000", "cuda.piece.mib", "100")
	r := mustProbe(t, Options{UUID: h.UUID(0), MemoryShare: 0.9})
	if c := row(t, r, MemoryCheck); r.Verdict != Pass || r.TestedBytes != 900<<20 || !c.OK {
		t.Fatalf("%+v %+v", r, c)
	}
	if err := h.Set("cuda.bad.word", "777"); err != nil {
		t.Fatal(err)
	}
	if r := mustProbe(t, Options{UUID: h.UUID(0), MemoryShare: 0.9}); r.Verdict != Fail || !strings.Contains(r.Error, "block 1 of ") {
		t.Fatalf("each piece is checked: %+v", r)
	}
}

func TestAShareOfALargeDeviceIsTested(t *testing.T) {
	h := host(t)
	r, err := Probe(t.Context(), Options{UUID: h.UUID(0), MemoryShare: 0.25, Copies: true, Timeout: 20 * time.Second})
	if err != nil || r.Verdict != Pass || r.TestedBytes < 18<<30 {
		t.Fatalf("%+v %v", r, err)
	}
}

func TestASoakWritesNewPatternsUntilItsTimeIsOver(t *testing.T) {
	h := host(t)
	if r := mustProbe(t, Options{UUID: h.UUID(0), Soak: 300 * time.Millisecond}); r.Verdict != Pass || r.Patterns <= len(seeds) {
		t.Fatalf("%+v", r)
	}
}

func TestASlowCopyIsAWarning(t *testing.T) {
	h := host(t, "gpu.0.pcie.width", "4")
	r := mustProbe(t, Options{UUID: h.UUID(0), Copies: true, Floors: Bandwidth{DeviceToDevice: 2000, HostToDevice: 40, DeviceToHost: 10}})
	slow := row(t, r, BandwidthCheck)
	if r.Verdict != Pass || len(r.Slow) != 1 || slow.OK || slow.Severity != gpu.Warn {
		t.Fatalf("%+v %+v", r, slow)
	}
}

func TestAWedgedChildIsReportedWithItsStage(t *testing.T) {
	r, err := became("GPU-1", fmt.Errorf("probe: %w", child.Wedged{PID: 7, State: "D", WChan: "nv_wait", Stage: "context"}))
	if err != nil || r.Verdict != Wedged || r.Stage != "context" || !strings.Contains(r.Error, "nv_wait") {
		t.Fatalf("%+v %v", r, err)
	}
	if c := r.Checks()[0]; c.Severity != gpu.Fatal || !strings.Contains(c.Hint, "reboot") {
		t.Fatalf("%+v", c)
	}
}

func TestAWedgedChildKeepsProbesFromEveryDeviceOfItsCard(t *testing.T) {
	one, other := key(Options{Card: "GPU-1", UUID: "MIG-1"}), key(Options{Card: "GPU-1", UUID: "MIG-2"})
	if one != other || one != key(Options{UUID: "GPU-1"}) || one == key(Options{UUID: "GPU-2"}) {
		t.Fatalf("%q %q", one, other)
	}
}

func TestACancelledProbeIsAnErrorNotAVerdict(t *testing.T) {
	h := host(t, "hang.cuInit", "1")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := Probe(ctx, Options{UUID: h.UUID(0), Timeout: time.Minute}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
}
