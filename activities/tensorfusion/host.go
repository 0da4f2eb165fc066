package tensorfusion

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"sort"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/finding"
)

// hostView is what the API server knows of one GPU node.
type hostView struct {
	name    string
	pods    []corev1.Pod // every hypervisor pod bound to the node
	gpuNode *FusionNode
	gpus    []FusionGPU
}

// inventory are the node's GPUs as lines, sorted.
func (v hostView) inventory() []string {
	out := make([]string, 0, len(v.gpus))
	for _, g := range v.gpus {
		out = append(out, g.inventory())
	}
	sort.Strings(out)
	return out
}

// gpusBefore are a host's GPUs as they were before its pod was touched. Only
// the digest travels in heartbeats: a wave of 100 hosts has 800 GPUs, once a
// second. The lines serve the text while the attempt that saw them lives.
type gpusBefore struct {
	Digest string   `json:"digest"`
	lines  []string // unexported: no part of the heartbeat
}

func newGPUsBefore(lines []string) *gpusBefore {
	sum := sha256.Sum256([]byte(strings.Join(lines, "\n")))
	return &gpusBefore{Digest: hex.EncodeToString(sum[:12]), lines: lines}
}

// changed says how the GPUs differ from before, "" when they don't.
func (b *gpusBefore) changed(now []string) string {
	if b == nil || b.Digest == newGPUsBefore(now).Digest {
		return ""
	}
	before := "another set"
	if b.lines != nil {
		before = orNone(strings.Join(b.lines, ", "))
	}
	return fmt.Sprintf("GPUs changed: before %s, now %s", before, orNone(strings.Join(now, ", ")))
}

// named reports whether a pod carries the name of the wanted line; the other
// line's pods are leftovers (P07).
func (g Goal) named(pod *corev1.Pod) bool { return strings.HasPrefix(pod.Name, g.PodName) }

// pod returns the hypervisor pod to look at: the one of the wanted name, else
// whichever is there, nil when none is.
func (v hostView) pod(g Goal) *corev1.Pod {
	var other *corev1.Pod
	for i := range v.pods {
		if g.named(&v.pods[i]) {
			return &v.pods[i]
		}
		other = &v.pods[i]
	}
	return other
}

// wants says why a pod's specification is not the Goal's, "" when it is. It
// says nothing about readiness.
func (g Goal) wants(pod *corev1.Pod) string {
	if !g.named(pod) {
		return fmt.Sprintf("pod %s is named by another controller line (wanted %s<node>)", pod.Name, g.PodName)
	}
	if len(pod.Spec.Containers) == 0 {
		return fmt.Sprintf("pod %s has no container", pod.Name)
	}
	// Containers are addressed by index: chart and code name them differently.
	if c := pod.Spec.Containers[0]; c.Image != g.HypervisorImage {
		return fmt.Sprintf("pod %s runs image %s", pod.Name, c.Image)
	}
	if g.MiddlewareImage != "" {
		found := false
		for _, c := range pod.Spec.InitContainers {
			if c.Name != runtimeInit {
				continue
			}
			if found = true; c.Image != g.MiddlewareImage {
				return fmt.Sprintf("pod %s has middleware image %s", pod.Name, c.Image)
			}
		}
		if !found {
			return fmt.Sprintf("pod %s has no init container %s", pod.Name, runtimeInit)
		}
	}
	if g.IsolationPolicy != "" {
		c := pod.Spec.Containers[0]
		want := "--isolation-policy=" + g.IsolationPolicy
		if !slices.Contains(c.Args, want) && !slices.Contains(c.Command, want) {
			return fmt.Sprintf("pod %s lacks the argument %s", pod.Name, want)
		}
	}
	if made := pod.CreationTimestamp.Time; !after(made, g.Since) && (g.Kept.IsZero() || made.After(g.Kept)) {
		return fmt.Sprintf("pod %s is from %s, before the change", pod.Name, pod.CreationTimestamp.UTC().Format("15:04:05Z"))
	}
	return ""
}

// unhealthy says why the host does not serve GPUs now, "" when it does:
// exactly one hypervisor pod, Ready, GPUNode and every GPU Running.
func (v hostView) unhealthy(g Goal) string {
	pod := v.pod(g)
	switch {
	case pod == nil:
		return "no hypervisor pod"
	case len(v.pods) > 1:
		names := make([]string, 0, len(v.pods))
		for _, p := range v.pods {
			names = append(names, p.Name)
		}
		sort.Strings(names)
		return fmt.Sprintf("%d hypervisor pods: %s", len(names), strings.Join(names, ", "))
	case pod.DeletionTimestamp != nil:
		return fmt.Sprintf("pod %s is terminating", pod.Name)
	case !ready(pod):
		return fmt.Sprintf("pod %s is %s and not Ready", pod.Name, pod.Status.Phase)
	case v.gpuNode == nil:
		return "no GPUNode object"
	case v.gpuNode.Status.Phase != phaseRunning:
		return "GPUNode is " + orNone(v.gpuNode.Status.Phase)
	}
	for _, gpu := range v.gpus {
		if gpu.Annotations[annotationGPUMissing] != "" {
			return fmt.Sprintf("GPU %s is missing since %s", gpu.Name, gpu.Annotations[annotationGPUMissing])
		}
		if gpu.Status.Phase != phaseRunning {
			return fmt.Sprintf("GPU %s is %s", gpu.Name, orNone(gpu.Status.Phase))
		}
	}
	return ""
}

// unproven says which part of the proof is missing, "" when the host is
// proven (facts, section 6): wanted pod, healthy, same GPUs as before.
func (v hostView) unproven(g Goal, before *gpusBefore) string {
	pod := v.pod(g)
	if pod == nil {
		return "no hypervisor pod"
	}
	if why := g.wants(pod); why != "" {
		return why
	}
	if why := v.unhealthy(g); why != "" {
		return why
	}
	return before.changed(v.inventory())
}

const phaseRunning = "Running"

func orNone(s string) string {
	if s == "" {
		return "empty"
	}
	return s
}

// hostObject names a host in findings.
func hostObject(node string) string { return "GPUNode/" + node }

// notProven is the finding of a host that missed its deadline.
func notProven(row, node, why string) finding.Finding {
	return finding.Finding{
		Row:      row,
		Object:   hostObject(node),
		Expected: "one hypervisor pod of the target, Ready, GPUNode and GPUs Running as before",
		Found:    why,
		Why:      "the node takes no new GPU work, and a pod that is only Running proves nothing",
	}
}
