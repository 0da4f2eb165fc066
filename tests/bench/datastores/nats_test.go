package datastores

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	natsSystem = "nats-system"
	// natsMessages lie in the stream that is raised.
	natsMessages = 500
	// natsReplicas are those of every stream at the end.
	natsReplicas = 3
	// natsConfirmed is when a message without a reply counts as refused: an
	// idle server replies in a few milliseconds.
	natsConfirmed = 250 * time.Millisecond
	// natsTurn is how often the client sends one.
	natsTurn = 50 * time.Millisecond
	// natsPatience is for what the servers do by themselves.
	natsPatience = 3 * time.Minute
)

// natsStreams are as the control plane makes them before there is a cluster:
// a queue in memory that must be empty, and one that holds messages.
var natsStreams = []jetstream.StreamConfig{
	{Name: "requests", Subjects: []string{"requests.>"}, Storage: jetstream.MemoryStorage, Retention: jetstream.WorkQueuePolicy, Replicas: 1},
	{Name: "events", Subjects: []string{"events.>"}, Replicas: 1},
}

// BenchmarkNATS checks that the queues are drained and raises the streams, by
// the scripts and by Refit in turn.
func BenchmarkNATS(b *testing.B) {
	times := repetitions(b)
	for b.Loop() {
		n := newNATS(up(b, "nats"))
		var script, refit, drainScript, drainRefit []cost
		for i := range times {
			script = append(script, n.measured(func(sightings) (wall, gates time.Duration) {
				_, drained, err := n.guide("nats-drain.sh")
				require.NoError(b, err)
				drainScript = append(drainScript, cost{wall: drained.took()})
				_, at, err := n.guide("nats-replicas.sh")
				require.NoError(b, err)
				return at.took(), 0
			}))
			refit = append(refit, n.measured(func(raised sightings) (wall, gates time.Duration) {
				run, drained := n.refit("examples/nats-drain.yaml", fmt.Sprintf("drain-%d", i+1))
				drainRefit = append(drainRefit, cost{wall: drained.took(), gates: unguided(n.acts(run, drained))})
				run, at := n.refit("examples/nats-replicas.yaml", fmt.Sprintf("replicas-%d", i+1))
				return at.took(), natsGates(b, n.acts(run, at), raised)
			}))
			logf("NATS %d of %d: script %+v, Refit %+v", i+1, times, script[i], refit[i])
		}
		sheet{"nats-drain", times}.walls(median(drainScript), median(drainRefit))
		out := sheet{"nats-replicas", times}
		out.walls(median(script), median(refit))
		out.refused("writes", natsTurn, median(script).writes, median(refit).writes)
		out.rows("at-end", median(script).left, median(refit).left)
	}
}

// sightings are when a bystander first saw a stream configured for three
// replicas: that is what the guide reads after an edit, and all it reads.
type sightings map[string]*sighting

func newSightings() sightings {
	s := sightings{}
	for _, config := range natsStreams {
		s[config.Name] = &sighting{}
	}
	return s
}

func (s sightings) look(q *queue) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, config := range natsStreams {
		stream, err := q.js.Stream(ctx, config.Name)
		if err != nil || stream.CachedInfo().Config.Replicas != natsReplicas {
			continue
		}
		s[config.Name].seen(time.Now())
	}
}

// natsGates is how long a run has gone on looking at streams when the guide's
// own check had been passed: from there to the end of each raise, and the proof
// that the copies stay; and what no guide has.
func natsGates(b testing.TB, acts []act, raised sightings) time.Duration {
	b.Helper()
	total := unguided(acts)
	found := 0
	for _, a := range acts {
		switch a.kind {
		case "nats.Settle":
			total += a.took()
		case "nats.Raise":
			var in struct {
				Stream struct {
					Name string `json:"name"`
				} `json:"stream"`
			}
			require.NoError(b, json.Unmarshal(a.input, &in))
			at := raised[in.Stream.Name].time()
			require.False(b, at.Before(a.from), "%s was seen raised at %s, before its raise", in.Stream.Name, at)
			total += max(0, a.to.Sub(at)) // a bystander on a busy machine may see it only afterwards
			found++
		}
	}
	require.Equal(b, len(natsStreams), found, "streams that the run has raised")
	return total
}

func TestOnlyWhatTheGuideLacksIsAGateOfNATS(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	one := func(kind, input string, from, to int) act {
		return act{span: span{at.Add(time.Duration(from) * time.Second), at.Add(time.Duration(to) * time.Second)}, kind: kind, input: json.RawMessage(input)}
	}
	got := natsGates(t, []act{
		one("nats.List", "{}", 0, 5), one("nats.Raise", `{"stream":{"name":"events"}}`, 5, 10), one("nats.Raise", `{"stream":{"name":"requests"}}`, 10, 20),
		one("nats.Settle", "{}", 20, 35), one("lease.Release", "{}", 35, 40),
	}, sightings{"events": {at: at.Add(6 * time.Second)}, "requests": {at: at.Add(21 * time.Second)}})
	require.Equal(t, (4+0+15+5)*time.Second, got, "the second one was seen after its raise had ended")
}

// queue is the world with NATS and a client of it.
type queue struct {
	*world
	js jetstream.JetStream
}

// natsPod finds the pod that has the name now.
type natsPod struct{ w *world }

func (d natsPod) Dial(_, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	name, _, _ := strings.Cut(address, ":")
	return d.w.DialPod(ctx, natsSystem, name, 4222)
}

func newNATS(w *world) *queue {
	w.b.Helper()
	self, err := os.Executable()
	require.NoError(w.b, err)
	w.Setenv(toolVariable, self)
	pair, err := nkeys.FromSeed([]byte(w.secret(natsSystem, "nats-nkeys", "user.key")))
	require.NoError(w.b, err)
	conn, err := nats.Connect("nats://nats-0:4222,nats://nats-1:4222,nats://nats-2:4222", nats.Nkey(w.secret(natsSystem, "nats-nkeys", "user.pub"), pair.Sign),
		nats.SetCustomDialer(natsPod{w}), nats.SkipHostLookup(), nats.IgnoreDiscoveredServers(),
		nats.MaxReconnects(-1), nats.ReconnectWait(200*time.Millisecond), nats.RetryOnFailedConnect(true), nats.Timeout(10*time.Second))
	require.NoError(w.b, err)
	w.b.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	require.NoError(w.b, err)
	return &queue{world: w, js: js}
}

// try does something of the client's until it is accepted.
func (q *queue) try(what string, do func(ctx context.Context) error) {
	q.b.Helper()
	var last error
	err := wait.PollUntilContextTimeout(context.Background(), 200*time.Millisecond, natsPatience, true, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		last = do(ctx)
		return last == nil, nil
	})
	require.NoError(q.b, err, "%s: %v", what, last)
}

// measured makes the streams anew and does the work while a client publishes
// and a bystander looks.
func (q *queue) measured(work func(sightings) (wall, gates time.Duration)) (c cost) {
	q.b.Helper()
	for _, config := range natsStreams {
		q.try("make stream "+config.Name, func(ctx context.Context) error {
			if err := q.js.DeleteStream(ctx, config.Name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
				return err
			}
			_, err := q.js.CreateStream(ctx, config)
			return err
		})
	}
	publish := func(ctx context.Context, id string) error {
		// The client's own second try would hide a refusal.
		_, err := q.js.Publish(ctx, "events.x", []byte("an event"), jetstream.WithMsgID(id), jetstream.WithRetryAttempts(0))
		return err
	}
	confirmed := map[string]bool{}
	for i := range natsMessages {
		id := fmt.Sprintf("first-%d", i)
		q.try("publish", func(ctx context.Context) error { return publish(ctx, id) })
		confirmed[id] = true
	}
	var writes meter
	raised := newSightings()
	ends := []func(){
		always(natsTurn, func(n int) {
			ctx, cancel := context.WithTimeout(context.Background(), natsConfirmed)
			defer cancel()
			began, id := time.Now(), fmt.Sprintf("then-%d", n)
			err := publish(ctx, id)
			writes.tried(began, time.Now(), err)
			if err == nil {
				confirmed[id] = true
			}
		}),
		always(20*time.Millisecond, func(int) { raised.look(q) }),
	}
	c.wall, c.gates = work(raised)
	for _, end := range ends {
		end()
	}
	require.Positive(q.b, writes.tries-writes.refusals, "the client has written: %s", writes.first)
	c.writes, c.left = writes.refused(time.Now()), q.missing(confirmed)
	return c
}

// missing counts the confirmed messages that the stream does not hold. Messages
// that it took without a reply in time are beside them: a sum would hide what
// is lost.
func (q *queue) missing(confirmed map[string]bool) int {
	q.b.Helper()
	held := map[string]bool{}
	q.try("read the messages", func(ctx context.Context) error {
		stream, err := q.js.Stream(ctx, "events")
		if err != nil {
			return err
		}
		state := stream.CachedInfo().State
		for seq := state.FirstSeq; seq <= state.LastSeq; seq++ {
			message, err := stream.GetMsg(ctx, seq)
			if errors.Is(err, jetstream.ErrMsgNotFound) {
				continue
			}
			if err != nil {
				return err
			}
			held[message.Header.Get(jetstream.MsgIDHeader)] = true
		}
		return nil
	})
	missing := 0
	for id := range confirmed {
		if !held[id] {
			missing++
		}
	}
	return missing
}
