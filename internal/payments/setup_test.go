package payments_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/lapse-orders/lapse/internal/payments"
	"github.com/lapse-orders/lapse/internal/payments/paytest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// limit is how long a test waits for what has to happen; only a failing test takes so long.
const limit = 30 * time.Second

const gatewayName = "test"

// bundle is a test's own database, and its own payment service.
type bundle struct {
	db      *mysqltest.DB
	store   *orders.Store
	service *paytest.Service
	gateway *payments.HTTP
	reg     *prometheus.Registry
}

func setup(t *testing.T) *bundle { return setupWith(t, payments.HTTPConfig{}) }

func setupWith(t *testing.T, cfg payments.HTTPConfig) *bundle {
	t.Helper()
	b := &bundle{db: mysqltest.New(t), service: paytest.Start(t), reg: prometheus.NewRegistry()}
	var err error
	if b.store, err = orders.Open(b.db.DSN, orders.Config{CloseOnCancel: true}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.store.Close() })
	if err := b.store.AdjustStock(t.Context(), orders.NewID(), "cup", 1_000_000); err != nil {
		t.Fatal(err)
	}
	cfg.URL, cfg.Secret, cfg.Registerer = b.service.URL, paytest.Secret, b.reg
	if cfg.Timeout == 0 {
		cfg.Timeout = limit / 3 // longer than a busy machine takes
	}
	if b.gateway, err = payments.NewHTTP(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.gateway.Shut)
	return b
}

// gate makes a gate on the bundle's store, or on another one.
func (b *bundle) gate(t *testing.T, cfg payments.GateConfig, on ...payments.Store) *payments.Gate {
	t.Helper()
	var store payments.Store = b.store
	if len(on) > 0 {
		store = on[0]
	}
	if cfg.Name == "" {
		cfg.Name = gatewayName
	}
	if cfg.Registerer == nil {
		cfg.Registerer = b.reg
	}
	if cfg.DecideWithin == 0 {
		cfg.DecideWithin = limit / 3
	}
	g, err := payments.NewGate(store, b.gateway, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// work runs a worker until the test ends, and ends it when stop is called.
func (b *bundle) work(t *testing.T, cfg payments.WorkerConfig) (stop func()) {
	t.Helper()
	if cfg.Name == "" {
		cfg.Name = gatewayName
	}
	if cfg.Registerer == nil {
		cfg.Registerer = b.reg
	}
	if cfg.Poll == 0 {
		cfg.Poll = 20 * time.Millisecond
	}
	w, err := payments.NewWorker(b.store, b.gateway, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }() // ends with ctx
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("the worker ends with %v", err)
			}
		case <-time.After(limit):
			t.Error("the worker does not end")
		}
	}
	t.Cleanup(stop)
	return stop
}

// place places an order of 1000 cents with one cup, overdue by a minute.
func (b *bundle) place(t *testing.T, change ...func(*orders.NewOrder)) int64 {
	t.Helper()
	n := orders.NewOrder{Channel: "web", Currency: "EUR", Amount: 1000, DeadlineAt: time.Now().Add(-time.Minute), Items: []orders.Item{{SKU: "cup", Quantity: 1, Price: 1000}}}
	for _, c := range change {
		c(&n)
	}
	o, err := b.store.Place(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	return o.ID
}

func (b *bundle) get(t *testing.T, id int64) orders.Order {
	t.Helper()
	o, err := b.store.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// cancel cancels through a gate, and gives the results in order.
func cancel(t *testing.T, g *payments.Gate, ids ...int64) []orders.Outcome {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), limit)
	defer stop()
	texts := make([]string, len(ids))
	for i, id := range ids {
		texts[i] = orders.FormatID(id)
	}
	outcomes, err := g.CancelDue(ctx, texts)
	if err != nil {
		t.Fatal(err)
	}
	for i, o := range outcomes {
		if o.ID != texts[i] {
			t.Errorf("outcome %d is of order %s, want %s", i, o.ID, texts[i])
		}
	}
	return outcomes
}

// money is a payment of the whole order.
func money(id int64) paytest.Payment {
	return paytest.Payment{TransactionID: fmt.Sprintf("t-%d", id), Currency: "EUR", Amount: 1000, PaidAt: time.Now()}
}

// notice is what the shop records of such a payment.
func notice(id int64) orders.Payment {
	m := money(id)
	return orders.Payment{Gateway: gatewayName, TransactionID: m.TransactionID, OrderID: id, Currency: m.Currency, Amount: m.Amount, PaidAt: m.PaidAt}
}

// eventually waits until cond is true.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	end := time.After(limit)
	for !cond() {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("after %s still not: %s", limit, what)
		}
	}
}

// wantClean fails for every violation that the audit finds.
func (b *bundle) wantClean(t *testing.T) {
	t.Helper()
	checks, err := orders.Audit(t.Context(), b.store.DB(), orders.AuditOptions{Grace: 10 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range checks {
		if c.Violations != 0 {
			t.Errorf("%s %s: %d violations, the first: %+v", c.Invariant, c.Name, c.Violations, c.Examples[0])
		}
	}
}

// metric sums a metric's series.
func (b *bundle) metric(t *testing.T, name string, labels map[string]string) float64 {
	t.Helper()
	families, err := b.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	series:
		for _, m := range f.GetMetric() {
			have := map[string]string{}
			for _, l := range m.GetLabel() {
				have[l.GetName()] = l.GetValue()
			}
			for k, v := range labels {
				if have[k] != v {
					continue series
				}
			}
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return sum
}
