package tensorfusion

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/refit-run/refit/activities/kube"
	kubenode "github.com/refit-run/refit/activities/node"
)

// ObservePool lists the hosts of one GPUPool in name order and judges each
// against the Goal; then it asserts the hold where the request says so.
func (a *Activities) ObservePool(ctx context.Context, req ObservePoolRequest) (PoolObservation, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return PoolObservation{Pool: req.Pool}, err
	}
	return lookAtPool(ctx, c, req)
}

// lookAtPool observes, then asserts: once a flag was found on and put back,
// nothing may fail that would lose the alarm.
func lookAtPool(ctx context.Context, c *kube.Client, req ObservePoolRequest) (PoolObservation, error) {
	out, err := observePool(ctx, c, req)
	if err != nil || req.Assert == 0 {
		return out, err
	}
	held, err := hold(ctx, c, HoldRequest{Scope: req.Scope, Assert: true, Limit: req.Assert})
	if err != nil {
		return out, inRow(err, "P10")
	}
	if held.Waited > freshLook && len(held.Broken) == 0 {
		return observePool(ctx, c, req)
	}
	out.Broken = held.Broken
	return out, nil
}

// freshLook is how old a look at the hosts may be when it is answered.
const freshLook = 5 * time.Second

func observePool(ctx context.Context, c *kube.Client, req ObservePoolRequest) (PoolObservation, error) {
	out := PoolObservation{Pool: req.Pool}
	var hosts []hostView
	var listed []corev1.Node
	group, reading := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		hosts, err = readHosts(reading, c, req.Release.Namespace, req.Pool)
		return kube.Wrap(err, "hosts of GPUPool/"+req.Pool)
	})
	group.Go(func() (err error) {
		listed, err = list[corev1.Node](reading, c, nodesGVR, "", "")
		return kube.Wrap(err, "Nodes of GPUPool/"+req.Pool)
	})
	if err := group.Wait(); err != nil {
		return out, err
	}
	nodes := make(map[string]corev1.Node, len(listed))
	for _, n := range listed {
		nodes[n.Name] = n
	}
	for _, v := range hosts {
		node, known := nodes[v.name]
		h := Host{Name: v.name, Created: v.gpuNode.CreationTimestamp.Time, BootID: node.Status.NodeInfo.BootID, KeptOff: kubenode.KeptOff(&node)}
		if pod := v.pod(req.Goal); pod != nil {
			h.UID = string(pod.UID)
			h.Partitioned = partitioned(pod)
		}
		// Lines before 2.15 say it on the GPUNode, whether a pod is there or not.
		h.Partitioned = h.Partitioned || v.gpuNode.Labels[labelIsolation] == "partitioned"
		h.OnTarget = v.unproven(req.Goal, nil) == ""
		switch {
		case !known:
			h.Broken = "no Node of this name"
		case !nodeReady(&node):
			h.Broken = "Node is not Ready"
		case driverUpgrade(&node) != "":
			h.Broken = "driver upgrade in progress: " + driverUpgrade(&node)
		default:
			h.Broken = v.unhealthy(req.Goal)
		}
		for _, key := range req.LabelKeys {
			value, ok := node.Labels[key]
			if !ok {
				continue
			}
			if h.Labels == nil {
				h.Labels = map[string]string{}
			}
			h.Labels[key] = value
		}
		out.Hosts = append(out.Hosts, h)
	}
	return out, nil
}

// readHosts reads the hosts of a pool (all pools when pool is empty), sorted
// by name.
func readHosts(ctx context.Context, c *kube.Client, namespace, pool string) ([]hostView, error) {
	// Side by side: the lists are the longest step between two batches.
	var nodes []FusionNode
	var pods []corev1.Pod
	var gpus []FusionGPU
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		pods, err = list[corev1.Pod](ctx, c, podsGVR, namespace, labelComponent+"="+componentHypervisor)
		return
	})
	group.Go(func() (err error) {
		if pool == "" {
			nodes, err = list[FusionNode](ctx, c, gpuNodesGVR, "", "")
		} else if nodes, err = list[FusionNode](ctx, c, gpuNodesGVR, "", poolLabel(pool)+"=true"); err == nil {
			gpus, err = readGPUs(ctx, c, nodes)
		}
		return
	})
	if pool == "" {
		group.Go(func() (err error) { gpus, err = list[FusionGPU](ctx, c, gpusGVR, "", ""); return })
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return joinHosts(pointers(nodes), pointers(pods), pointers(gpus)), nil
}

// readGPUs reads the GPUs of the nodes by the label that names theirs; all of
// the cluster when a node shows none that way, or the nodes are many.
func readGPUs(ctx context.Context, c *kube.Client, nodes []FusionNode) ([]FusionGPU, error) {
	names, bare := make([]string, len(nodes)), make(map[string]bool, len(nodes))
	for i, n := range nodes {
		names[i], bare[n.Name] = n.Name, true
	}
	selectors := gpuSelectors(names, false)
	if len(selectors) > parallelLists { // each has the server go through all GPUs
		return list[FusionGPU](ctx, c, gpusGVR, "", "")
	}
	parts := make([][]FusionGPU, len(selectors))
	group, reading := errgroup.WithContext(ctx)
	group.SetLimit(parallelLists)
	for i, selector := range selectors {
		group.Go(func() (err error) { parts[i], err = list[FusionGPU](reading, c, gpusGVR, "", selector); return })
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	gpus := slices.Concat(parts...)
	for _, g := range gpus {
		delete(bare, g.Node())
	}
	if len(bare) == 0 {
		return gpus, nil
	}
	return list[FusionGPU](ctx, c, gpusGVR, "", "")
}

// joinHosts joins GPUNodes, hypervisor pods and GPUs by node.
func joinHosts(nodes []*FusionNode, pods []*corev1.Pod, gpus []*FusionGPU) []hostView {
	out := make([]hostView, 0, len(nodes))
	index := make(map[string]int, len(nodes))
	for _, n := range nodes {
		index[n.Name] = len(out)
		out = append(out, hostView{name: n.Name, gpuNode: n})
	}
	for _, p := range pods {
		if i, ok := index[p.Spec.NodeName]; ok {
			out[i].pods = append(out[i].pods, *p)
		}
	}
	for _, g := range gpus {
		if i, ok := index[g.Node()]; ok {
			out[i].gpus = append(out[i].gpus, *g)
		}
	}
	return out
}

// parallelLists bounds the lists of one look that are in flight at once.
const parallelLists = 4

// selectorBytes bounds one label selector: it travels in the request's URL,
// which proxies cut off at 8 KiB.
const selectorBytes = 4 << 10

// gpuSelectors are label selectors that together find the GPUs of the nodes;
// one empty one, which finds every GPU, when their labels can't be used.
func gpuSelectors(nodes []string, unlabelled bool) []string {
	everything := []string{""}
	if unlabelled {
		return everything
	}
	var out []string
	var names []string
	size := 0
	flush := func() {
		if len(names) > 0 {
			out = append(out, labelManagedBy+" in ("+strings.Join(names, ",")+")")
		}
		names, size = nil, 0
	}
	for _, n := range nodes {
		if len(validation.IsValidLabelValue(n)) > 0 {
			return everything
		}
		if size += len(n) + 1; size > selectorBytes {
			flush()
			size = len(n) + 1
		}
		names = append(names, n)
	}
	flush()
	return out
}

func pointers[T any](in []T) []*T {
	out := make([]*T, len(in))
	for i := range in {
		out[i] = &in[i]
	}
	return out
}

// hostReader joins objects as a watch shows them. It decodes each once per
// version, so that looking again after each of many events stays cheap in a
// pool of thousands.
type hostReader struct {
	nodes decoded[FusionNode]
	pods  decoded[corev1.Pod]
	gpus  decoded[FusionGPU]
}

func (r *hostReader) views(nodes, pods, gpus []metav1.Object) ([]hostView, error) {
	n, err := r.nodes.all(nodes)
	if err != nil {
		return nil, err
	}
	p, err := r.pods.all(pods)
	if err != nil {
		return nil, err
	}
	g, err := r.gpus.all(gpus)
	if err != nil {
		return nil, err
	}
	return joinHosts(n, p, g), nil
}

// decoded remembers the typed form of objects by UID and resourceVersion.
type decoded[T any] struct {
	known map[types.UID]entry[T]
}

type entry[T any] struct {
	version string
	value   *T
}

func (d *decoded[T]) get(u metav1.Object) (*T, error) {
	if typed, ok := any(u).(*T); ok {
		return typed, nil
	}
	if e, ok := d.known[u.GetUID()]; ok && e.version != "" && e.version == u.GetResourceVersion() {
		return e.value, nil
	}
	v, err := decode[T](u)
	if err != nil {
		return nil, fmt.Errorf("decoding: %w", err)
	}
	if d.known == nil {
		d.known = map[types.UID]entry[T]{}
	}
	d.known[u.GetUID()] = entry[T]{u.GetResourceVersion(), &v}
	return &v, nil
}

func (d *decoded[T]) all(in []metav1.Object) ([]*T, error) {
	out := make([]*T, len(in))
	for i, u := range in {
		v, err := d.get(u)
		if err != nil {
			return nil, err
		}
		out[i] = v
	}
	return out, nil
}

// partitioned reports a hypervisor whose GPUs are shared out as MIG instances.
func partitioned(pod *corev1.Pod) bool {
	const argument = "--isolation-mode=partitioned"
	return slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool {
		return slices.Contains(c.Args, argument) || slices.Contains(c.Command, argument)
	})
}
