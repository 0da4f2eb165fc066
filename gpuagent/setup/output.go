package setup

import (
	"bytes"
	"context"
	"os/exec"
	"sync"
	"time"
)

// wedgedAfter is how long a killed tool may take to go: one that the driver
// holds in the kernel never does.
const wedgedAfter = 5 * time.Second

// Output runs a command of a context with a deadline and returns what it said.
// A tool that survives its own kill is left behind, not waited for.
func Output(ctx context.Context, cmd *exec.Cmd) (string, error) {
	var out shared
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, time.Second
	if err := cmd.Start(); err != nil {
		return "", err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return out.String(), err
	case <-ctx.Done():
	}
	late := time.NewTimer(wedgedAfter)
	defer late.Stop()
	select {
	case err := <-done:
		return out.String(), err
	case <-late.C:
		return out.String(), &Failure{Class: Stop, Object: cmd.Path, Expected: "to end when killed", Found: "it hangs in the kernel", Next: "reboot the host"}
	}
}

// shared is a buffer that a tool left behind may still write to.
type shared struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *shared) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *shared) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
