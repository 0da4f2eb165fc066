package check

import (
	"fmt"
	"slices"
	"strings"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// crcRateMost is the rate of CRC errors per second, over all links, that
// NVIDIA's diagnostic tolerates.
const crcRateMost = 100

func nvlinkUp(c *cell) {
	declared := c.in.Expect.NVLinks
	// A card without links answers 0, or that it has no such thing.
	if declared > 0 && (c.d.LinkCount.Code == nvml.NotSupported || c.d.LinkCount.OK() && c.d.LinkCount.Value == 0) {
		c.fail(gpu.Fatal, fmt.Sprintf("%d links", declared), "none", "the GPU shows no NVLink: check the baseboard and the fabric manager")
		return
	}
	n, ok := neededIf(c, declared > 0, c.d.LinkCount, "NVLink is declared")
	if !ok {
		return
	}
	if read := len(c.d.Links); int(n) > read {
		c.unanswered(fmt.Sprintf("the driver counts %d links, this agent reads %d", n, read), "this GPU is newer than the agent: upgrade the agent")
		return
	}
	var down, unknown []string
	for i, l := range c.d.Links {
		switch {
		case !l.Up.OK():
			unknown = append(unknown, fmt.Sprint(i))
		case !l.Up.Value:
			down = append(down, fmt.Sprint(i))
		}
	}
	found := fmt.Sprintf("%d links up", len(c.d.Links)-len(down)-len(unknown))
	switch {
	case declared > 0 && int(n) != declared:
		c.fail(gpu.Fatal, fmt.Sprintf("%d links", declared), fmt.Sprintf("%d links", n), "the GPU shows another number of links: check the baseboard")
	case c.d.MIGOn() && n > 0 && len(down) == int(n) && (!c.hasBase || c.base == found):
		c.skip("in MIG mode no link is on, as of an A100 on a baseboard")
	case declared == 0 && n > 0 && len(down) == int(n) && (!c.hasBase || c.base == found):
		// As on a PCIe card without a bridge.
		c.skip("no link is connected, and none is declared")
	case len(down) > 0:
		c.fail(gpu.Fatal, "every link up", "down: "+strings.Join(down, ", "), "check the fabric manager and the NVLink rows of the kernel log")
	case len(unknown) > 0:
		c.unanswered("no state of link "+strings.Join(unknown, ", "), "reload the driver and check again")
	case c.hasBase && c.base != found:
		c.fail(gpu.Fatal, c.base+", as in the baseline", found, "the GPU has other links than before: check the baseboard")
	default:
		c.pass("%s%s", found, remotes(c.d.Links))
	}
}

// remotes names what the links lead to, as far as the driver knows it.
func remotes(links []nvml.Link) string {
	names := map[int]string{0: "GPUs", 1: "processors", 2: "switches"}
	var to []string
	for _, l := range links {
		if name := names[l.Remote.Value]; l.Remote.OK() && name != "" && !slices.Contains(to, name) {
			to = append(to, name)
		}
	}
	if len(to) == 0 {
		return ""
	}
	return ", to " + strings.Join(to, " and ")
}

func nvlinkUpReading(d *nvml.Device) (string, bool) {
	up := 0
	for _, l := range d.Links {
		if !l.Up.OK() {
			return "", false
		}
		if l.Up.Value {
			up++
		}
	}
	return fmt.Sprintf("%d links up", up), d.LinkCount.OK()
}

func nvlinkSpeed(c *cell) {
	if !c.hasLinks() {
		return
	}
	if !everyLink(c, func(l nvml.Link) nvml.Reading[uint64] { return l.Speed }) {
		return
	}
	c.equalBase(gpu.Warn, speeds(c.d), "links trained at another speed: check the baseboard and the fabric manager")
}

// hasLinks records a skip on a GPU without an NVLink that may be up: a driver
// tells nothing of links that lead nowhere.
func (c *cell) hasLinks() bool {
	has := slices.ContainsFunc(c.d.Links, func(l nvml.Link) bool { return !l.Up.OK() || l.Up.Value })
	if !has {
		c.skip("no NVLink is up")
	}
	return has
}

// speeds writes each speed that a link has once: links of a healthy GPU have
// one. How many links there are is another row's matter.
func speeds(d *nvml.Device) string {
	var distinct []string
	for _, l := range d.Links {
		if s := fmt.Sprint(l.Speed.Value); !slices.Contains(distinct, s) {
			distinct = append(distinct, s)
		}
	}
	return strings.Join(distinct, ", ") + " MB/s"
}

func nvlinkSpeedReading(d *nvml.Device) (string, bool) {
	return speeds(d), allLinks(d, func(l nvml.Link) bool { return l.Speed.OK() })
}

// allLinks reports whether every link has what a baseline is made of: a link
// that was not read must not be kept as zero.
func allLinks(d *nvml.Device, has func(nvml.Link) bool) bool {
	return len(d.Links) > 0 && !slices.ContainsFunc(d.Links, func(l nvml.Link) bool { return !has(l) })
}

// everyLink records why the reading has no answer, where a link has none.
func everyLink[T any](c *cell, reading func(nvml.Link) nvml.Reading[T]) bool {
	for _, l := range c.d.Links {
		if _, ok := answered(c, reading(l)); !ok {
			return false
		}
	}
	return true
}

// nvlinkErrors: one replay or recovery more than in the baseline is fatal.
// NVLink 5 has no replays and counts recoveries of its own.
func nvlinkErrors(c *cell) {
	if !c.hasLinks() {
		return
	}
	older := !c.d.Links[0].Five.OK()
	if older && (!everyLink(c, func(l nvml.Link) nvml.Reading[uint64] { return l.Replay }) ||
		!everyLink(c, func(l nvml.Link) nvml.Reading[uint64] { return l.Recovery })) ||
		!older && !everyLink(c, func(l nvml.Link) nvml.Reading[nvml.Link5] { return l.Five }) {
		return
	}
	replays, recoveries := linkErrors(c.d)
	found := fmt.Sprintf("%d replays, %d recoveries", replays, recoveries)
	c.noGrowth(gpu.Fatal, [2]uint64{replays, recoveries}, found, nvlinkHint)
}

const nvlinkHint = "read the NVLink rows of the kernel log, reset the GPUs of the fabric"

// noGrowth compares two counters with those of the baseline. Those of a new
// boot start at zero: what they hold is new.
func (c *cell) noGrowth(severity gpu.Severity, now [2]uint64, found, hint string) {
	first, second, ok := parsePair(c.base)
	switch {
	case c.hasBase && ok:
		if grown := nvml.Growth(first, now[0]) + nvml.Growth(second, now[1]); grown > 0 {
			c.fail(severity, "none new since the baseline", fmt.Sprintf("%d new: %s", grown, found), hint)
			return
		}
	case c.in.rebooted() && now[0]+now[1] > 0:
		c.fail(severity, "none since the reboot", found, hint)
		return
	}
	c.pass("%s", found)
}

func linkErrors(d *nvml.Device) (replays, recoveries uint64) {
	for _, l := range d.Links {
		replays += l.Replay.Value
		recoveries += max(l.Recovery.Value, l.Five.Value.Recoveries)
	}
	return replays, recoveries
}

func nvlinkErrorsReading(d *nvml.Device) (string, bool) {
	replays, recoveries := linkErrors(d)
	return fmt.Sprintf("%d/%d", replays, recoveries), allLinks(d, func(l nvml.Link) bool { return l.Five.OK() || l.Replay.OK() && l.Recovery.OK() })
}

// nvlink5Errors: errors that NVLink 5 counts by packet warn when they grow. The
// bit error rates are estimates over the life of the link and only recorded.
func nvlink5Errors(c *cell) {
	if !c.hasLinks() || !everyLink(c, func(l nvml.Link) nvml.Reading[nvml.Link5] { return l.Five }) {
		return
	}
	var effective, symbol uint64
	for _, l := range c.d.Links {
		effective, symbol = max(effective, l.Five.Value.EffectiveRate), max(symbol, l.Five.Value.SymbolRate)
	}
	n := link5Errors(c.d)
	c.noGrowth(gpu.Warn, [2]uint64{n, 0}, fmt.Sprintf("%d errors; bit error rates %#x effective, %#x symbol", n, effective, symbol), nvlinkHint)
}

func link5Errors(d *nvml.Device) (n uint64) {
	for _, l := range d.Links {
		n += l.Five.Value.Errors
	}
	return n
}

func nvlink5Reading(d *nvml.Device) (string, bool) {
	return fmt.Sprintf("%d/0", link5Errors(d)), allLinks(d, func(l nvml.Link) bool { return l.Five.OK() })
}

func nvlinkCRC(c *cell) {
	if !c.hasLinks() {
		return
	}
	w := c.watched()
	if w == nil {
		c.skip("not observed under load")
		return
	}
	n, ok := answered(c, w.CRC)
	if !ok {
		return
	}
	rate := float64(n) / max(c.in.Watch.Took.Seconds(), 1e-3)
	if rate >= crcRateMost {
		c.fail(gpu.Warn, fmt.Sprintf("less than %d CRC errors per second", crcRateMost), fmt.Sprintf("%.0f", rate), "check cables and baseboard")
		return
	}
	c.pass("%.0f CRC errors per second", rate)
}

func nvlinkCRCReading(d *nvml.Device) (string, bool) {
	return "a counter", allLinks(d, func(l nvml.Link) bool { return l.CRC.OK() })
}

// States and health of the fabric, as the published API numbers them.
const (
	fabricNone, fabricNotStarted, fabricInProgress, fabricCompleted = 0, 1, 2, 3
	fabricHealthy, fabricUnhealthy, fabricLimited                   = 1, 2, 3
)

// fabricHealth are the fields of the health mask: two bits each, 1 is true; the
// configuration has four and is right at 1, wrong above.
var fabricHealth = []struct {
	shift, bits uint
	name        string
}{{0, 2, "degraded bandwidth"}, {2, 2, "route recovery"}, {4, 2, "unhealthy route"}, {6, 2, "access timeout recovery"}, {8, 4, "wrong configuration"}}

func fabricTrouble(mask uint32) []string {
	var trouble []string
	for _, f := range fabricHealth {
		value := mask >> f.shift & (1<<f.bits - 1)
		if f.bits == 2 && value == 1 || f.bits == 4 && value >= 2 {
			trouble = append(trouble, f.name)
		}
	}
	return trouble
}

// ComingUp names what is worth another look before the deadline: a driver or a
// GPU that is not ready yet, a fabric in progress. It is empty when nothing is.
func ComingUp(s *nvml.Snapshot) string {
	notReady := func(d nvml.Device) bool { return d.Handle == nvml.NotReady }
	inProgress := func(d nvml.Device) bool { return d.Fabric.OK() && d.Fabric.Value.State == fabricInProgress }
	switch {
	case s.Init == nvml.NotReady:
		return "driver"
	case slices.ContainsFunc(s.Devices, notReady):
		return "GPUs"
	case slices.ContainsFunc(s.Devices, inProgress):
		return "fabric"
	}
	return ""
}

func fabric(c *cell) {
	none := c.d.Fabric.Code == nvml.NotSupported || c.d.Fabric.OK() && c.d.Fabric.Value.State == fabricNone
	if none && c.in.Expect.Fabric {
		c.fail(gpu.Fatal, "part of an NVSwitch fabric", "no fabric", "start the fabric manager of the driver's version")
		return
	}
	if none && !c.hasBase {
		c.skip("no NVSwitch fabric")
		return
	}
	f, ok := neededIf(c, c.in.Expect.Fabric, c.d.Fabric, "a fabric is declared")
	if !ok {
		return
	}
	trouble := fabricTrouble(f.Health)
	const completed = "state COMPLETED with status SUCCESS"
	switch {
	case f.State == fabricNone:
		c.fail(gpu.Warn, c.base+", as in the baseline", "no fabric", "start the fabric manager of the driver's version")
	case f.State == fabricNotStarted:
		c.fail(gpu.Fatal, completed, "NOT_STARTED", "start the fabric manager of the driver's version")
	case f.State == fabricInProgress:
		c.fail(gpu.Fatal, completed+" before the deadline", "IN_PROGRESS", "read the fabric manager's log")
	case f.State != fabricCompleted || f.Status != nvml.Success:
		c.fail(gpu.Fatal, completed, fmt.Sprintf("state %d with status %s", f.State, f.Status), "read the fabric manager's log")
	case f.Version == 3 && f.Summary == fabricLimited:
		c.fail(gpu.Warn, "healthy", "limited capacity: "+list(trouble), "read the fabric manager's log")
	case f.Version == 3 && f.Summary == fabricUnhealthy, len(trouble) > 0:
		c.fail(gpu.Fatal, "healthy", "unhealthy: "+list(trouble), "read the fabric manager's log; reset the GPUs of the fabric")
	default:
		c.pass("completed")
	}
}

func fabricReading(d *nvml.Device) (string, bool) {
	return "completed", d.Fabric.OK() && d.Fabric.Value.State == fabricCompleted
}

// peers compares the matrix of peer access with the baseline's.
func peers(c *cell) {
	if len(c.d.Peers) == 0 {
		c.skip("no other GPU")
		return
	}
	for _, p := range c.d.Peers {
		for _, r := range []nvml.Reading[int]{p.NVLink, p.Read, p.Write, p.Topology} {
			if _, ok := answered(c, r); !ok {
				return
			}
		}
	}
	if !c.hasBase {
		c.pass("%d peers", len(c.d.Peers))
		return
	}
	had, has := strings.Fields(c.base), strings.Fields(peerText(c.d))
	if lost := without(had, has); len(lost) > 0 {
		c.fail(gpu.Warn, list(lost)+", as in the baseline", list(without(has, had)), "peer access changed (UUID end: NVLink/read/write@topology): check NVLink, IOMMU and the driver's parameters")
		return
	}
	c.pass("%d peers as in the baseline", len(c.d.Peers))
}

// peerText writes one word a peer: the end of its UUID, then the answers for
// NVLink, read and write (0 is yes), then the kind of path.
func peerText(d *nvml.Device) string {
	var words []string
	for _, p := range d.Peers {
		end := p.UUID[max(0, len(p.UUID)-8):]
		words = append(words, fmt.Sprintf("%s:%d/%d/%d@%d", end, p.NVLink.Value, p.Read.Value, p.Write.Value, p.Topology.Value))
	}
	slices.Sort(words)
	return strings.Join(words, " ")
}

func peersReading(d *nvml.Device) (string, bool) {
	unread := slices.ContainsFunc(d.Peers, func(p nvml.Peer) bool {
		return !p.NVLink.OK() || !p.Read.OK() || !p.Write.OK() || !p.Topology.OK()
	})
	return peerText(d), len(d.Peers) > 0 && !unread
}
