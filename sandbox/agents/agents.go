// Package agents holds what runs on the GPU hosts of a sandbox: the node
// agents, one Temporal worker per node on that node's task queue, and the
// verdict of the CUDA probe in canary Jobs. The agents are simulated in this
// process (Fleet) or the product's own program on fake driver libraries
// (Real); both follow the contract of activities/gpu. It must not know how a
// rollout uses them.
package agents

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/sandbox/process"
)

// heartbeatEvery is short enough for a caller that wants to notice a dead
// agent within seconds.
const heartbeatEvery = time.Second

// Fleet is the set of simulated node agents of one cluster.
type Fleet struct {
	client  client.Client
	cluster string
	takes   time.Duration

	mu      sync.Mutex
	hosts   map[string]*host
	workers map[string]worker.Worker
}

// NewFleet prepares agents for the nodes, each with as many GPUs;
// validateTakes is how long a validation lasts.
func NewFleet(c client.Client, cluster string, nodes []string, gpus int, validateTakes time.Duration) *Fleet {
	f := &Fleet{client: c, cluster: cluster, takes: validateTakes, hosts: map[string]*host{}, workers: map[string]worker.Worker{}}
	for _, n := range nodes {
		f.hosts[n] = newHost(n, gpus)
	}
	return f
}

// Start starts every agent.
func (f *Fleet) Start(ctx context.Context) error {
	for node := range f.hosts {
		if err := f.StartNode(ctx, node); err != nil {
			return err
		}
	}
	return nil
}

// Stop ends every agent.
func (f *Fleet) Stop() {
	f.mu.Lock()
	running := f.workers
	f.workers = map[string]worker.Worker{}
	f.mu.Unlock()
	var all sync.WaitGroup
	for _, w := range running {
		all.Go(w.Stop)
	}
	all.Wait()
}

// Components: the simulated agents live in this process and have none.
func (f *Fleet) Components() []*process.Keeper { return nil }

// Running is the number of agents that poll.
func (f *Fleet) Running() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.workers)
}

// StartNode starts the agent of one node; it does nothing when it runs.
func (f *Fleet) StartNode(_ context.Context, node string) error {
	h, err := f.host(node)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.workers[node] != nil {
		return nil
	}
	w := worker.New(f.client, gpu.TaskQueue(f.cluster, node), worker.Options{
		DisableWorkflowWorker: true,
		// A thousand agents share one process and one server: one poll each,
		// and no local or session machinery.
		MaxConcurrentActivityTaskPollers:   1,
		MaxConcurrentActivityExecutionSize: 2,
		DisableEagerActivities:             true,
		WorkerStopTimeout:                  time.Second,
		Identity:                           "gpuagent@" + node,
	})
	a := &agent{host: h, takes: f.takes}
	w.RegisterActivityWithOptions(a.Baseline, activity.RegisterOptions{Name: gpu.BaselineActivity})
	w.RegisterActivityWithOptions(a.Validate, activity.RegisterOptions{Name: gpu.ValidateActivity})
	if err := w.Start(); err != nil {
		return fmt.Errorf("agent of node %s: %w", node, err)
	}
	f.workers[node] = w
	return nil
}

// StopNode ends the agent of one node: nobody polls its queue any more.
func (f *Fleet) StopNode(node string) error {
	if _, err := f.host(node); err != nil {
		return err
	}
	f.mu.Lock()
	w := f.workers[node]
	delete(f.workers, node)
	f.mu.Unlock()
	if w != nil {
		w.Stop()
	}
	return nil
}

// Break makes a GPU of the node fail its validation; Repair heals it.
func (f *Fleet) Break(node string) error  { return f.setBroken(node, true) }
func (f *Fleet) Repair(node string) error { return f.setBroken(node, false) }

func (f *Fleet) setBroken(node string, broken bool) error {
	h, err := f.host(node)
	if err != nil {
		return err
	}
	h.setBroken(broken)
	return nil
}

// Heal repairs every host and starts every agent.
func (f *Fleet) Heal(ctx context.Context) error {
	for _, h := range f.hosts {
		h.setBroken(false)
	}
	return f.Start(ctx)
}

func (f *Fleet) host(node string) (*host, error) {
	if h := f.hosts[node]; h != nil {
		return h, nil
	}
	return nil, unknownNode(node, len(f.hosts))
}

func unknownNode(node string, nodes int) error {
	return fmt.Errorf("node %q: expected one of the sandbox's %d GPU nodes, found no such node", node, nodes)
}

// agent holds the activities of one host.
type agent struct {
	host  *host
	takes time.Duration
}

// Baseline reports the hardware as it is now.
func (a *agent) Baseline(_ context.Context, req gpu.BaselineRequest) (gpu.Baseline, error) {
	if err := a.own(req.Node, req.NodeBootID); err != nil {
		return gpu.Baseline{}, err
	}
	return a.host.baseline(time.Now()), nil
}

// Validate takes its time, heartbeating, and gives the verdict; past the
// deadline the verdict is unproven.
func (a *agent) Validate(ctx context.Context, req gpu.ValidateRequest) (gpu.Result, error) {
	if err := a.own(req.Node, req.NodeBootID); err != nil {
		return gpu.Result{}, err
	}
	if req.Deadline > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, req.Deadline, errDeadline)
		defer cancel()
	}
	done := time.NewTimer(a.takes)
	defer done.Stop()
	beat := time.NewTicker(heartbeatEvery)
	defer beat.Stop()
	for {
		select {
		case <-done.C:
			return a.host.validate(req.Baseline), nil
		case <-beat.C:
			activity.RecordHeartbeat(ctx, "validating")
		case <-ctx.Done():
			if !errors.Is(context.Cause(ctx), errDeadline) {
				return gpu.Result{}, context.Cause(ctx)
			}
			r := a.host.validate(nil)
			r.Verdict = gpu.Unproven
			r.Checks = append(r.Checks, gpu.Check{
				Name: "CUDA call", Severity: gpu.Fatal, Expected: "an answer within " + req.Deadline.String(),
				Found: "none", Skipped: "deadline",
			})
			return r, nil
		}
	}
}

var errDeadline = errors.New("the validation's deadline passed")

func (a *agent) own(node, boot string) error {
	if node != a.host.node {
		return fmt.Errorf("agent of node %s: expected a request for it, found one for %q", a.host.node, node)
	}
	if boot != "" && boot != a.host.bootID {
		return finding.Finding{Object: "boot of node " + node, Expected: boot + ", as the Node object says", Found: a.host.bootID}.Error(finding.Wait)
	}
	return nil
}
