package kube

import (
	"context"
	"time"
)

// Look asks a system once and says whether the wait is over. An error ends it.
type Look func(ctx context.Context) (done bool, err error)

// Poll is for systems behind the cluster's API that have nothing to watch:
// look is called at once and then at every pace until it is done or fails, or
// until the limit has passed, which is (false, nil): the last look knows best
// what is wrong. A look that has begun is not cut off by the limit, so that it
// never reports its own deadline as the system's fault; it must have a limit
// of its own. Heartbeats are the caller's (StartBeat).
func Poll(ctx context.Context, limit, pace time.Duration, look Look) (bool, error) {
	over := time.NewTimer(limit)
	defer over.Stop()
	ticker := time.NewTicker(pace)
	defer ticker.Stop()
	for {
		done, err := look(ctx)
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
		if done || err != nil {
			return done, err
		}
		select {
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case <-over.C:
			return false, nil
		case <-ticker.C:
		}
	}
}
