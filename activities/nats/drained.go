package nats

import (
	"fmt"
	"slices"

	"github.com/refit-run/refit/activities/finding"
)

const memory = "memory"

// Drained is the verdict on the memory streams that have one copy: a restart
// of its server empties such a stream.
type Drained struct {
	// OK: every server answered, and nothing is left in any of them.
	OK bool `json:"ok"`
	// Seen counts the streams with one copy in memory, Messages what is in them.
	Seen     int    `json:"seen"`
	Messages uint64 `json:"messages"`
	// Malformed: waiting does not help.
	Malformed bool              `json:"malformed,omitempty"`
	Findings  []finding.Finding `json:"findings,omitempty"`
}

// JudgeDrained judges one look. least is how many single-copy memory streams
// must have been seen: none at all is more likely a look at the wrong place
// than an empty system (N127).
func JudgeDrained(v View, least int) Drained {
	d := Drained{Malformed: v.Malformed, Findings: v.Troubles}
	for _, s := range v.Streams {
		if s.Storage != memory || s.Replicas != 1 {
			continue
		}
		d.Seen++
		d.Messages += s.State.Messages
		if f, ok := undrained(s); ok {
			d.Findings = append(d.Findings, f)
		}
	}
	if d.Seen < least {
		d.Findings = append(d.Findings, finding.Finding{
			Row: "N127", Object: "memory streams with one replica", Expected: fmt.Sprintf("at least %d over all servers", least), Found: fmt.Sprint(d.Seen),
			Why:  "a missing stream is not a drained one: its server may have lost it, or this is not the cluster that is meant",
			Next: "compare with the streams that the control plane uses; once they all have three replicas this check does not apply any more",
		})
	}
	d.OK = len(d.Findings) == 0
	return d
}

// emptied compares a look with how the streams were when they last held
// messages, and returns those that hold some now. Consumers that empty a queue
// leave its sequence as it is. One that began anew, or is gone, was emptied by
// a restart or a deletion, and nobody saw its messages worked off (N124). A
// purge leaves the sequence, too: it is told only of streams that no consumer
// empties. Nothing is called lost while a server is away or still recovers.
func emptied(v View, held []Record) (lost []finding.Finding, now []Record) {
	for _, b := range held {
		s, ok := v.find(b)
		f, gone := finding.Finding{}, !ok
		switch {
		case ok && s.Leader == "":
			now = append(now, b)
			continue
		case ok:
			f, gone = Lost(b, s)
		default:
			f = finding.Finding{Object: b.String(), Expected: fmt.Sprintf("its %d messages worked off", b.State.Messages), Found: "no server lists it"}
		}
		switch {
		case gone && len(v.Troubles) > 0:
			now = append(now, b)
		case gone:
			f.Row, f.Why = "N124", "a restart of its server or a deletion has emptied it (or a purge, where no consumer does), and nobody saw its messages worked off"
			f.Next = "find out what they were and have them sent again; retry judges what is there by then"
			lost = append(lost, f)
		}
	}
	for _, s := range v.Streams {
		r := s.record()
		known := slices.ContainsFunc(now, func(b Record) bool { return b.AccountID == r.AccountID && b.Name == r.Name })
		if s.Storage == memory && s.Replicas == 1 && s.Leader != "" && s.State.Messages > 0 && !known {
			now = append(now, r)
		}
	}
	return lost, now
}

func undrained(s Stream) (finding.Finding, bool) {
	f := finding.Finding{
		Row: "N127", Object: s.String(), Expected: "0 messages and no pending deliveries",
		Why:  "it has one copy, in memory: a restart of its server loses what is in it",
		Next: "let its consumers finish the work; messages are never discarded to empty a stream. Stuck deployments and retained creation messages: follow their recovery steps (N130)",
	}
	switch {
	case s.Leader == "":
		f.Found = s.Unled
	case s.State.Messages > 0 || s.Pending > 0 || s.Unacked > 0:
		f.Found = fmt.Sprintf("%d messages, %d deliveries pending, %d not acknowledged", s.State.Messages, s.Pending, s.Unacked)
	case len(s.Leaderless) > 0:
		f.Found = "its consumer " + s.Leaderless[0] + " has no leader to ask"
	default:
		return f, false
	}
	return f, true
}
