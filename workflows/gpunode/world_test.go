package gpunode

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/node"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/activities/visibility"
	"github.com/refit-run/refit/workflows/internal/workflowtest"
	"github.com/refit-run/refit/workflows/protocol"
)

// host is the world behind the activities: a Node and its agent.
type host struct {
	mu  sync.Mutex
	log []string
	// cordoned: "" or who; label: who has set it.
	cordoned, label string
	locked, silent  bool
	silentPlan      bool // nobody polls when the plan is asked for
	busy            bool // refused before the first step
	breaks          bool // fails in the middle of the set-up
	resumed         bool // an earlier attempt of the set-up did it all, and its reply was lost
	mute            bool // no verdict comes
	taken           int  // so many set-ups find another request at work
	inherited       bool // the cordon is that of an earlier run
	needs           []gpu.Need
	layout          bool   // as declared
	tenants         string // who says that the instances are those of tenants
	// boot is that of the Node object, booted the one in which the agent runs.
	boot, booted string
	port         int // of the hypervisor, by the pool
	baselined    int
	prepared     []gpu.PrepareRequest
	verdict      gpu.Verdict
	validated    []gpu.ValidateRequest
	leases       []lease.Held // of the requests that change the Node
	stored       []tensorfusion.ReceiptRequest
}

func (h *host) say(what string) { h.log = append(h.log, what) }

func (h *host) do(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
}

func (h *host) observe(context.Context, node.Request) (node.Result, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return node.Result{UID: "node-uid", BootID: h.boot}, nil
}

func (h *host) ofTensorFusion(_ context.Context, r tensorfusion.GPUHostsRequest) (tensorfusion.GPUHostsResult, error) {
	return tensorfusion.GPUHostsResult{Hosts: map[string]tensorfusion.GPUHost{r.Nodes[0]: {Port: h.port, Pods: []string{}}}}, nil
}

// own is the agent's refusal of a request for a boot that it does not run in.
func (h *host) own(boot string) error {
	if boot == h.booted {
		return nil
	}
	return finding.Finding{Object: "boot of node gpu-1", Expected: boot, Found: h.booted}.Error(finding.Wait)
}

func (h *host) keepOff(_ context.Context, r node.Request) (node.Result, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.leases = append(h.leases, r.Lease)
	h.say("keep off")
	h.label = "ours"
	return node.Result{UID: "node-uid", Changed: true, Before: "<absent>"}, nil
}

func (h *host) giveBack(_ context.Context, r node.Request) (node.Result, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.leases = append(h.leases, r.Lease)
	h.say("give back")
	h.label = ""
	return node.Result{}, nil
}

func (h *host) cordon(_ context.Context, r node.Request) (node.Result, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.leases = append(h.leases, r.Lease)
	h.say("cordon " + r.UID)
	if h.cordoned == "" {
		h.cordoned = "us"
	}
	return node.Result{UID: "node-uid", Foreign: h.cordoned != "us", Inherited: h.inherited}, nil
}

func (h *host) uncordon(_ context.Context, r node.Request) (node.Result, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.leases = append(h.leases, r.Lease)
	h.say("uncordon")
	if h.cordoned == "us" {
		h.cordoned = ""
	}
	return node.Result{}, nil
}

func (h *host) baseline(_ context.Context, r gpu.BaselineRequest) (gpu.Baseline, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.baselined++
	if err := h.own(r.NodeBootID); err != nil {
		return gpu.Baseline{}, err
	}
	if h.silent {
		return gpu.Baseline{}, temporal.NewTimeoutError(enums.TIMEOUT_TYPE_SCHEDULE_TO_START, nil)
	}
	h.say("baseline")
	return gpu.Baseline{Node: "gpu-1", Driver: "580", Devices: []gpu.Device{{UUID: "GPU-1",
		Readings: map[string]string{"MIG layout": "none", "VBIOS": "96.00"}}}}, nil
}

func (h *host) prepare(ctx context.Context, r gpu.PrepareRequest) (gpu.PrepareResult, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.prepared = append(h.prepared, r)
	if h.silentPlan {
		return gpu.PrepareResult{}, temporal.NewTimeoutError(enums.TIMEOUT_TYPE_SCHEDULE_TO_START, nil)
	}
	if err := h.own(r.NodeBootID); err != nil {
		return gpu.PrepareResult{}, err
	}
	out := gpu.PrepareResult{Node: r.Node}
	if h.resumed && !r.PlanOnly {
		out.Resumed, h.layout = true, true
	}
	if h.busy {
		f := finding.Finding{Object: "GPU GPU-1", Found: "2 clients"}
		return out, temporal.NewApplicationErrorWithOptions(f.String(), string(finding.Wait), temporal.ApplicationErrorOptions{
			NonRetryable: true, Details: []any{f, gpu.SetUpFailure{Untouched: true}}})
	}
	if h.taken > 0 && !r.PlanOnly {
		h.taken--
		f := finding.Finding{Object: "agent of this node", Found: "a validation is at work"}
		return out, temporal.NewApplicationErrorWithOptions(f.String(), string(finding.Wait), temporal.ApplicationErrorOptions{
			NextRetryDelay: 30 * time.Second, Details: []any{f, gpu.SetUpFailure{Untouched: activity.GetInfo(ctx).Attempt == 1}}})
	}
	if h.breaks && !r.PlanOnly {
		return out, finding.Finding{Object: "GPU GPU-1", Found: "left the bus"}.Error(finding.Stop)
	}
	if !h.layout {
		out.Actions = []gpu.Action{{System: "mig", Device: "GPU-1", What: "create GPU instance 7g.80gb at 0"}}
	}
	if r.PlanOnly {
		h.say("plan")
		return out, nil
	}
	h.say("prepare")
	if out.Needs = h.needs; len(h.needs) == 0 {
		h.layout = true
	}
	return out, nil
}

func (h *host) askTenants(context.Context, tensorfusion.TenantsRequest) (tensorfusion.TenantsResult, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return tensorfusion.TenantsResult{Partitioned: h.tenants != "", Why: h.tenants}, nil
}

func (h *host) validate(_ context.Context, r gpu.ValidateRequest) (gpu.Result, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.own(r.NodeBootID); err != nil {
		return gpu.Result{}, err
	}
	if h.mute {
		return gpu.Result{}, finding.Finding{Object: "node gpu-1", Found: "the reading broke off"}.Error(finding.Stop)
	}
	h.say("validate")
	h.validated = append(h.validated, r)
	out := gpu.Result{Node: r.Node, Verdict: gpu.Pass, Passed: 40}
	if h.verdict != "" {
		out.Verdict = h.verdict
		out.Checks = []gpu.Check{{Name: "CUDA call", Device: "GPU-1", Expected: "pass", Found: "wrong result", Severity: gpu.Fatal}}
	}
	return out, nil
}

func input() Input {
	return Input{Target: kube.Target{Cluster: "prod"}, Node: "gpu-1", Cordon: true,
		Prepare: &Prepare{MIG: &gpu.MIGRequest{Config: "version: v1"}}}
}

type harness struct {
	*testsuite.TestWorkflowEnvironment
	t *testing.T
	h *host
}

func newHarness(t *testing.T, h *host) *harness {
	env := workflowtest.Environment()
	env.RegisterWorkflowWithOptions(GPUNode, workflow.RegisterOptions{Name: protocol.GPUNode})
	for name, f := range map[string]any{
		kube.IdentifyActivity: func(context.Context, kube.IdentifyRequest) (kube.IdentifyResult, error) {
			return kube.IdentifyResult{UID: "uid-prod"}, nil
		},
		lease.AcquireActivity: func(_ context.Context, r lease.AcquireRequest) (lease.AcquireResult, error) {
			require.Equal(t, "gpunode-gpu-1", r.Release)
			if h.locked {
				return lease.AcquireResult{}, temporal.NewNonRetryableApplicationError("held by another run", protocol.Locked, nil)
			}
			h.do(func() { h.say("lock") })
			return lease.AcquireResult{Holder: "me"}, nil
		},
		lease.ReleaseActivity: func(context.Context, lease.ReleaseRequest) (lease.ReleaseResult, error) {
			h.do(func() { h.say("unlock") })
			return lease.ReleaseResult{Released: true}, nil
		},
		tensorfusion.ReceiptActivity: func(_ context.Context, r tensorfusion.ReceiptRequest) (tensorfusion.ReceiptResult, error) {
			h.do(func() { h.say("receipt"); h.stored = append(h.stored, r) })
			return tensorfusion.ReceiptResult{Artifact: artifact.Ref{Name: "receipt.json"}}, nil
		},
		visibility.InstalledActivity: func(context.Context, visibility.Request) (visibility.Result, error) {
			return visibility.Result{}, nil
		},
		node.ObserveActivity: h.observe, tensorfusion.GPUHostsActivity: h.ofTensorFusion,
		node.KeepOffActivity: h.keepOff, node.GiveBackActivity: h.giveBack, node.CordonActivity: h.cordon, node.UncordonActivity: h.uncordon,
		gpu.BaselineActivity: h.baseline, gpu.PrepareActivity: h.prepare, gpu.ValidateActivity: h.validate,
		tensorfusion.TenantsActivity: h.askTenants,
	} {
		env.RegisterActivityWithOptions(f, activity.RegisterOptions{Name: name})
	}
	return &harness{TestWorkflowEnvironment: env, t: t, h: h}
}

func (h *harness) at(after time.Duration, f func()) { h.RegisterDelayedCallback(f, after) }

func (h *harness) status() protocol.Status {
	v, err := h.QueryWorkflow(protocol.QueryStatus)
	require.NoError(h.t, err)
	var s protocol.Status
	require.NoError(h.t, v.Get(&s))
	return s
}

func (h *harness) waits(stage string) protocol.Waiting {
	s := h.status()
	require.NotNil(h.t, s.WaitingFor, "%+v", s)
	require.Equal(h.t, stage, s.WaitingFor.Stage)
	return *s.WaitingFor
}

func (h *harness) run(in Input) Result {
	h.ExecuteWorkflow(protocol.GPUNode, in)
	require.True(h.t, h.IsWorkflowCompleted())
	require.NoError(h.t, h.GetWorkflowError())
	var out Result
	require.NoError(h.t, h.GetWorkflowResult(&out))
	return out
}
