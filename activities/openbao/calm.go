package openbao

import (
	"fmt"
	"time"

	"github.com/refit-run/refit/activities/finding"
)

// calm counts looks in a row that were right, with the same leader.
type calm struct {
	leader string
	since  time.Time
	looks  int
}

// look takes one look and tells whether enough of them have been right for
// long enough.
func (c *calm) look(now time.Time, leader string, right bool, stable time.Duration) bool {
	switch {
	case !right:
		*c = calm{}
		return false
	case c.looks == 0 || leader != c.leader:
		*c = calm{leader: leader, since: now}
	}
	c.looks++
	return c.looks >= steadyLooks && now.Sub(c.since) >= stable
}

// ready decides when a step may begin: not on one look, whose answers may be
// as old as a look may take, but on looks that were right for as long as after
// a step, the last of them fresh.
type ready struct {
	calm
	// caught is what every member must have applied: what was committed when
	// it was known, and what the first right look found. It stays then, because
	// a mark that moved with every write would never be reached.
	caught uint64
	marked bool
}

// look takes one look, with what it found by itself against the step that
// follows, and returns all that stands against it.
func (q *ready) look(now time.Time, v View, found []finding.Finding, step string, stable time.Duration) []finding.Finding {
	active, _ := v.Active()
	if len(found) == 0 {
		found = aged(now, v.At, step)
	}
	if len(found) == 0 && !q.marked {
		q.caught, q.marked = max(q.caught, active.Committed), true
	}
	if steady := q.calm.look(now, active.Pod, len(found) == 0, stable); !steady && len(found) == 0 {
		found = []finding.Finding{unsteady("before the "+step, stable)}
	}
	return found
}

// aged is the finding of a look that has become too old to act on.
func aged(now, at time.Time, step string) []finding.Finding {
	age := now.Sub(at)
	if age <= freshFor {
		return nil
	}
	return []finding.Finding{{Object: "OpenBao before the " + step, Expected: fmt.Sprintf("a look at all members within %s", freshFor), Found: age.Round(time.Millisecond).String(),
		Why: "what was true when the look began may be so no more", Next: "look at the way to the members and to the artifact store: the API server, the nodes, their load"}}
}

// tooLate is why a step that has not begun must not begin now: the section that
// it is a part of fitted the window only if it had begun by then. The zero time
// is that of a run which finishes what it has begun and begins nothing.
func tooLate(now, by time.Time, step string) string {
	switch {
	case by.IsZero():
		return step + " has not begun"
	case now.After(by):
		return fmt.Sprintf("%s was to begin by %s and has not at %s", step, by.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	return ""
}

// missed is why a step must not begin although the look at the members allows
// it: right before the request, which keeping the look, asking for the Lease or
// a process that stood still have put off.
func missed(at, by time.Time, step string) string {
	now := time.Now()
	if late := tooLate(now, by, "the "+step); late != "" {
		return late
	}
	if found := aged(now, at, step); len(found) > 0 {
		return overtaken(found)
	}
	return ""
}

func unsteady(when string, stable time.Duration) finding.Finding {
	return finding.Finding{Row: "N164", Object: "OpenBao " + when, Expected: fmt.Sprintf("whole, with the same leader, for %s", stable), Found: "not for so long yet",
		Next: "leadership does not hold still: look at the load and the network between the members, then retry"}
}
