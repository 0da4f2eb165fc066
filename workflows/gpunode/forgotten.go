package gpunode

import (
	"errors"
	"fmt"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/node"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

// GiveBack gives foreign automation a node back that a GPUNode kept it off and was
// ended by force before it could. A node that another run works on now is left
// to that run. A cordon of the ended run stays, with a warning: nothing proves
// the set-up of the host. The target was identified before; the Lease is given
// back however it ends, so that a GPUNode of the host can still have it.
func GiveBack(ctx workflow.Context, s *stage.Scope, target kube.Target, name string) error {
	l, err := release.Acquire(ctx, s, scope(target, name))
	if err != nil || l.Refused != nil {
		return err
	}
	cluster := target.Cluster
	var out node.Result
	err = release.Do(ctx, s, cluster, node.GiveBackActivity, "give foreign automation back "+name, callLimit,
		request(l.Scope, name, "", l.Holder), &out)
	if out.Changed {
		s.Run().Warn(fmt.Sprintf("Node %s: label %s is as it was before a run that was ended by force (%s)", name, node.ManagedLabel, out.Before))
	}
	if out.Inherited {
		s.Run().Warn(cordonStays(name))
	}
	return errors.Join(err, release.Do(ctx, s, cluster, lease.ReleaseActivity, "give the Lease of "+l.Scope.Release.Name+" back", callLimit, lease.ReleaseRequest{
		Target: l.Scope.Target, Namespace: l.Scope.Release.Namespace, Release: l.Scope.Release.Name, Holder: l.Holder,
	}, nil))
}

// cordonStays is what a person reads of a cordon that is left on purpose.
func cordonStays(name string) string {
	return fmt.Sprintf(
		"Node %[1]s stays cordoned, because the host is not proven: a run with cordon that proves it uncordons it; by hand it is kubectl uncordon %[1]s", name)
}
