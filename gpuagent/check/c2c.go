package check

import (
	"fmt"
	"slices"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/nvml"
)

func c2c(c *cell) {
	if up, ok := answered(c, c.d.C2C); ok {
		c.equalBase(gpu.Warn, onOff(up), "the chip-to-chip link changed: reboot the host")
	}
}

func c2cReading(d *nvml.Device) (string, bool) { return text(d.C2C, onOff) }

// c2cLinks: each link between the chips is up, and they are those of before.
func c2cLinks(c *cell) {
	links, ok := answered(c, c.d.C2CLinks)
	if !ok {
		return
	}
	if len(links) == 0 {
		c.gone(c.answeredBefore, c.base, "no C2C")
		return
	}
	var down []string
	for i, l := range links {
		up, ok := needed(c, l.Up, fmt.Sprintf("there is a link %d", i))
		if !ok {
			return
		}
		if !up {
			down = append(down, fmt.Sprint(i))
		}
	}
	if len(down) > 0 {
		c.fail(gpu.Warn, "every link up", "down: "+list(down), "the chip-to-chip link is not whole: reboot the host; if it stays, return the board")
		return
	}
	if _, ok := part(c, links[0].Bandwidth, partC2CBandwidth); ok || links[0].Bandwidth.Absent() {
		c.equalBase(gpu.Warn, c2cText(links), "the chip-to-chip links are others than before: reboot the host")
	}
}

const partC2CBandwidth = "bandwidth"

// c2cText gives the bandwidths that the links have, each once.
func c2cText(links []nvml.C2CLink) string {
	var distinct []string
	for _, l := range links {
		word := "unknown"
		if l.Bandwidth.OK() {
			word = fmt.Sprint(l.Bandwidth.Value)
		}
		if !slices.Contains(distinct, word) {
			distinct = append(distinct, word)
		}
	}
	return fmt.Sprintf("%d links of at most %s MB/s", len(links), list(distinct))
}

func c2cLinksReading(d *nvml.Device) (string, bool) {
	return c2cText(d.C2CLinks.Value), d.C2CLinks.OK() && len(d.C2CLinks.Value) > 0
}

func c2cErrors(c *cell) {
	n, ok := answered(c, c.d.C2CErrors)
	if !ok {
		return
	}
	c.noGrowth(gpu.Warn, [2]uint64{n, 0}, fmt.Sprintf("%d errors in all", n), "watch the chip-to-chip link; if they go on, return the board")
}

func c2cErrorsReading(d *nvml.Device) (string, bool) {
	return text(d.C2CErrors, func(n uint64) string { return fmt.Sprintf("%d/0", n) })
}
