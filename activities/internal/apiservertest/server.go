//go:build linux

// Package apiservertest runs a real API server (with etcd) for the tests of
// the activities, one per test process. It must hold no double of an API
// server: what a test proves here is proven on the real one.
package apiservertest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/tests/freeport"
)

const (
	// BinaryVariable names the control plane binary; without it, bin/refit-kube
	// of the repository is looked for.
	BinaryVariable = "REFIT_TEST_KUBE"
	// KubeconfigVariable names an existing cluster instead: PATH#CONTEXT.
	KubeconfigVariable = "REFIT_TEST_KUBECONFIG"

	// Context is the context's name in Server.Kubeconfig.
	Context = "test"

	startLimit = 2 * time.Minute
	stopLimit  = 20 * time.Second
)

// Server is a running API server. A server made by Start can be stopped and
// started again on the same data and port.
type Server struct {
	// Kubeconfig is a file; ContextName the context in it.
	Kubeconfig  string
	ContextName string

	folder string
	binary string
	etcd   *process
	api    *process
	port   int
	client int
}

var (
	once   sync.Once
	shared *Server
	failed error
)

// Main runs a package's tests and stops the shared server afterwards; call it
// from TestMain.
func Main(m *testing.M) int {
	code := m.Run()
	if shared != nil {
		shared.Close()
	}
	return code
}

// Shared is the one server of this test process; the test is skipped, with
// the reason printed, when there is nothing to run.
func Shared(t testing.TB) *Server {
	t.Helper()
	if external := os.Getenv(KubeconfigVariable); external != "" {
		path, name, ok := strings.Cut(external, "#")
		if !ok {
			t.Fatalf("%s: expected PATH#CONTEXT, found %q", KubeconfigVariable, external)
		}
		return &Server{Kubeconfig: path, ContextName: name}
	}
	binary := findBinary()
	if binary == "" {
		t.Skipf("skipped: no control plane binary; build bin/refit-kube or set %s or %s", BinaryVariable, KubeconfigVariable)
	}
	once.Do(func() { shared, failed = start(binary) })
	if failed != nil {
		t.Fatalf("API server for tests: %v", failed)
	}
	return shared
}

// Start runs a server of the test's own, for tests that stop it or need
// another cluster.
func Start(t testing.TB) *Server {
	t.Helper()
	binary := findBinary()
	if binary == "" {
		t.Skipf("skipped: no control plane binary; build bin/refit-kube or set %s", BinaryVariable)
	}
	s, err := start(binary)
	if err != nil {
		t.Fatalf("API server for tests: %v", err)
	}
	t.Cleanup(s.Close)
	return s
}

func findBinary() string {
	if path := os.Getenv(BinaryVariable); path != "" {
		return path
	}
	folder, err := os.Getwd()
	if err != nil {
		return ""
	}
	for ; folder != filepath.Dir(folder); folder = filepath.Dir(folder) {
		candidate := filepath.Join(folder, "bin", "refit-kube")
		if _, err := os.Stat(candidate); err == nil {
			return candidate
		}
	}
	return ""
}

func start(binary string) (*Server, error) {
	folder, err := os.MkdirTemp("", "refit-apiserver-")
	if err != nil {
		return nil, err
	}
	s := &Server{folder: folder, binary: binary, ContextName: Context, Kubeconfig: filepath.Join(folder, "kubeconfig")}
	ports, err := freeport.Get(3)
	if err != nil {
		return nil, err
	}
	s.client, s.port = ports[0], ports[2]
	if err := writeCredentials(folder, s.port, s.Kubeconfig); err != nil {
		return nil, err
	}
	if s.etcd, err = s.run("etcd", "--data-dir", filepath.Join(folder, "etcd"),
		"--client-url", fmt.Sprintf("http://127.0.0.1:%d", ports[0]), "--peer-url", fmt.Sprintf("http://127.0.0.1:%d", ports[1])); err != nil {
		return nil, err
	}
	if err := s.StartAPI(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// StartAPI starts the API server and waits until it is ready.
func (s *Server) StartAPI() error {
	file := func(name string) string { return filepath.Join(s.folder, name) }
	api, err := s.run("apiserver",
		fmt.Sprintf("--etcd-servers=http://127.0.0.1:%d", s.client), fmt.Sprintf("--secure-port=%d", s.port),
		"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC", "--profiling=false",
		// No controller makes the default ServiceAccount that it would ask for.
		"--disable-admission-plugins=ServiceAccount",
		"--tls-cert-file="+file("server.crt"), "--tls-private-key-file="+file("server.key"), "--token-auth-file="+file("tokens.csv"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file="+file("server.key"), "--service-account-key-file="+file("server.key"))
	if err != nil {
		return err
	}
	s.api = api
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}, Timeout: 2 * time.Second}
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		reply, err := client.Get(fmt.Sprintf("https://127.0.0.1:%d/readyz", s.port))
		if err == nil {
			_, _ = io.Copy(io.Discard, reply.Body)
			reply.Body.Close()
			if reply.StatusCode == http.StatusOK {
				client.CloseIdleConnections()
				return nil
			}
		}
		select {
		case <-api.ended:
			return fmt.Errorf("apiserver ended: %s", api.complaints())
		case <-ctx.Done():
			return fmt.Errorf("apiserver not ready within %s: %s", startLimit, api.complaints())
		case <-ticker.C:
		}
	}
}

// StopAPI kills the API server; etcd keeps its data.
func (s *Server) StopAPI() { s.api.kill() }

// Close stops everything and removes the data. The API server goes first: it
// hangs when etcd is gone.
func (s *Server) Close() {
	for _, p := range []*process{s.api, s.etcd} {
		if p != nil {
			p.kill()
		}
	}
	os.RemoveAll(s.folder)
}

// Config is an administrator's configuration.
func (s *Server) Config(t testing.TB) *rest.Config {
	t.Helper()
	loaded, err := clientcmd.LoadFromFile(s.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.NewNonInteractiveClientConfig(*loaded, s.ContextName, nil, nil).ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// Client is an administrator's client.
func (s *Server) Client(t testing.TB) *kube.Client {
	t.Helper()
	client, err := kube.NewClient(s.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// Target is the server's identity under a cluster name.
func (s *Server) Target(t testing.TB, cluster string) kube.Target {
	t.Helper()
	ns, err := s.Client(t).Typed.CoreV1().Namespaces().Get(t.Context(), metav1.NamespaceSystem, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return kube.Target{Cluster: cluster, UID: string(ns.UID)}
}

// Clusters maps a name to this server.
func (s *Server) Clusters(t testing.TB, cluster string) *kube.Clusters {
	t.Helper()
	clusters, err := kube.Parse(fmt.Sprintf("%s=%s#%s", cluster, s.Kubeconfig, s.ContextName))
	if err != nil {
		t.Fatal(err)
	}
	return clusters
}

// Namespace makes a namespace of the test's own.
func (s *Server) Namespace(t testing.TB) string {
	t.Helper()
	name := "test-" + uuid.NewString()[:8]
	_, err := s.Client(t).Typed.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// process is a child that dies with the tests.
type process struct {
	cmd   *exec.Cmd
	log   string
	ended chan struct{}
}

func (s *Server) run(args ...string) (*process, error) {
	log, err := os.OpenFile(filepath.Join(s.folder, args[0]+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(s.binary, args...), log: log.Name(), ended: make(chan struct{})}
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = s.folder, log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// The parent-death signal comes when this thread ends: keep it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.ended)
		defer log.Close()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

func (p *process) kill() {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return
	}
	limit := time.NewTimer(stopLimit)
	defer limit.Stop()
	select {
	case <-p.ended:
	case <-limit.C:
	}
}

func (p *process) complaints() string {
	data, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(data[max(0, len(data)-2000):])
}
