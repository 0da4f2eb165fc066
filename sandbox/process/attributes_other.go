//go:build !linux

package process

import "syscall"

// attributes puts the child into its own group; only Linux has a signal for
// the parent's death.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}
