package folder

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLocateUsesHomeOrDir(t *testing.T) {
	t.Setenv(HomeVariable, "/somewhere")
	f, err := Locate("demo", "")
	require.NoError(t, err)
	require.Equal(t, "/somewhere/demo", f.Root)
	f, err = Locate("demo", "/elsewhere/x")
	require.NoError(t, err)
	require.Equal(t, "/elsewhere/x", f.Root)
}

func TestLocateRefusesNamesThatAreNoFolder(t *testing.T) {
	for _, name := range []string{"", "..", "a/b", "A", "-a", strings.Repeat("a", 41)} {
		_, err := Locate(name, "")
		require.Error(t, err, name)
	}
}

func TestStateSurvives(t *testing.T) {
	f := Folder{Root: t.TempDir()}
	_, err := f.Load()
	require.ErrorIs(t, err, os.ErrNotExist)
	require.False(t, f.Exists())
	want := State{Options: Options{Name: "demo", Pools: []Pool{{Name: "shared", Nodes: 3}}}, Ports: portsOf(7)}
	require.NoError(t, f.Save(want))
	got, err := f.Load()
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.True(t, f.Exists())
}

func TestOnlyOneHoldsTheLock(t *testing.T) {
	f := Folder{Root: t.TempDir()}
	lock, err := f.TryLock()
	require.NoError(t, err)
	require.NoError(t, lock.RecordPID())
	require.Equal(t, os.Getpid(), f.HolderPID())
	_, err = f.TryLock()
	require.True(t, errors.Is(err, ErrRunning))
	lock.Release()
	again, err := f.WaitLock()
	require.NoError(t, err)
	again.Release()
}

func TestTwoSandboxesNeverShareABlock(t *testing.T) {
	root := t.TempDir()
	f := Folder{Root: root}
	first, listener, err := f.Reserve()
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	second, other, err := f.Reserve()
	require.NoError(t, err)
	t.Cleanup(func() { _ = other.Close() })
	require.NotEqual(t, first.Block, second.Block, "the same preferred block was given out twice")
	_, err = first.Reopen()
	require.Error(t, err, "the listener reserves the block")
}

func TestNodeAddressesAreLoopbackAndUnique(t *testing.T) {
	seen := map[string]bool{}
	for _, block := range []int{0, 1, blockCount - 1} {
		p := portsOf(block)
		for _, i := range []int{0, 1, 999, nodesPerBlock - 2} {
			ip, err := p.NodeIP(i)
			require.NoError(t, err)
			require.True(t, ip.IsLoopback(), ip)
			require.False(t, seen[ip.String()], ip)
			seen[ip.String()] = true
		}
	}
	_, err := portsOf(0).NodeIP(nodesPerBlock - 1)
	require.Error(t, err)
}

func TestLongFoldersKeepTheirSocketElsewhere(t *testing.T) {
	short := Folder{Root: "/tmp/a"}
	require.Equal(t, "/tmp/a/control.sock", short.SocketPath("/tmp"))
	long := Folder{Root: "/" + strings.Repeat("x", 120)}
	require.LessOrEqual(t, len(long.SocketPath("/tmp")), maxSocketPath)
}
