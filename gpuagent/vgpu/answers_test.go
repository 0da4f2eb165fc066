package vgpu

import (
	"context"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/setup"
)

// refusal is an error of the kernel at the end of a path, and what a person is told.
type refusal struct {
	framework, end string
	err            error
	class          setup.Class
	says           string
}

func TestWhatTheKernelAnswersIsTold(t *testing.T) {
	layout := map[string]int{"H100-40C": 2}
	for name, c := range map[string]refusal{
		"VF busy":             {Vendor, "current_vgpu_type", syscall.EBUSY, setup.Wait, "virtual machine"},
		"type refused":        {Vendor, "current_vgpu_type", syscall.EINVAL, setup.Stop, "does not take this type"},
		"write refused":       {Vendor, "current_vgpu_type", syscall.EACCES, setup.Stop, "as root"},
		"read-only sysfs":     {Vendor, "current_vgpu_type", syscall.EROFS, setup.Stop, "writable"},
		"driver unloaded":     {Vendor, "current_vgpu_type", syscall.ENOENT, setup.Stop, "plan again"},
		"mdev busy":           {MDev, "create", syscall.EBUSY, setup.Wait, "virtual machine"},
		"mdev refused":        {MDev, "create", syscall.EINVAL, setup.Stop, "does not take this type"},
		"sriov-manage failed": {MDev, "sriov-manage", exec.Command("false").Run(), setup.Stop, "exit status 1"},
	} {
		t.Run(name, func(t *testing.T) {
			k, _ := newKernel(t, c.framework, 4)
			k.faults[c.end] = c.err
			_, err := k.applier().Apply(t.Context(), entry(layout), node)
			require.Equal(t, c.class, setup.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, c.says)
			require.Len(t, apply(t, k, layout, node).Devices, 2, "the next run finishes it")
		})
	}
	for name, c := range map[string]refusal{
		"VF busy":      {Vendor, "current_vgpu_type", syscall.EBUSY, setup.Wait, "virtual machine"},
		"VF refuses":   {Vendor, "current_vgpu_type", syscall.EINVAL, setup.Stop, "release H100-40C on"},
		"mdev busy":    {MDev, "remove", syscall.EBUSY, setup.Wait, "virtual machine"},
		"mdev refuses": {MDev, "remove", syscall.EINVAL, setup.Stop, "release H100-40C"},
		"not root":     {MDev, "remove", syscall.EACCES, setup.Stop, "as root"},
	} {
		t.Run("to release, "+name, func(t *testing.T) {
			k, _ := newKernel(t, c.framework, 4)
			apply(t, k, layout, node)
			k.faults[c.end] = c.err
			r, err := k.applier().Apply(t.Context(), entry(map[string]int{}), node)
			require.Equal(t, c.class, setup.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, c.says)
			require.Empty(t, r.Actions)
			require.Empty(t, apply(t, k, map[string]int{}, node).Devices, "the next run finishes it")
		})
	}
	t.Run("the id is another device's: EEXIST", func(t *testing.T) {
		k, _ := newKernel(t, MDev, 4)
		require.NoError(t, k.EnableVFs(t.Context(), k.pci))
		k.link(mdevDevices+"/"+ID("gpu-1", k.pci, "H100-40C", 0), "../../../devices/pci/0000:77:00.0/x")
		require.NoError(t, os.MkdirAll(k.path("sys/devices/pci/0000:77:00.0/x"), 0o755))
		_, err := k.applier().Apply(t.Context(), entry(layout), node)
		require.Equal(t, setup.Stop, setup.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, "nothing has changed")
	})
	t.Run("a reply that was lost: EEXIST", func(t *testing.T) {
		k, _ := newKernel(t, MDev, 4)
		apply(t, k, map[string]int{}, node)
		require.NoError(t, k.EnableVFs(t.Context(), k.pci))
		a := k.applier()
		a.Writer = twice{k}
		r, err := a.Apply(t.Context(), entry(layout), node)
		require.NoError(t, err)
		require.Len(t, r.Devices, 2)
	})
	t.Run("gone already: ENOENT", func(t *testing.T) {
		k, _ := newKernel(t, MDev, 4)
		apply(t, k, layout, node)
		a := k.applier()
		a.Writer = twice{k}
		r, err := a.Apply(t.Context(), entry(map[string]int{}), node)
		require.NoError(t, err)
		require.Empty(t, r.Devices)
	})
	t.Run("a write that does nothing", func(t *testing.T) {
		k, _ := newKernel(t, Vendor, 4)
		require.NoError(t, k.EnableVFs(t.Context(), k.pci))
		k.deaf = true
		_, err := k.applier().Apply(t.Context(), entry(layout), node)
		require.ErrorContains(t, err, "nothing has changed")
		require.Equal(t, setup.Stop, setup.ClassOf(err))
	})
}

// twice makes every write twice and shows the answer of the second: what a
// caller sees whose first reply was lost.
type twice struct{ *kernel }

func (w twice) Write(ctx context.Context, path, value string) error {
	if err := w.kernel.Write(ctx, path, value); err != nil {
		return err
	}
	return w.kernel.Write(ctx, path, value)
}

func (w twice) SetVF(ctx context.Context, vf, value, was string) error {
	if err := w.kernel.SetVF(ctx, vf, value, was); err != nil {
		return err
	}
	return w.kernel.SetVF(ctx, vf, value, was)
}
