package tensorfusion

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/finding"
)

// checkCRDs requires the target's CRDs to keep every served version and every
// field. A rollback to a stored revision applies no CRDs at all.
func checkCRDs(o *Observation) []finding.Finding {
	if o.Intent.Chart.Revision != 0 {
		return nil
	}
	var out []finding.Finding
	for _, target := range o.Target.CRDs {
		live := o.CRDs[target.Name]
		if live == nil {
			continue
		}
		for _, v := range live.Spec.Versions {
			if !v.Served {
				continue
			}
			t := versionOf(target, v.Name)
			if t == nil || !t.Served {
				out = append(out, lostField(target.Name, "version "+v.Name))
				continue
			}
			if v.Schema == nil || t.Schema == nil {
				continue
			}
			for _, path := range lostFields(v.Schema.OpenAPIV3Schema, t.Schema.OpenAPIV3Schema, "") {
				out = append(out, lostField(target.Name, "field "+path))
			}
		}
	}
	return out
}

func lostField(crd, what string) finding.Finding {
	return finding.Finding{
		Object: "CustomResourceDefinition/" + crd, Expected: "a superset of the installed one", Found: what + " is missing or of another type in the target chart",
		Why:  "fields that leave a CRD are pruned from the stored objects: their data is lost",
		Next: "choose a chart whose CRDs keep it",
	}
}

func versionOf(crd *apiextensionsv1.CustomResourceDefinition, name string) *apiextensionsv1.CustomResourceDefinitionVersion {
	for i := range crd.Spec.Versions {
		if crd.Spec.Versions[i].Name == name {
			return &crd.Spec.Versions[i]
		}
	}
	return nil
}

// lostFields lists the paths of live that target lacks or types differently.
func lostFields(live, target *apiextensionsv1.JSONSchemaProps, path string) []string {
	if live == nil {
		return nil
	}
	if target == nil {
		return []string{orRoot(path)}
	}
	open := target.XPreserveUnknownFields != nil && *target.XPreserveUnknownFields
	if live.Type != target.Type && !target.XIntOrString {
		return []string{orRoot(path)}
	}
	var out []string
	for _, name := range sortedKeys(live.Properties) {
		l := live.Properties[name]
		t, ok := target.Properties[name]
		switch {
		case ok:
			out = append(out, lostFields(&l, &t, path+"."+name)...)
		case !open:
			out = append(out, path+"."+name)
		}
	}
	if live.Items != nil && live.Items.Schema != nil && target.Items != nil {
		out = append(out, lostFields(live.Items.Schema, target.Items.Schema, path+"[]")...)
	}
	if l, t := live.AdditionalProperties, target.AdditionalProperties; l != nil && l.Schema != nil && !open {
		if t == nil {
			out = append(out, path+"{}")
		} else if t.Schema != nil {
			out = append(out, lostFields(l.Schema, t.Schema, path+"{}")...)
		}
	}
	return out
}

func orRoot(path string) string {
	if path == "" {
		return "."
	}
	return path
}

// precious kinds hold data, or take everything below them along.
var precious = []string{"Namespace", "PersistentVolumeClaim", "StatefulSet", "CustomResourceDefinition", "TensorFusionCluster"}

// checkDeletions refuses what cannot be brought back by another upgrade.
func checkDeletions(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, c := range o.Changes {
		switch {
		case c.Action == "delete" && slices.Contains(precious, c.Kind):
			out = append(out, finding.Finding{Object: c.Object, Expected: "kept", Found: "the upgrade deletes it",
				Why:  "its data, or everything in it, goes with it",
				Next: "keep it in the values, or annotate it with helm.sh/resource-policy: keep first"})
		case c.Kind == "StatefulSet" && c.Old != nil && c.New != nil && claimsDiffer(c.Old, c.New):
			out = append(out, finding.Finding{Object: c.Object, Expected: "unchanged volumeClaimTemplates", Found: "the upgrade changes them",
				Why:  "Kubernetes refuses the update and the Helm step fails half way",
				Next: "leave persistence as it is; to change it delete the StatefulSet with orphan propagation first"})
		}
	}
	if len(o.Target.Clusters) == 0 {
		return out
	}
	// An entry that leaves spec.gpuPools takes its GPUPool along.
	target := entriesOf(o.Target.Clusters)
	for _, pool := range sortedKeys(entriesOf(o.Clusters)) {
		if _, kept := target[pool]; !kept {
			out = append(out, finding.Finding{Object: "GPUPool/" + pool, Expected: "its entry in spec.gpuPools", Found: "the rendered TensorFusionCluster has none",
				Why: "the controller deletes a pool whose entry is renamed or removed", Next: "keep the entry's name in the values"})
		}
	}
	return out
}

func claimsDiffer(a, b *unstructured.Unstructured) bool {
	return !reflect.DeepEqual(claims(a), claims(b))
}

// claims reduces volumeClaimTemplates to what a chart sets: the API server
// fills in defaults that say nothing.
func claims(u *unstructured.Unstructured) []string {
	list, _, _ := unstructured.NestedSlice(u.Object, "spec", "volumeClaimTemplates")
	var out []string
	for _, item := range list {
		m, ok := item.(map[string]any)
		if !ok {
			continue
		}
		name, _, _ := unstructured.NestedString(m, "metadata", "name")
		class, _, _ := unstructured.NestedString(m, "spec", "storageClassName")
		size, _, _ := unstructured.NestedFieldNoCopy(m, "spec", "resources", "requests", "storage")
		out = append(out, fmt.Sprintf("%s %s %v", name, class, size))
	}
	return out
}

// checkRoles requires the rendered ClusterRoles to keep every right that the
// running ones grant, and the controller's to reach every kind of the target's
// CRDs; once Helm is done, the live controller to have every right that it is
// known to use.
func checkRoles(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, r := range o.Lacking {
		out = append(out, finding.Finding{Object: "ServiceAccount of the controller", Expected: "may " + r, Found: "denied",
			Why: "the controller's code does this: it would fail at it from now on", Next: "grant it in an extra ClusterRole and a binding, then retry"})
	}
	target := clusterRoles(o.Target.Objects)
	source := clusterRoles(o.Source.Objects)
	for _, name := range sortedKeys(source) {
		t, ok := target[name]
		if !ok {
			out = append(out, finding.Finding{Object: "ClusterRole/" + name, Expected: "in the target chart", Found: "not rendered",
				Next: "compare the charts' roles by hand; the controller may need it"})
			continue
		}
		for _, right := range rights(source[name]) {
			if !right.grantedBy(t) {
				out = append(out, finding.Finding{Object: "ClusterRole/" + name, Expected: "grants " + right.String(), Found: "the target chart drops it",
					Why: "charts have lagged behind the controller's code before", Next: "choose a chart that grants it, or add the rule to the chart"})
			}
		}
	}
	if len(target) == 0 {
		return out
	}
	var all []rbacv1.PolicyRule
	for _, name := range sortedKeys(target) {
		all = append(all, target[name]...)
	}
	for _, crd := range o.Target.CRDs {
		for _, verb := range []string{"get", "list", "watch"} {
			r := right{crd.Spec.Group, crd.Spec.Names.Plural, verb}
			if !r.grantedBy(all) {
				out = append(out, finding.Finding{Object: "ClusterRoles of the target chart", Expected: "grant " + r.String(), Found: "no rule does",
					Why: "the new controller watches every kind of its CRDs", Next: "choose a chart that grants it, or add the rule to the chart"})
			}
		}
	}
	return out
}

func clusterRoles(objects []*unstructured.Unstructured) map[string][]rbacv1.PolicyRule {
	out := map[string][]rbacv1.PolicyRule{}
	for _, u := range objects {
		if u.GetKind() != "ClusterRole" {
			continue
		}
		if role, err := decode[rbacv1.ClusterRole](u); err == nil {
			out[role.Name] = role.Rules
		}
	}
	return out
}

// right is one (group, resource, verb).
type right struct{ group, resource, verb string }

func (r right) String() string {
	group := r.group
	if group == "" {
		group = "core"
	}
	return strings.Join([]string{r.verb, r.resource, "in group", group}, " ")
}

func rights(rules []rbacv1.PolicyRule) []right {
	var out []right
	for _, rule := range rules {
		for _, g := range rule.APIGroups {
			for _, res := range rule.Resources {
				for _, v := range rule.Verbs {
					out = append(out, right{g, res, v})
				}
			}
		}
	}
	return out
}

func (r right) grantedBy(rules []rbacv1.PolicyRule) bool {
	has := func(list []string, want string) bool {
		return slices.Contains(list, "*") || slices.Contains(list, want)
	}
	for _, rule := range rules {
		if has(rule.APIGroups, r.group) && has(rule.Resources, r.resource) && has(rule.Verbs, r.verb) {
			return true
		}
	}
	return false
}
