package vgpu

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/setup"
)

func TestNothingIsMadeWhereTheVGPUManagerIsNotAtWork(t *testing.T) {
	noModules := func(rest string) func(*kernel) { return func(k *kernel) { k.file("proc/modules", rest) } }
	for name, c := range map[string]struct {
		framework string
		broken    func(*kernel)
		says      string
	}{
		"mdev without its module": {MDev, noModules("nvidia 1 2 - Live 0x0"), "expected module nvidia_vgpu_vfio, found it is not loaded"},
		"without the driver":      {Vendor, noModules("ext4 1 0 - Live 0x0"), "modprobe nvidia"},
		"the manager has died":    {Vendor, func(k *kernel) { k.unit(host.VGPUMgr, "") }, "systemctl start nvidia-vgpu-mgr"},
		"the manager is not there": {MDev, func(k *kernel) {
			require.NoError(k.t, os.RemoveAll(k.path("sys/fs/cgroup/system.slice/"+host.VGPUMgr+".service")))
		}, host.VGPUMgr},
	} {
		t.Run(name, func(t *testing.T) {
			k, _ := newKernel(t, c.framework, 4)
			require.NoError(t, k.EnableVFs(t.Context(), k.pci))
			k.writes = nil
			c.broken(k)
			for _, do := range []func() (setup.Report, error){
				func() (setup.Report, error) {
					return k.applier().Preview(t.Context(), entry(map[string]int{"H100-40C": 1}), node)
				},
				func() (setup.Report, error) {
					return k.applier().Apply(t.Context(), entry(map[string]int{"H100-40C": 1}), node)
				},
			} {
				_, err := do()
				require.ErrorContains(t, err, c.says)
				require.Equal(t, setup.Stop, setup.ClassOf(err))
			}
			require.Empty(t, k.writes)
			require.Empty(t, apply(t, k, map[string]int{}, node).Actions, "a layout without virtual GPUs does not need it")
		})
	}
}

func TestWhatOfTheVGPUManagerIsNotVisibleIsNoted(t *testing.T) {
	k, _ := newKernel(t, Vendor, 4)
	require.NoError(t, os.Remove(k.path("proc/modules")))
	require.NoError(t, os.RemoveAll(k.path("sys/fs/cgroup")))
	r := apply(t, k, map[string]int{"H100-40C": 1}, node)
	require.Len(t, r.Notes, 1)
	require.Contains(t, r.Notes[0], "not visible here")

	k, _ = newKernel(t, Vendor, 4)
	k.unit(host.VGPUDaemon, "")
	r = apply(t, k, map[string]int{"H100-40C": 1}, node)
	require.Contains(t, r.Notes[0], "no process of nvidia-vgpud", "it may end once the types are told")
	require.Empty(t, apply(t, k, map[string]int{"H100-40C": 1}, node).Actions)

	k, _ = newKernel(t, Vendor, 4)
	k.file("proc/modules", "nvidia 1 2 - Live 0x0")
	require.Empty(t, apply(t, k, map[string]int{"H100-40C": 1}, node).Notes, "vendor VFIO needs no module of its own")
}
