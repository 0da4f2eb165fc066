// Package tensorfusion acts on a TensorFusion installation: observes it, holds
// its rolling-update policy, replaces hypervisor pods, proves what it did. Its
// checks are pure functions from an observation to findings, registered by
// catalogue row. It must not decide an order of steps: workflows do.
package tensorfusion

import (
	"time"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// Release names the Helm release under care.
type Release struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
}

// Scope is carried by every request.
type Scope struct {
	Target  kube.Target `json:"target"`
	Release Release     `json:"release"`
	// Holder, once the run has the release's Lease: an activity begins only
	// while the Lease names it. A plan can't set it.
	Holder string `json:"holder,omitempty" jsonschema:"-"`
}

// Activity names of the rollouts; queue cluster/<name>.
const (
	ObservePoolActivity  = "tensorfusion.ObservePool"
	HoldActivity         = "tensorfusion.Hold"
	ReplaceActivity      = "tensorfusion.ReplaceHypervisors"
	WorkersActivity      = "tensorfusion.ObserveWorkers"
	RollWorkersActivity  = "tensorfusion.RollWorkers"
	ClientsActivity      = "tensorfusion.ObserveClients"
	EvictClientsActivity = "tensorfusion.EvictClients"
)

// Goal is what a proven host looks like (facts, section 6).
type Goal struct {
	// HypervisorImage is containers[0].image.
	HypervisorImage string `json:"hypervisorImage"`
	// MiddlewareImage is the image of init container init-runtime; empty when
	// no ProviderConfig exists.
	MiddlewareImage string `json:"middlewareImage,omitempty"`
	// IsolationPolicy is the wanted --isolation-policy argument; empty below 2.17.
	IsolationPolicy string `json:"isolationPolicy,omitempty"`
	// PodName is the prefix of the pod's name, "hypervisor-" or "tf-hypervisor-".
	PodName string `json:"podName"`
	// Since is when the change was applied: a proven pod is younger.
	Since time.Time `json:"since,omitzero"`
	// Kept is set when a change is undone under which not every pod was made
	// anew: a pod that was made by then is of the template that comes back.
	Kept time.Time `json:"kept,omitzero"`
}

// ObservePoolRequest asks for the hosts of one GPUPool.
type ObservePoolRequest struct {
	Scope
	Pool string `json:"pool"`
	Goal Goal   `json:"goal"`
	// LabelKeys are the Node labels to report, those of a canary selector.
	LabelKeys []string `json:"labelKeys,omitempty"`
	// Assert has the hold asserted after the look (P10), as HoldRequest.Assert
	// does: it is how long the pools may take to show it. 0 only looks.
	Assert time.Duration `json:"assert,omitempty"`
}

// Host is one GPU node as observed; kept small because a pool may have
// thousands.
type Host struct {
	Name    string            `json:"name"`
	Created time.Time         `json:"created"`
	Labels  map[string]string `json:"labels,omitempty"` // only those a canary selector names
	// UID of the hypervisor pod; empty when it is missing.
	UID string `json:"uid,omitempty"`
	// BootID is that of the boot which the host's kubelet has reported last.
	BootID string `json:"bootID,omitempty"`
	// KeptOff: foreign automation is told to keep off the host's Node.
	KeptOff bool `json:"keptOff,omitempty"`
	// OnTarget: the pod meets the Goal and is Ready.
	OnTarget bool `json:"onTarget,omitempty"`
	// Broken says why the host is not healthy now; empty when it is.
	Broken string `json:"broken,omitempty"`
	// Partitioned: the hypervisor runs in isolation mode partitioned, so the
	// host's MIG instances are TensorFusion's.
	Partitioned bool `json:"partitioned,omitempty"`
}

// PoolObservation answers ObservePool.
type PoolObservation struct {
	Pool  string `json:"pool"`
	Hosts []Host `json:"hosts"`
	// Broken are the flags that were found on and put back to false.
	Broken []finding.Finding `json:"broken,omitempty"`
}

// HoldRequest makes the three flags false on the live TensorFusionCluster and
// waits until every GPUPool shows it (P10). Assert=true expects that they are
// held already: a flag found true is put back to false and reported as Broken.
type HoldRequest struct {
	Scope
	Assert bool          `json:"assert,omitempty"`
	Limit  time.Duration `json:"limit"`
	// Nudge makes the harmless spec change that 2.16 -> 2.17 needs, so that
	// synced=false is stored under the old controller (facts, section 5).
	Nudge bool `json:"nudge,omitempty"`
	// Undo takes the nudge back: the variable becomes what these pools had, so
	// that pods from before it are of the template again.
	Undo []PoolPolicy `json:"undo,omitempty"`
	// Outage: the plan accepts that every hypervisor is away at once. Pools that
	// do not show the hold within Limit are then told in Unheld, not an error.
	Outage bool `json:"outage,omitempty"`
}

// HoldResult says what was found and done.
type HoldResult struct {
	// Before holds each pool's policy as found, for the restore.
	Before []PoolPolicy `json:"before"`
	// Broken lists flags that somebody had set back to true.
	Broken []finding.Finding `json:"broken,omitempty"`
	// Unheld says what the pools showed at the deadline instead of the hold;
	// empty when they are held.
	Unheld string `json:"unheld,omitempty"`
	// Waited is how long until the pools showed it.
	Waited time.Duration `json:"waited"`
}

// PoolPolicy is nodePoolRollingUpdatePolicy of one pool entry of the TFC.
type PoolPolicy struct {
	Pool              string `json:"pool"`
	AutoHypervisor    bool   `json:"autoUpdateHypervisor"`
	AutoWorker        bool   `json:"autoUpdateWorker"`
	AutoClient        bool   `json:"autoUpdateClient"`
	BatchPercentage   int32  `json:"batchPercentage,omitempty"`
	BatchInterval     string `json:"batchInterval,omitempty"`
	MaintenanceWindow bool   `json:"maintenanceWindow,omitempty"`
	MaxDuration       string `json:"maxDuration,omitempty"`
	Missing           bool   `json:"missing,omitempty"`
	// Nudge is the value of the variable by which a hold changes the hypervisor
	// template; empty when there is none.
	Nudge string `json:"nudge,omitempty"`
}

// HostTarget is a host whose pod is to be replaced. UID is the pod seen by
// the planner: only that pod is deleted (or its leftover of another name).
type HostTarget struct {
	Name string `json:"name"`
	UID  string `json:"uid,omitempty"`
}

// ReplaceRequest replaces the hypervisor pods of up to 200 hosts at once and
// proves each one. It heartbeats host by host and may be run again at any
// point: a pod whose UID differs from HostTarget.UID and meets the Goal
// counts as replaced.
type ReplaceRequest struct {
	Scope
	Pool  string       `json:"pool"`
	Goal  Goal         `json:"goal"`
	Hosts []HostTarget `json:"hosts"`
	// Limit is the deadline of each host from delete to proof.
	Limit time.Duration `json:"limit"`
}

// Replaced outcomes.
const (
	OutcomeReplaced = "replaced" // we deleted it
	OutcomeAlready  = "already"  // it was on target, or replaced by itself
	OutcomeFailed   = "failed"
)

// HostResult is the outcome of one host.
type HostResult struct {
	Name    string           `json:"name"`
	Outcome string           `json:"outcome"`
	OldUID  string           `json:"oldUID,omitempty"`
	NewUID  string           `json:"newUID,omitempty"`
	Seconds float64          `json:"seconds,omitempty"`
	Failure *finding.Finding `json:"failure,omitempty"`
	// BootID of a proven host is that of the boot in which it was proven, as its
	// kubelet has reported it.
	BootID string `json:"bootID,omitempty"`
}

// ReplaceResult answers ReplaceHypervisors, hosts in the request's order.
type ReplaceResult struct {
	Hosts []HostResult `json:"hosts"`
}

// WorkersRequest asks for the workloads of one pool; with Roll the controller
// rolls them by its own batches (autoUpdateWorker) and we watch.
type WorkersRequest struct {
	Scope
	Pool string `json:"pool"`
	// BatchPercentage and BatchInterval are written with the flag.
	BatchPercentage int32         `json:"batchPercentage,omitempty"`
	BatchInterval   time.Duration `json:"batchInterval,omitempty"`
	// Stall is the longest time without progress before the flag is switched
	// off again and the finding returned.
	Stall time.Duration `json:"stall,omitempty"`
}

// Workload is one TensorFusionWorkload with the connections that lose their
// GPU session when its workers are replaced.
type Workload struct {
	Namespace   string   `json:"namespace"`
	Name        string   `json:"name"`
	Replicas    int      `json:"replicas"`
	Ready       int      `json:"ready"`
	Stale       bool     `json:"stale"`
	Connections []string `json:"connections,omitempty"`
}

// WorkersResult answers ObserveWorkers and RollWorkers.
type WorkersResult struct {
	Workloads []Workload `json:"workloads"`
}

// ClientsRequest asks for the stale client pods of one pool, or evicts them.
type ClientsRequest struct {
	Scope
	Pool string `json:"pool"`
	// PerOwner is how many pods of one owner may be away at a time.
	PerOwner int `json:"perOwner,omitempty"`
	// Leave names owners (Kind/namespace/name) that are not touched.
	Leave []string `json:"leave,omitempty"`
	// Limit is how long one eviction may be blocked by a budget.
	Limit time.Duration `json:"limit,omitempty"`
}

// ClientPod is one application pod with an outdated injection.
type ClientPod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Owner     string `json:"owner,omitempty"` // Kind/namespace/name; empty = bare
	Left      string `json:"left,omitempty"`  // why it was left alone
}

// ClientsResult answers ObserveClients and EvictClients.
type ClientsResult struct {
	Stale   []ClientPod `json:"stale"`
	Evicted int         `json:"evicted"`
	Left    []ClientPod `json:"left,omitempty"`
}
