package cassandra

import (
	"slices"
	"strings"
	"time"
)

// Repaired is one row of system_distributed.parent_repair_history: the durable
// evidence of a repair, whoever heard of its end.
type Repaired struct {
	ID       string `json:"id"`
	Keyspace string `json:"keyspace"`
	// Node is the node part of the ID, which is a time UUID: the row does not
	// name the member that coordinated.
	Node      string            `json:"node"`
	Started   time.Time         `json:"started"`
	Finished  time.Time         `json:"finished,omitzero"`
	Exception string            `json:"exception,omitempty"`
	Options   map[string]string `json:"options,omitempty"`
	Tables    []string          `json:"tables,omitempty"`
	Ranges    []string          `json:"ranges,omitempty"`
}

// repairState is what the rows say about one repair.
type repairState int

const (
	notRepaired repairState = iota
	repairRuns
	// repairStays: it runs for longer than anybody has patience for.
	repairStays
	repairDone
)

// sought is the repair that the rows are searched for: one of the keyspace with
// all these tables that this member (its node part) has begun since, of the
// whole ring where it holds all of it.
type sought struct {
	keyspace, node string
	tables         []string
	whole          bool
	since          time.Time
}

// state judges the rows. A row without an end is of a repair that this
// member's process has not given up, however long ago it has begun: a process
// that starts anew makes IDs with another node part.
func (w sought) state(rows []Repaired, now time.Time, patience time.Duration) (repairState, Repaired) {
	out, which := notRepaired, Repaired{}
	for _, r := range rows {
		switch {
		case r.Exception != "" || !w.is(r):
		case !r.Finished.IsZero():
			return repairDone, r
		case now.Sub(r.Started) < patience:
			out, which = repairRuns, r
		case out == notRepaired:
			out, which = repairStays, r
		}
	}
	return out, which
}

// is says whether the row is of a repair like ours: full, of every table and
// range, with all members. auto_repair's are of parts.
func (w sought) is(r Repaired) bool {
	o := r.Options
	for _, t := range w.tables {
		if !slices.Contains(r.Tables, t) {
			return false
		}
	}
	return r.Keyspace == w.keyspace && r.Node == w.node && !r.Started.Before(w.since) && (!w.whole || wholeRing(r.Ranges)) &&
		o["incremental"] == "false" && o["primaryRange"] == "false" && o["previewKind"] == "NONE" && o["sub_range_repair"] != "true" && o["paxosOnly"] != "true" &&
		o["dataCenters"] == "" && o["hosts"] == ""
}

// wholeRing says whether ranges "(a,b]" together go around the ring: each ends
// where another begins.
func wholeRing(ranges []string) bool {
	var begins, ends []string
	for _, r := range ranges {
		begin, end, ok := strings.Cut(strings.Trim(r, "(]"), ",")
		if !ok {
			return false
		}
		begins, ends = append(begins, strings.TrimSpace(begin)), append(ends, strings.TrimSpace(end))
	}
	slices.Sort(begins)
	slices.Sort(ends)
	return len(ranges) > 0 && slices.Equal(begins, ends)
}
