package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The binary alone in an empty root, as in an image made from scratch, knows the time zone that TZ names.
//
// case JOB-7
func TestTheBinaryAloneInAnEmptyRootKnowsTimeZones(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // a cold build cache
	defer cancel()
	build := exec.CommandContext(ctx, "go", "build", "-o", filepath.Join(root, "lapse"), ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}

	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "/lapse", "relay")
	cmd.Env = environOf("u:p@tcp("+closedAddr(t)+")/shop", closedAddr(t), "TZ=Asia/Shanghai")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	if os.Getuid() != 0 {
		// A user namespace gives the right to change the root to whoever lacks it.
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	p := spawned(t, cmd)
	if status, body := p.get(t, "/healthz"); status != 200 {
		t.Errorf("it answers %d %q", status, body)
	}
	entry, _ := p.line("serving http")
	if at, _ := entry["time"].(string); !strings.HasSuffix(at, "+08:00") {
		t.Errorf("its log has the time %q, want one of +08:00", at)
	}
	if _, body := p.get(t, "/metrics"); !strings.Contains(body, "lapse_build_info") {
		t.Error("it serves no metrics")
	}
	p.signal(syscall.SIGTERM)
	if code := p.wait(t); code != 0 {
		t.Errorf("it ends with %d, want 0", code)
	}

	unknown := exec.CommandContext(ctx, "/lapse", "relay")
	unknown.Env = environOf("u:p@tcp("+closedAddr(t)+")/shop", closedAddr(t), "TZ=Asia/Shangai")
	unknown.Dir = "/"
	unknown.SysProcAttr = cmd.SysProcAttr
	p = spawned(t, unknown)
	if code := p.wait(t); code != 2 || !strings.Contains(p.stderr.String(), `TZ is "Asia/Shangai", which is no time zone`) {
		t.Errorf("a time zone that is none: it ends with %d and %q, want 2 and the name", code, p.stderr)
	}
}
