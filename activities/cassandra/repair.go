package cassandra

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/gocql/gocql"
	corev1 "k8s.io/api/core/v1"

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
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	var seen []Repair
	for _, keyspace := range r.Keyspaces {
		if !ValidKeyspace(keyspace) {
			return out, finding.Finding{Object: fmt.Sprintf("keyspace %q", keyspace), Expected: "a plain name", Found: "another one"}.Error(finding.Stop)
		}
		c.record.Say("repair " + keyspace + " on " + r.Pod)
		done, err := c.repair(ctx, r, keyspace)
		if err != nil {
			return out, err
		}
		seen = append(seen, done)
		out.Repairs = append(out.Repairs, done.brief())
	}
	c.record.Trail.Looks = len(out.Repairs)
	c.record.Trail.Last, err = evidence.Store(ctx, a.Artifacts, "repairs.json", len(seen), seen)
	out.Evidence = c.record.Trail
	return out, err
}

// repair brings one keyspace to be repaired by the member, by as many calls as
// are allowed. None is made before the history has said that there is nothing
// to wait for; only a login that can't be had may leave that open.
func (c *cluster) repair(ctx context.Context, r RepairRequest, keyspace string) (Repair, error) {
	out := Repair{Pod: r.Pod, Keyspace: keyspace}
	var last error
	for since := r.Since; out.Attempts < tries; {
		if out.Attempts > 0 { // what is in the way may end meanwhile
			again := min(pause, 20*c.a.pace())
			c.record.Say(fmt.Sprintf("%v; tried again after %s", last, again))
			if err := rest(ctx, again); err != nil {
				return out, err
			}
		}
		past, err := c.history(ctx, r, keyspace, since)
		switch {
		case err != nil:
			return out, err
		case past.state == repairDone:
			out.By, out.Row = "history", &past.row
			return out, nil
		case !past.now.IsZero():
			since = past.now // by this member's own clock from here on
		}
		if err := c.fence(ctx); err != nil {
			return out, err
		}
		out.Attempts++
		begun := time.Now()
		exit, err := c.nodetool(ctx, r.Pod, r.Limit, "repair", "--full", keyspace)
		switch {
		case ctx.Err() != nil:
			return out, context.Cause(ctx)
		case err != nil && past.now.IsZero() && time.Since(begun) >= r.Limit:
			return out, c.stays(r, keyspace, "nodetool was given up after "+r.Limit.String()+", and without a login nobody can look for its end")
		case err != nil: // its end is not known: look it up
			last = err
			continue
		case exit.Code != 0:
			f := failed(r.Pod, exit, "repair", "--full", keyspace)
			f.Row, f.Next = "N187", "see that all members are up and that no other repair runs (nodetool netstats, compactionstats), then retry"
			f.Why = "until the repair, reads at LOCAL_ONE can miss rows"
			last = f.Error(finding.Stop)
			continue
		case strings.Contains(exit.Stdout, "No repair is needed"):
			return out, finding.Finding{Row: "N187", Object: "repair of " + keyspace + " on " + r.Pod, Expected: "more than one copy", Found: complaint(lastLine(exit.Stdout)),
				Why: "the member does not know of the raise", Next: "see that all members have one schema version, then retry"}.Error(finding.Stop)
		}
		out.By, out.Output = "nodetool", lastLine(exit.Stdout)
		out.Row, err = c.evidence(ctx, r, keyspace, since, !past.silent())
		return out, err
	}
	return out, last
}

// evidence is the row that a repair has left which nodetool calls done. It must
// be there where the history could be read before the call as well, for only
// then is since by the clock of this member.
func (c *cluster) evidence(ctx context.Context, r RepairRequest, keyspace string, since time.Time, must bool) (*Repaired, error) {
	var t trace
	_, err := kube.Poll(ctx, min(pause, 20*c.a.pace()), c.a.pace(), func(ctx context.Context) (bool, error) {
		var err error
		t, err = c.history(ctx, r, keyspace, since)
		return t.state == repairDone || t.silent() || !must, err
	})
	switch {
	case err != nil:
		return nil, err
	case t.state == repairDone:
		return &t.row, nil
	case must && !t.silent():
		return nil, finding.Finding{Row: "N187", Object: "repair of " + keyspace + " on " + r.Pod, Expected: "a row in system_distributed.parent_repair_history that says that it has ended", Found: "none, although nodetool says so",
			Why: "without it nothing proves that every range and table was repaired", Next: "look at the member's log, then retry: the repair is run again"}.Error(finding.Stop)
	}
	return nil, nil
}

// trace is what the history says of a repair, and the member's clock; a zero
// clock means that the history can't be read because nobody is let in.
type trace struct {
	state repairState
	row   Repaired
	now   time.Time
	// empty: the keyspace has no table, so that its repair leaves no row.
	empty bool
}

// silent says that no row is to be expected of a repair.
func (t trace) silent() bool { return t.now.IsZero() || t.empty }

// history is what earlier calls have left: it waits for one that still runs. A
// way to the member that fails proves nothing and is tried until it works; only
// a login that is refused or lacks its quorum is taken for an answer, because
// the repair may be what it lacks.
func (c *cluster) history(ctx context.Context, r RepairRequest, keyspace string, since time.Time) (trace, error) {
	var seen trace
	var last error
	over, err := kube.Poll(ctx, patience(r.Limit), c.a.pace(), func(ctx context.Context) (bool, error) {
		seen, last = c.look(ctx, r, keyspace, since)
		if letsNobodyIn(last) {
			seen, last = trace{}, nil
			return true, nil
		}
		if last != nil {
			c.record.Say(last.Error())
			if _, class, told := finding.Of(last); told && class == finding.Stop {
				return false, last
			}
			return false, nil
		}
		if seen.state == repairRuns {
			c.record.Say(fmt.Sprintf("repair %s of %s on %s runs since %s", seen.row.ID, keyspace, r.Pod, seen.row.Started.Format(time.RFC3339)))
		}
		return seen.state != repairRuns, nil
	})
	switch {
	case err != nil:
		return seen, err
	case last != nil:
		return seen, last
	case !over, seen.state == repairStays:
		return seen, c.stays(r, keyspace, fmt.Sprintf("repair %s still runs since %s", seen.row.ID, seen.row.Started.Format(time.RFC3339)))
	}
	return seen, nil
}

// stays is the finding of a repair that outlives its limit: another one on top
// of it would make both slower.
func (c *cluster) stays(r RepairRequest, keyspace, found string) error {
	return finding.Finding{Row: "N187", Object: "repair of " + keyspace + " on " + r.Pod, Expected: "an end within " + r.Limit.String(), Found: found,
		Why:  "a second repair on top of it would slow both down",
		Next: "follow it on the member (nodetool netstats, compactionstats); retry once it has ended, or restart the member, which gives it up, and give the plan a longer limits.repair"}.Error(finding.Stop)
}

func (c *cluster) lookUp(ctx context.Context, r RepairRequest, keyspace string, since time.Time) (trace, error) {
	pod, err := c.pod(ctx, r.Pod)
	if err != nil {
		return trace{}, err
	}
	s, err := c.login(ctx, pod, r.Login)
	if err != nil {
		return trace{}, err
	}
	defer s.Close()
	node, now, err := s.node(ctx)
	if err != nil {
		return trace{}, err
	}
	tables, err := s.tables(ctx, keyspace)
	if err != nil {
		return trace{}, err
	}
	rows, err := s.repairs(ctx)
	if err != nil {
		return trace{}, err
	}
	state, row := sought{keyspace, node, tables, r.Copies >= TargetMembers, since}.state(rows, now, patience(r.Limit))
	return trace{state, row, now, len(tables) == 0}, nil
}

func (c *cluster) pod(ctx context.Context, name string) (*corev1.Pod, error) {
	pods, _, err := c.pods(ctx)
	if err != nil {
		return nil, err
	}
	for i := range pods {
		if pods[i].Name == name {
			return &pods[i], nil
		}
	}
	return nil, finding.Finding{Object: "Cassandra member " + name, Expected: "a pod", Found: "none"}.Error(finding.Wait)
}

// node is the node part of the time UUIDs that the member makes until its
// process ends, and its clock.
func (s *session) node(ctx context.Context) (string, time.Time, error) {
	rows, err := s.rows(ctx, "SELECT now() AS now FROM system.local")
	if err != nil {
		return "", time.Time{}, err
	}
	if len(rows) == 1 {
		if id, ok := rows[0]["now"].(gocql.UUID); ok {
			return fmt.Sprintf("%x", id.Node()), id.Time().UTC(), nil
		}
	}
	return "", time.Time{}, fmt.Errorf("%s: SELECT now() gave %v", s.pod, rows)
}

func (s *session) tables(ctx context.Context, keyspace string) ([]string, error) {
	rows, err := s.rows(ctx, "SELECT table_name FROM system_schema.tables WHERE keyspace_name = ?", keyspace)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, row := range rows {
		name, _ := row["table_name"].(string)
		out = append(out, name)
	}
	return out, nil
}

func (s *session) repairs(ctx context.Context) ([]Repaired, error) {
	rows, err := s.rows(ctx, `SELECT parent_id, keyspace_name, started_at, finished_at, exception_message, options, columnfamily_names, requested_ranges
		FROM system_distributed.parent_repair_history`)
	if err != nil {
		return nil, err
	}
	out := make([]Repaired, 0, len(rows))
	for _, row := range rows {
		id, _ := row["parent_id"].(gocql.UUID)
		r := Repaired{ID: id.String(), Node: fmt.Sprintf("%x", id.Node())}
		r.Keyspace, _ = row["keyspace_name"].(string)
		r.Started, _ = row["started_at"].(time.Time)
		r.Finished, _ = row["finished_at"].(time.Time)
		r.Exception, _ = row["exception_message"].(string)
		r.Options, _ = row["options"].(map[string]string)
		r.Tables, _ = row["columnfamily_names"].([]string)
		r.Ranges, _ = row["requested_ranges"].([]string)
		out = append(out, r)
	}
	return out, nil
}

func rest(ctx context.Context, d time.Duration) error {
	_, err := kube.Poll(ctx, d, d, func(context.Context) (bool, error) { return false, nil })
	return err
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}
