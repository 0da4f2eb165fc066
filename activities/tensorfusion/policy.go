package tensorfusion

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// poolName is the GPUPool that the controller derives from an entry.
func poolName(cluster, entry string) string { return cluster + "-" + entry }

// policyOf reads one entry's policy; PoolPolicy.Pool is the GPUPool's name.
func policyOf(cluster string, e PoolEntry) PoolPolicy {
	out := PoolPolicy{Pool: poolName(cluster, e.Name), Nudge: nudgeOf(e)}
	p := e.Spec.Policy()
	if p == nil {
		out.Missing = true
		return out
	}
	out.AutoHypervisor, out.AutoWorker, out.AutoClient = p.AutoHypervisor, p.AutoWorker, p.AutoClient
	if p.BatchPercentage != nil {
		out.BatchPercentage = *p.BatchPercentage
	}
	out.BatchInterval, out.MaxDuration = p.BatchInterval, p.MaxDuration
	out.MaintenanceWindow = p.Maintenance != nil && len(p.Maintenance.Includes) > 0
	return out
}

// held reports that nothing of the pool rolls by itself.
func (p PoolPolicy) held() bool { return !p.AutoHypervisor && !p.AutoWorker && !p.AutoClient }

// onlyWorkers reports that nothing but workers rolls by itself.
func (p PoolPolicy) onlyWorkers() bool { return p.AutoWorker && !p.AutoHypervisor && !p.AutoClient }

// hold is the policy with the three flags off.
func (p PoolPolicy) hold() PoolPolicy {
	p.AutoHypervisor, p.AutoWorker, p.AutoClient = false, false, false
	return p
}

// sameFlags compares what the controller acts on.
func (p PoolPolicy) sameFlags(o PoolPolicy) bool {
	return p.AutoHypervisor == o.AutoHypervisor && p.AutoWorker == o.AutoWorker && p.AutoClient == o.AutoClient
}

// recordedPolicies reads the policies that an earlier hold wrote on the
// cluster object.
func recordedPolicies(c FusionCluster) map[string]PoolPolicy {
	var stored []PoolPolicy
	if json.Unmarshal([]byte(c.Annotations[annotationPolicyBefore]), &stored) != nil {
		return nil // absent, or written by somebody else
	}
	out := make(map[string]PoolPolicy, len(stored))
	for _, p := range stored {
		out[p.Pool] = p
	}
	return out
}

// patchOp is one JSON patch operation.
type patchOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// clusterPatch builds a JSON patch of one TensorFusionCluster. gpuPools has no
// list-map key, so an entry is addressed by its index; the resourceVersion
// makes sure that the index still means the same entry.
type clusterPatch struct {
	cluster FusionCluster
	ops     []patchOp
}

func entryPath(index int, rest string) string {
	return "/spec/gpuPools/" + strconv.Itoa(index) + "/specTemplate" + rest
}

// set makes the entry's flags those of want, and its batches too where want
// names them.
func (b *clusterPatch) set(index int, want PoolPolicy) {
	const block = "/nodeManagerConfig/nodePoolRollingUpdatePolicy"
	spec := b.cluster.Spec.GPUPools[index].Spec
	have := policyOf(b.cluster.Name, b.cluster.Spec.GPUPools[index])
	fields := []struct {
		name    string
		value   any
		changed bool
	}{
		{"autoUpdateHypervisor", want.AutoHypervisor, want.AutoHypervisor != have.AutoHypervisor},
		{"autoUpdateWorker", want.AutoWorker, want.AutoWorker != have.AutoWorker},
		{"autoUpdateClient", want.AutoClient, want.AutoClient != have.AutoClient},
		{"batchPercentage", want.BatchPercentage, want.BatchPercentage != 0 && want.BatchPercentage != have.BatchPercentage},
		{"batchInterval", want.BatchInterval, want.BatchInterval != "" && want.BatchInterval != have.BatchInterval},
	}
	if have.Missing {
		// The whole block: controllers below 2.10 panic without one.
		policy := map[string]any{}
		for i, f := range fields {
			if i < 3 || f.changed {
				policy[f.name] = f.value
			}
		}
		if spec.NodeManager == nil {
			b.add(entryPath(index, "/nodeManagerConfig"), map[string]any{"nodePoolRollingUpdatePolicy": policy})
		} else {
			b.add(entryPath(index, block), policy)
		}
		return
	}
	for _, f := range fields {
		if f.changed {
			b.add(entryPath(index, block+"/"+f.name), f.value)
		}
	}
}

func (b *clusterPatch) add(path string, value any) {
	b.ops = append(b.ops, patchOp{Op: "add", Path: path, Value: value})
}

// annotate sets an annotation; an empty value removes it.
func (b *clusterPatch) annotate(key, value string) {
	path := "/metadata/annotations/" + jsonPointer(key)
	switch {
	case value == "" && b.cluster.Annotations[key] == "":
	case value == "":
		b.ops = append(b.ops, patchOp{Op: "remove", Path: path})
	case b.cluster.Annotations == nil:
		b.add("/metadata/annotations", map[string]string{key: value})
	default:
		b.add(path, value)
	}
}

// send applies the patch if it changes anything. A conflict means that the
// object moved on: the caller reads again.
func (b *clusterPatch) send(ctx context.Context, c *kube.Client) error {
	if len(b.ops) == 0 {
		return nil
	}
	ops := append([]patchOp{{Op: "replace", Path: "/metadata/resourceVersion", Value: b.cluster.ResourceVersion}}, b.ops...)
	data, err := json.Marshal(ops)
	if err != nil {
		return fmt.Errorf("patch of TensorFusionCluster/%s: %w", b.cluster.Name, err)
	}
	_, err = c.Dynamic.Resource(clustersGVR).Patch(ctx, b.cluster.Name, types.JSONPatchType, data,
		metav1.PatchOptions{FieldManager: fieldManager})
	return err
}

// patchAttempts bounds how often a patch is rebuilt after somebody else wrote
// the object in between.
const patchAttempts = 8

// patchClusters reads every TensorFusionCluster, lets build say what changes,
// and sends it; after a conflict it reads and builds anew.
func patchClusters(ctx context.Context, c *kube.Client, build func(*clusterPatch) error) error {
	for range patchAttempts {
		clusters, err := readClusters(ctx, c)
		if err != nil {
			return err
		}
		conflict := false
		for _, fc := range clusters {
			b := &clusterPatch{cluster: fc}
			if err := build(b); err != nil {
				return err
			}
			switch err := b.send(ctx, c); {
			case apierrors.IsConflict(err):
				conflict = true
			case err != nil:
				return kube.Wrap(err, "patch of TensorFusionCluster/"+fc.Name)
			}
		}
		if !conflict {
			return nil
		}
	}
	return finding.Finding{
		Object: "TensorFusionCluster", Expected: "a quiet object",
		Found: fmt.Sprintf("it changed under each of %d patches", patchAttempts),
		Next:  "find who writes it all the time (managedFields, audit log) and stop it for the time of the run",
	}.Error(finding.Retry)
}

// readClusters lists the TensorFusionClusters; none is a finding, because then
// there is nothing to hold, upgrade or roll.
func readClusters(ctx context.Context, c *kube.Client) ([]FusionCluster, error) {
	out, err := list[FusionCluster](ctx, c, clustersGVR, "", "")
	if err != nil {
		return nil, kube.Wrap(err, "TensorFusionClusters")
	}
	if len(out) == 0 {
		return nil, finding.Finding{
			Object: "TensorFusionCluster", Expected: "at least one", Found: "none in the cluster",
			Next: "check that the plan names the right cluster and that TensorFusion is installed there",
		}.Error(finding.Stop)
	}
	return out, nil
}

// poolsShow says which GPUPool does not show the policy wanted for it yet, ""
// when all do.
func poolsShow(pools []metav1.Object, want map[string]PoolPolicy) (string, error) {
	seen := map[string]FusionPool{}
	for _, u := range pools {
		p, err := decode[FusionPool](u)
		if err != nil {
			return "", err
		}
		seen[p.Name] = p
	}
	for _, name := range sortedKeys(want) {
		p, ok := seen[name]
		if !ok {
			return fmt.Sprintf("GPUPool/%s does not exist", name), nil
		}
		have := PoolPolicy{}
		if policy := p.Spec.Policy(); policy != nil {
			have.AutoHypervisor, have.AutoWorker, have.AutoClient = policy.AutoHypervisor, policy.AutoWorker, policy.AutoClient
		}
		if !have.sameFlags(want[name]) {
			return fmt.Sprintf("GPUPool/%s still shows autoUpdate hypervisor=%t worker=%t client=%t",
				name, have.AutoHypervisor, have.AutoWorker, have.AutoClient), nil
		}
	}
	return "", nil
}
