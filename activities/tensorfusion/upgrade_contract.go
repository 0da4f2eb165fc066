package tensorfusion

import (
	"time"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
)

// Activity names of the upgrade and rollback stages; queue cluster/<name>.
const (
	PreflightActivity       = "tensorfusion.Preflight"
	DiffActivity            = "tensorfusion.Diff"
	BackupActivity          = "tensorfusion.Backup"
	ApplyCRDsActivity       = "tensorfusion.ApplyCRDs"
	ReleaseActivity         = "tensorfusion.UpgradeRelease"
	AwaitControllerActivity = "tensorfusion.AwaitController"
	DriftActivity           = "tensorfusion.CheckDrift"
	PolicyActivity          = "tensorfusion.SetPolicy"
	VerifyActivity          = "tensorfusion.Verify"
	CanaryJobActivity       = "tensorfusion.RunCanaryJob"
	ReceiptActivity         = "tensorfusion.WriteReceipt"
	RevisionActivity        = "tensorfusion.InspectRevision"
)

// Chart says where the target chart comes from: an oci:// reference, a
// repository URL with a name (URL#name), or a folder on the worker. Digest,
// once known, pins it: another digest stops the run.
type Chart struct {
	Ref     string `json:"ref"`
	Version string `json:"version,omitempty"`
	Digest  string `json:"digest,omitempty"`
	// Revision takes chart and values from a stored release revision instead
	// (TensorFusionRollback); Ref is empty then.
	Revision int `json:"revision,omitempty"`
}

// Values says what the release's values become: the user's values as stored
// in the live release, then File (on the worker), then Inline, then
// SecretsFile (on the worker; every value in it is secret), then Secrets. Inline
// values under known secret keys are refused; Secrets name them by reference.
type Values struct {
	File        string            `json:"file,omitempty"`
	Inline      map[string]any    `json:"inline,omitempty"`
	SecretsFile string            `json:"secretsFile,omitempty"`
	Secrets     []SecretReference `json:"secrets,omitempty"`
}

// Intent is what the release shall become; carried by every release activity,
// which resolves it anew and stops on another Digest.
type Intent struct {
	Chart  Chart  `json:"chart"`
	Values Values `json:"values"`
	// HypervisorImage is explicit in every plan (T02).
	HypervisorImage string `json:"hypervisorImage"`
	// IsolationPolicy pins controller.isolationModePolicy (rule 24); "" only
	// when the target chart does not know it.
	IsolationPolicy string `json:"isolationPolicy,omitempty"`
	// Digest is the SHA-256 of the resolved chart, values and post-rendering,
	// filled by Preflight.
	Digest string `json:"digest,omitempty"`
}

// PreflightRequest asks for every check before anything is touched.
type PreflightRequest struct {
	Scope
	Intent Intent `json:"intent"`
	// Acknowledged names the operator rows that the plan accepts, by row id.
	Acknowledged []string `json:"acknowledged,omitempty"`
	// AcceptedFloating lists images whose floating tag is accepted (P08).
	AcceptedFloating []string `json:"acceptedFloating,omitempty"`
	// Policy is the mode that SetPolicy is going to be asked for.
	Policy string `json:"policy,omitempty"`
}

// Versions of one side of the upgrade.
type Versions struct {
	Chart      string `json:"chart"`
	Controller string `json:"controller"` // image tag's version core, "" = unknown
	Hypervisor string `json:"hypervisor"` // image reference
	Revision   int    `json:"revision,omitempty"`
}

// Check is one row's verdict.
type Check struct {
	Row string `json:"row"`
	OK  bool   `json:"ok"`
	// Acknowledged: not OK, but the plan accepts it.
	Acknowledged bool              `json:"acknowledged,omitempty"`
	Class        finding.Class     `json:"class,omitempty"`
	Findings     []finding.Finding `json:"findings,omitempty"`
}

// Pool summarises one GPUPool.
type Pool struct {
	Name  string `json:"name"`  // GPUPool
	Entry string `json:"entry"` // name in spec.gpuPools
	Nodes int    `json:"nodes"`
	// Hash is the controller's of the hypervisor template as it now is.
	Hash string `json:"hash,omitempty"`
	// Settled: the controller says that every pod is of it (synced, 100 %).
	Settled bool `json:"settled,omitempty"`
}

// Snapshot is what must not change by itself (P12, P14): UIDs and inventory.
type Snapshot struct {
	// Hypervisors maps node to pod UID.
	Hypervisors map[string]string `json:"hypervisors"`
	// Workers by namespace/pod.
	Workers map[string]WorkerPod `json:"workers,omitempty"`
	// Youngest is when the youngest hypervisor pod was made, by the clock of
	// the API server.
	Youngest time.Time `json:"youngest,omitzero"`
	GPUs     int       `json:"gpus"`
	// Inventory is the SHA-256 over GPU name, model, capacity, node, sorted.
	Inventory string `json:"inventory"`
	// Ports of the hypervisors, by GPUPool.
	Ports map[string]int32 `json:"ports,omitempty"`
	// Allocations counts the pods that have GPUs by /api/allocation of the
	// leader, -1 unknown: the workers but for Unallocated, and Allocated (local
	// GPUs), both by namespace/pod, sorted.
	Allocations int      `json:"allocations"`
	Unallocated []string `json:"unallocated,omitempty"`
	Allocated   []string `json:"allocated,omitempty"`
	// Objects are digests of what the release's objects hold, by
	// Kind/namespace/name, without those that Helm would put back.
	Objects map[string]string `json:"objects,omitempty"`
}

// WorkerPod is one worker and the TensorFusionWorkload that it belongs to.
type WorkerPod struct {
	UID      string `json:"uid"`
	Workload string `json:"workload"`
}

// PreflightResult is small: verdicts, versions, digests.
type PreflightResult struct {
	Source   Versions     `json:"source"`
	Target   Versions     `json:"target"`
	Intent   Intent       `json:"intent"` // with Digest and chart digest filled
	Checks   []Check      `json:"checks"`
	Pools    []Pool       `json:"pools"`
	Snapshot Snapshot     `json:"snapshot"`
	Policy   []PoolPolicy `json:"policy"`
	Goal     Goal         `json:"goal"`
	// Database says which database answered, asked from which side (P02); empty
	// when the release has none or it did not answer.
	Database string `json:"database,omitempty"`
	// NeedsNudge: from < 2.17 to >= 2.17 (P10).
	NeedsNudge bool `json:"needsNudge,omitempty"`
	// NoChange: the release is already what the intent says and every host is
	// on target.
	NoChange bool `json:"noChange,omitempty"`
}

// DiffRequest asks what the upgrade would change, in Helm's own terms.
type DiffRequest struct {
	Scope
	Intent           Intent   `json:"intent"`
	Acknowledged     []string `json:"acknowledged,omitempty"`
	AcceptedFloating []string `json:"acceptedFloating,omitempty"`
}

// ObjectChange is one object of the diff.
type ObjectChange struct {
	Action string `json:"action"` // create, change, delete
	Object string `json:"object"` // Kind/namespace/name
	Lines  int    `json:"lines"`
}

// DiffResult holds the masked diff, cut at 48 KiB (whole in the artifact).
type DiffResult struct {
	Changes  []ObjectChange `json:"changes"`
	Text     string         `json:"text"`
	Cut      bool           `json:"cut,omitempty"`
	Artifact artifact.Ref   `json:"artifact"`
	Checks   []Check        `json:"checks"`
	// Forecast lists what the new controller rolls by itself (P11).
	Forecast []finding.Finding `json:"forecast,omitempty"`
	// Outdated names the GPUPools whose workers or clients the release changes.
	Outdated []Outdated `json:"outdated,omitempty"`
}

// BackupRequest asks for the backup of T06.
type BackupRequest struct {
	Scope
	// Key is the artifact prefix, one per run.
	Key string `json:"key"`
}

// BackupResult names the artifacts and what they hold.
type BackupResult struct {
	Artifacts []artifact.Ref `json:"artifacts"`
	// Counts per resource, equal to live.
	Counts map[string]int `json:"counts"`
}

// CRDsRequest applies the target chart's CRDs server-side with force (T07).
type CRDsRequest struct {
	Scope
	Intent Intent        `json:"intent"`
	Limit  time.Duration `json:"limit"`
}

// CRDsResult lists what was applied and is Established.
type CRDsResult struct {
	Applied []string `json:"applied"`
}

// ReleaseRequest upgrades the release in a child process, fenced by the Lease.
type ReleaseRequest struct {
	Scope
	Intent Intent `json:"intent"`
	// FromRevision is the revision seen by Preflight: another deployed one
	// that is not ours stops the run.
	FromRevision int           `json:"fromRevision"`
	Holder       string        `json:"holder"` // the Lease's holder
	Limit        time.Duration `json:"limit"`
}

// ReleaseResult names the revision that now stands.
type ReleaseResult struct {
	Revision int    `json:"revision"`
	Chart    string `json:"chart"`
	// Already: a former attempt had done it, of this run or of one before it
	// with the same intent.
	Already bool `json:"already,omitempty"`
	// Deployed is when the revision's engine began, by the clock of the API
	// server: pods are compared with it.
	Deployed time.Time `json:"deployed,omitzero"`
}

// ControllerRequest waits for the controller's rollout and its neighbours
// (T09, T10), restarts it when only mounted configuration changed (T12), then
// checks leader, webhook, rights and allocations (P05, P06, P13).
type ControllerRequest struct {
	Scope
	Intent   Intent   `json:"intent"`
	Snapshot Snapshot `json:"snapshot"`
	// FromRevision is the revision that the Helm step started from; 0 unknown.
	FromRevision int           `json:"fromRevision,omitempty"`
	Limit        time.Duration `json:"limit"`
	// Return are pools as they were before the change that is being undone:
	// until the controller shows their Hash again the answer waits a while, no
	// longer than it takes a controller to look at every pool.
	Return []Pool `json:"return,omitempty"`
	// Told, as in ControllerResult, is what a person has been told and has
	// answered with retry: it is taken as it is.
	Told []string `json:"told,omitempty"`
}

// ControllerResult is the controller as proven.
type ControllerResult struct {
	Image     string  `json:"image"`
	Replicas  int     `json:"replicas"`
	Leader    string  `json:"leader"`
	Restarted bool    `json:"restarted,omitempty"`
	Checks    []Check `json:"checks"`
	// Pools as the new controller sees them.
	Pools []Pool `json:"pools,omitempty"`
	// Objects as in Snapshot, now.
	Objects map[string]string `json:"objects,omitempty"`
	// Told are digests of what Checks tell of objects that hold something else
	// than the release says.
	Told []string `json:"told,omitempty"`
}

// DriftRequest compares the live UIDs with a snapshot (P12, P14).
type DriftRequest struct {
	Scope
	Snapshot Snapshot `json:"snapshot"`
	// Planned nodes may have another hypervisor UID; PlannedWorkers: any
	// worker may.
	Planned        []string `json:"planned,omitempty"`
	PlannedWorkers bool     `json:"plannedWorkers,omitempty"`
	// Allocations asks anew for what the Helm step must leave alone, the leader's
	// allocations and the release's objects; without it those of Snapshot are
	// carried on.
	Allocations bool `json:"allocations,omitempty"`
}

// DriftResult lists what changed unplanned, and the fresh snapshot.
type DriftResult struct {
	Findings []finding.Finding `json:"findings,omitempty"`
	Snapshot Snapshot          `json:"snapshot"`
}

// Policy modes after the rollout.
const (
	PolicyRestore = "restore" // the policy as found before the hold
	PolicySeal    = "seal"    // autoUpdate true where allowed, so that synced=100
	PolicyKeepOff = "keepOff" // all three flags stay false
)

// PolicyRequest sets the policy once every pod is proven.
type PolicyRequest struct {
	Scope
	Mode   string        `json:"mode"`
	Before []PoolPolicy  `json:"before"`
	Goal   Goal          `json:"goal"`
	Limit  time.Duration `json:"limit"`
}

// PolicyResult is the policy as it now stands.
type PolicyResult struct {
	After []PoolPolicy `json:"after"`
}

// VerifyRequest runs T14-T19 and compares the inventory with the backup's.
type VerifyRequest struct {
	Scope
	Goal     Goal          `json:"goal"`
	Snapshot Snapshot      `json:"snapshot"`
	Rolled   Rolled        `json:"rolled,omitzero"`
	Limit    time.Duration `json:"limit"`
	// Endpoint also asks each rolled host's hypervisor for /readyz and its
	// devices, through the API server: about four requests per host.
	Endpoint bool `json:"endpoint,omitempty"`
}

// Rolled are the GPUPools whose components the run replaced; what it did not
// replace is not judged by the new template.
type Rolled struct {
	Hypervisors []string `json:"hypervisors,omitempty"`
	Workers     []string `json:"workers,omitempty"`
	Clients     []string `json:"clients,omitempty"`
	// Completed are pools whose workers the controller made anew by itself, as
	// forecast: they must be complete, of whatever image.
	Completed []string `json:"completed,omitempty"`
	// Left are client pods (namespace/name) that were left alone and listed,
	// LeftHosts nodes whose hypervisor was.
	Left      []string `json:"left,omitempty"`
	LeftHosts []string `json:"leftHosts,omitempty"`
}

// VerifyResult holds the verdicts.
type VerifyResult struct {
	Checks []Check  `json:"checks"`
	After  Versions `json:"after"`
}

// CanaryJobRequest runs the CUDA probe in one TensorFusion pod of a pool (T20).
type CanaryJobRequest struct {
	Scope
	Pool string `json:"pool"`
	Node string `json:"node,omitempty"` // pinned when set
	// Image's entry point must run the CUDA probe.
	Image string        `json:"image"`
	Key   string        `json:"key"` // unique per run and pool, DNS-safe
	Limit time.Duration `json:"limit"`
}

// CanaryJobResult is the probe's own verdict from inside the workload.
type CanaryJobResult struct {
	Pod    string     `json:"pod"`
	Node   string     `json:"node"`
	Result gpu.Result `json:"result"`
	Checks []Check    `json:"checks"`
}

// ReceiptRequest stores the receipt as an artifact and as a ConfigMap.
type ReceiptRequest struct {
	Scope
	Key string `json:"key"`
	// JSON is the receipt; Hosts the rows per host (artifact only). Without JSON
	// the request stores one page of rows and nothing else.
	JSON  []byte `json:"json,omitempty"`
	Hosts []byte `json:"hosts,omitempty"`
	// Page counts from 1 where the rows come in several requests; Pages are the
	// URLs that they were stored under before the receipt.
	Page  int      `json:"page,omitempty"`
	Pages []string `json:"pages,omitempty"`
}

// ReceiptResult names the places: the receipt, its rows per host, and the
// ConfigMap.
type ReceiptResult struct {
	Artifact  artifact.Ref `json:"artifact"`
	Hosts     artifact.Ref `json:"hosts,omitzero"`
	ConfigMap string       `json:"configMap"`
}

// RevisionRequest inspects a stored revision for a rollback; 0 = the newest
// superseded one.
type RevisionRequest struct {
	Scope
	Revision int `json:"revision,omitempty"`
}

// RevisionResult says what the revision holds.
type RevisionResult struct {
	Revision        int      `json:"revision"`
	Versions        Versions `json:"versions"`
	HypervisorImage string   `json:"hypervisorImage"`
	IsolationPolicy string   `json:"isolationPolicy,omitempty"`
	// Substituted names the secret values that today's replace.
	Substituted []string `json:"substituted,omitempty"`
}
