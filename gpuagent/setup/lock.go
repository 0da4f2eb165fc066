package setup

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
)

// lockFile is below the host's root: the agent and a person at the host meet
// there, whichever container each of them runs in.
const lockFile = "run/refit-gpuagent.lock"

// Lock keeps every other set-up of this host away until unlock is called. The
// kernel gives it back when the process dies.
func Lock(root string) (unlock func(), err error) {
	path := filepath.Join(root, lockFile)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, &Failure{Class: Stop, Object: "lock " + path, Found: err.Error(), Next: "run as root, with the host's /run writable"}
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, &Failure{Class: Stop, Object: "lock " + path, Found: err.Error(), Next: "run as root, with the host's /run writable"}
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return func() { f.Close() }, nil
	}
	f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, &Failure{Class: Wait, Object: "lock " + path, Expected: "no other set-up of this host", Found: "one is at work",
			Next: "wait for it: a set-up ends by itself"}
	}
	return nil, &Failure{Class: Retry, Object: "lock " + path, Found: err.Error()}
}
