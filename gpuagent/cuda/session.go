package cuda

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"github.com/refit-run/refit/gpuagent/child"
)

const childName = "cuda.probe"

func init() {
	child.Register(childName, func(ctx context.Context, raw json.RawMessage) (any, error) {
		var req request
		if err := json.Unmarshal(raw, &req); err != nil {
			return nil, fmt.Errorf("decode the probe's request: %w", err)
		}
		return probe(ctx, req), nil
	})
}

// session is one probe in the child. Its context belongs to one thread.
type session struct {
	*driver
	req     request
	out     reply
	since   time.Time
	device  cuDevice
	kernels map[string]handle
	stream  handle
	undo    []func()
}

// probe runs the stages in turn; the first that fails gives the verdict.
func probe(ctx context.Context, req request) reply {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := &session{req: req, since: time.Now()}
	s.out.Millis = map[string]int64{}
	defer s.releaseTo(0)
	stages := []struct {
		name string
		run  func(context.Context) error
	}{
		{"dlopen", s.open}, {"init", s.identify}, {"context", s.context}, {"jit", s.compile},
		{"kernel", s.multiply}, {"memory", s.patterns}, {"bandwidth", s.copies}, {"limit", s.limit},
	}
	for _, stage := range stages {
		if (stage.name == "bandwidth" && !req.Copies) || (stage.name == "limit" && req.LimitBytes == 0) {
			continue
		}
		// The parent names the last stage of a child that hangs.
		child.Stage("%s", stage.name)
		s.since = time.Now()
		err := stage.run(ctx)
		s.out.Millis[stage.name] = time.Since(s.since).Milliseconds()
		if err != nil {
			s.failed(stage.name, err)
			return s.out
		}
	}
	s.out.Verdict = Pass
	return s.out
}

// releaseTo undoes what was taken since undo had so many entries.
func (s *session) releaseTo(entries int) {
	for i := len(s.undo) - 1; i >= entries; i-- {
		s.undo[i]()
	}
	s.undo = s.undo[:entries]
}

var errNotVisible = errors.New("the device asked for is not visible to CUDA")

func (s *session) failed(stage string, err error) {
	s.out.Stage, s.out.Error, s.out.Verdict = stage, err.Error(), Fail
	var refused *cudaError
	switch {
	case errors.Is(err, errNoLibrary):
		s.out.Verdict = NoLibrary
	case errors.Is(err, errNotVisible):
		s.out.Verdict = NoDevice
	case errors.As(err, &refused):
		s.out.Code = int(refused.code)
		switch refused.code {
		case codeNoDevice:
			s.out.Verdict = NoDevice
		case codeNotReady:
			s.out.Verdict = NotReady
		case codeMismatch:
			s.out.Verdict = Mismatch
		}
	}
}

func (s *session) open(context.Context) error {
	d, err := load(s.req.Library, s.req.Interposed)
	if err != nil {
		return err
	}
	s.driver = d
	s.out.Library, err = mapped(s.req.Library)
	return err
}

func (s *session) identify(context.Context) error {
	if err := s.check("cuInit", s.init(0)); err != nil {
		return err
	}
	var version, count int32
	if err := s.check("cuDriverGetVersion", s.driverVersion(&version)); err != nil {
		return err
	}
	if err := s.check("cuDeviceGetCount", s.deviceCount(&count)); err != nil {
		return err
	}
	s.out.CUDA, s.out.Devices = int(version), int(count)
	if count == 0 {
		return fmt.Errorf("%w: %s", errNotVisible, s.req.UUID)
	}
	// With a UUID in CUDA_VISIBLE_DEVICES the device asked for is number 0.
	if err := s.check("cuDeviceGet", s.deviceGet(&s.device, s.req.Ordinal)); err != nil {
		return err
	}
	return s.describe()
}

func (s *session) describe() error {
	var (
		name        [128]byte
		pci         [32]byte
		id, card    [16]byte
		total       uint64
		attributes  = []int32{attrProcessors, attrComputeMode, attrECC, attrMajor, attrMinor}
		values      [5]int32
		check       = s.check
		errs        = []error{check("cuDeviceGetName", s.deviceName(&name[0], int32(len(name)), s.device))}
		asTerminate = func(b []byte) string { text, _, _ := strings.Cut(string(b), "\x00"); return text }
	)
	errs = append(errs, check("cuDeviceGetUuid_v2", s.deviceUUID(&id, s.device)), check("cuDeviceGetUuid", s.cardUUID(&card, s.device)),
		check("cuDeviceGetPCIBusId", s.devicePCI(&pci[0], int32(len(pci)), s.device)),
		check("cuDeviceTotalMem", s.deviceMemory(&total, s.device)))
	for i, a := range attributes {
		errs = append(errs, check(fmt.Sprintf("cuDeviceGetAttribute %d", a), s.deviceAttribute(&values[i], a, s.device)))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	s.out.Name, s.out.PCI, s.out.TotalBytes = asTerminate(name[:]), asTerminate(pci[:]), total
	kind := "GPU"
	if isMIG(s.req.UUID, s.out.Name) || id != card {
		kind = "MIG"
	}
	s.out.UUID = fmt.Sprintf("%s-%x-%x-%x-%x-%x", kind, id[:4], id[4:6], id[6:8], id[8:10], id[10:])
	s.out.Processors, s.out.ComputeMode, s.out.ECC = int(values[0]), int(values[1]), values[2] != 0
	s.out.Capability = fmt.Sprintf("%d.%d", values[3], values[4])
	if values[3] < 5 {
		return fmt.Errorf("compute capability %s is older than the oldest that the probe has code for (5.0)", s.out.Capability)
	}
	if !sameUUID(s.req.UUID, s.out.UUID) {
		return fmt.Errorf("%w: asked for %s, CUDA gives %s", errNotVisible, s.req.UUID, s.out.UUID)
	}
	return nil
}

// context takes the primary context, the one that a CUDA program gets.
func (s *session) context(context.Context) error {
	var c handle
	if err := s.check("cuDevicePrimaryCtxRetain", s.primaryCtxRetain(&c, s.device)); err != nil {
		return err
	}
	s.undo = append(s.undo, func() { s.primaryCtxRelease(s.device) })
	if err := s.check("cuCtxSetCurrent", s.ctxSetCurrent(c)); err != nil {
		return err
	}
	if err := s.check("cuStreamCreate", s.streamCreate(&s.stream, streamNonBlocking)); err != nil {
		return err
	}
	s.undo = append(s.undo, func() { s.streamDestroy(s.stream) })
	return s.check("cuMemGetInfo", s.memInfo(&s.out.FreeBytes, &s.out.UsableBytes))
}

// compile hands the driver the kernels as text; its log explains a refusal.
func (s *session) compile(context.Context) error {
	var major, minor int
	if _, err := fmt.Sscanf(s.out.Capability, "%d.%d", &major, &minor); err != nil {
		return fmt.Errorf("read compute capability %q: %w", s.out.Capability, err)
	}
	text, name := ptxFor(major, minor)
	s.out.PTX = name
	image := append([]byte(text), 0)
	log := make([]byte, 8192)
	// The values are a C array of pointers and of integers cast to pointers, which
	// the collector does not see: pinned, the log neither moves with a growing
	// stack nor goes away.
	var pin runtime.Pinner
	pin.Pin(&log[0])
	defer pin.Unpin()
	options := []int32{jitErrorLog, jitErrorLogSize}
	values := []uintptr{uintptr(unsafe.Pointer(&log[0])), uintptr(len(log))}
	var module handle
	code := s.moduleLoadDataEx(&module, &image[0], uint32(len(options)), &options[0], &values[0])
	if err := s.check("cuModuleLoadDataEx of PTX "+name, code); err != nil {
		return fmt.Errorf("%w; compiler: %s", err, strings.TrimSpace(cString(&log[0])))
	}
	s.undo = append(s.undo, func() { s.moduleUnload(module) })
	s.kernels = map[string]handle{}
	for _, kernel := range []string{kernelFMA, kernelFill, kernelCheck} {
		var f handle
		symbol := append([]byte(kernel), 0)
		if err := s.check("cuModuleGetFunction "+kernel, s.moduleGetFunction(&f, module, &symbol[0])); err != nil {
			return err
		}
		s.kernels[kernel] = f
	}
	return nil
}

// launch queues a kernel. The driver reads the arguments before it returns.
func (s *session) launch(kernel string, grid, block uint32, args ...unsafe.Pointer) error {
	code := s.launchKernel(s.kernels[kernel], grid, 1, 1, block, 1, 1, 0, s.stream, &args[0], nil)
	runtime.KeepAlive(args)
	return s.check("cuLaunchKernel "+kernel, code)
}

// wait ends all queued work; an error of a kernel shows here.
func (s *session) wait(after string) error {
	return s.check("cuStreamSynchronize after "+after, s.streamSynchronize(s.stream))
}

// alloc takes device memory until the session ends.
func (s *session) alloc(n uint64) (devicePtr, error) {
	var p devicePtr
	if err := s.check(fmt.Sprintf("cuMemAlloc of %d MiB", (n+1<<20-1)>>20), s.memAlloc(&p, n)); err != nil {
		return 0, err
	}
	s.undo = append(s.undo, func() { s.memFree(p) })
	return p, nil
}

// pinned takes host memory that the device copies to and from: with it every
// copy is asynchronous and ordered on the one stream. Pageable memory is not.
func (s *session) pinned(n uint64) (unsafe.Pointer, error) {
	var p unsafe.Pointer
	if err := s.check(fmt.Sprintf("cuMemHostAlloc of %d bytes", n), s.hostAlloc(&p, n, 0)); err != nil {
		return nil, err
	}
	s.undo = append(s.undo, func() { s.hostFree(p) })
	return p, nil
}
