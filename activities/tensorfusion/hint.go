package tensorfusion

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// hints are the handbook's causes of a hypervisor that does not come back,
// matched against what the pod's states and log say (facts, section 11).
var hints = []struct {
	any  []string
	hint string
}{
	{[]string{"libnvidia-ml.so.1"}, "the NVIDIA Container Toolkit is missing or misconfigured on the node: libnvidia-ml.so.1 is not visible in the pod"},
	{[]string{"libcuda.so"}, "the NVIDIA driver is missing on the node: check `lsmod | grep nvidia`"},
	{[]string{"ImagePullBackOff", "ErrImagePull", "ImageInspectError", "InvalidImageName", "ErrImageNeverPull"}, "the image cannot be pulled: check its name, the registry or a mirror, and the pull secret"},
	{[]string{"no GPU node", "no gpu node"}, "the Node label nvidia.com/gpu.present=true may be missing"},
	{[]string{"NodePorts", "address already in use"}, "another process holds the hypervisor's host port: look for a leftover hypervisor pod on the node"},
	{[]string{"CreateContainerConfigError", "configmap", "MountVolume"}, "a ConfigMap or Secret that the pod mounts is missing: tensor-fusion-sys-vector-config and tensor-fusion-sys-public-gpu-info must exist"},
	{[]string{"hardwareMetadata", "unknown gpu model"}, "the GPU model is unknown: add it to ProviderConfig hardwareMetadata by its full name"},
	{[]string{"CrashLoopBackOff", "exited with"}, "the hypervisor exits: read its log (`kubectl logs --previous`)"},
	{[]string{"OOMKilled"}, "the hypervisor runs out of memory: raise its limit in the TensorFusionCluster"},
}

// podTrouble describes every container state that is not fine; "" when the
// pod is only on its way.
func podTrouble(pod *corev1.Pod) string {
	var out []string
	if pod.Status.Phase == corev1.PodFailed {
		out = append(out, strings.TrimSpace("pod failed: "+pod.Status.Reason+" "+pod.Status.Message))
	}
	for _, list := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for _, s := range list {
			switch w, t := s.State.Waiting, s.State.Terminated; {
			case w != nil && w.Reason != "" && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing":
				out = append(out, fmt.Sprintf("container %s: %s", s.Name, w.Reason))
			case t != nil && t.ExitCode != 0:
				out = append(out, fmt.Sprintf("container %s: exited with %d %s", s.Name, t.ExitCode, t.Reason))
			}
			if last := s.LastTerminationState.Terminated; last != nil && s.RestartCount > 0 {
				out = append(out, fmt.Sprintf("container %s: %d restarts, last exited with %d %s", s.Name, s.RestartCount, last.ExitCode, last.Reason))
			}
		}
	}
	return strings.Join(out, "; ")
}

// hintFor chooses the advice for a pod that does not come back, from its state
// and the end of its log. The log itself stays here: it may hold anything.
func hintFor(pod *corev1.Pod, log string) string {
	if pod == nil {
		return "the controller did not create a pod: check that it runs, has a leader, and that the Node is Ready and not in a driver upgrade"
	}
	trouble := podTrouble(pod)
	for _, h := range hints {
		for _, word := range h.any {
			if strings.Contains(trouble, word) || strings.Contains(log, word) {
				return h.hint
			}
		}
	}
	return "look at the pod's events and log (`kubectl describe`, `kubectl logs`)"
}
