package openbao

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/testsuite"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/secret"
)

func (c *cluster) backup(limit time.Duration) SnapshotRequest {
	return SnapshotRequest{Place: c.place, Limit: limit, Transfer: patience,
		Secrets: []Held{{"openbao-server-unseal", "unseal_key"}, {"openbao-server-root-token", "root_token"}}}
}

func TestASnapshotIsStoredWholeWithWhatOpensItAndNothingElse(t *testing.T) {
	c := start(t)
	active := c.active()
	var suite testsuite.WorkflowTestSuite // only an activity's artifacts have the whole name
	env := suite.NewTestActivityEnvironment()
	env.RegisterActivity(c.acts.Snapshot)
	v, err := env.ExecuteActivity(c.acts.Snapshot, c.backup(patience))
	require.NoError(t, err)
	var out SnapshotResult
	require.NoError(t, v.Get(&out))
	require.Empty(t, out.Findings)
	require.Equal(t, active.Pod, out.Active)
	require.Equal(t, active.ClusterID, out.ClusterID)
	require.Equal(t, artifact.Secret, out.Snapshot.Kind)
	require.Equal(t, len(archiveFiles), out.Snapshot.Entries)
	read := func(ref artifact.Ref) []byte {
		var text bytes.Buffer
		_, err := c.acts.Artifacts.Get(t.Context(), ref.URL, strings.NewReader(c.identity), &text)
		require.NoError(t, err)
		return text.Bytes()
	}
	require.NoError(t, checkArchive(bytes.NewReader(read(out.Snapshot))))
	require.Len(t, out.Secrets, 2)
	for i, key := range []string{"unseal_key:", "root_token:"} {
		require.Equal(t, artifact.Secret, out.Secrets[i].Kind)
		text := string(read(out.Secrets[i]))
		require.Contains(t, text, "kind: Secret")
		require.Contains(t, text, key)
	}
	stored := func() int {
		refs, err := c.acts.Artifacts.List(t.Context(), "")
		require.NoError(t, err)
		secrets := 0
		for _, r := range refs {
			if r.Kind == artifact.Secret {
				secrets++
			}
		}
		return secrets
	}
	require.Equal(t, 3, stored())

	t.Run("a survey finds the snapshot that it is given", func(t *testing.T) {
		ask := func(url string) SurveyResult {
			s, err := c.acts.Survey(t.Context(), SurveyRequest{Place: c.place, Want: c.want(), Limit: patience, Snapshot: url})
			require.NoError(t, err)
			return s
		}
		found := ask(out.Snapshot.URL)
		require.Equal(t, out.Snapshot, found.Snapshot)
		require.WithinDuration(t, time.Now(), found.Taken, patience)
		for _, other := range []string{out.Secrets[0].URL, out.Snapshot.URL[:len(out.Snapshot.URL)-1], "file:///nowhere/openbao.snap"} {
			none := ask(other)
			require.Len(t, none.Findings, 1, other)
			require.Equal(t, "N104", none.Findings[0].Row)
			require.Equal(t, Step{}, none.Step)
		}
	})

	t.Run("a survey refuses the snapshot of another cluster, and one of which it is not known", func(t *testing.T) {
		store := func(run string, about ...taken) string {
			ref, err := c.acts.Artifacts.Put(t.Context(), "other/"+run+"/openbao.Snapshot-5-1/"+snapshotName, artifact.Secret, 1, func(w io.Writer) error {
				_, err := w.Write(read(out.Snapshot))
				return err
			})
			require.NoError(t, err)
			for _, a := range about {
				text, err := json.Marshal(a)
				require.NoError(t, err)
				_, err = c.acts.Artifacts.Put(t.Context(), "other/"+run+"/openbao.Snapshot-5-1/"+takenName, artifact.Evidence, 1, func(w io.Writer) error {
					_, err := w.Write(text)
					return err
				})
				require.NoError(t, err)
			}
			return ref.URL
		}
		for url, words := range map[string]string{
			store("run-1", taken{ClusterID: "another", Cluster: "west", Namespace: "vault-system"}): "one of another (west/vault-system)",
			store("run-2"): "expected " + takenName + " beside it",
		} {
			s, err := c.acts.Survey(t.Context(), SurveyRequest{Place: c.place, Want: c.want(), Limit: patience, Snapshot: url})
			require.NoError(t, err)
			require.Len(t, s.Findings, 1)
			require.Equal(t, "N104", s.Findings[0].Row)
			require.Contains(t, s.Findings[0].String(), words)
			require.Equal(t, Step{}, s.Step)
		}
	})
	had := stored()

	t.Run("a wrong token is named by its place", func(t *testing.T) {
		_, err := c.client.Typed.CoreV1().Secrets(c.place.Namespace).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "wrong"},
			StringData: map[string]string{"token": "s.fake-wrong-token"}}, metav1.CreateOptions{})
		require.NoError(t, err)
		r := c.backup(patience)
		r.Token = secret.Reference{Secret: "wrong", Key: "token"}
		_, err = c.acts.Snapshot(t.Context(), r)
		f, class, ok := finding.Of(err)
		require.True(t, ok, err)
		require.Equal(t, finding.Stop, class)
		require.Contains(t, f.Expected, "key token of Secret wrong")
		require.NotContains(t, err.Error(), "fake-wrong-token")
		require.Equal(t, had, stored())
	})

	t.Run("without the unseal key a snapshot is useless", func(t *testing.T) {
		r := c.backup(patience)
		r.Secrets = []Held{{"wrong", "unseal_key"}}
		_, err := c.acts.Snapshot(t.Context(), r)
		f, class, ok := finding.Of(err)
		require.True(t, ok, err)
		require.Equal(t, finding.Stop, class)
		require.Equal(t, "N99", f.Row)
		require.Equal(t, had, stored())
	})

	t.Run("without recipients nothing is asked for", func(t *testing.T) {
		open, err := artifact.Open(t.TempDir(), nil)
		require.NoError(t, err)
		acts := *c.acts
		acts.Artifacts = open
		_, err = acts.Snapshot(t.Context(), c.backup(patience))
		require.ErrorContains(t, err, "N102")
	})

	t.Run("a run that has lost its Lease touches nothing", func(t *testing.T) {
		holder := "somebody/else"
		_, err := c.client.Typed.CoordinationV1().Leases(c.place.Namespace).Create(t.Context(), &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: "refit-openbao-server"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder}}, metav1.CreateOptions{})
		require.NoError(t, err)
		s := c.survey(c.want(), patience)
		r := c.replacement(c.want(), s)
		r.Release, r.Holder = "openbao-server", "me"
		_, err = c.acts.Replace(t.Context(), r)
		_, class, ok := finding.Of(err)
		require.True(t, ok, err)
		require.Equal(t, finding.Stop, class)
		require.True(t, Untouched(err), "no step is half done")
		require.Equal(t, s.Step.UID, c.uid(s.Step.Pod))
	})

	t.Run("a StatefulSet of another release than the plan's is refused", func(t *testing.T) {
		sets := c.client.Typed.AppsV1().StatefulSets(c.place.Namespace)
		set, err := sets.Get(t.Context(), "bao", metav1.GetOptions{})
		require.NoError(t, err)
		set.Annotations = map[string]string{"meta.helm.sh/release-name": "openbao-server", "meta.helm.sh/release-namespace": c.place.Namespace}
		_, err = sets.Update(t.Context(), set, metav1.UpdateOptions{})
		require.NoError(t, err)
		found := c.survey(c.want(), patience).Findings
		require.NotEmpty(t, found)
		require.Contains(t, found[0].String(), "expected made by release bao in namespace "+c.place.Namespace+", found made by release openbao-server")
	})

	for _, fault := range []string{"truncated", "corrupt"} {
		t.Run("a snapshot that is "+fault, func(t *testing.T) {
			if !c.fault(active.Pod, `{"snapshot":"`+fault+`"}`) {
				t.Skip("a real server can't be told to send half a snapshot")
			}
			_, err := c.acts.Snapshot(t.Context(), c.backup(patience))
			f, class, ok := finding.Of(err)
			require.True(t, ok, err)
			require.Equal(t, finding.Stop, class)
			require.Equal(t, "N98", f.Row)
			require.Contains(t, f.Found, "the snapshot is not whole")
			require.Equal(t, had, stored(), "nothing of it is kept")
		})
	}
}
