//go:build !linux

// Package proc tells processes apart and proves that they are dead, which
// needs Linux. Elsewhere nothing is started, so nothing is left to end.
package proc

import (
	"errors"
	"syscall"
)

// ID names a process for good.
type ID struct {
	PID   int    `json:"pid,omitempty"`
	Ticks string `json:"ticks,omitempty"`
}

// Supported says whether this system can run pods as processes.
func Supported() error {
	return errors.New("pods as local processes: expected Linux, with /proc and pidfd")
}

// Identify knows no process here.
func Identify(int) (ID, bool) { return ID{}, false }

// Alive is false.
func (ID) Alive() bool { return false }

// SignalGroup does nothing.
func (ID) SignalGroup(syscall.Signal) {}

// Wait returns at once.
func (ID) Wait() error { return nil }

// Marked finds nothing.
func Marked(string, string) []int { return nil }

// End has nothing to end.
func End(string, string) error { return nil }
