package process

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const limit = 20 * time.Second

// asParent turns the test binary into a parent that keeps a child and is then
// killed by the test.
const asParent = "SANDBOX_TEST_PARENT"

func TestMain(m *testing.M) {
	if log := os.Getenv(asParent); log != "" {
		k := Keep(Spec{Name: "child", Path: "/bin/sleep", Args: []string{"600"}, Log: log})
		if err := k.Start(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(k.Status().PID)
		select {}
	}
	os.Exit(m.Run())
}

func shell(t *testing.T, script string) *Keeper {
	t.Helper()
	dir := t.TempDir()
	k := Keep(Spec{
		Name: "child", Path: "/bin/sh", Args: []string{"-c", script}, Dir: dir,
		Log: filepath.Join(dir, "log"), Grace: 5 * time.Second,
	})
	t.Cleanup(k.Stop)
	return k
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	require.NoError(t, Until(ctx, 10*time.Millisecond, func(context.Context) error {
		if !ok() {
			return fmt.Errorf("not yet: %s", what)
		}
		return nil
	}))
}

func TestKilledChildIsStartedAgain(t *testing.T) {
	k := shell(t, "exec sleep 600")
	require.NoError(t, k.Start())
	first := k.Status().PID
	require.NoError(t, k.Kill())
	eventually(t, "another process", func() bool { s := k.Status(); return s.Running && s.PID != first })
	require.Equal(t, 1, k.Status().Restarts)
}

func TestStoppedChildStaysDownUntilStarted(t *testing.T) {
	k := shell(t, "exec sleep 600")
	require.NoError(t, k.Start())
	pid := k.Status().PID
	k.Stop()
	require.False(t, k.Status().Running)
	require.ErrorIs(t, unix.Kill(pid, 0), unix.ESRCH)
	k.Stop()
	require.Error(t, k.Kill())
	require.NoError(t, k.Start())
	require.True(t, k.Status().Running)
	require.NoError(t, k.Start(), "starting twice changes nothing")
}

func TestSuspendDoesNotWaitForAChildThatIgnoresSIGTERM(t *testing.T) {
	k := shell(t, `trap "" TERM; echo armed; while :; do sleep 600; done`)
	require.NoError(t, k.Start())
	eventually(t, "the trap is set", func() bool { return k.Tail() != "" })
	began := time.Now()
	k.Suspend()
	require.Less(t, time.Since(began), 4*time.Second, "shorter than the grace period")
}

func TestStartReportsAMissingProgram(t *testing.T) {
	k := Keep(Spec{Name: "ghost", Path: "/nonexistent", Log: filepath.Join(t.TempDir(), "log")})
	require.ErrorContains(t, k.Start(), "ghost")
	require.False(t, k.Status().Running)
}

func TestReadyGivesUpOnAChildThatKeepsDying(t *testing.T) {
	k := shell(t, "echo wrong flag; exit 3")
	require.NoError(t, k.Start())
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	err := k.Ready(ctx, 10*time.Millisecond, func(context.Context) error { return fmt.Errorf("connection refused") })
	require.ErrorContains(t, err, "died")
	require.ErrorContains(t, err, "wrong flag", "the log's end explains it")
	require.NoError(t, ctx.Err(), "it did not wait for the deadline")
}

func TestChildDiesWithItsParent(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	parent := exec.Command(self)
	parent.Env = append(os.Environ(), asParent+"="+filepath.Join(t.TempDir(), "log"))
	out, err := parent.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, parent.Start())
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan())
	var pid int
	_, err = fmt.Sscan(lines.Text(), &pid)
	require.NoError(t, err, lines.Text())
	fd, err := unix.PidfdOpen(pid, 0)
	require.NoError(t, err)
	defer unix.Close(fd)

	require.NoError(t, parent.Process.Kill())
	require.Error(t, parent.Wait())

	// A pidfd becomes readable when its process ends.
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(limit.Milliseconds()))
	require.NoError(t, err)
	require.Equal(t, 1, n, "the child outlived its parent")
}
