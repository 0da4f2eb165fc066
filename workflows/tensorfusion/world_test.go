package tensorfusion

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/activities/visibility"
	"github.com/refit-run/refit/workflows/internal/workflowtest"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
)

const (
	oldImage = "registry.invalid/hypervisor:2.15.0"
	newImage = "registry.invalid/hypervisor:2.17.0"
	holder   = "temporal/default/run/1"
)

// installation is the world behind the activities. Its methods are the
// activities; its fields are what a test plans to find.
type installation struct {
	t   *testing.T
	log []string // the activities that ran, in order

	taken            bool
	checks           [][]tensorfusion.Check // of each preflight in turn, the last one for ever
	noChange         bool
	returning        []tensorfusion.Pool
	undone           []tensorfusion.PoolPolicy
	template         string // of every pool, as preflight and the new controller see it
	now              string
	changes          []tensorfusion.ObjectChange
	planned          []tensorfusion.ObservePoolRequest
	forecast         []finding.Finding
	drift            map[string][]finding.Finding // by number of the call, "*" for the next
	broken           []finding.Finding            // of the next assertion
	controller       []tensorfusion.Check
	rolled           []rollout.Input
	releases         []tensorfusion.ReleaseRequest
	policies         []tensorfusion.PolicyRequest
	drifts           []tensorfusion.DriftRequest
	policyRefused    bool
	unheld           int // holds and assertions that the pools do not show, from the first on
	holds            []tensorfusion.HoldRequest
	fleet            []string // more nodes of pool shared
	receipts         []tensorfusion.ReceiptRequest
	rollbacks        []RollbackInput
	rollbackEnd      protocol.Receipt
	revision         int                 // deployed
	seen, led        []tensorfusion.Pool // instead of pools, by the preflight and under the new controller
	proven           bool                // every host is on target whatever the goal
	outdated         []tensorfusion.Outdated
	workloads        map[string][]tensorfusion.Workload // by GPUPool
	clients          map[string][]tensorfusion.ClientPod
	ends             map[string]rollout.Result // of the next rollout of that name
	policy           []tensorfusion.PoolPolicy // as found, instead of asFound
	verified         []tensorfusion.VerifyRequest
	same             bool // the controller's version
	awaited          []tensorfusion.ControllerRequest
	objects, present map[string]string // of the release, before and after the Helm step
	told             []string          // of objects that hold something else
	probes           []gpu.Result      // of the next canary Jobs, which do not pass
}

func newInstallation(t *testing.T) *installation {
	return &installation{t: t, policy: asFound, drift: map[string][]finding.Finding{}, revision: 3,
		rollbackEnd: protocol.Receipt{Outcome: protocol.OutcomeDone, After: map[string]string{"controller": "2.16.3"}, LeftBehind: []string{"CRDs stay"}}}
}

// helmBegan and youngest are times by the cluster's clock.
var (
	helmBegan = time.Date(2026, 11, 2, 8, 0, 30, 0, time.UTC)
	youngest  = time.Date(2026, 11, 2, 7, 0, 0, 0, time.UTC)
)

var asFound = []tensorfusion.PoolPolicy{{Pool: "tf-shared", AutoHypervisor: true}, {Pool: "tf-training", AutoHypervisor: true, AutoWorker: true}}

// record notes a call by the activity's short name.
func (i *installation) record(name string, args ...string) {
	_, short, _ := strings.Cut(name, ".")
	i.log = append(i.log, strings.TrimSpace(short+" "+strings.Join(args, " ")))
}

// pools are of that template; without one the controller has not settled them.
func pools(template string) []tensorfusion.Pool {
	settled := template != ""
	return []tensorfusion.Pool{
		{Name: "tf-shared", Entry: "shared", Nodes: 2, Hash: template, Settled: settled},
		{Name: "tf-training", Entry: "training", Nodes: 1, Hash: template, Settled: settled},
		{Name: "tf-empty", Entry: "empty"}, // never settled
	}
}

func (i *installation) preflight(_ context.Context, r tensorfusion.PreflightRequest) (tensorfusion.PreflightResult, error) {
	i.record(tensorfusion.PreflightActivity)
	checks := []tensorfusion.Check{{Row: "T01", OK: true}}
	if len(i.checks) > 0 {
		checks = i.checks[0]
		if len(i.checks) > 1 {
			i.checks = i.checks[1:]
		}
	}
	intent := r.Intent
	intent.Digest = "digest"
	hypervisors := map[string]string{"gpu-1": "uid-1"}
	for _, node := range i.fleet {
		hypervisors[node] = podUID
	}
	target := tensorfusion.Versions{Chart: "1.8.7", Controller: "2.17.0", Hypervisor: newImage}
	if i.same {
		target.Controller = "2.16.3"
	}
	return tensorfusion.PreflightResult{
		Source: tensorfusion.Versions{Chart: "1.8.6", Controller: "2.16.3", Hypervisor: oldImage, Revision: i.revision},
		Target: target,
		Intent: intent, Checks: checks, Pools: or(i.seen, pools(i.template)), Policy: i.policy, NoChange: i.noChange, NeedsNudge: true,
		Snapshot: tensorfusion.Snapshot{Hypervisors: hypervisors, GPUs: 16, Youngest: youngest, Objects: i.objects},
		Goal:     tensorfusion.Goal{HypervisorImage: newImage, PodName: "tf-hypervisor-"},
	}, nil
}

func or(given, otherwise []tensorfusion.Pool) []tensorfusion.Pool {
	if given != nil {
		return given
	}
	return otherwise
}

func (i *installation) hold(_ context.Context, r tensorfusion.HoldRequest) (tensorfusion.HoldResult, error) {
	i.holds = append(i.holds, r)
	if len(i.holds) <= i.unheld {
		if !r.Outage {
			return tensorfusion.HoldResult{}, finding.Finding{Row: "P10", Object: "hold of the update policy in every GPUPool", Found: "GPUPool/tf-shared shows the old policy"}.Error(finding.Stop)
		}
		return tensorfusion.HoldResult{Before: slices.Clone(i.policy), Unheld: "GPUPool/tf-shared shows the old policy"}, nil
	}
	if r.Assert {
		i.record(tensorfusion.HoldActivity, "assert")
		i.undone = append(i.undone, r.Undo...)
		out := tensorfusion.HoldResult{Broken: i.broken}
		i.broken = nil
		return out, nil
	}
	i.record(tensorfusion.HoldActivity, fmt.Sprintf("nudge=%t", r.Nudge))
	return tensorfusion.HoldResult{Before: slices.Clone(i.policy)}, nil
}

func (i *installation) checkDrift(_ context.Context, r tensorfusion.DriftRequest) (tensorfusion.DriftResult, error) {
	i.drifts = append(i.drifts, r)
	i.record(tensorfusion.DriftActivity)
	number := fmt.Sprint(len(i.drifts))
	out := tensorfusion.DriftResult{Findings: i.drift[number], Snapshot: r.Snapshot}
	if len(i.fleet) == 0 {
		out.Snapshot.Hypervisors = map[string]string{"gpu-1": "seen-" + number}
	}
	return out, nil
}

// rollout stands for the child Rollout: every host of the pool is replaced.
func (i *installation) rollout(_ workflow.Context, in rollout.Input) (rollout.Result, error) {
	i.rolled = append(i.rolled, in)
	name := in.Component + " " + in.Entry
	i.log = append(i.log, "rollout "+name)
	if end, ok := i.ends[name]; ok {
		delete(i.ends, name)
		return end, nil
	}
	out := rollout.Result{Outcome: protocol.OutcomeDone}
	if in.Component == Hypervisor {
		out.Hosts = []rollout.HostRow{{Name: in.Entry + "-1", Outcome: tensorfusion.OutcomeReplaced}}
		if in.Entry == "shared" {
			for _, node := range i.fleet {
				out.Hosts = append(out.Hosts, rollout.HostRow{
					Name: node, Outcome: tensorfusion.OutcomeReplaced, OldUID: podUID, NewUID: podUID, Seconds: 41.5, Verdict: gpu.Pass,
				})
			}
		}
	}
	return out, nil
}

// harness runs one upgrade or rollback on the test suite's clock.
type harness struct {
	*testsuite.TestWorkflowEnvironment
	t *testing.T
	i *installation
}

func newHarness(t *testing.T, i *installation) *harness {
	env := workflowtest.Environment()
	env.SetStartTime(time.Date(2026, 11, 2, 8, 0, 0, 0, time.UTC))
	env.RegisterWorkflowWithOptions(Upgrade, workflow.RegisterOptions{Name: protocol.TensorFusionUpgrade})
	env.RegisterWorkflowWithOptions(i.rollout, workflow.RegisterOptions{Name: protocol.Rollout})
	for name, f := range i.activities() {
		env.RegisterActivityWithOptions(f, activity.RegisterOptions{Name: name})
	}
	return &harness{TestWorkflowEnvironment: env, t: t, i: i}
}

func (i *installation) activities() map[string]any {
	return map[string]any{
		visibility.InstalledActivity: func(context.Context, visibility.Request) (visibility.Result, error) {
			return visibility.Result{}, nil
		},
		kube.IdentifyActivity: func(context.Context, kube.IdentifyRequest) (kube.IdentifyResult, error) {
			return kube.IdentifyResult{UID: "uid-prod", Version: "v1.37.2"}, nil
		},
		lease.AcquireActivity: func(context.Context, lease.AcquireRequest) (lease.AcquireResult, error) {
			i.record(lease.AcquireActivity)
			if i.taken {
				return lease.AcquireResult{}, temporal.NewNonRetryableApplicationError("Lease refit-tf is held by run other", protocol.Locked, nil)
			}
			return lease.AcquireResult{Holder: holder}, nil
		},
		lease.ReleaseActivity: func(_ context.Context, r lease.ReleaseRequest) (lease.ReleaseResult, error) {
			i.record(lease.ReleaseActivity)
			require.Equal(i.t, holder, r.Holder)
			return lease.ReleaseResult{Released: true}, nil
		},
		tensorfusion.RevisionActivity: func(_ context.Context, r tensorfusion.RevisionRequest) (tensorfusion.RevisionResult, error) {
			i.record(tensorfusion.RevisionActivity, fmt.Sprint(r.Revision))
			return tensorfusion.RevisionResult{Revision: max(r.Revision, 1), HypervisorImage: oldImage, Substituted: []string{"greptime.password"},
				Versions: tensorfusion.Versions{Chart: "1.8.6", Controller: "2.16.3"}}, nil
		},
		tensorfusion.PreflightActivity: i.preflight,
		tensorfusion.DiffActivity: func(context.Context, tensorfusion.DiffRequest) (tensorfusion.DiffResult, error) {
			i.record(tensorfusion.DiffActivity)
			return tensorfusion.DiffResult{Text: "- a\n+ b\n", Forecast: i.forecast, Outdated: i.outdated, Artifact: artifact.Ref{URL: "file:///diff"},
				Changes: append([]tensorfusion.ObjectChange{{Action: "change", Object: "Deployment/tf/controller", Lines: 2}}, i.changes...)}, nil
		},
		tensorfusion.ObservePoolActivity: func(_ context.Context, r tensorfusion.ObservePoolRequest) (tensorfusion.PoolObservation, error) {
			i.planned = append(i.planned, r)
			entry := strings.TrimPrefix(r.Pool, "tf-")
			hosts := []tensorfusion.Host{{Name: entry + "-1", OnTarget: i.proven}, {Name: entry + "-2", OnTarget: i.proven}}
			for _, node := range i.fleet {
				hosts = append(hosts, tensorfusion.Host{Name: node, Created: youngest, UID: podUID})
			}
			return tensorfusion.PoolObservation{Pool: r.Pool, Hosts: hosts}, nil
		},
		tensorfusion.WorkersActivity: func(_ context.Context, r tensorfusion.WorkersRequest) (tensorfusion.WorkersResult, error) {
			return tensorfusion.WorkersResult{Workloads: i.workloads[r.Pool]}, nil
		},
		tensorfusion.ClientsActivity: func(_ context.Context, r tensorfusion.ClientsRequest) (tensorfusion.ClientsResult, error) {
			return tensorfusion.ClientsResult{Stale: i.clients[r.Pool]}, nil
		},
		tensorfusion.HoldActivity:  i.hold,
		tensorfusion.DriftActivity: i.checkDrift,
		tensorfusion.BackupActivity: func(context.Context, tensorfusion.BackupRequest) (tensorfusion.BackupResult, error) {
			i.record(tensorfusion.BackupActivity)
			return tensorfusion.BackupResult{Artifacts: []artifact.Ref{{Name: "values", Entries: 3}}}, nil
		},
		tensorfusion.ApplyCRDsActivity: func(context.Context, tensorfusion.CRDsRequest) (tensorfusion.CRDsResult, error) {
			i.record(tensorfusion.ApplyCRDsActivity)
			return tensorfusion.CRDsResult{Applied: []string{"gpus"}}, nil
		},
		tensorfusion.ReleaseActivity: func(_ context.Context, r tensorfusion.ReleaseRequest) (tensorfusion.ReleaseResult, error) {
			i.record(tensorfusion.ReleaseActivity)
			i.releases = append(i.releases, r)
			return tensorfusion.ReleaseResult{Revision: i.revision + 1, Chart: "1.8.7", Deployed: helmBegan}, nil
		},
		tensorfusion.AwaitControllerActivity: func(_ context.Context, r tensorfusion.ControllerRequest) (tensorfusion.ControllerResult, error) {
			i.record(tensorfusion.AwaitControllerActivity)
			i.returning, i.awaited = r.Return, append(i.awaited, r)
			return tensorfusion.ControllerResult{Image: "controller:2.17.0", Replicas: 2, Leader: "c-0", Checks: i.controller, Pools: or(i.led, pools(i.now)), Objects: i.present, Told: i.told}, nil
		},
		tensorfusion.PolicyActivity: func(_ context.Context, r tensorfusion.PolicyRequest) (tensorfusion.PolicyResult, error) {
			i.record(tensorfusion.PolicyActivity, r.Mode)
			if i.policyRefused {
				return tensorfusion.PolicyResult{}, finding.Finding{Row: "T14", Object: "GPUNode/gpu-9", Found: "old pod"}.Error(finding.Stop)
			}
			i.policies = append(i.policies, r)
			return tensorfusion.PolicyResult{After: r.Before}, nil
		},
		tensorfusion.VerifyActivity: func(_ context.Context, r tensorfusion.VerifyRequest) (tensorfusion.VerifyResult, error) {
			i.verified = append(i.verified, r)
			i.record(tensorfusion.VerifyActivity, strings.Join(r.Rolled.Hypervisors, ","))
			return tensorfusion.VerifyResult{After: tensorfusion.Versions{Chart: "1.8.7", Controller: "2.17.0", Hypervisor: newImage}}, nil
		},
		tensorfusion.CanaryJobActivity: i.probe,
		tensorfusion.ReceiptActivity: func(_ context.Context, r tensorfusion.ReceiptRequest) (tensorfusion.ReceiptResult, error) {
			i.record(tensorfusion.ReceiptActivity)
			i.receipts = append(i.receipts, r)
			if len(r.JSON) == 0 {
				name := fmt.Sprintf("hosts-%d.json", r.Page)
				return tensorfusion.ReceiptResult{Hosts: artifact.Ref{Name: name, URL: "file:///" + name}}, nil
			}
			return tensorfusion.ReceiptResult{Artifact: artifact.Ref{Name: "receipt.json"}, Hosts: artifact.Ref{Name: "hosts.json", URL: "file:///hosts.json"}, ConfigMap: "refit-receipt"}, nil
		},
	}
}

// upgradeInput is a plan that passes.
func upgradeInput() UpgradeInput {
	return UpgradeInput{
		Cluster: "prod", Release: tensorfusion.Release{Name: "tf", Namespace: "tf"},
		Chart: tensorfusion.Chart{Ref: "oci://registry.invalid/charts/tf", Version: "1.8.7"}, HypervisorImage: newImage,
		Rollouts:    []Rollout{{Component: Hypervisor}},
		Validation:  Validation{CanaryImage: "registry.invalid/cuda-probe:1.0.0"},
		Acknowledge: []string{"T04"},
	}
}

func rollbackInput() RollbackInput {
	return RollbackInput{
		Cluster: "prod", Release: tensorfusion.Release{Name: "tf", Namespace: "tf"}, Revision: 1,
		Validation: Validation{CanaryImage: "registry.invalid/cuda-probe:1.0.0"},
	}
}

// at does something after the start of the run.
func (h *harness) at(after time.Duration, f func()) { h.RegisterDelayedCallback(f, after) }

func (h *harness) answer(verb string) { h.SignalWorkflow(verb, protocol.Answer{By: "ann"}) }

func (h *harness) status() protocol.Status {
	v, err := h.QueryWorkflow(protocol.QueryStatus)
	require.NoError(h.t, err)
	var s protocol.Status
	require.NoError(h.t, v.Get(&s))
	return s
}

// waits requires that the run waits in the way given, and returns how.
func (h *harness) waits(kind, stage string) protocol.Waiting {
	s := h.status()
	require.NotNil(h.t, s.WaitingFor, "the run should wait for %s at %s; it is %s at %s", kind, stage, s.Phase, s.Stage)
	require.Equal(h.t, kind, s.WaitingFor.Kind, "%+v", s.WaitingFor)
	require.Equal(h.t, stage, s.WaitingFor.Stage)
	return *s.WaitingFor
}

func (h *harness) run(kind string, in any) protocol.Receipt {
	h.t.Helper()
	h.ExecuteWorkflow(kind, in)
	require.True(h.t, h.IsWorkflowCompleted())
	require.NoError(h.t, h.GetWorkflowError())
	var r protocol.Receipt
	require.NoError(h.t, h.GetWorkflowResult(&r))
	return r
}

func (h *harness) upgrade(in UpgradeInput) protocol.Receipt {
	h.t.Helper()
	return h.run(protocol.TensorFusionUpgrade, in)
}

// rollback runs the real rollback alone.
func (h *harness) rollback(in RollbackInput) protocol.Receipt {
	h.t.Helper()
	h.RegisterWorkflowWithOptions(Rollback, workflow.RegisterOptions{Name: protocol.TensorFusionRollback})
	return h.run(protocol.TensorFusionRollback, in)
}

// mockRollback stands for the child rollback.
func (h *harness) mockRollback() {
	h.RegisterWorkflowWithOptions(func(_ workflow.Context, in RollbackInput) (protocol.Receipt, error) {
		h.i.rollbacks = append(h.i.rollbacks, in)
		return h.i.rollbackEnd, nil
	}, workflow.RegisterOptions{Name: protocol.TensorFusionRollback})
}

// stored is the receipt that was written last.
func (i *installation) stored() protocol.Receipt {
	require.NotEmpty(i.t, i.receipts)
	var r protocol.Receipt
	require.NoError(i.t, json.Unmarshal(i.receipts[len(i.receipts)-1].JSON, &r))
	return r
}

func names(stages []protocol.Stage) []string {
	var out []string
	for _, s := range stages {
		out = append(out, s.Name)
	}
	return out
}

func unmet(row string, class finding.Class) tensorfusion.Check {
	return tensorfusion.Check{Row: row, Class: class, Findings: []finding.Finding{{Row: row, Object: "object of " + row, Found: "not so"}}}
}
