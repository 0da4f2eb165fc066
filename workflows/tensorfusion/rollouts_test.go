package tensorfusion

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/rollout/plan"
)

// rolledEntries are the pools that rollouts went through, in order.
func (i *installation) rolledEntries() (out []string) {
	for _, in := range i.rolled {
		out = append(out, in.Component+" "+in.Entry)
	}
	return out
}

// A gate or a window before the Helm step may take days.
func TestAPoolThatGotNodesSinceThePlanIsRolledToo(t *testing.T) {
	i := newInstallation(t)
	i.led = pools("")
	i.led[2].Nodes = 3
	r := newHarness(t, i).upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, []string{"hypervisor shared", "hypervisor training", "hypervisor empty"}, i.rolledEntries())
	require.Contains(t, strings.Join(r.Warnings, "\n"), "pool empty has 3 GPU nodes and had none at the plan")
	require.Contains(t, i.log, "Verify tf-shared,tf-training,tf-empty")
}

func TestAPoolThatLostItsNodesSinceThePlanIsNotWaitedFor(t *testing.T) {
	i := newInstallation(t)
	i.led = pools("")
	i.led[1].Nodes = 0
	r := newHarness(t, i).upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, []string{"hypervisor shared"}, i.rolledEntries())
	require.Contains(t, strings.Join(r.Warnings, "\n"), "pool training has no GPU nodes any more")
}

func TestAPoolOfThePlanThatIsGoneUnderTheNewControllerParks(t *testing.T) {
	i := newInstallation(t)
	i.led = pools("")[1:]
	in := upgradeInput()
	in.Rollouts[0].Pools = []string{"shared", "training"}
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		require.Contains(t, h.waits(protocol.WaitParked, "helm").Found, `the plan rolls pool "shared", which spec.gpuPools does not hold`)
		require.Empty(t, i.rolled)
		i.led = pools("")
		h.answer(protocol.Retry)
	})
	r := h.upgrade(in)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, []string{"hypervisor shared", "hypervisor training"}, i.rolledEntries())
	require.Equal(t, 2, attempts(r, "helm"))
}

// attempts says how often a stage was tried.
func attempts(r protocol.Receipt, stage string) int {
	for _, s := range r.Stages {
		if s.Name == stage {
			return s.Attempts
		}
	}
	return 0
}

// Retry must be able to help: the preflight looks at the pools again.
func TestAPoolThatIsMissingParksThePreflightAndRetryFindsIt(t *testing.T) {
	i := newInstallation(t)
	i.seen = pools("")[1:]
	in := upgradeInput()
	in.Rollouts[0].Pools = []string{"shared", "training"}
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		require.Contains(t, h.waits(protocol.WaitParked, "preflight").Helps, "known: training, empty")
		i.seen = nil
		h.answer(protocol.Retry)
	})
	r := h.upgrade(in)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, []string{"hypervisor shared", "hypervisor training"}, i.rolledEntries())
	require.Equal(t, 2, attempts(r, "preflight"))
}

func TestAPlanWhosePoolsHaveNoNodesSaysThatNothingIsRolled(t *testing.T) {
	i := newInstallation(t)
	i.seen = []tensorfusion.Pool{{Name: "tf-empty", Entry: "empty"}}
	i.led = i.seen
	r := newHarness(t, i).upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Empty(t, i.rolled)
	require.Contains(t, strings.Join(r.Warnings, "\n"), "no pool that the plan rolls has GPU nodes")
}

func TestEveryPoolOfWhichSomethingWasRolledIsProvenByAJobOnce(t *testing.T) {
	i := newInstallation(t)
	in := upgradeInput()
	in.Acknowledge = append(in.Acknowledge, AcknowledgeOff)
	in.Rollouts = []Rollout{
		{Component: Worker, Workers: &rollout.WorkerOptions{AcknowledgeLostSessions: true}},
		{Component: Hypervisor, Pools: []string{"training"}},
	}
	require.Equal(t, protocol.OutcomeDone, newHarness(t, i).upgrade(in).Outcome)
	var jobs []string
	for _, l := range i.log {
		if strings.HasPrefix(l, "RunCanaryJob") {
			jobs = append(jobs, l)
		}
	}
	require.Equal(t, []string{"RunCanaryJob tf-training training-1", "RunCanaryJob tf-shared"}, jobs,
		"pinned to the host that was proven; elsewhere wherever the pool has room")
}

func TestTheJobGoesToAHostThatIsStillProvenWhenARolloutRanAgain(t *testing.T) {
	i := newInstallation(t)
	i.ends = map[string]rollout.Result{"hypervisor shared": {Outcome: protocol.OutcomeDone, Hosts: []rollout.HostRow{{Name: "shared-9", Outcome: tensorfusion.OutcomeReplaced}}}}
	i.drift["6"] = []finding.Finding{{Row: "P12", Object: "worker Pod/apps/x", Found: "gone"}}
	h := newHarness(t, i)
	h.at(time.Minute, func() { h.answer(protocol.Retry) })
	require.Equal(t, protocol.OutcomeDone, h.upgrade(upgradeInput()).Outcome)
	require.Contains(t, i.log, "RunCanaryJob tf-shared shared-1")
}

// The release of an earlier run is in place, its workers are not rolled yet.
func TestWorkersThatAreStillOutdatedAreWorkAlthoughTheReleaseIsInPlace(t *testing.T) {
	i := newInstallation(t)
	i.noChange, i.proven, i.same = true, true, true
	in := workersOnly()
	require.Equal(t, protocol.OutcomeNoChange, newHarness(t, i).upgrade(in).Outcome)

	i.workloads = map[string][]tensorfusion.Workload{"tf-shared": {{Name: "chat", Stale: true}}}
	require.Equal(t, protocol.OutcomeDone, newHarness(t, i).upgrade(in).Outcome)
	require.Equal(t, []string{"worker shared"}, i.rolledEntries())

	i.rolled, i.clients = nil, map[string][]tensorfusion.ClientPod{"tf-training": {{Name: "app"}}}
	in.Rollouts = []Rollout{{Component: Client}}
	require.Equal(t, protocol.OutcomeDone, newHarness(t, i).upgrade(in).Outcome)
	require.Equal(t, []string{"client shared", "client training"}, i.rolledEntries())
}

// Until a new leader has looked at its pools they show what the one before it
// stored: the same template as before the upgrade, so nothing to roll.
func TestTheNewControllersTemplateIsBelievedOnlyOnceItHasLooked(t *testing.T) {
	i := newInstallation(t)
	i.template, i.now = "h1", "h1"
	h := newHarness(t, i)
	h.at(5*time.Second, func() { i.now = "h2" })
	h.upgrade(upgradeInput())
	require.Equal(t, helmBegan, i.rolled[0].Goal.Since, "every host is of the former template")
}

func TestWorkersAndClientsAreLookedAtOnlyOnceTheNewControllerHasLooked(t *testing.T) {
	for _, c := range []struct {
		rollout Rollout
		asked   int
	}{{Rollout{Component: Hypervisor}, 1}, {Rollout{Component: Client}, 2}} {
		i, in := newInstallation(t), upgradeInput()
		in.Policy, in.Rollouts = tensorfusion.PolicyKeepOff, []Rollout{c.rollout}
		require.Equal(t, protocol.OutcomeDone, newHarness(t, i).upgrade(in).Outcome)
		require.Equal(t, c.asked, strings.Count(strings.Join(i.log, "\n"), "AwaitController"), c.rollout.Component)
	}
}

func TestMoreHostsThanOneRolloutTakesAreRefusedAtThePlan(t *testing.T) {
	i := newInstallation(t)
	for n := range plan.MaxHosts {
		i.fleet = append(i.fleet, fmt.Sprintf("gpu-%04d", n))
	}
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		w := h.waits(protocol.WaitParked, "plan")
		assert.Contains(t, w.Found, "pool shared can't be rolled as planned")
		assert.Contains(t, w.Found, "hosts are 5002: one rollout takes at most 5000, split the pool")
		h.answer(protocol.Abort)
	})
	require.Equal(t, protocol.OutcomeAborted, h.upgrade(upgradeInput()).Outcome)
	require.NotContains(t, strings.Join(i.log, "\n"), "Hold")
}

// A canary of one pool is no host of another: with the first strategy for all
// the rollback could not even begin.
func TestTheAnswerRollbackRollsEachPoolByItsOwnStrategy(t *testing.T) {
	i := newInstallation(t)
	h := newHarness(t, i)
	rejected(h)
	in := upgradeInput()
	canary := plan.Strategy{Canary: &plan.Canary{Nodes: []string{"shared-2"}}}
	in.Rollouts = []Rollout{{Component: Hypervisor, Pools: []string{"shared"}, Strategy: canary}}
	in.Acknowledge = append(in.Acknowledge, AcknowledgeOff)
	require.Equal(t, protocol.OutcomeRolledBack, h.upgrade(in).Outcome)
	require.Equal(t, []Rollout{{Component: Hypervisor, Pools: []string{"shared"}, Strategy: canary}}, i.rollbacks[0].Of.Rollouts)
	require.Zero(t, i.rollbacks[0].Strategy)

	e := &engine{settings: rollbackOf(i.rollbacks[0])}
	require.NoError(t, e.aim(pools("")))
	require.Len(t, e.targets, 2)
	for _, target := range e.targets {
		require.Equal(t, target.pool.Entry == "shared", target.Strategy.Canary != nil, target.name())
	}
}

// What a rollout left half done, such as a cordoned node, no rollback undoes.
func TestWhatRolloutsLeftHalfDoneIsListedHoweverTheRunEnds(t *testing.T) {
	const cordoned = "Node shared-1 stays cordoned"
	i := newInstallation(t)
	i.ends = map[string]rollout.Result{"hypervisor shared": {Outcome: protocol.OutcomeDone, LeftBehind: []string{cordoned},
		Hosts: []rollout.HostRow{{Name: "shared-1", Outcome: tensorfusion.OutcomeFailed}}}}
	i.drift["6"] = []finding.Finding{{Row: "P12", Object: "hypervisor of gpu-1", Found: "another UID"}}
	h := newHarness(t, i)
	h.mockRollback()
	h.at(time.Minute, func() { h.answer(protocol.Rollback) })
	r := h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeRolledBack, r.Outcome)
	require.Contains(t, r.LeftBehind, cordoned)
}
