package machine

import (
	"encoding/json"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Phases of pools, nodes, GPUs, workloads and connections.
const (
	Pending  = "Pending"
	Running  = "Running"
	Updating = "Updating"
)

// Isolation policies of controllers from 2.17 on.
const (
	StaticPolicy  = "static"
	DynamicPolicy = "dynamic"
)

// Waits of the controller.
const (
	pendingRequeue = 3 * time.Second
	statusRequeue  = 6 * time.Second
)

// Process is one controller process: its version and what it read at start.
type Process struct {
	Version Version
	// Policy is TF_ISOLATION_MODE_POLICY; empty is static.
	Policy string
	// MaxCrash is dynamicConfig.hypervisorMaxCrashCount; 0 turns it off.
	MaxCrash int32
	// KubeMinor is KUBE_API_VERSION_MINOR; from 30 on an AppArmor profile is
	// composed into hypervisors (rule 4).
	KubeMinor int
	// Toolkit is -compatible-with-nvidia-container-toolkit.
	Toolkit bool
	// ForcedNodes is DEBUG_FORCE_GPUNODE_STATE: node to phase (rule 22).
	ForcedNodes map[string]string
}

// Pool is a GPUPool.
type Pool struct {
	Name        string
	Annotations map[string]string
	Spec        PoolSpec
	Status      PoolStatus
}

// PoolStatus is a GPUPool's status.
type PoolStatus struct {
	Phase             string            `json:"phase,omitempty"`
	ReadyNodes        int32             `json:"readyNodes"`
	NotReadyNodes     int32             `json:"notReadyNodes"`
	TotalNodes        int32             `json:"totalNodes,omitempty"`
	TotalGPUs         int32             `json:"totalGPUs,omitempty"`
	RunningApps       int32             `json:"runningAppsCnt,omitempty"`
	TotalTFlops       resource.Quantity `json:"totalTFlops"`
	TotalVRAM         resource.Quantity `json:"totalVRAM"`
	VirtualTFlops     resource.Quantity `json:"virtualTFlops"`
	VirtualVRAM       resource.Quantity `json:"virtualVRAM"`
	AvailableTFlops   resource.Quantity `json:"availableTFlops"`
	AvailableVRAM     resource.Quantity `json:"availableVRAM"`
	ProvisioningPhase string            `json:"provisioningPhase,omitempty"`
	Components        ComponentStatus   `json:"componentStatus"`
}

// ComponentStatus is what the pool recorded of each component's rollout.
type ComponentStatus struct {
	Hypervisor         string `json:"hypervisor,omitempty"`
	HypervisorSynced   bool   `json:"hypervisorConfigSynced,omitempty"`
	HypervisorProgress int32  `json:"hypervisorUpdateProgress,omitempty"`
	Worker             string `json:"worker,omitempty"`
	WorkerSynced       bool   `json:"workerConfigSynced,omitempty"`
	WorkerProgress     int32  `json:"workerUpdateProgress,omitempty"`
	Client             string `json:"client,omitempty"`
	ClientSynced       bool   `json:"clientConfigSynced,omitempty"`
	ClientProgress     int32  `json:"clientUpdateProgress,omitempty"`
}

// Component is one of the three that a pool rolls out.
type Component string

const (
	Hypervisor Component = "hypervisor"
	Worker     Component = "worker"
	Client     Component = "client"
)

// progress is one component's part of ComponentStatus.
type progress struct {
	hash    string
	synced  bool
	percent int32
}

func (s *ComponentStatus) get(c Component) progress {
	switch c {
	case Hypervisor:
		return progress{s.Hypervisor, s.HypervisorSynced, s.HypervisorProgress}
	case Worker:
		return progress{s.Worker, s.WorkerSynced, s.WorkerProgress}
	default:
		return progress{s.Client, s.ClientSynced, s.ClientProgress}
	}
}

func (s *ComponentStatus) set(c Component, p progress) {
	switch c {
	case Hypervisor:
		s.Hypervisor, s.HypervisorSynced, s.HypervisorProgress = p.hash, p.synced, p.percent
	case Worker:
		s.Worker, s.WorkerSynced, s.WorkerProgress = p.hash, p.synced, p.percent
	default:
		s.Client, s.ClientSynced, s.ClientProgress = p.hash, p.synced, p.percent
	}
}

// Node is a core Node as far as the controller looks.
type Node struct {
	Name          string
	Labels        map[string]string
	Ready         bool
	Deleting      bool
	Unschedulable bool
	// NoDevicePlugin: the vendor's device plugin is not there (rule 27).
	NoDevicePlugin bool
}

// GPUNode is the custom resource of a Node.
type GPUNode struct {
	Name     string
	Labels   map[string]string
	Created  time.Time
	Deleting bool
	Phase    string
}

// GPU is a device as its hypervisor reported it.
type GPU struct {
	Name    string
	Phase   string
	Missing bool
	TFlops  resource.Quantity
	VRAM    resource.Quantity
}

// usable: capacity and availability are known and the device is not missing.
func (g GPU) usable() bool { return !g.Missing && !g.TFlops.IsZero() && !g.VRAM.IsZero() }

// Pod is any pod that the controller looks at.
type Pod struct {
	Namespace   string
	Name        string
	UID         string
	Created     time.Time
	Hash        string // label pod-template-hash
	Phase       corev1.PodPhase
	Ready       bool
	Terminating bool
	Restarts    int32 // of the container that restarted most
	Args        []string
}

func (p Pod) running() bool { return p.Phase == corev1.PodRunning && p.Ready }

func (p Pod) stopped() bool { return p.Phase == corev1.PodFailed || p.Phase == corev1.PodSucceeded }

// Provider is a ProviderConfig.
type Provider struct {
	Name        string
	Annotations map[string]string
	Spec        ProviderSpec
}

// ProviderSpec is the spec of a ProviderConfig.
type ProviderSpec struct {
	Vendor                  string              `json:"vendor"`
	Images                  ProviderImages      `json:"images"`
	Hypervisor              *ProviderHypervisor `json:"hypervisor,omitempty"`
	HardwareMetadata        []HardwareMetadata  `json:"hardwareMetadata,omitempty"`
	VirtualizationTemplates json.RawMessage     `json:"virtualizationTemplates,omitempty"`
	InUseResourceNames      []string            `json:"inUseResourceNames,omitempty"`
	DevicePluginDetection   json.RawMessage     `json:"devicePluginDetection,omitempty"`
}

// ProviderImages are the vendor's images.
type ProviderImages struct {
	Middleware   string `json:"middleware"`
	RemoteClient string `json:"remoteClient,omitempty"`
	RemoteWorker string `json:"remoteWorker,omitempty"`
}

// ProviderHypervisor is the vendor's part of the hypervisor pod.
type ProviderHypervisor struct {
	PrivilegedHypervisor bool            `json:"privilegedHypervisor,omitempty"`
	LDLibraryPath        string          `json:"ldLibraryPath,omitempty"`
	ExtraEnv             []corev1.EnvVar `json:"extraEnv,omitempty"`
	HostPathMounts       json.RawMessage `json:"hostPathMounts,omitempty"`
	DeviceMount          json.RawMessage `json:"deviceMount,omitempty"`
}

// HardwareMetadata describes one GPU model.
type HardwareMetadata struct {
	Model         string             `json:"model"`
	FullModelName string             `json:"fullModelName,omitempty"`
	Vendor        string             `json:"vendor,omitempty"`
	CostPerHour   *resource.Quantity `json:"costPerHour,omitempty"`
	FP16TFlops    *resource.Quantity `json:"fp16TFlops,omitempty"`
	VRAM          *resource.Quantity `json:"vram,omitempty"`
}
