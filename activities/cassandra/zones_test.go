package cassandra

import (
	"encoding/json"
	"maps"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func podSpec(center string) corev1.PodSpec {
	return corev1.PodSpec{Containers: []corev1.Container{{Name: "cassandra", Image: "cassandra", Env: []corev1.EnvVar{
		{Name: "CASSANDRA_DC", Value: center}, {Name: "CASSANDRA_SEEDS", Value: "cassandra-0.cassandra-headless,cassandra-1.cassandra-headless"}}}}}
}

func node(name, zone string, cordoned bool) corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}, Spec: corev1.NodeSpec{Unschedulable: cordoned}}
	if zone != "" {
		n.Labels[ZoneKey] = zone
	}
	return n
}

func TestMembersAreSpreadOverZonesOnlyWhereEverySchedulableNodeHasOne(t *testing.T) {
	nodes := []corev1.Node{node("a", "z1", false), node("b", "z2", false), node("c", "", true)}
	rule, why := ZoneRule(nodes, set(), ModePreferred)
	require.NotNil(t, rule, why)
	require.Equal(t, corev1.ScheduleAnyway, rule.WhenUnsatisfiable)
	require.Equal(t, int32(1), rule.MaxSkew)
	require.Equal(t, "topology.kubernetes.io/zone", rule.TopologyKey)
	require.Equal(t, map[string]string{"app.kubernetes.io/name": "cassandra"}, rule.LabelSelector.MatchLabels)
	renamed := set()
	renamed.Spec.Template.Labels = map[string]string{"app": "scylla"}
	renamed.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "scylla"}}
	rule, _ = ZoneRule(nodes, renamed, ModePreferred)
	require.Equal(t, renamed.Spec.Selector, rule.LabelSelector, "a rule that selects nobody spreads nobody")
	rule, _ = ZoneRule(nodes, set(), ModeEnforced)
	require.Equal(t, corev1.DoNotSchedule, rule.WhenUnsatisfiable)

	rule, why = ZoneRule(append(nodes, node("d", "", false)), set(), ModeEnforced)
	require.Nil(t, rule)
	require.Contains(t, why, "node d has no label")
	rule, why = ZoneRule([]corev1.Node{node("c", "z", true)}, set(), ModePreferred)
	require.Nil(t, rule)
	require.Contains(t, why, "no node is schedulable")
}

func TestTwoMembersInOneZoneAreNamed(t *testing.T) {
	pods := []corev1.Pod{
		{ObjectMeta: metav1.ObjectMeta{Name: "cassandra-0"}, Spec: corev1.PodSpec{NodeName: "a"}},
		{ObjectMeta: metav1.ObjectMeta{Name: "cassandra-1"}, Spec: corev1.PodSpec{NodeName: "b"}},
		{ObjectMeta: metav1.ObjectMeta{Name: "cassandra-2"}, Spec: corev1.PodSpec{NodeName: "c"}},
	}
	shared := sameZone(seats(pods, []corev1.Node{node("a", "z1", false), node("b", "z2", false), node("c", "z1", false)}))
	require.Len(t, shared, 1)
	require.Equal(t, "zone z1", shared[0].Object)
	require.Equal(t, "cassandra-0, cassandra-2", shared[0].Found)
	require.Empty(t, sameZone(seats(pods, []corev1.Node{node("a", "z1", false), node("b", "z2", false), node("c", "z3", false)})))
	half := seats(pods, []corev1.Node{node("a", "z1", false), node("b", "", false)})
	require.Empty(t, sameZone(half))
	require.Contains(t, texts(noZone(half)), "none for cassandra-1, cassandra-2", "nobody knows the zones: that is not apart")
	require.Empty(t, noZone(seats(pods[:1], []corev1.Node{node("a", "z1", false)})))
}

func TestSeedsAreNarrowedToTheFirstMember(t *testing.T) {
	const first, second = "cassandra-0.cassandra-headless.cassandra-system.svc.cluster.local", "cassandra-1.cassandra-headless.cassandra-system.svc.cluster.local"
	to, ok := narrowed(first+", "+second, "cassandra")
	require.True(t, ok)
	require.Equal(t, first, to)
	require.Equal(t, []string{second}, joiningSeeds(first+","+second, "cassandra"))
	require.Empty(t, joiningSeeds(first, "cassandra"))
	_, ok = narrowed("10.0.0.1", "cassandra")
	require.False(t, ok)
	_, ok = narrowed("cassandra-01.x", "cassandra")
	require.False(t, ok)
}

func set(rules ...corev1.TopologySpreadConstraint) *appsv1.StatefulSet {
	s := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "cassandra", Namespace: "cassandra-system", UID: "u", ResourceVersion: "7"}}
	s.Spec.Template.Labels = maps.Clone(memberLabels)
	s.Spec.Template.Spec = podSpec("ncp")
	s.Spec.Template.Spec.TopologySpreadConstraints = rules
	return s
}

func TestOnePatchAddsTheRuleAndNarrowsTheSeedsAndIsMadeOnce(t *testing.T) {
	m := Members{}.WithDefaults()
	seeds, _ := variable(podSpec("ncp"), m.Container, seedsVariable)
	request := TemplateRequest{Rule: true, Narrow: true, Mode: ModeEnforced, Seeds: seeds}
	patch, err := templatePatch(set(), request, m)
	require.NoError(t, err)
	var got struct {
		Metadata struct{ UID, ResourceVersion string }
		Spec     struct{ Template struct{ Spec corev1.PodSpec } }
	}
	require.NoError(t, json.Unmarshal(patch, &got))
	require.Equal(t, "u", got.Metadata.UID)
	require.Equal(t, "7", got.Metadata.ResourceVersion, "a change in between is a conflict")
	require.Equal(t, []corev1.EnvVar{{Name: seedsVariable, Value: "cassandra-0.cassandra-headless"}}, got.Spec.Template.Spec.Containers[0].Env)
	require.Len(t, got.Spec.Template.Spec.TopologySpreadConstraints, 1)

	done := set(got.Spec.Template.Spec.TopologySpreadConstraints...)
	done.Spec.Template.Spec.Containers[0].Env[1].Value = "cassandra-0.cassandra-headless"
	patch, err = templatePatch(done, request, m)
	require.NoError(t, err)
	require.Nil(t, patch, "a second patch would restart the member again")

	changed := set()
	changed.Spec.Template.Spec.Containers[0].Env[1].Value = "cassandra-0.x,cassandra-9.x"
	_, err = templatePatch(changed, request, m)
	require.ErrorContains(t, err, "as surveyed")

	other := corev1.TopologySpreadConstraint{MaxSkew: 5, TopologyKey: "kubernetes.io/hostname", WhenUnsatisfiable: corev1.ScheduleAnyway}
	old := corev1.TopologySpreadConstraint{MaxSkew: 5, TopologyKey: ZoneKey, WhenUnsatisfiable: corev1.ScheduleAnyway}
	patch, err = templatePatch(set(other, old), TemplateRequest{Rule: true, Mode: ModePreferred}, m)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(patch, &got))
	require.Len(t, got.Spec.Template.Spec.TopologySpreadConstraints, 2, "rules for other keys stay")
}

func TestARolloutHasEndedWhenEveryPodIsNewAndReady(t *testing.T) {
	s := set()
	s.Generation, s.Status.ObservedGeneration, s.Status.UpdateRevision = 2, 2, "r2"
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "cassandra-0", Labels: map[string]string{appsv1.StatefulSetRevisionLabel: "r2"}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}}
	require.Empty(t, notRolledOut(s, []corev1.Pod{pod}))
	require.Contains(t, notRolledOut(s, nil), "0 of 1 pods")
	old := *pod.DeepCopy()
	old.Labels[appsv1.StatefulSetRevisionLabel] = "r1"
	require.Contains(t, notRolledOut(s, []corev1.Pod{old}), "not replaced yet")
	unready := *pod.DeepCopy()
	unready.Status.Conditions[0].Status = corev1.ConditionFalse
	require.Contains(t, notRolledOut(s, []corev1.Pod{unready}), "not Ready")
	s.Status.ObservedGeneration = 1
	require.Contains(t, notRolledOut(s, []corev1.Pod{pod}), "has not seen the change")
}

func TestTheSurveySaysWhatAnExpansionStartsFrom(t *testing.T) {
	got := survey(set(), []corev1.Node{node("a", "z1", false)}, nil, ModePreferred, Members{}.WithDefaults())
	require.Equal(t, 1, got.Replicas)
	require.Equal(t, "ncp", got.DataCenter)
	require.Equal(t, "cassandra-0.cassandra-headless", got.Narrowed)
	require.Equal(t, []string{"cassandra-1.cassandra-headless"}, got.JoiningSeeds)
	require.True(t, got.Rule)
	require.False(t, got.Ruled)
	require.True(t, got.NewRule)
	require.True(t, survey(set(corev1.TopologySpreadConstraint{TopologyKey: ZoneKey}), nil, nil, ModePreferred, Members{}.WithDefaults()).Ruled)

	ruled := set(zoneRule(set(), ModePreferred))
	require.False(t, survey(ruled, []corev1.Node{node("a", "z1", false)}, nil, ModePreferred, Members{}.WithDefaults()).NewRule)
	require.True(t, survey(ruled, []corev1.Node{node("a", "z1", false)}, nil, ModeEnforced, Members{}.WithDefaults()).NewRule, "that of another mode")
}
