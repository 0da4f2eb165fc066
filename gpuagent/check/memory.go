package check

import (
	"fmt"
	"slices"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// Limits of retired pages and remapped rows after which a card is returned, as
// NVIDIA's own diagnostic sets them.
const (
	retiredMost       = 63
	retiredMostDouble = 15
	remappedMost      = 512
)

func eccMode(c *cell) {
	mode, ok := answered(c, c.d.ECCMode)
	if !ok {
		return
	}
	if found, settled := c.settled(mode); settled {
		c.equalBase(gpu.Reset, found, "set the ECC mode back (nvidia-smi -e) and reset the GPU")
	}
}

// settled writes a mode, and fails one of which another value is pending.
func (c *cell) settled(mode nvml.Pair) (string, bool) {
	found := onOff(mode.Current == 1)
	if mode.Current != mode.Other {
		c.fail(gpu.Reset, "nothing pending", fmt.Sprintf("%s, %s after a reset", found, onOff(mode.Other == 1)), "reset the GPU or reboot the host to apply it")
		return found, false
	}
	return found, true
}

func eccModeReading(d *nvml.Device) (string, bool) {
	return text(d.ECCMode, func(p nvml.Pair) string { return onOff(p.Current == 1) })
}

func eccVolatile(c *cell) {
	c.zero(c.d.ECCVolatile, gpu.Fatal, "0 uncorrected errors since the driver was loaded", "%d", "drain the host and reset the GPU; if they come back, return the card")
}

// zero fails a counter that has counted.
func (c *cell) zero(r nvml.Reading[uint64], severity gpu.Severity, expected, found, hint string) {
	n, ok := answered(c, r)
	switch {
	case !ok:
	case n > 0:
		c.fail(severity, expected, fmt.Sprintf(found, n), hint)
	default:
		c.pass("%s", expected)
	}
}

// clear fails a flag that is raised.
func (c *cell) clear(r nvml.Reading[bool], expected, found, hint string) {
	raised, ok := answered(c, r)
	switch {
	case !ok:
	case raised:
		c.fail(gpu.Fatal, expected, found, hint)
	default:
		c.pass("%s", expected)
	}
}

func eccVolatileReading(d *nvml.Device) (string, bool) { return text(d.ECCVolatile, number) }

func number(n uint64) string { return fmt.Sprint(n) }

func sramErrors(c *cell) {
	c.clear(c.d.SRAMOver, "below the threshold", "SRAM error threshold exceeded", "return the card")
}

func sramReading(d *nvml.Device) (string, bool) { return flag(d.SRAMOver, "below the threshold") }

// flag is the reading of a row that compares nothing with a baseline: it tells
// that the driver had an answer.
func flag(r nvml.Reading[bool], lowered string) (string, bool) {
	return text(r, func(raised bool) string {
		if raised {
			return "raised"
		}
		return lowered
	})
}

func eccAggregate(c *cell) {
	if n, ok := answered(c, c.d.ECCAggregate); ok {
		c.equalBase(gpu.Warn, number(n), "uncorrected errors were added over the life of the card: watch it")
	}
}

func eccAggregateReading(d *nvml.Device) (string, bool) { return text(d.ECCAggregate, number) }

// hiddenByMIG records the skip of a reading that the driver refuses only
// because MIG instances exist: no comparison with a baseline taken without them.
func (c *cell) hiddenByMIG(code nvml.Code) bool {
	hidden := code == nvml.NotSupported && len(c.d.Instances.Value) > 0
	if hidden {
		c.skip("not supported: MIG instances exist")
	}
	return hidden
}

func rowRemap(c *cell) {
	if c.hiddenByMIG(c.d.Remap.Code) {
		return
	}
	r, ok := answered(c, c.d.Remap)
	if !ok {
		return
	}
	switch {
	case r.Failure:
		c.fail(gpu.Fatal, "no failure", "a row could not be remapped", "return the card")
	case r.Uncorrectable > remappedMost:
		c.fail(gpu.Fatal, fmt.Sprintf("at most %d rows for uncorrectable errors", remappedMost), fmt.Sprint(r.Uncorrectable), "return the card")
	case r.Pending:
		c.fail(gpu.Reset, "nothing pending", "a remapping waits for a reset", "running work is unaffected; reset the GPU to apply it")
	default:
		c.pass("%d rows for correctable, %d for uncorrectable errors", r.Correctable, r.Uncorrectable)
	}
}

func rowRemapReading(d *nvml.Device) (string, bool) {
	return text(d.Remap, func(r nvml.Remap) string { return fmt.Sprintf("%d/%d", r.Correctable, r.Uncorrectable) })
}

func rowRemapReserve(c *cell) {
	if !c.hiddenByMIG(c.d.RemapNone.Code) {
		c.zero(c.d.RemapNone, gpu.Warn, "spare rows in every bank", "%d banks without", "the next bad row there cannot be remapped: plan to return the card")
	}
}

func rowRemapReserveReading(d *nvml.Device) (string, bool) {
	return text(d.RemapNone, func(n uint64) string { return fmt.Sprintf("%d banks without spare rows", n) })
}

func unrepairableMemory(c *cell) {
	c.clear(c.d.Unrepairable, "none", "the GPU has unrepairable memory", "return the card")
}

func unrepairableReading(d *nvml.Device) (string, bool) { return flag(d.Unrepairable, "none") }

func memoryRepairReading(d *nvml.Device) (string, bool) {
	return flag(d.RepairWaits, "nothing pending")
}

func memoryRepair(c *cell) {
	c.clear(c.d.RepairWaits, "nothing pending", "a channel or TPC repair is pending", "reset the GPU to apply it")
}

const partRetiredWaits = "pending retirement"

func retiredPages(c *cell) {
	r, ok := answered(c, c.d.Retired)
	if !ok {
		return
	}
	waits, known := part(c, c.d.RetiredWaits, partRetiredWaits)
	all := r.SingleBit + r.DoubleBit
	found := fmt.Sprintf("%d pages, %d of them for double-bit errors", all, r.DoubleBit)
	switch {
	case known && waits:
		c.fail(gpu.Warn, "nothing pending", "a page waits to be retired", "reset the GPU or reboot the host to apply it")
	case all >= retiredMost || r.DoubleBit > retiredMostDouble:
		c.fail(gpu.Warn, fmt.Sprintf("fewer than %d pages, at most %d for double-bit errors", retiredMost, retiredMostDouble), found, "return the card")
	default:
		c.pass("%s", found)
	}
}

func retiredReading(d *nvml.Device) (string, bool) {
	return text(d.Retired, func(r nvml.Retired) string { return fmt.Sprintf("%d/%d", r.SingleBit, r.DoubleBit) })
}

func infoROM(c *cell) {
	if code := c.d.InfoROMValid.Code; code == nvml.CorruptedInfoROM {
		c.fail(gpu.Warn, "valid", code.String(), "settings of the card may be lost: power-cycle the host; if it stays, return the card")
		return
	}
	image, known := part(c, c.d.InfoROM, partInfoROMImage)
	if _, ok := answered(c, c.d.InfoROMValid); !ok || c.failed() {
		return
	}
	if known {
		c.pass("valid, image %s", image)
		return
	}
	c.pass("valid")
}

const partInfoROMImage = "version of its image"

func infoROMReading(d *nvml.Device) (string, bool) {
	return text(d.InfoROMValid, func(bool) string { return "valid" })
}

// usedMost is how much memory an idle GPU may use: what the driver keeps for
// itself and its context.
const usedMost = 512 << 20

func processes(c *cell) {
	running, ok := answered(c, c.d.Processes)
	if !ok {
		return
	}
	for _, kind := range c.d.Unlisted {
		c.missing(partProcesses(kind), "not supported")
	}
	if len(running) > 0 {
		var found []string
		for _, p := range running {
			found = append(found, fmt.Sprintf("%d (%s)", p.PID, p.Kind))
		}
		c.fail(gpu.Reset, "no process on a drained GPU", list(found), "end these processes or validate with level quick")
		return
	}
	c.pass("none")
}

func partProcesses(kind string) string { return "the list of " + kind + " processes" }

// lists reports whether the driver lists the processes of a kind.
func lists(kind string) func(d *nvml.Device) bool {
	return func(d *nvml.Device) bool { return d.Processes.OK() && !slices.Contains(d.Unlisted, kind) }
}

func processesReading(d *nvml.Device) (string, bool) {
	return text(d.Processes, func([]nvml.Process) string { return "a list" })
}

// memoryInUse has no reading of its own in a baseline: it is that of the total.
func memoryInUse(c *cell) {
	m, ok := answered(c, c.d.Memory)
	if !ok {
		return
	}
	if m.Used >= usedMost {
		c.fail(gpu.Warn, fmt.Sprintf("less than %d MiB", usedMost>>20), fmt.Sprintf("%d MiB", m.Used>>20), "something holds memory of a drained GPU: look for its process")
		return
	}
	c.pass("%d MiB", m.Used>>20)
}

func memoryTotal(c *cell) {
	if m, ok := answered(c, c.d.Memory); ok {
		c.equalBase(gpu.Warn, number(m.Total), "the GPU shows another amount of memory than before")
	}
}

func memoryTotalReading(d *nvml.Device) (string, bool) {
	return text(d.Memory, func(m nvml.Memory) string { return number(m.Total) })
}
