package nats

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// recorded replays what three real servers answered at one time, each through
// the monitoring reader; null is a server that was down. The files hold the
// parts of real answers that are read here.
func recorded(t *testing.T, moment string) []Answer {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", moment+".json"))
	require.NoError(t, err)
	var pages map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(data, &pages))
	var out []Answer
	for _, pod := range []string{"nats-0", "nats-1", "nats-2"} {
		if string(pages[pod]) == "null" {
			out = append(out, Answer{Pod: pod, Trouble: "connection refused"})
			continue
		}
		a := answered(t, pod, func(http.ResponseWriter) {}, pages[pod])
		a.Pod = pod
		out = append(out, a)
	}
	return out
}

// answered asks a server that gives these answers.
func answered(t *testing.T, name string, health func(http.ResponseWriter), jsz json.RawMessage) Answer {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/varz", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]string{"server_name": name, "version": "2.15.2"})
	})
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { health(w) })
	mux.HandleFunc("/jsz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(jsz) })
	server := httptest.NewServer(mux)
	defer server.Close()
	m := newMonitor(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", server.Listener.Addr().String())
	})
	defer m.close()
	return m.ask(t.Context(), pageSize)
}

func healthy(http.ResponseWriter) {}

func TestMemoryStreamsWithOneCopyAreFoundOnTheServerThatHoldsThem(t *testing.T) {
	d := JudgeDrained(Judge(recorded(t, "single")), 1)
	require.False(t, d.OK)
	require.Equal(t, 4, d.Seen, "M1 on nats-0, M3 on nats-1, M2 and KEEP1 on nats-2; F1 is a file")
	require.EqualValues(t, 8000, d.Messages)
	require.Len(t, d.Findings, 4)
	require.Equal(t, "stream NVCF/KEEP1", d.Findings[0].Object)
	require.Equal(t, "2000 messages, 1500 deliveries pending, 0 not acknowledged", d.Findings[0].Found)
	require.Equal(t, "N127", d.Findings[0].Row)
}

func TestAServerWithoutAnAnswerIsNotDrained(t *testing.T) {
	answers := recorded(t, "rolled")
	require.True(t, JudgeDrained(Judge(answers), 1).OK, "KEEP1 came back empty")

	// nats-2 holds the only single-copy stream; without it nothing is listed.
	answers[2] = Answer{Pod: "nats-2", Trouble: "connection refused", Unready: "container nats waits: CrashLoopBackOff"}
	d := JudgeDrained(Judge(answers), 1)
	require.False(t, d.OK)
	require.Equal(t, "N125", d.Findings[0].Row)
	require.Contains(t, d.Findings[0].Found, "CrashLoopBackOff")
	require.Contains(t, d.Findings[1].Expected, "at least 1")

	// Its pod is gone from the list, too: the others still know the server.
	d = JudgeDrained(Judge(answers[:2]), 0)
	require.False(t, d.OK)
	require.Equal(t, "NATS server nats-2", d.Findings[0].Object)
	require.Contains(t, d.Findings[0].Next, "peer-remove nats-2")

	d = JudgeDrained(Judge(nil), 0)
	require.False(t, d.OK, "no server at all")
}

func TestAStreamIsJudgedFromItsLeaderAndConsumersFromTheirs(t *testing.T) {
	v := Judge(recorded(t, "rolled"))
	require.Empty(t, v.Troubles)
	m1 := v.Streams[2]
	require.Equal(t, "M1", m1.Name)
	require.Equal(t, "nats-0", m1.Leader)
	require.EqualValues(t, 1500, m1.Pending, "nats-1 leads the consumer, nats-0 the stream: followers say 0")
	require.Len(t, m1.Copies, 3)

	v = Judge(recorded(t, "two-down"))
	require.Len(t, v.Troubles, 2)
	leaderless := v.Streams[1]
	require.Equal(t, "M1", leaderless.Name)
	require.Empty(t, leaderless.Leader)
	require.Contains(t, leaderless.Unled, "no leader")
}

func TestTwoLeadersAreNoLeader(t *testing.T) {
	h := func(server, leader string) held {
		return held{server, Hosted{Account: "A", Name: "S", Group: &Group{Leader: leader}, config: settings{Storage: memory, Replicas: 1}}}
	}
	s := lead([]held{h("a", "a"), h("b", "b")})
	require.Empty(t, s.Leader)
	require.Equal(t, "a and b both lead it", s.Unled)
	f, undone := undrained(s)
	require.True(t, undone)
	require.Equal(t, s.Unled, f.Found)
}

func TestPendingDeliveriesKeepAnEmptyStreamFromBeingDrained(t *testing.T) {
	s := Stream{settings: settings{Storage: memory, Replicas: 1}, Leader: "a", Unacked: 3}
	f, undone := undrained(s)
	require.True(t, undone)
	require.Contains(t, f.Found, "3 not acknowledged")
	s.Unacked, s.Leaderless = 0, []string{"d"}
	f, undone = undrained(s)
	require.True(t, undone)
	require.Contains(t, f.Found, "consumer d")
}

func TestAnAnswerOfAnotherShapeStopsAndASilentOneWaits(t *testing.T) {
	for name, c := range map[string]struct {
		jsz       string
		malformed bool
		trouble   string
	}{
		"a server without streams":     {`{"accounts":0,"streams":0}`, false, ""},
		"accounts without streams":     {`{"streams":0,"account_details":[{"name":"A","id":"A"}]}`, false, ""},
		"streams without details":      {`{"streams":2}`, true, "account_details"},
		"details that are no list":     {`{"streams":1,"account_details":{}}`, true, "/jsz"},
		"no storage":                   {`{"streams":1,"account_details":[{"name":"A","stream_detail":[{"name":"S","config":{},"state":{"messages":0}}]}]}`, true, "config.storage"},
		"storage that is no text":      {`{"streams":1,"account_details":[{"name":"A","stream_detail":[{"name":"S","config":{"storage":1},"state":{"messages":0}}]}]}`, true, "stream A/S"},
		"no count of messages":         {`{"streams":1,"account_details":[{"name":"A","stream_detail":[{"name":"S","config":{"storage":"memory"},"state":{}}]}]}`, true, "state.messages"},
		"JetStream not up yet":         {`{"disabled":true}`, false, "not enabled"},
		"a stream that was lost track": {`{"streams":2,"account_details":[{"name":"A","id":"A"}]}`, false, "counts 2 streams and lists 0"},
	} {
		a := answered(t, "nats-0", healthy, json.RawMessage(c.jsz))
		require.Equal(t, c.malformed, a.Malformed, name)
		require.Equal(t, c.trouble == "", a.Trouble == "", "%s: %s", name, a.Trouble)
		require.Contains(t, a.Trouble, c.trouble, name)
		require.True(t, c.malformed || a.Raw == "", name)
		v := Judge([]Answer{a})
		require.Equal(t, c.malformed, v.Malformed, name)
		if c.malformed {
			require.Equal(t, "N126", v.Troubles[0].Row, name)
			require.Equal(t, c.jsz, a.Raw, "what is not understood is kept: %s", name)
		}
	}
}

func TestAServerThatStillRecoversItsStreamsIsNotDrained(t *testing.T) {
	a := answered(t, "nats-0", func(w http.ResponseWriter) {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = w.Write([]byte(`{"status":"unavailable","error":"JetStream stream 'NVCF > M1' is not current"}`))
	}, json.RawMessage(`{"streams":0}`))
	d := JudgeDrained(Judge([]Answer{a}), 0)
	require.False(t, d.OK)
	require.Contains(t, d.Findings[0].Found, "M1' is not current")
}

func TestAServerThatAcceptsAndSaysNothingIsNotDrained(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	m := newMonitor(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	})
	defer m.close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	a := m.ask(ctx, pageSize)
	require.Contains(t, a.Trouble, "/varz: no answer after")
	require.False(t, a.Malformed, "that passes")
	require.False(t, JudgeDrained(Judge([]Answer{a}), 0).OK)
}

func TestRaisedReplicasAreAcceptedOnlyFromTheLeadersPointOfView(t *testing.T) {
	before := save(Place{}, Judge(recorded(t, "single")))
	record := func(name string) Record {
		for _, s := range before.Streams {
			if s.Name == name {
				return s.Record
			}
		}
		t.Fatal(name)
		return Record{}
	}
	judge := func(moment, name string) string {
		v := Judge(recorded(t, moment))
		s, ok := v.find(record(name))
		require.True(t, ok)
		return Settled(v, record(name), s)
	}
	for _, name := range []string{"F1", "M1", "M3"} {
		require.Empty(t, judge("raised", name), name)
	}
	require.Empty(t, judge("raised", "M2"), "nats-2 leads and sees both current; what a follower thinks of the other does not count")
	require.Equal(t, "it is configured for 1 replicas", judge("raised", "KEEP1"))
	require.Contains(t, judge("one-down", "M1"), "nats-0 did not answer")
	require.Contains(t, judge("two-down", "M1"), "no leader")

	// One server lags, is offline, no member yet, or has fewer messages.
	for found, change := range map[string]func(*Stream){
		"current false":   func(s *Stream) { s.Peers[0].Current = false },
		"lag 5":           func(s *Stream) { s.Peers[0].Lag = 5 },
		"is offline":      func(s *Stream) { s.Peers[0].Offline = true },
		"no member yet":   func(s *Stream) { s.Peers[0].Pending = true },
		"with 1 replicas": func(s *Stream) { s.Peers = s.Peers[:1] },
		"sequence 7":      func(s *Stream) { s.Copies[s.Peers[0].Name] = State{LastSeq: 7} },
		"does not list":   func(s *Stream) { delete(s.Copies, s.Peers[0].Name) },
	} {
		v := Judge(recorded(t, "raised"))
		s, _ := v.find(record("M1"))
		change(&s)
		require.Contains(t, Settled(v, record("M1"), s), found)
	}
}
