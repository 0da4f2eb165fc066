package agent

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/refit-run/refit/gpuagent/setup"
)

const (
	// turnPatience is how long a request waits for its turn here. It is short
	// because the request's own time runs meanwhile; one that must wait longer is
	// sent back, and comes again with all of it.
	turnPatience = 10 * time.Second
	// turnAgain is when it is worth another try.
	turnAgain = 30 * time.Second
)

// turn is the one place of the request that is being served: two at once would
// disturb each other's probes.
type turn struct {
	place    chan struct{}
	patience time.Duration

	mu    sync.Mutex
	what  string // is being served
	since time.Time
}

func newTurn() *turn {
	return &turn{place: make(chan struct{}, 1), patience: turnPatience}
}

// take waits for the turn; what names the request to those that wait for it. The
// error of one that waited in vain is a Failure of class Wait.
func (t *turn) take(ctx context.Context, what string) (release func(), err error) {
	patience := time.NewTimer(t.patience)
	defer patience.Stop()
	select {
	case t.place <- struct{}{}:
		t.begin(what)
		return func() {
			<-t.place
			// An agent is idle for months between upgrades: give the memory of
			// this request back.
			debug.FreeOSMemory()
		}, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-patience.C:
		return nil, &setup.Failure{Class: setup.Wait, Object: "agent of this node", Expected: fmt.Sprintf("its turn within %s", t.patience),
			Found: t.serving(), Why: "one host answers one request at a time", Next: "wait for it to end", Again: turnAgain}
	}
}

func (t *turn) begin(what string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.what, t.since = what, time.Now()
}

func (t *turn) serving() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Sprintf("a %s is at work since %s", t.what, t.since.UTC().Format(time.TimeOnly))
}
