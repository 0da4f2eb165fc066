package tensorfusion

import (
	"context"
	"fmt"
	"io"
	"path"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
)

// Backup stores what the guide's list names and what it forgets (T06): user
// values and manifest of the release, every resource of the API group, its
// CRDs, and the Deployments, StatefulSets, ConfigMaps and Secrets of the
// namespace. Everything is encrypted; counts are compared with a second list.
func (a *Activities) Backup(ctx context.Context, req BackupRequest) (BackupResult, error) {
	defer pulse(ctx, nil)()
	out := BackupResult{Counts: map[string]int{}}
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return out, err
	}
	if err := a.backupRelease(ctx, c, req, &out); err != nil {
		return out, inRow(err, "T06")
	}
	sets, err := backupSets(c, req.Release.Namespace)
	if err != nil {
		return out, inRow(err, "T06")
	}
	for _, s := range sets {
		beat(ctx, "backing up "+s.name)
		if err := a.backupSet(ctx, c, req.Key, s, &out); err != nil {
			return out, inRow(err, "T06")
		}
	}
	return out, nil
}

// backupSet names one list of objects.
type backupSet struct {
	name      string
	gvr       schema.GroupVersionResource
	namespace string
	keep      func(*unstructured.Unstructured) bool
}

// backupSets asks discovery for the API group, so that a kind that a newer
// version brings is not forgotten.
func backupSets(c *kube.Client, namespace string) ([]backupSet, error) {
	c.Discovery.Invalidate()
	served, err := c.Discovery.ServerResourcesForGroupVersion(apiGroup + "/" + apiVersion)
	if err != nil {
		return nil, kube.Wrap(err, "resources of "+apiGroup+"/"+apiVersion)
	}
	var out []backupSet
	for _, r := range served.APIResources {
		if path.Base(r.Name) == r.Name { // no subresource
			out = append(out, backupSet{name: r.Name + "." + apiGroup, gvr: tensorFusion(r.Name)})
		}
	}
	out = append(out, backupSet{name: "customresourcedefinitions", gvr: crdsGVR, keep: func(u *unstructured.Unstructured) bool {
		group, _, _ := unstructured.NestedString(u.Object, "spec", "group")
		return group == apiGroup
	}})
	for _, s := range []struct {
		name string
		gvr  schema.GroupVersionResource
	}{
		{"deployments", deploymentsGVR},
		{"statefulsets", statefulSetsGVR},
		{"configmaps", schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}},
		{"secrets", schema.GroupVersionResource{Version: "v1", Resource: "secrets"}},
	} {
		out = append(out, backupSet{name: s.name, gvr: s.gvr, namespace: namespace})
	}
	return out, nil
}

func (s backupSet) list(ctx context.Context, c *kube.Client) ([]unstructured.Unstructured, error) {
	items, err := listRaw(ctx, c.Dynamic, s.gvr, s.namespace)
	if err != nil {
		return nil, kube.Wrap(err, "backup of "+s.name)
	}
	if s.keep == nil {
		return items, nil
	}
	var out []unstructured.Unstructured
	for i := range items {
		if s.keep(&items[i]) {
			out = append(out, items[i])
		}
	}
	return out, nil
}

// countAttempts bounds how often a set is stored again because it changed
// while it was written.
const countAttempts = 3

func (a *Activities) backupSet(ctx context.Context, c *kube.Client, key string, s backupSet, out *BackupResult) error {
	live := 0
	for range countAttempts {
		items, err := s.list(ctx, c)
		if err != nil {
			return err
		}
		ref, err := a.Artifacts.Put(ctx, path.Join(key, "backup", s.name+".yaml"), artifact.Secret, len(items), func(w io.Writer) error {
			return writeObjects(w, items)
		})
		if err != nil {
			return err
		}
		again, err := s.list(ctx, c)
		if err != nil {
			return err
		}
		if live = len(again); live == ref.Entries {
			out.Artifacts = append(out.Artifacts, ref)
			out.Counts[s.name] = live
			return nil
		}
	}
	return finding.Finding{
		Object: "backup of " + s.name, Expected: plural(live, "objects as in the cluster"),
		Found: fmt.Sprintf("another count in each of %d attempts", countAttempts),
		Next:  "stop what creates and deletes them, then retry",
	}.Error(finding.Retry)
}

// writeObjects writes a YAML stream that kubectl can apply.
func writeObjects(w io.Writer, items []unstructured.Unstructured) error {
	for i := range items {
		data, err := yaml.Marshal(items[i].Object)
		if err != nil {
			return fmt.Errorf("%s: %w", kube.Name(&items[i]), err)
		}
		if _, err := fmt.Fprintf(w, "---\n%s", data); err != nil {
			return err
		}
	}
	return nil
}

func (a *Activities) backupRelease(ctx context.Context, c *kube.Client, req BackupRequest, out *BackupResult) error {
	r, err := helm.Current(ctx, c, req.Release.Namespace, req.Release.Name)
	if err != nil {
		return err
	}
	values, err := yaml.Marshal(r.Config)
	if err != nil {
		return fmt.Errorf("values of release %s: %w", req.Release.Name, err)
	}
	objects, err := helm.Objects(r.Manifest)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name    string
		text    string
		entries int
	}{
		{"values.yaml", string(values), len(leaves(r.Config))},
		{"manifest.yaml", r.Manifest, len(objects)},
	} {
		ref, err := a.Artifacts.Put(ctx, path.Join(req.Key, "backup", f.name), artifact.Secret, f.entries, func(w io.Writer) error {
			_, err := io.WriteString(w, f.text)
			return err
		})
		if err != nil {
			return err
		}
		out.Artifacts = append(out.Artifacts, ref)
		out.Counts[f.name] = f.entries
	}
	return nil
}
