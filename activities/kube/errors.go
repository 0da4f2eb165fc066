package kube

import (
	"context"
	"errors"
	"net"
	"syscall"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	"github.com/refit-run/refit/activities/finding"
)

// Class says what an error of the API server, or of the way to it, means for a
// run: what only a person can mend is stop, what passes by itself is retry.
func Class(err error) finding.Class {
	var netErr net.Error
	switch {
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err),
		apierrors.IsNotFound(err), apierrors.IsMethodNotSupported(err), apierrors.IsRequestEntityTooLargeError(err), meta.IsNoMatchError(err):
		return finding.Stop
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), apierrors.IsServerTimeout(err), apierrors.IsTimeout(err),
		apierrors.IsTooManyRequests(err), apierrors.IsInternalError(err), apierrors.IsServiceUnavailable(err),
		apierrors.IsResourceExpired(err), apierrors.IsGone(err), apierrors.IsUnexpectedServerError(err):
		return finding.Retry
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.As(err, &netErr), utilnet.IsProbableEOF(err),
		utilnet.IsConnectionRefused(err), utilnet.IsConnectionReset(err), errors.Is(err, syscall.EPIPE), utilnet.IsHTTP2ConnectionLost(err):
		return finding.Retry
	}
	// Another status of the server: 5xx passes, the rest is an answer.
	var status apierrors.APIStatus
	if errors.As(err, &status) && status.Status().Code < 500 {
		return finding.Stop
	}
	return finding.Retry
}

// Wrap turns an error into the finding of its class; what names the act and
// its object. A finding and a cancellation pass unchanged: the first is
// already told, and Temporal must see the second as what it is.
func Wrap(err error, what string) error {
	if err == nil {
		return nil
	}
	if _, _, ok := finding.Of(err); ok || errors.Is(err, context.Canceled) {
		return err
	}
	f := finding.Finding{Object: what, Found: err.Error()}
	switch {
	case apierrors.IsForbidden(err):
		f.Next = "grant the worker's user this permission (deploy/ lists what it needs), then retry"
	case apierrors.IsUnauthorized(err):
		f.Next = "renew the credentials in the worker's kubeconfig, then retry"
	case meta.IsNoMatchError(err):
		f.Next = "the API server does not know this kind: check that its CRD is installed"
	}
	return f.Error(Class(err))
}
