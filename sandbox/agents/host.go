package agents

import (
	"fmt"
	"sync"
	"time"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/sandbox/kwok"
	"github.com/refit-run/refit/sandbox/tensorfusion"
)

// The inventory that every simulated host reports; its GPUs are the double's.
const (
	memoryBytes = 80 << 30
	driver      = "570.124.06"
	// rowsThatPass is the number of rows of the validation table that a
	// healthy host answers.
	rowsThatPass = 43
)

// host is the state of one simulated GPU host.
type host struct {
	node string
	gpus int

	mu     sync.Mutex
	bootID string
	broken bool
}

func newHost(node string, gpus int) *host {
	return &host{node: node, gpus: gpus, bootID: kwok.BootID(node)}
}

func (h *host) devices() []gpu.Device {
	all := make([]gpu.Device, h.gpus)
	for i := range all {
		all[i] = gpu.Device{UUID: tensorfusion.DeviceUUID(h.node, i), Model: tensorfusion.Model, MemoryBytes: memoryBytes}
	}
	return all
}

func (h *host) setBroken(broken bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.broken = broken
}

func (h *host) isBroken() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.broken
}

func (h *host) baseline(now time.Time) gpu.Baseline {
	return gpu.Baseline{Node: h.node, BootID: h.bootID, Driver: driver, Taken: now.UTC(), Devices: h.devices()}
}

// validate compares like the real agent: against the baseline where there is
// one, and with the faults of the host.
func (h *host) validate(base *gpu.Baseline) gpu.Result {
	r := gpu.Result{Node: h.node, BootID: h.bootID, Driver: driver, Devices: h.devices(), Passed: rowsThatPass, Verdict: gpu.Pass}
	fail := func(c gpu.Check) {
		r.Checks = append(r.Checks, c)
		r.Passed--
		r.Verdict = gpu.Unfit
	}
	if h.isBroken() {
		r.Devices = r.Devices[1:]
		fail(gpu.Check{
			Name: "device count", Device: tensorfusion.DeviceUUID(h.node, 0), Severity: gpu.Fatal,
			Expected: fmt.Sprintf("%d devices", h.gpus), Found: fmt.Sprintf("%d devices", len(r.Devices)),
			Hint: "Xid 79: the GPU fell off the bus; restart the host",
		})
	}
	if base == nil {
		return r
	}
	if base.Driver != driver {
		fail(gpu.Check{Name: "driver version", Severity: gpu.Fatal, Expected: base.Driver, Found: driver})
	}
	have := map[string]bool{}
	for _, d := range r.Devices {
		have[d.UUID] = true
	}
	for _, d := range base.Devices {
		if !have[d.UUID] {
			fail(gpu.Check{
				Name: "identity", Device: d.UUID, Severity: gpu.Fatal,
				Expected: "the device of the baseline", Found: "no such device",
				Hint: "compare nvidia-smi -L with the baseline in the receipt",
			})
		}
	}
	return r
}
