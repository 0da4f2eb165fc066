package cassandra

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/tests/sandbox"
)

// zoned is a sandbox whose nodes are kwok's: a real scheduler places members
// on them, and nothing runs in a member's pod.
type zoned struct {
	*sandbox.Sandbox
	t     *testing.T
	acts  *Activities
	at    kube.Target
	nodes []string
}

// newZoned leaves three nodes that take pods, each in a zone of its own.
func newZoned(t *testing.T) *zoned {
	t.Helper()
	z := &zoned{Sandbox: sandbox.Up(t, "--no-tensorfusion", "--pools", "shared=3"), t: t}
	clusters, err := kube.Parse(z.Vars["REFIT_CLUSTERS"])
	require.NoError(t, err)
	store, err := artifact.Open(t.TempDir(), nil)
	require.NoError(t, err)
	z.acts = &Activities{Clusters: clusters, Artifacts: store, Pace: 100 * time.Millisecond,
		Exec: func(context.Context, *kube.Client, kube.Command) (kube.Exit, error) {
			return kube.Exit{}, errors.New("nothing runs here")
		}}
	z.at.Cluster = clusters.Names()[0]
	who, err := clusters.Identify(t.Context(), kube.IdentifyRequest{Cluster: z.at.Cluster})
	require.NoError(t, err)
	z.at.UID = who.UID
	all, err := z.Kube.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	for _, n := range all.Items {
		if strings.HasPrefix(n.Name, "shared-") {
			z.nodes = append(z.nodes, n.Name)
			z.zone(n.Name, "zone-of-"+n.Name)
		} else {
			z.cordon(n.Name, true)
		}
	}
	require.Len(t, z.nodes, 3)
	return z
}

func (z *zoned) patch(node, patch string) {
	z.t.Helper()
	_, err := z.Kube.CoreV1().Nodes().Patch(z.t.Context(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	require.NoError(z.t, err)
}

func (z *zoned) cordon(node string, off bool) {
	z.t.Helper()
	z.patch(node, fmt.Sprintf(`{"spec":{"unschedulable":%t}}`, off))
}

// zone names a node's zone; an empty one takes the label away.
func (z *zoned) zone(node, zone string) {
	z.t.Helper()
	label := "null"
	if zone != "" {
		label = fmt.Sprintf("%q", zone)
	}
	z.patch(node, fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, ZoneKey, label))
}

// placed is one Cassandra on those nodes.
type placed struct {
	*zoned
	place Place
}

// one makes a StatefulSet of one member in a namespace of its own.
func (z *zoned) one(namespace string) *placed {
	z.t.Helper()
	ctx := z.t.Context()
	_, err := z.Kube.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	require.NoError(z.t, err)
	s := set()
	s.ObjectMeta = metav1.ObjectMeta{Name: "cassandra", Namespace: namespace}
	s.Spec.ServiceName, s.Spec.Selector = "cassandra-headless", &metav1.LabelSelector{MatchLabels: memberLabels}
	s.Spec.Template.Labels = memberLabels
	_, err = z.Kube.AppsV1().StatefulSets(namespace).Create(ctx, s, metav1.CreateOptions{})
	require.NoError(z.t, err)
	r := &placed{z, Place{Target: z.at, Namespace: namespace}}
	r.ready(1)
	return r
}

func (r *placed) set() *appsv1.StatefulSet {
	r.t.Helper()
	s, err := r.Kube.AppsV1().StatefulSets(r.place.Namespace).Get(r.t.Context(), "cassandra", metav1.GetOptions{})
	require.NoError(r.t, err)
	return s
}

func (r *placed) ready(members int32) {
	r.t.Helper()
	require.Eventually(r.t, func() bool { return r.set().Status.ReadyReplicas == members }, 2*time.Minute, 200*time.Millisecond)
}

func (r *placed) survey(mode string) SurveyResult {
	r.t.Helper()
	out, err := r.acts.Survey(r.t.Context(), SurveyRequest{Place: r.place, Mode: mode})
	require.NoError(r.t, err)
	return out
}

// rule adds the zone rule, which restarts the member.
func (r *placed) rule(mode string) {
	r.t.Helper()
	out, err := r.acts.Template(r.t.Context(), TemplateRequest{Place: r.place, UID: string(r.set().UID), Mode: mode, Rule: true, Limit: 2 * time.Minute})
	require.NoError(r.t, err)
	require.True(r.t, out.Changed)
}

func (r *placed) scale() {
	r.t.Helper()
	out, err := r.acts.Scale(r.t.Context(), ScaleRequest{Place: r.place, UID: string(r.set().UID)})
	require.NoError(r.t, err)
	require.True(r.t, out.Changed)
}

func TestARealSchedulerPartsMembersByTheRuleAndSaysWhyOneIsPending(t *testing.T) {
	z := newZoned(t)

	r := z.one("enforced")
	third := z.nodes[2]
	home := r.survey(ModeEnforced).Seats[0].Node
	if home == third {
		third = z.nodes[1]
	}
	z.zone(third, "")
	got := r.survey(ModeEnforced)
	require.False(t, got.Rule)
	require.Contains(t, got.NoRule, "node "+third+" has no label")
	z.cordon(third, true)
	require.True(t, r.survey(ModeEnforced).Rule, "a node that takes no pods need not say where it is")

	r.rule(ModeEnforced)
	got = r.survey(ModeEnforced)
	require.True(t, got.Ruled)
	home = got.Seats[0].Node
	for _, node := range z.nodes {
		z.cordon(node, node != home)
	}
	r.scale()
	var pending RingResult
	require.Eventually(t, func() bool { // the scheduler tells it when it has tried
		var err error
		pending, err = r.acts.Ring(t.Context(), RingRequest{Place: r.place, Want: 3, Row: "N137", Limit: time.Second})
		require.NoError(t, err)
		return strings.Contains(texts(pending.Findings), "Unschedulable")
	}, time.Minute, 200*time.Millisecond)
	require.False(t, pending.OK)
	said := texts(pending.Findings)
	require.Contains(t, said, "cassandra-1")
	require.Contains(t, said, "Pending: Unschedulable")
	require.Contains(t, said, "didn't match pod topology spread constraints")

	z.zone(third, "zone-of-"+third)
	for _, node := range z.nodes {
		z.cordon(node, false)
	}
	r.ready(TargetMembers)
	got = r.survey(ModeEnforced)
	require.Len(t, got.Seats, TargetMembers)
	require.Empty(t, got.Shared, "a zone each")
	require.Empty(t, got.Unzoned)

	// A zone without capacity never leaves a member Pending under preferred.
	soft := z.one("preferred")
	soft.rule(ModePreferred)
	home = soft.survey(ModePreferred).Seats[0].Node
	for _, node := range z.nodes {
		z.cordon(node, node != home)
	}
	soft.scale()
	soft.ready(TargetMembers)
	shared := soft.survey(ModePreferred).Shared
	require.Len(t, shared, 1)
	require.Equal(t, "cassandra-0, cassandra-1, cassandra-2", shared[0].Found)
}
