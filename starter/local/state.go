// Package local runs the embedded default for people without a Temporal
// cluster: a Temporal dev server on a file in the user's state folder and a
// worker beside it, both found again later by pid and start time. It must not
// know what runs on them.
package local

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// State is what `refit up` started.
type State struct {
	Folder  string `json:"-"`
	Address string `json:"address"`
	UI      string `json:"ui"`
	// Identity is the age identity file made for this host, if one was.
	Identity string  `json:"identity,omitempty"`
	Server   Process `json:"server"`
	Worker   Process `json:"worker"`
	// Clusters is what the worker was given, as in REFIT_CLUSTERS.
	Clusters string `json:"clusters"`
}

// Running tells whether the server is still the process that was started.
func (s State) Running() bool { return s.Server.alive() }

// folder is $XDG_STATE_HOME/refit, by default ~/.local/state/refit.
func folder(getenv func(string) string) (string, error) {
	if base := getenv("XDG_STATE_HOME"); base != "" {
		return filepath.Join(base, "refit"), nil
	}
	home := getenv("HOME")
	if home == "" {
		return "", errors.New("neither XDG_STATE_HOME nor HOME is set: the state folder has no place")
	}
	return filepath.Join(home, ".local", "state", "refit"), nil
}

// Read returns the recorded state; without a record it is empty.
func Read(getenv func(string) string) (State, error) {
	dir, err := folder(getenv)
	if err != nil {
		return State{}, err
	}
	s := State{Folder: dir}
	content, err := os.ReadFile(s.file("up.json"))
	if errors.Is(err, os.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, fmt.Errorf("state of refit up: %w", err)
	}
	if err := json.Unmarshal(content, &s); err != nil {
		return s, fmt.Errorf("state of refit up in %s: %w; remove the file if no server runs", s.file("up.json"), err)
	}
	return s, nil
}

func (s State) file(name string) string { return filepath.Join(s.Folder, name) }

// write replaces the record in one step.
func (s State) write() error {
	content, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("state of refit up: %w", err)
	}
	partial := s.file("up.json.partial")
	if err := os.WriteFile(partial, append(content, '\n'), 0o600); err != nil {
		return fmt.Errorf("state of refit up: %w", err)
	}
	if err := os.Rename(partial, s.file("up.json")); err != nil {
		return fmt.Errorf("state of refit up: %w", err)
	}
	return nil
}

// lock keeps a second `refit up` or `down` away while one works; it goes with
// the process.
func (s State) lock() (release func(), err error) {
	if err := os.MkdirAll(s.Folder, 0o700); err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	f, err := os.OpenFile(s.file("lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another refit up or down is at work on %s: wait for it to end", s.Folder)
	}
	return func() { f.Close() }, nil
}
