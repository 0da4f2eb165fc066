// Package e2e runs the sandbox's own program from the outside: up, a look
// around, faults, down.
package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/sandbox/control"
	"github.com/refit-run/refit/sandbox/process"
)

// limit bounds the whole test on a busy machine.
const limit = 5 * time.Minute

// box is one sandbox driven through its program.
type box struct {
	t       *testing.T
	program string
	folder  string
}

func newBox(t *testing.T) *box {
	t.Helper()
	bin := os.Getenv("REFIT_BIN")
	if bin == "" {
		bin = filepath.Join("..", "..", "bin")
	}
	bin, err := filepath.Abs(bin)
	require.NoError(t, err)
	for _, name := range []string{"refit-sandbox", "refit-kube", "kwok", "temporal"} {
		if _, err := os.Stat(filepath.Join(bin, name)); err != nil {
			t.Skipf("SKIPPED: %s is not built in %s; run `make build`", name, bin)
		}
	}
	b := &box{t: t, program: filepath.Join(bin, "refit-sandbox"), folder: filepath.Join(t.TempDir(), "box")}
	t.Cleanup(func() { _, _ = b.try("down") })
	return b
}

func (b *box) try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, b.program, append([]string{"--dir", b.folder}, args...)...)
	var progress strings.Builder
	cmd.Stderr = &progress
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("refit-sandbox %s: %w\n%s", strings.Join(args, " "), err, progress.String())
	}
	return string(out), err
}

func (b *box) run(args ...string) string {
	b.t.Helper()
	out, err := b.try(args...)
	require.NoError(b.t, err)
	return out
}

func (b *box) status() control.Status {
	b.t.Helper()
	var s control.Status
	require.NoError(b.t, json.Unmarshal([]byte(b.run("status", "-o", "json")), &s))
	return s
}

// environment parses the export lines.
func (b *box) environment() map[string]string {
	env := map[string]string{}
	for line := range strings.Lines(b.run("env")) {
		name, value, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "export "), "=")
		env[name] = strings.Trim(value, "'")
	}
	return env
}

// processes lists those whose command line names the folder.
func (b *box) processes() []string {
	var found []string
	entries, err := os.ReadDir("/proc")
	require.NoError(b.t, err)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if line, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")); err == nil && strings.Contains(string(line), b.folder) {
			found = append(found, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

func (b *box) eventually(what func(context.Context) error) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	defer cancel()
	require.NoError(b.t, process.Until(ctx, 100*time.Millisecond, what))
}

func TestUpDown(t *testing.T) {
	b := newBox(t)
	b.run("up", "--pools", "shared=2,training=1", "--cluster", "alpha")
	s := b.status()
	require.True(t, s.Ready)
	require.Equal(t, 3, s.NodesReady)
	require.Equal(t, 3, s.Agents)
	require.Len(t, s.Components, 6)
	env := b.environment()
	b.run("up")
	require.Equal(t, s.PID, b.status().PID, "up finds the running sandbox")

	t.Run("the worker's user sees the installed release on every node", func(t *testing.T) {
		name, rest, _ := strings.Cut(env["REFIT_CLUSTERS"], "=")
		kubeconfig, contextName, _ := strings.Cut(rest, "#")
		require.Equal(t, "alpha", name)
		require.Equal(t, "alpha", contextName)
		pods, err := kubernetesOf(t, kubeconfig).CoreV1().Pods("tensor-fusion-sys").List(t.Context(), metav1.ListOptions{LabelSelector: "tensor-fusion.ai/component=hypervisor"})
		require.NoError(t, err)
		require.Len(t, pods.Items, 3)
		audit, err := os.ReadFile(env["REFIT_SANDBOX_AUDIT_LOG"])
		require.NoError(t, err)
		require.Contains(t, string(audit), `"username":"refit-worker"`)
	})
	t.Run("an agent validates its GPUs, and fails when told so", func(t *testing.T) {
		agentVerdicts(t, b, env)
	})
	t.Run("a hypervisor crashes from its first moment on and recovers", func(t *testing.T) {
		hypervisorCrashes(t, b, env)
	})
	t.Run("the API server goes away and comes back", func(t *testing.T) {
		b.run("fault", "apiserver-down", "1s")
		b.eventually(func(ctx context.Context) error {
			_, err := kubernetesOf(t, env["KUBECONFIG"]).CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{})
			return err
		})
	})

	b.run("down")
	require.Empty(t, b.processes())
	require.NoDirExists(t, b.folder)
	_, err := b.try("status")
	require.Error(t, err)
	b.run("down")
}

// A daemon that is killed takes its components with it; up continues on the
// same data and the same ports.
func TestUpAfterKill(t *testing.T) {
	b := newBox(t)
	b.run("up", "--pools", "shared=1", "--no-tensorfusion")
	before := b.environment()
	kube := kubernetesOf(t, before["KUBECONFIG"])
	_, err := kube.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kept"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	daemon, err := os.FindProcess(b.status().PID)
	require.NoError(t, err)
	require.NoError(t, daemon.Kill())
	b.eventually(func(context.Context) error {
		if left := b.processes(); len(left) > 0 {
			return errors.New("still there: " + strings.Join(left, "; "))
		}
		return nil
	})
	b.run("up")
	require.Equal(t, before, b.environment())
	_, err = kube.CoreV1().ConfigMaps("default").Get(t.Context(), "kept", metav1.GetOptions{})
	require.NoError(t, err)
	b.run("down")
	require.Empty(t, b.processes())
}

func kubernetesOf(t *testing.T, kubeconfig string) kubernetes.Interface {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	require.NoError(t, err)
	kube, err := kubernetes.NewForConfig(cfg)
	require.NoError(t, err)
	return kube
}

func agentVerdicts(t *testing.T, b *box, env map[string]string) {
	c, err := client.Dial(client.Options{HostPort: env["TEMPORAL_ADDRESS"], Namespace: env["TEMPORAL_NAMESPACE"]})
	require.NoError(t, err)
	defer c.Close()
	w := worker.New(c, "probe", worker.Options{})
	w.RegisterWorkflowWithOptions(validateNode, workflow.RegisterOptions{Name: "validateNode"})
	require.NoError(t, w.Start())
	defer w.Stop()
	verdict := func() gpu.Verdict {
		run, err := c.ExecuteWorkflow(t.Context(), client.StartWorkflowOptions{TaskQueue: "probe"}, "validateNode", "alpha", "shared-001")
		require.NoError(t, err)
		var v gpu.Verdict
		require.NoError(t, run.Get(t.Context(), &v))
		return v
	}
	require.Equal(t, gpu.Pass, verdict())
	b.run("fault", "gpu-fails", "shared-001")
	require.Equal(t, gpu.Unfit, verdict())
	b.run("fault", "temporal-kill")
	b.run("fault", "gpu-repaired", "shared-001")
	b.eventually(func(ctx context.Context) error {
		_, err := c.CheckHealth(ctx, &client.CheckHealthRequest{})
		return err
	})
	require.Equal(t, gpu.Pass, verdict(), "the agents find the restarted server")
}

func validateNode(ctx workflow.Context, cluster, node string) (gpu.Verdict, error) {
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		TaskQueue: gpu.TaskQueue(cluster, node), StartToCloseTimeout: time.Minute, HeartbeatTimeout: 10 * time.Second,
	})
	var base gpu.Baseline
	if err := workflow.ExecuteActivity(ctx, gpu.BaselineActivity, gpu.BaselineRequest{Node: node}).Get(ctx, &base); err != nil {
		return "", err
	}
	var r gpu.Result
	err := workflow.ExecuteActivity(ctx, gpu.ValidateActivity, gpu.ValidateRequest{Node: node, Level: gpu.Quick, Baseline: &base, Deadline: time.Minute}).Get(ctx, &r)
	return r.Verdict, err
}

func hypervisorCrashes(t *testing.T, b *box, env map[string]string) {
	kube := kubernetesOf(t, env["KUBECONFIG"])
	get := func(ctx context.Context) (*corev1.Pod, error) {
		return kube.CoreV1().Pods("tensor-fusion-sys").Get(ctx, "hypervisor-shared-000", metav1.GetOptions{})
	}
	b.run("fault", "hypervisor-crash-loop", "shared-000")
	before, err := get(t.Context())
	require.NoError(t, err)
	b.run("fault", "hypervisor-replaced", "shared-000")
	b.eventually(func(ctx context.Context) error {
		p, err := get(ctx)
		if err != nil {
			return err
		}
		if p.UID == before.UID || len(p.Status.ContainerStatuses) == 0 {
			return errors.New("no crash of the new pod yet")
		}
		if p.Status.ContainerStatuses[0].Ready {
			return fmt.Errorf("pod %s became Ready", p.UID)
		}
		if p.Status.ContainerStatuses[0].RestartCount < 1 {
			return errors.New("no restart yet")
		}
		return nil
	})
	b.run("fault", "clear")
	b.eventually(func(ctx context.Context) error {
		p, err := get(ctx)
		if err != nil {
			return err
		}
		if len(p.Status.ContainerStatuses) == 0 || !p.Status.ContainerStatuses[0].Ready {
			return errors.New("not Ready yet")
		}
		return nil
	})
}
