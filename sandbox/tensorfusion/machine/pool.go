package machine

import (
	"errors"
	"fmt"
	"maps"
	"sort"
	"time"
)

// ErrPanic is a panic of the real controller, recovered by its framework: the
// reconcile ended in the middle and will do so again.
var ErrPanic = errors.New("controller panicked")

// PoolView is what the pool reconciler sees.
type PoolView struct {
	Pool Pool
	// Nodes are the GPUNodes labelled for the pool.
	Nodes []PoolNode
	GPUs  []GPU
	// Workloads and Clients of the pool.
	Workloads []Workload
	Clients   []Pod
}

// PoolNode is a GPUNode with its Node and its hypervisor, as the pool sees it.
type PoolNode struct {
	GPUNode GPUNode
	Node    *Node
	Pod     *Pod
}

// PoolResult is what the pool reconciler writes, annotations first.
type PoolResult struct {
	// Annotations to set; an empty value is written as such.
	Annotations map[string]string
	Status      PoolStatus
	// SetPending names GPUNodes whose phase becomes Pending (rule 18).
	SetPending []string
	// ClearWorkloads are namespace/name whose status.podTemplateHash is cleared.
	ClearWorkloads []string
	DeleteClients  []Pod
	// Requeue is the next wake-up; 0 is none.
	Requeue time.Duration
	// Err joins the errors of the components; the others went on.
	Err error
}

// ReconcilePool computes readiness and capacity, then runs the update machine
// for the three components (rules 6-18).
func (p Process) ReconcilePool(v PoolView, now time.Time) PoolResult {
	r := PoolResult{Status: v.Pool.Status, Annotations: map[string]string{}}
	readiness(v, &r.Status)
	if v.Pool.Spec.ComponentConfig == nil {
		r.Err = fmt.Errorf("GPUPool %s: componentConfig is missing", v.Pool.Name)
		return r
	}
	policy := v.Pool.Spec.policy()
	if policy == nil && !p.Version.toleratesMissingPolicy() {
		r.Err = fmt.Errorf("GPUPool %s: %w: nil nodePoolRollingUpdatePolicy", v.Pool.Name, ErrPanic)
		return r
	}
	for _, c := range []Component{Hypervisor, Worker, Client} {
		requeue, err := p.reconcileComponent(c, v, &r, now)
		if err != nil {
			r.Err = errors.Join(r.Err, fmt.Errorf("GPUPool %s: %s: %w", v.Pool.Name, c, err))
		}
		if errors.Is(err, ErrPanic) {
			return r
		}
		if requeue > 0 && (r.Requeue == 0 || requeue < r.Requeue) {
			r.Requeue = requeue
		}
	}
	return r
}

func (p Process) componentHash(c Component, pool *Pool) (string, error) {
	switch c {
	case Hypervisor:
		return p.PoolHash(pool)
	case Worker:
		return WorkerHash(&pool.Spec)
	default:
		return ClientHash(&pool.Spec)
	}
}

// reconcileComponent runs rules 7-16 and returns when to come back.
func (p Process) reconcileComponent(c Component, v PoolView, r *PoolResult, now time.Time) (time.Duration, error) {
	policy := v.Pool.Spec.policy()
	auto, percent, interval := policy.auto(c), policy.percentage(), policy.interval()
	current, err := p.componentHash(c, &v.Pool)
	if err != nil {
		return 0, err
	}
	annotations := maps.Clone(v.Pool.Annotations)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotate := func(key, value string) {
		if old, ok := annotations[key]; ok && old == value {
			return
		}
		annotations[key], r.Annotations[key] = value, value
	}
	// In memory only until written (rule 8).
	state := v.Pool.Status.Components.get(c)
	if state.hash != current {
		first := state.hash == ""
		state = progress{hash: current}
		if first || !auto {
			r.Status.Components.set(c, state)
			return 0, nil
		}
		annotate(InProgress(c), current)
		annotate(LastTime(c), "")
	} else {
		if !auto {
			return 0, nil // rule 9
		}
		if annotations[InProgress(c)] != current {
			if !p.Version.resumesPending() || state.synced {
				return 0, nil // rule 10
			}
			annotate(InProgress(c), current)
			annotate(LastTime(c), "")
		} else if last, err := time.Parse(time.RFC3339, annotations[LastTime(c)]); err == nil {
			if wait := last.Add(interval).Sub(now); wait > 0 {
				return wait, nil
			}
		}
	}
	units, recheck, err := p.units(c, v)
	if err != nil {
		return 0, err
	}
	if recheck {
		return pendingRequeue, nil // rule 11: status is not written
	}
	if units.total == 0 {
		return 0, nil
	}
	b, err := nextBatch(units.total, len(units.outdated), int(state.percent), percent)
	if err != nil {
		return 0, err
	}
	if b.act > 0 {
		state.percent, state.synced = int32(b.progress), false
		r.Status.Components.set(c, state)
		return units.act(units.outdated[:b.act], r), nil
	}
	state.percent = int32(b.progress)
	if b.progress < 100 {
		annotate(LastTime(c), now.UTC().Format(time.RFC3339))
		r.Status.Components.set(c, state)
		return max(interval, pendingRequeue), nil
	}
	annotate(InProgress(c), "")
	annotate(LastTime(c), "")
	state.synced = true
	r.Status.Components.set(c, state)
	return 0, nil
}

type batch struct{ act, progress int }

// nextBatch is the arithmetic of rules 15 and 16.
func nextBatch(total, outdated, done, percent int) (batch, error) {
	if percent == 0 {
		return batch{}, fmt.Errorf("%w: integer divide by zero (batchPercentage 0)", ErrPanic)
	}
	size := (percent*total + 99) / 100
	for {
		index := done / percent
		desired := min((index+1)*size, total)
		delta := desired - (total - outdated)
		if delta > 0 {
			return batch{act: delta, progress: done}, nil
		}
		if delta == 0 {
			return batch{progress: min((index+1)*percent, 100)}, nil
		}
		done = min(done+percent, 100)
	}
}

// readiness is rule 6. An empty pool is Running only without minResources.
func readiness(v PoolView, s *PoolStatus) {
	s.ReadyNodes, s.NotReadyNodes = 0, 0
	for _, n := range v.Nodes {
		if n.GPUNode.Phase == Running {
			s.ReadyNodes++
		} else {
			s.NotReadyNodes++
		}
	}
	s.TotalNodes = int32(len(v.Nodes))
	s.TotalGPUs = int32(len(v.GPUs))
	s.RunningApps = int32(len(v.Clients))
	if s.ProvisioningPhase == "" {
		s.ProvisioningPhase = "None"
	}
	s.Phase = Updating
	if s.NotReadyNodes == 0 && (s.TotalNodes > 0 || v.Pool.Spec.needsNothing()) {
		s.Phase = Running
	}
	capacity(v, s)
}

func (s *PoolSpec) needsNothing() bool {
	if s.CapacityConfig == nil || s.CapacityConfig.MinResources == nil {
		return true
	}
	low := s.CapacityConfig.MinResources
	return (low.TFlops == nil || low.TFlops.IsZero()) && (low.VRAM == nil || low.VRAM.IsZero())
}

func capacity(v PoolView, s *PoolStatus) {
	var tflops, vram, freeTFlops, freeVRAM int64
	for _, gpu := range v.GPUs {
		tflops += gpu.TFlops.Value()
		vram += gpu.VRAM.Value()
		if gpu.Phase == Running && !gpu.Missing {
			freeTFlops += gpu.TFlops.Value()
			freeVRAM += gpu.VRAM.Value()
		}
	}
	oversell, expand := int64(100), int64(0)
	if config := v.Pool.Spec.CapacityConfig; config != nil && config.Oversubscription != nil {
		o := config.Oversubscription
		if o.TFlopsOversellRatio > 0 {
			oversell = int64(o.TFlopsOversellRatio)
		}
		expand = int64(o.VRAMExpandToHostMem + o.VRAMExpandToHostDisk)
	}
	s.TotalTFlops, s.TotalVRAM = decimal(tflops), binary(vram)
	s.AvailableTFlops, s.AvailableVRAM = decimal(freeTFlops), binary(freeVRAM)
	s.VirtualTFlops, s.VirtualVRAM = decimal(tflops*oversell/100), binary(vram*(100+expand)/100)
}

// older sorts by creation, then name (rule 12).
func older(a, b time.Time, nameA, nameB string) bool {
	if !a.Equal(b) {
		return a.Before(b)
	}
	return nameA < nameB
}

func sortNodes(nodes []PoolNode) {
	sort.Slice(nodes, func(i, j int) bool {
		a, b := nodes[i].GPUNode, nodes[j].GPUNode
		return older(a.Created, b.Created, a.Name, b.Name)
	})
}
