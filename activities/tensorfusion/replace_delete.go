package tensorfusion

import (
	"context"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// doomedPod is a pod that is deleted, and the host that it belongs to.
type doomedPod struct {
	host string
	name string
	uid  types.UID
}

// doomed lists the pods to delete: leftovers of another line (P07), and the
// pod that the planner saw unless it is already of the target and young enough
// to be on its way. A pod with another UID was made after the plan: it is
// waited for, never deleted.
func (r *replacement) doomed(h HostTarget, v hostView) []doomedPod {
	var out []doomedPod
	for i := range v.pods {
		pod := &v.pods[i]
		if pod.DeletionTimestamp != nil || r.sent[pod.UID] {
			continue
		}
		leftover := !r.req.Goal.named(pod)
		planned := h.UID != "" && string(pod.UID) == h.UID
		coming := r.req.Goal.wants(pod) == "" && podTrouble(pod) == "" &&
			time.Since(pod.CreationTimestamp.Time) < r.req.Limit
		if leftover || planned && !coming {
			out = append(out, doomedPod{host: h.Name, name: pod.Name, uid: pod.UID})
		}
	}
	return out
}

// blocked says why deleting would not help: the controller does not recreate
// pods on such nodes (rules 19 and 20).
func (r *replacement) blocked(name string) *finding.Finding {
	n, known := r.nodes[name]
	switch {
	case !known:
		return &finding.Finding{Row: "P14", Object: "Node/" + name, Expected: "it exists", Found: "no Node of this name",
			Next: "leave the host out, or bring the Node back and retry"}
	case !nodeReady(n):
		return &finding.Finding{Row: "P14", Object: "Node/" + name, Expected: "Ready", Found: "not Ready",
			Why: "the controller creates no hypervisor on it, so nothing was deleted", Next: "repair the Node, then retry"}
	case driverUpgrade(n) != "":
		return &finding.Finding{Row: "P01", Object: "Node/" + name, Expected: "no driver upgrade in progress",
			Found: labelDriverUpgrade + "=" + driverUpgrade(n),
			Why:   "the controller leaves the node alone meanwhile, so nothing was deleted", Next: "let the driver upgrade finish, then retry"}
	}
	return nil
}

// delete removes the pods with their UID as precondition. Gone or changed
// means that the next look tells more, so a lost reply does no harm.
func (r *replacement) delete(ctx context.Context, pods []doomedPod) error {
	if len(pods) == 0 {
		return nil
	}
	// Before the first request: its reply may be lost, or this process, and the
	// pod gone all the same.
	asked := map[string]bool{}
	for _, p := range pods {
		r.setMemory(p.host, func(m *hostMemory) { asked[p.host] = asked[p.host] || m.Deleted })
	}
	for _, p := range pods {
		r.setMemory(p.host, func(m *hostMemory) { m.Deleted = true })
	}
	if err := r.record(ctx); err != nil {
		for _, p := range pods { // none was asked for
			r.setMemory(p.host, func(m *hostMemory) { m.Deleted = asked[p.host] })
		}
		return err
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallelRequests)
	errs := make([]error, len(pods))
	others := make([]bool, len(pods)) // somebody else's doing
	for i, p := range pods {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			err := r.client.Dynamic.Resource(podsGVR).Namespace(r.req.Release.Namespace).Delete(ctx, p.name, metav1.DeleteOptions{
				Preconditions: &metav1.Preconditions{UID: &p.uid},
			})
			switch {
			case err == nil:
				r.setMemory(p.host, func(*hostMemory) { r.sent[p.uid] = true })
			case !apierrors.IsNotFound(err) && !apierrors.IsConflict(err):
				errs[i] = kube.Wrap(err, "delete of Pod/"+r.req.Release.Namespace+"/"+p.name)
			default:
				others[i] = true
			}
		})
	}
	wg.Wait()
	for i, p := range pods {
		asked[p.host] = asked[p.host] || !others[i]
	}
	for _, p := range pods {
		r.setMemory(p.host, func(m *hostMemory) { m.Deleted = asked[p.host] })
	}
	// One is enough: a joined error would lose its class on the way out.
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
