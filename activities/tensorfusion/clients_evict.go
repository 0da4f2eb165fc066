package tensorfusion

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

const (
	// lookAgain is how often owners are asked anew without a pod or a budget
	// having changed: a DaemonSet that loses a node says so after its pod went.
	lookAgain = 30 * time.Second
	// namedOwners bounds the owners that a finding names one by one.
	namedOwners = 5
)

// run evicts until no evictable pod is stale and every owner is complete. Each
// eviction gives the next one its own time.
func (e *eviction) run(ctx context.Context) (ClientsResult, error) {
	var out ClientsResult
	var budgets []policyv1.PodDisruptionBudget
	deadline := time.Now().Add(e.req.Limit)
	for {
		// A turn is never cut short by the deadline: its end must have been seen.
		turn, cancel := context.WithTimeout(ctx, cmp.Or(min(lookAgain, e.req.Limit), lookAgain))
		clear(e.blocked)
		failed := false
		err := e.client.Await(turn, kube.Wait{What: "client pods of GPUPool/" + e.req.Pool, Heartbeat: beater(ctx)},
			func(objects kube.Objects) (done bool, found string, err error) {
				defer func() { failed = err != nil }()
				pods, err := decodeAll[corev1.Pod](objects[0])
				if err != nil {
					return false, "", err
				}
				if budgets, err = decodeAll[policyv1.PodDisruptionBudget](objects[1]); err != nil {
					return false, "", err
				}
				if err = e.refresh(ctx); err != nil {
					return false, "", err
				}
				sent := e.evicted
				open, found, err := e.round(ctx, pods)
				if e.evicted > sent {
					deadline = time.Now().Add(e.req.Limit)
				}
				if err != nil {
					return false, found, err
				}
				out, err = e.sort(ctx, pods)
				return !open, found, err
			},
			kube.Selection{Resource: podsGVR, Labels: clientSelector(e.req.Pool)},
			kube.Selection{Resource: budgetsGVR})
		over := errors.Is(turn.Err(), context.DeadlineExceeded) && ctx.Err() == nil
		cancel()
		if err == nil || failed || !over {
			out.Evicted = e.evicted
			return out, err
		}
		if e.req.Limit > 0 && !time.Now().Before(deadline) {
			out.Evicted = e.evicted
			return out, e.late(err, budgets)
		}
	}
}

// late is the finding of the deadline: the budgets that refuse where there are
// such, else what the wait found last. Any other error keeps its own class.
func (e *eviction) late(err error, budgets []policyv1.PodDisruptionBudget) error {
	if uids := sortedKeys(e.blocked); len(uids) > 0 {
		return e.refusedBy(e.blocked[uids[0]], budgets)
	}
	f, _, _ := finding.Of(err)
	f.Expected = "every owner complete within " + e.req.Limit.String() + " of the last eviction"
	f.Next = "look at the owners that are named: their pods do not become Ready; then retry"
	return f.Error(finding.Stop)
}

// group is the pods of one owner.
type group struct {
	owner owner
	live  int // neither ended nor being deleted
	away  int // of those: not Ready, or told to go
	// broken are those away that are stale, do not just start and were not told
	// to go yet: to replace one of them takes nothing more away.
	broken int
	stale  []*corev1.Pod // may be told to go, in this order
}

// busy is how many of the owner's pods are away when p is to go, p left out.
func (g *group) busy(p *corev1.Pod) int {
	if ready(p) {
		return g.away
	}
	return g.away - g.broken
}

// groups sorts the pods by their owners, those left alone excepted.
func (e *eviction) groups(ctx context.Context, pods []corev1.Pod) (map[string]*group, error) {
	out := map[string]*group{}
	for name, o := range e.touched {
		if e.leaves(o) == "" {
			out[name] = &group{owner: o}
		}
	}
	for i := range pods {
		p := &pods[i]
		o, err := e.ownerOf(ctx, p)
		if err != nil {
			return nil, err
		}
		if e.leaves(o) != "" {
			continue
		}
		g := out[o.name()]
		if g == nil {
			g = &group{owner: o}
			out[o.name()] = g
		}
		if ended(p) || p.DeletionTimestamp != nil {
			continue // their owner replaces them, so they are among the missing ones
		}
		g.live++
		told := e.sent[p.UID]
		if told || !ready(p) {
			g.away++
		}
		if told || !staleClient(p, e.hash) {
			continue
		}
		switch {
		case ready(p):
			g.stale = append(g.stale, p)
		case e.early[p.UID]:
			g.stale = append(g.stale, p)
			g.broken++
		} // else it is starting
	}
	for _, g := range out {
		slices.SortStableFunc(g.stale, func(a, b *corev1.Pod) int { return cmp.Compare(e.rank(a), e.rank(b)) })
	}
	return out, nil
}

// rank is the order of eviction: what does not work, then the oldest.
func (e *eviction) rank(p *corev1.Pod) int {
	switch {
	case !ready(p):
		return 0
	case e.early[p.UID]:
		return 1
	}
	return 2
}

// round evicts what may go now. It reports whether anything is still open, and
// what in words, the owners by name.
func (e *eviction) round(ctx context.Context, pods []corev1.Pod) (open bool, found string, err error) {
	clear(e.blocked)
	if e.early == nil {
		e.early = map[types.UID]bool{}
		for _, p := range pods {
			e.early[p.UID] = true
		}
	}
	groups, err := e.groups(ctx, pods)
	if err != nil {
		return true, "", err
	}
	var lacking []string
	for _, name := range sortedKeys(groups) {
		g := groups[name]
		if e.complete[name] && len(g.stale) == 0 && g.away == 0 {
			continue
		}
		stale := len(g.stale)
		there, err := e.advance(ctx, g)
		if err != nil {
			return true, "", err
		}
		if e.complete[name] = stale == 0 && g.away == 0; there && !e.complete[name] {
			lacking = append(lacking, fmt.Sprintf("%s has %d outdated pods and %d away", name, stale, g.away))
		}
	}
	found = fmt.Sprintf("%d pods evicted, every owner is complete", e.evicted)
	if n := len(lacking); n > 0 {
		shown := lacking[:min(n, namedOwners)]
		found = fmt.Sprintf("%d pods evicted, %d owners are not complete: %s", e.evicted, n, strings.Join(shown, "; "))
		if n > namedOwners {
			found += fmt.Sprintf("; and %d more", n-namedOwners)
		}
	}
	return len(lacking) > 0, found, nil
}

// advance evicts pods of one owner as long as fewer than PerOwner are away.
// there is false when the owner turns out to be deleted.
func (e *eviction) advance(ctx context.Context, g *group) (there bool, err error) {
	limit := max(1, e.req.PerOwner)
	if g.away-g.broken >= limit {
		return true, nil // whatever it wants, none may go now
	}
	wanted, there, err := e.wanted(ctx, g.owner)
	if err != nil {
		return true, err
	}
	if !there {
		e.gone[g.owner.name()] = true
		return false, nil
	}
	g.away += max(0, wanted-g.live)
	for _, p := range g.stale {
		if g.busy(p) >= limit {
			continue
		}
		name := g.owner.name()
		if !e.early[p.UID] && e.again[name] >= max(1, wanted) {
			return true, e.inVain(name)
		}
		e.touched[name] = g.owner
		if err := e.evict(ctx, p); err != nil {
			return true, err
		}
		if e.sent[p.UID] && !e.early[p.UID] {
			e.again[name]++
		}
		switch {
		case !e.sent[p.UID]:
		case ready(p):
			g.away++
		default:
			g.broken--
		}
	}
	return true, nil
}

// inVain stops an eviction that would never end: the owner's new pods are as
// outdated as those that they replace.
func (e *eviction) inVain(owner string) error {
	return finding.Finding{
		Object: owner, Expected: "new pods with the injection " + e.hash + " of GPUPool/" + e.req.Pool,
		Found: fmt.Sprintf("%d pods that were made since the eviction began were outdated again", e.again[owner]),
		Why:   "to evict them again would go on without an end",
		Next:  "check that the admission webhook of the new controller answers and injects that version, then retry",
	}.Error(finding.Stop)
}

// evict asks for one eviction. A budget that refuses is asked again when a pod
// or a budget changes. A pod that is gone already counts as told to go: what
// was seen of it is older than that.
func (e *eviction) evict(ctx context.Context, p *corev1.Pod) error {
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
		e.evicted++
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		e.sent[p.UID] = true
	case apierrors.IsTooManyRequests(err):
		e.blocked[p.UID] = p
	default:
		return kube.Wrap(err, "eviction of Pod/"+p.Namespace+"/"+p.Name)
	}
	return nil
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
	found := "refused by " + orNone(strings.Join(names, ", "))
	if n := len(e.blocked); n > 1 {
		found += fmt.Sprintf(", as are %d more pods", n-1)
	}
	return finding.Finding{
		Object: "Pod/" + p.Namespace + "/" + p.Name, Expected: "evicted within " + e.req.Limit.String(),
		Found: found,
		Why:   "the budget allows no disruption now",
		Next:  "let the owner's other pods become Ready, or raise the budget, then retry",
	}.Error(finding.Wait)
}
