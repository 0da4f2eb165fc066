package protocol

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"

	"github.com/refit-run/refit/activities/finding"
)

// Plan is what a run is going to do, shown before anything changes and in the
// receipt. `refit plan` prints it.
type Plan struct {
	// Digest is the SHA-256 of the plan's canonical JSON without times.
	Digest   string            `json:"digest"`
	From     map[string]string `json:"from,omitempty"`
	To       map[string]string `json:"to,omitempty"`
	Changes  []PlannedChange   `json:"changes,omitempty"`
	Diff     string            `json:"diff,omitempty"` // masked; cut at 48 KiB
	Forecast []finding.Finding `json:"forecast,omitempty"`
	Accepted []string          `json:"accepted,omitempty"` // rows not met, acknowledged by the plan
	Batches  []PlannedBatch    `json:"batches,omitempty"`
	// LeftOff is auto update that can't come back because no rollout of the
	// plan takes the pods that it leaves outdated.
	LeftOff []finding.Finding `json:"leftOff,omitempty"`
}

// DigestOf is the SHA-256 of a value's canonical JSON (struct fields in their
// order, map keys sorted). A value that JSON can't hold is a defect: it panics,
// which fails the workflow's task and not its run.
func DigestOf(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// PlannedChange is one object of the diff.
type PlannedChange struct {
	Action string `json:"action"`
	Object string `json:"object"`
	Lines  int    `json:"lines"`
}

// PlannedBatch is one batch of one rollout: its stage name, how many hosts and
// the first of them (at most 20).
type PlannedBatch struct {
	Stage string   `json:"stage"`
	Total int      `json:"total"`
	Hosts []string `json:"hosts"`
}
