package helm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
)

const (
	// killGrace is what a child may take beyond its own deadline to record a
	// failed revision before it is killed.
	killGrace = 10 * time.Second
	// reportLine is the longest line a child may print.
	reportLine = 1 << 20
)

// runChild starts the engine, feeds it, and waits for its last word.
func runChild(ctx context.Context, c *kube.Client, r UpgradeRequest, engine string) (revision int, err error) {
	object := fmt.Sprintf("helm upgrade of release %s/%s", r.Namespace, r.Release)
	kubeconfig, err := c.Kubeconfig()
	if err != nil {
		return 0, finding.Finding{Object: object, Expected: "a kubeconfig for the child process", Found: err.Error()}.Error(finding.Stop)
	}
	input, err := json.Marshal(order{
		Kubeconfig: kubeconfig, Target: r.Target, Namespace: r.Namespace, Release: r.Release,
		Chart: toWire(r.Chart), Values: Merge(r.Values), Pins: r.Pins, Holder: r.Holder, Engine: engine,
		Description: r.description(), Limit: r.Limit,
	})
	if err != nil {
		return 0, fmt.Errorf("%s: %w", object, err)
	}
	ctx, cancel := context.WithTimeout(ctx, r.Limit+killGrace)
	defer cancel()
	path, err := executable()
	if err != nil {
		return 0, err
	}
	// No context in the command: killing is done below, for the whole group.
	cmd := exec.Command(path, childArgument)
	cmd.SysProcAttr = childAttributes()
	// A plugin that keeps the pipes open must not keep Wait waiting.
	cmd.WaitDelay = killGrace
	cmd.Stdin = bytes.NewReader(input)
	complaints := &tail{limit: 4 << 10}
	cmd.Stderr = complaints
	stdout, feed := io.Pipe()
	cmd.Stdout = feed

	ended := start(cmd, feed)
	listening := listen(stdout, r)
	beat := heartbeats(r, listening)
	defer beat()
	select {
	case err = <-ended:
	case <-ctx.Done():
		kill(cmd)
		<-ended
		err = context.Cause(ctx)
	}
	last := listening.wait()
	switch {
	case last.Done && last.Failure == nil:
		return last.Revision, nil
	case last.Done && last.Class == lease.Locked:
		return 0, lease.LockedError(*last.Failure)
	case last.Done:
		return 0, last.Failure.Error(finding.Class(last.Class))
	case errors.Is(ctx.Err(), context.Canceled):
		return 0, err // Temporal must see the cancellation, or the pause, as such
	}
	f := finding.Finding{Object: object, Expected: "an answer of its child process", Found: fmt.Sprintf("%v", err)}
	if text := complaints.String(); text != "" {
		f.Found += ": " + text
	}
	if errors.Is(err, context.DeadlineExceeded) {
		f.Expected, f.Found = "to end within "+r.Limit.String(), "killed; last: "+listening.note()
		f.Next = "look at the release's objects; a retry marks the pending revision failed and upgrades anew"
		return 0, f.Error(finding.Stop)
	}
	// The child was killed or crashed: the next attempt recovers.
	return 0, f.Error(finding.Retry)
}

// start runs the command on a thread of its own that lives as long as the
// child: the kernel sends the parent-death signal when that thread ends.
func start(cmd *exec.Cmd, feed *io.PipeWriter) <-chan error {
	ended := make(chan error, 1)
	started := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		close(started)
		if err == nil {
			err = cmd.Wait()
		}
		feed.Close()
		ended <- err
	}()
	<-started
	return ended
}

// listener reads a child's reports.
type listener struct {
	mu   sync.Mutex
	text string
	end  report
	done chan struct{}
}

func listen(stdout io.Reader, r UpgradeRequest) *listener {
	l := &listener{done: make(chan struct{})}
	go func() {
		defer close(l.done)
		scanner := bufio.NewScanner(stdout)
		scanner.Buffer(nil, reportLine)
		for scanner.Scan() {
			var line report
			if json.Unmarshal(scanner.Bytes(), &line) != nil {
				continue // a library that prints to stdout
			}
			l.mu.Lock()
			if line.Done {
				l.end = line
			} else {
				l.text = r.Masker.String(line.Note)
			}
			l.mu.Unlock()
		}
		// A line beyond the limit must not block the child.
		_, _ = io.Copy(io.Discard, stdout)
	}()
	return l
}

func (l *listener) wait() report {
	<-l.done
	return l.end
}

func (l *listener) note() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text
}

// heartbeats calls the request's heartbeat until the returned stop is called.
func heartbeats(r UpgradeRequest, l *listener) (stop func()) {
	if r.Heartbeat == nil {
		return func() {}
	}
	quit, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for {
			r.Heartbeat(l.note())
			select {
			case <-quit:
				return
			case <-ticker.C:
			}
		}
	}()
	return func() { close(quit); <-stopped }
}

// tail keeps the end of what is written.
type tail struct {
	limit int
	mu    sync.Mutex
	text  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if over := len(t.text) - t.limit; over > 0 {
		t.text = t.text[over:]
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.text))
}
