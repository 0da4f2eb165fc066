package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/sandbox/procnode/proc"
)

// container is one container. Its fields are written by the goroutine of run,
// under the pod's lock, except next.
type container struct {
	pod  *Pod
	name string
	init bool
	// kills holds one request to end the present process.
	kills chan request

	spec corev1.Container
	// next is the specification from the next start on.
	next     *corev1.Container
	id       proc.ID
	env      map[string]string
	restarts int32
	// again says that the next start is a restart.
	again     bool
	state     corev1.ContainerState
	last      corev1.ContainerState
	ready     bool
	startedOK bool
	finished  bool
	killed    string
}

// request is a wish to end a process: a probe's, or of a new image.
type request struct {
	why   string
	grace time.Duration
}

func newContainer(p *Pod, spec corev1.Container, init bool) *container {
	reason := "ContainerCreating"
	if init {
		reason = "PodInitializing"
	}
	return &container{
		pod: p, name: spec.Name, init: init, spec: *spec.DeepCopy(), kills: make(chan request, 1),
		state: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}},
	}
}

// image is the one that runs, or will from the next start on.
func (c *container) image() string {
	if c.next != nil {
		return c.next.Image
	}
	return c.spec.Image
}

// ask requests the end of the present process; one request is enough.
func (c *container) ask(why string, grace time.Duration) {
	select {
	case c.kills <- request{why, grace}:
	default:
	}
}

const (
	// The longest delay between restarts, and how long a process must have run
	// for the delays to begin anew: the kubelet's.
	longestBackoff = 5 * time.Minute
	forgetAfter    = 10 * time.Minute
)

// unknownExit is the exit code of a process that was adopted: only a parent is
// told the real one.
const unknownExit = 255

// run starts the container and starts it again until its restart policy or the
// end of the pod says that it is over.
func (c *container) run() {
	p, backoff := c.pod, time.Duration(0)
	for {
		p.mu.Lock()
		finished, id := c.finished, c.id
		p.mu.Unlock()
		if finished || p.isStopping() {
			return
		}
		began := time.Now()
		exited := c.adopt(id)
		if exited == nil {
			var err error
			if exited, err = c.start(); err != nil {
				if !c.refuse(err) {
					return
				}
				continue
			}
		}
		if !c.ended(c.supervise(exited)) {
			return
		}
		if time.Since(began) > forgetAfter {
			backoff = 0
		}
		if !c.rest(backoff) {
			return
		}
		// The first restart is immediate.
		backoff = min(max(2*backoff, p.host.Backoff), longestBackoff)
	}
}

// adopt waits for a process that an earlier node process started; the channel
// is nil when there is none.
func (c *container) adopt(id proc.ID) <-chan int {
	if !id.Alive() {
		return nil
	}
	exited := make(chan int, 1)
	go func() {
		if err := id.Wait(); err != nil {
			c.pod.log.Error("an adopted process can't be waited for", "container", c.name, "error", err)
		}
		exited <- unknownExit
	}()
	return exited
}

// sweep proves that nothing of the container's former life is left.
func (c *container) sweep() error { return proc.End(containerMark, c.mark()) }

func (c *container) mark() string { return c.pod.uid + "/" + c.name }

// start launches the process. Its output goes to a file, which outlives the
// node process as the process itself does.
func (c *container) start() (<-chan int, error) {
	p := c.pod
	p.mu.Lock()
	if c.next != nil {
		c.spec, c.next = *c.next, nil
	}
	restarts := c.restarts
	if c.again {
		restarts++
	}
	p.mu.Unlock()
	// A request that came too late was for the former process.
	select {
	case <-c.kills:
	default:
	}
	if err := c.sweep(); err != nil {
		return nil, err
	}
	line, env, err := c.prepare()
	if err != nil {
		return nil, err
	}
	out, err := os.OpenFile(c.logFile(restarts), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := command(line, env, c.workDir())
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = out, out, &syscall.SysProcAttr{Setsid: true}
	if err := os.MkdirAll(cmd.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, &startError{"RunContainerError", err}
	}
	exited := make(chan int, 1)
	// A process that ended at once is a zombie until it is waited for, and has
	// no identity: its end is seen below.
	id, _ := proc.Identify(cmd.Process.Pid)
	p.update(func() {
		c.id, c.env, c.killed, c.restarts, c.again = id, env, "", restarts, false
		c.state = corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}}
		c.startedOK = c.spec.StartupProbe == nil
		c.ready = c.startedOK && c.spec.ReadinessProbe == nil && !c.init
	})
	go func() {
		// The exit code says all; there are no pipes that could fail.
		_ = cmd.Wait()
		exited <- exitCode(cmd.ProcessState)
	}()
	return exited, nil
}

func (c *container) workDir() string { return filepath.Join(c.pod.dir, "work", c.name) }

func (c *container) logFile(restart int32) string {
	return filepath.Join(c.pod.dir, fmt.Sprintf("%s.%d.log", c.name, restart))
}

func exitCode(s *os.ProcessState) int {
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return s.ExitCode()
}

// startError carries the reason that Kubernetes shows.
type startError struct {
	reason string
	err    error
}

func (e *startError) Error() string { return e.err.Error() }
func (e *startError) Unwrap() error { return e.err }

// refuse shows why the container does not start and waits before the next
// attempt; false when the pod is to stop.
func (c *container) refuse(err error) bool {
	reason := "CreateContainerError"
	var known *startError
	if errors.As(err, &known) {
		reason = known.reason
	}
	c.pod.log.Warn("a container can't start", "container", c.name, "reason", reason, "error", err)
	c.pod.event(corev1.EventTypeWarning, "Failed", fmt.Sprintf("container %s: %v", c.name, err))
	c.pod.update(func() {
		c.state = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: err.Error()}}
	})
	return c.pod.pause(retryEvery)
}

// supervise probes the process until it ends, or ends it when the pod stops or
// somebody asks.
func (c *container) supervise(exited <-chan int) int {
	p := c.pod
	ctx, cancel := context.WithCancel(context.Background())
	var probes sync.WaitGroup
	defer probes.Wait()
	defer cancel()
	c.probe(ctx, &probes)
	probes.Go(func() { c.noteTimes(ctx) })
	select {
	case code := <-exited:
		return code
	case r := <-c.kills:
		p.event(corev1.EventTypeNormal, "Killing", fmt.Sprintf("container %s: %s", c.name, r.why))
		p.update(func() { c.killed = r.why })
		return c.terminate(exited, r.grace)
	case <-p.stopping:
		p.mu.Lock()
		grace := p.grace
		p.mu.Unlock()
		return c.terminate(exited, grace)
	}
}

// terminate runs the preStop hook, sends SIGTERM and, when the grace period is
// over, SIGKILL.
func (c *container) terminate(exited <-chan int, grace time.Duration) int {
	ctx, cancel := context.WithTimeout(c.pod.hurry, grace)
	defer cancel()
	if ctx.Err() == nil {
		c.preStop(ctx)
		c.id.SignalGroup(syscall.SIGTERM)
		select {
		case code := <-exited:
			return code
		case <-ctx.Done():
		}
	}
	c.id.SignalGroup(syscall.SIGKILL)
	return <-exited
}

func (c *container) preStop(ctx context.Context) {
	if c.spec.Lifecycle == nil || c.spec.Lifecycle.PreStop == nil {
		return
	}
	ok, out := true, ""
	switch hook := c.spec.Lifecycle.PreStop; {
	case hook.Exec != nil:
		ok, out = c.tryExec(ctx, hook.Exec.Command)
	case hook.HTTPGet != nil:
		ok, out = c.tryHTTP(ctx, hook.HTTPGet)
	case hook.Sleep != nil:
		timer := time.NewTimer(time.Duration(hook.Sleep.Seconds) * time.Second)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	if !ok {
		c.pod.event(corev1.EventTypeWarning, "FailedPreStopHook", fmt.Sprintf("container %s: %s", c.name, out))
	}
}

// ended notes how the process ended; false when it is not started again.
func (c *container) ended(code int) bool {
	p := c.pod
	if err := c.sweep(); err != nil {
		// The next start proves it again.
		p.log.Error("a container left processes behind", "container", c.name, "error", err)
	}
	var again bool
	p.update(func() {
		policy := p.object.Spec.RestartPolicy
		again = !p.isStopping() && (policy == corev1.RestartPolicyAlways && !c.init || policy != corev1.RestartPolicyNever && code != 0)
		reason := "Completed"
		if code != 0 {
			reason = "Error"
		}
		over := &corev1.ContainerStateTerminated{
			ExitCode: int32(code), Reason: reason, Message: c.killed, FinishedAt: metav1.Now(), ContainerID: c.containerID(),
		}
		if c.state.Running != nil {
			over.StartedAt = c.state.Running.StartedAt
		}
		c.state = corev1.ContainerState{Terminated: over}
		c.id, c.ready, c.startedOK, c.finished = proc.ID{}, false, false, !again
	})
	return again
}

// rest waits before a restart; false when the pod is to stop.
func (c *container) rest(backoff time.Duration) bool {
	p := c.pod
	if backoff > 0 {
		p.event(corev1.EventTypeWarning, "BackOff", fmt.Sprintf("container %s: back-off %s before it is started again", c.name, backoff))
		p.update(func() {
			c.last = c.state
			c.state = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{
				Reason: "CrashLoopBackOff", Message: fmt.Sprintf("back-off %s restarting container %s", backoff, c.name),
			}}
		})
	}
	if !p.pause(backoff) {
		return false
	}
	p.update(func() {
		if c.state.Terminated != nil {
			c.last = c.state
		}
		c.again = true
	})
	return true
}

func (p *Pod) event(kind, reason, message string) {
	p.mu.Lock()
	object := p.object
	p.mu.Unlock()
	p.host.Events.Event(object, kind, reason, message)
}
