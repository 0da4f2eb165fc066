package check

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/nvml"
)

func libraryAndDriver(c *cell) {
	switch {
	case c.in.Trouble != "":
		c.fail(gpu.Fatal, "an answer of the driver", c.in.Trouble, "read the kernel log; a GPU that holds a process needs a reset or a reboot of the host")
	case c.in.NVML.Init == nvml.LibraryNotFound:
		c.fail(gpu.Fatal, "libnvidia-ml.so.1", "no library: "+c.in.NVML.Init.String(), "install the driver's user-space libraries, or mount them into the agent's container")
	case c.in.NVML.Init == nvml.DriverNotLoaded:
		c.fail(gpu.Fatal, "the kernel module nvidia", "driver not loaded: "+c.in.NVML.Init.String(), "load the module (modprobe nvidia) and read the kernel log if it refuses")
	case c.in.NVML.Init == nvml.VersionMismatch:
		c.fail(gpu.Fatal, "library and kernel module of one version", "version mismatch: "+c.in.NVML.Init.String(), "a driver upgrade is half done: reload the kernel module or reboot the host")
	case c.in.NVML.Init != nvml.Success:
		c.fail(gpu.Fatal, "SUCCESS", c.in.NVML.Init.String(), "read the kernel log")
	default:
		c.pass("up")
	}
}

// alone: nobody else checks or sets up this host meanwhile.
func alone(c *cell) {
	if c.in.Unseen != "" {
		c.skip("others at work on this host are not seen: " + c.in.Unseen)
		return
	}
	c.pass("the only one at work")
}

// hostRead: what the kernel and the file system show could be read.
func hostRead(c *cell) {
	if c.in.HostTrouble != "" {
		c.unanswered(c.in.HostTrouble, "look on the host for what hangs there (a mount, a file of sysfs, a program), then check again")
		return
	}
	c.pass("read")
}

// baselineBoot notes that a baseline is of an earlier boot. That is what a
// driver upgrade with a reboot looks like, so it only changes how counters and
// the kernel log are read.
func baselineBoot(c *cell) {
	switch {
	case c.in.Baseline == nil:
		c.skip("no baseline")
	case c.in.rebooted():
		c.fail(gpu.Info, "boot "+c.in.Baseline.BootID, "boot "+c.in.Host.BootID, "the host was rebooted since the baseline: counters and kernel log are judged from the boot on")
	default:
		c.pass("of this boot")
	}
}

// driverVersion: library and kernel module have the version that is declared;
// without one, that of the baseline. Nobody has said that it was to change.
func driverVersion(c *cell) {
	if b := c.in.Baseline; b != nil {
		c.base, c.answeredBefore = b.Driver, b.Driver != ""
	}
	declared := c.in.Expect.Driver
	library, ok := neededIf(c, declared != "", c.in.NVML.Driver, "a version is declared")
	if !ok {
		return
	}
	want := declared
	if want == "" && c.answeredBefore && c.base != library {
		c.fail(gpu.Fatal, c.base+", as in the baseline", library, "if the driver was meant to change, declare its version (expect.driver); else find out who replaced it")
		return
	}
	if want == "" {
		want = library
	}
	hidden := 0
	for _, v := range []struct{ from, version string }{
		{"library", library}, {"/sys/module/nvidia/version", c.in.Host.Module}, {"/proc/driver/nvidia/version", c.in.Host.Proc},
	} {
		switch {
		case v.version == "":
			hidden++
			c.skip("not visible: " + v.from)
		case v.version != want:
			c.fail(gpu.Fatal, want, v.version+" ("+v.from+")", "reload the kernel module or reboot the host; if it stays, the upgrade did not install the target driver")
			return
		}
	}
	if hidden == 0 {
		c.pass("%s", library)
	}
}

// userSpaceLibraries: the driver's libraries are of the loaded module's version,
// those in the host's files and those that the children of the agent loaded. In
// a container the two are not the same: the files of the host tell what a new
// container gets, the loaded ones what this agent's proofs ran on.
func userSpaceLibraries(c *cell) {
	module := c.in.Host.Module
	if module == "" {
		c.skip("not visible: /sys/module/nvidia/version")
		return
	}
	loaded := c.loadedLibraries()
	for _, l := range c.in.Host.Libraries {
		answers := slices.ContainsFunc(loaded, func(file string) bool {
			return strings.HasPrefix(filepath.Base(file), strings.TrimSuffix(l.Name, "1"))
		})
		switch {
		case l.Path == "" && answers:
			// As where a container of the GPU Operator has the driver.
			c.skip("not in the loader's path by the host's files, and loaded by the agent all the same: " + l.Name)
			continue
		case l.Path == "":
			c.fail(gpu.Fatal, l.Name, "not in the loader's path by the host's files", "install the driver's user-space libraries and run ldconfig")
			continue
		}
		c.library(module, l.Version, "file "+l.Path, "a driver upgrade is half done: reload the kernel module or reboot the host")
	}
	for _, file := range loaded {
		c.library(module, host.LibraryVersion(file), "loaded by the agent: "+file,
			"an agent in a container keeps the libraries that it was started with: restart its pod; one on the host: reload the kernel module or reboot")
	}
}

// library judges one file by the version in its name.
func (c *cell) library(module, version, where, hint string) {
	switch version {
	case "":
		c.skip(where + ": its name carries no version")
	case module:
		c.pass("%s (%s)", version, where)
	default:
		c.fail(gpu.Fatal, module+", as the kernel module", version+" ("+where+")", hint)
	}
}

// loadedLibraries are the files that answered in the children, each once.
func (c *cell) loadedLibraries() []string {
	var files []string
	add := func(file string) {
		if file != "" && !slices.Contains(files, file) {
			files = append(files, file)
		}
	}
	add(c.in.NVML.Library)
	for _, p := range c.in.Proofs {
		add(p.Library)
	}
	return files
}

func cudaText(version int) string { return fmt.Sprintf("%d.%d", version/1000, version%1000/10) }

func cudaVersion(c *cell) {
	version, ok := neededIf(c, c.in.Expect.CUDA != "", c.in.NVML.CUDA, "a version is declared")
	if !ok {
		return
	}
	found := cudaText(version)
	if want := c.in.Expect.CUDA; want != "" {
		var major, minor int
		if n, err := fmt.Sscanf(want, "%d.%d", &major, &minor); n != 2 || err != nil {
			c.unanswered("the plan asks for CUDA "+want+", which is no version like 12.4", "correct the plan")
			return
		}
		if version < 1000*major+10*minor {
			c.fail(gpu.Fatal, "at least "+want, found, "the driver is too old for this CUDA version: upgrade it")
			return
		}
	}
	c.pass("%s", found)
}

func deviceCount(c *cell) {
	n, ok := needed(c, c.in.NVML.Count, "the host has GPUs")
	if !ok {
		return
	}
	const hint = "a GPU is off the bus or not bound to the driver: compare with lspci and read the kernel log"
	failed := false
	compare := func(with string, want int) {
		if want != n {
			failed = true
			c.fail(gpu.Fatal, fmt.Sprintf("%d (%s)", want, with), fmt.Sprintf("%d by NVML", n), hint)
		}
	}
	if c.in.Host.PCIVisible {
		compare("on the PCI bus", len(c.in.Host.PCI))
	} else {
		c.skip("not visible: PCI bus")
	}
	if want := c.in.Expect.GPUs; want > 0 {
		compare("declared", want)
	}
	if b := c.in.Baseline; b != nil {
		compare("in the baseline", len(b.Devices))
	}
	if n == 0 && !failed {
		failed = true
		c.fail(gpu.Fatal, "at least one GPU", "none", hint)
	}
	if !failed {
		c.pass("%d GPUs", n)
	}
}

func fabricServices(c *cell) {
	if len(c.in.Expect.Services) == 0 {
		c.skip("none declared")
	}
	for _, s := range c.in.Host.Services {
		switch {
		case !s.Visible:
			c.unanswered("not visible: systemd's control groups ("+s.Name+")", "give the agent the host's /sys/fs/cgroup")
		case !s.Active:
			c.fail(gpu.Fatal, s.Name+" active", "not running", "start it and read its log; its version must be the driver's")
		default:
			c.pass("%s active", s.Name)
			c.serviceVersion(s)
		}
	}
}

// serviceVersion: fabric manager and IMEX work with the driver of their own
// version only.
func (c *cell) serviceVersion(s host.Service) {
	driver := c.in.NVML.Driver.Value
	switch {
	case !host.Versioned(s.Name):
	case driver == "":
		c.skip("version of " + s.Name + ": the driver's own is not known")
	case s.Version == "":
		c.skip("not visible: version of " + s.Name)
	case s.Version != driver:
		c.fail(gpu.Fatal, s.Name+" "+driver+", as the driver", s.Version, "install the package of the driver's version and restart the service")
	default:
		c.pass("%s %s", s.Name, s.Version)
	}
}

func confidentialComputing(c *cell) {
	feature, ok := answered(c, c.in.NVML.ConfCompute)
	if !ok {
		return
	}
	if feature != 0 {
		if ready, ok := needed(c, c.in.NVML.ConfReady, "confidential computing is on"); !ok {
			return
		} else if ready != 1 {
			c.fail(gpu.Fatal, "GPUs ready for work", "not ready", "set the ready state (nvidia-smi conf-compute -srs 1): CUDA fails without")
			return
		}
	}
	c.equalBase(gpu.Fatal, onOff(feature != 0), "confidential computing was switched: check firmware settings of the host")
}

func deviceFiles(c *cell) {
	for i := range c.in.NVML.Devices {
		// Without its number the file of a GPU is not looked for.
		if d := &c.in.NVML.Devices[i]; d.Handle == nvml.Success && !d.Minor.OK() {
			refusedOn(c, d, d.Minor)
		}
	}
	for _, n := range c.in.Host.Nodes {
		major, known := c.in.Host.Majors[n.Wanted]
		const hint = "create the device files (nvidia-modprobe -u -c 0, nvidia-smi) or check udev"
		switch {
		case !n.Exists && n.Optional:
			c.skip(n.Path + ": not made, its service does not run here")
		case !n.Exists:
			c.fail(gpu.Fatal, n.Path, "no such file", hint)
		case !n.Char:
			c.fail(gpu.Fatal, n.Path+" a character device", "another kind of file", "remove it; "+hint)
		case !known:
			c.unanswered(n.Path+": not visible: the major number of "+n.Wanted+" in /proc/devices", "load the module that it belongs to, or give the agent the host's /proc")
		case major != n.Major:
			c.fail(gpu.Fatal, fmt.Sprintf("%s with major %d of %s", n.Path, major, n.Wanted), fmt.Sprint(n.Major), "the file is left over from another driver: remove it; "+hint)
		default:
			c.pass("%s", n.Path)
		}
	}
}

func minorReading(d *nvml.Device) (string, bool) {
	return text(d.Minor, func(n int) string { return "/dev/nvidia" + strconv.Itoa(n) })
}

// tensorFusion gives the part of the snapshot, or records the skip.
func (c *cell) tensorFusion() bool {
	if c.in.Host.TensorFusion == nil || c.in.Expect.TensorFusion == nil {
		c.skip("not asked for")
		return false
	}
	return true
}

func tensorFusionModules(c *cell) {
	if !c.tensorFusion() {
		return
	}
	var missing []string
	for _, m := range []string{"nvidia", "nvidia_uvm"} {
		if !slices.Contains(c.in.Host.Modules, m) {
			missing = append(missing, m)
		}
	}
	if len(missing) > 0 {
		c.fail(gpu.Fatal, "modules nvidia and nvidia_uvm", "not loaded: "+strings.Join(missing, ", "), "load them with modprobe")
		return
	}
	c.pass("%s", list(c.in.Host.Modules))
}
