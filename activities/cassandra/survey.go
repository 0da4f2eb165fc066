package cassandra

import (
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// SurveyRequest asks what an expansion would start from.
type SurveyRequest struct {
	Place
	Mode string `json:"mode"`
}

// SurveyResult is the StatefulSet, its nodes, and what an expansion would
// change in the pod template.
type SurveyResult struct {
	// UID and Generation are the StatefulSet's: the patch holds on to them.
	UID        string `json:"uid"`
	Generation int64  `json:"generation"`
	Replicas   int    `json:"replicas"`
	DataCenter string `json:"dataCenter"`
	Seeds      string `json:"seeds,omitempty"`
	// Narrowed is the list of seeds with only the first member in it; empty
	// where it is not in the list. JoiningSeeds are the others.
	Narrowed     string   `json:"narrowed,omitempty"`
	JoiningSeeds []string `json:"joiningSeeds,omitempty"`
	// OldVolumes are claims of members that are not there: an earlier scale down
	// has left them, and a member that finds one does not stream.
	OldVolumes []string `json:"oldVolumes,omitempty"`
	// Ruled says that the pod template has the zone rule already.
	Ruled bool `json:"ruled,omitempty"`
	// Rule says whether the zone rule can be had, NoRule why not; NewRule that the
	// pod template lacks it, or has another one.
	Rule    bool   `json:"rule"`
	NewRule bool   `json:"newRule,omitempty"`
	NoRule  string `json:"noRule,omitempty"`
	Seats   []Seat `json:"seats,omitempty"`
	// Shared are the zones with more than one member, Unzoned the members whose
	// zone nobody knows.
	Shared   []finding.Finding `json:"shared,omitempty"`
	Unzoned  []finding.Finding `json:"unzoned,omitempty"`
	Evidence evidence.Trail    `json:"evidence"`
}

// Survey is the activity cassandra.Survey (N131, N133, N134, N138, N139). It
// only reads.
func (a *Activities) Survey(ctx context.Context, r SurveyRequest) (out SurveyResult, err error) {
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	set, err := c.set(ctx)
	if err != nil {
		return out, err
	}
	nodes, err := c.nodes(ctx)
	if err != nil {
		return out, err
	}
	pods, _, err := c.pods(ctx)
	if err != nil {
		return out, err
	}
	out = survey(set, nodes, pods, r.Mode, c.place.Members)
	if err := ValidDataCenter(out.DataCenter); err != nil {
		return out, err
	}
	if out.OldVolumes, err = c.oldVolumes(ctx, set); err != nil {
		return out, err
	}
	out.Evidence.Looks = 1
	out.Evidence.Last, err = evidence.Store(ctx, a.Artifacts, "survey.json", len(nodes), out)
	return out, err
}

// survey is the pure part.
func survey(set *appsv1.StatefulSet, nodes []corev1.Node, pods []corev1.Pod, mode string, m Members) SurveyResult {
	spec := set.Spec.Template.Spec
	out := SurveyResult{UID: string(set.UID), Generation: set.Generation, Replicas: replicas(set.Spec.Replicas), Seats: seats(pods, nodes)}
	out.DataCenter, _ = variable(spec, m.Container, dataCenterVariable)
	out.Seeds, _ = variable(spec, m.Container, seedsVariable)
	out.Narrowed, _ = narrowed(out.Seeds, m.StatefulSet)
	out.JoiningSeeds = joiningSeeds(out.Seeds, m.StatefulSet)
	var rule *corev1.TopologySpreadConstraint
	rule, out.NoRule = ZoneRule(nodes, set, mode)
	out.NewRule = rule != nil && !sameJSON(withRule(spec.TopologySpreadConstraints, *rule), spec.TopologySpreadConstraints)
	out.Rule, out.Shared, out.Unzoned = rule != nil, sameZone(out.Seats), noZone(out.Seats)
	out.Ruled = slices.ContainsFunc(spec.TopologySpreadConstraints, func(r corev1.TopologySpreadConstraint) bool { return r.TopologyKey == ZoneKey })
	return out
}

// oldVolumes are the claims of members beyond those that the StatefulSet asks
// for: their pods would take them up again.
func (c *cluster) oldVolumes(ctx context.Context, set *appsv1.StatefulSet) ([]string, error) {
	list, err := c.client.Typed.CoreV1().PersistentVolumeClaims(c.place.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, kube.Wrap(err, "PersistentVolumeClaims of "+c.place.Namespace)
	}
	var out []string
	for _, claim := range list.Items {
		for _, template := range set.Spec.VolumeClaimTemplates {
			if n, ok := ordinal(template.Name+"-"+set.Name, claim.Name); ok && n >= replicas(set.Spec.Replicas) && n < TargetMembers {
				out = append(out, claim.Name)
			}
		}
	}
	slices.Sort(out)
	return out, nil
}

// oldVolume is the finding of volumes that new members must not take up.
func oldVolume(namespace string, claims []string) finding.Finding {
	return finding.Finding{Row: "N136", Object: "PersistentVolumeClaims of " + namespace, Expected: "none of members that are not there", Found: strings.Join(claims, ", "),
		Why:  "a member that finds its old volume joins with the tokens of before and streams nothing, or refuses to start because it was decommissioned",
		Next: "see that nobody needs what is on them, delete them by hand, then retry; Refit deletes no volume"}
}

// OldVolume is the finding of the survey's old volumes, if there are any.
func (r SurveyResult) OldVolume(namespace string) []finding.Finding {
	if len(r.OldVolumes) == 0 {
		return nil
	}
	return []finding.Finding{oldVolume(namespace, r.OldVolumes)}
}

func (c *cluster) nodes(ctx context.Context) ([]corev1.Node, error) {
	list, err := c.client.Typed.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, kube.Wrap(err, fmt.Sprintf("nodes of cluster %s", c.place.Target.Cluster))
	}
	return list.Items, nil
}
