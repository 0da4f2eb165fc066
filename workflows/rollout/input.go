// Package rollout takes one component over the hosts of one pool: canary,
// batches, waves, soak, gates, budget. It carries out what the pure planner in
// rollout/plan decides, as stages of the sequencer. It must do no I/O of its
// own and hold no rule about which host goes next.
package rollout

import (
	"fmt"
	"slices"
	"time"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

// Components.
const (
	Hypervisor = "hypervisor"
	Worker     = "worker"
	Client     = "client"
)

// Validation modes. In mode canaryJob the run that starts the rollout proves
// each pool by a Job afterwards; hosts are proven by their pods alone.
const (
	ValidateAgent     = "agent"
	ValidateCanaryJob = "canaryJob"
	ValidateNone      = "none"
)

// AcknowledgeValidation accepts that hosts are called proven without a GPU call.
const AcknowledgeValidation = "validation"

// Input is the one JSON value of a Rollout.
type Input struct {
	Scope     tensorfusion.Scope `json:"scope"`
	Component string             `json:"component" jsonschema:"enum=hypervisor,enum=worker,enum=client"`
	// Pool is the GPUPool, Entry its name in spec.gpuPools, which names the
	// stages: rollout.hypervisor.shared.canary.
	Pool     string            `json:"pool"`
	Entry    string            `json:"entry"`
	Strategy plan.Strategy     `json:"strategy,omitzero"`
	Goal     tensorfusion.Goal `json:"goal,omitzero"`
	// Validation is agent (default), canaryJob or none; Level how deep the
	// agent goes. Where no agent and no Job proves the hosts, which a rollout
	// started alone must accept as "validation" in acknowledge, its result
	// carries a warning.
	Validation string    `json:"validation,omitempty" jsonschema:"enum=agent,enum=canaryJob,enum=none"`
	Level      gpu.Level `json:"level,omitempty" jsonschema:"enum=quick,enum=standard,enum=stress"`
	// Acknowledge names what the plan accepts: "validation".
	Acknowledge []string `json:"acknowledge,omitempty"`
	// Prepare has every host of a batch brought to a declared set-up and proven
	// by a GPUNode of its own before its pod is replaced; a host that can't be
	// has failed, its pod untouched. Component hypervisor alone.
	Prepare *gpunode.Prepare `json:"prepare,omitempty"`
	// Expect is what every host must be beside what it was, such as a driver
	// version. With tensorFusion in it the hypervisor's own answers are compared
	// on the host; its port is the pool's where the plan names none.
	Expect *gpu.Expect `json:"expect,omitempty"`
	// Strict counts the verdict "degraded" as a failure instead of a warning.
	Strict  bool           `json:"strict,omitempty"`
	Windows []window.Spec  `json:"windows,omitempty"`
	Workers *WorkerOptions `json:"workers,omitempty"`
	Clients *ClientOptions `json:"clients,omitempty"`
	// Deadline is when the parent's maxDuration ends: the rollout parks then, and
	// a retry allows another MaxDuration.
	Deadline    time.Time       `json:"deadline,omitzero" jsonschema:"-"`
	MaxDuration window.Duration `json:"maxDuration,omitempty" jsonschema:"-"`
	// FixFirst takes broken hosts first, as a rollback wants it.
	FixFirst bool `json:"fixFirst,omitempty"`
	// Parent is nil when the rollout was started alone: it then takes the
	// release's Lease and holds auto update by itself.
	Parent *protocol.Parent `json:"parent,omitempty"`
	// Resume is set by continue-as-new alone.
	Resume *State `json:"resume,omitempty"`
}

// Result of a Rollout, which reads as a protocol.Receipt too. Hosts are in the
// order of the batches; hosts on target before the rollout began come last.
type Result struct {
	Kind       string             `json:"kind"`
	Cluster    string             `json:"cluster"`
	Object     string             `json:"object"`
	WorkflowID string             `json:"workflowID"`
	RunID      string             `json:"runID"`
	Started    time.Time          `json:"started"`
	Ended      time.Time          `json:"ended"`
	Ignored    []protocol.Ignored `json:"ignored,omitempty"`

	Outcome  protocol.Outcome  `json:"outcome"`
	Hosts    []HostRow         `json:"hosts,omitempty"`
	Progress protocol.Progress `json:"progress"`
	Stages   []protocol.Stage  `json:"stages,omitempty"`
	// Drift lists what changed in the pool without being part of the plan.
	Drift      []finding.Finding `json:"drift,omitempty"`
	Warnings   []string          `json:"warnings,omitempty"`
	LeftBehind []string          `json:"leftBehind,omitempty"`
	// LeftClients are application pods that keep their outdated injection.
	LeftClients []tensorfusion.ClientPod `json:"leftClients,omitempty"`
	// Artifacts are the record and the rows per host of a run that was started
	// alone.
	Artifacts []artifact.Ref `json:"artifacts,omitempty"`
}

// Outcomes of a host beside those of tensorfusion.HostResult.
const (
	OutcomeGone = "gone" // left the pool
	OutcomeLeft = "left" // its batch was skipped
	// OutcomeUnproven: it was taken, and what became of it is not known.
	OutcomeUnproven = "unproven"
)

// HostRow is the record of one host. It is kept small: a rollout carries one
// per host through every continue-as-new.
type HostRow struct {
	Name string `json:"name"`
	// Outcome is replaced, already, failed, gone, left or unproven.
	Outcome string      `json:"outcome"`
	OldUID  string      `json:"oldUID,omitempty"`
	NewUID  string      `json:"newUID,omitempty"`
	Seconds float64     `json:"seconds,omitempty"`
	Verdict gpu.Verdict `json:"verdict,omitempty"`
	// Failure of a failed host; Warning of one that passed with a remark.
	Failure *finding.Finding `json:"failure,omitempty"`
	Warning string           `json:"warning,omitempty"`
	// Prepared says in words what was done to bring the host to the plan's
	// set-up; empty without one, and when it failed.
	Prepared string `json:"prepared,omitempty"`
	// LeftBehind is what a set-up that failed did not undo; the result of the
	// rollout lists it.
	LeftBehind []string `json:"leftBehind,omitempty"`
	// Baseline of a host that failed after its pod was replaced: what the next
	// attempt has to find again.
	Baseline *gpu.Baseline `json:"baseline,omitempty"`
}

const (
	defaultWorkerBatch = int32(20)
	defaultStall       = 10 * time.Minute
	defaultLimit       = 10 * time.Minute
)

func (in Input) withDefaults() Input {
	in.Strategy = in.Strategy.WithDefaults()
	if in.Entry == "" {
		in.Entry = in.Pool
	}
	if in.Validation == "" {
		in.Validation = ValidateAgent
	}
	if in.Level == "" {
		in.Level = gpu.Quick
	}
	if in.Workers != nil {
		in.Workers = in.Workers.withDefaults()
	}
	if in.Component == Client {
		in.Clients = in.Clients.withDefaults()
	}
	return in
}

// Validate returns every problem of the input at once.
func (in Input) Validate() []plan.Problem {
	var ps []plan.Problem
	add := func(path, format string, args ...any) {
		ps = append(ps, plan.Problem{Path: path, Message: fmt.Sprintf(format, args...)})
	}
	if in.Scope.Target.Cluster == "" {
		add("scope.target.cluster", "is missing: name a cluster of the worker's configuration")
	}
	if in.Scope.Release.Name == "" || in.Scope.Release.Namespace == "" {
		add("scope.release", "is %q in %q: want name and namespace of the Helm release", in.Scope.Release.Name, in.Scope.Release.Namespace)
	}
	if in.Pool == "" {
		add("pool", "is missing: name a GPUPool")
	}
	if !slices.Contains([]string{"", ValidateAgent, ValidateCanaryJob, ValidateNone}, in.Validation) {
		add("validation", "is %q: want agent, canaryJob or none", in.Validation)
	}
	if !slices.Contains([]gpu.Level{"", gpu.Quick, gpu.Standard, gpu.Stress}, in.Level) {
		add("level", "is %q: want quick, standard or stress", in.Level)
	}
	if in.Component == Hypervisor {
		if in.Goal.HypervisorImage == "" {
			add("goal.hypervisorImage", "is missing: a rollout must know the image that proves a host")
		}
		if in.Goal.PodName == "" {
			add("goal.podName", "is missing: want the prefix of the pod's name, hypervisor- or tf-hypervisor-")
		}
		if why := in.unproven(); why != "" && in.Parent == nil && !slices.Contains(in.Acknowledge, AcknowledgeValidation) {
			add("validation", "is %s: %s; add %q to acknowledge to accept that", in.Validation, why, AcknowledgeValidation)
		}
	}
	for i, a := range in.Acknowledge {
		if a != AcknowledgeValidation {
			add(fmt.Sprintf("acknowledge[%d]", i), "is %q: a rollout asks for nothing but %q", a, AcknowledgeValidation)
		}
	}
	ps = append(ps, gpunode.ExpectProblems("expect", in.Expect)...)
	ps = append(ps, ComponentProblems("", in.Component, in.Strategy, in.Workers, in.Clients, in.Prepare)...)
	return ps
}

// unproven says why no GPU call proves the hosts; empty when one does.
func (in Input) unproven() string {
	switch {
	case in.Component != Hypervisor:
		return "" // only hosts are validated
	case in.Validation == ValidateNone:
		return "hosts are called proven without a GPU call"
	case in.Validation == ValidateCanaryJob && in.Parent == nil:
		return "no run starts the Job after a rollout of its own, so hosts are called proven without a GPU call"
	}
	return ""
}

// warnUnproven has the result say that its hosts were not proven by a GPU call.
func (r *run) warnUnproven(hosts []HostRow) {
	n := 0
	for _, h := range hosts {
		if h.Outcome == tensorfusion.OutcomeReplaced {
			n++
		}
	}
	if why := r.in.unproven(); why != "" && n > 0 {
		r.Warn(fmt.Sprintf("validation is %s: %s (%d of pool %s)", r.in.Validation, why, n, r.in.Entry))
	}
}

// PlannerHosts are observed hosts as the planner sees them.
func PlannerHosts(hosts []tensorfusion.Host) []plan.Host {
	out := make([]plan.Host, len(hosts))
	for i, h := range hosts {
		out[i] = plan.Host{Name: h.Name, Created: h.Created, Labels: h.Labels, OnTarget: h.OnTarget, Broken: h.Broken}
	}
	return out
}
