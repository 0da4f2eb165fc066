package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/contrib/envconfig"
	tlog "go.temporal.io/sdk/log"
	"go.temporal.io/sdk/worker"

	"github.com/refit-run/refit/activities/codec"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/agent"
	"github.com/refit-run/refit/gpuagent/setup"
)

// requestsAtOnce: one is served, the others wait for their turn and say so by
// heartbeats.
const requestsAtOnce = 4

// stopPatience is how long a stopping agent lets a request finish. Validations
// change nothing and are simply run again.
const stopPatience = 5 * time.Second

// initLimit bounds the first look at the driver.
const initLimit = 30 * time.Second

func runCommand() *cobra.Command {
	var cluster string
	c := &cobra.Command{
		Use:   "run",
		Short: "Serve this host's task queue gpu/<cluster>/<node> as a Temporal activity worker",
		Args:  cobra.NoArgs,
	}
	c.Flags().StringVar(&cluster, "cluster", os.Getenv("REFIT_CLUSTER"), "the cluster's name (REFIT_CLUSTER)")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if cluster == "" {
			return failed(bad("the cluster has no name: set REFIT_CLUSTER or --cluster, as the worker's map of clusters has it"))
		}
		node, err := nodeName()
		if err != nil {
			return failed(err)
		}
		if err := serve(c.Context(), cluster, node); err != nil {
			return &setup.Exit{Code: setup.ExitError, Err: err}
		}
		return nil
	}
	return c
}

func serve(ctx context.Context, cluster, node string) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	opts, err := envconfig.LoadDefaultClientOptions()
	if err != nil {
		return fmt.Errorf("read the Temporal connection (TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, profiles): %w", err)
	}
	if opts.Namespace == "" {
		opts.Namespace = client.DefaultNamespace
	}
	keys, err := codec.FromEnv(os.Getenv)
	if err != nil {
		return err
	}
	keys.Apply(&opts)
	opts.Logger = tlog.NewStructuredLogger(log)
	// The state of the host is said before the connection is made: a person who
	// reads the log of an agent that does not connect sees it too.
	found, err := agent.State(ctx, initLimit)
	if ctx.Err() != nil {
		return nil
	}
	log.Info("the GPUs of this host", "node", node, "found", found, "error", err)
	c, err := client.DialContext(ctx, opts)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("reach the Temporal server at %s: %w; set TEMPORAL_ADDRESS", opts.HostPort, err)
	}
	defer c.Close()
	w := worker.New(c, gpu.TaskQueue(cluster, node), worker.Options{
		DisableWorkflowWorker:              true,
		MaxConcurrentActivityExecutionSize: requestsAtOnce,
		MaxConcurrentActivityTaskPollers:   1,
		DisableEagerActivities:             true,
		WorkerStopTimeout:                  stopPatience,
		Identity:                           "gpuagent@" + node,
	})
	a := agent.New(node)
	w.RegisterActivityWithOptions(a.Baseline, activity.RegisterOptions{Name: gpu.BaselineActivity})
	w.RegisterActivityWithOptions(a.Validate, activity.RegisterOptions{Name: gpu.ValidateActivity})
	w.RegisterActivityWithOptions(a.Prepare, activity.RegisterOptions{Name: gpu.PrepareActivity})
	if err := w.Start(); err != nil {
		return fmt.Errorf("serve task queue %s: %w", gpu.TaskQueue(cluster, node), err)
	}
	defer w.Stop()
	log.Info("serving", "queue", gpu.TaskQueue(cluster, node), "namespace", opts.Namespace)
	<-ctx.Done()
	return nil
}
