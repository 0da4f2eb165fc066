package plan

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Kind of a decision.
type Kind string

const (
	// Replace: take these hosts, all of one batch, never more than the limit.
	Replace Kind = "replace"
	// Soak: watch the proven batch for a while.
	Soak Kind = "soak"
	// Interval: wait for the rest of the interval between two batches.
	Interval Kind = "interval"
	// Gate: ask a person.
	Gate Kind = "gate"
	// Advance: this batch is done, the next one follows.
	Advance Kind = "advance"
	// Park: something is wrong; a person has to look.
	Park Kind = "park"
	// Done: nothing is left to do.
	Done Kind = "done"
)

// Decision is the next step of a rollout and why.
type Decision struct {
	Kind Kind
	// Batch is the name of the batch it belongs to.
	Batch string
	// Hosts to replace (Replace), or those that made it park (Park).
	Hosts []string
	// For is the length of a Soak or Interval.
	For time.Duration
	// Reason says why, in words for a person.
	Reason string
	// Notes say what the observation changed.
	Notes []string
	// State has the observation folded in; After goes on from it.
	State State
}

// Observation is what was seen since the last decision. It holds no time: the
// planner orders waits and never measures them.
type Observation struct {
	// Hosts of the whole pool; nil when nobody looked.
	Hosts []Host
	// Alarms are findings that park the rollout whatever its budget says, for
	// example that somebody switched auto update on again.
	Alarms []string
}

// Next decides the next step of the rollout.
func Next(l Layout, s State, o Observation) Decision {
	s, notes := s.take(l, o.Hosts)
	s.Batch = min(s.Batch, max(0, len(l.Batches)-1))
	d := decide(l, s, o.Alarms)
	d.Notes, d.State = notes, s
	if s.Batch < len(l.Batches) {
		d.Batch = l.Batches[s.Batch].Name
	}
	return d
}

func decide(l Layout, s State, alarms []string) Decision {
	if len(alarms) > 0 {
		return Decision{Kind: Park, Reason: strings.Join(alarms, "; ")}
	}
	if d, over := budget(l, s); over {
		return d
	}
	if s.Batch >= len(l.Batches) {
		return Decision{Kind: Done, Reason: "every host was on target before the rollout began"}
	}
	b := l.Batches[s.Batch]
	if due := s.due(l); len(due) > 0 {
		wave := due[:min(l.MaxUnavailable, len(due))]
		return Decision{Kind: Replace, Hosts: wave, Reason: fmt.Sprintf(
			"%d of %d waiting hosts of %s, at most %d away at a time", len(wave), len(due), b.Name, l.MaxUnavailable)}
	}
	if d, wait := rest(l, s, b); wait {
		return d
	}
	if s.Batch+1 < len(l.Batches) {
		return advance(l, s)
	}
	if failed := s.Failed(l); len(failed) > 0 {
		return Decision{Kind: Done, Hosts: failed, Reason: fmt.Sprintf(
			"every host was handled, %d failed within the budget of %d: %s", len(failed), l.Budget, list(failed))}
	}
	return Decision{Kind: Done, Reason: "every host is settled"}
}

// budget parks when more failed than the strategy tolerates.
func budget(l Layout, s State) (Decision, bool) {
	failed := s.Failed(l)
	if len(failed) == 0 {
		return Decision{}, false
	}
	park := func(bad []string, format string, args ...any) (Decision, bool) {
		return Decision{Kind: Park, Hosts: bad, Reason: fmt.Sprintf(format, args...)}, true
	}
	for _, b := range l.Batches {
		if !b.Canary {
			continue
		}
		if bad := both(b.Hosts, failed); len(bad) > 0 {
			return park(bad, "%d of %s of the canary failed: %s; a canary's failure always parks", len(bad), hosts(len(b.Hosts)), list(bad))
		}
	}
	if s.Batch < len(l.Batches) {
		b := l.Batches[s.Batch]
		var here []string
		for _, h := range failed {
			if s.Hosts[h].Batch == s.Batch {
				here = append(here, h)
			}
		}
		if len(here) > b.Budget {
			return park(here, "%s failed in %s, its budget is %d: %s", hosts(len(here)), b.Name, b.Budget, list(here))
		}
	}
	if len(failed) > l.Budget {
		return park(failed, "%s failed in all, the budget is %d: %s", hosts(len(failed)), l.Budget, list(failed))
	}
	return Decision{}, false
}

// rest is what follows a batch's last wave: soak, the rest of the interval,
// the gate. A batch in which nothing was replaced has nothing to soak.
func rest(l Layout, s State, b Batch) (Decision, bool) {
	st, ahead := l.Strategy, s.ahead(l)
	soak := st.SoakBatch.D()
	if b.Canary {
		soak = st.SoakCanary.D()
	}
	if s.Worked && s.Step == Replacing && soak > 0 {
		return Decision{Kind: Soak, For: soak, Reason: fmt.Sprintf("%s is handled: watch it for %s", b.Name, soak)}, true
	}
	if ahead == 0 {
		return Decision{}, false
	}
	if gap := st.Interval.D() - soak; s.Worked && (s.Step == Replacing || s.Step == Soaked) && gap > 0 {
		return Decision{Kind: Interval, For: gap, Reason: fmt.Sprintf(
			"%s between batches, %s of them left after the soak", st.Interval, gap)}, true
	}
	if s.Step != Approved && (st.Gates == GateEachBatch || st.Gates == GateAfterCanary && b.Canary) {
		return Decision{Kind: Gate, Reason: fmt.Sprintf("%s is handled, %s left in later batches", b.Name, hosts(ahead))}, true
	}
	return Decision{}, false
}

func advance(l Layout, s State) Decision {
	next := l.Batches[s.Batch+1]
	waiting := 0
	for _, h := range next.Hosts {
		if s.Hosts[h].Status == Waiting {
			waiting++
		}
	}
	return Decision{Kind: Advance, Reason: fmt.Sprintf("%s follows with %s", next.Name, hosts(waiting))}
}

func both(a, b []string) []string {
	var out []string
	for _, x := range a {
		if slices.Contains(b, x) {
			out = append(out, x)
		}
	}
	return out
}

func hosts(n int) string {
	if n == 1 {
		return "1 host"
	}
	return fmt.Sprintf("%d hosts", n)
}

// list names at most ten hosts.
func list(hosts []string) string {
	if len(hosts) > 10 {
		return strings.Join(hosts[:10], ", ") + fmt.Sprintf(" and %d more", len(hosts)-10)
	}
	return strings.Join(hosts, ", ")
}

// Remaining estimates how long the rest takes when one wave takes perWave. It
// knows nothing of gates, windows and parkings.
func Remaining(l Layout, s State, perWave time.Duration) time.Duration {
	if l.MaxUnavailable == 0 {
		return 0
	}
	waves := func(n int) time.Duration {
		return time.Duration((n+l.MaxUnavailable-1)/l.MaxUnavailable) * perWave
	}
	left := waves(len(s.due(l)))
	for i := s.Batch + 1; i < len(l.Batches); i++ {
		n := 0
		for _, h := range l.Batches[i].Hosts {
			if s.Hosts[h].Status == Waiting {
				n++
			}
		}
		left += waves(n)
	}
	for i := s.Batch; i < len(l.Batches); i++ {
		if i == s.Batch && s.Step != Replacing {
			continue
		}
		soak := l.Strategy.SoakBatch.D()
		if l.Batches[i].Canary {
			soak = l.Strategy.SoakCanary.D()
		}
		if i+1 < len(l.Batches) {
			soak = max(soak, l.Strategy.Interval.D())
		}
		left += soak
	}
	return left
}
