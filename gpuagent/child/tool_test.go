package child

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func init() {
	// test.toolparent runs a tool while it holds a lock.
	Register("test.toolparent", func(ctx context.Context, r json.RawMessage) (any, error) {
		var in struct{ Script, FIFO, Lock string }
		if err := json.Unmarshal(r, &in); err != nil {
			return nil, err
		}
		lock, err := flock(in.Lock)
		if err != nil {
			return nil, err
		}
		defer lock.Close()
		_, err = Tool(Holding(ctx, lock), plenty, "sh", "-c", in.Script, "sh", in.FIFO)
		return nil, err
	})
}

func flock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func fifo(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pid")
	require.NoError(t, unix.Mkfifo(path, 0o600))
	return path
}

// Each tells its process id and hangs: the tool itself, or what it started.
const (
	hangs       = `echo $$ >"$1"; exec sleep 1000`
	startsAHang = `sleep 1000 & echo $! >"$1"; wait`
)

// killedParent runs the script from a process of its own, kills that process
// and returns who told its id to the script's FIFO.
func killedParent(t *testing.T, script, lock string) (pid int) {
	t.Helper()
	in := map[string]string{"Script": script, "FIFO": fifo(t), "Lock": lock}
	done := make(chan error, 1)
	go func() { done <- Run(context.Background(), Spec{Name: "test.toolparent", Request: in, Timeout: plenty}) }()
	pid = readPID(t, in["FIFO"])
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	tool := pid
	if script == startsAHang {
		tool = parentOf(t, pid)
	}
	require.NoError(t, syscall.Kill(parentOf(t, tool), syscall.SIGKILL))
	var crash Crash
	require.ErrorAs(t, <-done, &crash)
	requireGone(t, tool)
	return pid
}

func TestAToolDiesWithItsParentAndTheLockIsFree(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	requireGone(t, killedParent(t, hangs, path))
	lock, err := flock(path)
	require.NoError(t, err)
	lock.Close()
}

func TestALockIsFreeOnlyOnceTheLastProcessOfItsRunIsGone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	left := killedParent(t, startsAHang, path)
	_, err := flock(path)
	require.ErrorIs(t, err, syscall.EWOULDBLOCK, "what the tool started is still at work")
	require.NoError(t, syscall.Kill(left, syscall.SIGKILL))
	require.Eventually(t, func() bool {
		lock, err := flock(path)
		if err == nil {
			lock.Close()
		}
		return err == nil
	}, plenty, time.Millisecond)
}

func TestAToolPastItsDeadlineIsKilledWithAllThatItStarted(t *testing.T) {
	path := fifo(t)
	done := make(chan error, 1)
	go func() {
		_, err := Tool(context.Background(), 500*time.Millisecond, "sh", "-c", startsAHang, "sh", path)
		done <- err
	}()
	left := readPID(t, path)
	var late Timeout
	require.ErrorAs(t, <-done, &late)
	require.Equal(t, "sh", late.Name)
	requireGone(t, left)
}

func TestACancelledCallKillsItsTool(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	path := fifo(t)
	why := errors.New("the rollout was aborted")
	done := make(chan error, 1)
	go func() {
		_, err := Tool(ctx, plenty, "sh", "-c", hangs, "sh", path)
		done <- err
	}()
	pid := readPID(t, path)
	cancel(why)
	require.ErrorIs(t, <-done, why)
	requireGone(t, pid)
}

func TestWhatAToolSaysIsToldWithItsExitCode(t *testing.T) {
	t.Setenv("LD_PRELOAD", "")
	said, err := Tool(context.Background(), plenty, "sh", "-c", `echo "preload ${LD_PRELOAD-none}"`)
	require.NoError(t, err)
	require.Equal(t, "preload none", said)
	said, err = Tool(context.Background(), plenty, "sh", "-c", "echo GPU is in use >&2; exit 3")
	require.Equal(t, "GPU is in use", said)
	require.EqualError(t, err, "sh: exit status 3: GPU is in use")
	_, err = Tool(context.Background(), plenty, "refit-no-such-tool")
	require.ErrorIs(t, err, exec.ErrNotFound)
}

func TestAToolThatSurvivesItsKillBlocksItsName(t *testing.T) {
	gone := make(chan struct{})
	defer close(gone)
	r := &runner{grace: 10 * time.Millisecond, proc: t.TempDir(), wedged: map[string][]Wedged{}, wait: func(c *exec.Cmd) error {
		err := c.Wait()
		<-gone
		return err
	}}
	var wedged Wedged
	_, err := r.tool(context.Background(), 100*time.Millisecond, "sleep", "1000")
	require.ErrorAs(t, err, &wedged)
	_, err = r.tool(context.Background(), plenty, "sleep", "0")
	require.ErrorAs(t, err, &wedged, "a second one would meet the first")
}
