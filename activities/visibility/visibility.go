// Package visibility asks the Temporal server once per run which of Refit's
// search attributes exist, because upserting an absent one would fail the
// workflow task for ever. It must not create them: `refit setup` does.
package visibility

import (
	"context"

	"go.temporal.io/api/operatorservice/v1"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
)

// InstalledActivity is the name of Activities.Installed.
const InstalledActivity = "visibility.Installed"

// Activities needs a client of the server that runs the workflow.
type Activities struct {
	Temporal  client.Client
	Namespace string
}

// Request lists the attribute names that the run wants to set.
type Request struct {
	Names []string `json:"names"`
}

// Result says whether every one of them exists.
type Result struct {
	Installed bool `json:"installed"`
}

// Installed reports whether every named search attribute exists. A server that
// can't answer counts as not installed: the run goes on without them.
func (a *Activities) Installed(ctx context.Context, req Request) (Result, error) {
	resp, err := a.Temporal.OperatorService().ListSearchAttributes(ctx,
		&operatorservice.ListSearchAttributesRequest{Namespace: a.Namespace})
	if err != nil {
		activity.GetLogger(ctx).Warn("search attributes can't be listed; going on without them", "error", err)
		return Result{}, nil
	}
	for _, name := range req.Names {
		if _, ok := resp.GetCustomAttributes()[name]; !ok {
			return Result{}, nil
		}
	}
	return Result{Installed: true}, nil
}

// Register adds the activity under its stable name.
func (a *Activities) Register(r worker.Registry) {
	r.RegisterActivityWithOptions(a.Installed, activity.RegisterOptions{Name: InstalledActivity})
}
