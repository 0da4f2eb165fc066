package openbao

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// ReplaceRequest replaces one standby.
type ReplaceRequest struct {
	Place
	Want Want `json:"want"`
	// Pod and UID are the pod that is to go; under another UID it is gone.
	Pod string `json:"pod"`
	UID string `json:"uid"`
	// Committed is the active member's committed index as the survey saw it.
	Committed uint64 `json:"committed"`
	// BeginBy is when the deletion may be begun at the latest; without it none
	// is, and only what an earlier one has begun is finished.
	BeginBy time.Time `json:"beginBy,omitzero"`
	// Limit is how long a whole cluster is waited for, before the deletion and
	// after the new pod is Ready; Delete and Ready bound these (N162).
	Limit  time.Duration `json:"limit"`
	Delete time.Duration `json:"delete"`
	Ready  time.Duration `json:"ready"`
}

// ReplaceResult is the verdict on the member that came back.
type ReplaceResult struct {
	OK bool `json:"ok"`
	// Moved: nothing was touched, because the pod is not a standby any more,
	// the cluster is not whole any more, or it is too late.
	Moved string `json:"moved,omitempty"`
	// Anew: the member came back whole, and of a template that is not the
	// present one any more. The step is over; what is next is to be found anew.
	Anew string `json:"anew,omitempty"`
	// Touched: the old pod is gone, or asked to go.
	Touched bool `json:"touched,omitempty"`
	// UID and Version are the new member's.
	UID     string `json:"uid,omitempty"`
	Version string `json:"version,omitempty"`
	State
	Findings []finding.Finding `json:"findings,omitempty"`
	Evidence evidence.Trail    `json:"evidence"`
}

// Replace is the activity openbao.Replace (N162-N164). Every try begins with
// who is active now. It deletes the one pod, by its UID, only right after
// looks that found all members whole, with the same leader; a pod under another UID is
// one that an earlier try has deleted. Then it waits for the new one and
// proves it.
func (a *Activities) Replace(ctx context.Context, r ReplaceRequest) (out ReplaceResult, err error) {
	defer func() {
		if !out.Touched {
			err = untouched(ctx, err)
		}
	}()
	l, err := a.looker(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer l.close()
	defer func() { out.Evidence = l.record.Trail }()

	mark := r.Committed
	var at time.Time // of the look that decides
	var gone, refused bool
	steady := ready{caught: r.Committed}
	err = l.until(ctx, min(r.Limit, RecheckLimit), func(v View) verdict {
		if active, none := v.Active(); none == "" {
			mark = max(mark, active.Committed)
		}
		at, r.Committed = v.At, steady.caught
		gone, out.Moved, out.Findings = before(v, r)
		if gone || out.Moved != "" {
			return verdict{true, "", out}
		}
		refused = len(refusals(v, r.Want)) > 0
		out.Findings = steady.look(time.Now(), v, out.Findings, "replacement of "+r.Pod, a.stable())
		return verdict{refused || len(out.Findings) == 0, evidence.InWords(out.Findings), out}
	})
	if err != nil || out.Moved != "" || refused {
		return out, err
	}
	if len(out.Findings) > 0 {
		out.Moved, out.Findings = overtaken(out.Findings), nil
		return out, nil
	}
	if gone {
		out.Touched = true
	} else if err := l.delete(ctx, r, at, &out); err != nil || out.Moved != "" {
		return out, err
	}
	if err := l.renewed(ctx, r); err != nil {
		return out, err
	}
	var quiet calm
	err = l.until(ctx, r.Limit, func(v View) verdict {
		final := judge(v, r, mark, &out)
		active, _ := v.Active()
		out.OK = quiet.look(time.Now(), active.Pod, !final && len(out.Findings) == 0, a.stable())
		if !out.OK && !final && len(out.Findings) == 0 {
			out.Findings = []finding.Finding{unsteady("after the replacement of "+r.Pod, a.stable())}
		}
		return verdict{out.OK || final, evidence.InWords(out.Findings), out}
	})
	return out, err
}

// before decides whether the pod may be deleted now: it may with no findings,
// unless it is gone already or has become what is not deleted.
func before(v View, r ReplaceRequest) (gone bool, moved string, found []finding.Finding) {
	m, there := v.member(r.Pod)
	if !there || m.UID != r.UID || m.Deleting {
		return true, "", nil
	}
	if late := tooLate(v.At, r.BeginBy, "the replacement of "+r.Pod); late != "" {
		return false, late, nil
	}
	if found := slices.Concat(refusals(v, r.Want), waiting(v, r.Committed)); len(found) > 0 {
		return false, "", evidence.Shown(found)
	}
	if active, _ := v.Active(); active.Pod == r.Pod {
		return false, r.Pod + " has become active", nil
	}
	if !v.stale(m) {
		return false, r.Pod + " is of the present template", nil
	}
	return false, "", nil
}

// judge is the gate of a replaced member (N163, N164): itself and all others.
// It tells whether waiting would not help. A pod of another template than the
// present one can't be proven by any waiting or retry: the step ends there.
func judge(v View, r ReplaceRequest, mark uint64, out *ReplaceResult) (final bool) {
	m, _ := v.member(r.Pod)
	out.UID, out.Version, out.State = m.UID, m.Version, v.State()
	refused := refusals(v, r.Want)
	out.Findings = evidence.Shown(append(refused, waiting(v, mark)...))
	if len(out.Findings) == 0 && v.stale(m) {
		out.Anew = fmt.Sprintf("the template changed while %s was replaced: it is of revision %s, and the present one is %s", m.Pod, m.Revision, v.Set.Revision)
		return true
	}
	return len(refused) > 0
}

// delete deletes the pod that was looked at, and no other of its name, unless
// the look has become too old meanwhile.
func (l *looker) delete(ctx context.Context, r ReplaceRequest, at time.Time, out *ReplaceResult) error {
	if err := l.mayChange(ctx); err != nil {
		return err
	}
	if out.Moved = missed(at, r.BeginBy, "replacement of "+r.Pod); out.Moved != "" {
		return nil
	}
	out.Touched = true
	uid := types.UID(r.UID)
	err := l.client.Typed.CoreV1().Pods(l.place.Namespace).Delete(ctx, r.Pod, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // somebody was faster; what comes back is judged all the same
	}
	return kube.Wrap(err, fmt.Sprintf("deletion of Pod/%s/%s", l.place.Namespace, r.Pod))
}

var podsGVR = schema.GroupVersionResource{Version: "v1", Resource: "pods"}

// renewed waits until the old pod is gone, and then until the new one is there
// and Ready.
func (l *looker) renewed(ctx context.Context, r ReplaceRequest) error {
	pod := kube.Selection{Resource: podsGVR, Namespace: l.place.Namespace, Name: r.Pod}
	what := fmt.Sprintf("Pod/%s/%s", l.place.Namespace, r.Pod)
	old := func(objects kube.Objects) bool { return len(objects[0]) > 0 && string(objects[0][0].GetUID()) == r.UID }
	err := l.client.Await(ctx, kube.Wait{What: "deletion of " + what, Limit: r.Delete, Heartbeat: l.record.Say,
		Next: "look at what holds the pod (its node, finalizers); do not force the deletion before you know that its process is gone: retry waits again",
	}, func(objects kube.Objects) (bool, string, error) {
		return !old(objects), r.Pod + " is being deleted", nil
	}, pod)
	if err != nil {
		return finding.InRow(err, "N162")
	}
	err = l.client.Await(ctx, kube.Wait{What: what + " after its deletion", Limit: r.Ready, Heartbeat: l.record.Say,
		Next: "look at the pod's events (image, node, volume); the other members keep the quorum: replace none of them, then retry",
	}, func(objects kube.Objects) (bool, string, error) {
		if len(objects[0]) == 0 || old(objects) {
			return false, "there is no new pod yet", nil
		}
		why := kube.Unready(objects[0][0].(*corev1.Pod))
		return why == "", why, nil
	}, pod)
	return finding.InRow(err, "N162")
}
