package child

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// plenty is a deadline that no test reaches.
const plenty = time.Minute

func init() {
	Register("test.echo", func(_ context.Context, r json.RawMessage) (any, error) {
		var words []string
		if err := json.Unmarshal(r, &words); err != nil {
			return nil, err
		}
		return map[string]any{"words": words, "preload": os.Getenv("LD_PRELOAD"), "extra": os.Getenv("EXTRA"), "pid": os.Getpid()}, nil
	})
	Register("test.error", func(context.Context, json.RawMessage) (any, error) { return nil, errors.New("the GPU is elsewhere") })
	Register("test.exit", func(context.Context, json.RawMessage) (any, error) {
		Stage("GPU 3 nvmlDeviceGetNothing")
		fmt.Fprintln(os.Stderr, "symbol lookup error: undefined symbol: nvmlDeviceGetNothing")
		os.Exit(MissingSymbol)
		return nil, nil
	})
	Register("test.signal", func(context.Context, json.RawMessage) (any, error) {
		Stage("context")
		// A signal that the Go runtime does not catch, as an abort without it.
		return nil, syscall.Kill(os.Getpid(), syscall.SIGKILL)
	})
	Register("test.segv", func(context.Context, json.RawMessage) (any, error) {
		return nil, unix.Kill(os.Getpid(), unix.SIGSEGV)
	})
	Register("test.hang", func(_ context.Context, r json.RawMessage) (any, error) {
		Stage("GPU 1 nvmlDeviceGetTemperature")
		var path string
		if err := json.Unmarshal(r, &path); err == nil && path != "" {
			if err := os.WriteFile(path, []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
				return nil, err
			}
		}
		select {}
	})
	Register("test.patient", func(ctx context.Context, _ json.RawMessage) (any, error) {
		Stage("waiting")
		<-ctx.Done()
		return "stopped early", nil
	})
	Register("test.chatty", func(context.Context, json.RawMessage) (any, error) {
		fmt.Print(strings.Repeat("a library that prints\n", 100_000))
		return strings.Repeat("x", 1<<20), nil
	})
	// test.parent starts a child that hangs, and tells its process id.
	Register("test.parent", func(ctx context.Context, r json.RawMessage) (any, error) {
		return nil, Run(ctx, Spec{Name: "test.hang", Request: r, Timeout: plenty})
	})
}

func TestMain(m *testing.M) {
	if Main() {
		return
	}
	os.Exit(m.Run())
}

type echo struct {
	Words          []string
	Preload, Extra string
	PID            int
}

func TestARequestIsAnsweredByAnotherProcessWithoutAnInterposer(t *testing.T) {
	t.Setenv("LD_PRELOAD", "")
	var out echo
	require.NoError(t, Run(context.Background(), Spec{Name: "test.echo", Request: []string{"a", "b"}, Timeout: plenty, Reply: &out, Env: Env("EXTRA=1")}))
	require.Equal(t, []string{"a", "b"}, out.Words)
	require.Equal(t, "1", out.Extra)
	require.NotEqual(t, os.Getpid(), out.PID)
	for _, kv := range Env() {
		require.False(t, strings.HasPrefix(kv, "LD_PRELOAD="))
	}
}

func TestTheErrorOfTheFunctionComesBackAsItsOwn(t *testing.T) {
	var failed Error
	require.ErrorAs(t, Run(context.Background(), Spec{Name: "test.error", Timeout: plenty}), &failed)
	require.Equal(t, "the GPU is elsewhere", failed.Message)
}

func TestAMissingSymbolIsAnExitWithTheStageItHappenedIn(t *testing.T) {
	var exit Exit
	err := Run(context.Background(), Spec{Name: "test.exit", Timeout: plenty})
	require.ErrorAs(t, err, &exit)
	require.Equal(t, MissingSymbol, exit.Code)
	require.Equal(t, "GPU 3 nvmlDeviceGetNothing", exit.Stage)
	require.ErrorContains(t, err, "lacks a symbol")
	require.ErrorContains(t, err, "undefined symbol: nvmlDeviceGetNothing")
}

func TestACrashIsToldApartFromAnExit(t *testing.T) {
	var crash Crash
	require.ErrorAs(t, Run(context.Background(), Spec{Name: "test.signal", Timeout: plenty}), &crash)
	require.Equal(t, "SIGKILL", crash.Signal)
	require.Equal(t, "context", crash.Stage)
	// The Go runtime catches this one and ends the process by itself.
	require.ErrorAs(t, Run(context.Background(), Spec{Name: "test.segv", Timeout: plenty}), &crash)
	require.Equal(t, "SIGSEGV", crash.Signal)
}

func TestAnUnknownFunctionIsAnExitThatSaysSo(t *testing.T) {
	var exit Exit
	err := Run(context.Background(), Spec{Name: "test.none", Timeout: plenty})
	require.ErrorAs(t, err, &exit)
	require.ErrorContains(t, err, "agent and child differ")
}

func TestAHangIsKilledAtTheDeadlineAndLocated(t *testing.T) {
	var late Timeout
	started := time.Now()
	require.ErrorAs(t, Run(context.Background(), Spec{Name: "test.hang", Request: "", Timeout: 500 * time.Millisecond}), &late)
	require.Equal(t, "GPU 1 nvmlDeviceGetTemperature", late.Stage)
	require.Less(t, time.Since(started), 30*time.Second)
	require.Error(t, Run(context.Background(), Spec{Name: "test.hang"}), "a call without a deadline is refused")
}

func TestACancelledCallKillsItsChild(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	fifo := filepath.Join(t.TempDir(), "pid")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	why := errors.New("the rollout was aborted")
	done := make(chan error, 1)
	go func() { done <- Run(ctx, Spec{Name: "test.hang", Request: fifo, Timeout: plenty}) }()
	pid := readPID(t, fifo)
	cancel(why)
	require.ErrorIs(t, <-done, why)
	requireGone(t, pid)
}

func TestAChildCanBeAskedForItsReplyBeforeTheDeadline(t *testing.T) {
	stop := make(chan struct{})
	close(stop)
	var out string
	require.NoError(t, Run(context.Background(), Spec{Name: "test.patient", Timeout: plenty, Stop: stop, Reply: &out}))
	require.Equal(t, "stopped early", out)
}

func TestMuchOutputBlocksNeitherSide(t *testing.T) {
	var out string
	require.NoError(t, Run(context.Background(), Spec{Name: "test.chatty", Timeout: plenty, Reply: &out}))
	require.Len(t, out, 1<<20)
}

func TestTheChildDiesWithItsParent(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "pid")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	// The parent is itself a child of this test, so that it can be killed.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- Run(ctx, Spec{Name: "test.parent", Request: fifo, Timeout: plenty}) }()
	pid := readPID(t, fifo)
	parent := parentOf(t, pid)
	require.NotEqual(t, os.Getpid(), parent)
	require.NoError(t, syscall.Kill(parent, syscall.SIGKILL))
	var crash Crash
	require.ErrorAs(t, <-done, &crash)
	requireGone(t, pid)
}

func TestAChildThatSurvivesItsKillIsWedgedAndBlocksItsKeyUntilItIsGone(t *testing.T) {
	gone := make(chan struct{})
	proc := t.TempDir()
	r := &runner{grace: 10 * time.Millisecond, proc: proc, wedged: map[string][]Wedged{}, wait: func(c *exec.Cmd) error {
		// The first thread of a killed process is a zombie while another is held.
		for path, content := range map[string]string{
			"stat": "7 (a (b) c) Z 1 1", "wchan": "0", "task/7/stat": "7 (a) Z 1 1", "task/8/stat": "8 (a) S 1 1",
			"task/9/stat": "9 (a (b) c) D 1 1", "task/9/wchan": "rm_ioctl", "task/9/stack": "[<0>] rm_ioctl+0x1/0x2 [nvidia]\n[<0>] nvidia_ioctl\n",
		} {
			path = filepath.Join(proc, strconv.Itoa(c.Process.Pid), path)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600)); err != nil {
				return err
			}
		}
		err := c.Wait()
		<-gone
		return err
	}}
	spec := Spec{Name: "test.hang", Request: "", Timeout: 300 * time.Millisecond, Key: "GPU-1"}
	var wedged Wedged
	err := r.run(context.Background(), spec)
	require.ErrorAs(t, err, &wedged)
	require.Equal(t, "D", wedged.State)
	require.Equal(t, "rm_ioctl", wedged.WChan)
	require.ErrorContains(t, err, "in state D, wchan rm_ioctl, kernel stack rm_ioctl+0x1/0x2 [nvidia] < nvidia_ioctl")
	require.ErrorContains(t, err, "reboot the host")

	again := Wedged{}
	require.ErrorAs(t, r.run(context.Background(), spec), &again, "no other child is started on that GPU")
	require.Equal(t, wedged.PID, again.PID)
	_, held := r.blocked("GPU-2")
	require.False(t, held, "another GPU is free")

	// Two at once, on two devices of one card: the key is free after both.
	other := make(chan error)
	r.hold("GPU-1", Wedged{PID: -1}, other)
	close(gone)
	require.Eventually(t, func() bool { held, _ := r.blocked("GPU-1"); return held.PID == -1 }, plenty, time.Millisecond)
	close(other)
	require.Eventually(t, func() bool { _, held := r.blocked("GPU-1"); return !held }, plenty, time.Millisecond)
}

func readPID(t *testing.T, fifo string) int {
	t.Helper()
	f, err := os.Open(fifo)
	require.NoError(t, err)
	defer f.Close()
	line, err := bufio.NewReader(f).ReadString('\n')
	if line == "" {
		require.NoError(t, err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)
	return pid
}

func parentOf(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	fields := strings.Fields(string(b[strings.LastIndex(string(b), ")")+1:]))
	parent, err := strconv.Atoi(fields[1])
	require.NoError(t, err)
	return parent
}

// requireGone waits until a process has ended; one that nobody has reaped yet
// has ended too.
func requireGone(t *testing.T, pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		state, _, _ := kernelState("/proc", pid)
		return ended(state)
	}, plenty, time.Millisecond)
}
