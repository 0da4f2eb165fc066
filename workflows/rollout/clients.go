package rollout

import (
	"fmt"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

// clients is the driver `owner`: application pods with an outdated injection
// are evicted, and their owners make new ones. Bare pods and owners that the
// plan names stay and are listed.
type clients struct {
	*run
	stale   []tensorfusion.ClientPod
	left    []tensorfusion.ClientPod
	evicted bool // every pod of stale
}

func (c *clients) state(*State) {}

func (c *clients) roll(ctx workflow.Context) error {
	if err := c.Execute(ctx, stage.Stage{
		Name: c.name("observe"), Purpose: "list the application pods whose injection is outdated", Do: c.observe,
	}); err != nil {
		return err
	}
	if len(c.stale) == 0 {
		return nil
	}
	return c.Execute(ctx, stage.Stage{
		Name: c.name("evict"), Purpose: fmt.Sprintf("evict outdated application pods of pool %s, at most %d per owner at a time", c.in.Entry, *c.in.Clients.PerOwner),
		Mutates: true, Skippable: true, Do: c.evict,
	})
}

func (c *clients) request() tensorfusion.ClientsRequest {
	return tensorfusion.ClientsRequest{
		Scope: c.in.Scope, Pool: c.in.Pool, PerOwner: *c.in.Clients.PerOwner, Leave: c.in.Clients.Leave, Limit: c.in.Clients.Limit.D(),
	}
}

func (c *clients) observe(ctx workflow.Context, s *stage.Scope) error {
	var seen tensorfusion.ClientsResult
	if err := c.do(ctx, s, tensorfusion.ClientsActivity, "client pods of pool "+c.in.Pool, holdLimit, c.request(), &seen); err != nil {
		return err
	}
	c.stale, c.left = nil, seen.Left
	for _, p := range seen.Stale {
		if p.Left == "" {
			c.stale = append(c.stale, p)
		}
	}
	s.Progress(0, len(c.stale), 0)
	s.Note("%d outdated pods to evict, %d left alone", len(c.stale), len(c.left))
	return nil
}

func (c *clients) evict(ctx workflow.Context, s *stage.Scope) error {
	var out tensorfusion.ClientsResult
	nothing := func(workflow.Context) error { return nil }
	if err := c.attended(ctx, s, tensorfusion.EvictClientsActivity, "evict client pods of pool "+c.in.Pool, c.request(), &out, nothing); err != nil {
		return err
	}
	c.left, c.evicted = out.Left, true
	s.Progress(len(c.stale), len(c.stale), 0)
	s.Note("%d pods evicted, every owner is available again; %d left alone", out.Evicted, len(c.left))
	return nil
}

// leftBySkip is why a pod keeps its injection when a person gave the eviction up.
const leftBySkip = "the eviction was skipped"

func (c *clients) fill(out *Result) {
	if out.Outcome == protocol.OutcomeDone && !c.evicted {
		for _, p := range c.stale { // some may be gone by now
			p.Left = leftBySkip
			c.left = append(c.left, p)
		}
	}
	out.LeftClients = c.left
	for i, p := range c.left {
		if i == maxWarnings {
			c.Warn(fmt.Sprintf("%d more outdated pods were left alone", len(c.left)-maxWarnings))
			break
		}
		c.Warn(fmt.Sprintf("pod %s/%s keeps its outdated injection: %s", p.Namespace, p.Name, p.Left))
	}
	if out.Outcome == protocol.OutcomeDone && len(c.stale) == 0 {
		out.Outcome = protocol.OutcomeNoChange
	}
}
