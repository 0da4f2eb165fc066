package openbao

import (
	"bytes"
	"errors"
	"strings"
	"syscall"
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

func (c *cluster) survey(want Want, limit time.Duration) SurveyResult {
	c.t.Helper()
	out, err := c.acts.Survey(c.t.Context(), SurveyRequest{Place: c.place, Want: want, Limit: limit})
	require.NoError(c.t, err)
	return out
}

func (c *cluster) replacement(want Want, s SurveyResult) ReplaceRequest {
	return ReplaceRequest{Place: c.place, Want: want, Pod: s.Step.Pod, UID: s.Step.UID, Committed: s.Committed, BeginBy: time.Now().Add(time.Hour), Limit: patience, Delete: patience, Ready: patience}
}

func (c *cluster) replace(r ReplaceRequest) ReplaceResult {
	c.t.Helper()
	out, err := c.acts.Replace(c.t.Context(), r)
	require.NoError(c.t, err)
	return out
}

func (c *cluster) handover(want Want, s SurveyResult) StepDownRequest {
	return StepDownRequest{Place: c.place, Want: want, Pod: s.Step.Pod, UID: s.Step.UID, Committed: s.Committed, BeginBy: time.Now().Add(time.Hour), Limit: patience, Transfer: patience}
}

func (c *cluster) stepDown(r StepDownRequest) StepDownResult {
	c.t.Helper()
	out, err := c.acts.StepDown(c.t.Context(), r)
	require.NoError(c.t, err)
	return out
}

func TestMembersOfAnOlderLineAreReplacedOneByOneAndTwoAreNeverAway(t *testing.T) {
	c := start(t)
	want := c.want()
	first := c.active()
	require.Equal(t, c.version(oldImage), first.Version)

	s := c.survey(want, patience)
	require.Empty(t, s.Findings)
	require.Len(t, s.Steps, 4)
	require.Equal(t, first.Pod, s.Active)
	require.Equal(t, []string{"openbao=" + oldImage, "auto-unseal-sidecar=" + oldImage}, s.Images["bao-0"])

	// A step-down that is sent to a standby would depose the active member.
	standby := c.handover(want, s)
	moved := c.stepDown(standby)
	require.Contains(t, moved.Moved, first.Pod+" is active, not "+s.Step.Pod)
	require.False(t, moved.Sent)
	require.Equal(t, first.Pod, c.active().Pod)

	// The first one comes back sealed and stays so, while its pod is Ready.
	c.leaveSealed(s.Step.Pod, true)
	r := c.replacement(want, s)
	r.Limit = 2 * time.Second
	sealed := c.replace(r)
	require.False(t, sealed.OK)
	require.True(t, sealed.Touched)
	require.Contains(t, sealed.Findings[0].String(), "N163: OpenBao member "+s.Step.Pod+": expected unsealed, found Ready and sealed")
	require.Contains(t, sealed.Findings[0].Next, "runbook")
	waits := c.survey(want, time.Second)
	require.Equal(t, Step{}, waits.Step, "with a sealed member nothing is planned")
	uid := c.uid(s.Step.Pod)
	require.NoError(t, c.unseal(c.node(s.Step.Pod)))
	r.Limit = patience
	proven := c.replace(r)
	require.True(t, proven.OK, proven.Findings)
	require.Equal(t, uid, c.uid(s.Step.Pod), "what was deleted is not deleted again")
	require.Equal(t, want.Version, proven.Version)
	began := time.Now()
	require.True(t, c.replace(r).OK)
	require.GreaterOrEqual(t, time.Since(began), c.acts.Stable, "one good look proves nothing")

	for {
		s = c.survey(want, patience)
		require.Empty(t, s.Findings)
		if s.Step.Act == Done {
			break
		}
		if s.Step.Act == Replace {
			out := c.replace(c.replacement(want, s))
			require.True(t, out.OK, "%+v", out)
			continue
		}
		former := s.Active
		out := c.stepDown(c.handover(want, s))
		require.True(t, out.OK, "%+v", out)
		require.True(t, out.Sent)
		require.NotEqual(t, former, out.Active)
		began := time.Now()
		again := c.stepDown(c.handover(want, s))
		require.GreaterOrEqual(t, time.Since(began), c.acts.Stable, "one good look proves nothing")
		require.True(t, again.OK, again.Findings)
		require.False(t, again.Sent, "the new leader is not asked to step down")
		require.Equal(t, out.Active, c.active().Pod)
	}
	require.Equal(t, members, c.made, "each pod was replaced once")
	require.EqualValues(t, members-1, c.least.Load(), "one member was away at a time, never two")
	for _, m := range c.look().Members {
		require.Equal(t, want.Version, m.Version)
		require.Equal(t, want.ClusterID, m.ClusterID)
		require.Equal(t, newImage, m.Image)
	}
}

func TestAStepDownIsJudgedByWhoLeadsAndNotByItsReply(t *testing.T) {
	c := start(t)
	want := c.want()
	for s := c.survey(want, patience); s.Step.Act == Replace; s = c.survey(want, patience) {
		out := c.replace(c.replacement(want, s))
		require.True(t, out.OK, "%+v", out)
	}
	s := c.survey(want, patience)
	require.Equal(t, StepDown, s.Step.Act)

	if !c.fault(s.Step.Pod, `{"stepDown":"ignored"}`) {
		t.Skip("a real server can't be told to ignore a step-down")
	}
	r := c.handover(want, s)
	r.Transfer = 3 * time.Second
	ignored := c.stepDown(r)
	require.False(t, ignored.OK)
	require.True(t, ignored.Sent)
	require.Equal(t, "accepted", ignored.Reply)
	require.Equal(t, "N166", ignored.Findings[0].Row)
	require.Equal(t, s.Step.Pod, c.active().Pod)

	c.fault(s.Step.Pod, `{}`)
	var suite testsuite.WorkflowTestSuite
	env := suite.NewTestActivityEnvironment()
	env.RegisterActivity(c.acts.StepDown)
	env.SetHeartbeatDetails(sent + " to " + s.Step.Pod)
	v, err := env.ExecuteActivity(c.acts.StepDown, r)
	require.NoError(t, err)
	var resumed StepDownResult
	require.NoError(t, v.Get(&resumed))
	require.True(t, resumed.Sent)
	require.False(t, resumed.OK, "the try before had sent it: this one only looks")
	require.Equal(t, s.Step.Pod, c.active().Pod)

	c.fault(s.Step.Pod, `{"stepDown":"lost"}`)
	lost := c.stepDown(c.handover(want, s))
	require.True(t, lost.OK, "%+v", lost)
	require.NotEqual(t, "accepted", lost.Reply)
	require.NotEqual(t, s.Step.Pod, lost.Active)
	repeated := c.stepDown(c.handover(want, s))
	require.True(t, repeated.OK)
	require.False(t, repeated.Sent)
	require.Equal(t, lost.Active, repeated.Active)
}

func TestWithOneMemberDownNoOtherIsDeletedAndWithoutQuorumNothingIsStored(t *testing.T) {
	c := start(t)
	want := c.want()
	s := c.survey(want, patience)
	active := c.active().Pod
	other := "" // the standby that is not the next one to be replaced
	for _, n := range c.nodes {
		if n.name != active && n.name != s.Step.Pod {
			other = n.name
		}
	}
	r := c.replacement(want, s)

	// A pod that was made anew under the same name since it was looked at stays.
	l, err := c.acts.looker(t.Context(), c.place)
	require.NoError(t, err)
	defer l.close()
	former := r
	former.UID = "of the pod before"
	require.NoError(t, l.delete(t.Context(), former, time.Now(), &ReplaceResult{}))
	require.Equal(t, s.Step.UID, c.uid(s.Step.Pod))

	// The Lease was lost after the activity had begun.
	l.place.Release, l.place.Holder = "openbao-server", "me"
	_, err = l.look(t.Context())
	require.NoError(t, err)
	var touched ReplaceResult
	require.ErrorContains(t, l.delete(t.Context(), r, time.Now(), &touched), "no Lease")
	require.False(t, touched.Touched)
	require.ErrorContains(t, l.stepDown(t.Context(), StepDownRequest{Pod: active, UID: c.active().UID}, time.Now(), &StepDownResult{}), "no Lease")
	l.place.Holder = ""
	require.ErrorContains(t, l.delete(t.Context(), r, time.Now(), &touched), "the run's name in the Lease")
	require.ErrorContains(t, l.stepDown(t.Context(), StepDownRequest{Pod: active, UID: c.active().UID}, time.Now(), &StepDownResult{}), "the run's name in the Lease")
	require.Equal(t, s.Step.UID, c.uid(s.Step.Pod))
	require.Equal(t, active, c.active().Pod)

	c.end(c.node(other), syscall.SIGKILL)
	r.Limit = time.Second
	down := c.replace(r)
	require.False(t, down.OK)
	require.False(t, down.Touched)
	require.Contains(t, down.Moved, "OpenBao member "+other, "the next survey waits for it")
	require.Equal(t, s.Step.UID, c.uid(s.Step.Pod))
	require.Equal(t, "N89", c.survey(want, time.Second).Findings[0].Row)

	// What the leader loses with its quorum it may notice late; then nobody leads.
	c.end(c.node(s.Step.Pod), syscall.SIGKILL)
	c.fault(active, `{"snapshot":"local"}`)
	require.NoError(t, c.eventually("nobody leads", func() error {
		if _, none := c.look().Active(); none == "" {
			return errors.New("somebody does")
		}
		return nil
	}))
	out, err := c.acts.Snapshot(t.Context(), c.backup(time.Second))
	require.NoError(t, err)
	require.Empty(t, out.Snapshot.URL, "a member without quorum gives a snapshot out too")
	require.Equal(t, "N97", out.Findings[0].Row)
	require.Zero(t, c.made)
}

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
		require.Equal(t, out.Snapshot, ask(out.Snapshot.URL).Snapshot)
		for _, other := range []string{out.Secrets[0].URL, out.Snapshot.URL[:len(out.Snapshot.URL)-1], "file:///nowhere/openbao.snap"} {
			none := ask(other)
			require.Len(t, none.Findings, 1, other)
			require.Equal(t, "N104", none.Findings[0].Row)
			require.Equal(t, Step{}, none.Step)
		}
	})

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
		require.Equal(t, 3, stored())
	})

	t.Run("without the unseal key a snapshot is useless", func(t *testing.T) {
		r := c.backup(patience)
		r.Secrets = []Held{{"wrong", "unseal_key"}}
		_, err := c.acts.Snapshot(t.Context(), r)
		f, class, ok := finding.Of(err)
		require.True(t, ok, err)
		require.Equal(t, finding.Stop, class)
		require.Equal(t, "N99", f.Row)
		require.Equal(t, 3, stored())
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
			require.Equal(t, 3, stored(), "nothing of it is kept")
		})
	}
}
