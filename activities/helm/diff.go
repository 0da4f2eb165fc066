package helm

import (
	"context"
	"fmt"
	"strings"

	"github.com/aymanbagabas/go-udiff"
	helmkube "helm.sh/helm/v3/pkg/kube"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/mask"
)

// Actions of a Change.
const (
	Create = "create"
	Update = "change"
	Delete = "delete"
)

// Change is what an upgrade would do to one object.
type Change struct {
	Action    string
	Kind      string
	Namespace string
	Name      string
	// UnifiedDiff compares the live object with what the server says it would
	// become; masked.
	UnifiedDiff string
	// Refused is the server's answer when it would not accept the write
	// (an immutable field, a kind that is not installed yet); masked.
	Refused string
}

// Object names the changed object: Kind/namespace/name.
func (c Change) Object() string {
	if c.Namespace == "" {
		return c.Kind + "/" + c.Name
	}
	return c.Kind + "/" + c.Namespace + "/" + c.Name
}

// DiffRequest compares two manifests of one release against the live cluster.
type DiffRequest struct {
	Namespace string
	Release   string
	Current   string // manifest of the deployed revision
	Target    string // manifest as rendered
	Masker    *mask.Masker
}

// Diff says what Helm's upgrade would do, object by object, in the order in
// which Helm does it: patches are made as Helm makes them (three-way strategic
// merge for built-in kinds; two-way JSON merge from the old to the new manifest
// for custom resources, which keeps live edits or undoes them all) and sent
// with dryRun=All, so that defaults and webhooks have their say. Nothing is
// stored. Objects that would not change are left out.
func Diff(ctx context.Context, c *kube.Client, r DiffRequest) ([]Change, error) {
	current, err := loadManifest(c, r.Current, r.Namespace)
	if err != nil {
		return nil, err
	}
	target, err := loadManifest(c, r.Target, r.Namespace)
	if err != nil {
		return nil, err
	}
	d := &differ{ctx: ctx, client: c, request: r, masker: mask.New()}
	d.masker.Merge(r.Masker)
	for _, e := range append(append([]entry(nil), current...), target...) {
		d.learn(e.object)
	}
	var changes []Change
	for _, e := range target {
		change, err := d.compare(e, find(current, e))
		if err != nil {
			return nil, d.masker.Error(err)
		}
		if change != nil {
			changes = append(changes, *change)
		}
	}
	for _, e := range current {
		if find(target, e) != nil {
			continue
		}
		change, err := d.removal(e)
		if err != nil {
			return nil, d.masker.Error(err)
		}
		if change != nil {
			changes = append(changes, *change)
		}
	}
	// A later object may have taught a secret that an earlier one shows.
	for i := range changes {
		changes[i].UnifiedDiff = d.masker.String(changes[i].UnifiedDiff)
		changes[i].Refused = d.masker.String(changes[i].Refused)
	}
	return changes, nil
}

// entry is an object of a manifest with its mapping, nil for a kind that the
// server does not know.
type entry struct {
	object  *unstructured.Unstructured
	mapping *meta.RESTMapping
}

func loadManifest(c *kube.Client, manifest, namespace string) ([]entry, error) {
	objects, err := Objects(manifest)
	if err != nil {
		return nil, finding.Finding{Object: "manifest of the release", Found: err.Error()}.Error(finding.Stop)
	}
	entries := make([]entry, 0, len(objects))
	for _, obj := range objects {
		mapping, err := c.Mapping(obj.GroupVersionKind())
		if err != nil && !meta.IsNoMatchError(err) {
			return nil, kube.Wrap(err, "kind of "+kube.Name(obj))
		}
		if mapping != nil && mapping.Scope.Name() == meta.RESTScopeNameNamespace && obj.GetNamespace() == "" {
			obj.SetNamespace(namespace)
		}
		entries = append(entries, entry{object: obj, mapping: mapping})
	}
	return entries, nil
}

// find matches as Helm does: by group, kind, namespace and name, whatever the
// version.
func find(entries []entry, e entry) *entry {
	want := e.object.GroupVersionKind().GroupKind()
	for i := range entries {
		o := entries[i].object
		if o.GroupVersionKind().GroupKind() == want && o.GetNamespace() == e.object.GetNamespace() && o.GetName() == e.object.GetName() {
			return &entries[i]
		}
	}
	return nil
}

type differ struct {
	ctx     context.Context
	client  *kube.Client
	request DiffRequest
	masker  *mask.Masker
}

func (d *differ) resource(e entry) dynamic.ResourceInterface {
	r := d.client.Dynamic.Resource(e.mapping.Resource)
	if e.mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		return r.Namespace(e.object.GetNamespace())
	}
	return r
}

func (d *differ) compare(e entry, former *entry) (*Change, error) {
	change := newChange(Create, e.object)
	d.own(e.object)
	if e.mapping == nil {
		change.Refused = "the API server does not know this kind yet"
		change.UnifiedDiff = d.unified(nil, e.object)
		return change, nil
	}
	live, err := d.resource(e).Get(d.ctx, e.object.GetName(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		made, err := d.resource(e).Create(d.ctx, e.object, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldManager: FieldManager})
		if err != nil {
			if change.Refused, err = refusal(err, e.object); err != nil {
				return nil, err
			}
			made = e.object
		}
		change.UnifiedDiff = d.unified(nil, made)
		return change, nil
	}
	if err != nil {
		return nil, kube.Wrap(err, kube.Name(e.object))
	}
	d.learn(live)
	change.Action = Update
	original := live
	switch {
	case former != nil:
		original = former.object
	case d.owned(live):
		original = e.object
	default:
		return nil, finding.Finding{
			Object: kube.Name(e.object), Expected: fmt.Sprintf("not to exist, or to belong to release %s/%s", d.request.Namespace, d.request.Release),
			Found: "an object of another owner", Next: "Helm would refuse to import it: remove it, or leave it out by the chart's values",
		}.Error(finding.Stop)
	}
	patch, kind, err := createPatch(original, e.object, live, e.mapping)
	if err != nil {
		return nil, finding.Finding{Object: "patch of " + kube.Name(e.object), Found: err.Error()}.Error(finding.Stop)
	}
	if patch == nil || string(patch) == "{}" {
		return nil, nil
	}
	result, err := d.resource(e).Patch(d.ctx, e.object.GetName(), kind, patch, metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}, FieldManager: FieldManager})
	if err != nil {
		if change.Refused, err = refusal(err, e.object); err != nil {
			return nil, err
		}
		result = e.object
	}
	d.learn(result)
	change.UnifiedDiff = d.unified(live, result)
	if change.UnifiedDiff == "" && change.Refused == "" {
		return nil, nil
	}
	return change, nil
}

// removal: Helm leaves an object alone whose live annotation says keep.
func (d *differ) removal(e entry) (*Change, error) {
	if e.mapping == nil {
		return nil, nil
	}
	live, err := d.resource(e).Get(d.ctx, e.object.GetName(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, kube.Wrap(err, kube.Name(e.object))
	}
	if live.GetAnnotations()[helmkube.ResourcePolicyAnno] == helmkube.KeepPolicy {
		return nil, nil
	}
	d.learn(live)
	change := newChange(Delete, e.object)
	change.UnifiedDiff = d.unified(live, nil)
	return change, nil
}

func newChange(action string, obj *unstructured.Unstructured) *Change {
	return &Change{Action: action, Kind: obj.GetKind(), Namespace: obj.GetNamespace(), Name: obj.GetName()}
}

// refusal separates an answer about the object, which belongs into the diff,
// from a failure to ask.
func refusal(err error, obj *unstructured.Unstructured) (string, error) {
	if kube.Class(err) == finding.Stop && !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err) {
		return err.Error(), nil
	}
	// Admission answers "forbidden" too; only authorization names the user.
	if apierrors.IsForbidden(err) && !strings.Contains(err.Error(), "cannot ") {
		return err.Error(), nil
	}
	return "", kube.Wrap(err, "dry run of "+kube.Name(obj))
}

// unified is the masked diff, empty when nothing changes.
func (d *differ) unified(before, after *unstructured.Unstructured) string {
	from, to := "live", "after"
	if before == nil {
		from = "/dev/null"
	}
	if after == nil {
		to = "/dev/null"
	}
	return d.masker.String(udiff.Unified(from, to, text(before, after, "before"), text(after, before, "after")))
}
