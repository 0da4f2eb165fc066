package e2e

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/history/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	refit "github.com/refit-run/refit/worker"
	"github.com/refit-run/refit/workflows/protocol"
)

// quickPlan makes the example plan quick: two nodes a pool, no soak.
var quickPlan = []string{"rollouts[0].strategy.soakCanary=1s"}

const (
	oldImage = "registry.refit.local/tensorfusion/tensor-fusion-hypervisor:2.15.0"
	newImage = "registry.refit.local/tensorfusion/tensor-fusion-hypervisor:2.17.0"
)

// TestUpgrade is the main job: from chart 1.8.6 to 1.8.7 (2.16 to 2.17, where
// the new controller would delete every hypervisor by itself), gate after the
// canary, receipt. Then the same plan again changes nothing, an upgrade of the
// controller image alone rolls no node, and a rollback brings the old version
// back in batches with today's credentials.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	w := up(t, "--lease", "15s") // as the real controller's
	o := observe(t, w)
	planted := w.plantedSecrets()
	require.NotEmpty(t, planted)

	run := w.start(quickPlan...)
	s := w.untilGate(run)
	assert.Equal(t, "rollout.hypervisor.shared.canary", s.WaitingFor.Stage)
	assert.Equal(t, protocol.PhaseGate, s.Phase)
	assert.Equal(t, 1, o.deletions(), "only the canary is replaced before the gate")

	t.Run("a stage that does not wait can't be approved", func(t *testing.T) {
		out, code := w.refit("approve", run, "--stage", "backup", "--by", "ann")
		assert.Equal(t, exitRefused, code, out)
		assert.Contains(t, out, "backup")
	})
	t.Run("the printed commands work verbatim", func(t *testing.T) {
		out, code := w.refit("status", run, "--exit-code")
		require.Equal(t, exitGate, code, out)
		line := commandLine(out, "temporal workflow update execute")
		require.NotEmpty(t, line, out)
		out, code = w.run("bash", "-c", line)
		require.Zero(t, code, "%s\n%s", line, out)
	})
	w.until(run, "the second pool", 2*time.Minute, func(s protocol.Status) bool {
		return s.WaitingFor != nil && s.WaitingFor.Stage == "rollout.hypervisor.training.canary"
	})
	t.Run("refit approve as printed works verbatim", func(t *testing.T) {
		out, _ := w.refit("status", run)
		line := commandLine(out, "refit approve")
		require.NotEmpty(t, line, out)
		out, code := w.run("bash", "-c", line)
		require.Zero(t, code, "%s\n%s", line, out)
	})
	r := w.approveAll(run)
	undisturbed(t, r)
	assert.Empty(t, o.violations(1, 2))
	assert.Equal(t, 4, o.deletions(), "every node exactly once")
	for node, pods := range w.hypervisors() {
		require.Len(t, pods, 1, node)
		assert.Contains(t, pods[0], newImage)
	}
	w.searchSecrets(run, planted)
	w.replay(run)

	t.Run("the same plan again changes nothing", func(t *testing.T) {
		o.reset()
		again := w.start(quickPlan...)
		r := w.approveAll(again)
		assert.Equal(t, protocol.OutcomeNoChange, r.Outcome)
		assert.Zero(t, o.deletions())
	})

	t.Run("rollback", func(t *testing.T) {
		o.reset()
		out, code := w.refit("start", "-f", "examples/tensorfusion-rollback.yaml", "-o", "json")
		require.Zero(t, code, out)
		var started struct {
			WorkflowID string `json:"workflowID"`
		}
		require.NoError(t, json.Unmarshal([]byte(out), &started), out)
		r := w.approveAll(started.WorkflowID)
		assert.Equal(t, protocol.OutcomeDone, r.Outcome)
		assert.Equal(t, "2.16.3", r.After["controller"])
		assert.Empty(t, o.violations(1, 2))
		assert.Equal(t, 4, o.deletions())
		w.searchSecrets(started.WorkflowID, planted)
		w.replay(started.WorkflowID)
	})
}

// commandLine finds a printed command.
func commandLine(out, prefix string) string {
	for _, l := range strings.Split(out, "\n") {
		if i := strings.Index(l, prefix); i >= 0 {
			return strings.TrimSpace(l[i:])
		}
	}
	return ""
}

// histories exports the run's history and those of every child, by workflow ID.
func (w *world) histories(run string) map[string]*history.History {
	w.t.Helper()
	ctx := context.Background()
	list, err := w.temporal.ListWorkflow(ctx, &workflowservice.ListWorkflowExecutionsRequest{
		Namespace: client.DefaultNamespace, PageSize: 1000,
	})
	require.NoError(w.t, err)
	out := map[string]*history.History{}
	for _, e := range list.Executions {
		id := e.Execution.WorkflowId
		if id != run && !strings.HasPrefix(id, run+".") {
			continue
		}
		h := &history.History{}
		it := w.temporal.GetWorkflowHistory(ctx, id, e.Execution.RunId, false, enums.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT)
		for it.HasNext() {
			ev, err := it.Next()
			require.NoError(w.t, err)
			h.Events = append(h.Events, ev)
		}
		out[id+"/"+e.Execution.RunId] = h
	}
	require.NotEmpty(w.t, out)
	return out
}

// replay proves that today's workflow code goes the recorded way again.
func (w *world) replay(run string) {
	w.t.Helper()
	for id, h := range w.histories(run) {
		r := worker.NewWorkflowReplayer()
		refit.RegisterWorkflows(r)
		workflowID, runID, _ := strings.Cut(id, "/")
		err := r.ReplayWorkflowHistoryWithOptions(nil, h, worker.ReplayWorkflowHistoryOptions{
			OriginalExecution: workflow.Execution{ID: workflowID, RunID: runID},
		})
		assert.NoError(w.t, err, "replay of %s", id)
	}
}

// plantedSecrets are the values of the release's Secrets and of the plain
// environment of its controller, as an operator would have planted them.
func (w *world) plantedSecrets() []string {
	w.t.Helper()
	ctx := context.Background()
	var out []string
	secrets, err := w.kube.CoreV1().Secrets("tensor-fusion-sys").List(ctx, metav1.ListOptions{LabelSelector: "owner!=helm"})
	require.NoError(w.t, err)
	for _, s := range secrets.Items {
		for _, v := range s.Data {
			out = append(out, string(v))
		}
	}
	d, err := w.kube.AppsV1().Deployments("tensor-fusion-sys").Get(ctx, "tensor-fusion-sys-controller", metav1.GetOptions{})
	require.NoError(w.t, err)
	for _, c := range d.Spec.Template.Spec.Containers {
		for _, e := range c.Env {
			if e.Name == "ENROLL_TOKEN" {
				out = append(out, e.Value)
			}
		}
	}
	return out
}

// searchSecrets looks for the planted values in everything that leaves the
// cluster: histories, status, logs, command line output.
func (w *world) searchSecrets(run string, planted []string) {
	w.t.Helper()
	places := map[string][]byte{}
	for id, h := range w.histories(run) {
		b, err := protojson.Marshal(h)
		require.NoError(w.t, err)
		places["history of "+id] = b
		raw, err := proto.Marshal(h) // payloads are base64 in JSON: look at them in the clear too
		require.NoError(w.t, err)
		places["history of "+id] = append(b, raw...)
	}
	for _, cmd := range [][]string{{"status", run, "-o", "json"}, {"receipt", run}, {"receipt", run, "-o", "yaml"}, {"artifacts", "list"}} {
		out, _ := w.refit(cmd...)
		places["refit "+strings.Join(cmd, " ")] = []byte(out)
	}
	log, err := os.ReadFile(filepath.Join(w.home, "worker.log"))
	require.NoError(w.t, err)
	places["the worker's log"] = log
	for path, content := range w.evidence() {
		places["artifact "+path] = content
	}
	for place, b := range places {
		b = append(b, unpacked(b)...)
		for _, s := range planted {
			assert.False(w.t, bytes.Contains(b, []byte(s)), "a planted secret appears in %s", place)
			coded := base64.StdEncoding.EncodeToString([]byte(s))
			assert.False(w.t, bytes.Contains(b, []byte(coded)), "a planted secret appears in %s, in base64", place)
		}
	}
}

// evidence reads every artifact that is stored in the clear.
func (w *world) evidence() map[string][]byte {
	w.t.Helper()
	found := map[string][]byte{}
	root := strings.TrimPrefix(w.vars["REFIT_ARTIFACTS"], "file://")
	require.NoError(w.t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasSuffix(path, ".age") {
			return err
		}
		found[path], err = os.ReadFile(path)
		return err
	}))
	require.NotEmpty(w.t, found, "the diff and the receipt at least lie in %s", root)
	return found
}

var base64Text = regexp.MustCompile(`[A-Za-z0-9+/]{24,}={0,2}`)

// unpacked is what stands in base64 in a text: bytes in a JSON payload do.
func unpacked(b []byte) []byte {
	var out []byte
	for _, text := range base64Text.FindAll(b, -1) {
		text = bytes.TrimRight(text, "=")
		if clear, err := base64.RawStdEncoding.DecodeString(string(text[:len(text)/4*4])); err == nil {
			out = append(append(out, clear...), '\n')
		}
	}
	return out
}
