package host_test

import (
	"encoding/binary"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/host/hosttest"
)

const driver = "580.95.05"

func tree(t *testing.T) (*hosttest.Tree, host.Host) {
	t.Helper()
	made, err := hosttest.Create(t.TempDir(), driver, 2)
	require.NoError(t, err)
	return made, host.Host{Root: made.Root}
}

func TestAHostIsReadBelowItsRoot(t *testing.T) {
	made, h := tree(t)
	require.NoError(t, made.Write("sys/bus/pci/devices/0000:00:1f.0/vendor", "0x8086\n"))
	require.NoError(t, made.Write("sys/bus/pci/devices/0000:20:00.0/vendor", "0x10de\n"))
	require.NoError(t, made.Write("sys/bus/pci/devices/0000:20:00.0/class", "0x040300\n"))
	require.NoError(t, made.AddPCI("0000:10:00.4"))
	require.NoError(t, os.Symlink("../0000:10:00.0", filepath.Join(made.Root, "sys/bus/pci/devices/0000:10:00.4/physfn")))
	require.NoError(t, made.Service("nvidia-fabricmanager", true))
	require.NoError(t, made.Service("nvidia-imex", false))
	s := h.Read(host.Options{Minors: []int{0, 1, 2}, Services: []string{"nvidia-fabricmanager", "nvidia-imex", "nvidia-persistenced"}})
	require.Equal(t, driver, s.Module)
	require.Equal(t, driver, s.Proc)
	require.Equal(t, []string{"nvidia", "nvidia_modeset", "nvidia_uvm"}, s.Modules)
	require.Equal(t, []host.PCIDevice{{Address: "0000:10:00.0"}, {Address: "0000:11:00.0"}}, s.PCI,
		"no audio function, no other vendor, no virtual function")
	require.Equal(t, time.Unix(1767225600, 0), s.Booted)
	require.NotEmpty(t, s.BootID)
	require.Equal(t, []host.Service{{Name: "nvidia-fabricmanager", Visible: true, Active: true},
		{Name: "nvidia-imex", Visible: true}, {Name: "nvidia-persistenced", Visible: true}}, s.Services)
	var missing []host.Node
	for _, n := range s.Nodes {
		if !n.Exists {
			missing = append(missing, n)
			continue
		}
		require.True(t, n.Char)
		require.Equal(t, s.Majors[n.Wanted], n.Major, "%s", n.Path)
	}
	require.Equal(t, []host.Node{{Path: "/dev/nvidia2", Wanted: "nvidia"}, {Path: "/dev/nvidia-caps/nvidia-cap4323", Wanted: "nvidia-caps", Optional: true}}, missing)
	require.Len(t, s.Nodes, 10, "control, uvm, uvm-tools, modeset, three GPUs and three capabilities")
}

func TestWhatIsHiddenIsNotTakenForAbsent(t *testing.T) {
	h := host.Host{Root: t.TempDir()}
	s := h.Read(host.Options{Services: []string{"nvidia-imex"}})
	require.False(t, s.PCIVisible)
	require.False(t, s.Services[0].Visible)
	require.False(t, s.Log.Visible)
	require.NotEmpty(t, s.Log.Why)
	require.Empty(t, s.Module)
}

func TestAnEmptyPCIBusIsAHiddenOne(t *testing.T) {
	made, h := tree(t)
	require.NoError(t, made.Remove("sys/bus/pci/devices"))
	require.NoError(t, os.MkdirAll(filepath.Join(made.Root, "sys/bus/pci/devices"), 0o755))
	require.False(t, h.Read(host.Options{}).PCIVisible)
}

func TestAServiceTellsTheVersionOfTheProgramThatRuns(t *testing.T) {
	made, h := tree(t)
	version := func() string {
		return h.Read(host.Options{Services: []string{"nvidia-fabricmanager.service"}}).Services[0].Version
	}
	require.NoError(t, made.Service("nvidia-fabricmanager", true))
	require.Empty(t, version(), "a process that is not the fabric manager is not asked")
	require.NoError(t, made.ServiceVersion("nvidia-fabricmanager", "nv-fabricmanager", "580.65.06"))
	require.Equal(t, "580.65.06", version())
	require.NoError(t, made.Remove("proc/4711/exe"))
	require.Empty(t, version())
	require.True(t, host.Versioned("nvidia-imex.service"))
	require.False(t, host.Versioned("nvidia-persistenced"))
}

func TestTheKernelLogIsReadAfterARecordAndMalformedLinesAreKept(t *testing.T) {
	made, h := tree(t)
	require.NoError(t, made.Log("[  9.000000] NVRM: Xid (PCI:0000:10:00): 13, before"))
	before := h.Read(host.Options{}).Log
	require.Equal(t, uint64(2), before.Last)
	require.Equal(t, 5*time.Second, before.Loaded)
	require.NoError(t, made.Log(
		"[ 10.000000] NVRM: Xid (PCI:0000:11:00): 79, pid=7, name=python, GPU has fallen off the bus.",
		"[ 10.500000] NVRM: Xid (PCI:0000AF:EE:00.0): 48",
		"[ 10.600000] NVRM: Xid (PCI:0000:11:00 GPU-I:05): 94, pid=7, Contained: CE User Channel", "[ 10.700000] NVRM: Xid (PCI:0000:11:00 GPU-I:05 GPU-CI:00): 13, pid=9",
		"NVRM: Xid (no address)", "[ 11.000000] usb 1-1: new device"))
	log := h.Read(host.Options{Since: before.Last}).Log
	require.Equal(t, []host.Xid{{PCI: "0000:11:00.0", Number: 79, Text: "pid=7, name=python, GPU has fallen off the bus."},
		{PCI: "00af:ee:00.0", Number: 48},
		{PCI: "0000:11:00.0", Instance: "GPU-I:05", Number: 94, Text: "pid=7, Contained: CE User Channel"},
		{PCI: "0000:11:00.0", Instance: "GPU-I:05 GPU-CI:00", Number: 13, Text: "pid=9"}}, log.Xids)
	require.Equal(t, []string{"NVRM: Xid (no address)"}, log.Unreadable)
	require.Equal(t, uint64(8), log.Last)
}

func TestAddressesOfAllWritersAreOne(t *testing.T) {
	for _, s := range []string{"0000:1A:00", "00000000:1a:00.0", "0000:1a:00.0"} {
		require.Equal(t, "0000:1a:00.0", host.Address(s))
	}
}

func TestLibrariesAreFoundAsTheLoaderFindsThem(t *testing.T) {
	made, h := tree(t)
	t.Setenv("LD_LIBRARY_PATH", "")
	require.NoError(t, made.Write("opt/nvidia/libcuda.so."+driver, ""))
	require.NoError(t, os.Symlink("libcuda.so."+driver, filepath.Join(made.Root, "opt/nvidia/libcuda.so.1")))
	require.NoError(t, made.Write("etc/ld.so.cache", loaderCache("libcuda.so.1", "/opt/nvidia/libcuda.so.1")))
	require.NoError(t, made.Write("usr/lib64/libnvidia-ml.so.570.1.2", ""))
	require.NoError(t, os.Symlink("libnvidia-ml.so.570.1.2", filepath.Join(made.Root, "usr/lib64/libnvidia-ml.so.1")))
	libraries := h.Read(host.Options{}).Libraries
	require.Equal(t, driver, libraries[0].Version)
	require.Equal(t, "570.1.2", libraries[1].Version)
	require.NoError(t, made.Remove("usr/lib64"))
	require.Empty(t, h.Read(host.Options{}).Libraries[1].Path)
}

// loaderCache is a cache with one entry, in the present format behind an older
// one.
func loaderCache(name, path string) string {
	b := make([]byte, 48+24)
	copy(b, "glibc-ld.so.cache1.1")
	binary.LittleEndian.PutUint32(b[20:], 1)
	binary.LittleEndian.PutUint32(b[48+4:], uint32(len(b)))
	binary.LittleEndian.PutUint32(b[48+8:], uint32(len(b)+len(name)+1))
	return "ld.so-1.7.0\x00" + string(b) + name + "\x00" + path + "\x00"
}

func TestTensorFusionsPlacesAreRead(t *testing.T) {
	made, h := tree(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/v1/devices" {
			_, _ = w.Write([]byte(`{"devices":[{"UUID":"GPU-B"},{"uuid":"GPU-A"}]}`))
		}
	}))
	defer server.Close()
	_, text, err := net.SplitHostPort(server.Listener.Addr().String())
	require.NoError(t, err)
	port, err := strconv.Atoi(text)
	require.NoError(t, err)
	require.NoError(t, made.Write("run/tensor-fusion/lib/libaccelerator_nvidia.so", ""))
	require.NoError(t, made.Write("run/tensor-fusion/shm/team/old/shm", "\x00\x00\x00\x00rest"))
	require.NoError(t, made.Write("run/tensor-fusion/shm/team/new/shm", "\x01\x00\x00\x00rest"))
	require.NoError(t, made.Write("run/tensor-fusion/shm/team/odd/shm", "\x07\x00\x00\x00rest"))
	require.NoError(t, made.Write("run/nvidia/validations/toolkit-ready", ""))
	require.NoError(t, made.Write("var/lib/kubelet/pod-resources/kubelet.sock", ""))
	require.NoError(t, made.Write("proc/1/mountinfo",
		"22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n44 22 0:40 / /run/tensor-fusion/shm rw,nosuid,nodev shared:9 - tmpfs tmpfs rw,size=1048576k,mode=777\n"))
	s := h.Read(host.Options{TensorFusion: &host.TensorFusionOptions{Port: port}}).TensorFusion
	require.Equal(t, "/run/tensor-fusion/lib/libaccelerator_nvidia.so", s.Accelerator)
	require.Equal(t, []host.PodState{{Pod: "team/new", Layout: 2}, {Pod: "team/odd"}, {Pod: "team/old", Layout: 1}}, s.Pods)
	require.Equal(t, []string{"gpu-a", "gpu-b"}, s.Hypervisor.UUIDs)
	require.False(t, s.Toolkit.IsZero())
	require.Equal(t, map[string]bool{"device-plugins": false, "pod-resources": true}, s.Kubelet)
	require.Equal(t, "tmpfs", s.Shm.Type)
	require.Equal(t, uint64(1<<20), s.Shm.SizeKiB)
	require.Subset(t, s.Shm.Options, []string{"rw", "nosuid", "nodev"})

	require.Nil(t, s.Process)
	require.Equal(t, host.Segment{}, s.Transport)

	process := func(pid, name, uid, capabilities string) {
		require.NoError(t, made.Write("proc/"+pid+"/comm", name+"\n"))
		require.NoError(t, made.Write("proc/"+pid+"/status", "Name:\t"+name+"\nUid:\t0\t"+uid+"\t0\t0\nCapEff:\t"+capabilities+"\n"))
	}
	process("1", "systemd", "0", "000001ffffffffff")
	process("50", "other", "1000", "0000000000000000")
	process("60", "hypervisor", "0", "000001ffffffffff")
	require.NoError(t, made.Write("dev/shm/tf_shm", "segment"))
	s = h.Read(host.Options{TensorFusion: &host.TensorFusionOptions{Port: port}}).TensorFusion
	require.Equal(t, &host.Process{PID: 60}, s.Process)
	require.Equal(t, host.Segment{Exists: true, Regular: true}, s.Transport)
	process("70", "hypervisor", "1000", "00000000a80425fb")
	s = h.Read(host.Options{TensorFusion: &host.TensorFusionOptions{Port: port}}).TensorFusion
	require.Equal(t, 70, s.Process.PID, "the one with fewer rights is judged")
	require.Equal(t, 1000, s.Process.UID)
	require.Equal(t, uint64(0x1ffffffffff&^0xa80425fb), s.Process.Lacks)

	server.Close()
	s = h.Read(host.Options{TensorFusion: &host.TensorFusionOptions{Port: port, Accelerator: "/none.so"}}).TensorFusion
	require.NotEmpty(t, s.Hypervisor.Error)
	require.Empty(t, s.Accelerator)
}
