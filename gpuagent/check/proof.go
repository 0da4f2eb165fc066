package check

import (
	"fmt"
	"math"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/cuda"
)

// Proof is the outcome of the CUDA probe on one GPU or MIG device; GPU is the
// UUID of the card.
type Proof struct {
	GPU string
	cuda.Result
}

// ToldByProofs are the rows whose figures are those of the proofs.
var ToldByProofs = []string{rowCUDA, rowBandwidth}

// Figures are what the probe measured where it passed.
func Figures(proofs []Proof) []gpu.Proof {
	var out []gpu.Proof
	for _, p := range proofs {
		if p.Verdict != cuda.Pass {
			continue
		}
		f := gpu.Proof{Device: p.UUID, TestedMiB: p.TestedBytes >> 20, WantedMiB: p.WantedBytes >> 20, Patterns: p.Patterns}
		if b := p.Bandwidth; b != (cuda.Bandwidth{}) {
			f.Bandwidth = &gpu.Bandwidth{DeviceToDevice: tenths(b.DeviceToDevice), HostToDevice: tenths(b.HostToDevice), DeviceToHost: tenths(b.DeviceToHost)}
		}
		out = append(out, f)
	}
	return out
}

func tenths(v float64) float64 { return math.Round(v*10) / 10 }

// cudaCall: the GPU, or every MIG device of it, runs work.
func cudaCall(c *cell) {
	if c.d.MIGOn() && !c.migDevicesKnown() {
		return
	}
	c.each(cuda.CallCheck, func(uuid string) {
		c.openOn(uuid, "the probe did not run", "give the validation a longer deadline")
	})
}

// migDevicesKnown: the driver gives a MIG device for every compute instance. One
// that it does not give would be proven by nobody and missed by nobody.
func (c *cell) migDevicesKnown() bool {
	devices, ok := needed(c, c.d.MIGDevices, "MIG is on")
	if !ok {
		return false
	}
	instances, ok := needed(c, c.d.Instances, "MIG is on")
	if !ok {
		return false
	}
	made := 0
	for _, i := range instances {
		made += len(i.Compute)
	}
	switch {
	case made != len(devices):
		c.unanswered(fmt.Sprintf("the driver has %d compute instances and gives %d MIG devices", made, len(devices)),
			"run again once nobody changes the instances; if it stays, look at the capability files of the agent (NVIDIA_MIG_MONITOR_DEVICES=all)")
	case made == 0:
		c.skip("MIG is on and has no instance: CUDA has no device here")
		return false
	}
	return true
}

// vgpuLimit: with the limiter preloaded, memory above the limit is refused.
func vgpuLimit(c *cell) {
	if t := c.in.Expect.TensorFusion; t == nil || t.Limiter == "" {
		c.skip("not asked for")
		return
	}
	c.each(cuda.LimitCheck, func(uuid string) {
		c.openOn(uuid, "the probe with the limiter did not run", "the probe without it must pass first")
	})
}

func bandwidth(c *cell) { c.measured(cuda.BandwidthCheck) }

// memoryTested: the patterns went over as much memory as the level asks for.
func memoryTested(c *cell) { c.measured(cuda.MemoryCheck) }

// measured takes over what only a probe that passed has to say: of another the
// row of the call has told.
func (c *cell) measured(name string) {
	c.each(name, func(uuid string) {
		c.add(gpu.Check{Device: uuid, Severity: gpu.Info, Found: "not answered", Skipped: "not measured"})
	})
}

// each takes over the probe's answers of one kind for every device that CUDA
// has on this GPU, and hands those without one to open.
func (c *cell) each(name string, open func(uuid string)) {
	devices := c.d.CUDADevices()
	if len(devices) == 0 {
		c.skip("CUDA has no device here that is known: see " + rowCUDA)
	}
	for _, uuid := range devices {
		if !c.proven(uuid, name) {
			open(uuid)
		}
	}
}

// openOn is unanswered for one device of the GPU.
func (c *cell) openOn(uuid, why, hint string) {
	c.add(gpu.Check{Device: uuid, Severity: c.row.severity, Found: "not answered", Skipped: why, Hint: hint})
}

// proven takes over the probe's own answers of one kind for one device.
func (c *cell) proven(uuid, name string) bool {
	found := false
	for _, p := range c.in.Proofs {
		if p.GPU != c.d.UUID.Value || p.UUID != uuid {
			continue
		}
		for _, k := range p.Checks() {
			if k.Name == name {
				found = true
				c.add(k)
			}
		}
	}
	return found
}
