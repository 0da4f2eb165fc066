package world

import (
	"context"
	"fmt"

	"github.com/refit-run/refit/sandbox/agents"
	"github.com/refit-run/refit/sandbox/fault"
	"github.com/refit-run/refit/sandbox/kwok"
	"github.com/refit-run/refit/sandbox/process"
	"github.com/refit-run/refit/sandbox/temporal"
)

// nodeAgents serve the nodes' task queues, simulated or real.
type nodeAgents interface {
	fault.Agents
	Start(ctx context.Context) error
	Stop()
	Running() int
	Components() []*process.Keeper
}

// prepareAgents makes the fake hosts of real agents; without a C compiler they
// can't be made.
func (w *World) prepareAgents(program string) (err error) {
	options := w.state.Options
	if !options.RealAgents() {
		return nil
	}
	w.gpuagent = program
	w.hosts, err = agents.MakeHosts(w.folder.Path("agents"), kwok.Nodes(options.Pools), options.GPUs)
	return err
}

// startAgents needs the connection to Temporal.
func (w *World) startAgents(ctx context.Context) error {
	options := w.state.Options
	var fleet nodeAgents
	if options.RealAgents() {
		fleet = agents.NewReal(agents.RealOptions{
			Client: w.client, Program: w.gpuagent, Address: w.temporal.Address(), Namespace: temporal.Namespace,
			Cluster: options.Cluster, Hosts: w.hosts,
		})
	} else {
		fleet = agents.NewFleet(w.client, options.Cluster, kwok.Nodes(options.Pools), options.GPUs, options.ValidateTakes)
	}
	w.mu.Lock()
	w.fleet = fleet
	w.mu.Unlock()
	if err := fleet.Start(ctx); err != nil {
		return err
	}
	w.report(fmt.Sprintf("%d %s GPU agents poll their queues", fleet.Running(), options.AgentKind()))
	return nil
}
