package tensorfusion

import (
	"context"
	"sync"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

// route sends every event to the reconcilers that the real controller wakes
// for it, and to no other: that a GPUNode does not hear of its pool is part of
// the behaviour.
func (d *Double) route() {
	on := func(i cache.SharedIndexInformer, handle func(o any)) {
		_, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    handle,
			UpdateFunc: func(_, o any) { handle(o) },
			DeleteFunc: func(o any) {
				if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
					o = gone.Obj
				}
				handle(o)
			},
		})
		if err != nil {
			panic(err) // only on a stopped informer, and none has started
		}
	}
	object := func(r schema.GroupVersionResource, handle func(u *unstructured.Unstructured)) {
		on(d.caches.custom[r], func(o any) { handle(o.(*unstructured.Unstructured)) })
	}
	q := d.queues
	on(d.caches.nodes, func(o any) {
		name := o.(*corev1.Node).Name
		q.inventory.Add(name)
		q.nodes.Add(name)
	})
	on(d.caches.pods, func(o any) { d.routePod(o.(*corev1.Pod)) })
	object(clusterResource, func(u *unstructured.Unstructured) { q.clusters.Add(u.GetName()) })
	d.routePools()
	object(nodeResource, func(u *unstructured.Unstructured) {
		q.nodes.Add(u.GetName())
		q.devices.Add(u.GetName())
		q.pools.AddAfter(poolOf(u.GetLabels()), d.pace.wait())
	})
	object(gpuResource, func(u *unstructured.Unstructured) { q.nodes.Add(u.GetLabels()[machine.ManagedByLabel]) })
	object(providerResource, func(u *unstructured.Unstructured) { q.providers.Add(u.GetName()) })
	object(workloadResource, func(u *unstructured.Unstructured) { q.workloads.Add(u.GetNamespace() + "/" + u.GetName()) })
	object(connectionResource, func(u *unstructured.Unstructured) {
		q.connections.Add(u.GetNamespace() + "/" + u.GetName())
		name, _, _ := unstructured.NestedString(u.Object, "spec", "workloadName")
		q.workloads.Add(u.GetNamespace() + "/" + name)
	})
	on(d.caches.webhooks, func(o any) {
		q.webhooks.Add(o.(*admissionregistrationv1.MutatingWebhookConfiguration).Name)
	})
	on(d.caches.claims, func(o any) {
		c := o.(*corev1.PersistentVolumeClaim)
		q.claims.Add(c.Namespace + "/" + c.Name)
	})
}

func (d *Double) routePod(p *corev1.Pod) {
	switch {
	case p.Labels[machine.ComponentLabel] == "hypervisor" && p.Namespace == d.options.Namespace:
		d.queues.nodes.Add(p.Spec.NodeName)
		d.queues.devices.Add(p.Spec.NodeName)
	case isWorker(p):
		key := p.Namespace + "/" + p.Labels[machine.WorkloadLabel]
		d.queues.workloads.Add(key)
		for _, c := range d.caches.indexed(connectionResource, byWorkload, key) {
			d.queues.connections.Add(c.GetNamespace() + "/" + c.GetName())
		}
	}
}

// poolSeen is what tells a change of a pool from a change of its status.
type poolSeen struct {
	generation int64
	revisions  string
}

// routePools sends a pool's status to its cluster only: the pool does not wake
// for what it wrote itself, which is why a step takes its requeue of 3 s even
// with a shorter interval (rule 17). The inventory of all Nodes and the
// ProviderConfigs wake when the pool's selection may have changed.
func (d *Double) routePools() {
	seen := map[string]poolSeen{}
	var mu sync.Mutex
	handle := func(u *unstructured.Unstructured, gone bool) {
		for _, owner := range u.GetOwnerReferences() {
			d.queues.clusters.AddAfter(owner.Name, settle)
		}
		now := poolSeen{u.GetGeneration(), u.GetAnnotations()[machine.RevisionsAnnotation]}
		mu.Lock()
		before := seen[u.GetName()]
		seen[u.GetName()] = now
		if gone {
			delete(seen, u.GetName())
		}
		mu.Unlock()
		if gone || before != now {
			d.queues.pools.AddAfter(u.GetName(), settle)
		}
		if !gone && before.generation == now.generation {
			return
		}
		for _, name := range d.caches.custom[providerResource].GetStore().ListKeys() {
			d.queues.providers.Add(name)
		}
		for _, name := range d.caches.nodes.GetStore().ListKeys() {
			d.queues.inventory.Add(name)
		}
	}
	_, err := d.caches.custom[poolResource].AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { handle(o.(*unstructured.Unstructured), false) },
		UpdateFunc: func(_, o any) { handle(o.(*unstructured.Unstructured), false) },
		DeleteFunc: func(o any) {
			if u, ok := o.(*unstructured.Unstructured); ok {
				handle(u, true)
			}
		},
	})
	if err != nil {
		panic(err) // only on a stopped informer, and none has started
	}
}

// heartbeat is how often a kubelet reports its Node. Fake nodes report
// nothing, but GPUNodes without any other event wait for just that (rules 24
// and 30).
const heartbeat = 10 * time.Second

func (d *Double) runHeartbeats(ctx context.Context) error {
	ticker := d.clock.NewTicker(heartbeat)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
			for _, name := range d.caches.custom[nodeResource].GetStore().ListKeys() {
				d.queues.nodes.Add(name)
			}
		}
	}
}

// startProcess is the first pass of a new process. The real reconcilers race
// here; the double lets the nodes win, which is the worst order that was seen
// (rule 24): whatever a pool would have held back is not held back yet.
func (d *Double) startProcess(ctx context.Context, p *process) {
	pass := func(handle reconciler, keys []string, workers int) {
		work := make(chan string)
		var group sync.WaitGroup
		for range workers {
			group.Add(1)
			go func() {
				defer group.Done()
				for key := range work {
					if _, err := handle(ctx, p, key); err != nil && ctx.Err() == nil {
						d.log.Info("first reconcile failed", "key", key, "error", err.Error())
					}
				}
			}()
		}
		for _, key := range keys {
			work <- key
		}
		close(work)
		group.Wait()
	}
	keys := func(r schema.GroupVersionResource) []string { return d.caches.custom[r].GetStore().ListKeys() }
	pass(d.reconcileProvider, keys(providerResource), 1)
	pass(d.reconcileNode, keys(nodeResource), d.options.Concurrency)
}

// enqueueAll is what the watches of a new process bring.
func (d *Double) enqueueAll() {
	for _, each := range []struct {
		queue    queue
		resource schema.GroupVersionResource
	}{
		{d.queues.providers, providerResource}, {d.queues.clusters, clusterResource}, {d.queues.pools, poolResource},
		{d.queues.nodes, nodeResource}, {d.queues.workloads, workloadResource}, {d.queues.connections, connectionResource},
	} {
		for _, key := range d.caches.custom[each.resource].GetStore().ListKeys() {
			each.queue.Add(key)
		}
	}
	for _, name := range d.caches.nodes.GetStore().ListKeys() {
		d.queues.inventory.Add(name)
	}
}
