package gpu

import "github.com/refit-run/refit/activities/duration"

// Expect is what a plan declares about a host; an empty field is not checked
// against a declaration, only against the baseline.
type Expect struct {
	// Driver is the version that library, kernel module and NVML must have.
	Driver string `json:"driver,omitempty"`
	// CUDA is the least version, like 12.4.
	CUDA string `json:"cuda,omitempty"`
	// GPUs is the number of GPUs, NVLinks that of links per GPU.
	GPUs    int `json:"gpus,omitempty"`
	NVLinks int `json:"nvlinks,omitempty"`
	// Fabric: the host is part of an NVSwitch fabric.
	Fabric bool `json:"fabric,omitempty"`
	// Services are systemd units that must be active, like
	// nvidia-fabricmanager.
	Services []string `json:"services,omitempty"`
	// Persistence: persistence mode must be on.
	Persistence bool `json:"persistence,omitempty"`
	// PowerLimitWatts is the limit of every GPU.
	PowerLimitWatts float64    `json:"powerLimitWatts,omitempty"`
	MIG             *ExpectMIG `json:"mig,omitempty"`
	// Bandwidth holds the floors of the probe's copies, in GB/s.
	Bandwidth *Bandwidth `json:"bandwidth,omitempty"`
	// AllowedWarnings is how many warnings leave the verdict at pass.
	AllowedWarnings int `json:"allowedWarnings,omitempty"`
	// StressFor is how long level stress keeps at it.
	StressFor duration.Duration `json:"stressFor,omitempty"`
	// SharedMemoryMiB is what the probe uses at level quick, beside tenants.
	SharedMemoryMiB uint64            `json:"sharedMemoryMiB,omitempty"`
	TensorFusion    *TensorFusionHost `json:"tensorFusion,omitempty"`
}

// Bandwidth is in GB/s; 0 has no floor.
type Bandwidth struct {
	DeviceToDevice float64 `json:"deviceToDevice,omitempty"`
	HostToDevice   float64 `json:"hostToDevice,omitempty"`
	DeviceToHost   float64 `json:"deviceToHost,omitempty"`
}

// ExpectMIG is the declared MIG set-up of every GPU of the host.
type ExpectMIG struct {
	Enabled bool `json:"enabled"`
	// Devices counts the instances by profile, like 1g.10gb.
	Devices map[string]int `json:"devices,omitempty"`
	// ModeOnly: the instances belong to somebody else, as in a TensorFusion
	// pool of isolation mode partitioned.
	ModeOnly bool `json:"modeOnly,omitempty"`
}

// TensorFusionHost asks for the checks of a host that runs TensorFusion's
// hypervisor.
type TensorFusionHost struct {
	// Port is the hypervisor's, read from the pool; 0 is the pool's default.
	Port int `json:"port,omitempty"`
	// ShmMiB is the size of the shared-memory file system; 0 is 1024, a
	// constant of the operator.
	ShmMiB int `json:"shmMiB,omitempty"`
	// AcceleratorLibrary is the provider library; empty looks for
	// libaccelerator_nvidia.so below /run/tensor-fusion.
	AcceleratorLibrary string `json:"acceleratorLibrary,omitempty"`
	// Toolkit: pods wait for the GPU Operator's toolkit-ready file.
	Toolkit bool `json:"toolkit,omitempty"`
	// Pods are the live client pods of this node as namespace/name; shared
	// memory of others is stale. Nil leaves that unasked.
	Pods []string `json:"pods,omitzero"`
	// Limiter is the path of the vGPU limiter; the probe then runs a second
	// time with it preloaded and must be refused memory above LimitMiB.
	Limiter  string `json:"limiter,omitempty"`
	LimitMiB uint64 `json:"limitMiB,omitempty"`
}

// KernelLogPosition says up to where the kernel log was read: the sequence
// number of the last record of one boot.
type KernelLogPosition struct {
	Visible  bool   `json:"visible"`
	Sequence uint64 `json:"sequence,omitempty"`
}
