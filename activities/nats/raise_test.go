package nats

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/kube"
)

// TestAStreamThatIsEmptiedBeforeItsRaise: its one copy is in the memory of a
// server that restarts between the list and the raise.
func TestAStreamThatIsEmptiedBeforeItsRaise(t *testing.T) {
	c := start(t)
	js := c.js("nats-nkeys")
	drained := c.stream(js, requests())
	c.publish(js, "requests", 3)
	consumer, err := drained.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "workers", AckPolicy: jetstream.AckExplicitPolicy})
	require.NoError(t, err)
	batch, err := consumer.Fetch(3)
	require.NoError(t, err)
	for m := range batch.Messages() {
		require.NoError(t, m.DoubleAck(t.Context()))
	}
	kept := c.stream(js, jetstream.StreamConfig{Name: "kept", Storage: jetstream.MemoryStorage})
	c.publish(js, "kept", 2)
	listed, err := c.list(nkey("NVCF", "nats-nkeys"))
	require.NoError(t, err)
	require.Len(t, listed.Raise, 2)
	require.EqualValues(t, 3, listed.Raise[1].State.LastSeq)
	require.Zero(t, listed.Raise[1].State.Messages)
	for _, s := range []jetstream.Stream{drained, kept} {
		holder := c.leader(s)
		c.down(holder)
		c.up(holder)
		c.healthy()
	}

	lost := c.raise(listed.Raise[0], 20*time.Second)
	require.False(t, lost.OK)
	require.False(t, lost.Changed)
	require.Contains(t, lost.Findings[0].Expected, "nothing lost of 2 messages")
	require.Contains(t, lost.Findings[0].Next, "Then retry: it is raised as it is")

	out := c.raise(listed.Raise[1], time.Minute)
	require.True(t, out.OK, "nothing was in it to lose: %v", out.Findings)
	require.Zero(t, out.Before.State.LastSeq)
	settled, err := c.acts.Settle(t.Context(), SettleRequest{Place: c.place, Streams: []Record{out.Before}, Limit: time.Minute})
	require.NoError(t, err)
	require.True(t, settled.OK, settled.Findings)
}

// TestARaiseThatIsCancelledTellsWhatItHasChanged: the run was aborted while the
// copies were waited for.
func TestARaiseThatIsCancelledTellsWhatItHasChanged(t *testing.T) {
	c := start(t)
	c.stream(c.js("nats-nkeys"), jetstream.StreamConfig{Name: "events"})
	listed, err := c.list(nkey("NVCF", "nats-nkeys"))
	require.NoError(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	c.acts.Dial = func(ctx context.Context, client *kube.Client, namespace, pod string, port int) (net.Conn, error) {
		conn, err := c.dial(ctx, client, namespace, pod, port)
		if port == 4222 && err == nil {
			return &onClose{conn, func() { cancel(temporal.NewCanceledError()) }}, nil // the update was sent
		}
		return conn, err
	}
	out, err := c.acts.Raise(ctx, RaiseRequest{Place: c.place, Logins: []Login{nkey("NVCF", "nats-nkeys")}, Stream: listed.Raise[0], Limit: time.Minute})
	require.NoError(t, err)
	require.False(t, out.OK)
	require.True(t, out.Changed)

	ctx, stop := context.WithCancelCause(t.Context())
	stop(errors.New("the worker stops"))
	_, err = c.acts.Raise(ctx, RaiseRequest{Place: c.place, Stream: listed.Raise[0], Limit: time.Minute})
	require.Error(t, err, "the next try goes on")
}

type onClose struct {
	net.Conn
	then func()
}

func (c *onClose) Close() error {
	defer c.then()
	return c.Conn.Close()
}
