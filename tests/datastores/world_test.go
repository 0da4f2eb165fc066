// Package datastores proves the runs on datastores from outside: it runs the
// binaries against a sandbox whose datastores are servers as pods, and looks at
// what a person, the cluster and the datastore's own clients see. It must not
// import the product's workflows or activities beyond the protocol's structs.
package datastores

import (
	"context"
	"encoding/base64"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/api/enums/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/refit-run/refit/tests/sandbox"
)

// processNode is the node whose pods are processes.
const processNode = "process-000"

// patience is for what the cluster does by itself: machines that run tests are
// busy.
const patience = 3 * time.Minute

// world is a sandbox with datastores and a worker.
type world struct {
	*sandbox.Sandbox
	t *testing.T
}

// up starts a sandbox with the named datastores, and a worker that has the
// rights of the shipped role alone.
func up(t *testing.T, stores ...string) *world {
	t.Helper()
	w := &world{Sandbox: sandbox.Up(t, "--no-tensorfusion", "--pools", "shared=1", "--datastores="+strings.Join(stores, ",")), t: t}
	w.asShipped()
	w.StartWorker()
	return w
}

// in is the same world for a subtest.
func (w *world) in(t *testing.T) *world { return &world{Sandbox: w.Sandbox.In(t), t: t} }

// step is one of the subtests of a world.
type step struct {
	behaviour string
	run       func(w *world)
}

// through takes the world through the steps. It stops at one that fails, because
// the next one would find what that has left.
func (w *world) through(t *testing.T, steps []step) bool {
	for _, s := range steps {
		if !t.Run(s.behaviour, func(t *testing.T) { s.run(w.in(t)) }) {
			return false
		}
	}
	return true
}

// eventually waits until f gives no error, and fails with the last one.
func (w *world) eventually(what string, f func(ctx context.Context) error) {
	w.t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(context.Background(), 200*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		last = f(ctx)
		return last == nil, nil
	})
	if err != nil {
		w.t.Fatalf("%s: not so within %s: %v", what, patience, last)
	}
}

func (w *world) pod(namespace, name string) (*corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return w.Kube.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
}

// dial connects to a port of the pod that has the name now.
func (w *world) dial(ctx context.Context, namespace, name string, port int) (net.Conn, error) {
	return w.DialPod(ctx, namespace, name, port)
}

// replaced waits until another pod than the one of the UID has the name and is
// Ready.
func (w *world) replaced(namespace, name string, former types.UID) {
	w.t.Helper()
	w.eventually("another "+name+" is Ready", func(ctx context.Context) error {
		p, err := w.Kube.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if p.UID == former || p.DeletionTimestamp != nil {
			return fmt.Errorf("pod %s has UID %s still", name, p.UID)
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("pod %s: %s, not Ready", name, p.Status.Phase)
	})
}

// deletePod deletes a pod and returns its UID.
func (w *world) deletePod(namespace, name string) types.UID {
	w.t.Helper()
	p, err := w.pod(namespace, name)
	require.NoError(w.t, err)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(w.t, w.Kube.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(p.UID))}))
	return p.UID
}

// keepDown takes a pod away and keeps the next one from being placed; back lets
// it start.
func (w *world) keepDown(namespace, name string) (back func()) {
	w.t.Helper()
	w.cordon(true)
	former := w.deletePod(namespace, name)
	w.eventually(name+" is gone", func(ctx context.Context) error {
		p, err := w.Kube.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
		if err == nil && p.UID == former {
			return fmt.Errorf("pod %s is there still", name)
		}
		return nil
	})
	return func() {
		w.t.Helper()
		w.cordon(false)
		w.replaced(namespace, name, former)
	}
}

// claims are the volume claims of a namespace.
func (w *world) claims(namespace string) map[string]types.UID {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	list, err := w.Kube.CoreV1().PersistentVolumeClaims(namespace).List(ctx, metav1.ListOptions{})
	require.NoError(w.t, err)
	uids := map[string]types.UID{}
	for _, c := range list.Items {
		uids[c.Name] = c.UID
	}
	return uids
}

// secretly requires that none of the values stands anywhere that more than the
// activity which needs it can read: the histories of all runs of the sandbox,
// the worker's log, the artifacts that are stored in the clear, and what the
// command line tells of this run, which has ended. A value counts in plain and
// in base64.
func (w *world) secretly(run string, values ...string) {
	w.t.Helper()
	log, err := os.ReadFile(filepath.Join(w.Home, "worker.log"))
	require.NoError(w.t, err)
	said := map[string]string{"the worker's log": string(log)}
	for _, add := range []map[string]string{w.histories(), w.clearArtifacts(), w.told(run)} {
		maps.Copy(said, add)
	}
	require.NotEmpty(w.t, said["the history of "+run], "the run's own history is searched")
	for i, v := range values {
		require.NotEmpty(w.t, v, "value %d of %d", i+1, len(values))
		for _, form := range forms(v) {
			for where, text := range said {
				require.False(w.t, strings.Contains(text, form), "value %d of %d is in %s", i+1, len(values), where)
			}
		}
	}
}

// histories are the events of every run as they are on the wire, where payloads
// stand in plain; the CLI shows them in base64.
func (w *world) histories() map[string]string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	list, err := w.Temporal.ListWorkflow(ctx, &workflowservice.ListWorkflowExecutionsRequest{Namespace: client.DefaultNamespace, PageSize: 1000})
	require.NoError(w.t, err)
	require.Empty(w.t, list.NextPageToken, "all runs are on one page")
	out := map[string]string{}
	for _, e := range list.Executions {
		var text strings.Builder
		events := w.Temporal.GetWorkflowHistory(ctx, e.Execution.WorkflowId, e.Execution.RunId, false, enums.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT)
		for events.HasNext() {
			event, err := events.Next()
			require.NoError(w.t, err)
			wire, err := event.Marshal()
			require.NoError(w.t, err)
			text.Write(wire)
		}
		out["the history of "+e.Execution.WorkflowId] += text.String()
	}
	return out
}

// clearArtifacts are the files of the artifact store but the encrypted ones.
func (w *world) clearArtifacts() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	root := strings.TrimPrefix(w.Vars["REFIT_ARTIFACTS"], "file://")
	require.NoError(w.t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasSuffix(path, ".age") {
			return err
		}
		text, err := os.ReadFile(path)
		out["artifact "+path] = string(text)
		return err
	}))
	require.NotEmpty(w.t, out, "evidence and receipts lie in %s", root)
	return out
}

// told is what the command line says of a run.
func (w *world) told(run string) map[string]string {
	w.t.Helper()
	out := map[string]string{}
	for _, verb := range []string{"status", "receipt", "watch"} {
		for _, format := range []string{"table", "json"} {
			text, _ := w.Refit(verb, run, "-o", format)
			require.NotEmpty(w.t, text, "%s -o %s", verb, format)
			out[fmt.Sprintf("refit %s %s -o %s", verb, run, format)] = text
		}
	}
	return out
}

// forms are how a value may stand in a text: as it is, and what base64 makes of
// it behind nothing, one byte or two more.
func forms(value string) []string {
	out := []string{value}
	for _, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		for before := range 3 {
			text := e.EncodeToString([]byte(strings.Repeat("x", before) + value))
			whole := (before + len(value)) / 3 * 4 // what follows the value changes the rest
			out = append(out, text[[]int{0, 2, 3}[before]:whole])
		}
	}
	return out
}

func TestASecretIsFoundInEveryForm(t *testing.T) {
	const value = "fake-secret?>~value"
	for _, e := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
		for _, before := range []string{"", "a", "ab", "abc"} {
			for _, after := range []string{"", "y", "yz", "yzz"} {
				text := e.EncodeToString([]byte(before + value + after))
				require.True(t, slices.ContainsFunc(forms(value), func(form string) bool { return strings.Contains(text, form) }), "%q %q", before, after)
			}
		}
	}
}

// cordon keeps new pods off the process node, or lets them on it again.
func (w *world) cordon(off bool) {
	w.t.Helper()
	patch := fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, off)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := w.Kube.CoreV1().Nodes().Patch(ctx, processNode, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	require.NoError(w.t, err)
}
