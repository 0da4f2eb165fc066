package tensorfusion

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
)

// workersOnly rolls the workers of one pool and nothing else.
func workersOnly() UpgradeInput {
	in := upgradeInput()
	in.Rollouts = []Rollout{{Component: Worker, Pools: []string{"shared"}, Workers: &rollout.WorkerOptions{AcknowledgeLostSessions: true}}}
	return in
}

// With the flag on, the controller would roll the hypervisors that the plan
// leaves: better asked before anything is touched than at the end of the run.
func TestAutoUpdateThatCannotComeBackIsAskedAboutBeforeAnythingChanges(t *testing.T) {
	i := newInstallation(t)
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		w := h.waits(protocol.WaitParked, "plan")
		assert.Contains(t, w.Found, "hypervisors of tf-shared (2 of 2 hosts are not of the target), hypervisors of tf-training")
		assert.Contains(t, w.Helps, `"policy" in acknowledge`)
		require.Len(t, w.Findings, 2)
		assert.Equal(t, "T14", w.Findings[0].Row)
		h.answer(protocol.Abort)
	})
	r := h.upgrade(workersOnly())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.NotContains(t, strings.Join(i.log, "\n"), "Hold")
	require.Empty(t, r.LeftBehind)
}

func TestAnAcknowledgedPlanEndsWithAutoUpdateOffWhereItRolledNothing(t *testing.T) {
	i := newInstallation(t)
	in := workersOnly()
	in.Acknowledge = append(in.Acknowledge, AcknowledgeOff)
	r := newHarness(t, i).upgrade(in)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.Contains(t, r.Plan.Accepted, AcknowledgeOff)
	require.Len(t, r.Plan.LeftOff, 2)
	assert.Equal(t, []tensorfusion.PoolPolicy{{Pool: "tf-shared"}, {Pool: "tf-training", AutoWorker: true}}, i.policies[0].Before)
	assert.Equal(t, []string{
		"pool tf-shared: auto update of hypervisors stays off: 2 of 2 hosts are not of the target",
		"pool tf-training: auto update of hypervisors stays off: 2 of 2 hosts are not of the target",
	}, r.LeftBehind)
}

func TestWhatCameOnTargetByItselfGetsItsPolicyBack(t *testing.T) {
	i := newInstallation(t)
	i.proven = true // but another controller comes, which may make pods otherwise
	in := workersOnly()
	in.Acknowledge = append(in.Acknowledge, AcknowledgeOff)
	r := newHarness(t, i).upgrade(in)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Len(t, r.Plan.LeftOff, 2)
	assert.Contains(t, r.Plan.LeftOff[0].Found, "controller 2.17.0 may make its pods otherwise than 2.16.3")
	assert.Equal(t, asFound, i.policies[0].Before)
	assert.Empty(t, r.LeftBehind)
}

func TestAutoUpdateIsNotAskedAboutWhereNothingBecomesOutdatedOrItStaysOff(t *testing.T) {
	i := newInstallation(t)
	i.proven, i.same = true, true
	require.Equal(t, protocol.OutcomeDone, newHarness(t, i).upgrade(workersOnly()).Outcome)
	require.Equal(t, asFound, i.policies[0].Before)

	i, in := newInstallation(t), workersOnly()
	in.Policy = tensorfusion.PolicyKeepOff
	require.Equal(t, protocol.OutcomeDone, newHarness(t, i).upgrade(in).Outcome)
}

func TestAPoolThatCannotBeSealedIsLeftOut(t *testing.T) {
	i, in := newInstallation(t), upgradeInput()
	in.Rollouts[0].Pools = []string{"shared"}
	in.Policy, in.Acknowledge = tensorfusion.PolicySeal, append(in.Acknowledge, AcknowledgeOff)
	r := newHarness(t, i).upgrade(in)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, asFound[:1], i.policies[0].Before)
	require.Contains(t, strings.Join(r.LeftBehind, "\n"), "pool tf-training: auto update of hypervisors stays off")
}

func TestWorkersAndClientsThatThePlanLeavesOutdatedAreForeseen(t *testing.T) {
	for _, c := range []struct {
		name string
		plan func(*installation)
		want string
	}{
		{"the release changes their template", func(i *installation) {
			i.outdated = []tensorfusion.Outdated{{Pool: "tf-training", Workers: true}, {Pool: "tf-shared", Workers: true, Clients: true}}
		}, "workers of tf-training (the release changes what its workers are made of)"},
		{"they are outdated already", func(i *installation) {
			i.workloads = map[string][]tensorfusion.Workload{"tf-training": {{Name: "a", Stale: true}, {Name: "b"}}}
		}, "workers of tf-training (1 of 2 workloads have outdated workers)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			i := newInstallation(t)
			c.plan(i)
			h := newHarness(t, i)
			h.at(time.Minute, func() {
				w := h.waits(protocol.WaitParked, "plan")
				assert.Contains(t, w.Found, c.want)
				assert.NotContains(t, w.Found, "tf-shared", "its flag was off before")
				assert.Equal(t, "T15", w.Findings[0].Row)
				h.answer(protocol.Abort)
			})
			require.Equal(t, protocol.OutcomeAborted, h.upgrade(upgradeInput()).Outcome)
		})
	}
}

// What an answer leaves out because it is empty must not stay from the one before.
func TestARetriedPlanForgetsWhatIsNoLongerOutdated(t *testing.T) {
	i := newInstallation(t)
	i.outdated = []tensorfusion.Outdated{{Pool: "tf-training", Workers: true}}
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		h.waits(protocol.WaitParked, "plan")
		i.outdated = nil
		h.answer(protocol.Retry)
	})
	require.Equal(t, protocol.OutcomeDone, h.upgrade(upgradeInput()).Outcome)
}

// A rollback that parks at its end leaves people with two problems.
func TestARollbackShowsAtItsGateWhatStaysOffAndAsksNoMore(t *testing.T) {
	i := newInstallation(t)
	i.outdated = []tensorfusion.Outdated{{Pool: "tf-training", Workers: true}}
	i.workloads = map[string][]tensorfusion.Workload{"tf-training": {{Name: "a", Stale: true}}}
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		assert.Contains(t, h.waits(protocol.WaitApproval, "plan").Found, "stays off: GPUPool/tf-training, auto update of workers")
		h.answer(protocol.Approve)
	})
	r := h.rollback(rollbackInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.Equal(t, tensorfusion.PoolPolicy{Pool: "tf-training", AutoHypervisor: true}, i.policies[0].Before[1])
	assert.Contains(t, strings.Join(r.LeftBehind, "\n"), "pool tf-training: auto update of workers stays off: 1 of 1 workloads")
}

// Who skips a batch has decided; the run must still be able to end, and say so.
func TestHostsOfASkippedBatchAreListedAndNotJudged(t *testing.T) {
	i := newInstallation(t)
	i.ends = map[string]rollout.Result{"hypervisor shared": {Outcome: protocol.OutcomeDone, Hosts: []rollout.HostRow{
		{Name: "shared-1", Outcome: tensorfusion.OutcomeReplaced}, {Name: "shared-2", Outcome: rollout.OutcomeLeft},
	}}}
	r := newHarness(t, i).upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, []string{"shared-2"}, i.verified[0].Rolled.LeftHosts)
	require.Equal(t, []tensorfusion.PoolPolicy{{Pool: "tf-shared"}, asFound[1]}, i.policies[0].Before)
	left := strings.Join(r.LeftBehind, "\n")
	assert.Contains(t, left, "pool tf-shared: auto update of hypervisors stays off: hosts left as they are: 1")
	assert.Contains(t, left, "they keep the hypervisor they had: shared-2 (1 of 1 shown)")
}

// A batch that was left and then done after all is not left.
func TestARolloutThatRunsAgainForgetsWhatItsFirstRunLeft(t *testing.T) {
	i := newInstallation(t)
	i.ends = map[string]rollout.Result{"hypervisor shared": {Outcome: protocol.OutcomeDone, Hosts: []rollout.HostRow{{Name: "shared-1", Outcome: rollout.OutcomeLeft}}}}
	i.drift["6"] = []finding.Finding{{Row: "P12", Object: "worker Pod/apps/x", Found: "gone"}}
	h := newHarness(t, i)
	h.at(time.Minute, func() { h.answer(protocol.Retry) })
	r := h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Empty(t, i.verified[0].Rolled.LeftHosts)
	require.Equal(t, asFound, i.policies[0].Before)
	require.Empty(t, r.LeftBehind)
}

// Auto update of clients deletes pods, bare ones too, and heeds no budget.
func TestAutoUpdateOfClientsStaysOffWhereSomeWereLeft(t *testing.T) {
	i := newInstallation(t)
	i.policy = []tensorfusion.PoolPolicy{{Pool: "tf-shared", AutoHypervisor: true, AutoClient: true}}
	i.ends = map[string]rollout.Result{"client shared": {Outcome: protocol.OutcomeDone, LeftClients: []tensorfusion.ClientPod{{Namespace: "apps", Name: "bare"}}}}
	in := upgradeInput()
	in.Rollouts = append(in.Rollouts, Rollout{Component: Client, Pools: []string{"shared"}})
	r := newHarness(t, i).upgrade(in)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, []tensorfusion.PoolPolicy{{Pool: "tf-shared", AutoHypervisor: true}}, i.policies[0].Before)
	require.Equal(t, []string{"apps/bare"}, i.verified[0].Rolled.Left)
	require.Contains(t, strings.Join(r.LeftBehind, "\n"), "auto update of clients stays off: application pods with an outdated injection: 1")
}
