package tensorfusion

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/refit-run/refit/activities/kube"
)

// GPUHostsActivity tells what the agents of nodes cannot see of TensorFusion.
const GPUHostsActivity = "tensorfusion.GPUHosts"

// GPUHostsRequest names nodes of any cluster, with TensorFusion or without. The
// answer for 200 full nodes is about a megabyte: ask for no more at once.
type GPUHostsRequest struct {
	Target kube.Target `json:"target"`
	Nodes  []string    `json:"nodes"`
}

// GPUHostsResult is what the pools and the API server say, by node.
type GPUHostsResult struct {
	Hosts map[string]GPUHost `json:"hosts"`
}

// GPUHost is what is known of one node.
type GPUHost struct {
	// Port is the hypervisor's, of the pool that has the node; 0 where none has.
	Port int `json:"port,omitempty"`
	// Pods are the live client pods of the node, as namespace/name; not nil.
	Pods []string `json:"pods"`
}

// GPUHosts reads the pool of each node and its client pods.
func (a *Activities) GPUHosts(ctx context.Context, r GPUHostsRequest) (GPUHostsResult, error) {
	defer pulse(ctx, nil)()
	out := GPUHostsResult{Hosts: make(map[string]GPUHost, len(r.Nodes))}
	for _, n := range r.Nodes {
		out.Hosts[n] = GPUHost{Pods: []string{}}
	}
	c, err := a.Clusters.Connect(ctx, r.Target)
	if err != nil {
		return out, err
	}
	const what = "TensorFusion on the nodes"
	var byName, onNode metav1.ListOptions
	if len(r.Nodes) == 1 { // spares listing a whole fleet for one
		byName.FieldSelector, onNode.FieldSelector = "metadata.name="+r.Nodes[0], "spec.nodeName="+r.Nodes[0]
	}
	nodes, err := namedBy(ctx, c, gpuNodesGVR, byName)
	if err != nil {
		return out, kube.Wrap(err, what)
	}
	ours := make(map[string]GPUHost, len(r.Nodes))
	pools, err := namedBy(ctx, c, poolsGVR, metav1.ListOptions{})
	if err != nil {
		return out, kube.Wrap(err, what)
	}
	for _, n := range nodes {
		h, asked := out.Hosts[n.GetName()]
		if !asked {
			continue
		}
		if h.Port, err = portOf(n, pools); err != nil {
			return out, err
		}
		ours[n.GetName()] = h
	}
	if len(ours) == 0 {
		return out, nil
	}
	onNode.LabelSelector = clientPods
	pods, err := c.Typed.CoreV1().Pods("").List(ctx, onNode)
	if err != nil {
		return out, kube.Wrap(err, what)
	}
	for _, p := range pods.Items {
		h, known := ours[p.Spec.NodeName]
		if known && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			h.Pods = append(h.Pods, p.Namespace+"/"+p.Name)
			ours[p.Spec.NodeName] = h
		}
	}
	for n, h := range ours {
		slices.Sort(h.Pods)
		out.Hosts[n] = h
	}
	return out, nil
}

// portOf is the hypervisor's port by the pool that has the node.
func portOf(node unstructured.Unstructured, pools []unstructured.Unstructured) (int, error) {
	for _, p := range pools {
		if node.GetLabels()[poolLabel(p.GetName())] != "true" {
			continue
		}
		var pool FusionPool
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(p.Object, &pool); err != nil {
			return 0, kube.Wrap(err, "GPUPool/"+p.GetName())
		}
		return int(pool.Spec.Port()), nil
	}
	return 0, nil
}
