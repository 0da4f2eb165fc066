// Package e2e proves Refit from outside: it runs the binaries against a
// sandbox (a real API server, a real Temporal server, kwok nodes, the
// TensorFusion double) and looks at what a person and the cluster see. It must
// not import the product's workflows or activities beyond the protocol's
// structs.
package e2e

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
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/client"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/refit-run/refit/workflows/protocol"
)

// Exit codes of the protocol.
const (
	exitDone     = 0
	exitBadInput = 2
	exitParked   = 3
	exitAborted  = 4
	exitGate     = 5
	exitRefused  = 6
)

// root is the repository, bin where `make build` puts the binaries; a test runs
// in its package's folder.
var (
	root = func() string {
		dir, err := filepath.Abs(filepath.Join("..", ".."))
		if err != nil {
			panic(err)
		}
		return dir
	}()
	bin = filepath.Join(root, "bin")
)

// world is one sandbox with a worker, as an operator would have it.
type world struct {
	t        *testing.T
	name     string
	home     string
	env      []string
	vars     map[string]string
	kube     kubernetes.Interface
	dynamic  dynamic.Interface
	temporal client.Client

	mu     sync.Mutex
	worker *exec.Cmd
	exited chan struct{}
	starts int
}

// up starts a sandbox of two pools with two nodes each and a worker. Unless told
// otherwise it spares every Helm step ten seconds of the controller's lease.
func up(t *testing.T, args ...string) *world {
	t.Helper()
	for _, name := range []string{"refit", "refit-worker", "refit-gpuagent", "refit-sandbox", "refit-kube", "kwok", "temporal"} {
		if _, err := os.Stat(filepath.Join(bin, name)); err != nil {
			t.Fatalf("bin/%s is missing: run `make build` first (make test does)", name)
		}
	}
	home, err := os.MkdirTemp("", "refit-e2e-")
	require.NoError(t, err)
	w := &world{t: t, name: "e2e", home: home, vars: map[string]string{}}
	w.env = append(os.Environ(), "REFIT_SANDBOX_HOME="+home, "PATH="+bin+":"+os.Getenv("PATH"), "NO_COLOR=1")
	t.Cleanup(w.down)
	args = append([]string{"up", "--name", w.name}, args...)
	if !strings.Contains(strings.Join(args, " "), "--pools") {
		args = append(args, "--nodes", "4", "--pools", "shared=2,training=2")
	}
	if !strings.Contains(strings.Join(args, " "), "--lease") {
		args = append(args, "--lease", "5s")
	}
	out, code := w.run("refit-sandbox", args...)
	require.Zero(t, code, out)
	out, code = w.run("refit-sandbox", "env", "--name", w.name)
	require.Zero(t, code, out)
	for _, line := range strings.Split(out, "\n") {
		key, value, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "export "), "=")
		if ok {
			value = strings.Trim(value, `"'`)
			w.vars[key] = value
			w.env = append(w.env, key+"="+value)
		}
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", w.vars["KUBECONFIG"])
	require.NoError(t, err)
	cfg.QPS, cfg.Burst = 100, 200
	w.kube, err = kubernetes.NewForConfig(cfg)
	require.NoError(t, err)
	w.dynamic, err = dynamic.NewForConfig(cfg)
	require.NoError(t, err)
	w.temporal, err = client.Dial(client.Options{HostPort: w.vars["TEMPORAL_ADDRESS"], Logger: quiet{}})
	require.NoError(t, err)
	t.Cleanup(w.temporal.Close)
	out, code = w.run("refit", "setup")
	require.Zero(t, code, out)
	w.startWorker()
	return w
}

// quiet drops the client's log lines.
type quiet struct{}

func (quiet) Debug(string, ...any) {}
func (quiet) Info(string, ...any)  {}
func (quiet) Warn(string, ...any)  {}
func (quiet) Error(string, ...any) {}

func (w *world) down() {
	w.killWorker()
	if w.t.Failed() {
		if log, err := os.ReadFile(filepath.Join(w.home, "worker.log")); err == nil {
			w.t.Logf("end of the worker's log:\n%s", tail(log, 3000))
		}
		if audit, err := os.ReadFile(w.vars["REFIT_SANDBOX_AUDIT_LOG"]); err == nil {
			_ = os.WriteFile(filepath.Join(w.home, "audit.log"), audit, 0o600)
		}
	}
	out, code := w.run("refit-sandbox", "down", "--name", w.name)
	if code != 0 {
		w.t.Errorf("refit-sandbox down: exit %d\n%s", code, out)
	}
	if !w.t.Failed() {
		os.RemoveAll(w.home)
	} else {
		w.t.Logf("kept: %s", w.home)
	}
}

func tail(b []byte, n int) string { return string(b[max(0, len(b)-n):]) }

// startWorker starts refit-worker with the sandbox's environment; extra
// entries win.
func (w *world) startWorker(extra ...string) {
	w.t.Helper()
	log, err := os.OpenFile(filepath.Join(w.home, "worker.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(w.t, err)
	cmd := exec.Command(filepath.Join(bin, "refit-worker"))
	cmd.Env = append(append([]string{}, w.env...), extra...)
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(w.t, cmd.Start())
	log.Close()
	exited := make(chan struct{})
	go func() { cmd.Wait(); close(exited) }()
	w.mu.Lock()
	w.worker, w.exited = cmd, exited
	w.starts++
	w.mu.Unlock()
}

// killWorker is kill -9.
func (w *world) killWorker() {
	w.mu.Lock()
	cmd, exited := w.worker, w.exited
	w.worker = nil
	w.mu.Unlock()
	if cmd == nil {
		return
	}
	cmd.Process.Kill()
	<-exited
}

// run runs a binary of bin/ or of the PATH to its end.
func (w *world) run(name string, args ...string) (string, int) {
	w.t.Helper()
	path := filepath.Join(bin, name)
	if _, err := os.Stat(path); err != nil {
		path = name
	}
	ctx, cancel := context.WithTimeout(context.Background(), 6*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env, cmd.Dir = w.env, root
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return out.String(), 0
	case errors.As(err, &exit):
		return out.String(), exit.ExitCode()
	default:
		return out.String() + err.Error(), -1
	}
}

// refit runs the command line.
func (w *world) refit(args ...string) (string, int) {
	w.t.Helper()
	return w.run("refit", args...)
}

// answer gives an answer by the command line, as ann; it must be accepted.
func (w *world) answer(verb, run string, args ...string) {
	w.t.Helper()
	out, code := w.refit(append([]string{verb, run, "--by", "ann"}, args...)...)
	require.Zero(w.t, code, "%s: %s", verb, out)
}

// long skips what takes minutes of real time unless it is asked for.
func long(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("REFIT_TEST_LONG") == "" {
		t.Skip(what + ": runs with REFIT_TEST_LONG=1 (make test-long)")
	}
}

// fault injects a fault by name.
func (w *world) fault(args ...string) {
	w.t.Helper()
	out, code := w.run("refit-sandbox", append([]string{"fault", "--name", w.name}, args...)...)
	require.Zero(w.t, code, "fault %v: %s", args, out)
}

// start begins an upgrade from the example plan with --set changes and returns
// the workflow ID.
func (w *world) start(set ...string) string {
	w.t.Helper()
	args := []string{"start", "-f", "examples/tensorfusion-upgrade.yaml", "-o", "json"}
	for _, s := range set {
		args = append(args, "--set", s)
	}
	out, code := w.refit(args...)
	require.Zero(w.t, code, out)
	var started struct {
		WorkflowID string `json:"workflowID"`
	}
	require.NoError(w.t, json.Unmarshal([]byte(out), &started), out)
	require.NotEmpty(w.t, started.WorkflowID, out)
	return started.WorkflowID
}

// status is the query, asked by the client as any script would.
func (w *world) status(run string) (protocol.Status, error) {
	return w.statusWithin(run, 10*time.Second)
}

// statusWithin gives up after limit: a query waits for the worker that had the
// run last, also when it is dead.
func (w *world) statusWithin(run string, limit time.Duration) (protocol.Status, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var s protocol.Status
	v, err := w.temporal.QueryWorkflow(ctx, run, "", protocol.QueryStatus)
	if err != nil {
		return s, err
	}
	return s, v.Get(&s)
}

// until polls the status until cond holds.
func (w *world) until(run, what string, limit time.Duration, cond func(protocol.Status) bool) protocol.Status {
	w.t.Helper()
	var last protocol.Status
	var lastErr error
	err := wait.PollUntilContextTimeout(context.Background(), 200*time.Millisecond, limit, true, func(context.Context) (bool, error) {
		s, err := w.status(run)
		if err != nil {
			lastErr = err
			return false, nil // the worker may be dead on purpose
		}
		last = s
		return cond(s), nil
	})
	if err != nil {
		b, _ := json.MarshalIndent(last, "", "  ")
		w.t.Fatalf("%s did not happen within %s (last error %v); last status:\n%s", what, limit, lastErr, b)
	}
	return last
}

// untilGate waits until a person is asked, and returns the stage.
func (w *world) untilGate(run string) protocol.Status {
	w.t.Helper()
	return w.until(run, "a gate", 4*time.Minute, func(s protocol.Status) bool {
		if s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked {
			b, _ := json.MarshalIndent(s.WaitingFor, "", "  ")
			w.t.Fatalf("parked instead of a gate:\n%s", b)
		}
		return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitApproval
	})
}

// untilParked waits until the run parks.
func (w *world) untilParked(run string) protocol.Status {
	w.t.Helper()
	return w.until(run, "parking", 5*time.Minute, func(s protocol.Status) bool {
		return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked
	})
}

// approveAll answers every gate until the run closes, and returns its receipt.
func (w *world) approveAll(run string) protocol.Receipt {
	w.t.Helper()
	for range 20 {
		out, code := w.refit("watch", run, "--until-gate")
		switch code {
		case exitGate:
			s, err := w.status(run)
			require.NoError(w.t, err)
			if s.WaitingFor == nil {
				continue
			}
			answer, code := w.refit("approve", run, "--stage", s.WaitingFor.Stage, "--by", "ann")
			require.Zero(w.t, code, answer)
		case exitDone, exitAborted:
			return w.receipt(run)
		default:
			w.t.Fatalf("refit watch: exit %d\n%s", code, out)
		}
	}
	w.t.Fatal("twenty gates were approved and the run is still open")
	return protocol.Receipt{}
}

// receipt is the workflow's result.
func (w *world) receipt(run string) protocol.Receipt {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	var r protocol.Receipt
	require.NoError(w.t, w.temporal.GetWorkflow(ctx, run, "").Get(ctx, &r))
	return r
}

// hypervisors maps each GPU node to its hypervisor pods' UIDs and images.
func (w *world) hypervisors() map[string][]string {
	w.t.Helper()
	pods, err := w.kube.CoreV1().Pods("tensor-fusion-sys").List(context.Background(), metav1.ListOptions{
		LabelSelector: "tensor-fusion.ai/component=hypervisor",
	})
	require.NoError(w.t, err)
	out := map[string][]string{}
	for _, p := range pods.Items {
		out[p.Spec.NodeName] = append(out[p.Spec.NodeName], fmt.Sprintf("%s %s %s", p.UID, p.Spec.Containers[0].Image, p.Status.Phase))
	}
	return out
}
