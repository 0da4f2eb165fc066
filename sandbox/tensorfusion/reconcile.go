package tensorfusion

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

const managedName = "tensor-fusion"

func reference(kind, name string, uid types.UID, controller bool) metav1.OwnerReference {
	return metav1.OwnerReference{
		APIVersion: group + "/v1", Kind: kind, Name: name, UID: uid,
		Controller: ptr.To(controller), BlockOwnerDeletion: ptr.To(controller),
	}
}

func newObject(kind, name string, spec map[string]any) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": group + "/v1", "kind": kind}}
	if spec != nil {
		u.Object["spec"] = spec
	}
	u.SetName(name)
	return u
}

// poolCache keeps decoded pools: every node asks for its own.
type poolCache struct {
	mu    sync.Mutex
	pools map[string]decodedPool
}

type decodedPool struct {
	version string
	pool    machine.Pool
}

// pool is nil when the GPUPool does not exist. Its contents are shared: read only.
func (d *Double) pool(name string) (*machine.Pool, error) {
	u, ok := d.caches.get(poolResource, name)
	if !ok {
		return nil, nil
	}
	d.pools.mu.Lock()
	defer d.pools.mu.Unlock()
	if found, ok := d.pools.pools[name]; ok && found.version == u.GetResourceVersion() {
		return &found.pool, nil
	}
	decoded, err := decodePool(u)
	if err != nil {
		return nil, err
	}
	if d.pools.pools == nil {
		d.pools.pools = map[string]decodedPool{}
	}
	d.pools.pools[name] = decodedPool{u.GetResourceVersion(), decoded}
	return &decoded, nil
}

func (d *Double) allPools() ([]machine.Pool, error) {
	var pools []machine.Pool
	for _, u := range d.caches.list(poolResource) {
		p, err := d.pool(u.GetName())
		if err != nil {
			return nil, err
		}
		if p != nil {
			pools = append(pools, *p)
		}
	}
	return pools, nil
}

// provider is the ProviderConfig of a pool's vendor; nil without one.
func (d *Double) provider(pool *machine.Pool) (*machine.Provider, error) {
	for _, u := range d.caches.list(providerResource) {
		p, err := decodeProvider(u)
		if err != nil {
			return nil, err
		}
		if p.Serves(pool) {
			return &p, nil
		}
	}
	return nil, nil
}

// writeStatus replaces fields of an object's status; the cached version must
// still be the live one. It writes nothing when nothing changes.
func (d *Double) writeStatus(ctx context.Context, r schema.GroupVersionResource, u *unstructured.Unstructured, fields map[string]any) error {
	status, _, err := unstructured.NestedMap(u.Object, "status")
	if err != nil {
		return err
	}
	if status == nil {
		status = map[string]any{}
	}
	before, err := json.Marshal(status)
	if err != nil {
		return err
	}
	for key, value := range fields {
		if value == nil {
			delete(status, key)
		} else {
			status[key] = value
		}
	}
	after, err := json.Marshal(status)
	if err != nil || string(before) == string(after) {
		return err
	}
	changed := u.DeepCopy()
	changed.Object["status"] = status
	_, err = d.dynamic.Resource(r).Namespace(u.GetNamespace()).UpdateStatus(ctx, changed, metav1.UpdateOptions{})
	return err
}

// annotate merges annotations under the cached version and returns the object
// as it then is.
func (d *Double) annotate(ctx context.Context, r schema.GroupVersionResource, u *unstructured.Unstructured, annotations map[string]string) (*unstructured.Unstructured, error) {
	if len(annotations) == 0 {
		return u, nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations, "resourceVersion": u.GetResourceVersion()}})
	if err != nil {
		return nil, err
	}
	return d.dynamic.Resource(r).Patch(ctx, u.GetName(), types.MergePatchType, patch, metav1.PatchOptions{})
}

func (d *Double) deletePod(ctx context.Context, namespace, name, uid string) error {
	err := d.client.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(uid)})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

func (d *Double) reconcileProvider(ctx context.Context, p *process, key string) (time.Duration, error) {
	u, ok := d.caches.get(providerResource, key)
	if !ok {
		return 0, nil
	}
	provider, err := decodeProvider(u)
	if err != nil {
		return 0, err
	}
	pools, err := d.allPools()
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	r, err := p.ReconcileProvider(machine.ProviderView{Provider: provider, Pools: pools}, &p.memory)
	p.mu.Unlock()
	if err != nil {
		return 0, err
	}
	for name, annotations := range r.PoolAnnotations {
		pool, ok := d.caches.get(poolResource, name)
		if !ok {
			continue
		}
		if _, err := d.annotate(ctx, poolResource, pool, annotations); err != nil {
			return 0, err
		}
	}
	for _, name := range r.DeleteHypervisors {
		for _, n := range d.caches.indexed(nodeResource, byPool, name) {
			if pod := d.caches.pod(d.options.Namespace, p.Version.HypervisorName(n.GetName())); pod != nil {
				if err := d.deletePod(ctx, pod.Namespace, pod.Name, string(pod.UID)); err != nil {
					return 0, err
				}
			}
		}
	}
	_, err = d.annotate(ctx, providerResource, u, r.Annotations)
	return 0, err
}

func (d *Double) reconcileInventory(ctx context.Context, p *process, key string) (time.Duration, error) {
	selector, err := labels.Parse(p.selector)
	if err != nil {
		return 0, fmt.Errorf("INITIAL_GPU_NODE_LABEL_SELECTOR %q: %w", p.selector, err)
	}
	v := machine.InventoryView{Selector: selector}
	node := d.caches.node(key)
	if node != nil {
		v.Node = decodeNode(node)
	}
	if u, ok := d.caches.get(nodeResource, key); ok {
		v.GPUNode = ptr.To(decodeGPUNode(u))
	}
	if v.Pools, err = d.allPools(); err != nil {
		return 0, err
	}
	r := machine.ReconcileInventory(v)
	if r.Delete {
		return 0, d.deleteGPUNode(ctx, key)
	}
	if r.Create == "" {
		return 0, nil
	}
	pool, ok := d.caches.get(poolResource, r.Create)
	if !ok {
		return 0, nil
	}
	u := newObject("GPUNode", key, map[string]any{"manageMode": "Auto"})
	u.SetLabels(map[string]string{
		machine.ManagedByLabel: r.Create, machine.PoolLabelPrefix + r.Create: "true", machine.VendorLabel: "NVIDIA",
	})
	u.SetOwnerReferences([]metav1.OwnerReference{reference("GPUPool", r.Create, pool.GetUID(), true)})
	_, err = d.dynamic.Resource(nodeResource).Create(ctx, u, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return 0, nil
	}
	return 0, err
}

func (d *Double) deleteGPUNode(ctx context.Context, name string) error {
	err := d.dynamic.Resource(nodeResource).Delete(ctx, name, metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func (d *Double) nodeView(version machine.Version, u *unstructured.Unstructured) (machine.NodeView, error) {
	v := machine.NodeView{GPUNode: decodeGPUNode(u)}
	if node := d.caches.node(u.GetName()); node != nil {
		v.Node = decodeNode(node)
	}
	var err error
	if v.Pool, err = d.pool(poolOf(u.GetLabels())); err != nil || v.Pool == nil {
		return v, err
	}
	if v.Provider, err = d.provider(v.Pool); err != nil {
		return v, err
	}
	if pod := d.caches.pod(d.options.Namespace, version.HypervisorName(u.GetName())); pod != nil {
		v.Pod = ptr.To(decodePod(pod))
	}
	for _, gpu := range d.caches.indexed(gpuResource, byNode, u.GetName()) {
		v.GPUs = append(v.GPUs, decodeGPU(gpu))
	}
	return v, nil
}

func (d *Double) reconcileNode(ctx context.Context, p *process, key string) (time.Duration, error) {
	u, ok := d.caches.get(nodeResource, key)
	if !ok {
		return 0, nil
	}
	v, err := d.nodeView(p.Version, u)
	if err != nil {
		return 0, err
	}
	r := p.ReconcileNode(v)
	switch {
	case r.DeleteGPUNode:
		return 0, d.deleteGPUNode(ctx, key)
	case r.DeletePod != "":
		d.log.Info("hypervisor deleted", "pod", v.Pod.Name, "reason", r.Reason)
		if r.Reason == machine.CrashLoop {
			d.event(ctx, u, r.Reason, fmt.Sprintf("pod %s restarted %d times", v.Pod.Name, v.Pod.Restarts))
		}
		if err := d.deletePod(ctx, v.Pod.Namespace, v.Pod.Name, r.DeletePod); err != nil {
			return 0, err
		}
	case r.Create != nil:
		if err := d.createHypervisor(ctx, u, v.Node, r.Create); err != nil && !apierrors.IsAlreadyExists(err) {
			return 0, err
		}
	}
	if r.Phase != "" {
		if err := d.writeStatus(ctx, nodeResource, u, nodeStatus(r.Phase, v.GPUs)); err != nil {
			return 0, err
		}
	}
	if r.GPUPhase != "" {
		patch := []byte(fmt.Sprintf(`{"status":{"phase":%q}}`, r.GPUPhase))
		for _, gpu := range v.GPUs {
			if gpu.Phase == r.GPUPhase {
				continue
			}
			_, err := d.dynamic.Resource(gpuResource).Patch(ctx, gpu.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
			if err != nil && !apierrors.IsNotFound(err) {
				return 0, err
			}
		}
	}
	return r.Requeue, r.Err
}

func nodeStatus(phase string, gpus []machine.GPU) map[string]any {
	fields := map[string]any{"phase": phase}
	if phase != machine.Running {
		return fields
	}
	var ids []any
	for _, gpu := range gpus {
		ids = append(ids, gpu.Name)
	}
	fields["totalGPUs"], fields["managedGPUs"], fields["managedGPUDeviceIDs"] = int64(len(gpus)), int64(len(gpus)), ids
	return fields
}

func (d *Double) createHypervisor(ctx context.Context, gpuNode *unstructured.Unstructured, node *machine.Node, pod *machine.NewPod) error {
	owners := []metav1.OwnerReference{reference("GPUNode", gpuNode.GetName(), gpuNode.GetUID(), true)}
	if live := d.caches.node(node.Name); live != nil {
		owners = append(owners, metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: live.Name, UID: live.UID})
	}
	object := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: pod.Name, Labels: pod.Labels, OwnerReferences: owners, Annotations: d.faults.annotations(node.Name),
		},
		Spec: pod.Spec,
	}
	_, err := d.client.CoreV1().Pods(d.options.Namespace).Create(ctx, object, metav1.CreateOptions{})
	return err
}

func (d *Double) event(ctx context.Context, u *unstructured.Unstructured, reason, message string) {
	now := metav1.NewTime(d.clock.Now())
	e := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{GenerateName: u.GetName() + ".", Namespace: d.options.Namespace},
		InvolvedObject: corev1.ObjectReference{
			APIVersion: u.GetAPIVersion(), Kind: u.GetKind(), Name: u.GetName(), UID: u.GetUID(), Namespace: d.options.Namespace,
		},
		Reason: reason, Message: message, Type: corev1.EventTypeWarning, FirstTimestamp: now, LastTimestamp: now, Count: 1,
		Source: corev1.EventSource{Component: managedName},
	}
	if _, err := d.client.CoreV1().Events(d.options.Namespace).Create(ctx, e, metav1.CreateOptions{}); err != nil && !errors.Is(err, context.Canceled) {
		d.log.Info("event not written", "reason", reason, "error", err.Error())
	}
}
