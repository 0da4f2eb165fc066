package tensorfusion

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

var (
	budgetsGVR     = schema.GroupVersionResource{Group: "policy", Version: "v1", Resource: "poddisruptionbudgets"}
	replicaSetsGVR = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "replicasets"}
)

// Reasons for leaving a client pod alone.
const (
	leftBare    = "it has no owner that would recreate it"
	leftByPlan  = "the plan leaves its owner alone"
	leftByOwner = "its owner of this kind does not replace pods"
)

// ObserveClients lists the pool's application pods with an outdated injection.
func (a *Activities) ObserveClients(ctx context.Context, req ClientsRequest) (ClientsResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return ClientsResult{}, err
	}
	pods, err := list[corev1.Pod](ctx, c.Dynamic, podsGVR, "", clientSelector(req.Pool))
	if err != nil {
		return ClientsResult{}, kube.Wrap(err, "client pods of GPUPool/"+req.Pool)
	}
	return newEviction(c, req).sort(ctx, pods)
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

// owner is what recreates a pod.
type owner struct {
	name     string // Kind/namespace/name, as the plan writes it
	replicas int
	recreate bool
}

// eviction is one attempt over all stale pods of a pool.
type eviction struct {
	client  *kube.Client
	req     ClientsRequest
	hash    string
	owners  map[types.UID]owner       // by the UID of the pod's direct controller
	blocked map[types.UID]*corev1.Pod // refused by a budget when last asked
	sent    map[types.UID]bool
	evicted int
}

func newEviction(c *kube.Client, req ClientsRequest) *eviction {
	return &eviction{client: c, req: req, owners: map[types.UID]owner{}, blocked: map[types.UID]*corev1.Pod{}, sent: map[types.UID]bool{}}
}

// sort splits the stale pods into those that are evicted and those left.
func (e *eviction) sort(ctx context.Context, pods []corev1.Pod) (ClientsResult, error) {
	out := ClientsResult{Evicted: e.evicted}
	u, err := e.client.Dynamic.Resource(poolsGVR).Get(ctx, e.req.Pool, metav1.GetOptions{})
	if err != nil {
		return out, kube.Wrap(err, "GPUPool/"+e.req.Pool)
	}
	pool, err := decode[FusionPool](u)
	if err != nil {
		return out, err
	}
	e.hash = pool.Status.Components.Client
	for i := range pods {
		p := &pods[i]
		if !staleClient(p, e.hash) {
			continue
		}
		o, err := e.ownerOf(ctx, p)
		if err != nil {
			return out, err
		}
		row := ClientPod{Namespace: p.Namespace, Name: p.Name, Owner: o.name, Left: e.leaves(o)}
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
	case o.name == "":
		return leftBare
	case slices.Contains(e.req.Leave, o.name):
		return leftByPlan
	case !o.recreate:
		return leftByOwner
	}
	return ""
}

// ownerOf follows the controller reference; a ReplicaSet stands for its
// Deployment.
func (e *eviction) ownerOf(ctx context.Context, p *corev1.Pod) (owner, error) {
	ref := metav1.GetControllerOf(p)
	if ref == nil {
		return owner{}, nil
	}
	if o, ok := e.owners[ref.UID]; ok {
		return o, nil
	}
	o := owner{name: strings.Join([]string{ref.Kind, p.Namespace, ref.Name}, "/")}
	var gvr schema.GroupVersionResource
	switch ref.Kind {
	case "ReplicaSet":
		gvr, o.recreate = replicaSetsGVR, true
	case "StatefulSet":
		gvr, o.recreate = statefulSetsGVR, true
	case "DaemonSet", "ReplicationController":
		// They recreate pods; how many are wanted is not a field of their own.
		o.recreate, o.replicas = true, 1
	}
	if gvr.Resource != "" {
		u, err := e.client.Dynamic.Resource(gvr).Namespace(p.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		if err != nil {
			return o, kube.Wrap(err, o.name)
		}
		type scaled struct {
			metav1.ObjectMeta `json:"metadata"`
			Spec              struct {
				Replicas *int32 `json:"replicas"`
			} `json:"spec"`
		}
		s, err := decode[scaled](u)
		if err != nil {
			return o, err
		}
		o.replicas = int(desired(s.Spec.Replicas))
		if top := metav1.GetControllerOf(&s.ObjectMeta); top != nil && top.Kind == "Deployment" {
			o.name = strings.Join([]string{top.Kind, p.Namespace, top.Name}, "/")
		}
	}
	e.owners[ref.UID] = o
	return o, nil
}

// run evicts until no evictable pod is stale and every owner is complete.
func (e *eviction) run(ctx context.Context) (ClientsResult, error) {
	var out ClientsResult
	var budgets []policyv1.PodDisruptionBudget
	for {
		err := e.client.Await(ctx, kube.Wait{
			What: "client pods of GPUPool/" + e.req.Pool, Limit: e.req.Limit, Heartbeat: beater(ctx),
			Next: "look at the owner that is named: its new pods do not become Ready",
		}, func(objects kube.Objects) (bool, string, error) {
			pods, err := decodeAll[corev1.Pod](objects[0])
			if err != nil {
				return false, "", err
			}
			if budgets, err = decodeAll[policyv1.PodDisruptionBudget](objects[1]); err != nil {
				return false, "", err
			}
			sent := e.evicted
			if out, err = e.sort(ctx, pods); err != nil {
				return false, "", err
			}
			open, err := e.round(ctx, pods)
			out.Evicted = e.evicted
			if err == nil && open > 0 && e.evicted > sent {
				err = errProgress
			}
			return open == 0, fmt.Sprintf("%d stale or away, %d evicted", open, e.evicted), err
		},
			kube.Selection{Resource: podsGVR, Labels: clientSelector(e.req.Pool)},
			kube.Selection{Resource: budgetsGVR})
		uids := sortedKeys(e.blocked)
		if _, _, late := finding.Of(err); late && len(uids) > 0 && ctx.Err() == nil {
			return out, e.refusedBy(e.blocked[uids[0]], budgets)
		}
		if !errors.Is(err, errProgress) {
			return out, err
		}
	}
}

// round evicts what may go now and counts what is still open.
func (e *eviction) round(ctx context.Context, pods []corev1.Pod) (int, error) {
	available := map[string]int{}
	wanted := map[string]int{}
	var stale []*corev1.Pod
	for i := range pods {
		p := &pods[i]
		if ended(p) {
			continue
		}
		o, err := e.ownerOf(ctx, p)
		if err != nil {
			return 0, err
		}
		if o.name == "" || e.leaves(o) != "" {
			continue
		}
		wanted[o.name] = o.replicas
		if ready(p) && !e.sent[p.UID] {
			available[o.name]++
		}
		if p.DeletionTimestamp == nil && !e.sent[p.UID] && p.Labels[labelTemplateHash] != e.hash && e.hash != "" {
			stale = append(stale, p)
		}
	}
	open := len(stale)
	for _, name := range sortedKeys(wanted) {
		open += max(0, wanted[name]-available[name])
	}
	for _, p := range stale {
		o, err := e.ownerOf(ctx, p)
		if err != nil {
			return open, err
		}
		away := wanted[o.name] - available[o.name]
		if away >= max(1, e.req.PerOwner) {
			continue
		}
		gone, err := e.evict(ctx, p)
		if err != nil {
			return open, err
		}
		if gone {
			if ready(p) {
				available[o.name]--
			}
			e.evicted++
		}
	}
	return open, nil
}

// evict asks for one eviction. A budget that refuses is asked again when a pod
// or a budget changes.
func (e *eviction) evict(ctx context.Context, p *corev1.Pod) (bool, error) {
	// The client's own retries would sleep through a refusal with Retry-After,
	// without a heartbeat and past our deadline.
	err := e.client.Typed.PolicyV1().RESTClient().Post().AbsPath("/api/v1").
		Namespace(p.Namespace).Resource("pods").Name(p.Name).SubResource("eviction").
		Body(&policyv1.Eviction{
			ObjectMeta:    metav1.ObjectMeta{Name: p.Name, Namespace: p.Namespace},
			DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.UID}},
		}).MaxRetries(0).Do(ctx).Error()
	switch {
	case err == nil:
		e.sent[p.UID] = true
		delete(e.blocked, p.UID)
		return true, nil
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		delete(e.blocked, p.UID)
		return false, nil
	case !apierrors.IsTooManyRequests(err):
		return false, kube.Wrap(err, "eviction of Pod/"+p.Namespace+"/"+p.Name)
	}
	e.blocked[p.UID] = p
	return false, nil
}

// refusedBy names the budgets that cover the pod.
func (e *eviction) refusedBy(p *corev1.Pod, budgets []policyv1.PodDisruptionBudget) error {
	var names []string
	for _, b := range budgets {
		s, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
		if err == nil && b.Namespace == p.Namespace && s.Matches(labels.Set(p.Labels)) {
			names = append(names, "PodDisruptionBudget/"+b.Namespace+"/"+b.Name)
		}
	}
	return finding.Finding{
		Object: "Pod/" + p.Namespace + "/" + p.Name, Expected: "evicted within " + e.req.Limit.String(),
		Found: "refused by " + orNone(strings.Join(names, ", ")),
		Why:   "the budget allows no disruption now",
		Next:  "let the owner's other pods become Ready, or raise the budget, then retry",
	}.Error(finding.Wait)
}
