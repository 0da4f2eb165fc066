package tensorfusion

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// The types below hold the fields that checks and acts read, not whole
// objects: unknown fields stay in the API server.

// FusionCluster is a TensorFusionCluster.
type FusionCluster struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		GPUPools []PoolEntry `json:"gpuPools"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

// PoolEntry is one element of spec.gpuPools.
type PoolEntry struct {
	Name string   `json:"name"`
	Spec PoolSpec `json:"specTemplate"`
}

// PoolSpec is a GPUPool's spec.
type PoolSpec struct {
	NodeManager *struct {
		Policy *RollingPolicy `json:"nodePoolRollingUpdatePolicy"`
	} `json:"nodeManagerConfig"`
	Components struct {
		Hypervisor *HypervisorConfig `json:"hypervisor"`
		Worker     map[string]any    `json:"worker"`
		Client     map[string]any    `json:"client"`
	} `json:"componentConfig"`
}

// HypervisorConfig is componentConfig.hypervisor.
type HypervisorConfig struct {
	Image       string         `json:"image"`
	PortNumber  *int32         `json:"portNumber"`
	PodTemplate map[string]any `json:"podTemplate"`
}

// RollingPolicy is nodePoolRollingUpdatePolicy.
type RollingPolicy struct {
	AutoHypervisor  bool   `json:"autoUpdateHypervisor"`
	AutoWorker      bool   `json:"autoUpdateWorker"`
	AutoClient      bool   `json:"autoUpdateClient"`
	BatchPercentage *int32 `json:"batchPercentage"`
	BatchInterval   string `json:"batchInterval"`
	MaxDuration     string `json:"maxDuration"`
	Maintenance     *struct {
		Includes []string `json:"includes"`
	} `json:"maintenanceWindow"`
}

// Policy of the pool; nil when the block is missing.
func (s PoolSpec) Policy() *RollingPolicy {
	if s.NodeManager == nil {
		return nil
	}
	return s.NodeManager.Policy
}

// Port of the hypervisors.
func (s PoolSpec) Port() int32 {
	if h := s.Components.Hypervisor; h != nil && h.PortNumber != nil {
		return *h.PortNumber
	}
	return defaultPort
}

// FusionPool is a GPUPool.
type FusionPool struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              PoolSpec `json:"spec"`
	Status            struct {
		Phase         string `json:"phase"`
		ReadyNodes    int32  `json:"readyNodes"`
		NotReadyNodes int32  `json:"notReadyNodes"`
		Components    struct {
			Hypervisor         string `json:"hypervisor"`
			HypervisorSynced   bool   `json:"hypervisorConfigSynced"`
			HypervisorProgress int32  `json:"hypervisorUpdateProgress"`
			Worker             string `json:"worker"`
			WorkerSynced       bool   `json:"workerConfigSynced"`
			WorkerProgress     int32  `json:"workerUpdateProgress"`
			Client             string `json:"client"`
			ClientSynced       bool   `json:"clientConfigSynced"`
		} `json:"componentStatus"`
	} `json:"status"`
}

// FusionNode is a GPUNode.
type FusionNode struct {
	metav1.ObjectMeta `json:"metadata"`
	Status            struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

// FusionGPU is a GPU.
type FusionGPU struct {
	metav1.ObjectMeta `json:"metadata"`
	Status            struct {
		Phase        string            `json:"phase"`
		Model        string            `json:"gpuModel"`
		Capacity     map[string]any    `json:"capacity"`
		NodeSelector map[string]string `json:"nodeSelector"`
	} `json:"status"`
}

// Node that the GPU is in.
func (g FusionGPU) Node() string {
	if n := g.Status.NodeSelector[corev1.LabelHostname]; n != "" {
		return n
	}
	return g.Labels[labelManagedBy]
}

// inventory is the line that must not change over an upgrade.
func (g FusionGPU) inventory() string {
	return strings.Join([]string{g.Name, g.Status.Model,
		fmt.Sprint(g.Status.Capacity["tflops"]), fmt.Sprint(g.Status.Capacity["vram"]), g.Node()}, "|")
}

// FusionWorkload is a TensorFusionWorkload.
type FusionWorkload struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Replicas *int32 `json:"replicas"`
		PoolName string `json:"poolName"`
	} `json:"spec"`
	Status struct {
		Phase        string `json:"phase"`
		WorkerCount  int32  `json:"workerCount"`
		ReadyWorkers int32  `json:"readyWorkers"`
		Hash         string `json:"podTemplateHash"`
	} `json:"status"`
}

// Pool of the workload: the label is the controller's, the spec the user's.
func (w FusionWorkload) Pool() string {
	if p := w.Labels[labelGPUPool]; p != "" {
		return p
	}
	return w.Spec.PoolName
}

// FusionConnection is a TensorFusionConnection.
type FusionConnection struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		WorkloadName string `json:"workloadName"`
		ClientPod    string `json:"clientPod"`
	} `json:"spec"`
	Status struct {
		WorkerName string `json:"workerName"`
	} `json:"status"`
}

// FusionProvider is a ProviderConfig.
type FusionProvider struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Vendor string `json:"vendor"`
		Images struct {
			Middleware   string `json:"middleware"`
			RemoteClient string `json:"remoteClient"`
			RemoteWorker string `json:"remoteWorker"`
		} `json:"images"`
	} `json:"spec"`
}

// decode turns an object into one of the types above, or one of Kubernetes.
func decode[T any](o metav1.Object) (T, error) {
	var out T
	if typed, ok := any(o).(*T); ok {
		return *typed, nil
	}
	u, ok := o.(*unstructured.Unstructured)
	if !ok {
		return out, fmt.Errorf("reading %s: expected %T, found %T", o.GetName(), out, o)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &out); err != nil {
		return out, fmt.Errorf("reading %s %s: %w", u.GetKind(), u.GetName(), err)
	}
	return out, nil
}

// ready reports the pod's Ready condition, false while it is being deleted.
func ready(p *corev1.Pod) bool {
	if p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning {
		return false
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// nodeReady reports the Node's Ready condition.
func nodeReady(n *corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// driverUpgrade names the state of a driver upgrade in progress, "" for none.
func driverUpgrade(n *corev1.Node) string {
	if s := n.Labels[labelDriverUpgrade]; s != driverUpgradeDone {
		return s
	}
	return ""
}

// after reports whether created is not older than since, which API servers
// store by the second.
func after(created, since time.Time) bool {
	return since.IsZero() || !created.Before(since.Truncate(time.Second))
}
