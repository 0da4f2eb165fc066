package controller

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/refit-run/refit/sandbox/process"
)

const (
	namespace = "tensor-fusion-sys"
	release   = "tensor-fusion-sys"
	limit     = 20 * time.Second
)

// TestMain is the stand-in of a controller when the package's tests start it:
// it records how it was started and answers /readyz.
func TestMain(m *testing.M) {
	if os.Getenv("OPERATOR_NAMESPACE") == "" {
		os.Exit(m.Run())
	}
	record := strings.Join(append(os.Args[1:], os.Environ()...), "\n")
	if err := os.WriteFile(filepath.Join(os.Getenv("HOME"), fmt.Sprintf("started.%d", os.Getpid())), []byte(record), 0o600); err != nil {
		panic(err)
	}
	for _, a := range os.Args {
		if address, ok := strings.CutPrefix(a, "-health-probe-bind-address="); ok {
			panic(http.ListenAndServe(address, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
		}
	}
	panic("no address for the probes")
}

func deployment() *appsv1.Deployment {
	secret := func(name, key string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: name}, Key: key}}
	}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: release + "-controller"},
		Spec: appsv1.DeploymentSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{
			{Name: "vector"},
			{
				Name:    "controller",
				Command: []string{"/manager", "-metrics-path=/logs/metrics.log", "-leader-elect", "-enable-auto-scale"},
				Env: []corev1.EnvVar{
					{Name: "OPERATOR_NAMESPACE", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.namespace"}}},
					{Name: "TSDB_MYSQL_HOST", Value: "127.0.0.1"},
					{Name: "TSDB_MYSQL_PASSWORD", ValueFrom: secret("tensor-fusion-sys-greptimedb-secret", "password")},
				},
			},
		}}}},
	}
}

func prepared(t *testing.T) *Controller {
	t.Helper()
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: namespace, Name: name} }
	kube := fake.NewClientset(deployment(),
		&corev1.Secret{ObjectMeta: meta("tensor-fusion-sys-greptimedb-secret"), Data: map[string][]byte{"password": []byte("fake-password-0000")}},
		&corev1.ConfigMap{ObjectMeta: meta(release + "-config"), Data: map[string]string{"config.yaml": "metricsTTL: 30d\n", "scheduler-config.yaml": "profiles: []\n"}},
		&corev1.ConfigMap{ObjectMeta: meta(gpuInfo), Data: map[string]string{"gpu-info.yaml": "[]\n"}},
	)
	self, err := os.Executable()
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	probe := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	c := New(Options{
		Kube: kube, Program: self, Dir: t.TempDir(), Kubeconfig: "/fake/tensorfusion.kubeconfig", Namespace: namespace,
		Release: release, APIPort: 1234, ProbePort: probe, Cert: []byte("fake cert"), Key: []byte("fake key"),
	})
	t.Cleanup(c.Stop)
	return c
}

func start(t *testing.T, c *Controller) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	require.NoError(t, c.Start(ctx))
}

// started is what the process with this id recorded.
func started(t *testing.T, c *Controller, pid int) string {
	t.Helper()
	var record []byte
	eventually(t, func() (err error) {
		record, err = os.ReadFile(filepath.Join(c.options.Dir, fmt.Sprintf("started.%d", pid)))
		return err
	})
	return string(record)
}

func eventually(t *testing.T, probe func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	require.NoError(t, process.Until(ctx, 20*time.Millisecond, func(context.Context) error { return probe() }))
}

func TestProgramStartsAsItsContainerWould(t *testing.T) {
	c := prepared(t)
	start(t, c)
	dir := c.options.Dir
	lines := strings.Split(started(t, c, c.Keeper().Status().PID), "\n")
	for _, want := range []string{
		"-leader-elect", "-enable-auto-scale", "-health-probe-bind-address=127.0.0.1:" + fmt.Sprint(c.options.ProbePort),
		"-dynamic-config=" + dir + "/config.yaml", "-scheduler-config=" + dir + "/scheduler-config.yaml",
		"-gpu-info-config=" + dir + "/gpu-info.yaml",
		"OPERATOR_NAMESPACE=" + namespace, "TSDB_MYSQL_HOST=127.0.0.1", "TSDB_MYSQL_PASSWORD=fake-password-0000",
		"KUBECONFIG=/fake/tensorfusion.kubeconfig", "PORT=1234", "TMPDIR=" + dir + "/tmp",
	} {
		require.Contains(t, lines, want)
	}
	require.NotContains(t, lines, "/manager", "the program's path in its image is no argument")
	for name, want := range map[string]string{
		"config.yaml": "metricsTTL: 30d\n", "gpu-info.yaml": "[]\n",
		"tmp/k8s-webhook-server/serving-certs/tls.crt": "fake cert", "tmp/k8s-webhook-server/serving-certs/tls.key": "fake key",
	} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		require.Equal(t, want, string(got), name)
	}
}

func TestRestartIsAnotherProcess(t *testing.T) {
	c := prepared(t)
	start(t, c)
	first := c.Keeper().Status().PID
	require.NoError(t, c.Restart(t.Context()))
	second := c.Keeper().Status().PID
	require.NotEqual(t, first, second)
	require.NotEmpty(t, started(t, c, second))
	_, err := os.Stat(fmt.Sprintf("/proc/%d", first))
	require.ErrorIs(t, err, os.ErrNotExist, "the former process is gone")
}

func TestChangedDeploymentStartsTheProgramAnew(t *testing.T) {
	c := prepared(t)
	start(t, c)
	first := c.Keeper().Status().PID
	following := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { following <- c.Follow(ctx) }()
	d := deployment()
	d.Spec.Template.Spec.Containers[1].Env = append(d.Spec.Template.Spec.Containers[1].Env, corev1.EnvVar{Name: "TF_ISOLATION_MODE_POLICY", Value: "dynamic"})
	_, err := c.options.Kube.AppsV1().Deployments(namespace).Update(t.Context(), d, metav1.UpdateOptions{})
	require.NoError(t, err)
	eventually(t, func() error {
		if pid := c.Keeper().Status().PID; pid == 0 || pid == first {
			return fmt.Errorf("the process is still %d", pid)
		}
		return nil
	})
	require.Contains(t, started(t, c, c.Keeper().Status().PID), "TF_ISOLATION_MODE_POLICY=dynamic")
	cancel()
	require.NoError(t, <-following)
}

func TestProgramThatCannotRunIsRefused(t *testing.T) {
	dir := t.TempDir()
	plain := filepath.Join(dir, "plain")
	require.NoError(t, os.WriteFile(plain, nil, 0o600))
	for path, want := range map[string]string{filepath.Join(dir, "missing"): "no such file", plain: "executable", dir: "executable"} {
		t.Setenv(Variable, path)
		_, err := Program()
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, path)
		require.ErrorContains(t, Check(path), want)
	}
	t.Setenv(Variable, "")
	none, err := Program()
	require.NoError(t, err)
	require.Empty(t, none)
}

func TestUnknownSourceOfAVariableIsRefused(t *testing.T) {
	c := prepared(t)
	d := deployment()
	d.Spec.Template.Spec.Containers[1].Env[1] = corev1.EnvVar{Name: "ODD", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{}}}
	_, err := c.options.compose(t.Context(), d)
	require.ErrorContains(t, err, "ODD")
	d.Spec.Template.Spec.Containers = d.Spec.Template.Spec.Containers[:1]
	_, err = c.options.compose(t.Context(), d)
	require.ErrorContains(t, err, "controller")
}
