// Package bench measures the node agent on fake GPUs: the quick check of a full
// host, and the memory of an agent that waits for work. It runs the real binary
// and prints one line per figure; a missed goal is a figure too.
package bench

import (
	"context"
	"fmt"
	"io"
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
	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/gpuagent/host/hosttest"
	"github.com/refit-run/refit/tests/temporaltest"
)

const (
	gpus    = 8
	cluster = "bench"
	node    = "gpu-01"
	queue   = "bench"
)

// Goals of the agent.
const (
	quickGoalSeconds = 2
	idleGoalMB       = 40
)

func BenchmarkAgent(b *testing.B) {
	binary := agentBinary(b)
	env := fakeHost(b)
	for b.Loop() {
		figure("quick check of 8 fake GPUs", quickCheck(b, binary, env).Seconds(), "s", quickGoalSeconds)
		if server := temporaltest.Binary(); server != "" {
			figure("idle RSS of the GPU agent", idleRSS(b, binary, server, env), "MB", idleGoalMB)
		} else {
			b.Log("skipped: idle RSS: " + temporaltest.Missing)
		}
	}
}

func figure(name string, value float64, unit string, goal float64) {
	verdict := "ok"
	if value > goal {
		verdict = "miss"
	}
	fmt.Printf("bench: %s %.2f %s (goal <= %g) %s\n", name, value, unit, goal, verdict)
}

// agentBinary is the built one, or one built here.
func agentBinary(b *testing.B) string {
	if dir := os.Getenv("REFIT_BIN"); dir != "" {
		path := filepath.Join(dir, "refit-gpuagent")
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	path := filepath.Join(b.TempDir(), "refit-gpuagent")
	out, err := exec.Command("go", "build", "-trimpath", "-o", path, "../cmd/refit-gpuagent").CombinedOutput()
	require.NoError(b, err, "%s", out)
	return path
}

func fakeHost(b *testing.B) []string {
	h, err := fakes.Create(b.TempDir())
	require.NoError(b, err)
	require.NoError(b, h.Set("gpus", strconv.Itoa(gpus)))
	tree, err := hosttest.Create(b.TempDir(), fakes.DefaultDriver, gpus)
	require.NoError(b, err)
	env := append(os.Environ(), h.Env()...)
	return append(env, "REFIT_HOST_ROOT="+tree.Root, "NODE_NAME="+node, "REFIT_CLUSTER="+cluster)
}

func quickCheck(b *testing.B, binary string, env []string) time.Duration {
	c := exec.Command(binary, "check", "--level", "quick")
	c.Env = env
	started := time.Now()
	out, err := c.CombinedOutput()
	took := time.Since(started)
	require.NoError(b, err, "%s", out)
	return took
}

// idleRSS is the memory of an agent that has served one validation and waits
// for the next request.
func idleRSS(b *testing.B, binary, server string, env []string) float64 {
	address, c := temporaltest.Start(b, server)
	agent := exec.Command(binary, "run")
	agent.Env = append(env, "TEMPORAL_ADDRESS="+address)
	start(b, agent)

	w := worker.New(c, queue, worker.Options{})
	w.RegisterWorkflowWithOptions(validate, workflow.RegisterOptions{Name: "validate"})
	require.NoError(b, w.Start())
	defer w.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	run, err := c.ExecuteWorkflow(ctx, client.StartWorkflowOptions{TaskQueue: queue}, "validate")
	require.NoError(b, err)
	var verdict gpu.Verdict
	require.NoError(b, run.Get(ctx, &verdict))
	require.Equal(b, gpu.Pass, verdict)
	return rss(b, agent.Process.Pid)
}

func validate(ctx workflow.Context) (gpu.Verdict, error) {
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{TaskQueue: gpu.TaskQueue(cluster, node),
		StartToCloseTimeout: time.Minute, RetryPolicy: &temporal.RetryPolicy{MaximumAttempts: 1}})
	var r gpu.Result
	err := workflow.ExecuteActivity(ctx, gpu.ValidateActivity, gpu.ValidateRequest{Node: node, Level: gpu.Quick}).Get(ctx, &r)
	return r.Verdict, err
}

func start(b *testing.B, c *exec.Cmd) {
	c.Stderr = io.Discard
	require.NoError(b, c.Start())
	b.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
}

func rss(b *testing.B, pid int) float64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(b, err)
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			require.NoError(b, err)
			return kib * 1024 / 1e6
		}
	}
	b.Fatal("no VmRSS in /proc")
	return 0
}
