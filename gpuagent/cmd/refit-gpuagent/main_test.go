package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/gpuagent/host/hosttest"
	"github.com/refit-run/refit/gpuagent/setup"
	"github.com/refit-run/refit/tests/temporaltest"
)

// actAsAgent makes the test binary the agent, so that it can be killed.
const actAsAgent = "REFIT_TEST_ACT_AS_GPUAGENT"

const node = "gpu-01"

func TestMain(m *testing.M) {
	if child.Main() {
		return
	}
	if os.Getenv(actAsAgent) != "" {
		main()
		return
	}
	if request := os.Getenv(actAsPreparer); request != "" {
		os.Exit(prepareOnce(request))
	}
	os.Exit(m.Run())
}

type world struct {
	gpus *fakes.Host
	tree *hosttest.Tree
}

func newWorld(t *testing.T) world {
	w := world{gpus: fakes.NewHost(t)}
	require.NoError(t, w.gpus.Set("gpus", "1"))
	var err error
	w.tree, err = hosttest.Create(t.TempDir(), fakes.DefaultDriver, 1)
	require.NoError(t, err)
	t.Setenv("REFIT_HOST_ROOT", w.tree.Root)
	t.Setenv("NODE_NAME", node)
	return w
}

// invoke runs a command as main does, and returns what it printed.
func invoke(args ...string) (code int, out string) {
	var b bytes.Buffer
	root := command()
	root.SetOut(&b)
	return run(context.Background(), root, args), b.String()
}

func TestTheExitCodeOfCheckIsTheVerdict(t *testing.T) {
	for _, c := range []struct {
		key, value string
		code       int
	}{
		{"cuda.version", "13000", 0},
		{"gpu.0.remap.banks.none", "1", exitDegraded},
		{"gpu.0.remap.pending", "1", exitResetNeeded},
		{"gpu.0.recovery", "2", exitUnfit},
		{"gpu.0.fail.nvmlDeviceGetSramEccErrorStatus", "4", exitUnproven},
	} {
		t.Run(strconv.Itoa(c.code), func(t *testing.T) {
			w := newWorld(t)
			require.NoError(t, w.gpus.Set(c.key, c.value))
			code, out := invoke("check", "-o", "json")
			require.Equal(t, c.code, code, out)
			var r gpu.Result
			require.NoError(t, json.Unmarshal([]byte(out), &r))
			require.Equal(t, node, r.Node)
			require.Len(t, r.Devices, 1)
		})
	}
}

func TestACheckAtTheHostWaitsForWhoIsAtWorkThere(t *testing.T) {
	w := newWorld(t)
	unlock, err := setup.Lock(t.Context(), w.tree.Root)
	require.NoError(t, err)
	for _, command := range []string{"check", "baseline"} {
		code, out := invoke(command)
		require.Equal(t, setup.ExitWaiting, code, "%s: %s", command, out)
	}
	unlock()
	code, out := invoke("check", "--all")
	require.Zero(t, code, out)
	require.Contains(t, out, "the only one at work")
}

// A check needs no right to the lock: where it may not have it, it says so.
func TestACheckThatMayNotLockTheHostSaysThatItSeesNobodyElse(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.tree.Write("run", ""))
	code, out := invoke("check", "--all")
	require.Zero(t, code, out)
	require.Contains(t, strings.Join(strings.Fields(out), " "), "others at work")
}

func TestTheTableNamesTheFailedRowAndTheVerdict(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.gpus.Set("gpu.0.recovery", "2"))
	_, out := invoke("check")
	require.Contains(t, out, "NODE_REBOOT")
	require.Contains(t, out, "verdict: unfit")
	require.NotContains(t, out, "PCIe width", "rows that passed are not shown")
	_, out = invoke("check", "--all")
	require.Contains(t, out, "PCIe width")
}

func TestABaselineIsWrittenAndComparedWith(t *testing.T) {
	w := newWorld(t)
	code, out := invoke("baseline")
	require.Zero(t, code)
	file := filepath.Join(t.TempDir(), "baseline.json")
	require.NoError(t, os.WriteFile(file, []byte(out), 0o600))
	code, out = invoke("check", "--baseline", file)
	require.Zero(t, code, out)
	require.NoError(t, w.gpus.Set("gpu.0.vbios", "1.2.3"))
	code, out = invoke("check", "--baseline", file)
	require.Equal(t, exitDegraded, code)
	require.Contains(t, out, "VBIOS")
	t.Setenv("NODE_NAME", "gpu-02")
	code, _ = invoke("check", "--baseline", file)
	require.Equal(t, 2, code, "a baseline of another host")
}

func TestWhatAHostIsDeclaredToHaveIsReadStrictly(t *testing.T) {
	newWorld(t)
	file := filepath.Join(t.TempDir(), "expect.yaml")
	require.NoError(t, os.WriteFile(file, []byte("gpus: 8\n"), 0o600))
	code, out := invoke("check", "--expect", file)
	require.Equal(t, exitUnfit, code)
	require.Contains(t, out, "8 (declared)")
	for _, wrong := range []string{"gpu: 8\n", "\n"} {
		require.NoError(t, os.WriteFile(file, []byte(wrong), 0o600))
		code, _ = invoke("check", "--expect", file)
		require.Equal(t, 2, code, "%q", wrong)
	}
}

func TestBadInputEndsWithTwo(t *testing.T) {
	newWorld(t)
	for _, args := range [][]string{
		{"check", "--level", "deep"}, {"check", "-o", "xml"}, {"check", "--baseline", "none.json"}, {"check", "--nope"}, {"check", "extra"}, {"nope"}, {"run"},
	} {
		t.Setenv("REFIT_CLUSTER", "")
		code, _ := invoke(args...)
		require.Equal(t, 2, code, "%q", args)
	}
}

func TestAHostWithoutADriverIsAVerdictAndNoError(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.gpus.RemoveLibraries())
	code, out := invoke("check")
	require.Equal(t, exitUnfit, code)
	require.Contains(t, out, "LIBRARY_NOT_FOUND")
	code, _ = invoke("baseline")
	require.Equal(t, 1, code)
}

func TestEveryExitCodeIsInTheHelp(t *testing.T) {
	_, out := invoke("--help")
	for _, text := range []string{"degraded", "resetNeeded", "unfit", "unproven", "bad input", "NODE_NAME", "REFIT_CLUSTER"} {
		require.Contains(t, out, text)
	}
}

// A killed agent takes its children along, and the one after it serves the
// same request again.
func TestAnAgentKilledInAStepIsReplacedAndTheRequestIsServed(t *testing.T) {
	c := temporalWith(t)
	for _, step := range []struct{ name, fault string }{
		{"the first look at the driver", "hang.nvmlInit"}, {"a reading", "hang.nvmlDeviceGetTemperature"}, {"the kernel launch", "gpu.0.cuda.hang.kernel"},
	} {
		t.Run(step.name, func(t *testing.T) {
			host := newWorld(t)
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
			defer cancel()
			run, err := c.ExecuteWorkflow(ctx, client.StartWorkflowOptions{TaskQueue: "test"}, "validate")
			require.NoError(t, err)
			agent := startAgent(t)
			// The fault comes when the agent serves: its own start looks too.
			started(t, c, run)
			require.NoError(t, host.gpus.Set(step.fault, "1"))
			stuck := eventuallyChild(t, agent.Process.Pid)
			require.NoError(t, agent.Process.Kill())
			_ = agent.Wait()
			require.Eventually(t, func() bool { return !alive(stuck) }, time.Minute, 10*time.Millisecond, "the child outlived its agent")
			require.NoError(t, host.gpus.Set(step.fault, ""))
			startAgent(t)
			var verdict gpu.Verdict
			require.NoError(t, run.Get(ctx, &verdict))
			require.Equal(t, gpu.Pass, verdict)
		})
	}
}

// The driver may come while the agent runs: it starts without one and says
// what is missing.
func TestAnAgentOnAHostWithoutADriverServes(t *testing.T) {
	c := temporalWith(t)
	host := newWorld(t)
	require.NoError(t, host.gpus.RemoveLibraries())
	startAgent(t)
	for _, want := range []gpu.Verdict{gpu.Unfit, gpu.Pass} {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		run, err := c.ExecuteWorkflow(ctx, client.StartWorkflowOptions{TaskQueue: "test"}, "validate")
		require.NoError(t, err)
		var verdict gpu.Verdict
		require.NoError(t, run.Get(ctx, &verdict))
		require.Equal(t, want, verdict)
		require.NoError(t, host.gpus.Swap())
	}
}

// temporalWith starts a Temporal server with a worker of the workflow below,
// and points agents at it.
func temporalWith(t *testing.T) client.Client {
	t.Helper()
	server := temporaltest.Binary()
	if server == "" {
		t.Skip(temporaltest.Missing)
	}
	address, c := temporaltest.Start(t, server)
	w := worker.New(c, "test", worker.Options{})
	w.RegisterWorkflowWithOptions(validate, workflow.RegisterOptions{Name: "validate"})
	require.NoError(t, w.Start())
	t.Cleanup(w.Stop)
	t.Setenv("TEMPORAL_ADDRESS", address)
	t.Setenv("REFIT_CLUSTER", "test")
	return c
}

func validate(ctx workflow.Context) (gpu.Verdict, error) {
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{TaskQueue: gpu.TaskQueue("test", node),
		StartToCloseTimeout: 3 * time.Minute, HeartbeatTimeout: 5 * time.Second,
		RetryPolicy: &temporal.RetryPolicy{InitialInterval: 100 * time.Millisecond, MaximumInterval: time.Second}})
	var r gpu.Result
	err := workflow.ExecuteActivity(ctx, gpu.ValidateActivity, gpu.ValidateRequest{Node: node, Level: gpu.Quick}).Get(ctx, &r)
	return r.Verdict, err
}

func startAgent(t *testing.T) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	agent := exec.Command(self, "run")
	agent.Env = append(os.Environ(), actAsAgent+"=1")
	require.NoError(t, agent.Start())
	t.Cleanup(func() {
		_ = agent.Process.Kill()
		_ = agent.Wait()
	})
	return agent
}

// started waits until an agent serves the run's activity.
func started(t *testing.T, c client.Client, run client.WorkflowRun) {
	t.Helper()
	require.Eventually(t, func() bool {
		d, err := c.DescribeWorkflowExecution(context.Background(), run.GetID(), run.GetRunID())
		return err == nil && len(d.PendingActivities) == 1 && d.PendingActivities[0].LastStartedTime != nil
	}, time.Minute, time.Millisecond)
}

// eventuallyChild is the process id of a child of the agent.
func eventuallyChild(t *testing.T, parent int) int {
	t.Helper()
	pid := 0
	require.Eventually(t, func() bool {
		lists, _ := filepath.Glob("/proc/" + strconv.Itoa(parent) + "/task/*/children")
		for _, l := range lists {
			b, _ := os.ReadFile(l)
			for _, f := range bytes.Fields(b) {
				pid, _ = strconv.Atoi(string(f))
			}
		}
		return pid != 0
	}, time.Minute, time.Millisecond)
	return pid
}

func alive(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	state := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])[0]
	return string(state) != "Z" && string(state) != "X"
}
