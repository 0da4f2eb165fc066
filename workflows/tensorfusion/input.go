// Package tensorfusion holds the workflows that upgrade and roll back a
// TensorFusion installation: which stage comes when, what parks, what is asked
// of a person. Effects live in activities/tensorfusion; this package must do
// no I/O.
package tensorfusion

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/mask"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

// Components that a plan may roll.
const (
	Hypervisor = rollout.Hypervisor
	Worker     = rollout.Worker
	Client     = rollout.Client
)

// UpgradeInput is the plan file of a TensorFusionUpgrade: one struct, one JSON
// value.
type UpgradeInput struct {
	Kind string `json:"kind,omitempty" jsonschema:"enum=TensorFusionUpgrade"`
	// Cluster is a name in the worker's configuration.
	Cluster string               `json:"cluster"`
	Release tensorfusion.Release `json:"release"`
	Chart   tensorfusion.Chart   `json:"chart"`
	Values  tensorfusion.Values  `json:"values,omitzero"`
	// HypervisorImage is explicit in every plan (T02).
	HypervisorImage string `json:"hypervisorImage"`
	// IsolationPolicy pins controller.isolationModePolicy: static (default)
	// or dynamic.
	IsolationPolicy string    `json:"isolationPolicy,omitempty" jsonschema:"enum=static,enum=dynamic"`
	Rollouts        []Rollout `json:"rollouts"`
	// Policy is what becomes of the auto-update policy after every pod is
	// proven: restore (default), seal or keepOff.
	Policy     string     `json:"policy,omitempty" jsonschema:"enum=restore,enum=seal,enum=keepOff"`
	Validation Validation `json:"validation,omitzero"`
	// Acknowledge names the operator rows the plan accepts (T04, T05, P08 ...);
	// "policy" accepts that auto update stays off for what no rollout takes.
	Acknowledge []string `json:"acknowledge,omitempty"`
	// AcceptFloating lists images whose floating tag is accepted (P08).
	AcceptFloating []string        `json:"acceptFloating,omitempty"`
	Windows        []window.Spec   `json:"windows,omitempty"`
	MaxDuration    window.Duration `json:"maxDuration,omitempty"`
	Limits         Limits          `json:"limits,omitzero"`
	// PlanOnly stops after the plan stage.
	PlanOnly bool `json:"planOnly,omitempty"`
}

// Rollout is one component over the pools of the plan.
type Rollout struct {
	Component string `json:"component" jsonschema:"enum=hypervisor,enum=worker,enum=client"`
	// Pools are entries of spec.gpuPools by name; empty means every pool.
	Pools    []string      `json:"pools,omitempty"`
	Strategy plan.Strategy `json:"strategy,omitzero"`
	// Prepare brings each host to a declared MIG or vGPU set-up before its
	// hypervisor is replaced.
	Prepare *gpunode.Prepare       `json:"prepare,omitempty"`
	Workers *rollout.WorkerOptions `json:"workers,omitempty"`
	Clients *rollout.ClientOptions `json:"clients,omitempty"`
}

// Validation says how a node and a pool are proven.
type Validation struct {
	// Mode is agent (default), canaryJob or none; none must be acknowledged
	// as "validation".
	Mode  string    `json:"mode,omitempty" jsonschema:"enum=agent,enum=canaryJob,enum=none"`
	Level gpu.Level `json:"level,omitempty" jsonschema:"enum=quick,enum=standard,enum=stress"`
	// Expect is what every host's agent requires beside the baseline; with
	// tensorFusion in it also what the hypervisor on the host answers.
	Expect *gpu.Expect `json:"expect,omitempty"`
	// CanaryImage holds the CUDA probe run at the end in each rolled pool with
	// the argument probe: the agent's image does. Empty skips the Job and must be
	// acknowledged as "T20".
	CanaryImage string `json:"canaryImage,omitempty"`
}

// Validation modes.
const (
	ValidateAgent     = rollout.ValidateAgent
	ValidateCanaryJob = rollout.ValidateCanaryJob
	ValidateNone      = rollout.ValidateNone
)

// Limits are deadlines of single steps.
type Limits struct {
	// Controller is the limit of its rollout (T09), default 180 s as in the guide.
	Controller window.Duration `json:"controller,omitempty"`
	// Hold is how long the pools may take to show the held policy, default 2 m.
	Hold window.Duration `json:"hold,omitempty"`
	// Release is the limit of the Helm operation, default 10 m.
	Release window.Duration `json:"release,omitempty"`
	// Settle is how long the preflight waits for what ends by itself, such as
	// a rollout of the controller's own, default 5 m.
	Settle window.Duration `json:"settle,omitempty"`
	// Verify is the limit of the last proof, default 5 m.
	Verify window.Duration `json:"verify,omitempty"`
}

// RollbackInput is the plan file of a TensorFusionRollback.
type RollbackInput struct {
	Kind    string               `json:"kind,omitempty" jsonschema:"enum=TensorFusionRollback"`
	Cluster string               `json:"cluster"`
	Release tensorfusion.Release `json:"release"`
	// Revision to return to; 0 = the newest superseded one.
	Revision       int             `json:"revision,omitempty"`
	Strategy       plan.Strategy   `json:"strategy,omitzero"`
	Policy         string          `json:"policy,omitempty" jsonschema:"enum=restore,enum=seal,enum=keepOff"`
	Validation     Validation      `json:"validation,omitzero"`
	Acknowledge    []string        `json:"acknowledge,omitempty"`
	AcceptFloating []string        `json:"acceptFloating,omitempty"`
	Windows        []window.Spec   `json:"windows,omitempty"`
	MaxDuration    window.Duration `json:"maxDuration,omitempty"`
	Limits         Limits          `json:"limits,omitzero"`
	PlanOnly       bool            `json:"planOnly,omitempty"`
	// Of is set when an upgrade runs this rollback as its answer: the Lease
	// is the parent's and the policy as found before its hold is restored.
	Of *Answered `json:"of,omitempty" jsonschema:"-"`
}

// Answered hands a running upgrade over to its rollback.
type Answered struct {
	Holder string                    `json:"holder"`
	Policy []tensorfusion.PoolPolicy `json:"policy"`
	Parent protocol.Parent           `json:"parent"`
	// Revision, Pools and Youngest are the release, its pools and its youngest
	// hypervisor pod as they were before anything was changed.
	Revision int                 `json:"revision"`
	Pools    []tensorfusion.Pool `json:"pools"`
	Youngest time.Time           `json:"youngest,omitzero"`
	// Rollouts are those of the upgrade's hypervisors that name their pools;
	// every other pool is rolled by the rollback's own strategy.
	Rollouts []Rollout `json:"rollouts,omitempty"`
}

// WithDefaults fills what the plan left out.
func (l Limits) WithDefaults() Limits {
	set := func(d *window.Duration, v time.Duration) {
		if *d == 0 {
			*d = window.Duration(v)
		}
	}
	set(&l.Controller, 180*time.Second)
	set(&l.Hold, 2*time.Minute)
	set(&l.Release, 10*time.Minute)
	set(&l.Settle, 5*time.Minute)
	set(&l.Verify, 5*time.Minute)
	return l
}

// WithDefaults fills what the plan left out.
func (v Validation) WithDefaults() Validation {
	if v.Mode == "" {
		v.Mode = ValidateAgent
	}
	if v.Level == "" {
		v.Level = gpu.Quick
	}
	return v
}

// problems collects every fault of a plan with its JSON path.
type problems []plan.Problem

func (p *problems) add(path, format string, args ...any) {
	*p = append(*p, plan.Problem{Path: path, Message: fmt.Sprintf(format, args...)})
}

func (p *problems) release(cluster string, r tensorfusion.Release) {
	if cluster == "" {
		p.add("cluster", "is missing: name a cluster of the worker's configuration")
	}
	if r.Name == "" {
		p.add("release.name", "is missing: the Helm release under care, for example tensor-fusion-sys")
	}
	if r.Namespace == "" {
		p.add("release.namespace", "is missing: the release's namespace")
	}
}

func (p *problems) windows(specs []window.Spec) {
	for i, s := range specs {
		if err := s.Validate(); err != nil {
			p.add(fmt.Sprintf("windows[%d]", i), "%v", err)
		}
	}
}

func (p *problems) choice(path, value string, allowed ...string) {
	if value != "" && !slices.Contains(allowed, value) {
		p.add(path, "is %q: want one of %s", value, strings.Join(allowed, ", "))
	}
}

func (p *problems) duration(path string, d window.Duration) {
	if d < 0 {
		p.add(path, "is %s: want a positive duration", d)
	}
}

func (p *problems) limits(l Limits) {
	p.duration("limits.controller", l.Controller)
	p.duration("limits.hold", l.Hold)
	p.duration("limits.release", l.Release)
	p.duration("limits.settle", l.Settle)
	p.duration("limits.verify", l.Verify)
}

func (p *problems) validation(v Validation, acknowledged []string) {
	p.choice("validation.mode", v.Mode, ValidateAgent, ValidateCanaryJob, ValidateNone)
	p.choice("validation.level", string(v.Level), string(gpu.Quick), string(gpu.Standard), string(gpu.Stress))
	*p = append(*p, gpunode.ExpectProblems("validation.expect", v.Expect)...)
	if v.Mode == ValidateNone && !slices.Contains(acknowledged, rollout.AcknowledgeValidation) {
		p.add("validation.mode", "is none: hosts would be called proven without a GPU call; add \"validation\" to acknowledge to accept that")
	}
	if v.CanaryImage == "" && !slices.Contains(acknowledged, "T20") {
		p.add("validation.canaryImage", "is missing: name the image of the CUDA probe, or add \"T20\" to acknowledge to finish without a real CUDA call in a workload")
	}
	if v.Mode == ValidateCanaryJob && v.CanaryImage == "" {
		p.add("validation.canaryImage", "is missing: mode canaryJob needs the image of the CUDA probe")
	}
}

// Validate returns every problem of the plan; nil means it may start.
func (in UpgradeInput) Validate() []plan.Problem {
	var p problems
	p.choice("kind", in.Kind, "TensorFusionUpgrade")
	p.release(in.Cluster, in.Release)
	if in.Chart.Ref == "" {
		p.add("chart.ref", "is missing: an oci:// reference, a repository URL with #name, or a folder on the worker")
	}
	if in.Chart.Revision != 0 {
		p.add("chart.revision", "is %d: returning to a stored revision is TensorFusionRollback's work", in.Chart.Revision)
	}
	if in.HypervisorImage == "" {
		p.add("hypervisorImage", "is missing: T02: the chart pins the hypervisor apart from the controller, so every plan names it")
	}
	p.choice("isolationPolicy", in.IsolationPolicy, "static", "dynamic")
	p.choice("policy", in.Policy, tensorfusion.PolicyRestore, tensorfusion.PolicySeal, tensorfusion.PolicyKeepOff)
	for _, path := range mask.RefuseInline(in.Values.Inline) {
		p.add("values.inline."+path, "is a secret key: name it by reference in values.secrets, so that it never enters history")
	}
	for i, ref := range in.Values.Secrets {
		if why := ref.Problem(); why != "" {
			p.add(fmt.Sprintf("values.secrets[%d]", i), "%s", why)
		}
	}
	if len(in.Rollouts) == 0 {
		p.add("rollouts", "is empty: name at least the hypervisor rollout")
	}
	p.rollouts(in.Rollouts)
	p.validation(in.Validation, in.Acknowledge)
	p.windows(in.Windows)
	p.duration("maxDuration", in.MaxDuration)
	p.limits(in.Limits)
	return p
}

// rollouts checks each rollout as its own run is going to, so that none is
// refused in mid-run, and that no two roll the same component of a pool.
func (p *problems) rollouts(rollouts []Rollout) {
	for i, r := range rollouts {
		path := fmt.Sprintf("rollouts[%d]", i)
		*p = append(*p, rollout.ComponentProblems(path, r.Component, r.Strategy, r.Workers, r.Clients, r.Prepare)...)
		for k, name := range r.Pools {
			if name == "" || name == "*" {
				p.add(fmt.Sprintf("%s.pools[%d]", path, k), "is %q: want the name of an entry of spec.gpuPools; leave pools out to roll every pool", name)
			} else if slices.Contains(r.Pools[:k], name) {
				p.add(fmt.Sprintf("%s.pools[%d]", path, k), "is %s, which is named already", name)
			}
		}
		for j, other := range rollouts[:i] {
			if what := overlap(other, r); r.Component == other.Component && what != "" {
				p.add(path+".pools", "%s of %s is rolled by rollouts[%d] already: roll each pool once", r.Component, what, j)
			}
		}
	}
}

// overlap names what two rollouts of one component have in common.
func overlap(a, b Rollout) string {
	switch {
	case len(a.Pools) == 0 && len(b.Pools) == 0:
		return "every pool"
	case len(a.Pools) == 0:
		return "pool " + strings.Join(b.Pools, ", ")
	case len(b.Pools) == 0:
		return "pool " + strings.Join(a.Pools, ", ")
	}
	common := slices.DeleteFunc(slices.Clone(b.Pools), func(name string) bool { return !slices.Contains(a.Pools, name) })
	if len(common) == 0 {
		return ""
	}
	return "pool " + strings.Join(common, ", ")
}

// Validate returns every problem of the plan; nil means it may start.
func (in RollbackInput) Validate() []plan.Problem {
	var p problems
	p.choice("kind", in.Kind, "TensorFusionRollback")
	p.release(in.Cluster, in.Release)
	if in.Revision < 0 {
		p.add("revision", "is %d: want a revision of the release's history, or 0 for the newest superseded one", in.Revision)
	}
	p = append(p, in.Strategy.Validate("strategy")...)
	p.choice("policy", in.Policy, tensorfusion.PolicyRestore, tensorfusion.PolicySeal, tensorfusion.PolicyKeepOff)
	p.validation(in.Validation, in.Acknowledge)
	p.windows(in.Windows)
	p.duration("maxDuration", in.MaxDuration)
	p.limits(in.Limits)
	return p
}
