// Package check judges a GPU host: pure rules, one function per row of the
// validation table, from what was read (driver, host, probe) to checks. It does no I/O and calls no driver; a rule that cannot be answered
// says so by name and never passes silently.
package check

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// Input is everything a validation saw.
type Input struct {
	Level gpu.Level
	NVML  nvml.Snapshot
	// Trouble is set when the child that reads the driver did not answer; NVML
	// is empty then.
	Trouble string
	Host    host.Snapshot
	// HostTrouble is set when the child that reads the host did not answer; of
	// Host only the boot is known then.
	HostTrouble string
	// Unseen says why other checks and set-ups of this host are not kept off.
	Unseen string
	// Watch is what was seen while the probe ran, nil when nothing was; then
	// WatchTrouble is what became of the child that looked.
	Watch        *nvml.Observation
	WatchTrouble error
	Proofs       []Proof
	// Soak is how long level stress is to keep at it.
	Soak time.Duration
	// Baseline is nil when there is nothing to compare with.
	Baseline *gpu.Baseline
	Expect   gpu.Expect
}

// driverUp reports whether the driver was read at all.
func (in *Input) driverUp() bool { return in.Trouble == "" && in.NVML.Init == nvml.Success }

// rebooted reports whether the baseline is of an earlier boot: volatile
// counters and the kernel log then started anew.
func (in *Input) rebooted() bool {
	return in.Baseline != nil && in.Baseline.BootID != in.Host.BootID
}

// Evaluate answers every row: those of the host first, then those of each GPU.
func Evaluate(in Input) []gpu.Check {
	var out []gpu.Check
	for _, r := range hostRows {
		if !covers(in.Level, r.level) || r.needsDriver && !in.driverUp() || r.needsHost && in.HostTrouble != "" {
			continue
		}
		out = append(out, r.answer(&in, nil)...)
	}
	if !in.driverUp() {
		return out
	}
	for i := range in.NVML.Devices {
		d := &in.NVML.Devices[i]
		for _, r := range gpuRows {
			// Nothing was read of a GPU whose handle is refused; identity says so.
			if d.Handle != nvml.Success && r.name != rowIdentity {
				continue
			}
			if covers(in.Level, r.level) {
				out = append(out, r.answer(&in, d)...)
			}
		}
	}
	return out
}

func covers(asked, row gpu.Level) bool {
	order := []gpu.Level{gpu.Quick, gpu.Standard, gpu.Stress}
	return slices.Index(order, asked) >= slices.Index(order, row)
}

// row is one line of the validation table.
type row struct {
	name  string
	level gpu.Level
	// severity is the row's own: that of an answer it needs and does not get.
	severity gpu.Severity
	// why says what NOT_SUPPORTED stands for.
	why         string
	needsDriver bool
	// needsHost: without a reading of the host the row would take what was not
	// read for absent; the row of the host tells.
	needsHost bool
	check     func(c *cell)
	// reading is what a baseline keeps of the row, for the comparison or only to
	// know later that there was an answer; nil keeps nothing.
	reading func(d *nvml.Device) (string, bool)
	// parts are the single readings of a row that has several; a baseline keeps
	// those that had an answer, by part.
	parts parts
	// counter: the reading starts anew with each boot.
	counter bool
}

// parts are readings of a row by name, and whether a GPU has them.
type parts map[string]func(d *nvml.Device) bool

func (r *row) answer(in *Input, d *nvml.Device) []gpu.Check {
	c := newCell(in, d, r)
	r.check(c)
	return c.out
}

func newCell(in *Input, d *nvml.Device, r *row) *cell {
	c := &cell{in: in, d: d, row: r, before: in.before(d)}
	c.base, c.answeredBefore = c.before[r.name]
	c.hasBase = c.answeredBefore && (!r.counter || !in.rebooted())
	return c
}

// before are the baseline's readings of a GPU, or of the host without one.
func (in *Input) before(d *nvml.Device) map[string]string {
	switch {
	case in.Baseline == nil:
		return nil
	case d == nil:
		return in.Baseline.Readings
	}
	for _, b := range in.Baseline.Devices {
		if b.UUID == d.UUID.Value {
			return b.Readings
		}
	}
	return nil
}

// cell is one row on one device: what a rule reads and where it answers.
type cell struct {
	in     *Input
	d      *nvml.Device // nil on a row of the host
	row    *row
	before map[string]string
	// base is the baseline's reading of the row. answeredBefore: there is one.
	// hasBase: it is one to compare with, which a counter of an earlier boot is
	// not.
	base                    string
	answeredBefore, hasBase bool
	out                     []gpu.Check
}

func (c *cell) device() string {
	if c.d == nil {
		return ""
	}
	if c.d.UUID.OK() {
		return c.d.UUID.Value
	}
	return fmt.Sprintf("GPU %d", c.d.Index)
}

func (c *cell) add(k gpu.Check) {
	k.Name = c.row.name
	if k.Device == "" {
		k.Device = c.device()
	}
	c.out = append(c.out, k)
}

func (c *cell) pass(found string, args ...any) {
	c.add(gpu.Check{OK: true, Severity: gpu.Info, Found: fmt.Sprintf(found, args...)})
}

func (c *cell) fail(severity gpu.Severity, expected, found, hint string) {
	c.add(gpu.Check{Severity: severity, Expected: expected, Found: found, Hint: hint})
}

// skip records a row that has no answer and needs none here.
func (c *cell) skip(why string) {
	c.add(gpu.Check{Severity: gpu.Info, Found: "not answered", Skipped: why})
}

// unanswered records a row that has no answer though it matters.
func (c *cell) unanswered(why, hint string) {
	c.add(gpu.Check{Severity: c.row.severity, Found: "not answered", Skipped: why, Hint: hint})
}

// answered gives the value of a reading, or records why there is none.
func answered[T any](c *cell, r nvml.Reading[T]) (T, bool) {
	if r.OK() {
		return r.Value, true
	}
	c.refused(r.Why())
	var none T
	return none, false
}

// needed is answered for a value that must be there, because of what else is
// known or was declared: that the driver has no such call proves nothing then.
func needed[T any](c *cell, r nvml.Reading[T], because string) (T, bool) {
	if r.Absent() {
		c.unanswered(because+", and "+c.absence(r.Why()), "install a driver that has the call, or correct the plan")
		return r.Value, false
	}
	return answered(c, r)
}

// neededIf is needed where the condition holds, else answered.
func neededIf[T any](c *cell, must bool, r nvml.Reading[T], because string) (T, bool) {
	if must {
		return needed(c, r, because)
	}
	return answered(c, r)
}

// part is answered for one reading of several of a row: absent, it is named.
func part[T any](c *cell, r nvml.Reading[T], name string) (T, bool) {
	if r.Absent() {
		c.missing(name, c.absence(r.Why()))
		return r.Value, false
	}
	return answered(c, r)
}

// missing records a part of the row that is not there.
func (c *cell) missing(part, why string) {
	_, had := c.before[partKey(c.row.name, part)]
	c.gone(had, part, part+": "+why)
}

func partKey(row, part string) string { return row + ": " + part }

// gone records what has no answer and needs none: a skip, unless the baseline
// had it. A value that an upgrade took away is no good one.
func (c *cell) gone(had bool, what, why string) {
	if had {
		c.fail(gpu.Warn, what+", as in the baseline", why, "the new driver or the GPU's mode no longer gives this value")
		return
	}
	c.skip(why)
}

// absence says what it means that a value is not there at all.
func (c *cell) absence(code nvml.Code, missing string) string {
	switch {
	case missing != "":
		return "the driver's library has no " + missing
	case code == nvml.FunctionNotFound, code == nvml.ArgumentVersion:
		return "the driver's library has another version of the call"
	case c.row.why != "":
		return "not supported: " + c.row.why
	}
	return "not supported"
}

func (c *cell) refused(code nvml.Code, missing string) {
	switch {
	case nvml.Reading[bool]{Code: code, Missing: missing}.Absent():
	case code == nvml.GPUIsLost:
		c.fail(gpu.Fatal, "an answer", code.String(), "the GPU fell off the bus: read the kernel log, power-cycle the host")
		return
	case code == nvml.ResetRequired:
		c.fail(gpu.Reset, "an answer", code.String(), "drain the host and reset the GPU")
		return
	case code == nvml.NoPermission:
		c.unanswered("no permission", "run the agent as root with the capability files of the driver")
		return
	case code == nvml.Unknown:
		c.fail(c.row.severity, "an answer", code.String(), "the driver failed inside: read the kernel log")
		return
	default:
		c.unanswered("the driver answers "+code.String(), "repeat the check; if it stays, reload the driver")
		return
	}
	c.gone(c.answeredBefore, c.base, c.absence(code, missing))
}

// failed reports whether the row has failed on this device.
func (c *cell) failed() bool {
	return slices.ContainsFunc(c.out, func(k gpu.Check) bool { return !k.OK && k.Skipped == "" && k.Severity != gpu.Info })
}

// refusedOn is refused for one GPU on a row of the host.
func refusedOn[T any](c *cell, d *nvml.Device, r nvml.Reading[T]) {
	one := newCell(c.in, d, c.row)
	one.refused(r.Why())
	c.out = append(c.out, one.out...)
}

// equalBase compares with the baseline, where there is one.
func (c *cell) equalBase(severity gpu.Severity, found, hint string) {
	if c.hasBase && c.base != found {
		c.fail(severity, c.base+", as in the baseline", found, hint)
		return
	}
	c.pass("%s", found)
}

// Readings are what a baseline keeps of one GPU.
func Readings(d *nvml.Device) map[string]string {
	kept := map[string]string{}
	if d.Handle != nvml.Success {
		return kept
	}
	for _, r := range slices.Concat(hostRows, gpuRows) {
		if r.reading != nil {
			if value, ok := r.reading(d); ok {
				kept[r.name] = value
			}
		}
		for name, has := range r.parts {
			if has(d) {
				kept[partKey(r.name, name)] = "answered"
			}
		}
	}
	return kept
}

// HostReadings are what a baseline keeps of the host.
func HostReadings(s *nvml.Snapshot) map[string]string {
	kept := map[string]string{}
	if s.ConfCompute.OK() {
		kept[rowConfCompute] = onOff(s.ConfCompute.Value != 0)
	}
	if s.CUDA.OK() {
		kept[rowCUDAVersion] = cudaText(s.CUDA.Value)
	}
	return kept
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

// text makes a baseline reading out of an answer.
func text[T any](r nvml.Reading[T], write func(T) string) (string, bool) {
	if !r.OK() {
		return "", false
	}
	return write(r.Value), true
}

func list(values []string) string {
	if len(values) == 0 {
		return "none"
	}
	return strings.Join(values, ", ")
}
