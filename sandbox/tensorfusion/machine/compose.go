package machine

import (
	"encoding/json"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"
)

// podTemplate is the raw PodTemplate of the custom resources.
type podTemplate struct {
	Template struct {
		Metadata metav1.ObjectMeta `json:"metadata,omitempty"`
		Spec     corev1.PodSpec    `json:"spec,omitempty"`
	} `json:"template,omitempty"`
}

func parseTemplate(raw json.RawMessage) (corev1.PodSpec, error) {
	var t podTemplate
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &t); err != nil {
			return corev1.PodSpec{}, fmt.Errorf("pod template: %w", err)
		}
	}
	return t.Template.Spec, nil
}

var errNoHypervisor = errors.New("componentConfig.hypervisor is missing")

// composeHypervisor puts code defaults around the user's template. Without a
// vendor it is what gets hashed; with one it is what gets created.
func (p Process) composeHypervisor(pool *PoolSpec, provider *Provider) (corev1.PodSpec, error) {
	if pool.ComponentConfig == nil || pool.ComponentConfig.Hypervisor == nil {
		return corev1.PodSpec{}, errNoHypervisor
	}
	config := pool.ComponentConfig.Hypervisor
	spec, err := parseTemplate(config.PodTemplate)
	if err != nil {
		return spec, err
	}
	spec.HostNetwork, spec.HostPID = true, true
	spec.PriorityClassName = "system-node-critical"
	spec.ServiceAccountName = "tensor-fusion-hypervisor-sa"
	spec.DNSPolicy = corev1.DNSClusterFirstWithHostNet
	spec.EnableServiceLinks = ptr.To(false)
	spec.TerminationGracePeriodSeconds = ptr.To[int64](5)
	if len(spec.Tolerations) == 0 {
		spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	}
	if len(spec.Containers) == 0 {
		spec.Containers = []corev1.Container{{Name: "tensorfusion-hypervisor"}}
	}
	c := &spec.Containers[0]
	if config.Image != "" {
		c.Image = config.Image
	}
	c.Ports = append(c.Ports, corev1.ContainerPort{Name: "http", ContainerPort: pool.HypervisorPort(), HostPort: pool.HypervisorPort()})
	c.Env = append(c.Env,
		corev1.EnvVar{Name: "HYPERVISOR_PORT", Value: fmt.Sprint(pool.HypervisorPort())},
		corev1.EnvVar{Name: "GPU_NODE_NAME", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}},
	)
	shm := corev1.VolumeMount{Name: "tensor-fusion-shm", MountPath: "/run/tensor-fusion", MountPropagation: ptr.To(corev1.MountPropagationBidirectional)}
	privileged := &corev1.SecurityContext{Privileged: ptr.To(true)}
	c.SecurityContext = privileged
	c.VolumeMounts = append(c.VolumeMounts, shm,
		corev1.VolumeMount{Name: "device-plugins", MountPath: "/var/lib/kubelet/device-plugins"},
		corev1.VolumeMount{Name: "pod-resources", MountPath: "/var/lib/kubelet/pod-resources"})
	for name, path := range map[string]string{
		"tensor-fusion-shm": "/run/tensor-fusion",
		"device-plugins":    "/var/lib/kubelet/device-plugins",
		"pod-resources":     "/var/lib/kubelet/pod-resources",
	} {
		spec.Volumes = append(spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}})
	}
	sortVolumes(spec.Volumes)
	spec.InitContainers = append(spec.InitContainers, corev1.Container{
		Name: "init-shm", Image: c.Image, Command: []string{"hypervisor", "mount-shm"},
		SecurityContext: privileged, VolumeMounts: []corev1.VolumeMount{shm},
	})
	if provider != nil {
		spec.InitContainers = append(spec.InitContainers, corev1.Container{Name: "init-runtime", Image: provider.Spec.Images.Middleware})
		if h := provider.Spec.Hypervisor; h != nil {
			c.Env = append(c.Env, h.ExtraEnv...)
		}
	}
	if p.Toolkit {
		spec.InitContainers = append(spec.InitContainers, corev1.Container{Name: "toolkit-validation", Image: c.Image, Command: []string{"hypervisor", "validate-toolkit"}})
	}
	if config.EnableVector {
		spec.Containers = append(spec.Containers, corev1.Container{Name: "vector", Image: config.VectorImage})
	}
	if p.KubeMinor >= 30 {
		spec.SecurityContext = &corev1.PodSecurityContext{AppArmorProfile: &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeUnconfined}}
	}
	return spec, nil
}

// isolationMode is the mode of one node. Before 2.15 the GPUNode's label says
// it and an unlabelled node has none; since then the pool's rules decide, the
// first match winning.
func (p Process) isolationMode(pool *PoolSpec, node *Node, gpuNode GPUNode) string {
	if !p.Version.poolIsolation() {
		return gpuNode.Labels[IsolationLabel]
	}
	config := pool.NodeManagerConfig
	if config == nil {
		return "soft"
	}
	for _, rule := range config.IsolationModeRules {
		selector, err := metav1.LabelSelectorAsSelector(rule.Selector)
		if err == nil && node != nil && selector.Matches(labels.Set(node.Labels)) {
			return rule.Mode
		}
	}
	if config.DefaultIsolationMode == "" {
		return "soft"
	}
	return config.DefaultIsolationMode
}

func (p Process) policy() string {
	if p.Policy == DynamicPolicy {
		return DynamicPolicy
	}
	return StaticPolicy
}

// isolationArguments are in no spec hash (rule 23).
func (p Process) isolationArguments(mode string) []string {
	var args []string
	if mode != "" {
		args = append(args, "--isolation-mode="+mode)
	}
	if p.Version.hasIsolationPolicy() {
		args = append(args, "--isolation-policy="+p.policy())
	}
	return args
}

// ComposeWorker is a worker pod of a workload on a node. Its image is the
// provider's where there is one (rule 26).
func ComposeWorker(pool *PoolSpec, provider *Provider, node string) (corev1.PodSpec, error) {
	var config WorkerConfig
	if pool.ComponentConfig != nil && pool.ComponentConfig.Worker != nil {
		config = *pool.ComponentConfig.Worker
	}
	spec, err := parseTemplate(config.PodTemplate)
	if err != nil {
		return spec, err
	}
	if len(spec.Containers) == 0 {
		spec.Containers = []corev1.Container{{Name: "tensorfusion-worker"}}
	}
	c := &spec.Containers[0]
	c.Image = config.Image
	if provider != nil && provider.Spec.Images.RemoteWorker != "" {
		c.Image = provider.Spec.Images.RemoteWorker
	}
	c.Env = append(c.Env, corev1.EnvVar{Name: "HYPERVISOR_PORT", Value: fmt.Sprint(pool.HypervisorPort())})
	spec.NodeName = node
	spec.EnableServiceLinks = ptr.To(false)
	return spec, nil
}
