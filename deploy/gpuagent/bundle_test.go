package gpuagent

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/gpuagent/host/hosttest"
)

// bundled builds the bundle into a folder of its own, as `make gpu-bundle` does.
func bundled(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "gpu")
	out, err := exec.Command(filepath.Join(top, "tools", "gpu-bundle.sh"), dir).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return dir
}

// bare runs a program where there is nothing of this machine to help it: no Go,
// no other program than a shell's, no home, and no network where this user may
// be cut off from it.
func bare(t *testing.T, dir string, env []string, name string, args ...string) (string, error) {
	t.Helper()
	tools := t.TempDir()
	for _, tool := range []string{"sh", "dirname"} {
		path, err := exec.LookPath(tool)
		require.NoError(t, err)
		require.NoError(t, os.Symlink(path, filepath.Join(tools, tool)))
	}
	run := func(apart *syscall.SysProcAttr) (string, error) {
		c := exec.Command(name, args...)
		c.Dir, c.Env, c.SysProcAttr = dir, append(env, "PATH="+tools), apart
		out, err := c.CombinedOutput()
		return string(out), err
	}
	out, err := run(&syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}, GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}})
	if errors.Is(err, syscall.EPERM) {
		t.Log("with the network of this machine: its user may make no namespace")
		return run(nil)
	}
	return out, err
}

// aGPU is a fake host with one, all that the level that looks is to see, and
// what leads a program there.
func aGPU(t *testing.T) (*hosttest.Tree, []string) {
	t.Helper()
	gpus := fakes.NewHost(t)
	require.NoError(t, gpus.Set("gpus", "1", "model", "h200"))
	tree, err := hosttest.Create(t.TempDir(), fakes.DefaultDriver, 1)
	require.NoError(t, err)
	require.NoError(t, tree.Service("nvidia-persistenced", true))
	for file, content := range map[string]string{
		"run/nvidia/validations/toolkit-ready": "", "run/tensor-fusion/libaccelerator_nvidia.so": "",
		"run/tensor-fusion/shm/apps/a/shm": "\x01\x00\x00\x00", "var/lib/kubelet/device-plugins/kubelet.sock": "",
		"var/lib/kubelet/pod-resources/kubelet.sock": "", "dev/shm/tf_shm": "", "etc/ld.so.cache": "",
		"proc/1/mountinfo": "36 35 0:40 / /run/tensor-fusion/shm rw,nosuid,nodev - tmpfs tmpfs rw,size=1048576k\n",
		"proc/77/comm":     "hypervisor\n", "proc/77/status": "Uid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n",
		"usr/lib64/libcuda.so.1": "", "usr/lib64/libnvidia-ml.so.1": "",
	} {
		require.NoError(t, tree.Write(file, content))
	}
	return tree, append(gpus.Env(), "NODE_NAME=gpu-1", "REFIT_HOST_ROOT="+tree.Root)
}

// declared asks for every row that reads the host.
const declared = `{"services": ["nvidia-persistenced"], "sharedMemoryMiB": 4, "tensorFusion": {"port": 1, "toolkit": true, "pods": ["apps/a"]}}`

// A GPU host may have neither Go nor a network.
func TestTheBundle(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil && os.Getenv("CI") == "" {
		t.Skip("no C compiler: install gcc and the C library's headers")
	}
	dir := bundled(t)
	tree, env := aGPU(t)
	t.Run("is small", func(t *testing.T) { small(t, dir) })
	t.Run("runs without Go and network", func(t *testing.T) {
		out, err := bare(t, dir, env, "./refit-gpuagent", "check", "--level", "standard")
		require.NoError(t, err, "%s", out)
		require.Contains(t, out, "verdict: pass")
		// The examination goes through whole, and ends there because what it met is
		// no real driver.
		out, err = bare(t, dir, env, "./run.sh")
		require.Error(t, err)
		require.Contains(t, out, fakes.CUDA+" is a fake library")
		require.NoFileExists(t, filepath.Join(dir, "gpu.md"))
		out, err = bare(t, dir, []string{"REFIT_HOST_ROOT=" + tree.Root}, "./run.sh")
		require.Error(t, err)
		require.Contains(t, out, "is the driver installed and loaded")
	})
	t.Run("sees through the mounts of the level that looks all that the host shows", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "expect.json")
		require.NoError(t, os.WriteFile(file, []byte(declared), 0o600))
		rows := func(root string) string {
			out, err := bare(t, dir, append(env, "REFIT_HOST_ROOT="+root), "./refit-gpuagent", "check", "--expect", file, "-o", "json", "--all")
			require.ErrorContains(t, err, "exit status 12", "%s", out) // no hypervisor answers
			return strings.ReplaceAll(out, root, "")
		}
		sets, _ := load(t)
		through := t.TempDir()
		for _, path := range mounted(sets["check"]) {
			at := filepath.Join(through, path)
			if _, err := os.Lstat(at); err == nil { // the lock is below /run
				continue
			}
			require.NoError(t, os.MkdirAll(filepath.Dir(at), 0o755))
			require.NoError(t, os.Symlink(filepath.Join(tree.Root, path), at))
		}
		require.Equal(t, rows(tree.Root), rows(through))
	})
}

func small(t *testing.T, dir string) {
	t.Helper()
	var size int64
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, f := range files {
		info, err := f.Info()
		require.NoError(t, err)
		size += info.Size()
	}
	require.Less(t, size, int64(60<<20))
}
