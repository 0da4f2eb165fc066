package setup

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func nothing(context.Context) (Report, error) { return Report{}, nil }

func TestTheSecondSetUpOfAHostIsToldToWait(t *testing.T) {
	root := t.TempDir()
	_, err := Locked(t.Context(), root, func(ctx context.Context) (Report, error) {
		_, err := Locked(ctx, root, nothing)
		return Report{}, err
	})
	require.Equal(t, Wait, ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "fuser -v "+filepath.Join(root, lockFile))
	_, err = Locked(t.Context(), root, nothing)
	require.NoError(t, err, "the first is done")
}

// The children of a killed agent have its lock until they have followed it.
func TestALockThatIsGivenBackInAMomentIsWaitedFor(t *testing.T) {
	root := t.TempDir()
	unlock, err := Lock(t.Context(), root)
	require.NoError(t, err)
	time.AfterFunc(5*lockPoll, unlock)
	_, err = Locked(t.Context(), root, nothing)
	require.NoError(t, err)
}

func TestACancelledSetUpDoesNotWaitForTheLock(t *testing.T) {
	root := t.TempDir()
	unlock, err := Lock(t.Context(), root)
	require.NoError(t, err)
	defer unlock()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Locked(ctx, root, func(context.Context) (Report, error) { return Report{}, errors.New("it was done") })
	require.Equal(t, Wait, ClassOf(err), "%v", err)
}

func TestALockThatCannotBeMadeSaysWhatItNeeds(t *testing.T) {
	root := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(root, "run"), nil, 0o600))
	_, err := Lock(t.Context(), root)
	require.Equal(t, Stop, ClassOf(err))
	require.ErrorContains(t, err, "run as root")
}

func TestWhoChangesNothingIsKeptOffByTheLockAndMayGoWithoutIt(t *testing.T) {
	root := t.TempDir()
	unlock, unseen, err := LockToLook(t.Context(), root)
	require.NoError(t, err)
	require.Empty(t, unseen)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Locked(gone, root, nothing)
	require.Equal(t, Wait, ClassOf(err), "a set-up waits for a check: %v", err)
	_, _, err = LockToLook(gone, root)
	require.Equal(t, Wait, ClassOf(err), "and so does another check: %v", err)
	unlock()

	root = t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(root, "run"), nil, 0o600))
	_, unseen, err = LockToLook(t.Context(), root)
	require.NoError(t, err)
	require.Contains(t, unseen, "run as root")
}
