package cassandra

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/window"
)

func expansion() ExpandInput {
	return ExpandInput{Site: site(), Login: admin(), Mode: acts.ModePreferred, SavedMembers: 1}
}

// between returns what the log says after the first entry that is from, up to
// the first one after it that is to.
func between(log []string, from, to string) []string {
	log = log[slices.Index(log, from)+1:]
	return log[:slices.Index(log, to)]
}

func TestBootstrapNarrowsTheSeedsBeforeTheScaleAndRaisesStepByStep(t *testing.T) {
	s := newSystem(1)
	var out ExpandResult
	newHarness(t, s).Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{
		"lock", "survey", "ring 1", "logins ", "plan 7 keyspaces",
		"template rule=true narrow=true uid-sts", "ring 1", "scale uid-sts", "ring 3", "logins ",
		"raise [system_auth] to 2", "ring 3", "repair [system_auth] on cassandra-0", "repair [system_auth] on cassandra-1",
		"raise [system_auth] to 3", "ring 3", "repair [system_auth] on cassandra-0", "repair [system_auth] on cassandra-1", "repair [system_auth] on cassandra-2", "logins ",
		"plan 7 keyspaces",
		"raise [nvcf_api sis_api] to 2", "ring 3", "repair [nvcf_api sis_api] on cassandra-0", "repair [nvcf_api sis_api] on cassandra-1",
		"raise [nvcf_api sis_api] to 3", "ring 3", "repair [nvcf_api sis_api] on cassandra-0", "repair [nvcf_api sis_api] on cassandra-1", "repair [nvcf_api sis_api] on cassandra-2",
		"auth errors of nvcf-api", "survey", "unlock",
	}, s.log)
	require.Len(t, out.Repairs, 15)
	require.Len(t, out.Raised, 3)
	require.Equal(t, "schema_migrations", out.Outside[0].Name)
	require.Contains(t, out.Absent, "nvct_api")
	require.Contains(t, strings.Join(out.Warnings, "\n"), "CASSANDRA_SEEDS")
}

func TestQuorumFirstLeavesTheTemplateAloneAndRaisesEveryKeyspaceBeforeTheScale(t *testing.T) {
	s := newSystem(1)
	in := expansion()
	in.Strategy = QuorumFirst
	var out ExpandResult
	newHarness(t, s).Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.NotContains(t, s.log, "template rule=true narrow=false uid-sts")
	before := s.log[:slices.Index(s.log, "scale uid-sts")]
	require.Equal(t, "raise all to 3", before[len(before)-1])
	after := between(s.log, "scale uid-sts", "auth errors of nvcf-api")
	require.Equal(t, []string{"ring 3", "repair [system_auth] on cassandra-0", "repair [system_auth] on cassandra-1", "repair [system_auth] on cassandra-2", "logins "}, after[:5],
		"no login is needed before the repair")
	for _, k := range []string{"nvcf_api", "schema_migrations", "sis_api"} {
		require.True(t, repairs(after, k, "cassandra-2"))
	}
	require.Empty(t, out.Outside)
}

func TestQuorumFirstGoesOnWhereARunHadEndedBetweenTheRaiseAndTheScale(t *testing.T) {
	s := newSystem(1)
	for name := range s.factors {
		s.factors[name] = 3
	}
	in := expansion()
	in.Strategy = QuorumFirst
	var out ExpandResult
	newHarness(t, s).Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "survey", "ring 1", "ring 1", "scale uid-sts", "ring 3", "repair [system_auth] on cassandra-0"}, s.log[:7],
		"nobody can log in to one member of three, and nobody tries")
	require.True(t, repairs(s.log, "nvcf_api", "cassandra-1"))
}

func TestTheGuidesOrderIsRefusedWhereAJoinerIsASeedUnlessAcknowledged(t *testing.T) {
	s := newSystem(1)
	in := expansion()
	in.Strategy = Guide
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		w := h.Waits("survey")
		require.Contains(t, w.Found, "found cassandra-1.h too", "the joiner is named")
		require.Contains(t, w.Why, "does not bootstrap")
		h.Answer(protocol.Abort)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.Equal(t, []string{"lock", "survey", "unlock"}, s.log)

	s = newSystem(1)
	in.AcknowledgeSeeds = true
	newHarness(t, s).Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Contains(t, s.log, "template rule=true narrow=false uid-sts", "the guide leaves the seeds alone")
	require.NotContains(t, s.log, "raise [system_auth] to 2", "and raises at once")
}

func TestAMemberThatRefusesTheLoginAfterTheRepairStopsWithTheGuidesWords(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	s.scaled = func() { s.refused = []string{"cassandra-1"} }
	h.At(time.Hour, func() {
		w := h.Waits("expand")
		require.Contains(t, w.Found, "N143: login of cassandra on cassandra-1")
		require.Contains(t, w.Helps, "do not upgrade")
		s.do(func() { s.refused = nil; s.log = nil })
		h.Answer(protocol.Retry)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"ring 3", "logins "}, s.log[:2], "what was raised and repaired is not done again")
}

func TestAWindowThatEndsInsideTheSectionDoesNotStopItAndAnswersComeAfterIt(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	start := time.Date(2026, 1, 5, 1, 0, 0, 0, time.UTC)
	h.SetStartTime(start)
	in := expansion()
	in.Estimate = window.Duration(time.Hour)
	in.Windows = []window.Spec{{Opens: "0 1 * * *", Duration: window.Duration(2 * time.Hour), TimeZone: "UTC"}}
	h.OnActivity(acts.ScaleActivity, mock.Anything, mock.Anything).After(3 * time.Hour).Return(s.scale)
	h.At(90*time.Minute, func() {
		require.Equal(t, "expansion", h.Status().Section)
		h.Answer(protocol.Pause)
	})
	var paused bool
	h.At(5*time.Hour, func() {
		w := h.Status().WaitingFor
		require.NotNil(t, w)
		require.Equal(t, protocol.WaitPaused, w.Kind)
		s.do(func() {
			require.Equal(t, "logins ", s.log[len(s.log)-1], "the section went on to its last login")
			require.True(t, repairs(s.log, "system_auth", "cassandra-2"))
		})
		paused = true
		h.Answer(protocol.Resume)
	})
	h.At(6*time.Hour, func() {
		require.Equal(t, protocol.WaitWindow, h.Status().WaitingFor.Kind, "the keyspaces wait for the next window")
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, in, &out)
	require.True(t, paused)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}

func TestAnAbortInsideTheSectionIsAnsweredAfterIt(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	h.OnActivity(acts.ScaleActivity, mock.Anything, mock.Anything).After(30 * time.Minute).Return(s.scale)
	h.At(10*time.Minute, func() { h.Answer(protocol.Abort) })
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.Equal(t, []string{"repair [system_auth] on cassandra-2", "logins ", "unlock"}, s.log[len(s.log)-3:])
	const few = " has fewer than 3 copies over 3 members: losing one can make its rows unavailable; start again with savedMembers: 1, which goes on from here"
	require.Equal(t, []string{"keyspace nvcf_api" + few, "keyspace sis_api" + few}, out.LeftBehind, "the section was ended whole")
}

func TestMembersThatAreDownOrDisagreeParkAndARetryGoesOnWhereItWas(t *testing.T) {
	for want, harm := range map[string]func(*system){
		"Cassandra member cassandra-2: expected UN, found DN as cassandra-0 sees it": func(s *system) { s.down = "cassandra-2" },
		"schema of Cassandra: expected one version on all members, found 2":          func(s *system) { s.schemas = 2 },
	} {
		s := newSystem(1)
		h := newHarness(t, s)
		s.scaled = func() { harm(s) }
		h.At(time.Hour, func() {
			w := h.Waits("expand")
			require.Equal(t, "N137: "+want, w.Found)
			require.Contains(t, w.Why, "left half done: expansion")
			s.do(func() { s.down, s.schemas = "", 1 })
			h.Answer(protocol.Retry)
		})
		var out ExpandResult
		h.Run(protocol.CassandraExpand, expansion(), &out)
		require.Equal(t, protocol.OutcomeDone, out.Outcome)
		scales := slices.DeleteFunc(slices.Clone(s.log), func(l string) bool { return l != "scale uid-sts" })
		require.Len(t, scales, 1)
	}
}

func TestARepairThatFailsIsRetriedOnItsMemberAndNotForgotten(t *testing.T) {
	s := newSystem(1)
	s.failRepair = "cassandra-1 nvcf_api"
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		w := h.Waits("keyspaces")
		require.Contains(t, w.Found, "nodetool repair --full nvcf_api on cassandra-1")
		require.Contains(t, w.Why, "left half done: step to 2 copies")
		s.do(func() { s.log = nil })
		h.Answer(protocol.Retry)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"repair [nvcf_api sis_api] on cassandra-0", "repair [nvcf_api sis_api] on cassandra-1", "raise [nvcf_api sis_api] to 3"}, s.log[1:4],
		"its two copies are there: they are repaired before the third is asked for")
	require.Empty(t, out.LeftBehind)
}

func TestALastRepairThatFailsIsOwed(t *testing.T) {
	s := newSystem(1)
	s.failRepair = "cassandra-2 nvcf_api"
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("keyspaces").Found, "on cassandra-2")
		s.do(func() { s.log = nil })
		h.Answer(protocol.Retry)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"repair [nvcf_api sis_api] on cassandra-0", "repair [nvcf_api sis_api] on cassandra-1", "repair [nvcf_api sis_api] on cassandra-2"}, s.log[1:4],
		"its three copies are there, so no list names it any more: the debt does")
}

func TestWhatNeedsNoExpansionIsLeftAlone(t *testing.T) {
	for name, c := range map[string]struct {
		members int
		in      func(*ExpandInput)
	}{
		"three members before": {3, func(in *ExpandInput) { in.SavedMembers = 3 }},
		"mode none":            {1, func(in *ExpandInput) { in.Mode = acts.ModeNone }},
	} {
		s := newSystem(c.members)
		in := expansion()
		c.in(&in)
		var out ExpandResult
		newHarness(t, s).Run(protocol.CassandraExpand, in, &out)
		require.Equal(t, protocol.OutcomeNoChange, out.Outcome, name)
		require.Contains(t, strings.Join(out.Warnings, "\n"), "N131", name)
		require.NotContains(t, s.log, "scale uid-sts", name)
	}
}

func TestAPlanNamesEveryChangeAndMakesNone(t *testing.T) {
	s := newSystem(1)
	in := expansion()
	in.PlanOnly = true
	var out ExpandResult
	newHarness(t, s).Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomePlanned, out.Outcome)
	var actions []string
	for _, c := range out.Plan.Changes {
		actions = append(actions, c.Object+": "+c.Action)
	}
	require.Equal(t, []string{
		"StatefulSet cassandra: add the rule that spreads members over zones", "StatefulSet cassandra: leave cassandra-0.h alone in CASSANDRA_SEEDS",
		"StatefulSet cassandra: scale to 3", "keyspace system_auth: raise to 3 copies and repair on every member",
		"keyspace nvcf_api: raise to 3 copies and repair on every member", "keyspace sis_api: raise to 3 copies and repair on every member",
	}, actions)
	require.Equal(t, 1, s.members)
}

func TestBootstrapWithoutAListOfSeedsPointsToQuorumFirst(t *testing.T) {
	s := newSystem(1)
	s.seeds = ""
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("survey").Helps, "quorumFirst")
		h.Answer(protocol.Abort)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.NotContains(t, s.log, "scale uid-sts")
}

func TestTwoMembersInAZoneStopOnlyWhereZonesAreEnforced(t *testing.T) {
	shared := []finding.Finding{{Row: "N138", Object: "zone a", Expected: "at most one member of Cassandra", Found: "cassandra-0, cassandra-2"}}
	s := newSystem(1)
	s.shared = shared
	var out ExpandResult
	newHarness(t, s).Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Contains(t, out.Warnings[len(out.Warnings)-1], "zone a")

	s = newSystem(1)
	s.shared = shared
	in := expansion()
	in.Mode = acts.ModeEnforced
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("zones").Found, "N138: zone a")
		s.do(func() {
			require.True(t, repairs(s.log, "sis_api", "cassandra-2"), "the copies did not wait for it")
		})
		h.Answer(protocol.Abort)
	})
	h.Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
}

func TestRefusedLoginsInTheLogsPark(t *testing.T) {
	s := newSystem(1)
	s.authErrors = 4
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("authentication").Found, "N146")
		s.do(func() { s.authErrors = 0 })
		h.Answer(protocol.Retry)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}
