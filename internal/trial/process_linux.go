package trial

import "syscall"

// childAttr gives a process a group of its own, so that Ctrl-C on the terminal reaches it through us alone and in our order, and lets the
// kernel kill it when we are gone.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
