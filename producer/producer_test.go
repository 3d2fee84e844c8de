package producer_test

import (
	"context"
	"errors"
	"maps"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"gorm.io/driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/producer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func setup(t *testing.T, cfg producer.Config) (context.Context, *mysqltest.DB, *producer.Client) {
	t.Helper()
	db := mysqltest.New(t)
	client, err := producer.Open(db.DSN, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx, db, client
}

// shop opens the handle that a shop's own code has.
func shop(t *testing.T, dsn string) *gorm.DB {
	t.Helper()
	db, err := gorm.Open(mysql.Open(dsn), &gorm.Config{Logger: logger.Discard})
	if err != nil {
		t.Fatal(err)
	}
	pool, err := db.DB()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pool.Close() })
	return db
}

// TestCheckoutLinksADatabaseClientAndNothingElse: invariant I6 begins with what a checkout imports.
//
// case PRD-7
func TestCheckoutLinksADatabaseClientAndNothingElse(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	deps := strings.Fields(string(out))
	if len(deps) < 50 {
		t.Fatalf("only %d packages: %v", len(deps), deps)
	}
	for _, dep := range deps {
		for _, banned := range []string{"rocketmq", "google.golang.org/grpc", "opencensus", "go.uber.org/zap", "spf13", "lapse/relay", "lapse/consumer", "lapse/internal", "lapse/lapsetest", "testing"} {
			if strings.Contains(dep, banned) && dep != "testing/fstest" {
				t.Errorf("a checkout would link %s", dep)
			}
		}
	}
}

// TestOpenDialsNothing: a checkout starts whatever is down.
func TestOpenDialsNothing(t *testing.T) {
	t.Parallel()
	lis, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lis.Close() }()
	client, err := producer.Open("root:x@tcp("+lis.Addr().String()+")/x", producer.Config{Registerer: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Close(); err != nil {
		t.Error(err)
	}
	if err := lis.(*net.TCPListener).SetDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if conn, err := lis.Accept(); err == nil {
		_ = conn.Close()
		t.Error("opening the client dialled the database")
	}
}

func TestOpenRefusesBadArguments(t *testing.T) {
	t.Parallel()
	const good = "root:x@tcp(127.0.0.1:1)/x"
	for name, cfg := range map[string]producer.Config{"Timeout": {Timeout: -1}, "MaxLifetime": {MaxLifetime: -1}, "MaxOpenConns": {MaxOpenConns: -1}} {
		if _, err := producer.Open(good, cfg); !errors.Is(err, orders.ErrInvalid) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := producer.Open("nonsense", producer.Config{}); !errors.Is(err, orders.ErrInvalid) {
		t.Errorf("%v", err)
	}
	registry := prometheus.NewRegistry()
	first, err := producer.Open(good, producer.Config{Registerer: registry})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = first.Close() }()
	if _, err := producer.Open(good, producer.Config{Registerer: registry}); err == nil || !strings.Contains(err.Error(), "metrics") {
		t.Errorf("a second client on one registry: %v", err)
	}
}

func TestEveryVerbIsCountedByWhatBecameOfIt(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	ctx, db, client := setup(t, producer.Config{Registerer: registry})
	if err := client.Ready(ctx); err != nil {
		t.Error(err)
	}
	db.Exec(t, "INSERT INTO stock VALUES ('tea', 5, 0, 0)")
	tea := []producer.Item{{SKU: "tea", Quantity: 1, Price: 1000}}
	o, err := client.PlaceOrder(ctx, producer.NewOrder{Currency: "EUR", Amount: 1000, Items: tea})
	if err != nil {
		t.Fatal(err)
	}
	for reason, n := range map[string]producer.NewOrder{
		"out_of_stock": {Currency: "EUR", Items: []producer.Item{{SKU: "tea", Quantity: 9, Price: 1}}},
		"unknown_sku":  {Currency: "EUR", Items: []producer.Item{{SKU: "oil", Quantity: 9, Price: 1}}},
		"invalid":      {},
		"exists":       {ID: o.ID, Currency: "EUR"},
	} {
		if _, err := client.PlaceOrder(ctx, n); err == nil {
			t.Errorf("%s was placed", reason)
		}
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := client.PlaceOrder(over, producer.NewOrder{Currency: "EUR"}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	pay := func(transaction string) {
		t.Helper()
		if _, err := client.RecordPayment(ctx, producer.Payment{Gateway: "g", TransactionID: transaction, OrderID: o.ID, Currency: "EUR", Amount: 1000}); err != nil {
			t.Error(err)
		}
	}
	pay("one")
	pay("one")
	pay("two")
	want := map[string]float64{
		"lapse_orders_placed_total":                             1,
		"lapse_orders_refused_total{reason=error}":              1,
		"lapse_orders_refused_total{reason=exists}":             1,
		"lapse_orders_refused_total{reason=invalid}":            1,
		"lapse_orders_refused_total{reason=out_of_stock}":       1,
		"lapse_orders_refused_total{reason=unknown_sku}":        1,
		"lapse_payments_total{outcome=accepted}":                1,
		"lapse_payments_total{outcome=duplicate}":               1,
		"lapse_payments_total{outcome=late}":                    0, // there from the start, so that a rate over it is not empty
		"lapse_payments_total{outcome=mismatch}":                0,
		"lapse_payments_total{outcome=repeated}":                1,
		"lapse_place_duration_seconds (number of observations)": 6,
	}
	if got := values(t, registry); !maps.Equal(got, want) {
		t.Errorf("metrics are\n%v\nwant\n%v", got, want)
	}
}

// values reads a registry: counters by name and label, of histograms the number of observations.
func values(t *testing.T, registry *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	list := map[string]float64{}
	for _, f := range families {
		if f.GetHelp() == "" {
			t.Errorf("%s says nothing", f.GetName())
		}
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += "{" + l.GetName() + "=" + l.GetValue() + "}"
			}
			if h := m.GetHistogram(); h != nil {
				list[name+" (number of observations)"] = float64(h.GetSampleCount())
				continue
			}
			list[name] = m.GetCounter().GetValue()
		}
	}
	return list
}

// TestVerbsOfTheClientInATransactionOfTheShop also runs each verb once outside of it.
func TestVerbsOfTheClientInATransactionOfTheShop(t *testing.T) {
	t.Parallel()
	ctx, db, _ := setup(t, producer.Config{})
	handle := shop(t, db.DSN)
	client, err := producer.New(handle, producer.Config{Timeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	var paid, cancelled, extended producer.Order
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(handle.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		for _, o := range []*producer.Order{&paid, &cancelled, &extended} {
			var err error
			if *o, err = client.PlaceOrderTx(ctx, tx, producer.NewOrder{Currency: "EUR", Amount: 1000}); err != nil {
				return err
			}
		}
		if r, err := client.RecordPaymentTx(ctx, tx, producer.Payment{Gateway: "g", TransactionID: "t", OrderID: paid.ID, Currency: "EUR", Amount: 1000}); err != nil || r.Outcome != orders.PaymentAccepted {
			t.Errorf("%+v, %v", r, err)
		}
		if out, err := client.CancelTx(ctx, tx, cancelled.ID, "u1", "changed my mind"); err != nil || out.Result != orders.ResultCancelled {
			t.Errorf("%+v, %v", out, err)
		}
		if x, err := client.ExtendDeadlineTx(ctx, tx, extended.ID, extended.DeadlineAt.Add(time.Hour), "support"); err != nil || !x.Extended {
			t.Errorf("%+v, %v", x, err)
		}
		return nil
	}))
	if d := paid.DeadlineAt.Sub(paid.CreatedAt); d != time.Hour {
		t.Errorf("the deadline is %s after placing", d)
	}
	x, err := client.ExtendDeadline(ctx, extended.ID, extended.DeadlineAt.Add(2*time.Hour), "support")
	if err != nil || !x.DeadlineAt.Equal(extended.DeadlineAt.Add(2*time.Hour)) {
		t.Errorf("%+v, %v", x, err)
	}
	if out, err := client.Cancel(ctx, paid.ID, "u1", "too late"); err != nil || out.Result != orders.ResultAlreadyPaid {
		t.Errorf("%+v, %v", out, err)
	}
	for id, want := range map[int64]orders.Status{paid.ID: orders.Paid, cancelled.ID: orders.Cancelled, extended.ID: orders.Unpaid} {
		if o, err := client.Get(ctx, id); err != nil || o.Status != want {
			t.Errorf("%d: %+v, %v; want %s", id, o, err, want)
		}
	}
	if _, err := client.Get(ctx, 1); !errors.Is(err, orders.ErrNotFound) {
		t.Errorf("%v", err)
	}
	if _, err := client.PlaceOrderTx(ctx, handle, producer.NewOrder{Currency: "EUR"}); !errors.Is(err, orders.ErrNoTransaction) {
		t.Errorf("outside a transaction: %v", err)
	}
	must(client.Close())
	if err := handle.Exec("DO 0").Error; err != nil {
		t.Errorf("closing the client closed the shop's pool: %v", err)
	}
	if producer.IsRetryable(orders.ErrExists) || producer.IsRetryable(nil) {
		t.Error("retryable")
	}
}

// TestTheExamplesWork runs what the documentation shows, on a real database.
func TestTheExamplesWork(t *testing.T) {
	t.Parallel()
	ctx, db, _ := setup(t, producer.Config{})
	db.Exec(t, "INSERT INTO stock VALUES ('tea-500g', 3, 0, 0)")
	db.Exec(t, "CREATE TABLE carts (id BIGINT PRIMARY KEY, order_id BIGINT NOT NULL)")
	db.Exec(t, "INSERT INTO carts VALUES (7, 0), (8, 0), (9, 0)")
	handle := shop(t, db.DSN)
	client, err := producer.New(handle, producer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	id, err := checkout(ctx, handle, client, 7)
	if err != nil {
		t.Fatal(err)
	}
	if got := db.Int(t, "SELECT order_id FROM carts WHERE id = 7"); got != id {
		t.Errorf("the cart names order %d, want %d", got, id)
	}
	if answer := paymentNotice(ctx, client, producer.Payment{Gateway: "alipay", TransactionID: "2026113022001", OrderID: id, Currency: "CNY", Amount: 5600}); answer != "success" {
		t.Error(answer)
	}
	if answer := paymentNotice(ctx, client, producer.Payment{Gateway: "alipay", TransactionID: "x", OrderID: 1, Currency: "CNY", Amount: 5600}); answer != "fail" {
		t.Errorf("an order that is not there: %s", answer)
	}
	if _, err := checkout(ctx, handle, client, 8); !errors.Is(err, orders.ErrOutOfStock) {
		t.Errorf("one piece is left, two are wanted: %v", err)
	}
	if got := db.Int(t, "SELECT order_id FROM carts WHERE id = 8"); got != 0 {
		t.Error("the cart's own change outlived its order")
	}
}
