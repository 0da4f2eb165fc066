package helm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/release"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/mask"
)

func TestUpgradeInTheChildKeepsThePinsAndIsHarmlessTwice(t *testing.T) {
	w := newWorld(t)
	var beats atomic.Int32
	r := w.request()
	r.Heartbeat = func(string) { beats.Add(1) }
	got, err := Upgrade(t.Context(), w.c, r)
	require.NoError(t, err)
	require.Equal(t, UpgradeResult{Revision: 2}, got)
	require.Positive(t, beats.Load())
	require.Equal(t, []string{"superseded", "deployed"}, w.history())
	for _, pool := range w.gadget()["pools"].([]any) {
		require.Equal(t, false, pool.(map[string]any)["policy"].(map[string]any)["auto"])
		require.Equal(t, "registry.example/gadget:2.0.0", pool.(map[string]any)["image"])
	}
	require.True(t, w.exists("ConfigMap", "added"))
	require.False(t, w.exists("ConfigMap", "removed"))

	// The reply was lost: the second attempt recognises the revision as its own.
	got, err = Upgrade(t.Context(), w.c, r)
	require.NoError(t, err)
	require.Equal(t, UpgradeResult{Revision: 2, Already: true}, got)
	require.Equal(t, []string{"superseded", "deployed"}, w.history())

	// The stored manifest holds the pins, and equals what Render foretold.
	current, err := Current(t.Context(), w.c, w.namespace, "tf")
	require.NoError(t, err)
	foretold, err := Render(t.Context(), w.c, RenderRequest{Namespace: w.namespace, Release: "tf", Revision: 2, Chart: r.Chart, Values: r.Values, Pins: r.Pins})
	require.NoError(t, err)
	require.Equal(t, foretold.Manifest, current.Manifest)
	require.Equal(t, 2, foretold.Pinned)
	require.NotContains(t, current.Manifest, "auto: true")
}

func TestUpgradeRefusesAnotherBaseAnotherHolderAndAnotherCluster(t *testing.T) {
	w := newWorld(t)
	r := w.request()
	r.FromRevision = 7
	_, err := Upgrade(t.Context(), w.c, r)
	f, class, _ := finding.Of(err)
	require.Equal(t, finding.Stop, class)
	require.Contains(t, f.Expected, "revision 7")
	require.Contains(t, f.Found, "revision 1")

	r = w.request()
	r.Target.UID = "another-uid"
	_, err = Upgrade(t.Context(), w.c, r)
	f, class, _ = finding.Of(err)
	require.Equal(t, finding.Stop, class, "%v", err)
	require.Contains(t, f.Expected, "another-uid")
	require.Contains(t, f.Found, w.target.UID)

	w.hold("temporal-a/default/other/run-9")
	_, err = Upgrade(t.Context(), w.c, w.request())
	locked, ok := lease.LockedFinding(err)
	require.True(t, ok, err)
	require.Contains(t, locked.Found, "run-9")
	require.Equal(t, []string{"deployed"}, w.history(), "nothing was written")
}

// childPID finds the engine among the children of a process.
func childPID(t *testing.T, parent int) int {
	t.Helper()
	found := 0
	require.Eventually(t, func() bool {
		paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
		require.NoError(t, err)
		for _, path := range paths {
			data, err := os.ReadFile(path)
			if err != nil || !bytes.HasSuffix(data, []byte("\x00"+childArgument+"\x00")) {
				continue
			}
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			require.NoError(t, err)
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
			if err == nil && strings.Contains(string(status), fmt.Sprintf("PPid:\t%d\n", parent)) {
				found = pid
				return true
			}
		}
		return false
	}, 20*time.Second, 20*time.Millisecond)
	return found
}

func alive(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	return err == nil && !strings.Contains(string(status), "State:\tZ")
}

// parentVariable makes the test binary a worker that upgrades with a hook that
// never ends; its value is the namespace and the cluster's UID.
const parentVariable = "REFIT_TEST_HELM_PARENT"

func runParent(value string) error {
	namespace, uid, _ := strings.Cut(value, "/")
	config, err := clientcmd.RESTConfigFromKubeConfig([]byte(os.Getenv(parentVariable + "_KUBECONFIG")))
	if err != nil {
		return err
	}
	c, err := kube.NewClient(config)
	if err != nil {
		return err
	}
	chart, err := loader.LoadFiles(gadgetFiles("2.0.0"))
	if err != nil {
		return err
	}
	_, err = Upgrade(context.Background(), c, UpgradeRequest{
		Target: kube.Target{Cluster: "prod", UID: uid}, Namespace: namespace, Release: "tf", Chart: chart,
		Values: map[string]any{"hang": true}, Holder: holder, Mark: "intent-1", Limit: time.Minute,
	})
	return err
}

// kill -9 of the worker: its engine dies with it, and the next attempt on
// another worker recovers.
func TestEngineDiesWithItsWorker(t *testing.T) {
	w := newWorld(t)
	kubeconfig, err := w.c.Kubeconfig()
	require.NoError(t, err)
	worker := exec.Command("/proc/self/exe")
	worker.Env = append(os.Environ(), parentVariable+"="+w.namespace+"/"+w.target.UID, parentVariable+"_KUBECONFIG="+string(kubeconfig))
	require.NoError(t, worker.Start())
	w.awaitPending(t.Context())
	engine := childPID(t, worker.Process.Pid)
	require.NoError(t, worker.Process.Kill())
	require.Error(t, worker.Wait())
	require.Eventually(t, func() bool { return !alive(engine) }, 5*time.Second, 10*time.Millisecond)
	require.Equal(t, []string{"deployed", "pending-upgrade"}, w.history())
	got, err := Upgrade(t.Context(), w.c, w.request())
	require.NoError(t, err)
	require.Equal(t, UpgradeResult{Revision: 3, Recovered: 2}, got)
}

// The engine is killed -9 while its hook runs. The release is left pending,
// which no Helm would upgrade; the retry recovers and ends.
func TestKilledEngineLeavesPendingAndTheRetryRecovers(t *testing.T) {
	w := newWorld(t)
	r := w.request()
	r.Values["hang"] = true
	done := make(chan error, 1)
	go func() { _, err := Upgrade(t.Context(), w.c, r); done <- err }()
	w.awaitPending(t.Context())
	require.NoError(t, syscall.Kill(childPID(t, os.Getpid()), syscall.SIGKILL))
	err := <-done
	_, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Retry, class, "Temporal tries again: %v", err)
	require.Equal(t, []string{"deployed", "pending-upgrade"}, w.history())

	r = w.request()
	got, err := Upgrade(t.Context(), w.c, r)
	require.NoError(t, err)
	require.Equal(t, UpgradeResult{Revision: 3, Recovered: 2}, got)
	require.Equal(t, []string{"superseded", "failed", "deployed"}, w.history())
	require.Equal(t, "registry.example/gadget:2.0.0", w.gadget()["pools"].([]any)[0].(map[string]any)["image"])
}

func TestCancellingKillsTheEngineAtOnce(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	r := w.request()
	r.Values["hang"] = true
	done := make(chan error, 1)
	go func() { _, err := Upgrade(ctx, w.c, r); done <- err }()
	w.awaitPending(t.Context())
	pid := childPID(t, os.Getpid())
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH, "no engine is left")
	require.Equal(t, []string{"deployed", "pending-upgrade"}, w.history())

	revision, _, err := takeOver(t.Context(), w.c, w.namespace, "tf", holder, nil)
	require.NoError(t, err)
	require.Equal(t, 2, revision)
	revision, _, err = takeOver(t.Context(), w.c, w.namespace, "tf", holder, nil)
	require.NoError(t, err)
	require.Zero(t, revision, "nothing is pending any more")
	require.Equal(t, []string{"deployed", "failed"}, w.history())
}

func TestUpgradeThatCannotEndFailsAtItsDeadline(t *testing.T) {
	w := newWorld(t)
	r := w.request()
	r.Values["hang"], r.Limit = true, 4*time.Second
	_, err := Upgrade(t.Context(), w.c, r)
	_, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class)
	require.ErrorContains(t, err, "helm upgrade of release "+w.namespace+"/tf")
	require.Equal(t, []string{"deployed", "failed"}, w.history())
	got, err := Upgrade(t.Context(), w.c, w.request())
	require.NoError(t, err)
	require.Equal(t, 3, got.Revision)
}

// Somebody else's Helm is at work, or died: we can't know, so we don't touch.
func TestForeignPendingReleaseIsNeverRecovered(t *testing.T) {
	w := newWorld(t)
	releases := store(w.c, w.namespace)
	foreign, err := releases.Last("tf")
	require.NoError(t, err)
	foreign.Version, foreign.Info.Status = 2, release.StatusPendingUpgrade
	// Inherited from a revision of ours, as Helm copies labels.
	foreign.Labels = map[string]string{engineLabel: engineLabelFor("engine", 1)}
	require.NoError(t, releases.Create(foreign))
	_, err = Upgrade(t.Context(), w.c, w.request())
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class)
	require.Contains(t, f.Found, "was not begun by Refit")
	require.Equal(t, []string{"deployed", "pending-upgrade"}, w.history())
}

// A worker cut off from Temporal lives on with its engine while another worker
// takes the work over: the first engine's writes must be refused.
func TestFencedEngineWritesNothingMore(t *testing.T) {
	w := newWorld(t)
	guard := newFence(w.c.Typed, w.namespace, "tf", holder, "engine-1")
	_, err := lease.ClaimEngine(t.Context(), w.c.Typed, w.namespace, "tf", holder, "engine-1")
	require.NoError(t, err)
	config := apiservertest.Shared(t).Config(t)
	config.Wrap(guard.wrap)
	fenced, err := kube.NewClient(config)
	require.NoError(t, err)
	write := func() error {
		_, err := fenced.Typed.CoreV1().ConfigMaps(w.namespace).Patch(t.Context(), "tf", "application/merge-patch+json", []byte(`{"data":{"touched":"yes"}}`), metav1.PatchOptions{})
		return err
	}
	require.NoError(t, write())
	_, err = lease.ClaimEngine(t.Context(), w.c.Typed, w.namespace, "tf", holder, "engine-2")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return write() != nil }, fenceMargin, 50*time.Millisecond, "within the margin that a successor waits")
	require.Error(t, write())
	_, locked := lease.LockedFinding(guard.refusal())
	require.True(t, locked)
	_, err = fenced.Typed.CoreV1().ConfigMaps(w.namespace).Get(t.Context(), "tf", metav1.GetOptions{})
	require.NoError(t, err, "reading is never fenced")
}

func TestIncompleteRequestStops(t *testing.T) {
	_, err := Upgrade(t.Context(), nil, UpgradeRequest{Namespace: "ns", Release: "tf"})
	require.ErrorContains(t, err, "no Holder, Mark, Limit, Target.UID")
}

func TestChildArguments(t *testing.T) {
	require.True(t, IsChild([]string{"worker", "helm-child"}))
	require.False(t, IsChild([]string{"worker"}))
	require.False(t, IsChild([]string{"worker", "helm-child", "x"}))
	var out bytes.Buffer
	require.Equal(t, 1, RunChild(strings.NewReader("no order"), &out))
	var end report
	require.NoError(t, json.Unmarshal(out.Bytes(), &end))
	require.True(t, end.Done)
	require.Contains(t, end.Failure.Found, "order on stdin")
}

func TestErrorsOfTheEngineAreMasked(t *testing.T) {
	w := newWorld(t)
	r := w.request()
	r.Masker = mask.New(planted)
	// The server's answer quotes the value.
	r.Values["image"] = planted + " not: an image"
	_, err := Upgrade(t.Context(), w.c, r)
	require.Error(t, err)
	require.NotContains(t, err.Error(), planted)
	f, _, ok := finding.Of(err)
	require.True(t, ok)
	require.NotContains(t, fmt.Sprintf("%+v", f), planted)
}
