package cassandra

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/secret"
)

func TestMain(m *testing.M) { os.Exit(apiservertest.Main(m)) }

// scripted is a real API server with a StatefulSet and pods without a kubelet:
// nodetool answers by a script, and nobody listens for CQL.
type scripted struct {
	t      *testing.T
	acts   *Activities
	place  Place
	client *kube.Client
	ran    []string
	// answer is asked for each command; nil text means an exit code of 0.
	answer func(pod, command string) (kube.Exit, error)
}

func newScripted(t *testing.T, members int) *scripted {
	t.Helper()
	api := apiservertest.Shared(t)
	store, err := artifact.Open(t.TempDir(), nil)
	require.NoError(t, err)
	s := &scripted{t: t, client: api.Client(t), place: Place{Target: api.Target(t, "prod"), Namespace: api.Namespace(t)}}
	s.acts = &Activities{Clusters: api.Clusters(t, "prod"), Artifacts: store, Pace: 5 * time.Millisecond,
		Dial: func(context.Context, *kube.Client, string, string, int) (net.Conn, error) {
			return nil, errors.New("connection refused")
		},
		Exec: func(_ context.Context, _ *kube.Client, cmd kube.Command) (kube.Exit, error) {
			command := strings.Join(cmd.Argv[1:], " ")
			s.ran = append(s.ran, cmd.Pod+" "+command)
			return s.answer(cmd.Pod, command)
		}}
	count := int32(members)
	labels := map[string]string{"app.kubernetes.io/name": "cassandra"}
	_, err = s.client.Typed.AppsV1().StatefulSets(s.place.Namespace).Create(t.Context(), &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "cassandra"},
		Spec: appsv1.StatefulSetSpec{Replicas: &count, ServiceName: "cassandra-headless", Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template:             corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: podSpec("ncp")},
			VolumeClaimTemplates: []corev1.PersistentVolumeClaim{claim("data")}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	pods := s.client.Typed.CoreV1().Pods(s.place.Namespace)
	for i := range members {
		pod, err := pods.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("cassandra-%d", i), Labels: labels}, Spec: podSpec("ncp")}, metav1.CreateOptions{})
		require.NoError(t, err)
		pod.Status.Phase = corev1.PodRunning
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		_, err = pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	_, err = s.client.Typed.CoreV1().Secrets(s.place.Namespace).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "cassandra-admin"},
		Data: map[string][]byte{"password": []byte("fake-password")}}, metav1.CreateOptions{})
	require.NoError(t, err)
	return s
}

func (s *scripted) set() *appsv1.StatefulSet {
	s.t.Helper()
	set, err := s.client.Typed.AppsV1().StatefulSets(s.place.Namespace).Get(s.t.Context(), "cassandra", metav1.GetOptions{})
	require.NoError(s.t, err)
	return set
}

func TestMembersAreLeftAloneWhileNotAllPodsAreThereAndReady(t *testing.T) {
	answer := func(_, command string) (kube.Exit, error) {
		return kube.Exit{Stdout: recorded(t, command+"-3.txt")}, nil
	}
	s := newScripted(t, 1)
	s.answer = answer
	out, err := s.acts.Ring(t.Context(), RingRequest{Place: s.place, Want: 3, Row: "N137", Limit: limit})
	require.NoError(t, err)
	require.Greater(t, out.Evidence.Looks, 2)
	require.Equal(t, []string{"cassandra-0 status", "cassandra-0 describecluster"}, s.ran, "once, so that whoever waits is told what it sees")
	require.Contains(t, evidence.InWords(out.Findings), "members of Cassandra: expected 3, found 1 pods")
	require.NotEmpty(t, out.Keyspaces, "what it has said is still known")

	s = newScripted(t, 3)
	s.answer = answer
	_, err = s.acts.Ring(t.Context(), RingRequest{Place: s.place, Want: 3, Limit: limit})
	require.NoError(t, err)
	require.Greater(t, len(s.ran), 6, "all are Ready: each look asks")
}

func TestAScaleGoesFromOneToThreeAndNowhereElse(t *testing.T) {
	s := newScripted(t, 1)
	uid := string(s.set().UID)
	_, err := s.acts.Scale(t.Context(), ScaleRequest{Place: s.place, UID: uid, Seeds: "cassandra-0.cassandra-headless"})
	require.ErrorContains(t, err, "expected CASSANDRA_SEEDS cassandra-0.cassandra-headless in the pod template", "somebody has put the list back")
	_, err = s.acts.Scale(t.Context(), ScaleRequest{Place: s.place, UID: uid, Login: &Login{Password: secret.Reference{Secret: "cassandra-admin", Key: "password"}}})
	require.ErrorContains(t, err, "connection refused", "nobody is let in")
	require.Equal(t, int32(1), *s.set().Spec.Replicas)
	out, err := s.acts.Scale(t.Context(), ScaleRequest{Place: s.place, UID: uid})
	require.NoError(t, err)
	require.Equal(t, ScaleResult{Before: 1, Changed: true}, out)
	require.Equal(t, int32(3), *s.set().Spec.Replicas)
	out, err = s.acts.Scale(t.Context(), ScaleRequest{Place: s.place, UID: uid})
	require.NoError(t, err)
	require.Equal(t, ScaleResult{Before: 3}, out, "three are done already")
	_, err = s.acts.Scale(t.Context(), ScaleRequest{Place: s.place, UID: "another"})
	require.ErrorContains(t, err, "expected UID another")

	set := s.set()
	five := int32(5)
	set.Spec.Replicas = &five
	_, err = s.client.Typed.AppsV1().StatefulSets(s.place.Namespace).Update(t.Context(), set, metav1.UpdateOptions{})
	require.NoError(t, err)
	_, err = s.acts.Scale(t.Context(), ScaleRequest{Place: s.place, UID: uid})
	require.ErrorContains(t, err, "expected 1 or 3, found 5")
}

func TestThePodTemplateIsPatchedOnceAndWaitedFor(t *testing.T) {
	s := newScripted(t, 1)
	set := s.set()
	request := TemplateRequest{Place: s.place, UID: string(set.UID), Mode: ModePreferred, Rule: true, Narrow: true,
		Seeds: "cassandra-0.cassandra-headless,cassandra-1.cassandra-headless", Limit: 50 * time.Millisecond}
	_, err := s.acts.Template(t.Context(), request)
	require.ErrorContains(t, err, "N135", "nobody rolls it out here")
	set = s.set()
	seeds, _ := variable(set.Spec.Template.Spec, "cassandra", seedsVariable)
	require.Equal(t, "cassandra-0.cassandra-headless", seeds)
	center, _ := variable(set.Spec.Template.Spec, "cassandra", dataCenterVariable)
	require.Equal(t, "ncp", center, "the rest of the environment stays")
	require.Equal(t, ZoneKey, set.Spec.Template.Spec.TopologySpreadConstraints[0].TopologyKey)

	set.Status.ObservedGeneration, set.Status.UpdateRevision = set.Generation, "r2"
	_, err = s.client.Typed.AppsV1().StatefulSets(s.place.Namespace).UpdateStatus(t.Context(), set, metav1.UpdateOptions{})
	require.NoError(t, err)
	_, err = s.client.Typed.CoreV1().Pods(s.place.Namespace).Patch(t.Context(), "cassandra-0", "application/merge-patch+json",
		[]byte(`{"metadata":{"labels":{"controller-revision-hash":"r2"}}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	out, err := s.acts.Template(t.Context(), request)
	require.NoError(t, err)
	require.False(t, out.Changed)
}

func TestTheSurveyReadsTheLiveStatefulSet(t *testing.T) {
	s := newScripted(t, 1)
	out, err := s.acts.Survey(t.Context(), SurveyRequest{Place: s.place, Mode: ModePreferred})
	require.NoError(t, err)
	require.Equal(t, "cassandra-0.cassandra-headless", out.Narrowed)
	require.False(t, out.Rule, "a cluster without nodes has no zones")
}

// Hosts of the recorded ring.
const (
	host0 = "6df9418b-84a5-4159-8560-5d8d97e0c3f3"
	host2 = "0b3f7510-1ab4-488a-8826-403a2dcb2a6a"
)

// leaves answers for three members of which the last one goes its way: modes
// are what it says of itself, and it is gone from the ring with the last mode
// when it is let.
func (s *scripted) leaves(gone bool, modes ...string) {
	status, described := recorded(s.t, "status-3.txt"), recorded(s.t, "describecluster-3.txt")
	lines := strings.Split(status, "\n")
	s.answer = func(pod, command string) (kube.Exit, error) {
		switch {
		case command == "describecluster":
			return kube.Exit{Stdout: described}, nil
		case command == "status" && gone && len(modes) == 0:
			return kube.Exit{Stdout: strings.Join(append(slices.Clone(lines[:5]), lines[6:]...), "\n")}, nil // without 127.0.2.13
		case command == "status":
			return kube.Exit{Stdout: status}, nil
		case command == "netstats" && len(modes) == 0:
			return kube.Exit{}, errors.New("container is not running")
		case command == "netstats":
			mode := modes[0]
			if modes = modes[1:]; len(modes) == 0 && !gone {
				modes = []string{mode}
			}
			return kube.Exit{Stdout: "Mode: " + mode + "\n"}, nil
		}
		return kube.Exit{}, nil
	}
}

func (s *scripted) takeOut(hostID string) (DecommissionResult, error) {
	return s.acts.Decommission(s.t.Context(), DecommissionRequest{Place: s.place, Pod: "cassandra-2", HostID: hostID, Keyspaces: []string{"nvcf_api"}, Limit: time.Second})
}

func TestAMemberHasLeftWhenTheFirstOnesRingLacksItsHost(t *testing.T) {
	s := newScripted(t, 3)
	s.leaves(true)
	out, err := s.takeOut(host2)
	require.NoError(t, err)
	require.True(t, out.Already)
	require.Equal(t, []string{"cassandra-0 status"}, s.ran)

	// Another member is missing: two rows are no proof that this one has left.
	s.ran = nil
	_, err = s.takeOut(host0)
	require.ErrorContains(t, err, "expected host "+host0+" gone from the ring of cassandra-0")
	require.Contains(t, s.ran, "cassandra-2 decommission --force")

	s.ran = nil
	_, err = s.takeOut("")
	require.ErrorContains(t, err, "expected the host ID of cassandra-2")
	require.Empty(t, s.ran)
}

func TestADecommissionEndsWhenTheHostIsGoneAndNotWhenTheMemberSaysSo(t *testing.T) {
	s := newScripted(t, 3)
	s.leaves(true, "LEAVING", "DECOMMISSIONED")
	out, err := s.takeOut(host2)
	require.NoError(t, err)
	require.False(t, out.Already)
	require.Equal(t, []string{"cassandra-0 status", "cassandra-0 describecluster", "cassandra-2 decommission --force", "cassandra-0 status", "cassandra-2 netstats",
		"cassandra-0 status", "cassandra-2 netstats", "cassandra-0 status", "cassandra-2 netstats"}, s.ran)

	s.leaves(false, "DECOMMISSION_FAILED")
	begun := time.Now()
	s.acts.Pace = 100 * time.Millisecond
	_, err = s.takeOut(host2)
	require.ErrorContains(t, err, "mode DECOMMISSION_FAILED")
	require.Less(t, time.Since(begun), time.Second, "it is over, and failed")
}

func TestADecommissionThatNobodyHasBegunIsToldAtOnce(t *testing.T) {
	for want, c := range map[string]struct {
		exit  kube.Exit
		err   error
		class finding.Class
	}{
		"the call: its pod is being terminated":          {kube.Exit{}, errors.New("its pod is being terminated"), finding.Retry},
		"the call ended with exit code 0":                {kube.Exit{}, nil, finding.Retry}, // as a connection looks that was lost
		"the call ended with 2: error: Not enough nodes": {kube.Exit{Code: 2, Stderr: "error: Not enough nodes"}, nil, finding.Stop},
	} {
		s := newScripted(t, 3)
		s.leaves(false, "NORMAL")
		others := s.answer
		s.answer = func(pod, command string) (kube.Exit, error) {
			if command == "decommission --force" {
				return c.exit, c.err
			}
			return others(pod, command)
		}
		begun := time.Now()
		_, err := s.acts.Decommission(t.Context(), DecommissionRequest{Place: s.place, Pod: "cassandra-2", HostID: host2, Keyspaces: []string{"nvcf_api"}, Limit: time.Minute})
		require.ErrorContains(t, err, "still in the ring, mode NORMAL; "+want)
		_, class, _ := finding.Of(err)
		require.Equal(t, c.class, class)
		require.Less(t, time.Since(begun), 10*time.Second, "nobody logs in meanwhile")
	}
}

func TestACallThatNobodyHearsMayBeginTheDecommissionAllTheSame(t *testing.T) {
	s := newScripted(t, 3)
	s.leaves(true, "NORMAL", "NORMAL", "LEAVING")
	others := s.answer
	s.answer = func(pod, command string) (kube.Exit, error) {
		if command == "decommission --force" {
			return kube.Exit{}, errors.New("the stream broke")
		}
		return others(pod, command)
	}
	_, err := s.takeOut(host2)
	require.NoError(t, err)
}

func TestNoMemberIsTakenOutWhileAKeyspaceAsksForMoreThanOneCopy(t *testing.T) {
	described := recorded(t, "describecluster-3.txt")
	for want, text := range map[string]string{
		"keyspace system_auth": strings.Replace(described, "system_auth -> Replication class: SimpleStrategy {replication_factor=1}", "system_auth -> Replication class: NetworkTopologyStrategy {dc1=3}", 1),
		"keyspace nvcf_api":    described + "\tnvcf_api -> Replication class: NetworkTopologyStrategy {dc1=2}\n",
	} {
		s := newScripted(t, 3)
		s.answer = func(_, command string) (kube.Exit, error) {
			if command == "describecluster" {
				return kube.Exit{Stdout: text}, nil
			}
			return kube.Exit{Stdout: recorded(t, "status-3.txt")}, nil
		}
		_, err := s.takeOut(host2)
		require.ErrorContains(t, err, want)
		require.NotContains(t, s.ran, "cassandra-2 decommission --force")
	}
}

func TestAPasswordThatIsNowhereStopsBeforeAnyLogin(t *testing.T) {
	s := newScripted(t, 1)
	_, err := s.acts.Logins(t.Context(), LoginsRequest{Place: s.place, Login: Login{Password: secret.Reference{Secret: "cassandra-admin", Key: "absent"}}, Limit: time.Second})
	require.ErrorContains(t, err, "expected a value in key absent of Secret cassandra-admin")
	out, err := s.acts.Logins(t.Context(), LoginsRequest{Place: s.place, Login: Login{Password: secret.Reference{Secret: "cassandra-admin", Key: "password"}}, Limit: 20 * time.Millisecond})
	require.NoError(t, err)
	require.False(t, out.OK)
	require.False(t, out.LockedOut(), "a member that does not answer does not refuse")
	require.NotContains(t, fmt.Sprint(out), "fake-password")
}

func TestWhatStopsTheQuestionIsNoRefusedLogin(t *testing.T) {
	s := newScripted(t, 3)
	s.acts.Dial = func(context.Context, *kube.Client, string, string, int) (net.Conn, error) {
		return nil, finding.Finding{Object: "port-forward to a pod", Expected: "the right to create pods/portforward", Found: "forbidden"}.Error(finding.Stop)
	}
	out, err := s.acts.Logins(t.Context(), LoginsRequest{Place: s.place, Login: Login{Password: secret.Reference{Secret: "cassandra-admin", Key: "password"}}, Limit: time.Second})
	require.ErrorContains(t, err, "forbidden")
	require.False(t, out.LockedOut())
}

func TestLockedOutMeansThatEveryMemberRefused(t *testing.T) {
	f := finding.Finding{Found: refusedLogin}
	require.True(t, LoginsResult{Refused: []string{"a", "b"}, Findings: []finding.Finding{f, f}}.LockedOut())
	require.False(t, LoginsResult{Refused: []string{"a"}, Findings: []finding.Finding{f, {Found: "no answer"}}}.LockedOut(), "who does not answer may let it in")
	require.False(t, LoginsResult{Refused: []string{"a"}, Accepted: []string{"b"}, Findings: []finding.Finding{f}}.LockedOut())
}

func TestAHostileDataCentreStopsBeforeAnybodyIsAsked(t *testing.T) {
	s := newScripted(t, 1)
	dialled := false
	s.acts.Dial = func(context.Context, *kube.Client, string, string, int) (net.Conn, error) {
		dialled = true
		return nil, errors.New("connection refused")
	}
	set := s.set()
	set.Spec.Template.Spec = podSpec("ncp': '3'}; DROP KEYSPACE nvcf_api; --")
	_, err := s.client.Typed.AppsV1().StatefulSets(s.place.Namespace).Update(t.Context(), set, metav1.UpdateOptions{})
	require.NoError(t, err)
	_, err = s.acts.Raise(t.Context(), RaiseRequest{Place: s.place, Login: Login{Password: secret.Reference{Secret: "cassandra-admin", Key: "password"}},
		Keyspaces: []string{"nvcf_api"}, Factor: 3, Limit: time.Second})
	require.ErrorContains(t, err, "N139")
	require.False(t, dialled)
	_, err = s.acts.Survey(t.Context(), SurveyRequest{Place: s.place, Mode: ModePreferred})
	require.ErrorContains(t, err, "N139")
}

func TestAPodThatIsGoneSinceItWasListedIsLookedForAgain(t *testing.T) {
	s := newScripted(t, 1)
	c, err := s.acts.open(t.Context(), s.place)
	require.NoError(t, err)
	defer c.close()
	gone := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "nvcf-api-1", Namespace: s.place.Namespace}}
	found, err := c.refusals(t.Context(), gone, "", time.Minute)
	require.NoError(t, err, "the next look reads the pod in its place")
	require.Len(t, found, 1)
	require.Equal(t, "the pod is gone", found[0].Found)
}

func TestServicesThatAreNotInstalledHaveNoRefusedLogins(t *testing.T) {
	s := newScripted(t, 1)
	out, err := s.acts.AuthErrors(t.Context(), AuthErrorsRequest{Place: s.place, Services: []Service{{Namespace: s.place.Namespace, Deployment: "nvcf-api"}}, Within: time.Minute, Limit: time.Second})
	require.NoError(t, err)
	require.True(t, out.OK)
	require.Zero(t, out.Pods)
	require.Equal(t, []string{s.place.Namespace + "/nvcf-api"}, out.Absent)
}
