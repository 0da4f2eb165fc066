package cassandra

import (
	"context"
	"fmt"
	"time"

	"github.com/gocql/gocql"
	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// trace is what the history says of the repairs of keyspaces, and the member's
// clock; a zero clock means that the history can't be read because nobody is
// let in.
type trace struct {
	of  map[string]past
	now time.Time
}

// past is what the history says of one keyspace's repair.
type past struct {
	state repairState
	row   Repaired
	// empty: the keyspace has no table, so that its repair leaves no row.
	empty bool
}

// silent says that no row is to be expected of a keyspace's repair.
func (t trace) silent(keyspace string) bool { return t.now.IsZero() || t.of[keyspace].empty }

// history is what earlier calls have left of what is to be repaired: it waits
// for one that still runs. A way to the member that fails proves nothing and is
// tried until it works; only a login that is refused or lacks its quorum is
// taken for an answer, because the repair may be what it lacks.
func (w *repairing) history(ctx context.Context) (trace, error) {
	var seen trace
	var last error
	answered := time.Now()
	running := func(state repairState) (name string, found past) {
		for _, keyspace := range w.left {
			if p := seen.of[keyspace]; p.state == state {
				return keyspace, p
			}
		}
		return "", past{}
	}
	over, err := kube.Poll(ctx, together(len(w.left), w.r.Limit), w.a.pace(), func(ctx context.Context) (bool, error) {
		seen, last = w.look(ctx, w.r, w.left, w.since)
		if last != nil {
			w.record.Say(last.Error())
			// The patience is with a repair that runs, not with who does not answer.
			if _, class, told := finding.Of(last); told && class == finding.Stop || time.Since(answered) > w.r.Limit {
				return false, last
			}
			return false, nil
		}
		answered = time.Now()
		name, p := running(repairRuns)
		if name != "" {
			w.record.Say(fmt.Sprintf("repair %s of %s on %s runs since %s", p.row.ID, name, w.r.Pod, p.row.Started.Format(time.RFC3339)))
		}
		return name == "", nil
	})
	if err != nil {
		return seen, err
	}
	if last != nil {
		return seen, last
	}
	for _, state := range []repairState{repairRuns, repairStays} {
		if name, p := running(state); name != "" && (state == repairStays || !over) {
			return seen, w.stays(name, fmt.Sprintf("repair %s still runs since %s", p.row.ID, p.row.Started.Format(time.RFC3339)))
		}
	}
	return seen, nil
}

// lookUp reads the history once. Who is let in by nobody reads nothing: that is
// the zero trace.
func (c *cluster) lookUp(ctx context.Context, r RepairRequest, keyspaces []string, since time.Time) (trace, error) {
	pod, err := c.pod(ctx, r.Pod)
	if err != nil {
		return trace{}, err
	}
	s, err := c.login(ctx, pod, r.Login)
	if letsNobodyIn(err) {
		return trace{}, nil
	}
	if err != nil {
		return trace{}, err
	}
	defer s.Close()
	node, now, err := s.node(ctx)
	if err != nil {
		return trace{}, err
	}
	rows, err := s.repairs(ctx)
	if err != nil {
		return trace{}, err
	}
	out := trace{of: map[string]past{}, now: now}
	for _, keyspace := range keyspaces {
		tables, err := s.tables(ctx, keyspace)
		if err != nil {
			return trace{}, err
		}
		state, row := sought{keyspace, node, tables, r.Copies >= TargetMembers, since}.state(rows, now, patience(r.Limit))
		out.of[keyspace] = past{state, row, len(tables) == 0}
	}
	return out, nil
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
	return nil, finding.Finding{Object: "Cassandra member " + name, Expected: "a pod", Found: "none", Next: "see why the StatefulSet has not brought it, then retry"}.Error(finding.Wait)
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
