package host

import "os"

// Units of NVIDIA's vGPU manager.
const (
	VGPUDaemon = "nvidia-vgpud"
	VGPUMgr    = "nvidia-vgpu-mgr"
)

// VGPUManager is what runs of NVIDIA's vGPU manager.
type VGPUManager struct {
	// ModulesVisible: the kernel's list of modules could be read.
	ModulesVisible bool     `json:"modulesVisible"`
	Modules        []string `json:"modules,omitempty"` // loaded, nvidia*
	// Daemon and Mgr are its units. The daemon may end once it has told the
	// kernel the types: only Mgr has a process as long as it is at work.
	Daemon Service `json:"daemon"`
	Mgr    Service `json:"mgr"`
}

// VGPUManager reads it.
func (h Host) VGPUManager() VGPUManager {
	_, err := os.ReadFile(h.path("proc/modules"))
	units := h.services([]string{VGPUDaemon, VGPUMgr})
	return VGPUManager{ModulesVisible: err == nil, Modules: h.modules(), Daemon: units[0], Mgr: units[1]}
}
