package machine

import (
	"encoding/json"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
)

// stored is what the API server makes of a written pool spec: empty fields are
// absent, and absent ones get their default.
func (w *world) stored(s PoolSpec) PoolSpec {
	data, err := json.Marshal(s)
	if err != nil {
		w.t.Fatal(err)
	}
	var out PoolSpec
	if err := json.Unmarshal(data, &out); err != nil {
		w.t.Fatal(err)
	}
	if out.NodeManagerConfig != nil && out.NodeManagerConfig.Policy != nil && out.NodeManagerConfig.Policy.BatchPercentage == 0 {
		out.NodeManagerConfig.Policy.BatchPercentage = 100
	}
	return out
}

func (w *world) reconcileCluster() {
	v := ClusterView{Name: "tensor-fusion", Entries: []Entry{{Name: "shared", SpecTemplate: w.entry}}}
	if w.pool != nil {
		v.Pools = []Pool{*w.pool}
	}
	r, err := ReconcileCluster(v)
	if err != nil {
		w.t.Fatal(err)
	}
	w.clusterPhase = r.Status.Phase
	for _, write := range r.Create {
		w.pool = &Pool{Name: write.Name, Annotations: map[string]string{}, Spec: w.stored(write.Spec)}
		w.after(0, "provider", "")
	}
	changed := len(r.Create) > 0
	for _, write := range r.Update {
		stored := w.stored(write.Spec)
		same, err := equalSpecs(stored, w.pool.Spec)
		if err != nil {
			w.t.Fatal(err)
		}
		changed = changed || !same // a write that changes nothing is no event
		w.pool.Spec = stored
		w.clusterWrites++
	}
	if changed {
		w.after(0, "pool", "")
		w.after(0, "cluster", "")
	}
	if r.Requeue > 0 {
		w.after(r.Requeue, "cluster", "")
	}
}

func (w *world) reconcileProvider() {
	if w.provider == nil || w.pool == nil {
		return
	}
	r, err := w.process.ReconcileProvider(ProviderView{Provider: *w.provider, Pools: []Pool{*w.pool}}, &w.memory)
	if err != nil {
		w.t.Fatal(err)
	}
	if w.provider.Annotations == nil {
		w.provider.Annotations = map[string]string{}
	}
	maps.Copy(w.provider.Annotations, r.Annotations)
	if annotations := r.PoolAnnotations[w.pool.Name]; annotations != nil {
		maps.Copy(w.pool.Annotations, annotations)
		w.after(0, "pool", "")
	}
	if len(r.DeleteHypervisors) > 0 {
		for _, n := range sorted(w.pods) {
			w.deleteHypervisor(n, "provider")
		}
	}
}

func (w *world) poolView() PoolView {
	v := PoolView{Pool: *w.pool}
	v.Pool.Annotations = maps.Clone(w.pool.Annotations)
	for _, n := range sorted(w.gpuNodes) {
		v.Nodes = append(v.Nodes, PoolNode{GPUNode: *w.gpuNodes[n], Node: w.nodes[n], Pod: w.podOfVersion(n)})
		v.GPUs = append(v.GPUs, w.gpus[n]...)
	}
	for _, k := range sorted(w.workloads) {
		v.Workloads = append(v.Workloads, *w.workloads[k])
	}
	for _, k := range sorted(w.clients) {
		v.Clients = append(v.Clients, *w.clients[k])
	}
	return v
}

// podOfVersion hides a pod whose name the version does not use.
func (w *world) podOfVersion(node string) *Pod {
	p := w.pods[node]
	if p == nil || p.Name != w.process.Version.HypervisorName(node) {
		return nil
	}
	copied := *p
	return &copied
}

func (w *world) reconcilePool() {
	if w.pool == nil {
		return
	}
	r := w.process.ReconcilePool(w.poolView(), w.now)
	w.err = r.Err
	maps.Copy(w.pool.Annotations, r.Annotations)
	for _, n := range r.SetPending {
		w.gpuNodes[n].Phase = Pending
		w.after(0, "node", n)
		w.after(0, "pool", "")
	}
	for _, k := range r.ClearWorkloads {
		w.workloads[k].Status.Hash = ""
		w.after(0, "workload", k)
	}
	for _, c := range r.DeleteClients {
		w.deleted = append(w.deleted, deletion{w.now.Sub(w.start), c.Name, "client"})
		delete(w.clients, c.Namespace+"/"+c.Name)
	}
	if w.pool.Status.Phase != r.Status.Phase {
		w.after(0, "cluster", "")
	}
	w.pool.Status = r.Status
	if r.Requeue > 0 {
		w.after(r.Requeue, "pool", "")
	}
}

func (w *world) reconcileNode(name string) {
	g := w.gpuNodes[name]
	if g == nil || w.pool == nil {
		return
	}
	r := w.process.ReconcileNode(NodeView{
		GPUNode: *g, Node: w.nodes[name], Pool: w.pool, Provider: w.provider, Pod: w.podOfVersion(name), GPUs: w.gpus[name],
	})
	if r.DeleteGPUNode {
		delete(w.gpuNodes, name)
		w.after(0, "pool", "")
		return
	}
	if r.DeletePod != "" {
		w.deleteHypervisor(name, r.Reason)
	}
	if r.Create != nil {
		if w.pods[name] != nil && w.pods[name].Name == r.Create.Name {
			w.t.Fatalf("two pods %s", r.Create.Name)
		}
		w.uids++
		w.pods[name] = &Pod{
			Name: r.Create.Name, UID: fmt.Sprint("uid-", w.uids), Created: w.now, Hash: r.Create.Labels[HashLabel],
			Phase: corev1.PodPending, Args: r.Create.Spec.Containers[0].Args,
		}
		w.after(0, "node", name)
		if !w.neverReady[name] {
			w.after(w.readyAfter, "ready", name+" "+w.pods[name].UID)
		}
	}
	if r.Phase != "" {
		g.Phase = r.Phase
		w.after(0, "node", name)
		w.after(0, "pool", "")
	}
	if r.GPUPhase != "" {
		for i := range w.gpus[name] {
			w.gpus[name][i].Phase = r.GPUPhase
		}
	}
	if r.Requeue > 0 {
		w.after(r.Requeue, "node", name)
	}
}
