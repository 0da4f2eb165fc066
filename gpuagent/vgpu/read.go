package vgpu

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/nvml"
)

const (
	// readLimit: the files of the tree answer at once, the open files of all
	// processes of a full host within seconds.
	readLimit = time.Minute
	// writeLimit: the vGPU manager takes seconds to make or to release one.
	writeLimit = time.Minute
)

// Names of the functions that run in a child: a driver that hangs holds
// whoever reads or writes its files in the kernel.
const (
	readChild  = "vgpu.read"
	writeChild = "vgpu.write"
	vfChild    = "vgpu.setVF"
)

// freeVF is what a virtual function holds that is no virtual GPU.
const freeVF = "0"

func init() {
	child.Register(readChild, func(_ context.Context, r json.RawMessage) (any, error) {
		var in readRequest
		if err := json.Unmarshal(r, &in); err != nil {
			return nil, err
		}
		return observe(in.Root, in.Told)
	})
	child.Register(writeChild, func(_ context.Context, r json.RawMessage) (any, error) {
		var in writeRequest
		if err := json.Unmarshal(r, &in); err != nil {
			return nil, err
		}
		child.Stage("the write of %q to %s", in.Value, in.Path)
		return answer(write(filepath.Join(in.Root, in.Path), in.Value))
	})
	child.Register(vfChild, func(_ context.Context, r json.RawMessage) (any, error) {
		var in vfRequest
		if err := json.Unmarshal(r, &in); err != nil {
			return nil, err
		}
		return answer(setVF(in))
	})
}

// answer makes the kernel's own answer data.
func answer(err error) (syscall.Errno, error) {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno, nil
	}
	return 0, err
}

type readRequest struct {
	Root string
	Told nvml.VGPUHost
}

type writeRequest struct{ Root, Path, Value string }

type vfRequest struct{ Root, VF, Value, Was string }

// Read observes the tree under root; told is what NVML said.
func Read(ctx context.Context, root string, told nvml.VGPUHost) (Host, error) {
	return readWithin(ctx, readLimit, root, told)
}

func readWithin(ctx context.Context, limit time.Duration, root string, told nvml.VGPUHost) (Host, error) {
	var h Host
	err := child.Run(ctx, child.Spec{Name: readChild, Request: readRequest{root, told}, Timeout: limit, Reply: &h})
	return h, err
}

func writeWithin(ctx context.Context, limit time.Duration, root, path, value string) error {
	return writing(ctx, limit, writeChild, path, writeRequest{root, path, value})
}

// writing gives the kernel's own answer back, so that a caller can tell EBUSY
// from EEXIST.
func writing(ctx context.Context, limit time.Duration, name, path string, request any) error {
	var errno syscall.Errno
	err := child.Run(ctx, child.Spec{Name: name, Request: request, Timeout: limit, Reply: &errno})
	if err != nil {
		return err
	}
	if errno != 0 {
		return &os.PathError{Op: "write", Path: path, Err: errno}
	}
	return nil
}

// setVF runs in the child.
func setVF(in vfRequest) error {
	t := tree{root: in.Root}
	path := t.path(vendorFile(in.VF))
	is, err := line(path)
	switch {
	case err != nil:
		return err
	case is == in.Value:
		return nil // an earlier try, whose reply was lost
	case is != in.Was:
		return syscall.ESTALE
	}
	if in.Value == freeVF {
		child.Stage("the scan of %s", t.path("proc"))
		blind := t.scan()
		switch {
		case t.inUse(t.path(pciDevices, in.VF)):
			return syscall.EBUSY
		case blind:
			return syscall.EACCES // it may be in use
		}
	}
	child.Stage("the write of %q to %s", in.Value, vendorFile(in.VF))
	return write(path, in.Value)
}

// write opens without creating: a file that is not there is an answer.
func write(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
