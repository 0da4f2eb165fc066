package machine

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// deleteHypervisor is a DELETE of the pod, whoever sends it; the pod object
// goes after its grace.
func (w *world) deleteHypervisor(node, reason string) {
	p := w.pods[node]
	if p == nil || p.Terminating {
		return
	}
	p.Terminating = true
	w.deleted = append(w.deleted, deletion{w.now.Sub(w.start), node, reason})
	w.after(0, "node", node)
	w.after(w.goneAfter, "gone", node+" "+p.UID)
}

func (w *world) becomeReady(key string) {
	node, uid, _ := strings.Cut(key, " ")
	p := w.pods[node]
	if p == nil || p.UID != uid || p.Terminating {
		return
	}
	p.Phase, p.Ready = corev1.PodRunning, true
	if w.gpus[node] == nil {
		for i := range 2 {
			w.gpus[node] = append(w.gpus[node], GPU{
				Name: fmt.Sprintf("%s-gpu%d", node, i), Phase: Pending,
				TFlops: resource.MustParse("100"), VRAM: resource.MustParse("80Gi"),
			})
		}
	}
	w.after(0, "node", node)
}

func (w *world) podGone(key string) {
	node, uid, _ := strings.Cut(key, " ")
	if p := w.pods[node]; p != nil && p.UID == uid {
		delete(w.pods, node)
		w.after(0, "node", node)
	}
}

func (w *world) progress() int32 { return w.pool.Status.Components.HypervisorProgress }
func (w *world) synced() bool    { return w.pool.Status.Components.HypervisorSynced }

func (w *world) phases() string {
	var out []string
	for _, n := range sorted(w.gpuNodes) {
		out = append(out, n+"="+w.gpuNodes[n].Phase)
	}
	return strings.Join(out, " ")
}

// hashes are the labels of the hypervisor pods, by node.
func (w *world) hashes() map[string]string {
	out := map[string]string{}
	for n, p := range w.pods {
		out[n] = p.Hash
	}
	return out
}

// uidsNow are the UIDs of the hypervisor pods, by node.
func (w *world) uidsNow() map[string]string {
	out := map[string]string{}
	for n, p := range w.pods {
		out[n] = p.UID
	}
	return out
}

func changed(before, after map[string]string) int {
	n := 0
	for key, value := range before {
		if after[key] != value {
			n++
		}
	}
	return n
}

// wanted is Hn of a node of the default mode.
func (w *world) wanted() string {
	w.t.Helper()
	h, err := w.process.NodeHash(w.pool, w.process.isolationMode(&w.pool.Spec, nil, GPUNode{}))
	if err != nil {
		w.t.Fatal(err)
	}
	return h
}

// updated counts Ready pods with the wanted label.
func (w *world) updated() int {
	want, n := w.wanted(), 0
	for _, p := range w.pods {
		if p.Hash == want && p.running() {
			n++
		}
	}
	return n
}
