package tensorfusion

import (
	"context"
	"errors"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/registry"
)

// Preflight runs every check that must hold before anything is touched. It
// changes nothing. Failed checks are in the result, not an error: the workflow
// shows all of them at once and decides.
func (a *Activities) Preflight(ctx context.Context, req PreflightRequest) (PreflightResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return PreflightResult{}, err
	}
	beat(ctx, "resolving chart and values")
	r, err := a.resolve(ctx, c, req.Scope, req.Intent)
	if err != nil {
		return PreflightResult{}, err
	}
	out, err := a.preflight(ctx, c, req, r)
	return out, r.masker.Error(err)
}

func (a *Activities) preflight(ctx context.Context, c *kube.Client, req PreflightRequest, r *resolved) (PreflightResult, error) {
	var out PreflightResult
	target, err := r.targetSide()
	if err != nil {
		return out, err
	}
	source, err := r.sourceSide()
	if err != nil {
		return out, err
	}
	goal := r.goal(target)
	beat(ctx, "reading the installation")
	o, err := observe(ctx, c, req.Scope, goal)
	if err != nil {
		return out, err
	}
	live := o.Source // what runs counts, not what the release says
	o.Source = source
	o.Source.ControllerImage, o.Source.Controller = live.ControllerImage, live.Controller
	o.Source.Replicas, o.Source.IsolationPolicy = live.Replicas, live.IsolationPolicy
	o.Target, o.Intent, o.Accepted, o.Values = target, r.intent, req.AcceptedFloating, r.review()
	o.Policy = req.Policy
	o.Goal.PodName = podPrefixFor(live.Controller) // which pods stand for the hosts now
	if err := a.askAround(ctx, c, r, o); err != nil {
		return out, err
	}
	out = PreflightResult{
		Intent: r.intent,
		Source: Versions{
			Chart: source.Chart, Controller: versionString(live.Controller),
			Hypervisor: first(o.hypervisorImages()), Revision: r.current.Version,
		},
		Target:     Versions{Chart: target.Chart, Controller: versionString(target.Controller), Hypervisor: r.intent.HypervisorImage},
		Checks:     runChecks(o, StagePreflight, req.Acknowledged),
		Pools:      o.poolSummaries(),
		Snapshot:   o.snapshot(),
		Policy:     o.policies(),
		Goal:       goal,
		NeedsNudge: needsNudge(live.Controller, target.Controller),
		Database:   o.Database.answered(),
	}
	maskChecks(r, out.Checks)
	o.Goal = goal
	out.NoChange = r.unchanged() && live.ControllerImage == target.ControllerImage && o.allOnGoal() &&
		!r.unfinished(req.Intent.Chart.Revision != 0, o)
	return out, nil
}

// goal is what a proven host looks like once the intent is deployed.
func (r *resolved) goal(target Side) Goal {
	g := Goal{
		HypervisorImage: r.intent.HypervisorImage,
		MiddlewareImage: middlewareImage(target.Providers),
		PodName:         podPrefixFor(target.Controller),
	}
	// Controllers below 2.17 know no isolation policy and set no argument.
	if target.Controller == nil || atLeast(target.Controller, "2.17.0") {
		g.IsolationPolicy = target.IsolationPolicy
		if g.IsolationPolicy == "" {
			g.IsolationPolicy = "static" // the controller's own default
		}
	}
	return g
}

// unfinished reports that an earlier run or Helm operation left work that looks
// like none: a policy still held, or a revision that failed half way and whose
// objects may be in the cluster. A rollback holds before it looks, so the hold
// tells nothing there.
func (r *resolved) unfinished(rollback bool, o *Observation) bool {
	if last, ok := r.history.Last(); ok && last.Revision != r.current.Version {
		return true
	}
	return !rollback && slices.ContainsFunc(o.Clusters, func(c FusionCluster) bool {
		return c.Annotations[annotationPolicyBefore] != ""
	})
}

// unchanged reports that the deployed revision is already what the intent says.
func (r *resolved) unchanged() bool {
	if len(r.differing(r.current.Config)) > 0 || r.current.Chart == nil || r.current.Chart.Metadata == nil {
		return false
	}
	return r.current.Chart.Metadata.Version == r.chart.Metadata.Version && sameObjects(r)
}

// sameObjects compares the stored manifest with the rendered one.
func sameObjects(r *resolved) bool {
	source, err := r.sourceSide()
	if err != nil || len(source.Objects) != len(r.rendered.Objects) {
		return false
	}
	stored := map[string]*unstructured.Unstructured{}
	for _, u := range source.Objects {
		stored[u.GroupVersionKind().String()+kube.Name(u)] = u
	}
	for _, u := range r.rendered.Objects {
		s, ok := stored[u.GroupVersionKind().String()+kube.Name(u)]
		if !ok || !sameObject(s, u) {
			return false
		}
	}
	return true
}

// askAround adds what only the preflight needs: own rights, the artifact
// store, the database, the webhook and the registries.
func (a *Activities) askAround(ctx context.Context, c *kube.Client, r *resolved, o *Observation) error {
	beat(ctx, "asking for own rights")
	helms, err := r.chartRights(c, o.Scope.Release.Namespace, o.Source.Objects)
	if err != nil {
		return err
	}
	if o.Denied, err = denied(ctx, c, append(demands(needed), helms...)); err != nil {
		return err
	}
	if err := a.Artifacts.CheckRecipients(); err != nil {
		o.Vault = foundIn(err)
	}
	beat(ctx, "asking the database")
	o.Database = askDatabase(ctx, c, r.rendered.Values)
	o.Database.Trouble = r.masker.String(o.Database.Trouble)
	o.Controller.WebhookTrouble = webhookTrouble(ctx, c, namesOf(o.Source.Objects, "MutatingWebhookConfiguration"), firstPool(o))
	images := imagesOf(r.rendered.Objects, r.rendered.Hooks)
	if r.intent.HypervisorImage != "" {
		images = union(images, r.intent.HypervisorImage)
	}
	o.Images.Floating = floatingOf(images)
	beat(ctx, "asking the registries")
	o.Images.Missing, err = missingImages(ctx, a.Registry, images)
	return err
}

// missingImages asks for every image; a registry that cannot be reached is an
// error that is tried again, an image that is not there a finding.
func missingImages(ctx context.Context, m registry.Mirrors, images []string) (map[string]string, error) {
	errs := make([]error, len(images))
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallelRequests)
	for i, image := range images {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			_, errs[i] = m.HasImage(ctx, image)
		})
	}
	wg.Wait()
	missing := map[string]string{}
	for i, err := range errs {
		if err == nil {
			continue
		}
		f, class, ok := finding.Of(err)
		if !ok || class != finding.Stop {
			return nil, inRow(err, "P09")
		}
		missing[images[i]] = f.Found
	}
	return missing, nil
}

func foundIn(err error) string {
	if f, _, ok := finding.Of(err); ok {
		return f.Found
	}
	return errors.Unwrap(err).Error()
}

func namesOf(objects []*unstructured.Unstructured, kind string) []string {
	var out []string
	for _, u := range objects {
		if u.GetKind() == kind {
			out = append(out, u.GetName())
		}
	}
	return out
}

// maskChecks hides secret values that a finding may quote.
func maskChecks(r *resolved, checks []Check) {
	for i := range checks {
		maskFindings(r, checks[i].Findings)
	}
}

func maskFindings(r *resolved, findings []finding.Finding) {
	for i := range findings {
		f := &findings[i]
		for _, text := range []*string{&f.Object, &f.Expected, &f.Found, &f.Why, &f.Next} {
			*text = r.masker.String(*text)
		}
	}
}

func first(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}

func firstPool(o *Observation) string {
	if len(o.Pools) == 0 {
		return ""
	}
	return o.Pools[0].Name
}
