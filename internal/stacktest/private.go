package stacktest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq/admin"
)

// Part is a server of the stack, by the name that scripts/stack gives it.
type Part string

const (
	// MySQL is the primary.
	MySQL Part = "mysql"
	// Replica follows MySQL and needs it.
	Replica Part = "replica"
	// NameServer knows where RocketMQ's topics are.
	NameServer Part = "namesrv"
	// BrokerProxy is the broker and the gRPC proxy, one process. It needs NameServer.
	BrokerProxy Part = "broker"
)

// Options says what a private stack has.
type Options struct {
	Parts       []Part   // at least one; for RocketMQ both NameServer and BrokerProxy
	PrecisionMs int      // width of the broker's tick, 100 (the default) or 1000
	Env         []string // more for scripts/stack, as KEY=value
}

// Stack is a set of servers that one test alone uses, and may stop, start and kill. Its methods fail the test when they do not succeed. They
// may be called from several goroutines of a test, except that a failure must then be waited for, as with any use of testing.T.
type Stack struct {
	Broker *Broker // nil if it has none

	script string
	state  string
	env    []string // for scripts/stack
	values map[string]string
}

// Private brings up servers of the test's own, with empty stores, and removes them and their data when the test ends. It takes some 10
// seconds, so a test shares one among its subtests. It is skipped, or fails, as Require does when the shared stack is not there: whoever has
// not asked for servers gets none started.
func Private(t testing.TB, options Options) *Stack {
	t.Helper()
	Require(t, "LAPSE_TEST_MYSQL_ADMIN_DSN")
	if len(options.Parts) == 0 {
		t.Fatal("stacktest.Private: Options.Parts is empty")
	}
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	sweep(t, filepath.Join(root, "scripts", "stack"))

	// Not t.TempDir: the data of a killed test has to be found again, see sweep.
	dir, err := os.MkdirTemp("", statePrefix)
	if err != nil {
		t.Fatal(err)
	}
	owner, err := lockOwner(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := &Stack{script: filepath.Join(root, "scripts", "stack"), state: filepath.Join(dir, "state")}
	// Before anything can fail: the reset below is of this stack then, and not of the shared one.
	s.env = stackEnv(dir, 0, options)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if out, err := s.run(ctx, "reset"); err != nil {
			t.Errorf("end the private stack in %s: %v\n%s", dir, err, out)
			return
		}
		_ = owner.Close()
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove the private stack: %v", err)
		}
	})

	var names []string
	for _, p := range options.Parts {
		names = append(names, string(p))
	}
	var out string
	// Between our look at the ports and the servers' use of them, another test may have taken them.
	for range 3 {
		s.env = stackEnv(dir, freeOffset(t), options)
		if out, err = s.run(t.Context(), "up", "--only", strings.Join(names, ",")); err == nil {
			break
		}
		t.Logf("private stack: %v\n%s", err, out)
		if _, err := s.run(t.Context(), "reset"); err != nil {
			t.Fatal(err)
		}
	}
	if err != nil {
		t.Fatalf("private stack: %v\n%s", err, out)
	}
	printed, err := s.run(t.Context(), "env")
	if err != nil {
		t.Fatalf("private stack: %v\n%s", err, printed)
	}
	s.values = parseExports(printed)
	if endpoints := s.values["LAPSE_ROCKETMQ_ENDPOINTS"]; endpoints != "" {
		s.Broker = &Broker{Endpoints: endpoints, Admin: admin.New(s.values["LAPSE_TEST_BROKER_ADMIN"])}
	}
	return s
}

// Stop ends a part as an operator would: SIGTERM, and it is gone when Stop returns.
func (s *Stack) Stop(t testing.TB, part Part) { t.Helper(); s.must(t, "stop", string(part)) }

// Kill ends a part with SIGKILL. It is gone when Kill returns.
func (s *Stack) Kill(t testing.TB, part Part) { t.Helper(); s.must(t, "kill", string(part)) }

// Start starts a part that was stopped or killed, on its old data and port, and returns when it is ready for use.
func (s *Stack) Start(t testing.TB, part Part) { t.Helper(); s.must(t, "start", string(part)) }

// Store is the folder of the broker's files.
func (s *Stack) Store() string { return filepath.Join(s.state, "broker", "store") }

// Getenv returns one value of what `scripts/stack env` prints for this stack, "" if it has no such part.
func (s *Stack) Getenv(name string) string { return s.values[name] }

// Env returns all of them as KEY=value, for a child process.
func (s *Stack) Env() []string {
	env := make([]string, 0, len(s.values))
	for k, v := range s.values {
		env = append(env, k+"="+v)
	}
	return env
}

// MySQLAdminDSN is root's data source name on the private primary, without a database: user:password@tcp(host:port)/
func (s *Stack) MySQLAdminDSN() string { return s.values["LAPSE_TEST_MYSQL_ADMIN_DSN"] }

// ReplicaAdminDSN is root's data source name on the private replica.
func (s *Stack) ReplicaAdminDSN() string { return s.values["LAPSE_TEST_REPLICA_ADMIN_DSN"] }

// Endpoints is the private proxy's gRPC address, host:port; plaintext.
func (s *Stack) Endpoints() string { return s.values["LAPSE_ROCKETMQ_ENDPOINTS"] }

func (s *Stack) must(t testing.TB, args ...string) {
	t.Helper()
	// scripts/stack gives up by itself after 90 s for a start and 55 s for a stop, with a message that says more.
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	if out, err := s.run(ctx, args...); err != nil {
		t.Fatalf("scripts/stack %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func (s *Stack) run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, s.script, args...) //nolint:gosec // the module's own script
	cmd.Env = append(os.Environ(), s.env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func stackEnv(dir string, offset int, options Options) []string {
	env := []string{
		"STACK=native",
		"STACK_STATE=" + filepath.Join(dir, "state"),
		"STACK_PORT_OFFSET=" + strconv.Itoa(offset),
		"STACK_BROKER_HEAP=512m",
	}
	if options.PrecisionMs != 0 {
		env = append(env, "STACK_TIMER_PRECISION_MS="+strconv.Itoa(options.PrecisionMs))
	}
	return append(env, options.Env...)
}

// ports are the shared stack's (scripts/stack --help). They lie within a hundred, so stacks whose offsets are different hundreds never meet;
// and below 32768, where the kernel picks ports for outgoing connections.
var ports = []int{13306, 13307, 13309, 13311, 13312, 13357, 13376, 13380, 13381}

func freeOffset(t testing.TB) int {
	t.Helper()
	for range 100 {
		offset := 100 * (1 + rand.IntN(190)) //nolint:gosec // a port, not a secret
		if allFree(t.Context(), offset) {
			return offset
		}
	}
	t.Fatal("no free ports for a private stack among 13400 to 32400")
	return 0
}

func allFree(ctx context.Context, offset int) bool {
	var config net.ListenConfig
	for _, port := range ports {
		l, err := config.Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port+offset)))
		if err != nil {
			return false
		}
		_ = l.Close()
	}
	return true
}

const statePrefix = "lapse-stack-"

// lockOwner marks the directory as in use for as long as this process lives, however it ends.
func lockOwner(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "owner"), os.O_CREATE|os.O_RDWR, 0o600) //nolint:gosec // our own directory
	if err != nil {
		return nil, fmt.Errorf("mark private stack: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("mark private stack %s: %w", dir, err)
	}
	return f, nil
}

// sweep ends the private stacks of test processes that were killed before they could: without it, each run into a time limit would leave two
// JVMs and a MySQL behind.
func sweep(t testing.TB, script string) {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), statePrefix+"*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		// A directory without the mark is one that another process is just making.
		if _, err := os.Stat(filepath.Join(dir, "owner")); err != nil {
			continue
		}
		owner, err := lockOwner(dir)
		if errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		left := &Stack{script: script, env: []string{"STACK_STATE=" + filepath.Join(dir, "state")}}
		if out, err := left.run(t.Context(), "reset"); err != nil {
			t.Logf("private stack left behind in %s: %v\n%s", dir, err, out)
		} else {
			_ = os.RemoveAll(dir)
		}
		_ = owner.Close()
	}
}

func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod above the working directory: private stacks need the checkout")
		}
		dir = parent
	}
}

// parseExports reads lines of the form export NAME='value'; other lines are for people.
func parseExports(text string) map[string]string {
	values := make(map[string]string)
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "export "), "=")
		if ok && strings.HasPrefix(name, "LAPSE_") {
			values[name] = strings.Trim(value, "'")
		}
	}
	return values
}
