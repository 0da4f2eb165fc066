//go:build !linux

package sandbox

import "syscall"

// attributes: only Linux has a signal for a parent's death.
func attributes() *syscall.SysProcAttr { return nil }
