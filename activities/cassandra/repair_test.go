package cassandra

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/testsuite"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/secret"
)

const limit = 100 * time.Millisecond

// looked is one answer of the scripted history.
type looked struct {
	trace
	err error
}

var (
	broken  = finding.Finding{Object: "tunnel", Found: "connection refused"}.Error(finding.Wait)
	member  = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC) // the member's clock
	nothing = looked{trace: trace{now: member}}
	running = of("nvcf_api", past{state: repairRuns, row: Repaired{ID: "8a8c00a0", Started: member}})
	done    = of("nvcf_api", past{state: repairDone, row: Repaired{ID: "8a8c00a0"}})
	// nobodyIn: the history can't be read because the login is refused.
	nobodyIn = looked{}
)

func of(keyspace string, p past) looked {
	return looked{trace: trace{of: map[string]past{keyspace: p}, now: member}}
}

// repairs is a repair of nvcf_api whose looks into the history are scripted; the
// last one is repeated. It says since when each look asked.
func (s *scripted) repairs(limit time.Duration, looks ...looked) (Repair, []time.Time, error) {
	s.t.Helper()
	got, since, err := s.repairsOf(RepairRequest{Keyspaces: []string{"nvcf_api"}, Limit: limit}, looks...)
	if len(got) == 0 {
		return Repair{}, since, err
	}
	return got[0], since, err
}

func (s *scripted) repairsOf(r RepairRequest, looks ...looked) ([]Repair, []time.Time, error) {
	s.t.Helper()
	r.Place, r.Pod, r.Since = s.place, "cassandra-0", member.Add(-time.Minute)
	c, err := s.acts.open(s.t.Context(), s.place)
	require.NoError(s.t, err)
	defer c.close()
	var since []time.Time
	c.look = func(_ context.Context, _ RepairRequest, _ []string, from time.Time) (trace, error) {
		l := looks[min(len(since), len(looks)-1)]
		since = append(since, from)
		return l.trace, l.err
	}
	got, err := c.repair(s.t.Context(), r)
	return got, since, err
}

func succeeds(string, string) (kube.Exit, error) {
	return kube.Exit{Stdout: said("nvcf_api")}, nil
}

// said is what nodetool says of keyspaces that it has repaired.
func said(keyspaces ...string) (out string) {
	for i, name := range keyspaces {
		out += fmt.Sprintf("[2026-01-01 12:00:00,000] Starting repair command #%d (8a8c00a0-ecdb-11f1-a0c9-3d1e53d22c60), repairing keyspace %s with repair options (parallelism: parallel)\n"+
			"[2026-01-01 12:00:01,000] Repair completed successfully\n[2026-01-01 12:00:01,000] Repair command #%d finished in 1 second\n", i+1, name, i+1)
	}
	return out
}

func TestARepairThatFailsIsTriedThreeTimes(t *testing.T) {
	s := newScripted(t, 1)
	calls := 0
	s.answer = func(string, string) (kube.Exit, error) {
		if calls++; calls < 3 {
			return kube.Exit{Code: 2, Stderr: "error: Repair job has failed with the error message: Did not get replies from all endpoints.\n-- StackTrace --"}, nil
		}
		return succeeds("", "")
	}
	out, _, err := s.repairs(limit, nobodyIn)
	require.NoError(t, err)
	require.Equal(t, 3, out.Attempts)
	require.Equal(t, "nodetool", out.By)
	require.Nil(t, out.Row)

	calls = -9
	_, _, err = s.repairs(limit, nobodyIn)
	require.ErrorContains(t, err, "Did not get replies from all endpoints")
	require.Len(t, s.ran, 6)
}

func TestARepairThatRepairsNothingIsNone(t *testing.T) {
	s := newScripted(t, 1)
	s.answer = func(string, string) (kube.Exit, error) {
		return kube.Exit{Stdout: recorded(t, "repair-one-copy.txt")}, nil
	}
	_, _, err := s.repairsOf(RepairRequest{Keyspaces: []string{AuthKeyspace}, Limit: limit}, nothing)
	require.ErrorContains(t, err, "No repair is needed", "exit code 0 is not enough")
}

func TestKeyspacesThatAloneHaveCopiesAreRepairedByOneCall(t *testing.T) {
	s := newScripted(t, 1)
	names := []string{"nvcf_api", "system_distributed", "sis_api"}
	s.answer = func(_, command string) (kube.Exit, error) { return kube.Exit{Stdout: said(names...)}, nil }
	out, _, err := s.repairsOf(RepairRequest{Keyspaces: names, Alone: true, Limit: limit}, nobodyIn)
	require.NoError(t, err)
	require.Len(t, out, 3)
	require.Equal(t, []string{"cassandra-0 repair --full", "cassandra-0 repair --full system_distributed"}, s.ran, "nodetool leaves that one out where none is named")

	s.ran = nil
	_, _, err = s.repairsOf(RepairRequest{Keyspaces: names[:2], Limit: limit}, nobodyIn)
	require.NoError(t, err)
	require.Equal(t, []string{"cassandra-0 repair --full nvcf_api", "cassandra-0 repair --full system_distributed"}, s.ran, "another keyspace would be repaired with them")
}

func TestOneCallThatFailsInTheMiddleIsNotRepeatedForWhatItHasRepaired(t *testing.T) {
	s := newScripted(t, 1)
	s.answer = func(_, command string) (kube.Exit, error) {
		if command == "repair --full" {
			return kube.Exit{Code: 2, Stderr: "error: Repair job has failed with the error message: Did not get replies from all endpoints."}, nil
		}
		return kube.Exit{Stdout: said("sis_api")}, nil
	}
	both := looked{trace: trace{now: member, of: map[string]past{"nvcf_api": done.of["nvcf_api"], "sis_api": {state: repairDone}}}}
	out, _, err := s.repairsOf(RepairRequest{Keyspaces: []string{"nvcf_api", "sis_api"}, Alone: true, Limit: limit}, nothing, done, both)
	require.NoError(t, err)
	require.Equal(t, []string{"cassandra-0 repair --full", "cassandra-0 repair --full sis_api"}, s.ran)
	var how []string
	for _, r := range out {
		how = append(how, fmt.Sprintf("%s by %s after %d", r.Keyspace, r.By, r.Attempts))
	}
	require.Equal(t, []string{"nvcf_api by history after 1", "sis_api by nodetool after 2"}, how)
}

func TestAfterACallWhoseEndNobodyHeardTheHistoryIsAskedBeforeTheNext(t *testing.T) {
	s := newScripted(t, 1)
	s.answer = func(_, command string) (kube.Exit, error) {
		if command == "repair --full nvcf_api" {
			return kube.Exit{}, errors.New("the stream broke")
		}
		return kube.Exit{Stdout: said("sis_api")}, nil
	}
	both := looked{trace: trace{now: member, of: map[string]past{"nvcf_api": done.of["nvcf_api"], "sis_api": {state: repairDone}}}}
	looks := []looked{nothing, running, done, both}
	_, since, err := s.repairsOf(RepairRequest{Keyspaces: []string{"nvcf_api", "sis_api"}, Limit: time.Minute}, looks...)
	require.NoError(t, err)
	require.Equal(t, []string{"cassandra-0 repair --full nvcf_api", "cassandra-0 repair --full sis_api"}, s.ran)
	require.Len(t, since, 4, "while the first one runs, no other is begun")

	s.ran = nil
	_, _, err = s.repairsOf(RepairRequest{Keyspaces: []string{"nvcf_api", "sis_api"}, Limit: limit}, nothing, running)
	require.ErrorContains(t, err, "repair 8a8c00a0 still runs")
	require.Equal(t, []string{"cassandra-0 repair --full nvcf_api"}, s.ran)
}

func TestAnEndWithoutNodetoolsWordIsNoneWhereNobodyCanReadTheHistory(t *testing.T) {
	s := newScripted(t, 1)
	cut := "[2026-01-01 12:00:00,000] Starting repair command #1 (8a8c00a0-ecdb-11f1-a0c9-3d1e53d22c60), repairing keyspace nvcf_api with repair options (parallelism: parallel)\n"
	for _, output := range []string{"", cut, said("sis_api")} {
		s.ran = nil
		s.answer = func(string, string) (kube.Exit, error) { return kube.Exit{Stdout: output}, nil }
		_, _, err := s.repairs(limit, nobodyIn)
		require.ErrorContains(t, err, "N187: repair of nvcf_api on cassandra-0: expected nodetool's word that it has ended, found exit code 0", output)
		require.Len(t, s.ran, tries)
	}
	s.answer = func(string, string) (kube.Exit, error) {
		return kube.Exit{Stdout: "[2026-01-01 12:00:00,000] Repair command #1 (8a8c00a0) Empty keyspace, skipping repair: nvcf_api\n"}, nil
	}
	_, _, err := s.repairs(limit, nobodyIn)
	require.NoError(t, err)
}

func TestATryAfterOneThatWasAboutToCallNodetoolWaitsForItsRow(t *testing.T) {
	for said, want := range map[string]bool{calling + "repair --full nvcf_api on cassandra-0 (nvcf_api)": true, "repair 8a8c00a0 of nvcf_api runs": false, "": false} {
		env := new(testsuite.WorkflowTestSuite).NewTestActivityEnvironment()
		if said != "" {
			env.SetHeartbeatDetails(said)
		}
		ask := func(ctx context.Context) (bool, error) { return calledBefore(ctx), nil }
		env.RegisterActivity(ask)
		got, err := env.ExecuteActivity(ask)
		require.NoError(t, err)
		var called bool
		require.NoError(t, got.Get(&called))
		require.Equal(t, want, called, said)
	}
}

func TestARepairWhoseEndIsLostIsNotRepeatedBeforeTheHistoryAnswers(t *testing.T) {
	s := newScripted(t, 1)
	s.answer = func(string, string) (kube.Exit, error) { return kube.Exit{}, errors.New("the stream broke") }
	out, since, err := s.repairs(time.Minute, nothing, looked{err: broken}, looked{err: broken}, running, done)
	require.NoError(t, err)
	require.Equal(t, "history", out.By)
	require.Equal(t, []string{"cassandra-0 repair --full nvcf_api"}, s.ran)
	require.Equal(t, []time.Time{member.Add(-time.Minute), member, member, member, member}, since, "its own clock tells what is newer than the call")

	s.ran = nil
	_, _, err = s.repairs(limit, nothing, looked{err: broken})
	require.ErrorContains(t, err, "connection refused")
	require.Len(t, s.ran, 1, "the way that has failed proves nothing")
	s.ran = nil
	_, _, err = s.repairs(limit, looked{err: broken})
	require.ErrorContains(t, err, "connection refused")
	require.Empty(t, s.ran)
}

func TestAnAPIServerThatGoesAwayInARepairLeadsToNoSecondOne(t *testing.T) {
	s := newScripted(t, 1)
	away := false
	s.answer = func(string, string) (kube.Exit, error) {
		away = true
		return kube.Exit{}, errors.New("connection refused")
	}
	s.acts.Dial = func(context.Context, *kube.Client, string, string, int) (net.Conn, error) {
		if away {
			return nil, errors.New("connection refused")
		}
		return nil, errors.New("Provided username cassandra and/or password are incorrect")
	}
	_, err := s.acts.Repair(t.Context(), RepairRequest{Place: s.place, Login: Login{Password: secret.Reference{Secret: "cassandra-admin", Key: "password"}},
		Pod: "cassandra-0", Keyspaces: []string{"nvcf_api"}, Since: member, Limit: time.Second})
	require.ErrorContains(t, err, "connection refused")
	require.Equal(t, []string{"cassandra-0 repair --full nvcf_api"}, s.ran)
}

func TestARepairThatOutlivesItsLimitIsWaitedForAndNeverRepeated(t *testing.T) {
	s := newScripted(t, 1)
	s.acts.Exec = func(ctx context.Context, _ *kube.Client, cmd kube.Command) (kube.Exit, error) {
		s.ran = append(s.ran, cmd.Pod)
		ctx, cancel := context.WithTimeout(ctx, cmd.Limit)
		defer cancel()
		<-ctx.Done()
		return kube.Exit{}, ctx.Err()
	}
	out, _, err := s.repairs(limit, nothing, running, running, done)
	require.NoError(t, err)
	require.Equal(t, "history", out.By)

	stays := of("nvcf_api", past{state: repairStays, row: Repaired{ID: "8a8c00a0", Started: member}})
	for what, after := range map[string]looked{"runs on": running, "has run for too long": stays} {
		_, _, err = s.repairs(limit, nothing, after)
		_, class, _ := finding.Of(err)
		require.Equal(t, finding.Stop, class, what)
		require.ErrorContains(t, err, "repair 8a8c00a0 still runs since 2026-01-01T12:00:00Z", what)
	}
	require.Len(t, s.ran, 3)

	_, _, err = s.repairs(limit, nobodyIn)
	require.ErrorContains(t, err, "without a login nobody can look for its end")
	require.Len(t, s.ran, 4)
}

func TestARepairIsDoneWhenTheHistorySaysSoWhereItCanBeRead(t *testing.T) {
	s := newScripted(t, 1)
	s.answer = succeeds
	out, _, err := s.repairs(limit, nothing, nothing, done)
	require.NoError(t, err, "the row may come late")
	require.Equal(t, "8a8c00a0", out.Row.ID)
	_, _, err = s.repairs(limit, nothing)
	require.ErrorContains(t, err, "found none, although nodetool says so")
	out, _, err = s.repairs(limit, of("nvcf_api", past{empty: true}))
	require.NoError(t, err, "a keyspace without tables leaves no row")
	require.Nil(t, out.Row)
	_, _, err = s.repairs(limit, nobodyIn, nothing)
	require.NoError(t, err, "who was let in by this repair has no clock of before it")
}

func TestTheActivityHasTimeForWhatItMayWaitFor(t *testing.T) {
	require.Equal(t, 7*patience(time.Hour), together(7, time.Hour), "each keyspace of one call may take its own time")
	require.GreaterOrEqual(t, RepairLimit(7, time.Hour), tries*(7*time.Hour+together(7, time.Hour)))
	require.GreaterOrEqual(t, RepairLimit(2, time.Hour), 2*tries*(time.Hour+patience(time.Hour)))
}
