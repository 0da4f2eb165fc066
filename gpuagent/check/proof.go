package check

import "github.com/refit-run/refit/gpuagent/cuda"

// Proof is the outcome of the CUDA probe on one GPU or MIG device; GPU is the
// UUID of the card.
type Proof struct {
	GPU string
	cuda.Result
}

// cudaCall: every GPU, or every MIG device of it, runs work.
func cudaCall(c *cell) {
	mig := c.d.MIGMode.OK() && c.d.MIGMode.Value.Current == 1
	if mig && len(c.d.MIGDevices) == 0 {
		c.skip("MIG is on and has no instance: CUDA has no device here")
		return
	}
	if !c.proven(cuda.CallCheck) {
		c.unanswered("the probe did not run", "give the validation a longer deadline")
	}
}

// vgpuLimit: with the limiter preloaded, memory above the limit is refused.
func vgpuLimit(c *cell) {
	if t := c.in.Expect.TensorFusion; t == nil || t.Limiter == "" {
		c.skip("not asked for")
		return
	}
	if !c.proven(cuda.LimitCheck) {
		c.unanswered("the probe with the limiter did not run", "the probe without it must pass first")
	}
}

func bandwidth(c *cell) {
	if !c.proven(cuda.BandwidthCheck) {
		c.skip("not measured")
	}
}

// proven takes over the probe's own answers of one kind for this GPU.
func (c *cell) proven(name string) bool {
	found := false
	for _, p := range c.in.Proofs {
		if p.GPU != c.d.UUID.Value {
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
