package tensorfusion

import (
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/kube"
)

// What the diff and Helm do to an object that the chart renders, to one that
// leaves it, and to a hook, whose end Helm waits for.
var (
	verbsOfRendered = []string{"get", "create", "patch"}
	verbsOfRemoved  = []string{"get", "delete"}
	verbsOfHook     = []string{"get", "list", "watch", "create", "patch", "delete"}
)

// chartRights are the rights that the upgrade of the release needs for the
// objects of its charts. Roles may grant more than the worker itself may do,
// which Kubernetes allows only who may escalate and bind.
func (r *resolved) chartRights(c *kube.Client, namespace string, current []*unstructured.Unstructured) ([]demand, error) {
	var out []demand
	add := func(objects []*unstructured.Unstructured, verbs []string) error {
		for _, u := range objects {
			mapping, err := c.Mapping(u.GroupVersionKind())
			if meta.IsNoMatchError(err) {
				continue // of a CRD that is not applied yet
			}
			if err != nil {
				return kube.Wrap(err, "kind of "+kube.Name(u))
			}
			where := ""
			if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
				where = orNamespace(u.GetNamespace(), namespace)
			}
			all := verbs
			switch u.GetKind() {
			case "ClusterRole", "Role":
				all = append(slices.Clone(verbs), "escalate")
			case "ClusterRoleBinding", "RoleBinding":
				kind, _, _ := unstructured.NestedString(u.Object, "roleRef", "kind")
				bound := demand{right: right{mapping.Resource.Group, "clusterroles", "bind"}}
				if kind == "Role" {
					bound = demand{right: right{mapping.Resource.Group, "roles", "bind"}, namespace: where}
				}
				out = append(out, bound)
			}
			for _, v := range all {
				out = append(out, demand{right{mapping.Resource.Group, mapping.Resource.Resource, v}, where})
			}
		}
		return nil
	}
	removed := slices.DeleteFunc(slices.Clone(current), func(u *unstructured.Unstructured) bool {
		return slices.ContainsFunc(r.rendered.Objects, func(t *unstructured.Unstructured) bool {
			return t.GroupVersionKind().GroupKind() == u.GroupVersionKind().GroupKind() && kube.Name(t) == kube.Name(u)
		})
	})
	for _, part := range []struct {
		objects []*unstructured.Unstructured
		verbs   []string
	}{{r.rendered.Objects, verbsOfRendered}, {removed, verbsOfRemoved}, {r.rendered.Hooks, verbsOfHook}} {
		if err := add(part.objects, part.verbs); err != nil {
			return nil, err
		}
	}
	// Several objects of a kind ask for the same.
	seen := map[demand]bool{}
	return slices.DeleteFunc(out, func(q demand) bool {
		was := seen[q]
		seen[q] = true
		return was
	}), nil
}
