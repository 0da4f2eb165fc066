package openbao

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"filippo.io/age"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
)

// snapshotOf asks a member for its snapshot, as the activity does.
func snapshotOf(t *testing.T, s *server, limit time.Duration) error {
	t.Helper()
	identity, err := age.GenerateX25519Identity()
	require.NoError(t, err)
	store, err := artifact.Open(t.TempDir(), []string{identity.Recipient().String()})
	require.NoError(t, err)
	l := &looker{a: &Activities{Artifacts: store}, servers: map[string]*server{"uid-0": s}, record: evidence.Begin(t.Context(), store)}
	defer l.record.End()
	active := Member{Pod: "bao-0", UID: "uid-0"}
	ref, err := l.store(t.Context(), active, limit)
	require.Error(t, err)
	require.Empty(t, ref.URL, "nothing of it is kept")
	return l.snapshotError(active, err)
}

func TestASnapshotThatBreaksOffOnTheWireIsABrokenArchive(t *testing.T) {
	broken := member(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		_, _ = w.Write([]byte("half"))
		wire, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			wire.Close()
		}
	})
	err := snapshotOf(t, broken, patience)
	require.ErrorIs(t, err, errArchive, "it is asked for again so often, and not by the activity's retries")
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)

	reset := member(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		_, _ = w.Write([]byte("half"))
		_ = http.NewResponseController(w).Flush()
		if wire, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_ = wire.(*net.TCPConn).SetLinger(0)
			wire.Close()
		}
	})
	require.ErrorIs(t, snapshotOf(t, reset, patience), errArchive)

	slow := member(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte("half"))
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	err = snapshotOf(t, slow, 300*time.Millisecond)
	require.ErrorIs(t, err, errArchive)
	require.ErrorContains(t, err, "did not come within its time")
	require.Contains(t, brokenNext(err), "raise transferLimit")
	require.NotContains(t, brokenNext(errArchive), "transferLimit")
}

func brokenNext(err error) string { return broken("bao-0", err).Next }

func TestAMemberThatGivesNoSnapshotOutIsNoBrokenArchive(t *testing.T) {
	away, err := newServer("bao-0", "fake-token", func(context.Context) (net.Conn, error) { return nil, errors.New("no route") })
	require.NoError(t, err)
	failed := snapshotOf(t, away, patience)
	require.NotErrorIs(t, failed, errArchive)
	_, class, ok := finding.Of(failed)
	require.True(t, ok)
	require.Equal(t, finding.Retry, class)

	refused := member(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) })
	require.NotErrorIs(t, snapshotOf(t, refused, patience), errArchive)
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestAStoreThatTakesNoMoreIsTheStoresFault(t *testing.T) {
	s := member(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("archive")) })
	l := &looker{servers: map[string]*server{"uid-0": s}}
	sink := &noted{to: full{}}
	require.Error(t, l.stream(t.Context(), Member{UID: "uid-0"}, sink))
	require.ErrorContains(t, sink.err, "no space left")
}

func TestAnErrorBeforeAnythingWasChangedSaysSo(t *testing.T) {
	f := finding.Finding{Row: "N165", Object: "OpenBao member bao-0", Found: "denied"}
	err := untouched(t.Context(), f.Error(finding.Stop))
	require.True(t, Untouched(err))
	got, class, ok := finding.Of(err)
	require.True(t, ok)
	require.Equal(t, finding.Stop, class)
	require.Equal(t, f, got)
	require.False(t, Untouched(f.Error(finding.Stop)))
	require.False(t, Untouched(untouched(t.Context(), errors.New("the worker is gone"))))
	require.NoError(t, untouched(t.Context(), nil))
}
