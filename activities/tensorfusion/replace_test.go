package tensorfusion

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func (w *world) replace(hosts []HostTarget, limit time.Duration) ReplaceResult {
	w.t.Helper()
	out, err := replace(w.t.Context(), w.client, ReplaceRequest{Scope: w.scope, Pool: w.pool, Goal: testGoal(), Hosts: hosts, Limit: limit}, nil)
	require.NoError(w.t, err)
	require.Len(w.t, out.Hosts, len(hosts))
	return out
}

// oldHosts gives every node a pod of the old image; pods made from then on run
// the new one.
func (w *world) oldHosts(nodes ...string) []HostTarget {
	w.t.Helper()
	for _, n := range nodes {
		require.NoError(w.t, w.makePod(w.t.Context(), w.node(n), w.podPrefix, oldHypervisor))
	}
	return w.hosts()
}

func TestHypervisorsAreReplacedAndProvenTogether(t *testing.T) {
	w := newWorld(t, "a", "b", "c")
	hosts := w.oldHosts("a", "b", "c")
	w.control()
	out := w.replace(hosts, 30*time.Second)
	for i, h := range out.Hosts {
		assert.Equal(t, OutcomeReplaced, h.Outcome, h.Name)
		assert.Equal(t, hosts[i].UID, h.OldUID)
		assert.NotEmpty(t, h.NewUID)
		assert.NotEqual(t, h.OldUID, h.NewUID)
		assert.Equal(t, "boot-of-"+h.Name, h.BootID, "the boot in which it was proven")
	}

	// The reply was lost: a second attempt with the same request deletes nothing.
	again := w.replace(hosts, 30*time.Second)
	for i, h := range again.Hosts {
		assert.Equal(t, OutcomeAlready, h.Outcome)
		assert.Equal(t, out.Hosts[i].NewUID, h.NewUID)
		assert.Equal(t, out.Hosts[i].BootID, h.BootID)
	}
	assert.Equal(t, 3, w.writes.count(func(r string) bool { return strings.HasPrefix(r, "DELETE") }))
}

func TestAHostCostsOneRequestBesidesTheSharedWatches(t *testing.T) {
	w := newWorld(t, "a", "b", "c", "d", "e")
	hosts := w.oldHosts("a", "b", "c", "d", "e")
	w.control()
	w.replace(hosts, 30*time.Second)
	deletes := w.writes.count(func(r string) bool { return strings.HasPrefix(r, "DELETE") })
	all := w.writes.count(func(string) bool { return true })
	assert.Equal(t, len(hosts), deletes)
	assert.LessOrEqual(t, all-deletes, 8, "four lists and four watches, whatever the number of hosts")
}

// The API server takes the delete and its reply is lost: the next attempt finds
// the pod gone, and must know that it was this run's doing.
func TestADeleteWhoseReplyIsLostIsRemembered(t *testing.T) {
	w := newWorld(t, "a")
	hosts := w.oldHosts("a")
	w.writes.lost = http.MethodDelete
	request := ReplaceRequest{Scope: w.scope, Pool: w.pool, Goal: testGoal(), Hosts: hosts, Limit: 30 * time.Second}
	r := newReplacement(w.client, request, nil)
	require.Error(t, r.delete(t.Context(), []doomedPod{{host: hosts[0].Name, name: w.podPrefix + hosts[0].Name, uid: types.UID(hosts[0].UID)}}))

	w.writes.lost = ""
	w.control()
	out, err := replace(t.Context(), w.client, request, r.remember())
	require.NoError(t, err)
	assert.Equal(t, OutcomeReplaced, out.Hosts[0].Outcome)
	assert.NotEqual(t, hosts[0].UID, out.Hosts[0].NewUID)
}

// The pod is another one by the time of the delete: that was not this run.
func TestADeleteThatFindsAnotherPodIsNotThisRuns(t *testing.T) {
	w := newWorld(t, "a")
	hosts := w.oldHosts("a")
	r := newReplacement(w.client, ReplaceRequest{Scope: w.scope}, nil)
	for _, name := range []string{w.podPrefix + hosts[0].Name, "gone"} {
		require.NoError(t, r.delete(t.Context(), []doomedPod{{host: hosts[0].Name, name: name, uid: "another"}}))
		assert.False(t, r.remember()[hosts[0].Name].Deleted)
	}
}

// GPUs of other builds may name their node in their status alone.
func TestGPUsWithoutTheLabelOfTheirNodeArePartOfTheProof(t *testing.T) {
	w := newWorld(t, "a", "b")
	hosts := w.oldHosts("a", "b")
	api, gpu := w.admin.Dynamic.Resource(gpusGVR), "gpu-0."+w.node("b")
	_, err := api.Patch(t.Context(), gpu, types.JSONPatchType, []byte(`[{"op":"remove","path":"/metadata/labels"}]`), metav1.PatchOptions{})
	require.NoError(t, err)
	_, err = api.Patch(t.Context(), gpu, types.MergePatchType, []byte(`{"status":{"phase":"Pending"}}`), metav1.PatchOptions{}, "status")
	require.NoError(t, err)
	w.control()
	out := w.replace(hosts, 5*time.Second)
	assert.Equal(t, OutcomeReplaced, out.Hosts[0].Outcome)
	assert.Equal(t, OutcomeFailed, out.Hosts[1].Outcome)
	assert.Contains(t, out.Hosts[1].Failure.Found, "GPU "+gpu+" is Pending")
	seen, err := observePool(t.Context(), w.client, ObservePoolRequest{Scope: w.scope, Pool: w.pool, Goal: testGoal()})
	require.NoError(t, err)
	assert.Empty(t, seen.Hosts[0].Broken)
	assert.Equal(t, "GPU "+gpu+" is Pending", seen.Hosts[1].Broken)
}

func TestGPUsAreAskedForByTheirNodesAsFarAsLabelsReach(t *testing.T) {
	assert.Equal(t, []string{labelManagedBy + " in (a,b)"}, gpuSelectors([]string{"a", "b"}, false))
	assert.Equal(t, []string{""}, gpuSelectors([]string{"a", "b"}, true))
	assert.Equal(t, []string{""}, gpuSelectors([]string{"a", strings.Repeat("x", 64)}, false), "no label has such a value")

	var names []string
	for i := range 500 {
		names = append(names, fmt.Sprintf("gpu-node-%03d.rack-7.example.internal", i))
	}
	selectors := gpuSelectors(names, false)
	require.Greater(t, len(selectors), 1)
	seen := 0
	for _, s := range selectors {
		assert.Less(t, len(s), 5<<10)
		seen += strings.Count(s, "gpu-node-")
	}
	assert.Equal(t, len(names), seen)
}

// A worker that dies right after its delete must not forget that it asked: the
// next one finds a pod of the target and would call it somebody else's.
func TestWhatIsAboutToBeDeletedIsRecordedBeforeTheFirstRequest(t *testing.T) {
	w := newWorld(t, "a", "b")
	hosts := w.oldHosts("a", "b")
	w.control()
	deletes := func() int { return w.writes.count(func(r string) bool { return strings.HasPrefix(r, "DELETE") }) }
	r := newReplacement(w.client, ReplaceRequest{Scope: w.scope, Pool: w.pool, Goal: testGoal(), Hosts: hosts, Limit: 30 * time.Second}, nil)
	var kept map[string]hostMemory
	r.record = func(context.Context) error {
		if kept == nil {
			assert.Zero(t, deletes())
			kept = r.remember()
			return errors.New("the server is away")
		}
		return nil
	}
	_, err := r.run(t.Context())
	require.ErrorContains(t, err, "the server is away")
	assert.Zero(t, deletes(), "nothing is deleted that is not recorded")
	assert.False(t, r.remember()[hosts[0].Name].Deleted, "nor taken for deleted")
	for _, h := range hosts {
		assert.True(t, kept[h.Name].Deleted)
		assert.NotNil(t, kept[h.Name].Before, "the GPUs as they were")
	}
	_, err = r.run(t.Context())
	require.NoError(t, err)
	assert.Equal(t, 2, deletes())
}

// The watch is slower than the reply: the pod looks untouched once more.
func TestAPodWhoseDeleteWasTakenIsNotDeletedAgain(t *testing.T) {
	r := newReplacement(nil, ReplaceRequest{Goal: testGoal(), Limit: time.Minute}, nil)
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: testGoal().PodName + "a", UID: "old"}}
	view := hostView{name: "a", pods: []corev1.Pod{pod}}
	require.Len(t, r.doomed(HostTarget{Name: "a", UID: "old"}, view), 1)
	r.sent["old"] = true
	assert.Empty(t, r.doomed(HostTarget{Name: "a", UID: "old"}, view))
}

func TestAHostOnTargetIsLeftAlone(t *testing.T) {
	w := newWorld(t, "a")
	w.control()
	hosts := w.hosts()
	out := w.replace(hosts, 30*time.Second)
	assert.Equal(t, OutcomeAlready, out.Hosts[0].Outcome)
	assert.Zero(t, w.writes.count(func(r string) bool { return strings.HasPrefix(r, "DELETE") }))
}

// A pod that the controller replaced by itself since the plan counts as progress.
func TestASpontaneousReplacementCounts(t *testing.T) {
	w := newWorld(t, "a")
	w.control()
	hosts := w.hosts()
	hosts[0].UID = "the-pod-of-the-plan-is-gone"
	out := w.replace(hosts, 30*time.Second)
	assert.Equal(t, OutcomeAlready, out.Hosts[0].Outcome)
}

// P07: after 2.13 the old line's pod stays beside the new one, on the same port.
func TestALeftoverOfTheOldLineIsRemovedInItsHostsTurn(t *testing.T) {
	w := newWorld(t, "a")
	require.NoError(t, w.makePod(t.Context(), w.node("a"), podPrefixOld, oldHypervisor))
	hosts := w.hosts()
	w.control()
	out := w.replace(hosts, 30*time.Second)
	assert.Equal(t, OutcomeReplaced, out.Hosts[0].Outcome)
	pods, err := w.admin.Typed.CoreV1().Pods(w.scope.Release.Namespace).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	require.Len(t, pods.Items, 1)
	assert.True(t, strings.HasPrefix(pods.Items[0].Name, podPrefix+w.node("a")))
}

func TestAHostThatDoesNotComeBackFailsWithAHintAndTheOthersGoOn(t *testing.T) {
	w := newWorld(t, "a", "b")
	hosts := w.oldHosts("a", "b")
	w.broken[w.node("b")] = true
	w.control()
	out := w.replace(hosts, 3*time.Second)
	assert.Equal(t, OutcomeReplaced, out.Hosts[0].Outcome)
	assert.Equal(t, OutcomeFailed, out.Hosts[1].Outcome)
	require.NotNil(t, out.Hosts[1].Failure)
	assert.Equal(t, "T25", out.Hosts[1].Failure.Row)
	assert.Contains(t, out.Hosts[1].Failure.Found, "ImagePullBackOff")
	assert.Contains(t, out.Hosts[1].Failure.Next, "cannot be pulled")
}

// The controller recreates nothing on a Node that is not Ready (rule 20).
func TestNothingIsDeletedOnANodeThatIsNotReady(t *testing.T) {
	w := newWorld(t, "a")
	hosts := w.oldHosts("a")
	node, err := w.admin.Typed.CoreV1().Nodes().Get(t.Context(), w.node("a"), metav1.GetOptions{})
	require.NoError(t, err)
	node.Status.Conditions[0].Status = corev1.ConditionFalse
	_, err = w.admin.Typed.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
	require.NoError(t, err)
	out := w.replace(hosts, 30*time.Second)
	assert.Equal(t, OutcomeFailed, out.Hosts[0].Outcome)
	assert.Equal(t, "P14", out.Hosts[0].Failure.Row)
	assert.Zero(t, w.writes.count(func(r string) bool { return strings.HasPrefix(r, "DELETE") }))
}

// A later attempt must not call a host late before it has looked at it.
func TestAnAttemptAfterALongAbsenceLooksFirst(t *testing.T) {
	w := newWorld(t, "a")
	w.control()
	hosts := w.hosts()
	kept := map[string]hostMemory{hosts[0].Name: {Started: time.Now().Add(-time.Hour), Deleted: true}}
	hosts[0].UID = "deleted-an-hour-ago"
	out, err := replace(t.Context(), w.client, ReplaceRequest{Scope: w.scope, Pool: w.pool, Goal: testGoal(), Hosts: hosts, Limit: time.Second}, kept)
	require.NoError(t, err)
	assert.Equal(t, OutcomeReplaced, out.Hosts[0].Outcome)
}

func TestObservePoolTellsTargetAndTrouble(t *testing.T) {
	w := newWorld(t, "a", "b", "c")
	require.NoError(t, w.makePod(t.Context(), w.node("a"), podPrefix, newHypervisor))
	require.NoError(t, w.makePod(t.Context(), w.node("b"), podPrefix, oldHypervisor))
	_, err := w.admin.Typed.CoreV1().Nodes().Patch(t.Context(), w.node("c"), types.MergePatchType,
		[]byte(`{"metadata":{"annotations":{"refit.run/managed-by-nvsentinel-before":"true"}}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	out, err := observePool(t.Context(), w.client, ObservePoolRequest{Scope: w.scope, Pool: w.pool, Goal: testGoal()})
	require.NoError(t, err)
	require.Len(t, out.Hosts, 3)
	assert.True(t, out.Hosts[0].OnTarget)
	assert.Empty(t, out.Hosts[0].Broken)
	assert.False(t, out.Hosts[1].OnTarget)
	assert.Empty(t, out.Hosts[1].Broken)
	assert.Equal(t, "no hypervisor pod", out.Hosts[2].Broken)
	assert.Equal(t, "boot-of-"+w.node("a"), out.Hosts[0].BootID)
	assert.False(t, out.Hosts[0].KeptOff)
	assert.True(t, out.Hosts[2].KeptOff, "a run told foreign automation to keep off")
}

func TestDriftNamesEveryUnplannedChange(t *testing.T) {
	w := newWorld(t, "a", "b")
	w.control()
	w.hosts()
	first, err := checkDrift(t.Context(), w.client, DriftRequest{Scope: w.scope})
	require.NoError(t, err)
	require.NoError(t, w.admin.Typed.CoreV1().Pods(w.scope.Release.Namespace).Delete(t.Context(), podPrefix+w.node("a"), metav1.DeleteOptions{}))
	w.hosts()
	request := DriftRequest{Scope: w.scope, Snapshot: first.Snapshot}
	out, err := checkDrift(t.Context(), w.client, request)
	require.NoError(t, err)
	require.Len(t, out.Findings, 1)
	assert.Contains(t, out.Findings[0].Object, w.node("a"))
	request.Planned = []string{w.node("a")}
	out, err = checkDrift(t.Context(), w.client, request)
	require.NoError(t, err)
	assert.Empty(t, out.Findings)
}
