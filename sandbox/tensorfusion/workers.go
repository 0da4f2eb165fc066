package tensorfusion

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilrand "k8s.io/apimachinery/pkg/util/rand"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

// createdPods are worker pods that were created but not yet seen by the cache:
// their names are random, so nothing else stops a second set.
type createdPods struct {
	mu   sync.Mutex
	uids map[string]map[string]bool // workload key -> UIDs
}

func (c *createdPods) add(key, uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.uids == nil {
		c.uids = map[string]map[string]bool{}
	}
	if c.uids[key] == nil {
		c.uids[key] = map[string]bool{}
	}
	c.uids[key][uid] = true
}

// pending forgets what the cache shows and reports whether any is left.
func (c *createdPods) pending(key string, seen []*corev1.Pod) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range seen {
		delete(c.uids[key], string(p.UID))
	}
	return len(c.uids[key]) > 0
}

// forget drops expectations that an API server restart may have made void.
func (c *createdPods) forget(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.uids, key)
}

// unseen is how long a created pod may stay out of the cache.
const unseen = 2 * time.Second

func workloadPool(u *unstructured.Unstructured) string {
	if pool := u.GetLabels()[machine.PoolLabel]; pool != "" {
		return pool
	}
	pool, _, _ := unstructured.NestedString(u.Object, "spec", "poolName")
	return pool
}

func (d *Double) reconcileWorkload(ctx context.Context, _ *process, key string) (time.Duration, error) {
	u, ok := d.caches.get(workloadResource, key)
	if !ok || u.GetDeletionTimestamp() != nil {
		return 0, nil
	}
	pods := d.caches.podsBy(byWorkload, key)
	if d.created.pending(key, pods) {
		d.created.forget(key)
		return unseen, nil
	}
	w, err := decodeWorkload(u)
	if err != nil {
		return 0, err
	}
	v := machine.WorkloadView{Workload: w}
	if v.Pool, err = d.pool(workloadPool(u)); err != nil {
		return 0, err
	}
	for _, p := range pods {
		v.Workers = append(v.Workers, decodePod(p))
	}
	for _, c := range d.caches.indexed(connectionResource, byWorkload, key) {
		v.Connections = append(v.Connections, decodeConnection(c))
	}
	r, err := machine.ReconcileWorkload(v)
	if err != nil {
		return 0, err
	}
	for _, p := range r.Delete {
		if err := d.deletePod(ctx, p.Namespace, p.Name, p.UID); err != nil {
			return 0, err
		}
	}
	names := r.CreateNamed
	for range r.Create {
		names = append(names, fmt.Sprintf("%s-tf-worker-%s", w.Name, utilrand.String(5)))
	}
	var requeue time.Duration
	placed := map[string]int{} // not yet in the cache
	for _, name := range names {
		node := d.chooseNode(v.Pool.Name, placed)
		if node == "" {
			requeue = statusCheck // no node has room now
			break
		}
		if err := d.createWorker(ctx, u, v.Pool, r.Hash, name, node); err != nil {
			return 0, err
		}
		placed[node]++
	}
	fields, err := encode(r.Status)
	if err != nil {
		return 0, err
	}
	return requeue, d.writeStatus(ctx, workloadResource, u, fields)
}

const statusCheck = 6 * time.Second

// chooseNode is the double's scheduler: the Running node of the pool with the
// fewest workers, the first by name among equals.
func (d *Double) chooseNode(pool string, placed map[string]int) string {
	best, fewest := "", 0
	for _, u := range d.caches.indexed(nodeResource, byPool, pool) {
		n := decodeGPUNode(u)
		if n.Phase != machine.Running || n.Deleting {
			continue
		}
		if node := d.caches.node(n.Name); node == nil || node.Spec.Unschedulable {
			continue
		}
		count := len(d.caches.podsBy(byWorkers, n.Name)) + placed[n.Name]
		if best == "" || count < fewest || count == fewest && n.Name < best {
			best, fewest = n.Name, count
		}
	}
	return best
}

func (d *Double) createWorker(ctx context.Context, workload *unstructured.Unstructured, pool *machine.Pool, hash, name, node string) error {
	provider, err := d.provider(pool)
	if err != nil {
		return err
	}
	spec, err := machine.ComposeWorker(&pool.Spec, provider, node)
	if err != nil {
		return err
	}
	created, err := d.client.CoreV1().Pods(workload.GetNamespace()).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name,
			Labels: map[string]string{
				machine.ComponentLabel: "worker", machine.WorkloadLabel: workload.GetName(), machine.HashLabel: hash,
			},
			Annotations:     map[string]string{machine.PoolLabel: pool.Name},
			OwnerReferences: []metav1.OwnerReference{reference("TensorFusionWorkload", workload.GetName(), workload.GetUID(), true)},
		},
		Spec: spec,
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	if err != nil {
		return err
	}
	d.created.add(workload.GetNamespace()+"/"+workload.GetName(), string(created.UID))
	return nil
}

func decodeConnection(u *unstructured.Unstructured) machine.Connection {
	worker, _, _ := unstructured.NestedString(u.Object, "status", "workerName")
	return machine.Connection{Name: u.GetName(), Worker: worker}
}

func (d *Double) reconcileConnection(ctx context.Context, _ *process, key string) (time.Duration, error) {
	u, ok := d.caches.get(connectionResource, key)
	if !ok || u.GetDeletionTimestamp() != nil {
		return 0, nil
	}
	name, _, err := unstructured.NestedString(u.Object, "spec", "workloadName")
	if err != nil {
		return 0, err
	}
	workload, ok := d.caches.get(workloadResource, u.GetNamespace()+"/"+name)
	if !ok {
		return statusCheck, nil
	}
	w, err := decodeWorkload(workload)
	if err != nil {
		return 0, err
	}
	var workers []machine.Pod
	for _, p := range d.caches.podsBy(byWorkload, w.Key()) {
		workers = append(workers, decodePod(p))
	}
	r := machine.ReconcileConnection(decodeConnection(u), w.Replicas == nil, workers, func(p machine.Pod) string {
		live := d.caches.pod(p.Namespace, p.Name)
		if live == nil {
			return ""
		}
		return fmt.Sprintf("%s+42+%s-%s", live.Status.PodIP, live.Name, live.ResourceVersion)
	})
	fields := map[string]any{"phase": r.Phase, "workerName": nil, "connectionURL": nil}
	if r.WorkerName != "" {
		// A worker's resourceVersion moves without the connection moving.
		before, _, _ := unstructured.NestedString(u.Object, "status", "workerName")
		if before == r.WorkerName {
			r.ConnectionURL, _, _ = unstructured.NestedString(u.Object, "status", "connectionURL")
		}
		fields["workerName"], fields["connectionURL"] = r.WorkerName, r.ConnectionURL
	}
	return 0, d.writeStatus(ctx, connectionResource, u, fields)
}
