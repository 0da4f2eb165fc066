// Package sandbox gives tests a sandbox with a worker, as an operator would
// have it, and the commands of the person who works with it. Everything goes
// through the binaries of bin/; it must not import the product's workflows or
// activities beyond the protocol's structs.
package sandbox

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/client"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// Name is the sandbox's, for commands of refit-sandbox.
const Name = "test"

const (
	// commandLimit is for commands that wait for a run, too.
	commandLimit = 10 * time.Minute
	// tools is the folder of a sandbox's own programs.
	tools = "tools"
)

// programs are what a sandbox and its worker are made of.
var programs = []string{"refit", "refit-worker", "refit-gpuagent", "refit-sandbox", "refit-kube", "kwok", "temporal"}

// Sandbox is one sandbox with a worker, as one test or bench sees it.
type Sandbox struct {
	t testing.TB
	*shared
}

// shared is the sandbox itself.
type shared struct {
	// Root is the repository, Home what only this sandbox writes to.
	Root, Home string
	bin        string
	// Vars is the environment that refit-sandbox tells.
	Vars     map[string]string
	Kube     kubernetes.Interface
	Dynamic  dynamic.Interface
	Temporal client.Client

	env []string

	mu     sync.Mutex
	worker *exec.Cmd
	exited chan struct{}
}

// Up starts a sandbox with these arguments of refit-sandbox up. It ends with
// the test, and so does its worker. It fails when bin/ is not built.
func Up(t testing.TB, args ...string) *Sandbox {
	t.Helper()
	root := repository(t)
	bin := os.Getenv("REFIT_BIN")
	if bin == "" {
		bin = filepath.Join(root, "bin")
	}
	for _, name := range programs {
		if _, err := os.Stat(filepath.Join(bin, name)); err != nil {
			t.Fatalf("%s is missing in %s: run `make build` first (make test does)", name, bin)
		}
	}
	home, err := os.MkdirTemp("", "refit-test-")
	require.NoError(t, err)
	s := &Sandbox{t: t, shared: &shared{Root: root, Home: home, bin: bin, Vars: map[string]string{}}}
	path := strings.Join([]string{bin, filepath.Join(home, tools), os.Getenv("PATH")}, string(filepath.ListSeparator))
	s.env = append(os.Environ(), "REFIT_SANDBOX_HOME="+home, "PATH="+path, "NO_COLOR=1")
	t.Cleanup(s.down)
	s.must("refit-sandbox", append([]string{"up", "--name", Name, "--until-exit", strconv.Itoa(os.Getpid())}, args...)...)
	for line := range strings.Lines(s.must("refit-sandbox", "env", "--name", Name)) {
		key, value, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "export "), "=")
		if ok {
			value = strings.Trim(value, `"'`)
			s.Vars[key] = value
			s.env = append(s.env, key+"="+value)
		}
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", s.Vars["KUBECONFIG"])
	require.NoError(t, err)
	cfg.QPS, cfg.Burst = 100, 200
	s.Kube, err = kubernetes.NewForConfig(cfg)
	require.NoError(t, err)
	s.Dynamic, err = dynamic.NewForConfig(cfg)
	require.NoError(t, err)
	s.Temporal, err = client.Dial(client.Options{HostPort: s.Vars["TEMPORAL_ADDRESS"], Logger: quiet{}})
	require.NoError(t, err)
	t.Cleanup(s.Temporal.Close)
	s.must("refit", "setup")
	return s
}

// repository is the folder of this module: a test runs in its package's folder.
func repository(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	require.NoError(t, err)
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("no go.mod above the test's folder: run the tests from the repository")
	return ""
}

// Setenv changes the environment of what is started from now on.
func (s *Sandbox) Setenv(key, value string) { s.env = append(s.env, key+"="+value) }

// In is the same sandbox for a subtest.
func (s *Sandbox) In(t testing.TB) *Sandbox { return &Sandbox{t: t, shared: s.shared} }

// quiet drops the client's log lines.
type quiet struct{}

func (quiet) Debug(string, ...any) {}
func (quiet) Info(string, ...any)  {}
func (quiet) Warn(string, ...any)  {}
func (quiet) Error(string, ...any) {}

func (s *Sandbox) down() {
	s.KillWorker()
	if s.t.Failed() {
		for log, file := range map[string]string{"worker's": filepath.Join(s.Home, "worker.log"), "sandbox's": filepath.Join(s.Home, Name, "daemon.log")} {
			if text, err := os.ReadFile(file); err == nil {
				s.t.Logf("end of the %s log:\n%s", log, text[max(0, len(text)-3000):])
			}
		}
		if audit, err := os.ReadFile(s.Vars["REFIT_SANDBOX_AUDIT_LOG"]); err == nil {
			_ = os.WriteFile(filepath.Join(s.Home, "audit.log"), audit, 0o600)
		}
	}
	if out, code := s.Run("refit-sandbox", "down", "--name", Name); code != 0 {
		s.t.Errorf("refit-sandbox down: exit %d\n%s", code, out)
	}
	if s.t.Failed() {
		s.t.Logf("kept: %s", s.Home)
		return
	}
	_ = os.RemoveAll(s.Home)
}

// StartWorker starts refit-worker with the sandbox's environment; extra
// entries win. It ends with the test's process, also when that is killed.
func (s *Sandbox) StartWorker(extra ...string) {
	s.t.Helper()
	log, err := os.OpenFile(filepath.Join(s.Home, "worker.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(s.t, err)
	defer log.Close()
	cmd := exec.Command(filepath.Join(s.bin, "refit-worker"))
	cmd.Env = append(append([]string{}, s.env...), extra...)
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = log, log, attributes()
	started, exited := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // whose end is the parent's to a child on Linux
		defer close(exited)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // says that it was killed
		}
	}()
	require.NoError(s.t, <-started)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.worker, s.exited = cmd, exited
}

// KillWorker is kill -9.
func (s *Sandbox) KillWorker() {
	s.mu.Lock()
	cmd, exited := s.worker, s.exited
	s.worker = nil
	s.mu.Unlock()
	if cmd == nil {
		return
	}
	_ = cmd.Process.Kill()
	<-exited
}

// Run runs a program of bin/ or of the PATH to its end, in the repository.
func (s *Sandbox) Run(program string, args ...string) (string, int) {
	s.t.Helper()
	path := filepath.Join(s.bin, program)
	if _, err := os.Stat(path); err != nil {
		path = program
	}
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	var out bytes.Buffer
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = s.env, s.Root, &out, &out
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return out.String(), 0
	case errors.As(err, &exit):
		return out.String(), exit.ExitCode()
	}
	return out.String() + err.Error(), -1
}

// must runs a program that has to succeed.
func (s *Sandbox) must(program string, args ...string) string {
	s.t.Helper()
	out, code := s.Run(program, args...)
	require.Zero(s.t, code, "%s %s: %s", program, strings.Join(args, " "), out)
	return out
}

// Fault injects a fault by name.
func (s *Sandbox) Fault(args ...string) {
	s.t.Helper()
	s.must("refit-sandbox", append([]string{"fault", "--name", Name}, args...)...)
}

// Tool puts a script into the PATH of the sandbox and its agents.
func (s *Sandbox) Tool(name, script string) {
	s.t.Helper()
	dir := filepath.Join(s.Home, tools)
	require.NoError(s.t, os.MkdirAll(dir, 0o755))
	require.NoError(s.t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
}
