package child

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// grace is how long a killed process may take to go: the kernel ends one that
// is not held in a driver within milliseconds, also on a loaded host.
const grace = 5 * time.Second

// logLimit bounds what is kept of a child's log.
const logLimit = 64 << 10

// Spec is one call.
type Spec struct {
	Name    string
	Request any
	// Env is the whole environment of the child; nil is Env().
	Env     []string
	Timeout time.Duration
	// Reply is a pointer that the function's value is decoded into.
	Reply any
	// Key groups calls that a wedged child blocks, usually the GPU's UUID;
	// empty is Name.
	Key string
	// Stop, when closed, asks the function for its reply before the deadline
	// by ending its context.
	Stop <-chan struct{}
}

// Env is this process's environment for a child: without LD_PRELOAD, so that
// no interposer answers in the driver's place, and with the additions, each
// KEY=value, in place of earlier values.
func Env(add ...string) []string {
	drop := map[string]bool{"LD_PRELOAD": true}
	for _, kv := range add {
		key, _, _ := strings.Cut(kv, "=")
		drop[key] = true
	}
	var env []string
	for _, kv := range os.Environ() {
		if key, _, _ := strings.Cut(kv, "="); !drop[key] {
			env = append(env, kv)
		}
	}
	return append(env, add...)
}

// Run starts one child and waits for its reply. The errors that tell what
// became of the child are Error, Exit, Crash, Timeout and Wedged.
func Run(ctx context.Context, spec Spec) error { return defaultRunner.run(ctx, spec) }

var defaultRunner = &runner{wait: (*exec.Cmd).Wait, proc: "/proc", grace: grace, wedged: map[string][]Wedged{}}

// runner holds what a test replaces: a wedged child cannot be made from user
// space.
type runner struct {
	wait  func(*exec.Cmd) error
	proc  string
	grace time.Duration

	mu     sync.Mutex
	wedged map[string][]Wedged
}

func (r *runner) run(ctx context.Context, spec Spec) error {
	key := spec.Key
	if key == "" {
		key = spec.Name
	}
	if w, ok := r.blocked(key); ok {
		return w
	}
	if spec.Timeout <= 0 {
		return fmt.Errorf("child %s: a call needs a deadline", spec.Name)
	}
	p, err := prepare(ctx, spec)
	if err != nil {
		return err
	}
	defer p.close()
	waited, err := r.supervise(ctx, p, key)
	if err != nil {
		return err
	}
	return p.outcome(waited)
}

// supervise starts the process and waits for its end; waited is what Wait said
// of one that ended by itself, err tells that it was killed or never started.
func (r *runner) supervise(ctx context.Context, p *process, key string) (waited, err error) {
	ended, err := r.start(p)
	if err != nil {
		return nil, fmt.Errorf("start child %s: %w", p.spec.Name, err)
	}
	deadline := time.NewTimer(p.spec.Timeout)
	defer deadline.Stop()
	stop := p.spec.Stop
	for {
		select {
		case waited := <-ended:
			return waited, nil
		case <-stop:
			stop = nil
			p.askForReply()
		case <-ctx.Done():
			return nil, r.kill(p, key, ended, fmt.Errorf("child %s: %w", p.spec.Name, context.Cause(ctx)))
		case <-deadline.C:
			return nil, r.kill(p, key, ended, nil)
		}
	}
}

// start runs the child from a thread that lives as long as the child: the
// parent-death signal is sent when the starting thread ends, not the process.
func (r *runner) start(p *process) (<-chan error, error) {
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			ended <- r.wait(p.cmd)
		}
	}()
	return ended, <-started
}

// kill ends the child and waits for it to go; why is the answer of a cancelled
// call, nil of one past its deadline.
func (r *runner) kill(p *process, key string, ended <-chan error, why error) error {
	pid := p.cmd.Process.Pid
	_ = syscall.Kill(-pid, syscall.SIGKILL)
	grace := time.NewTimer(r.grace)
	defer grace.Stop()
	select {
	case <-ended:
		if why != nil {
			return why
		}
		log := p.stderr()
		return Timeout{Name: p.spec.Name, After: p.spec.Timeout, Stage: lastStage(log), Stderr: log}
	case <-grace.C:
	}
	log := p.stderr()
	w := Wedged{Name: p.spec.Name, PID: pid, Stage: lastStage(log), Stderr: log}
	w.State, w.WChan, w.Stack = kernelState(r.proc, pid)
	r.hold(key, w, ended)
	return w
}

func (r *runner) blocked(key string) (Wedged, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.wedged[key]) == 0 {
		return Wedged{}, false
	}
	return r.wedged[key][0], true
}

// hold keeps further calls away from what the child hangs on until it is gone.
func (r *runner) hold(key string, w Wedged, ended <-chan error) {
	r.mu.Lock()
	r.wedged[key] = append(r.wedged[key], w)
	r.mu.Unlock()
	go func() {
		<-ended
		r.mu.Lock()
		defer r.mu.Unlock()
		r.wedged[key] = slices.DeleteFunc(r.wedged[key], func(other Wedged) bool { return other.PID == w.PID })
	}()
}

// process is one child with its files. They are anonymous memory, not pipes: a
// wedged child would hold the reader of a pipe for ever, and a full one would
// hold the child.
type process struct {
	spec                 Spec
	cmd                  *exec.Cmd
	request, answer, log *os.File
	// The pipe whose end asks for the reply, where the call can be stopped.
	stopRead, stopWrite *os.File
}

func prepare(ctx context.Context, spec Spec) (*process, error) {
	p := &process{spec: spec}
	request, err := json.Marshal(spec.Request)
	if err != nil {
		return nil, fmt.Errorf("child %s: encode the request: %w", spec.Name, err)
	}
	in, err := json.Marshal(envelope{Timeout: spec.Timeout, Stop: spec.Stop != nil, Request: request})
	if err != nil {
		return nil, fmt.Errorf("child %s: encode the request: %w", spec.Name, err)
	}
	for _, f := range []struct {
		to   **os.File
		name string
	}{{&p.request, "request"}, {&p.answer, "reply"}, {&p.log, "log"}} {
		if *f.to, err = memory(spec.Name, f.name); err != nil {
			p.close()
			return nil, err
		}
	}
	// WriteAt leaves the offset, which the child shares, at the start.
	if _, err := p.request.WriteAt(in, 0); err != nil {
		p.close()
		return nil, fmt.Errorf("child %s: write its request: %w", spec.Name, err)
	}
	env := spec.Env
	if env == nil {
		env = Env()
	}
	inherited := []*os.File{p.answer}
	if spec.Stop != nil {
		if p.stopRead, p.stopWrite, err = os.Pipe(); err != nil {
			p.close()
			return nil, fmt.Errorf("child %s: make the pipe that stops it: %w", spec.Name, err)
		}
		inherited = append(inherited, p.stopRead)
	}
	inherited = append(inherited, held(ctx)...)
	// /proc/self/exe, not the path: a replaced agent keeps its own children.
	p.cmd = &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{os.Args[0], argument, spec.Name}, Env: env,
		Stdin: p.request, Stdout: p.log, Stderr: p.log, ExtraFiles: inherited,
		SysProcAttr: attributes(),
	}
	return p, nil
}

// attributes: a group of its own, so that what it starts is killed with it, and
// death with its parent.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

func memory(child, what string) (*os.File, error) {
	fd, err := unix.MemfdCreate("refit-"+what, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("child %s: make the file of its %s: %w", child, what, err)
	}
	return os.NewFile(uintptr(fd), what), nil
}

func (p *process) close() {
	for _, f := range []*os.File{p.request, p.answer, p.log, p.stopRead, p.stopWrite} {
		if f != nil {
			f.Close()
		}
	}
}

func (p *process) askForReply() {
	p.stopWrite.Close()
	p.stopWrite = nil
}

// outcome reads what a child that ended left behind.
func (p *process) outcome(waited error) error {
	log := p.stderr()
	stage := lastStage(log)
	var exit *exec.ExitError
	if errors.As(waited, &exit) {
		status, _ := exit.Sys().(syscall.WaitStatus)
		if status.Signaled() {
			return Crash{Name: p.spec.Name, Signal: unix.SignalName(status.Signal()), Stage: stage, Stderr: log}
		}
		if signal, ok := crashSignal(log); ok && exit.ExitCode() == 2 {
			return Crash{Name: p.spec.Name, Signal: signal, Stage: stage, Stderr: log}
		}
		return Exit{Name: p.spec.Name, Code: exit.ExitCode(), Stage: stage, Stderr: log}
	}
	if waited != nil {
		return fmt.Errorf("wait for child %s: %w", p.spec.Name, waited)
	}
	var out reply
	if err := json.NewDecoder(io.NewSectionReader(p.answer, 0, 1<<62)).Decode(&out); err != nil {
		// The library called exit: it ended the process with status 0.
		return Exit{Name: p.spec.Name, Stage: stage, Stderr: log}
	}
	if out.Error != nil {
		return Error{Name: p.spec.Name, Message: *out.Error}
	}
	if p.spec.Reply == nil {
		return nil
	}
	if err := json.Unmarshal(out.Value, p.spec.Reply); err != nil {
		return fmt.Errorf("child %s: decode its reply: %w", p.spec.Name, err)
	}
	return nil
}

func (p *process) stderr() string {
	b, _ := io.ReadAll(io.NewSectionReader(p.log, 0, 1<<62))
	if len(b) > logLimit {
		b = append(b[:logLimit/2:logLimit/2], b[len(b)-logLimit/2:]...)
	}
	return string(b)
}

// kernelState reads where the kernel holds a process: of its threads the one
// in an uninterruptible wait, because the first thread of a killed process is
// a zombie until the last one is gone. Each part may be hidden from this
// process and is empty then.
func kernelState(proc string, pid int) (state, wchan, stack string) {
	dir := filepath.Join(proc, strconv.Itoa(pid))
	state = threadState(dir)
	threads, _ := filepath.Glob(filepath.Join(dir, "task", "*"))
	for _, thread := range threads {
		if s := threadState(thread); s == "D" || !ended(s) && ended(state) {
			dir, state = thread, s
		}
		if state == "D" {
			break
		}
	}
	w, _ := os.ReadFile(filepath.Join(dir, "wchan"))
	k, _ := os.ReadFile(filepath.Join(dir, "stack"))
	return state, strings.TrimSpace(string(w)), strings.TrimSpace(string(k))
}

func ended(state string) bool { return state == "" || state == "Z" || state == "X" }

func threadState(dir string) string {
	stat, _ := os.ReadFile(filepath.Join(dir, "stat"))
	// The name in parentheses may hold anything, also a parenthesis.
	if _, rest, ok := strings.Cut(string(stat[strings.LastIndex(string(stat), ")")+1:]), " "); ok && rest != "" {
		return rest[:1]
	}
	return ""
}
