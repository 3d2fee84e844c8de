package rmq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	innermd "github.com/apache/rocketmq-clients/golang/v5/metadata"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"google.golang.org/grpc/metadata"

	"github.com/lapse-orders/lapse/lapsetest"
)

// Some behaviour belongs to the process: its files, its environment, the number
// of its goroutines. Those tests run this test binary again, with childEnv naming
// the function.
const childEnv = "LAPSE_RMQ_TEST_CHILD"

var children = map[string]func() error{
	"files":   childFiles,
	"foreign": childForeign,
	"leaks":   childLeaks,
	"waiting": childWaiting,
}

func child() int {
	if err := children[os.Getenv(childEnv)](); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runChild(t *testing.T, name string, env ...string) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(within(t, 3*time.Minute), exe)
	cmd.Env = append(os.Environ(), append(env, childEnv+"="+name)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("child %s: %v\n%s", name, err, out)
	}
	t.Logf("child %s: %s", name, out)
	return string(out)
}

const secretBody = "a-body-that-must-not-be-on-disk"

func TestNothingIsWrittenToHomeOrTempAndNoBodyIsLogged(t *testing.T) {
	t.Parallel()
	home, tmp := t.TempDir(), t.TempDir()
	fixed := "/tmp/rocketmq-logger.log" // whatever TMPDIR says (pkg/zaplog/options.go:28)
	before, _ := os.Stat(fixed)
	out := runChild(t, "files", "HOME="+home, "TMPDIR="+tmp)
	for _, dir := range []string{home, tmp} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err == nil && path != dir {
				t.Errorf("%s was written", path)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	after, _ := os.Stat(fixed)
	if (before == nil) != (after == nil) || before != nil && (before.Size() != after.Size() || !before.ModTime().Equal(after.ModTime())) {
		t.Errorf("%s was written", fixed)
	}
	if strings.Contains(out, secretBody) {
		t.Errorf("the body was printed:\n%s", out)
	}
}

// childFiles sends, is refused, loses its server, and logs all of it at debug level.
func childFiles() error {
	b, err := lapsetest.New()
	if err != nil {
		return err
	}
	defer b.Close()
	b.CreateTopic("t", lapsetest.Delay, 1)
	b.CreateGroup("g", 16)
	var log bytes.Buffer
	cfg := Config{Endpoints: b.Endpoint(), TLS: TLS{Disabled: true}, Logger: childLog(&log)}
	p, c, err := openBoth(cfg, "g", "t")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	m := Message{Topic: "t", Body: []byte(secretBody), DeliverAt: time.Now()}
	if _, err := p.Send(ctx, m); err != nil {
		return err
	}
	if _, err := c.Receive(ctx, 1, 10*time.Second); err != nil {
		return err
	}
	m.DeliverAt = time.Now().Add(48 * time.Hour)
	if _, err := p.Send(ctx, m); !IsRefusedMessage(err) {
		return fmt.Errorf("send beyond the limit: %w", err)
	}
	b.Stop()
	m.DeliverAt = time.Now()
	if _, err := p.Send(ctx, m); !IsUnavailable(err) {
		return fmt.Errorf("send without a server: %w", err)
	}
	if err := closeBoth(ctx, p, c); err != nil {
		return err
	}
	if bytes.Contains(log.Bytes(), []byte(secretBody)) {
		return fmt.Errorf("the body was logged:\n%s", log.String())
	}
	return nil
}

// case MQ-19
func TestFiftyCyclesLeaveOnlyTheClientsTickers(t *testing.T) {
	t.Parallel()
	runChild(t, "leaks")
}

func childLeaks() error {
	b, err := lapsetest.New()
	if err != nil {
		return err
	}
	defer b.Close()
	b.CreateTopic("t", lapsetest.Delay, 1)
	b.CreateGroup("g", 16)
	cfg := Config{Endpoints: b.Endpoint(), TLS: TLS{Disabled: true}}
	const cycles, perClient = 50, 4 // doc.go
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	goroutines, files := runtime.NumGoroutine(), countFiles()
	// Ten at a time: each Start takes the client a second.
	for range cycles / 10 {
		type pair struct {
			p *Producer
			c *Consumer
		}
		var open []pair
		for range 10 {
			p, err := NewProducer(cfg, "t")
			if err != nil {
				return err
			}
			c, err := NewConsumer(cfg, "g", "t")
			if err != nil {
				return err
			}
			open = append(open, pair{p, c})
		}
		for _, o := range open {
			if err := awaitBoth(ctx, o.p, o.c); err != nil {
				return err
			}
			if _, err := o.p.Send(ctx, Message{Topic: "t", Body: []byte("x"), DeliverAt: time.Now()}); err != nil {
				return err
			}
			if _, err := o.c.Receive(ctx, 1, 10*time.Second); err != nil {
				return err
			}
		}
		for _, o := range open {
			if err := closeBoth(ctx, o.p, o.c); err != nil {
				return err
			}
		}
	}
	limit := goroutines + 2*cycles*perClient
	if !poll100(ctx, func() bool {
		return runtime.NumGoroutine() <= limit && b.Conns() == 0 && b.Streams() == 0 && slices.Equal(countFiles(), files)
	}) {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		return fmt.Errorf("after %d cycles: %d goroutines (limit %d), %d connections, %d streams, files %v (before: %v)\n%s",
			cycles, runtime.NumGoroutine(), limit, b.Conns(), b.Streams(), countFiles(), files, stacks)
	}
	fmt.Printf("%d cycles of a producer and a consumer: goroutines %d before, %d after (%d are the client's tickers), connections 0, files %v\n",
		cycles, goroutines, runtime.NumGoroutine(), 2*cycles*perClient, countFiles())
	return nil
}

// childWaiting lets producers and consumers wait for a server that is not there,
// then for a topic, then for a group, and counts goroutines and files meanwhile.
func childWaiting() error {
	b, err := lapsetest.New()
	if err != nil {
		return err
	}
	defer b.Close()
	b.Stop()
	reg := prometheus.NewRegistry()
	cfg := Config{Endpoints: b.Endpoint(), TLS: TLS{Disabled: true}, RequestTimeout: time.Second, Registerer: reg}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	type pair struct {
		p *Producer
		c *Consumer
	}
	var open []pair
	for range 5 {
		p, err := NewProducer(cfg, "t")
		if err != nil {
			return err
		}
		c, err := NewConsumer(cfg, "g", "t")
		if err != nil {
			return err
		}
		open = append(open, pair{p, c})
	}
	attempts := func(code string) float64 {
		n, err := count(reg, "lapse_rocketmq_requests_total", "method", "QueryRoute", "code", code)
		if err != nil {
			return 0
		}
		return n
	}
	// Five looks each, after the first pause, while the same is missing.
	steady := func(what string, more func() bool) error {
		before := runtime.NumGoroutine()
		most := before
		if !poll100(ctx, func() bool { most = max(most, runtime.NumGoroutine()); return more() }) {
			return fmt.Errorf("%s: no attempts", what)
		}
		fmt.Printf("%s: %d goroutines at first, %d at most\n", what, before, most)
		// A dial that happens to be under way has up to four goroutines of its own.
		if most > before+4*2*len(open) || runtime.NumGoroutine() > before+4*2*len(open) {
			return fmt.Errorf("%s: %d goroutines at first, %d at most", what, before, most)
		}
		return nil
	}
	if !poll100(ctx, func() bool { return attempts("grpc_Unavailable") >= 10 }) {
		return errors.New("no attempts")
	}
	if err := steady("no server", func() bool { return attempts("grpc_Unavailable") >= 40 }); err != nil {
		return err
	}
	if err := b.Resume(); err != nil {
		return err
	}
	if !poll100(ctx, func() bool { return attempts("TOPIC_NOT_FOUND") >= 10 }) {
		return errors.New("no attempts")
	}
	if err := steady("no topic", func() bool { return attempts("TOPIC_NOT_FOUND") >= 20 }); err != nil {
		return err
	}
	b.CreateTopic("t", lapsetest.Delay, 1)
	if !poll100(ctx, func() bool { return open[0].p.Ready() == nil && attempts("OK") >= 10 }) {
		return errors.Join(errors.New("the producers are not ready"), open[0].p.Ready())
	}
	settings := b.Calls(lapsetest.Telemetry)
	if err := steady("no group", func() bool { return b.Calls(lapsetest.Telemetry) >= settings+30 }); err != nil {
		return err
	}
	b.CreateGroup("g", 16)
	for _, o := range open {
		if err := awaitBoth(ctx, o.p, o.c); err != nil {
			return err
		}
	}
	for _, o := range open {
		if err := closeBoth(ctx, o.p, o.c); err != nil {
			return err
		}
	}
	return nil
}

func TestClientsThatAreNotOursGetTheOfficialConnection(t *testing.T) {
	t.Parallel()
	runChild(t, "foreign")
}

// childForeign calls as the official client does, with an id that is nobody's here.
func childForeign() error {
	b, err := lapsetest.New()
	if err != nil {
		return err
	}
	defer b.Close()
	b.CreateTopic("t", lapsetest.Delay, 1)
	golang.EnableSsl = false // what such a program would do
	rpc, err := golang.NewRpcClient("ip:///"+b.Endpoint(), golang.WithRpcClientConnOption(golang.WithZapLogger(zap.NewNop())))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, innermd.ClintID, "somebody")
	for range 2 { // the second over the same connection, and after Close over a new one
		r, err := rpc.QueryRoute(ctx, &v2.QueryRouteRequest{Topic: &v2.Resource{Name: "t"}})
		if err != nil || len(r.GetMessageQueues()) != 1 {
			return fmt.Errorf("route %v: %w", r, err)
		}
		stream, err := rpc.Telemetry(ctx)
		if err != nil {
			return err
		}
		if err := stream.CloseSend(); err != nil {
			return err
		}
		if b.Conns() != 1 {
			return fmt.Errorf("%d connections, want 1", b.Conns())
		}
		if err := rpc.GracefulStop(); err != nil {
			return err
		}
		if !poll100(ctx, func() bool { return b.Conns() == 0 }) {
			return errors.New("the connection was not closed")
		}
	}
	return nil
}
