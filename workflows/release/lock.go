package release

import (
	"errors"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

// callLimit is the deadline of an activity that asks the API server a few
// questions.
const callLimit = time.Minute

// Lock is what a run has of its release once it has asked for it.
type Lock struct {
	// Scope names the cluster by its UID and the Lease by its holder: another
	// cluster under the same name, and a lost Lease, are refused from now on.
	Scope  tensorfusion.Scope
	Holder string
	// Refused closes the run as Locked: another run holds the Lease.
	Refused error
	// TookOverFrom is the closed run that still had the Lease.
	TookOverFrom string
}

// Identify proves which cluster the scope's name stands for.
func Identify(ctx workflow.Context, s *stage.Scope, scope tensorfusion.Scope) (tensorfusion.Scope, error) {
	var id kube.IdentifyResult
	cluster := scope.Target.Cluster
	if err := Do(ctx, s, cluster, kube.IdentifyActivity, "identify cluster "+cluster, callLimit,
		kube.IdentifyRequest{Cluster: cluster}, &id); err != nil {
		return scope, err
	}
	scope.Target.UID = id.UID
	s.Note("cluster %s (Kubernetes %s, uid %s)", cluster, id.Version, id.UID)
	return scope, nil
}

// Take identifies the cluster and takes the release's Lease for the run's whole
// life.
func Take(ctx workflow.Context, s *stage.Scope, scope tensorfusion.Scope) (Lock, error) {
	scope, err := Identify(ctx, s, scope)
	if err != nil {
		return Lock{}, err
	}
	l, err := Acquire(ctx, s, scope)
	if l.TookOverFrom != "" {
		s.Run().Warn("Took the Lease over from " + l.TookOverFrom + ", which is closed: what it left is found and finished by the stages that follow.")
	}
	return l, err
}

// Acquire takes the Lease in a cluster that was identified before. A Lease in
// another run's hand is no failure to park on, because waiting behind it would
// be a surprise: it is told in Refused.
func Acquire(ctx workflow.Context, s *stage.Scope, scope tensorfusion.Scope) (Lock, error) {
	name := scope.Release.Name
	var got lease.AcquireResult
	err := Do(ctx, s, scope.Target.Cluster, lease.AcquireActivity, "take the Lease of "+name, callLimit,
		lease.AcquireRequest{Target: scope.Target, Namespace: scope.Release.Namespace, Release: name}, &got)
	var app *temporal.ApplicationError
	if errors.As(err, &app) && app.Type() == protocol.Locked {
		s.Note("%s", app.Message())
		return Lock{Scope: scope, Refused: temporal.NewNonRetryableApplicationError(app.Message(), protocol.Locked, nil)}, nil
	}
	if err != nil {
		return Lock{}, err
	}
	s.Note("cluster %s (uid %s), Lease refit-%s taken", scope.Target.Cluster, scope.Target.UID, name)
	if got.TookOverFrom != "" {
		s.Note("Lease refit-%s taken over from the closed run %s", name, got.TookOverFrom)
	}
	scope.Holder = got.Holder
	return Lock{Scope: scope, Holder: got.Holder, TookOverFrom: got.TookOverFrom}, nil
}

// GiveBack gives the Lease back at the run's end. A failure is listed among
// what is left behind: the next run takes a closed run's Lease over.
func GiveBack(run *stage.Run, l Lock) {
	run.Cleanup("unlock", "give the Lease of the release back", func(ctx workflow.Context) error {
		return Last(ctx, l.Scope.Target.Cluster, lease.ReleaseActivity, "give the Lease of "+l.Scope.Release.Name+" back", lease.ReleaseRequest{
			Target: l.Scope.Target, Namespace: l.Scope.Release.Namespace, Release: l.Scope.Release.Name, Holder: l.Holder,
		}, nil)
	})
}

// Hold switches auto update off, or with Assert proves that it is; the
// request's Limit is how long the pools may take to show it.
func Hold(ctx workflow.Context, s *stage.Scope, summary string, req tensorfusion.HoldRequest) (tensorfusion.HoldResult, error) {
	var out tensorfusion.HoldResult
	err := Do(ctx, s, req.Target.Cluster, tensorfusion.HoldActivity, summary, req.Limit, req, &out)
	return out, err
}
