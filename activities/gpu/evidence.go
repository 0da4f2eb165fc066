package gpu

import "slices"

// Proof is what the CUDA probe measured on one GPU or MIG device that passed.
type Proof struct {
	Device string `json:"device"`
	// TestedMiB is the memory that the patterns were written to and read from,
	// WantedMiB what the level asks for.
	TestedMiB uint64 `json:"testedMiB"`
	WantedMiB uint64 `json:"wantedMiB"`
	Patterns  int    `json:"patterns"`
	// SoakedSeconds is how long level stress kept at it.
	SoakedSeconds int `json:"soakedSeconds,omitempty"`
	// Bandwidth is nil at level quick, which times no copies.
	Bandwidth *Bandwidth `json:"bandwidth,omitempty"`
}

// Found is what a row found where it passed.
type Found struct {
	Name  string `json:"name"`
	Found string `json:"found"`
	// Devices counts the GPUs and MIG devices that found this; 0 is the host.
	Devices int `json:"devices,omitempty"`
}

// Take adds the rows to the result: those that failed or were skipped whole, of
// those that passed their number and each text once, because the GPUs of a host
// mostly find the same. Rows named in told have their figures in Proofs.
func (r *Result) Take(checks []Check, told ...string) {
	for _, c := range checks {
		if !c.OK {
			r.Checks = append(r.Checks, c)
			continue
		}
		r.Passed++
		if slices.Contains(told, c.Name) {
			continue
		}
		at := slices.IndexFunc(r.Found, func(f Found) bool { return f.Name == c.Name && f.Found == c.Found })
		if at < 0 {
			at = len(r.Found)
			r.Found = append(r.Found, Found{Name: c.Name, Found: c.Found})
		}
		if c.Device != "" {
			r.Found[at].Devices++
		}
	}
}
