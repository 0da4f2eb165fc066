package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
	"github.com/stretchr/testify/require"
	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/client"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/starter/cli"
	"github.com/refit-run/refit/starter/run"
	"github.com/refit-run/refit/workflows/protocol"
)

func TestSetupCreatesTheSearchAttributesOnce(t *testing.T) {
	needWorld(t)
	first := refit(t, "setup", "-o", "json")
	require.Equal(t, cli.ExitDone, first.code, first.err)
	again := refit(t, "setup")
	require.Equal(t, cli.ExitDone, again.code, again.err)
	require.Contains(t, again.out, "there already")
}

func TestARunIsStartedWatchedApprovedAndItsReceiptRead(t *testing.T) {
	needWorld(t)
	file, id := planFile(t, "gate", "hosts: 2")
	started := refit(t, "start", file)
	require.Equal(t, cli.ExitDone, started.code, started.err)
	require.Contains(t, started.out, "started "+id)

	early := refit(t, "receipt", id)
	require.NotEqual(t, cli.ExitDone, early.code)
	require.Contains(t, early.err, "is open")

	watched := refit(t, "watch", id)
	require.Equal(t, cli.ExitGate, watched.code, watched.err)
	require.Contains(t, watched.out, "progress: 2 of 2 hosts")
	require.Contains(t, watched.out, "Waiting for approval of "+gateName)
	require.Contains(t, watched.out, "refit approve "+id+" --stage "+gateName)
	require.NotContains(t, watched.out, "\x1b", "no colours outside a terminal")

	status := refit(t, "status", id, "-o", "json", "--exit-code")
	require.Equal(t, cli.ExitGate, status.code)
	var o run.Observation
	require.NoError(t, json.Unmarshal([]byte(status.out), &o))
	require.Equal(t, protocol.PhaseGate, o.Status.Phase)

	approved := refit(t, "approve", id, "--stage", gateName, "--comment", "canary is fine")
	require.Equal(t, cli.ExitDone, approved.code, approved.err)
	require.Contains(t, approved.out, "the run goes on")

	ended := refit(t, "watch", id)
	require.Equal(t, cli.ExitDone, ended.code, ended.err)
	closed := refit(t, "watch", id, "-o", "json")
	require.Equal(t, cli.ExitDone, closed.code, closed.err)
	var last run.Observation
	require.NoError(t, json.Unmarshal([]byte(closed.out), &last))
	require.Equal(t, protocol.OutcomeDone, last.Receipt.Outcome)
	receipt := refit(t, "receipt", id)
	require.Equal(t, cli.ExitDone, receipt.code, receipt.err)
	require.Contains(t, receipt.out, "approve "+gateName+" by ann")
	require.Contains(t, receipt.out, "canary is fine")

	late := refit(t, "approve", id)
	require.Equal(t, cli.ExitRefused, late.code)
	require.Contains(t, late.err, "is closed")
}

func TestARejectedRunParksAndAnAbortedOneSaysSo(t *testing.T) {
	needWorld(t)
	file, id := planFile(t, "gate")
	require.Equal(t, cli.ExitGate, refit(t, "start", file, "--until-gate").code)
	require.Equal(t, cli.ExitDone, refit(t, "reject", id, "--by", "bob").code)
	parked := refit(t, "watch", id)
	require.Equal(t, cli.ExitParked, parked.code)
	require.Contains(t, parked.out, "rejected by bob")
	require.Equal(t, cli.ExitDone, refit(t, "abort", id).code)
	require.Equal(t, cli.ExitAborted, refit(t, "watch", id, "--follow").code)
	require.Equal(t, cli.ExitAborted, refit(t, "status", id, "--exit-code").code)
}

func TestAnswersThatFitNothingAreRefusedAndChangeNothing(t *testing.T) {
	needWorld(t)
	file, id := planFile(t, "gate")
	require.Equal(t, cli.ExitGate, refit(t, "start", file, "--until-gate").code)
	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"approve", id, "--stage", "backup"}, cli.ExitRefused, "approve refused by run " + id + ": stage backup does not wait"},
		{[]string{"skip", id}, cli.ExitRefused, "does not take skip"},
		{[]string{"approve", "no-such-run"}, cli.ExitInput, `run "no-such-run" is not known`},
		{[]string{"start", file}, cli.ExitRefused, "is open already"},
		{[]string{"pause", id, "--stage", "x"}, cli.ExitInput, "unknown flag: --stage"},
	} {
		got := refit(t, c.args...)
		require.Equal(t, c.code, got.code, "%v: %s", c.args, got.err)
		require.Contains(t, got.err, c.text)
	}
	require.Equal(t, cli.ExitGate, refit(t, "status", id, "--exit-code").code)
}

func TestASignalThatFitsNothingIsRecordedAsIgnored(t *testing.T) {
	needWorld(t)
	file, id := planFile(t, "gate")
	require.Equal(t, cli.ExitGate, refit(t, "start", file, "--until-gate").code)
	sent := refit(t, "approve", id, "--stage", "backup", "--signal")
	require.Equal(t, cli.ExitDone, sent.code, sent.err)
	require.Contains(t, sent.out, "as a signal")
	require.Contains(t, refit(t, "status", id).out, "ignored: approve backup by ann")
}

func TestARunWithoutUpdatesIsAnsweredBySignal(t *testing.T) {
	needWorld(t)
	file, id := planFile(t, "noUpdates")
	require.Equal(t, cli.ExitGate, refit(t, "start", file, "--until-gate").code)
	sent := refit(t, "approve", id)
	require.Equal(t, cli.ExitDone, sent.code, sent.err)
	require.Contains(t, sent.out, "as a signal")
	require.Equal(t, cli.ExitDone, refit(t, "watch", id, "--follow").code)
}

func TestFailedRunsHaveTheirExitCodes(t *testing.T) {
	needWorld(t)
	for course, code := range map[string]int{"badInput": cli.ExitInput, "locked": cli.ExitRefused, "work": cli.ExitDone, "park": cli.ExitParked} {
		t.Run(course, func(t *testing.T) {
			file, id := planFile(t, course)
			got := refit(t, "start", file, "--until-gate")
			require.Equal(t, code, got.code, got.err)
			require.Equal(t, code, refit(t, "status", id, "--exit-code").code)
		})
	}
}

func TestPlanShowsChangesAndLeavesNothingOpen(t *testing.T) {
	needWorld(t)
	file, id := planFile(t, "gate")
	got := refit(t, "plan", file, "--exit-code")
	require.Equal(t, cli.ExitChanges, got.code, got.err)
	require.Contains(t, got.out, "Deployment/ns/tf")
	require.Equal(t, cli.ExitDone, refit(t, "plan", "-f", file).code)

	parked := refit(t, "plan", file, "--set", "course=park")
	require.Equal(t, cli.ExitParked, parked.code, parked.err)
	require.Contains(t, parked.out, "host gpu-1 is broken")
	require.Eventually(t, func() bool {
		d, err := world.client.DescribeWorkflowExecution(context.Background(), id+".plan", "")
		return err == nil && d.WorkflowExecutionInfo.Status == enumspb.WORKFLOW_EXECUTION_STATUS_COMPLETED
	}, waitLimit, waitStep)
}

func TestABadPlanFileStopsBeforeTemporalIsContacted(t *testing.T) {
	nobody := environment(t, "TEMPORAL_ADDRESS=127.0.0.1:1")
	file := filepath.Join(t.TempDir(), "plan.yaml")
	require.NoError(t, os.WriteFile(file, []byte("kind: TensorFusionUpgrade\ncluster: 3\nobjct: x\n"), 0o600))
	got := refitWith(t, nobody, nil, "start", file)
	require.Equal(t, cli.ExitInput, got.code)
	require.Contains(t, got.err, file+`:2:10: cluster is the number 3: want a string`)
	require.Contains(t, got.err, file+`:3:1: objct is not a key that is known here; did you mean "object"?`)
}

func TestWhatIsTypedWrongIsSaid(t *testing.T) {
	nobody := environment(t, "TEMPORAL_ADDRESS=127.0.0.1:1")
	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"status"}, cli.ExitError, "no Temporal server answers at 127.0.0.1:1"},
		{[]string{"start", "/does/not/exist.yaml"}, cli.ExitInput, "no such file"},
		{[]string{"start"}, cli.ExitInput, "takes one plan file"},
		{[]string{"plan", "a.yaml", "-f", "b.yaml"}, cli.ExitInput, "found 2"},
		{[]string{"strat"}, cli.ExitInput, `"strat" is not a refit command`},
		{[]string{"list", "-o", "xml"}, cli.ExitInput, "want table, json or yaml"},
		{[]string{"list", "--al"}, cli.ExitInput, "unknown flag: --al"},
		{[]string{"watch", "--follow", "--until-gate"}, cli.ExitInput, "follow"},
	} {
		got := refitWith(t, nobody, nil, c.args...)
		require.Equal(t, c.code, got.code, "%v: %s", c.args, got.err)
		require.Contains(t, got.err, c.text)
	}
}

func TestATerminalGetsColoursAndOneBlockDrawnOver(t *testing.T) {
	needWorld(t)
	file, id := planFile(t, "gate", "hosts: 3")
	size := func() (int, int) { return 100, 40 }
	got := refitWith(t, environment(t), size, "start", file, "--until-gate")
	require.Equal(t, cli.ExitGate, got.code, got.err)
	require.Contains(t, got.out, "\x1b[J")
	require.Contains(t, got.out, "█")
	require.Contains(t, got.out, "\x1b[3")
	plain := refitWith(t, environment(t, "NO_COLOR=1"), size, "status", id)
	require.NotContains(t, plain.out, "\x1b[3")
}

func TestThePrintedCommandsWorkAsPrinted(t *testing.T) {
	needWorld(t)
	bin := t.TempDir()
	require.NoError(t, os.Symlink(world.temporal, filepath.Join(bin, "temporal")))
	own, err := os.Executable()
	require.NoError(t, err)
	require.NoError(t, os.Symlink(own, filepath.Join(bin, "refit")))
	for _, tool := range []string{"refit", "temporal"} {
		t.Run(tool, func(t *testing.T) {
			file, id := planFile(t, "gate")
			shown := refitWith(t, environment(t), nil, "start", file, "--until-gate")
			require.Equal(t, cli.ExitGate, shown.code, shown.err)
			shell := exec.Command("sh", "-c", line(t, shown.out, tool+" "))
			shell.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "TEMPORAL_ADDRESS="+world.address, "USER=ann", "HOME="+t.TempDir(), actAsRefit+"=1")
			out, err := shell.CombinedOutput()
			require.NoError(t, err, string(out))
			require.Equal(t, cli.ExitDone, refit(t, "watch", id, "--follow").code)
			require.Contains(t, refit(t, "receipt", id).out, "approve "+gateName+" by ann")
		})
	}
}

// line is the printed line that begins with a tool, without its indent.
func line(t *testing.T, text, tool string) string {
	t.Helper()
	for _, l := range strings.Split(text, "\n") {
		if l = strings.TrimSpace(l); strings.HasPrefix(l, tool) {
			return l
		}
	}
	require.Fail(t, "no line begins with "+tool, text)
	return ""
}

// TestTheTctlLineOnTheWire plays tctl: a stand-in binary of that name records
// its arguments, and SignalWorkflowExecution is sent as tctl sends it, with the
// input as one json/plain payload.
func TestTheTctlLineOnTheWire(t *testing.T) {
	needWorld(t)
	file, id := planFile(t, "gate")
	shown := refit(t, "start", file, "--until-gate")
	require.Equal(t, cli.ExitGate, shown.code, shown.err)
	bin, record := t.TempDir(), filepath.Join(t.TempDir(), "args")
	require.NoError(t, os.WriteFile(filepath.Join(bin, "tctl"), []byte("#!/bin/sh\nprintf '%s\\n' \"$@\" > "+record+"\n"), 0o755))
	printed := line(t, shown.out, "TEMPORAL_CLI_ADDRESS="+world.address+" tctl ")
	shell := exec.Command("sh", "-c", printed)
	shell.Env = []string{"PATH=" + bin + ":/usr/bin:/bin", "USER=ann"}
	out, err := shell.CombinedOutput()
	require.NoError(t, err, string(out))
	args, err := os.ReadFile(record)
	require.NoError(t, err)
	words := strings.Split(strings.TrimSpace(string(args)), "\n")
	require.Equal(t, []string{"workflow", "signal", "-w", id, "-n", "approve", "-i"}, words[:7])
	signalAsTctl(t, id, words[5], words[7])
	require.Equal(t, cli.ExitDone, refit(t, "watch", id, "--follow").code)
	require.Contains(t, refit(t, "receipt", id).out, "approve "+gateName+" by ann")
}

func TestARunIsFoundWithoutItsNameWhenItIsTheOnlyOne(t *testing.T) {
	needWorld(t)
	none := refit(t, "status")
	require.Equal(t, cli.ExitInput, none.code)
	require.Contains(t, none.err, "no run is open")
	file, id := planFile(t, "gate")
	require.Equal(t, cli.ExitGate, refit(t, "start", file, "--until-gate").code)
	require.Eventually(t, func() bool { return strings.Contains(refit(t, "list").out, id) }, waitLimit, waitStep)
	require.Contains(t, refit(t, "status").out, id)
	second, _ := planFile(t, "gate", "")
	require.Equal(t, cli.ExitDone, refit(t, "start", second, "--id", id+".second").code)
	t.Cleanup(func() { _ = world.client.TerminateWorkflow(context.Background(), id+".second", "", "end of test") })
	require.Eventually(t, func() bool {
		got := refit(t, "status")
		return got.code == cli.ExitInput && strings.Contains(got.err, "2 runs are open")
	}, waitLimit, waitStep)
}

func TestArtifactsAreListedAndDecryptedWithAnIdentity(t *testing.T) {
	needWorld(t)
	key, err := age.GenerateX25519Identity()
	require.NoError(t, err)
	store, err := artifact.Open(t.TempDir(), []string{key.Recipient().String()})
	require.NoError(t, err)
	defer store.Close()
	ref, err := store.Put(context.Background(), "runs/1/values.yaml", artifact.Secret, 1, func(w io.Writer) error {
		_, err := w.Write([]byte("password: fake\n"))
		return err
	})
	require.NoError(t, err)
	refs, err := json.Marshal([]artifact.Ref{ref})
	require.NoError(t, err)
	file, id := planFile(t, "gate", "stored: "+string(refs))
	require.Equal(t, cli.ExitGate, refit(t, "start", file, "--until-gate").code)

	listed := refit(t, "artifacts", "list", id)
	require.Equal(t, cli.ExitDone, listed.code, listed.err)
	require.Contains(t, listed.out, "runs/1/values.yaml")
	sealed := refit(t, "artifacts", "get", "values.yaml", "--run", id)
	require.Equal(t, cli.ExitInput, sealed.code)
	require.Contains(t, sealed.err, "--identity")
	identity := filepath.Join(t.TempDir(), "identity.txt")
	require.NoError(t, os.WriteFile(identity, []byte(key.String()+"\n"), 0o600))
	got := refit(t, "artifacts", "get", "values.yaml", "--run", id, "--identity", identity)
	require.Equal(t, cli.ExitDone, got.code, got.err)
	require.Equal(t, "password: fake\n", got.out)
	target := filepath.Join(t.TempDir(), "values.yaml")
	require.Equal(t, cli.ExitDone, refit(t, "artifacts", "get", "values.yaml", "--run", id, "--identity", identity, "--to", target).code)
	content, err := os.ReadFile(target)
	require.NoError(t, err)
	require.True(t, bytes.Equal(content, []byte("password: fake\n")))
	require.Equal(t, cli.ExitInput, refit(t, "artifacts", "get", "nothing", "--run", id).code)
}

// No worker polls there: a mistyped namespace, or a worker that is down.
func TestAPlanThatNobodyTakesUpIsGivenUpAndLeavesNoOpenRun(t *testing.T) {
	needWorld(t)
	quiet := inNamespace(t, "deserted")
	t.Setenv("TEMPORAL_ADDRESS", world.address)
	file, id := planFile(t, "work")
	var out, errs bytes.Buffer
	a := app(environment(t), func() (int, int) { return 0, 0 }, &out, &errs)
	a.Patience = time.Second
	code := 0
	require.Eventually(t, func() bool { // the server learns of a namespace within seconds
		out.Reset()
		errs.Reset()
		code = cli.Main(t.Context(), a, []string{"plan", file})
		return !strings.Contains(errs.String(), "deserted is not found") && !strings.Contains(errs.String(), "not found")
	}, waitLimit, waitStep)
	require.Equal(t, cli.ExitError, code)
	require.Contains(t, errs.String(), "no worker took it up within 1s")
	c, err := client.Dial(client.Options{HostPort: world.address, Namespace: "deserted", Logger: quiet})
	require.NoError(t, err)
	defer c.Close()
	requested := false
	events := c.GetWorkflowHistory(t.Context(), id+".plan", "", false, enumspb.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT)
	for events.HasNext() {
		e, err := events.Next()
		require.NoError(t, err)
		requested = requested || e.EventType == enumspb.EVENT_TYPE_WORKFLOW_EXECUTION_CANCEL_REQUESTED
	}
	require.True(t, requested, "it would take the Lease as soon as a worker comes")
}
