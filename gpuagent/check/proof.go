package check

import (
	"fmt"
	"time"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/cuda"
)

// Proof is the outcome of the CUDA probe on one GPU or MIG device; GPU is the
// UUID of the card.
type Proof struct {
	GPU string
	cuda.Result
}

// Figures are what the probe measured where it passed.
func Figures(proofs []Proof) []gpu.Proof {
	var out []gpu.Proof
	for _, p := range proofs {
		if p.Verdict == cuda.Pass {
			out = append(out, p.Figures())
		}
	}
	return out
}

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
			"run again once nobody changes the instances; if it stays, give the agent the driver's right to see them (NVIDIA_MIG_MONITOR_DEVICES=all, in level setup of its DaemonSet)")
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

// stressTime: the patterns went on for as long as the plan asks. A probe that
// did not pass is told by the row of the call.
func stressTime(c *cell) {
	want := c.in.Soak.Round(time.Second)
	for _, p := range c.in.Proofs {
		if p.GPU != c.d.UUID.Value || p.Verdict != cuda.Pass {
			continue
		}
		if p.Soaked < c.in.Soak {
			c.openOn(p.UUID, fmt.Sprintf("%s of the plan's %s: the deadline came before", p.Soaked.Round(time.Second), want),
				"give the validation a longer deadline, or none, or the plan fewer minutes")
			continue
		}
		c.add(gpu.Check{Device: p.UUID, OK: true, Severity: gpu.Info, Found: want.String()})
	}
	if len(c.out) == 0 {
		c.skip("no probe that passed: see " + rowCUDA)
	}
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
