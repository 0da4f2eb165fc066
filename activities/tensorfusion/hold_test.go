package tensorfusion

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/finding"
)

const holdLimit = 30 * time.Second

func TestHoldSwitchesTheFlagsOffUntilEveryPoolShowsIt(t *testing.T) {
	w := newWorld(t)
	w.control()
	out, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit})
	require.NoError(t, err)
	assert.True(t, w.policy().held())
	require.Len(t, out.Before, 1)
	assert.True(t, out.Before[0].AutoHypervisor)
	assert.Equal(t, int32(20), out.Before[0].BatchPercentage)
	assert.Empty(t, out.Broken)
}

// The first attempt's reply was lost: the second finds the flags false and must
// still know what they were.
func TestHoldRemembersThePolicyWhenItsReplyIsLost(t *testing.T) {
	w := newWorld(t)
	w.control()
	for range 2 {
		out, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit})
		require.NoError(t, err)
		require.Len(t, out.Before, 1)
		assert.True(t, out.Before[0].AutoHypervisor)
	}
}

func TestAssertPutsAFlagBackAndSaysSo(t *testing.T) {
	w := newWorld(t)
	w.control()
	_, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit})
	require.NoError(t, err)
	out, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit, Assert: true})
	require.NoError(t, err)
	assert.Empty(t, out.Broken)

	w.setFlag("autoUpdateWorker", true)
	out, err = hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit, Assert: true})
	require.NoError(t, err)
	require.Len(t, out.Broken, 1)
	assert.Contains(t, out.Broken[0].Found, "worker=true")
	assert.True(t, w.policy().held())
	assert.True(t, out.Before[0].AutoHypervisor, "what was before the run stays known")
}

func TestTheLookBetweenBatchesAssertsTheHoldToo(t *testing.T) {
	w := newWorld(t, "a")
	w.control()
	look := ObservePoolRequest{Scope: w.scope, Pool: w.pool, Goal: testGoal()}
	w.setFlag("autoUpdateHypervisor", true)
	out, err := lookAtPool(t.Context(), w.client, look)
	require.NoError(t, err)
	assert.Empty(t, out.Broken)
	assert.False(t, w.policy().held(), "without Assert nothing is written")

	look.Assert = holdLimit
	out, err = lookAtPool(t.Context(), w.client, look)
	require.NoError(t, err)
	require.Len(t, out.Broken, 1)
	assert.Contains(t, out.Broken[0].Found, "hypervisor=true")
	assert.True(t, w.policy().held())
	assert.Len(t, out.Hosts, 1)
}

func TestNudgeAddsOneVariableAndWaitsForThePendingChange(t *testing.T) {
	w := newWorld(t)
	w.control()
	for range 2 {
		_, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit, Nudge: true})
		require.NoError(t, err)
	}
	u, err := w.admin.Dynamic.Resource(clustersGVR).Get(t.Context(), w.cluster, metav1.GetOptions{})
	require.NoError(t, err)
	fc, err := decode[FusionCluster](u)
	require.NoError(t, err)
	containers := fc.Spec.GPUPools[0].Spec.Components.Hypervisor.PodTemplate["template"].(map[string]any)["spec"].(map[string]any)["containers"].([]any)
	env := containers[0].(map[string]any)["env"].([]any)
	require.Len(t, env, 2, "the user's variable stays, ours comes once")
	assert.Equal(t, nudgeEnv, env[1].(map[string]any)["name"])
}

// What a rollback undoes: pods from before the hold are of the template again.
func TestANudgeIsTakenBackToWhatWasThere(t *testing.T) {
	w := newWorld(t)
	w.control()
	template := func() map[string]any {
		u, err := w.admin.Dynamic.Resource(clustersGVR).Get(t.Context(), w.cluster, metav1.GetOptions{})
		require.NoError(t, err)
		fc, err := decode[FusionCluster](u)
		require.NoError(t, err)
		return fc.Spec.GPUPools[0].Spec.Components.Hypervisor.PodTemplate
	}
	first := template()
	held, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit, Nudge: true})
	require.NoError(t, err)
	nudged := w.policy().Nudge
	require.NotEmpty(t, nudged)
	for range 2 {
		_, err = hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit, Assert: true, Undo: held.Before})
		require.NoError(t, err)
		require.Equal(t, first, template())
	}

	// The variable of a former run, under which the pods had been made.
	earlier := []PoolPolicy{{Pool: w.pool, Nudge: "2026-11-01T00:00:00Z"}}
	_, err = hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit, Assert: true, Undo: earlier})
	require.NoError(t, err)
	require.Equal(t, earlier[0].Nudge, w.policy().Nudge)
}

// Terminate leaves the flag of a worker rollout on; it is not what was found.
func TestTheFlagOfAnEndedWorkerRolloutIsNotTakenForTheUsers(t *testing.T) {
	w := newWorld(t)
	w.control()
	_, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit})
	require.NoError(t, err)
	require.NoError(t, setWorkerPolicy(t.Context(), w.client, w.workersRequest(0), true))
	require.True(t, w.policy().AutoWorker)

	next, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit})
	require.NoError(t, err)
	require.Len(t, next.Before, 1)
	assert.False(t, next.Before[0].AutoWorker)
	assert.True(t, next.Before[0].AutoHypervisor)
	assert.Equal(t, int32(20), next.Before[0].BatchPercentage)

	w.setFlag("autoUpdateWorker", true) // this time somebody else's
	next, err = hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit})
	require.NoError(t, err)
	assert.True(t, next.Before[0].AutoWorker)
}

// A former run left its variable and the pool was sealed with it: the same
// value again would change no hash and the wait would never end.
func TestANudgeOfAFormerRunGetsANewValue(t *testing.T) {
	nudge := func(c FusionCluster, synced bool) (bool, []patchOp) {
		t.Helper()
		b := &clusterPatch{cluster: c}
		changed, err := b.nudge(0, synced, time.Now())
		require.NoError(t, err)
		return changed, b.ops
	}
	c := testCluster(oldHypervisor)
	changed, ops := nudge(c, true)
	require.True(t, changed)
	c.Spec.GPUPools[0].Spec.Components.Hypervisor.PodTemplate = ops[0].Value.(map[string]any)

	changed, _ = nudge(c, false)
	assert.False(t, changed, "its change is still pending")
	changed, again := nudge(c, true)
	require.True(t, changed)
	assert.NotEqual(t, ops[0].Value, again[0].Value)
}

func TestHoldMakesTheMissingPolicyBlock(t *testing.T) {
	w := newWorld(t)
	_, err := w.admin.Dynamic.Resource(clustersGVR).Patch(t.Context(), w.cluster, types.JSONPatchType,
		[]byte(`[{"op":"remove","path":"/spec/gpuPools/0/specTemplate/nodeManagerConfig"}]`), metav1.PatchOptions{})
	require.NoError(t, err)
	w.control()
	out, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit})
	require.NoError(t, err)
	assert.True(t, out.Before[0].Missing)
	assert.False(t, w.policy().Missing)
	assert.True(t, w.policy().held())
}

func TestHoldStopsWhenNoControllerCopiesThePolicy(t *testing.T) {
	w := newWorld(t)
	_, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: time.Second})
	f, class, ok := finding.Of(inRow(err, "P10"))
	require.True(t, ok)
	assert.Equal(t, finding.Stop, class)
	assert.Equal(t, "P10", f.Row)
	assert.Contains(t, f.Found, "does not exist")
}

// Who accepts a full outage (P10) goes on: the flags are off on the cluster's
// object, and the answer says what the pools still show.
func TestAHoldThatCannotBeHadIsToldToWhoAcceptsTheOutage(t *testing.T) {
	w := newWorld(t)
	out, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: time.Second, Outage: true})
	require.NoError(t, err)
	assert.Contains(t, out.Unheld, "does not exist")
	require.Len(t, out.Before, 1)
	assert.True(t, out.Before[0].AutoHypervisor, "the restore needs it all the same")
	assert.True(t, w.policy().held())

	w.control()
	out, err = hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit, Assert: true, Outage: true})
	require.NoError(t, err)
	assert.Empty(t, out.Unheld)
}

// T13: the policy is never written on a GPUPool, whose spec the controller
// overwrites.
func TestPolicyIsNeverWrittenOnAGPUPool(t *testing.T) {
	w := newWorld(t, "a")
	w.control()
	w.hosts()
	_, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit, Nudge: true})
	require.NoError(t, err)
	_, err = setPolicy(t.Context(), w.client, PolicyRequest{Scope: w.scope, Mode: PolicyKeepOff, Goal: testGoal(), Limit: holdLimit})
	require.NoError(t, err)
	assert.Zero(t, w.writes.count(func(r string) bool {
		return strings.Contains(r, "/gpupools") && !strings.HasPrefix(r, "GET") && !strings.HasPrefix(r, "WATCH")
	}))
}

func TestPolicyIsRestoredOnlyWhenEveryHostIsProven(t *testing.T) {
	w := newWorld(t, "a")
	w.image = oldHypervisor
	w.control()
	w.hosts()
	out, err := hold(t.Context(), w.client, HoldRequest{Scope: w.scope, Limit: holdLimit})
	require.NoError(t, err)
	request := PolicyRequest{Scope: w.scope, Mode: PolicyRestore, Before: out.Before, Goal: testGoal(), Limit: holdLimit}

	_, err = setPolicy(t.Context(), w.client, request)
	f, _, ok := finding.Of(err)
	require.True(t, ok)
	assert.Contains(t, f.Found, oldHypervisor)
	assert.True(t, w.policy().held())

	request.Goal.HypervisorImage = oldHypervisor
	after, err := setPolicy(t.Context(), w.client, request)
	require.NoError(t, err)
	require.Len(t, after.After, 1)
	assert.True(t, after.After[0].AutoHypervisor)
	assert.Equal(t, int32(20), after.After[0].BatchPercentage)
}

// The hold had switched the controller's own worker and client rollouts off; to
// switch them on again would begin one that nobody asked this run for.
func TestAPolicyThatWouldRollStaleWorkersOrClientsIsNotRestored(t *testing.T) {
	w := newWorld(t)
	w.workload()
	require.NoError(t, w.clientPod(t.Context(), "app", "app", "old", nil, true))
	restore := func(p PoolPolicy) error {
		return mayRollOthers(t.Context(), w.client, map[string]PoolPolicy{w.pool: p})
	}
	refused := func(err error, row, object string) {
		t.Helper()
		f, class, ok := finding.Of(err)
		require.True(t, ok, err)
		assert.Equal(t, finding.Stop, class)
		assert.Equal(t, row, f.Row)
		assert.Contains(t, f.Object, object)
		assert.Contains(t, f.Next, "skip")
	}
	w.poolStatus(map[string]any{"client": "new", "workerConfigSynced": false})
	refused(restore(PoolPolicy{AutoWorker: true}), "T15", "/llm")
	refused(restore(PoolPolicy{AutoClient: true}), "T16", "/app")
	require.NoError(t, restore(PoolPolicy{AutoHypervisor: true}), "flags that stay off start nothing")

	w.poolStatus(map[string]any{"client": "old", "workerConfigSynced": true})
	require.NoError(t, restore(PoolPolicy{AutoWorker: true, AutoClient: true}))
}

// An attempt before may have switched the flags on: a refusal must not leave
// the controller rolling behind a parked run.
func TestARefusedPolicyLeavesAutoUpdateOff(t *testing.T) {
	w := newWorld(t, "a")
	w.image = oldHypervisor
	w.control()
	w.hosts()
	c, scope := w.client, w.scope
	out, err := hold(t.Context(), c, HoldRequest{Scope: scope, Limit: holdLimit})
	require.NoError(t, err)
	on := PolicyRequest{Scope: scope, Mode: PolicyRestore, Before: out.Before, Goal: testGoal(), Limit: holdLimit}
	on.Goal.HypervisorImage = oldHypervisor
	_, err = setPolicy(t.Context(), c, on)
	require.NoError(t, err)
	require.False(t, w.policy().held())

	refused := on
	refused.Goal.HypervisorImage = "registry.example/hypervisor:never"
	_, err = setPolicyOrHold(t.Context(), c, refused)
	f, _, ok := finding.Of(err)
	require.True(t, ok)
	assert.Contains(t, f.Next, "skip")
	assert.True(t, w.policy().held())
}
