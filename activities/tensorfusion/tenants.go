package tensorfusion

import (
	"context"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/refit-run/refit/activities/kube"
)

// TenantsActivity tells whose the MIG instances of one node are.
const TenantsActivity = "tensorfusion.Tenants"

// TenantsRequest names a node of any cluster, with TensorFusion or without.
type TenantsRequest struct {
	Target kube.Target `json:"target"`
	Node   string      `json:"node"`
}

// TenantsResult: where TensorFusion shares the GPUs of the node out as MIG
// instances, these are its tenants' partitions.
type TenantsResult struct {
	Partitioned bool `json:"partitioned,omitempty"`
	// Why names what says so.
	Why string `json:"why,omitempty"`
}

// isolationPartitioned is the isolation mode whose partitions are MIG instances.
const isolationPartitioned = "partitioned"

// Tenants looks at everything that tells the isolation mode of a node. One that
// says partitioned is enough: an instance taken for ours by mistake is gone.
func (a *Activities) Tenants(ctx context.Context, r TenantsRequest) (TenantsResult, error) {
	c, err := a.Clusters.Connect(ctx, r.Target)
	if err != nil {
		return TenantsResult{}, err
	}
	what := "isolation mode of node " + r.Node
	nodes, err := namedBy(ctx, c, gpuNodesGVR, metav1.ListOptions{FieldSelector: "metadata.name=" + r.Node})
	if err != nil || len(nodes) == 0 {
		return TenantsResult{}, kube.Wrap(err, what)
	}
	if nodes[0].GetLabels()[labelIsolation] == isolationPartitioned {
		return tenantsBy("GPUNode/%s has the label %s=%s", r.Node, labelIsolation, isolationPartitioned), nil
	}
	gpus, err := namedBy(ctx, c, gpusGVR, metav1.ListOptions{LabelSelector: labelManagedBy + "=" + r.Node})
	if err != nil {
		return TenantsResult{}, kube.Wrap(err, what)
	}
	for _, g := range gpus {
		for _, field := range []string{"isolationMode", "activeIsolationMode"} {
			if mode, _, _ := unstructured.NestedString(g.Object, "status", field); mode == isolationPartitioned {
				return tenantsBy("GPU/%s has status.%s %s", g.GetName(), field, mode), nil
			}
		}
	}
	pods, err := c.Typed.CoreV1().Pods("").List(ctx, metav1.ListOptions{
		LabelSelector: labelComponent + "=" + componentHypervisor, FieldSelector: "spec.nodeName=" + r.Node,
	})
	if err != nil {
		return TenantsResult{}, kube.Wrap(err, what)
	}
	for i := range pods.Items {
		if p := &pods.Items[i]; partitioned(p) {
			return tenantsBy("hypervisor Pod %s/%s runs in this mode", p.Namespace, p.Name), nil
		}
	}
	out, err := poolSharesOut(ctx, c, nodes[0], len(pods.Items) > 0)
	return out, kube.Wrap(err, what)
}

// poolSharesOut looks at the pool's declaration. A rule stands for some of its
// nodes only: it speaks for this one as long as no hypervisor says otherwise.
func poolSharesOut(ctx context.Context, c *kube.Client, node unstructured.Unstructured, hypervisor bool) (TenantsResult, error) {
	pools, err := namedBy(ctx, c, poolsGVR, metav1.ListOptions{})
	if err != nil {
		return TenantsResult{}, err
	}
	for _, p := range pools {
		if node.GetLabels()[poolLabel(p.GetName())] != "true" {
			continue
		}
		mode, _, _ := unstructured.NestedString(p.Object, "spec", "nodeManagerConfig", "defaultIsolationMode")
		rules, _, _ := unstructured.NestedSlice(p.Object, "spec", "nodeManagerConfig", "isolationModeRules")
		ruled := slices.ContainsFunc(rules, func(rule any) bool {
			fields, _ := rule.(map[string]any)
			return fields["mode"] == isolationPartitioned
		})
		switch {
		case mode == isolationPartitioned && (len(rules) == 0 || !hypervisor):
			return tenantsBy("GPUPool/%s has defaultIsolationMode %s", p.GetName(), mode), nil
		case ruled && !hypervisor:
			return tenantsBy("GPUPool/%s has a rule for %s, and no hypervisor tells whether it is of this node", p.GetName(), isolationPartitioned), nil
		}
	}
	return TenantsResult{}, nil
}

func tenantsBy(format string, args ...any) TenantsResult {
	return TenantsResult{Partitioned: true, Why: fmt.Sprintf(format, args...)}
}

// namedBy lists objects of a kind; where the cluster does not know the kind
// there are none.
func namedBy(ctx context.Context, c *kube.Client, gvr schema.GroupVersionResource, o metav1.ListOptions) ([]unstructured.Unstructured, error) {
	found, err := c.Dynamic.Resource(gvr).List(ctx, o)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", strings.ToLower(gvr.Resource), err)
	}
	return found.Items, nil
}
