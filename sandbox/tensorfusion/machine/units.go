package machine

import (
	"slices"
	"sort"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
)

func decimal(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }

func binary(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.BinarySI) }

// units are what a component is rolled out over.
type units struct {
	total    int
	outdated []string
	// act takes the chosen ones and returns the requeue of rule 18.
	act func(chosen []string, r *PoolResult) time.Duration
}

// units lists a component's resources; recheck means that one of them is still
// on its way (rules 12-14).
func (p Process) units(c Component, v PoolView) (u units, recheck bool, err error) {
	switch c {
	case Hypervisor:
		return p.nodeUnits(v)
	case Worker:
		return workloadUnits(v)
	default:
		return clientUnits(v)
	}
}

func (p Process) nodeUnits(v PoolView) (u units, recheck bool, err error) {
	var nodes []PoolNode
	for _, n := range v.Nodes {
		if n.GPUNode.Deleting {
			continue
		}
		if n.GPUNode.Phase == Pending {
			return u, true, nil
		}
		nodes = append(nodes, n)
	}
	sortNodes(nodes)
	u.total = len(nodes)
	wanted := map[string]string{} // by isolation mode: composing is not cheap
	for _, n := range nodes {
		mode := p.isolationMode(&v.Pool.Spec, n.Node, n.GPUNode)
		want, ok := wanted[mode]
		if !ok {
			if want, err = p.NodeHash(&v.Pool, mode); err != nil {
				return u, false, err
			}
			wanted[mode] = want
		}
		if n.Pod == nil || n.Pod.Hash != want {
			u.outdated = append(u.outdated, n.GPUNode.Name)
		}
	}
	u.act = func(chosen []string, r *PoolResult) time.Duration {
		r.SetPending = append(r.SetPending, chosen...)
		return 0 // the GPUNodes' events bring the pool back
	}
	return u, false, nil
}

func workloadUnits(v PoolView) (u units, recheck bool, err error) {
	workloads := slices.Clone(v.Workloads)
	sort.Slice(workloads, func(i, j int) bool {
		return older(workloads[i].Created, workloads[j].Created, workloads[i].Key(), workloads[j].Key())
	})
	u.total = len(workloads)
	for _, w := range workloads {
		if w.Status.Hash == "" {
			return u, true, nil
		}
		want, err := WorkloadHash(&v.Pool.Spec, w.Spec)
		if err != nil {
			return u, false, err
		}
		if w.Status.Hash != want {
			u.outdated = append(u.outdated, w.Key())
		}
	}
	u.act = func(chosen []string, r *PoolResult) time.Duration {
		r.ClearWorkloads = append(r.ClearWorkloads, chosen...)
		return pendingRequeue
	}
	return u, false, nil
}

func clientUnits(v PoolView) (u units, recheck bool, err error) {
	want, err := ClientHash(&v.Pool.Spec)
	if err != nil {
		return u, false, err
	}
	clients := slices.Clone(v.Clients)
	key := func(p Pod) string { return p.Namespace + "/" + p.Name }
	sort.Slice(clients, func(i, j int) bool {
		return older(clients[i].Created, clients[j].Created, key(clients[i]), key(clients[j]))
	})
	u.total = len(clients)
	byKey := map[string]Pod{}
	for _, c := range clients {
		if c.Terminating {
			return u, true, nil
		}
		byKey[key(c)] = c
		if c.Hash != want {
			u.outdated = append(u.outdated, key(c))
		}
	}
	u.act = func(chosen []string, r *PoolResult) time.Duration {
		for _, k := range chosen {
			r.DeleteClients = append(r.DeleteClients, byKey[k])
		}
		return pendingRequeue
	}
	return u, false, nil
}
