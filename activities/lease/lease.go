// Package lease holds the Lease `refit-<release>`: the lock that keeps two
// runs from working on one release, and the fence that every dangerous child
// process checks (design, contract 4). It must not know what the lock guards.
package lease

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// Activity names; queue cluster/<name>.
const (
	AcquireActivity = "lease.Acquire"
	ReleaseActivity = "lease.Release"
)

// Locked is the type of the application error that says another run holds the
// Lease; a run closes Failed with it.
const Locked = "Locked"

const (
	// HeartbeatMargin is how long after a run's end one of its activities may
	// still be at work: it learns of the end by its next heartbeat (timeout
	// 5 s) and needs a moment to stop. A takeover waits this long.
	HeartbeatMargin = 15 * time.Second

	// engineAnnotation names the one attempt that may drive Helm now.
	engineAnnotation = "refit.run/engine"
	managedByLabel   = "app.kubernetes.io/managed-by"
	managedBy        = "refit"
)

// Name is the Lease of a release.
func Name(release string) string { return "refit-" + release }

// Owner is a Lease holder taken apart.
type Owner struct {
	TemporalCluster string
	Namespace       string
	WorkflowID      string
	// RunID is the first run of the owner's chain: continuing as new and a
	// reset give a run another id, and the chain works on.
	RunID string
}

// String is the holder as the Lease stores it.
func (o Owner) String() string {
	return strings.Join([]string{o.TemporalCluster, o.Namespace, o.WorkflowID, o.RunID}, "/")
}

// ParseOwner reads a holder. A workflow ID may hold slashes, its neighbours
// can't. ok is false for a holder that is not ours.
func ParseOwner(holder string) (o Owner, ok bool) {
	parts := strings.Split(holder, "/")
	if len(parts) < 4 {
		return o, false
	}
	o = Owner{
		TemporalCluster: parts[0], Namespace: parts[1],
		WorkflowID: strings.Join(parts[2:len(parts)-1], "/"), RunID: parts[len(parts)-1],
	}
	return o, o.TemporalCluster != "" && o.Namespace != "" && o.WorkflowID != "" && o.RunID != ""
}

// lockedError is the refusal that names the holder and the way out.
func lockedError(namespace, name string, found, next string) error {
	f := finding.Finding{
		Object:   fmt.Sprintf("Lease %s/%s", namespace, name),
		Expected: "no other run at work on this release",
		Found:    found,
		Why:      "two runs on one release would undo each other's steps",
		Next:     next,
	}
	return LockedError(f)
}

func holderOf(l *coordinationv1.Lease) string {
	if l.Spec.HolderIdentity == nil {
		return ""
	}
	return *l.Spec.HolderIdentity
}

func microNow() *metav1.MicroTime {
	now := metav1.NowMicro()
	return &now
}

// Verify is the fence: it reads the Lease and fails when the holder, or the
// engine (unless empty), is another.
func Verify(ctx context.Context, k kubernetes.Interface, namespace, release, holder, engine string) error {
	name := Name(release)
	l, err := k.CoordinationV1().Leases(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return lockedError(namespace, name, "no Lease", "another run or a person removed it; abort this run and start a new one")
	case err != nil:
		return kube.Wrap(err, fmt.Sprintf("Lease %s/%s", namespace, name))
	case holderOf(l) != holder:
		return lockedError(namespace, name, fmt.Sprintf("held by %q, not by %q", holderOf(l), holder), "this run lost its Lease; abort it and look at the holder")
	case engine != "" && l.Annotations[engineAnnotation] != engine:
		return lockedError(namespace, name, "another attempt of this run drives Helm now", "nothing: the newer attempt goes on")
	}
	return nil
}

// ClaimEngine writes the engine's name into the holder's Lease: from now on
// the fence stops every earlier engine. It returns the former engine's name.
func ClaimEngine(ctx context.Context, k kubernetes.Interface, namespace, release, holder, engine string) (former string, err error) {
	name := Name(release)
	leases := k.CoordinationV1().Leases(namespace)
	err = retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if err := Verify(ctx, k, namespace, release, holder, ""); err != nil {
			return err
		}
		l, err := leases.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if holderOf(l) != holder {
			return Verify(ctx, k, namespace, release, holder, "")
		}
		former = l.Annotations[engineAnnotation]
		if l.Annotations == nil {
			l.Annotations = map[string]string{}
		}
		l.Annotations[engineAnnotation] = engine
		l.Spec.RenewTime = microNow()
		_, err = leases.Update(ctx, l, metav1.UpdateOptions{FieldManager: kube.UserAgent})
		return err
	})
	if _, locked := LockedFinding(err); err != nil && !locked {
		err = kube.Wrap(err, fmt.Sprintf("claim of Lease %s/%s", namespace, name))
	}
	return former, err
}

// LockedFinding extracts the finding of an error of type Locked.
func LockedFinding(err error) (f finding.Finding, ok bool) {
	var app *temporal.ApplicationError
	if !errors.As(err, &app) || app.Type() != Locked {
		return f, false
	}
	if f, ok = finding.Details(app); !ok {
		f = finding.Finding{Object: "Lease", Found: app.Message()}
	}
	return f, true
}

// LockedError makes an error of type Locked from its finding.
func LockedError(f finding.Finding) error {
	return temporal.NewApplicationErrorWithOptions(f.String(), Locked, temporal.ApplicationErrorOptions{
		NonRetryable: true, Details: []any{f},
	})
}
