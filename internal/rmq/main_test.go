package rmq

import (
	"context"
	"flag"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lapse-orders/lapse/lapsetest"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(child())
	}
	// The tests wait for servers and timeouts most of the time.
	flag.Parse()
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m, clientTickers()...)
}

// clientTickers are the goroutines that doc.go names, and the one that the
// client's metrics library starts in its init.
func clientTickers() []goleak.Option {
	const pkg = "github.com/apache/rocketmq-clients/golang/v5"
	return []goleak.Option{
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func1"),
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func2"),
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func3"),
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func4"),
		goleak.IgnoreAnyFunction(pkg + "/pkg/ticker.Tick.func1"),
		goleak.IgnoreTopFunction("go.opencensus.io/stats/view.(*worker).start"),
	}
}

// eventually fails the test when cond is not true within the limit.
func eventually(t *testing.T, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("not within %s: %s", limit, what)
		}
	}
}

// within is a context that fails late calls.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// bundle is what setup makes: a broker with one topic and one group.
type bundle struct {
	*lapsetest.Broker
	topic, group string
}

func setup(t *testing.T, opts ...lapsetest.Option) *bundle {
	t.Helper()
	b := &bundle{Broker: lapsetest.Start(t, opts...), topic: "order-timeout", group: "order-timeout-cg"}
	b.CreateTopic(b.topic, lapsetest.Delay, 8)
	b.CreateGroup(b.group, 16)
	return b
}

func (b *bundle) config(t *testing.T) Config {
	return Config{Endpoints: b.Endpoint(), TLS: TLS{Disabled: true}, Logger: testLog(t)}
}

func (b *bundle) producer(t *testing.T) *Producer {
	t.Helper()
	return openProducer(t, b.config(t), b.topic)
}

func (b *bundle) consumer(t *testing.T) *Consumer {
	t.Helper()
	return openConsumer(t, b.config(t), b.group, b.topic)
}

func openProducer(t *testing.T, cfg Config, topics ...string) *Producer {
	t.Helper()
	p := newProducer(t, cfg, topics...)
	awaitReady(t, 45*time.Second, p.Ready)
	return p
}

func newProducer(t *testing.T, cfg Config, topics ...string) *Producer {
	t.Helper()
	p, err := NewProducer(cfg, topics...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeInTime(t, p.Close) })
	return p
}

func openConsumer(t *testing.T, cfg Config, group string, topics ...string) *Consumer {
	t.Helper()
	c := newConsumer(t, cfg, group, topics...)
	awaitReady(t, 45*time.Second, c.Ready)
	return c
}

func newConsumer(t *testing.T, cfg Config, group string, topics ...string) *Consumer {
	t.Helper()
	c, err := NewConsumer(cfg, group, topics...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeInTime(t, c.Close) })
	return c
}

func closeInTime(t *testing.T, closeIt func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := closeIt(ctx); err != nil {
		t.Errorf("close: %v", err)
	}
}

func awaitReady(t *testing.T, limit time.Duration, ready func() error) {
	t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ready()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("not ready within %s: %v", limit, err)
		}
	}
}

// receiveOne receives until a message comes.
func receiveOne(t *testing.T, c *Consumer, limit time.Duration) *Delivery {
	t.Helper()
	ctx := within(t, limit)
	for {
		ds, err := c.Receive(ctx, 1, 10*time.Second)
		if ctx.Err() != nil {
			t.Fatalf("no message within %s (%v)", limit, err)
		}
		if err == nil && len(ds) > 0 {
			return ds[0]
		}
	}
}

// testLog writes to the test's log what happens before the test ends.
func testLog(t *testing.T) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// pause waits between attempts, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// untilListening returns the moment at which addr first accepts a connection.
func untilListening(ctx context.Context, addr string) time.Time {
	for ctx.Err() == nil {
		conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", addr)
		if err == nil {
			_ = conn.Close()
			break
		}
		pause(ctx, 20*time.Millisecond)
	}
	return time.Now()
}
