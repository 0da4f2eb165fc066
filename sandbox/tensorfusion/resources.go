package tensorfusion

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

const group = "tensor-fusion.ai"

func custom(plural string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: group, Version: "v1", Resource: plural}
}

var (
	clusterResource    = custom("tensorfusionclusters")
	poolResource       = custom("gpupools")
	nodeResource       = custom("gpunodes")
	gpuResource        = custom("gpus")
	providerResource   = custom("providerconfigs")
	workloadResource   = custom("tensorfusionworkloads")
	connectionResource = custom("tensorfusionconnections")
	crdResource        = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
)

var customResources = []schema.GroupVersionResource{
	clusterResource, poolResource, nodeResource, gpuResource, providerResource, workloadResource, connectionResource,
}

// decode reads one top-level field of an object into a struct.
func decode(u *unstructured.Unstructured, field string, into any) error {
	value, ok := u.Object[field]
	if !ok {
		return nil
	}
	data, err := json.Marshal(value)
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %s: %w", u.GetKind(), u.GetName(), field, err)
	}
	return nil
}

// encode is the reverse of decode.
func encode(from any) (map[string]any, error) {
	data, err := json.Marshal(from)
	if err != nil {
		return nil, err
	}
	var value map[string]any
	return value, json.Unmarshal(data, &value)
}

func decodePool(u *unstructured.Unstructured) (machine.Pool, error) {
	p := machine.Pool{Name: u.GetName(), Annotations: u.GetAnnotations()}
	if err := decode(u, "spec", &p.Spec); err != nil {
		return p, err
	}
	return p, decode(u, "status", &p.Status)
}

func decodeGPUNode(u *unstructured.Unstructured) machine.GPUNode {
	phase, _, _ := unstructured.NestedString(u.Object, "status", "phase")
	return machine.GPUNode{
		Name: u.GetName(), Labels: u.GetLabels(), Created: u.GetCreationTimestamp().Time,
		Deleting: u.GetDeletionTimestamp() != nil, Phase: phase,
	}
}

// poolOf is the pool that a GPUNode is labelled for.
func poolOf(labels map[string]string) string {
	for key, value := range labels {
		if pool, ok := strings.CutPrefix(key, machine.PoolLabelPrefix); ok && value == "true" {
			return pool
		}
	}
	return ""
}

func decodeGPU(u *unstructured.Unstructured) machine.GPU {
	g := machine.GPU{Name: u.GetName(), Missing: u.GetAnnotations()[machine.GPUMissingAnnotation] != ""}
	g.Phase, _, _ = unstructured.NestedString(u.Object, "status", "phase")
	quantity := func(field string) resource.Quantity {
		text, _, _ := unstructured.NestedFieldNoCopy(u.Object, "status", "capacity", field)
		q, err := resource.ParseQuantity(fmt.Sprint(text))
		if err != nil {
			return resource.Quantity{}
		}
		return q
	}
	g.TFlops, g.VRAM = quantity("tflops"), quantity("vram")
	return g
}

func decodeProvider(u *unstructured.Unstructured) (machine.Provider, error) {
	p := machine.Provider{Name: u.GetName(), Annotations: u.GetAnnotations()}
	return p, decode(u, "spec", &p.Spec)
}

func decodeWorkload(u *unstructured.Unstructured) (machine.Workload, error) {
	w := machine.Workload{Namespace: u.GetNamespace(), Name: u.GetName(), Created: u.GetCreationTimestamp().Time}
	if replicas, ok, err := unstructured.NestedInt64(u.Object, "spec", "replicas"); err == nil && ok {
		n := int32(replicas)
		w.Replicas = &n
	}
	spec, err := json.Marshal(u.Object["spec"])
	if err != nil {
		return w, err
	}
	w.Spec = spec
	return w, decode(u, "status", &w.Status)
}

func decodeNode(n *corev1.Node) *machine.Node {
	return &machine.Node{
		Name: n.Name, Labels: n.Labels, Deleting: n.DeletionTimestamp != nil, Unschedulable: n.Spec.Unschedulable,
		Ready: slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}),
	}
}

func podReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

func decodePod(p *corev1.Pod) machine.Pod {
	pod := machine.Pod{
		Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Created: p.CreationTimestamp.Time,
		Hash: p.Labels[machine.HashLabel], Phase: p.Status.Phase, Ready: podReady(p),
		Terminating: p.DeletionTimestamp != nil,
	}
	for _, c := range p.Status.ContainerStatuses {
		pod.Restarts = max(pod.Restarts, c.RestartCount)
	}
	if len(p.Spec.Containers) > 0 {
		pod.Args = p.Spec.Containers[0].Args
	}
	return pod
}
