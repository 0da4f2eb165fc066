package tensorfusion

import (
	"context"
	"strings"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/kube"
)

// What the controller is known to do: it makes, overwrites and deletes pools and
// nodes, makes and deletes pods, watches Nodes, leads by a Lease and writes its
// address into a ConfigMap (facts, sections 3 and 4). Code may write by update or
// by patch: either will do (see lacking).
var (
	controllerRules = []rbacv1.PolicyRule{
		rule(apiGroup, "gpupools", "create", "update", "delete"),
		rule(apiGroup, "gpunodes", "create", "update", "delete"),
		rule("", "pods", "get", "list", "watch", "create", "update", "delete"),
		rule("", "nodes", "get", "list", "watch"),
	}
	controllerRulesAtHome = []rbacv1.PolicyRule{
		rule("coordination.k8s.io", "leases", "get", "create", "update"),
		rule("", "configmaps", "get", "create", "update"),
	}
	// statusWritten are the kinds whose status the controller keeps.
	statusWritten = []string{"tensorfusionclusters", "gpupools", "gpunodes", "gpus", "tensorfusionworkloads"}
)

// controllerDemands are the rights that the controller needs: those above, and
// to watch every kind of its CRDs.
func controllerDemands(namespace string, crds []*apiextensionsv1.CustomResourceDefinition) []demand {
	rules := controllerRules
	for _, crd := range crds {
		rules = append(rules[:len(rules):len(rules)], rule(crd.Spec.Group, crd.Spec.Names.Plural, "get", "list", "watch"))
	}
	for _, plural := range statusWritten {
		rules = append(rules, rule(apiGroup, plural+"/status", "update"))
	}
	out := demands(rules)
	for _, d := range demands(controllerRulesAtHome) {
		d.namespace = namespace
		out = append(out, d)
	}
	return out
}

// lacking asks the API server which rights the ServiceAccount of the live
// controller lacks (P05), whatever roles grant them.
func lacking(ctx context.Context, c *kube.Client, namespace string, crds []*apiextensionsv1.CustomResourceDefinition) ([]string, error) {
	d, err := controllerDeployment(ctx, c, namespace)
	if err != nil {
		return nil, err
	}
	account := d.Spec.Template.Spec.ServiceAccountName
	if account == "" {
		account = "default"
	}
	allowed := func(ctx context.Context, attributes authorizationv1.ResourceAttributes) (bool, error) {
		review, err := c.Typed.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{
				User:               strings.Join([]string{"system:serviceaccount", namespace, account}, ":"),
				Groups:             []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
				ResourceAttributes: &attributes,
			},
		}, metav1.CreateOptions{})
		return err == nil && review.Status.Allowed, kube.Wrap(err, "review of the rights of ServiceAccount/"+namespace+"/"+account)
	}
	return unmet(ctx, controllerDemands(namespace, crds), func(ctx context.Context, attributes authorizationv1.ResourceAttributes) (bool, error) {
		ok, err := allowed(ctx, attributes)
		if ok || err != nil || attributes.Verb != "update" {
			return ok, err
		}
		attributes.Verb = "patch"
		return allowed(ctx, attributes)
	})
}
