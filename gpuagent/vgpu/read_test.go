package vgpu

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

func TestTheRealWriterNeverMakesAFile(t *testing.T) {
	root := t.TempDir()
	w := Sysfs{root}
	require.ErrorIs(t, w.Write(t.Context(), "sys/none", "1"), os.ErrNotExist)
	require.NoError(t, os.WriteFile(filepath.Join(root, "there"), []byte("0"), 0o600))
	require.NoError(t, w.Write(t.Context(), "there", "1"))
	text, err := os.ReadFile(filepath.Join(root, "there"))
	require.NoError(t, err)
	require.Equal(t, "1", string(text))
	require.ErrorIs(t, w.Write(t.Context(), ".", "1"), syscall.EISDIR, "the kernel's own answer comes back")
}

// hang makes a file that answers nobody: to open a FIFO waits for its other end.
func hang(t *testing.T, path string) {
	t.Helper()
	require.NoError(t, os.RemoveAll(path))
	require.NoError(t, unix.Mkfifo(path, 0o600))
}

const soon = 500 * time.Millisecond

func TestAWriteThatNeverReturnsIsGivenUpAndItsFileNamed(t *testing.T) {
	k, _ := newKernel(t, Vendor, 4)
	require.NoError(t, k.EnableVFs(t.Context(), k.pci))
	path := vendorFile(k.vf(1))
	hang(t, k.path(path))
	err := explain(writeWithin(t.Context(), soon, k.root, path, "1003"), "GPU "+k.pci)
	var late child.Timeout
	require.ErrorAs(t, err, &late)
	require.Equal(t, setup.Stop, setup.ClassOf(err))
	require.ErrorContains(t, err, `the write of "1003" to `+path)
	require.ErrorContains(t, err, "needs a GPU reset or a reboot")
}

func TestAReadThatNeverReturnsIsGivenUpAndItsFileNamed(t *testing.T) {
	for _, framework := range []string{Vendor, MDev} {
		t.Run(framework, func(t *testing.T) {
			k, _ := newKernel(t, framework, 4)
			require.NoError(t, k.EnableVFs(t.Context(), k.pci))
			told, err := nvml.Setters{}.ReadVGPU(t.Context())
			require.NoError(t, err)
			path := k.path("sys/bus/pci/devices/" + k.vf(2) + "/nvidia/creatable_vgpu_types")
			if framework == MDev {
				path = k.path(mdevBus + "/" + k.vf(2) + "/mdev_supported_types/nvidia-1002/available_instances")
			}
			hang(t, path)
			_, err = readWithin(t.Context(), soon, k.root, told)
			var late child.Timeout
			require.ErrorAs(t, err, &late)
			require.ErrorContains(t, err, "the read of "+path)
		})
	}
}
