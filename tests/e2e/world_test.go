// Package e2e proves Refit from outside: it runs the binaries against a
// sandbox (a real API server, a real Temporal server, kwok nodes, the
// TensorFusion double) and looks at what a person and the cluster see. It must
// not import the product's workflows or activities beyond the protocol's
// structs.
package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/client"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/refit-run/refit/tests/sandbox"
	"github.com/refit-run/refit/workflows/protocol"
)

// Exit codes of the protocol.
const (
	exitDone     = sandbox.ExitDone
	exitBadInput = sandbox.ExitBadInput
	exitParked   = sandbox.ExitParked
	exitAborted  = sandbox.ExitAborted
	exitGate     = sandbox.ExitGate
	exitRefused  = sandbox.ExitRefused
)

// root is the repository; a test runs in its package's folder.
var root = func() string {
	dir, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		panic(err)
	}
	return dir
}()

// world is one sandbox of TensorFusion with a worker. Its methods give the
// sandbox's own the names that these tests use.
type world struct {
	t        *testing.T
	name     string
	home     string
	vars     map[string]string
	kube     kubernetes.Interface
	dynamic  dynamic.Interface
	temporal client.Client
	sandbox  *sandbox.Sandbox
	// printed is what refit has printed so far, both streams, by command line.
	printed map[string][]byte
}

// up starts a sandbox of two pools with two nodes each and a worker. Unless told
// otherwise it spares every Helm step ten seconds of the controller's lease.
func up(t *testing.T, args ...string) *world {
	t.Helper()
	if !strings.Contains(strings.Join(args, " "), "--pools") {
		args = append(args, "--nodes", "4", "--pools", "shared=2,training=2")
	}
	if !strings.Contains(strings.Join(args, " "), "--lease") {
		args = append(args, "--lease", "5s")
	}
	s := sandbox.Up(t, args...)
	s.StartWorker()
	return &world{t: t, name: sandbox.Name, home: s.Home, vars: s.Vars, kube: s.Kube, dynamic: s.Dynamic, temporal: s.Temporal, sandbox: s,
		printed: map[string][]byte{}}
}

func (w *world) tool(name, script string) { w.t.Helper(); w.sandbox.Tool(name, script) }

func (w *world) startWorker(extra ...string) { w.t.Helper(); w.sandbox.StartWorker(extra...) }

// killWorker is kill -9.
func (w *world) killWorker() { w.sandbox.KillWorker() }

func (w *world) run(name string, args ...string) (string, int) {
	w.t.Helper()
	return w.sandbox.Run(name, args...)
}

func (w *world) refit(args ...string) (string, int) {
	w.t.Helper()
	out, code := w.sandbox.Refit(args...)
	line := strings.Join(args, " ")
	w.printed[line] = append(w.printed[line], out...)
	return out, code
}

func (w *world) answer(verb, run string, args ...string) {
	w.t.Helper()
	w.sandbox.Answer(verb, run, args...)
}

func (w *world) fault(args ...string) { w.t.Helper(); w.sandbox.Fault(args...) }

func (w *world) status(run string) (protocol.Status, error) { return w.sandbox.Status(run) }

func (w *world) statusWithin(run string, limit time.Duration) (protocol.Status, error) {
	return w.sandbox.StatusWithin(run, limit)
}

func (w *world) until(run, what string, limit time.Duration, cond func(protocol.Status) bool) protocol.Status {
	w.t.Helper()
	return w.sandbox.Until(run, what, limit, cond)
}

func (w *world) untilGate(run string) protocol.Status { w.t.Helper(); return w.sandbox.UntilGate(run) }

func (w *world) untilParked(run string) protocol.Status {
	w.t.Helper()
	return w.sandbox.UntilParked(run)
}

// start begins an upgrade from the example plan with --set changes and returns
// the workflow ID.
func (w *world) start(set ...string) string {
	w.t.Helper()
	return w.sandbox.Start("examples/tensorfusion-upgrade.yaml", set)
}

// long skips what takes minutes of real time unless it is asked for.
func long(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("REFIT_TEST_LONG") == "" {
		t.Skip(what + ": runs with REFIT_TEST_LONG=1 (make test-long)")
	}
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
