package check

import (
	"fmt"
	"slices"
	"strings"

	"github.com/refit-run/refit/activities/gpu"
)

// defaultShmMiB is the operator's constant for the shared-memory file system.
const defaultShmMiB = 1024

// shmFreeLeast is how much of it must be free for the next pods, in KiB: the
// state of one pod is below 64 KiB.
const shmFreeLeast = 16 << 10

// tensorFusionToolkit: the file that pods wait for is of this load of the
// driver; an older one passes their test without proving anything.
func tensorFusionToolkit(c *cell) {
	if !c.tensorFusion() {
		return
	}
	t := c.in.Host.TensorFusion
	boot, loaded := c.in.Host.Booted, c.in.Host.Log.Loaded
	since := boot.Add(loaded)
	switch {
	case !c.in.Expect.TensorFusion.Toolkit && t.Toolkit.IsZero():
		c.skip("no toolkit-ready file, and none is declared")
	case t.Toolkit.IsZero():
		c.fail(gpu.Fatal, "/run/nvidia/validations/toolkit-ready", "no such file", "look at the GPU Operator's toolkit pod: client pods wait for this file")
	case !boot.IsZero() && !t.Toolkit.Before(boot) && loaded == 0, boot.IsZero():
		// A file of this boot may still be older than this load of the driver.
		c.unanswered("when the driver came up is not in the kernel log that is left", "restart the GPU Operator's validator, so that toolkit-ready is written anew, or read the host's stored log")
	case t.Toolkit.Before(since):
		c.fail(gpu.Fatal, "toolkit-ready written after the driver came up at "+since.UTC().Format(stampFormat),
			t.Toolkit.UTC().Format(stampFormat), "the file is stale: restart the GPU Operator's validator so that it is written anew")
	default:
		c.pass("written %s", t.Toolkit.UTC().Format(stampFormat))
	}
}

const stampFormat = "2006-01-02T15:04:05Z"

func tensorFusionProvider(c *cell) {
	if !c.tensorFusion() {
		return
	}
	t := c.in.Host.TensorFusion
	switch {
	case !t.Run:
		c.fail(gpu.Fatal, "/run/tensor-fusion", "no such directory", "the hypervisor pod makes it: look at its init containers")
	case t.Accelerator == "":
		c.fail(gpu.Fatal, "the provider library libaccelerator_nvidia.so", "not found", "look at the hypervisor pod's init container that installs it, and at TF_ACCELERATOR_LIB_PATH")
	default:
		c.pass("%s", t.Accelerator)
	}
}

func tensorFusionShm(c *cell) {
	if !c.tensorFusion() {
		return
	}
	m := c.in.Host.TensorFusion.Shm
	want := uint64(c.in.Expect.TensorFusion.ShmMiB)
	if want == 0 {
		want = defaultShmMiB
	}
	var lacks []string
	for _, o := range []string{"rw", "nosuid", "nodev"} {
		if !slices.Contains(m.Options, o) {
			lacks = append(lacks, o)
		}
	}
	const remount = "unmount it on the drained host and restart the hypervisor: it keeps any tmpfs that it finds"
	switch {
	case !m.Mounted:
		c.fail(gpu.Fatal, "a tmpfs at /run/tensor-fusion/shm", "nothing mounted", "look at the hypervisor pod's init-shm container")
	case m.Type != "tmpfs":
		c.fail(gpu.Fatal, "tmpfs", m.Type, remount)
	case len(lacks) > 0:
		c.fail(gpu.Fatal, "rw,nosuid,nodev", "without "+strings.Join(lacks, ", "), remount)
	case m.Mode != 0o777:
		c.fail(gpu.Fatal, "mode 0777", fmt.Sprintf("%04o", m.Mode), "set the mode: client pods of any user write there")
	case m.SizeKiB != want<<10:
		c.fail(gpu.Warn, fmt.Sprintf("%d MiB", want), fmt.Sprintf("%d MiB", m.SizeKiB>>10), remount)
	case m.FreeKiB < shmFreeLeast:
		c.fail(gpu.Warn, fmt.Sprintf("%d MiB free", shmFreeLeast>>10), fmt.Sprintf("%d MiB", m.FreeKiB>>10), "remove the state of pods that are gone")
	default:
		c.pass("tmpfs of %d MiB", want)
	}
}

// tensorFusionPods: the state in shared memory is of a layout that is known,
// and of a pod that lives.
func tensorFusionPods(c *cell) {
	if !c.tensorFusion() {
		return
	}
	live := c.in.Expect.TensorFusion.Pods
	var stale, unknown []string
	for _, p := range c.in.Host.TensorFusion.Pods {
		switch {
		case live != nil && !slices.Contains(live, p.Pod):
			stale = append(stale, p.Pod)
		case p.Layout == 0:
			unknown = append(unknown, p.Pod)
		}
	}
	if len(unknown) > 0 {
		c.fail(gpu.Fatal, "shared state of layout V1 or V2", "another layout: "+list(unknown), "drain these pods before the hypervisor is used: it cannot read their state")
	}
	if len(stale) > 0 {
		c.fail(gpu.Warn, "only state of live pods", "stale: "+list(stale), "remove these directories below /run/tensor-fusion/shm")
	}
	if live == nil {
		c.skip("the live pods were not given, so stale state is not looked for")
	} else if len(unknown)+len(stale) == 0 {
		c.pass("%d pods", len(c.in.Host.TensorFusion.Pods))
	}
}

func tensorFusionKubelet(c *cell) {
	if !c.tensorFusion() {
		return
	}
	for _, dir := range []string{"device-plugins", "pod-resources"} {
		if !c.in.Host.TensorFusion.Kubelet[dir] {
			c.fail(gpu.Fatal, "/var/lib/kubelet/"+dir, "not reachable", "the hypervisor registers and asks there: check its host paths and the kubelet's root directory")
			return
		}
	}
	c.pass("device-plugins and pod-resources")
}

// tensorFusionDevices: the hypervisor lists exactly the GPUs that NVML shows;
// partitions of them may stand beside.
func tensorFusionDevices(c *cell) {
	if !c.tensorFusion() {
		return
	}
	h := c.in.Host.TensorFusion.Hypervisor
	if h.Error != "" {
		c.fail(gpu.Fatal, fmt.Sprintf("an answer on port %d", c.in.Expect.TensorFusion.Port), h.Error, "look at the hypervisor pod of this node and at the pool's portNumber")
		return
	}
	var gpus, listed []string
	for _, d := range c.in.NVML.Devices {
		if d.UUID.OK() {
			gpus = append(gpus, strings.ToLower(d.UUID.Value))
		}
	}
	for _, u := range h.UUIDs {
		if !strings.HasPrefix(u, "mig-") {
			listed = append(listed, u)
		}
	}
	if lost, more := without(gpus, listed), without(listed, gpus); len(lost)+len(more) > 0 {
		c.fail(gpu.Fatal, "the GPUs that NVML shows", fmt.Sprintf("not listed: %s; unknown to NVML: %s", list(lost), list(more)), "restart the hypervisor pod: a GPU that it does not list is not given to workloads")
		return
	}
	c.pass("%d GPUs", len(gpus))
}

// tensorFusionHypervisor: the hypervisor has the rights that mounts, partitions
// and the processes of all tenants need.
func tensorFusionHypervisor(c *cell) {
	if !c.tensorFusion() {
		return
	}
	const hint = "compare privilegedHypervisor of the ProviderConfig and the securityContext of the hypervisor pod with those of the release"
	p := c.in.Host.TensorFusion.Process
	switch {
	case p == nil:
		c.skip("not visible: the hypervisor's process")
	case p.UID != 0:
		c.fail(gpu.Warn, "user 0", fmt.Sprintf("user %d (process %d)", p.UID, p.PID), hint)
	case p.Lacks != 0:
		c.fail(gpu.Warn, "every capability, as a privileged container has", fmt.Sprintf("without %#x (process %d)", p.Lacks, p.PID), hint)
	default:
		c.pass("privileged, user 0")
	}
}

// tensorFusionTransport: what lies where workers and clients share memory can
// be mapped. It is made when the first of them needs it.
func tensorFusionTransport(c *cell) {
	if !c.tensorFusion() {
		return
	}
	s := c.in.Host.TensorFusion.Transport
	switch {
	case !s.Exists:
		c.skip("no /dev/shm/tf_shm: no worker of this host has made it")
	case !s.Regular:
		c.fail(gpu.Warn, "/dev/shm/tf_shm a plain file", "another kind of file", "remove it on the drained host: workers cannot map it")
	default:
		c.pass("/dev/shm/tf_shm")
	}
}
