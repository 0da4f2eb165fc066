package tensorfusion

import (
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/kube"
)

var (
	budgetsGVR                = schema.GroupVersionResource{Group: "policy", Version: "v1", Resource: "poddisruptionbudgets"}
	replicaSetsGVR            = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "replicasets"}
	daemonSetsGVR             = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "daemonsets"}
	replicationControllersGVR = schema.GroupVersionResource{Version: "v1", Resource: "replicationcontrollers"}
)

// Reasons for leaving a client pod alone.
const (
	leftBare    = "it has no owner that would recreate it"
	leftByPlan  = "the plan leaves its owner alone"
	leftByOwner = "its owner of this kind does not replace pods"
	leftGone    = "its owner is deleted, so nothing would recreate it"
)

// ObserveClients lists the pool's application pods with an outdated injection.
func (a *Activities) ObserveClients(ctx context.Context, req ClientsRequest) (ClientsResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return ClientsResult{}, err
	}
	pods, err := list[corev1.Pod](ctx, c, podsGVR, "", clientSelector(req.Pool))
	if err != nil {
		return ClientsResult{}, kube.Wrap(err, "client pods of GPUPool/"+req.Pool)
	}
	e := newEviction(c, req)
	if err := e.refresh(ctx); err != nil {
		return ClientsResult{}, err
	}
	return e.sort(ctx, pods)
}

func clientSelector(pool string) string { return clientPods + "=" + pool }

// EvictClients lets the owners of stale client pods replace them (T16): by the
// Eviction API, at most PerOwner away per owner, the next when the owner is
// complete again. Bare pods and the owners that the plan names are left.
func (a *Activities) EvictClients(ctx context.Context, req ClientsRequest) (ClientsResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return ClientsResult{}, err
	}
	out, err := newEviction(c, req).run(ctx)
	return out, inRow(err, "T16")
}

// owner is what recreates a pod. A Deployment stands for its ReplicaSets.
type owner struct {
	kind, namespace, object string
	left                    string // why its pods are left alone; empty = it recreates them
}

// name is Kind/namespace/name, as the plan writes it; empty for no owner.
func (o owner) name() string {
	if o.kind == "" {
		return ""
	}
	return strings.Join([]string{o.kind, o.namespace, o.object}, "/")
}

// eviction is one attempt over all stale pods of a pool.
type eviction struct {
	client   *kube.Client
	req      ClientsRequest
	hash     string
	owners   map[types.UID]owner       // by the UID of the pod's direct controller
	gone     map[string]bool           // owners that were found deleted
	touched  map[string]owner          // owners of pods that were told to go: their last pod may be away
	complete map[string]bool           // owners with nothing left to do when last asked
	early    map[types.UID]bool        // pods that were there in the first round; nil before it
	again    map[string]int            // evictions of pods that came later, by owner
	sent     map[types.UID]bool        // pods that were told to go
	blocked  map[types.UID]*corev1.Pod // refused by a budget in the last round
	evicted  int
}

func newEviction(c *kube.Client, req ClientsRequest) *eviction {
	return &eviction{
		client: c, req: req, owners: map[types.UID]owner{}, gone: map[string]bool{}, touched: map[string]owner{},
		complete: map[string]bool{}, again: map[string]int{}, sent: map[types.UID]bool{}, blocked: map[types.UID]*corev1.Pod{},
	}
}

// refresh reads which injection the pool wants now.
func (e *eviction) refresh(ctx context.Context) error {
	u, err := e.client.Dynamic.Resource(poolsGVR).Get(ctx, e.req.Pool, metav1.GetOptions{})
	if err != nil {
		return kube.Wrap(err, "GPUPool/"+e.req.Pool)
	}
	pool, err := decode[FusionPool](u)
	if err != nil {
		return err
	}
	e.hash = pool.Status.Components.Client
	return nil
}

// sort splits the stale pods into those that are evicted and those left.
func (e *eviction) sort(ctx context.Context, pods []corev1.Pod) (ClientsResult, error) {
	out := ClientsResult{Evicted: e.evicted}
	for i := range pods {
		p := &pods[i]
		if !staleClient(p, e.hash) {
			continue
		}
		o, err := e.ownerOf(ctx, p)
		if err != nil {
			return out, err
		}
		row := ClientPod{Namespace: p.Namespace, Name: p.Name, Owner: o.name(), Left: e.leaves(o)}
		out.Stale = append(out.Stale, row)
		if row.Left != "" {
			out.Left = append(out.Left, row)
		}
	}
	return out, nil
}

// staleClient reports a live application pod whose injection is not the pool's;
// an empty hash means that the pool says nothing yet.
func staleClient(p *corev1.Pod, hash string) bool {
	return hash != "" && p.Labels[labelTemplateHash] != hash && p.DeletionTimestamp == nil && !ended(p)
}

func ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

func (e *eviction) leaves(o owner) string {
	switch {
	case o.kind == "":
		return leftBare
	case slices.Contains(e.req.Leave, o.name()):
		return leftByPlan
	case e.gone[o.name()]:
		return leftGone
	}
	return o.left
}

// resources are the kinds that recreate pods and can be asked how many they
// want, by API version and kind: other groups have kinds of the same names.
var resources = map[string]schema.GroupVersionResource{
	"apps/v1/Deployment": deploymentsGVR, "apps/v1/ReplicaSet": replicaSetsGVR, "apps/v1/StatefulSet": statefulSetsGVR,
	"apps/v1/DaemonSet": daemonSetsGVR, "v1/ReplicationController": replicationControllersGVR,
}

// ownerOf follows the controller reference.
func (e *eviction) ownerOf(ctx context.Context, p *corev1.Pod) (owner, error) {
	ref := metav1.GetControllerOf(p)
	if ref == nil {
		return owner{}, nil
	}
	if o, ok := e.owners[ref.UID]; ok {
		return o, nil
	}
	o := owner{kind: ref.Kind, namespace: p.Namespace, object: ref.Name}
	gvr, known := resources[ref.APIVersion+"/"+ref.Kind]
	switch {
	case !known:
		o.left = leftByOwner
	case gvr == replicaSetsGVR:
		rs, err := e.client.Dynamic.Resource(gvr).Namespace(p.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err), err == nil && rs.GetUID() != ref.UID:
			o.left = leftGone
		case err != nil:
			return o, kube.Wrap(err, o.name())
		default:
			if top := metav1.GetControllerOf(rs); top != nil && resources[top.APIVersion+"/"+top.Kind] == deploymentsGVR {
				o.kind, o.object = top.Kind, top.Name
			}
		}
	}
	e.owners[ref.UID] = o
	return o, nil
}

// wanted asks how many pods the owner wants now: a Deployment may be scaled,
// and a DaemonSet's number follows the nodes. ok is false when it is deleted.
func (e *eviction) wanted(ctx context.Context, o owner) (n int, ok bool, err error) {
	gvr := resources["apps/v1/"+o.kind]
	if gvr.Resource == "" {
		gvr = resources["v1/"+o.kind]
	}
	u, err := e.client.Dynamic.Resource(gvr).Namespace(o.namespace).Get(ctx, o.object, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, kube.Wrap(err, o.name())
	}
	type scaled struct {
		Spec struct {
			Replicas *int32 `json:"replicas"`
		} `json:"spec"`
		Status struct {
			Desired int32 `json:"desiredNumberScheduled"`
		} `json:"status"`
	}
	s, err := decode[scaled](u)
	if err != nil {
		return 0, false, err
	}
	if gvr == daemonSetsGVR {
		return int(s.Status.Desired), true, nil
	}
	return int(desired(s.Spec.Replicas)), true, nil
}
