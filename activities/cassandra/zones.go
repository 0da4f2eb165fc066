package cassandra

import (
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/refit-run/refit/activities/finding"
)

// Modes of high availability, as the stack's values name them.
const (
	ModeNone      = "none"
	ModePreferred = "preferred"
	ModeEnforced  = "enforced"
)

// ZoneKey is the label that names a node's zone.
const ZoneKey = corev1.LabelTopologyZone

// memberLabels select the members, for the rule that spreads them, as the guide
// names them.
var memberLabels = map[string]string{"app.kubernetes.io/name": "cassandra"}

// ZoneRule decides whether members are spread over zones (N133, N134): only
// where every schedulable node says in which zone it is. The text says why not.
func ZoneRule(nodes []corev1.Node, set *appsv1.StatefulSet, mode string) (*corev1.TopologySpreadConstraint, string) {
	schedulable := 0
	for i := range nodes {
		if !takesPods(&nodes[i]) {
			continue
		}
		schedulable++
		if nodes[i].Labels[ZoneKey] == "" {
			return nil, fmt.Sprintf("node %s has no label %s", nodes[i].Name, ZoneKey)
		}
	}
	if schedulable == 0 {
		return nil, "no node is schedulable"
	}
	rule := zoneRule(set, mode)
	return &rule, ""
}

// zoneRule spreads the members over zones: where it can, or under enforced
// before a pod may start.
func zoneRule(set *appsv1.StatefulSet, mode string) corev1.TopologySpreadConstraint {
	rule := corev1.TopologySpreadConstraint{MaxSkew: 1, TopologyKey: ZoneKey, WhenUnsatisfiable: corev1.ScheduleAnyway,
		LabelSelector: &metav1.LabelSelector{MatchLabels: memberLabels}}
	if !labels.SelectorFromSet(memberLabels).Matches(labels.Set(set.Spec.Template.Labels)) { // a changed chart: the rule would count nobody
		rule.LabelSelector = set.Spec.Selector
	}
	if mode == ModeEnforced {
		rule.WhenUnsatisfiable = corev1.DoNotSchedule
	}
	return rule
}

// takesPods says whether a node is schedulable as kubectl shows it.
func takesPods(n *corev1.Node) bool { return !n.Spec.Unschedulable }

// withRule is the pod template's list of rules with this one in it: one rule
// for a key, whoever wrote the one before.
func withRule(rules []corev1.TopologySpreadConstraint, rule corev1.TopologySpreadConstraint) []corev1.TopologySpreadConstraint {
	out := slices.DeleteFunc(slices.Clone(rules), func(r corev1.TopologySpreadConstraint) bool { return r.TopologyKey == rule.TopologyKey })
	return append(out, rule)
}

// Seat is where a member runs.
type Seat struct {
	Pod  string `json:"pod"`
	Node string `json:"node,omitempty"`
	Zone string `json:"zone,omitempty"`
}

// seats joins pods with the zones of their nodes.
func seats(pods []corev1.Pod, nodes []corev1.Node) []Seat {
	out := make([]Seat, 0, len(pods))
	for _, p := range pods {
		s := Seat{Pod: p.Name, Node: p.Spec.NodeName}
		if at := slices.IndexFunc(nodes, func(n corev1.Node) bool { return n.Name == s.Node }); at >= 0 {
			s.Zone = nodes[at].Labels[ZoneKey]
		}
		out = append(out, s)
	}
	return out
}

// sameZone says which members share a zone (N138): a volume stays in the zone
// where its member first started, so that only a new volume would part them.
// Members whose zone nobody knows are noZone's.
func sameZone(seats []Seat) []finding.Finding {
	byZone := map[string][]string{}
	for _, s := range seats {
		if s.Zone != "" {
			byZone[s.Zone] = append(byZone[s.Zone], s.Pod)
		}
	}
	var out []finding.Finding
	for zone, pods := range byZone {
		if len(pods) > 1 {
			out = append(out, finding.Finding{Row: "N138", Object: "zone " + zone, Expected: "at most one member of Cassandra", Found: strings.Join(pods, ", "),
				Why:  "their volumes stay in this zone; under enforced a pod of them stays Pending from the upgrade on",
				Next: "give the cluster nodes in another zone and move a member there by the reviewed procedure, or choose preferred"})
		}
	}
	slices.SortFunc(out, func(a, b finding.Finding) int { return strings.Compare(a.Object, b.Object) })
	return out
}

// noZone says which members' zone nobody knows: they may share one.
func noZone(seats []Seat) []finding.Finding {
	var pods []string
	for _, s := range seats {
		if s.Zone == "" {
			pods = append(pods, s.Pod)
		}
	}
	if len(pods) == 0 {
		return nil
	}
	return []finding.Finding{{Row: "N138", Object: "zones of the members of Cassandra", Expected: "a label " + ZoneKey + " on the node of each", Found: "none for " + strings.Join(pods, ", "),
		Why: "nothing proves that the members run in different zones", Next: "label the nodes by the zones that they are in, or choose preferred"}}
}

// narrowed is the list of seeds with nobody in it but the first member: a seed
// does not bootstrap, it takes over ranges of tokens and holds no row of them.
func narrowed(seeds, set string) (string, bool) {
	for _, s := range fields(seeds) {
		host, _, _ := strings.Cut(s, ".")
		if host == set+"-0" {
			return s, true
		}
	}
	return "", false
}

// joiningSeeds are the members after the first that the list names.
func joiningSeeds(seeds, set string) []string {
	var out []string
	for _, s := range fields(seeds) {
		host, _, _ := strings.Cut(s, ".")
		if n, ok := ordinal(set, host); !ok || n > 0 {
			out = append(out, s)
		}
	}
	return out
}
