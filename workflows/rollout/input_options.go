package rollout

import (
	"fmt"
	"slices"
	"strings"

	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

// WorkerOptions of the driver `controller`. Pointers tell an explicit 0, which
// is refused, from what a plan leaves out.
type WorkerOptions struct {
	// AcknowledgeLostSessions accepts that the connections listed at the gate
	// lose their GPU session. Without it the rollout is refused.
	AcknowledgeLostSessions bool `json:"acknowledgeLostSessions,omitempty"`
	// Stall is the longest time without progress (default 10 m).
	Stall *window.Duration `json:"stall,omitempty"`
	// BatchPercentage and BatchInterval are the controller's own: share of the
	// workloads per batch (default 20, as in the guide) and the wait between
	// (default: what the pool has).
	BatchPercentage *int32           `json:"batchPercentage,omitempty" jsonschema:"minimum=1,maximum=100"`
	BatchInterval   *window.Duration `json:"batchInterval,omitempty"`
}

// ClientOptions of the driver `owner`.
type ClientOptions struct {
	// PerOwner is how many pods of one owner may be away at a time (default 1).
	PerOwner *int `json:"perOwner,omitempty" jsonschema:"minimum=1"`
	// Leave names owners (Kind/namespace/name) that are not touched.
	Leave []string `json:"leave,omitempty"`
	// Limit is how long one eviction may be blocked by a disruption budget
	// (default 10 m).
	Limit *window.Duration `json:"limit,omitempty"`
}

func (o *WorkerOptions) withDefaults() *WorkerOptions {
	w := *o
	w.Stall = or(w.Stall, window.Duration(defaultStall))
	w.BatchPercentage = or(w.BatchPercentage, defaultWorkerBatch)
	w.BatchInterval = or(w.BatchInterval, 0)
	return &w
}

func (o *ClientOptions) withDefaults() *ClientOptions {
	var c ClientOptions
	if o != nil {
		c = *o
	}
	c.PerOwner = or(c.PerOwner, 1)
	c.Limit = or(c.Limit, window.Duration(defaultLimit))
	return &c
}

func or[T any](given *T, missing T) *T {
	if given != nil {
		return given
	}
	return &missing
}

// ComponentProblems returns every problem of what a plan declares at path for
// the rollout of one component: the same for a Rollout started alone and for
// one that a longer run is going to start, so that none fails in mid-run.
func ComponentProblems(path, component string, s plan.Strategy, w *WorkerOptions, c *ClientOptions, p *gpunode.Prepare) []plan.Problem {
	at := func(key string) string { return strings.TrimPrefix(path+"."+key, ".") }
	ps := PrepareProblems(at("prepare"), component, p)
	switch component {
	case Hypervisor, Worker, Client:
		ps = append(ps, s.Validate(at("strategy"))...)
	default:
		ps = append(ps, plan.Problem{Path: at("component"), Message: fmt.Sprintf("is %q: want hypervisor, worker or client", component)})
	}
	switch component {
	case Worker:
		ps = append(ps, w.problems(at("workers"))...)
	case Client:
		ps = append(ps, c.problems(at("clients"))...)
	}
	return ps
}

func (o *WorkerOptions) problems(path string) []plan.Problem {
	var ps []plan.Problem
	if o == nil || !o.AcknowledgeLostSessions {
		ps = append(ps, plan.Problem{Path: path + ".acknowledgeLostSessions",
			Message: "is not true: connections to replaced workers lose their GPU session; the plan must accept that"})
	}
	if o == nil {
		return ps
	}
	if b := o.BatchPercentage; b != nil && (*b < 1 || *b > 100) {
		ps = append(ps, plan.Problem{Path: path + ".batchPercentage",
			Message: fmt.Sprintf("is %d: T27: want 1 to 100, or leave it out for %d; the API drops a 0 and the controller makes one batch of all", *b, defaultWorkerBatch)})
	}
	ps = append(ps, durationProblems(path+".stall", o.Stall)...)
	return append(ps, durationProblems(path+".batchInterval", o.BatchInterval)...)
}

func (o *ClientOptions) problems(path string) []plan.Problem {
	if o == nil {
		return nil
	}
	var ps []plan.Problem
	if n := o.PerOwner; n != nil && *n < 1 {
		ps = append(ps, plan.Problem{Path: path + ".perOwner", Message: fmt.Sprintf("is %d: want 1 or more, or leave it out for 1", *n)})
	}
	for i, name := range o.Leave {
		if parts := strings.Split(name, "/"); len(parts) != 3 || slices.Contains(parts, "") {
			ps = append(ps, plan.Problem{Path: fmt.Sprintf("%s.leave[%d]", path, i),
				Message: fmt.Sprintf("is %q: want Kind/namespace/name, for example Deployment/team-a/web", name)})
		}
	}
	return append(ps, durationProblems(path+".limit", o.Limit)...)
}

func durationProblems(path string, d *window.Duration) []plan.Problem {
	if d == nil || *d > 0 {
		return nil
	}
	return []plan.Problem{{Path: path, Message: fmt.Sprintf("is %s: want a positive duration, or leave it out for the default", *d)}}
}
