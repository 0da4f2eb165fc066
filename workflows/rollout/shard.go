package rollout

import (
	"errors"
	"fmt"
	"time"

	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

// ShardSize is the most hosts of one shard: about 1,300 events of history,
// well below the 4,096 at which Temporal suggests to continue as new.
const ShardSize = 200

const (
	// agentMissing is how long an agent's queue may stay without a poller
	// (design, contract 6).
	agentMissing = 2 * time.Minute
	// baselineLimit is generous: NVML answers within seconds, a driver that is
	// initialising within half a minute.
	baselineLimit = time.Minute
	// agentSlack lets the agent's own deadline come first, with its reason.
	agentSlack = 30 * time.Second
	// replaceSlack is what listing and watching take beside the hosts' own
	// deadline.
	replaceSlack = 2 * time.Minute
)

// ShardInput asks for the replacement of a wave's hosts, or of a part of it.
type ShardInput struct {
	Scope      tensorfusion.Scope `json:"scope"`
	Pool       string             `json:"pool"`
	Goal       tensorfusion.Goal  `json:"goal"`
	Prepare    *gpunode.Prepare   `json:"prepare,omitempty"`
	Validation string             `json:"validation"`
	Level      gpu.Level          `json:"level"`
	Expect     *gpu.Expect        `json:"expect,omitempty"`
	Strict     bool               `json:"strict,omitempty"`
	Limit      time.Duration      `json:"limit"`
	Hosts      []ShardHost        `json:"hosts"`
}

// ShardHost is a host with the pod that is to go, and the boot that its Node is
// of. Baseline is set when an earlier attempt took it before it replaced the
// pod: the GPUs of that time must be there again.
type ShardHost struct {
	tensorfusion.HostTarget
	BootID   string        `json:"bootID,omitempty"`
	Baseline *gpu.Baseline `json:"baseline,omitempty"`
	// Partitioned: the host's MIG instances are tenants of TensorFusion.
	Partitioned bool `json:"partitioned,omitempty"`
}

// ShardResult holds one row per host, in the input's order.
type ShardResult struct {
	Hosts []HostRow `json:"hosts"`
}

// Shard replaces and proves up to ShardSize hosts at once: two activities per
// host for its agent, a run of its own where it is prepared, and one activity
// for all of them in the cluster, so that the history costs a constant number
// of events per host. It takes no verbs: the rollout that started it does.
func Shard(ctx workflow.Context, in ShardInput) (ShardResult, error) {
	s := &shard{
		in: in, rows: make([]HostRow, len(in.Hosts)), baselines: make([]*gpu.Baseline, len(in.Hosts)), boots: make([]string, len(in.Hosts)),
	}
	for i, h := range in.Hosts {
		s.rows[i], s.boots[i] = HostRow{Name: h.Name, OldUID: h.UID}, h.BootID
	}
	if in.Prepare != nil {
		s.prepare(ctx)
	}
	if in.Validation == ValidateAgent {
		s.baseline(ctx)
	}
	if err := s.replace(ctx); err != nil {
		return ShardResult{}, err
	}
	if in.Validation == ValidateAgent {
		s.validate(ctx)
	}
	return ShardResult{Hosts: s.rows}, nil
}

type shard struct {
	in        ShardInput
	rows      []HostRow
	baselines []*gpu.Baseline
	// boots are those that the Nodes were of when they were last looked at. An
	// agent that runs in another is on another machine than it says.
	boots []string
}

func (s *shard) fail(i int, f finding.Finding) {
	s.rows[i].Outcome, s.rows[i].Failure = tensorfusion.OutcomeFailed, &f
	s.rows[i].Verdict = gpu.Unproven
}

// baseline asks every agent for a snapshot. A host whose agent does not answer
// has failed before anything of it was touched.
func (s *shard) baseline(ctx workflow.Context) {
	futures := make([]workflow.Future, len(s.in.Hosts))
	for i, h := range s.in.Hosts {
		if s.rows[i].Outcome != "" {
			continue
		}
		futures[i] = workflow.ExecuteActivity(s.agent(ctx, h.Name, "baseline of "+h.Name, baselineLimit+agentSlack),
			gpu.BaselineActivity, gpu.BaselineRequest{Node: h.Name, NodeBootID: s.boots[i]})
	}
	for i, h := range s.in.Hosts {
		if futures[i] == nil {
			continue
		}
		var b gpu.Baseline
		if err := futures[i].Get(ctx, &b); err != nil {
			f := s.agentFailure(h.Name, "baseline", err)
			f.Why = "without a baseline nothing could be proven afterwards; the pod was not touched"
			s.fail(i, f)
			s.rows[i].Baseline = h.Baseline
			continue
		}
		s.baselines[i] = s.reference(b, h.Baseline)
	}
}

// reference is what a host is compared with: the host as it was before the
// first attempt touched it. A later baseline would take for given what that
// attempt broke. Where the set-up is changed on purpose, what hangs on MIG is
// left out.
func (s *shard) reference(now gpu.Baseline, before *gpu.Baseline) *gpu.Baseline {
	switch {
	case before == nil:
		return &now
	case s.in.Prepare != nil:
		b := before.WithoutMIG()
		return &b
	}
	return before
}

// replace has the pods of all hosts with a baseline replaced and proven in one
// activity.
func (s *shard) replace(ctx workflow.Context) error {
	req := tensorfusion.ReplaceRequest{Scope: s.in.Scope, Pool: s.in.Pool, Goal: s.in.Goal, Limit: s.in.Limit}
	var index []int
	for i, h := range s.in.Hosts {
		if s.rows[i].Outcome == "" {
			req.Hosts = append(req.Hosts, h.HostTarget)
			index = append(index, i)
		}
	}
	if len(req.Hosts) == 0 {
		return nil
	}
	var out tensorfusion.ReplaceResult
	if err := s.cluster(ctx, tensorfusion.ReplaceActivity, "replace the hypervisors of "+naming(req.Hosts), s.in.Limit+replaceSlack, req, &out); err != nil {
		return err
	}
	if len(out.Hosts) != len(req.Hosts) {
		return finding.Finding{
			Object: "activity " + tensorfusion.ReplaceActivity, Expected: fmt.Sprintf("%d results", len(req.Hosts)),
			Found: fmt.Sprintf("%d", len(out.Hosts)), Next: "run workers of one version",
		}.Error(finding.Stop)
	}
	for k, h := range out.Hosts {
		row := &s.rows[index[k]]
		row.Outcome, row.NewUID, row.Seconds, row.Failure = h.Outcome, h.NewUID, h.Seconds, h.Failure
		if h.OldUID != "" {
			row.OldUID = h.OldUID
		}
		s.boots[index[k]] = h.BootID
		if h.Outcome == tensorfusion.OutcomeFailed {
			row.Baseline = s.baselines[index[k]]
		}
	}
	return nil
}

// validate asks the agents of all replaced hosts for their verdict.
func (s *shard) validate(ctx workflow.Context) {
	limit := gpunode.ValidationLimit(s.in.Level, s.in.Expect)
	expect := s.expect(ctx)
	futures := make([]workflow.Future, len(s.in.Hosts))
	for i, h := range s.in.Hosts {
		if s.rows[i].Outcome == tensorfusion.OutcomeFailed {
			continue
		}
		futures[i] = workflow.ExecuteActivity(s.agent(ctx, h.Name, "validate "+h.Name, limit+agentSlack),
			gpu.ValidateActivity, gpu.ValidateRequest{
				Node: h.Name, NodeBootID: s.boots[i], Level: s.in.Level, Baseline: s.baselines[i], Expect: expect(h.Name), Deadline: limit,
			})
	}
	for i, h := range s.in.Hosts {
		if futures[i] == nil {
			continue
		}
		var r gpu.Result
		if err := futures[i].Get(ctx, &r); err != nil {
			s.unproven(i, s.agentFailure(h.Name, "validation", err))
			continue
		}
		s.judge(i, r)
	}
}

// unproven fails a host whose agent has given no verdict.
func (s *shard) unproven(i int, f finding.Finding) {
	f.Why = "the pod was replaced, but nothing proves that its GPUs compute"
	s.fail(i, f)
	s.rows[i].Baseline = s.baselines[i]
}

// judge turns a verdict into the host's outcome.
func (s *shard) judge(i int, r gpu.Result) {
	row := &s.rows[i]
	row.Verdict = r.Verdict
	switch {
	case r.Verdict == gpu.Pass:
		return
	case r.Verdict == gpu.Degraded && !s.in.Strict:
		row.Warning = "degraded: " + failures(r)
		return
	}
	next := "repair the host and reboot it (what its log has said since the baseline counts until then), then answer retry: it is validated again"
	if r.Verdict == gpu.ResetNeeded {
		next = "reset the GPU or reboot the host, then answer retry"
	}
	s.fail(i, finding.Finding{
		Object: "GPUs of host " + row.Name, Expected: "verdict pass", Found: "verdict " + string(r.Verdict) + ": " + failures(r),
		Why: "the pod runs, but its GPUs are not as they were before", Next: next,
	})
	row.Verdict = r.Verdict
	row.Baseline = s.baselines[i]
}

// severities from the one that decides a verdict down.
var severities = []gpu.Severity{gpu.Fatal, gpu.Reset, gpu.Warn, gpu.Info}

// failures is the one-line form of the checks that did not pass, the gravest
// first. What was not answered is named only where it decided the verdict.
func failures(r gpu.Result) string {
	var open []gpu.Check
	for _, severity := range severities {
		for _, c := range r.Checks {
			if !c.OK && c.Severity == severity && (c.Skipped == "" || r.Verdict == gpu.Unproven) {
				open = append(open, c)
			}
		}
	}
	text := ""
	for _, c := range open {
		if text != "" {
			text += "; "
		}
		text += c.Name
		if c.Device != "" {
			text += " of " + c.Device
		}
		switch {
		case c.Skipped != "":
			text += " not answered: " + c.Skipped
		case c.Expected != "":
			text += fmt.Sprintf(": expected %s, found %s", c.Expected, c.Found)
		default:
			text += ": " + c.Found
		}
		if len(text) > 400 {
			return text[:400] + " ..."
		}
	}
	if text == "" {
		return "the agent named no check"
	}
	return text
}

// cluster runs one activity of the cluster, however long its queue has no worker.
func (s *shard) cluster(ctx workflow.Context, name, summary string, limit time.Duration, req, out any) error {
	queue := protocol.ClusterQueue(s.in.Scope.Target.Cluster)
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		StartToCloseTimeout: limit,
		HeartbeatTimeout:    release.Heartbeat,
		WaitForCancellation: true,
		Summary:             summary,
		RetryPolicy:         release.Retries(),
	})
	return stage.Queued(ctx, queue, out, func(since time.Time) error {
		tell(ctx, queueNote{Queue: queue, Since: since})
		return nil
	}, func() { tell(ctx, queueNote{}) }, name, req)
}

func (s *shard) agent(ctx workflow.Context, node, summary string, limit time.Duration) workflow.Context {
	return workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		TaskQueue:              gpu.TaskQueue(s.in.Scope.Target.Cluster, node),
		ScheduleToStartTimeout: agentMissing,
		StartToCloseTimeout:    limit,
		HeartbeatTimeout:       release.Heartbeat,
		Summary:                summary,
		RetryPolicy: &temporal.RetryPolicy{
			InitialInterval: 2 * time.Second, BackoffCoefficient: 2, MaximumInterval: 10 * time.Second, MaximumAttempts: 5,
		},
	})
}

// agentFailure names what went wrong with an agent; above all the queue that
// nobody polls.
func (s *shard) agentFailure(node, what string, err error) finding.Finding {
	queue := gpu.TaskQueue(s.in.Scope.Target.Cluster, node)
	var timeout *temporal.TimeoutError
	if errors.As(err, &timeout) {
		if timeout.TimeoutType() == enums.TIMEOUT_TYPE_SCHEDULE_TO_START {
			return finding.Finding{
				Object: "agent of host " + node, Expected: "a poller of the task queue " + queue,
				Found: fmt.Sprintf("nobody polled it for %s", agentMissing),
				Next:  "start refit-gpuagent on the host, check its Temporal address and node name, then answer retry",
			}
		}
		return finding.Finding{
			Object: "agent of host " + node, Expected: what + " within its deadline", Found: "no answer",
			Next: "look at the agent's log on the host: a hanging driver needs a reset or reboot; then answer retry",
		}
	}
	if f, _, ok := finding.Of(err); ok {
		return f
	}
	return finding.Finding{
		Object: "agent of host " + node, Expected: what, Found: message(err),
		Next: "look at the agent's log on the host, then answer retry",
	}
}

// naming is a short list of hosts for summaries.
func naming(hosts []tensorfusion.HostTarget) string {
	if len(hosts) == 1 {
		return hosts[0].Name
	}
	return fmt.Sprintf("%s and %d more hosts", hosts[0].Name, len(hosts)-1)
}
