package orders_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bundle is what the tests of a store work with.
type bundle struct {
	t     *testing.T
	ctx   context.Context
	db    *mysqltest.DB
	store *orders.Store
}

func setup(t *testing.T) *bundle { return setupWith(t, orders.Config{}) }

func setupWith(t *testing.T, cfg orders.Config) *bundle {
	t.Helper()
	db := mysqltest.New(t)
	store, err := orders.Open(db.DSN, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return &bundle{t: t, ctx: ctx, db: db, store: store}
}

// stock makes a SKU with n pieces.
func (b *bundle) stock(sku string, n int64) {
	b.t.Helper()
	if err := b.store.AdjustStock(b.ctx, orders.NewID(), sku, n); err != nil {
		b.t.Fatal(err)
	}
}

// place places an order of 1000 cents; change may alter it first.
func (b *bundle) place(change ...func(*orders.NewOrder)) orders.Order {
	b.t.Helper()
	n := orders.NewOrder{Channel: "web", UserID: "u1", Currency: "EUR", Amount: 1000}
	for _, c := range change {
		c(&n)
	}
	o, err := b.store.Place(b.ctx, n)
	if err != nil {
		b.t.Fatalf("place: %v", err)
	}
	return o
}

func items(list ...orders.Item) func(*orders.NewOrder) {
	return func(n *orders.NewOrder) { n.Items = list }
}

func overdue(n *orders.NewOrder) { n.DeadlineAt = time.Now().Add(-time.Hour) }

func noDeadline(n *orders.NewOrder) { n.NoDeadline = true }

func text(ids ...int64) []string {
	list := make([]string, len(ids))
	for i, id := range ids {
		list[i] = orders.FormatID(id)
	}
	return list
}

func (b *bundle) cancelDue(ids ...int64) []orders.Outcome {
	b.t.Helper()
	outcomes, err := b.store.CancelDue(b.ctx, text(ids...))
	if err != nil {
		b.t.Fatalf("cancel: %v", err)
	}
	return outcomes
}

// pay pays an order whole, with a transaction id that is the order's own.
func (b *bundle) pay(id int64) orders.PaymentResult {
	b.t.Helper()
	result, err := b.store.RecordPayment(b.ctx, payment(id))
	if err != nil {
		b.t.Fatal(err)
	}
	return result
}

func payment(id int64) orders.Payment {
	return orders.Payment{Gateway: "test", TransactionID: fmt.Sprintf("t-%d", id), OrderID: id, Currency: "EUR", Amount: 1000}
}

func (b *bundle) get(id int64) orders.Order {
	b.t.Helper()
	o, err := b.store.Get(b.ctx, id)
	if err != nil {
		b.t.Fatal(err)
	}
	return o
}

// wantStock fails unless the SKU has just these sums.
func (b *bundle) wantStock(sku string, available, reserved, sold int64) {
	b.t.Helper()
	st, err := b.store.GetStock(b.ctx, sku)
	if err != nil {
		b.t.Fatal(err)
	}
	if st.Available == nil || *st.Available != available || st.Reserved != reserved || st.Sold != sold {
		b.t.Errorf("stock of %s is %s, want available %d reserved %d sold %d", sku, describe(st), available, reserved, sold)
	}
}

func describe(st orders.Stock) string {
	available := "unlimited"
	if st.Available != nil {
		available = fmt.Sprint(*st.Available)
	}
	return fmt.Sprintf("available %s reserved %d sold %d", available, st.Reserved, st.Sold)
}

// wantClean fails for every violation that the audit finds.
func (b *bundle) wantClean() {
	b.t.Helper()
	checks, err := orders.Audit(b.ctx, b.db.SQL, orders.AuditOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, c := range checks {
		if c.Violations != 0 {
			b.t.Errorf("%s %s: %d violations, the first: %+v", c.Invariant, c.Name, c.Violations, c.Examples[0])
		}
	}
}
