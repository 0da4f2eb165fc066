package vgpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// Writer changes the host. Sysfs is the real one.
type Writer interface {
	// Write writes value to the file at path below the root.
	Write(path, value string) error
	// EnableVFs switches all virtual functions of a GPU on.
	EnableVFs(ctx context.Context, pci string) error
}

// Sysfs writes under a root.
type Sysfs struct{ Root string }

// Write opens without creating: a file that is not there is an answer.
func (s Sysfs) Write(path, value string) error {
	f, err := os.OpenFile(filepath.Join(s.Root, path), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// manage is the vGPU manager's own tool: a direct write of sriov_numvfs is
// refused while its driver holds the GPU.
const (
	manage      = "/usr/lib/nvidia/sriov-manage"
	manageLimit = 2 * time.Minute
)

// EnableVFs runs sriov-manage, in the host's root where that is not ours.
func (s Sysfs) EnableVFs(ctx context.Context, pci string) error {
	ctx, cancel := context.WithTimeout(ctx, manageLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, manage, "-e", pci)
	if filepath.Clean(s.Root) != "/" {
		cmd = exec.CommandContext(ctx, "chroot", s.Root, manage, "-e", pci)
	}
	out, err := setup.Output(ctx, cmd)
	if err != nil {
		return fmt.Errorf("%s -e %s: %w: %s", manage, pci, err, strings.TrimSpace(out))
	}
	return nil
}

// ReadOnly is a Driver and a Writer that refuses every change: for hosts that
// somebody else answers for.
type ReadOnly struct{ Driver }

// ActVGPU refuses.
func (ReadOnly) ActVGPU(_ context.Context, a nvml.VGPUAct) (nvml.VGPUGPU, error) {
	return nvml.VGPUGPU{}, fmt.Errorf("%w: %s on GPU %s: this run only reads", setup.ErrRefused, a.Kind, a.UUID)
}

// Write refuses.
func (ReadOnly) Write(path, value string) error {
	return fmt.Errorf("%w: write %q to %s: this run only reads", setup.ErrRefused, value, path)
}

// EnableVFs refuses.
func (ReadOnly) EnableVFs(_ context.Context, pci string) error {
	return fmt.Errorf("%w: virtual functions of %s: this run only reads", setup.ErrRefused, pci)
}

// explain classes what a write ended with.
func explain(err error, object string) error {
	f := &setup.Failure{Class: setup.Stop, Object: object, Found: err.Error(), Cause: err}
	switch {
	case errors.Is(err, setup.ErrRefused):
		return err
	case errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.EAGAIN):
		f.Class, f.Next = setup.Wait, "stop the virtual machine that uses it, then go on"
	case errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENOSPC):
		f.Next = "the driver does not take this type there: correct the layout"
	case errors.Is(err, os.ErrPermission), errors.Is(err, syscall.EROFS):
		f.Next = "run as root, with the host's /sys writable"
	case errors.Is(err, os.ErrNotExist):
		f.Next = "the device is gone or the driver was unloaded meanwhile: plan again"
	}
	return f
}
