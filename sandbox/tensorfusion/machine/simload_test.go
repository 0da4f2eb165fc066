package machine

import (
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// addWorkload adds a workload with fixed replicas, and lets it settle.
func (w *world) addWorkload(name string, replicas int32) {
	k := "apps/" + name
	w.workloads[k] = &Workload{
		Namespace: "apps", Name: name, Created: w.now, Replicas: &replicas,
		Spec: json.RawMessage(fmt.Sprintf(`{"poolName":%q,"replicas":%d}`, poolName, replicas)),
	}
	w.after(0, "workload", k)
	w.run(5 * time.Second)
}

func (w *world) workersOf(key string) []Pod {
	var out []Pod
	for _, n := range sorted(w.workers) {
		if w.workers[n].Namespace+"/"+workloadOf(n) == key {
			out = append(out, *w.workers[n])
		}
	}
	return out
}

func workloadOf(worker string) string {
	for i := range worker {
		if worker[i] == '.' {
			return worker[:i]
		}
	}
	return worker
}

func (w *world) reconcileWorkload(key string) {
	load := w.workloads[key]
	if load == nil || w.pool == nil {
		return
	}
	r, err := ReconcileWorkload(WorkloadView{Workload: *load, Pool: w.pool, Workers: w.workersOf(key)})
	if err != nil {
		w.t.Fatal(err)
	}
	if load.Status != r.Status {
		load.Status = r.Status
		w.after(0, "workload", key)
	}
	for _, p := range r.Delete {
		w.deleted = append(w.deleted, deletion{w.now.Sub(w.start), p.Name, "worker"})
		delete(w.workers, p.Name)
		w.after(0, "workload", key)
	}
	for range r.Create {
		w.uids++
		name := fmt.Sprintf("%s.%d", load.Name, w.uids)
		w.workers[name] = &Pod{
			Namespace: load.Namespace, Name: name, UID: fmt.Sprint("uid-", w.uids), Created: w.now,
			Hash: r.Hash, Phase: corev1.PodRunning, Ready: true,
		}
		w.after(0, "workload", key)
	}
}

// addClients adds n client pods with the given label.
func (w *world) addClients(n int, hash string) {
	for i := range n {
		name := fmt.Sprintf("client%d", i)
		w.clients["apps/"+name] = &Pod{
			Namespace: "apps", Name: name, UID: name, Hash: hash, Created: w.now.Add(time.Duration(i) * time.Second),
			Phase: corev1.PodRunning, Ready: true,
		}
	}
}
