package check

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// xid is what an error number means, by NVIDIA's Xid catalogue.
type xid struct {
	meaning  string
	severity gpu.Severity
	action   string
	// application: an error of a program; of our own probe it is fatal.
	application bool
}

const (
	resetGPU   = "drain the host and reset the GPU"
	restartApp = "restart the program that caused it"
	askSupport = "ask the vendor's support if it comes back"
)

var xids = map[int]xid{
	46:  {"GPU stopped processing", gpu.Fatal, resetGPU, false},
	48:  {"double-bit ECC error", gpu.Fatal, "drain the host, reset the GPU; see Xid 63, 64, 94, 95, 171 and 172 beside it", false},
	62:  {"internal micro-controller halt", gpu.Fatal, resetGPU, false},
	64:  {"row remap or page retirement failed", gpu.Fatal, resetGPU + "; if it comes back, return the card", false},
	74:  {"NVLink error", gpu.Fatal, "check NVLink and the fabric manager, reset the GPUs of the fabric", false},
	79:  {"GPU fell off the bus", gpu.Fatal, "power-cycle the host", false},
	95:  {"uncontained memory error", gpu.Fatal, resetGPU, false},
	109: {"context-switch timeout", gpu.Fatal, resetGPU, false},
	110: {"security fault", gpu.Fatal, resetGPU, false},
	119: {"GSP RPC timeout", gpu.Fatal, resetGPU, false},
	120: {"GSP error", gpu.Fatal, resetGPU, false},
	136: {"link training failed", gpu.Fatal, resetGPU, false},
	140: {"unrecovered ECC error", gpu.Fatal, resetGPU, false},
	143: {"GPU initialisation error", gpu.Fatal, resetGPU, false},
	151: {"key rotation error", gpu.Fatal, "restart the virtual machine", false},
	155: {"NVLink software-defined error", gpu.Fatal, resetGPU, false},
	156: {"resource retirement", gpu.Reset, resetGPU, false},
	158: {"GPU fatal timeout", gpu.Fatal, resetGPU, false},
	167: {"PCIe fatal timeout", gpu.Fatal, resetGPU, false},
	168: {"reduced memory capacity", gpu.Fatal, resetGPU, false},
	169: {"SEC2 halt", gpu.Fatal, resetGPU, false},
	154: {"recovery action changed", gpu.Info, "the recovery action says what to do", false},

	13: {"engine exception", gpu.Warn, restartApp, true},
	31: {"page fault", gpu.Warn, restartApp, true},
	32: {"bad push buffer", gpu.Warn, restartApp, true},
	43: {"channel reset", gpu.Warn, restartApp, true},
	45: {"clean-up after another error", gpu.Warn, "look at the error before it; alone, restart the fabric manager", true},
	68: {"video engine exception", gpu.Warn, restartApp, true},
	69: {"graphics engine exception", gpu.Warn, restartApp, true},
	80: {"bad data from the host", gpu.Warn, restartApp, true},

	37: {"driver firmware error", gpu.Warn, askSupport, false},
	38: {"driver firmware error", gpu.Warn, askSupport, false},
	66: {"illegal access by the driver", gpu.Warn, askSupport, false},
	67: {"illegal access by the driver", gpu.Warn, askSupport, false},

	54:  {"auxiliary power not connected", gpu.Warn, "check the power cables of the card and open a ticket", false},
	63:  {"row remapped or page retired", gpu.Warn, "a reset applies it; see row remap", false},
	78:  {"vGPU start error", gpu.Warn, "update the vGPU software", false},
	92:  {"many single-bit ECC errors", gpu.Warn, "watch the card", false},
	93:  {"InfoROM wear limit", gpu.Warn, "watch the card", false},
	94:  {"contained memory error", gpu.Warn, restartApp, false},
	121: {"C2C error", gpu.Warn, askSupport, false},
	137: {"NVLink privilege error", gpu.Warn, "look at the program that caused it", false},
	157: {"resource retirement failed", gpu.Warn, askSupport, false},
}

func init() {
	for _, n := range []int{39, 40, 41, 70, 71, 72, 75, 76, 77, 85} {
		xids[n] = xid{"copy-engine error", gpu.Warn, restartApp, true}
	}
	for _, n := range []int{42, 56, 57, 58, 61, 73} {
		xids[n] = xid{"error of the driver", gpu.Warn, askSupport, false}
	}
	for n, unit := range linkUnits {
		xids[n] = xid{"NVLink 5 " + unit + " error", gpu.Fatal, "check NVLink and the fabric manager, reset the GPUs of the fabric", false}
	}
}

// linkUnits are the NVLink 5 units of Xid 144 to 150; whether an error is
// fatal stands in the line of the log.
var linkUnits = map[int]string{144: "SAW", 145: "RLW", 146: "TLW", 147: "TREX", 148: "NVLPW", 149: "NETIR", 150: "MSE"}

var (
	linkNonFatal = regexp.MustCompile(`(?i)\bnon-?fatal\b`)
	linkFatal    = regexp.MustCompile(`(?i)\bfatal\b`)
)

// voltaArch is the newest architecture that Xid 93 has a meaning on.
const voltaArch = 5

// judge gives the severity of one number; text is the rest of the log's line,
// empty for a live event, and own says that our probe raised it.
func judge(number int, text string, d *nvml.Device, own bool) xid {
	x, known := xids[number]
	switch {
	case !known:
		return xid{"unknown", gpu.Warn, "look the number up in NVIDIA's Xid catalogue", false}
	case x.application && own:
		x.severity, x.action = gpu.Fatal, "our own probe raised it: the GPU cannot run work; "+resetGPU
	case number == 78 && d != nil && d.VGPUHost.OK() && d.VGPUHost.Value:
		x.severity = gpu.Fatal
	case number == 93 && d != nil && d.Architecture.OK() && d.Architecture.Value > voltaArch:
		x.meaning, x.action = "a number without meaning on this GPU", askSupport
	case linkUnits[number] != "" && decodedNonFatal(number, text):
		x.severity = gpu.Warn
	}
	return x
}

// decodedNonFatal reads the error status of an NVLink 5 line. Without a word
// of it the unit decides: TREX and NVLPW errors are not fatal.
func decodedNonFatal(number int, text string) bool {
	if linkNonFatal.MatchString(text) {
		return true
	}
	if linkFatal.MatchString(text) {
		return false
	}
	return number == 147 || number == 148
}

// xidHistory judges the kernel log since the baseline: since the boot when
// there is none or it is of an earlier boot.
func xidHistory(c *cell) {
	log := c.in.Host.Log
	if !log.Visible {
		c.unanswered("not visible: "+log.Why, "give the agent /dev/kmsg and the capability SYSLOG")
		return
	}
	if log.Lost {
		c.unanswered("a part of the kernel log was overwritten before it was read", "read the host's stored log for NVRM: Xid (journalctl -k); a baseline taken before the upgrade shortens what is looked at")
	}
	if n := len(log.Unreadable); n > 0 {
		c.fail(gpu.Warn, "lines that can be read", fmt.Sprintf("%d of an unknown form, the first: %s", n, log.Unreadable[0]), "look at NVRM: Xid in the kernel log yourself")
	}
	seen := map[kind]int{}
	var order []host.Xid
	for _, x := range log.Xids {
		if seen[kindOf(x)]++; seen[kindOf(x)] == 1 {
			order = append(order, x)
		}
	}
	for _, x := range order {
		d := c.byPCI(x.PCI)
		j := judge(x.Number, x.Text, d, own(x.Text))
		text := strings.TrimSpace(x.Instance + " " + x.Text)
		k := gpu.Check{Severity: j.severity, Device: x.PCI, Expected: "no Xid", Found: fmt.Sprintf("Xid %d, %d times: %s (%s)", x.Number, seen[kindOf(x)], j.meaning, text), Hint: j.action}
		if d != nil {
			k.Device = d.UUID.Value
		} else if c.in.driverUp() {
			// A device that NVML does not show: the count says what is missing.
			k.Found += " of a device that is not here"
		}
		c.add(k)
	}
	if len(order) == 0 && len(log.Unreadable) == 0 && !log.Lost {
		c.pass("no Xid")
	}
}

// kind is what lines have in common of which the first stands for all: GPU,
// instance and number, who raised it, and of NVLink 5 whether it was fatal.
type kind struct {
	pci, instance string
	number        int
	own, nonFatal bool
}

func kindOf(x host.Xid) kind {
	return kind{x.PCI, x.Instance, x.Number, own(x.Text), linkUnits[x.Number] != "" && decodedNonFatal(x.Number, x.Text)}
}

// own reports a line that names our own child process.
func own(text string) bool { return strings.Contains(text, "name="+child.ProcessName) }

func (c *cell) byPCI(address string) *nvml.Device {
	for i := range c.in.NVML.Devices {
		d := &c.in.NVML.Devices[i]
		if d.PCI.OK() && host.Address(d.PCI.Value) == address {
			return d
		}
	}
	return nil
}

func (c *cell) byUUID(uuid string) *nvml.Device {
	for i := range c.in.NVML.Devices {
		if c.in.NVML.Devices[i].UUID.Value == uuid {
			return &c.in.NVML.Devices[i]
		}
	}
	return nil
}

// xidLive judges the events of the time of the probe. On a drained host only
// the probe can have raised an application's error; beside tenants the kernel
// log tells whose it was.
func xidLive(c *cell) {
	w := c.in.Watch
	if w == nil && c.in.WatchTrouble != nil {
		severity := gpu.Warn
		if Holds(c.in.WatchTrouble) {
			severity = gpu.Fatal
		}
		c.fail(severity, "an answer of the driver during the probe", c.in.WatchTrouble.Error(), "read the kernel log; a GPU that holds a process needs a reset or a reboot of the host")
		return
	}
	if w == nil {
		c.skip("not observed")
		return
	}
	drained := covers(c.in.Level, gpu.Standard)
	for _, e := range w.Xids {
		k := gpu.Check{Device: e.UUID, Expected: "no event during the probe", Severity: gpu.Fatal}
		switch e.Kind {
		case "xid":
			j := judge(e.Xid, "", c.byUUID(e.UUID), drained)
			k.Severity, k.Found, k.Hint = j.severity, fmt.Sprintf("Xid %d: %s", e.Xid, j.meaning), j.action
		case "doubleBitECC":
			k.Found, k.Hint = "double-bit ECC error", resetGPU
		default:
			k.Severity, k.Found, k.Hint = gpu.Info, "the recovery action changed", "the recovery action says what to do"
		}
		c.add(k)
	}
	deaf := 0
	for _, d := range w.Devices {
		if !d.Events.OK() {
			deaf++
			refusedOn(c, c.byUUID(d.UUID), d.Events)
		}
	}
	switch {
	case !w.Events.OK() && deaf == 0:
		c.refused(w.Events.Why())
	case len(w.Xids) == 0 && deaf < len(w.Devices):
		c.pass("no event")
	}
}

// Holds reports that the driver held or broke a child: fatal as it is for a
// reading, also between two that were answered.
func Holds(err error) bool {
	var (
		wedged child.Wedged
		late   child.Timeout
		crash  child.Crash
	)
	return errors.As(err, &wedged) || errors.As(err, &late) || errors.As(err, &crash)
}
