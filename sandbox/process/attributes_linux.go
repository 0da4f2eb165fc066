package process

import "syscall"

// attributes makes the child die with its parent, even when the parent is
// killed. SIGKILL, because components told to end together can wait for one
// another; their stores survive it.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
