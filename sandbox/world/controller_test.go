package world

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/sandbox/charts"
	"github.com/refit-run/refit/sandbox/controller"
	"github.com/refit-run/refit/sandbox/controlplane"
	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/process"
)

func TestMain(m *testing.M) {
	if asController() {
		panic(standIn())
	}
	os.Exit(m.Run())
}

func options(program string) folder.Options {
	return folder.Options{
		Name: "test", Cluster: "sandbox", Pools: []folder.Pool{{Name: "shared", Nodes: 1}}, Chart: charts.Versions()[0],
		TensorFusion: true, GPUs: 2, Controller: program,
	}
}

// needPrograms skips where the sandbox's components are not built.
func needPrograms(t *testing.T) {
	t.Helper()
	if _, err := findPrograms(false); err != nil {
		t.Skipf("not run: %v", err)
	}
}

// newWorld is a world that Run would run, for a look inside.
func newWorld(t *testing.T) (*World, context.CancelFunc) {
	t.Helper()
	life, end := context.WithCancel(t.Context())
	return &World{folder: folder.Folder{Root: t.TempDir()}, report: func(line string) { t.Log(line) }, life: life}, end
}

// A real controller takes the double's place: it is started as the chart
// starts its container, the double leaves the election, the lease, the webhook
// and the API to it, a fault starts it again and the end of the sandbox is its
// end. The hypervisors stay simulated.
func TestRealControllerRunsInsteadOfTheDouble(t *testing.T) {
	needPrograms(t)
	self, err := os.Executable()
	require.NoError(t, err)
	w, end := newWorld(t)
	t.Cleanup(func() { end(); w.stop() })
	require.NoError(t, w.prepare(options(self)))
	ctx, cancel := context.WithTimeout(t.Context(), startDeadline)
	defer cancel()
	require.NoError(t, w.start(ctx))
	w.ready = true

	pid := w.real.Keeper().Status().PID
	started, err := os.ReadFile(record(w.folder.Path("controller"), pid))
	require.NoError(t, err)
	lines := strings.Split(string(started), "\n")
	for _, want := range []string{
		"-leader-elect", "-enable-auto-scale", "-health-probe-bind-address=" + folder.Address(w.state.Ports.ControllerProbes),
		"KUBECONFIG=" + w.plane.Kubeconfig(controlplane.TensorFusion), "OPERATOR_NAMESPACE=" + Namespace,
		fmt.Sprintf("PORT=%d", w.state.Ports.ControllerAPI), "TSDB_MYSQL_HOST=127.0.0.1",
		fmt.Sprintf("TSDB_MYSQL_PORT=%d", w.state.Ports.GreptimeMySQL), "TSDB_MYSQL_PASSWORD=" + greptimePassword,
		"INITIAL_GPU_NODE_LABEL_SELECTOR=nvidia.com/gpu.present=true", "TMPDIR=" + w.folder.Path("controller", "tmp"),
	} {
		require.Contains(t, lines, want)
	}
	for _, name := range []string{"config.yaml", "scheduler-config.yaml", "gpu-info.yaml", "tmp/k8s-webhook-server/serving-certs/tls.crt"} {
		require.FileExists(t, w.folder.Path("controller", name))
	}

	_, err = w.kube.CoordinationV1().Leases(Namespace).Get(ctx, "85104305.tensor-fusion.ai", metav1.GetOptions{})
	require.True(t, apierrors.IsNotFound(err), "the double elects nobody: %v", err)
	for _, port := range []int{w.state.Ports.Webhook, w.state.Ports.ControllerAPI} {
		_, err := net.Dial("tcp", folder.Address(port))
		require.ErrorIs(t, err, syscall.ECONNREFUSED, "the double does not answer for the controller")
	}
	hook, err := w.kube.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(ctx, "tensor-fusion-sys-mutating-webhook", metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, "https://"+controller.WebhookAddr+"/mutate-v1-pod", *hook.Webhooks[0].ClientConfig.URL)
	soon, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	require.NoError(t, process.Until(soon, 100*time.Millisecond, func(ctx context.Context) error {
		gpus, err := w.dynamic.Resource(gpuResource).List(ctx, metav1.ListOptions{LabelSelector: apiGroup + "/managed-by=" + nodeName})
		if err == nil && len(gpus.Items) != 2 {
			err = fmt.Errorf("GPUs of the simulated hypervisor: expected 2, found %d", len(gpus.Items))
		}
		return err
	}))
	s := w.Status(ctx)
	require.Equal(t, self, s.Controller)

	require.NoError(t, w.Fault(ctx, "controller-restart", nil))
	again := w.real.Keeper().Status().PID
	require.NotEqual(t, pid, again)
	require.NoDirExists(t, fmt.Sprintf("/proc/%d", pid))
	require.NoError(t, process.Until(ctx, 100*time.Millisecond, func(context.Context) error {
		_, err := os.Stat(record(w.folder.Path("controller"), again))
		return err
	}))

	end()
	w.stop()
	require.NoDirExists(t, fmt.Sprintf("/proc/%d", again), "the controller ends with the sandbox")
}

func TestProgramThatCannotRunIsRefusedBeforeAnythingStarts(t *testing.T) {
	needPrograms(t)
	w, end := newWorld(t)
	defer end()
	missing := filepath.Join(w.folder.Root, "no-controller")
	require.ErrorContains(t, w.prepare(options(missing)), missing)
	entries, err := os.ReadDir(w.folder.Root)
	require.NoError(t, err)
	require.Empty(t, entries, "nothing was written")
}
