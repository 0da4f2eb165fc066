package cassandra

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/secret"
)

func claim(name string) corev1.PersistentVolumeClaim {
	return corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}}}
}

func (s *scripted) claims(names ...string) {
	s.t.Helper()
	for _, name := range names {
		c := claim(name)
		_, err := s.client.Typed.CoreV1().PersistentVolumeClaims(s.place.Namespace).Create(s.t.Context(), &c, metav1.CreateOptions{})
		require.NoError(s.t, err)
	}
}

func TestVolumesOfMembersThatAreNotThereForbidTheScale(t *testing.T) {
	s := newScripted(t, 1)
	s.claims("data-cassandra-0", "other-cassandra-1", "data-cassandra-3", "data-cassandra-x")
	out, err := s.acts.Survey(t.Context(), SurveyRequest{Place: s.place, Mode: ModePreferred})
	require.NoError(t, err)
	require.Empty(t, out.OldVolumes)
	require.Empty(t, out.OldVolume("ns"))
	s.claims("data-cassandra-2", "data-cassandra-1")
	out, err = s.acts.Survey(t.Context(), SurveyRequest{Place: s.place, Mode: ModePreferred})
	require.NoError(t, err)
	require.Equal(t, []string{"data-cassandra-1", "data-cassandra-2"}, out.OldVolumes)
	require.Contains(t, texts(out.OldVolume("ns")), "N136: PersistentVolumeClaims of ns")
	_, err = s.acts.Scale(t.Context(), ScaleRequest{Place: s.place, UID: string(s.set().UID)})
	require.ErrorContains(t, err, "found data-cassandra-1, data-cassandra-2")
	require.Equal(t, int32(1), *s.set().Spec.Replicas)
}

func TestARunWithoutItsLeaseChangesNothing(t *testing.T) {
	s := newScripted(t, 1)
	s.place.Release, s.place.Holder = "cassandra", "somebody else"
	login := Login{Password: secret.Reference{Secret: "cassandra-admin", Key: "password"}}
	s.answer = func(string, string) (kube.Exit, error) { return kube.Exit{}, nil }
	set := s.set()
	_, scale := s.acts.Scale(t.Context(), ScaleRequest{Place: s.place, UID: string(set.UID)})
	_, template := s.acts.Template(t.Context(), TemplateRequest{Place: s.place, UID: string(set.UID), Rule: true, Limit: time.Second})
	_, raise := s.acts.Raise(t.Context(), RaiseRequest{Place: s.place, Login: login, Keyspaces: []string{"nvcf_api"}, Factor: 3, Limit: time.Second})
	_, repair := s.acts.Repair(t.Context(), RepairRequest{Place: s.place, Login: login, Pod: "cassandra-0", Keyspaces: []string{"nvcf_api"}, Since: time.Now(), Limit: time.Second})
	_, snapshot := s.acts.Snapshot(t.Context(), SnapshotRequest{Place: s.place, Pod: "cassandra-0", Tag: "t", Limit: time.Second})
	_, decommission := s.acts.Decommission(t.Context(), DecommissionRequest{Place: s.place, Pod: "cassandra-1", Limit: time.Second})
	for name, err := range map[string]error{"scale": scale, "template": template, "raise": raise, "repair": repair, "snapshot": snapshot, "decommission": decommission} {
		_, class, told := finding.Of(err)
		require.True(t, told && class == finding.Stop, "%s: %v", name, err)
		require.ErrorContains(t, err, "ease", name)
	}
	require.Empty(t, s.ran)
	require.Equal(t, set.ResourceVersion, s.set().ResourceVersion)
}
