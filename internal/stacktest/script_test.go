package stacktest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// These tests hold scripts/stack to what it promises, with the name server alone, which starts fastest.

// newScript returns a way to call scripts/stack on a state of the test's own: it gives the combined output and the exit code. The output
// comes through a pipe, so a server that kept it open would hang every one of these tests.
func newScript(t *testing.T) (call func(env []string, args ...string) (string, int), state string, offset int) {
	t.Helper()
	Require(t, "LAPSE_TEST_BROKER_ADMIN")
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	offset = freeOffset(t)
	s := &Stack{script: filepath.Join(root, "scripts", "stack"), env: stackEnv(dir, offset, Options{})}
	call = func(env []string, args ...string) (string, int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
		defer cancel()
		with := &Stack{script: s.script, env: append(append([]string{}, s.env...), env...)}
		out, err := with.run(ctx, args...)
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Errorf("scripts/stack %s: %v\n%s", strings.Join(args, " "), err, out)
			return out, -1
		}
		if exit != nil {
			return out, exit.ExitCode()
		}
		return out, 0
	}
	t.Cleanup(func() {
		if out, code := call(nil, "reset"); code != 0 {
			t.Errorf("reset: exit %d\n%s", code, out)
		}
	})
	return call, filepath.Join(dir, "state"), offset
}

// serverPid reads from the status what runs where; 0 if the part is down.
func serverPid(t *testing.T, status, part string) int {
	t.Helper()
	for line := range strings.Lines(status) {
		if fields := strings.Fields(line); len(fields) > 2 && fields[0] == part {
			if fields[1] == "down" {
				return 0
			}
			pid, err := strconv.Atoi(fields[2])
			if err != nil {
				t.Fatalf("status line %q", line)
			}
			return pid
		}
	}
	t.Fatalf("no line of %s in:\n%s", part, status)
	return 0
}

func TestTwoUpsAtOnceStartOneServer(t *testing.T) {
	t.Parallel()
	call, state, _ := newScript(t)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if out, code := call(nil, "up", "--only", "namesrv"); code != 0 {
				t.Errorf("up: exit %d\n%s", code, out)
			}
		})
	}
	wg.Wait()
	var marked []string
	cmdlines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range cmdlines {
		// A process may end while we look.
		if cmdline, err := os.ReadFile(path); err == nil && strings.Contains(string(cmdline), "-Dlapse.stack="+state+"/namesrv\x00") {
			marked = append(marked, path)
		}
	}
	if len(marked) != 1 {
		t.Errorf("%d name servers, want 1: %v", len(marked), marked)
	}
	out, code := call(nil, "status")
	if pid := serverPid(t, out, "namesrv"); code != 0 || pid == 0 {
		t.Errorf("status: exit %d\n%s", code, out)
	}
}

func TestKilledServerComesUpAgainAndAStalePidFileHurtsNobody(t *testing.T) {
	t.Parallel()
	call, state, _ := newScript(t)
	if out, code := call(nil, "up", "--only", "namesrv"); code != 0 {
		t.Fatalf("up: exit %d\n%s", code, out)
	}
	if out, code := call(nil, "kill", "namesrv"); code != 0 {
		t.Fatalf("kill: exit %d\n%s", code, out)
	}
	// The pid has been given to somebody else: to a process with this very start time, even.
	bystander := exec.CommandContext(t.Context(), "sleep", "600")
	if err := bystander.Start(); err != nil {
		t.Fatal(err)
	}
	gone := make(chan error, 1)
	go func() { gone <- bystander.Wait() }()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", bystander.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	pidFile := filepath.Join(state, "run", "namesrv.pid")
	started := strings.Fields(string(stat))[21]
	if err := os.WriteFile(pidFile, fmt.Appendf(nil, "%d %s\n", bystander.Process.Pid, started), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, code := call(nil, "status"); code != 1 || serverPid(t, out, "namesrv") != 0 {
		t.Errorf("status with a stale pid file: exit %d\n%s", code, out)
	}
	for range 2 { // down twice does no harm either
		if out, code := call(nil, "down"); code != 0 {
			t.Errorf("down: exit %d\n%s", code, out)
		}
	}
	if out, code := call(nil, "start", "namesrv"); code != 0 {
		t.Errorf("start: exit %d\n%s", code, out)
	}
	// And the other way round: a server whose pid file is gone is still found, and stopped.
	if err := os.Remove(pidFile); err != nil {
		t.Fatal(err)
	}
	out, _ := call(nil, "status")
	if serverPid(t, out, "namesrv") == 0 {
		t.Errorf("the running server is not found without its pid file:\n%s", out)
	}
	if out, code := call(nil, "stop", "namesrv"); code != 0 || !strings.Contains(out, "namesrv: stopped") {
		t.Errorf("stop: exit %d\n%s", code, out)
	}
	select {
	case err := <-gone:
		t.Errorf("the process that has the pid now was ended: %v", err)
	default:
	}
}

func TestPortOfAnotherProcessIsNamedAndLeftAlone(t *testing.T) {
	t.Parallel()
	call, _, offset := newScript(t)
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(13376+offset))
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // a test's listener
	out, code := call(nil, "up", "--only", "namesrv")
	if code != 1 || !strings.Contains(out, strconv.Itoa(13376+offset)) || !strings.Contains(out, fmt.Sprintf("pid %d", os.Getpid())) {
		t.Errorf("exit %d, want 1 with the port and our pid %d:\n%s", code, os.Getpid(), out)
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatalf("our own server no longer answers: %v", err)
	}
	_ = conn.Close()
}

func TestServerThatCannotStartShowsItsLastWords(t *testing.T) {
	t.Parallel()
	call, _, _ := newScript(t)
	out, code := call([]string{"STACK_BROKER_HEAP=nonsense"}, "up", "--only", "rocketmq")
	if code != 1 || !strings.Contains(out, "broker ended before") || !strings.Contains(out, "-Xmsnonsense") || !strings.Contains(out, "What to do:") {
		t.Errorf("exit %d, want 1 with Java's complaint:\n%s", code, out)
	}
}

func TestServerThatIgnoresTheSignalIsKilledAndSaidSo(t *testing.T) {
	t.Parallel()
	call, _, _ := newScript(t)
	if out, code := call(nil, "up", "--only", "namesrv"); code != 0 {
		t.Fatalf("up: exit %d\n%s", code, out)
	}
	out, _ := call(nil, "status")
	pid := serverPid(t, out, "namesrv")
	// A stopped process keeps SIGTERM pending, like a broker that hangs in its shutdown.
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	out, code := call([]string{"STACK_STOP_TIMEOUT=1"}, "down")
	if code != 0 || !strings.Contains(out, "did not stop within 1 s and is killed") {
		t.Errorf("down: exit %d\n%s", code, out)
	}
	if err := syscall.Kill(pid, 0); err == nil {
		// A zombie that nobody has reaped yet is gone as far as its files are concerned.
		if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && !strings.Contains(string(stat), ") Z ") {
			t.Errorf("still there after down: %s", stat)
		}
	}
}

func TestStoreOfAnotherKindIsRefused(t *testing.T) {
	t.Parallel()
	call, state, _ := newScript(t)
	if out, code := call(nil, "up", "--only", "namesrv"); code != 0 {
		t.Fatalf("up: exit %d\n%s", code, out)
	}
	if err := os.MkdirAll(filepath.Join(state, "broker", "store"), 0o700); err != nil {
		t.Fatal(err)
	}
	out, code := call([]string{"STACK_TIMER_PRECISION_MS=1000"}, "up", "--only", "namesrv")
	if code != 2 || !strings.Contains(out, "ticks of 100 ms") || !strings.Contains(out, "scripts/stack reset") {
		t.Errorf("exit %d, want 2 with the reason and the way out:\n%s", code, out)
	}
}

func TestWrongUseSaysWhatIsRight(t *testing.T) {
	t.Parallel()
	call, _, _ := newScript(t)
	for _, c := range []struct {
		env  []string
		args string
		code int
		want string
	}{
		{nil, "", 2, "Usage:"},
		{nil, "--help", 0, "Usage:"},
		{nil, "frobnicate", 2, "unknown command 'frobnicate'"},
		{nil, "up now", 2, "up does not know 'now'"},
		{nil, "up --with mysql", 2, "--with takes 'replica'"},
		{nil, "up --only", 2, "--only takes parts"},
		{nil, "up --only postgres", 2, "one of mysql replica namesrv broker"},
		{nil, "up --only replica", 2, "a replica needs its primary"},
		{nil, "up --only broker", 2, "the broker needs the name server"},
		{nil, "stop", 2, "unknown part ''"},
		{[]string{"STACK=podman"}, "up", 2, "native or docker"},
		{[]string{"STACK=docker", "PATH=" + pathWithout(t, "docker")}, "up", 3, "STACK=docker: there is no docker here"},
		{[]string{"STACK=docker", "STACK_MYSQL=mariadb"}, "up", 2, "STACK=docker has MySQL only"},
		{[]string{"STACK_MYSQL=oracle"}, "up", 2, "auto, mysql or mariadb"},
		{[]string{"STACK_TIMER_PRECISION_MS=10"}, "up", 2, "100 or 1000"},
		{[]string{"STACK_PORT_OFFSET=x"}, "up", 2, "STACK_PORT_OFFSET=x"},
		{[]string{"STACK_MYSQL_PORT=70000"}, "up", 2, "not between 1 and 65535"},
		{nil, "status", 1, "scripts/stack up"},
		{nil, "env", 1, "scripts/stack up"},
		{nil, "start mysql", 1, "scripts/stack up"},
		{nil, "down", 0, ""},
		{[]string{"PATH=" + pathWithout(t, "go")}, "up --only namesrv", 3, "Go is not on the PATH"},
	} {
		out, code := call(c.env, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%v scripts/stack %s: exit %d, want %d and %q:\n%s", c.env, c.args, code, c.code, c.want, out)
		}
	}
}

// Tests that kill servers count on processes, so a state of its own is never given to containers by accident; and one that is there stays what
// it is, since the data of the one kind is nothing to the other.
func TestAStackOfItsOwnIsNativeUnlessToldOtherwise(t *testing.T) {
	t.Parallel()
	call, _, _ := newScript(t)
	out, code := call([]string{"STACK="}, "up", "--only", "namesrv")
	if code != 0 || !strings.Contains(out, "native servers (STACK=native): STACK_STATE") {
		t.Errorf("up without STACK: exit %d, want native servers and the reason:\n%s", code, out)
	}
	for _, command := range []string{"up", "status", "down"} {
		out, code := call([]string{"STACK=docker"}, command)
		if code != 2 || !strings.Contains(out, "brought up with STACK=native") {
			t.Errorf("STACK=docker scripts/stack %s on a native stack: exit %d, want 2 and the reason:\n%s", command, code, out)
		}
	}
	if out, code := call([]string{"STACK="}, "status"); code != 0 || !strings.Contains(out, "native") {
		t.Errorf("status: exit %d, want 0 and the kind:\n%s", code, out)
	}
}

func TestAnEngineThatHangsCountsAsNone(t *testing.T) {
	t.Parallel()
	call, _, _ := newScript(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "docker"), []byte("#!/bin/sh\nexec sleep 300\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	out, code := call([]string{"STACK=docker", "PATH=" + dir + string(filepath.ListSeparator) + os.Getenv("PATH")}, "up")
	if code != 3 || !strings.Contains(out, "no Docker engine answers") {
		t.Errorf("up: exit %d, want 3 and the reason:\n%s", code, out)
	}
	if took := time.Since(begun); took > 20*time.Second {
		t.Errorf("it took %s to see that the engine does not answer", took)
	}
}

// pathWithout is the search path without one program, wherever it lies: every other program of its folder is linked into one of ours.
func pathWithout(t *testing.T, program string) string {
	t.Helper()
	var kept []string
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		if _, err := os.Stat(filepath.Join(dir, program)); err != nil {
			kept = append(kept, dir)
			continue
		}
		links := t.TempDir()
		programs, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range programs {
			if p.Name() != program {
				if err := os.Symlink(filepath.Join(dir, p.Name()), filepath.Join(links, p.Name())); err != nil {
					t.Fatal(err)
				}
			}
		}
		kept = append(kept, links)
	}
	return strings.Join(kept, string(filepath.ListSeparator))
}

// STACK_STATE may lead to a directory of somebody else's.
func TestAResetLeavesADirectoryAloneThatIsNoStack(t *testing.T) {
	t.Parallel()
	call, state, _ := newScript(t)
	theirs := filepath.Join(state, "bin", "tool")
	if err := os.MkdirAll(filepath.Dir(theirs), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(theirs, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, code := call(nil, "reset"); code != 0 || !strings.Contains(out, "no stack here") {
		t.Errorf("exit %d:\n%s", code, out)
	}
	if _, err := os.Stat(theirs); err != nil {
		t.Error(err)
	}
}
