package tensorfusion

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/kube"
)

// probeRuns plays Job controller and node: the Job's pod ends at once with the
// message.
func (w *world) probeRuns(message string) {
	w.t.Helper()
	namespace := w.scope.Release.Namespace
	w.background(func(objects kube.Objects) {
		for _, u := range objects[0] {
			job, err := decode[batchv1.Job](u)
			if err != nil {
				continue
			}
			template := job.Spec.Template
			pod := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
			pod.Name = job.Name + "-x"
			pod.Labels[batchv1.ControllerUidLabel] = string(job.UID)
			pod.Spec.NodeName = pinned(template.Spec)
			made, err := w.admin.Typed.CoreV1().Pods(namespace).Create(w.t.Context(), pod, metav1.CreateOptions{})
			if err != nil {
				continue
			}
			made.Status = corev1.PodStatus{Phase: corev1.PodSucceeded, ContainerStatuses: []corev1.ContainerStatus{{
				Name: probeContainer, State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Message: message}},
			}}}
			_, _ = w.admin.Typed.CoreV1().Pods(namespace).UpdateStatus(w.t.Context(), made, metav1.UpdateOptions{})
		}
	}, kube.Selection{Resource: schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "jobs"}, Namespace: namespace})
}

func passing() gpu.Result {
	return gpu.Result{Node: "n", Verdict: gpu.Pass, Passed: 5, Devices: []gpu.Device{{UUID: "GPU-1"}},
		Proofs: []gpu.Proof{{Device: "GPU-1", TestedMiB: 64, WantedMiB: 64, Patterns: 3}}}
}

// T20: the verdict comes from inside the workload; completing is not enough.
func TestTheCanaryJobBelievesOnlyAVerdict(t *testing.T) {
	wrong := passing()
	wrong.Verdict = gpu.Unfit
	wrong.Checks = []gpu.Check{{Name: "vGPU limit", Expected: "an allocation above the limit fails", Found: "it succeeded", Severity: gpu.Fatal}}
	noDevice := passing()
	noDevice.Devices = nil
	for _, tc := range []struct {
		world   string
		message any
		says    string
	}{
		{"pass", passing(), ""},
		{"limit not enforced", wrong, "it succeeded"},
		{"no device", noDevice, "0 devices"},
		{"no verdict", nil, "no termination message"},
		{"not JSON", "Segmentation fault", "no verdict"},
	} {
		t.Run(tc.world, func(t *testing.T) {
			w := newWorld(t)
			message, _ := tc.message.(string)
			if r, ok := tc.message.(gpu.Result); ok {
				data, err := json.Marshal(r)
				require.NoError(t, err)
				message = string(data)
			}
			w.probeRuns(message)
			req := CanaryJobRequest{Scope: w.scope, Pool: w.pool, Node: "n", Image: "registry.test/cuda-probe:1.0.0", Key: "run-shared", Limit: 30 * time.Second}
			out, err := runCanaryJob(t.Context(), w.client, req)
			require.NoError(t, err)
			require.Len(t, out.Checks, 1)
			assert.Equal(t, "T20", out.Checks[0].Row)
			assert.Equal(t, tc.says == "", out.Checks[0].OK)
			text := ""
			for _, f := range out.Checks[0].Findings {
				text += f.String()
			}
			assert.Contains(t, text, tc.says)
			assert.Equal(t, "n", out.Node)
			if r, ok := tc.message.(gpu.Result); ok {
				assert.Equal(t, r, out.Result, "verdict and figures as the probe wrote them")
			}
			job, err := w.admin.Typed.BatchV1().Jobs(w.scope.Release.Namespace).Get(t.Context(), "refit-canary-run-shared", metav1.GetOptions{})
			if !apierrors.IsNotFound(err) {
				require.NoError(t, err)
				assert.NotNil(t, job.DeletionTimestamp, "the Job is deleted")
			}
		})
	}
}

func TestTheCanaryPodIsWhatAUserWouldWrite(t *testing.T) {
	job := canaryJob(CanaryJobRequest{Scope: Scope{Release: Release{Namespace: "ns"}}, Pool: "tf-shared", Node: "n", Image: "probe:1", Key: "k", Limit: time.Minute})
	template := job.Spec.Template
	assert.Equal(t, "true", template.Labels[labelEnabled])
	assert.Equal(t, probeCUDA, template.Labels[labelProbe])
	assert.Equal(t, "tf-shared", template.Annotations[annotationGPUPool])
	for _, key := range []string{annotationRequestTFlops, annotationLimitTFlops, annotationRequestVRAM, annotationLimitVRAM, annotationGPUCount, annotationInject} {
		assert.NotEmpty(t, template.Annotations[key], key)
	}
	assert.Equal(t, "n", pinned(template.Spec), "by its name: its hostname label may be another one")
	assert.Empty(t, template.Spec.NodeSelector)
	assert.Contains(t, template.Spec.Containers[0].Env, corev1.EnvVar{Name: "NODE_NAME", ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}}, "the verdict names its node")
	assert.Equal(t, []string{"probe"}, template.Spec.Containers[0].Args, "the command of the agent's image")
	assert.Equal(t, int32(0), *job.Spec.BackoffLimit, "a second pod could hide the first one's verdict")
}

// pinned is the one Node that a pod asks for by name.
func pinned(spec corev1.PodSpec) string {
	if spec.Affinity == nil {
		return ""
	}
	field := spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchFields[0]
	if field.Key != "metadata.name" || len(field.Values) != 1 {
		return ""
	}
	return field.Values[0]
}
