package tensorfusion

import (
	"context"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	"go.temporal.io/sdk/activity"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
)

// diffLimit is how much of the diff goes into history; the artifact holds all.
const diffLimit = 48 << 10

// Diff says what the upgrade would change, as Helm would do it, and what the
// new controller would then do by itself. Nothing is written but the artifact.
func (a *Activities) Diff(ctx context.Context, req DiffRequest) (DiffResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return DiffResult{}, err
	}
	r, err := a.resolve(ctx, c, req.Scope, req.Intent)
	if err != nil {
		return DiffResult{}, err
	}
	out, err := a.diff(ctx, c, req, r)
	return out, r.masker.Error(err)
}

func (a *Activities) diff(ctx context.Context, c *kube.Client, req DiffRequest, r *resolved) (DiffResult, error) {
	var out DiffResult
	beat(ctx, "comparing manifests")
	changes, err := helm.Diff(ctx, c, helm.DiffRequest{
		Namespace: req.Release.Namespace, Release: req.Release.Name,
		Current: r.current.Manifest, Target: r.rendered.Manifest, Masker: r.masker,
	})
	if err != nil {
		return out, err
	}
	crdChanges, err := diffCRDs(ctx, c, r)
	if err != nil {
		return out, err
	}
	var text strings.Builder
	for _, ch := range append(crdChanges, changes...) {
		out.Changes = append(out.Changes, ObjectChange{Action: ch.Action, Object: ch.Object(), Lines: changedLines(ch.UnifiedDiff)})
		fmt.Fprintf(&text, "# %s %s\n", ch.Action, ch.Object())
		if ch.Refused != "" {
			fmt.Fprintf(&text, "# the server would refuse it: %s\n", ch.Refused)
		}
		text.WriteString(ch.UnifiedDiff)
	}
	whole := r.masker.String(text.String())
	out.Text, out.Cut = cut(whole, diffLimit)
	if out.Artifact, err = a.Artifacts.Put(ctx, artifactKey(ctx, "diff.patch"), artifact.Evidence, len(out.Changes), func(w io.Writer) error {
		_, err := io.WriteString(w, whole)
		return err
	}); err != nil {
		return out, err
	}
	o, err := observe(ctx, c, req.Scope, Goal{PodName: podPrefix})
	if err != nil {
		return out, err
	}
	live := o.Source
	if o.Source, err = r.sourceSide(); err != nil {
		return out, err
	}
	o.Source.Controller, o.Source.IsolationPolicy = live.Controller, live.IsolationPolicy
	if o.Target, err = r.targetSide(); err != nil {
		return out, err
	}
	o.Intent, o.Values = r.intent, r.review()
	o.Changes = changesOf(r, o.Source.Objects, changes)
	out.Checks = append(runChecks(o, StageDiff, req.Acknowledged), refusals(changes)...)
	maskChecks(r, out.Checks)
	out.Forecast = cutFindings(forecast(o))
	out.Outdated = outdated(o)
	return out, nil
}

// changesOf joins Helm's changes with the objects on both sides.
func changesOf(r *resolved, source []*unstructured.Unstructured, changes []helm.Change) []Change {
	var out []Change
	for _, ch := range changes {
		out = append(out, Change{
			Action: ch.Action, Object: ch.Object(), Kind: ch.Kind,
			Old: find(source, ch), New: find(r.rendered.Objects, ch),
		})
	}
	return out
}

func find(objects []*unstructured.Unstructured, ch helm.Change) *unstructured.Unstructured {
	for _, u := range objects {
		if u.GetKind() == ch.Kind && u.GetName() == ch.Name && (u.GetNamespace() == ch.Namespace || u.GetNamespace() == "") {
			return u
		}
	}
	return nil
}

// refusals are writes that the server would not accept: they would stop Helm
// half way. A kind that the CRD stage brings is no refusal.
func refusals(changes []helm.Change) []Check {
	var found []finding.Finding
	for _, ch := range changes {
		if ch.Refused != "" && !strings.Contains(ch.Refused, "does not know this kind") {
			found = append(found, finding.Finding{Row: "P04", Object: ch.Object(), Expected: "accepted by server dry run", Found: ch.Refused,
				Why: "the Helm step would fail in the middle", Next: "correct the values, or prepare the object by hand"})
		}
	}
	if len(found) == 0 {
		return nil
	}
	return []Check{{Row: "P04", Class: finding.Stop, Findings: found}}
}

// diffCRDs lists the CRDs that the CRD stage creates or changes; their schema
// is thousands of lines, so only their names are shown.
func diffCRDs(ctx context.Context, c *kube.Client, r *resolved) ([]helm.Change, error) {
	if r.intent.Chart.Revision != 0 {
		return nil, nil
	}
	crds, err := helm.CRDs(r.chart)
	if err != nil {
		return nil, err
	}
	live, err := listRaw(ctx, c.Dynamic, crdsGVR, "")
	if err != nil {
		return nil, kube.Wrap(err, "CustomResourceDefinitions")
	}
	var out []helm.Change
	for _, u := range crds {
		i := slices.IndexFunc(live, func(l unstructured.Unstructured) bool { return l.GetName() == u.GetName() })
		if i < 0 {
			out = append(out, helm.Change{Action: helm.Create, Kind: u.GetKind(), Name: u.GetName()})
			continue
		}
		applied, err := c.Apply(ctx, u.DeepCopy(), fieldManager, true, true)
		if err != nil {
			return nil, err
		}
		if !reflect.DeepEqual(live[i].Object["spec"], applied.Object["spec"]) {
			out = append(out, helm.Change{Action: helm.Update, Kind: u.GetKind(), Name: u.GetName()})
		}
	}
	return out, nil
}

func changedLines(diff string) int {
	n := 0
	for l := range strings.Lines(diff) {
		if isChange(l) {
			n++
		}
	}
	return n
}

func isChange(line string) bool {
	return strings.HasPrefix(line, "+") && !strings.HasPrefix(line, "+++") || strings.HasPrefix(line, "-") && !strings.HasPrefix(line, "---")
}

// cut ends the text at a line below limit bytes.
func cut(text string, limit int) (string, bool) {
	if len(text) <= limit {
		return text, false
	}
	text = text[:limit]
	if i := strings.LastIndexByte(text, '\n'); i > 0 {
		text = text[:i+1]
	}
	return text, true
}

// artifactKey puts an object below its run.
func artifactKey(ctx context.Context, name string) string {
	if !activity.IsActivity(ctx) {
		return name
	}
	e := activity.GetInfo(ctx).WorkflowExecution
	return strings.ReplaceAll(e.ID, "/", "_") + "/" + e.RunID + "/" + name
}

func sameObject(a, b *unstructured.Unstructured) bool { return reflect.DeepEqual(a.Object, b.Object) }

func union(list []string, more string) []string {
	if slices.Contains(list, more) {
		return list
	}
	out := append(slices.Clone(list), more)
	slices.Sort(out)
	return out
}
