package agents

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/sandbox/kwok"
	"github.com/refit-run/refit/sandbox/tensorfusion"
)

// ProbeLabel marks pods that run the CUDA probe; their value is CUDAProbe.
const (
	ProbeLabel = "refit.run/probe"
	CUDAProbe  = "cuda"
)

// Verdict is what the probe of a canary Job answers.
type Verdict string

// Answers of the probe: OK passes; Wrong says unfit; Missing completes without
// a word; NotEnforced says that the memory limit did not hold.
const (
	OK          Verdict = "ok"
	Wrong       Verdict = "wrong"
	Missing     Verdict = "missing"
	NotEnforced Verdict = "limit-not-enforced"
)

// Canary completes probe pods of fake nodes with a verdict in the termination
// message of their first container, as the probe does on a real node.
type Canary struct {
	kube kubernetes.Interface

	mu      sync.Mutex
	verdict Verdict
}

// NewCanary returns a controller that answers OK.
func NewCanary(kube kubernetes.Interface) *Canary { return &Canary{kube: kube, verdict: OK} }

// Answer sets the verdict of probes that complete from now on.
func (c *Canary) Answer(v Verdict) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.verdict = v
}

// Run watches probe pods until ctx ends.
func (c *Canary) Run(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(c.kube, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.LabelSelector = ProbeLabel + "=" + CUDAProbe
	}))
	handle := func(object any) {
		if pod, ok := object.(*corev1.Pod); ok && pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil {
			if err := c.complete(ctx, pod); err != nil && ctx.Err() == nil {
				slog.Error("canary probe", "pod", pod.Namespace+"/"+pod.Name, "error", err)
			}
		}
	}
	informer := factory.Core().V1().Pods().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    handle,
		UpdateFunc: func(_, now any) { handle(now) },
	}); err != nil {
		return err
	}
	factory.Start(ctx.Done())
	<-ctx.Done()
	factory.Shutdown()
	return nil
}

func (c *Canary) complete(ctx context.Context, pod *corev1.Pod) error {
	c.mu.Lock()
	message, err := probeMessage(c.verdict, pod.Spec.NodeName)
	c.mu.Unlock()
	if err != nil {
		return err
	}
	next := pod.DeepCopy()
	now := metav1.Now()
	next.Status.Phase = corev1.PodSucceeded
	for i := range next.Status.ContainerStatuses {
		s := &next.Status.ContainerStatuses[i]
		started := now
		if s.State.Running != nil {
			started = s.State.Running.StartedAt
		}
		s.Ready, s.Started = false, new(bool)
		s.State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
			Reason: "Completed", StartedAt: started, FinishedAt: now,
		}}
		if i == 0 {
			s.State.Terminated.Message = message
		}
	}
	for i := range next.Status.Conditions {
		if t := next.Status.Conditions[i].Type; t == corev1.PodReady || t == corev1.ContainersReady {
			next.Status.Conditions[i].Status, next.Status.Conditions[i].Reason = corev1.ConditionFalse, "PodCompleted"
		}
	}
	_, err = c.kube.CoreV1().Pods(pod.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		// A newer event follows, or the pod is gone.
		return nil
	}
	if err != nil {
		return fmt.Errorf("status: %w", err)
	}
	return nil
}

// canaryMemory is what a workload with one vGPU sees.
const canaryMemory = 10 << 30

func probeMessage(v Verdict, node string) (string, error) {
	r := gpu.Result{
		Node: node, BootID: kwok.BootID(node), Driver: driver, Passed: 4, Verdict: gpu.Pass,
		Devices: []gpu.Device{{UUID: tensorfusion.DeviceUUID(node, 0), Model: tensorfusion.Model, MemoryBytes: canaryMemory}},
		Proofs:  []gpu.Proof{{Device: tensorfusion.DeviceUUID(node, 0), TestedMiB: 64, WantedMiB: 64, Patterns: 3}},
		Found: []gpu.Found{{Name: "device count", Found: "1"}, {Name: "memory tested", Found: "64 MiB", Devices: 1},
			{Name: "vGPU limit", Found: "2112 MiB were refused, the limit is 2048 MiB", Devices: 1}},
	}
	switch v {
	case OK:
	case Missing:
		return "", nil
	case Wrong:
		r.Verdict, r.Passed, r.Found, r.Proofs = gpu.Unfit, 1, r.Found[:1], nil
		r.Checks = []gpu.Check{{
			Name: "CUDA call", Device: r.Devices[0].UUID, Severity: gpu.Fatal, Expected: "kernel result 42", Found: "0",
			Hint: "the injected library does not reach the GPU worker",
		}}
	case NotEnforced:
		r.Verdict, r.Passed, r.Found = gpu.Unfit, 3, r.Found[:2]
		r.Checks = []gpu.Check{{
			Name: "vGPU limit", Device: r.Devices[0].UUID, Severity: gpu.Fatal,
			Expected: "an allocation above the vram limit fails", Found: "it succeeded",
			Hint: "the isolation mode of the pool is not in force",
		}}
	default:
		return "", fmt.Errorf("canary verdict %q: expected ok, wrong, missing or limit-not-enforced", v)
	}
	data, err := json.Marshal(r)
	return string(data), err
}
