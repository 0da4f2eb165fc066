package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/workflows/protocol"
)

// ofOneRun are the fields of a receipt that hold a time, an identity of the run
// or the digest or size of what contains some. The digest of a plan covers the
// addresses that it was made with; its diff has none.
var ofOneRun = regexp.MustCompile(`\.(started|ended|at|runID)$` + `|^\.(planDigest|plan\.digest)$` +
	`|^\.artifacts\[<UID>/(backup/[^]]+|receipt\.json|hosts\.json)\]\.(size|plainSHA256|storedSHA256)$`)

// ofOneWorld are the parts of a receipt's texts that no two worlds share.
var ofOneWorld = []struct {
	what    string
	pattern *regexp.Regexp
}{
	{"UID", regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)},
	{"folder", regexp.MustCompile(`/[^ ]*/refit-test-\d+/`)},
	{"address", regexp.MustCompile(`127\.0\.0\.1:\d+`)},
	{"leader", regexp.MustCompile(`leader [a-z-]+-controller-[a-z0-9]+-[a-z0-9]+$`)},
	{"plan", regexp.MustCompile(`plan [0-9a-f]{12}$`)},
	{"duration", regexp.MustCompile(`\b\d+(\.\d+)?(ms| s)\b`)},
}

// differences are the fields in which two receipts of one plan differ, but for
// those that differ between any two runs in worlds that are alike.
func differences(t *testing.T, expected, found protocol.Receipt) []string {
	t.Helper()
	a, b := fields(t, expected), fields(t, found)
	var out []string
	for _, path := range slices.Sorted(maps.Keys(a)) {
		if text, ok := b[path]; !ok {
			out = append(out, fmt.Sprintf("%s: expected %q, found no such field", path, a[path]))
		} else if text != a[path] {
			out = append(out, fmt.Sprintf("%s: expected %q, found %q", path, a[path], text))
		}
	}
	for _, path := range slices.Sorted(maps.Keys(b)) {
		if _, ok := a[path]; !ok {
			out = append(out, fmt.Sprintf("%s: expected no such field, found %q", path, b[path]))
		}
	}
	return out
}

// fields maps the path of each field of a receipt to its text.
func fields(t *testing.T, r protocol.Receipt) map[string]string {
	t.Helper()
	text, err := json.Marshal(r)
	require.NoError(t, err)
	var tree map[string]any
	require.NoError(t, json.Unmarshal(text, &tree))
	out := map[string]string{}
	flatten("", tree, out)
	return out
}

// flatten puts a value under its path. Elements of a list go by their names,
// so that one more of them is one difference; the list itself is their order.
func flatten(path string, value any, out map[string]string) {
	switch v := value.(type) {
	case map[string]any:
		for key, field := range v {
			flatten(path+"."+key, field, out)
		}
	case []any:
		var names []string
		for i, element := range v {
			name := nameOf(element)
			if name == "" || slices.Contains(names, name) {
				name += fmt.Sprint("#", i)
			}
			names = append(names, name)
			flatten(path+"["+name+"]", element, out)
		}
		out[path] = strings.Join(names, ", ")
	default:
		if out[path] = worldless(fmt.Sprint(v)); ofOneRun.MatchString(path) {
			out[path] = "<differs>"
		}
	}
}

// nameOf is what an element of a list is known by, "" when it has no name.
func nameOf(element any) string {
	if m, ok := element.(map[string]any); ok {
		for _, key := range []string{"name", "stage", "object"} {
			if name, ok := m[key].(string); ok {
				return worldless(name)
			}
		}
	}
	return ""
}

func worldless(text string) string {
	for _, w := range ofOneWorld {
		text = w.pattern.ReplaceAllLiteralString(text, "<"+w.what+">")
	}
	return text
}

// TestReceiptsDifferByWhatARunDidAndNotByWhereAndWhen changes one thing of a
// receipt at a time.
func TestReceiptsDifferByWhatARunDidAndNotByWhereAndWhen(t *testing.T) {
	t.Parallel()
	began, ended := afterNoon(0), afterNoon(9)
	receipt := func() protocol.Receipt {
		return protocol.Receipt{
			Kind: protocol.TensorFusionUpgrade, RunID: "01a22d88-033f-7656-b0bc-a3fe82d70a2d", Started: began, Ended: ended, PlanDigest: "e5a1",
			After: map[string]string{"chart": "1.8.7"},
			Stages: []protocol.Stage{
				{Name: "lock", State: protocol.Done, Started: &began, Ended: &ended, Attempts: 1,
					Note: "cluster sandbox (uid 5216db9e-ce48-4190-8f79-393416b46fef), GreptimeDB 127.0.0.1:21931"},
				{Name: "canary", State: protocol.Done, Started: &began, Ended: &ended, Attempts: 1, Note: "1 replaced, slowest 8 s, proven by the agents"},
			},
			Plan: &protocol.Plan{Digest: "e5a1", Batches: []protocol.PlannedBatch{{Stage: "canary", Total: 1, Hosts: []string{"shared-000"}}}},
			Artifacts: []artifact.Ref{{Name: "01a22d88-033f-7656-b0bc-a3fe82d70a2d/backup/values.yaml", PlainSHA256: "11", StoredSHA256: "12",
				URL: "file:///tmp/refit-test-1/test/artifacts/01a22d88-033f-7656-b0bc-a3fe82d70a2d/backup/values.yaml.age"}},
		}
	}
	for _, c := range []struct {
		name   string
		change func(*protocol.Receipt)
		want   []string
	}{
		{"nothing", func(*protocol.Receipt) {}, nil},
		{"another run in another world", func(r *protocol.Receipt) {
			later := afterNoon(100)
			r.RunID, r.Started, r.Stages[0].Ended = "11a22d88-033f-7656-b0bc-a3fe82d70a2d", later, &later
			r.Stages[0].Note = "cluster sandbox (uid 6216db9e-ce48-4190-8f79-393416b46fef), GreptimeDB 127.0.0.1:1"
			r.Stages[1].Note = "1 replaced, slowest 25 s, proven by the agents"
			r.Artifacts[0] = artifact.Ref{Name: "11a22d88-033f-7656-b0bc-a3fe82d70a2d/backup/values.yaml", PlainSHA256: "21", StoredSHA256: "22",
				URL: "file:///tmp/refit-test-22/test/artifacts/11a22d88-033f-7656-b0bc-a3fe82d70a2d/backup/values.yaml.age"}
		}, nil},
		{"another word", func(r *protocol.Receipt) { r.Stages[1].Note = "1 already, proven by the agents" },
			[]string{`.stages[canary].note: expected "1 replaced, slowest <duration>, proven by the agents", found "1 already, proven by the agents"`}},
		{"one more attempt", func(r *protocol.Receipt) { r.Stages[1].Attempts = 2 }, []string{`.stages[canary].attempts: expected "1", found "2"`}},
		{"an end that is missing", func(r *protocol.Receipt) { r.Stages[1].Ended = nil }, []string{`.stages[canary].ended: expected "<differs>", found no such field`}},
		{"one stage less", func(r *protocol.Receipt) { r.Stages = r.Stages[:1] }, []string{`.stages: expected "lock, canary", found "lock"`,
			".stages[canary].attempts", ".stages[canary].ended", ".stages[canary].name", ".stages[canary].note", ".stages[canary].started", ".stages[canary].state"}},
		{"a warning", func(r *protocol.Receipt) { r.Warnings = []string{"late"} },
			[]string{`.warnings: expected no such field, found "#0"`, `.warnings[#0]: expected no such field, found "late"`}},
		{"another host", func(r *protocol.Receipt) { r.Plan.Batches[0].Hosts[0] = "shared-001" },
			[]string{`.plan.batches[canary].hosts[#0]: expected "shared-000", found "shared-001"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			other := receipt()
			c.change(&other)
			found := differences(t, receipt(), other)
			require.Len(t, found, len(c.want), "%q", found)
			for i, want := range c.want {
				assert.Contains(t, found[i], want)
			}
		})
	}
}
