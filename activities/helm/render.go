package helm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path"
	"sort"
	"strings"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/releaseutil"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// RenderRequest is what an upgrade would be made of.
type RenderRequest struct {
	Namespace string
	Release   string
	// Revision is what templates see as .Release.Revision; 0 means 1.
	Revision int
	Chart    *chart.Chart
	// Values are the user's; the chart's defaults come below them.
	Values map[string]any
	Pins   []Pin
}

// Rendered is the manifest that Helm would store and apply. It holds secrets:
// it never leaves an activity.
type Rendered struct {
	Manifest string
	// Objects are those of the manifest, in its order, namespaces as written.
	Objects []*unstructured.Unstructured
	// Hooks are the chart's hook objects, which pins do not reach.
	Hooks []*unstructured.Unstructured
	// Pinned counts the fields that hold a pinned value.
	Pinned int
	// Values are the chart's defaults with the user's values over them.
	Values map[string]any
}

// Render does what `helm upgrade` does before it writes: `lookup` reads the
// live cluster, capabilities are the server's, then the pins are set. It needs
// no CRD of the chart to be there yet, and works while the release is pending.
func Render(ctx context.Context, c *kube.Client, r RenderRequest) (*Rendered, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := CheckChart(r.Chart); err != nil {
		return nil, err
	}
	object := fmt.Sprintf("chart %s %s rendered for release %s/%s", r.Chart.Name(), r.Chart.Metadata.Version, r.Namespace, r.Release)
	// Helm merges subcharts' values into the chart that it is given.
	copied, err := copyChart(r.Chart)
	if err != nil {
		return nil, err
	}
	user := Merge(r.Values)
	if err := chartutil.ProcessDependenciesWithMerge(copied, user); err != nil {
		return nil, renderError(object, err)
	}
	capabilities, err := capabilities(c)
	if err != nil {
		return nil, kube.Wrap(err, "capabilities of the API server")
	}
	options := chartutil.ReleaseOptions{Name: r.Release, Namespace: r.Namespace, Revision: max(r.Revision, 1), IsUpgrade: true}
	values, err := chartutil.ToRenderValues(copied, user, options, capabilities)
	if err != nil {
		return nil, renderError(object, err)
	}
	files, err := engine.New(c.Config).Render(copied, values)
	if err != nil {
		return nil, renderError(object, err)
	}
	for file := range files {
		if path.Base(file) == "NOTES.txt" {
			delete(files, file)
		}
	}
	hooks, manifests, err := releaseutil.SortManifests(files, nil, releaseutil.InstallOrder)
	if err != nil {
		return nil, renderError(object, err)
	}
	var text bytes.Buffer
	for _, m := range manifests {
		fmt.Fprintf(&text, "---\n# Source: %s\n%s\n", m.Name, m.Content)
	}
	rendered := &Rendered{}
	if rendered.Manifest, rendered.Pinned, err = ApplyPins(text.String(), r.Pins); err != nil {
		return nil, renderError(object, err)
	}
	if rendered.Objects, err = Objects(rendered.Manifest); err != nil {
		return nil, renderError(object, err)
	}
	for _, hook := range hooks {
		objects, err := Objects(hook.Manifest)
		if err != nil {
			return nil, renderError(object, err)
		}
		rendered.Hooks = append(rendered.Hooks, objects...)
	}
	rendered.Values, _ = values["Values"].(chartutil.Values)
	return rendered, nil
}

func renderError(object string, err error) error {
	return finding.Finding{Object: object, Expected: "to render", Found: err.Error(), Next: "correct the values, or choose another chart version"}.Error(finding.Stop)
}

func capabilities(c *kube.Client) (*chartutil.Capabilities, error) {
	c.Discovery.Invalidate()
	version, err := c.Discovery.ServerVersion()
	if err != nil {
		return nil, err
	}
	// A broken aggregated API must not stop a release that does not use it.
	apis, err := action.GetVersionSet(c.Discovery)
	if err != nil && !discovery.IsGroupDiscoveryFailedError(err) {
		return nil, err
	}
	return &chartutil.Capabilities{
		APIVersions: apis,
		KubeVersion: chartutil.KubeVersion{Version: version.GitVersion, Major: version.Major, Minor: version.Minor},
		HelmVersion: chartutil.DefaultCapabilities.HelmVersion,
	}, nil
}

// Objects parses a manifest; lists are taken apart as Helm does.
func Objects(manifest string) ([]*unstructured.Unstructured, error) {
	documents, err := split(manifest)
	if err != nil {
		return nil, err
	}
	var objects []*unstructured.Unstructured
	for _, document := range documents {
		data, err := yaml.YAMLToJSON([]byte(document))
		if err != nil {
			return nil, fmt.Errorf("manifest: %w", err)
		}
		if string(data) == "null" {
			continue // comments only
		}
		obj := &unstructured.Unstructured{}
		if err := obj.UnmarshalJSON(data); err != nil {
			return nil, fmt.Errorf("manifest: %w", err)
		}
		if obj.IsList() {
			err = obj.EachListItem(func(item runtime.Object) error {
				objects = append(objects, item.(*unstructured.Unstructured))
				return nil
			})
			if err != nil {
				return nil, fmt.Errorf("manifest: %w", err)
			}
			continue
		}
		objects = append(objects, obj)
	}
	return objects, nil
}

// CRDs are the chart's CustomResourceDefinitions from its crds folders, which
// Helm never upgrades, by name.
func CRDs(c *chart.Chart) ([]*unstructured.Unstructured, error) {
	var all []*unstructured.Unstructured
	for _, file := range c.CRDObjects() {
		objects, err := Objects(string(file.File.Data))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file.Filename, err)
		}
		for _, obj := range objects {
			if obj.GetKind() == "CustomResourceDefinition" {
				all = append(all, obj)
			}
		}
	}
	sort.Slice(all, func(i, j int) bool { return strings.Compare(all[i].GetName(), all[j].GetName()) < 0 })
	return all, nil
}

// wireChart carries a chart with its subcharts, which chart.Chart keeps in
// unexported fields, to a child process.
type wireChart struct {
	Chart     *chart.Chart `json:"chart"`
	Subcharts []wireChart  `json:"subcharts,omitempty"`
}

func toWire(c *chart.Chart) wireChart {
	w := wireChart{Chart: c}
	for _, sub := range c.Dependencies() {
		w.Subcharts = append(w.Subcharts, toWire(sub))
	}
	return w
}

func (w wireChart) unpack() *chart.Chart {
	for _, sub := range w.Subcharts {
		w.Chart.AddDependency(sub.unpack())
	}
	return w.Chart
}

func copyChart(c *chart.Chart) (*chart.Chart, error) {
	data, err := json.Marshal(toWire(c))
	if err != nil {
		return nil, fmt.Errorf("chart %s: %w", c.Name(), err)
	}
	var w wireChart
	if err := json.Unmarshal(data, &w); err != nil {
		return nil, fmt.Errorf("chart %s: %w", c.Name(), err)
	}
	return w.unpack(), nil
}
