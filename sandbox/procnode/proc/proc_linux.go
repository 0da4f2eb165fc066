// Package proc tells processes apart and proves that they are dead. It finds
// every process of a pod, wherever it went, by a mark in the environment that
// children inherit. It must not know what a pod is.
package proc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ID names a process for good: numbers are given out again, a number together
// with the moment of its start (in clock ticks since boot) is not.
type ID struct {
	PID   int    `json:"pid,omitempty"`
	Ticks string `json:"ticks,omitempty"`
}

// Supported says whether this system can run pods as processes.
func Supported() error { return nil }

// Identify reads the identity of a live process; a zombie is dead.
func Identify(pid int) (ID, bool) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ID{}, false
	}
	// The command's name stands in brackets and may hold anything.
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	const state, started = 0, 19
	if len(fields) <= started || fields[state] == "Z" || fields[state] == "X" {
		return ID{}, false
	}
	return ID{PID: pid, Ticks: fields[started]}, true
}

// Alive reports whether this very process still runs.
func (id ID) Alive() bool {
	now, ok := Identify(id.PID)
	return ok && now == id
}

// SignalGroup signals the process and its group. Once the leader is dead the
// group's number may be another's: then it does nothing, and End finds what is
// left.
func (id ID) SignalGroup(signal syscall.Signal) {
	if id.Alive() {
		_ = unix.Kill(-id.PID, signal)
	}
}

// deathLimit is how long a killed process may take to be gone; longer, it
// hangs in the kernel.
const deathLimit = 10 * time.Second

// Wait returns when the process is gone. It works for processes that are not
// children of this one.
func (id ID) Wait() error {
	return whileAlive(id.PID, id.Alive, func(fd int) error { return poll(fd, -1) })
}

// whileAlive runs do on a descriptor of the process, which can't come to mean
// another; check is asked after it is open.
func whileAlive(pid int, check func() bool, do func(fd int) error) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	if !check() {
		return nil
	}
	return do(fd)
}

func poll(fd, milliseconds int) error {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, milliseconds)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return os.ErrDeadlineExceeded
		default:
			return nil
		}
	}
}

// Marked lists the live processes with the variable in their environment.
func Marked(variable, value string) []int {
	want := []byte(variable + "=" + value)
	var found []int
	for _, pid := range all() {
		if marked(pid, want) {
			found = append(found, pid)
		}
	}
	return found
}

func all() []int {
	// Glob fails only for a bad pattern.
	paths, _ := filepath.Glob("/proc/[0-9]*")
	var pids []int
	for _, path := range paths {
		if pid, err := strconv.Atoi(filepath.Base(path)); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// marked is false for a dead process, whose environment is empty.
func marked(pid int, want []byte) bool {
	environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return false
	}
	for entry := range bytes.SplitSeq(environment, []byte{0}) {
		if bytes.Equal(entry, want) {
			return true
		}
	}
	return false
}

// generations bounds the rounds of End: a process that forks faster than it is
// killed is not ended.
const generations = 20

// End kills every process with the variable in its environment and returns
// when none is left. An error means that some may live.
func End(variable, value string) error {
	want := []byte(variable + "=" + value)
	for range generations {
		pids := Marked(variable, value)
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			err := whileAlive(pid, func() bool { return marked(pid, want) }, func(fd int) error {
				if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
					return err
				}
				return poll(fd, int(deathLimit.Milliseconds()))
			})
			if err != nil {
				return fmt.Errorf("process %d of %s=%s: expected it gone after SIGKILL: %w", pid, variable, value, err)
			}
		}
	}
	return fmt.Errorf("processes of %s=%s: expected none after %d rounds of SIGKILL, found %v", variable, value, generations, Marked(variable, value))
}
