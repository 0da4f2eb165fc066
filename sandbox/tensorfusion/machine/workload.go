package machine

import (
	"encoding/json"
	"fmt"
	"sort"
	"time"
)

// Workload is a TensorFusionWorkload.
type Workload struct {
	Namespace string
	Name      string
	Created   time.Time
	// Spec is the whole spec as stored, part of the workers' hash.
	Spec json.RawMessage
	// Replicas is nil for a dynamic workload: one worker per connection.
	Replicas *int32
	Status   WorkloadStatus
}

// Key is namespace/name.
func (w Workload) Key() string { return w.Namespace + "/" + w.Name }

// WorkloadStatus is a TensorFusionWorkload's status.
type WorkloadStatus struct {
	Phase        string `json:"phase,omitempty"`
	WorkerCount  int32  `json:"workerCount"`
	ReadyWorkers int32  `json:"readyWorkers"`
	Hash         string `json:"podTemplateHash,omitempty"`
}

// Connection is a TensorFusionConnection of a workload.
type Connection struct {
	Name   string
	Worker string // status.workerName
}

// WorkloadView is what the workload reconciler sees.
type WorkloadView struct {
	Workload    Workload
	Pool        *Pool
	Workers     []Pod
	Connections []Connection
}

// WorkloadResult is what it writes.
type WorkloadResult struct {
	Status WorkloadStatus
	// Delete are pods, all at once.
	Delete []Pod
	// Create is how many pods with random names are missing.
	Create int
	// CreateNamed are dedicated workers, named after their connections.
	CreateNamed []string
	// Hash is the label of new pods.
	Hash string
}

// ReconcileWorkload keeps a workload's workers. autoUpdateWorker is not
// consulted: any event recreates all workers whose template changed (rule 25).
func ReconcileWorkload(v WorkloadView) (WorkloadResult, error) {
	r := WorkloadResult{Status: v.Workload.Status}
	if v.Pool == nil {
		return r, fmt.Errorf("TensorFusionWorkload %s: its GPUPool does not exist", v.Workload.Key())
	}
	want, err := WorkloadHash(&v.Pool.Spec, v.Workload.Spec)
	if err != nil {
		return r, fmt.Errorf("TensorFusionWorkload %s: %w", v.Workload.Key(), err)
	}
	r.Hash = want
	workers := append([]Pod(nil), v.Workers...)
	sort.Slice(workers, func(i, j int) bool {
		return older(workers[i].Created, workers[j].Created, workers[i].Name, workers[j].Name)
	})
	r.Status.WorkerCount, r.Status.ReadyWorkers = int32(len(workers)), 0
	for _, w := range workers {
		if w.running() && !w.Terminating {
			r.Status.ReadyWorkers++
		}
	}
	if r.Status.Hash != want {
		r.Status.Hash = want
		r.Status.Phase = v.phase(r.Status)
		return r, nil // the write's own event does the rest
	}
	r.Status.Phase = v.phase(r.Status)
	for _, w := range workers {
		if w.Hash != want && !w.Terminating {
			r.Delete = append(r.Delete, w)
		}
	}
	if v.Workload.Replicas == nil {
		v.dedicated(workers, &r)
		return r, nil
	}
	if len(r.Delete) > 0 {
		return r, nil
	}
	missing := int(*v.Workload.Replicas) - len(workers)
	if missing >= 0 {
		r.Create = missing
		return r, nil
	}
	for _, w := range workers[:-missing] {
		if !w.Terminating {
			r.Delete = append(r.Delete, w)
		}
	}
	return r, nil
}

// dedicated keeps one worker per connection, named after it.
func (v WorkloadView) dedicated(workers []Pod, r *WorkloadResult) {
	exists := map[string]bool{}
	for _, w := range workers {
		exists[w.Name] = true
	}
	wanted := map[string]bool{}
	for _, c := range v.Connections {
		wanted[c.Name] = true
		if !exists[c.Name] {
			r.CreateNamed = append(r.CreateNamed, c.Name)
		}
	}
	sort.Strings(r.CreateNamed)
	for _, w := range workers {
		if !wanted[w.Name] && !w.Terminating && w.Hash == r.Hash {
			r.Delete = append(r.Delete, w)
		}
	}
}

// phase: a dynamic workload is Running even with no worker.
func (v WorkloadView) phase(s WorkloadStatus) string {
	if v.Workload.Replicas == nil || s.ReadyWorkers >= *v.Workload.Replicas {
		return Running
	}
	return Pending
}

// ConnectionResult is a TensorFusionConnection's status.
type ConnectionResult struct {
	Phase         string `json:"phase,omitempty"`
	ConnectionURL string `json:"connectionURL,omitempty"`
	WorkerName    string `json:"workerName,omitempty"`
}

// ReconcileConnection gives a connection its worker: the one it has while that
// runs, else its dedicated one, else the first running one by name. address
// says where a worker is reached.
func ReconcileConnection(c Connection, dynamic bool, workers []Pod, address func(Pod) string) ConnectionResult {
	candidates := map[string]Pod{}
	var names []string
	for _, w := range workers {
		if w.running() && !w.Terminating && (!dynamic || w.Name == c.Name) {
			candidates[w.Name] = w
			names = append(names, w.Name)
		}
	}
	if len(names) == 0 {
		return ConnectionResult{Phase: Pending}
	}
	sort.Strings(names)
	chosen, ok := candidates[c.Worker]
	if !ok {
		chosen = candidates[names[0]]
	}
	return ConnectionResult{Phase: Running, WorkerName: chosen.Name, ConnectionURL: "native+" + address(chosen)}
}
