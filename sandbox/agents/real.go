package agents

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/client"
	"golang.org/x/sync/errgroup"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/sandbox/process"
)

const (
	// startLimit bounds the wait for an agent that was started.
	startLimit = time.Minute
	// stopGrace is longer than the agent's own patience with a request.
	stopGrace = 10 * time.Second
	pollEvery = 100 * time.Millisecond
)

// RealOptions say which program serves which hosts.
type RealOptions struct {
	Client client.Client
	// Program is the product's refit-gpuagent.
	Program string
	// Address and Namespace of the Temporal server, for the agents.
	Address, Namespace string
	Cluster            string
	Hosts              Hosts
}

// Real is the product's own agent, one process per node, each on its fake
// host. Every process loads the driver libraries that its environment names,
// which is why one process can't serve two hosts.
type Real struct {
	client  client.Client
	cluster string
	hosts   Hosts
	agents  map[string]*process.Keeper
	nodes   []string
}

// NewReal prepares the agents; none runs yet.
func NewReal(o RealOptions) *Real {
	r := &Real{client: o.Client, cluster: o.Cluster, hosts: o.Hosts, agents: map[string]*process.Keeper{}}
	for node, h := range o.Hosts {
		r.nodes = append(r.nodes, node)
		r.agents[node] = process.Keep(process.Spec{
			Name: "gpuagent-" + node, Path: o.Program, Args: []string{"run"},
			Env: append(h.env(), "NODE_NAME="+node, "REFIT_CLUSTER="+o.Cluster,
				"TEMPORAL_ADDRESS="+o.Address, "TEMPORAL_NAMESPACE="+o.Namespace),
			Dir: h.dir, Log: filepath.Join(h.dir, "agent.log"), Grace: stopGrace,
		})
	}
	slices.Sort(r.nodes)
	return r
}

// Start starts every agent and waits until each polls.
func (r *Real) Start(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, node := range r.nodes {
		group.Go(func() error { return r.StartNode(ctx, node) })
	}
	return group.Wait()
}

// Stop ends every agent.
func (r *Real) Stop() {
	var all sync.WaitGroup
	for _, k := range r.agents {
		all.Go(k.Stop)
	}
	all.Wait()
}

// Running is the number of agents whose process lives.
func (r *Real) Running() int {
	n := 0
	for _, k := range r.agents {
		if k.Status().Running {
			n++
		}
	}
	return n
}

// Components are the processes, in the order of the nodes.
func (r *Real) Components() []*process.Keeper {
	var all []*process.Keeper
	for _, node := range r.nodes {
		all = append(all, r.agents[node])
	}
	return all
}

// StartNode starts the agent of one node and returns when it polls its queue;
// it does nothing when it runs.
func (r *Real) StartNode(ctx context.Context, node string) error {
	k, err := r.agent(node)
	if err != nil || k.Status().Running {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	began := time.Now()
	if err := k.Start(); err != nil {
		return err
	}
	return k.Ready(ctx, pollEvery, func(ctx context.Context) error { return r.polls(ctx, node, began) })
}

// polls asks the server: it remembers pollers of the past, so only one that
// was there since the start counts.
func (r *Real) polls(ctx context.Context, node string, since time.Time) error {
	queue := gpu.TaskQueue(r.cluster, node)
	found, err := r.client.DescribeTaskQueue(ctx, queue, enums.TASK_QUEUE_TYPE_ACTIVITY)
	if err != nil {
		return err
	}
	for _, p := range found.GetPollers() {
		if !p.GetLastAccessTime().AsTime().Before(since) {
			return nil
		}
	}
	return fmt.Errorf("task queue %s: expected a poller, found none since %s", queue, since.Format(time.TimeOnly))
}

// StopNode ends the agent of one node: nobody polls its queue any more.
func (r *Real) StopNode(node string) error {
	k, err := r.agent(node)
	if err != nil {
		return err
	}
	k.Stop()
	return nil
}

// Break makes the driver of the node lose a GPU; Repair brings it back.
func (r *Real) Break(node string) error  { return r.setBroken(node, true) }
func (r *Real) Repair(node string) error { return r.setBroken(node, false) }

func (r *Real) setBroken(node string, broken bool) error {
	if _, err := r.agent(node); err != nil {
		return err
	}
	return r.hosts[node].setBroken(broken)
}

// Heal repairs every host and starts every agent.
func (r *Real) Heal(ctx context.Context) error {
	var problems []error
	for _, node := range r.nodes {
		problems = append(problems, r.Repair(node))
	}
	return errors.Join(append(problems, r.Start(ctx))...)
}

func (r *Real) agent(node string) (*process.Keeper, error) {
	if k := r.agents[node]; k != nil {
		return k, nil
	}
	return nil, unknownNode(node, len(r.agents))
}
