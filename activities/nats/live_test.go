package nats

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/testsuite"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/secret"
)

func requests() jetstream.StreamConfig {
	return jetstream.StreamConfig{Name: "requests", Storage: jetstream.MemoryStorage, Retention: jetstream.WorkQueuePolicy, Description: "what functions are asked",
		Metadata: map[string]string{"team": "nvcf"}}
}

func TestMessagesThatNeverDrainAreNamedWithTheirStreamUntilTheyAreDone(t *testing.T) {
	c := start(t)
	js := c.js("nats-nkeys")

	none := c.drain(time.Millisecond)
	require.False(t, none.OK)
	require.Equal(t, 0, none.Seen)
	require.Contains(t, none.Findings[0].Object, "one replica")

	s := c.stream(js, requests())
	c.stream(js, jetstream.StreamConfig{Name: "kept", Storage: jetstream.FileStorage})
	c.publish(js, "requests", 3)
	c.publish(js, "kept", 1)
	consumer, err := s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "workers", AckPolicy: jetstream.AckExplicitPolicy})
	require.NoError(t, err)

	stuck := c.drain(time.Second)
	require.False(t, stuck.OK)
	require.Equal(t, 1, stuck.Seen, "a file stream is not asked to be empty")
	require.EqualValues(t, 3, stuck.Messages)
	require.Equal(t, "stream NVCF/requests", stuck.Findings[0].Object)
	require.Equal(t, "3 messages, 3 deliveries pending, 0 not acknowledged", stuck.Findings[0].Found)
	require.Greater(t, stuck.Evidence.Looks, 1)

	// The work is done while the activity waits.
	go func() {
		batch, err := consumer.Fetch(3)
		if err != nil {
			return
		}
		for m := range batch.Messages() {
			_ = m.Ack()
		}
	}()
	done := c.drain(30 * time.Second)
	require.True(t, done.OK, done.Findings)
	info, err := s.Info(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 3, info.State.LastSeq, "the consumer took them; nothing was purged")

	t.Run("every try keeps its own evidence", func(t *testing.T) {
		var suite testsuite.WorkflowTestSuite
		env := suite.NewTestActivityEnvironment()
		env.RegisterActivity(c.acts.Drain)
		var names []string
		for range 2 {
			v, err := env.ExecuteActivity(c.acts.Drain, DrainRequest{Place: c.place, Least: 1})
			require.NoError(t, err)
			var out DrainResult
			require.NoError(t, v.Get(&out))
			var text bytes.Buffer
			_, err = c.acts.Artifacts.Get(t.Context(), out.Evidence.Last.URL, nil, &text)
			require.NoError(t, err)
			require.Contains(t, text.String(), `"num_replicas": 1`)
			require.Equal(t, members, out.Evidence.Last.Entries)
			names = append(names, out.Evidence.Last.Name)
		}
		require.NotEqual(t, names[0], names[1])
	})

	t.Run("pages are put together", func(t *testing.T) {
		c.stream(c.js("other"), jetstream.StreamConfig{Name: "requests", Storage: jetstream.MemoryStorage})
		for i := range members {
			m := newMonitor(func(ctx context.Context) (net.Conn, error) {
				return c.dial(ctx, nil, c.place.Namespace, fmt.Sprintf("nats-%d", i), 8222)
			})
			whole, paged := m.ask(t.Context(), pageSize), m.ask(t.Context(), 1)
			m.close()
			require.Empty(t, paged.Trouble)
			require.ElementsMatch(t, whole.Streams, paged.Streams)
		}
		require.Equal(t, 2, c.drain(10*time.Second).Seen, "one in each account")
	})

	t.Run("a server nobody reaches is not drained", func(t *testing.T) {
		c.cutOff("nats-1", true)
		defer c.cutOff("nats-1", false)
		out := c.drain(time.Millisecond)
		require.False(t, out.OK)
		require.Equal(t, "N125", out.Findings[0].Row)
		require.Equal(t, "NATS server nats-1", out.Findings[0].Object)
		require.Contains(t, out.Findings[0].Found, "connection refused")
	})

	t.Run("a pod that is gone is not drained", func(t *testing.T) {
		pods := c.client.Typed.CoreV1().Pods(c.place.Namespace)
		pod, err := pods.Get(t.Context(), "nats-2", metav1.GetOptions{})
		require.NoError(t, err)
		now := int64(0)
		require.NoError(t, pods.Delete(t.Context(), "nats-2", metav1.DeleteOptions{GracePeriodSeconds: &now}))
		out := c.drain(time.Millisecond)
		require.False(t, out.OK)
		require.Contains(t, out.Findings[0].Found, "there is no such pod")
		c.pod(2, pod.Labels, pod.Spec)
	})

	t.Run("a stream that only a dead server held is not drained", func(t *testing.T) {
		dead := c.leader(s)
		c.down(dead)
		out := c.drain(500 * time.Millisecond)
		require.False(t, out.OK)
		require.Equal(t, fmt.Sprintf("NATS server nats-%d", dead), out.Findings[0].Object)
		require.Contains(t, out.Findings[0].Why, "unreachable is not drained")
	})
}

func nkey(account, name string) Login {
	return Login{Account: account, NKey: &secret.Reference{Secret: name, Key: "user.key"}}
}

func (c *cluster) list(logins ...Login) (ListResult, error) {
	return c.acts.List(c.t.Context(), ListRequest{Place: c.place, Logins: logins, Limit: 20 * time.Second})
}

func (c *cluster) raise(s Record, limit time.Duration) RaiseResult {
	c.t.Helper()
	var out RaiseResult
	require.Eventually(c.t, func() bool { // what Temporal does with a transient error
		var err error
		out, err = c.acts.Raise(c.t.Context(), RaiseRequest{Place: c.place, Logins: []Login{nkey("NVCF", "nats-nkeys"), nkey("OTHER", "other")}, Stream: s, Limit: limit})
		_, class, _ := finding.Of(err)
		require.True(c.t, err == nil || class == finding.Retry, "%v", err)
		return err == nil
	}, time.Minute, 100*time.Millisecond)
	return out
}

func TestStreamsOfEveryAccountAreRaisedWhileServicesPublish(t *testing.T) {
	c := start(t)
	js, other := c.js("nats-nkeys"), c.js("other")
	s := c.stream(js, requests())
	c.publish(js, "requests", 5)
	// The same name in another account.
	c.stream(other, jetstream.StreamConfig{Name: "requests", Storage: jetstream.FileStorage})
	c.publish(other, "requests", 2)

	_, err := c.list(nkey("NVCF", "nats-nkeys"))
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class)
	require.Equal(t, "stream OTHER/requests: expected a login into account OTHER, found none in the plan", f.Object+": expected "+f.Expected+", found "+f.Found)

	_, err = c.list(nkey("NVCF", "nats-nkeys"), nkey("OTHER", "nats-nkeys"))
	require.ErrorContains(t, err, "the login leads into another account", "what stands behind a login is proven, not believed")

	_, err = c.list(nkey("NVCF", "absent"), nkey("OTHER", "other"))
	require.ErrorContains(t, err, "absent")
	_, err = c.list(Login{Account: "NVCF", NKey: &secret.Reference{Secret: "nats-nkeys", Key: "user.pub"}}, nkey("OTHER", "other"))
	require.ErrorContains(t, err, "an NKey seed")

	listed, err := c.list(nkey("NVCF", "nats-nkeys"), nkey("OTHER", "other"))
	require.NoError(t, err)
	require.Empty(t, listed.Findings)
	require.Len(t, listed.Raise, 2)
	left, err := c.acts.List(t.Context(), ListRequest{Place: c.place, Logins: []Login{nkey("NVCF", "nats-nkeys")}, Leave: []string{"OTHER/requests"}, Limit: time.Second})
	require.NoError(t, err)
	require.Len(t, left.Raise, 1)
	require.Equal(t, 1, left.Left)
	require.Empty(t, left.Unknown)
	left, err = c.acts.List(t.Context(), ListRequest{Place: c.place, Logins: []Login{nkey("NVCF", "nats-nkeys"), nkey("OTHER", "other")}, Leave: []string{"OTHER/typo"}, Limit: time.Second})
	require.NoError(t, err)
	require.Equal(t, "N189", left.Unknown[0].Row, "otherwise the stream that is meant would be raised")
	require.Contains(t, left.Unknown[0].Object, "OTHER/typo")

	_, err = c.list(nkey("NVCF", "plain"), nkey("OTHER", "other"))
	f, class, ok = finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class, "an account without JetStream gets none by itself")
	require.Contains(t, f.Next, "without JetStream")
	require.Equal(t, "N190", f.Row)

	sent := c.heard("other")

	lost := c.place
	lost.Release, lost.Holder = "nats", "a run that no Lease names"
	_, err = c.acts.Raise(t.Context(), RaiseRequest{Place: lost, Logins: []Login{nkey("NVCF", "nats-nkeys"), nkey("OTHER", "other")}, Stream: listed.Raise[0], Limit: time.Minute})
	require.ErrorContains(t, err, "Lease")
	still, err := c.list(nkey("NVCF", "nats-nkeys"), nkey("OTHER", "other"))
	require.NoError(t, err)
	require.Equal(t, listed.Raise, still.Raise, "nothing was changed")

	_, err = c.acts.Raise(t.Context(), RaiseRequest{Place: c.place, Logins: []Login{nkey("NVCF", "reader")}, Stream: listed.Raise[0], Limit: time.Minute})
	_, class, ok = finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class, err)
	require.ErrorContains(t, err, "STREAM.UPDATE.requests")

	before, err := s.Info(t.Context())
	require.NoError(t, err)
	for _, r := range listed.Raise {
		c.publish(js, "requests", 1)
		out := c.raise(r, time.Minute)
		require.True(t, out.OK, out.Findings)
		require.True(t, out.Changed)
	}
	again := c.raise(listed.Raise[0], time.Minute)
	require.True(t, again.OK, "twice is harmless")
	require.True(t, again.Changed, "it has more than before the run, whichever try has sent it")

	settled, err := c.acts.Settle(t.Context(), SettleRequest{Place: c.place, Streams: listed.Raise, Limit: time.Minute})
	require.NoError(t, err)
	require.True(t, settled.OK, settled.Findings)

	after, err := s.Info(t.Context())
	require.NoError(t, err)
	require.Equal(t, 3, after.Config.Replicas)
	require.EqualValues(t, 7, after.State.Msgs)
	want := before.Config
	want.Replicas = 3
	require.Equal(t, want.Description, after.Config.Description)
	require.Equal(t, "nvcf", after.Config.Metadata["team"])
	wantJSON, err := json.Marshal(want)
	require.NoError(t, err)
	gotJSON, err := json.Marshal(after.Config)
	require.NoError(t, err)
	changed, err := drift(wantJSON, gotJSON)
	require.NoError(t, err)
	require.Empty(t, changed, "one number was changed")

	listed, err = c.list()
	require.NoError(t, err)
	require.Empty(t, listed.Raise)
	require.Len(t, listed.Already, 2)
	require.Equal(t, []string{"$JS.API.STREAM.INFO.requests", "$JS.API.STREAM.UPDATE.requests"}, sent(), "nothing else is ever asked for: no purge, no deletion")
}

func TestAServerThatIsDownHoldsTheRaiseUpAndTheRaiseGoesOnWhenItIsBack(t *testing.T) {
	c := start(t)
	js := c.js("nats-nkeys")
	s := c.stream(js, requests())
	c.publish(js, "requests", 5)
	listed, err := c.list(nkey("NVCF", "nats-nkeys"))
	require.NoError(t, err)
	record := listed.Raise[0]
	dead := (c.leader(s) + 1) % members

	c.down(dead)
	out := c.raise(record, time.Second)
	require.False(t, out.OK)
	require.False(t, out.Changed, "nothing is raised onto a cluster that is not whole")
	require.Contains(t, out.Findings[0].Object, fmt.Sprintf("nats-%d", dead))
	config, err := s.Info(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, config.Config.Replicas)

	// It goes down after the update was accepted: the reply looked like success.
	want := config.Config
	want.Replicas = 3
	_, err = js.UpdateStream(t.Context(), want)
	require.NoError(t, err)
	out = c.raise(record, time.Second)
	require.False(t, out.OK)
	settled, err := c.acts.Settle(t.Context(), SettleRequest{Place: c.place, Streams: listed.Raise, Limit: time.Second})
	require.NoError(t, err)
	require.False(t, settled.OK)

	c.up(dead)
	out = c.raise(record, time.Minute)
	require.True(t, out.OK, out.Findings)
	require.True(t, out.Changed, "an earlier try may have sent it")
	record.Replicas = 3
	require.False(t, c.raise(record, time.Minute).Changed, "it had three before")

	// A replica flaps while its calm is waited for: the wait begins anew.
	back := make(chan time.Time, 1)
	c.acts.Stable = 4 * time.Second
	time.AfterFunc(time.Second, func() {
		c.down(dead)
		back <- time.Now()
		c.up(dead)
	})
	settled, err = c.acts.Settle(t.Context(), SettleRequest{Place: c.place, Streams: listed.Raise, Limit: time.Minute})
	require.NoError(t, err)
	require.True(t, settled.OK, settled.Findings)
	require.Greater(t, time.Since(<-back), 4*time.Second)
}

func TestARollIsCheckedAgainstWhatWasBefore(t *testing.T) {
	c := start(t)
	js := c.js("nats-nkeys")
	queue := c.stream(js, requests())
	kept := c.stream(js, jetstream.StreamConfig{Name: "events", Storage: jetstream.MemoryStorage, Replicas: 3})
	c.publish(js, "events", 20)
	c.publish(js, "requests", 2)

	before := DrainRequest{Place: c.place, Limit: time.Second}
	saved, err := c.acts.Save(t.Context(), before)
	require.NoError(t, err)
	require.False(t, saved.OK)
	require.Empty(t, saved.List.URL, "there is no list of a state that must not be rolled")
	consumer, err := queue.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "workers", AckPolicy: jetstream.AckExplicitPolicy})
	require.NoError(t, err)
	batch, err := consumer.Fetch(2)
	require.NoError(t, err)
	for m := range batch.Messages() {
		require.NoError(t, m.DoubleAck(t.Context()))
	}
	before.Limit = 20 * time.Second
	saved, err = c.acts.Save(t.Context(), before)
	require.NoError(t, err)
	require.True(t, saved.OK, saved.Findings)
	require.Equal(t, 2, saved.Streams)
	compare := CompareRequest{Place: c.place, List: saved.List.URL, Limit: 30 * time.Second}

	// A roll that waits for the full health of each server.
	for i := range members {
		c.down(i)
		c.up(i)
		c.healthy()
	}
	out, err := c.acts.Compare(t.Context(), compare)
	require.NoError(t, err)
	require.True(t, out.OK, out.Findings)
	require.Equal(t, []string{"NVCF/requests"}, out.Emptied, "one copy in memory: its sequence began anew")

	_, err = c.acts.Compare(t.Context(), CompareRequest{Place: Place{Target: c.place.Target, Namespace: "elsewhere"}, List: saved.List.URL})
	require.ErrorContains(t, err, "expected the streams of elsewhere")
	notSaved, err := c.acts.Artifacts.Put(t.Context(), "note.txt", artifact.Evidence, 1, func(w io.Writer) error { _, err := w.Write([]byte("no list")); return err })
	require.NoError(t, err)
	for _, url := range []string{"s3://elsewhere/streams.json", notSaved.URL} {
		_, err = c.acts.Compare(t.Context(), CompareRequest{Place: c.place, List: url})
		f, class, ok := finding.Of(err)
		require.True(t, ok, err)
		require.Equal(t, finding.Stop, class, "another list is never found by trying again")
		require.Contains(t, f.Next, "the URL that the receipt of the phase before names")
	}

	// A stream is gone, and everything is healthy.
	require.NoError(t, js.DeleteStream(t.Context(), "requests"))
	compare.Limit = time.Second
	out, err = c.acts.Compare(t.Context(), compare)
	require.NoError(t, err)
	require.False(t, out.OK)
	require.Equal(t, "stream NVCF/requests", out.Findings[0].Object)
	require.Equal(t, "no server lists it", out.Findings[0].Found)
	c.stream(js, requests())

	// A roll that does not wait: all copies in memory are away at the same time.
	for i := range members {
		c.down(i)
	}
	for i := range members {
		c.up(i)
	}
	c.healthy()
	c.leader(kept)
	compare.Limit = 20 * time.Second
	out, err = c.acts.Compare(t.Context(), compare)
	require.NoError(t, err)
	require.False(t, out.OK)
	var found []string
	for _, f := range out.Findings {
		found = append(found, f.Object)
	}
	require.Contains(t, found, "stream NVCF/events", "the replicas read current and hold nothing")
}
