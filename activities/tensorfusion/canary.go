package tensorfusion

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/kube"
)

// RunCanaryJob runs the CUDA probe in one TensorFusion pod and reads its
// verdict from the container's termination message (T20): a pod that only
// completes proves nothing. The Job is deleted afterwards.
func (a *Activities) RunCanaryJob(ctx context.Context, req CanaryJobRequest) (CanaryJobResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return CanaryJobResult{}, err
	}
	out, err := runCanaryJob(ctx, c, req)
	return out, inRow(err, "T20")
}

// probeContainer is the name of the container with the verdict.
const probeContainer = "probe"

// onNode asks for the Node by its name: clouds label nodes with other hostnames.
func onNode(name string) *corev1.Affinity {
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{
			{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{name}},
		}}},
	}}}
}

// canaryJob is the Job of a request: one pod, no second try.
func canaryJob(req CanaryJobRequest) *batchv1.Job {
	container := corev1.Container{
		// The agent's image, or one whose entry point takes the same word.
		Name: probeContainer, Image: req.Image, Args: []string{"probe"},
		Env: []corev1.EnvVar{
			{Name: "REFIT_PROBE_GPU_COUNT", Value: fmt.Sprint(probeGPUCount)},
			{Name: "REFIT_PROBE_VRAM_LIMIT", Value: probeVRAM},
			{Name: "NODE_NAME", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}},
		},
		TerminationMessagePolicy: corev1.TerminationMessageReadFile,
	}
	pod := gpuPod("", "", req.Pool, container)
	pod.Labels[labelProbe] = probeCUDA
	if req.Node != "" {
		pod.Spec.Affinity = onNode(req.Node)
	}
	once, never, limit := int32(1), int32(0), int64(req.Limit.Seconds())
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Name: "refit-canary-" + req.Key, Namespace: req.Release.Namespace,
			Labels: map[string]string{labelProbe: probeCUDA},
		},
		Spec: batchv1.JobSpec{
			Parallelism: &once, Completions: &once, BackoffLimit: &never,
			Template: corev1.PodTemplateSpec{ObjectMeta: pod.ObjectMeta, Spec: pod.Spec},
		},
	}
	ttl := int32(canaryTTL / time.Second)
	job.Spec.TTLSecondsAfterFinished = &ttl
	if limit > 0 {
		job.Spec.ActiveDeadlineSeconds = &limit
	}
	return job
}

func runCanaryJob(ctx context.Context, c *kube.Client, req CanaryJobRequest) (CanaryJobResult, error) {
	var out CanaryJobResult
	jobs := c.Typed.BatchV1().Jobs(req.Release.Namespace)
	job, err := jobs.Create(ctx, canaryJob(req), metav1.CreateOptions{FieldManager: fieldManager})
	if apierrors.IsAlreadyExists(err) {
		job, err = jobs.Get(ctx, "refit-canary-"+req.Key, metav1.GetOptions{})
	}
	if err != nil {
		return out, kube.Wrap(err, "canary Job refit-canary-"+req.Key)
	}
	// By UID: the pod of an earlier attempt's Job has the same name and may
	// still be there with its verdict.
	var pod *corev1.Pod
	err = c.Await(ctx, kube.Wait{
		What: "verdict of canary Job/" + job.Namespace + "/" + job.Name, Limit: req.Limit, Heartbeat: beater(ctx),
		Next: "look at the pod's events: was it injected (init container inject-lib), scheduled and started?",
	}, func(objects kube.Objects) (bool, string, error) {
		var found string
		var err error
		pod, found, err = endedPod(objects[0])
		return pod != nil, found, err
	}, kube.Selection{Resource: podsGVR, Namespace: job.Namespace, Labels: batchv1.ControllerUidLabel + "=" + string(job.UID)})
	if err != nil {
		return out, deleteJobAfter(ctx, c, job, err)
	}
	out.Pod, out.Node = pod.Name, pod.Spec.NodeName
	result, found := verdictOf(pod)
	if result != nil {
		out.Result = *result
	}
	out.Checks = []Check{checkVerdict(req, pod, result, found)}
	return out, deleteJobAfter(ctx, c, job, nil)
}

// endedPod returns the Job's pod once its containers have ended.
func endedPod(pods []metav1.Object) (*corev1.Pod, string, error) {
	found := "no pod yet"
	for _, u := range pods {
		p, err := decode[corev1.Pod](u)
		if err != nil {
			return nil, "", err
		}
		if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			return &p, "ended", nil
		}
		found = fmt.Sprintf("pod %s is %s on node %s %s", p.Name, p.Status.Phase, orNone(p.Spec.NodeName), podTrouble(&p))
	}
	return nil, strings.TrimSpace(found), nil
}

// canaryTTL is how long a Job that nobody could remove stays after its end.
const canaryTTL = 10 * time.Minute

// deleteJobAfter removes the Job and its pod, after an abort too; the error of
// the run goes first.
func deleteJobAfter(ctx context.Context, c *kube.Client, job *batchv1.Job, run error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	background := metav1.DeletePropagationBackground
	err := c.Typed.BatchV1().Jobs(job.Namespace).Delete(ctx, job.Name, metav1.DeleteOptions{
		PropagationPolicy: &background, Preconditions: &metav1.Preconditions{UID: &job.UID},
	})
	if run != nil || err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return run
	}
	return kube.Wrap(err, "delete of canary Job/"+job.Namespace+"/"+job.Name)
}

// verdictOf reads the probe's answer; nil with the reason when there is none.
func verdictOf(pod *corev1.Pod) (*gpu.Result, string) {
	for _, s := range pod.Status.ContainerStatuses {
		if s.Name != probeContainer || s.State.Terminated == nil {
			continue
		}
		message := strings.TrimSpace(s.State.Terminated.Message)
		if message == "" {
			return nil, fmt.Sprintf("exit code %d and no termination message", s.State.Terminated.ExitCode)
		}
		var r gpu.Result
		if err := json.Unmarshal([]byte(message), &r); err != nil || r.Verdict == "" {
			return nil, fmt.Sprintf("exit code %d and a termination message that is no verdict", s.State.Terminated.ExitCode)
		}
		return &r, ""
	}
	return nil, "the container " + probeContainer + " never ended"
}

// checkVerdict is row T20. It stands apart from the registry's list because
// its observation is one pod.
func checkVerdict(req CanaryJobRequest, pod *corev1.Pod, r *gpu.Result, missing string) Check {
	var out []finding.Finding
	if !disabled["T20"] {
		out = verdictFindings(req, pod, r, missing)
	}
	c := Check{Row: "T20", OK: len(out) == 0, Findings: out}
	if !c.OK {
		c.Class = finding.Stop
	}
	return c
}

func verdictFindings(req CanaryJobRequest, pod *corev1.Pod, r *gpu.Result, missing string) []finding.Finding {
	object := "canary Pod/" + pod.Namespace + "/" + pod.Name
	const next = "exec into a labelled pod with `sh -c` and run the probe; see 'Pod stuck starting' in the handbook"
	if r == nil {
		return []finding.Finding{{Row: "T20", Object: object, Expected: "a verdict of the CUDA probe", Found: missing,
			Why: "a pod that completes proves nothing about the GPU path", Next: next}}
	}
	var out []finding.Finding
	add := func(expected, found, hint string) {
		if hint == "" {
			hint = next
		}
		out = append(out, finding.Finding{Row: "T20", Object: object, Expected: expected, Found: found, Next: hint})
	}
	if r.Verdict != gpu.Pass {
		add("verdict pass", "verdict "+string(r.Verdict), "")
	}
	if len(r.Devices) != probeGPUCount {
		add(fmt.Sprintf("%d device as requested", probeGPUCount), fmt.Sprintf("%d devices", len(r.Devices)), "")
	}
	if r.Passed == 0 {
		add("at least one passed check", "none", "")
	}
	for _, check := range r.Checks {
		switch {
		case check.Skipped != "" && check.Severity == gpu.Fatal:
			add(check.Name+" answered", "skipped: "+check.Skipped, check.Hint)
		case !check.OK && check.Skipped == "" && check.Severity != gpu.Info && check.Severity != gpu.Warn:
			add(check.Name+": "+orNone(check.Expected), check.Found, check.Hint)
		}
	}
	if req.Node != "" && pod.Spec.NodeName != req.Node {
		add("a run on node "+req.Node, "it ran on "+orNone(pod.Spec.NodeName), "")
	}
	return out
}
