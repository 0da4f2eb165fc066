package setup

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/refit-run/refit/gpuagent/child"
)

// lockFile is below the host's root: the agent and a person at the host meet
// there, whichever container each of them runs in.
const lockFile = "run/refit-gpuagent.lock"

const (
	// lockPatience is how long the children of an agent that was killed may
	// take to follow it: they have the lock too.
	lockPatience = 5 * time.Second
	// lockAgain is when a request that found the host taken is worth another try.
	lockAgain = 30 * time.Second
	// lockPoll: the kernel has no flock with a deadline.
	lockPoll = 20 * time.Millisecond
)

// Locked runs a set-up while no other one works on this host. Whatever it
// starts with its context has the lock too: a tool or a child that outlives
// this process in the driver keeps the next set-up away until it is gone.
func Locked(ctx context.Context, root string, do func(ctx context.Context) (Report, error)) (Report, error) {
	f, err := lock(ctx, root)
	if err != nil {
		return Report{}, err
	}
	defer f.Close()
	return do(child.Holding(ctx, f))
}

// Lock keeps every other set-up and check of this host away until unlock is
// called. The kernel gives it back when the process dies.
func Lock(ctx context.Context, root string) (unlock func(), err error) {
	f, err := lock(ctx, root)
	if err != nil {
		return nil, err
	}
	return func() { f.Close() }, nil
}

// LockToLook is Lock for who changes nothing, and so may have no right to the
// lock: unseen then says why others are not seen, and nothing is locked.
func LockToLook(ctx context.Context, root string) (unlock func(), unseen string, err error) {
	unlock, err = Lock(ctx, root)
	var f *Failure
	if errors.As(err, &f) && f.Class == Stop {
		return func() {}, f.Error(), nil
	}
	return unlock, "", err
}

func lock(ctx context.Context, root string) (*os.File, error) {
	path := filepath.Join(root, lockFile)
	f, err := open(path)
	if err != nil {
		return nil, &Failure{Class: Stop, Object: "lock " + path, Found: err.Error(), Next: "run as root, with the host's /run writable"}
	}
	if err := await(ctx, f); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, &Failure{Class: Wait, Object: "lock " + path, Expected: "no other set-up or check of this host", Found: "one is at work", Again: lockAgain,
				Next: "wait for it: each ends by itself; if it does not, `fuser -v " + path + "` names what hangs, and only a reboot ends that"}
		}
		return nil, &Failure{Class: Retry, Object: "lock " + path, Found: err.Error()}
	}
	return f, nil
}

// open makes the file, or takes one that is there and may only be read: that is
// enough to lock it.
func open(path string) (*os.File, error) {
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		return f, nil
	}
	if f, readable := os.Open(path); readable == nil {
		return f, nil
	}
	return nil, err
}

// await takes the lock, or gives up when its holder keeps it.
func await(ctx context.Context, f *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, lockPatience)
	defer cancel()
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-tick.C:
		}
	}
}
