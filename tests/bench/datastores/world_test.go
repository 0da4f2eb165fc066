// Package datastores measures Refit's runs on datastores beside scripts that
// do what the guide says, in one run on one sandbox: how long each takes, how
// much of Refit's time goes into gates that the guide does not have, and what
// the datastores' clients lose meanwhile. It runs the binaries, as the tests
// do, and prints one line per figure; a missed goal is a figure too and fails
// nothing. It must not import the product beyond the protocol's structs.
package datastores

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/history/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/tests/sandbox"
	"github.com/refit-run/refit/workflows/protocol"
)

// runLimit is for one way on a machine that is not idle.
const runLimit = 15 * time.Minute

// world is a sandbox with one datastore and a worker.
type world struct {
	*sandbox.Sandbox
	b *testing.B
}

func up(b *testing.B, store string) *world {
	b.Helper()
	w := &world{Sandbox: sandbox.Up(b, "--no-tensorfusion", "--pools", "shared=1", "--datastores="+store), b: b}
	w.StartWorker()
	logf("%s is up", store)
	return w
}

// logf tells at once how far it is: a run takes minutes.
func logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s  %s\n", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}

// span is from when to when something took place.
type span struct{ from, to time.Time }

func (s span) took() time.Duration { return s.to.Sub(s.from) }

// guide runs a script of the folder guide to its end.
func (w *world) guide(script string, args ...string) (out string, at span, err error) {
	w.b.Helper()
	for _, command := range []string{"bash", "kubectl", "curl", "jq"} {
		_, err := exec.LookPath(command)
		require.NoError(w.b, err, "the guide's commands need %s: install it", command)
	}
	at.from = time.Now()
	out, code := w.Run("bash", append([]string{filepath.Join("tests", "bench", "datastores", "guide", script)}, args...)...)
	at.to = time.Now()
	if code != 0 {
		err = fmt.Errorf("%s: exit %d\n%s", script, code, out)
	}
	return out, at, err
}

// refit runs a plan to its end, under an ID of its own; the run must be done.
func (w *world) refit(plan, id string) (run string, at span) {
	w.b.Helper()
	at.from = time.Now()
	run = w.Start(plan, nil, "--id", id)
	ctx, cancel := context.WithTimeout(context.Background(), runLimit)
	defer cancel()
	var r protocol.Receipt
	if err := w.Temporal.GetWorkflow(ctx, run, "").Get(ctx, &r); err != nil {
		s, _ := w.Status(run)
		w.b.Fatalf("%s: %v; it waits for %+v", run, err, s.WaitingFor)
	}
	at.to = time.Now()
	require.Equal(w.b, protocol.OutcomeDone, r.Outcome, run)
	return run, at
}

// act is one activity of a run.
type act struct {
	span
	kind  string
	input json.RawMessage
}

// acts are the activities of a run, from being scheduled to their end. They are
// told too: a figure that is missed is looked for there.
func (w *world) acts(run string, whole span) []act {
	w.b.Helper()
	var all []act
	at := map[int64]int{}
	ended := func(scheduled int64, e *history.HistoryEvent) {
		if i, ok := at[scheduled]; ok {
			all[i].to = e.GetEventTime().AsTime()
		}
	}
	events := w.Temporal.GetWorkflowHistory(context.Background(), run, "", false, enums.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT)
	for events.HasNext() {
		e, err := events.Next()
		require.NoError(w.b, err)
		if a := e.GetActivityTaskScheduledEventAttributes(); a != nil {
			next := act{span: span{from: e.GetEventTime().AsTime()}, kind: a.GetActivityType().GetName()}
			if in := a.GetInput().GetPayloads(); len(in) > 0 {
				next.input = in[0].GetData()
			}
			at[e.GetEventId()] = len(all)
			all = append(all, next)
		}
		if a := e.GetActivityTaskCompletedEventAttributes(); a != nil {
			ended(a.GetScheduledEventId(), e)
		}
	}
	all = slices.DeleteFunc(all, func(a act) bool { return a.to.IsZero() })
	for _, a := range all {
		logf("%5.2f s at %6.2f s %s", a.took().Seconds(), a.from.Sub(whole.from).Seconds(), a.kind)
	}
	logf("ended at %6.2f s: %s", whole.took().Seconds(), run)
	return all
}

// secret is one value of a Secret.
func (w *world) secret(namespace, name, key string) string {
	w.b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := w.Kube.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	require.NoError(w.b, err)
	return string(s.Data[key])
}

func names(n int, format string) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprintf(format, i))
	}
	return all
}
