package setup

import (
	"errors"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// Explain classes what a driver call, or the child that made it, ended with. A
// Failure passes as it is.
func Explain(err error, object string) error {
	if err == nil {
		return nil
	}
	var f *Failure
	if errors.As(err, &f) || errors.Is(err, ErrRefused) {
		return err
	}
	out := &Failure{Class: Retry, Object: object, Found: err.Error(), Cause: err}
	var (
		refused *nvml.Failure
		wedged  child.Wedged
		late    child.Timeout
		crash   child.Crash
		exit    child.Exit
	)
	switch {
	case errors.As(err, &refused):
		out.Class, out.Next = verdict(refused.Code)
	case errors.As(err, &wedged):
		out.Class, out.Next = Stop, "reboot the host: only that ends what hangs in the driver"
	case errors.As(err, &late):
		out.Class, out.Next = Stop, "look at the kernel log; a driver that hangs needs a GPU reset or a reboot"
	case errors.As(err, &exit) && exit.Code == child.MissingSymbol:
		out.Class, out.Next = Stop, "install a driver that has the function, or leave this part out of the layout"
	case errors.As(err, &crash), errors.As(err, &exit):
		out.Class, out.Next = Stop, "look at the agent's log: the driver's library ended the child process"
	}
	return out
}

// verdict is what a code of NVML means for a set-up (facts of the NVML API:
// what passes by idling, what only a person mends).
func verdict(c nvml.Code) (Class, string) {
	switch c {
	case nvml.InUse:
		return Wait, "stop the GPU's clients (workloads, device plugin, DCGM, hypervisor), then go on"
	case nvml.InsufficientResources:
		return Stop, "the driver finds no room for this: correct the layout, or drain the GPU so that all of it can be made anew"
	case nvml.NoPermission:
		return Stop, "run as root, with access to the driver's configuration capability (NVIDIA_MIG_CONFIG_DEVICES=all in a container)"
	case nvml.GPUIsLost:
		return Stop, "the GPU has left the bus: drain the host and reboot it"
	case nvml.ResetRequired:
		return Stop, "the GPU must be reset: drain it, then reset it or reboot the host"
	case nvml.LibraryNotFound:
		return Stop, "install the NVIDIA driver's libraries where the agent can see them"
	case nvml.DriverNotLoaded:
		return Stop, "load the NVIDIA kernel module"
	case nvml.VersionMismatch:
		return Stop, "finish the driver upgrade: load the kernel module of the installed libraries, or reboot"
	case nvml.FunctionNotFound, nvml.NotSupported:
		return Stop, "this GPU or driver cannot do it: leave it out of the layout, or install another driver"
	case nvml.InvalidState, nvml.NotFound:
		return Stop, "the GPU is not as it was planned for: plan again"
	}
	return Retry, ""
}
