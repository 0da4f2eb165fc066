package tensorfusion

import (
	"context"
	"strings"

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
	var reader hostReader
	err := c.Await(ctx, kube.Wait{What: "settled installation", Limit: req.Limit, Heartbeat: beater(ctx)},
		func(objects kube.Objects) (bool, string, error) {
			o := &Observation{Goal: req.Goal, Rolled: req.Rolled}
			var err error
			if o.Hosts, err = reader.views(objects[2], objects[3], objects[4]); err != nil {
				return false, "", err
			}
			for _, u := range objects[0] {
				fc, err := decode[FusionCluster](u)
				if err != nil {
					return false, "", err
				}
				o.Clusters = append(o.Clusters, fc)
			}
			for _, u := range objects[1] {
				p, err := decode[FusionPool](u)
				if err != nil {
					return false, "", err
				}
				o.Pools = append(o.Pools, p)
			}
			open := append(append(checkPhases(o), checkOnePod(o)...), checkHosts(o)...)
			if len(open) == 0 {
				return true, "", nil
			}
			return false, open[0].String(), nil
		},
		kube.Selection{Resource: clustersGVR},
		kube.Selection{Resource: poolsGVR},
		kube.Selection{Resource: gpuNodesGVR},
		kube.Selection{Resource: podsGVR, Namespace: req.Release.Namespace, Labels: labelComponent + "=" + componentHypervisor},
		kube.Selection{Resource: gpusGVR})
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
