package tensorfusion

import (
	"context"
	"fmt"
	"time"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
)

// UpgradeRelease brings the release to the intent: in a child process, fenced
// by the Lease, with the policy pins in the manifest (T08, T11, T26, P10). A
// TensorFusionCluster that the chart does not manage is edited directly.
func (a *Activities) UpgradeRelease(ctx context.Context, req ReleaseRequest) (ReleaseResult, error) {
	defer pulse(ctx, nil)()
	until := time.Now().Add(req.Limit)
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return ReleaseResult{}, err
	}
	r, err := a.resolve(ctx, c, req.Scope, req.Intent)
	if err != nil {
		return ReleaseResult{}, err
	}
	// What pulling the chart took is not Helm's any more: its own deadline must
	// come before the activity's, which says nothing.
	req.Limit = max(time.Until(until), time.Second)
	out, err := upgradeRelease(ctx, c, req, r)
	return out, r.masker.Error(inRow(err, "T08"))
}

func upgradeRelease(ctx context.Context, c *kube.Client, req ReleaseRequest, r *resolved) (ReleaseResult, error) {
	done, err := helm.Upgrade(ctx, c, helm.UpgradeRequest{
		Target: req.Target, Namespace: req.Release.Namespace, Release: req.Release.Name,
		Chart: r.chart, Values: r.values, Pins: r.pins,
		Holder: req.Holder, Mark: r.intent.Digest, SecretPaths: r.secretPaths, FromRevision: req.FromRevision,
		Limit: req.Limit, Heartbeat: beater(ctx), Masker: r.masker,
	})
	if err != nil {
		return ReleaseResult{}, err
	}
	deployed, err := helm.Current(ctx, c, req.Release.Namespace, req.Release.Name)
	if err != nil {
		return ReleaseResult{}, err
	}
	out := ReleaseResult{Revision: deployed.Version, Already: done.Already}
	if out.Deployed, err = helm.Stamp(ctx, c, deployed); err != nil {
		return out, err
	}
	if deployed.Chart != nil && deployed.Chart.Metadata != nil {
		out.Chart = deployed.Chart.Metadata.Version
	}
	if paths := r.differing(deployed.Config); len(paths) > 0 {
		return out, finding.Finding{
			Object: fmt.Sprintf("release %s revision %d", req.Release.Name, deployed.Version), Expected: "the values of the plan",
			Found: fmt.Sprintf("%d paths differ, first %s", len(paths), paths[0]),
			Why:   "another engine upgraded the release in between", Next: "look at the release's history",
		}.Error(finding.Stop)
	}
	target, err := r.targetSide()
	if err != nil {
		return out, err
	}
	return out, settleClusters(ctx, c, r, target)
}

// settleClusters makes the live TensorFusionClusters what the run needs: held,
// and of the target's hypervisor image where Helm does not manage them
// (cluster.enabled false, T11). The patch names its field manager; it is no
// server-side apply, because gpuPools is one atomic list that applying would
// take over whole.
func settleClusters(ctx context.Context, c *kube.Client, r *resolved, target Side) error {
	managed := map[string]bool{}
	for _, fc := range target.Clusters {
		managed[fc.Name] = true
	}
	return patchClusters(ctx, c, func(b *clusterPatch) error {
		for i, e := range b.cluster.Spec.GPUPools {
			b.set(i, policyOf(b.cluster.Name, e).hold())
			h := e.Spec.Components.Hypervisor
			if managed[b.cluster.Name] || r.intent.HypervisorImage == "" || h == nil || h.Image == r.intent.HypervisorImage {
				continue
			}
			b.add(entryPath(i, "/componentConfig/hypervisor/image"), r.intent.HypervisorImage)
		}
		return nil
	})
}
