package tensorfusion

import (
	"context"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

const defaultPoolAnnotation = group + "/is-default-pool"

func ownedBy(u *unstructured.Unstructured, owner *unstructured.Unstructured) bool {
	for _, r := range u.GetOwnerReferences() {
		if r.UID == owner.GetUID() {
			return true
		}
	}
	return false
}

func (d *Double) reconcileCluster(ctx context.Context, p *process, key string) (time.Duration, error) {
	u, ok := d.caches.get(clusterResource, key)
	if !ok || u.GetDeletionTimestamp() != nil {
		return 0, nil
	}
	v := machine.ClusterView{Name: key}
	var spec struct {
		GPUPools []machine.Entry `json:"gpuPools"`
	}
	if err := decode(u, "spec", &spec); err != nil {
		return 0, err
	}
	v.Entries = spec.GPUPools
	live := map[string]*unstructured.Unstructured{}
	for _, owned := range d.caches.list(poolResource) {
		if !ownedBy(owned, u) {
			continue
		}
		pool, err := d.pool(owned.GetName())
		if err != nil {
			return 0, err
		}
		if pool != nil {
			live[owned.GetName()] = owned
			v.Pools = append(v.Pools, *pool)
		}
	}
	r, err := machine.ReconcileCluster(v)
	if err != nil {
		return 0, err
	}
	pools := d.dynamic.Resource(poolResource)
	for _, write := range r.Create {
		spec, err := encode(write.Spec)
		if err != nil {
			return 0, err
		}
		pool := newObject("GPUPool", write.Name, spec)
		pool.SetLabels(map[string]string{machine.ManagedByLabel: key})
		annotations, err := d.newPoolAnnotations(p, write)
		if err != nil {
			return 0, err
		}
		pool.SetAnnotations(annotations)
		pool.SetOwnerReferences([]metav1.OwnerReference{reference("TensorFusionCluster", key, u.GetUID(), true)})
		if _, err := pools.Create(ctx, pool, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return 0, err
		}
	}
	for _, write := range r.Update {
		spec, err := encode(write.Spec)
		if err != nil {
			return 0, err
		}
		pool := live[write.Name].DeepCopy()
		pool.Object["spec"] = spec
		if _, err := pools.Update(ctx, pool, metav1.UpdateOptions{}); err != nil {
			return 0, err
		}
	}
	for _, name := range r.Delete {
		err := pools.Delete(ctx, name, metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)})
		if err != nil && !apierrors.IsNotFound(err) {
			return 0, err
		}
	}
	fields, err := d.clusterFields(u, r.Status)
	if err != nil {
		return 0, err
	}
	return r.Requeue, d.writeStatus(ctx, clusterResource, u, fields)
}

// newPoolAnnotations are what a pool is created with: a ProviderConfig that was
// there first is no change of the new pool's hypervisors.
func (d *Double) newPoolAnnotations(p *process, write machine.PoolWrite) (map[string]string, error) {
	annotations := map[string]string{}
	if write.IsDefault {
		annotations[defaultPoolAnnotation] = "true"
	}
	pool := machine.Pool{Name: write.Name, Spec: write.Spec}
	provider, err := d.provider(&pool)
	if err != nil || provider == nil {
		return annotations, err
	}
	var memory machine.Memory
	r, err := p.ReconcileProvider(machine.ProviderView{Provider: *provider, Pools: []machine.Pool{pool}}, &memory)
	for key, value := range r.PoolAnnotations[write.Name] {
		annotations[key] = value
	}
	return annotations, err
}

// clusterFields adds the conditions that follow from the phase.
func (d *Double) clusterFields(u *unstructured.Unstructured, s machine.ClusterStatus) (map[string]any, error) {
	fields := map[string]any{"totalNodes": nil, "totalGPUs": nil, "totalPools": nil, "readyGPUPools": nil, "notReadyGPUPools": nil}
	written, err := encode(s)
	if err != nil {
		return nil, err
	}
	for key, value := range written {
		fields[key] = value
	}
	var conditions []metav1.Condition
	var status struct {
		Conditions []metav1.Condition `json:"conditions"`
	}
	if err := decode(u, "status", &status); err != nil {
		return nil, err
	}
	ready := metav1.ConditionFalse
	if s.Phase == machine.Running {
		ready = metav1.ConditionTrue
	}
	for _, want := range []metav1.Condition{
		{Type: "Ready", Status: ready}, {Type: "GPUPoolReady", Status: ready}, {Type: "TimeSeriesDatabaseReady", Status: metav1.ConditionTrue},
	} {
		want.Reason, want.LastTransitionTime = "Checked", metav1.NewTime(d.clock.Now().UTC().Truncate(time.Second))
		for _, have := range status.Conditions {
			if have.Type == want.Type && have.Status == want.Status {
				want = have
			}
		}
		conditions = append(conditions, want)
	}
	encoded, err := encode(map[string]any{"conditions": conditions})
	if err != nil {
		return nil, err
	}
	fields["conditions"] = encoded["conditions"]
	return fields, nil
}

func (d *Double) reconcilePool(ctx context.Context, p *process, key string) (time.Duration, error) {
	u, ok := d.caches.get(poolResource, key)
	if !ok || u.GetDeletionTimestamp() != nil {
		return 0, nil
	}
	begin := d.clock.Now()
	v, err := d.poolView(p.Version, key)
	if err != nil {
		return 0, err
	}
	r := p.ReconcilePool(v, d.clock.Now())
	d.pace.took(d.clock.Since(begin))
	if u, err = d.annotate(ctx, poolResource, u, r.Annotations); err != nil {
		return 0, err
	}
	if err := d.setPending(ctx, r.SetPending); err != nil {
		return 0, err
	}
	for _, name := range r.ClearWorkloads {
		if w, ok := d.caches.get(workloadResource, name); ok {
			if err := d.writeStatus(ctx, workloadResource, w, map[string]any{"podTemplateHash": nil}); err != nil {
				return 0, err
			}
		}
	}
	for _, pod := range r.DeleteClients {
		if err := d.deletePod(ctx, pod.Namespace, pod.Name, pod.UID); err != nil {
			return 0, err
		}
	}
	fields, err := encode(r.Status)
	if err != nil {
		return 0, err
	}
	for _, optional := range []string{"totalNodes", "totalGPUs", "runningAppsCnt"} {
		if _, ok := fields[optional]; !ok {
			fields[optional] = nil
		}
	}
	if err := d.writeStatus(ctx, poolResource, u, fields); err != nil {
		return 0, err
	}
	if r.Requeue == 0 && v.Pool.Status.Components.Hypervisor == "" {
		return firstLook, r.Err
	}
	return r.Requeue, r.Err
}

// firstLook wakes a new pool once more: it has stored its hashes and stopped
// (rule 8). In a real cluster the nodes that come up wake it; here they may all
// be up already, and the pool would never reach 100 and synced (rule 29).
const firstLook = time.Second

// setPending starts a batch. Its writes go side by side: a batch of a thousand
// nodes would otherwise begin with a minute of them.
func (d *Double) setPending(ctx context.Context, names []string) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(d.options.Concurrency)
	for _, name := range names {
		u, ok := d.caches.get(nodeResource, name)
		if !ok {
			continue
		}
		group.Go(func() error {
			return d.writeStatus(ctx, nodeResource, u, map[string]any{"phase": machine.Pending})
		})
	}
	return group.Wait()
}

func (d *Double) poolView(version machine.Version, name string) (machine.PoolView, error) {
	pool, err := d.pool(name)
	if err != nil || pool == nil {
		return machine.PoolView{}, err
	}
	v := machine.PoolView{Pool: *pool}
	for _, u := range d.caches.indexed(nodeResource, byPool, name) {
		n := machine.PoolNode{GPUNode: decodeGPUNode(u)}
		if node := d.caches.node(u.GetName()); node != nil {
			n.Node = decodeNode(node)
		}
		if pod := d.caches.pod(d.options.Namespace, version.HypervisorName(u.GetName())); pod != nil {
			n.Pod = ptr.To(decodePod(pod))
		}
		v.Nodes = append(v.Nodes, n)
		for _, gpu := range d.caches.indexed(gpuResource, byNode, u.GetName()) {
			v.GPUs = append(v.GPUs, decodeGPU(gpu))
		}
	}
	for _, u := range d.caches.indexed(workloadResource, byPool, name) {
		w, err := decodeWorkload(u)
		if err != nil {
			return v, err
		}
		v.Workloads = append(v.Workloads, w)
	}
	for _, pod := range d.caches.podsBy(byClients, name) {
		if pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed {
			v.Clients = append(v.Clients, decodePod(pod))
		}
	}
	return v, nil
}

// splitKey is namespace and name of a queue's key.
func splitKey(key string) (namespace, name string) {
	namespace, name, _ = strings.Cut(key, "/")
	return namespace, name
}
