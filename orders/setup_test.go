package orders_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
)

func TestMain(m *testing.M) {
	// gorm starts a goroutine for the cache of each handle with PrepareStmt and has no way to end it (gorm internal/lru).
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("gorm.io/gorm/internal/lru.NewLRU[...].func1"))
}

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

// at opens a store on the same database in whose sessions the clock stands still at now.
func (b *bundle) at(now time.Time, cfg orders.Config) *orders.Store {
	b.t.Helper()
	return b.open(cfg, func(c *mysql.Config) { c.Params = map[string]string{"timestamp": stopped(now)} })
}

// stopped gives a value for the session variable timestamp. Half a millisecond keeps the instant clear of what a binary fraction loses.
func stopped(now time.Time) string {
	return fmt.Sprintf("%d.%03d5", now.Unix(), now.Nanosecond()/1e6)
}

// open opens another store on the same database with a changed DSN.
func (b *bundle) open(cfg orders.Config, change func(*mysql.Config)) *orders.Store {
	b.t.Helper()
	parsed, err := mysql.ParseDSN(b.db.DSN)
	if err != nil {
		b.t.Fatal(err)
	}
	change(parsed)
	store, err := orders.Open(parsed.FormatDSN(), cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = store.Close() })
	return store
}

// on gives the bundle with another store.
func (b *bundle) on(store *orders.Store) *bundle {
	other := *b
	other.store = store
	return &other
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

// isMariaDB tells which of the two servers the tests run on.
func (b *bundle) isMariaDB() bool {
	b.t.Helper()
	return strings.Contains(b.db.Text(b.t, "SELECT VERSION()"), "MariaDB")
}

// eventually waits until holds does.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	eventuallyEvery(t, 5*time.Millisecond, what, holds)
}

func eventuallyEvery(t testing.TB, pause time.Duration, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(pause)
	defer tick.Stop()
	limit := time.After(20 * time.Second)
	for !holds() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("waited 20s in vain: %s", what)
		}
	}
}

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
	checks, err := orders.Audit(b.ctx, b.store.DB(), orders.AuditOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, c := range checks {
		if c.Violations != 0 {
			b.t.Errorf("%s %s: %d violations, the first: %+v", c.Invariant, c.Name, c.Violations, c.Examples[0])
		}
	}
}
