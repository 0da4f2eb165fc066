// Package workflowtest holds Temporal's time-skipping environment as the tests of
// workflows want it, and drives one run in it for those on datastores. It answers what every run asks
// before its first stage; what a datastore answers is the test's. It must not
// know any workflow.
package workflowtest

import (
	"context"
	"maps"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/activities/visibility"
	"github.com/refit-run/refit/workflows/protocol"
)

// Run is a run under test.
type Run struct {
	*testsuite.TestWorkflowEnvironment
	t *testing.T
	// due are the callbacks of At that have not been called yet.
	due atomic.Int32
}

// Release is the Helm release whose Lease the runs take.
type Release struct {
	Name, Namespace string
	// Locked: another run holds it.
	Locked bool
	// Say hears "lock" and "unlock".
	Say func(string)
}

// Environment is Temporal's for one test, with time for a busy machine: that may
// leave a goroutine alone for the second after which a workflow counts as stuck.
func Environment() *testsuite.TestWorkflowEnvironment {
	var suite testsuite.WorkflowTestSuite
	env := suite.NewTestWorkflowEnvironment()
	env.SetTestTimeout(time.Minute)
	env.SetWorkerOptions(worker.Options{DeadlockDetectionTimeout: time.Minute})
	return env
}

// New registers workflows and activities under their names.
func New(t *testing.T, release Release, workflows, activities map[string]any) *Run {
	env := Environment()
	for name, fn := range workflows {
		env.RegisterWorkflowWithOptions(fn, workflow.RegisterOptions{Name: name})
	}
	all := release.activities(t)
	maps.Copy(all, activities)
	for name, fn := range all {
		env.RegisterActivityWithOptions(fn, activity.RegisterOptions{Name: name})
	}
	return &Run{TestWorkflowEnvironment: env, t: t}
}

func (r Release) activities(t *testing.T) map[string]any {
	return map[string]any{
		kube.IdentifyActivity: func(context.Context, kube.IdentifyRequest) (kube.IdentifyResult, error) {
			return kube.IdentifyResult{UID: "uid-prod"}, nil
		},
		lease.AcquireActivity: func(_ context.Context, q lease.AcquireRequest) (lease.AcquireResult, error) {
			require.Equal(t, r.Name, q.Release)
			require.Equal(t, r.Namespace, q.Namespace)
			if r.Locked {
				return lease.AcquireResult{}, temporal.NewNonRetryableApplicationError("held by another run", protocol.Locked, nil)
			}
			r.Say("lock")
			return lease.AcquireResult{Holder: "me"}, nil
		},
		lease.ReleaseActivity: func(context.Context, lease.ReleaseRequest) (lease.ReleaseResult, error) {
			r.Say("unlock")
			return lease.ReleaseResult{Released: true}, nil
		},
		tensorfusion.ReceiptActivity: func(context.Context, tensorfusion.ReceiptRequest) (tensorfusion.ReceiptResult, error) {
			return tensorfusion.ReceiptResult{Artifact: artifact.Ref{Name: "receipt.json"}, ConfigMap: "refit-receipt"}, nil
		},
		visibility.InstalledActivity: func(context.Context, visibility.Request) (visibility.Result, error) {
			return visibility.Result{}, nil
		},
	}
}

// At calls f while the run is under way. Run fails if it ended before: a test
// whose look never came has tested nothing.
func (r *Run) At(after time.Duration, f func()) {
	r.due.Add(1)
	r.RegisterDelayedCallback(func() {
		r.due.Add(-1)
		f()
	}, after)
}

// Answer sends a verb as ann's signal.
func (r *Run) Answer(verb string) { r.SignalWorkflow(verb, protocol.Answer{By: "ann"}) }

// Status queries the run.
func (r *Run) Status() protocol.Status {
	v, err := r.QueryWorkflow(protocol.QueryStatus)
	require.NoError(r.t, err)
	var s protocol.Status
	require.NoError(r.t, v.Get(&s))
	return s
}

// Waits is what the run waits for at a stage.
func (r *Run) Waits(stage string) protocol.Waiting {
	s := r.Status()
	require.NotNil(r.t, s.WaitingFor, "%+v", s)
	require.Equal(r.t, stage, s.WaitingFor.Stage)
	return *s.WaitingFor
}

// Run executes the workflow to its good end.
func (r *Run) Run(kind string, in, out any) {
	r.t.Helper()
	r.ExecuteWorkflow(kind, in)
	require.True(r.t, r.IsWorkflowCompleted())
	require.NoError(r.t, r.GetWorkflowError())
	require.Zero(r.t, r.due.Load(), "the run ended before it was looked at")
	require.NoError(r.t, r.GetWorkflowResult(out))
}

// RefusesInput executes a workflow that must end with a typed error before
// anything.
func (r *Run) RefusesInput(kind string, in any) {
	r.t.Helper()
	r.ExecuteWorkflow(kind, in)
	var app *temporal.ApplicationError
	require.ErrorAs(r.t, r.GetWorkflowError(), &app)
	require.Equal(r.t, protocol.BadInput, app.Type())
}
