package view_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/starter/view"
	"github.com/refit-run/refit/workflows/protocol"
)

var update = flag.Bool("update", false, "write the golden files anew")

var now = time.Date(2026, 11, 30, 10, 30, 0, 0, time.UTC)

func ago(d time.Duration) *time.Time { t := now.Add(-d); return &t }

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".txt")
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err, "make it with: go test ./starter/view -update")
	require.Equal(t, string(want), got)
}

func status() protocol.Status {
	eta := now.Add(14 * time.Minute)
	return protocol.Status{
		Kind: "TensorFusionUpgrade", Cluster: "prod", Phase: protocol.PhaseGate, Stage: "rollout.hypervisor.shared.canary",
		Stages: []protocol.Stage{
			{Name: "preflight", State: protocol.Done, Started: ago(20 * time.Minute), Ended: ago(19 * time.Minute), Note: "31 checks met"},
			{Name: "hold", State: protocol.Done, Started: ago(19 * time.Minute), Ended: ago(19*time.Minute - 4*time.Second), Attempts: 2},
			{Name: "backup", State: protocol.Skipped},
			{Name: "rollout.hypervisor.shared.canary", State: protocol.WaitingForGate, Started: ago(4 * time.Minute),
				Answers: []protocol.Given{{Verb: "approve", By: "ann", Comment: "looks good", At: *ago(time.Minute)}}},
			{Name: "rollout.hypervisor.shared.batch-1", State: protocol.Pending},
		},
		WaitingFor: &protocol.Waiting{Kind: protocol.WaitApproval, Stage: "rollout.hypervisor.shared.canary", Since: *ago(90 * time.Second),
			Found: "1 host proven: gpu-1", Answers: []string{"approve", "reject", "abort"}, Approvals: []string{"ann"}, Needed: 2},
		Progress: protocol.Progress{Done: 2, Total: 8, Failed: 1},
		ETA:      &eta,
		Section:  "host gpu-2, from delete to proof", Deferred: "pause",
		Current:  []string{"gpu-2", "gpu-3"},
		Warnings: []string{"search attributes are absent; run `refit setup`"},
		Ignored:  []protocol.Ignored{{Verb: "approve", Stage: "backup", By: "bob", At: *ago(2 * time.Minute), Reason: "stage backup does not wait"}},
	}
}

var ways = view.Ways{
	Refit:    "refit approve RUN --stage rollout.hypervisor.shared.canary",
	Page:     "http://127.0.0.1:8233/namespaces/default/workflows/RUN",
	Temporal: "temporal workflow update execute -w RUN --name approve --input '{}'",
	Tctl:     "tctl workflow signal -w RUN -n approve -i '{}'",
}

func TestStatus(t *testing.T) {
	golden(t, "status", view.Status("TensorFusionUpgrade.prod.tf", status(), view.Options{Now: now}))
}

func TestStatusIsColouredOnRequestAndReadsTheSame(t *testing.T) {
	plain := view.Status("run", status(), view.Options{Now: now})
	coloured := view.Status("run", status(), view.Options{Now: now, Colour: true})
	require.NotContains(t, plain, "\x1b")
	for _, code := range []string{"\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[36m", "\x1b[2m", "\x1b[1m", "\x1b[0m"} {
		coloured = strings.ReplaceAll(coloured, code, "")
	}
	require.Equal(t, plain, coloured)
}

func TestWaitingForApproval(t *testing.T) {
	golden(t, "waiting-approval", view.Waiting(*status().WaitingFor, ways, view.Options{Now: now}))
}

func TestParked(t *testing.T) {
	w := protocol.Waiting{Kind: protocol.WaitParked, Stage: "verify", Since: *ago(time.Hour),
		Found: "2 of 8 hosts failed", Why: "a failed host serves no GPU\nand its workloads stay away", Helps: "look at the node, repair it, then retry",
		Answers: []string{"retry", "rollback", "abort"},
		Findings: []finding.Finding{
			{Row: "T17", Object: "GPUNode gpu-3", Expected: "Running", Found: "Pending", Why: "its hypervisor is not ready", Next: "kubectl describe pod"},
			{Object: "host gpu-4", Found: "no worker polls gpu/prod/gpu-4"},
		}}
	golden(t, "waiting-parked", view.Waiting(w, view.Ways{Refit: "refit retry RUN --stage verify"}, view.Options{Now: now}))
}

func TestWaitingForAWindowAsksNobody(t *testing.T) {
	until := now.Add(9 * time.Hour)
	w := protocol.Waiting{Kind: protocol.WaitWindow, Stage: "rollout", Since: now, Until: &until}
	got := view.Waiting(w, ways, view.Options{Now: now})
	require.Equal(t, "Waiting for a maintenance window before rollout  since 10:30:00 (0s), until 19:30:00\n", got)
}

func TestChangesTellWhatHappenedOnce(t *testing.T) {
	after := status()
	first := view.Changes(nil, after, view.Options{Now: now})
	golden(t, "changes-first", strings.Join(first, "\n")+"\n")
	require.Empty(t, view.Changes(&after, status(), view.Options{Now: now}))

	later := status()
	later.Phase = protocol.PhaseRunning
	later.Stages[3].State, later.Stages[3].Ended = protocol.Done, &now
	later.Stages[4].State, later.Stages[4].Note = protocol.Running, "2 hosts"
	later.Progress.Done = 4
	golden(t, "changes-later", strings.Join(view.Changes(&after, later, view.Options{Now: now}), "\n")+"\n")
}

func TestReceipt(t *testing.T) {
	s := status()
	golden(t, "receipt", view.Receipt(protocol.Receipt{
		Kind: s.Kind, Cluster: "prod", Object: "tf", WorkflowID: "TensorFusionUpgrade.prod.tf", RunID: "0192-fake", Outcome: protocol.OutcomeAborted,
		Started: *ago(26 * time.Hour), Ended: now, PlanDigest: "abc123", Stages: s.Stages, Progress: s.Progress,
		Before: map[string]string{"chart": "1.2.0", "controller": "2.16.3"}, After: map[string]string{"chart": "1.3.0", "hypervisor": "2.17"},
		Ignored: s.Ignored, LeftBehind: []string{"auto update stays off"}, Acknowledged: []string{"T04"},
		Probes: []protocol.Probe{
			{Pool: "tf-shared", Node: "gpu-1", Result: gpu.Result{Verdict: gpu.Pass, Proofs: []gpu.Proof{{Device: "GPU-1", Patterns: 3}},
				Found: []gpu.Found{{Name: "memory tested", Found: "64 MiB"}}}},
			{Pool: "tf-training", Node: "gpu-2", Result: gpu.Result{Verdict: gpu.Unfit, Checks: []gpu.Check{{Name: "vGPU limit", Found: "2112 MiB were granted"}}}},
		},
		Artifacts: []artifact.Ref{{Name: "values.yaml", Kind: artifact.Secret, Size: 2048, PlainSHA256: "0123456789abcdef", Entries: 1}},
	}, view.Options{Now: now}))
}

func TestAClosedRunIsOneLine(t *testing.T) {
	r := protocol.Receipt{WorkflowID: "TensorFusionUpgrade.prod.tf", Outcome: protocol.OutcomeDone, Started: *ago(90 * time.Minute), Ended: now, Progress: protocol.Progress{Done: 8, Total: 8}}
	require.Equal(t, "TensorFusionUpgrade.prod.tf  done after 1h30m, 8 of 8 hosts (100 %); receipt: refit receipt TensorFusionUpgrade.prod.tf\n", view.Closed(r, view.Options{Now: now}))
}

func TestEachKindCountsItsOwnUnits(t *testing.T) {
	half := protocol.Progress{Done: 1, Total: 2}
	for kind, want := range map[string]string{protocol.OpenBaoReplace: "1 of 2 steps (50 %)", protocol.NATSReplicas: "1 of 2 streams (50 %)",
		protocol.CassandraExpand: "1 of 2 steps (50 %)", protocol.TensorFusionUpgrade: "1 of 2 hosts (50 %)"} {
		require.Equal(t, want, view.Counts(kind, half))
	}
}

func TestPlan(t *testing.T) {
	golden(t, "plan", view.Plan(protocol.Plan{
		Digest: "abc", From: map[string]string{"chart": "1.2.0"}, To: map[string]string{"chart": "1.3.0"},
		Changes:  []protocol.PlannedChange{{Action: "create", Object: "ConfigMap/ns/a", Lines: 3}, {Action: "change", Object: "Deployment/ns/b", Lines: 2}},
		Diff:     "--- live\n+++ planned\n@@ -1 +1 @@\n-image: old\n+image: new\n",
		Batches:  []protocol.PlannedBatch{{Stage: "rollout.hypervisor.shared.canary", Total: 1, Hosts: []string{"gpu-1"}}, {Stage: "rollout.hypervisor.shared.batch-1", Total: 40, Hosts: []string{"gpu-2", "gpu-3"}}},
		Forecast: []finding.Finding{{Object: "worker pods", Found: "12 are recreated"}},
		Accepted: []string{"P08"},
	}, view.Options{Now: now}))
	require.Equal(t, "Nothing to change.\n", view.Plan(protocol.Plan{}, view.Options{Now: now}))
}

func TestAPlanShowsWhereAutoUpdateStaysOff(t *testing.T) {
	text := view.Plan(protocol.Plan{LeftOff: []finding.Finding{{Row: "T14", Object: "GPUPool/tf-training, auto update of hypervisors", Found: "2 of 2 hosts are not of the target"}}}, view.Options{Now: now})
	require.Contains(t, text, "Auto update stays off at the end:")
	require.Contains(t, text, "GPUPool/tf-training, auto update of hypervisors")
}

func TestRuns(t *testing.T) {
	golden(t, "runs", view.Runs([]view.Row{
		{ID: "TensorFusionUpgrade.prod.tf", State: "open", Phase: "waitingForApproval", WaitingFor: "rollout.hypervisor.shared.canary", Started: *ago(time.Hour)},
		{ID: "TensorFusionRollback.lab.tf", State: "completed", Phase: "done", Started: *ago(72 * time.Hour), Closed: ago(71 * time.Hour)},
	}, view.Options{Now: now}))
}

func TestTheBarShowsDoneFailedAndLeft(t *testing.T) {
	o := view.Options{}
	require.Equal(t, "", o.Bar(protocol.Progress{}, 10))
	require.Equal(t, "░░░░░░░░░░", o.Bar(protocol.Progress{Total: 100}, 10))
	require.Equal(t, "█████▒▒░░░", o.Bar(protocol.Progress{Done: 5, Failed: 2, Total: 10}, 10))
	require.Equal(t, "▒░░░░░░░░░", o.Bar(protocol.Progress{Failed: 1, Total: 1000}, 10), "one failure is seen even among many hosts")
	require.Equal(t, "██████████", o.Bar(protocol.Progress{Done: 12, Total: 10}, 10))
}

func TestANarrowTerminalCutsNothingOff(t *testing.T) {
	s := status()
	s.Stages[0].Note = "controller 2.16.3 -> 2.17.0, hypervisor 2.16.3 -> 2.17.0; 2 pools, 8 GPU nodes, 64 GPUs; 31 checks met"
	out := view.Status("run", s, view.Options{Now: now, Width: 80})
	require.NotContains(t, out, "≈")
	squeezed := strings.Join(strings.Fields(out), " ")
	for _, word := range strings.Fields(s.Stages[0].Note) {
		require.Contains(t, squeezed, word)
	}
	_, table, _ := strings.Cut(out, "STAGE")
	for _, line := range strings.Split(table, "\n") {
		if strings.Contains(line, "rollout.") || strings.Contains(line, "31 checks") {
			require.LessOrEqual(t, len([]rune(line)), 80, line)
		}
	}
}
