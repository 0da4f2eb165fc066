package bench

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

const (
	namespace  = "tensor-fusion-sys"
	hypervisor = "tensor-fusion.ai/component=hypervisor"
	// inFlight is how many deletes go side by side, as in Refit.
	inFlight = 16
	// floorLimit is far above what a thousand hosts take.
	floorLimit = 20 * time.Minute
)

var gpuNodes = schema.GroupVersionResource{Group: "tensor-fusion.ai", Version: "v1", Resource: "gpunodes"}

// hostPod is the Ready hypervisor pod of a node; a pod on its way out or not
// yet Ready counts as none.
type hostPod struct {
	name string
	uid  types.UID
}

// hosts is the pool as two watches show it.
type hosts struct {
	mu      sync.Mutex
	ready   map[string]hostPod
	running map[string]bool // GPUNodes in phase Running
	changed chan struct{}
}

func (h *hosts) change(f func()) {
	h.mu.Lock()
	f()
	h.mu.Unlock()
	select {
	case h.changed <- struct{}{}:
	default:
	}
}

func (h *hosts) pod(p *corev1.Pod, gone bool) {
	ok := !gone && p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
	h.change(func() {
		switch {
		case ok:
			h.ready[p.Spec.NodeName] = hostPod{p.Name, p.UID}
		case h.ready[p.Spec.NodeName].uid == p.UID:
			delete(h.ready, p.Spec.NodeName)
		}
	})
}

func (h *hosts) gpuNode(u *unstructured.Unstructured) {
	phase, _, _ := unstructured.NestedString(u.Object, "status", "phase")
	h.change(func() { h.running[u.GetName()] = phase == "Running" })
}

// await watches until each node has a Ready pod other than before and its
// GPUNode is Running.
func (h *hosts) await(ctx context.Context, nodes []string, before map[string]hostPod) error {
	for {
		h.mu.Lock()
		left := slices.ContainsFunc(nodes, func(n string) bool {
			p, ok := h.ready[n]
			return !ok || p.uid == before[n].uid || !h.running[n]
		})
		h.mu.Unlock()
		if !left {
			return nil
		}
		select {
		case <-h.changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// follow opens the two watches.
func (w *world) follow(ctx context.Context) *hosts {
	w.b.Helper()
	h := &hosts{ready: map[string]hostPod{}, running: map[string]bool{}, changed: make(chan struct{}, 1)}
	pods := informers.NewSharedInformerFactoryWithOptions(w.kube, 0, informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = hypervisor }))
	custom := dynamicinformer.NewDynamicSharedInformerFactory(w.dynamic, 0)
	_, err := pods.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { h.pod(o.(*corev1.Pod), false) },
		UpdateFunc: func(_, o any) { h.pod(o.(*corev1.Pod), false) },
		DeleteFunc: func(o any) {
			if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			h.pod(o.(*corev1.Pod), true)
		},
	})
	require.NoError(w.b, err)
	_, err = custom.ForResource(gpuNodes).Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { h.gpuNode(o.(*unstructured.Unstructured)) },
		UpdateFunc: func(_, o any) { h.gpuNode(o.(*unstructured.Unstructured)) },
	})
	require.NoError(w.b, err)
	pods.Start(ctx.Done())
	custom.Start(ctx.Done())
	pods.WaitForCacheSync(ctx.Done())
	custom.WaitForCacheSync(ctx.Done())
	return h
}

// floor rolls the pool in the same batches with nothing but client-go: no
// record, no question, no proof beyond Ready and Running. It returns how long
// that took, from the first list on.
func (w *world) floor() time.Duration {
	w.b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), floorLimit)
	defer cancel()
	began := time.Now()
	h := w.follow(ctx)
	before := map[string]hostPod{}
	require.NoError(w.b, h.await(ctx, w.nodes, before), "the pool is healthy")
	batches := [][]string{w.nodes[:1]}
	batches = slices.AppendSeq(batches, slices.Chunk(w.nodes[1:], w.batch()))
	for _, batch := range batches {
		h.mu.Lock()
		for _, n := range batch {
			before[n] = h.ready[n]
		}
		h.mu.Unlock()
		require.NoError(w.b, deletePods(ctx, w.kube, batch, before))
		require.NoError(w.b, h.await(ctx, batch, before))
		// The agents' validation, which all hosts of a batch do side by side.
		select {
		case <-time.After(validateTakes):
		case <-ctx.Done():
			w.b.Fatal(ctx.Err())
		}
	}
	return time.Since(began)
}

func deletePods(ctx context.Context, kube kubernetes.Interface, nodes []string, pods map[string]hostPod) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(inFlight)
	for _, n := range nodes {
		p := pods[n]
		group.Go(func() error {
			return kube.CoreV1().Pods(namespace).Delete(ctx, p.name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.uid}})
		})
	}
	return group.Wait()
}
