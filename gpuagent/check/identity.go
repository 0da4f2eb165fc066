package check

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// identity: every GPU of the baseline answers by its UUID. Index and minor
// number may change, so they are not compared. A handle that is refused until a
// reset is remedied by one; any other refusal is not.
func identity(c *cell) {
	switch {
	case c.d.Handle == nvml.ResetRequired:
		c.fail(gpu.Reset, "a handle", c.d.Handle.String(), "drain the host and reset the GPU")
	case c.d.Handle != nvml.Success:
		c.fail(gpu.Fatal, "a handle", c.d.Handle.String(), "the driver knows this GPU and cannot reach it: read the kernel log, reset the GPU or reboot the host")
	default:
		if uuid, ok := answered(c, c.d.UUID); ok {
			c.pass("%s (%s at %s)", uuid, c.d.Name.Value, c.d.PCI.Value)
		}
	}
}

func identityReading(d *nvml.Device) (string, bool) {
	return text(d.PCI, func(pci string) string { return pci })
}

// deviceSet compares the UUIDs as a set with the baseline's.
func deviceSet(c *cell) {
	if c.in.Baseline == nil {
		c.skip("no baseline")
		return
	}
	var had, has []string
	for _, d := range c.in.Baseline.Devices {
		had = append(had, d.UUID)
	}
	for _, d := range c.in.NVML.Devices {
		if d.UUID.OK() {
			has = append(has, d.UUID.Value)
		}
	}
	lost, added := without(had, has), without(has, had)
	switch {
	case len(lost) > 0 && len(lost) == len(had):
		c.fail(gpu.Fatal, list(had), list(has), "not one GPU of the baseline is here: it was taken on another host")
	case len(lost) > 0 || len(added) > 0:
		c.fail(gpu.Fatal, "the GPUs of the baseline", fmt.Sprintf("missing: %s; new: %s", list(lost), list(added)),
			"look for the missing GPU on the PCI bus and in the kernel log")
	default:
		c.pass("%d GPUs of the baseline", len(had))
	}
}

func without(a, b []string) []string {
	var left []string
	for _, s := range a {
		if !slices.Contains(b, s) {
			left = append(left, s)
		}
	}
	return left
}

func vbios(c *cell) {
	if version, ok := answered(c, c.d.VBIOS); ok {
		c.equalBase(gpu.Warn, version, "the card's firmware changed: was that part of the upgrade?")
	}
}

func vbiosReading(d *nvml.Device) (string, bool) { return text(d.VBIOS, same) }

func serial(c *cell) {
	if number, ok := answered(c, c.d.Serial); ok {
		c.equalBase(gpu.Warn, number, "the card was exchanged")
	}
}

func serialReading(d *nvml.Device) (string, bool) { return text(d.Serial, same) }

func same(s string) string { return s }

// recoveryActions are the values of the driver's own advice.
var recoveryActions = map[uint64]struct {
	name     string
	severity gpu.Severity
	hint     string
}{
	1: {"GPU_RESET", gpu.Reset, "drain the host and reset the GPU"},
	2: {"NODE_REBOOT", gpu.Fatal, "drain and reboot the host"},
	3: {"DRAIN_P2P", gpu.Warn, "end the work that uses peer access, then check again"},
	4: {"DRAIN_AND_RESET", gpu.Reset, "drain the host and reset the GPU"},
	5: {"RECOVER_IMEX_DOMAIN", gpu.Fatal, "recover the IMEX domain, then check again"},
	6: {"BUS_RESET", gpu.Fatal, "drain the host and reset the GPU's bus"},
	7: {"SYSTEM_REBOOT", gpu.Fatal, "drain and reboot the host"},
}

func recoveryName(action uint64) string {
	if a, known := recoveryActions[action]; known {
		return a.name
	}
	if action == 0 {
		return "NONE"
	}
	return fmt.Sprintf("unknown action %d", action)
}

func recoveryAction(c *cell) {
	action, ok := answered(c, c.d.Recovery)
	if !ok {
		return
	}
	found := recoveryName(action)
	if action == 0 {
		c.pass("%s", found)
		return
	}
	if a, known := recoveryActions[action]; known {
		c.fail(a.severity, "NONE", found, a.hint)
		return
	}
	c.fail(gpu.Fatal, "NONE", found, "this driver asks for something newer than this agent: read the driver's manual")
}

func recoveryReading(d *nvml.Device) (string, bool) { return text(d.Recovery, recoveryName) }

func pcieWidth(c *cell) {
	w, ok := answered(c, c.d.PCIeWidth)
	if !ok {
		return
	}
	found := fmt.Sprintf("x%d", w.Current)
	if w.Current != w.Other {
		c.fail(gpu.Fatal, fmt.Sprintf("x%d", w.Other), found, "the link trained with fewer lanes: reseat the card or its riser")
		return
	}
	c.equalBase(gpu.Fatal, found, "the link trained with other lanes than before: reseat the card or its riser")
}

func pcieWidthReading(d *nvml.Device) (string, bool) {
	return text(d.PCIeWidth, func(w nvml.Pair) string { return fmt.Sprintf("x%d", w.Current) })
}

// pcieGeneration is judged under load only: an idle GPU lowers its link speed.
func pcieGeneration(c *cell) {
	w := c.watched()
	if w == nil {
		if _, ok := answered(c, c.d.PCIeGen); ok {
			c.skip("not observed under load")
		}
		return
	}
	gen, ok := answered(c, w.PCIeGen)
	if !ok {
		return
	}
	if gen.Current < gen.Other {
		c.fail(gpu.Warn, fmt.Sprintf("generation %d while the probe copies", gen.Other), fmt.Sprint(gen.Current), "the link trained at a lower speed: check slot, riser and firmware")
		return
	}
	if card := c.d.PCIeGenCard; card.OK() && card.Value > gen.Other {
		c.pass("generation %d, the most of its slot; the card alone has %d", gen.Current, card.Value)
		return
	}
	c.pass("generation %d", gen.Current)
}

// pcieGenerationReading is that of an idle GPU: it tells only that there is one.
func pcieGenerationReading(d *nvml.Device) (string, bool) {
	return text(d.PCIeGen, func(p nvml.Pair) string { return fmt.Sprintf("up to generation %d", p.Other) })
}

// watched is what was seen of this GPU during the probe.
func (c *cell) watched() *nvml.Watched {
	if c.in.Watch == nil || c.in.Watch.Samples == 0 {
		return nil
	}
	for i := range c.in.Watch.Devices {
		if c.in.Watch.Devices[i].UUID == c.d.UUID.Value {
			return &c.in.Watch.Devices[i]
		}
	}
	return nil
}

// Parts of the row of PCIe errors.
const (
	partPCIeFatal   = "fatal errors"
	partPCIeReplays = "replays"
	partPCIeOther   = "other errors"
)

// pcieErrors: a fatal one is fatal; replays and the other counters must not
// have grown since the baseline, or in the time of the probe without one.
func pcieErrors(c *cell) {
	if fatal, ok := part(c, c.d.PCIeFatal, partPCIeFatal); ok && fatal > 0 {
		c.fail(gpu.Fatal, "0 fatal PCIe errors", fmt.Sprint(fatal), "the link broke down: reset the GPU or reboot the host")
	}
	var seen nvml.Watched
	w := c.watched()
	if w != nil {
		seen = *w
	}
	replays, others, _ := strings.Cut(c.base, "/")
	var fine, grew []string
	for _, counter := range []struct {
		name, before string
		now, grown   nvml.Reading[uint64]
	}{{partPCIeReplays, replays, c.d.PCIeReplay, seen.Replays}, {partPCIeOther, others, c.d.PCIeErrors, seen.PCIeErrors}} {
		now, ok := part(c, counter.now, counter.name)
		if !ok {
			continue
		}
		var grown uint64
		since := "since the baseline"
		switch had, err := strconv.ParseUint(counter.before, 10, 64); {
		case c.hasBase && err == nil:
			grown = nvml.Growth(had, now)
		case w == nil:
			c.skip(fmt.Sprintf("%s: %d in all, and neither a baseline nor an observation to compare with", counter.name, now))
			continue
		default:
			since = "during the probe"
			if grown, ok = part(c, counter.grown, counter.name+" "+since); !ok {
				continue
			}
		}
		if grown > 0 {
			grew = append(grew, fmt.Sprintf("%d new %s %s, %d in all", grown, counter.name, since, now))
			continue
		}
		fine = append(fine, fmt.Sprintf("no new %s %s, %d in all", counter.name, since, now))
	}
	switch {
	case len(grew) > 0: // a bad link counts in both: that is one warning
		c.fail(gpu.Warn, "no new PCIe errors", strings.Join(grew, "; "), "watch the link; errors that go on mean a bad slot, riser or cable")
	case len(fine) > 0 && !c.failed():
		c.pass("%s", strings.Join(fine, "; "))
	}
}

// pcieErrorsReading keeps what was not counted as not counted.
func pcieErrorsReading(d *nvml.Device) (string, bool) {
	replays, counted := text(d.PCIeReplay, number)
	others, more := text(d.PCIeErrors, number)
	return orDash(replays, counted) + "/" + orDash(others, more), counted || more
}

func orDash(s string, ok bool) string {
	if ok {
		return s
	}
	return "-"
}

func parsePair(s string) (a, b uint64, ok bool) {
	n, err := fmt.Sscanf(strings.ReplaceAll(s, "/", " "), "%d %d", &a, &b)
	return a, b, n == 2 && err == nil
}
