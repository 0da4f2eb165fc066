package child

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Tool runs a program that is not ours, by the same rules as a child: it has a
// deadline, at which it and what it started are killed; it dies with this
// process; while one survives its kill no other is started under its name. It
// returns what the program said, also with an error.
func Tool(ctx context.Context, deadline time.Duration, program string, args ...string) (string, error) {
	return defaultRunner.tool(ctx, deadline, program, args...)
}

func (r *runner) tool(ctx context.Context, deadline time.Duration, program string, args ...string) (string, error) {
	name := filepath.Base(program)
	key := "tool " + name
	if w, ok := r.blocked(key); ok {
		return "", w
	}
	log, err := memory(name, "log")
	if err != nil {
		return "", err
	}
	cmd := exec.Command(program, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = Env(), log, log
	cmd.ExtraFiles, cmd.SysProcAttr = held(ctx), attributes()
	p := &process{spec: Spec{Name: name, Timeout: deadline}, cmd: cmd, log: log}
	defer p.close()
	waited, err := r.supervise(ctx, p, key)
	said := strings.TrimSpace(p.stderr())
	if err != nil {
		return said, err
	}
	var exit *exec.ExitError
	if errors.As(waited, &exit) {
		return said, fmt.Errorf("%s: %w: %s", name, exit, limit(said, logLine))
	}
	return said, waited
}

// logLine bounds what an error repeats of a program's words.
const logLine = 1000

type heldKey struct{}

// Holding gives every child and tool that is started with the context the file
// too, which must be a lock: the kernel gives a lock back only when the last
// process that has it open is gone, so one that outlives this process in the
// driver keeps the next run away.
func Holding(ctx context.Context, lock *os.File) context.Context {
	return context.WithValue(ctx, heldKey{}, append(held(ctx), lock))
}

func held(ctx context.Context) []*os.File {
	files, _ := ctx.Value(heldKey{}).([]*os.File)
	return files[:len(files):len(files)]
}
