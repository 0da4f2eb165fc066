package openbao

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// FaultsFile in a member's folder tells it what to do wrong; it is read at
// every request.
const FaultsFile = "faults.json"

// Faults are what a member does wrong.
type Faults struct {
	Snapshot SnapshotFault `json:"snapshot,omitempty"`
	StepDown StepDownFault `json:"stepDown,omitempty"`
}

// SnapshotFault is what is wrong with a member's snapshots.
type SnapshotFault string

const (
	// SnapshotTruncated ends the archive early, with a reply that ends well.
	SnapshotTruncated SnapshotFault = "truncated"
	// SnapshotCorrupt changes a byte of the state after its checksum was taken.
	SnapshotCorrupt SnapshotFault = "corrupt"
	// SnapshotLocal gives out the member's own state although it is not active
	// and knows of no active member.
	SnapshotLocal SnapshotFault = "local"
)

// StepDownFault is what is wrong with step-downs.
type StepDownFault string

const (
	// StepDownIgnored answers as ever and does nothing.
	StepDownIgnored StepDownFault = "ignored"
	// StepDownLost does it and ends the connection without an answer.
	StepDownLost StepDownFault = "lost"
)

// Set writes the faults of the member whose folder it is given; none when f is
// empty.
func (f Faults) Set(dir string) error {
	path := filepath.Join(dir, FaultsFile)
	if f == (Faults{}) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	data, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".next", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".next", path)
}

func (s *Server) faults() (f Faults) {
	data, err := os.ReadFile(s.path(FaultsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return f
	}
	if err == nil {
		err = json.Unmarshal(data, &f)
	}
	if err != nil {
		s.log.Error("the file of faults can't be read", "error", err)
	}
	return f
}
