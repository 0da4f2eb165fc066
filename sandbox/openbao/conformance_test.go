package openbao_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// recording is a request to a real server and its reply.
type recording struct {
	Request struct {
		Method  string            `json:"method"`
		Path    string            `json:"path"`
		Auth    bool              `json:"auth"`
		Headers map[string]string `json:"headers"`
	} `json:"request"`
	Status  int               `json:"status"`
	Headers map[string]string `json:"headers"`
	Body    any               `json:"body"`
}

func load(t *testing.T, name string) recording {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name+".json"))
	require.NoError(t, err)
	var r recording
	require.NoError(t, json.Unmarshal(data, &r), name)
	if r.Request.Method == "" {
		// The step-down of the active member was recorded without its request.
		r.Request.Method, r.Request.Path, r.Request.Auth = http.MethodPut, "/v1/sys/step-down", true
	}
	return r
}

// names are the recordings below a folder that begin with one of the prefixes.
func names(t *testing.T, dir string, prefixes ...string) (found []string) {
	t.Helper()
	files, err := os.ReadDir(filepath.Join("testdata", dir))
	require.NoError(t, err)
	for _, f := range files {
		name, ok := strings.CutSuffix(f.Name(), ".json")
		if ok && slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
			found = append(found, filepath.Join(dir, name))
		}
	}
	require.NotEmpty(t, found, prefixes)
	return found
}

// compared are the recordings that a test has compared, so that none is left
// out.
type compared map[string]bool

// matches sends the recorded requests to a member and compares the replies.
// what describes the two recorded versions by age.
func (c *cluster) matches(done compared, s *server, what map[string]age, recordings ...string) {
	c.Helper()
	for _, name := range recordings {
		r := load(c.T, name)
		token := ""
		if r.Request.Auth {
			token = c.token
		}
		if strings.Contains(name, "badtoken") {
			token = "s.not-a-token"
		}
		if token == "" && r.Request.Auth {
			// Before the initialisation there is none that would be right.
			token = "s.none-yet"
		}
		got, err := c.try(s, r.Request.Method, r.Request.Path, token, r.Request.Headers, nil)
		require.NoError(c, err, name)
		require.Equal(c, r.Status, got.code, "%s: %s", name, got.body)
		c.sameHeaders(name, r, got)
		c.sameBody(name, r, got, what)
		done[name] = true
	}
}

func (c *cluster) sameHeaders(name string, r recording, got reply) {
	c.Helper()
	want := map[string]string{}
	for _, header := range []string{"Cache-Control", "Content-Type", "Strict-Transport-Security", "Content-Disposition"} {
		if value, ok := r.Headers[header]; ok {
			want[header] = value
		}
		require.Equal(c, want[header], got.header.Get(header), "%s: %s", name, header)
	}
	require.Equal(c, r.Headers["Transfer-Encoding"], strings.Join(got.coding, " "), "%s: Transfer-Encoding", name)
	location, err := url.Parse(r.Headers["Location"])
	require.NoError(c, err)
	if location.Host == "" {
		require.Empty(c, got.header.Get("Location"), name)
		return
	}
	active, err := c.active()
	require.NoError(c, err)
	require.Equal(c, active.api+location.Path, got.header.Get("Location"), name)
}

func (c *cluster) sameBody(name string, r recording, got reply, what map[string]age) {
	c.Helper()
	text, isText := r.Body.(string)
	switch {
	case isText && text == "":
		require.Empty(c, got.body, name)
	case isText:
		require.Equal(c, []string{"meta.json", "state.bin", "SHA256SUMS", "SHA256SUMS.sealed"}, c.archive(got.body), name)
	default:
		var body any
		require.NoError(c, json.Unmarshal(got.body, &body), "%s: %s", name, got.body)
		want, found := plain("", r.Body, c.recordedVersion(what)), plain("", body, c.runningVersion)
		require.Equal(c, pretty(want), pretty(found), name)
	}
}

func pretty(v any) string {
	text, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// recordedVersion and runningVersion say of a version which of the two it is.
func (c *cluster) recordedVersion(what map[string]age) func(string) string {
	return func(v string) string {
		a, ok := what[v]
		require.True(c, ok, "recorded version %s", v)
		return fmt.Sprint("version ", a)
	}
}

func (c *cluster) runningVersion(v string) string {
	for _, a := range []age{newer, older} {
		if c.versions[a] == v {
			return fmt.Sprint("version ", a)
		}
	}
	return "another version"
}

// volatile fields have the same kind of value in each cluster, not the same
// value.
var volatile = map[string]bool{
	"request_id": true, "server_time_utc": true, "cluster_id": true, "last_echo": true, "active_time": true, "hostname": true,
	"leader_address": true, "leader_cluster_address": true, "api_address": true, "cluster_address": true, "address": true,
	"raft_committed_index": true, "raft_applied_index": true, "last_contact": true, "last_term": true, "last_index": true,
	"stable_since": true, "commit_date": true, "build_date": true, "node_id": true, "id": true, "name": true, "leader": true,
}

// plain takes out of a body what differs between clusters: whose turn it is to
// lead, times and addresses, and the recorded seal, which opened itself.
func plain(field string, v any, version func(string) string) any {
	switch v := v.(type) {
	case map[string]any:
		if v["type"] == "static" {
			v = maps.Clone(v)
			v["type"], v["recovery_seal"] = "shamir", false
			delete(v, "recovery_seal_type")
		}
		out := map[string]any{}
		for key, value := range v {
			if key == "servers" {
				if byName, ok := value.(map[string]any); ok {
					value = slices.Collect(maps.Values(byName))
				}
			}
			out[key] = plain(key, value, version)
		}
		return out
	case []any:
		out := []any{}
		for _, x := range v {
			if field == "voters" {
				x = "a member"
			}
			out = append(out, plain("", x, version))
		}
		slices.SortFunc(out, func(a, b any) int { return strings.Compare(pretty(a), pretty(b)) })
		return out
	case string:
		if field == "version" || field == "upgrade_version" {
			return version(v)
		}
	}
	if _, isBool := v.(bool); volatile[field] && !isBool {
		return fmt.Sprintf("%T", v)
	}
	return v
}

// Every recording has a reply of the double that matches it: code, headers and
// body. Real binaries take the double's place when they are named.
func TestRepliesMatchTheRecordings(t *testing.T) {
	parts := []compared{{}, {}, {}, {}}
	t.Run("each on its cluster", func(t *testing.T) {
		for i, run := range []func(*testing.T, compared){sameLine, acrossLines, withoutStandbyReads, sealedByShamir} {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				run(t, parts[i])
			})
		}
	})
	var left []string
	require.NoError(t, filepath.WalkDir("testdata", func(path string, d os.DirEntry, err error) error {
		name, ok := strings.CutSuffix(strings.TrimPrefix(path, "testdata/"), ".json")
		if ok && !slices.ContainsFunc(parts, func(c compared) bool { return c[name] }) {
			left = append(left, name)
		}
		return err
	}))
	if newer.real() == "" {
		require.Empty(t, left, "recordings that nothing was compared with")
	}
}
