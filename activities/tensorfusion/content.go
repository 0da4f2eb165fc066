package tensorfusion

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
)

// releaseObjects are the objects of a manifest by Kind/namespace/name, without
// those of kinds that the API server does not know.
func releaseObjects(c *kube.Client, manifest, namespace string) (map[string]*unstructured.Unstructured, error) {
	objects, err := helm.Objects(manifest)
	if err != nil {
		return nil, err
	}
	out := map[string]*unstructured.Unstructured{}
	for _, u := range objects {
		mapping, err := c.Mapping(u.GroupVersionKind())
		if meta.IsNoMatchError(err) {
			continue
		}
		if err != nil {
			return nil, kube.Wrap(err, "kind of "+kube.Name(u))
		}
		if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
			u.SetNamespace(orNamespace(u.GetNamespace(), namespace))
		}
		out[kube.Name(u)] = u
	}
	return out, nil
}

// liveObject is nil when there is none.
func liveObject(ctx context.Context, c *kube.Client, u *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	resource, err := c.ResourceOf(u.GroupVersionKind(), u.GetNamespace())
	if err != nil {
		return nil, err
	}
	live, err := resource.Get(ctx, u.GetName(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return live, kube.Wrap(err, kube.Name(u))
}

// contents are digests of what the release's objects hold, by
// Kind/namespace/name. Objects that Helm would put back, because they have
// drifted from the manifest, are left out: the plan shows them.
func contents(ctx context.Context, c *kube.Client, s Scope) (map[string]string, error) {
	history, err := helm.Releases(ctx, c, s.Release.Namespace, s.Release.Name)
	if err != nil {
		return nil, err
	}
	deployed, err := currentRelease(ctx, c, s, history)
	if err != nil {
		return nil, err
	}
	objects, err := releaseObjects(c, deployed.Manifest, s.Release.Namespace)
	if err != nil {
		return nil, err
	}
	drifted, err := helm.Diff(ctx, c, helm.DiffRequest{
		Namespace: s.Release.Namespace, Release: s.Release.Name, Current: deployed.Manifest, Target: deployed.Manifest,
	})
	if err != nil {
		return nil, err
	}
	for _, ch := range drifted {
		delete(objects, ch.Object())
	}
	return digests(ctx, c, objects)
}

func digests(ctx context.Context, c *kube.Client, objects map[string]*unstructured.Unstructured) (map[string]string, error) {
	out := map[string]string{}
	for name, u := range objects {
		live, err := liveObject(ctx, c, u)
		if err != nil {
			return nil, err
		}
		if live == nil {
			continue
		}
		if out[name], err = contentOf(live); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// contentOf is a digest of an object without metadata and status. The UID, which
// no history holds, goes into it: nobody can try passwords against the digest.
func contentOf(u *unstructured.Unstructured) (string, error) {
	digest, err := helm.Digest(map[string]any{"uid": u.GetUID(), "content": withoutOurs(content(u))})
	return fmt.Sprintf("%.16s", digest), err
}

func content(u *unstructured.Unstructured) map[string]any {
	out := map[string]any{}
	for key, value := range u.Object {
		if key != "metadata" && key != "status" {
			out[key] = value
		}
	}
	return out
}

func sameContent(a, b *unstructured.Unstructured) bool {
	return sameObject(&unstructured.Unstructured{Object: content(a)}, &unstructured.Unstructured{Object: content(b)})
}

// ours are the fields that a run itself changes: the policy of a pool, and the
// marks of a restart.
var ours = []string{"nodePoolRollingUpdatePolicy", annotationRestarted, annotationRestartedAt}

// withoutOurs leaves out what a run itself changes, the hold's variable too; nil
// where nothing else was.
func withoutOurs(value any) any {
	switch v := value.(type) {
	case map[string]any:
		out := map[string]any{}
		for key, field := range v {
			if kept := withoutOurs(field); kept != nil && !slices.Contains(ours, key) {
				out[key] = kept
			}
		}
		if len(out) == 0 && len(v) > 0 {
			return nil
		}
		return out
	case []any:
		out := []any{}
		for _, item := range v {
			if kept := withoutOurs(item); kept != nil && !isNudge(item) {
				out = append(out, kept)
			}
		}
		if len(out) == 0 && len(v) > 0 {
			return nil
		}
		return out
	}
	return value
}
