// Package datastores proves the runs on datastores from outside: it runs the
// binaries against a sandbox whose datastores are servers as pods, and looks at
// what a person, the cluster and the datastore's own clients see. It must not
// import the product's workflows or activities beyond the protocol's structs.
package datastores

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/api/enums/v1"
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

// secretly requires that neither the run's history nor the worker's log holds
// one of the values. The events are searched as they are on the wire, where
// payloads stand in plain; the CLI shows them in base64.
func (w *world) secretly(run string, values ...string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	said, err := os.ReadFile(filepath.Join(w.Home, "worker.log"))
	require.NoError(w.t, err)
	events := w.Temporal.GetWorkflowHistory(ctx, run, "", false, enums.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT)
	for events.HasNext() {
		event, err := events.Next()
		require.NoError(w.t, err)
		text, err := event.Marshal()
		require.NoError(w.t, err)
		said = append(said, text...)
	}
	require.Contains(w.t, string(said), run, "what is searched is the run")
	for i, v := range values {
		require.False(w.t, v == "" || strings.Contains(string(said), v), "value %d of %d is in the history of %s or in the worker's log", i+1, len(values), run)
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
