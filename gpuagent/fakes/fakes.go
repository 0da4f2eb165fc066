// Package fakes makes hosts with GPUs that are not there: C libraries under the
// names libnvidia-ml.so.1 and libcuda.so.1, built with the C compiler, that the
// real bindings (go-nvml and purego) load in a child process. Their state is a
// file of key=value lines beside them, read anew at every call, so that a test
// changes the hardware between two calls and the state outlives every process.
//
// The fakes enforce what the published API says (placement of MIG instances,
// IN_USE, root, struct versions, the order of asynchronous work) and give a
// healthy answer to everything the agent reads. They are no proof about real
// hardware: nothing here has met a driver.
//
// Keys. "gpu.<n>.<key>" speaks for one GPU, "<key>" for all of them; the value
// "unsupported" makes the getter answer NOT_SUPPORTED.
//
//	gpus, model (h100 h200 a100 t4), library.driver, module.driver (none = not loaded), cuda.version
//	uuid pci serial name vbios minor gsp.version gsp.mode inforom inforom.image
//	lost (getter | handle), reset.required, recovery, not.root
//	pcie.width pcie.width.max pcie.gen pcie.gen.max pcie.gen.gpu pcie.replay
//	ecc.current ecc.pending ecc.{volatile,aggregate}.{corrected,uncorrected} sram.threshold
//	remap (unsupported) remap.{corrected,uncorrected,pending,failed,banks.none} unrepairable
//	repair.channel repair.tpc retired.pending retired.dbe retired.sbe
//	throttle temperature temperature.{slowdown,shutdown,margin,memory,gpu.max,memory.max}
//	power.{usage,limit,enforced,default,min,max} persistence compute.mode memory.total.mib memory.used.mib
//	nvlink.generation (5: other counters) nvlink.count nvlink.speed nvlink.<l>.{up,remote,speed,replay,recovery,crc.flit,crc.data}
//	fabric.{state,status,mask,summary,clique} p2p.<peer>.<kind> topology.<peer>
//	field.<id> field.<id>.<scope> (any field value; unknown: the driver is older than the field) events event=<type>:<data> (delivered once)
//	processes.{compute,graphics,mps}=<pid>:<MiB>[:<gi>:<ci>],…
//	cc.feature cc.ready c2c
//	mig (unsupported) mig.current mig.pending mig.needs.reset
//	gi.<id>=<profile>:<start>:<size> ci.<gi>.<id>=<profile>:<start>:<size> mig.uuid.<gi>.<ci>
//	vgpu.virtualization (3 = host) vgpu.sriov vgpu.active vgpu.type vgpu.heterogeneous vgpu.scheduler.*
//	cuda.free.mib cuda.alloc.mib cuda.piece.mib cuda.jit.fault cuda.bad.result cuda.bad.word cuda.consistent.flaw
//	cuda.hang.kernel cuda.fault.kernel (1 fma, 2 fill, 3 check) cuda.gbps.{dtod,htod,dtoh}
//
// Faults of one function, named without its _vN suffix, e.g.
// "gpu.3.fail.nvmlDeviceGetTemperature=999":
//
//	fail.<function>=CODE | CODExN (the next N calls) | CODE@K (the K-th call only)
//	hang.<function>=1   crash.<function>=1   slow.<function>=<milliseconds>
//
// "mig.activation" stands for the activation status of SetMigMode. "before.change"
// and "after.change" stand for any call of NVML that sets, creates or destroys:
// right before or right after its effect it kills the process that makes it and
// that one's parent, an agent with its child.
package fakes

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// StateVariable names the state file; without it a library reads gpu.state
// beside itself.
const StateVariable = "REFIT_FAKE_GPU_STATE"

// Host is one fake host: the libraries in Dir/lib and the state beside them.
type Host struct {
	Dir string
}

// TB is the part of testing.TB that NewHost needs.
type TB interface {
	Helper()
	TempDir() string
	Setenv(key, value string)
	Fatalf(format string, args ...any)
	Skipf(format string, args ...any)
}

// NewHost makes a fake host for one test and points the children that the test
// starts at it. CI must have a C compiler; elsewhere the test is skipped.
func NewHost(t TB, opts ...Option) *Host {
	t.Helper()
	h, err := Create(t.TempDir(), opts...)
	if errors.Is(err, ErrNoCompiler) && os.Getenv("CI") == "" {
		t.Skipf("%v", err)
	}
	if err != nil {
		t.Fatalf("make a fake host: %v", err)
	}
	for _, kv := range h.Env() {
		key, value, _ := strings.Cut(kv, "=")
		t.Setenv(key, value)
	}
	return h
}

// Create makes a fake host in dir.
func Create(dir string, opts ...Option) (*Host, error) {
	h := &Host{Dir: dir}
	if err := Build(h.Lib(), opts...); err != nil {
		return nil, err
	}
	return h, h.Set("gpus", "8")
}

// Lib is the folder of the libraries.
func (h *Host) Lib() string { return filepath.Join(h.Dir, "lib") }

// StateFile is the file of the state.
func (h *Host) StateFile() string { return filepath.Join(h.Lib(), "gpu.state") }

// Env is what a process needs to find this host's libraries and state.
func (h *Host) Env() []string {
	return []string{"LD_LIBRARY_PATH=" + h.Lib(), StateVariable + "=" + h.StateFile()}
}

// Set changes the state: keys and values in turn. An empty value removes the
// key.
func (h *Host) Set(pairs ...string) error {
	if len(pairs)%2 != 0 {
		return fmt.Errorf("set fake GPU state: %q has a key without a value", pairs)
	}
	return h.change(func(state map[string]string) {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i+1] == "" {
				delete(state, pairs[i])
			} else {
				state[pairs[i]] = pairs[i+1]
			}
		}
	})
}

// Get reads one key; empty when it is not set.
func (h *Host) Get(key string) (string, error) {
	var value string
	err := h.locked(func() error {
		state, err := h.read()
		value = state[key]
		return err
	})
	return value, err
}

// Swap replaces the libraries, as a driver upgrade does.
func (h *Host) Swap(opts ...Option) error { return Build(h.Lib(), opts...) }

// RemoveLibraries leaves a host without a userspace driver.
func (h *Host) RemoveLibraries() error {
	return errors.Join(os.Remove(filepath.Join(h.Lib(), NVML)), os.Remove(filepath.Join(h.Lib(), CUDA)))
}

// Limiter is the path of the library to preload.
func (h *Host) Limiter() string { return filepath.Join(h.Lib(), Limiter) }

// UUID is the name that the libraries give GPU n unless the state says
// otherwise, MIGUUID that of a compute instance.
func (h *Host) UUID(n int) string { return fmt.Sprintf("GPU-00000000-0000-4000-8000-%012x", n) }

// MIGUUID is the default name of a MIG device.
func (h *Host) MIGUUID(n, gi, ci int) string {
	return fmt.Sprintf("MIG-00000000-0000-5000-8000-%04x%04x%04x", n, gi, ci)
}

// ResetGPU does to GPU n what `nvidia-smi -r` does: a pending mode becomes
// current, a remap is applied, the GPU answers again.
func (h *Host) ResetGPU(n int) error {
	return h.change(func(state map[string]string) {
		prefix := "gpu." + strconv.Itoa(n) + "."
		if mode, ok := state[prefix+"mig.pending"]; ok && mode != state[prefix+"mig.current"] {
			state[prefix+"mig.current"] = mode
			dropInstances(state, prefix)
		}
		for _, key := range []string{"lost", "reset.required", "remap.pending", "recovery", "mig.needs.reset"} {
			delete(state, prefix+key)
		}
	})
}

// Reboot drops every MIG instance and, on Hopper, the MIG mode; settings that
// the driver does not keep return to their defaults.
func (h *Host) Reboot() error {
	return h.change(func(state map[string]string) {
		for n := range 16 {
			prefix := "gpu." + strconv.Itoa(n) + "."
			dropInstances(state, prefix)
			model := state[prefix+"model"]
			if model == "" {
				model = state["model"]
			}
			if mode, ok := state[prefix+"mig.pending"]; ok && model == "a100" {
				state[prefix+"mig.current"] = mode
			} else if model != "a100" {
				delete(state, prefix+"mig.current")
				delete(state, prefix+"mig.pending")
			}
			for _, key := range []string{"lost", "reset.required", "remap.pending", "recovery", "mig.needs.reset",
				"persistence", "power.limit", "compute.mode", "processes.compute"} {
				delete(state, prefix+key)
			}
		}
	})
}

func dropInstances(state map[string]string, prefix string) {
	for key := range state {
		if strings.HasPrefix(key, prefix+"gi.") || strings.HasPrefix(key, prefix+"ci.") {
			delete(state, key)
		}
	}
}

// locked holds the lock that the libraries take around each call.
func (h *Host) locked(fn func() error) error {
	lock, err := os.OpenFile(h.StateFile()+".lock", os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock the fake GPU state: %w", err)
	}
	return fn()
}

func (h *Host) change(fn func(map[string]string)) error {
	return h.locked(func() error {
		state, err := h.read()
		if err != nil {
			return err
		}
		fn(state)
		return h.write(state)
	})
}

func (h *Host) read() (map[string]string, error) {
	state := map[string]string{}
	f, err := os.Open(h.StateFile())
	if errors.Is(err, os.ErrNotExist) {
		return state, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		key, value, ok := strings.Cut(lines.Text(), "=")
		if ok && !strings.HasPrefix(key, "#") {
			state[strings.TrimSpace(key)] = strings.TrimSpace(value)
		}
	}
	return state, nil
}

func (h *Host) write(state map[string]string) error {
	var b strings.Builder
	for key, value := range state {
		fmt.Fprintf(&b, "%s=%s\n", key, value)
	}
	draft := h.StateFile() + ".edit"
	if err := os.WriteFile(draft, []byte(b.String()), 0o666); err != nil {
		return err
	}
	return os.Rename(draft, h.StateFile())
}
