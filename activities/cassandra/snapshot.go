package cassandra

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// SnapshotRequest flushes one member and snapshots it under a tag.
type SnapshotRequest struct {
	Place
	Pod   string        `json:"pod"`
	Tag   string        `json:"tag"`
	Limit time.Duration `json:"limit"`
}

// SnapshotResult says what the tag holds on the member.
type SnapshotResult struct {
	Pod    string `json:"pod"`
	Tables int    `json:"tables"`
	// Already: the tag was there before this call.
	Already  bool           `json:"already,omitempty"`
	Evidence evidence.Trail `json:"evidence"`
}

// plainTag is what may stand in a command's arguments as a tag.
var plainTag = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$`)

// ValidTag says whether a name can be that of a snapshot.
func ValidTag(tag string) bool { return plainTag.MatchString(tag) }

// Snapshot is the activity cassandra.Snapshot (N95). A second snapshot under
// one tag would fail with a stack trace: the list is read first, and a tag
// that holds every table counts as done.
func (a *Activities) Snapshot(ctx context.Context, r SnapshotRequest) (out SnapshotResult, err error) {
	out.Pod = r.Pod
	if !ValidTag(r.Tag) {
		return out, finding.Finding{Row: "N95", Object: fmt.Sprintf("snapshot tag %q", r.Tag), Expected: "letters, digits, dots, underscores and hyphens", Found: "something else", Next: "give the plan another tag"}.Error(finding.Stop)
	}
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	held, err := c.snapshots(ctx, r.Pod, r.Tag)
	if err != nil {
		return out, err
	}
	if out.Already = len(held) > 0; !out.Already {
		for _, args := range [][]string{{"flush"}, {"snapshot", "-t", r.Tag}} {
			c.record.Say(args[0] + " on " + r.Pod)
			if err := c.fence(ctx); err != nil {
				return out, err
			}
			if err := c.must(ctx, r.Pod, r.Limit, args...); err != nil {
				return out, err
			}
		}
	}
	tables, err := c.tables(ctx, r.Pod)
	if err != nil {
		return out, err
	}
	// The snapshot may be that of a call that nobody hears any more.
	var missing []string
	_, err = kube.Poll(ctx, min(r.Limit, 20*a.pace()), a.pace(), func(ctx context.Context) (bool, error) {
		if held, err = c.snapshots(ctx, r.Pod, r.Tag); err != nil {
			return false, err
		}
		missing = slices.DeleteFunc(slices.Clone(tables), func(t string) bool { return slices.Contains(held, t) })
		return len(missing) == 0, nil
	})
	if err != nil {
		return out, err
	}
	out.Tables = len(held)
	out.Evidence.Looks = 1
	if out.Evidence.Last, err = evidence.Store(ctx, a.Artifacts, "snapshot.json", len(held), seenSnapshot{r.Pod, r.Tag, held, missing}); err != nil {
		return out, err
	}
	if len(missing) > 0 {
		return out, finding.Finding{Row: "N95", Object: fmt.Sprintf("snapshot %s on %s", r.Tag, r.Pod), Expected: fmt.Sprintf("all %d tables", len(tables)),
			Found: fmt.Sprintf("%d; %s is missing", len(held), missing[0]), Why: "a table that was made after the snapshot is in no backup",
			Next: "give the plan another tag, or clear this one by hand: nodetool clearsnapshot -t " + r.Tag}.Error(finding.Stop)
	}
	return out, nil
}

type seenSnapshot struct {
	Pod     string   `json:"pod"`
	Tag     string   `json:"tag"`
	Tables  []string `json:"tables"`
	Missing []string `json:"missing,omitempty"`
}

// must runs nodetool and makes a finding of an exit code.
func (c *cluster) must(ctx context.Context, pod string, limit time.Duration, args ...string) error {
	exit, err := c.nodetool(ctx, pod, limit, args...)
	if err == nil && exit.Code != 0 {
		err = finding.InRow(failed(pod, exit, args...).Error(finding.Retry), "N95")
	}
	return err
}

// tables are those of the member, as keyspace/table.
func (c *cluster) tables(ctx context.Context, pod string) ([]string, error) {
	args := []string{"tablestats", "-F", "json"}
	exit, err := c.nodetool(ctx, pod, toolLimit, args...)
	if err != nil {
		return nil, err
	}
	if exit.Code != 0 {
		return nil, finding.InRow(failed(pod, exit, args...).Error(finding.Retry), "N95")
	}
	tables, err := parseTables(exit.Stdout)
	if err != nil {
		f := failed(pod, exit, args...)
		f.Row, f.Expected, f.Found = "N95", "the tables as JSON", err.Error()
		return nil, f.Error(finding.Retry)
	}
	return tables, nil
}

// snapshots are the tables that a tag holds on a member.
func (c *cluster) snapshots(ctx context.Context, pod, tag string) ([]string, error) {
	exit, err := c.nodetool(ctx, pod, toolLimit, "listsnapshots")
	if err != nil {
		return nil, err
	}
	if exit.Code != 0 {
		return nil, finding.InRow(failed(pod, exit, "listsnapshots").Error(finding.Retry), "N95")
	}
	return parseSnapshots(exit.Stdout, tag), nil
}

// parseSnapshots reads `nodetool listsnapshots`: keyspace/table of each row of
// the tag.
func parseSnapshots(text, tag string) []string {
	var out []string
	for _, line := range strings.Split(text, "\n") {
		if f := strings.Fields(line); len(f) > 3 && f[0] == tag {
			out = append(out, f[1]+"/"+f[2])
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// parseTables reads `nodetool tablestats -F json`: every table of the member. An
// index that has a table of its own stands there as table.index; its snapshot is
// part of the table's.
func parseTables(text string) ([]string, error) {
	at := strings.Index("\n"+text, "\n{") // the server's logger may write before it
	if at < 0 {
		return nil, fmt.Errorf("no JSON in the output of nodetool tablestats: %q", text[:min(len(text), 200)])
	}
	var keyspaces map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text[at:]), &keyspaces); err != nil {
		return nil, fmt.Errorf("output of nodetool tablestats: %w", err)
	}
	var out []string
	for name, raw := range keyspaces {
		var stats struct {
			Tables map[string]json.RawMessage `json:"tables"`
		}
		if json.Unmarshal(raw, &stats) != nil {
			continue // a number beside the keyspaces
		}
		for table := range stats.Tables {
			if !strings.Contains(table, ".") {
				out = append(out, name+"/"+table)
			}
		}
	}
	slices.Sort(out)
	if len(out) == 0 {
		return nil, fmt.Errorf("no table in the output of nodetool tablestats")
	}
	return out, nil
}
