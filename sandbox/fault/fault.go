// Package fault holds everything that a sandbox can be made to do wrong: one
// table of names, what they do, and the function that does it. It must not
// keep components running; it acts on those it is given.
package fault

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/refit-run/refit/sandbox/agents"
	"github.com/refit-run/refit/sandbox/greptime"
	"github.com/refit-run/refit/sandbox/process"
	"github.com/refit-run/refit/sandbox/registry"
)

// Agents are the node agents, simulated or real.
type Agents interface {
	// Break makes a GPU of the node fail its validation; Repair heals it.
	Break(node string) error
	Repair(node string) error
	StartNode(ctx context.Context, node string) error
	StopNode(node string) error
	// Heal repairs every host and starts every agent.
	Heal(ctx context.Context) error
}

// Targets are the parts of a sandbox that faults act on.
type Targets struct {
	Kube      kubernetes.Interface
	Dynamic   dynamic.Interface
	Namespace string
	Release   string
	Agents    Agents
	Canary    *agents.Canary
	Registry  *registry.Registry
	Greptime  *greptime.Server
	APIServer *process.Keeper
	Temporal  *process.Keeper
	// TemporalAddress is in the environment of this sandbox's workers.
	TemporalAddress string
	// RestartController ends the TensorFusion controller's process, the
	// double's or a real one, which starts again; nil without TensorFusion.
	RestartController func(context.Context) error
	// APIReady waits until the API server answers again.
	APIReady func(context.Context) error
	// After runs a function later; a second call replaces the first.
	After func(time.Duration, func(context.Context) error)
}

// Fault is one row of the table.
type Fault struct {
	Name string
	// Args names the arguments, one word each.
	Args string
	// Does says what happens, and until when.
	Does  string
	apply func(ctx context.Context, t *Targets, args []string) error
}

// Table lists every fault in the order in which they are printed.
func Table() []Fault {
	return []Fault{
		{"node-never-ready", "NODE", "the Node stays NotReady until clear", nodeNeverReady},
		{"hypervisor-never-ready", "NODE", "hypervisor pods made on the node stay Pending until clear", hypervisorNeverReady},
		{"hypervisor-crash-loop", "NODE", "the node's hypervisor crashes again and again, the next one too, until clear", hypervisorCrashLoop},
		{"hypervisor-replaced", "NODE", "the node's hypervisor pod is deleted by nobody of us, once", hypervisorReplaced},
		{"gpu-fails", "NODE", "the node's agent reports a lost GPU until gpu-repaired or clear", gpuFails},
		{"gpu-repaired", "NODE", "the node's agent passes again", gpuRepaired},
		{"agents-stop", "NODE", "nobody polls the node's task queue until agents-start or clear", agentsStop},
		{"agents-start", "NODE", "the node's agent polls again", agentsStart},
		{"canary-verdict", "ok|wrong|missing", "what the CUDA probe of canary Jobs answers", canaryVerdict},
		{"limit-not-enforced", "", "the CUDA probe finds that the memory limit does not hold", limitNotEnforced},
		{"apiserver-down", "DURATION", "the API server is killed and comes back after the duration", apiServerDown},
		{"slow-image", "DURATION", "every manifest request of the registry takes the duration, until clear", slowImage},
		{"image-missing", "IMAGE", "the registry does not have the image, until clear", imageMissing},
		{"greptime-down", "", "the GreptimeDB stand-in refuses connections until clear", greptimeDown},
		{"greptime-password", "PASSWORD", "the GreptimeDB stand-in's password is rotated; clear does not bring the former one back", greptimePassword},
		{"pdb-blocks", "NAMESPACE LABEL=VALUE", "a PodDisruptionBudget allows no eviction of the pods, until clear", pdbBlocks},
		{"auto-update-on", "POOL", "somebody sets autoUpdateHypervisor of the pool to true, once", autoUpdateOn},
		{"controller-restart", "", "the controller's pods are deleted: it loses its memory and its lease", controllerRestart},
		{"helm-kill", "DURATION", "the next Helm process of a worker of this sandbox is killed (-9) in the middle of its upgrade, within the duration", helmKill},
		{"temporal-kill", "", "the Temporal server is killed (-9) and starts again on the same file", temporalKill},
		{"clear", "", "takes every lasting fault back", heal},
	}
}

// Inject finds the fault by name, checks the number of arguments and does it.
// It returns when the fault is in force.
func Inject(ctx context.Context, t *Targets, name string, args []string) error {
	table := Table()
	i := slices.IndexFunc(table, func(f Fault) bool { return f.Name == name })
	if i < 0 {
		return fmt.Errorf("fault %q: no such fault; `refit-sandbox fault --list` lists them", name)
	}
	f := table[i]
	if want := strings.Fields(f.Args); len(args) != len(want) {
		return fmt.Errorf("fault %s: expected %d arguments (%s), found %d", name, len(want), f.Args, len(args))
	}
	if err := f.apply(ctx, t, args); err != nil {
		return fmt.Errorf("fault %s: %w", name, err)
	}
	return nil
}

func gpuFails(_ context.Context, t *Targets, args []string) error    { return t.Agents.Break(args[0]) }
func gpuRepaired(_ context.Context, t *Targets, args []string) error { return t.Agents.Repair(args[0]) }
func agentsStop(_ context.Context, t *Targets, args []string) error {
	return t.Agents.StopNode(args[0])
}
func agentsStart(ctx context.Context, t *Targets, args []string) error {
	return t.Agents.StartNode(ctx, args[0])
}

func canaryVerdict(_ context.Context, t *Targets, args []string) error {
	switch v := agents.Verdict(args[0]); v {
	case agents.OK, agents.Wrong, agents.Missing:
		t.Canary.Answer(v)
		return nil
	default:
		return fmt.Errorf("verdict %q: expected ok, wrong or missing", args[0])
	}
}

func limitNotEnforced(_ context.Context, t *Targets, _ []string) error {
	t.Canary.Answer(agents.NotEnforced)
	return nil
}

func apiServerDown(_ context.Context, t *Targets, args []string) error {
	d, err := positive(args[0])
	if err != nil {
		return err
	}
	t.APIServer.Suspend()
	t.After(d, func(ctx context.Context) error {
		if err := t.APIServer.Start(); err != nil {
			return err
		}
		return t.APIReady(ctx)
	})
	return nil
}

func slowImage(_ context.Context, t *Targets, args []string) error {
	d, err := positive(args[0])
	if err != nil {
		return err
	}
	t.Registry.SetDelay(d)
	return nil
}

func imageMissing(_ context.Context, t *Targets, args []string) error {
	return t.Registry.SetMissing(args[0], true)
}

func greptimeDown(_ context.Context, t *Targets, _ []string) error {
	t.Greptime.SetDown(true)
	return nil
}

func greptimePassword(_ context.Context, t *Targets, args []string) error {
	t.Greptime.SetPassword(args[0])
	return nil
}

func temporalKill(_ context.Context, t *Targets, _ []string) error { return t.Temporal.Kill() }

func positive(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, err
	}
	if d <= 0 {
		return 0, fmt.Errorf("duration %s: expected more than zero", text)
	}
	return d, nil
}
