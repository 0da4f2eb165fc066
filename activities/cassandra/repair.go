package cassandra

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/activity"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

const (
	// tries bounds how often a repair that failed is begun again within one
	// activity; the chart's auto_repair may be in the way, and pauses as long.
	tries  = 3
	pause  = time.Minute
	margin = 5 * time.Minute // of an exec for the end of its activity
)

// RepairRequest repairs keyspaces in full on one member.
type RepairRequest struct {
	Place
	Login     Login    `json:"login"`
	Pod       string   `json:"pod"`
	Keyspaces []string `json:"keyspaces"`
	// Alone: no other keyspace has more than one copy, so that one call of
	// nodetool, without a name, repairs no other (N145).
	Alone bool `json:"alone,omitempty"`
	// Copies is how many the keyspaces have: with fewer than there are members a
	// member repairs a part of the ring only.
	Copies int `json:"copies"`
	// Since is when the keyspaces had their copies, by a member's clock: a
	// repair that this member has finished since then is not repeated.
	Since time.Time `json:"since"`
	// Limit bounds the repair of one keyspace.
	Limit time.Duration `json:"limit"`
}

// RepairLimit is how long the activity may take for so many keyspaces: each try
// takes its time, and what it leaves behind is waited for.
func RepairLimit(keyspaces int, limit time.Duration) time.Duration {
	return time.Duration(max(1, keyspaces)) * (tries*(limit+patience(limit)+pause) + 2*margin)
}

// patience is how long a repair may run on whose end nobody waits for any more:
// nodetool that is given up ends, the repair does not.
func patience(limit time.Duration) time.Duration { return 2 * limit }

// together is the patience with one call that repairs so many keyspaces, one
// after the other.
func together(keyspaces int, limit time.Duration) time.Duration {
	return time.Duration(max(1, keyspaces)) * patience(limit)
}

// RepairResult says how each keyspace came to be repaired.
type RepairResult struct {
	Repairs  []Repair       `json:"repairs,omitempty"`
	Evidence evidence.Trail `json:"evidence"`
}

// Repair is one keyspace repaired by one member.
type Repair struct {
	Pod      string `json:"pod"`
	Keyspace string `json:"keyspace"`
	// By is "nodetool", or "history" when an earlier call's end was found there.
	By string `json:"by"`
	// Row is what the history says of it, if it could be read: a login may be
	// refused as long as system_auth is not repaired.
	Row      *Repaired `json:"row,omitempty"`
	Attempts int       `json:"attempts,omitempty"`
	Output   string    `json:"output,omitempty"`
}

// brief leaves out what only the artifact holds: a row names every range.
func (r Repair) brief() Repair {
	if r.Row != nil {
		r.Row = &Repaired{ID: r.Row.ID, Keyspace: r.Row.Keyspace, Node: r.Row.Node, Started: r.Row.Started, Finished: r.Row.Finished}
	}
	return r
}

// Repair is the activity cassandra.Repair (N142, N145, N187). A call whose end
// nobody heard is looked up in the history before it is repeated.
func (a *Activities) Repair(ctx context.Context, r RepairRequest) (out RepairResult, err error) {
	for _, keyspace := range r.Keyspaces {
		if !ValidKeyspace(keyspace) {
			return out, finding.Finding{Object: fmt.Sprintf("keyspace %q", keyspace), Expected: "a name of lower-case letters, digits and underscores", Found: "another one",
				Next: "repair it by hand, or leave it out of the plan"}.Error(finding.Stop)
		}
	}
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	done, err := c.repair(ctx, r)
	if err != nil {
		return out, err
	}
	for _, one := range done {
		out.Repairs = append(out.Repairs, one.brief())
	}
	c.record.Trail.Looks = len(done)
	c.record.Trail.Last, err = evidence.Store(ctx, a.Artifacts, "repairs.json", len(done), done)
	out.Evidence = c.record.Trail
	return out, err
}

// repairing is the work of one activity.
type repairing struct {
	*cluster
	r RepairRequest
	// left are the keyspaces that are still to be repaired, since when by the
	// member's clock once it is known.
	left  []string
	since time.Time
	// attempts counts the calls by keyspace.
	attempts map[string]int
	done     []Repair
	// unheard: nobody knows how the last call has ended.
	unheard bool
}

// repair brings the keyspaces to be repaired by the member, by as many calls as
// are allowed. None is made before the history has said that there is nothing
// to wait for; only a login that can't be had may leave that open.
func (c *cluster) repair(ctx context.Context, r RepairRequest) ([]Repair, error) {
	w := &repairing{cluster: c, r: r, left: slices.Clone(r.Keyspaces), since: r.Since, attempts: map[string]int{}}
	if calledBefore(ctx) {
		if err := rest(ctx, min(startLimit, 5*c.a.pace())); err != nil {
			return nil, err
		}
	}
	var last error
	for try := range tries {
		if try > 0 { // what is in the way may end meanwhile
			again := min(pause, 20*c.a.pace())
			c.record.Say(fmt.Sprintf("%v; tried again after %s", last, again))
			if err := rest(ctx, again); err != nil {
				return nil, err
			}
		}
		before, err := w.history(ctx)
		if err != nil {
			return nil, err
		}
		w.finish(before, "history", "")
		if len(w.left) == 0 {
			return w.done, nil
		}
		if !before.now.IsZero() {
			w.since = before.now // by this member's own clock from here on
		}
		if last, err = w.round(ctx, before); err != nil || len(w.left) == 0 {
			return w.done, err
		}
	}
	return nil, last
}

const (
	// calling begins what the heartbeat tells before a call.
	calling = "run nodetool "
	// startLimit is how long nodetool, a Java program, may take until its repair
	// is in the history.
	startLimit = 15 * time.Second
)

// calledBefore says whether an earlier try of this activity was about to call
// nodetool: its row may not be there yet.
func calledBefore(ctx context.Context) bool {
	var said string
	return activity.IsActivity(ctx) && activity.HasHeartbeatDetails(ctx) && activity.GetHeartbeatDetails(ctx, &said) == nil && strings.HasPrefix(said, calling)
}

// round repairs what is left: by one call where no other keyspace would be
// repaired with it, and else by one each. again is what another round may mend:
// after a call whose end nobody heard the history is asked before the next.
func (w *repairing) round(ctx context.Context, before trace) (again, err error) {
	calls := make([][]string, 0, len(w.left))
	for _, keyspace := range w.left {
		calls = append(calls, []string{keyspace})
	}
	if w.r.Alone && len(calls) > 1 {
		calls = [][]string{slices.DeleteFunc(slices.Clone(w.left), func(name string) bool { return name == onlyByName })}
		if len(calls[0]) < len(w.left) {
			calls = append(calls, []string{onlyByName})
		}
	}
	for _, keyspaces := range calls {
		failure, err := w.call(ctx, before, keyspaces)
		if err != nil {
			return nil, err
		}
		if failure != nil {
			again = failure
		}
		if w.unheard {
			return again, nil
		}
	}
	return again, nil
}

// onlyByName is the keyspace that nodetool leaves out where none is named
// (CASSANDRA-9621).
const onlyByName = "system_distributed"

// call is one call of nodetool, which repairs several keyspaces where none is
// named, one after the other, and ends with the first that fails. again is why
// another one is needed; what it did repair is in the history.
func (w *repairing) call(ctx context.Context, before trace, keyspaces []string) (again, err error) {
	args := []string{"repair", "--full"}
	if len(keyspaces) == 1 {
		args = append(args, keyspaces[0])
	}
	what := strings.Join(keyspaces, ", ")
	if err := w.record.Mark(calling + strings.Join(args, " ") + " on " + w.r.Pod + " (" + what + ")"); err != nil {
		return nil, err
	}
	if err := w.fence(ctx); err != nil {
		return nil, err
	}
	for _, keyspace := range keyspaces {
		w.attempts[keyspace]++
	}
	w.unheard = false
	limit := w.r.Limit * time.Duration(len(keyspaces))
	begun := time.Now()
	exit, err := w.nodetool(ctx, w.r.Pod, limit, args...)
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil && before.now.IsZero() && time.Since(begun) >= limit:
		return nil, w.stays(what, "nodetool was given up after "+limit.String()+", and without a login nobody can look for its end")
	case err != nil:
		w.unheard = true
		return err, nil
	case exit.Code != 0:
		f := failed(w.r.Pod, exit, args...)
		f.Row, f.Next = "N187", "see that all members are up and that no other repair runs (nodetool netstats, compactionstats), then retry"
		f.Why = "until the repair, reads at LOCAL_ONE can miss rows"
		return f.Error(finding.Stop), nil
	}
	for _, keyspace := range keyspaces {
		if line := needless(exit.Stdout, keyspace); line != "" {
			return nil, finding.Finding{Row: "N187", Object: "repair of " + keyspace + " on " + w.r.Pod, Expected: "more than one copy", Found: line,
				Why: "the member does not know of the raise", Next: "see that all members have one schema version, then retry"}.Error(finding.Stop)
		}
	}
	return w.proof(ctx, before, keyspaces, exit.Stdout)
}

// proof finds what shows that a call has ended well: the rows that it has left,
// which must be there where the history could be read before the call too, for
// only then is since by the clock of this member; and else what nodetool said,
// because a connection that broke looks like its end.
func (w *repairing) proof(ctx context.Context, before trace, keyspaces []string, output string) (again, err error) {
	must := !before.now.IsZero()
	var now trace
	missing := func(name string) bool {
		return slices.Contains(w.left, name) && now.of[name].state != repairDone && !now.silent(name)
	}
	_, err = kube.Poll(ctx, min(pause, 20*w.a.pace()), w.a.pace(), func(ctx context.Context) (bool, error) {
		var err error
		now, err = w.history(ctx)
		return !must || !slices.ContainsFunc(keyspaces, missing), err
	})
	if err != nil {
		return nil, err
	}
	w.finish(now, "nodetool", lastLine(output))
	for _, keyspace := range keyspaces {
		switch {
		case !slices.Contains(w.left, keyspace): // its row was found
		case ended(output, keyspace) && must && missing(keyspace):
			return nil, finding.Finding{Row: "N187", Object: "repair of " + keyspace + " on " + w.r.Pod, Expected: "a row in system_distributed.parent_repair_history that says that it has ended", Found: "none, although nodetool says so",
				Why: "without it nothing proves that every range and table was repaired", Next: "look at the member's log, then retry: the repair is run again"}.Error(finding.Stop)
		case ended(output, keyspace):
			w.add(Repair{Keyspace: keyspace, By: "nodetool", Output: lastLine(output)})
		default:
			w.unheard = true
			again = finding.Finding{Row: "N187", Object: "repair of " + keyspace + " on " + w.r.Pod, Expected: "nodetool's word that it has ended", Found: "exit code 0 and " + fmt.Sprintf("%q", lastLine(output)),
				Why: "the connection to nodetool may have broken", Next: "look at the member's log, then retry"}.Error(finding.Stop)
		}
	}
	return again, nil
}

// finish takes the keyspaces whose rows say that they are repaired for done.
func (w *repairing) finish(t trace, by, output string) {
	for _, keyspace := range slices.Clone(w.left) {
		if found := t.of[keyspace]; found.state == repairDone {
			w.add(Repair{Keyspace: keyspace, By: by, Row: &found.row, Output: output})
		}
	}
}

func (w *repairing) add(done Repair) {
	done.Pod, done.Attempts = w.r.Pod, w.attempts[done.Keyspace]
	w.done = append(w.done, done)
	w.left = slices.DeleteFunc(w.left, func(name string) bool { return name == done.Keyspace })
}

// needless is the line with which nodetool says that a keyspace has one copy.
func needless(output, keyspace string) string {
	for line := range strings.Lines(output) {
		if strings.Contains(line, "No repair is needed") && strings.Contains(line, "'"+keyspace+"'") {
			return complaint(line)
		}
	}
	return ""
}

// started is how nodetool says which of its commands repairs a keyspace.
var started = regexp.MustCompile(`Starting repair command (#\d+) \(\S+\), repairing keyspace (\S+) with`)

// ended says whether nodetool tells of a keyspace's repair that it has ended, or
// that there is no table.
func ended(output, keyspace string) bool {
	for _, m := range started.FindAllStringSubmatch(output, -1) {
		if m[2] == keyspace && strings.Contains(output, "Repair command "+m[1]+" finished in") {
			return true
		}
	}
	return slices.ContainsFunc(strings.Split(output, "\n"), func(line string) bool {
		return strings.HasSuffix(strings.TrimSpace(line), "Empty keyspace, skipping repair: "+keyspace)
	})
}

// stays is the finding of a repair that outlives its limit: another one on top
// of it would make both slower.
func (w *repairing) stays(keyspaces, found string) error {
	return finding.Finding{Row: "N187", Object: "repair of " + keyspaces + " on " + w.r.Pod, Expected: "an end within " + w.r.Limit.String(), Found: found,
		Why:  "a second repair on top of it would slow both down",
		Next: "follow it on the member (nodetool netstats, compactionstats); retry once it has ended, or restart the member, which gives it up, and give the plan a longer limits.repair"}.Error(finding.Stop)
}

func rest(ctx context.Context, d time.Duration) error {
	_, err := kube.Poll(ctx, d, d, func(context.Context) (bool, error) { return false, nil })
	return err
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}
