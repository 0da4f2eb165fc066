package agents

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/testsuite"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/sandbox/kwok"
)

const node = "shared-000"

func environment(a *agent) *testsuite.TestActivityEnvironment {
	var suite testsuite.WorkflowTestSuite
	env := suite.NewTestActivityEnvironment()
	env.RegisterActivityWithOptions(a.Baseline, activity.RegisterOptions{Name: gpu.BaselineActivity})
	env.RegisterActivityWithOptions(a.Validate, activity.RegisterOptions{Name: gpu.ValidateActivity})
	return env
}

func validate(t *testing.T, a *agent, req gpu.ValidateRequest) gpu.Result {
	t.Helper()
	value, err := environment(a).ExecuteActivity(gpu.ValidateActivity, req)
	require.NoError(t, err)
	var r gpu.Result
	require.NoError(t, value.Get(&r))
	return r
}

func TestHealthyHostPassesAgainstItsBaseline(t *testing.T) {
	a := &agent{host: newHost(node, 8)}
	value, err := environment(a).ExecuteActivity(gpu.BaselineActivity, gpu.BaselineRequest{Node: node})
	require.NoError(t, err)
	var base gpu.Baseline
	require.NoError(t, value.Get(&base))
	require.Len(t, base.Devices, 8)
	r := validate(t, a, gpu.ValidateRequest{Node: node, Baseline: &base, Deadline: time.Minute})
	require.Equal(t, gpu.Pass, r.Verdict)
	require.Equal(t, base.Devices, r.Devices)
	require.Empty(t, r.Checks)
}

func TestLostGPUIsUnfitUntilRepaired(t *testing.T) {
	h := newHost(node, 8)
	base := h.baseline(time.Now())
	a := &agent{host: h}
	h.setBroken(true)
	r := validate(t, a, gpu.ValidateRequest{Node: node, Baseline: &base})
	require.Equal(t, gpu.Unfit, r.Verdict)
	require.Len(t, r.Devices, 7)
	require.Len(t, r.Checks, 2, "the count and the identity of the lost GPU")
	h.setBroken(false)
	require.Equal(t, gpu.Pass, validate(t, a, gpu.ValidateRequest{Node: node, Baseline: &base}).Verdict)
}

func TestAnotherDriverIsNoticed(t *testing.T) {
	h := newHost(node, 8)
	base := h.baseline(time.Now())
	base.Driver = "1.0"
	require.Equal(t, gpu.Unfit, h.validate(&base).Verdict)
}

func TestDeadlineLeavesItUnproven(t *testing.T) {
	a := &agent{host: newHost(node, 8), takes: time.Hour}
	r := validate(t, a, gpu.ValidateRequest{Node: node, Deadline: 20 * time.Millisecond})
	require.Equal(t, gpu.Unproven, r.Verdict)
}

func TestAgentRefusesAnotherNodesRequest(t *testing.T) {
	_, err := environment(&agent{host: newHost(node, 8)}).ExecuteActivity(gpu.BaselineActivity, gpu.BaselineRequest{Node: "other"})
	require.ErrorContains(t, err, "other")
}

func TestAgentAnswersForTheBootOfItsNodeObjectAlone(t *testing.T) {
	a := &agent{host: newHost(node, 8)}
	base := gpu.BaselineRequest{Node: node, NodeBootID: kwok.BootID(node)}
	_, err := environment(a).ExecuteActivity(gpu.BaselineActivity, base)
	require.NoError(t, err, "the sandbox's Node and agent are of one boot")
	base.NodeBootID = kwok.BootID("other")
	_, err = environment(a).ExecuteActivity(gpu.BaselineActivity, base)
	require.ErrorContains(t, err, "as the Node object says")
	_, err = environment(a).ExecuteActivity(gpu.ValidateActivity, gpu.ValidateRequest{Node: node, NodeBootID: base.NodeBootID})
	require.ErrorContains(t, err, "as the Node object says")
}

func TestProbeVerdicts(t *testing.T) {
	for verdict, want := range map[Verdict]gpu.Verdict{OK: gpu.Pass, Wrong: gpu.Unfit, NotEnforced: gpu.Unfit} {
		message, err := probeMessage(verdict, node)
		require.NoError(t, err)
		var r gpu.Result
		require.NoError(t, json.Unmarshal([]byte(message), &r))
		require.Equal(t, want, r.Verdict, verdict)
		require.Less(t, len(message), 4096, "a termination message holds 4 KiB")
	}
	message, err := probeMessage(Missing, node)
	require.NoError(t, err)
	require.Empty(t, message)
	_, err = probeMessage("nonsense", node)
	require.Error(t, err)
}

func TestProbePodCompletesWithItsVerdict(t *testing.T) {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: "probe", Labels: map[string]string{ProbeLabel: CUDAProbe}},
		Spec:       corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{
			Phase:             corev1.PodRunning,
			Conditions:        []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
			ContainerStatuses: []corev1.ContainerStatus{{Name: "probe", Ready: true}, {Name: "sidecar", Ready: true}},
		},
	}
	kube := fake.NewClientset(pod)
	c := NewCanary(kube)
	require.NoError(t, c.complete(t.Context(), pod))
	got, err := kube.CoreV1().Pods("apps").Get(t.Context(), "probe", metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, corev1.PodSucceeded, got.Status.Phase)
	require.Contains(t, got.Status.ContainerStatuses[0].State.Terminated.Message, `"verdict":"pass"`)
	require.Empty(t, got.Status.ContainerStatuses[1].State.Terminated.Message)
	require.Equal(t, corev1.ConditionFalse, got.Status.Conditions[0].Status)
	require.NoError(t, c.complete(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: "gone"}}))
}
