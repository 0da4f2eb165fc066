package nvml

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	nvlib "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/refit-run/refit/gpuagent/child"
)

// Names of the functions that run in a child.
const (
	migReadChild  = "nvml.mig.read"
	migActChild   = "nvml.mig.act"
	vgpuReadChild = "nvml.vgpu.read"
	vgpuActChild  = "nvml.vgpu.act"
)

const (
	// setupRead is generous: without persistence mode each GPU initialises
	// anew for the child, which takes seconds on a host of eight.
	setupRead = time.Minute
	// setupAct covers SetMigMode, which resets the GPU where it can.
	setupAct = 3 * time.Minute
)

func init() {
	child.Register(migReadChild, inChild(readMIG))
	child.Register(migActChild, inChild(actMIG))
	child.Register(vgpuReadChild, inChild(readVGPU))
	child.Register(vgpuActChild, inChild(actVGPU))
}

// Setters reads and changes the set-up of the host's GPUs; every call is one
// child process. Env is the child's environment (nil: this process's own).
type Setters struct{ Env []string }

// Failure is what NVML answered instead of SUCCESS. With Found it was not asked:
// that was seen before, and Code is what it amounts to.
type Failure struct {
	Op    string `json:"op"`
	Code  Code   `json:"code"`
	Found string `json:"found,omitempty"`
}

func (f *Failure) Error() string {
	if f.Found != "" {
		return f.Op + ": " + f.Found
	}
	return fmt.Sprintf("%s: NVML answers %s", f.Op, f.Code)
}

// Answered reports whether err is NVML's answer with this code.
func Answered(err error, c Code) bool {
	var f *Failure
	return errors.As(err, &f) && f.Code == c
}

// Codes that a set-up decides on, beside those of a snapshot.
const (
	InUse                 = Code(gonvml.ERROR_IN_USE)
	InsufficientResources = Code(gonvml.ERROR_INSUFFICIENT_RESOURCES)
	InvalidState          = Code(gonvml.ERROR_INVALID_STATE)
	NotFound              = Code(gonvml.ERROR_NOT_FOUND)
)

// failed is nil for SUCCESS.
func failed(ret gonvml.Return, format string, args ...any) error {
	if ret == gonvml.SUCCESS {
		return nil
	}
	return &Failure{Op: fmt.Sprintf(format, args...), Code: Code(ret)}
}

// answer crosses the pipe: what NVML refused is data, so that its code stays a
// code.
type answer struct {
	Value   json.RawMessage `json:"value,omitempty"`
	Failure *Failure        `json:"failure,omitempty"`
}

// inChild wraps a call with what each needs: a library that initialised.
func inChild[Req, Out any](call func(s *session, r Req) (Out, error)) child.Func {
	return func(_ context.Context, request json.RawMessage) (any, error) {
		var r Req
		if err := json.Unmarshal(request, &r); err != nil {
			return nil, err
		}
		child.Stage("init")
		s := &session{lib: gonvml.New()}
		s.profiles = nvlib.New(s.lib)
		out, err := func() (Out, error) {
			var none Out
			if err := failed(s.lib.Init(), "initialise NVML"); err != nil {
				return none, err
			}
			defer func() { _ = s.lib.Shutdown() }() // the process ends next
			return call(s, r)
		}()
		if f, ok := err.(*Failure); ok {
			return answer{Failure: f}, nil
		}
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(out)
		return answer{Value: value}, err
	}
}

// session is the library in one child.
type session struct {
	lib      gonvml.Interface
	profiles nvlib.Interface
}

// has proves that the library knows the functions: calling one that it lacks
// ends the process.
func (s *session) has(names ...string) error {
	for _, name := range names {
		if s.lib.Extensions().LookupSymbol(name) != nil {
			return failed(gonvml.ERROR_FUNCTION_NOT_FOUND, "look up %s", name)
		}
	}
	return nil
}

// hasVersion is has for a function with versions: any up to last will do.
func (s *session) hasVersion(name string, last int) error {
	for v := last; v > 1; v-- {
		if s.has(fmt.Sprintf("%s_v%d", name, v)) == nil {
			return nil
		}
	}
	return s.has(name)
}

// each calls do for every GPU of the host.
func (s *session) each(do func(index int, d gonvml.Device) error) error {
	count, ret := s.lib.DeviceGetCount()
	if err := failed(ret, "count GPUs"); err != nil {
		return err
	}
	for i := range count {
		d, ret := s.lib.DeviceGetHandleByIndex(i)
		if err := failed(ret, "open GPU %d", i); err != nil {
			return err
		}
		if err := do(i, d); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) byUUID(uuid string) (gonvml.Device, error) {
	d, ret := s.lib.DeviceGetHandleByUUID(uuid)
	return d, failed(ret, "open GPU %s", uuid)
}

// identity is what both kinds of set-up know a GPU by.
func identity(d gonvml.Device) (uuid, pci string, pciID uint32, err error) {
	uuid, ret := d.GetUUID()
	if err := failed(ret, "UUID of a GPU"); err != nil {
		return "", "", 0, err
	}
	info, ret := d.GetPciInfo()
	if err := failed(ret, "PCI address of GPU %s", uuid); err != nil {
		return "", "", 0, err
	}
	// The address as sysfs writes it: NVML pads the domain to eight digits.
	return uuid, fmt.Sprintf("%04x:%02x:%02x.0", info.Domain, info.Bus, info.Device), info.PciDeviceId, nil
}

// call runs one function in a child and unpacks its answer.
func (s Setters) call(ctx context.Context, name, key string, limit time.Duration, request, out any) error {
	var a answer
	if err := child.Run(ctx, child.Spec{Name: name, Key: key, Request: request, Env: s.Env, Timeout: limit, Reply: &a}); err != nil {
		return err
	}
	if a.Failure != nil {
		return a.Failure
	}
	return json.Unmarshal(a.Value, out)
}
