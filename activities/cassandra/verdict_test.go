package cassandra

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// answers are those of three members who see each other as the recording says.
func answers(t *testing.T) []Answer {
	t.Helper()
	var out []Answer
	for i := range 3 {
		status, err := parseStatus(recorded(t, "status-3.txt"))
		require.NoError(t, err)
		about, err := parseDescription(recorded(t, "describecluster-3.txt"))
		require.NoError(t, err)
		out = append(out, Answer{Pod: fmt.Sprintf("cassandra-%d", i), Addresses: []string{fmt.Sprintf("127.0.2.%d", 11+i)}, Ring: status, Description: about})
	}
	return out
}

func TestARingIsWholeOnlyAsEveryMemberSeesIt(t *testing.T) {
	r := JudgeRing(answers(t), 3, "N137")
	require.True(t, r.OK, r.Findings)
	require.Equal(t, []string{"cassandra-0", "cassandra-1", "cassandra-2"}, r.Members)
	require.Equal(t, "dc1", r.DataCenter)
	require.Equal(t, "d03783d7-b468-3c1a-82f1-8e30b2edde8b", r.Schema)

	for want, harm := range map[string]func([]Answer){
		"DN as cassandra-1 sees it":        func(a []Answer) { a[1].Ring[0].State = "DN" },
		"UJ as cassandra-0 sees it":        func(a []Answer) { a[0].Ring[2].State = "UJ" },
		"expected 3 members UN, found 2":   func(a []Answer) { a[2].Ring = a[2].Ring[:2] },
		"found none; cassandra-0 sees it":  func(a []Answer) { a[0].Ring[0].Address = "127.0.2.99" },
		"connection refused; the pod: not": func(a []Answer) { a[1].Trouble, a[1].Unready = "connection refused", "not Ready: x" },
		"expected a pod that is Ready":     func(a []Answer) { a[2].Unready = "not Ready: ContainersNotReady" },
		"for all members, found dc1, dc2":  func(a []Answer) { a[0].Ring[1].DataCenter = "dc2" },
		"UNREACHABLE, d03783d7": func(a []Answer) {
			a[1].Description.Versions = append(a[1].Description.Versions, SchemaVersion{"UNREACHABLE", []string{"127.0.2.13"}})
		},
		"e0000000-b468-3c1a-82f1-8e30b2edde8b": func(a []Answer) {
			a[2].Description.Versions = []SchemaVersion{{"e0000000-b468-3c1a-82f1-8e30b2edde8b", nil}}
		},
	} {
		a := answers(t)
		harm(a)
		r := JudgeRing(a, 3, "N137")
		require.False(t, r.OK, want)
		require.Contains(t, texts(r.Findings), want)
	}
	few := JudgeRing(answers(t)[:2], 3, "N137")
	require.False(t, few.OK)
	require.Contains(t, texts(few.Findings), "found 2 pods")
	none := JudgeRing(nil, 1, "N84")
	require.False(t, none.OK)
}

func texts(fs []finding.Finding) string {
	var b strings.Builder
	for _, f := range fs {
		b.WriteString(f.String() + "\n")
	}
	return b.String()
}

func TestAPodThatRunsNowhereIsToldWithItsReason(t *testing.T) {
	p := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable",
		Message: "0/3 nodes are available: 1 node(s) didn't match pod topology spread constraints, 2 node(s) had volume node affinity conflict.",
	}}}}
	require.Equal(t, "Pending: Unschedulable 0/3 nodes are available: 1 node(s) didn't match pod topology spread constraints, 2 node(s) had volume node affinity conflict.", Pending(p))
	a := answers(t)
	a[2] = Answer{Pod: "cassandra-2", Trouble: Pending(p), Unready: "not Ready, phase Pending"}
	r := JudgeRing(a, 3, "N137")
	require.False(t, r.OK)
	require.Contains(t, texts(r.Findings), "check the capacity of nodes and volumes first")

	p.Status.Conditions = nil
	require.Equal(t, "Pending: not scheduled yet", Pending(p))
	p.Spec.NodeName = "n1"
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "cassandra", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "no such image"}}}}
	require.Equal(t, "Pending: container cassandra waits: ImagePullBackOff no such image", Pending(p))
	p.Status.ContainerStatuses = nil
	require.Equal(t, "Pending: starting on node n1", Pending(p))
	p.Status.Phase = corev1.PodRunning
	require.Empty(t, Pending(p))
}

func network(name, factors string) Keyspace {
	options := map[string]string{"class": "org.apache.cassandra.locator.NetworkTopologyStrategy"}
	for _, f := range fields(factors) {
		center, factor, _ := strings.Cut(f, "=")
		options[center] = factor
	}
	return replication(name, options)
}

func TestOnlyKeyspacesThatNeedItAreRaised(t *testing.T) {
	live := []Keyspace{
		network("nvcf_api", "ncp=1"), network("sis_api", "ncp=3"), network("schema_migrations", "ncp=1"), network("system_auth", "ncp=1"),
		replication("ess_api", map[string]string{"class": "org.apache.cassandra.locator.SimpleStrategy", "replication_factor": "3"}),
		replication("system_traces", map[string]string{"class": "SimpleStrategy", "replication_factor": "2"}),
		{Name: "system", Class: "LocalStrategy"},
	}
	p, strange := plan(live, ApplicationKeyspaces(), false, "ncp", 3)
	require.Empty(t, strange)
	require.Equal(t, []string{"nvcf_api", "ess_api"}, namesOf(p.Raise), "three copies by another strategy are not three in the data centre")
	require.Equal(t, []string{"sis_api"}, namesOf(p.Already))
	require.Equal(t, []string{"nvct_api", "api_keys_api", "event_ledger", "nvcf_autoscaler"}, p.Absent)
	require.Equal(t, []string{"schema_migrations"}, namesOf(p.Outside))

	p, _ = plan(live, nil, true, "ncp", 3)
	require.Equal(t, "system_auth", p.Raise[len(p.Raise)-1].Name, "nobody logs in any more once it asks for three members")
	require.Equal(t, []string{"nvcf_api", "schema_migrations", "ess_api", "system_traces", "system_auth"}, namesOf(p.Raise))
	require.Empty(t, p.Outside)
}

func TestAStepNeverTakesCopiesAway(t *testing.T) {
	live := []Keyspace{
		network("one", "ncp=1"), network("two", "ncp=2"), network("three", "ncp=3"),
		replication("simple", map[string]string{"class": "SimpleStrategy", "replication_factor": "3"}),
	}
	names := []string{"one", "two", "three", "simple"}
	p, _ := plan(live, names, false, "ncp", 2)
	require.Equal(t, []string{"one"}, namesOf(p.Raise))
	p, _ = plan(live, names, false, "ncp", 3)
	require.Equal(t, []string{"one", "two", "simple"}, namesOf(p.Raise))
}

func TestCopiesElsewhereAreNotDropped(t *testing.T) {
	_, strange := plan([]Keyspace{network("nvcf_api", "ncp=1, other=3")}, []string{"nvcf_api"}, false, "ncp", 3)
	require.Len(t, strange, 1)
	require.Contains(t, strange[0].Why, "drop the copies")
	_, strange = plan([]Keyspace{network("nvcf_api", "other=1")}, []string{"nvcf_api"}, false, "ncp", 3)
	require.Len(t, strange, 1)
}

func namesOf(ks []Keyspace) []string {
	var out []string
	for _, k := range ks {
		out = append(out, k.Name)
	}
	return out
}

func TestTheStatementAsksForCopiesInTheOneDataCentre(t *testing.T) {
	require.Equal(t, "ALTER KEYSPACE nvcf_api WITH replication = {'class': 'NetworkTopologyStrategy', 'ncp': '3'}", alter("nvcf_api", "ncp", 3))
}

func TestErrorsOfCQLHaveTheirClass(t *testing.T) {
	for text, want := range map[string]finding.Class{
		"gocql: unable to create session: unable to discover protocol version: Provided username cassandra and/or password are incorrect": finding.Stop,
		"Unable to perform authentication: Cannot achieve consistency level QUORUM":                                                       finding.Wait,
		"Cannot achieve consistency level LOCAL_QUORUM":                                                                                   finding.Wait,
		"Unrecognized strategy option {dc9} passed to NetworkTopologyStrategy for keyspace nvcf_api":                                      finding.Stop,
		"unconfigured table t":                        finding.Stop,
		"context deadline exceeded":                   finding.Wait,
		"line 1:7 no viable alternative at input 'x'": finding.Stop,
		"gocql: no hosts available in the pool":       finding.Wait,
		"User x has no ALTER permission":              finding.Stop,
	} {
		require.Equal(t, want, class(errors.New(text)), text)
	}
	f := refusal("cassandra-1", "cassandra", errors.New("Provided username cassandra and/or password are incorrect"))
	require.Contains(t, f.Next, "do not upgrade")
	require.Contains(t, f.Next, "restore from the backups")
	require.Contains(t, f.Next, "contact NVIDIA support with this output")
	require.NotContains(t, f.Found, "Provided")
}

func TestWhatFailsOnAMemberTellsWhatWasExpectedAndWhatToDo(t *testing.T) {
	away := errors.New("connection refused")
	one, _, _ := finding.Of((&session{pod: "cassandra-0"}).wrong("SELECT 1", away))
	other, _, _ := finding.Of((&session{pod: "cassandra-0"}).wrong("SELECT 1", errors.New("unconfigured table t")))
	for _, f := range []finding.Finding{
		failed("cassandra-0", kube.Exit{Code: 1}, "flush"), refusal("cassandra-0", "cassandra", away),
		refusal("cassandra-0", "cassandra", errors.New("Cannot achieve consistency level QUORUM")), one, other,
	} {
		require.NotEmpty(t, f.Expected, f)
		require.NotEmpty(t, f.Next, f)
	}
	require.NotEqual(t, one.Next, other.Next)
}

func TestALedgerIsCleanOrForAPerson(t *testing.T) {
	entries := []Entry{{Keyspace: "nvcf_api", Version: 41}, {Keyspace: "nvcf_api", Version: 42}, {Keyspace: "sis_api", Version: 7}}
	tables := []string{"nvcf_api", "sis_api"}
	ok := judgeLedger(tables, entries, []string{"nvcf_api", "sis_api", "ess_api"}, []Expected{{"nvcf_api", 42}})
	require.True(t, ok.OK, ok.Findings)
	require.Equal(t, []string{"ess_api"}, ok.Absent)
	require.Contains(t, texts(judgeLedger(tables, entries, []string{"nvcf_api"}, []Expected{{"nvcf_api", 43}}).Findings), "expected version 43, found 41, 42")
	require.Contains(t, texts(judgeLedger(tables, entries, nil, []Expected{{"ess_api", 1}}).Findings), "expected version 1, found none")
	require.Contains(t, texts(judgeLedger([]string{"ess_api"}, nil, nil, []Expected{{"ess_api", 1}}).Findings), "found the table without a row", "the two statements that replace the row were cut in two")
	require.False(t, judgeLedger([]string{"ess_api"}, nil, []string{"ess_api"}, nil).OK)
	require.Equal(t, []string{"nvcf_api", "ess_api"}, ledgers([]string{"nvcf_api"}, []Expected{{"ess_api", 1}, {"nvcf_api", 2}}), "what must have a version is read too")
	_, err := entry("nvcf_api", map[string]any{"version": int64(1), "dirty": "yes"})
	require.ErrorContains(t, err, "expected true or false as dirty, found yes")
	_, err = entry("nvcf_api", map[string]any{"version": "1", "dirty": true})
	require.ErrorContains(t, err, "expected a number as version")
	one, err := entry("nvcf_api", map[string]any{"version": 7, "dirty": true})
	require.NoError(t, err)
	require.Equal(t, Entry{"nvcf_api", 7, true}, one)
	entries[2].Dirty = true
	require.Contains(t, texts(judgeLedger(tables, entries, []string{"sis_api"}, nil).Findings), "dirty at version 7")
}

func TestOnlyAMembersOwnAnswerIsTakenForALoginThatCantBeHad(t *testing.T) {
	for text, want := range map[string]bool{
		"Provided username x and/or password are incorrect": true,
		"Cannot achieve consistency level QUORUM":           true,
		"connection refused":                                false,
		"gocql: no hosts available in the pool":             false,
		"pods is forbidden":                                 false,
	} {
		err := errors.New(text)
		require.Equal(t, want, letsNobodyIn(refusal("cassandra-0", "x", err).Error(class(err))), text)
	}
	require.False(t, letsNobodyIn(nil))
}

func TestRefusedLoginsAreCountedInAnyCase(t *testing.T) {
	n, err := countErrors(strings.NewReader("ok\ncom.x.AuthenticationException: no\nfine\nauthenticationexception\n"))
	require.NoError(t, err)
	require.Equal(t, 2, n)

	long := strings.Repeat("x", 64<<10-5) + "AuthenticationException" + strings.Repeat("y", 2<<20) + " AuthenticationException\nfine"
	n, err = countErrors(strings.NewReader(long))
	require.NoError(t, err, "a line of two megabytes")
	require.Equal(t, 1, n, "one line, whichever pieces it comes in")
}

// repaired is a row like one that a real full repair has left, with fewer
// ranges.
func repaired(change func(*Repaired)) Repaired {
	start := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	r := Repaired{ID: "8a8c00a0-ecdb-11f1-a0c9-3d1e53d22c60", Keyspace: "nvcf_api", Node: "3d1e53d22c60", Started: start, Finished: start.Add(time.Second),
		Options: map[string]string{"dataCenters": "", "forceRepair": "false", "hosts": "", "incremental": "false", "jobThreads": "1", "optimiseStreams": "false",
			"parallelism": "parallel", "paxosOnly": "false", "previewKind": "NONE", "primaryRange": "false", "pullRepair": "false", "repairPaxos": "true",
			"sub_range_repair": "false", "trace": "false"},
		Tables: []string{"t", "u"}, Ranges: []string{"(10,20]", "(20,-5]", "(-5,10]"}}
	change(&r)
	return r
}

func TestTheHistoryProvesOnlyThisMembersWholeRepairSinceTheRaise(t *testing.T) {
	since := time.Date(2026, 1, 1, 11, 59, 0, 0, time.UTC)
	now := since.Add(5 * time.Minute)
	w := sought{"nvcf_api", "3d1e53d22c60", []string{"t", "u"}, true, since}
	option := func(name, value string) func(*Repaired) { return func(r *Repaired) { r.Options[name] = value } }
	for name, c := range map[string]struct {
		change func(*Repaired)
		want   repairState
	}{
		"ours":                 {func(*Repaired) {}, repairDone},
		"another keyspace":     {func(r *Repaired) { r.Keyspace = "sis_api" }, notRepaired},
		"another member":       {func(r *Repaired) { r.Node = "ffffffffffff" }, notRepaired},
		"before the raise":     {func(r *Repaired) { r.Started = since.Add(-time.Second) }, notRepaired},
		"incremental":          {option("incremental", "true"), notRepaired},
		"primary ranges only":  {option("primaryRange", "true"), notRepaired},
		"a look and no repair": {option("previewKind", "ALL"), notRepaired},
		"some members":         {option("hosts", "10.0.0.1"), notRepaired},
		"a range":              {option("sub_range_repair", "true"), notRepaired},
		"some tables":          {func(r *Repaired) { r.Tables = r.Tables[:1] }, notRepaired},
		"a part of the ring":   {func(r *Repaired) { r.Ranges = r.Ranges[:2] }, notRepaired},
		"failed":               {func(r *Repaired) { r.Exception = "no replies" }, notRepaired},
		"still running":        {func(r *Repaired) { r.Finished = time.Time{} }, repairRuns},
	} {
		got, _ := w.state([]Repaired{repaired(c.change)}, now, 30*time.Minute)
		require.Equal(t, c.want, got, name)
	}
	running := repaired(func(r *Repaired) { r.Finished = time.Time{} })
	const limit = 3 * time.Minute
	got, _ := w.state([]Repaired{running}, running.Started.Add(limit+time.Second), patience(limit))
	require.Equal(t, repairRuns, got, "nodetool was given up, the repair was not")
	got, which := w.state([]Repaired{running}, running.Started.Add(patience(limit)+time.Second), patience(limit))
	require.Equal(t, repairStays, got, "another one on top of it helps nobody")
	require.Equal(t, running.ID, which.ID)
	got, _ = w.state([]Repaired{running, repaired(func(*Repaired) {})}, now, time.Hour)
	require.Equal(t, repairDone, got)
	w.whole = false
	got, _ = w.state([]Repaired{repaired(func(r *Repaired) { r.Ranges = r.Ranges[:2] })}, now, time.Hour)
	require.Equal(t, repairDone, got, "with two copies no member holds the whole ring")
}
