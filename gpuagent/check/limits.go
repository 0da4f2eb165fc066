package check

import (
	"fmt"
	"math"
	"strings"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// temperatureMargin is how far below its limit a GPU must be, in degrees: an
// idle or probed GPU that is closer has no cooling to spare for work.
const temperatureMargin = 5

// persistentSamples is how many samples in a row, all of the probe's, make
// throttling persistent.
const persistentSamples = 3

var throttleReasons = []struct {
	bit  uint64
	name string
}{{0x8, "hardware slowdown"}, {0x20, "software thermal"}, {0x40, "hardware thermal"}, {0x80, "hardware power brake"}}

func throttle(c *cell) {
	bits, ok := answered(c, c.d.Throttle)
	if !ok {
		return
	}
	harmful, persistent := bits&nvml.HarmfulReasons, false
	if w := c.watched(); w != nil {
		harmful |= w.Reasons
		persistent = w.Throttled >= persistentSamples && w.Throttled+w.Unread == c.in.Watch.Samples
		if w.Unread > 0 {
			c.skip(fmt.Sprintf("no reasons in %d of %d samples", w.Unread, c.in.Watch.Samples))
		}
	}
	if harmful == 0 {
		c.pass("no harmful reason")
		return
	}
	var names []string
	for _, r := range throttleReasons {
		if harmful&r.bit != 0 {
			names = append(names, r.name)
		}
	}
	severity, found := gpu.Warn, strings.Join(names, ", ")
	if persistent {
		severity, found = gpu.Fatal, found+" in every sample"
	}
	c.fail(severity, "no slowdown", found, "check cooling and power of the host")
}

func throttleReading(d *nvml.Device) (string, bool) {
	return text(d.Throttle, func(uint64) string { return "reasons" })
}

func temperature(c *cell) {
	if c.d.Margin.OK() {
		c.margin(c.d.Margin.Value)
		return
	}
	now, ok := answered(c, c.d.Temperature)
	if !ok {
		return
	}
	limit, ok := answered(c, c.d.Slowdown)
	if !ok {
		return
	}
	c.below(now, limit)
}

const partSlowdown = "limit of the slowdown"

func degrees(n int) string { return fmt.Sprintf("%d °C", n) }

func temperatureReading(d *nvml.Device) (string, bool) {
	if d.Margin.OK() {
		return text(d.Margin, func(n int) string { return "a margin of " + degrees(n) })
	}
	value, ok := text(d.Temperature, degrees)
	return value, ok && d.Slowdown.OK()
}

// margin judges a driver that gives the distance to the point where the GPU
// begins to slow down by itself; its forced slowdown is a limit below that.
func (c *cell) margin(now int) {
	slowdown, known := part(c, c.d.Limits.Slowdown, partSlowdown)
	if m := now - slowdown; m < temperatureMargin {
		c.fail(gpu.Warn, fmt.Sprintf("at least %d °C below the slowdown", temperatureMargin), fmt.Sprintf("%d °C", m), "check the host's cooling")
		return
	}
	var others []string
	for _, l := range []struct {
		name  string
		limit nvml.Reading[int]
	}{{"GPU", c.d.Limits.GPU}, {"memory", c.d.Limits.Memory}, {"shutdown", c.d.Limits.Shutdown}} {
		if l.limit.OK() {
			others = append(others, fmt.Sprintf("%s %d", l.name, l.limit.Value))
		}
	}
	of := "slowdown"
	if !known {
		of = "point where it slows down by itself"
	}
	c.pass("%d °C below the %s; other limits by margin: %s", now-slowdown, of, list(others))
}

func memoryTemperature(c *cell) {
	now, ok := answered(c, c.d.MemoryTemp)
	if !ok {
		return
	}
	// A memory sensor that reads 0 is absent.
	if now == 0 {
		c.gone(c.answeredBefore, c.base, "no sensor at the memory")
		return
	}
	if limit, ok := answered(c, c.d.MemoryMax); ok {
		c.below(now, limit)
	}
}

func memoryTemperatureReading(d *nvml.Device) (string, bool) {
	value, ok := text(d.MemoryTemp, degrees)
	return value, ok && d.MemoryTemp.Value != 0 && d.MemoryMax.OK()
}

func (c *cell) below(now, limit int) {
	if now > limit-temperatureMargin {
		c.fail(gpu.Warn, "at most "+degrees(limit-temperatureMargin), degrees(now), "check the host's cooling")
		return
	}
	c.pass("%s", degrees(now))
}

func powerLimit(c *cell) {
	limit, ok := answered(c, c.d.PowerLimit)
	if !ok {
		return
	}
	enforced, known := part(c, c.d.Power.Enforced, partEnforced)
	if c.failed() {
		return
	}
	const hint = "a reload of the driver resets it: set it again (nvidia-smi -pl)"
	found := watts(limit)
	if known && enforced < limit {
		found += ", " + watts(enforced) + " in force"
	}
	reading, _ := powerLimitReading(c.d)
	bounds, want := c.d.Power.Bounds, c.in.Expect.PowerLimitWatts
	declared := fmt.Sprintf("%g W", want)
	switch {
	case want > 0 && bounds.OK() && (want*1000 < float64(bounds.Value.Least) || want*1000 > float64(bounds.Value.Most)):
		c.fail(gpu.Warn, declared, found, fmt.Sprintf("this board takes %s to %s: correct the plan", watts(bounds.Value.Least), watts(bounds.Value.Most)))
	case want > 0 && math.Abs(float64(limit)-want*1000) >= 1:
		c.fail(gpu.Warn, declared, found, hint)
	case want > 0 && known && enforced < limit:
		c.fail(gpu.Warn, declared+" in force", found, "something beside the driver holds the GPU below its limit (the board's controller, out of band): look there")
	case want == 0 && c.hasBase && c.base != reading:
		c.fail(gpu.Warn, c.base+", as in the baseline", found, hint)
	case bounds.OK() && c.d.Power.Default.OK():
		c.pass("%s; %s by default, %s to %s can be set", found, watts(c.d.Power.Default.Value), watts(bounds.Value.Least), watts(bounds.Value.Most))
	default:
		c.pass("%s", found)
	}
}

const partEnforced = "limit in force"

func watts(milli uint64) string { return fmt.Sprintf("%g W", float64(milli)/1000) }

// powerLimitReading is the limit that is set, and whether another limiter holds
// the GPU below it: how far may change from one moment to the next.
func powerLimitReading(d *nvml.Device) (string, bool) {
	found, ok := text(d.PowerLimit, watts)
	if e := d.Power.Enforced; ok && e.OK() && e.Value < d.PowerLimit.Value {
		found += ", less in force"
	}
	return found, ok
}

func persistenceMode(c *cell) {
	on, ok := answered(c, c.d.Persistence)
	if !ok {
		return
	}
	if c.in.Expect.Persistence && !on {
		c.fail(gpu.Warn, "on", "off", "a reload of the driver resets it: start nvidia-persistenced or set it (nvidia-smi -pm 1)")
		return
	}
	c.pass("%s", onOff(on))
}

func persistenceReading(d *nvml.Device) (string, bool) { return text(d.Persistence, onOff) }

var computeModes = []string{"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"}

func computeModeName(mode int) string {
	if mode >= 0 && mode < len(computeModes) {
		return computeModes[mode]
	}
	return fmt.Sprintf("mode %d", mode)
}

func computeMode(c *cell) {
	mode, ok := answered(c, c.d.ComputeMode)
	if !ok {
		return
	}
	found := computeModeName(mode)
	switch {
	case found == "DEFAULT", c.hasBase && c.base == found && found != "PROHIBITED":
		c.pass("%s", found)
	case c.hasBase:
		c.fail(gpu.Fatal, "DEFAULT, or "+c.base+" as in the baseline", found, "set it back (nvidia-smi -c 0): PROHIBITED refuses every CUDA program")
	default:
		c.fail(gpu.Fatal, "DEFAULT", found, "set it (nvidia-smi -c 0), or validate against a baseline that has this mode")
	}
}

func computeModeReading(d *nvml.Device) (string, bool) { return text(d.ComputeMode, computeModeName) }

func gsp(c *cell) {
	const hint = "the module's parameters changed (NVreg_EnableGpuFirmware)"
	if mode := c.d.GSPEnabled; mode.OK() && !mode.Value {
		// The driver tells no version of a firmware that is off.
		c.equalBase(gpu.Warn, onOff(false), hint)
		return
	}
	version, told := part(c, c.d.GSPVersion, partGSPVersion)
	if driver := c.in.NVML.Driver; told && driver.OK() && version != driver.Value {
		c.fail(gpu.Warn, "firmware "+driver.Value, version, "the firmware files are of another driver: install the matching package")
	}
	if c.failed() {
		return
	}
	if on, ok := answered(c, c.d.GSPEnabled); ok {
		c.equalBase(gpu.Warn, onOff(on), hint)
	}
}

const partGSPVersion = "version of the firmware"

func gspReading(d *nvml.Device) (string, bool) {
	return text(d.GSPEnabled, onOff)
}
