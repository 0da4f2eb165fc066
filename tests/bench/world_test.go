package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/client"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/refit-run/refit/workflows/protocol"
)

// world is the sandbox with one worker.
type world struct {
	b        *testing.B
	root     string // of the repository
	home     string
	env      []string
	vars     map[string]string
	nodes    []string // of the pool, by name
	kube     kubernetes.Interface
	dynamic  dynamic.Interface
	temporal client.Client
	worker   *exec.Cmd
}

const sandbox = "bench"

// up starts a sandbox with one pool and a worker.
func up(b *testing.B, nodes int) *world {
	b.Helper()
	root, err := filepath.Abs(filepath.Join("..", ".."))
	require.NoError(b, err)
	home, err := os.MkdirTemp("", "refit-bench-")
	require.NoError(b, err)
	w := &world{b: b, root: root, home: home, vars: map[string]string{}}
	bin := filepath.Join(root, "bin")
	w.env = append(os.Environ(), "REFIT_SANDBOX_HOME="+home, "PATH="+bin+":"+os.Getenv("PATH"), "NO_COLOR=1")
	b.Cleanup(w.down)
	began := time.Now()
	out, code := w.run("refit-sandbox", "up", "--name", sandbox, "--pools", fmt.Sprintf("%s=%d", pool, nodes),
		"--ready-after", readyAfter.String(), "--validate-takes", validateTakes.String())
	require.Zero(b, code, out)
	out, code = w.run("refit-sandbox", "env", "--name", sandbox)
	require.Zero(b, code, out)
	for _, line := range strings.Split(out, "\n") {
		if key, value, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "export "), "="); ok {
			value = strings.Trim(value, `"'`)
			w.vars[key] = value
			w.env = append(w.env, key+"="+value)
		}
	}
	w.connect()
	out, code = w.run("refit", "setup")
	require.Zero(b, code, out)
	w.startWorker()
	logf(b, "a sandbox of %d nodes is up after %s", nodes, time.Since(began).Round(time.Second))
	return w
}

func (w *world) connect() {
	w.b.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", w.vars["KUBECONFIG"])
	require.NoError(w.b, err)
	cfg.QPS = -1 // a floor that throttles itself would flatter Refit
	w.kube, err = kubernetes.NewForConfig(cfg)
	require.NoError(w.b, err)
	w.dynamic, err = dynamic.NewForConfig(cfg)
	require.NoError(w.b, err)
	w.temporal, err = client.Dial(client.Options{HostPort: w.vars["TEMPORAL_ADDRESS"], Logger: quiet{}})
	require.NoError(w.b, err)
	w.b.Cleanup(w.temporal.Close)
	list, err := w.kube.CoreV1().Nodes().List(context.Background(), metav1.ListOptions{LabelSelector: "refit.sandbox/pool=" + pool})
	require.NoError(w.b, err)
	for _, n := range list.Items {
		w.nodes = append(w.nodes, n.Name)
	}
}

// quiet drops the client's log lines.
type quiet struct{}

func (quiet) Debug(string, ...any) {}
func (quiet) Info(string, ...any)  {}
func (quiet) Warn(string, ...any)  {}
func (quiet) Error(string, ...any) {}

// batch is how many hosts a full batch has; shares are rounded up.
func (w *world) batch() int { return (batchPercent*len(w.nodes) + 99) / 100 }

func (w *world) down() {
	w.killWorker()
	out, code := w.run("refit-sandbox", "down", "--name", sandbox)
	if code != 0 {
		w.b.Errorf("refit-sandbox down: exit %d\n%s", code, out)
	}
	if w.b.Failed() {
		w.b.Logf("kept: %s", w.home)
		return
	}
	_ = os.RemoveAll(w.home)
}

func (w *world) startWorker() {
	w.b.Helper()
	log, err := os.OpenFile(filepath.Join(w.home, "worker.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(w.b, err)
	defer log.Close()
	w.worker = exec.Command(filepath.Join(w.root, "bin", "refit-worker"))
	w.worker.Env, w.worker.Stdout, w.worker.Stderr = w.env, log, log
	require.NoError(w.b, w.worker.Start())
}

// killWorker is kill -9.
func (w *world) killWorker() {
	if w.worker == nil {
		return
	}
	_ = w.worker.Process.Kill()
	_ = w.worker.Wait() // says that it was killed
	w.worker = nil
}

// commandLimit leaves room for a whole upgrade on a machine that is not idle.
const commandLimit = 40 * time.Minute

// run runs a binary of bin/ to its end.
func (w *world) run(name string, args ...string) (string, int) {
	w.b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(w.root, "bin", name), args...)
	var out bytes.Buffer
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = w.env, w.root, &out, &out
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return out.String(), 0
	case errors.As(err, &exit):
		return out.String(), exit.ExitCode()
	}
	w.b.Fatalf("%s: %v; `make bench` builds what is missing in bin/\n%s", name, err, out.String())
	return "", -1
}

func (w *world) refit(args ...string) (string, int) {
	w.b.Helper()
	return w.run("refit", args...)
}

// plan changes the example's plan to one pool without gates and waits.
func plan(image string) []string {
	return []string{
		"hypervisorImage=registry.refit.local/tensorfusion/tensor-fusion-hypervisor:" + image,
		"rollouts[0].pools=[" + pool + "]",
		fmt.Sprintf("rollouts[0].strategy.batch.percent=%d", batchPercent),
		fmt.Sprintf("rollouts[0].strategy.maxUnavailable={percent: %d}", batchPercent),
		"rollouts[0].strategy.soakCanary=0s",
		"rollouts[0].strategy.gates=none",
	}
}

// start begins an upgrade to the chart's newest version with the given
// hypervisor.
func (w *world) start(image string) string {
	w.b.Helper()
	args := []string{"start", "-f", "examples/tensorfusion-upgrade.yaml", "-o", "json"}
	for _, s := range plan(image) {
		args = append(args, "--set", s)
	}
	out, code := w.refit(args...)
	require.Zero(w.b, code, out)
	var started struct {
		WorkflowID string `json:"workflowID"`
	}
	require.NoError(w.b, json.Unmarshal([]byte(out), &started), out)
	logf(w.b, "%s begins", started.WorkflowID)
	return started.WorkflowID
}

// receipt follows the run to its end. A run that parks has no end: then its
// status says why.
func (w *world) receipt(run string) protocol.Receipt {
	w.b.Helper()
	out, code := w.refit("watch", run, "--until-gate")
	if code != 0 && code != exitAborted {
		w.b.Fatalf("the run is not done: exit %d\n%s", code, out)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var r protocol.Receipt
	require.NoError(w.b, w.temporal.GetWorkflow(ctx, run, "").Get(ctx, &r))
	return r
}

// exitAborted is the protocol's exit code of an aborted run.
const exitAborted = 4
