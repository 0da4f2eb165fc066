package tensorfusion

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

// Model is the GPU that every simulated node has unless its Node names another
// in the label nvidia.com/gpu.product.
const Model = "NVIDIA H100 80GB HBM3"

const productLabel = "nvidia.com/gpu.product"

// DeviceUUID is the UUID of a simulated GPU, always the same for a node and an
// index. Kubernetes names are lower case, and so is the UUID.
func DeviceUUID(node string, index int) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d", node, index))
	return fmt.Sprintf("gpu-%x-%x-%x-%x-%x", sum[0:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

// reconcileDevices is the hypervisor process of a node: once it is Ready it
// reports its devices as GPU objects. It does so without any controller.
func (d *Double) reconcileDevices(ctx context.Context, key string) (time.Duration, error) {
	u, ok := d.caches.get(nodeResource, key)
	if !ok || u.GetDeletionTimestamp() != nil {
		return 0, nil
	}
	if d.readyHypervisor(key) == nil {
		return 0, nil
	}
	node := d.caches.node(key)
	pool, err := d.pool(poolOf(u.GetLabels()))
	if err != nil {
		return 0, err
	}
	if node == nil || pool == nil {
		// Each cache fills on its own, and neither wakes this queue.
		return look, nil
	}
	have := map[string]bool{}
	for _, gpu := range d.caches.indexed(gpuResource, byNode, key) {
		// The controller may write a phase before the hypervisor wrote the rest.
		uuid, _, _ := unstructured.NestedString(gpu.Object, "status", "uuid")
		have[gpu.GetName()] = uuid != ""
	}
	model := node.Labels[productLabel]
	if model == "" {
		model = Model
	}
	tflops, vram, err := d.hardware(pool, model)
	if err != nil {
		return 0, err
	}
	for index := range d.options.GPUsPerNode {
		name := DeviceUUID(key, index)
		if have[name] {
			continue
		}
		gpu := newObject("GPU", name, nil)
		gpu.SetLabels(map[string]string{machine.ManagedByLabel: key, machine.PoolLabelPrefix + pool.Name: "true"})
		gpu.SetAnnotations(map[string]string{machine.LastSyncAnnotation: d.clock.Now().UTC().Format(time.RFC3339)})
		gpu.SetOwnerReferences([]metav1.OwnerReference{reference("GPUNode", key, u.GetUID(), true)})
		created, err := d.dynamic.Resource(gpuResource).Create(ctx, gpu, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			created, err = d.dynamic.Resource(gpuResource).Get(ctx, name, metav1.GetOptions{})
		}
		if err != nil {
			return 0, err
		}
		resources := map[string]any{"tflops": tflops, "vram": vram}
		created.Object["status"] = map[string]any{
			"phase": machine.Running, "uuid": name, "gpuModel": model, "vendor": "NVIDIA", "index": int64(index),
			"capacity": resources, "available": resources, "usedBy": managedName,
			"nodeSelector": map[string]any{"kubernetes.io/hostname": key},
		}
		if _, err := d.dynamic.Resource(gpuResource).UpdateStatus(ctx, created, metav1.UpdateOptions{}); err != nil {
			return 0, err
		}
	}
	return 0, nil
}

// readyHypervisor is a Ready hypervisor pod on the node, of either name.
func (d *Double) readyHypervisor(node string) *machine.Pod {
	for _, version := range []machine.Version{machine.Newest, {Major: 2}} {
		if p := d.caches.pod(d.options.Namespace, version.HypervisorName(node)); p != nil && podReady(p) {
			pod := decodePod(p)
			return &pod
		}
	}
	return nil
}

// hardware looks the model up as a hypervisor does; what nobody describes gets
// the capacity of Model.
func (d *Double) hardware(pool *machine.Pool, model string) (tflops, vram string, err error) {
	tflops, vram = "989", "80Gi"
	provider, err := d.provider(pool)
	if err != nil || provider == nil {
		return tflops, vram, err
	}
	for _, h := range provider.Spec.HardwareMetadata {
		if h.FullModelName != model {
			continue
		}
		if h.FP16TFlops != nil {
			tflops = h.FP16TFlops.String()
		}
		if h.VRAM != nil {
			vram = h.VRAM.String()
		}
	}
	return tflops, vram, nil
}
