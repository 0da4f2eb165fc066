package cassandra

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// TemplateRequest changes the pod template, once: each change restarts the
// member.
type TemplateRequest struct {
	Place
	UID  string `json:"uid"`
	Mode string `json:"mode"`
	// Rule adds the zone rule, Narrow leaves the first member alone in the list
	// of seeds, which was Seeds when somebody decided this.
	Rule   bool          `json:"rule,omitempty"`
	Narrow bool          `json:"narrow,omitempty"`
	Seeds  string        `json:"seeds,omitempty"`
	Limit  time.Duration `json:"limit"`
}

// TemplateResult says whether anything was changed.
type TemplateResult struct {
	Changed  bool           `json:"changed"`
	Evidence evidence.Trail `json:"evidence"`
}

// Template is the activity cassandra.Template (N133, N135): one patch, then it
// waits until the StatefulSet has rolled out. It may run twice.
func (a *Activities) Template(ctx context.Context, r TemplateRequest) (out TemplateResult, err error) {
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	set, err := c.ours(ctx, r.UID)
	if err != nil {
		return out, err
	}
	patch, err := templatePatch(set, r, c.place.Members)
	if err != nil {
		return out, err
	}
	if patch != nil {
		if err := c.fence(ctx); err != nil {
			return out, err
		}
		what := fmt.Sprintf("pod template of StatefulSet/%s/%s", c.place.Namespace, set.Name)
		// The patch carries the version that it was made for: a change in
		// between is a conflict, and the retry decides anew.
		if set, err = c.client.Typed.AppsV1().StatefulSets(c.place.Namespace).Patch(ctx, set.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{FieldManager: kube.UserAgent}); err != nil {
			return out, kube.Wrap(err, what)
		}
		out.Changed = true
	}
	var wrong *finding.Finding
	err = c.until(ctx, r.Limit, func(ctx context.Context) (evidence.Look, error) {
		now, err := c.ours(ctx, r.UID)
		if err != nil {
			return evidence.Look{}, err
		}
		pods, _, err := c.pods(ctx)
		if err != nil {
			return evidence.Look{}, err
		}
		found := notRolledOut(now, pods)
		wrong = &finding.Finding{Row: "N135", Object: fmt.Sprintf("StatefulSet/%s/%s", c.place.Namespace, now.Name), Expected: "rolled out within " + r.Limit.String(), Found: found,
			Next: "look at the pod's events and log"}
		return evidence.Look{Done: found == "", Found: found, Entries: len(pods), Seen: now.Status}, nil
	})
	out.Evidence = c.record.Trail
	if err == nil && wrong != nil && wrong.Found != "" {
		err = wrong.Error(finding.Stop)
	}
	return out, err
}

// ours is the StatefulSet that the run began with.
func (c *cluster) ours(ctx context.Context, uid string) (*appsv1.StatefulSet, error) {
	set, err := c.set(ctx)
	if err == nil && string(set.UID) != uid {
		err = finding.Finding{Object: fmt.Sprintf("StatefulSet/%s/%s", c.place.Namespace, set.Name), Expected: "UID " + uid, Found: string(set.UID),
			Why: "somebody made it anew since the run began", Next: "abort, and begin again"}.Error(finding.Stop)
	}
	return set, err
}

// templatePatch is what is missing in the template; nil when nothing is.
func templatePatch(set *appsv1.StatefulSet, r TemplateRequest, m Members) ([]byte, error) {
	spec := set.Spec.Template.Spec
	change := map[string]any{}
	if r.Rule {
		rules := withRule(spec.TopologySpreadConstraints, zoneRule(set, r.Mode))
		if !sameJSON(rules, spec.TopologySpreadConstraints) {
			change["topologySpreadConstraints"] = rules
		}
	}
	if r.Narrow {
		seeds, _ := variable(spec, m.Container, seedsVariable)
		to, ok := narrowed(seeds, m.StatefulSet)
		switch {
		case !ok || seeds != to && seeds != r.Seeds:
			return nil, finding.Finding{Object: seedsVariable + " of StatefulSet/" + set.Namespace + "/" + set.Name, Expected: fmt.Sprintf("%q, as surveyed", r.Seeds), Found: fmt.Sprintf("%q", seeds),
				Next: "abort, and begin again"}.Error(finding.Stop)
		case seeds != to:
			change["containers"] = []any{map[string]any{"name": m.Container, "env": []any{map[string]any{"name": seedsVariable, "value": to}}}}
		}
	}
	if len(change) == 0 {
		return nil, nil
	}
	return json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": set.UID, "resourceVersion": set.ResourceVersion},
		"spec":     map[string]any{"template": map[string]any{"spec": change}},
	})
}

func sameJSON(a, b any) bool {
	x, err := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err == nil && err2 == nil && string(x) == string(y)
}

// notRolledOut says what is missing until every pod is of the template's
// newest revision and Ready.
func notRolledOut(set *appsv1.StatefulSet, pods []corev1.Pod) string {
	switch want := replicas(set.Spec.Replicas); {
	case set.Status.ObservedGeneration < set.Generation:
		return "the controller has not seen the change yet"
	case len(pods) < want:
		return fmt.Sprintf("%d of %d pods", len(pods), want)
	}
	for i := range pods {
		p := &pods[i]
		if p.Labels[appsv1.StatefulSetRevisionLabel] != set.Status.UpdateRevision {
			return fmt.Sprintf("%s is not replaced yet", p.Name)
		}
		if why := Pending(p); why != "" {
			return fmt.Sprintf("%s: %s", p.Name, why)
		}
		if why := kube.Unready(p); why != "" {
			return fmt.Sprintf("%s: %s", p.Name, why)
		}
	}
	return ""
}
