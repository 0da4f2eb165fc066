package tensorfusion

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/kube"
)

// CheckDrift compares the live UIDs with a snapshot (P12, P14).
func (a *Activities) CheckDrift(ctx context.Context, req DriftRequest) (DriftResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return DriftResult{}, err
	}
	return checkDrift(ctx, c, req)
}

func checkDrift(ctx context.Context, c *kube.Client, req DriftRequest) (DriftResult, error) {
	o := &Observation{
		Scope: req.Scope, Goal: Goal{PodName: podPrefix}, Objects: req.Snapshot.Objects,
		Before: req.Snapshot, Planned: req.Planned, PlannedWorkers: req.PlannedWorkers,
	}
	var err error
	if o.Hosts, err = readHosts(ctx, c, req.Release.Namespace, ""); err != nil {
		return DriftResult{}, kube.Wrap(err, "GPU hosts")
	}
	if o.Workers, err = list[corev1.Pod](ctx, c, podsGVR, "", workerSelector); err != nil {
		return DriftResult{}, kube.Wrap(err, "worker pods")
	}
	if o.Workloads, err = list[FusionWorkload](ctx, c, workloadsGVR, "", ""); err != nil {
		return DriftResult{}, kube.Wrap(err, "TensorFusionWorkloads")
	}
	if req.Allocations {
		if err := o.readController(ctx, c); err != nil {
			return DriftResult{}, err
		}
		if o.Objects, err = contents(ctx, c, req.Scope); err != nil {
			return DriftResult{}, err
		}
	}
	out := DriftResult{Snapshot: o.snapshot()}
	out.Snapshot.Ports = req.Snapshot.Ports
	if o.Allocated == nil { // not asked, or no answer now: the last known ones stand
		out.Snapshot.carry(req.Snapshot)
	}
	for _, check := range runChecks(o, StageDrift, nil) {
		out.Findings = append(out.Findings, check.Findings...)
	}
	for _, f := range inventoryFindings(req.Snapshot, out.Snapshot) {
		f.Row = "P14"
		out.Findings = append(out.Findings, f)
	}
	return out, nil
}
