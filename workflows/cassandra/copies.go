package cassandra

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

const (
	// perStep is how long a keyspace is expected to take from one ALTER to the
	// last repair that follows it, perKeyspace on the whole way.
	perStep     = 5 * time.Minute
	perKeyspace = 2 * perStep
)

// copies raises keyspaces and proves it by repairs. A keyspace that was raised
// owes its repairs: until then a read can miss rows, and nothing stops in
// between. They go together from one copy to two, and once all are repaired from
// two to three: a quorum of two copies asks both, one of which is whole, and a
// quorum of three asks two, one of which at least is whole. From one to three at
// once a quorum can ask two empty ones.
type copies struct {
	*run
	names  []string
	always bool
	// atOnce goes to three copies at once, as the guide does.
	atOnce bool

	plan    acts.Plan
	center  string
	raised  []acts.Keyspace
	repairs []acts.Repair
	owed    []debt
	// complete are the keyspaces that have all copies, repaired, halfway those
	// that have one less.
	complete, halfway []string
}

// debt is a keyspace that is not repaired since it was asked to have so many
// copies. It is recorded before the statement is sent, because nobody may hear
// of its end.
type debt struct {
	keyspace string
	copies   int
	// since is the clock of a member before the statement, or after it where
	// its end was heard: a repair that counts has begun later. It is zero until
	// the members are there that take the copies.
	since time.Time
	// before is how the keyspace was.
	before []acts.Keyspace
	// raised: the copies are proven to be asked for; agreed: all members were
	// seen with one schema since then.
	raised, agreed bool
	// everywhere repairs on all members whatever the number of copies.
	everywhere bool
}

// check finds what is to be raised; it proves the data centre's name too.
func (c *copies) check(ctx workflow.Context, s *stage.Scope) error {
	got, err := c.raise(ctx, s, c.names, acts.TargetMembers, false, true)
	if err != nil {
		return err
	}
	c.plan, c.center = got.Plan, got.DataCenter
	s.Note("data centre %s: %d keyspaces to raise, %d have %d copies, not installed: %s", got.DataCenter, len(got.Raise), len(got.Already), acts.TargetMembers, list(got.Absent))
	return nil
}

func list(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// bring raises and repairs every keyspace that needs it.
func (c *copies) bring(ctx workflow.Context, s *stage.Scope) error {
	if err := c.check(ctx, s); err != nil {
		return err
	}
	var todo []string
	for _, d := range c.owed {
		todo = append(todo, d.keyspace)
	}
	for _, k := range c.plan.Raise {
		if !slices.Contains(todo, k.Name) {
			todo = append(todo, k.Name)
		}
	}
	if c.always || c.TookOver { // what the run before has raised it may not have repaired
		for _, k := range c.plan.Already {
			if !slices.Contains(todo, k.Name) && !c.repaired(k.Name) {
				todo = append(todo, k.Name)
			}
		}
	}
	for i, factor := range steps {
		s.Progress(i, len(steps), 0)
		names := c.needing(todo, factor, c.atOnce)
		if len(names) == 0 {
			continue
		}
		s.Note("step to %d copies: %s", factor, list(names))
		err := s.Section(ctx, fmt.Sprintf("step to %d copies", factor), time.Duration(len(names))*perStep, func(ctx workflow.Context) error { return c.step(ctx, s, names, factor) })
		if err != nil {
			return err
		}
	}
	s.Progress(len(steps), len(steps), 0)
	repaired := map[string]bool{}
	for _, r := range c.repairs {
		repaired[r.Keyspace] = true
	}
	s.Note("%d keyspaces raised, %d repaired on %d members", len(c.raised), len(repaired), acts.TargetMembers)
	c.tell()
	return nil
}

func (c *copies) repaired(keyspace string) bool {
	return slices.ContainsFunc(c.repairs, func(r acts.Repair) bool { return r.Keyspace == keyspace })
}

// steps are the numbers of copies on the way to all.
var steps = []int{acts.TargetMembers - 1, acts.TargetMembers}

// needing are the keyspaces that take the step to so many copies. A step that
// owes its repairs is not made again, and neither is one before it.
func (c *copies) needing(names []string, factor int, atOnce bool) (out []string) {
	for _, name := range names {
		if factor == acts.TargetMembers || c.debt(name, factor) != nil || !atOnce && c.debt(name, acts.TargetMembers) == nil {
			out = append(out, name)
		}
	}
	return out
}

// one raises one keyspace step by step, or at once, where it has fewer copies,
// and repairs it after each.
func (c *copies) one(ctx workflow.Context, s *stage.Scope, name string, atOnce bool) error {
	for _, factor := range steps {
		if err := c.step(ctx, s, c.needing([]string{name}, factor, atOnce), factor); err != nil {
			return err
		}
	}
	return nil
}

// step brings keyspaces to so many copies, and repairs them. Those that have
// more are passed over.
func (c *copies) step(ctx workflow.Context, s *stage.Scope, names []string, factor int) error {
	fresh := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return c.debt(name, factor) != nil })
	if len(fresh) > 0 {
		got, err := c.raise(ctx, s, fresh, factor, false, true)
		if err != nil {
			return err
		}
		for _, k := range got.Raise {
			c.owed = append(c.owed, debt{keyspace: k.Name, copies: factor, since: got.At, before: []acts.Keyspace{k}})
		}
		for _, k := range got.Already {
			if factor == acts.TargetMembers || k.Copies() <= factor {
				c.owed = append(c.owed, debt{keyspace: k.Name, copies: factor, since: got.At})
			}
		}
	}
	ours := func(d debt) bool { return d.copies == factor && slices.Contains(names, d.keyspace) }
	if !slices.ContainsFunc(c.owed, ours) {
		return nil
	}
	if err := c.settle(ctx, s, ours); err != nil {
		return err
	}
	for _, d := range c.owed {
		switch {
		case !ours(d):
		case factor == acts.TargetMembers:
			c.complete = append(c.complete, d.keyspace)
			c.halfway = slices.DeleteFunc(c.halfway, func(name string) bool { return name == d.keyspace })
		default:
			c.halfway = append(c.halfway, d.keyspace)
		}
	}
	c.owed = slices.DeleteFunc(c.owed, ours)
	return nil
}

// debt is that of a keyspace at so many copies.
func (c *copies) debt(name string, factor int) *debt {
	at := slices.IndexFunc(c.owed, func(d debt) bool { return d.keyspace == name && d.copies == factor })
	if at < 0 {
		return nil
	}
	return &c.owed[at]
}

// settle raises what is not proven to be raised, sees that every member knows
// of it, and repairs.
func (c *copies) settle(ctx workflow.Context, s *stage.Scope, ours func(debt) bool) error {
	var unproven []string
	agreed, factor := true, 0
	for _, d := range c.owed {
		if ours(d) {
			factor, agreed = d.copies, agreed && d.agreed
			if !d.raised {
				unproven = append(unproven, d.keyspace)
			}
		}
	}
	if len(unproven) > 0 {
		got, err := c.raise(ctx, s, unproven, factor, false, false)
		if err != nil {
			return err
		}
		for i := range c.owed {
			d := &c.owed[i]
			if !ours(*d) || !slices.Contains(unproven, d.keyspace) {
				continue
			}
			if slices.ContainsFunc(got.Raise, func(k acts.Keyspace) bool { return k.Name == d.keyspace }) {
				d.since = got.At
			}
			c.proven(d)
		}
	}
	if !agreed { // a member that does not know of the raise repairs nothing
		if err := c.run.look(ctx, s, acts.TargetMembers, "N187", c.limits.Join); err != nil {
			return err
		}
	}
	var debts []debt
	for i := range c.owed {
		if ours(c.owed[i]) {
			c.owed[i].agreed = true
			debts = append(debts, c.owed[i])
		}
	}
	done, err := c.repair(ctx, s, debts)
	if err != nil {
		return err
	}
	c.repairs = append(c.repairs, done...)
	return nil
}

// proven records that the copies are asked for.
func (c *copies) proven(d *debt) {
	d.raised = true
	if !slices.ContainsFunc(c.raised, func(k acts.Keyspace) bool { return k.Name == d.keyspace }) {
		c.raised = append(c.raised, d.before...)
	}
}

// close ends the run, and lists each keyspace whose repairs are still owed; plan
// is what a run that was only to plan has found, more what else is to be told.
func (c *copies) close(outcome protocol.Outcome, plan *protocol.Plan, more ...func(*protocol.Receipt)) protocol.Receipt {
	owed := func(receipt *protocol.Receipt) {
		receipt.Plan = plan
		for _, d := range c.owed {
			asks := "asks"
			if !d.raised {
				asks = "may ask"
			}
			receipt.LeftBehind = append(receipt.LeftBehind, fmt.Sprintf("keyspace %s %s for %d copies and is not repaired since: until it is, reads can miss rows", d.keyspace, asks, d.copies))
		}
	}
	return c.Close(outcome, append([]func(*protocol.Receipt){owed}, more...)...)
}

// tell warns of what keeps fewer copies.
func (c *copies) tell() {
	for _, k := range c.plan.Outside {
		c.Warn(fmt.Sprintf("keyspace %s is in no list of this run and stays as it is (%s): losing a member can make its rows unavailable", k.Name, k))
	}
	if len(c.plan.Absent) > 0 {
		c.Warn("not installed, left out: " + list(c.plan.Absent))
	}
}

// prove reads the replication again (N188).
func (c *copies) prove(ctx workflow.Context, s *stage.Scope) error {
	if err := c.check(ctx, s); err != nil {
		return err
	}
	if len(c.plan.Raise) > 0 {
		return stage.Parking(fmt.Sprintf("N188: keyspace %s: expected %d copies in %s, found %s", c.plan.Raise[0].Name, acts.TargetMembers, c.center, c.plan.Raise[0]),
			"somebody has altered it since", "find out who, then retry: it is raised and repaired by a run of its own", nil)
	}
	return nil
}

// planned is what would be done, as the command line and the receipt show it.
func (c *copies) planned() *protocol.Plan {
	p := &protocol.Plan{}
	for _, k := range c.plan.Raise {
		p.Changes = append(p.Changes, protocol.PlannedChange{Action: fmt.Sprintf("raise to %d copies and repair on every member", acts.TargetMembers), Object: "keyspace " + k.Name})
	}
	return p
}

// leftHalfway is what an abort leaves between the two steps.
func (c *copies) leftHalfway(receipt *protocol.Receipt) {
	for _, name := range c.halfway {
		if receipt.Outcome == protocol.OutcomeAborted && c.debt(name, acts.TargetMembers) == nil {
			receipt.LeftBehind = append(receipt.LeftBehind, fmt.Sprintf("keyspace %s has %d copies: while any member is away, most of its rows can't be read at a quorum; start again", name, acts.TargetMembers-1))
		}
	}
}

// replication is the workflow CassandraReplication as a value.
type replication struct {
	copies
	in ReplicationInput
}

func (r *replication) stages() []stage.Stage {
	limit := r.limits.Join
	out := []stage.Stage{
		{Name: "ring", Purpose: "see that three members are up, as seen from every member, with one schema", Do: func(ctx workflow.Context, s *stage.Scope) error {
			return r.look(ctx, s, acts.TargetMembers, "N183", limit)
		}},
		{Name: "check", Purpose: "prove the data centre's name and record how every keyspace is replicated", Do: r.check},
	}
	if r.in.PlanOnly {
		return out
	}
	return append(out,
		stage.Stage{Name: "keyspaces", Purpose: "raise the keyspaces to three copies and repair them, one member after the other", Mutates: true, Do: r.bring},
		stage.Stage{Name: "verify", Purpose: "see that every keyspace has three copies", Do: r.prove})
}

// skipped ends a run that has nothing to do.
func skipped(r *datastore.Run, why string) protocol.Receipt {
	r.Warn(why)
	return r.Close(protocol.OutcomeNoChange)
}
