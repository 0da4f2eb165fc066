//go:build !linux

package helm

import (
	"os"
	"os/exec"
	"syscall"
)

func executable() (string, error) { return os.Executable() }

// childAttributes: without a parent-death signal the Lease's fence alone stops
// a child that outlives its worker.
func childAttributes() *syscall.SysProcAttr { return nil }

func kill(cmd *exec.Cmd) {
	if cmd.Process != nil {
		_ = cmd.Process.Kill()
	}
}
