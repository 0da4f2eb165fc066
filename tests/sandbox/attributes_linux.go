package sandbox

import "syscall"

// attributes has a child die with the thread that started it.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
