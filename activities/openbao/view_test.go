package openbao

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	oldImage = "registry.example/nvcf-openbao:2.6.2-nv-1.3.4"
	newImage = "registry.example/nvcf-openbao:2.6.3-nv-1.3.7"
)

func target() Want {
	return Want{Image: "nvcf-openbao:2.6.3-nv-1.3.7", Version: "2.6.3", Members: 3, ClusterID: "c1"}
}

// whole is a cluster of three members of the old template; the first one leads.
func whole() View {
	v := View{Set: Set{Name: "bao", Replicas: 3, Strategy: "OnDelete", Image: newImage, Revision: "new", Service: "bao-internal", Namespace: "vault"}}
	for i := range 3 {
		v.Members = append(v.Members, Member{
			Pod: fmt.Sprintf("bao-%d", i), UID: fmt.Sprintf("uid-%d", i), Revision: "old", Image: oldImage, IP: fmt.Sprintf("10.0.0.%d", i),
			Status: Status{Initialized: true, Version: "2.6.2", Storage: "raft", ClusterID: "c1", Leader: "http://bao-0:8200", Committed: 50, Applied: 50},
		})
		v.Peers = append(v.Peers, Peer{ID: fmt.Sprintf("node-%d", i), Address: fmt.Sprintf("bao-%d.bao-internal:8201", i), Voter: true})
	}
	v.Members[0].Active = true
	return v
}

// renew is what a replacement does.
func (v *View) renew(i int) {
	m := &v.Members[i]
	m.UID, m.Revision, m.Image, m.Version = m.UID+"x", "new", newImage, "2.6.3"
}

func (v *View) lead(i int) {
	for j := range v.Members {
		v.Members[j].Active, v.Members[j].Leader = i == j, fmt.Sprintf("http://bao-%d:8200", i)
	}
}

func TestOnlyOneMemberThatAllFollowIsActive(t *testing.T) {
	v := whole()
	active, none := v.Active()
	require.Empty(t, none)
	require.Equal(t, "bao-0", active.Pod)

	for want, change := range map[string]func(*View){
		"no member is active":                   func(v *View) { v.Members[0].Active = false },
		"bao-0 and bao-2 are both active":       func(v *View) { v.Members[2].Active = true },
		`and bao-1 follows "http://bao-2:8200"`: func(v *View) { v.Members[1].Leader = "http://bao-2:8200" },
		`and bao-1 follows ""`:                  func(v *View) { v.Members[1].Leader = "" },
	} {
		v := whole()
		change(&v)
		_, none := v.Active()
		require.Contains(t, none, want)
	}

	v = whole()
	v.Members[0].Sealed = true
	_, none = v.Active()
	require.Equal(t, "no member is active", none, "what a sealed member claims does not count")
	v = whole()
	v.Members[2] = Member{Pod: "bao-2", Status: Status{Trouble: "connection refused"}}
	_, none = v.Active()
	require.Empty(t, none, "one that does not answer follows nobody")
}

func TestStandbysComeFirstThenTheStepDownThenTheFormerActive(t *testing.T) {
	v := whole()
	require.Equal(t, []Step{{Replace, "bao-1", "uid-1"}, {Replace, "bao-2", "uid-2"}, {StepDown, "bao-0", "uid-0"}, {Replace, "bao-0", "uid-0"}}, Steps(v))
	require.Equal(t, Steps(v)[0], Next(v))
	v.renew(1)
	require.Equal(t, Step{Replace, "bao-2", "uid-2"}, Next(v))
	v.renew(2)
	require.Equal(t, Step{StepDown, "bao-0", "uid-0"}, Next(v))
	v.lead(2)
	require.Equal(t, Step{Replace, "bao-0", "uid-0"}, Next(v))
	v.renew(0)
	require.Equal(t, Step{Act: Done}, Next(v))
	require.Empty(t, Steps(v))
}

func TestThePlanIsMadeAnewWhenLeadershipHasMoved(t *testing.T) {
	v := whole()
	v.lead(1)
	require.Equal(t, Step{Replace, "bao-0", "uid-0"}, Next(v), "the member that was active is a standby now")
	v.renew(0)
	v.lead(0)
	require.Equal(t, Step{Replace, "bao-1", "uid-1"}, Next(v))
	v.renew(1)
	require.Equal(t, Step{Replace, "bao-2", "uid-2"}, Next(v), "a member of the present template leads: no step-down is needed")
}

// TestWhereverLeadershipGoesEveryMemberIsReplacedOnceAndNeverWhileItLeads plays
// clusters whose leader moves at random after each step.
func TestWhereverLeadershipGoesEveryMemberIsReplacedOnceAndNeverWhileItLeads(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 0))
		v := whole()
		v.lead(random.IntN(3))
		replaced := map[string]bool{}
		for steps := 0; Next(v).Act != Done; steps++ {
			require.Less(t, steps, 30, "seed %d", seed)
			step := Next(v)
			active, _ := v.Active()
			m, _ := v.member(step.Pod)
			switch step.Act {
			case Replace:
				require.NotEqual(t, active.Pod, step.Pod, "seed %d", seed)
				require.False(t, replaced[step.Pod], "seed %d", seed)
				replaced[step.Pod] = true
				v.renew(int(step.Pod[4] - '0'))
			case StepDown:
				require.Equal(t, active.Pod, step.Pod)
				require.True(t, v.stale(m), "a member of the present template never steps down by our doing")
				require.Len(t, v.Stale(), 1, "leadership may only go to a member of the present template")
				v.lead((int(step.Pod[4]-'0') + 1 + random.IntN(2)) % 3)
			}
			if random.IntN(3) == 0 {
				v.lead(random.IntN(3))
			}
		}
		require.Len(t, replaced, 3)
	}
}

func TestTheTagIsNotTheVersion(t *testing.T) {
	for image, want := range map[string]string{
		"nvcf-openbao:2.6.3-nv-1.3.7":                 "2.6.3",
		"registry.example:5000/a/nvcf-openbao:v2.6.3": "2.6.3",
		"nvcf-openbao:2.6.3-nv-1.3.7@sha256:0123":     "2.6.3",
		"nvcf-openbao:2.6":                            "",
		"nvcf-openbao:2.6.31x":                        "",
		"nvcf-openbao:latest":                         "",
		"registry.example:5000/nvcf-openbao":          "",
		"nvcf-openbao@sha256:0123":                    "",
	} {
		require.Equal(t, want, VersionOf(image), image)
	}
	for reported, same := range map[string]bool{"2.6.3": true, "v2.6.3": true, "2.6.3+build": true, "2.6.3-nv-1.3.7": false, "2.6.3-rc1": false, "2.6.2": false, "": false, "2.6.30": false} {
		require.Equal(t, same, sameVersion(reported, "2.6.3"), reported)
	}
	for image, same := range map[string]bool{
		newImage: true, newImage + "@sha256:0123": true, "nvcf-openbao:2.6.3-nv-1.3.7": true,
		oldImage: false, "other-nvcf-openbao:2.6.3-nv-1.3.7": false, "nvcf-openbao:2.6.3-nv-1.3.70": false, "": false,
	} {
		require.Equal(t, same, sameImage(image, "nvcf-openbao:2.6.3-nv-1.3.7"), image)
	}
	require.True(t, newer("2.10.0", "2.9.9"), "numbers are compared, not texts")
	require.False(t, newer("2.6.3", "2.6.3"))
	require.False(t, newer("unknown", "2.6.3"))
}

func TestThePodsOfTheSetAreReadWithTheirRevisionAndWhatIsMissing(t *testing.T) {
	pod := func(name, container, revision string) corev1.Pod {
		return corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{appsv1.ControllerRevisionHashLabelKey: revision}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: container, Image: oldImage}, {Name: "sidecar", Image: "sidecar:1"}}},
			Status:     corev1.PodStatus{PodIP: "10.0.0.1", Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
		}
	}
	leaving := pod("bao-2", "openbao", "new")
	leaving.DeletionTimestamp = &metav1.Time{}
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "bao", Namespace: "vault", Generation: 7, Labels: map[string]string{"app.kubernetes.io/instance": "by-label"}}, Status: appsv1.StatefulSetStatus{ObservedGeneration: 7, CurrentRevision: "old", UpdateRevision: "new"}}
	replicas := int32(3)
	set.Spec.Replicas, set.Spec.ServiceName = &replicas, "bao-internal"
	set.Spec.UpdateStrategy.Type = appsv1.OnDeleteStatefulSetStrategyType
	set.Spec.Template.Spec.Containers = []corev1.Container{{Name: "sidecar", Image: "sidecar:2"}, {Name: "openbao", Image: newImage}}

	v := viewOf(set, []corev1.Pod{leaving, pod("bao-0", "openbao", "old"), pod("injector-0", "agent", "")}, "openbao")
	require.Equal(t, Set{Name: "bao", Replicas: 3, Strategy: "OnDelete", Image: newImage, Revision: "new", Service: "bao-internal", Namespace: "vault",
		Owner: Owner{Release: "by-label"}}, v.Set)
	require.Equal(t, []string{"bao-1"}, v.Missing)
	require.Len(t, v.Members, 2)
	require.Equal(t, Member{Pod: "bao-0", UID: "uid-bao-0", Revision: "old", IP: "10.0.0.1", Image: oldImage, Images: []string{"openbao=" + oldImage, "sidecar=sidecar:1"}}, v.Members[0])
	require.True(t, v.Members[1].Deleting)
	require.Equal(t, []string{"bao-0"}, []string{v.Stale()[0].Pod}, "by revision, whatever the current revision says")
	require.Len(t, v.Stale(), 1)

	set.Annotations = map[string]string{"meta.helm.sh/release-name": "bao", "meta.helm.sh/release-namespace": "vault"}
	require.Equal(t, Owner{"bao", "vault"}, viewOf(set, nil, "openbao").Set.Owner, "Helm's annotations are above a label")
	held := pod("bao-0", "openbao", "old")
	held.Spec.Volumes = []corev1.Volume{{Name: "tmp"}, {Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data-bao-0"}}}}
	require.Equal(t, []string{"data-bao-0"}, viewOf(set, []corev1.Pod{held}, "openbao").Members[0].Claims)
	require.False(t, viewOf(set, nil, "openbao").Set.Deleting)
	set.DeletionTimestamp = &metav1.Time{}
	require.True(t, viewOf(set, nil, "openbao").Set.Deleting)
	set.Generation = 8
	require.True(t, viewOf(set, nil, "openbao").Set.Unobserved, "the revision is that of an older template")
	set.Generation, set.Spec.Replicas = 7, nil
	require.Equal(t, 1, viewOf(set, nil, "openbao").Set.Replicas, "what Kubernetes takes for none")
}

func TestASnapshotIsTakenOfAMemberThatAMajorityFollowsBeforeAndAfter(t *testing.T) {
	v := whole()
	before, found := leading(v)
	require.Empty(t, found)
	require.Equal(t, "bao-0", before.Pod)
	require.Empty(t, stillLeading(v, before))

	v.Members[2].Sealed = true
	require.Empty(t, stillLeading(v, before), "one that is away does not stand against a backup")
	v.Members[1].Status = Status{Trouble: "connection refused"}
	require.Equal(t, "bao-0 is active, and 1 of 3 members serve", stillLeading(v, before)[0].Found, "a leader that has lost its quorum may say for seconds that it leads")
	v.Members = v.Members[:1]
	require.NotEmpty(t, stillLeading(v, before), "pods that are missing count")

	v = whole()
	v.lead(1)
	require.Equal(t, "bao-1 is", stillLeading(v, before)[0].Found)
	v = whole()
	v.Members[0].UID = "another"
	require.NotEmpty(t, stillLeading(v, before), "a member that was made anew is not the one that was asked")
	v.Members[0].Active = false
	require.Equal(t, "no member is active", stillLeading(v, before)[0].Found)
}
