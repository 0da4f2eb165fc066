package tensorfusion

import (
	"context"
	"fmt"
	"slices"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
)

// ApplyCRDs applies the target chart's CRDs, which Helm never upgrades, by
// server-side apply with force and waits until each is Established (T07). A
// rollback to a stored revision leaves the newer CRDs in place (T22).
func (a *Activities) ApplyCRDs(ctx context.Context, req CRDsRequest) (CRDsResult, error) {
	defer pulse(ctx, nil)()
	var out CRDsResult
	if req.Intent.Chart.Revision != 0 {
		return out, nil
	}
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return out, err
	}
	r, err := a.resolve(ctx, c, req.Scope, req.Intent)
	if err != nil {
		return out, err
	}
	out.Applied, err = applyCRDs(ctx, c, r, req)
	return out, r.masker.Error(inRow(err, "T07"))
}

func applyCRDs(ctx context.Context, c *kube.Client, r *resolved, req CRDsRequest) ([]string, error) {
	crds, err := helm.CRDs(r.chart)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, u := range crds {
		beat(ctx, "applying "+u.GetName())
		if _, err := c.Apply(ctx, u, fieldManager, true, false); err != nil {
			return nil, err
		}
		names = append(names, u.GetName())
	}
	if len(names) == 0 {
		return nil, nil
	}
	err = c.Await(ctx, kube.Wait{
		What: plural(len(names), "CustomResourceDefinitions Established"), Limit: req.Limit, Heartbeat: beater(ctx),
		Next: "look at the conditions of the CustomResourceDefinition that is named",
	}, func(objects kube.Objects) (bool, string, error) {
		waiting := map[string]bool{}
		for _, n := range names {
			waiting[n] = true
		}
		for _, u := range objects[0] {
			if !waiting[u.GetName()] {
				continue
			}
			crd, err := decode[apiextensionsv1.CustomResourceDefinition](u)
			if err != nil {
				return false, "", err
			}
			if established(crd) {
				delete(waiting, crd.Name)
			}
		}
		return len(waiting) == 0, fmt.Sprintf("not Established: %v", sortedKeys(waiting)), nil
	}, kube.Selection{Resource: crdsGVR})
	return names, err
}

func established(crd apiextensionsv1.CustomResourceDefinition) bool {
	return slices.ContainsFunc(crd.Status.Conditions, func(c apiextensionsv1.CustomResourceDefinitionCondition) bool {
		return c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionTrue
	})
}
