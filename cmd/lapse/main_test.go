package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// runAsMain makes the test binary be the lapse binary: what is killed and signalled in the tests is then the code under test, with the race
// detector where the tests have it.
const runAsMain = "LAPSE_TEST_RUN_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(runAsMain) == "1" {
		main()
		return
	}
	// What the official RocketMQ client leaves behind, see the package documentation of internal/rmq.
	const client = "github.com/apache/rocketmq-clients/golang/v5"
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction(client+".(*defaultClientManager).startUp.func1"),
		goleak.IgnoreAnyFunction(client+".(*defaultClientManager).startUp.func2"),
		goleak.IgnoreAnyFunction(client+".(*defaultClientManager).startUp.func3"),
		goleak.IgnoreAnyFunction(client+".(*defaultClientManager).startUp.func4"),
		goleak.IgnoreAnyFunction(client+"/pkg/ticker.Tick.func1"),
		goleak.IgnoreTopFunction("go.opencensus.io/stats/view.(*worker).start"),
	)
}

// limit is how long a test waits for what has to happen; only a failing test takes so long.
const limit = time.Minute

// eventually waits until cond is true, and fails the test if that takes longer than limit.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("after %s still not: %s", limit, what)
		}
	}
}

// output is written by a running command and read by its test.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// lapse runs one command to its end.
func lapse(t *testing.T, environ []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errOut output
	code = run(t.Context(), args, environ, &out, &errOut)
	return code, out.String(), errOut.String()
}

// process is a service that a test has started, inside the test's process or as one of its own.
type process struct {
	stderr *output
	done   chan struct{} // closed when it has ended
	code   int           // after done; -1: ended by a signal
	signal func(syscall.Signal)
}

// start runs a service inside the test's process. A signal to it is the end of its context.
func start(t *testing.T, environ []string, args ...string) *process {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	p := &process{stderr: new(output), done: make(chan struct{}), signal: func(syscall.Signal) { cancel() }}
	go func() { // ended by the cleanup
		defer close(p.done)
		p.code = run(ctx, args, environ, io.Discard, p.stderr)
	}()
	p.endWithTest(t, cancel)
	return p
}

// spawn runs a service as a process of its own.
func spawn(t *testing.T, environ []string, args ...string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), self, args...)
	cmd.Env = append([]string{runAsMain + "=1", "PATH=" + os.Getenv("PATH"), "GOCOVERDIR=" + t.TempDir()}, environ...)
	return spawned(t, cmd)
}

func spawned(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{stderr: new(output), done: make(chan struct{})}
	cmd.Stderr = p.stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.signal = func(s syscall.Signal) {
		if err := cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("send %s: %v", s, err)
		}
	}
	go func() { // ends with the process
		defer close(p.done)
		_ = cmd.Wait() // the exit code says it
		p.code = cmd.ProcessState.ExitCode()
	}()
	p.endWithTest(t, func() { _ = cmd.Process.Kill() })
	return p
}

func (p *process) endWithTest(t *testing.T, end func()) {
	t.Helper()
	t.Cleanup(func() {
		end()
		select {
		case <-p.done:
		case <-time.After(limit):
			t.Errorf("a process does not end with its test")
		}
		if t.Failed() {
			t.Logf("its log:\n%s", p.stderr)
		}
	})
}

// wait gives the exit code of a process that is to end by itself.
func (p *process) wait(t *testing.T) int {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(limit):
		t.Fatalf("the process does not end; its log:\n%s", p.stderr)
	}
	return p.code
}

// line gives the first line of the log with this message.
func (p *process) line(message string) (map[string]any, bool) {
	for text := range strings.Lines(p.stderr.String()) {
		var entry map[string]any
		if json.Unmarshal([]byte(text), &entry) == nil && entry["msg"] == message {
			return entry, true
		}
	}
	return nil, false
}

// addr is where the process serves: tests use port 0.
func (p *process) addr(t *testing.T) string {
	t.Helper()
	var addr string
	eventually(t, "the process serves", func() bool {
		select {
		case <-p.done:
			t.Fatalf("the process has ended with %d; its log:\n%s", p.code, p.stderr)
		default:
		}
		entry, ok := p.line("serving http")
		addr, _ = entry["addr"].(string)
		return ok
	})
	return addr
}

// get asks the process; an empty body and 0 where nothing answers.
func (p *process) get(t *testing.T, path string) (status int, body string) {
	t.Helper()
	return get(t, "http://"+p.addr(t)+path)
}

func get(t *testing.T, url string) (status int, body string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return 0, ""
	}
	defer resp.Body.Close() //nolint:errcheck // it was read
	content, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(content)
}

func (p *process) ready(t *testing.T) {
	t.Helper()
	eventually(t, "ready", func() bool {
		status, _ := p.get(t, "/readyz")
		return status == http.StatusOK
	})
}
