package nvml

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/refit-run/refit/gpuagent/child"
)

const watchChild = "nvml.watch"

// eventWait is how long one wait for an event lasts; the samples are taken
// between the waits.
const eventWait = 50 * time.Millisecond

// leastSamples are taken also when the work is over at once: only several in a
// row tell a persistent slowdown from a passing one.
const leastSamples = 3

func init() {
	child.Register(watchChild, func(ctx context.Context, _ json.RawMessage) (any, error) { return watch(ctx), nil })
}

// Observation is what was seen while the GPUs worked.
type Observation struct {
	Init    Code          `json:"init"`
	Took    time.Duration `json:"took"`
	Samples int           `json:"samples"`
	// Events is the answer of the set of events as a whole; each GPU has its own.
	Events  Reading[bool] `json:"events"`
	Xids    []LiveXid     `json:"xids,omitempty"`
	Devices []Watched     `json:"devices"`
}

// LiveXid is an event of the driver; Kind is xid, doubleBitECC or
// recoveryAction.
type LiveXid struct {
	UUID string `json:"uuid"`
	Kind string `json:"kind"`
	Xid  int    `json:"xid,omitempty"`
}

// Watched is one GPU over the time of the observation.
type Watched struct {
	UUID string `json:"uuid"`
	// Events is the answer to the registration of this GPU.
	Events Reading[bool] `json:"events"`
	// PCIeGen holds the fastest generation seen, with the greatest possible.
	PCIeGen Reading[Pair] `json:"pcieGen"`
	// Throttled counts the samples with a harmful reason, Unread those in which
	// the driver gave none; Reasons joins them.
	Throttled int    `json:"throttled"`
	Unread    int    `json:"unread,omitempty"`
	Reasons   uint64 `json:"reasons,omitempty"`
	// What grew: PCIe replays, other errors of the PCIe link that are not fatal,
	// CRC errors of all NVLinks.
	Replays    Reading[uint64] `json:"replays"`
	PCIeErrors Reading[uint64] `json:"pcieErrors"`
	CRC        Reading[uint64] `json:"crc"`
	start      counters
}

// counters are what may grow under load.
type counters struct{ replays, pcieErrors, crc Reading[uint64] }

func (d device) counters() counters { return counters{d.replay(), d.pcieErrors(), d.crc()} }

// HarmfulReasons are the clock event bits that tell of trouble: hardware
// slowdown, thermal limits by software or hardware, power brake.
const HarmfulReasons = 0x8 | 0x20 | 0x40 | 0x80

// Watch observes in a child process until stop closes or the time is over.
func Watch(ctx context.Context, timeout time.Duration, stop <-chan struct{}) (Observation, error) {
	var o Observation
	err := child.Run(ctx, child.Spec{Name: watchChild, Timeout: timeout, Reply: &o, Stop: stop})
	return o, err
}

// watch runs in the child until its context ends, and a few samples at least.
func watch(ctx context.Context) Observation {
	lib, code := open()
	o := Observation{Init: code}
	if code != Success {
		return o
	}
	defer lib.Shutdown()
	start := time.Now()
	devices, set := o.begin(lib)
	for ctx.Err() == nil || o.Samples < leastSamples {
		o.wait(lib, set)
		o.sample(devices)
	}
	for i, d := range devices {
		w, end := &o.Devices[i], d.counters()
		w.Replays, w.PCIeErrors = growth(w.start.replays, end.replays), growth(w.start.pcieErrors, end.pcieErrors)
		w.CRC = growth(w.start.crc, end.crc)
	}
	o.Took = time.Since(start)
	return o
}

// begin opens the GPUs and registers for events: those of the mask that each
// supports.
func (o *Observation) begin(lib library) ([]device, gonvml.EventSet) {
	count := ask(lib, "host", lib.DeviceGetCount, "nvmlDeviceGetCount_v2", "nvmlDeviceGetCount")
	set := ask(lib, "host", lib.EventSetCreate, "nvmlEventSetCreate")
	o.Events = then(set, func(gonvml.EventSet) bool { return true })
	var devices []device
	for i := range count.Value {
		h := ask(lib, gpuScope(i), func() (gonvml.Device, gonvml.Return) { return lib.DeviceGetHandleByIndex(i) },
			"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex")
		if !h.OK() {
			continue
		}
		d := device{Device: h.Value, library: lib, scope: gpuScope(i)}
		w := Watched{UUID: get(d, d.GetUUID, "nvmlDeviceGetUUID").Value, start: d.counters()}
		if w.Events = o.Events; set.OK() {
			w.Events = d.register(set.Value)
		}
		devices, o.Devices = append(devices, d), append(o.Devices, w)
	}
	return devices, set.Value
}

// register asks for those events that the GPU supports.
func (d device) register(set gonvml.EventSet) Reading[bool] {
	const wanted = gonvml.EventTypeXidCriticalError | gonvml.EventTypeDoubleBitEccError | gonvml.EventTypeGpuRecoveryAction
	kinds := get(d, d.GetSupportedEventTypes, "nvmlDeviceGetSupportedEventTypes")
	switch {
	case !kinds.OK():
		return Reading[bool]{Code: kinds.Code, Missing: kinds.Missing}
	case kinds.Value&wanted == 0:
		return Reading[bool]{Code: NotSupported}
	}
	return get(d, func() (bool, gonvml.Return) { return true, d.RegisterEvents(kinds.Value&wanted, set) }, "nvmlDeviceRegisterEvents")
}

// listens reports whether a GPU is registered: one that is not takes no event
// from the others.
func (o *Observation) listens() bool {
	return slices.ContainsFunc(o.Devices, func(w Watched) bool { return w.Events.OK() })
}

// wait takes one event, or lets a moment pass.
func (o *Observation) wait(lib library, set gonvml.EventSet) {
	if missing := lib.has("nvmlEventSetWait_v2", "nvmlEventSetWait"); missing != "" {
		o.Events = Reading[bool]{Missing: missing}
	}
	if o.Events.Missing != "" || !o.listens() {
		<-time.After(eventWait)
		return
	}
	e, ret := set.Wait(uint32(eventWait.Milliseconds()))
	if ret != gonvml.SUCCESS {
		if ret != gonvml.ERROR_TIMEOUT {
			// Said, and tried again: a lost GPU must not deafen us to the others.
			o.Events = Reading[bool]{Code: Code(ret)}
			<-time.After(eventWait)
		}
		return
	}
	x := LiveXid{}
	if e.Device != nil {
		x.UUID, _ = e.Device.GetUUID()
	}
	switch e.EventType {
	case gonvml.EventTypeXidCriticalError:
		x.Kind, x.Xid = "xid", int(e.EventData)
	case gonvml.EventTypeDoubleBitEccError:
		x.Kind = "doubleBitECC"
	default:
		x.Kind = "recoveryAction"
	}
	o.Xids = append(o.Xids, x)
}

func (o *Observation) sample(devices []device) {
	o.Samples++
	for i, d := range devices {
		w := &o.Devices[i]
		if gen := d.pcieGeneration(); !w.PCIeGen.OK() || o.Samples == 1 || gen.OK() && gen.Value.Current > w.PCIeGen.Value.Current {
			w.PCIeGen = gen
		}
		reasons := d.throttle()
		bits := reasons.Value & HarmfulReasons
		switch {
		case !reasons.OK():
			w.Unread++
		case bits != 0:
			w.Throttled++
			w.Reasons |= bits
		}
	}
}

// crc adds the CRC errors of all links.
func (d device) crc() Reading[uint64] {
	n := d.field(fieldLinkCount, 0)
	if !n.OK() {
		return n
	}
	var total Reading[uint64]
	for l := range linksRead(n) {
		r := d.linkCRC(l)
		if !r.OK() {
			return r
		}
		total.Value += r.Value
	}
	return total
}

// growth of a counter; one that fell was reset in between.
func growth(before, after Reading[uint64]) Reading[uint64] {
	if !before.OK() {
		return before
	}
	return then(after, func(n uint64) uint64 { return Growth(before.Value, n) })
}

// Growth of a counter between two readings; one that fell was reset, and all
// it holds now is new.
func Growth(before, after uint64) uint64 {
	if after < before {
		return after
	}
	return after - before
}
