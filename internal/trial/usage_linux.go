package trial

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// usage is what a process has used up to now. It is read from /proc and not from the rusage of an ended child: there the peak of a process
// includes that of its parent, from before the exec.
type usage struct {
	peak, now int64 // resident memory in bytes
	cpu       time.Duration
}

// clockTick is the unit of the times in /proc/PID/stat: USER_HZ, 100 on every platform that Go runs on.
const clockTick = 10 * time.Millisecond

// usageOf reads what a process uses; false where it is gone or cannot be seen.
func usageOf(pid int) (usage, bool) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return usage{}, false
	}
	var u usage
	for line := range strings.Lines(string(status)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		kib, _ := strconv.ParseInt(fields[1], 10, 64)
		switch fields[0] {
		case "VmHWM:":
			u.peak = kib << 10
		case "VmRSS:":
			u.now = kib << 10
		}
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	// The name in parentheses may have blanks in it: utime and stime are fields 14 and 15, counted from 1.
	end := bytes.LastIndexByte(stat, ')')
	if err != nil || end < 0 {
		return usage{}, false
	}
	fields := strings.Fields(string(stat[end+1:]))
	if len(fields) < 13 {
		return usage{}, false
	}
	for _, f := range fields[11:13] {
		ticks, _ := strconv.ParseInt(f, 10, 64)
		u.cpu += time.Duration(ticks) * clockTick
	}
	return u, true
}

// listener gives the process that listens on a TCP port of this machine; 0 where it is elsewhere, or somebody else's.
func listener(port int) int {
	sockets := map[string]bool{}
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		text, _ := os.ReadFile(table) //nolint:gosec // the kernel's
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			const listening = "0A"
			if len(f) > 9 && f[3] == listening && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
				sockets["socket:["+f[9]+"]"] = true
			}
		}
	}
	handles, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, h := range handles {
		if target, err := os.Readlink(h); err == nil && sockets[target] {
			pid, _ := strconv.Atoi(strings.Split(h, "/")[2])
			return pid
		}
	}
	return 0
}

// machine says what kind of machine this is.
func machine() string {
	info, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(info)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "MemTotal:" {
			kib, _ := strconv.ParseInt(f[1], 10, 64)
			return fmt.Sprintf("%d GiB", (kib+1<<19)>>20)
		}
	}
	return ""
}
