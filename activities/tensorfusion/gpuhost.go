package tensorfusion

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/refit-run/refit/activities/kube"
)

// GPUHostActivity tells what the agent of one node cannot see of TensorFusion.
const GPUHostActivity = "tensorfusion.GPUHost"

// GPUHostRequest names a node of any cluster, with TensorFusion or without.
type GPUHostRequest struct {
	Target kube.Target `json:"target"`
	Node   string      `json:"node"`
}

// GPUHostResult is what the pool and the API server say of the node.
type GPUHostResult struct {
	// Port is the hypervisor's, of the pool that has the node; 0 where none has.
	Port int `json:"port,omitempty"`
	// Pods are the live client pods of the node, as namespace/name; not nil.
	Pods []string `json:"pods"`
}

// GPUHost reads the node's pool and its client pods.
func (a *Activities) GPUHost(ctx context.Context, r GPUHostRequest) (GPUHostResult, error) {
	out := GPUHostResult{Pods: []string{}}
	c, err := a.Clusters.Connect(ctx, r.Target)
	if err != nil {
		return out, err
	}
	what := "TensorFusion on node " + r.Node
	nodes, err := namedBy(ctx, c, gpuNodesGVR, metav1.ListOptions{FieldSelector: "metadata.name=" + r.Node})
	if err != nil || len(nodes) == 0 {
		return out, kube.Wrap(err, what)
	}
	pools, err := namedBy(ctx, c, poolsGVR, metav1.ListOptions{})
	if err != nil {
		return out, kube.Wrap(err, what)
	}
	for _, p := range pools {
		if nodes[0].GetLabels()[poolLabel(p.GetName())] != "true" {
			continue
		}
		var pool FusionPool
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(p.Object, &pool); err != nil {
			return out, kube.Wrap(err, "GPUPool/"+p.GetName())
		}
		out.Port = int(pool.Spec.Port())
		break
	}
	pods, err := c.Typed.CoreV1().Pods("").List(ctx, metav1.ListOptions{LabelSelector: clientPods, FieldSelector: "spec.nodeName=" + r.Node})
	if err != nil {
		return out, kube.Wrap(err, what)
	}
	for _, p := range pods.Items {
		if p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			out.Pods = append(out.Pods, p.Namespace+"/"+p.Name)
		}
	}
	slices.Sort(out.Pods)
	return out, nil
}
