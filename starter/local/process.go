package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Process is one started process. Start tells it from a later one that got
// the same pid.
type Process struct {
	Pid   int    `json:"pid,omitempty"`
	Start string `json:"start,omitempty"`
}

// startOf reads when a process began: clock ticks since boot on Linux, what
// ps says elsewhere. It is empty for a process that is gone or only waits to
// be reaped.
func startOf(pid int) string {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err == nil {
		return startIn(stat)
	}
	if _, err := os.Stat("/proc/self/stat"); err == nil {
		return ""
	}
	out, err := exec.Command("ps", "-o", "lstart=", "-p", strconv.Itoa(pid)).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

// startIn takes the start from a line of /proc/PID/stat (proc_pid_stat(5)). A
// killed process turns into a zombie with its first thread; as long as others
// remain its ports and locks are still taken, so it counts as running.
func startIn(stat []byte) string {
	// The name before it may hold spaces and brackets: count from its end.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	const state, threads, start = 0, 17, 19
	if len(fields) <= start || fields[state] == "X" || fields[state] == "Z" && fields[threads] == "1" {
		return ""
	}
	return fields[start]
}

func (p Process) alive() bool { return p.Pid > 0 && p.Start != "" && startOf(p.Pid) == p.Start }

// launch starts a program that outlives this process, its output in a log.
func launch(program string, args, env []string, logFile string) (Process, *exec.Cmd, error) {
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return Process{}, nil, fmt.Errorf("log of %s: %w", filepath.Base(program), err)
	}
	defer log.Close()
	cmd := exec.Command(program, args...)
	cmd.Env = env
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = filepath.Dir(logFile)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return Process{}, nil, fmt.Errorf("start %s: %w", program, err)
	}
	return Process{Pid: cmd.Process.Pid, Start: startOf(cmd.Process.Pid)}, cmd, nil
}

// lookEvery is how often a process is looked at while it starts or stops.
const lookEvery = 50 * time.Millisecond

// stop asks a process to end and waits until it has.
func (p Process) stop(ctx context.Context, name string, limit time.Duration) error {
	if !p.alive() {
		return nil
	}
	if err := syscall.Kill(p.Pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("stop %s (pid %d): %w", name, p.Pid, err)
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for p.alive() {
		select {
		case <-limited.Done():
			return fmt.Errorf("%s (pid %d) still runs %s after SIGTERM: look at its log; it is safe to kill, runs go on at the next `refit up`", name, p.Pid, limit)
		case <-tick.C:
		}
	}
	return nil
}

// find looks for a program beside our own binary, then in PATH.
func find(name, beside, hint string) (string, error) {
	own := filepath.Join(beside, name)
	if info, err := os.Stat(own); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
		return own, nil
	}
	if path, err := exec.LookPath(name); err == nil {
		return filepath.Abs(path)
	}
	return "", fmt.Errorf("program %s: expected in %s or in PATH, found in neither; %s", name, beside, hint)
}

// lastLines is the end of a log, for an error that points at it.
func lastLines(file string, n int) string {
	content, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimRight(string(content), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
