package datastores

import (
	"context"
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
			script = append(script, n.measured(func() (wall, gates time.Duration) {
				_, drained, err := n.guide("nats-drain.sh")
				require.NoError(b, err)
				drainScript = append(drainScript, cost{wall: drained.took()})
				_, at, err := n.guide("nats-replicas.sh")
				require.NoError(b, err)
				return at.took(), 0
			}))
			refit = append(refit, n.measured(func() (wall, gates time.Duration) {
				_, drained := n.refit("examples/nats-drain.yaml", fmt.Sprintf("drain-%d", i+1))
				drainRefit = append(drainRefit, cost{wall: drained.took()})
				run, at := n.refit("examples/nats-replicas.yaml", fmt.Sprintf("replicas-%d", i+1))
				for _, a := range n.acts(run) {
					if a.kind == "nats.Settle" { // the guide reads the configuration and no more
						gates += a.took()
					}
				}
				return at.took(), gates
			}))
			logf("NATS %d of %d: script %+v, Refit %+v", i+1, times, script[i], refit[i])
		}
		sheet{"nats-drain", times}.walls(median(drainScript), median(drainRefit))
		out := sheet{"nats-replicas", times}
		out.walls(median(script), median(refit))
		out.refused("writes", median(script).writes, median(refit).writes)
		out.rows("at-end", median(script).left, median(refit).left)
	}
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

// measured makes the streams anew and does the work while a client publishes.
func (q *queue) measured(work func() (wall, gates time.Duration)) (c cost) {
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
		_, err := q.js.Publish(ctx, "events.x", []byte("an event"), jetstream.WithMsgID(id))
		return err
	}
	for i := range natsMessages {
		q.try("publish", func(ctx context.Context) error { return publish(ctx, fmt.Sprintf("first-%d", i)) })
	}
	accepted := natsMessages
	var writes meter
	end := always(50*time.Millisecond, func(n int) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		began := time.Now()
		err := publish(ctx, fmt.Sprintf("then-%d", n))
		writes.tried(began, time.Now(), err)
		if err == nil {
			accepted++
		}
	})
	c.wall, c.gates = work()
	end()
	c.writes = writes.refused(time.Now())
	q.try("count", func(ctx context.Context) error {
		stream, err := q.js.Stream(ctx, "events")
		if err != nil {
			return err
		}
		c.left = max(0, accepted-int(stream.CachedInfo().State.Msgs))
		return nil
	})
	return c
}
