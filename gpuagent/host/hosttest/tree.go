// Package hosttest makes the file tree of a GPU host that is not there: what
// package host reads of /proc, /sys, /dev and /run, below a directory. The
// device files are links to /dev/null, whose major number the tree's
// /proc/devices gives to the driver.
package hosttest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// nullMajor is the major number of /dev/null on Linux.
const nullMajor = 1

// Tree is one host.
type Tree struct{ Root string }

// Create makes the tree of a healthy host with so many GPUs, at the PCI
// addresses 0000:10:00.0 and on, that runs this driver.
func Create(root, driver string, gpus int) (*Tree, error) {
	t := &Tree{Root: root}
	files := map[string]string{
		"proc/sys/kernel/random/boot_id": "00000000-0000-4000-8000-000000000001\n",
		"proc/stat":                      "cpu 0\nbtime 1767225600\n",
		"proc/modules":                   "nvidia_uvm 1 0 - Live 0x0\nnvidia_modeset 1 0 - Live 0x0\nnvidia 1 2 - Live 0x0\next4 1 0 - Live 0x0\n",
		"proc/devices":                   fmt.Sprintf("Character devices:\n  1 mem\n%3d nvidia\n%3d nvidia-uvm\n%3d nvidia-caps\n\nBlock devices:\n  8 sd\n", nullMajor, nullMajor, nullMajor),
		"proc/driver/nvidia/capabilities/mig/config":  "DeviceFileMinor: 1\nDeviceFileMode: 256\n",
		"proc/driver/nvidia/capabilities/mig/monitor": "DeviceFileMinor: 2\nDeviceFileMode: 292\n",
		// Every driver has it; only a host with IMEX has its device file.
		"proc/driver/nvidia/capabilities/fabric-imex-mgmt": "DeviceFileMinor: 4323\nDeviceFileMode: 256\n",
		"sys/fs/cgroup/system.slice/cgroup.procs":          "",
		"dev/kmsg": "[    5.000000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n",
	}
	for name, content := range files {
		if err := t.Write(name, content); err != nil {
			return nil, err
		}
	}
	if err := t.Driver(driver); err != nil {
		return nil, err
	}
	for _, d := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2"} {
		if err := t.device(d); err != nil {
			return nil, err
		}
	}
	for i := range gpus {
		if err := t.AddGPU(i); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// AddGPU puts the GPU of a number on the bus, with its device file.
func (t *Tree) AddGPU(number int) error {
	if err := t.AddPCI(fmt.Sprintf("0000:%02x:00.0", 0x10+number)); err != nil {
		return err
	}
	return t.device("nvidia" + strconv.Itoa(number))
}

func (t *Tree) device(name string) error {
	path := filepath.Join(t.Root, "dev", name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.Symlink("/dev/null", path)
}

// Write makes or replaces a file.
func (t *Tree) Write(name, content string) error {
	path := filepath.Join(t.Root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(content), 0o644)
}

// Remove takes a file or folder away.
func (t *Tree) Remove(name string) error { return os.RemoveAll(filepath.Join(t.Root, name)) }

// AddPCI puts an NVIDIA display controller on the bus.
func (t *Tree) AddPCI(address string) error {
	dir := "sys/bus/pci/devices/" + address
	if err := t.Write(dir+"/vendor", "0x10de\n"); err != nil {
		return err
	}
	return t.Write(dir+"/class", "0x030200\n")
}

// Driver sets the version of the loaded kernel module.
func (t *Tree) Driver(version string) error {
	if err := t.Write("sys/module/nvidia/version", version+"\n"); err != nil {
		return err
	}
	return t.Write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "+version+"  Thu Jan  1 00:00:00 UTC 2026\n")
}

// Log adds lines to the kernel log.
func (t *Tree) Log(lines ...string) error {
	f, err := os.OpenFile(filepath.Join(t.Root, "dev/kmsg"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(strings.Join(lines, "\n") + "\n"); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

// Reboot starts another boot with an empty kernel log.
func (t *Tree) Reboot(bootID string) error {
	if err := t.Write("proc/sys/kernel/random/boot_id", bootID+"\n"); err != nil {
		return err
	}
	return t.Write("dev/kmsg", "[    5.000000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n")
}

// ServiceVersion makes a systemd unit active, with a program that tells its
// version.
func (t *Tree) ServiceVersion(name, program, version string) error {
	const pid = "4711"
	if err := t.Write("sys/fs/cgroup/system.slice/"+name+".service/cgroup.procs", "1\n"+pid+"\n"); err != nil {
		return err
	}
	if err := t.Write("proc/"+pid+"/comm", program[:min(len(program), 15)]+"\n"); err != nil {
		return err
	}
	if err := t.Write("proc/"+pid+"/exe", "#!/bin/sh\necho \"Fabric Manager version is : "+version+"\"\n"); err != nil {
		return err
	}
	return os.Chmod(filepath.Join(t.Root, "proc", pid, "exe"), 0o755)
}

// Service makes a systemd unit active or not.
func (t *Tree) Service(name string, active bool) error {
	procs := ""
	if active {
		procs = "1\n"
	}
	return t.Write("sys/fs/cgroup/system.slice/"+name+".service/cgroup.procs", procs)
}
