package machine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"sort"
	"time"
)

// Entry is one of a TensorFusionCluster's gpuPools.
type Entry struct {
	Name         string   `json:"name"`
	IsDefault    bool     `json:"isDefault,omitempty"`
	SpecTemplate PoolSpec `json:"specTemplate"`
}

// ClusterView is what the TensorFusionCluster reconciler sees.
type ClusterView struct {
	Name    string
	Entries []Entry
	// Pools that the cluster owns.
	Pools []Pool
}

// ClusterStatus is a TensorFusionCluster's status, without its conditions.
type ClusterStatus struct {
	Phase            string   `json:"phase,omitempty"`
	TotalPools       int32    `json:"totalPools,omitempty"`
	TotalNodes       int32    `json:"totalNodes,omitempty"`
	TotalGPUs        int32    `json:"totalGPUs,omitempty"`
	ReadyGPUPools    []string `json:"readyGPUPools,omitempty"`
	NotReadyGPUPools []string `json:"notReadyGPUPools,omitempty"`
}

// PoolWrite creates a GPUPool or overwrites its spec.
type PoolWrite struct {
	Name      string
	IsDefault bool
	Spec      PoolSpec
}

// ClusterResult is what it writes.
type ClusterResult struct {
	Create  []PoolWrite
	Update  []PoolWrite
	Delete  []string
	Status  ClusterStatus
	Requeue time.Duration
}

// PoolName is the GPUPool of a cluster's entry.
func PoolName(cluster, entry string) string { return cluster + "-" + entry }

// ReconcileCluster makes the GPUPools what the cluster's entries say (rule 5).
func ReconcileCluster(v ClusterView) (ClusterResult, error) {
	var r ClusterResult
	existing := map[string]Pool{}
	for _, pool := range v.Pools {
		existing[pool.Name] = pool
	}
	wanted := map[string]bool{}
	for _, entry := range v.Entries {
		name := PoolName(v.Name, entry.Name)
		wanted[name] = true
		write := PoolWrite{Name: name, IsDefault: entry.IsDefault, Spec: entry.SpecTemplate}
		pool, ok := existing[name]
		if !ok {
			r.Create = append(r.Create, write)
			continue
		}
		same, err := equalSpecs(pool.Spec, entry.SpecTemplate)
		if err != nil {
			return r, fmt.Errorf("TensorFusionCluster %s: pool %s: %w", v.Name, entry.Name, err)
		}
		if !same {
			r.Update = append(r.Update, write)
		}
	}
	for name := range existing {
		if !wanted[name] {
			r.Delete = append(r.Delete, name)
		}
	}
	sort.Strings(r.Delete)
	r.Status = clusterStatus(v, wanted)
	if len(r.Create)+len(r.Update)+len(r.Delete) > 0 {
		r.Status.Phase = Updating
		r.Requeue = pendingRequeue
	}
	return r, nil
}

func clusterStatus(v ClusterView, wanted map[string]bool) ClusterStatus {
	s := ClusterStatus{TotalPools: int32(len(v.Pools)), Phase: Updating}
	for _, pool := range v.Pools {
		s.TotalNodes += pool.Status.TotalNodes
		s.TotalGPUs += pool.Status.TotalGPUs
		if pool.Status.Phase == Running {
			s.ReadyGPUPools = append(s.ReadyGPUPools, pool.Name)
		} else {
			s.NotReadyGPUPools = append(s.NotReadyGPUPools, pool.Name)
		}
	}
	sort.Strings(s.ReadyGPUPools)
	sort.Strings(s.NotReadyGPUPools)
	if len(v.Pools) == len(wanted) && len(s.NotReadyGPUPools) == 0 {
		s.Phase = Running
	}
	return s
}

// equalSpecs compares what is sent: a field that is omitted when empty is
// absent, whatever the stored object was defaulted to.
func equalSpecs(a, b PoolSpec) (bool, error) {
	x, err := json.Marshal(a)
	if err != nil {
		return false, err
	}
	y, err := json.Marshal(b)
	return bytes.Equal(x, y), err
}
