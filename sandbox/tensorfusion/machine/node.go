package machine

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// NodeView is what the GPUNode reconciler sees.
type NodeView struct {
	GPUNode GPUNode
	// Node is nil when it is gone.
	Node     *Node
	Pool     *Pool
	Provider *Provider
	// Pod is the hypervisor of this version's name; nil when it is missing.
	Pod  *Pod
	GPUs []GPU
}

// NewPod is a hypervisor pod to create.
type NewPod struct {
	Name   string
	Labels map[string]string
	Spec   corev1.PodSpec
}

// NodeResult is what the GPUNode reconciler writes.
type NodeResult struct {
	DeleteGPUNode bool
	Create        *NewPod
	// DeletePod is the UID of the pod to delete, Reason why.
	DeletePod string
	Reason    string
	// Phase of the GPUNode; GPUPhase of all its GPUs. Empty leaves them alone.
	Phase    string
	GPUPhase string
	Requeue  time.Duration
	Err      error
}

// Reasons of a deletion; CrashLoop is an event's reason too.
const (
	CrashLoop = "HypervisorCrashLoopRecreate"
	isolation = "isolation arguments changed"
	outdated  = "stopped or outdated"
	notReady  = "node is not ready"
	noPlugin  = "device plugin is missing"
)

// ReconcileNode keeps one node's hypervisor (rules 19-23).
func (p Process) ReconcileNode(v NodeView) NodeResult {
	r := p.reconcileNode(v)
	if v.GPUNode.Phase == "" && r.Phase == "" && !r.DeleteGPUNode {
		r.Phase = Pending
	}
	return r
}

func (p Process) reconcileNode(v NodeView) NodeResult {
	if v.Node == nil || v.Node.Deleting {
		return NodeResult{DeleteGPUNode: true}
	}
	if v.GPUNode.Deleting || v.Pool == nil {
		return NodeResult{}
	}
	if state := v.Node.Labels[driverUpgradeLabel]; state != "" && state != "upgrade-done" {
		return NodeResult{Requeue: statusRequeue}
	}
	if p.Version.gatesNotReadyNodes() && !v.Node.Ready {
		r := NodeResult{Requeue: pendingRequeue}
		if v.Pod != nil && !v.Pod.Terminating && v.Pod.Phase != corev1.PodRunning {
			r.DeletePod, r.Reason = v.Pod.UID, notReady
		}
		return r
	}
	if p.Toolkit && v.Node.NoDevicePlugin {
		r := NodeResult{Err: fmt.Errorf("GPUNode %s: waiting for the device plugin", v.GPUNode.Name), Requeue: pendingRequeue}
		if v.Pod != nil && !v.Pod.Terminating {
			r.DeletePod, r.Reason = v.Pod.UID, noPlugin
		}
		return r
	}
	mode := p.isolationMode(&v.Pool.Spec, v.Node, v.GPUNode)
	want, err := p.NodeHash(v.Pool, mode)
	if err != nil {
		return NodeResult{Err: fmt.Errorf("GPUNode %s: %w", v.GPUNode.Name, err)}
	}
	if v.Pod == nil {
		return p.createHypervisor(v, mode, want)
	}
	if r, done := p.keepOrDelete(v, mode, want); done {
		return r
	}
	return p.nodePhase(v)
}

// keepOrDelete is rule 21. done is false when the pod is kept.
func (p Process) keepOrDelete(v NodeView, mode, want string) (r NodeResult, done bool) {
	drop := func(reason string) (NodeResult, bool) {
		return NodeResult{DeletePod: v.Pod.UID, Reason: reason, Requeue: pendingRequeue}, true
	}
	if p.MaxCrash > 0 && v.Pod.Restarts > p.MaxCrash && !v.Pod.Terminating {
		return drop(CrashLoop)
	}
	if !v.Pod.Terminating && p.isolationMismatch(v.Pod, mode) {
		waits, err := p.isolationWaits(v)
		if err != nil {
			return NodeResult{Err: fmt.Errorf("GPUNode %s: %w", v.GPUNode.Name, err)}, true
		}
		if !waits {
			return drop(isolation)
		}
	}
	switch {
	case v.GPUNode.Phase == Running:
		return r, false
	case v.Pod.Terminating:
		return NodeResult{Requeue: pendingRequeue}, true
	case v.Pod.stopped() || v.Pod.Hash != want:
		return drop(outdated)
	}
	return r, false
}

func (p Process) isolationMismatch(pod *Pod, mode string) bool {
	for _, argument := range p.isolationArguments(mode) {
		if !slices.Contains(pod.Args, argument) {
			return true
		}
	}
	return false
}

// isolationWaits: from 2.15 on a Running node with a change pending in its
// pool waits for that change. "Pending" is read off the static hash, which is
// why a change of policy alone does not wait until the pool recorded it
// (rules 23 and 24).
func (p Process) isolationWaits(v NodeView) (bool, error) {
	if !p.Version.poolIsolation() || v.GPUNode.Phase != Running {
		return false, nil
	}
	static, err := p.poolHash(v.Pool, StaticPolicy)
	if err != nil {
		return false, err
	}
	recorded := v.Pool.Status.Components
	return recorded.Hypervisor != static || !recorded.HypervisorSynced, nil
}

func (p Process) createHypervisor(v NodeView, mode, want string) NodeResult {
	spec, err := p.composeHypervisor(&v.Pool.Spec, v.Provider)
	if err != nil {
		return NodeResult{Err: fmt.Errorf("GPUNode %s: %w", v.GPUNode.Name, err)}
	}
	spec.NodeName = v.GPUNode.Name
	spec.Containers[0].Args = append(spec.Containers[0].Args, p.isolationArguments(mode)...)
	r := NodeResult{Create: &NewPod{
		Name: p.Version.HypervisorName(v.GPUNode.Name),
		Labels: map[string]string{
			ComponentLabel:                 "hypervisor",
			PoolLabelPrefix + v.Pool.Name:  "true",
			HashLabel:                      want,
			"app.kubernetes.io/managed-by": "tensor-fusion",
			ManagedByLabel:                 v.GPUNode.Name,
			VendorLabel:                    v.Pool.Spec.vendor(),
		},
		Spec: spec,
	}}
	v.Pod = nil
	phase := p.nodePhase(v)
	r.Phase, r.GPUPhase = phase.Phase, phase.GPUPhase
	return r
}

// nodePhase is the second half of rule 22.
func (p Process) nodePhase(v NodeView) NodeResult {
	ready := v.Pod != nil && v.Pod.running()
	switch p.ForcedNodes[v.GPUNode.Name] {
	case Running:
		ready = true
	case Pending:
		ready = false
	}
	phase := Pending
	if ready {
		if len(v.GPUs) == 0 {
			return NodeResult{}
		}
		if !slices.ContainsFunc(v.GPUs, GPU.usable) {
			return NodeResult{}
		}
		phase = Running
	}
	var r NodeResult
	if v.GPUNode.Phase != phase {
		r.Phase = phase
	}
	for _, gpu := range v.GPUs {
		if gpu.Phase != phase {
			r.GPUPhase = phase
		}
	}
	return r
}
