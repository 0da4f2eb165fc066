package run

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.temporal.io/api/serviceerror"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/workflows/protocol"
)

// Means is how an answer reached its run.
type Means string

const (
	// ByUpdate answers were accepted and took effect.
	ByUpdate Means = "update"
	// BySignal answers were only delivered: one that fits no waiting stage is
	// recorded as ignored.
	BySignal Means = "signal"
)

// Given is how an answer went; Accepted is empty for a signal.
type Given struct {
	Means    Means             `json:"means"`
	Accepted protocol.Accepted `json:"accepted,omitzero"`
}

// Answer sends a verb as an Update and waits for its effect. Where the server
// or the run knows no Updates, or signal is asked for, it is sent as a signal.
func Answer(ctx context.Context, c *Connection, r Run, verb string, a protocol.Answer, limit time.Duration, signal bool) (Given, error) {
	if !r.Open() {
		return Given{}, &Refused{fmt.Sprintf("run %s is closed (%s): it takes no %s", r.WorkflowID, r.State, verb)}
	}
	if !signal {
		accepted, err := update(ctx, c, r, verb, a, limit)
		if !errors.Is(err, errNoUpdates) {
			return Given{Means: ByUpdate, Accepted: accepted}, err
		}
	}
	if err := c.SignalWorkflow(ctx, r.WorkflowID, r.RunID, verb, a); err != nil {
		return Given{}, fmt.Errorf("signal %s to run %s: %w", verb, r.WorkflowID, err)
	}
	return Given{Means: BySignal}, nil
}

var errNoUpdates = errors.New("updates are not possible")

func update(ctx context.Context, c *Connection, r Run, verb string, a protocol.Answer, limit time.Duration) (protocol.Accepted, error) {
	var accepted protocol.Accepted
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	handle, err := c.UpdateWorkflow(limited, client.UpdateWorkflowOptions{
		WorkflowID:   r.WorkflowID,
		RunID:        r.RunID,
		UpdateName:   verb,
		Args:         []any{a},
		WaitForStage: client.WorkflowUpdateStageCompleted,
	})
	if err == nil {
		err = handle.Get(limited, &accepted)
	}
	if err == nil {
		return accepted, nil
	}
	var app *temporal.ApplicationError
	var unimplemented *serviceerror.Unimplemented
	var denied *serviceerror.PermissionDenied
	switch {
	case errors.As(err, &unimplemented), errors.As(err, &denied):
		return accepted, errNoUpdates
	case errors.As(err, &app):
		if strings.HasPrefix(app.Message(), "unknown update") {
			return accepted, errNoUpdates
		}
		return accepted, &Refused{fmt.Sprintf("%s refused by run %s: %s", verb, r.WorkflowID, strings.TrimPrefix(app.Message(), verb+" refused: "))}
	case limited.Err() != nil && ctx.Err() == nil:
		return accepted, fmt.Errorf("%s was not answered by run %s within %s: no worker may be polling task queue %s; send it to be read later with --signal, after looking at `refit status %s`",
			verb, r.WorkflowID, limit, protocol.TaskQueue, r.WorkflowID)
	}
	return accepted, fmt.Errorf("%s to run %s: %w", verb, r.WorkflowID, err)
}
