package stage_test

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

func TestDetailsSayWhatIsAwaitedAndHowToAnswer(t *testing.T) {
	eta := start.Add(h)
	ended := start.Add(90 * time.Second)
	s := protocol.Status{
		Phase: protocol.PhaseGate, Stage: "canary", ETA: &eta,
		Progress: protocol.Progress{Done: 1, Total: 8, Failed: 1},
		Current:  []string{"n1", "n2"},
		WaitingFor: &protocol.Waiting{
			Kind: protocol.WaitApproval, Stage: "canary", Since: start, Found: "n1 is proven", Why: "7 follow",
			Helps: "look at n1", Answers: []string{"approve", "reject", "abort"}, Needed: 2, Approvals: []string{"ann"},
		},
		Stages: []protocol.Stage{
			{Name: "plan", State: protocol.Done, Started: &start, Ended: &ended, Note: "8 hosts | 2 pools"},
			{Name: "canary", State: protocol.WaitingForGate, Purpose: "one host first", Attempts: 2},
		},
	}
	text := stage.Details(s, stage.Target{Namespace: "default", WorkflowID: "up.east.tf"})
	for _, want := range []string{
		"**waitingForApproval** at `canary`, 1 of 8 done, 1 failed, ready about 2026-03-02 09:00:00Z",
		"Now: n1, n2",
		"### Waits for approval: `canary`",
		"1 of 2 approvals (ann)",
		"- **Found:** n1 is proven", "- **Why it matters:** 7 follow", "- **What helps:** look at n1",
		"**Answers:** approve, reject, abort",
		"refit approve up.east.tf --stage canary",
		"temporal workflow update execute -w up.east.tf --name approve",
		"tctl workflow signal -w up.east.tf -n approve",
		`| plan | done | 1m30s | 8 hosts \| 2 pools |`,
		"| canary | waitingForApproval |  | attempt 2; one host first |",
	} {
		assert.Contains(t, text, want)
	}
}

func TestDetailsStayBelowTheLimitAndKeepWhatMatters(t *testing.T) {
	long := strings.Repeat("é|", 400)
	for _, rows := range []int{0, 1, 5, 60, 200, 2000} {
		s := protocol.Status{Phase: protocol.PhaseParked, Warnings: make([]string, 100), WaitingFor: &protocol.Waiting{
			Kind: protocol.WaitParked, Stage: "s7", Found: strings.Repeat(long, 10), Why: strings.Repeat(long, 10),
			Helps: strings.Repeat(long, 10), Answers: []string{"retry"}, Findings: make([]finding.Finding, 20),
		}}
		for i := range s.Warnings {
			s.Warnings[i] = long
		}
		for i := range rows {
			s.Stages = append(s.Stages, protocol.Stage{Name: fmt.Sprintf("s%d", i), State: protocol.Done, Note: long})
		}
		if rows == 2000 {
			s.Stages[1200].State = protocol.Parked
		}
		text := stage.Details(s, stage.Target{WorkflowID: "w"})
		assert.Less(t, len(text), 20000, "%d rows", rows)
		assert.Contains(t, text, "refit retry w")
		if rows == 2000 {
			assert.Contains(t, text, "| s0 |")
			assert.Contains(t, text, "| s1200 | parked")
			assert.Contains(t, text, "| s1999 |")
			assert.Contains(t, text, "stages left out here")
		}
	}
}

func TestCommandsAreTheFourWaysToAnswer(t *testing.T) {
	assert.Equal(t, []string{
		"refit approve tensorfusion.east.tf --stage rollout.hypervisor.shared.canary",
		"/namespaces/default/workflows/tensorfusion.east.tf",
		`temporal workflow update execute -w tensorfusion.east.tf --name approve --input '{"stage":"rollout.hypervisor.shared.canary","by":"'"$USER"'"}'`,
		`tctl workflow signal -w tensorfusion.east.tf -n approve -i '{"stage":"rollout.hypervisor.shared.canary","by":"'"$USER"'"}'`,
	}, stage.Commands("tensorfusion.east.tf", "rollout.hypervisor.shared.canary"))
}

func TestCommandsNameTheNamespaceAndLeaveTheStageOutForTheRun(t *testing.T) {
	got := stage.Target{Namespace: "gpu ops", WorkflowID: "w", Verb: protocol.Resume, Stage: "s"}.Commands()
	assert.Equal(t, []string{
		"refit resume w --namespace 'gpu ops'",
		"/namespaces/gpu%20ops/workflows/w",
		`temporal workflow update execute -w w --namespace 'gpu ops' --name resume --input '{"by":"'"$USER"'"}'`,
		`tctl --namespace 'gpu ops' workflow signal -w w -n resume -i '{"by":"'"$USER"'"}'`,
	}, got)
}

func TestCommandsSurviveTheShell(t *testing.T) {
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Skip("no sh on this machine")
	}
	id, name := `it's "odd" $(id); x`, `a'b"c $HOME \`
	line := stage.Commands(id, name)[3]
	line = strings.Replace(line, "tctl workflow", `printf '%s\n'`, 1)
	cmd := exec.Command(sh, "-c", line)
	cmd.Env = []string{"USER=ann"}
	out, err := cmd.Output()
	require.NoError(t, err)
	assert.Equal(t, []string{"signal", "-w", id, "-n", "approve", "-i", `{"stage":"a'b\"c $HOME \\","by":"ann"}`},
		strings.Split(strings.TrimSuffix(string(out), "\n"), "\n"))
}
