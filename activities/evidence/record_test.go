package evidence

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/testsuite"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/kube"
)

const patience = time.Minute

func wait(t *testing.T, store *artifact.Store, look func(n int) (found string, done bool)) (*Record, error) {
	t.Helper()
	r := Begin(t.Context(), store)
	defer r.End()
	n := 0
	err := r.Until(t.Context(), patience, time.Millisecond, func(context.Context) (Look, error) {
		n++
		found, done := look(n)
		return Look{Done: done, Found: found, Entries: 1, Seen: n}, nil
	})
	return r, err
}

func open(t *testing.T, dir string) *artifact.Store {
	t.Helper()
	store, err := artifact.Open(dir, nil)
	require.NoError(t, err)
	return store
}

func kept(t *testing.T, store *artifact.Store) int {
	t.Helper()
	refs, err := store.List(t.Context(), "")
	require.NoError(t, err)
	return len(refs)
}

func TestLooksThatDifferOnlyInTheirCountsAreKeptOnce(t *testing.T) {
	store := open(t, t.TempDir())
	r, err := wait(t, store, func(n int) (string, bool) {
		return fmt.Sprintf("bao-1: applied up to %d, read 127.0.0.1:%d->127.0.0.1:8200: reset", n, 40000+n), n == 50
	})
	require.NoError(t, err)
	require.Equal(t, 50, r.Trail.Looks)
	require.Equal(t, 2, kept(t, store), "the first and the last")
	require.Contains(t, r.Trail.Last.Name, "look-0050.json")

	store = open(t, t.TempDir())
	_, err = wait(t, store, func(n int) (string, bool) { return fmt.Sprintf("bao-%d is sealed", n), n == 5 })
	require.NoError(t, err)
	require.Equal(t, 5, kept(t, store), "another member, or version, is something else")
	require.NotEqual(t, gist("found 2.6.2"), gist("found 2.6.3"))
}

func TestASystemThatSwingsDoesNotFillTheStore(t *testing.T) {
	store := open(t, t.TempDir())
	r, err := wait(t, store, func(n int) (string, bool) { return []string{"sealed", "lagging"}[n%2], n == 3*maxKept })
	require.NoError(t, err)
	require.Equal(t, maxKept+1, kept(t, store), "the end is always kept")
	require.Contains(t, r.Trail.Last.Name, fmt.Sprintf("look-%04d", 3*maxKept))
}

func TestAStoreThatIsAwayWhileOneWaitsIsToldAndTheEndMustBeKept(t *testing.T) {
	dir := t.TempDir()
	store := open(t, dir)
	r := Begin(t.Context(), store)
	defer r.End()
	n := 0
	look := func(end int) func(context.Context) (Look, error) {
		return func(context.Context) (Look, error) {
			n++
			return Look{Done: n == end, Found: fmt.Sprintf("state-%d", n), Seen: n}, nil
		}
	}
	// A file where the folder was: nobody can write there.
	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.WriteFile(dir, nil, 0o600))
	told := ""
	err := r.Until(t.Context(), patience, time.Millisecond, func(ctx context.Context) (Look, error) {
		if n == 2 {
			told = r.beat.Last()
			require.NoError(t, os.Remove(dir))
			require.NoError(t, os.Mkdir(dir, 0o700))
		}
		return look(4)(ctx)
	})
	require.NoError(t, err)
	require.Contains(t, told, "state-2; evidence not kept")

	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.WriteFile(dir, nil, 0o600))
	require.Error(t, r.Until(t.Context(), patience, time.Millisecond, look(6)))
}

// TestWhatATryHasToldIsNotForgottenByTheNext: it may say that something was
// sent, and the try after it must know that too.
func TestWhatATryHasToldIsNotForgottenByTheNext(t *testing.T) {
	var suite testsuite.WorkflowTestSuite
	env := suite.NewTestActivityEnvironment()
	heard := make(chan string, 10)
	env.SetOnActivityHeartbeatListener(func(_ *activity.Info, details converter.EncodedValues) {
		var said string
		_ = details.Get(&said)
		heard <- said
	})
	env.SetHeartbeatDetails("sent to bao-0")
	env.RegisterActivityWithOptions(func(ctx context.Context) error {
		Begin(ctx, nil).End()
		return nil
	}, activity.RegisterOptions{Name: "act"})
	_, err := env.ExecuteActivity("act")
	require.NoError(t, err)
	require.Equal(t, "sent to bao-0", <-heard)
}

func TestWhatIsKeptIsTheServersAtOnceAndInEveryHeartbeat(t *testing.T) {
	var sent []any
	r := &Record{former: "sent to bao-0", beat: kube.StartBeat(time.Hour, nil)}
	r.tell = func(string) {}
	r.keep = func(found string) error { sent = r.details(found); return nil }
	require.Equal(t, []any{"sent to bao-0"}, r.details(""), "nothing was kept")
	r.Say("4 messages")
	require.NoError(t, r.Keep("requests"))
	require.Equal(t, []any{"4 messages", "requests"}, sent)
	require.Equal(t, []any{"none left", "requests"}, r.details("none left"))
	require.Equal(t, "requests", r.Kept())
}

func TestAMarkDoesNotWaitForTheNextHeartbeat(t *testing.T) {
	told := make(chan string, 10)
	tell := func(found string) { told <- found }
	kept := ""
	r := &Record{tell: tell, beat: kube.StartBeat(time.Hour, tell), keep: func(found string) error { kept = found; return nil }}
	defer r.End()
	require.Empty(t, <-told, "the first heartbeat")
	require.NoError(t, r.Mark("sent to bao-0"))
	require.Len(t, told, 1, "told when Mark returns")
	require.Equal(t, "sent to bao-0", <-told)
	require.Equal(t, "sent to bao-0", kept, "the server has it: the SDK's heartbeat may wait here")
	require.Equal(t, "sent to bao-0", r.beat.Last(), "and by each heartbeat after it")

	r.keep = func(string) error { return errors.New("the server is away") }
	require.ErrorContains(t, r.Mark("sent to bao-0"), "the server is away")
}
