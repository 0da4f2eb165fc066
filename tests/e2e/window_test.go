package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/workflows/protocol"
)

// The real windows of this case are as short as the stages' own estimates
// allow: a stage starts only where its whole estimate fits.
const (
	// beforeClose is the estimate of the Helm step (120 s with the limits below),
	// and what the stages before it need, with as much again for a busy machine.
	beforeClose = 135 * time.Second
	// closed is how long the window stays shut: enough to see the wait.
	closed = 25 * time.Second
	// lastHost is when the batch is begun: later than that its measured estimate
	// might no longer fit, and a host's deadline must reach beyond the window.
	lastHost, hostDeadline = 25 * time.Second, 75 * time.Second
)

// throughAWindow runs the upgrade in a maintenance window that closes while a
// batch is away, and in the next one. The batch is finished, nothing else is
// begun until the window opens again.
func (w *world) throughAWindow(t *testing.T, o *observer) protocol.Receipt {
	t.Helper()
	const canary, batch, next = "rollout.hypervisor.shared.canary", "rollout.hypervisor.shared.batch-1", "rollout.hypervisor.training"
	now := time.Now().UTC()
	// Windows open at full minutes, and may close at any second.
	opens := now.Add(beforeClose + closed).Truncate(time.Minute).Add(time.Minute)
	closes := opens.Add(-closed)
	cron := func(at time.Time) string { return at.Format("4 15 * * *") }
	began := now.Truncate(time.Minute)
	node := w.nodesOf("shared")[1]
	w.fault("hypervisor-never-ready", node)
	run := w.start(append(slices.Clone(quickPlan),
		"windows[0].opens="+cron(began), fmt.Sprintf("windows[0].duration=%s", closes.Sub(began)),
		"windows[1].opens="+cron(opens), "windows[1].duration=1h",
		fmt.Sprintf("rollouts[0].strategy.hostTimeout=%s", hostDeadline), "validation.mode=canaryJob",
		"limits.release=20s", "limits.controller=40s", "limits.hold=5s")...)

	s := w.untilGate(run)
	require.Equal(t, canary, s.WaitingFor.Stage)
	require.Greater(t, time.Until(closes), lastHost, "the canary took too long to see a window close after it")
	w.poll("the window's last seconds", 3*time.Minute, func() bool { return time.Until(closes) < lastHost })
	w.answer(protocol.Approve, run)
	w.midHost(run, node)
	require.True(t, time.Now().Before(closes), "the batch must be begun within the window")
	s = w.until(rolloutOf(run, node), "the window's end", time.Minute, func(protocol.Status) bool { return time.Now().After(closes) })
	assert.Equal(t, protocol.PhaseRunning, s.Phase)
	assert.Equal(t, "wave of batch-1", s.Section, "what was begun goes on")
	w.fault("clear")

	s = w.until(run, "the wait for the next window", closed, func(s protocol.Status) bool { return s.WaitingFor != nil })
	assert.Equal(t, protocol.WaitWindow, s.WaitingFor.Kind)
	assert.Equal(t, protocol.PhaseWindow, s.Phase)
	assert.Equal(t, next, s.WaitingFor.Stage)
	require.NotNil(t, s.WaitingFor.Until)
	assert.True(t, opens.Equal(*s.WaitingFor.Until), "until %s, expected %s", s.WaitingFor.Until, opens)
	assert.Contains(t, s.WaitingFor.Found, "the next opens at "+opens.Format(time.RFC3339))
	out, _ := w.refit("status", run)
	assert.Contains(t, out, "Waiting for a maintenance window before "+next)
	assert.Contains(t, out, opens.Local().Format("15:04"))
	rows := map[string]protocol.Stage{}
	for _, row := range s.Stages {
		rows[row.Name] = row
	}
	require.Equal(t, protocol.Done, rows[batch].State, "the batch is finished")
	assert.True(t, rows[batch].Ended.After(closes), "ended %s, the window closed at %s", rows[batch].Ended, closes)

	w.until(run, "the next window", closed+time.Minute, func(s protocol.Status) bool {
		deleted := o.deletions()
		if time.Now().Before(opens) {
			require.Equal(t, 2, deleted, "nothing is begun outside the windows")
		}
		return s.WaitingFor == nil || s.WaitingFor.Kind != protocol.WaitWindow
	})
	assert.False(t, time.Now().Before(opens), "the run must not go on before %s", opens)
	return w.approveAll(run)
}
