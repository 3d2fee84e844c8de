//go:build !linux

package trial

import "syscall"

// childAttr is nil: only Linux ends a process with its parent. Elsewhere a trial that is killed with SIGKILL leaves its processes behind.
func childAttr() *syscall.SysProcAttr { return nil }
