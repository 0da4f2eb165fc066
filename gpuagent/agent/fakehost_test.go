package agent

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/host/hosttest"
)

func TestMain(m *testing.M) {
	if child.Main() {
		return
	}
	os.Exit(m.Run())
}

const node = "gpu-01"

// world is a host of fake GPUs with the agent that serves it.
type world struct {
	t     *testing.T
	gpus  *fakes.Host
	tree  *hosttest.Tree
	agent *Agent
}

func newWorld(t *testing.T, options ...fakes.Option) *world {
	t.Helper()
	w := &world{t: t, gpus: fakes.NewHost(t, options...)}
	w.set("gpus", "2")
	var err error
	w.tree, err = hosttest.Create(t.TempDir(), fakes.DefaultDriver, 2)
	require.NoError(t, err)
	t.Setenv(host.RootVariable, w.tree.Root)
	w.agent = New(node)
	return w
}

func (w *world) set(pairs ...string) {
	w.t.Helper()
	require.NoError(w.t, w.gpus.Set(pairs...))
}

func (w *world) baseline() *gpu.Baseline {
	w.t.Helper()
	b, err := w.agent.Baseline(context.Background(), gpu.BaselineRequest{Node: node})
	require.NoError(w.t, err)
	return &b
}

func (w *world) validate(req gpu.ValidateRequest) gpu.Result {
	w.t.Helper()
	req.Node = node
	// A small probe is as good a probe: these tests are about what is found.
	if req.Expect == nil {
		req.Expect = &gpu.Expect{SharedMemoryMiB: 4}
	}
	r, err := w.agent.Validate(context.Background(), req)
	require.NoError(w.t, err)
	return r
}

// quick validates at level quick against a baseline, nil for none.
func (w *world) quick(b *gpu.Baseline) gpu.Result {
	w.t.Helper()
	return w.validate(gpu.ValidateRequest{Level: gpu.Quick, Baseline: b})
}

// failing are the rows that failed, as "name: found".
func failing(r gpu.Result) []string {
	var out []string
	for _, c := range r.Checks {
		if !c.OK && c.Skipped == "" && c.Severity != gpu.Info {
			out = append(out, c.Name+": "+c.Found)
		}
	}
	return out
}

func requireRow(t *testing.T, r gpu.Result, name, found string, severity gpu.Severity) {
	t.Helper()
	i := slices.IndexFunc(r.Checks, func(c gpu.Check) bool {
		return c.Name == name && strings.Contains(c.Found+c.Skipped, found) && c.Severity == severity
	})
	require.GreaterOrEqual(t, i, 0, "no %s row %q with %q; failing: %q", severity, name, found, failing(r))
	require.NotEmpty(t, r.Checks[i].Hint, "row %q says what to do", name)
}
