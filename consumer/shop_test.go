package consumer

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
)

// shop is a database with orders in it.
type shop struct {
	db    *mysqltest.DB
	store *orders.Store
}

const sku = "cup"

func newShop(t testing.TB) *shop {
	t.Helper()
	return shopOn(t, mysqltest.New(t))
}

func shopOn(t testing.TB, db *mysqltest.DB) *shop {
	t.Helper()
	s := &shop{db: db, store: openStore(t, db.DSN)}
	if err := s.store.AdjustStock(t.Context(), orders.NewID(), sku, 1_000_000); err != nil {
		t.Fatal(err)
	}
	return s
}

func openStore(t testing.TB, dsn string) *orders.Store {
	t.Helper()
	store, err := orders.Open(dsn, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Errorf("close store: %v", err)
		}
	})
	return store
}

// overdue is a deadline that has passed by every clock.
func overdue() time.Time { return time.Now().Add(-time.Minute).Truncate(time.Millisecond) }

// place places n orders of two pieces each.
func (s *shop) place(t testing.TB, n int, deadline time.Time) []string {
	t.Helper()
	ids := make([]string, n)
	g, ctx := errgroup.WithContext(t.Context())
	g.SetLimit(8)
	for i := range ids {
		g.Go(func() error {
			o, err := s.store.Place(ctx, orders.NewOrder{Channel: "web", Currency: "EUR", Amount: 1000, DeadlineAt: deadline,
				Items: []orders.Item{{SKU: sku, Quantity: 2, Price: 500}}})
			ids[i] = orders.FormatID(o.ID)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatalf("place %d orders: %v", n, err)
	}
	return ids
}

// in gives the ids as the inside of an IN list.
func in(ids []string) string { return "(" + strings.Join(ids, ",") + ")" }

func (s *shop) cancelled(t testing.TB, ids []string) int {
	t.Helper()
	return int(s.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'cancelled' AND id IN "+in(ids)))
}

// wantCancelledOnce waits until the orders are cancelled, and checks that each was so once, with one release of its stock, and that the
// invariants hold for everything in the database.
func (s *shop) wantCancelledOnce(t testing.TB, ids []string) {
	t.Helper()
	until(t, fmt.Sprintf("%d orders are cancelled", len(ids)), func() bool { return s.cancelled(t, ids) == len(ids) })
	if n := s.db.Int(t, "SELECT COUNT(*) FROM stock_ledger WHERE kind = 'release' AND order_id IN "+in(ids)); int(n) != len(ids) {
		t.Errorf("%d releases of %d orders", n, len(ids))
	}
	if n := s.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE kind = 'cancelled' AND order_id IN "+in(ids)); int(n) != len(ids) {
		t.Errorf("%d events of a cancel of %d orders", n, len(ids))
	}
	s.wantSound(t)
}

func (s *shop) wantSound(t testing.TB) {
	t.Helper()
	// A day: orders that a test leaves unpaid on purpose are not its subject.
	checks, err := orders.Audit(t.Context(), s.db.SQL, orders.AuditOptions{Grace: 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range checks {
		if c.Violations > 0 {
			t.Errorf("%s %s: %d violations: %+v", c.Invariant, c.Name, c.Violations, c.Examples)
		}
	}
}

func (s *shop) parked(t testing.TB, what, ref string) int {
	t.Helper()
	return int(s.db.Int(t, "SELECT COUNT(*) FROM parked WHERE what = ? AND ref = ?", what, ref))
}

// poison makes every update of one order fail with an error that is the order's own. MySQL and MariaDB know no other way to make one row
// misbehave that a statement cannot tell beforehand.
func (s *shop) poison(t testing.TB, id string) {
	t.Helper()
	s.db.Exec(t, "CREATE TRIGGER poison BEFORE UPDATE ON orders FOR EACH ROW BEGIN IF NEW.id = "+id+
		" THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'poisonous'; END IF; END")
}

func (s *shop) cure(t testing.TB) {
	t.Helper()
	s.db.Exec(t, "DROP TRIGGER poison")
}

// recorder is a source that writes down how often messages were delivered.
type recorder struct {
	Source
	maxAttempt atomic.Int64
	receives   atomic.Int64
}

func (r *recorder) Receive(ctx context.Context, limit int, invisible time.Duration) ([]*Delivery, error) {
	r.receives.Add(1)
	ds, err := r.Source.Receive(ctx, limit, invisible)
	for _, d := range ds {
		for {
			seen := r.maxAttempt.Load()
			if int64(d.Attempt) <= seen || r.maxAttempt.CompareAndSwap(seen, int64(d.Attempt)) {
				break
			}
		}
	}
	return ds, err
}

// replica is one consumer with a connection of its own, as one process has it.
type replica struct {
	*Consumer
	source *recorder
	reg    *prometheus.Registry
	stop   func()
}

type replicaOptions struct {
	endpoint, group, topic string
	canceller              Canceller // nil: the store
	cfg                    Config
	prepare                func(*Consumer)
}

func startReplica(t testing.TB, store *orders.Store, o replicaOptions) *replica {
	t.Helper()
	conn, err := Connect(RocketMQ{Endpoints: o.endpoint, TLS: TLS{Disabled: true}, Logger: testLog(t)}, o.group, o.topic)
	if err != nil {
		t.Fatal(err)
	}
	var canceller Canceller = store
	if o.canceller != nil {
		canceller = o.canceller
	}
	r := &replica{source: &recorder{Source: conn}, reg: prometheus.NewPedanticRegistry()}
	o.cfg.Registerer, o.cfg.Logger = r.reg, testLog(t)
	if r.Consumer, err = New(canceller, store, r.source, o.cfg); err != nil {
		t.Fatal(err)
	}
	if o.prepare != nil {
		o.prepare(r.Consumer)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run consumer: %v", err)
		}
		within, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := conn.Close(within); err != nil {
			t.Errorf("close connection: %v", err)
		}
	})
	t.Cleanup(r.stop)
	return r
}

// ready waits until the replica is at work.
func (r *replica) ready(t testing.TB) *replica {
	t.Helper()
	until(t, "the consumer is ready", func() bool { return r.Ready() == nil })
	return r
}

// testLog writes warnings and errors to the test's log.
func testLog(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
}

const (
	wireTopic = "order-timeout"
	wireGroup = "order-timeout-cg"
)

// wire is a shop and the embedded broker.
type wire struct {
	*shop
	broker *lapsetest.Broker
}

func newWire(t testing.TB) *wire {
	t.Helper()
	w := &wire{shop: newShop(t), broker: lapsetest.Start(t, lapsetest.WithPollLimit(200*time.Millisecond))} // a Close waits for the poll under way
	w.broker.CreateTopic(wireTopic, lapsetest.Delay, 8)
	w.broker.CreateGroup(wireGroup, 16)
	return w
}

// options are those of a replica on the embedded broker. BackoffMin is short, since nothing here needs time to recover.
func (w *wire) options(cfg Config) replicaOptions {
	if cfg.BackoffMin == 0 {
		cfg.BackoffMin = 5 * time.Millisecond
	}
	return replicaOptions{endpoint: w.broker.Endpoint(), group: wireGroup, topic: wireTopic, cfg: cfg}
}

func (w *wire) send(t testing.TB, body []byte) string {
	t.Helper()
	id, err := w.broker.Inject(wireTopic, body, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func (w *wire) expire(t testing.TB, ids ...string) string {
	t.Helper()
	return w.send(t, expiry(t, ids...))
}

// acked counts how often a message was acknowledged.
func (w *wire) acked(id string) int {
	n := 0
	for _, m := range w.broker.Acked(wireGroup) {
		if m.ID == id {
			n++
		}
	}
	return n
}

// drained says that the group has everything behind it.
func (w *wire) drained() bool {
	return w.broker.Ready(wireTopic, wireGroup) == 0 && len(w.broker.InFlight(wireGroup)) == 0
}
