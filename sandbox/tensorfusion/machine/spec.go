package machine

import (
	"encoding/json"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PoolSpec is the spec of a GPUPool and the specTemplate of a cluster's entry.
// Fields are omitted when empty, as in the real types: that is how a batch
// percentage of 0 gets lost (rule 31).
type PoolSpec struct {
	NodeManagerConfig        *NodeManagerConfig `json:"nodeManagerConfig,omitempty"`
	ComponentConfig          *ComponentConfig   `json:"componentConfig,omitempty"`
	CapacityConfig           *CapacityConfig    `json:"capacityConfig,omitempty"`
	SchedulingConfigTemplate string             `json:"schedulingConfigTemplate,omitempty"`
}

// NodeManagerConfig selects the pool's Nodes and says how they are updated.
type NodeManagerConfig struct {
	ProvisioningMode        string                          `json:"provisioningMode,omitempty"`
	NodeSelector            *corev1.NodeSelector            `json:"nodeSelector,omitempty"`
	DefaultVendor           string                          `json:"defaultVendor,omitempty"`
	MultiVendorNodeSelector map[string]*corev1.NodeSelector `json:"multiVendorNodeSelector,omitempty"`
	DefaultIsolationMode    string                          `json:"defaultIsolationMode,omitempty"`
	IsolationModeRules      []IsolationRule                 `json:"isolationModeRules,omitempty"`
	Policy                  *UpdatePolicy                   `json:"nodePoolRollingUpdatePolicy,omitempty"`
}

// IsolationRule gives Nodes that match the selector another isolation mode.
type IsolationRule struct {
	Mode     string                `json:"mode"`
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
}

// UpdatePolicy is nodePoolRollingUpdatePolicy. MaxDuration and the maintenance
// window are stored and read by nobody.
type UpdatePolicy struct {
	AutoUpdateHypervisor bool               `json:"autoUpdateHypervisor,omitempty"`
	AutoUpdateWorker     bool               `json:"autoUpdateWorker,omitempty"`
	AutoUpdateClient     bool               `json:"autoUpdateClient,omitempty"`
	BatchPercentage      int32              `json:"batchPercentage,omitempty"`
	BatchInterval        string             `json:"batchInterval,omitempty"`
	MaxDuration          string             `json:"maxDuration,omitempty"`
	MaintenanceWindow    *MaintenanceWindow `json:"maintenanceWindow,omitempty"`
}

// MaintenanceWindow is stored only.
type MaintenanceWindow struct {
	Includes []string `json:"includes,omitempty"`
}

// ComponentConfig configures what the pool rolls out.
type ComponentConfig struct {
	Hypervisor    *HypervisorConfig    `json:"hypervisor,omitempty"`
	Worker        *WorkerConfig        `json:"worker,omitempty"`
	Client        *ClientConfig        `json:"client,omitempty"`
	NodeDiscovery *NodeDiscoveryConfig `json:"nodeDiscovery,omitempty"`
}

// HypervisorConfig describes the pod on every GPU node.
type HypervisorConfig struct {
	Image        string          `json:"image,omitempty"`
	VectorImage  string          `json:"vectorImage,omitempty"`
	PortNumber   *int32          `json:"portNumber,omitempty"`
	PodTemplate  json.RawMessage `json:"podTemplate,omitempty"`
	EnableVector bool            `json:"enableVector,omitempty"`
}

// WorkerConfig describes worker pods.
type WorkerConfig struct {
	Image       string          `json:"image,omitempty"`
	PodTemplate json.RawMessage `json:"podTemplate,omitempty"`
}

// ClientConfig describes what is injected into application pods.
type ClientConfig struct {
	Image                         string          `json:"image,omitempty"`
	RemoteModeImage               string          `json:"remoteModeImage,omitempty"`
	EmbeddedModeImage             string          `json:"embeddedModeImage,omitempty"`
	OperatorEndpoint              string          `json:"operatorEndpoint,omitempty"`
	PatchToPod                    json.RawMessage `json:"patchToPod,omitempty"`
	PatchToContainer              json.RawMessage `json:"patchToContainer,omitempty"`
	PatchToEmbeddedWorker         json.RawMessage `json:"patchToEmbeddedWorkerContainer,omitempty"`
	PatchEmbeddedWorkerToPodField json.RawMessage `json:"patchEmbeddedWorkerToPod,omitempty"`
}

// NodeDiscoveryConfig is kept for a return to 1.x only.
type NodeDiscoveryConfig struct {
	Image       string          `json:"image,omitempty"`
	PodTemplate json.RawMessage `json:"podTemplate,omitempty"`
}

// CapacityConfig bounds a pool.
type CapacityConfig struct {
	MinResources     *Resources        `json:"minResources,omitempty"`
	MaxResources     *Resources        `json:"maxResources,omitempty"`
	WarmResources    *Resources        `json:"warmResources,omitempty"`
	Oversubscription *Oversubscription `json:"oversubscription,omitempty"`
}

// Resources of GPUs and their hosts.
type Resources struct {
	TFlops *resource.Quantity `json:"tflops,omitempty"`
	VRAM   *resource.Quantity `json:"vram,omitempty"`
	CPU    *resource.Quantity `json:"cpu,omitempty"`
	Memory *resource.Quantity `json:"memory,omitempty"`
}

// Oversubscription widens a pool's capacity, in percent.
type Oversubscription struct {
	TFlopsOversellRatio  int32 `json:"tflopsOversellRatio,omitempty"`
	VRAMExpandToHostMem  int32 `json:"vramExpandToHostMem,omitempty"`
	VRAMExpandToHostDisk int32 `json:"vramExpandToHostDisk,omitempty"`
}

func (s *PoolSpec) policy() *UpdatePolicy {
	if s.NodeManagerConfig == nil {
		return nil
	}
	return s.NodeManagerConfig.Policy
}

func (s *PoolSpec) vendor() string {
	if s.NodeManagerConfig == nil || s.NodeManagerConfig.DefaultVendor == "" {
		return "NVIDIA"
	}
	return s.NodeManagerConfig.DefaultVendor
}

// HypervisorPort is the host port of the pool's hypervisors.
func (s *PoolSpec) HypervisorPort() int32 {
	if s.ComponentConfig == nil || s.ComponentConfig.Hypervisor == nil || s.ComponentConfig.Hypervisor.PortNumber == nil {
		return 8001 // the code's own default; the CRD's is 8000
	}
	return *s.ComponentConfig.Hypervisor.PortNumber
}

// interval is the parsed batchInterval; what does not parse is 1 s (rule 7).
func (p *UpdatePolicy) interval() time.Duration {
	if p == nil {
		return time.Second
	}
	d, err := time.ParseDuration(p.BatchInterval)
	if err != nil {
		return time.Second
	}
	return d
}

// percentage is batchPercentage; out of range is 100 (rule 7). 0 is in range.
func (p *UpdatePolicy) percentage() int {
	if p == nil || p.BatchPercentage < 0 || p.BatchPercentage > 100 {
		return 100
	}
	return int(p.BatchPercentage)
}

func (p *UpdatePolicy) auto(c Component) bool {
	if p == nil {
		return false
	}
	switch c {
	case Hypervisor:
		return p.AutoUpdateHypervisor
	case Worker:
		return p.AutoUpdateWorker
	default:
		return p.AutoUpdateClient
	}
}
