package tensorfusion

import (
	"context"
	"errors"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
)

// Verify waits until the installation has settled and then judges all of it:
// phases, one proven hypervisor per GPU node, workers, and the inventory equal
// to the backup's (T14, T15, T17-T19, P14).
func (a *Activities) Verify(ctx context.Context, req VerifyRequest) (VerifyResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return VerifyResult{}, err
	}
	return verify(ctx, c, req)
}

func verify(ctx context.Context, c *kube.Client, req VerifyRequest) (VerifyResult, error) {
	var out VerifyResult
	err := awaitSettled(ctx, c, req)
	// Past the deadline the checks below say what is still open.
	if _, class, ok := finding.Of(err); err != nil && (!ok || class != finding.Stop || ctx.Err() != nil) {
		return out, err
	}
	o, err := observe(ctx, c, req.Scope, req.Goal)
	if err != nil {
		return out, err
	}
	o.Before, o.Rolled = req.Snapshot, req.Rolled
	out.Checks = runChecks(o, StageVerify, nil)
	if req.Endpoint {
		found := askHypervisors(ctx, c, o)
		if len(found) > 0 {
			out.Checks = append(out.Checks, Check{Row: "T19", Class: finding.Stop, Findings: cutFindings(found)})
		}
	}
	current, err := helm.Current(ctx, c, req.Release.Namespace, req.Release.Name)
	if err != nil {
		return out, err
	}
	out.After = Versions{
		Controller: versionString(o.Source.Controller), Hypervisor: strings.Join(o.hypervisorImages(), ", "), Revision: current.Version,
	}
	if current.Chart != nil && current.Chart.Metadata != nil {
		out.After.Chart = current.Chart.Metadata.Version
	}
	return out, nil
}

// awaitSettled watches until nothing is open that Verify waits for. Workers and
// clients are watched only where the run replaced some: there may be thousands.
func awaitSettled(ctx context.Context, c *kube.Client, req VerifyRequest) error {
	var reader hostReader
	selections := []kube.Selection{
		{Resource: clustersGVR},
		{Resource: poolsGVR},
		{Resource: gpuNodesGVR},
		{Resource: podsGVR, Namespace: req.Release.Namespace, Labels: labelComponent + "=" + componentHypervisor},
		{Resource: gpusGVR},
	}
	watch := func(s ...kube.Selection) int {
		selections = append(selections, s...)
		return len(selections) - len(s)
	}
	workers, clients := 0, 0 // where in the objects they begin; 0 = not watched
	if len(req.Rolled.Workers)+len(req.Rolled.Completed) > 0 {
		workers = watch(kube.Selection{Resource: workloadsGVR}, kube.Selection{Resource: podsGVR, Labels: workerSelector})
	}
	if len(req.Rolled.Clients) > 0 {
		clients = watch(kube.Selection{Resource: podsGVR, Labels: clientPods})
	}
	return c.Await(ctx, kube.Wait{What: "settled installation", Limit: req.Limit, Heartbeat: beater(ctx),
		Next: "the checks name what is open"}, func(objects kube.Objects) (bool, string, error) {
		o := &Observation{Goal: req.Goal, Rolled: req.Rolled}
		var errs [6]error
		o.Hosts, errs[0] = reader.views(objects[2], objects[3], objects[4])
		o.Clusters, errs[1] = decodeAll[FusionCluster](objects[0])
		o.Pools, errs[2] = decodeAll[FusionPool](objects[1])
		if workers > 0 {
			o.Workloads, errs[3] = decodeAll[FusionWorkload](objects[workers])
			o.Workers, errs[4] = decodeAll[corev1.Pod](objects[workers+1])
		}
		if clients > 0 {
			o.Clients, errs[5] = decodeAll[corev1.Pod](objects[clients])
		}
		if err := errors.Join(errs[:]...); err != nil {
			return false, "", err
		}
		open := slices.Concat(checkPhases(o), checkOnePod(o), checkHosts(o), checkWorkers(o), checkClients(o))
		if len(open) == 0 {
			return true, "", nil
		}
		return false, open[0].String(), nil
	}, selections...)
}
