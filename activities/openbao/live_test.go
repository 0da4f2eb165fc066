package openbao

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/testsuite"
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
