package tensorfusion

import (
	"github.com/Masterminds/semver/v3"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Observation is the world as one activity read it. Checks are functions of it
// alone. It holds secrets (values) and never leaves an activity.
type Observation struct {
	Scope    Scope
	Intent   Intent
	Goal     Goal
	Accepted []string // floating images that the plan accepts
	Policy   string   // mode of the policy that the run ends with

	Source Side // what runs
	Target Side // what the intent renders

	// CRDs are the installed ones of the API group, by name.
	CRDs map[string]*apiextensionsv1.CustomResourceDefinition
	// Denied lists rights that the run needs and does not have.
	Denied []string
	// Vault is why secret artifacts could not be encrypted, "" when they can.
	Vault string

	Clusters  []FusionCluster
	Pools     []FusionPool
	Hosts     []hostView
	Nodes     map[string]corev1.Node
	Workloads []FusionWorkload
	Workers   []corev1.Pod
	Clients   []corev1.Pod
	Providers []FusionProvider

	Controller Controller
	// Lacking lists rights that the controller needs and does not have.
	Lacking    []string
	Neighbours []Neighbour
	// Objects are digests of what the release's objects hold, by
	// Kind/namespace/name.
	Objects map[string]string
	// Allocated are the pods (namespace/name) to which the leader has given
	// GPUs; nil unknown.
	Allocated map[string]bool
	Database  Database
	Images    Images
	Values    ValuesReview
	Changes   []Change

	// Before is the snapshot that this observation is compared with.
	Before Snapshot
	// Planned nodes may have another hypervisor than Before; with
	// PlannedWorkers any worker may be another.
	Planned        []string
	PlannedWorkers bool
	// Rolled are the pools whose components the run replaced.
	Rolled Rolled
}

// Side is one end of the upgrade.
type Side struct {
	Chart           string
	AppVersion      string
	ControllerImage string
	Controller      *semver.Version // nil when the tag does not say
	Replicas        int32
	// ShippedHypervisor is the image that the chart itself pins, "" without one.
	ShippedHypervisor string
	IsolationPolicy   string // value of TF_ISOLATION_MODE_POLICY, "" when unset
	KnowsIsolation    bool   // the chart has a value for it
	Clusters          []FusionCluster
	Providers         []FusionProvider
	Objects           []*unstructured.Unstructured
	CRDs              []*apiextensionsv1.CustomResourceDefinition
}

// Controller is the running controller.
type Controller struct {
	Deployment string
	Image      string
	Replicas   int32
	Ready      int32
	Updated    int32
	// RolledOut says why the rollout is not complete, "" when it is.
	RolledOut string
	// Leader is the pod that holds the leader Lease; LeaderTrouble why there
	// is none.
	Leader        string
	LeaderTrouble string
	// WebhookTrouble says why a labelled pod was not admitted, "" when it was.
	WebhookTrouble string
}

// Neighbour is another object that the Helm step touches (T10).
type Neighbour struct {
	Object  string
	Trouble string // "" when it is ready
	// Content: it is there and holds something else, which a person may accept.
	Content bool
}

// Database is the GreptimeDB that the controller needs at its start.
type Database struct {
	// Side says who asked: a database outside of the cluster may answer the
	// worker and not the controller's pods.
	Side    string
	Address string // empty when the release names none
	Trouble string // "" when login and query were answered
	// Unseen: the worker can't reach it, which says nothing of the controller.
	Unseen bool
}

// Images are the target's.
type Images struct {
	Floating []string
	Missing  map[string]string // image -> what the registry said
}

// ValuesReview compares the user's stored values with the intended ones.
type ValuesReview struct {
	// Lost are paths that the user had set and the intent drops or changes
	// without the plan saying so.
	Lost []string
	// Unknown are paths that the target chart does not know, with the nearest
	// known one after an arrow.
	Unknown []string
	// Agent are agent.* paths that change unplanned (T26).
	Agent []string
	// Live are paths whose value in the release differs from the intended one
	// after the upgrade.
	Live []string
}

// Change is one object of the diff, with the objects on both sides.
type Change struct {
	Action string // create, change, delete
	Object string // Kind/namespace/name
	Kind   string
	Old    *unstructured.Unstructured
	New    *unstructured.Unstructured
}

// entriesOf returns every pool entry of a side's clusters by GPUPool name.
func entriesOf(clusters []FusionCluster) map[string]PoolEntry {
	out := map[string]PoolEntry{}
	for _, c := range clusters {
		for _, e := range c.Spec.GPUPools {
			out[poolName(c.Name, e.Name)] = e
		}
	}
	return out
}

// nodesIn counts the hosts of a pool.
func (o *Observation) nodesIn(pool string) int {
	n := 0
	for _, h := range o.Hosts {
		if h.gpuNode.Labels[poolLabel(pool)] == "true" {
			n++
		}
	}
	return n
}

// emptyPools lists the pools without GPU nodes.
func (o *Observation) emptyPools() map[string]bool {
	out := map[string]bool{}
	for _, p := range o.Pools {
		if o.nodesIn(p.Name) == 0 {
			out[p.Name] = true
		}
	}
	return out
}

// hypervisorImages lists the images that run in containers[0], sorted.
func (o *Observation) hypervisorImages() []string {
	seen := map[string]bool{}
	for _, h := range o.Hosts {
		if p := h.pod(o.Goal); p != nil && len(p.Spec.Containers) > 0 {
			seen[p.Spec.Containers[0].Image] = true
		}
	}
	return sortedKeys(seen)
}
