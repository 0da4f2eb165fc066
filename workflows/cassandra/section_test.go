package cassandra

import (
	"context"
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

// hiding are the expansions that hide rows until every keyspace is repaired, by
// how many members they begin with.
func hiding() map[string]struct {
	members int
	in      ExpandInput
} {
	out := map[string]struct {
		members int
		in      ExpandInput
	}{}
	for name, members := range map[string]int{QuorumFirst: 1, Guide: 1, Bootstrap: 3} {
		in := expansion()
		in.Strategy, in.AcknowledgeSeeds = name, name == Guide
		out[name] = struct {
			members int
			in      ExpandInput
		}{members, in}
	}
	return out
}

func TestNoAnswerPartsAKeyspaceFromItsRepairsWhereRowsAreHidden(t *testing.T) {
	for strategy, c := range hiding() {
		for _, answer := range []string{protocol.Abort, protocol.Pause} {
			s := newSystem(c.members)
			h := newHarness(t, s)
			h.OnActivity(acts.RepairActivity, mock.Anything, mock.Anything).After(time.Minute).Return(s.repair)
			h.At(90*time.Second, func() {
				require.Equal(t, theSection, h.Status().Section, strategy)
				h.Answer(answer)
			})
			if answer == protocol.Pause {
				h.At(24*time.Hour, func() {
					require.Equal(t, protocol.WaitPaused, h.Status().WaitingFor.Kind, strategy)
					s.do(func() { require.True(t, repairs(s.log, "sis_api", "cassandra-2"), strategy) })
					h.Answer(protocol.Resume)
				})
			}
			var out ExpandResult
			h.Run(protocol.CassandraExpand, c.in, &out)
			for _, keyspace := range []string{"system_auth", "nvcf_api", "sis_api"} {
				require.Equal(t, 3, s.factors[keyspace], strategy)
				require.True(t, repairs(s.log, keyspace, "cassandra-2"), strategy)
			}
			require.Empty(t, out.LeftBehind, strategy)
		}
	}
}

func TestTheKeyspacesThatTheSectionBringsCountInItsEstimate(t *testing.T) {
	for strategy, c := range hiding() {
		in := c.in
		in.Keyspaces = []string{"nvcf_api", "sis_api"}
		in.Windows = []window.Spec{{Opens: "0 1 * * *", Duration: window.Duration(time.Hour), TimeZone: "UTC"}}
		s := newSystem(c.members)
		h := newHarness(t, s)
		h.SetStartTime(time.Date(2026, 1, 5, 1, 0, 0, 0, time.UTC))
		h.At(30*time.Minute, func() {
			w := h.Status().WaitingFor
			require.NotNil(t, w, strategy)
			want := "section expansion needs 1h15m0s" // 45 m, the two keyspaces and schema_migrations
			if strategy == Bootstrap {
				want = "section expansion needs 1h5m0s" // the members are first asked inside it
			}
			require.Contains(t, w.Found, want, strategy)
			h.Answer(protocol.Abort)
		})
		var out ExpandResult
		h.Run(protocol.CassandraExpand, in, &out)
		require.Equal(t, protocol.OutcomeAborted, out.Outcome, strategy)

		in.Estimate = window.Duration(time.Minute) // what the plan says is the whole
		h = newHarness(t, newSystem(c.members))
		h.SetStartTime(time.Date(2026, 1, 5, 1, 0, 0, 0, time.UTC))
		h.Run(protocol.CassandraExpand, in, &out)
		require.Equal(t, protocol.OutcomeDone, out.Outcome, strategy)
	}
}

func TestWhatIsOwedWhenARunIsAbortedIsNamedByKeyspace(t *testing.T) {
	s := newSystem(1)
	in := expansion()
	in.Strategy = QuorumFirst
	s.scaled = func() { s.down = "cassandra-2" } // nobody is repaired
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("expand").Found, "N137")
		h.Answer(protocol.Abort)
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, in, &out)
	left := strings.Join(out.LeftBehind, "\n")
	require.Contains(t, left, "expansion is half done")
	for _, keyspace := range []string{"system_auth", "nvcf_api", "sis_api", "schema_migrations"} {
		require.Contains(t, left, "keyspace "+keyspace+" asks for 3 copies and is not repaired since")
	}

	for strategy, c := range hiding() {
		for _, row := range []string{"N137", "N143"} {
			s := newSystem(c.members)
			switch {
			case row == "N143":
				s.refused = []string{"cassandra-1"}
			case c.members == 3:
				s.down = "cassandra-2"
			default:
				s.scaled = func() { s.down = "cassandra-2" }
			}
			h := newHarness(t, s)
			h.At(time.Hour, func() {
				require.Contains(t, h.Waits("expand").Found, row, strategy)
				h.Answer(protocol.Abort)
			})
			var out ExpandResult
			h.Run(protocol.CassandraExpand, c.in, &out)
			require.Equal(t, protocol.OutcomeAborted, out.Outcome, strategy)
			for _, keyspace := range []string{"nvcf_api", "sis_api", "schema_migrations"} {
				require.Regexp(t, "keyspace "+keyspace+" .*reads can miss rows", strings.Join(out.LeftBehind, "\n"), strategy+row)
			}
		}
	}

	s = newSystem(3)
	s.lostRaise = "sis_api"
	h = newHarness(t, s)
	h.At(time.Hour, func() {
		h.Waits("keyspaces")
		h.Answer(protocol.Abort)
	})
	var replicated ReplicationResult
	h.Run(protocol.CassandraReplication, replicationInput(), &replicated)
	require.Contains(t, strings.Join(replicated.LeftBehind, "\n"), "keyspace sis_api may ask for 2 copies and is not repaired since")
}

func TestTheGuideRepairsAKeyspaceThatHasItsCopiesToo(t *testing.T) {
	s := newSystem(1)
	s.factors["nvcf_api"] = 3
	in := expansion()
	in.Strategy, in.AcknowledgeSeeds = Guide, true
	var out ExpandResult
	newHarness(t, s).Run(protocol.CassandraExpand, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.True(t, repairs(s.log, "nvcf_api", "cassandra-2"), "its new members may be seeds that hold nothing")
}

func TestQuorumFirstTellsHowEachRaisedKeyspaceWasBefore(t *testing.T) {
	in := expansion()
	in.Strategy = QuorumFirst
	for _, lost := range []string{"", acts.AuthKeyspace} {
		s := newSystem(1)
		s.factors["sis_api"] = 3
		s.lostRaise = lost
		var out ExpandResult
		newHarness(t, s).Run(protocol.CassandraExpand, in, &out)
		require.Equal(t, protocol.OutcomeDone, out.Outcome)
		before := map[string]int{}
		for _, k := range out.Raised {
			before[k.Name] = k.Copies()
		}
		require.Equal(t, map[string]int{"system_auth": 1, "nvcf_api": 1, "schema_migrations": 1}, before)
		require.True(t, repairs(s.log, "sis_api", "cassandra-2"), "no member but the first holds its copies")
	}
}

func TestSeedsThatAreNarrowedAreToldWhoeverHeardOfThePatch(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	h.OnActivity(acts.TemplateActivity, mock.Anything, mock.Anything).Return(func(context.Context, acts.TemplateRequest) (acts.TemplateResult, error) {
		return acts.TemplateResult{}, nil // the call that has patched was lost with its worker
	})
	var out ExpandResult
	h.Run(protocol.CassandraExpand, expansion(), &out)
	require.Contains(t, strings.Join(out.Warnings, "\n"), "CASSANDRA_SEEDS of StatefulSet cassandra name cassandra-0.h alone")
}

func TestQuorumFirstThatStopsBeforeTheScaleSaysThatNobodyCanLogIn(t *testing.T) {
	s := newSystem(1)
	h := newHarness(t, s)
	h.OnActivity(acts.ScaleActivity, mock.Anything, mock.Anything).Return(func(context.Context, acts.ScaleRequest) (acts.ScaleResult, error) {
		return acts.ScaleResult{}, finding.Finding{Object: "StatefulSet cassandra", Found: "forbidden"}.Error(finding.Stop)
	})
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("expand").Found, "forbidden")
		h.Answer(protocol.Abort)
	})
	in := expansion()
	in.Strategy = QuorumFirst
	var out ExpandResult
	h.Run(protocol.CassandraExpand, in, &out)
	require.Contains(t, strings.Join(out.LeftBehind, "\n"), "nobody can log in until a second one does. Start again at once with strategy quorumFirst and savedMembers: 1")
}

func TestEveryKeyspaceIsBroughtWhereASeedMayHaveTakenItsRowsOver(t *testing.T) {
	for strategy, c := range hiding() {
		s := newSystem(c.members)
		var out ExpandResult
		newHarness(t, s).Run(protocol.CassandraExpand, c.in, &out)
		require.Equal(t, protocol.OutcomeDone, out.Outcome, strategy)
		require.Equal(t, 3, s.factors["schema_migrations"], "%s: no plan names it, and with one copy no repair shows its rows again", strategy)
		require.True(t, repairs(s.log, "schema_migrations", "cassandra-2"), strategy)
		require.Empty(t, out.Outside, strategy)
	}
}

func TestAKeyspaceThatNoStatementMayRaiseDoesNotHoldTheOthersUp(t *testing.T) {
	copies := func(name string, factors ...acts.Factor) acts.Keyspace {
		return acts.Keyspace{Name: name, Class: "NetworkTopologyStrategy", Factors: factors}
	}
	here := acts.Factor{DataCenter: "ncp", Factor: "1"}
	e := &expand{in: ExpandInput{Strategy: Guide}, copies: copiesOf("nvcf_api", copies("restored", acts.Factor{DataCenter: "old", Factor: "1"}, here), copies("Quoted", here),
		acts.Keyspace{Name: "system", Class: "LocalStrategy"}, copies("schema_migrations", here), copies("nvcf_api", here))}
	require.Equal(t, []string{"system_auth", "nvcf_api", "schema_migrations"}, e.every())
}

func TestWhatIsThereAndWhatIsNotInstalledIsNotCalledLeft(t *testing.T) {
	copies := func(name, factor string) acts.Keyspace {
		return acts.Keyspace{Name: name, Class: "NetworkTopologyStrategy", Factors: []acts.Factor{{DataCenter: "ncp", Factor: factor}}}
	}
	e := &expand{in: ExpandInput{Strategy: Bootstrap}, scaled: true, copies: copiesOf("nvcf_api", copies("system_auth", "3"), copies("nvcf_api", "3"), copies("sis_api", "1"))}
	e.names = []string{"nvcf_api", "sis_api", "event_ledger"}
	left := e.leftUndone()
	require.Len(t, left, 1)
	require.Contains(t, left[0], "keyspace sis_api has fewer than 3 copies")
}

// copiesOf are the copies of a run that has seen these keyspaces, one named by
// the plan.
func copiesOf(name string, live ...acts.Keyspace) copies {
	return copies{names: []string{name}, run: &run{ring: acts.Ring{DataCenter: "ncp", Keyspaces: live}}}
}
