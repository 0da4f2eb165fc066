package cuda

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/refit-run/refit/gpuagent/child"
)

// Types and codes of the driver API, from its published header.
type (
	cuResult int32
	cuDevice int32
	// devicePtr is an address on the device; the host must not follow it.
	devicePtr uint64
	handle    uintptr
)

const (
	codeOutOfMemory   cuResult = 2
	codeNoDevice      cuResult = 100
	codeNotReady      cuResult = 802
	codeMismatch      cuResult = 803
	attrProcessors             = 16
	attrComputeMode            = 20
	attrECC                    = 32
	attrMajor                  = 75
	attrMinor                  = 76
	jitErrorLog                = 5
	jitErrorLogSize            = 6
	streamNonBlocking          = 1
)

// driver is the loaded library. Only functions that every supported driver has
// are used, in their newest form where there are several.
type driver struct {
	init              func(flags uint32) cuResult
	driverVersion     func(v *int32) cuResult
	errorName         func(r cuResult, s **byte) cuResult
	errorText         func(r cuResult, s **byte) cuResult
	deviceCount       func(n *int32) cuResult
	deviceGet         func(d *cuDevice, ordinal int32) cuResult
	deviceName        func(name *byte, n int32, d cuDevice) cuResult
	deviceUUID        func(u *[16]byte, d cuDevice) cuResult
	cardUUID          func(u *[16]byte, d cuDevice) cuResult
	devicePCI         func(s *byte, n int32, d cuDevice) cuResult
	deviceMemory      func(n *uint64, d cuDevice) cuResult
	deviceAttribute   func(v *int32, attribute int32, d cuDevice) cuResult
	primaryCtxRetain  func(c *handle, d cuDevice) cuResult
	primaryCtxRelease func(d cuDevice) cuResult
	ctxSetCurrent     func(c handle) cuResult
	moduleLoadDataEx  func(m *handle, image *byte, n uint32, options *int32, values *uintptr) cuResult
	moduleUnload      func(m handle) cuResult
	moduleGetFunction func(f *handle, m handle, name *byte) cuResult
	memAlloc          func(p *devicePtr, n uint64) cuResult
	memFree           func(p devicePtr) cuResult
	memInfo           func(free, total *uint64) cuResult
	hostAlloc         func(p *unsafe.Pointer, n uint64, flags uint32) cuResult
	hostFree          func(p unsafe.Pointer) cuResult
	copyToDevice      func(d devicePtr, h unsafe.Pointer, n uint64, s handle) cuResult
	copyToHost        func(h unsafe.Pointer, d devicePtr, n uint64, s handle) cuResult
	copyOnDevice      func(to, from devicePtr, n uint64, s handle) cuResult
	set32             func(d devicePtr, v uint32, n uint64, s handle) cuResult
	streamCreate      func(s *handle, flags uint32) cuResult
	streamDestroy     func(s handle) cuResult
	streamSynchronize func(s handle) cuResult
	eventCreate       func(e *handle, flags uint32) cuResult
	eventDestroy      func(e handle) cuResult
	eventRecord       func(e handle, s handle) cuResult
	eventSynchronize  func(e handle) cuResult
	eventElapsed      func(ms *float32, from, to handle) cuResult
	launchKernel      func(f handle, gx, gy, gz, bx, by, bz, shared uint32, s handle, params, extra *unsafe.Pointer) cuResult
}

var errNoLibrary = errors.New("the driver's libcuda.so.1 was not found by the loader")

// load opens the library and binds its functions. For interposed calls the
// search is the process's own, which begins with what is preloaded; otherwise it
// is the library's.
func load(path string, interposed bool) (*driver, error) {
	lib, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		if strings.Contains(err.Error(), "cannot open shared object file") {
			return nil, fmt.Errorf("%w: %v", errNoLibrary, err)
		}
		return nil, fmt.Errorf("dlopen %s: %w", path, err)
	}
	if interposed {
		lib = purego.RTLD_DEFAULT
	}
	d := &driver{}
	for _, f := range d.functions() {
		addr, err := lookup(lib, f.names)
		if err != nil {
			return nil, err
		}
		purego.RegisterFunc(f.to, addr)
	}
	return d, nil
}

func lookup(lib uintptr, names []string) (uintptr, error) {
	for _, name := range names {
		if addr, err := purego.Dlsym(lib, name); err == nil && addr != 0 {
			return addr, nil
		}
	}
	return 0, fmt.Errorf("libcuda has no function %s: the installed driver is older than any that is supported, or the file is not the driver's", strings.Join(names, " or "))
}

type function struct {
	to    any
	names []string
}

func (d *driver) functions() []function {
	f := func(to any, names ...string) function { return function{to, names} }
	return []function{
		f(&d.init, "cuInit"), f(&d.driverVersion, "cuDriverGetVersion"),
		f(&d.errorName, "cuGetErrorName"), f(&d.errorText, "cuGetErrorString"),
		f(&d.deviceCount, "cuDeviceGetCount"), f(&d.deviceGet, "cuDeviceGet"), f(&d.deviceName, "cuDeviceGetName"),
		f(&d.deviceUUID, "cuDeviceGetUuid_v2", "cuDeviceGetUuid"), // the first names a MIG device itself
		f(&d.cardUUID, "cuDeviceGetUuid", "cuDeviceGetUuid_v2"),   // the first its GPU
		f(&d.devicePCI, "cuDeviceGetPCIBusId"), f(&d.deviceMemory, "cuDeviceTotalMem_v2"),
		f(&d.deviceAttribute, "cuDeviceGetAttribute"),
		f(&d.primaryCtxRetain, "cuDevicePrimaryCtxRetain"),
		f(&d.primaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease"),
		f(&d.ctxSetCurrent, "cuCtxSetCurrent"),
		f(&d.moduleLoadDataEx, "cuModuleLoadDataEx"), f(&d.moduleUnload, "cuModuleUnload"),
		f(&d.moduleGetFunction, "cuModuleGetFunction"),
		f(&d.memAlloc, "cuMemAlloc_v2"), f(&d.memFree, "cuMemFree_v2"), f(&d.memInfo, "cuMemGetInfo_v2"),
		f(&d.hostAlloc, "cuMemHostAlloc"), f(&d.hostFree, "cuMemFreeHost"),
		f(&d.copyToDevice, "cuMemcpyHtoDAsync_v2"), f(&d.copyToHost, "cuMemcpyDtoHAsync_v2"),
		f(&d.copyOnDevice, "cuMemcpyDtoDAsync_v2"), f(&d.set32, "cuMemsetD32Async"),
		f(&d.streamCreate, "cuStreamCreate"), f(&d.streamDestroy, "cuStreamDestroy_v2"),
		f(&d.streamSynchronize, "cuStreamSynchronize"),
		f(&d.eventCreate, "cuEventCreate"), f(&d.eventDestroy, "cuEventDestroy_v2"), f(&d.eventRecord, "cuEventRecord"),
		f(&d.eventSynchronize, "cuEventSynchronize"), f(&d.eventElapsed, "cuEventElapsedTime"),
		f(&d.launchKernel, "cuLaunchKernel"),
	}
}

// cudaError is a call that the driver refused.
type cudaError struct {
	call       string
	code       cuResult
	name, text string
}

func (e *cudaError) Error() string {
	if e.name == "" {
		return fmt.Sprintf("%s: CUDA error %d, which this driver has no name for", e.call, e.code)
	}
	return fmt.Sprintf("%s: %s (%d): %s", e.call, e.name, e.code, e.text)
}

func (d *driver) check(call string, code cuResult) error {
	if code == 0 {
		return nil
	}
	var name, text *byte
	d.errorName(code, &name)
	d.errorText(code, &text)
	return &cudaError{call, code, cString(name), cString(text)}
}

func cString(p *byte) string {
	if p == nil {
		return ""
	}
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return strings.Clone(unsafe.String(p, n))
}

// mapped is the file that stands for libcuda in this process. With an absolute
// path asked for it must be that file: a preloaded or interposed library would
// answer in the driver's place.
func mapped(wanted string) (string, error) {
	found, err := child.Mapped("libcuda.so")
	if err != nil {
		return "", err
	}
	first := strings.Join(found, ", ")
	if !filepath.IsAbs(wanted) {
		return first, nil
	}
	real, err := filepath.EvalSymlinks(wanted)
	if err != nil {
		return first, err
	}
	if first != real {
		return first, fmt.Errorf("%s was asked for and %q is mapped: another library stands in the driver's place (see /etc/ld.so.preload)", real, first)
	}
	return first, nil
}
