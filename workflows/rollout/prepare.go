package rollout

import (
	"errors"
	"fmt"
	"strings"
	"time"

	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
)

// preparedShard is ShardSize where hosts are prepared: each host is a child
// run then, started in one message together with the others, and each is given
// the layout files.
const preparedShard = 50

// PrepareProblems returns what is wrong with the set-up that a plan declares
// at path for the hosts of a component.
func PrepareProblems(path, component string, p *gpunode.Prepare) []plan.Problem {
	if p != nil && component != Hypervisor {
		return []plan.Problem{{Path: path, Message: fmt.Sprintf("is set for component %q: only hosts whose hypervisor is replaced are prepared; leave it out", component)}}
	}
	return p.Problems(path)
}

// nodeRun is the run that prepares one host. It validates as deep as the
// rollout does: the old hypervisor still runs, so the host is not idle. Where
// the MIG instances are tenants of TensorFusion it sets the mode only, whatever
// the plan says.
func (s *shard) nodeRun(h ShardHost) gpunode.Input {
	p := *s.in.Prepare
	if p.MIG != nil && h.Partitioned {
		mig := *p.MIG
		mig.ModeOnly = true
		p.MIG = &mig
	}
	return gpunode.Input{
		Target: s.in.Scope.Target, Node: h.Name, Cordon: true, Prepare: &p,
		Level: s.in.Level, Expect: s.in.Expect, Strict: s.in.Strict, Unattended: true,
	}
}

// prepare brings every host of the shard to the declared set-up, each by a run
// of its own. A host that does not get there has failed before its pod was
// touched. A shard that is ended asks the runs to stop instead of ending them:
// they give the node back to those that were told to keep off.
func (s *shard) prepare(ctx workflow.Context) {
	futures := make([]workflow.ChildWorkflowFuture, len(s.in.Hosts))
	ids := make([]string, len(s.in.Hosts))
	for i, h := range s.in.Hosts {
		ids[i] = workflow.GetInfo(ctx).WorkflowExecution.ID + ".prepare." + h.Name
		cctx := workflow.WithChildOptions(ctx, workflow.ChildWorkflowOptions{
			WorkflowID:          ids[i],
			TaskQueue:           protocol.TaskQueue,
			ParentClosePolicy:   enums.PARENT_CLOSE_POLICY_REQUEST_CANCEL,
			WaitForCancellation: true,
			StaticSummary:       "prepare " + h.Name,
		})
		futures[i] = workflow.ExecuteChildWorkflow(cctx, protocol.GPUNode,
			s.nodeRun(h))
	}
	for i, h := range s.in.Hosts {
		var out gpunode.Result
		err := futures[i].Get(ctx, &out)
		if err == nil && out.Outcome == protocol.OutcomeDone {
			s.rows[i].Prepared = done(out)
			continue
		}
		s.fail(i, setUpFailure(h.Name, ids[i], out, err))
		s.rows[i].Baseline = h.Baseline
		s.rows[i].LeftBehind = out.LeftBehind
		if err != nil && !locked(err) {
			s.rows[i].LeftBehind = []string{fmt.Sprintf(
				"run %s did not end by itself: look whether Node %s is cordoned and foreign automation kept off it; a GPUNode of it with cordon puts both right", ids[i], h.Name)}
		}
	}
}

// done is what a run did to the host, in a few words: a rollout carries it for
// every host.
func done(r gpunode.Result) string {
	switch {
	case r.Prepared == nil || len(r.Prepared.Actions) == 0:
		return "was as declared"
	case len(r.Prepared.Actions) == 1:
		return "1 action"
	}
	return fmt.Sprintf("%d actions", len(r.Prepared.Actions))
}

// setUpFailure is what a person reads of a host whose set-up failed.
func setUpFailure(host, run string, out gpunode.Result, err error) finding.Finding {
	f := finding.Finding{
		Object: fmt.Sprintf("set-up of host %s (run %s)", host, run), Expected: "the declared set-up, proven",
		Why: "the host is not as declared; its hypervisor pod was not touched", Next: "see what the run found, then answer retry",
	}
	switch {
	case err != nil:
		f.Found = message(err)
	case out.Failure != nil:
		f.Found = fmt.Sprintf("%s: %s", strings.TrimSuffix(out.Failure.Expected, " done"), out.Failure.Found)
		if out.Failure.Next != "" {
			f.Next = out.Failure.Next
		}
	default:
		f.Found = "the run was aborted by itself"
	}
	return f
}

func locked(err error) bool {
	var app *temporal.ApplicationError
	return errors.As(err, &app) && app.Type() == protocol.Locked
}

// message is the cause's own text, without the wrapping that names event
// numbers.
func message(err error) string {
	var app *temporal.ApplicationError
	if errors.As(err, &app) {
		return app.Message()
	}
	return err.Error()
}

// unprepared warns of the hosts that are on target without this run having
// prepared them: the set-up is part of a host's turn, and they had none.
func (h *hypervisors) unprepared() {
	if h.in.Prepare == nil {
		return
	}
	var names []string
	for _, b := range h.layout.Batches {
		for _, name := range b.Hosts {
			if h.plan.Hosts[name].Status == plan.Already && h.rows[name].Prepared == "" {
				names = append(names, name)
			}
		}
	}
	names = append(names, h.layout.Done...)
	if len(names) > 0 {
		h.Warn(fmt.Sprintf("%s came on target without a turn in this rollout and had no set-up: %s; start a GPUNode for each", hosts(len(names)), shorten(names)))
	}
}

// preparing is what the set-up adds to the longest turn of a host.
func (h *hypervisors) preparing() time.Duration {
	if h.in.Prepare == nil {
		return 0
	}
	s := shard{in: ShardInput{Prepare: h.in.Prepare, Level: h.in.Level, Expect: h.in.Expect}}
	return s.nodeRun(ShardHost{}).Longest()
}

// shardSize is the most hosts of one shard.
func (h *hypervisors) shardSize() int {
	if h.in.Prepare != nil {
		return preparedShard
	}
	return ShardSize
}
