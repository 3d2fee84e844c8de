package lapsetest_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/lapse-orders/lapse/lapsetest"
)

// The official client keeps its configuration in globals and the environment. Here
// it is told to leave home and temp directories alone, and to dial in plaintext
// without waiting.
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "lapsetest")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for k, v := range map[string]string{golang.CLIENT_LOG_ROOT: dir, golang.CLIENT_LOG_LEVEL: "error"} {
		if err := os.Setenv(k, v); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	golang.ResetLogger()
	// The tests wait, they do not compute: more of them at once than there are cores.
	if err := flag.Set("test.parallel", "32"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	original := golang.NewRpcClient
	golang.NewRpcClient = func(target string, opts ...golang.RpcClientOption) (golang.RpcClient, error) {
		return original(target, append(opts, golang.WithRpcClientClientConnFunc(dialPlain))...)
	}
	code := m.Run()
	closeConns()
	if code == 0 {
		if err := goleak.Find(clientGoroutines()...); err != nil {
			fmt.Fprintln(os.Stderr, "goroutines are left:", err)
			code = 1
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// clientGoroutines are those which the official client leaves behind after
// GracefulStop: its manager's four tickers, which nothing stops, and its logger.
func clientGoroutines() []goleak.Option {
	const pkg = "github.com/apache/rocketmq-clients/golang/v5"
	return []goleak.Option{
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func1"),
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func2"),
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func3"),
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func4"),
		goleak.IgnoreAnyFunction(pkg + "/pkg/ticker.Tick.func1"),
		goleak.IgnoreAnyFunction("github.com/natefinch/lumberjack.(*Logger).millRun"),
		goleak.IgnoreAnyFunction("go.opencensus.io/stats/view.(*worker).start"),
	}
}

// conns are the connections of all official clients, which do not close them when
// they stop.
var conns struct {
	mu  sync.Mutex
	all []*grpc.ClientConn
}

func closeConns() {
	conns.mu.Lock()
	defer conns.mu.Unlock()
	for _, c := range conns.all {
		_ = c.Close() // closed already where the client did it after all
	}
}

type plainConn struct{ c *grpc.ClientConn }

func (p plainConn) Conn() *grpc.ClientConn { return p.c }
func (p plainConn) Close() error           { return p.c.Close() }

func dialPlain(target string, _ ...golang.ConnOption) (golang.ClientConn, error) {
	c, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", target, err)
	}
	conns.mu.Lock()
	conns.all = append(conns.all, c)
	conns.mu.Unlock()
	return plainConn{c}, nil
}

// within fails the test when a step takes longer than d.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func until(t *testing.T, b *lapsetest.Broker, what string, cond func() bool) {
	t.Helper()
	if err := b.Until(within(t, 20*time.Second), cond); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// eventually asks again and again, for what the Broker itself does not announce.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	ctx := within(t, 20*time.Second)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: not within 20 s", what)
		}
	}
}
