package machine

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
)

const domain = "tensor-fusion.ai/"

// Labels and annotations of the controller.
const (
	ComponentLabel  = domain + "component"
	ManagedByLabel  = domain + "managed-by"
	PoolLabelPrefix = domain + "pool-"
	HashLabel       = domain + "pod-template-hash"
	PoolLabel       = domain + "gpupool" // annotation on workers
	WorkloadLabel   = domain + "workload"
	EnabledLabel    = domain + "enabled"
	VendorLabel     = domain + "hardware-vendor"
	// IsolationLabel is read from the GPUNode before 2.15 only.
	IsolationLabel = domain + "isolationMode"
	// GPUMissingAnnotation marks a device that its hypervisor lost.
	GPUMissingAnnotation = domain + "gpu-missing-since"
	LastSyncAnnotation   = domain + "last-sync"
	// RevisionsAnnotation holds a pool's ProviderConfig revisions, by vendor.
	RevisionsAnnotation = domain + "provider-config-revisions"

	providerHashAnnotation = domain + "provider-config-hash"
	driverUpgradeLabel     = "nvidia.com/gpu-driver-upgrade-state"
)

// InProgress is the annotation that holds the hash being rolled out.
func InProgress(c Component) string { return domain + string(c) + "-update-in-progress" }

// LastTime is the annotation that holds when the last batch ended.
func LastTime(c Component) string { return domain + string(c) + "-batch-update-last-time" }

// HypervisorName is the name of a node's hypervisor pod, which changed with 2.14.
func (v Version) HypervisorName(node string) string {
	prefix := "tf-hypervisor-"
	if v.atLeast(14, 0) {
		prefix = "hypervisor-"
	}
	name := prefix + node
	if len(name) <= 63 {
		return name
	}
	sum := sha256.Sum256([]byte(node))
	suffix := "-" + hex.EncodeToString(sum[:4])
	return fmt.Sprintf("%s%s%s", prefix, node[:63-len(prefix)-len(suffix)], suffix)
}
