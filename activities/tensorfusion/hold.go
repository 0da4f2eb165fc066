package tensorfusion

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// Hold switches the controller's own rollouts off (P10): the three flags
// become false on the live TensorFusionCluster, never on a GPUPool (T13), and
// every GPUPool is watched until it shows them.
//
// The policies as found are written on the TensorFusionCluster in the same
// patch, so a lost reply or a dead run does not lose them.
func (a *Activities) Hold(ctx context.Context, req HoldRequest) (HoldResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return HoldResult{}, err
	}
	out, err := hold(ctx, c, req)
	return out, inRow(err, "P10")
}

func hold(ctx context.Context, c *kube.Client, req HoldRequest) (HoldResult, error) {
	var out HoldResult
	start := time.Now()
	want := map[string]PoolPolicy{}
	synced, err := syncedPools(ctx, c)
	if err != nil {
		return out, err
	}
	if err := patchClusters(ctx, c, func(b *clusterPatch) error {
		return planHold(b, req, synced, &out, want)
	}); err != nil {
		return out, err
	}
	last := ""
	err = c.Await(ctx, kube.Wait{
		What:      "hold of the update policy in every GPUPool",
		Limit:     req.Limit,
		Heartbeat: beater(ctx),
		Next: "check that the controller runs and has a leader: it copies the TensorFusionCluster into its GPUPools. " +
			"When that can't be had and every hypervisor may be away at once, abort and start again with P10 in acknowledge",
	}, func(objects kube.Objects) (bool, string, error) {
		found, err := poolsShow(objects[0], want)
		if err == nil && found == "" && req.Nudge {
			found, err = poolsPending(objects[0], want)
		}
		last = found
		return found == "", found, err
	}, kube.Selection{Resource: poolsGVR})
	out.Waited = time.Since(start).Round(time.Millisecond)
	if _, class, told := finding.Of(err); req.Outage && last != "" && told && class == finding.Stop && ctx.Err() == nil {
		out.Unheld, err = last, nil
	}
	return out, err
}

// planHold adds one cluster's part of the hold to its patch. It may run again
// after a conflict: results are keyed by pool, and the first sight counts.
func planHold(b *clusterPatch, req HoldRequest, synced map[string]bool, out *HoldResult, want map[string]PoolPolicy) error {
	recorded := recordedPolicies(b.cluster)
	rolling := b.cluster.Annotations[annotationRollingWorkers]
	var before []PoolPolicy
	changed := false
	for i, e := range b.cluster.Spec.GPUPools {
		live := policyOf(b.cluster.Name, e)
		was, known := recorded[live.Pool]
		switch {
		case known && (live.held() || req.Assert):
			before = append(before, was)
		case known && rolling == live.Pool && live.onlyWorkers():
			// A run that was terminated in the middle of its worker rollout.
			before = append(before, was)
		default:
			before = append(before, live)
		}
		want[live.Pool] = live.hold()
		if !live.held() || live.Missing {
			changed = true
			b.set(i, live.hold())
		}
		if req.Assert && !live.held() {
			report(out, live)
		}
		if req.Nudge {
			nudged, err := b.nudge(i, synced[live.Pool], time.Now())
			if err != nil {
				return err
			}
			changed = changed || nudged
		}
		for _, u := range req.Undo {
			if u.Pool == live.Pool && u.Nudge != live.Nudge {
				if err := b.setNudge(i, u.Nudge); err != nil {
					return err
				}
			}
		}
	}
	for _, p := range before {
		if !slices.ContainsFunc(out.Before, func(o PoolPolicy) bool { return o.Pool == p.Pool }) {
			out.Before = append(out.Before, p)
		}
	}
	b.annotate(annotationRollingWorkers, "")
	if changed {
		note, err := json.Marshal(before)
		if err != nil {
			return fmt.Errorf("recording the policy of TensorFusionCluster/%s: %w", b.cluster.Name, err)
		}
		b.annotate(annotationPolicyBefore, string(note))
	}
	return nil
}

// report adds the finding of a flag that somebody set back to true.
func report(out *HoldResult, live PoolPolicy) {
	object := "TensorFusionCluster, policy of GPUPool/" + live.Pool
	if slices.ContainsFunc(out.Broken, func(f finding.Finding) bool { return f.Object == object }) {
		return
	}
	out.Broken = append(out.Broken, finding.Finding{
		Row:      "P10",
		Object:   object,
		Expected: "the three autoUpdate flags false while a run works",
		Found: fmt.Sprintf("hypervisor=%t worker=%t client=%t; put back to false",
			live.AutoHypervisor, live.AutoWorker, live.AutoClient),
		Why:  "with a flag true the controller replaces components in its own batches, unproven",
		Next: "find who writes the TensorFusionCluster (GitOps, a person, another Helm run) and stop it for the time of the run",
	})
}

// syncedPools tells which GPUPools store hypervisorConfigSynced=true now.
func syncedPools(ctx context.Context, c *kube.Client) (map[string]bool, error) {
	pools, err := list[FusionPool](ctx, c, poolsGVR, "", "")
	if err != nil {
		return nil, kube.Wrap(err, "GPUPools")
	}
	out := map[string]bool{}
	for _, p := range pools {
		out[p.Name] = p.Status.Components.HypervisorSynced
	}
	return out, nil
}

// poolsPending says which GPUPool does not store synced=false yet.
func poolsPending(pools []metav1.Object, want map[string]PoolPolicy) (string, error) {
	for _, u := range pools {
		p, err := decode[FusionPool](u)
		if err != nil {
			return "", err
		}
		if _, ours := want[p.Name]; ours && p.Status.Components.HypervisorSynced {
			return fmt.Sprintf("GPUPool/%s still stores hypervisorConfigSynced=true", p.Name), nil
		}
	}
	return "", nil
}

func sortedKeys[K ~string, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// jsonPointer escapes one step of a JSON pointer.
func jsonPointer(s string) string {
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(s)
}
