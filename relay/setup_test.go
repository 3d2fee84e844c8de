package relay_test

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/relay"
)

func TestMain(m *testing.M) {
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

const (
	topic = "order-timeout"
	group = "order-timeout-cg"
	// limit is how long a test waits for what has to happen; only a failing test takes so long.
	limit = 40 * time.Second
)

// bundle is one test's own database and embedded broker.
type bundle struct {
	db     *mysqltest.DB
	store  *orders.Store
	broker *lapsetest.Broker
}

func setup(t *testing.T, opts ...lapsetest.Option) *bundle {
	t.Helper()
	b := &bundle{db: mysqltest.New(t)}
	b.store = openStore(t, b.db.DSN, orders.Config{})
	b.broker = lapsetest.Start(t, opts...)
	b.broker.CreateTopic(topic, lapsetest.Delay, 8)
	b.broker.CreateGroup(group, 16)
	return b
}

func openStore(t *testing.T, dsn string, cfg orders.Config) *orders.Store {
	t.Helper()
	s, err := orders.Open(dsn, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close the store: %v", err)
		}
	})
	return s
}

// sender connects to the embedded broker; it need not be up.
func (b *bundle) sender(t *testing.T) relay.Sender {
	t.Helper()
	return openSender(t, relay.RocketMQ{Endpoints: b.broker.Endpoint(), TLS: rmq.TLS{Disabled: true}}, topic)
}

func openSender(t *testing.T, cfg relay.RocketMQ, topic string) relay.Sender {
	t.Helper()
	p, err := relay.OpenSender(cfg, topic)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), limit)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Errorf("close the sender: %v", err)
		}
	})
	return p
}

// running is a relay that runs until stop, or until the test ends.
type running struct {
	*relay.Relay
	stop func()
	reg  *prometheus.Registry
}

func start(t *testing.T, store relay.Outbox, sender relay.Sender, cfg relay.Config) *running {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	cfg.Registerer = reg
	cfg.Logger = testLog(t)
	r, err := relay.New(store, sender, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() { // ended by stop
		defer close(ended)
		if err := r.Run(ctx); err != nil {
			t.Errorf("run the relay: %v", err)
		}
	}()
	stop := sync.OnceFunc(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(limit):
			t.Errorf("the relay did not stop within %s", limit)
		}
	})
	t.Cleanup(stop)
	return &running{Relay: r, stop: stop, reg: reg}
}

// metric reads one counter, gauge, or the number of observations of a histogram.
func (r *running) metric(t *testing.T, name string) float64 {
	t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "lapse_relay_"+name {
			continue
		}
		m := f.GetMetric()[0]
		switch {
		case m.GetCounter() != nil:
			return m.GetCounter().GetValue()
		case m.GetGauge() != nil:
			return m.GetGauge().GetValue()
		default:
			return float64(m.GetHistogram().GetSampleCount())
		}
	}
	t.Fatalf("no metric lapse_relay_%s", name)
	return 0
}

func testLog(t *testing.T) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func (b *bundle) place(t *testing.T, n orders.NewOrder) orders.Order {
	t.Helper()
	if n.Currency == "" {
		n.Currency, n.Amount = "EUR", 100
	}
	o, err := b.store.Place(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func (b *bundle) row(t *testing.T, id int64) orders.OutboxRow {
	t.Helper()
	row, there, err := b.store.Outbox(t.Context(), id)
	if err != nil || !there {
		t.Fatalf("outbox row of order %d: there=%t, err=%v", id, there, err)
	}
	return row
}

// awaitState waits until so many outbox rows are in a state.
func (b *bundle) awaitState(t *testing.T, state string, n int64) {
	t.Helper()
	var got int64
	eventually(t, "outbox rows "+state, func() bool {
		got = b.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE state = ?", state)
		return got == n
	}, func() any { return got })
}

// eventually fails the test when cond does not become true; seen is what it says then.
func eventually(t *testing.T, what string, cond func() bool, seen ...func() any) {
	t.Helper()
	end := time.NewTimer(limit)
	defer end.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-end.C:
			for _, s := range seen {
				t.Logf("last seen: %v", s())
			}
			t.Fatalf("not within %s: %s", limit, what)
		}
	}
}

// sentIDs are the orders of all messages that the broker has accepted, in that order, repeated ones included.
func (b *bundle) sentIDs(t *testing.T) []string {
	t.Helper()
	var ids []string
	for _, m := range b.broker.Sent(topic) {
		e := expiryOf(t, m)
		ids = append(ids, e.Orders...)
	}
	return ids
}

// expiryOf decodes a message and holds it against what every message must be.
func expiryOf(t *testing.T, m lapsetest.Message) orders.Expiry {
	t.Helper()
	e, err := orders.DecodeExpiry(m.Body)
	if err != nil {
		t.Fatalf("message %s: %v", m.ID, err)
	}
	if !e.Due.Equal(m.DeliverAt) {
		t.Errorf("message %s: the body says due %s, the broker was asked for %s", m.ID, e.Due, m.DeliverAt)
	}
	if !slices.Equal(e.Orders, m.Keys) {
		t.Errorf("message %s: keys %v differ from orders %v", m.ID, m.Keys, e.Orders)
	}
	return e
}

// outbox is a store of which a test replaces single verbs.
type outbox struct {
	relay.Outbox
	claim    func(ctx context.Context, limit int, lease time.Duration) (orders.Claim, error)
	markSent func(ctx context.Context, token string, messages []orders.Sent) (int, error)
}

func (o *outbox) ClaimOutbox(ctx context.Context, limit int, lease time.Duration) (orders.Claim, error) {
	if o.claim != nil {
		return o.claim(ctx, limit, lease)
	}
	return o.Outbox.ClaimOutbox(ctx, limit, lease)
}

func (o *outbox) MarkSent(ctx context.Context, token string, messages []orders.Sent) (int, error) {
	if o.markSent != nil {
		return o.markSent(ctx, token, messages)
	}
	return o.Outbox.MarkSent(ctx, token, messages)
}

// senderFunc is a broker that a test plays itself.
type senderFunc func(ctx context.Context, m relay.Message) (string, error)

func (f senderFunc) Send(ctx context.Context, m relay.Message) (string, error) { return f(ctx, m) }
func (f senderFunc) Ready() error                                              { return nil }

// ceil is the tick at which the broker fires for a deadline.
func ceil(t time.Time) time.Time {
	const tick = 100
	return time.UnixMilli((t.UnixMilli() + tick - 1) / tick * tick).UTC()
}

// cancelDue is what a consumer does with a message.
func (b *bundle) cancelDue(t *testing.T, ids ...string) []orders.Result {
	t.Helper()
	outcomes, err := b.store.CancelDue(t.Context(), ids)
	if err != nil {
		t.Fatal(err)
	}
	var results []orders.Result
	for _, o := range outcomes {
		results = append(results, o.Result)
	}
	return results
}
