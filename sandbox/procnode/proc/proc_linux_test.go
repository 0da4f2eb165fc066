package proc

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

const variable = "REFIT_PROC_TEST"

// shell starts a script in a session of its own and returns after its first
// line.
func shell(t *testing.T, script string) (*exec.Cmd, string) {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Env = append(os.Environ(), variable+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, lines.Text()
}

func TestZombieIsDead(t *testing.T) {
	cmd, _ := shell(t, "echo up; exec sleep 600")
	id, ok := Identify(cmd.Process.Pid)
	require.True(t, ok)
	require.True(t, id.Alive())
	id.SignalGroup(syscall.SIGKILL)
	require.NoError(t, id.Wait())
	require.DirExists(t, fmt.Sprintf("/proc/%d", cmd.Process.Pid), "it was not reaped yet")
	require.False(t, id.Alive())
}

func TestSameNumberWithAnotherStartIsAnotherProcess(t *testing.T) {
	cmd, _ := shell(t, "echo up; exec sleep 600")
	id, ok := Identify(cmd.Process.Pid)
	require.True(t, ok)
	other := ID{PID: id.PID, Ticks: "1"}
	require.False(t, other.Alive())
	require.NoError(t, other.Wait())
	other.SignalGroup(syscall.SIGKILL)
	require.True(t, id.Alive(), "the signal was for another")
}

// A process that left the group and the session of its pod is found all the
// same.
func TestEndReachesProcessesThatWentAway(t *testing.T) {
	_, child := shell(t, `setsid sh -c 'echo $$; exec sleep 600' & wait`)
	require.Len(t, Marked(variable, t.Name()), 2)
	require.NoError(t, End(variable, t.Name()))
	require.Empty(t, Marked(variable, t.Name()))
	pid, err := strconv.Atoi(child)
	require.NoError(t, err)
	_, alive := Identify(pid)
	require.False(t, alive)
}

func TestEndSparesEveryoneElse(t *testing.T) {
	cmd, _ := shell(t, "echo up; exec sleep 600")
	require.NoError(t, End(variable, "somebody else"))
	_, alive := Identify(cmd.Process.Pid)
	require.True(t, alive)
}
