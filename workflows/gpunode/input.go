// Package gpunode prepares and proves one GPU host: others are kept off it,
// its agent brings it to the declared MIG and vGPU set-up and validates it,
// and it is given back only when it is proven. It carries no rule about GPUs:
// the agent's verdict decides. It must do no I/O of its own.
package gpunode

import (
	"fmt"
	"slices"
	"time"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

// Input is the one JSON value of a GPUNode.
type Input struct {
	Target kube.Target `json:"target"`
	Node   string      `json:"node"`
	// Cordon keeps new pods off the node until it is proven. Pods that are
	// there stay: draining is the owner's decision.
	Cordon bool `json:"cordon,omitempty"`
	// Prepare is the declared set-up; nil only validates.
	Prepare *Prepare `json:"prepare,omitempty"`
	// Level is how deep the validation goes (default standard: the host was
	// just set up, so it is idle).
	Level  gpu.Level   `json:"level,omitempty" jsonschema:"enum=quick,enum=standard,enum=stress"`
	Expect *gpu.Expect `json:"expect,omitempty"`
	// Strict counts the verdict "degraded" as a failure instead of a warning.
	Strict bool `json:"strict,omitempty"`
	// Baseline is one taken earlier; nil takes one before anything is changed.
	Baseline *gpu.Baseline `json:"baseline,omitempty"`
	Windows  []window.Spec `json:"windows,omitempty"`
	// PlanOnly stops once the agent has said what it would do.
	PlanOnly bool             `json:"planOnly,omitempty"`
	Parent   *protocol.Parent `json:"parent,omitempty"`
}

// Prepare is the declared set-up.
type Prepare struct {
	MIG  *gpu.MIGRequest  `json:"mig,omitempty"`
	VGPU *gpu.VGPURequest `json:"vgpu,omitempty"`
	// Limit is how long it may take (default 20 m: a reset of a GPU takes
	// minutes, the steps of eight GPUs some more).
	Limit window.Duration `json:"limit,omitempty"`
}

// Result of a GPUNode.
type Result struct {
	Outcome protocol.Outcome `json:"outcome"`
	Node    string           `json:"node"`
	// Planned is what the agent meant to do, Prepared what it did.
	Planned    *gpu.PrepareResult `json:"planned,omitempty"`
	Prepared   *gpu.PrepareResult `json:"prepared,omitempty"`
	Validation *gpu.Result        `json:"validation,omitempty"`
	Stages     []protocol.Stage   `json:"stages,omitempty"`
	Warnings   []string           `json:"warnings,omitempty"`
	LeftBehind []string           `json:"leftBehind,omitempty"`
}

const defaultPrepare = 20 * time.Minute

func (in Input) withDefaults() Input {
	if in.Level == "" {
		in.Level = gpu.Standard
	}
	if in.Prepare != nil && in.Prepare.Limit == 0 {
		p := *in.Prepare
		p.Limit = window.Duration(defaultPrepare)
		in.Prepare = &p
	}
	return in
}

// Validate returns every problem of the input at once.
func (in Input) Validate() []plan.Problem {
	var ps []plan.Problem
	add := func(path, format string, args ...any) {
		ps = append(ps, plan.Problem{Path: path, Message: fmt.Sprintf(format, args...)})
	}
	if in.Target.Cluster == "" {
		add("target.cluster", "is missing: name a cluster of the worker's configuration")
	}
	if in.Node == "" {
		add("node", "is missing: name a Node")
	}
	if !slices.Contains([]gpu.Level{"", gpu.Quick, gpu.Standard, gpu.Stress}, in.Level) {
		add("level", "is %q: want quick, standard or stress", in.Level)
	}
	if b := in.Baseline; b != nil && b.Node != in.Node {
		add("baseline.node", "is %q: want the baseline of node %q", b.Node, in.Node)
	}
	if in.PlanOnly && in.Prepare == nil {
		add("planOnly", "is true without prepare: there is nothing to plan")
	}
	p := in.Prepare
	if p == nil {
		return ps
	}
	if p.MIG == nil && p.VGPU == nil {
		add("prepare", "declares neither mig nor vgpu: declare one, or leave it out")
	}
	if p.MIG != nil && p.MIG.Config == "" {
		add("prepare.mig.config", "is empty: want the text of a layout file in mig-parted's format")
	}
	if p.VGPU != nil && p.VGPU.Config == "" {
		add("prepare.vgpu.config", "is empty: want the text of a layout file in vgpu-device-manager's format")
	}
	if p.Limit < 0 {
		add("prepare.limit", "is negative: want a duration")
	}
	return ps
}

// validationLimit is the deadline of the validation by its depth.
func (in Input) validationLimit() time.Duration {
	switch in.Level {
	case gpu.Stress:
		if in.Expect != nil && in.Expect.StressFor > 0 {
			return in.Expect.StressFor + 10*time.Minute
		}
		return time.Hour
	case gpu.Standard:
		return 10 * time.Minute
	}
	return 2 * time.Minute
}
