package run

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/workflows/protocol"
)

// Observation is everything known of a run now: its status while it is open,
// its receipt or failure once it is closed.
type Observation struct {
	Run     Run               `json:"run"`
	Status  *protocol.Status  `json:"status,omitempty"`
	Receipt *protocol.Receipt `json:"receipt,omitempty"`
	Failure *Failure          `json:"failure,omitempty"`
	// Silent says why an open run gave no status: most often no worker polls.
	Silent string `json:"silent,omitempty"`
}

// Failure is how a run closed without a receipt.
type Failure struct {
	Type    string `json:"type"`
	Message string `json:"message"`
}

// queryLimit bounds one status query: a server without a worker would keep
// the caller waiting for its own, much longer limit.
const queryLimit = 5 * time.Second

// Observe describes the run and asks it for its status or its result.
func Observe(ctx context.Context, c *Connection, id string) (Observation, error) {
	r, err := Describe(ctx, c, id)
	if err != nil {
		return Observation{}, err
	}
	o := Observation{Run: r}
	if r.Open() {
		o.Status, o.Silent = query(ctx, c, r)
		return o, ctx.Err()
	}
	o.Receipt, o.Failure, err = result(ctx, c, r)
	return o, err
}

func query(ctx context.Context, c *Connection, r Run) (*protocol.Status, string) {
	limited, cancel := context.WithTimeout(ctx, queryLimit)
	defer cancel()
	value, err := c.QueryWorkflow(limited, r.WorkflowID, r.RunID, protocol.QueryStatus)
	if err != nil {
		return nil, fmt.Sprintf("no worker answers for %s on task queue %s: %v; the run goes on when one polls again", r.WorkflowID, protocol.TaskQueue, err)
	}
	var s protocol.Status
	if err := value.Get(&s); err != nil {
		return nil, fmt.Sprintf("status of %s is not readable: %v; is this refit as new as its worker?", r.WorkflowID, err)
	}
	return &s, ""
}

func result(ctx context.Context, c *Connection, r Run) (*protocol.Receipt, *Failure, error) {
	var receipt protocol.Receipt
	err := c.GetWorkflow(ctx, r.WorkflowID, r.RunID).Get(ctx, &receipt)
	if err == nil {
		return &receipt, nil, nil
	}
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	var app *temporal.ApplicationError
	if errors.As(err, &app) {
		return nil, &Failure{Type: app.Type(), Message: app.Message()}, nil
	}
	var terminated *temporal.TerminatedError
	var canceled *temporal.CanceledError
	var timeout *temporal.TimeoutError
	switch {
	case errors.As(err, &terminated):
		return nil, &Failure{Type: "Terminated", Message: "was terminated: nothing was cleaned up; a new run takes its lock over"}, nil
	case errors.As(err, &canceled):
		return nil, &Failure{Type: "Canceled", Message: "was cancelled before its first stage"}, nil
	case errors.As(err, &timeout):
		return nil, &Failure{Type: "TimedOut", Message: err.Error()}, nil
	}
	return nil, nil, fmt.Errorf("result of run %s: %w", r.WorkflowID, err)
}
