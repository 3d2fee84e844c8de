package trial

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// envRole makes this test binary play one of the processes of a crew instead of running tests.
const envRole = "LAPSE_TEST_TRIAL_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(envRole); role != "" {
		os.Exit(play(role, os.Args))
	}
	// The tests wait for deadlines and servers most of the time.
	flag.Parse()
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	code := m.Run()
	removeBinary()
	if code == 0 {
		// The worker of the RocketMQ client's statistics is started by an import and has no end.
		if err := goleak.Find(goleak.IgnoreTopFunction("go.opencensus.io/stats/view.(*worker).start")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// play is one process: ready and deaf answer on http.addr, and end with SIGTERM or not; dies ends at once; parent starts a process of the
// role ready, tells its pid, and waits to be killed.
func play(role string, args []string) int {
	switch role {
	case "dies":
		fmt.Println("first line\nthe last thing it said")
		return 7
	case "parent":
		c := newCrew(args[0], []string{envRole + "=ready"}, os.TempDir(), func(error) {})
		p, err := c.start(fmt.Sprintf("child of %d", os.Getpid()))
		if err != nil {
			fmt.Println(err)
			return 1
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := c.waitReady(ctx, p); err != nil {
			fmt.Println(err)
			return 1
		}
		_ = os.Remove(p.log)
		fmt.Println(p.cmd.Process.Pid)
		<-ctx.Done()
		return 1
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	addr := strings.TrimPrefix(args[len(args)-1], "http.addr=")
	server := &http.Server{Addr: addr, ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if role == "unready" {
			http.Error(w, "the broker is on holiday", http.StatusServiceUnavailable)
		}
	})}
	failed := make(chan error, 1)
	go func() { failed <- server.ListenAndServe() }()
	if role == "deaf" {
		ctx = context.Background()
	}
	select {
	case <-ctx.Done():
		return 0
	case err := <-failed:
		fmt.Println(err)
		return 1
	}
}

// buildLapse builds the binary once for all tests.
var buildLapse = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "lapse-trial-test-")
	if err != nil {
		return "", err
	}
	binary := filepath.Join(dir, "lapse")
	out, err := exec.CommandContext(context.Background(), "go", "build", "-o", binary, "github.com/lapse-orders/lapse/cmd/lapse").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build lapse: %w\n%s", err, out)
	}
	builtIn = dir
	return binary, nil
})

var builtIn string // set by buildLapse

func removeBinary() {
	if builtIn != "" {
		_ = os.RemoveAll(builtIn)
	}
}

// eventually waits for a condition; what says what it is.
func eventually(t testing.TB, limit time.Duration, what string, is func() bool) {
	t.Helper()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.After(limit)
	for !is() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("not within %s: %s", limit, what)
		}
	}
}
