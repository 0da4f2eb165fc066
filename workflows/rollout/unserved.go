package rollout

import (
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/stage"
)

// queueSignal is how a shard, which answers no query that people ask, tells the
// rollout that started it which queue has no worker.
const queueSignal = "shard-queue"

// queueNote says that nobody polls the queue of a shard's activity, or, without
// a queue, that it was taken up.
type queueNote struct {
	Shard string    `json:"shard"`
	Queue string    `json:"queue,omitempty"`
	Since time.Time `json:"since,omitzero"`
}

// tell sends a note to the rollout. It is no part of the work: a note that can't
// be delivered is lost.
func tell(ctx workflow.Context, n queueNote) {
	info := workflow.GetInfo(ctx)
	if p := info.ParentWorkflowExecution; p != nil {
		n.Shard = info.WorkflowExecution.ID
		workflow.SignalExternalWorkflow(ctx, p.ID, p.RunID, queueSignal, n)
	}
}

// unserved are the shards of the present wave that wait for a worker.
type unserved struct {
	shards map[string]bool
	scope  *stage.Scope // of the wave, nil between waves
	served func()
}

// listen takes the shards' notes for as long as the rollout runs.
func (u *unserved) listen(ctx workflow.Context) {
	workflow.Go(ctx, func(ctx workflow.Context) {
		for {
			var n queueNote
			if !workflow.GetSignalChannel(ctx, queueSignal).Receive(ctx, &n) {
				return
			}
			u.note(n)
		}
	})
}

func (u *unserved) note(n queueNote) {
	switch {
	case u.scope == nil: // it came late
	case n.Queue == "":
		if delete(u.shards, n.Shard); len(u.shards) == 0 {
			u.served()
		}
	default:
		if len(u.shards) == 0 {
			u.served = u.scope.Unserved(n.Queue, n.Since)
		}
		u.shards[n.Shard] = true
	}
}

// wave begins to show notes on the stage of that scope; the function that it
// returns ends that.
func (u *unserved) wave(s *stage.Scope) (end func()) {
	u.scope, u.shards, u.served = s, map[string]bool{}, func() {}
	return func() {
		if u.scope = nil; len(u.shards) > 0 {
			u.served()
		}
	}
}
