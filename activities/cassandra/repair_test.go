package cassandra

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
	nobodyIn = refusal("cassandra-0", "cassandra", errors.New("Provided username cassandra and/or password are incorrect")).Error(finding.Stop)
	broken   = finding.Finding{Object: "tunnel", Found: "connection refused"}.Error(finding.Wait)
	member   = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC) // the member's clock
	nothing  = looked{trace: trace{now: member}}
	running  = looked{trace: trace{state: repairRuns, row: Repaired{ID: "8a8c00a0", Started: member}, now: member}}
	done     = looked{trace: trace{state: repairDone, row: Repaired{ID: "8a8c00a0"}, now: member}}
)

// repairs is a repair whose looks into the history are scripted; the last one
// is repeated. It says since when each look asked.
func (s *scripted) repairs(limit time.Duration, looks ...looked) (Repair, []time.Time, error) {
	s.t.Helper()
	c, err := s.acts.open(s.t.Context(), s.place)
	require.NoError(s.t, err)
	defer c.close()
	var since []time.Time
	c.look = func(_ context.Context, _ RepairRequest, _ string, from time.Time) (trace, error) {
		l := looks[min(len(since), len(looks)-1)]
		since = append(since, from)
		return l.trace, l.err
	}
	got, err := c.repair(s.t.Context(), RepairRequest{Place: s.place, Pod: "cassandra-0", Since: member.Add(-time.Minute), Limit: limit}, "nvcf_api")
	return got, since, err
}

func succeeds(string, string) (kube.Exit, error) {
	return kube.Exit{Stdout: "Repair completed successfully\n"}, nil
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
	out, _, err := s.repairs(limit, looked{err: nobodyIn})
	require.NoError(t, err)
	require.Equal(t, 3, out.Attempts)
	require.Equal(t, "nodetool", out.By)
	require.Nil(t, out.Row)

	calls = -9
	_, _, err = s.repairs(limit, looked{err: nobodyIn})
	require.ErrorContains(t, err, "Did not get replies from all endpoints")
	require.Len(t, s.ran, 6)
}

func TestARepairThatRepairsNothingIsNone(t *testing.T) {
	s := newScripted(t, 1)
	s.answer = func(string, string) (kube.Exit, error) {
		return kube.Exit{Stdout: recorded(t, "repair-one-copy.txt")}, nil
	}
	_, _, err := s.repairs(limit, nothing)
	require.ErrorContains(t, err, "No repair is needed", "exit code 0 is not enough")
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

	stays := looked{trace: trace{state: repairStays, row: Repaired{ID: "8a8c00a0", Started: member}, now: member}}
	for what, after := range map[string]looked{"runs on": running, "has run for too long": stays} {
		_, _, err = s.repairs(limit, nothing, after)
		_, class, _ := finding.Of(err)
		require.Equal(t, finding.Stop, class, what)
		require.ErrorContains(t, err, "repair 8a8c00a0 still runs since 2026-01-01T12:00:00Z", what)
	}
	require.Len(t, s.ran, 3)

	_, _, err = s.repairs(limit, looked{err: nobodyIn})
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
	out, _, err = s.repairs(limit, looked{trace: trace{now: member, empty: true}})
	require.NoError(t, err, "a keyspace without tables leaves no row")
	require.Nil(t, out.Row)
	_, _, err = s.repairs(limit, looked{err: nobodyIn}, nothing)
	require.NoError(t, err, "who was let in by this repair has no clock of before it")
}

func TestTheActivityHasTimeForWhatItMayWaitFor(t *testing.T) {
	require.GreaterOrEqual(t, RepairLimit(2, time.Hour), 2*tries*(time.Hour+patience(time.Hour)))
}
