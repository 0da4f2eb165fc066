// Command refit-worker runs Refit's workflows and cluster activities. It is
// configured by the environment: TEMPORAL_* for the server, REFIT_CLUSTERS,
// REFIT_ARTIFACTS, REFIT_AGE_RECIPIENTS, REFIT_REGISTRY_MIRRORS.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/contrib/envconfig"
	tlog "go.temporal.io/sdk/log"

	_ "github.com/refit-run/refit/activities/artifact/cloud"
	"github.com/refit-run/refit/activities/codec"
	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/worker"
)

func main() {
	if helm.IsChild(os.Args) {
		os.Exit(helm.RunChild(os.Stdin, os.Stdout))
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "refit-worker:", err)
		os.Exit(1)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
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
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
	opts.Logger = tlog.NewStructuredLogger(log)
	c, err := client.DialContext(ctx, opts)
	if err != nil {
		return fmt.Errorf("reach the Temporal server at %s: %w; start one with `refit up` or set TEMPORAL_ADDRESS", opts.HostPort, err)
	}
	defer c.Close()
	return worker.Run(ctx, c, opts.Namespace, worker.FromEnv())
}
