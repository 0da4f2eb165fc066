package rollout

import (
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

// attendedLimit bounds one attempt of an activity that watches a whole roll;
// what must end sooner has a stall limit of its own, and the heartbeat notices
// a dead worker.
const attendedLimit = 7 * 24 * time.Hour

// attended runs a long activity that may be stopped at any point and begun
// again, because it goes on from what it observes. A pause stops it and holds
// at the safe boundary; abort ends it. stopped runs after every stop.
func (r *run) attended(ctx workflow.Context, s *stage.Scope, name, summary string, req, out any, stopped func(ctx workflow.Context) error) error {
	// The wait must outlive the abort that cancels ctx: the activity is told to
	// stop, and its end is awaited.
	wait, cancel := workflow.NewDisconnectedContext(ctx)
	defer cancel()
	for {
		if err := s.Safe(ctx); err != nil {
			return err
		}
		actx, stop := workflow.WithCancel(ctx)
		var err error
		done := false
		workflow.Go(actx, func(ctx workflow.Context) {
			err = r.do(ctx, s, name, summary, attendedLimit, req, out)
			done = true
		})
		paused := func() bool { return r.Status().Deferred == protocol.Pause }
		if werr := workflow.Await(wait, func() bool { return done || paused() }); werr != nil {
			stop()
			return werr
		}
		interrupted := !done
		stop()
		if werr := workflow.Await(wait, func() bool { return done }); werr != nil {
			return werr
		}
		if serr := stopped(wait); serr != nil && err == nil {
			err = serr
		}
		if err == nil || !interrupted || r.Stopping() {
			return err
		}
	}
}

// holdAgain switches auto update off after a roll, however it ended.
// Assert keeps the policy recorded before the run: the flag that is on now is
// this roll's own and must not be taken for what was found.
func (r *run) holdAgain(s *stage.Scope) func(ctx workflow.Context) error {
	return func(ctx workflow.Context) error {
		_, err := release.Hold(ctx, s, "switch auto update off again", tensorfusion.HoldRequest{Scope: r.in.Scope, Limit: holdLimit, Assert: true})
		return err
	}
}
