// Package gpu holds the contract of the node agent: request and result
// structs, activity names and verdicts. It must import neither Kubernetes nor
// Helm, and holds no NVML or CUDA call (those live in gpuagent).
package gpu

import "time"

// Activity names; task queue `gpu/<cluster>/<node>`.
const (
	BaselineActivity = "gpu.Baseline"
	ValidateActivity = "gpu.Validate"
)

// TaskQueue is the queue that the agent of one node polls.
func TaskQueue(cluster, node string) string { return "gpu/" + cluster + "/" + node }

// Level says how deep a validation goes: quick is safe under load, standard
// needs an idle GPU, stress runs for the plan's minutes.
type Level string

const (
	Quick    Level = "quick"
	Standard Level = "standard"
	Stress   Level = "stress"
)

// Verdict is the outcome of a validation. From best to worst: pass, degraded,
// unproven, resetNeeded, unfit.
type Verdict string

const (
	Pass        Verdict = "pass"
	Degraded    Verdict = "degraded"
	ResetNeeded Verdict = "resetNeeded"
	Unfit       Verdict = "unfit"
	Unproven    Verdict = "unproven"
)

// Severity of one check, as in the validation table.
type Severity string

const (
	Fatal Severity = "fatal"
	Reset Severity = "resetNeeded"
	Warn  Severity = "warn"
	Info  Severity = "info"
)

// BaselineRequest asks for a snapshot before the component is replaced.
type BaselineRequest struct {
	Node string `json:"node"`
	// NodeBootID is the boot that the cluster's Node object is of; an agent that
	// runs in another is none of this node now. Empty is not compared.
	NodeBootID string `json:"nodeBootID,omitempty"`
}

// Device is one GPU or MIG device as the driver reports it.
type Device struct {
	UUID  string `json:"uuid"`
	Model string `json:"model"`
	// MemoryBytes is the device's total memory.
	MemoryBytes uint64 `json:"memoryBytes"`
	// Readings are what a later validation compares, by row of the validation
	// table; only a baseline holds them.
	Readings map[string]string `json:"readings,omitempty"`
}

// Baseline is what a validation is compared with.
type Baseline struct {
	Node    string    `json:"node"`
	BootID  string    `json:"bootID"`
	Driver  string    `json:"driver"`
	Taken   time.Time `json:"taken"`
	Devices []Device  `json:"devices"`
	// Readings are those of the host, as Device.Readings.
	Readings  map[string]string `json:"readings,omitempty"`
	KernelLog KernelLogPosition `json:"kernelLog,omitzero"`
}

// ValidateRequest asks the agent of Node for a verdict. A nil Baseline skips
// the comparisons.
type ValidateRequest struct {
	Node string `json:"node"`
	// NodeBootID is the boot that the cluster's Node object is of; an agent that
	// runs in another is none of this node now. Empty is not compared.
	NodeBootID string        `json:"nodeBootID,omitempty"`
	Level      Level         `json:"level"`
	Baseline   *Baseline     `json:"baseline,omitempty"`
	Deadline   time.Duration `json:"deadline"`
	Expect     *Expect       `json:"expect,omitempty"`
}

// Check is one row of the validation table with what was seen.
type Check struct {
	Name     string   `json:"name"`
	Device   string   `json:"device,omitempty"`
	Expected string   `json:"expected,omitempty"`
	Found    string   `json:"found"`
	Severity Severity `json:"severity"`
	// OK is true when the row passed; Skipped holds why it was not answered.
	OK      bool   `json:"ok"`
	Skipped string `json:"skipped,omitempty"`
	Hint    string `json:"hint,omitempty"`
}

// Result is the agent's answer: the proof that a Running pod is not.
type Result struct {
	Node    string   `json:"node"`
	BootID  string   `json:"bootID"`
	Driver  string   `json:"driver"`
	Devices []Device `json:"devices"`
	// Checks holds the rows that failed or were skipped; Passed counts the rest,
	// and Found is what they found.
	Checks []Check `json:"checks,omitempty"`
	Passed int     `json:"passed"`
	Found  []Found `json:"found,omitempty"`
	// Proofs are the figures of the CUDA probe.
	Proofs  []Proof `json:"proofs,omitempty"`
	Verdict Verdict `json:"verdict"`
}
