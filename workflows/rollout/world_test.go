package rollout

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/converter"
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
	"github.com/refit-run/refit/workflows/rollout/plan"
)

const (
	oldImage = "hypervisor:1"
	newImage = "hypervisor:2"
)

// cluster is the world behind the activities: hosts with a pod each, and a
// policy flag. Its methods are the activities.
type cluster struct {
	t     *testing.T
	mu    sync.Mutex
	names []string
	pods  map[string]*pod
	// flag is auto update, as somebody else may set it.
	flag bool
	// stuck hosts never become Ready, silent ones have no agent.
	stuck, silent map[string]bool
	verdict       map[string]gpu.Verdict
	took          time.Duration // of a wave
	breakShard    error         // returned once by ReplaceHypervisors, after the deletes
	unpolled      int           // tries of ReplaceHypervisors that no worker takes up

	log       []string // what happened, in order
	stored    []tensorfusion.ReceiptRequest
	deleted   map[string]int
	validated map[string]int
	baselines map[string]*gpu.Baseline // as validated last
	expected  map[string]*gpu.Expect
	tenants   bool // the hosts' MIG instances are TensorFusion's
	away      int
	maxAway   int
	lost      map[string]bool // GPUs of these hosts are gone after the replacement
	// boots are those that the Nodes are of, booted those in which the agents run
	// when these differ.
	boots, booted map[string]string
	reboots       map[string]string               // into this boot while their pods are replaced
	known         map[string]tensorfusion.GPUHost // of TensorFusion, by the cluster
	untold        error                           // instead of that
	kept          map[string]bool                 // foreign automation is kept off
}

type pod struct {
	uid      string
	image    string
	serial   int
	notReady string
}

func newCluster(t *testing.T, n int) *cluster {
	c := &cluster{t: t, pods: map[string]*pod{}, stuck: map[string]bool{}, silent: map[string]bool{},
		verdict: map[string]gpu.Verdict{}, deleted: map[string]int{}, validated: map[string]int{},
		baselines: map[string]*gpu.Baseline{}, expected: map[string]*gpu.Expect{}, lost: map[string]bool{}, took: 10 * time.Second,
		boots: map[string]string{}, booted: map[string]string{}, reboots: map[string]string{}, known: map[string]tensorfusion.GPUHost{}, kept: map[string]bool{}}
	for i := range n {
		name := fmt.Sprintf("gpu-%d", i+1)
		c.names = append(c.names, name)
		c.pods[name] = &pod{uid: name + "-0", image: oldImage}
	}
	return c
}

func (c *cluster) say(format string, args ...any) {
	c.log = append(c.log, fmt.Sprintf(format, args...))
}

func (c *cluster) renew(name string) {
	p := c.pods[name]
	p.serial++
	p.uid, p.image, p.notReady = fmt.Sprintf("%s-%d", name, p.serial), newImage, ""
	if c.stuck[name] {
		p.notReady = "pod is Pending"
	}
}

func (c *cluster) hold(_ context.Context, r tensorfusion.HoldRequest) (tensorfusion.HoldResult, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out tensorfusion.HoldResult
	out.Before = []tensorfusion.PoolPolicy{{Pool: "tf-shared", AutoHypervisor: c.flag}}
	if c.flag && r.Assert {
		out.Broken = []finding.Finding{{Row: "P10", Object: "GPUPool/tf-shared", Expected: "auto update off", Found: "autoUpdateHypervisor=true"}}
	}
	c.flag = false
	return out, nil
}

func (c *cluster) observe(ctx context.Context, r tensorfusion.ObservePoolRequest) (tensorfusion.PoolObservation, error) {
	out := tensorfusion.PoolObservation{Pool: "tf-shared"}
	if r.Assert > 0 {
		held, err := c.hold(ctx, tensorfusion.HoldRequest{Assert: true})
		if err != nil {
			return out, err
		}
		out.Broken = held.Broken
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range c.names {
		p := c.pods[name]
		out.Hosts = append(out.Hosts, tensorfusion.Host{Name: name, UID: p.uid,
			OnTarget: p.image == newImage && p.notReady == "", Broken: p.notReady, Partitioned: c.tenants,
			BootID: c.boots[name], KeptOff: c.kept[name]})
	}
	return out, nil
}

func (c *cluster) replace(_ context.Context, r tensorfusion.ReplaceRequest) (tensorfusion.ReplaceResult, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	require.LessOrEqual(c.t, len(r.Hosts), ShardSize)
	if c.unpolled > 0 {
		c.unpolled--
		return tensorfusion.ReplaceResult{}, neverPolled()
	}
	var out tensorfusion.ReplaceResult
	var wave []string
	for _, h := range r.Hosts {
		p := c.pods[h.Name]
		res := tensorfusion.HostResult{Name: h.Name, OldUID: h.UID, Outcome: tensorfusion.OutcomeAlready, Seconds: c.took.Seconds()}
		if p.uid == h.UID && (p.image != newImage || p.notReady != "") {
			c.deleted[h.Name]++
			c.renew(h.Name)
			res.Outcome = tensorfusion.OutcomeReplaced
			wave = append(wave, h.Name)
		}
		if boot := c.reboots[h.Name]; boot != "" {
			c.boots[h.Name], c.booted[h.Name] = boot, boot
		}
		res.NewUID, res.BootID = c.pods[h.Name].uid, c.boots[h.Name]
		if why := c.pods[h.Name].notReady; why != "" {
			res.Outcome, res.Failure = tensorfusion.OutcomeFailed, &finding.Finding{Object: "GPUNode/" + h.Name, Found: why}
		}
		out.Hosts = append(out.Hosts, res)
	}
	c.say("replace %v", wave)
	if err := c.breakShard; err != nil {
		c.breakShard = nil
		return tensorfusion.ReplaceResult{}, err
	}
	return out, nil
}

// neverPolled is what an activity ends with when no worker polls its queue.
func neverPolled() error {
	return temporal.NewTimeoutError(enums.TIMEOUT_TYPE_SCHEDULE_TO_START, nil)
}

func (c *cluster) baseline(_ context.Context, r gpu.BaselineRequest) (gpu.Baseline, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.silent[r.Node] {
		return gpu.Baseline{}, neverPolled()
	}
	if err := c.own(r.Node, r.NodeBootID); err != nil {
		return gpu.Baseline{}, err
	}
	// What the first attempt broke shows in every baseline taken later.
	b := gpu.Baseline{Node: r.Node, BootID: "boot", Readings: map[string]string{"xids": fmt.Sprint(c.deleted[r.Node])},
		KernelLog: gpu.KernelLogPosition{Visible: true, Sequence: uint64(c.deleted[r.Node])}}
	if !c.lost[r.Node] || c.deleted[r.Node] == 0 {
		b.Devices = []gpu.Device{{UUID: "GPU-" + r.Node}}
	}
	return b, nil
}

func (c *cluster) validate(_ context.Context, r gpu.ValidateRequest) (gpu.Result, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.own(r.Node, r.NodeBootID); err != nil {
		return gpu.Result{}, err
	}
	c.validated[r.Node]++
	c.baselines[r.Node], c.expected[r.Node] = r.Baseline, r.Expect
	out := gpu.Result{Node: r.Node, Verdict: gpu.Pass}
	if v := c.verdict[r.Node]; v != "" {
		out.Verdict = v
		out.Checks = []gpu.Check{{Name: "cuda-memory", Device: "GPU-" + r.Node, Expected: "no error", Found: "error 2", Severity: gpu.Fatal}}
	}
	return out, nil
}

// own is the agent's refusal of a request for a boot that it does not run in.
func (c *cluster) own(host, asked string) error {
	here, differs := c.booted[host]
	if !differs || asked == here {
		return nil
	}
	return finding.Finding{Object: "boot of node " + host, Expected: asked, Found: here}.Error(finding.Wait)
}

func (c *cluster) gpuHosts(_ context.Context, r tensorfusion.GPUHostsRequest) (tensorfusion.GPUHostsResult, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.say("ask of %v", r.Nodes)
	return tensorfusion.GPUHostsResult{Hosts: c.known}, c.untold
}

// do changes the world between two steps of the workflow.
func (c *cluster) do(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

func input(s plan.Strategy) Input {
	return Input{
		Scope: tensorfusion.Scope{
			Target:  kube.Target{Cluster: "prod"},
			Release: tensorfusion.Release{Name: "tensor-fusion-sys", Namespace: "tensor-fusion-sys"},
		},
		Component: Hypervisor, Pool: "tf-shared", Entry: "shared", Strategy: s,
		Goal: tensorfusion.Goal{HypervisorImage: newImage, PodName: "tf-hypervisor-"},
	}
}

// harness runs one Rollout against a cluster on the test suite's clock.
type harness struct {
	*testsuite.TestWorkflowEnvironment
	t *testing.T
	c *cluster
}

// more activities can only be given at the start.
func newHarness(t *testing.T, c *cluster, more ...map[string]any) *harness {
	env := workflowtest.Environment()
	env.SetStartTime(time.Date(2026, 11, 2, 8, 0, 0, 0, time.UTC))
	h := &harness{TestWorkflowEnvironment: env, t: t, c: c}
	env.RegisterWorkflowWithOptions(Rollout, workflow.RegisterOptions{Name: protocol.Rollout})
	env.RegisterWorkflowWithOptions(Shard, workflow.RegisterOptions{Name: protocol.RolloutShard})
	activities := map[string]any{
		kube.IdentifyActivity: func(context.Context, kube.IdentifyRequest) (kube.IdentifyResult, error) {
			return kube.IdentifyResult{UID: "uid-prod"}, nil
		},
		lease.AcquireActivity: func(context.Context, lease.AcquireRequest) (lease.AcquireResult, error) {
			c.say("lease taken")
			return lease.AcquireResult{Holder: "me"}, nil
		},
		lease.ReleaseActivity: func(context.Context, lease.ReleaseRequest) (lease.ReleaseResult, error) {
			c.say("lease given back")
			return lease.ReleaseResult{Released: true}, nil
		},
		tensorfusion.ReceiptActivity: func(_ context.Context, r tensorfusion.ReceiptRequest) (tensorfusion.ReceiptResult, error) {
			c.say("record stored")
			c.stored = append(c.stored, r)
			return tensorfusion.ReceiptResult{Artifact: artifact.Ref{Name: "receipt.json"}, Hosts: artifact.Ref{Name: "hosts.json", URL: "file:///hosts.json"}}, nil
		},
		visibility.InstalledActivity: func(context.Context, visibility.Request) (visibility.Result, error) {
			return visibility.Result{}, nil
		},
		tensorfusion.HoldActivity:        c.hold,
		tensorfusion.ObservePoolActivity: c.observe,
		gpu.BaselineActivity:             c.baseline,
		gpu.ValidateActivity:             c.validate,
		tensorfusion.ReplaceActivity:     c.replace,
		tensorfusion.GPUHostsActivity:    c.gpuHosts,
	}
	for _, m := range more {
		maps.Copy(activities, m)
	}
	for name, f := range activities {
		env.RegisterActivityWithOptions(f, activity.RegisterOptions{Name: name})
	}
	env.OnActivity(tensorfusion.ReplaceActivity, mock.Anything, mock.Anything).
		AfterFn(func() time.Duration { return c.took }).Return(c.replace)
	shard := func(i *workflow.Info) bool { return i.WorkflowType.Name == protocol.RolloutShard }
	env.SetOnChildWorkflowStartedListener(func(i *workflow.Info, _ workflow.Context, _ converter.EncodedValues) {
		if shard(i) {
			c.do(func() { c.away++; c.maxAway = max(c.maxAway, c.away) })
		}
	})
	env.SetOnChildWorkflowCompletedListener(func(i *workflow.Info, _ converter.EncodedValue, _ error) {
		if shard(i) {
			c.do(func() { c.away-- })
		}
	})
	return h
}

// at runs f at the given time after the start.
func (h *harness) at(after time.Duration, f func()) { h.RegisterDelayedCallback(f, after) }

func (h *harness) signal(verb string, a protocol.Answer) { h.SignalWorkflow(verb, a) }

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

func (h *harness) run(in Input) Result {
	h.ExecuteWorkflow(protocol.Rollout, in)
	require.True(h.t, h.IsWorkflowCompleted())
	require.NoError(h.t, h.GetWorkflowError())
	var out Result
	require.NoError(h.t, h.GetWorkflowResult(&out))
	return out
}

// continued returns the input of the next run when this one continued as new.
func (h *harness) continued() (Input, bool) {
	var again *workflow.ContinueAsNewError
	if !errors.As(h.GetWorkflowError(), &again) {
		return Input{}, false
	}
	var in Input
	require.NoError(h.t, converter.GetDefaultDataConverter().FromPayloads(again.Input, &in))
	return in, true
}

func outcomes(r Result) map[string]string {
	out := map[string]string{}
	for _, h := range r.Hosts {
		out[h.Name] = h.Outcome
	}
	return out
}

func (c *cluster) replaced() []string {
	var out []string
	for _, l := range c.log {
		if len(l) > 8 && l[:8] == "replace " {
			out = append(out, l[8:])
		}
	}
	return out
}

func states(stages []protocol.Stage) map[string]protocol.StageState {
	out := map[string]protocol.StageState{}
	for _, s := range stages {
		out[s.Name] = s.State
	}
	return out
}

func each(n int, outcome string) map[string]string {
	out := map[string]string{}
	for i := range n {
		out[fmt.Sprintf("gpu-%d", i+1)] = outcome
	}
	return out
}

func with(m map[string]string, name, outcome string) map[string]string {
	m[name] = outcome
	return m
}

func names(stages []protocol.Stage) []string {
	var out []string
	for _, s := range stages {
		out = append(out, s.Name)
	}
	return slices.Clip(out)
}
