package pod

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	utilexec "k8s.io/utils/exec"

	"github.com/refit-run/refit/sandbox/procnode/environ"
)

// prepare makes the command line and the environment of the main process.
func (c *container) prepare() ([]string, map[string]string, error) {
	p := c.pod
	p.mu.Lock()
	object, where, spec := p.object.DeepCopy(), maps.Clone(p.volumes), c.spec
	p.mu.Unlock()
	image, ok := p.host.Images[spec.Image]
	if !ok {
		return nil, nil, &startError{"ErrImageNeverPull", fmt.Errorf("image %s: expected one of this node's, found none of that name", spec.Image)}
	}
	hostname := object.Spec.Hostname
	if hostname == "" {
		hostname = object.Name
	}
	path := os.Getenv("PATH")
	if image.Path != "" {
		path = image.Path + string(filepath.ListSeparator) + path
	}
	known := map[string]string{
		"HOSTNAME": hostname, "PATH": path, "HOME": c.workDir(), "TMPDIR": c.workDir(),
		IPVariable: p.ip.String(), DNSVariable: p.host.DNS, HostsVariable: p.host.Hosts,
	}
	maps.Copy(known, image.Env)
	maps.Copy(known, environ.Volumes(where))
	ctx, cancel := context.WithTimeout(p.hurry, apiTimeout)
	defer cancel()
	env, err := p.source(object).Environment(ctx, &spec, known)
	if err != nil {
		return nil, nil, &startError{"CreateContainerConfigError", err}
	}
	env[NodeMark], env[podMark], env[containerMark] = p.host.Mark, p.uid, c.mark()
	line := environ.CommandLine(image, &spec, env)
	if len(line) == 0 {
		return nil, nil, &startError{"CreateContainerConfigError", fmt.Errorf("image %s: expected a command in it or in the container, found none", spec.Image)}
	}
	return line, env, nil
}

// command is a process of the container; its program is looked for in the
// container's PATH, not in the node's.
func command(line []string, env map[string]string, dir string) *exec.Cmd {
	cmd := &exec.Cmd{Path: line[0], Args: line, Env: environ.List(env), Dir: dir}
	if !strings.Contains(line[0], "/") {
		cmd.Path, cmd.Err = lookPath(line[0], env["PATH"])
	}
	return cmd
}

func lookPath(name, path string) (string, error) {
	for _, dir := range filepath.SplitList(path) {
		file := filepath.Join(dir, name)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return file, nil
		}
	}
	return name, &exec.Error{Name: name, Err: exec.ErrNotFound}
}

// ErrNotRunning says that a container has no process to join.
var ErrNotRunning = errors.New("the container does not run")

// What a shell's caller sees when a program can't be run.
const (
	cannotRun = 126
	notFound  = 127
)

// outputGrace is how long output may come from children of a command that
// ended itself.
const outputGrace = 2 * time.Second

// Exec runs a command as the container would: with its environment, volumes
// and tools. A failure of the command is a CodeExitError; ctx kills it.
func (p *Pod) Exec(ctx context.Context, name string, line []string, in io.Reader, out, errOut io.Writer) error {
	c := p.find(name)
	if c == nil {
		return fmt.Errorf("container %q: %w", name, fs.ErrNotExist)
	}
	env, err := c.environment()
	if err != nil {
		return err
	}
	cmd := command(line, env, c.workDir())
	cmd.Stdout, cmd.Stderr = out, errOut
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = outputGrace
	if err := pipe(cmd, in); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		if errOut != nil {
			fmt.Fprintln(errOut, err)
		}
		code := cannotRun
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
			code = notFound
		}
		return utilexec.CodeExitError{Err: err, Code: code}
	}
	// The group, because a shell's children would live on.
	stop := context.AfterFunc(ctx, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	err = cmd.Wait()
	stop()
	if code := exitCode(cmd.ProcessState); code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("command %s: exit code %d", line[0], code), Code: code}
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		return nil
	}
	return err
}

// pipe feeds the command without making its end wait for the end of the input,
// which a client may never send: that is what setting Stdin would do.
func pipe(cmd *exec.Cmd, in io.Reader) error {
	if in == nil {
		return nil
	}
	w, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	go func() {
		// A command need not read its input to the end.
		_, _ = io.Copy(w, in)
		_ = w.Close()
	}()
	return nil
}

// environment is that of the running process; after an adoption it is made
// anew.
func (c *container) environment() (map[string]string, error) {
	c.pod.mu.Lock()
	running, env := c.state.Running != nil, c.env
	c.pod.mu.Unlock()
	if !running {
		return nil, fmt.Errorf("container %s: %w", c.name, ErrNotRunning)
	}
	if env != nil {
		return env, nil
	}
	_, env, err := c.prepare()
	if err != nil {
		return nil, err
	}
	c.pod.mu.Lock()
	c.env = env
	c.pod.mu.Unlock()
	return env, nil
}

// tryExec runs a probe or a hook; the text is its output.
func (c *container) tryExec(ctx context.Context, line []string) (bool, string) {
	var out bytes.Buffer
	err := c.pod.Exec(ctx, c.name, line, nil, &out, &out)
	if ctx.Err() != nil {
		return false, "timed out"
	}
	if err != nil {
		return false, fmt.Sprintf("%v: %s", err, bytes.TrimSpace(out.Bytes()))
	}
	return true, ""
}
