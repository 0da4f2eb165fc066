package vgpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// Writer changes the host. Sysfs is the real one.
type Writer interface {
	// Write writes value to the file at path below the root.
	Write(ctx context.Context, path, value string) error
	// SetVF writes the type of a virtual function of the vendor's VFIO driver.
	// Right before, in one go with the write, it looks whether the function
	// still holds was (ESTALE) and, to release it, whether nobody has it open
	// (EBUSY): a machine may have been started since the plan.
	SetVF(ctx context.Context, vf, value, was string) error
	// EnableVFs switches all virtual functions of a GPU on.
	EnableVFs(ctx context.Context, pci string) error
}

// Sysfs writes under a root.
type Sysfs struct{ Root string }

// Write leaves a child that the driver holds behind, and names the file.
func (s Sysfs) Write(ctx context.Context, path, value string) error {
	return writeWithin(ctx, writeLimit, s.Root, path, value)
}

// SetVF leaves a child that the driver holds behind, and names the file.
func (s Sysfs) SetVF(ctx context.Context, vf, value, was string) error {
	return writing(ctx, writeLimit, vfChild, vendorFile(vf), vfRequest{s.Root, vf, value, was})
}

// manage is the vGPU manager's own tool: a direct write of sriov_numvfs is
// refused while its driver holds the GPU.
const (
	manage      = "/usr/lib/nvidia/sriov-manage"
	manageLimit = 2 * time.Minute
)

// EnableVFs runs sriov-manage, in the host's root where that is not ours.
func (s Sysfs) EnableVFs(ctx context.Context, pci string) error {
	command := []string{manage, "-e", pci}
	if filepath.Clean(s.Root) != "/" {
		command = append([]string{"chroot", s.Root}, command...)
	}
	_, err := child.Tool(ctx, manageLimit, command[0], command[1:]...)
	return err
}

// ReadOnly is a Driver and a Writer that refuses every change: for hosts that
// somebody else answers for.
type ReadOnly struct{ Driver }

// ActVGPU refuses.
func (ReadOnly) ActVGPU(_ context.Context, a nvml.VGPUAct) (nvml.VGPUGPU, error) {
	return nvml.VGPUGPU{}, fmt.Errorf("%w: %s on GPU %s: this run only reads", setup.ErrRefused, a.Kind, a.UUID)
}

// Write refuses.
func (ReadOnly) Write(_ context.Context, path, value string) error {
	return fmt.Errorf("%w: write %q to %s: this run only reads", setup.ErrRefused, value, path)
}

// SetVF refuses.
func (ReadOnly) SetVF(_ context.Context, vf, value, _ string) error {
	return fmt.Errorf("%w: write %q to %s: this run only reads", setup.ErrRefused, value, vendorFile(vf))
}

// EnableVFs refuses.
func (ReadOnly) EnableVFs(_ context.Context, pci string) error {
	return fmt.Errorf("%w: virtual functions of %s: this run only reads", setup.ErrRefused, pci)
}

// explain classes what a write ended with.
func explain(err error, object string) error {
	var errno syscall.Errno
	var said *exec.ExitError
	if !errors.As(err, &errno) && !errors.As(err, &said) {
		return setup.Explain(err, object) // refused, or what became of the child
	}
	f := &setup.Failure{Class: setup.Stop, Object: object, Found: err.Error(), Cause: err}
	switch {
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
