package tensorfusion

import (
	"context"
	"fmt"
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/worker"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/registry"
)

// Activities holds what the activities of one worker need. Methods are safe
// for concurrent use.
type Activities struct {
	Clusters  *kube.Clusters
	Artifacts *artifact.Store
	Registry  registry.Mirrors
}

// Register registers every activity under its name in the contract.
func (a *Activities) Register(r worker.Registry) {
	for name, fn := range map[string]any{
		ObservePoolActivity:     a.ObservePool,
		HoldActivity:            a.Hold,
		ReplaceActivity:         a.ReplaceHypervisors,
		WorkersActivity:         a.ObserveWorkers,
		RollWorkersActivity:     a.RollWorkers,
		ClientsActivity:         a.ObserveClients,
		EvictClientsActivity:    a.EvictClients,
		PreflightActivity:       a.Preflight,
		DiffActivity:            a.Diff,
		BackupActivity:          a.Backup,
		ApplyCRDsActivity:       a.ApplyCRDs,
		ReleaseActivity:         a.UpgradeRelease,
		AwaitControllerActivity: a.AwaitController,
		DriftActivity:           a.CheckDrift,
		PolicyActivity:          a.SetPolicy,
		VerifyActivity:          a.Verify,
		CanaryJobActivity:       a.RunCanaryJob,
		ReceiptActivity:         a.WriteReceipt,
		RevisionActivity:        a.InspectRevision,
		TenantsActivity:         a.Tenants,
		GPUHostsActivity:        a.GPUHosts,
	} {
		r.RegisterActivityWithOptions(fn, activity.RegisterOptions{Name: name})
	}
}

// connect reaches the scope's cluster; it fails when the API server is not the
// one that the run began with, or when the run has lost its Lease.
func (a *Activities) connect(ctx context.Context, s Scope) (*kube.Client, error) {
	if s.Release.Name == "" || s.Release.Namespace == "" {
		return nil, finding.Finding{
			Object:   "request",
			Expected: "the release's name and namespace",
			Found:    fmt.Sprintf("name %q, namespace %q", s.Release.Name, s.Release.Namespace),
		}.Error(finding.Stop)
	}
	c, err := a.Clusters.Connect(ctx, s.Target)
	if err != nil {
		return c, err
	}
	return c, lease.Held{Namespace: s.Release.Namespace, Release: s.Release.Name, Holder: s.Holder}.Check(ctx, c.Typed)
}

// beat reports that the activity lives, with details a later attempt can use.
// Outside an activity (unit tests of the parts) there is nobody to tell.
func beat(ctx context.Context, details ...any) {
	if activity.IsActivity(ctx) {
		activity.RecordHeartbeat(ctx, details...)
	}
}

// heartbeatEvery is well below the shortest heartbeat timeout, so that a list
// or a pull that takes its time does not look like a dead worker.
const heartbeatEvery = time.Second

// pulse beats until the returned function is called; details, when given, are
// what a later attempt starts from.
func pulse(ctx context.Context, details func() any) (stop func()) {
	if !activity.IsActivity(ctx) {
		return func() {}
	}
	quit, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(heartbeatEvery)
		defer tick.Stop()
		for {
			if details == nil {
				activity.RecordHeartbeat(ctx)
			} else {
				activity.RecordHeartbeat(ctx, details())
			}
			select {
			case <-quit:
				return
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return func() { close(quit); <-ended }
}

// beater is beat as kube.Wait wants it: the last finding is the detail.
func beater(ctx context.Context) func(string) {
	return func(found string) { beat(ctx, found) }
}

var inRow = finding.InRow
