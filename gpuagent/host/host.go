// Package host reads what the kernel, the file system and TensorFusion show of
// a GPU host: no driver library is loaded here. Everything is read below an
// injected root, which is / on a host and a mounted host tree in a container.
// What is hidden from this process is said to be not visible; it is never
// taken for absent.
package host

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// RootVariable names the directory that the host's tree is mounted at.
const RootVariable = "REFIT_HOST_ROOT"

// Snapshot is what was read at one time.
type Snapshot struct {
	BootID string    `json:"bootID"`
	Booted time.Time `json:"booted"`
	// Module is the version of the loaded kernel module, from sysfs; Proc the
	// one that the module itself reports.
	Module  string   `json:"module,omitempty"`
	Proc    string   `json:"proc,omitempty"`
	Modules []string `json:"modules,omitempty"` // loaded, nvidia*
	// PCIVisible: sysfs could be read.
	PCIVisible bool           `json:"pciVisible"`
	PCI        []PCIDevice    `json:"pci,omitempty"`
	Nodes      []Node         `json:"nodes,omitempty"`
	Majors     map[string]int `json:"majors,omitempty"`
	Libraries  []Library      `json:"libraries,omitempty"`
	Services   []Service      `json:"services,omitempty"`
	Log        KernelLog      `json:"log"`
	// TensorFusion is nil when its checks were not asked for.
	TensorFusion *TensorFusion `json:"tensorFusion,omitempty"`
}

// PCIDevice is an NVIDIA display controller.
type PCIDevice struct {
	Address string `json:"address"`
}

// Node is a device file; Wanted is the major number's name in /proc/devices.
type Node struct {
	Path   string `json:"path"`
	Wanted string `json:"wanted"`
	// Optional: the program that uses it makes it, where one does.
	Optional bool `json:"optional,omitempty"`
	Exists   bool `json:"exists"`
	Char     bool `json:"char,omitempty"`
	Major    int  `json:"major,omitempty"`
}

// Service is a systemd unit, judged by the processes in its control group.
type Service struct {
	Name    string `json:"name"`
	Visible bool   `json:"visible"`
	Active  bool   `json:"active"`
	// Version is that of the program that runs; empty where it has none or it
	// is not visible.
	Version string `json:"version,omitempty"`
}

// Options say what to read beside the fixed part.
type Options struct {
	// Since is the last kernel log record that is already known.
	Since uint64
	// Services are systemd units without their suffix.
	Services []string
	// Minors are the minor numbers of the GPUs, for their device files.
	Minors       []int
	TensorFusion *TensorFusionOptions
}

// Host is the tree to read.
type Host struct{ Root string }

// New is the host that the environment names: the tree at REFIT_HOST_ROOT,
// or this process's own.
func New() Host {
	if root := os.Getenv(RootVariable); root != "" {
		return Host{Root: root}
	}
	return Host{Root: "/"}
}

func (h Host) path(parts ...string) string {
	return filepath.Join(append([]string{h.Root}, parts...)...)
}

// line is the first line of a file, empty when it cannot be read.
func (h Host) line(parts ...string) string {
	b, err := os.ReadFile(h.path(parts...))
	if err != nil {
		return ""
	}
	first, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSpace(first)
}

// BootID identifies the running boot of the kernel.
func (h Host) BootID() string { return h.line("proc/sys/kernel/random/boot_id") }

// Read takes a snapshot in this process, and hangs where a file of the host
// does: an agent uses ReadApart.
func (h Host) Read(o Options) Snapshot { return h.read(o, func(string) {}) }

// read tells each step before it is taken.
func (h Host) read(o Options, step func(string)) Snapshot {
	var s Snapshot
	for _, part := range []struct {
		what string
		read func()
	}{
		{"the boot", func() { s.BootID, s.Booted = h.BootID(), h.booted() }},
		{"the kernel modules", func() {
			s.Module, s.Proc = h.line("sys/module/nvidia/version"), h.procVersion()
			s.Modules, s.Majors = h.modules(), h.majors()
		}},
		{"the PCI bus", func() { s.PCI, s.PCIVisible = h.pci() }},
		{"the device files", func() { s.Nodes = h.nodes(o.Minors) }},
		{"the libraries", func() { s.Libraries = h.libraries() }},
		{"the services", func() { s.Services = h.services(o.Services) }},
		{"the kernel log", func() { s.Log = h.kernelLog(o.Since) }},
		{"what TensorFusion has", func() {
			if o.TensorFusion != nil {
				s.TensorFusion = h.tensorFusion(*o.TensorFusion)
			}
		}},
	} {
		step(part.what)
		part.read()
	}
	return s
}

func (h Host) booted() time.Time {
	b, _ := os.ReadFile(h.path("proc/stat"))
	for line := range strings.Lines(string(b)) {
		if n, ok := strings.CutPrefix(line, "btime "); ok {
			if s, err := strconv.ParseInt(strings.TrimSpace(n), 10, 64); err == nil {
				return time.Unix(s, 0)
			}
		}
	}
	return time.Time{}
}

// procVersion takes the version out of a line like: NVRM version: NVIDIA UNIX
// x86_64 Kernel Module  580.95.05  Tue Sep 23 ...
func (h Host) procVersion() string { return versionIn(h.line("proc/driver/nvidia/version")) }

// versionIn is the first word of a text that is a version.
func versionIn(text string) string {
	for _, word := range strings.Fields(text) {
		if parts := strings.Split(word, "."); len(parts) >= 2 && digits(parts) {
			return word
		}
	}
	return ""
}

func digits(parts []string) bool {
	for _, p := range parts {
		if _, err := strconv.ParseUint(p, 10, 32); err != nil {
			return false
		}
	}
	return true
}

func (h Host) modules() []string {
	b, _ := os.ReadFile(h.path("proc/modules"))
	var names []string
	for line := range strings.Lines(string(b)) {
		if name, _, _ := strings.Cut(line, " "); strings.HasPrefix(name, "nvidia") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// pci lists the display controllers (class 0x03xx) of vendor 0x10de.
func (h Host) pci() ([]PCIDevice, bool) {
	entries, err := os.ReadDir(h.path("sys/bus/pci/devices"))
	// Every host has something on the bus: an empty one is hidden from us.
	if err != nil || len(entries) == 0 {
		return nil, false
	}
	var devices []PCIDevice
	for _, e := range entries {
		dir := []string{"sys/bus/pci/devices", e.Name()}
		vendor, class := h.line(append(dir, "vendor")...), h.line(append(dir, "class")...)
		// A virtual function of a GPU is none of the host's own.
		_, err := os.Stat(h.path(append(dir, "physfn")...))
		if vendor == "0x10de" && strings.HasPrefix(class, "0x03") && errors.Is(err, fs.ErrNotExist) {
			devices = append(devices, PCIDevice{Address: e.Name()})
		}
	}
	return devices, true
}

// majors reads the character devices of /proc/devices by name.
func (h Host) majors() map[string]int {
	b, _ := os.ReadFile(h.path("proc/devices"))
	majors := map[string]int{}
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(line, "Block devices") {
			break
		}
		f := strings.Fields(line)
		if len(f) == 2 && strings.HasPrefix(f[1], "nvidia") {
			if n, err := strconv.Atoi(f[0]); err == nil {
				majors[f[1]] = n
			}
		}
	}
	// The module's first name was nvidia-frontend.
	if n, ok := majors["nvidia-frontend"]; ok {
		if _, named := majors["nvidia"]; !named {
			majors["nvidia"] = n
		}
	}
	if n, ok := majors["nvidia"]; ok {
		if _, own := majors["nvidia-modeset"]; !own {
			majors["nvidia-modeset"] = n
		}
	}
	return majors
}

func (h Host) nodes(minors []int) []Node {
	nodes := []Node{
		{Path: "/dev/nvidiactl", Wanted: "nvidia"}, {Path: "/dev/nvidia-uvm", Wanted: "nvidia-uvm"},
		{Path: "/dev/nvidia-uvm-tools", Wanted: "nvidia-uvm"},
	}
	if slices.Contains(h.modules(), "nvidia_modeset") {
		nodes = append(nodes, Node{Path: "/dev/nvidia-modeset", Wanted: "nvidia-modeset"})
	}
	for _, m := range minors {
		nodes = append(nodes, Node{Path: "/dev/nvidia" + strconv.Itoa(m), Wanted: "nvidia"})
	}
	for _, c := range h.capabilities() {
		nodes = append(nodes, Node{Path: "/dev/nvidia-caps/nvidia-cap" + strconv.Itoa(c.minor), Wanted: "nvidia-caps", Optional: !c.mig})
	}
	for i := range nodes {
		info, err := os.Stat(h.path(nodes[i].Path))
		nodes[i].Exists = err == nil
		if err != nil {
			continue
		}
		nodes[i].Char = info.Mode()&os.ModeCharDevice != 0
		var st unix.Stat_t
		if nodes[i].Char && unix.Stat(h.path(nodes[i].Path), &st) == nil {
			nodes[i].Major = int(unix.Major(uint64(st.Rdev)))
		}
	}
	return nodes
}

// capability is an access right that the module has. Those of MIG are used by the
// driver's own libraries; another, like fabric-imex-mgmt, by one service alone.
type capability struct {
	minor int
	mig   bool
}

func (h Host) capabilities() []capability {
	var found []capability
	dir := h.path("proc/driver/nvidia/capabilities")
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // what cannot be read has no minor to check
		}
		b, _ := os.ReadFile(path)
		for line := range strings.Lines(string(b)) {
			if n, ok := strings.CutPrefix(line, "DeviceFileMinor:"); ok {
				if minor, err := strconv.Atoi(strings.TrimSpace(n)); err == nil {
					found = append(found, capability{minor, slices.Contains(strings.Split(strings.TrimPrefix(path, dir), "/"), "mig")})
				}
			}
		}
		return nil
	})
	slices.SortFunc(found, func(a, b capability) int { return a.minor - b.minor })
	return slices.Compact(found)
}
