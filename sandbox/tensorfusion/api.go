package tensorfusion

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sort"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

// serveAPI answers for the controller (/api/...), for every hypervisor
// (/nodes/NODE/...), and takes faults (POST /sandbox/fault?name=...&arg=...).
func (d *Double) serveAPI(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/allocation", d.allocation)
	mux.HandleFunc("GET /nodes/{node}/healthz", d.hypervisorReady)
	mux.HandleFunc("GET /nodes/{node}/readyz", d.hypervisorReady)
	mux.HandleFunc("GET /nodes/{node}/api/v1/devices", d.hypervisorDevices)
	mux.HandleFunc("GET /sandbox/status", d.status)
	mux.HandleFunc("POST /sandbox/fault", func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		if err := d.Fault(r.Context(), query.Get("name"), query["arg"]...); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("POST /sandbox/seed", func(w http.ResponseWriter, r *http.Request) {
		if err := d.Seed(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusConflict)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	return serve(ctx, d.api, mux)
}

func answer(w http.ResponseWriter, body any) {
	data, err := json.Marshal(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if _, err := w.Write(data); err != nil && !errors.Is(err, context.Canceled) {
		return // the caller went away
	}
}

// allocation is the leader's memory; without a leader nobody has one.
func (d *Double) allocation(w http.ResponseWriter, _ *http.Request) {
	if d.election.leading() == nil {
		http.Error(w, "no leader", http.StatusServiceUnavailable)
		return
	}
	store := map[string]any{}
	gpuToWorker := map[string][]string{}
	nodeWorkers := map[string][]string{}
	allocation := map[string]any{}
	for _, u := range d.caches.list(gpuResource) {
		status, _, _ := unstructured.NestedMap(u.Object, "status")
		store[u.GetName()] = status
	}
	for _, node := range d.caches.list(nodeResource) {
		gpus := d.caches.indexed(gpuResource, byNode, node.GetName())
		sort.Slice(gpus, func(i, j int) bool { return gpus[i].GetName() < gpus[j].GetName() })
		workers := d.caches.podsBy(byWorkers, node.GetName())
		sort.Slice(workers, func(i, j int) bool { return workers[i].Name < workers[j].Name })
		for i, pod := range workers {
			if pod.DeletionTimestamp != nil {
				continue
			}
			key := pod.Namespace + "/" + pod.Name
			nodeWorkers[node.GetName()] = append(nodeWorkers[node.GetName()], key)
			entry := map[string]any{
				"podMeta":     map[string]any{"namespace": pod.Namespace, "name": pod.Name, "uid": pod.UID},
				"workload":    pod.Labels[machine.WorkloadLabel],
				"poolName":    pod.Annotations[machine.PoolLabel],
				"gpuNames":    []string{},
				"nodeName":    node.GetName(),
				"count":       1,
				"qos":         "medium",
				"isolation":   "soft",
				"requestHash": pod.Labels[machine.HashLabel],
			}
			if len(gpus) > 0 {
				gpu := gpus[i%len(gpus)].GetName()
				entry["gpuNames"] = []string{gpu}
				gpuToWorker[gpu] = append(gpuToWorker[gpu], key)
			}
			allocation[string(pod.UID)] = entry
		}
	}
	answer(w, map[string]any{"gpuStore": store, "nodeWorkerStore": nodeWorkers, "allocation": allocation, "gpuToWorkerMap": gpuToWorker})
}

func (d *Double) hypervisorReady(w http.ResponseWriter, r *http.Request) {
	if d.readyHypervisor(r.PathValue("node")) == nil {
		http.Error(w, "hypervisor of node "+r.PathValue("node")+" is not ready", http.StatusServiceUnavailable)
		return
	}
	answer(w, map[string]string{"status": "ok"})
}

func (d *Double) hypervisorDevices(w http.ResponseWriter, r *http.Request) {
	node := r.PathValue("node")
	if d.readyHypervisor(node) == nil {
		http.Error(w, "hypervisor of node "+node+" is not ready", http.StatusServiceUnavailable)
		return
	}
	devices := []map[string]any{}
	for index := range d.options.GPUsPerNode {
		devices = append(devices, map[string]any{"uuid": DeviceUUID(node, index), "index": index, "vendor": "NVIDIA"})
	}
	answer(w, map[string]any{"devices": devices})
}

// status says what the double plays, for a person at the sandbox.
func (d *Double) status(w http.ResponseWriter, _ *http.Request) {
	body := map[string]any{"release": d.options.Release, "namespace": d.options.Namespace, "replicas": d.election.alive()}
	if p := d.election.leading(); p != nil {
		body["leader"], body["version"], body["isolationPolicy"] = p.pod, p.Version.String(), p.Policy
	}
	answer(w, body)
}
