package bench

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	readyGoal = 30 // s, from the command to its return
	gateGoal  = 90 // s, the demo's second run from its start
	// demoLimit is what a run of the demo with its builds may take.
	demoLimit = 30 * time.Minute
	// gateLine is the beginning of the command that the demo's watch prints when
	// the gate asks; progressLine is what it prints once it has everything built.
	gateLine     = "refit approve"
	progressLine = "2. Sandbox"
)

// small is a world for itself: what it starts lies in one folder.
type small struct {
	b    *testing.B
	root string
	env  []string
}

func newSmall(b *testing.B) small {
	b.Helper()
	root, err := filepath.Abs(filepath.Join("..", ".."))
	require.NoError(b, err)
	home, err := os.MkdirTemp("", "refit-bench-")
	require.NoError(b, err)
	b.Cleanup(func() {
		if !b.Failed() {
			_ = os.RemoveAll(home)
		}
	})
	return small{b: b, root: root, env: append(os.Environ(), "REFIT_SANDBOX_HOME="+home, "NO_COLOR=1", "DEMO_YES=1", "DEMO_NAME="+sandbox)}
}

func (s small) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(s.root, name), args...)
	cmd.Env, cmd.Dir = s.env, s.root
	return cmd
}

// BenchmarkSandboxReady measures how long `refit-sandbox up` takes for the
// demo's 8 nodes; everything is built.
func BenchmarkSandboxReady(b *testing.B) {
	for b.Loop() {
		s := newSmall(b)
		ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
		began := time.Now()
		out, err := s.command(ctx, "bin/refit-sandbox", "up", "--name", sandbox, "--pools", "shared=4,training=4").CombinedOutput()
		took := time.Since(began)
		down, downErr := s.command(ctx, "bin/refit-sandbox", "down", "--name", sandbox).CombinedOutput()
		cancel()
		require.NoError(b, err, "refit-sandbox up: %s", out)
		require.NoError(b, downErr, "refit-sandbox down: %s", down)
		fmt.Println(figure{"sandbox-ready", took.Seconds(), "s", "<=", readyGoal})
	}
}

// BenchmarkDemoGate runs the demo without a terminal, as CI does, and measures
// from its start until it says how the gate is approved. A first run, which may
// still build, is not measured.
func BenchmarkDemoGate(b *testing.B) {
	for b.Loop() {
		s := newSmall(b)
		logf(b, "the demo runs twice: the first run may build")
		s.demo()
		gate, whole := s.demo()
		fmt.Println(figure{"demo-gate", gate.Seconds(), "s", "<=", gateGoal})
		fmt.Println(figure{"demo", whole.Seconds(), "s", "", 0})
	}
}

// demo runs it to its end and returns how long it took until the gate, and in
// all.
func (s small) demo() (gate, whole time.Duration) {
	s.b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), demoLimit)
	defer cancel()
	cmd := s.command(ctx, "tools/demo.sh")
	stdout, err := cmd.StdoutPipe()
	require.NoError(s.b, err)
	cmd.Stderr = cmd.Stdout
	began := time.Now()
	require.NoError(s.b, cmd.Start())
	var said strings.Builder
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		line := lines.Text()
		said.WriteString(line + "\n")
		if strings.Contains(line, progressLine) {
			logf(s.b, "built after %s", time.Since(began).Round(time.Second))
		}
		if gate == 0 && strings.Contains(line, gateLine) {
			gate = time.Since(began)
		}
	}
	require.NoError(s.b, cmd.Wait(), "the demo:\n%s", said.String())
	require.NotZero(s.b, gate, "the demo was never at its gate:\n%s", said.String())
	return gate, time.Since(began)
}
