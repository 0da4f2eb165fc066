//go:build linux

package node

import (
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/testsuite"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
)

func TestMain(m *testing.M) { os.Exit(apiservertest.Main(m)) }

// world is a node in a real API server.
type world struct {
	t *testing.T
	*Activities
	k   *kube.Client
	req Request
}

func newWorld(t *testing.T, name string, labels map[string]string) *world {
	s := apiservertest.Shared(t)
	clusters, err := kube.Parse("test=" + s.Kubeconfig + "#" + s.ContextName)
	require.NoError(t, err)
	id, err := clusters.Identify(t.Context(), kube.IdentifyRequest{Cluster: "test"})
	require.NoError(t, err)
	target := kube.Target{Cluster: "test", UID: id.UID}
	k, err := clusters.Connect(t.Context(), target)
	require.NoError(t, err)
	n, err := k.Typed.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
	require.NoError(t, err)
	w := &world{t: t, Activities: &Activities{Clusters: clusters}, k: k, req: Request{Target: target, Node: name, UID: string(n.UID)}}
	t.Cleanup(func() { _ = k.Typed.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{}) })
	return w
}

func (w *world) node() *corev1.Node {
	n, err := w.k.Typed.CoreV1().Nodes().Get(w.t.Context(), w.req.Node, metav1.GetOptions{})
	require.NoError(w.t, err)
	return n
}

// patch is a write of somebody else, as kubectl makes it.
func (w *world) patch(json string) {
	_, err := w.k.Typed.CoreV1().Nodes().Patch(w.t.Context(), w.req.Node, types.MergePatchType, []byte(json), metav1.PatchOptions{FieldManager: "kubectl-cordon"})
	require.NoError(w.t, err)
}

func (w *world) must(r Result, err error) Result {
	w.t.Helper()
	require.NoError(w.t, err)
	return r
}

func TestANodesBootIsToldAndNothingIsChanged(t *testing.T) {
	w := newWorld(t, "boot", nil)
	n := w.node()
	n.Status.NodeInfo.BootID = "boot-2"
	_, err := w.k.Typed.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{})
	require.NoError(t, err)
	before := w.node().ResourceVersion
	w.req.UID = ""
	require.Equal(t, Result{UID: string(n.UID), BootID: "boot-2"}, w.must(w.Observe(t.Context(), w.req)))
	require.Equal(t, before, w.node().ResourceVersion)
}

func TestForeignAutomationIsKeptOffAndTheEarlierValueRestored(t *testing.T) {
	for name, labels := range map[string]map[string]string{
		"no label": nil, "a label": {ManagedLabel: "true"}, "the same label": {ManagedLabel: "false"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "keep-off", labels)
			require.True(t, w.must(w.KeepOff(t.Context(), w.req)).Changed)
			require.Equal(t, "false", w.node().Labels[ManagedLabel])
			require.False(t, w.must(w.KeepOff(t.Context(), w.req)).Changed, "again: nothing to do")

			require.True(t, w.must(w.GiveBack(t.Context(), w.req)).Changed)
			value, set := w.node().Labels[ManagedLabel]
			want, was := labels[ManagedLabel]
			require.Equal(t, want, value)
			require.Equal(t, was, set)
			require.NotContains(t, w.node().Annotations, managedBefore)
			require.False(t, w.must(w.GiveBack(t.Context(), w.req)).Changed)
		})
	}
}

func TestARunThatDiedLeavesTheEarlierValueToTheNext(t *testing.T) {
	w := newWorld(t, "died", map[string]string{ManagedLabel: "true"})
	w.must(w.KeepOff(t.Context(), w.req))
	// The next run must not take our own "false" for the earlier value.
	w.must(w.KeepOff(t.Context(), w.req))
	w.must(w.GiveBack(t.Context(), w.req))
	require.Equal(t, "true", w.node().Labels[ManagedLabel])
}

func TestALabelThatSomebodyHasSetMeanwhileStays(t *testing.T) {
	w := newWorld(t, "meanwhile", nil)
	w.must(w.KeepOff(t.Context(), w.req))
	w.patch(`{"metadata":{"labels":{"` + ManagedLabel + `":"true"}}}`)
	require.True(t, w.must(w.GiveBack(t.Context(), w.req)).Foreign)
	require.Equal(t, "true", w.node().Labels[ManagedLabel])
	require.NotContains(t, w.node().Annotations, managedBefore)
}

// A run died after KeepOff, a person has set the label since, and the next run
// restores what that person wants.
func TestALabelThatSomebodyHasSetSinceARunDiedIsWhatIsRestored(t *testing.T) {
	for name, c := range map[string]struct{ earlier, patch, want string }{
		"set":     {"", `"true"`, "true"},
		"changed": {"true", `"maintenance"`, "maintenance"},
		"removed": {"true", `null`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			labels := map[string]string{}
			if c.earlier != "" {
				labels[ManagedLabel] = c.earlier
			}
			w := newWorld(t, "since", labels)
			w.must(w.KeepOff(t.Context(), w.req))
			w.patch(`{"metadata":{"labels":{"` + ManagedLabel + `":` + c.patch + `}}}`)
			require.True(t, w.must(w.KeepOff(t.Context(), w.req)).Changed)
			require.Equal(t, keepOff, w.node().Labels[ManagedLabel])
			w.must(w.GiveBack(t.Context(), w.req))
			value, set := w.node().Labels[ManagedLabel]
			require.Equal(t, c.want, value)
			require.Equal(t, c.want != "", set)
		})
	}
}

func TestADriverUpgradeOfTheOperatorIsRespected(t *testing.T) {
	w := newWorld(t, "upgrading", map[string]string{driverUpgrade: "drain-required"})
	_, err := w.KeepOff(t.Context(), w.req)
	_, class, ok := finding.Of(err)
	require.True(t, ok)
	require.Equal(t, finding.Stop, class)
	require.NotContains(t, w.node().Labels, ManagedLabel)
	w.patch(`{"metadata":{"labels":{"` + driverUpgrade + `":"` + driverUpgradeDone + `"}}}`)
	w.must(w.KeepOff(t.Context(), w.req))
}

func TestACordonOfOursIsUndoneAndAForeignOneIsNot(t *testing.T) {
	w := newWorld(t, "cordon", nil)
	require.True(t, w.must(w.Cordon(t.Context(), w.req)).Changed)
	require.True(t, w.node().Spec.Unschedulable)
	require.Equal(t, Result{UID: w.req.UID}, w.must(w.Cordon(t.Context(), w.req)), "again: this run's, nothing to do")
	require.True(t, w.must(w.Uncordon(t.Context(), w.req)).Changed)
	require.False(t, w.node().Spec.Unschedulable)
	require.False(t, w.must(w.Uncordon(t.Context(), w.req)).Changed)

	w.patch(`{"spec":{"unschedulable":true}}`)
	require.True(t, w.must(w.Cordon(t.Context(), w.req)).Foreign)
	require.True(t, w.must(w.Uncordon(t.Context(), w.req)).Foreign)
	require.True(t, w.node().Spec.Unschedulable)
}

// The CLI gives every run of a host the same workflow ID.
func TestACordonOfAnEarlierRunIsOursAndToldApart(t *testing.T) {
	w := newWorld(t, "inherited", kubelet)
	inRun := func(act func(context.Context, Request) (Result, error)) Result {
		t.Helper()
		var out Result
		env := (&testsuite.WorkflowTestSuite{}).NewTestActivityEnvironment()
		env.RegisterActivity(act)
		v, err := env.ExecuteActivity(act, w.req)
		require.NoError(t, err)
		require.NoError(t, v.Get(&out))
		return out
	}
	require.True(t, w.must(w.Cordon(t.Context(), w.req)).Changed)
	require.True(t, w.must(w.KeepOff(t.Context(), w.req)).Changed)
	require.True(t, KeptOff(w.node()))
	again := inRun(w.Cordon)
	require.True(t, again.Inherited)
	require.False(t, again.Foreign)
	back := inRun(w.GiveBack)
	require.True(t, back.Changed)
	require.True(t, back.Inherited, "told beside what is given back")
	require.False(t, KeptOff(w.node()))
	require.True(t, inRun(w.Uncordon).Changed)
	require.False(t, w.node().Spec.Unschedulable)
	require.True(t, inRun(w.Cordon).Changed)
	require.False(t, inRun(w.Cordon).Inherited, "that was this run's")
}

// kubelet is a label as every node has from its kubelet: the API server tracks
// who set what only on objects that were made with something in them.
var kubelet = map[string]string{corev1.LabelOSStable: "linux"}

// kubectl uncordon leaves the mark of our cordon on the node.
func TestACordonAfterOursWasUndoneByHandIsNotTakenForOurs(t *testing.T) {
	const uncordon, cordon = `{"spec":{"unschedulable":null}}`, `{"spec":{"unschedulable":true}}`
	for name, do := range map[string]func(*world) Result{
		"the next run cordons":   func(w *world) Result { return w.must(w.Cordon(t.Context(), w.req)) },
		"the same run uncordons": func(w *world) Result { return w.must(w.Uncordon(t.Context(), w.req)) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "by-hand", kubelet)
			w.must(w.Cordon(t.Context(), w.req))
			w.patch(uncordon)
			require.Contains(t, w.node().Annotations, CordonedBy)
			w.patch(cordon)
			require.True(t, do(w).Foreign)
			require.True(t, w.must(w.Uncordon(t.Context(), w.req)).Foreign)
			require.True(t, w.node().Spec.Unschedulable, "theirs")
			require.NotContains(t, w.node().Annotations, CordonedBy, "it is the mark of nothing")
		})
	}
	t.Run("ours again", func(t *testing.T) {
		w := newWorld(t, "by-hand", kubelet)
		w.must(w.Cordon(t.Context(), w.req))
		w.patch(uncordon)
		require.True(t, w.must(w.Cordon(t.Context(), w.req)).Changed)
		require.False(t, w.must(w.Cordon(t.Context(), w.req)).Foreign)
		require.True(t, w.must(w.Uncordon(t.Context(), w.req)).Changed)
		require.False(t, w.node().Spec.Unschedulable)
	})
	t.Run("a server that does not tell who set it", func(t *testing.T) {
		w := newWorld(t, "by-hand", kubelet)
		w.must(w.Cordon(t.Context(), w.req))
		w.patch(`{"metadata":{"managedFields":[{}]}}`)
		require.False(t, w.must(w.Cordon(t.Context(), w.req)).Foreign)
	})
}

func TestAnotherMachineUnderTheNameIsNotTouched(t *testing.T) {
	w := newWorld(t, "other", nil)
	w.req.UID = "of-the-machine-before"
	_, err := w.Cordon(t.Context(), w.req)
	require.ErrorContains(t, err, "start again with this machine")
	require.False(t, w.node().Spec.Unschedulable)
}

// A run is terminated, the next one takes the node over, and then an activity
// of the first comes to its write.
func TestARunThatHasLostItsLeaseWritesNothing(t *testing.T) {
	w := newWorld(t, "fenced", map[string]string{ManagedLabel: "true"})
	locks := &lease.Activities{Clusters: w.Clusters}
	ours := lease.AcquireRequest{Target: w.req.Target, Namespace: "kube-system", Release: "gpunode-fenced", Holder: "temporal/default/first/run-1"}
	_, err := locks.Acquire(t.Context(), ours)
	require.NoError(t, err)
	w.req.Lease = lease.Held{Namespace: ours.Namespace, Release: ours.Release, Holder: ours.Holder}
	acts := map[string]func(context.Context, Request) (Result, error){
		"keep off": w.KeepOff, "cordon": w.Cordon, "uncordon": w.Uncordon, "give back": w.GiveBack,
	}
	held := []string{"keep off", "cordon"}
	for _, act := range held {
		require.True(t, w.must(acts[act](t.Context(), w.req)).Changed, act)
	}

	_, err = locks.Release(t.Context(), ours)
	require.NoError(t, err)
	theirs := ours
	theirs.Holder = "temporal/default/second/run-2"
	_, err = locks.Acquire(t.Context(), theirs)
	require.NoError(t, err)
	before := w.node().ResourceVersion
	for _, act := range []string{"uncordon", "give back"} {
		_, err := acts[act](t.Context(), w.req)
		f, class, ok := finding.Of(err)
		require.True(t, ok, "%s: %v", act, err)
		require.Equal(t, finding.Stop, class, act)
		require.Contains(t, f.Found, theirs.Holder, act)
	}
	require.Equal(t, before, w.node().ResourceVersion)
	for _, act := range held {
		_, err := acts[act](t.Context(), w.req)
		require.NoError(t, err, "%s: it is so already, so nothing is written", act)
	}
	w.patch(`{"spec":{"unschedulable":null},"metadata":{"labels":{"` + ManagedLabel + `":"true"}}}`)
	before = w.node().ResourceVersion
	for _, act := range held {
		_, err := acts[act](t.Context(), w.req)
		require.ErrorContains(t, err, theirs.Holder, act)
	}
	require.Equal(t, before, w.node().ResourceVersion)
}

func TestANodeThatIsGoneHasNothingToGiveBack(t *testing.T) {
	w := newWorld(t, "gone", nil)
	w.req.Node = "never-was"
	w.must(w.GiveBack(t.Context(), w.req))
	w.must(w.Uncordon(t.Context(), w.req))
	_, err := w.Cordon(t.Context(), w.req)
	_, class, ok := finding.Of(err)
	require.True(t, ok)
	require.Equal(t, finding.Stop, class)
}
