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
)

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
		var errno syscall.Errno
		err := write(filepath.Join(in.Root, in.Path), in.Value)
		if errors.As(err, &errno) {
			return errno, nil
		}
		return errno, err
	})
}

type readRequest struct {
	Root string
	Told nvml.VGPUHost
}

type writeRequest struct{ Root, Path, Value string }

// Read observes the tree under root; told is what NVML said.
func Read(ctx context.Context, root string, told nvml.VGPUHost) (Host, error) {
	return readWithin(ctx, readLimit, root, told)
}

func readWithin(ctx context.Context, limit time.Duration, root string, told nvml.VGPUHost) (Host, error) {
	var h Host
	err := child.Run(ctx, child.Spec{Name: readChild, Request: readRequest{root, told}, Timeout: limit, Reply: &h})
	return h, err
}

// writeWithin gives the kernel's own answer back, so that a caller can tell
// EBUSY from EEXIST.
func writeWithin(ctx context.Context, limit time.Duration, root, path, value string) error {
	var errno syscall.Errno
	err := child.Run(ctx, child.Spec{Name: writeChild, Request: writeRequest{root, path, value}, Timeout: limit, Reply: &errno})
	if err != nil {
		return err
	}
	if errno != 0 {
		return &os.PathError{Op: "write", Path: path, Err: errno}
	}
	return nil
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
