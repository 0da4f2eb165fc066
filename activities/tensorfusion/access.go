package tensorfusion

import (
	"context"
	"strings"
	"sync"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/kube"
)

// needed is every right that the activities of an upgrade use by themselves, in
// the whole cluster; deploy/worker/rbac.yaml grants this and what the runs on
// datastores need. What Helm does to the chart's objects comes on top
// (chartRights).
var needed = []rbacv1.PolicyRule{
	rule(apiGroup, "*", "list"), // the backup: every kind of the group, a newer version's too
	rule(apiGroup, "tensorfusionclusters", "get", "watch", "patch"),
	rule(apiGroup, "gpupools", "get", "watch"),
	rule(apiGroup, "gpunodes", "watch"),
	rule(apiGroup, "gpus", "watch"),
	rule(apiGroup, "tensorfusionworkloads", "watch"),
	rule(apiGroup, "providerconfigs", "watch"),
	rule(apiGroup, "schedulingconfigtemplates", "get"),
	rule("", "namespaces", "get"), // kube-system: which cluster this is
	rule("", "nodes", "get", "list", "watch", "patch"),
	rule("", "pods", "list", "watch", "create", "delete"),
	rule("", "pods/log", "get"),
	rule("", "pods/eviction", "create"),
	rule("", "pods/portforward", "get", "create"), // by WebSocket, by SPDY
	rule("", "services", "get"),
	rule("", "secrets", "get", "list", "create", "update", "delete"), // Helm's revisions
	rule("", "configmaps", "list", "create", "patch"),
	rule("", "replicationcontrollers", "get"),
	rule("apps", "deployments", "get", "list", "watch", "patch"),
	rule("apps", "replicasets", "get"),
	rule("apps", "statefulsets", "get", "list", "watch"),
	rule("apps", "daemonsets", "get"),
	rule("batch", "jobs", "get", "create", "delete"),
	rule("policy", "poddisruptionbudgets", "list", "watch"),
	rule("coordination.k8s.io", "leases", "get", "list", "watch", "create", "update", "delete"),
	rule("apiextensions.k8s.io", "customresourcedefinitions", "list", "watch", "create", "patch"),
	rule("authorization.k8s.io", "subjectaccessreviews", "create"), // the controller's rights
}

func rule(group, resource string, verbs ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: verbs}
}

// demand is a right in one namespace, or in all when it is empty.
type demand struct {
	right
	namespace string
}

func (d demand) String() string {
	if d.namespace == "" {
		return d.right.String()
	}
	return d.right.String() + " in namespace " + d.namespace
}

func demands(rules []rbacv1.PolicyRule) []demand {
	var out []demand
	for _, r := range rights(rules) {
		out = append(out, demand{right: r})
	}
	return out
}

// denied asks the API server for each right of one's own (T03) and lists the
// missing ones.
func denied(ctx context.Context, c *kube.Client, asked []demand) ([]string, error) {
	return unmet(ctx, asked, func(ctx context.Context, attributes authorizationv1.ResourceAttributes) (bool, error) {
		review, err := c.Typed.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
			Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &attributes},
		}, metav1.CreateOptions{})
		return err == nil && review.Status.Allowed, kube.Wrap(err, "review of own rights")
	})
}

// unmet lists the demands that are not allowed.
func unmet(ctx context.Context, asked []demand, allowed func(context.Context, authorizationv1.ResourceAttributes) (bool, error)) ([]string, error) {
	errs := make([]error, len(asked))
	missing := make([]bool, len(asked))
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallelRequests)
	for i, q := range asked {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			resource, sub, _ := strings.Cut(q.resource, "/")
			ok, err := allowed(ctx, authorizationv1.ResourceAttributes{
				Namespace: q.namespace, Group: q.group, Resource: resource, Subresource: sub, Verb: q.verb,
			})
			missing[i], errs[i] = !ok, err
		})
	}
	wg.Wait()
	var out []string
	for i, q := range asked {
		if errs[i] != nil {
			return nil, errs[i]
		}
		if missing[i] {
			out = append(out, q.String())
		}
	}
	return out, nil
}
