package helm

import (
	"os/exec"
	"syscall"
)

// executable is this very binary, also after its file was replaced.
func executable() (string, error) { return "/proc/self/exe", nil }

// childAttributes: the child dies with the thread that started it and leads a
// group, so that a credential plugin it runs dies with it.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}

func kill(cmd *exec.Cmd) {
	if cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
}
