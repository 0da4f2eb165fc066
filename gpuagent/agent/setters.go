package agent

import (
	"context"
	"fmt"

	"github.com/refit-run/refit/gpuagent/mig"
	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
	"github.com/refit-run/refit/gpuagent/vgpu"
)

// Setters is the whole of what the agent can change on a host, beside the
// readings that go with each change: MIG, vGPU, sysfs and the reset of a GPU.
// Whoever holds the refusing one can change nothing.
type Setters interface {
	mig.Host
	vgpu.Driver
	vgpu.Writer
	// Reset resets the GPUs at the PCI addresses given.
	Reset(ctx context.Context, pci ...string) error
}

// NewSetters are the real ones of the host at root.
func NewSetters(root string) Setters { return real{vgpuWriter: vgpu.Sysfs{Root: root}} }

type vgpuWriter = vgpu.Writer

type real struct {
	nvml.Setters
	vgpuWriter
}

func (real) Reset(ctx context.Context, pci ...string) error { return mig.Reset(ctx, pci...) }

// Refusing reads by s and refuses every change before it reaches s.
func Refusing(s Setters) Setters {
	return refusing{mig.ReadOnly{Host: s}, vgpu.ReadOnly{Driver: s}}
}

type (
	migReadOnly  = mig.ReadOnly
	vgpuReadOnly = vgpu.ReadOnly
	refusing     struct {
		migReadOnly
		vgpuReadOnly
	}
)

func (refusing) Reset(_ context.Context, pci ...string) error {
	return fmt.Errorf("%w: reset of %q: this run only reads", setup.ErrRefused, pci)
}
