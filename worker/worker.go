// Package worker assembles the process that runs Refit's workflows and the
// activities of every cluster it is given. It must hold no decision and no
// effect of its own: it reads the configuration, connects and registers.
package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/artifact"
	cassandraacts "github.com/refit-run/refit/activities/cassandra"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	natsacts "github.com/refit-run/refit/activities/nats"
	"github.com/refit-run/refit/activities/node"
	openbaoacts "github.com/refit-run/refit/activities/openbao"
	"github.com/refit-run/refit/activities/registry"
	acts "github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/activities/visibility"
	"github.com/refit-run/refit/workflows/cassandra"
	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/nats"
	"github.com/refit-run/refit/workflows/openbao"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/tensorfusion"
)

// Config is what the process is given, each from the environment.
type Config struct {
	// Clusters maps names to kubeconfigs: "prod=/path#context,lab=in-cluster"
	// (REFIT_CLUSTERS).
	Clusters string
	// Artifacts is the bucket's URL (REFIT_ARTIFACTS), Recipients the age
	// public keys, comma separated (REFIT_AGE_RECIPIENTS).
	Artifacts  string
	Recipients string
	// Mirrors maps registry hosts to where they are pulled from
	// (REFIT_REGISTRY_MIRRORS).
	Mirrors string
}

// FromEnv reads the configuration; what is wrong with it is reported by New.
func FromEnv() Config {
	return Config{
		Clusters:   os.Getenv("REFIT_CLUSTERS"),
		Artifacts:  os.Getenv("REFIT_ARTIFACTS"),
		Recipients: os.Getenv("REFIT_AGE_RECIPIENTS"),
		Mirrors:    os.Getenv("REFIT_REGISTRY_MIRRORS"),
	}
}

// stopTimeout is how long a stopping worker lets activities finish: below the
// heartbeat timeout, so that a stop never looks worse than a crash.
const stopTimeout = 4 * time.Second

// Run serves until ctx ends. It returns an error only when it could not start.
func Run(ctx context.Context, c client.Client, namespace string, cfg Config) error {
	clusters, err := kube.Parse(cfg.Clusters)
	if err != nil {
		return fmt.Errorf("REFIT_CLUSTERS: %w", err)
	}
	mirrors, err := registry.ParseMirrors(cfg.Mirrors)
	if err != nil {
		return fmt.Errorf("REFIT_REGISTRY_MIRRORS: %w", err)
	}
	if cfg.Artifacts == "" {
		return errors.New("REFIT_ARTIFACTS is empty: name the artifact store, for example file:///var/lib/refit/artifacts")
	}
	store, err := artifact.Open(cfg.Artifacts, split(cfg.Recipients))
	if err != nil {
		return fmt.Errorf("REFIT_ARTIFACTS %s: %w", cfg.Artifacts, err)
	}
	defer store.Close()

	// A worker that the server refuses for good stops polling; the process must
	// not live on as if it served.
	asked := ctx
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	fatal := func(err error) { fail(fmt.Errorf("a worker stopped: %w", err)) }

	workflows := worker.New(c, protocol.TaskQueue, worker.Options{WorkerStopTimeout: stopTimeout, OnFatalError: fatal})
	RegisterWorkflows(workflows)
	(&visibility.Activities{Temporal: c, Namespace: namespace}).Register(workflows)
	running := []worker.Worker{workflows}
	for _, name := range clusters.Names() {
		w := worker.New(c, protocol.ClusterQueue(name), worker.Options{
			WorkerStopTimeout: stopTimeout, DisableWorkflowWorker: true, OnFatalError: fatal,
			DefaultHeartbeatThrottleInterval: time.Second, MaxHeartbeatThrottleInterval: time.Second,
		})
		w.RegisterActivityWithOptions(clusters.Identify, activity.RegisterOptions{Name: kube.IdentifyActivity})
		locks := &lease.Activities{Clusters: clusters, Temporal: c}
		w.RegisterActivityWithOptions(locks.Acquire, activity.RegisterOptions{Name: lease.AcquireActivity})
		w.RegisterActivityWithOptions(locks.Release, activity.RegisterOptions{Name: lease.ReleaseActivity})
		(&node.Activities{Clusters: clusters}).Register(w)
		(&natsacts.Activities{Clusters: clusters, Artifacts: store}).Register(w)
		(&cassandraacts.Activities{Clusters: clusters, Artifacts: store}).Register(w)
		(&openbaoacts.Activities{Clusters: clusters, Artifacts: store}).Register(w)
		(&acts.Activities{Clusters: clusters, Artifacts: store, Registry: mirrors}).Register(w)
		running = append(running, w)
	}
	for i, w := range running {
		if err := w.Start(); err != nil {
			for _, started := range running[:i] {
				started.Stop()
			}
			return fmt.Errorf("start worker: %w", err)
		}
	}
	<-ctx.Done()
	for _, w := range running {
		w.Stop()
	}
	if asked.Err() != nil {
		return nil
	}
	return context.Cause(ctx)
}

// RegisterWorkflows registers every workflow under its stable name. Replay
// tests use it too.
func RegisterWorkflows(r worker.WorkflowRegistry) {
	for _, w := range []struct {
		name string
		fn   any
	}{
		{protocol.TensorFusionUpgrade, tensorfusion.Upgrade},
		{protocol.TensorFusionRollback, tensorfusion.Rollback},
		{protocol.Rollout, rollout.Rollout},
		{protocol.RolloutShard, rollout.Shard},
		{protocol.GPUNode, gpunode.GPUNode},
		{protocol.NATSDrain, nats.Drain},
		{protocol.NATSReplicas, nats.Replicas},
		{protocol.NATSRoll, nats.Roll},
		{protocol.CassandraBackup, cassandra.Backup},
		{protocol.CassandraExpand, cassandra.Expand},
		{protocol.CassandraReplication, cassandra.Replication},
		{protocol.CassandraLedger, cassandra.Ledger},
		{protocol.OpenBaoSnapshot, openbao.Snapshot},
		{protocol.OpenBaoReplace, openbao.Replace},
	} {
		r.RegisterWorkflowWithOptions(w.fn, workflow.RegisterOptions{Name: w.name})
	}
}

func split(list string) []string {
	var out []string
	for _, s := range strings.Split(list, ",") {
		if s = strings.TrimSpace(s); s != "" {
			out = append(out, s)
		}
	}
	return out
}
