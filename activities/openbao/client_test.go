package openbao

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// member serves a handler as the API of one member.
func member(t *testing.T, handler http.HandlerFunc) *server {
	t.Helper()
	web := httptest.NewServer(handler)
	t.Cleanup(web.Close)
	s, err := newServer("bao-0", "fake-token", func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", web.Listener.Addr().String())
	})
	require.NoError(t, err)
	t.Cleanup(s.close)
	return s
}

// recorded answers as a real server did.
func recorded(t *testing.T, name string) http.HandlerFunc {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name + ".json")
	require.NoError(t, err)
	var answers map[string]struct {
		Status int             `json:"status"`
		Body   json.RawMessage `json:"body"`
	}
	require.NoError(t, json.Unmarshal(text, &answers))
	return func(w http.ResponseWriter, r *http.Request) {
		a, ok := answers[strings.TrimPrefix(r.URL.Path, "/v1/")]
		if !ok {
			http.NotFound(w, r)
			return
		}
		w.WriteHeader(a.Status)
		_, _ = w.Write(a.Body)
	}
}

func TestOldAndNewServersAreUnderstoodAlike(t *testing.T) {
	const old, now = "27f94e46-2db3-d304-1aad-6e89a441394a", "5686888a-0184-ff86-c6fe-fe98afd0f76c"
	for name, want := range map[string]Status{
		"active-2.6":    {Initialized: true, Version: "2.6.2", Storage: "raft", ClusterID: now, Active: true, Leader: "http://127.0.0.1:8200", Committed: 57, Applied: 57},
		"standby-2.6":   {Initialized: true, Version: "2.6.2", Storage: "raft", ClusterID: now, Leader: "http://127.0.0.1:8200", Committed: 57, Applied: 57},
		"active-2.5":    {Initialized: true, Version: "2.5.5", Storage: "raft", ClusterID: old, Active: true, Leader: "http://127.0.0.1:8200", Committed: 35, Applied: 35},
		"standby-2.5":   {Initialized: true, Version: "2.5.5", Storage: "raft", ClusterID: old, Leader: "http://127.0.0.1:8200", Committed: 39, Applied: 38},
		"sealed":        {Initialized: true, Sealed: true, Version: "2.6.2", Storage: "raft"},
		"uninitialised": {Sealed: true, Version: "2.6.2", Storage: "raft"},
		"no-quorum":     {Initialized: true, Version: "2.6.9", Storage: "raft", ClusterID: now, Committed: 110, Applied: 110},
	} {
		require.Equal(t, want, member(t, recorded(t, name)).status(t.Context()), name)
	}
}

func TestThePeersAreReadFromOldAndNewServers(t *testing.T) {
	for _, name := range []string{"active-2.5", "active-2.6"} {
		peers, err := member(t, recorded(t, name)).peers(t.Context())
		require.NoError(t, err)
		require.Len(t, peers, 3, name)
		for _, p := range peers {
			require.True(t, p.Voter)
			require.NotEmpty(t, p.ID)
			require.Contains(t, p.Address, ":82")
		}
	}
}

// TestNothingAskedOfAMemberReachesAnother: a standby would forward the
// step-down, or redirect it, and depose the active member.
func TestNothingAskedOfAMemberReachesAnother(t *testing.T) {
	t.Setenv("BAO_TOKEN", "fake-token-of-the-worker")
	t.Setenv("BAO_ADDR", "http://127.0.0.1:1")
	t.Setenv("BAO_MAX_RETRIES", "5")
	var elsewhere, asked atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	defer other.Close()
	s := member(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		require.Equal(t, "true", r.Header.Get("X-Vault-No-Request-Forwarding"))
		require.Equal(t, "fake-token", r.Header.Get("X-Vault-Token"))
		http.Redirect(w, r, other.URL+r.URL.Path, http.StatusTemporaryRedirect)
	})
	require.NoError(t, s.stepDown(t.Context()), "a nil error proves nothing")
	require.ErrorContains(t, s.snapshot(t.Context(), io.Discard), "incomplete snapshot")
	_, err := s.peers(t.Context())
	require.ErrorContains(t, err, "answered with 307")
	require.EqualValues(t, 3, asked.Load(), "each was sent once")
	require.Zero(t, elsewhere.Load())
}

func TestWhatNeedsNoTokenIsAskedWithoutOne(t *testing.T) {
	t.Setenv("BAO_TOKEN", "fake-token-of-the-worker")
	s := member(t, func(w http.ResponseWriter, r *http.Request) {
		require.Empty(t, r.Header.Get("X-Vault-Token"))
		recorded(t, "active-2.6")(w, r)
	})
	require.Empty(t, s.status(t.Context()).Trouble)
}

func TestAMemberInTroubleIsAskedOnceAndSaysWhy(t *testing.T) {
	var asked atomic.Int32
	s := member(t, func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.WriteHeader(http.StatusInternalServerError)
		_, _ = io.WriteString(w, `{"errors":["local node not active but active cluster node not found"]}`)
	})
	require.Equal(t, Status{Trouble: "answered with 500: local node not active but active cluster node not found"}, s.status(t.Context()))
	require.EqualValues(t, 1, asked.Load())
	require.ErrorContains(t, s.stepDown(t.Context()), "active cluster node not found")
	require.EqualValues(t, 2, asked.Load())

	denied := member(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"errors":["permission denied"]}`)
	})
	require.ErrorIs(t, denied.stepDown(t.Context()), errDenied)
	require.ErrorIs(t, denied.snapshot(t.Context(), io.Discard), errDenied)
	_, err := denied.peers(t.Context())
	require.ErrorIs(t, err, errDenied)
	require.NotContains(t, err.Error(), "fake-token")
}
