// Package protocol holds what people and scripts type and read: workflow
// types, signal, update and query names, the answer and status structs. It is
// fixed (design, 'The protocol'); it must hold no decisions and no I/O.
package protocol

import (
	"time"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
)

// TaskQueue is the queue of every workflow.
const TaskQueue = "refit"

// ClusterQueue is the task queue of the activities of one cluster.
func ClusterQueue(cluster string) string { return "cluster/" + cluster }

// Workflow types.
const (
	TensorFusionUpgrade  = "TensorFusionUpgrade"
	TensorFusionRollback = "TensorFusionRollback"
	Rollout              = "Rollout"
	RolloutShard         = "RolloutShard"
	GPUNode              = "GPUNode"
	NATSDrain            = "NATSDrain"
	NATSReplicas         = "NATSReplicas"
	NATSRoll             = "NATSRoll"
	CassandraBackup      = "CassandraBackup"
	CassandraExpand      = "CassandraExpand"
	CassandraReplication = "CassandraReplication"
	CassandraLedger      = "CassandraLedger"
	OpenBaoSnapshot      = "OpenBaoSnapshot"
	OpenBaoReplace       = "OpenBaoReplace"
)

// Verbs: signals, Updates and CLI verbs share these names.
const (
	Pause    = "pause"
	Resume   = "resume"
	Approve  = "approve"
	Reject   = "reject"
	Retry    = "retry"
	Skip     = "skip"
	Abort    = "abort"
	Rollback = "rollback"
)

// Verbs lists every verb, in the order shown to people.
var Verbs = []string{Approve, Reject, Retry, Skip, Pause, Resume, Abort, Rollback}

// AddressesRun reports whether the verb addresses the run and ignores Stage.
func AddressesRun(verb string) bool {
	return verb == Pause || verb == Resume || verb == Abort || verb == Rollback
}

// QueryStatus is the only query.
const QueryStatus = "status"

// Signals between a parent run and its child runs. Not for people.
const (
	SignalReport = "refit.report" // child -> parent, a Report
)

// Search attributes (Keyword), created by `refit setup`.
const (
	AttrCluster    = "RefitCluster"
	AttrKind       = "RefitKind"
	AttrPhase      = "RefitPhase"
	AttrWaitingFor = "RefitWaitingFor"
)

// Answer is the one argument of every verb. Stage is the unique name shown in
// status; it may be left out only when exactly one stage waits. By is claimed,
// not proven.
type Answer struct {
	Stage   string `json:"stage,omitempty"`
	By      string `json:"by,omitempty"`
	Comment string `json:"comment,omitempty"`
	// ID is set by a parent that forwards the answer; the child's next report
	// acknowledges it.
	ID string `json:"id,omitempty"`
}

// Accepted is the result of an Update: what the answer does.
type Accepted struct {
	Verb  string `json:"verb"`
	Stage string `json:"stage,omitempty"`
	// Effect says in words what happens now, or after what it takes effect.
	Effect string `json:"effect"`
}

// Phase is the state of a whole run.
type Phase string

const (
	PhaseRunning Phase = "running"
	PhaseWindow  Phase = "waitingForWindow"
	PhaseGate    Phase = "waitingForApproval"
	PhasePaused  Phase = "paused"
	PhaseParked  Phase = "parked"
	PhaseDone    Phase = "done"
	PhaseAborted Phase = "aborted"
	// PhaseRolledBack is the end of a run that was answered with rollback.
	PhaseRolledBack Phase = "rolledBack"
)

// StageState is the state of one stage.
type StageState string

const (
	Pending          StageState = "pending"
	WaitingForWindow StageState = "waitingForWindow"
	WaitingForGate   StageState = "waitingForApproval"
	Running          StageState = "running"
	Paused           StageState = "paused"
	Parked           StageState = "parked"
	Done             StageState = "done"
	Skipped          StageState = "skipped"
	Aborted          StageState = "aborted"
)

// Stage is one row of the stage table.
type Stage struct {
	Name     string     `json:"name"`
	Purpose  string     `json:"purpose,omitempty"`
	State    StageState `json:"state"`
	Started  *time.Time `json:"started,omitempty"`
	Ended    *time.Time `json:"ended,omitempty"`
	Attempts int        `json:"attempts,omitempty"`
	// Note is one line of evidence: what was found or done.
	Note string `json:"note,omitempty"`
	// Answers given to this stage, in order.
	Answers []Given `json:"answers,omitempty"`
}

// Given is an answer that took effect: verb, who and when.
type Given struct {
	Verb    string    `json:"verb"`
	By      string    `json:"by,omitempty"`
	Comment string    `json:"comment,omitempty"`
	At      time.Time `json:"at"`
}

// Waiting says what a run waits for and how to answer it.
type Waiting struct {
	// Kind is approval, parked, window, paused or queue (no worker polls).
	Kind  string     `json:"kind"`
	Stage string     `json:"stage"`
	Since time.Time  `json:"since"`
	Until *time.Time `json:"until,omitempty"`
	// Found / Why / Helps: the parking text.
	Found   string   `json:"found,omitempty"`
	Why     string   `json:"why,omitempty"`
	Helps   string   `json:"helps,omitempty"`
	Answers []string `json:"answers,omitempty"`
	// Approvals counts who has approved already where a gate asks for several.
	Approvals []string `json:"approvals,omitempty"`
	Needed    int      `json:"needed,omitempty"`
	// Findings are the deviations behind a parking, at most 20.
	Findings []finding.Finding `json:"findings,omitempty"`
}

// Kinds of Waiting.
const (
	WaitApproval = "approval"
	WaitParked   = "parked"
	WaitWindow   = "window"
	WaitPaused   = "paused"
	WaitQueue    = "queue"
)

// Progress counts the units of the long part of a run: hosts, streams or steps.
type Progress struct {
	Done   int `json:"done"`
	Total  int `json:"total"`
	Failed int `json:"failed"`
}

// Ignored is a signal that fitted no waiting stage; it is never kept for later.
type Ignored struct {
	Verb   string    `json:"verb"`
	Stage  string    `json:"stage,omitempty"`
	By     string    `json:"by,omitempty"`
	At     time.Time `json:"at"`
	Reason string    `json:"reason"`
}

// Status answers the query.
type Status struct {
	Kind       string   `json:"kind"`
	Cluster    string   `json:"cluster"`
	Phase      Phase    `json:"phase"`
	Stage      string   `json:"stage,omitempty"`
	WaitingFor *Waiting `json:"waitingFor,omitempty"`
	// AlsoWaiting holds what else waits when several stages (of several child
	// runs) wait at the same time; then an answer has to name its stage.
	AlsoWaiting []Waiting `json:"alsoWaiting,omitempty"`
	Stages      []Stage   `json:"stages"`
	Progress    Progress  `json:"progress"`
	// ETA is empty while nothing is known.
	ETA     *time.Time `json:"eta,omitempty"`
	Ignored []Ignored  `json:"ignored,omitempty"`
	// Section names the unbreakable section in progress, Deferred the verb
	// that takes effect after it.
	Section   string         `json:"section,omitempty"`
	Deferred  string         `json:"deferred,omitempty"`
	Current   []string       `json:"current,omitempty"` // hosts or objects in work
	Warnings  []string       `json:"warnings,omitempty"`
	Artifacts []artifact.Ref `json:"artifacts,omitempty"`
}

// Parent tells a child run where to report; nil when started alone.
type Parent struct {
	WorkflowID string `json:"workflowID"`
	RunID      string `json:"runID"`
	// Prefix names the child's stages in the parent's table.
	Prefix string `json:"prefix"`
}

// Report is what a child run signals upwards on every change of state.
type Report struct {
	Prefix string `json:"prefix"`
	// WorkflowID is the child's, for forwarding answers.
	WorkflowID string `json:"workflowID"`
	Status     Status `json:"status"`
	// Acked are the IDs of the last forwarded answers that the child handled,
	// with the reason when one was refused ("" = accepted).
	Acked []Ack `json:"acked,omitempty"`
}

// Ack is a child's reply to a forwarded answer.
type Ack struct {
	ID     string `json:"id"`
	Reason string `json:"reason,omitempty"`
}

// Outcome of a closed run.
type Outcome string

const (
	OutcomeDone       Outcome = "done"
	OutcomeNoChange   Outcome = "noChange"
	OutcomePlanned    Outcome = "planned"
	OutcomeAborted    Outcome = "aborted"
	OutcomeRolledBack Outcome = "rolledBack"
)

// Receipt is the workflow result: what was asked, who answered, each stage
// with times and evidence, versions before and after, artifacts (contract 16).
type Receipt struct {
	Kind       string            `json:"kind"`
	Cluster    string            `json:"cluster"`
	Object     string            `json:"object"`
	WorkflowID string            `json:"workflowID"`
	RunID      string            `json:"runID"`
	Outcome    Outcome           `json:"outcome"`
	Started    time.Time         `json:"started"`
	Ended      time.Time         `json:"ended"`
	PlanDigest string            `json:"planDigest"`
	Before     map[string]string `json:"before,omitempty"`
	After      map[string]string `json:"after,omitempty"`
	Stages     []Stage           `json:"stages"`
	Progress   Progress          `json:"progress"`
	Ignored    []Ignored         `json:"ignored,omitempty"`
	Warnings   []string          `json:"warnings,omitempty"`
	// LeftBehind lists what an aborted or rolled-back run did not undo.
	LeftBehind   []string `json:"leftBehind,omitempty"`
	Acknowledged []string `json:"acknowledged,omitempty"`
	// Probes are what the CUDA probe found inside workloads, one per GPUPool.
	Probes []Probe `json:"probes,omitempty"`
	// Plan is what was shown before anything changed.
	Plan *Plan `json:"plan,omitempty"`
	// Rollback is the receipt of the rollback that answered this run.
	Rollback  *Receipt       `json:"rollback,omitempty"`
	Artifacts []artifact.Ref `json:"artifacts,omitempty"`
}

// Probe is the CUDA probe's own answer from a pod of a GPUPool: its verdict and
// its figures. The pod is gone by then.
type Probe struct {
	Pool   string     `json:"pool"`
	Node   string     `json:"node"`
	Result gpu.Result `json:"result"`
}

// Failure types a run may close Failed with; everything else parks.
const (
	BadInput = "BadInput"
	Locked   = "Locked"
)
