package nats

import (
	"fmt"
	"slices"
	"time"

	"github.com/refit-run/refit/activities/finding"
)

// Settled judges one look at a stream that was raised: a leader, two current
// replicas without lag besides it, on servers that answered, and every copy at
// least as far as the stream was before. The reply to the raise proves none of
// this. An empty string says that it is so.
func Settled(v View, before Record, s Stream) string {
	want := max(TargetReplicas, before.Replicas)
	switch {
	case s.Replicas != want:
		return fmt.Sprintf("it is configured for %d replicas", s.Replicas)
	case s.Leader == "":
		return s.Unled
	case len(s.Peers) != want-1:
		return fmt.Sprintf("%s leads with %d replicas besides it", s.Leader, len(s.Peers))
	}
	for _, p := range s.Peers {
		switch copied, held := s.Copies[p.Name]; {
		case !slices.Contains(v.Servers, p.Name):
			return fmt.Sprintf("its replica %s did not answer", p.Name)
		case p.Offline:
			return fmt.Sprintf("its replica %s is offline", p.Name)
		case p.Pending:
			return fmt.Sprintf("its replica %s is no member yet", p.Name)
		case !p.Current || p.Lag > 0:
			return fmt.Sprintf("its replica %s is behind (current %t, lag %d)", p.Name, p.Current, p.Lag)
		case !held:
			return fmt.Sprintf("its replica %s does not list it", p.Name)
		case copied.LastSeq < before.State.LastSeq:
			return fmt.Sprintf("its replica %s holds it up to sequence %d of %d", p.Name, copied.LastSeq, before.State.LastSeq)
		}
	}
	return ""
}

// raised judges one look at every stream of a raise. lost ends the wait: what
// is gone does not come back, and new messages would soon hide it. Nothing is
// called lost while a server is away or still recovers.
func raised(v View, before []Record) (waiting, lost []finding.Finding) {
	waiting = slices.Clone(v.Troubles)
	for _, b := range before {
		f := finding.Finding{
			Row: "N191", Object: b.String(), Expected: fmt.Sprintf("a leader and %d current replicas", TargetReplicas-1),
			Why:  "with fewer current copies the stream stops or is lost with the next member that is down",
			Next: "see that all servers are up and have room for it, then retry: the raise is not sent again",
		}
		s, ok := v.find(b)
		switch {
		case !ok:
			f.Found = "no server lists it"
			waiting = append(waiting, f)
			continue
		case s.Leader != "":
			if l, is := Lost(b, s); is {
				l.Row = "N191"
				l.Next = "find out what the messages were; publishers may have to send them again. "
				if s.Replicas < TargetReplicas {
					l.Next += "Then retry: it is raised as it is by then"
				} else {
					l.Next += "Then abort and start again: a new run judges the stream by what is in it by then"
				}
				if len(v.Troubles) > 0 {
					waiting = append(waiting, l)
				} else {
					lost = append(lost, l)
				}
				continue
			}
		}
		if f.Found = Settled(v, b, s); f.Found != "" {
			waiting = append(waiting, f)
		}
	}
	return waiting, lost
}

// maxGap is how far apart two looks may be that prove what was between them:
// copies that flap are behind for seconds.
const maxGap = 5 * time.Second

// steady tells how long nothing has been wrong and no leader has changed, as
// far as looks that follow each other within maxGap can tell.
type steady struct {
	leaders     string
	since, last time.Time
}

// look takes one look and returns for how long it has been steady.
func (st *steady) look(now time.Time, v View, before []Record, ok bool) time.Duration {
	leaders := ""
	for _, b := range before {
		s, _ := v.find(b)
		leaders += b.String() + " on " + s.Leader + "\n"
	}
	gap := now.Sub(st.last)
	st.last = now
	if !ok || st.since.IsZero() || leaders != st.leaders || gap > maxGap {
		st.leaders, st.since = leaders, now
		if !ok {
			st.since = time.Time{}
		}
		return 0
	}
	return now.Sub(st.since)
}
