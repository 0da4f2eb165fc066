package bench

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	enums "go.temporal.io/api/enums/v1"
	historypb "go.temporal.io/api/history/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
)

// histories sums up what the Rollout and its children left in Temporal.
type histories struct {
	began, ended time.Time // of the Rollout
	count        int
	events       int
	longest      int
	parts        parts
}

// history exports the histories of a run's Rollout with all its children.
func (w *world) history(run string) histories {
	w.b.Helper()
	ctx := context.Background()
	root := run + ".rollout.hypervisor." + pool
	list, err := w.temporal.ListWorkflow(ctx, &workflowservice.ListWorkflowExecutionsRequest{
		Namespace: client.DefaultNamespace, PageSize: 1000,
	})
	require.NoError(w.b, err)
	var h histories
	for _, e := range list.Executions {
		id := e.Execution.WorkflowId
		if id != root && !strings.HasPrefix(id, root+".") {
			continue
		}
		var events []*historypb.HistoryEvent
		it := w.temporal.GetWorkflowHistory(ctx, id, e.Execution.RunId, false, enums.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT)
		for it.HasNext() {
			ev, err := it.Next()
			require.NoError(w.b, err)
			events = append(events, ev)
		}
		h.count++
		h.events += len(events)
		h.longest = max(h.longest, len(events))
		if id != root {
			h.parts.shard(events)
			continue
		}
		h.parts.rollout(events)
		if at := events[0].EventTime.AsTime(); h.began.IsZero() || at.Before(h.began) {
			h.began = at
		}
		if at := events[len(events)-1].EventTime.AsTime(); at.After(h.ended) {
			h.ended = at
		}
	}
	require.NotZero(w.b, h.count, "no history of %s", root)
	return h
}

// requests counts API requests by verb and resource, refused ones apart.
type requests map[string]int

func (r requests) total() (n int) {
	for _, c := range r {
		n += c
	}
	return n
}

func (r requests) String() string {
	keys := slices.SortedFunc(maps.Keys(r), func(a, b string) int { return cmp.Compare(r[b], r[a]) })
	var parts []string
	for _, k := range keys {
		parts = append(parts, fmt.Sprintf("%d %s", r[k], k))
	}
	return strings.Join(parts, ", ")
}

// workerUser is who the worker is to the API server.
const workerUser = "refit-worker"

// requests reads the worker's from the audit log. A request may have several
// lines, one per stage; it counts once, and so does an open watch.
func (w *world) requests(from, to time.Time) requests {
	w.b.Helper()
	f, err := os.Open(w.vars["REFIT_SANDBOX_AUDIT_LOG"])
	require.NoError(w.b, err)
	defer f.Close()
	r, err := countRequests(f, workerUser, from, to)
	require.NoError(w.b, err)
	return r
}

func countRequests(log io.Reader, user string, from, to time.Time) (requests, error) {
	out, seen := requests{}, map[string]bool{}
	lines := bufio.NewReaderSize(log, 1<<20)
	for {
		line, err := lines.ReadBytes('\n')
		// Most lines are other users': not worth decoding.
		if bytes.Contains(line, []byte(`"`+user+`"`)) {
			var e struct {
				AuditID string    `json:"auditID"`
				Verb    string    `json:"verb"`
				At      time.Time `json:"requestReceivedTimestamp"`
				User    struct {
					Username string `json:"username"`
				} `json:"user"`
				Object struct {
					Resource    string `json:"resource"`
					Subresource string `json:"subresource"`
				} `json:"objectRef"`
				Response struct {
					Code int `json:"code"`
				} `json:"responseStatus"`
			}
			if err := json.Unmarshal(line, &e); err != nil {
				return nil, fmt.Errorf("audit log: %w", err)
			}
			if e.User.Username == user && !seen[e.AuditID] && !e.At.Before(from) && !e.At.After(to) {
				seen[e.AuditID] = true
				name := e.Verb + " " + cmp.Or(e.Object.Resource, "discovery")
				if e.Object.Subresource != "" {
					name += "/" + e.Object.Subresource
				}
				if e.Response.Code >= 400 {
					name += fmt.Sprintf(" (%d)", e.Response.Code)
				}
				out[name]++
			}
		}
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("audit log: %w", err)
		}
	}
}

// peakMemory is the most memory that the worker has held so far, in bytes.
func (w *world) peakMemory() int64 {
	w.b.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", w.worker.Process.Pid))
	require.NoError(w.b, err, "peak memory is read from /proc, which only Linux has")
	for _, line := range strings.Split(string(status), "\n") {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			require.NoError(w.b, err, line)
			return kib << 10
		}
	}
	w.b.Fatalf("no VmHWM in the worker's status:\n%s", status)
	return 0
}
