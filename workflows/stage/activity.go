package stage

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
)

const (
	// startWithin is how long an activity may lie in its queue before the
	// missing worker is named.
	startWithin = 2 * time.Minute
	// lookAgain is how long a later try on a cluster queue lies there. Each
	// try costs about six events, so an hour without a worker about 80.
	lookAgain = 5 * time.Minute
)

// Activity runs an activity on a queue and waits for it; result takes its
// result, or is nil. The other activity options come from ctx.
//
// Nobody polls the queue: on `gpu/...` the activity ends after two minutes in
// a Parking that names the queue. On any other the run keeps waiting, and
// status says for which queue and since when. On abort within a section the run
// waits for the try that lies in the queue, then stops: nothing is being done.
func (s *Scope) Activity(ctx workflow.Context, queue string, result any, activity any, args ...any) error {
	r := s.run
	served := func() {}
	defer func() { served() }()
	waiting := false
	err := Queued(ctx, queue, result, func(since time.Time) error {
		if r.stopping != "" || r.aborted {
			return ErrAborted
		}
		if strings.HasPrefix(queue, "gpu/") {
			return nobodyPolls(queue, startWithin)
		}
		s.unanswered++
		if !waiting {
			served, waiting = s.Unserved(queue, since), true
		}
		return nil
	}, func() {
		served()
		served, waiting = func() {}, false
	}, activity, args...)
	return s.stopped(ctx, err)
}

// Unanswered counts how often an activity of the stage was scheduled again. The
// one before may have begun: its worker died, and no other took the retry.
func (s *Scope) Unanswered() int { return s.unanswered }

// Unserved has status say that no worker polls the queue, until served is
// called.
func (s *Scope) Unserved(queue string, since time.Time) (served func()) {
	r, w := s.run, &wait{row: s.row}
	w.Kind, w.Stage, w.Since = protocol.WaitQueue, r.rows[s.row].Name, since
	w.Found = fmt.Sprintf("no worker polls the task queue %s", queue)
	w.Why = "nothing can be observed or changed there until one does"
	w.Helps = "start the worker that serves this queue; the run goes on by itself"
	w.Answers = r.answers()
	r.waits = append(r.waits, w)
	r.changed()
	return func() { r.drop(w) }
}

// Queued runs an activity on a queue and waits for it, however long the queue
// has no worker: missing is called each time that a try was not taken up, with
// the time since when none is, and ends the waiting by an error; found is called
// when a later try was taken up.
//
// A workflow cannot see that an activity has started, so the activity is
// scheduled with a limit on its time in the queue and scheduled again when that
// has passed: it had not started then, or its worker died and no other took the
// retry; an activity may run twice (design, contract 5). A try that outlives its
// limit has started.
func Queued(ctx workflow.Context, queue string, result any, missing func(since time.Time) error, found func(), activity any, args ...any) error {
	limit := startWithin
	var since time.Time
	for {
		o := workflow.GetActivityOptions(ctx)
		o.TaskQueue, o.ScheduleToStartTimeout = queue, limit
		future := workflow.ExecuteActivity(workflow.WithActivityOptions(ctx, o), activity, args...)
		if !since.IsZero() {
			started, err := startedAfter(ctx, future, limit)
			if err != nil {
				return err
			}
			if started {
				found()
				since = time.Time{}
			}
		}
		err := future.Get(ctx, result)
		if err == nil || !neverStarted(err) {
			return err
		}
		if since.IsZero() {
			since = workflow.Now(ctx).Add(-startWithin)
		}
		if err := missing(since); err != nil {
			return err
		}
		limit = lookAgain
	}
}

// startedAfter waits until the future is ready or has outlived its time in
// the queue; a second of slack lets the server's timeout come first.
func startedAfter(ctx workflow.Context, future workflow.Future, limit time.Duration) (bool, error) {
	ready, err := workflow.AwaitWithTimeout(ctx, limit+time.Second, future.IsReady)
	return !ready, err
}

func (r *Run) drop(w *wait) {
	r.waits = slices.DeleteFunc(r.waits, func(o *wait) bool { return o == w })
	r.changed()
}

// stopped names the reason when abort has cancelled the activity.
func (s *Scope) stopped(ctx workflow.Context, err error) error {
	if temporal.IsCanceledError(err) && (s.run.stopping != "" || s.run.aborted) && !inSection(ctx) {
		return ErrAborted
	}
	return err
}

func neverStarted(err error) bool {
	var t *temporal.TimeoutError
	return errors.As(err, &t) && t.TimeoutType() == enumspb.TIMEOUT_TYPE_SCHEDULE_TO_START
}
