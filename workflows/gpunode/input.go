// Package gpunode prepares and proves one GPU host: others are kept off it,
// its agent brings it to the declared MIG and vGPU set-up and validates it,
// and it is given back only when it is proven. It carries no rule about GPUs:
// the agent's verdict decides. It must do no I/O of its own.
package gpunode

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/refit-run/refit/activities/finding"
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
	// Unattended is set by a rollout that has its hosts prepared: nobody
	// answers the run, so what would park ends it, with Result.Failure.
	Unattended bool `json:"unattended,omitempty" jsonschema:"-"`
}

// Prepare is the declared set-up.
type Prepare struct {
	MIG  *gpu.MIGRequest  `json:"mig,omitempty"`
	VGPU *gpu.VGPURequest `json:"vgpu,omitempty"`
	// Limit is how long it may take (default 20 m: a reset of a GPU takes
	// minutes, the steps of eight GPUs some more).
	Limit *window.Duration `json:"limit,omitempty"`
}

// Result of a GPUNode: the receipt, with what the agent did and said.
type Result struct {
	protocol.Receipt
	Node string `json:"node"`
	// Planned is what the agent meant to do, Prepared what it did.
	Planned    *gpu.PrepareResult `json:"planned,omitempty"`
	Prepared   *gpu.PrepareResult `json:"prepared,omitempty"`
	Validation *gpu.Result        `json:"validation,omitempty"`
	// Failure is why an unattended run ended before its end.
	Failure *finding.Finding `json:"failure,omitempty"`
}

const (
	defaultPrepare = 20 * time.Minute
	// maxConfig is the most bytes of a layout file. A rollout gives it to every
	// host of a wave in one message, which Temporal limits to 4 MiB.
	maxConfig = 32 << 10
)

func (in Input) withDefaults() Input {
	if in.Level == "" {
		in.Level = gpu.Standard
	}
	in.Prepare = in.Prepare.withDefaults()
	return in
}

func (p *Prepare) withDefaults() *Prepare {
	if p == nil || p.Limit != nil {
		return p
	}
	limit, full := window.Duration(defaultPrepare), *p
	full.Limit = &limit
	return &full
}

// Longest is how long the run may take while nothing has to be answered and
// every queue has a worker.
func (in Input) Longest() time.Duration {
	in = in.withDefaults()
	longest := callLimit + ValidationLimit(in.Level, in.Expect) + slack // the calls to the API server take seconds
	if in.Baseline == nil {
		longest += baselineLimit
	}
	if in.Prepare != nil {
		longest += callLimit + in.Prepare.Limit.D() + slack
	}
	return longest
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
	for i, w := range in.Windows {
		if err := w.Validate(); err != nil {
			add(fmt.Sprintf("windows[%d]", i), "%v", err)
		}
	}
	ps = append(ps, ExpectProblems("expect", in.Expect)...)
	return append(ps, in.Prepare.Problems("prepare")...)
}

// Problems returns what is wrong with a declared set-up that stands at path of
// a plan; nil declares nothing.
func (p *Prepare) Problems(path string) []plan.Problem {
	var ps []plan.Problem
	add := func(at, format string, args ...any) {
		ps = append(ps, plan.Problem{Path: path + at, Message: fmt.Sprintf(format, args...)})
	}
	if p == nil {
		return nil
	}
	config := func(at, text, format string) {
		switch {
		case strings.TrimSpace(text) == "":
			add(at, "is empty: want the text of a layout file in %s's format", format)
		case len(text) > maxConfig:
			add(at, "has %d bytes: want at most %d; leave the layouts out that are not meant", len(text), maxConfig)
		}
	}
	if p.MIG == nil && p.VGPU == nil {
		add("", "declares neither mig nor vgpu: declare one, or leave it out")
	}
	if p.MIG != nil {
		config(".mig.config", p.MIG.Config, "mig-parted")
	}
	if v := p.VGPU; v != nil {
		config(".vgpu.config", v.Config, "vgpu-device-manager")
		if !slices.Contains(schedulers, v.Scheduler) {
			add(".vgpu.scheduler", "is %q: want best-effort, equal-share or fixed-share", v.Scheduler)
		}
	}
	if p.Limit != nil && *p.Limit <= 0 {
		add(".limit", "is %s: want a positive duration, or leave it out for %s", *p.Limit, window.Duration(defaultPrepare))
	}
	return ps
}

var schedulers = []string{"", "best-effort", "equal-share", "fixed-share"}

// ValidationLimit is the deadline of a validation by its depth.
func ValidationLimit(level gpu.Level, expect *gpu.Expect) time.Duration {
	switch level {
	case gpu.Stress:
		if expect != nil && expect.StressFor > 0 {
			return expect.StressFor.D() + 10*time.Minute
		}
		return time.Hour
	case gpu.Standard:
		return 10 * time.Minute
	}
	return 2 * time.Minute
}
