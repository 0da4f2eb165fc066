package tensorfusion

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The proof of a host has many parts; each alone must keep it unproven.
func TestAHostIsProvenOnlyWhenEveryPartHolds(t *testing.T) {
	before := newGPUsBefore(provenHost("n", "p").inventory())
	assert.Empty(t, provenHost("n", "p").unproven(testGoal(), before))
	for _, tc := range []struct {
		world string
		spoil func(*hostView, *Goal)
		says  string
	}{
		{"no pod", func(v *hostView, _ *Goal) { v.pods = nil }, "no hypervisor pod"},
		{"old image", func(v *hostView, _ *Goal) { v.pods[0].Spec.Containers[0].Image = oldHypervisor }, oldHypervisor},
		{"old middleware", func(v *hostView, _ *Goal) { v.pods[0].Spec.InitContainers[1].Image = "old" }, "middleware image old"},
		{"no init-runtime", func(v *hostView, _ *Goal) { v.pods[0].Spec.InitContainers = nil }, "no init container"},
		{"wrong isolation policy", func(v *hostView, _ *Goal) { v.pods[0].Spec.Containers[0].Args = []string{"--isolation-policy=dynamic"} }, "--isolation-policy=static"},
		{"pod from before the change", func(_ *hostView, g *Goal) { g.Since = time.Date(2026, 11, 30, 10, 0, 1, 0, time.UTC) }, "before the change"},
		{"name of the other line", func(v *hostView, g *Goal) { g.PodName = podPrefixOld }, "another controller line"},
		{"leftover beside it", func(v *hostView, _ *Goal) {
			p := provenPod("n")
			p.Name = podPrefixOld + "n"
			v.pods = append(v.pods, p)
		}, "2 hypervisor pods"},
		{"terminating", func(v *hostView, _ *Goal) { v.pods[0].DeletionTimestamp = &metav1.Time{Time: time.Now()} }, "terminating"},
		{"running but not Ready", func(v *hostView, _ *Goal) { v.pods[0].Status.Conditions = nil }, "not Ready"},
		{"GPUNode Pending", func(v *hostView, _ *Goal) { v.gpuNode.Status.Phase = "Pending" }, "GPUNode is Pending"},
		{"a GPU Pending", func(v *hostView, _ *Goal) { v.gpus[1].Status.Phase = "Pending" }, "gpu-n-1 is Pending"},
		{"a GPU marked missing", func(v *hostView, _ *Goal) { v.gpus[0].Annotations = map[string]string{annotationGPUMissing: "10:00"} }, "missing since"},
		{"a GPU gone", func(v *hostView, _ *Goal) { v.gpus = v.gpus[1:] }, "GPUs changed"},
		{"another capacity", func(v *hostView, _ *Goal) { v.gpus[0].Status.Capacity = map[string]any{"tflops": "1", "vram": "80Gi"} }, "GPUs changed"},
	} {
		t.Run(tc.world, func(t *testing.T) {
			v, g := provenHost("n", "p"), testGoal()
			tc.spoil(&v, &g)
			assert.Contains(t, v.unproven(g, before), tc.says)
		})
	}
}

// A change that is undone: pods that it never reached are of the template that
// comes back, those that it made are not.
func TestAPodFromBeforeTheUndoneChangeIsKept(t *testing.T) {
	v, g := provenHost("n", "p"), testGoal()
	made := v.pods[0].CreationTimestamp.Time
	g.Since = made.Add(time.Hour)
	assert.Contains(t, v.unproven(g, nil), "before the change")
	g.Kept = made
	assert.Empty(t, v.unproven(g, nil))
	g.Kept = made.Add(-time.Second)
	assert.Contains(t, v.unproven(g, nil), "before the change")
}

func TestAPodMadeInTheSecondOfTheChangeIsYoungEnough(t *testing.T) {
	second := time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC)
	assert.True(t, after(second, second.Add(900*time.Millisecond)))
	assert.False(t, after(second, second.Add(time.Second)))
	assert.True(t, after(second, time.Time{}))
}

func TestTheHintFitsWhatThePodSays(t *testing.T) {
	waiting := func(reason string) *corev1.Pod {
		p := provenPod("n")
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "h", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}}}
		return &p
	}
	for _, tc := range []struct {
		world string
		pod   *corev1.Pod
		log   string
		says  string
	}{
		{"toolkit missing", waiting("CrashLoopBackOff"), "dlopen: libnvidia-ml.so.1: not found", "Container Toolkit"},
		{"driver missing", waiting("CrashLoopBackOff"), "cannot load libcuda.so", "lsmod"},
		{"image", waiting("ImagePullBackOff"), "", "cannot be pulled"},
		{"crash loop, silent", waiting("CrashLoopBackOff"), "", "read its log"},
		{"no pod", nil, "", "did not create a pod"},
		{"nothing known", waiting(""), "", "events"},
	} {
		t.Run(tc.world, func(t *testing.T) { assert.Contains(t, hintFor(tc.pod, tc.log), tc.says) })
	}
}

func TestHypervisorPodsAreNamedByLine(t *testing.T) {
	for tag, want := range map[string]string{
		"1.58.5": podPrefix, "2.0.0": podPrefixOld, "v2.13.4": podPrefixOld, "2.14.0-rc1": podPrefix, "2.17.1": podPrefix, "latest": podPrefix,
	} {
		assert.Equal(t, want, podPrefixFor(imageVersion("registry.test:5000/operator:"+tag)), tag)
	}
}

func TestTheNudgeIsNeededOnTheWayTo217(t *testing.T) {
	for _, tc := range []struct {
		from, to string
		want     bool
	}{
		{"2.16.3", "2.17.0", true}, {"2.15.0", "2.17.1", true}, {"2.17.0", "2.17.1", false}, {"2.15.0", "2.16.3", false}, {"latest", "2.17.0", true},
	} {
		assert.Equal(t, tc.want, needsNudge(imageVersion("x:"+tc.from), imageVersion("x:"+tc.to)), tc.from+" -> "+tc.to)
	}
}

func TestALaterAttemptKnowsTheGPUsFromBeforeByTheirDigest(t *testing.T) {
	first := newGPUsBefore(provenHost("n", "p").inventory())
	beat, err := json.Marshal(first)
	require.NoError(t, err)
	assert.Less(t, len(beat), 64, "it travels once a second for every host of a wave")
	var kept *gpusBefore
	require.NoError(t, json.Unmarshal(beat, &kept))
	v := provenHost("n", "p")
	assert.Empty(t, v.unproven(testGoal(), kept))
	v.gpus = v.gpus[1:]
	assert.Contains(t, v.unproven(testGoal(), kept), "GPUs changed: before another set")
}
