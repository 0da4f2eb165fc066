package nats

import (
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/finding"
)

// A server that has just started takes clients before its JetStream answers.
func TestAServerWhoseJetStreamDoesNotAnswerYetIsAskedAgain(t *testing.T) {
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true})
	require.NoError(t, err)
	s.Start()
	defer s.Shutdown()
	require.True(t, s.ReadyForConnections(10*time.Second))
	conn, err := nats.Connect(s.ClientURL())
	require.NoError(t, err)
	defer conn.Close()
	err = call(t.Context(), conn, "STREAM.INFO.orders", nil, new(streamInfo))
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Retry, class, "a person is asked only once that has not passed by itself")
	require.Contains(t, f.Found, "nobody answers")
	require.Contains(t, f.Next, "without JetStream")
}
