package rollout

import (
	"fmt"
	"slices"
	"time"

	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/stage"
)

// hypervisors is the driver `engine`: auto update is off and Refit replaces
// the pods itself, in the planner's order.
type hypervisors struct {
	*run
	layout  plan.Layout
	plan    plan.State
	rows    map[string]HostRow
	seen    map[string]tensorfusion.Host // of the last look
	waves   int
	longest time.Duration
	handled int       // hosts taken since the last continue-as-new
	looked  time.Time // when the pool was last observed and the hold checked
	stale   bool      // a wave was not begun because that was too long ago
	again   bool      // the last attempt of the current batch parked
	drift   []finding.Finding
	warned  int
	queues  unserved
}

func newHypervisors(r *run) *hypervisors {
	h := &hypervisors{run: r, rows: map[string]HostRow{}}
	if c := r.in.Resume; c != nil {
		h.layout, h.plan, h.waves, h.longest, h.drift = c.Layout, c.Plan, c.Waves, c.Longest, c.Drift
		h.again, h.warned = c.Again, c.Warned
		if c.Rows != nil {
			h.rows = c.Rows
		}
	}
	return h
}

func (h *hypervisors) state(s *State) {
	s.Layout, s.Plan, s.Rows, s.Waves, s.Longest, s.Drift = h.layout, h.plan, h.rows, h.waves, h.longest, h.drift
	s.Again, s.Warned = h.again, h.warned
}

func (h *hypervisors) roll(ctx workflow.Context) error {
	h.queues.listen(ctx)
	if h.in.Resume == nil {
		if err := h.Execute(ctx, stage.Stage{
			Name: h.name("plan"), Purpose: "lay the hosts of pool " + h.in.Entry + " out in batches", Do: h.layOut,
		}); err != nil {
			return err
		}
		if err := h.remind(ctx); err != nil {
			return err
		}
	}
	stages := make([]stage.Stage, len(h.layout.Batches))
	for i, b := range h.layout.Batches {
		stages[i] = stage.Stage{
			Name: h.name(b.Name), Purpose: fmt.Sprintf("replace and prove the hypervisors of %s", hosts(len(b.Hosts))),
			Mutates: true, Skippable: !b.Canary,
			Do: func(ctx workflow.Context, s *stage.Scope) error { return h.batch(ctx, s, i) },
		}
	}
	if err := h.Execute(ctx, stages...); err != nil {
		return err
	}
	if h.again { // the last batch was skipped
		h.plan = h.plan.Leave(h.layout)
	}
	return h.proofs(ctx)
}

// layOut observes the pool and lays the strategy over it.
func (h *hypervisors) layOut(ctx workflow.Context, s *stage.Scope) error {
	seen, err := h.observe(ctx, s, "observe pool "+h.in.Pool, 0)
	if err != nil {
		return err
	}
	if len(seen.Hosts) == 0 && h.in.Parent != nil { // which has seen hosts in it
		h.Warn("pool " + h.in.Entry + " has no GPU nodes any more: nothing is left to roll")
		return nil
	}
	l, err := plan.Build(h.in.Strategy, PlannerHosts(seen.Hosts), h.in.FixFirst)
	if err != nil {
		return stage.Parking(fmt.Sprintf("pool %s can't be rolled as planned: %v", h.in.Entry, err),
			"the strategy does not fit the hosts that are there",
			"retry when the pool has changed; otherwise abort, correct the strategy and start again", []string{protocol.Retry})
	}
	h.layout = l
	s.Note("%s in %d batches, at most %d away at a time, budget %d; %d on target already",
		hosts(l.Total()), len(l.Batches), l.MaxUnavailable, l.Budget, len(l.Done))
	return nil
}

// batch carries out what the planner decides until the batch is done. It may
// be run again from the start: the pool is observed anew, and failed hosts are
// done again.
func (h *hypervisors) batch(ctx workflow.Context, s *stage.Scope, index int) (err error) {
	if h.handled > 0 && (h.handled >= ShardSize || workflow.GetInfo(ctx).GetContinueAsNewSuggested()) {
		return stage.ErrContinueAsNew
	}
	defer func() { h.again = err != nil }()
	switch {
	case h.plan.Batch < index: // the batch before was skipped
		h.plan = h.plan.Leave(h.layout).After(plan.Decision{Kind: plan.Advance}, nil)
	case h.again:
		h.plan = h.plan.Retry(h.layout)
	}
	look, err := h.look(ctx, s)
	for err == nil {
		d := plan.Next(h.layout, h.plan, look)
		h.plan, look = d.State, plan.Observation{}
		for _, n := range d.Notes {
			workflow.GetLogger(ctx).Info("rollout: "+n, "pool", h.in.Pool)
		}
		workflow.GetLogger(ctx).Info("rollout: "+string(d.Kind), "batch", d.Batch, "reason", d.Reason)
		h.report(ctx, s)
		switch d.Kind {
		case plan.Replace:
			if err = h.wave(ctx, s, d); err == nil && h.stale {
				h.stale = false
				look, err = h.look(ctx, s)
			}
			continue
		case plan.Soak, plan.Interval:
			if err = s.Sleep(ctx, d.For, d.Reason); err == nil {
				look, err = h.look(ctx, s)
			}
		case plan.Gate:
			err = s.Gate(ctx, h.gate(d))
		case plan.Advance:
			h.plan = h.plan.After(d, nil)
			h.note(s, index)
			return nil
		case plan.Park:
			return h.park(d)
		case plan.Done:
			h.note(s, index)
			return nil
		}
		if err == nil {
			h.plan = h.plan.After(d, nil)
		}
	}
	return err
}

// look asserts that auto update is still off and observes the pool.
func (h *hypervisors) look(ctx workflow.Context, s *stage.Scope) (plan.Observation, error) {
	seen, err := h.observe(ctx, s, "observe pool "+h.in.Pool+", check that auto update is off", holdLimit)
	if err != nil {
		return plan.Observation{}, err
	}
	for _, name := range plan.Unplanned(h.layout, PlannerHosts(seen.Hosts)) {
		f := finding.Finding{
			Object: "host " + name, Expected: "a host of the plan or one on target", Found: "joined the pool after the plan was made and is not on target",
			Next: "start another rollout of the pool: it takes the host",
		}
		if !slices.Contains(h.drift, f) {
			h.drift = append(h.drift, f)
		}
	}
	h.looked = workflow.Now(ctx)
	o := plan.Observation{Hosts: PlannerHosts(seen.Hosts)}
	for _, f := range seen.Broken {
		h.drift = append(h.drift, f)
		o.Alarms = append(o.Alarms, f.String())
	}
	return o, nil
}

func (h *hypervisors) observe(ctx workflow.Context, s *stage.Scope, summary string, assert time.Duration) (tensorfusion.PoolObservation, error) {
	var seen tensorfusion.PoolObservation
	if err := h.do(ctx, s, tensorfusion.ObservePoolActivity, summary, holdLimit, tensorfusion.ObservePoolRequest{
		Scope: h.in.Scope, Pool: h.in.Pool, Goal: h.in.Goal, LabelKeys: h.in.Strategy.Labels(), Assert: assert,
	}, &seen); err != nil {
		return seen, err
	}
	h.seen = make(map[string]tensorfusion.Host, len(seen.Hosts))
	for _, host := range seen.Hosts {
		h.seen[host.Name] = host
	}
	return seen, nil
}

// staleAfter is how old the last look may be when a wave begins. A pause or a
// window's end may have held it for a night, in which auto update can have been
// switched on and proven hosts can have broken.
const staleAfter = time.Minute

// wave replaces the hosts of one decision as one unbreakable section. What is
// known is recorded within it, also when a shard failed or abort was accepted
// meanwhile; a wave that did not begin leaves no trace.
func (h *hypervisors) wave(ctx workflow.Context, s *stage.Scope, d plan.Decision) error {
	err := s.Section(ctx, "wave of "+d.Batch, h.estimate(), func(ctx workflow.Context) error {
		if h.stale = workflow.Now(ctx).Sub(h.looked) > staleAfter; h.stale {
			return nil
		}
		s.Current(d.Hosts...)
		h.waves++
		started := workflow.Now(ctx)
		results, err := h.shards(ctx, s, d)
		h.plan = h.plan.After(d, results)
		h.handled += len(d.Hosts)
		h.longest = max(h.longest, workflow.Now(ctx).Sub(started))
		return err
	})
	h.report(ctx, s)
	return err
}

// estimate is how long a wave may take: the limits until one was measured,
// then twice the longest so far.
func (h *hypervisors) estimate() time.Duration {
	worst := h.in.Strategy.HostTimeout.D() + h.preparing()
	if h.in.Validation == ValidateAgent {
		worst += gpunode.ValidationLimit(h.in.Level, h.in.Expect)
	}
	if h.longest == 0 {
		return worst
	}
	return min(worst, 2*h.longest)
}

// overdue is when a wave has taken longer than all of its limits together:
// then most likely no worker polls a queue.
func (h *hypervisors) overdue() time.Duration {
	return h.in.Strategy.HostTimeout.D() + replaceSlack + gpunode.ValidationLimit(h.in.Level, h.in.Expect) + agentMissing + h.preparing()
}

// shards runs a wave as children of at most ShardSize hosts, all at once. Once
// begun they are not cancelled: a host ends by proof or by its deadline.
func (h *hypervisors) shards(ctx workflow.Context, s *stage.Scope, d plan.Decision) ([]plan.Result, error) {
	defer h.queues.wave(s)()
	var futures []workflow.ChildWorkflowFuture
	for part := range slices.Chunk(d.Hosts, h.shardSize()) {
		in := ShardInput{
			Scope: h.in.Scope, Pool: h.in.Pool, Goal: h.in.Goal, Validation: h.in.Validation, Level: h.in.Level,
			Expect: h.in.Expect, Strict: h.in.Strict, Limit: h.in.Strategy.HostTimeout.D(),
		}
		if d.Batch != proofStage {
			in.Prepare = h.in.Prepare
		}
		for _, name := range part {
			target := tensorfusion.HostTarget{Name: name, UID: h.seen[name].UID}
			if d.Batch == proofStage {
				target.UID = "" // without a UID nothing of the host is deleted
			}
			in.Hosts = append(in.Hosts, ShardHost{
				HostTarget: target, BootID: h.seen[name].BootID, Baseline: h.rows[name].Baseline, Partitioned: h.seen[name].Partitioned,
			})
		}
		cctx := workflow.WithChildOptions(ctx, workflow.ChildWorkflowOptions{
			WorkflowID:        fmt.Sprintf("%s.%s.%d.%d", workflow.GetInfo(ctx).WorkflowExecution.ID, h.name(d.Batch), h.waves, len(futures)+1),
			TaskQueue:         protocol.TaskQueue,
			ParentClosePolicy: enums.PARENT_CLOSE_POLICY_TERMINATE,
			StaticSummary:     fmt.Sprintf("%s: %s", d.Batch, shorten(part)),
		})
		futures = append(futures, workflow.ExecuteChildWorkflow(cctx, protocol.RolloutShard, in))
	}
	ready := func() bool {
		return !slices.ContainsFunc(futures, func(f workflow.ChildWorkflowFuture) bool { return !f.IsReady() })
	}
	if ok, err := workflow.AwaitWithTimeout(ctx, h.overdue(), ready); err == nil && !ok {
		s.Note("this wave is not back after %s: check that a worker polls the task queues %s and %s", h.overdue(),
			protocol.TaskQueue, protocol.ClusterQueue(h.in.Scope.Target.Cluster))
	}
	var results []plan.Result
	var errs []error
	for _, f := range futures {
		var out ShardResult
		if err := f.Get(ctx, &out); err != nil {
			errs = append(errs, err)
			continue
		}
		for _, row := range out.Hosts {
			results = append(results, h.keep(row))
		}
	}
	if len(errs) == 0 {
		return results, nil
	}
	// One is enough to park on: the hosts of every failed shard go again.
	return results, errs[0]
}

// park turns the planner's decision into the text a person reads.
func (h *hypervisors) park(d plan.Decision) error {
	var found []finding.Finding
	next := "repair the hosts, then answer retry: the pool is observed anew and failed hosts are done again"
	why := "going on would repeat on more hosts what failed on these"
	for _, name := range d.Hosts {
		if row := h.row(name); row.Failure != nil {
			found = append(found, *row.Failure)
		}
	}
	if len(d.Hosts) == 0 {
		found = h.drift
		why = "while auto update is on the controller replaces pods outside of every batch"
		next = "find out who changed the policy and keep it off, then answer retry"
	}
	return stage.Parking(d.Reason, why, next, nil, found...)
}

// gate is what a person is asked after a batch.
func (h *hypervisors) gate(d plan.Decision) stage.Gate {
	return stage.Gate{
		Approvers: h.in.Strategy.Approvers,
		Found:     d.Reason + "; " + h.evidence(h.plan.Batch),
		Why:       "the next batch takes more hosts; this is the cheapest moment to look at what the change does to workloads",
		Helps:     "look at the hosts of this batch and their workloads, then approve; reject parks the rollout",
	}
}

// report publishes progress and the estimated end.
func (h *hypervisors) report(ctx workflow.Context, s *stage.Scope) {
	done, failed := h.plan.Count(h.layout)
	s.Progress(done, h.layout.Total(), failed)
	if h.longest > 0 {
		s.ETA(workflow.Now(ctx).Add(plan.Remaining(h.layout, h.plan, h.longest)))
	}
}
