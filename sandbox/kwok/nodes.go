package kwok

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	toolswatch "k8s.io/client-go/tools/watch"

	"github.com/refit-run/refit/sandbox/folder"
)

// Labels of the sandbox's nodes.
const (
	// PoolLabel holds the pool's name; pool selectors use it.
	PoolLabel = "refit.sandbox/pool"
	// GPULabel is what the NVIDIA GPU operator sets on a node with GPUs.
	GPULabel = "nvidia.com/gpu.present"
)

// zones are given out in turn.
var zones = []string{"zone-a", "zone-b", "zone-c"}

// kubeletVersion is what the nodes claim to run.
const kubeletVersion = "v1.37.2"

// parallel bounds the writes at start.
const parallel = 16

// systemPool and systemNodes describe the nodes without GPUs, on which the
// scheduler puts controllers and applications.
const (
	systemPool  = "system"
	systemNodes = 2
)

// Node names the i-th node of a pool, from 0.
func Node(pool string, i int) string { return fmt.Sprintf("%s-%03d", pool, i) }

// Nodes lists the nodes of all pools in the order in which they are made.
func Nodes(pools []folder.Pool) []string {
	var names []string
	for _, p := range pools {
		for i := range p.Nodes {
			names = append(names, Node(p.Name, i))
		}
	}
	return names
}

// Addresses maps the address of every node with GPUs to its name.
func Addresses(pools []folder.Pool, ports folder.Ports) (map[string]string, error) {
	addresses := map[string]string{}
	for i, name := range Nodes(pools) {
		ip, err := ports.NodeIP(i)
		if err != nil {
			return nil, err
		}
		addresses[ip.String()] = name
	}
	return addresses, nil
}

// CreateNodes makes the nodes that do not exist yet: those with GPUs of every
// pool, and a few without.
func CreateNodes(ctx context.Context, kube kubernetes.Interface, pools []folder.Pool, ports folder.Ports) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	index := 0
	for _, pool := range append(slices.Clone(pools), folder.Pool{Name: systemPool, Nodes: systemNodes}) {
		for i := range pool.Nodes {
			ip, err := ports.NodeIP(index)
			if err != nil {
				return err
			}
			node := fakeNode(Node(pool.Name, i), zones[index%len(zones)], ip)
			if pool.Name != systemPool {
				addGPUs(node, pool.Name)
			}
			index++
			group.Go(func() error {
				_, err := kube.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
				if err != nil && !apierrors.IsAlreadyExists(err) {
					return fmt.Errorf("node %s: %w", node.Name, err)
				}
				return nil
			})
		}
	}
	return group.Wait()
}

// BootID is that of the boot in which every fake host is, to its kubelet and to
// its agent. It is derived from the name: a restarted sandbox has the same hosts.
func BootID(node string) string {
	sum := sha256.Sum256([]byte("boot/" + node))
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[0:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

func fakeNode(name, zone string, ip netip.Addr) *corev1.Node {
	size := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("192"), corev1.ResourceMemory: resource.MustParse("2Ti"),
		corev1.ResourcePods: resource.MustParse("250"),
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Annotations: map[string]string{NodeAnnotation: "fake"},
			Labels: map[string]string{
				corev1.LabelHostname: name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64",
				corev1.LabelTopologyZone: zone, corev1.LabelTopologyRegion: "region-1",
			},
		},
		Status: corev1.NodeStatus{
			Capacity: size, Allocatable: size,
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: ip.String()},
				// The kubelet server of all fake nodes.
				{Type: corev1.NodeExternalIP, Address: "127.0.0.1"},
				{Type: corev1.NodeHostName, Address: name},
			},
			NodeInfo: corev1.NodeSystemInfo{
				Architecture: "amd64", OperatingSystem: "linux", KernelVersion: "6.8.0-sandbox",
				BootID: BootID(name), OSImage: "Refit sandbox", ContainerRuntimeVersion: "containerd://2.1.0", KubeletVersion: kubeletVersion,
			},
		},
	}
}

// addGPUs makes a node one of a pool. Pods that need no GPU prefer others.
func addGPUs(node *corev1.Node, pool string) {
	node.Labels[PoolLabel], node.Labels[GPULabel] = pool, "true"
	node.Spec.Taints = []corev1.Taint{{Key: GPULabel, Value: "true", Effect: corev1.TaintEffectPreferNoSchedule}}
	node.Status.Capacity["nvidia.com/gpu"] = resource.MustParse("8")
	node.Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("8")
}

// IsReady reports the node's Ready condition.
func IsReady(n *corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// ReadyNodes watches until want nodes with GPUs and those without are Ready.
func ReadyNodes(ctx context.Context, kube kubernetes.Interface, want int) error {
	want += systemNodes
	ready := map[string]bool{}
	lw := cache.NewListWatchFromClient(kube.CoreV1().RESTClient(), "nodes", metav1.NamespaceAll, fields.Everything())
	_, err := toolswatch.UntilWithSync(ctx, lw, &corev1.Node{}, nil, func(e watch.Event) (bool, error) {
		if n, ok := e.Object.(*corev1.Node); ok {
			ready[n.Name] = e.Type != watch.Deleted && IsReady(n)
		}
		count := 0
		for _, ok := range ready {
			if ok {
				count++
			}
		}
		return count >= want, nil
	})
	if err != nil {
		return fmt.Errorf("nodes: expected %d Ready, found %d known: %w", want, len(ready), err)
	}
	return nil
}
