package cassandra

import (
	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
)

// Replication raises the application keyspaces to three copies and repairs
// them, one member at a time (N182-N188).
func Replication(ctx workflow.Context, in ReplicationInput) (ReplicationResult, error) {
	if problems := in.Validate(); len(problems) > 0 {
		return ReplicationResult{}, release.BadInput("input", problems)
	}
	shared, err := newRun(ctx, protocol.CassandraReplication, in.Site, in.Login, in.Limits, in.Windows)
	if err != nil {
		return ReplicationResult{}, err
	}
	shared.PlanOnly = in.PlanOnly
	if in.Mode == acts.ModeNone {
		return ReplicationResult{Receipt: skipped(shared.Run, "N182: the mode is none: nothing is raised")}, nil
	}
	r := &replication{copies: copies{run: shared, names: keyspaces(in.Keyspaces), always: in.Repair == RepairAlways}, in: in}
	outcome, err := r.Through(r.stages()...)
	if err != nil {
		return ReplicationResult{}, err
	}
	out := ReplicationResult{DataCenter: r.center, Raised: r.raised, Repairs: r.repairs, Absent: r.plan.Absent, Outside: r.plan.Outside}
	for _, k := range r.plan.Already {
		out.Already = append(out.Already, k.Name)
	}
	if outcome == protocol.OutcomeDone {
		switch {
		case in.PlanOnly:
			outcome = protocol.OutcomePlanned
		case len(r.raised) == 0 && len(r.repairs) == 0:
			outcome = protocol.OutcomeNoChange
		}
	}
	var plan *protocol.Plan
	if in.PlanOnly {
		plan = r.planned()
	}
	out.Receipt = r.close(outcome, plan, r.leftHalfway)
	return out, nil
}
