// Package process keeps child processes running: it starts them, restarts
// them when they die, stops them with a deadline and makes them die with
// their parent. It must not know what the children are.
package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Spec describes a child.
type Spec struct {
	Name string
	// Path is the program, Args its arguments without the program's name.
	Path string
	Args []string
	// Env is added to a minimal environment; the parent's is not inherited,
	// so that a variable such as KUBECONFIG never leaks into a component.
	Env []string
	Dir string
	// Log receives stdout and stderr, appended.
	Log string
	// Grace is how long the child may take to end after SIGTERM.
	Grace time.Duration
}

const (
	// Restarts are delayed a little more each time up to maxBackoff, so that
	// a child that can't start does not fill its log.
	minBackoff = 200 * time.Millisecond
	maxBackoff = 5 * time.Second
	// A child that ran this long is healthy: its next restart is fast again.
	healthyAfter = 10 * time.Second
)

// Keeper keeps one child running between Start and Stop.
type Keeper struct {
	spec Spec

	mu       sync.Mutex
	stop     chan time.Duration
	done     chan struct{}
	cmd      *exec.Cmd
	restarts int
}

// Keep returns a Keeper that has not started its child yet.
func Keep(spec Spec) *Keeper { return &Keeper{spec: spec} }

// Status of a child at one moment.
type Status struct {
	Name     string `json:"name"`
	PID      int    `json:"pid"`
	Running  bool   `json:"running"`
	Restarts int    `json:"restarts"`
}

// Name of the child.
func (k *Keeper) Name() string { return k.spec.Name }

// Status reports what runs now.
func (k *Keeper) Status() Status {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := Status{Name: k.spec.Name, Restarts: k.restarts}
	if k.cmd != nil {
		s.PID, s.Running = k.cmd.Process.Pid, true
	}
	return s
}

// Start launches the child and returns once the process exists. It does
// nothing when the child is already kept.
func (k *Keeper) Start() error {
	k.mu.Lock()
	if k.stop != nil {
		k.mu.Unlock()
		return nil
	}
	k.stop, k.done = make(chan time.Duration), make(chan struct{})
	stop, done := k.stop, k.done
	k.mu.Unlock()
	first := make(chan error, 1)
	go k.keep(stop, done, first)
	err := <-first
	if err != nil {
		k.forget()
	}
	return err
}

func (k *Keeper) forget() {
	k.mu.Lock()
	k.stop, k.done, k.cmd = nil, nil, nil
	k.mu.Unlock()
}

// Stop ends the child with SIGTERM, after the grace period with SIGKILL, and
// returns when it is gone. It stays down until Start.
func (k *Keeper) Stop() { k.halt(k.spec.Grace) }

// Suspend ends the child at once with SIGKILL and keeps it down until Start.
func (k *Keeper) Suspend() { k.halt(0) }

func (k *Keeper) halt(grace time.Duration) {
	k.mu.Lock()
	stop, done := k.stop, k.done
	k.mu.Unlock()
	if stop == nil {
		return
	}
	select {
	case stop <- grace:
		<-done
		k.forget()
	case <-done:
	}
}

// Kill ends the running process with SIGKILL; the keeper starts it again.
func (k *Keeper) Kill() error {
	k.mu.Lock()
	cmd := k.cmd
	k.mu.Unlock()
	if cmd == nil {
		return fmt.Errorf("%s: expected a running process, found none", k.spec.Name)
	}
	return cmd.Process.Kill()
}

// keep runs on one locked thread: the parent-death signal follows the thread
// that started the child, so that thread must live as long as the child.
func (k *Keeper) keep(stop <-chan time.Duration, done chan<- struct{}, first chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(done)
	backoff := minBackoff
	for started := false; ; started = true {
		began := time.Now()
		cmd, err := k.launch()
		if !started {
			first <- err
			if err != nil {
				return
			}
		}
		if err == nil {
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			select {
			case err = <-ended:
			case grace := <-stop:
				end(cmd, ended, grace)
				return
			}
			k.mu.Lock()
			k.cmd = nil
			k.restarts++
			k.mu.Unlock()
		}
		slog.Warn("component ended; it is started again", "component", k.spec.Name, "after", time.Since(began).Round(time.Millisecond), "error", err)
		if time.Since(began) > healthyAfter {
			backoff = minBackoff
		}
		timer := time.NewTimer(backoff)
		select {
		case <-timer.C:
		case <-stop:
			timer.Stop()
			return
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

func (k *Keeper) launch() (*exec.Cmd, error) {
	out, err := os.OpenFile(k.spec.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%s: log: %w", k.spec.Name, err)
	}
	defer out.Close()
	cmd := exec.Command(k.spec.Path, k.spec.Args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = k.spec.Dir, out, out
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + k.spec.Dir, "TMPDIR=" + os.TempDir()}, k.spec.Env...)
	cmd.SysProcAttr = attributes()
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", k.spec.Name, err)
	}
	k.mu.Lock()
	k.cmd = cmd
	k.mu.Unlock()
	return cmd, nil
}

func end(cmd *exec.Cmd, ended <-chan error, grace time.Duration) {
	if grace > 0 {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-ended:
			return
		case <-timer.C:
		}
	}
	_ = cmd.Process.Kill()
	<-ended
}

// Tail is the end of the child's log, for error messages.
func (k *Keeper) Tail() string { return Tail(k.spec.Log) }

// tailBytes is enough for the last lines that explain a death.
const tailBytes = 2000

// Tail reads the end of a log file.
func Tail(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > tailBytes {
		if _, err := f.Seek(-tailBytes, io.SeekEnd); err != nil {
			return ""
		}
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// maxDeaths is how often a child may die before it was ever ready: a wrong
// flag or a taken port does not heal.
const maxDeaths = 4

// Ready calls probe every interval until it returns nil. It gives up when ctx
// ends or when the child keeps dying, and then shows the end of its log.
func (k *Keeper) Ready(ctx context.Context, interval time.Duration, probe func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	before := k.Status().Restarts
	err := Until(ctx, interval, func(ctx context.Context) error {
		err := probe(ctx)
		if died := k.Status().Restarts - before; err != nil && died >= maxDeaths {
			cancel(fmt.Errorf("it died %d times", died))
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%s is not ready: %w; its log ends with:\n%s", k.spec.Name, err, k.Tail())
	}
	return nil
}

// Until calls probe every interval until it returns nil. It gives up when ctx
// ends, and then returns the probe's last error.
func Until(ctx context.Context, interval time.Duration, probe func(context.Context) error) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		last := probe(ctx)
		if last == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), last)
		case <-tick.C:
		}
	}
}

// Find locates a component's program: by the environment variable, beside the
// running binary, or in PATH.
func Find(name, variable string) (string, error) {
	if p := os.Getenv(variable); p != "" {
		return p, nil
	}
	self, err := os.Executable()
	if err == nil {
		p := filepath.Join(filepath.Dir(self), name)
		if _, err := os.Stat(p); err == nil {
			return p, nil
		}
	}
	p, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("program %s: expected it beside %s, in PATH or named by %s; found none: run `make build`", name, self, variable)
	}
	return p, nil
}
