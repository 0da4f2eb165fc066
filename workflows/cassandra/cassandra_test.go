package cassandra

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/secret"
	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

func replicationInput() ReplicationInput {
	return ReplicationInput{Site: site(), Login: admin(), Mode: acts.ModePreferred}
}

func TestABackupSnapshotsEveryMemberAndAsksForACopyOffTheCluster(t *testing.T) {
	s := newSystem(3)
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		w := h.Waits("copy")
		require.Contains(t, w.Found, "snapshot pre-1-1-5 lies on the volumes of 3 members")
		h.Answer(protocol.Approve)
	})
	var out BackupResult
	h.Run(protocol.CassandraBackup, BackupInput{Site: site(), Tag: "pre-1-1-5"}, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, 3, out.Members)
	require.Len(t, out.Snapshots, 3)
	require.Equal(t, []string{"lock", "ring 3", "snapshot cassandra-0 pre-1-1-5", "snapshot cassandra-1 pre-1-1-5", "snapshot cassandra-2 pre-1-1-5", "unlock"}, s.log)

	newHarness(t, s).Run(protocol.CassandraBackup, BackupInput{Site: site(), Tag: "pre-1-1-5", Copied: "OPS-1"}, &out)
	require.True(t, out.Snapshots[0].Already, "a second run counts what the first has made")
}

func TestABackupWaitsForMembersThatAreDown(t *testing.T) {
	s := newSystem(3)
	s.down = "cassandra-1"
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("ring").Found, "N84: Cassandra member cassandra-1")
		s.do(func() { s.down = "" })
		h.Answer(protocol.Retry)
	})
	var out BackupResult
	h.Run(protocol.CassandraBackup, BackupInput{Site: site(), Tag: "t", Copied: "OPS-1"}, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}

func TestReplicationRaisesAndRepairsOnlyWhatNeedsIt(t *testing.T) {
	s := newSystem(3)
	s.factors["nvcf_api"] = 3
	var out ReplicationResult
	newHarness(t, s).Run(protocol.CassandraReplication, replicationInput(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, "ncp", out.DataCenter)
	require.Len(t, out.Raised, 1)
	require.Len(t, out.Repairs, 5)
	require.False(t, repairs(s.log, "nvcf_api", "cassandra-0"))
	require.Equal(t, "schema_migrations", out.Outside[0].Name)
	require.Contains(t, out.Absent, "ess_api")
	require.Contains(t, strings.Join(out.Warnings, "\n"), "schema_migrations")
}

func TestCopiesThatAreThereNeedNeitherStatementNorRepairUnlessAsked(t *testing.T) {
	s := newSystem(3)
	s.factors["nvcf_api"], s.factors["sis_api"] = 3, 3
	var out ReplicationResult
	newHarness(t, s).Run(protocol.CassandraReplication, replicationInput(), &out)
	require.Equal(t, protocol.OutcomeNoChange, out.Outcome)
	require.Empty(t, out.Repairs)

	in := replicationInput()
	in.Repair = RepairAlways
	newHarness(t, s).Run(protocol.CassandraReplication, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Empty(t, out.Raised)
	require.Len(t, out.Repairs, 6)
}

// A run that was terminated between a statement and its repairs left no receipt.
func TestWhatAClosedRunHasRaisedIsRepairedByTheOneThatTakesItsLeaseOver(t *testing.T) {
	s := newSystem(3)
	s.factors["nvcf_api"], s.factors["sis_api"] = 3, 3
	h := newHarness(t, s)
	h.OnActivity(lease.AcquireActivity, mock.Anything, mock.Anything).Return(lease.AcquireResult{Holder: "me", TookOverFrom: "an ended run"}, nil)
	var out ReplicationResult
	h.Run(protocol.CassandraReplication, replicationInput(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Empty(t, out.Raised)
	require.Len(t, out.Repairs, 6)
}

// A look from before a window says nothing of the members in it.
func TestOnlyAYoungLookIsReliedOnByAStatement(t *testing.T) {
	for hour, relied := range map[int][]bool{1: {true, true}, 12: {false, true}} {
		s := newSystem(3)
		h := newHarness(t, s)
		h.SetStartTime(time.Date(2026, 1, 5, hour, 0, 0, 0, time.UTC))
		in := replicationInput()
		in.Windows = []window.Spec{{Opens: "0 1 * * *", Duration: window.Duration(4 * time.Hour), TimeZone: "UTC"}}
		var out ReplicationResult
		h.Run(protocol.CassandraReplication, in, &out)
		require.Equal(t, protocol.OutcomeDone, out.Outcome)
		require.Equal(t, relied, s.relied, "begun at %d", hour)
	}
}

func TestAnAbortBetweenTheStepsSaysWhatHasTwoCopies(t *testing.T) {
	c := &copies{halfway: []string{"nvcf_api", "sis_api"}, owed: []debt{{keyspace: "sis_api", copies: 3}}}
	r := protocol.Receipt{Outcome: protocol.OutcomeAborted}
	c.leftHalfway(&r)
	require.Equal(t, []string{"keyspace nvcf_api has 2 copies: while any member is away, most of its rows can't be read at a quorum; start again"}, r.LeftBehind,
		"what is owed is told by itself")
}

func TestAnotherDataCentreStopsBeforeAnythingIsAltered(t *testing.T) {
	s := newSystem(3)
	s.center = "dc1"
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Equal(t, "N184: data centre of Cassandra: expected ncp, found dc1", h.Waits("check").Found)
		h.Answer(protocol.Abort)
	})
	var out ReplicationResult
	h.Run(protocol.CassandraReplication, replicationInput(), &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
	require.Equal(t, 1, s.factors["nvcf_api"])
}

func TestModeNoneRaisesNothing(t *testing.T) {
	s := newSystem(3)
	in := replicationInput()
	in.Mode = acts.ModeNone
	var out ReplicationResult
	newHarness(t, s).Run(protocol.CassandraReplication, in, &out)
	require.Equal(t, protocol.OutcomeNoChange, out.Outcome)
	require.Empty(t, s.log)
}

func TestAReplicationPlanNamesTheKeyspaces(t *testing.T) {
	s := newSystem(3)
	in := replicationInput()
	in.PlanOnly = true
	var out ReplicationResult
	newHarness(t, s).Run(protocol.CassandraReplication, in, &out)
	require.Equal(t, protocol.OutcomePlanned, out.Outcome)
	require.Len(t, out.Plan.Changes, 2)
	require.Equal(t, 1, s.factors["nvcf_api"])
}

func TestADirtyLedgerWaitsForAPerson(t *testing.T) {
	s := newSystem(3)
	s.dirty = true
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		w := h.Waits("ledger")
		require.Equal(t, "ledger of nvcf_api: expected not dirty, found dirty at version 42", w.Found)
		require.NotContains(t, w.Answers, protocol.Skip)
		s.do(func() { s.dirty = false })
		h.Answer(protocol.Retry)
	})
	var out LedgerResult
	h.Run(protocol.CassandraLedger, LedgerInput{Site: site(), Login: admin()}, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"nvct_api"}, out.Absent)
}

func TestBadInputIsRefusedWithThePathOfEachFault(t *testing.T) {
	expand := func(change func(*ExpandInput)) ExpandInput {
		in := expansion()
		change(&in)
		return in
	}
	for want, in := range map[string]interface {
		Validate() []plan.Problem
	}{
		"target.cluster is missing":                BackupInput{Tag: "t"},
		`tag is "pre 1"`:                           BackupInput{Site: site(), Tag: "pre 1"},
		`tag is "-x"`:                              BackupInput{Site: site(), Tag: "-x"},
		"limit is -1m0s":                           BackupInput{Site: site(), Tag: "t", Limit: window.Duration(-time.Minute)},
		`mode is ""`:                               expand(func(in *ExpandInput) { in.Mode = "" }),
		`strategy is "fast"`:                       expand(func(in *ExpandInput) { in.Strategy = "fast" }),
		"acknowledgeSeeds is set without":          expand(func(in *ExpandInput) { in.AcknowledgeSeeds = true }),
		"login.password names 0 places":            expand(func(in *ExpandInput) { in.Login = acts.Login{} }),
		`keyspaces[0] is "x; DROP"`:                expand(func(in *ExpandInput) { in.Keyspaces = []string{"x; DROP"} }),
		"keyspaces[0] is system_auth":              expand(func(in *ExpandInput) { in.Keyspaces = []string{"system_auth"} }),
		`keyspaces[1] is "a" a second time`:        expand(func(in *ExpandInput) { in.Keyspaces = []string{"a", "a"} }),
		"services[0] lacks namespace":              expand(func(in *ExpandInput) { in.Services = []acts.Service{{Deployment: "d"}} }),
		"savedMembers is -1":                       expand(func(in *ExpandInput) { in.SavedMembers = -1 }),
		"limits.join is -1s":                       expand(func(in *ExpandInput) { in.Limits.Join = window.Duration(-time.Second) }),
		"members.port is 70000":                    expand(func(in *ExpandInput) { in.Members.Port = 70000 }),
		`repair is "never"`:                        ReplicationInput{Site: site(), Login: admin(), Mode: "none", Repair: "never"},
		"expect[0] is nvcf_api at 0":               LedgerInput{Site: site(), Login: admin(), Expect: []acts.Expected{{Keyspace: "nvcf_api"}}},
		"target.uid is missing":                    LedgerInput{Site: Site{Site: datastore.Site{Target: kube.Target{Cluster: "c"}, Holder: "me", Parent: &protocol.Parent{WorkflowID: "p"}}}, Login: admin()},
		"login.password.key is set without secret": LedgerInput{Site: site(), Login: acts.Login{Password: secret.Reference{File: "f", Key: "k"}}},
	} {
		ps := in.Validate()
		require.Len(t, ps, 1, want)
		require.Contains(t, ps[0].String(), want)
	}
	require.Empty(t, expansion().Validate())
	h := newHarness(t, newSystem(1))
	h.RefusesInput(protocol.CassandraExpand, ExpandInput{Site: site()})
}

func TestCopiesThatSomebodyTakesAwayMeanwhileAreNotCalledRaised(t *testing.T) {
	s := newSystem(3)
	s.repaired = func() {
		if repairs(s.log, "sis_api", "cassandra-2") { // the last of them
			s.factors["nvcf_api"] = 1
		}
	}
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("verify").Found, "N188: keyspace nvcf_api: expected 3 copies in ncp, found nvcf_api NetworkTopologyStrategy {ncp=1}")
		h.Answer(protocol.Abort)
	})
	var out ReplicationResult
	h.Run(protocol.CassandraReplication, replicationInput(), &out)
	require.Equal(t, protocol.OutcomeAborted, out.Outcome)
}
