// Package cuda proves that a GPU or a MIG device runs work: libcuda, loaded by
// purego without cgo or a toolkit, makes a primary context, compiles PTX, runs
// a kernel whose result is compared exactly, writes and checks memory patterns
// and times copies. A Running pod and a healthy NVML reading prove none of that.
//
// Each probe is one child process with a deadline: a wedged GPU can leave the
// caller in a kernel wait that no signal ends, and a replaced library is seen by
// a new process only. LD_PRELOAD is removed, so that a software vGPU limiter
// does not answer in the driver's place; a second run with the limiter proves
// the limited path on its own.
//
// After a child that is wedged no other is started on that card by this process.
// That is kept in memory only: an agent that was started anew tries once more,
// and meets the same wait.
//
// What has been proven: every verdict but wedged on the fake libcuda of package
// fakes, through the real purego calls, and that the vendor's assembler (12.9)
// accepts the PTX text for sm_50 to sm_120. The text has met no driver's JIT,
// purego no vendor libcuda, and the limiter of the tests is ours: `make
// test-gpu` is where that changes.
package cuda

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/refit-run/refit/activities/gpu"
)

// Verdict is the outcome of one probe.
type Verdict string

const (
	Pass      Verdict = "pass"
	NoLibrary Verdict = "no_library" // libcuda.so.1 is not on the loader's path
	NoDevice  Verdict = "no_device"  // CUDA_ERROR_NO_DEVICE, or the device asked for is not visible
	NotReady  Verdict = "not_ready"  // CUDA_ERROR_SYSTEM_NOT_READY: the fabric manager
	Mismatch  Verdict = "mismatch"   // library and kernel module of different versions
	Fail      Verdict = "fail"       // any other CUDA error, a wrong result, a bad memory word
	Crash     Verdict = "crash"      // the child ended without an answer
	Timeout   Verdict = "timeout"    // no answer by the deadline; the child was killed
	Wedged    Verdict = "wedged"     // the child survives SIGKILL
)

// Options say what to prove, and how hard.
type Options struct {
	// UUID is a GPU ("GPU-…") or a MIG device ("MIG-…"); empty takes the first
	// device that is visible, as in a pod.
	UUID string
	// Card is the UUID of the GPU that a MIG device is of: a child that is
	// wedged there keeps probes away from every device of the card.
	Card string
	// Ordinal picks one of several visible devices when UUID is empty.
	Ordinal int
	// Library replaces libcuda.so.1. With an absolute path the file that was
	// mapped must be that one.
	Library string
	// MemoryMiB is the size of the pattern test; 0 takes MemoryShare of what is
	// free. Where less can be had, less is used: the row of the memory says so.
	MemoryMiB   uint64
	MemoryShare float64
	// Soak repeats the patterns with new seeds for that long.
	Soak time.Duration
	// Copies times copies; Floors are the GB/s below which a copy is slow.
	Copies bool
	Floors Bandwidth
	// Preload is kept for the probe itself: in a pod the injected library is part
	// of the path that a workload takes, and may be the only way to a device.
	Preload string
	// Limit asks for the second run, with the limiter preloaded.
	Limit *Limit
	// Timeout bounds each run; 0 is a minute more than Soak.
	Timeout time.Duration
	// Env is added to the child's environment.
	Env []string
}

// Limit is a software vGPU as a workload meets it.
type Limit struct {
	// Preload is the limiter, the value of LD_PRELOAD.
	Preload string
	// Bytes is the memory above which an allocation must be refused.
	Bytes uint64
}

// Bandwidth is in GB/s; 0 is not measured, or no floor.
type Bandwidth struct {
	DeviceToDevice float64 `json:"deviceToDevice,omitempty"`
	HostToDevice   float64 `json:"hostToDevice,omitempty"`
	DeviceToHost   float64 `json:"deviceToHost,omitempty"`
}

// below lists the copies that are slower than their floor.
func (b Bandwidth) below(floor Bandwidth) []string {
	var out []string
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"device to device", b.DeviceToDevice, floor.DeviceToDevice},
		{"host to device", b.HostToDevice, floor.HostToDevice},
		{"device to host", b.DeviceToHost, floor.DeviceToHost},
	} {
		if c.got < c.want {
			out = append(out, fmt.Sprintf("%s %.1f GB/s of %.1f", c.name, c.got, c.want))
		}
	}
	return out
}

// Result is what one probe found.
type Result struct {
	Verdict Verdict `json:"verdict"`
	// Stage is where a probe that did not pass stopped.
	Stage string `json:"stage,omitempty"`
	Error string `json:"error,omitempty"`
	// Code is the CUresult, 0 where no CUDA call failed.
	Code int `json:"code,omitempty"`

	// CUDA is 1000*major + 10*minor of the driver; Library the mapped file.
	CUDA        int    `json:"cuda,omitempty"`
	Library     string `json:"library,omitempty"`
	Devices     int    `json:"devices"`
	Name        string `json:"name,omitempty"`
	UUID        string `json:"uuid,omitempty"`
	PCI         string `json:"pci,omitempty"`
	Capability  string `json:"capability,omitempty"`
	Processors  int    `json:"processors,omitempty"`
	ECC         bool   `json:"ecc"`
	ComputeMode int    `json:"computeMode"`
	PTX         string `json:"ptx,omitempty"`

	TotalBytes uint64 `json:"totalBytes,omitempty"`
	// UsableBytes is the total that cuMemGetInfo gives: a limiter may show its
	// limit there.
	UsableBytes uint64 `json:"usableBytes,omitempty"`
	FreeBytes   uint64 `json:"freeBytes,omitempty"`
	TestedBytes uint64 `json:"testedBytes,omitempty"`
	// WantedBytes is what was to be tested. Drained: it is a share of what was
	// free, which nobody else was to take.
	WantedBytes uint64 `json:"wantedBytes,omitempty"`
	Drained     bool   `json:"drained,omitempty"`
	// Patterns counts the seeds that were written and checked.
	Patterns int    `json:"patterns,omitempty"`
	BadWords uint64 `json:"badWords,omitempty"`
	// Soaked is how long the patterns were repeated; less than Soak where the
	// deadline came before.
	Soaked time.Duration `json:"soaked,omitempty"`

	Bandwidth Bandwidth `json:"bandwidth"`
	// Slow lists the copies below their floor: a warning, not a failure.
	Slow []string `json:"slow,omitempty"`
	// Millis is the time of each stage.
	Millis map[string]int64 `json:"millis,omitempty"`
	// Limit is the second run, nil when it was not asked for or the first did
	// not pass.
	Limit *LimitResult `json:"limit,omitempty"`
}

// LimitResult is the run with the limiter preloaded.
type LimitResult struct {
	Verdict Verdict `json:"verdict"`
	// Refused: an allocation above the limit was answered with out of memory.
	Refused bool   `json:"refused"`
	Found   string `json:"found"`
	// Skipped says why a refusal would have proven nothing.
	Skipped string `json:"skipped,omitempty"`
}

// Rows of the validation table that a probe answers.
const (
	CallCheck      = "CUDA call"
	MemoryCheck    = "memory tested"
	BandwidthCheck = "bandwidth"
	LimitCheck     = "vGPU limit"
)

// ToldByFigures are the rows whose figures Figures has.
var ToldByFigures = []string{CallCheck, BandwidthCheck}

// Figures are what a probe that passed has measured.
func (r Result) Figures() gpu.Proof {
	f := gpu.Proof{Device: r.UUID, TestedMiB: r.TestedBytes >> 20, WantedMiB: r.WantedBytes >> 20, Patterns: r.Patterns,
		SoakedSeconds: int(r.Soaked / time.Second)}
	if b := r.Bandwidth; b != (Bandwidth{}) {
		f.Bandwidth = &gpu.Bandwidth{DeviceToDevice: tenths(b.DeviceToDevice), HostToDevice: tenths(b.HostToDevice), DeviceToHost: tenths(b.DeviceToHost)}
	}
	return f
}

func tenths(v float64) float64 { return math.Round(v*10) / 10 }

// Checks are the rows of the validation table that this probe answers.
func (r Result) Checks() []gpu.Check {
	call := gpu.Check{Name: CallCheck, Device: r.UUID, Expected: string(Pass), Found: string(r.Verdict),
		// The table: whatever is not a pass is fatal, also what a reset mends.
		Severity: gpu.Fatal, OK: r.Verdict == Pass, Hint: hints[r.Verdict]}
	if r.Verdict == Pass {
		call.Found = fmt.Sprintf("pass (%d MiB, %d patterns)", r.TestedBytes>>20, r.Patterns)
	} else if r.Error != "" {
		call.Found = fmt.Sprintf("%s during %s: %s", r.Verdict, r.Stage, r.Error)
	}
	out := []gpu.Check{call}
	if r.Verdict == Pass {
		out = append(out, r.memory())
	}
	if r.Bandwidth != (Bandwidth{}) {
		c := gpu.Check{Name: BandwidthCheck, Device: r.UUID, Severity: gpu.Warn, OK: len(r.Slow) == 0,
			Expected: "copies at or above the plan's floors",
			Found: fmt.Sprintf("device to device %.1f, host to device %.1f, device to host %.1f GB/s",
				r.Bandwidth.DeviceToDevice, r.Bandwidth.HostToDevice, r.Bandwidth.DeviceToHost)}
		if !c.OK {
			c.Found = strings.Join(r.Slow, "; ")
			c.Hint = "compare PCIe width and generation, look for other work on the GPU, then run again on the drained host"
		}
		out = append(out, c)
	}
	if r.Limit != nil {
		hint := "the limiter is not in force: compare its version with the hypervisor's and look at the pod's LD_PRELOAD"
		if r.Limit.Skipped != "" {
			hint = "run again when the device has more memory free than the limit"
		}
		out = append(out, gpu.Check{Name: LimitCheck, Device: r.UUID, Severity: gpu.Fatal, OK: r.Limit.Refused,
			Expected: "an allocation above the limit is refused", Found: r.Limit.Found, Skipped: r.Limit.Skipped, Hint: hint})
	}
	return out
}

// memory judges how much was tested. Beside tenants less is a warning; of a
// drained device it leaves the level's question open.
func (r Result) memory() gpu.Check {
	c := gpu.Check{Name: MemoryCheck, Device: r.UUID, Expected: fmt.Sprintf("%d MiB", r.WantedBytes>>20),
		Found: fmt.Sprintf("%d MiB", r.TestedBytes>>20), Severity: gpu.Warn, OK: r.TestedBytes >= r.WantedBytes}
	if c.OK {
		return c
	}
	c.Found = fmt.Sprintf("only %d MiB could be taken, %d MiB were free", r.TestedBytes>>20, r.FreeBytes>>20)
	c.Hint = "something else keeps or takes the memory: " + whoKeeps + ", then check again"
	if r.Drained {
		c.Severity, c.Skipped = gpu.Fatal, c.Found+" and "+c.Expected+" were to be tested"
	}
	return c
}

// hints say what usually helps.
var hints = map[Verdict]string{
	NoLibrary: "install the userspace driver of the kernel module's version and run ldconfig",
	NoDevice:  "look at nvidia-smi -L and the device files; on a GPU in MIG mode create its instances first",
	NotReady:  "start nvidia-fabricmanager (and nvidia-imex where used) in the driver's version and wait until the fabric is up",
	Mismatch:  "the upgrade is half done: reload the kernel module of the installed version, or reboot",
	Fail:      "drain the host, look for Xid lines in the kernel log, reset the GPU and run again; a second failure means repair",
	Crash:     "the driver library ended the process: reinstall the driver, then look for Xid lines in the kernel log",
	Timeout:   "the GPU did not finish: look for Xid lines in the kernel log, drain the host and reset the GPU",
	Wedged:    "the driver holds the process in the kernel: reset the GPU, or reboot the host",
}
