package pod

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Conditions are those that the node owns; others in the object are left
// alone.
var Conditions = []corev1.PodConditionType{
	corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady,
}

// transition brings the conditions up to date; callers hold the lock.
func (p *Pod) transition() {
	ready, initialised := true, true
	for _, c := range p.containers {
		if c.init {
			initialised = initialised && c.succeeded()
		} else {
			ready = ready && c.ready
		}
	}
	holds := map[corev1.PodConditionType]bool{
		corev1.PodReadyToStartContainers: p.volumes != nil, corev1.PodInitialized: initialised,
		corev1.ContainersReady: ready, corev1.PodReady: ready,
	}
	for _, kind := range Conditions {
		status, reason := corev1.ConditionFalse, "ContainersNotReady"
		if holds[kind] {
			status, reason = corev1.ConditionTrue, ""
		}
		was, known := p.conditions[kind]
		if known && was.Status == status {
			continue
		}
		p.conditions[kind] = corev1.PodCondition{
			Type: kind, Status: status, Reason: reason, LastTransitionTime: metav1.Now(), ObservedGeneration: p.object.Generation,
		}
	}
}

func (c *container) succeeded() bool {
	return c.finished && c.state.Terminated != nil && c.state.Terminated.ExitCode == 0
}

// status is what the pod has come to; callers hold the lock.
func (p *Pod) status() corev1.PodStatus {
	ip := p.ip.String()
	s := corev1.PodStatus{
		Phase: p.phase(), Message: p.message, QOSClass: p.object.Status.QOSClass, ObservedGeneration: p.object.Generation,
		HostIP: p.host.IP, HostIPs: []corev1.HostIP{{IP: p.host.IP}}, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
		StartTime: &p.started,
	}
	for _, kind := range Conditions {
		if c, ok := p.conditions[kind]; ok {
			s.Conditions = append(s.Conditions, c)
		}
	}
	for _, c := range p.containers {
		if c.init {
			s.InitContainerStatuses = append(s.InitContainerStatuses, c.status())
		} else {
			s.ContainerStatuses = append(s.ContainerStatuses, c.status())
		}
	}
	return s
}

func (p *Pod) phase() corev1.PodPhase {
	over, failed, initialised := true, false, true
	for _, c := range p.containers {
		t := c.state.Terminated
		failed = failed || c.finished && t != nil && t.ExitCode != 0
		if c.init {
			initialised = initialised && c.succeeded()
		} else {
			over = over && c.finished
		}
	}
	switch {
	case over && failed:
		return corev1.PodFailed
	case over:
		return corev1.PodSucceeded
	case p.volumes == nil || !initialised:
		return corev1.PodPending
	}
	for _, c := range p.containers {
		// A pod is Running once each container was created.
		if w := c.state.Waiting; !c.init && w != nil && c.restarts == 0 && c.last.Terminated == nil {
			return corev1.PodPending
		}
	}
	return corev1.PodRunning
}

func (c *container) containerID() string {
	if c.id.PID == 0 {
		return ""
	}
	return fmt.Sprintf("process://%s/%d/%d", c.mark(), c.restarts, c.id.PID)
}

func (c *container) status() corev1.ContainerStatus {
	started := c.startedOK && c.state.Running != nil
	return corev1.ContainerStatus{
		Name: c.name, Image: c.spec.Image, ImageID: "process://" + c.spec.Image, ContainerID: c.containerID(),
		RestartCount: c.restarts, State: *c.state.DeepCopy(), LastTerminationState: *c.last.DeepCopy(), Ready: c.ready || c.init && c.succeeded(), Started: &started,
	}
}
