package tensorfusion

import (
	"context"
	"sync"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/kube"
)

// needed lists what a run does besides what Helm does for the chart, which the
// guide answers with cluster-admin; empty namespace means the whole cluster.
var needed = []struct {
	group, resource string
	verbs           []string
}{
	{apiGroup, "tensorfusionclusters", []string{"get", "list", "watch", "patch"}},
	{apiGroup, "gpupools", []string{"get", "list", "watch"}},
	{apiGroup, "gpunodes", []string{"get", "list", "watch"}},
	{apiGroup, "gpus", []string{"get", "list", "watch"}},
	{apiGroup, "tensorfusionworkloads", []string{"list", "watch"}},
	{apiGroup, "tensorfusionconnections", []string{"list"}},
	{"", "pods", []string{"get", "list", "watch", "create", "delete"}},
	{"", "pods/log", []string{"get"}},
	{"", "pods/eviction", []string{"create"}},
	{"", "pods/portforward", []string{"create"}},
	{"", "nodes", []string{"get", "list", "watch"}},
	{"", "secrets", []string{"get", "list", "create", "update", "delete"}},
	{"", "configmaps", []string{"get", "list", "create", "update", "patch"}},
	{"", "services", []string{"get"}},
	{"apps", "deployments", []string{"get", "list", "watch", "patch"}},
	{"apps", "statefulsets", []string{"get", "list", "watch"}},
	{"batch", "jobs", []string{"get", "list", "watch", "create", "delete"}},
	{"policy", "poddisruptionbudgets", []string{"list", "watch"}},
	{"coordination.k8s.io", "leases", []string{"get", "list", "watch", "create", "update"}},
	{"apiextensions.k8s.io", "customresourcedefinitions", []string{"get", "list", "watch", "create", "patch"}},
	{"rbac.authorization.k8s.io", "clusterroles", []string{"get", "create", "patch", "bind", "escalate"}},
	{"rbac.authorization.k8s.io", "clusterrolebindings", []string{"get", "create", "patch"}},
	{"admissionregistration.k8s.io", "mutatingwebhookconfigurations", []string{"get", "list", "create", "patch"}},
}

// denied asks the API server for each right (T03) and lists the missing ones.
func denied(ctx context.Context, c *kube.Client) ([]string, error) {
	type question struct{ group, resource, sub, verb, text string }
	var questions []question
	for _, n := range needed {
		resource, sub := n.resource, ""
		for i := range n.resource {
			if n.resource[i] == '/' {
				resource, sub = n.resource[:i], n.resource[i+1:]
			}
		}
		for _, v := range n.verbs {
			text := right{n.group, n.resource, v}.String()
			questions = append(questions, question{n.group, resource, sub, v, text})
		}
	}
	errs := make([]error, len(questions))
	missing := make([]bool, len(questions))
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallelRequests)
	for i, q := range questions {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			review, err := c.Typed.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
				Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
					Group: q.group, Resource: q.resource, Subresource: q.sub, Verb: q.verb,
				}},
			}, metav1.CreateOptions{})
			errs[i] = err
			missing[i] = err == nil && !review.Status.Allowed
		})
	}
	wg.Wait()
	var out []string
	for i, q := range questions {
		if errs[i] != nil {
			return nil, kube.Wrap(errs[i], "review of own rights")
		}
		if missing[i] {
			out = append(out, q.text)
		}
	}
	return out, nil
}
