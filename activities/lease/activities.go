package lease

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"go.temporal.io/api/serviceerror"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// Activities are the Lease activities of one worker.
type Activities struct {
	Clusters *kube.Clusters
	Temporal client.Client

	mu        sync.Mutex
	clusterID string
}

// AcquireRequest asks for the Lease of a release. Holder is left empty by
// workflows, which can't know their Temporal cluster's id: the activity fills
// in its own.
type AcquireRequest struct {
	Target    kube.Target `json:"target"`
	Namespace string      `json:"namespace"`
	Release   string      `json:"release"`
	Holder    string      `json:"holder,omitempty"`
}

// AcquireResult names the holder, to be carried by every release activity.
type AcquireResult struct {
	Holder string `json:"holder"`
	// TookOverFrom is the former holder, a run that had closed without
	// releasing; empty otherwise.
	TookOverFrom string `json:"tookOverFrom,omitempty"`
}

// ReleaseRequest gives the Lease back.
type ReleaseRequest = AcquireRequest

// ReleaseResult says whether there was anything of ours to give back.
type ReleaseResult struct {
	Released bool `json:"released"`
	// Holder is somebody else who holds it; that is left alone.
	Holder string `json:"holder,omitempty"`
}

// Holder names the owner that the activity whose context this is works for:
// the first run of its run's chain.
func (a *Activities) Holder(ctx context.Context) (string, error) {
	id, err := a.temporalCluster(ctx)
	if err != nil {
		return "", err
	}
	info := activity.GetInfo(ctx)
	workflow, run := info.WorkflowExecution.ID, info.WorkflowExecution.RunID
	first, err := a.firstRun(ctx, info.Namespace, workflow, run)
	if err != nil {
		return "", finding.Finding{Object: fmt.Sprintf("first run of workflow %q (run %s)", workflow, run), Found: err.Error()}.Error(finding.Retry)
	}
	return Owner{TemporalCluster: id, Namespace: info.Namespace, WorkflowID: workflow, RunID: first}.String(), nil
}

func (a *Activities) temporalCluster(ctx context.Context) (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.clusterID != "" {
		return a.clusterID, nil
	}
	info, err := a.Temporal.WorkflowService().GetClusterInfo(ctx, &workflowservice.GetClusterInfoRequest{})
	if err != nil {
		return "", finding.Finding{Object: "Temporal cluster id", Found: err.Error()}.Error(finding.Retry)
	}
	if info.GetClusterId() == "" {
		return "", finding.Finding{Object: "Temporal cluster id", Expected: "an id", Found: "none",
			Next: "without it two Temporal clusters can't be told apart: set the server's cluster id"}.Error(finding.Stop)
	}
	a.clusterID = info.GetClusterId()
	return a.clusterID, nil
}

func (a *Activities) resolve(ctx context.Context, r AcquireRequest) (*kube.Client, string, error) {
	holder := r.Holder
	if holder == "" {
		var err error
		if holder, err = a.Holder(ctx); err != nil {
			return nil, "", err
		}
	}
	k, err := a.Clusters.Connect(ctx, r.Target)
	return k, holder, err
}

// Acquire is the activity lease.Acquire. It creates the Lease, finds it ours
// already, or takes it over from a run that its own Temporal reports closed;
// every other holder is refused as Locked. After a closed run it waits until
// that run's last activity must have noticed (HeartbeatMargin), so give it a
// start-to-close timeout of a minute.
func (a *Activities) Acquire(ctx context.Context, r AcquireRequest) (AcquireResult, error) {
	k, holder, err := a.resolve(ctx, r)
	if err != nil {
		return AcquireResult{}, err
	}
	name, leases := Name(r.Release), k.Typed.CoordinationV1().Leases(r.Namespace)
	what := fmt.Sprintf("Lease %s/%s", r.Namespace, name)
	for {
		l, err := leases.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			_, err = leases.Create(ctx, fresh(name, r.Namespace, holder), metav1.CreateOptions{FieldManager: kube.UserAgent})
			if apierrors.IsAlreadyExists(err) {
				continue // somebody was faster, or the reply to our create was lost
			}
			if err != nil {
				return AcquireResult{}, kube.Wrap(err, "create "+what)
			}
			return AcquireResult{Holder: holder}, nil
		}
		if err != nil {
			return AcquireResult{}, kube.Wrap(err, what)
		}
		former := holderOf(l)
		if former == holder {
			return AcquireResult{Holder: holder, TookOverFrom: l.Annotations[tookOverAnnotation]}, nil
		}
		if former != "" {
			wait, err := a.mayTakeOver(ctx, l, holder)
			if err != nil {
				return AcquireResult{}, err
			}
			if wait > 0 {
				if err := pause(ctx, wait); err != nil {
					return AcquireResult{}, err
				}
				continue // look again: another run may have been faster
			}
		}
		take(l, holder, former)
		_, err = leases.Update(ctx, l, metav1.UpdateOptions{FieldManager: kube.UserAgent})
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return AcquireResult{}, kube.Wrap(err, "take over "+what)
		}
		return AcquireResult{Holder: holder, TookOverFrom: former}, nil
	}
}

// tookOverAnnotation keeps the former holder, so that an Acquire whose reply
// was lost answers the same again.
const tookOverAnnotation = "refit.run/took-over-from"

func fresh(name, namespace, holder string) *coordinationv1.Lease {
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace, Labels: map[string]string{managedByLabel: managedBy}},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, AcquireTime: microNow(), RenewTime: microNow()},
	}
}

func take(l *coordinationv1.Lease, holder, former string) {
	if l.Annotations == nil {
		l.Annotations = map[string]string{}
	}
	l.Annotations[tookOverAnnotation] = former
	transitions := int32(1)
	if l.Spec.LeaseTransitions != nil {
		transitions += *l.Spec.LeaseTransitions
	}
	l.Spec.HolderIdentity, l.Spec.LeaseTransitions = &holder, &transitions
	l.Spec.AcquireTime, l.Spec.RenewTime = microNow(), microNow()
}

// mayTakeOver says how long to wait before the Lease may be taken over, or
// refuses.
func (a *Activities) mayTakeOver(ctx context.Context, l *coordinationv1.Lease, holder string) (time.Duration, error) {
	former := holderOf(l)
	remove := fmt.Sprintf("prove that nothing works on the release any more, then `kubectl -n %s delete lease %s` and start again", l.Namespace, l.Name)
	theirs, ok := ParseOwner(former)
	if !ok {
		return 0, lockedError(l.Namespace, l.Name, fmt.Sprintf("held by %q, which is no run of Refit", former), remove)
	}
	ours, ok := ParseOwner(holder)
	if !ok {
		return 0, finding.Finding{Object: "Lease holder", Expected: "TEMPORAL-CLUSTER/NAMESPACE/WORKFLOW/RUN", Found: fmt.Sprintf("%q", holder)}.Error(finding.Stop)
	}
	if theirs.TemporalCluster != ours.TemporalCluster {
		return 0, lockedError(l.Namespace, l.Name,
			fmt.Sprintf("held by workflow %q (run %s) of another Temporal cluster, %s", theirs.WorkflowID, theirs.RunID, theirs.TemporalCluster),
			"finish or terminate that run there; if that Temporal is gone: "+remove)
	}
	o, err := a.ownerOf(ctx, theirs)
	var notFound *serviceerror.NotFound
	var denied *serviceerror.PermissionDenied
	switch {
	case errors.As(err, &notFound), errors.As(err, &denied):
		// Not found is no proof: another server may carry the same id.
		return 0, lockedError(l.Namespace, l.Name,
			fmt.Sprintf("held by workflow %q (run %s, namespace %s), of which Temporal says: %v", theirs.WorkflowID, theirs.RunID, theirs.Namespace, err), remove)
	case err != nil:
		return 0, finding.Finding{Object: fmt.Sprintf("workflow %q (run %s)", theirs.WorkflowID, theirs.RunID), Found: err.Error()}.Error(finding.Retry)
	case !o.closed():
		return 0, lockedError(l.Namespace, l.Name,
			fmt.Sprintf("held by workflow %q (run %s), which is %s", theirs.WorkflowID, o.run, o.status),
			"wait for it, or abort it: `refit abort "+theirs.WorkflowID+"`")
	}
	last := o.ended
	if l.Spec.RenewTime != nil && l.Spec.RenewTime.After(last) {
		last = l.Spec.RenewTime.Time
	}
	wait := time.Until(last.Add(HeartbeatMargin))
	// Clocks differ; more than the margin is never needed from now on.
	return min(wait, HeartbeatMargin), nil
}

// pause waits on a timer, heartbeating when the context is an activity's.
func pause(ctx context.Context, d time.Duration) error {
	until := time.NewTimer(d)
	defer until.Stop()
	beat := time.NewTicker(time.Second)
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-until.C:
			return nil
		case <-beat.C:
			if activity.IsActivity(ctx) {
				activity.RecordHeartbeat(ctx, "waiting for the former run's last heartbeat to time out")
			}
		}
	}
}

// Release is the activity lease.Release. A Lease that is gone, or is held by
// somebody else, is left as it is.
func (a *Activities) Release(ctx context.Context, r ReleaseRequest) (ReleaseResult, error) {
	k, holder, err := a.resolve(ctx, r)
	if err != nil {
		return ReleaseResult{}, err
	}
	name, leases := Name(r.Release), k.Typed.CoordinationV1().Leases(r.Namespace)
	l, err := leases.Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return ReleaseResult{}, nil
	}
	if err != nil {
		return ReleaseResult{}, kube.Wrap(err, fmt.Sprintf("Lease %s/%s", r.Namespace, name))
	}
	if holderOf(l) != holder {
		return ReleaseResult{Holder: holderOf(l)}, nil
	}
	err = leases.Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &l.UID, ResourceVersion: &l.ResourceVersion}})
	if apierrors.IsNotFound(err) {
		return ReleaseResult{}, nil
	}
	if err != nil {
		return ReleaseResult{}, kube.Wrap(err, fmt.Sprintf("delete Lease %s/%s", r.Namespace, name))
	}
	return ReleaseResult{Released: true}, nil
}
