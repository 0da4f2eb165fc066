package cassandra

import (
	"context"
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// ScaleRequest scales one member to three.
type ScaleRequest struct {
	Place
	UID string `json:"uid"`
	// Seeds is the list that the template must hold where the new members are
	// to bootstrap: a seed joins without the rows that it takes over.
	Seeds string `json:"seeds,omitempty"`
	// Login, where it is given, must be accepted right before the scale.
	Login *Login `json:"login,omitempty"`
}

// ScaleResult says how many there were.
type ScaleResult struct {
	Before  int  `json:"before"`
	Changed bool `json:"changed"`
}

// Scale is the activity cassandra.Scale (N136). It never scales down, and from
// nothing but one member without volumes of others; three are done already.
func (a *Activities) Scale(ctx context.Context, r ScaleRequest) (out ScaleResult, err error) {
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	set, err := c.ours(ctx, r.UID)
	if err != nil {
		return out, err
	}
	what := fmt.Sprintf("scale of StatefulSet/%s/%s", c.place.Namespace, set.Name)
	switch out.Before = replicas(set.Spec.Replicas); out.Before {
	case TargetMembers:
		return out, nil
	case 1:
	default:
		return out, finding.Finding{Row: "N136", Object: what, Expected: "1 or 3", Found: fmt.Sprint(out.Before), Next: "find out who scaled it; Refit never scales down"}.Error(finding.Stop)
	}
	if seeds, _ := variable(set.Spec.Template.Spec, c.place.Members.Container, seedsVariable); r.Seeds != "" && seeds != r.Seeds {
		return out, finding.Finding{Row: "N136", Object: what, Expected: seedsVariable + " " + r.Seeds + " in the pod template", Found: seeds,
			Why: "a new member that is a seed takes over ranges without their rows", Next: "find out who has put it back, then retry: it is narrowed again first"}.Error(finding.Stop)
	}
	old, err := c.oldVolumes(ctx, set)
	if err != nil {
		return out, err
	}
	if len(old) > 0 {
		return out, oldVolume(c.place.Namespace, old).Error(finding.Stop)
	}
	if r.Login != nil {
		s, err := c.loginFirst(ctx, *r.Login)
		if err != nil {
			return out, finding.InRow(err, "N136")
		}
		s.Close()
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": set.UID, "resourceVersion": set.ResourceVersion},
		"spec":     map[string]any{"replicas": TargetMembers},
	})
	if err != nil {
		return out, err
	}
	if err := c.fence(ctx); err != nil {
		return out, err
	}
	if _, err = c.client.Typed.AppsV1().StatefulSets(c.place.Namespace).Patch(ctx, set.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: kube.UserAgent}, "scale"); err != nil {
		return out, kube.Wrap(err, what)
	}
	out.Changed = true
	return out, nil
}
