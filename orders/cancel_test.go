package orders_test

import (
	"strings"
	"sync"
	"testing"

	"github.com/lapse-orders/lapse/orders"
)

func TestUnpaidOrderIsCancelledWhenDueAndItsStockReleased(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 10)
	o := b.place(overdue, items(orders.Item{SKU: "tea", Quantity: 3, Price: 100}))
	b.wantStock("tea", 7, 3, 0)

	out := b.cancelDue(o.ID)

	if out[0].Result != orders.ResultCancelled || out[0].Lateness <= 0 {
		t.Errorf("outcome is %+v, want cancelled, late", out[0])
	}
	b.wantStock("tea", 10, 0, 0)
	if got := b.get(o.ID); got.Status != orders.Cancelled || got.CancelReason != orders.ReasonTimeout || got.CancelledAt == nil {
		t.Errorf("order is %+v", got)
	}
	b.wantClean()
}

func TestPaidBeforeDueIsNotCancelled(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 10)
	o := b.place(overdue, items(orders.Item{SKU: "tea", Quantity: 3, Price: 100}))
	if r := b.pay(o.ID); r.Outcome != orders.PaymentAccepted {
		t.Fatalf("payment is %+v", r)
	}
	if out := b.cancelDue(o.ID); out[0].Result != orders.ResultAlreadyPaid {
		t.Errorf("outcome is %+v, want already paid", out[0])
	}
	b.wantStock("tea", 7, 0, 3)
	b.wantClean()
}

// TestConditionalUpdateIsRightByItself shows the store a row that says "unpaid, and due long ago", whatever is stored: the statement that
// cancels has to refuse by its own conditions.
func TestConditionalUpdateIsRightByItself(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := newProxy(t, b.db.DSN)
	p.rewrite = strings.NewReplacer("SELECT id, status, currency, amount, CAST(deadline_at AS CHAR), CAST(hold_until AS CHAR)",
		"SELECT id, 'unpaid', currency, amount, '2020-01-01 00:00:00.000', NULL")
	store, err := orders.Open(p.dsn, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	paid, early, exempt, held := b.place(overdue).ID, b.place().ID, b.place(noDeadline).ID, b.place(overdue).ID
	b.pay(paid)
	b.db.Exec(t, "UPDATE orders SET hold_until = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR WHERE id = ?", held)
	before := b.counts()
	var asking sync.WaitGroup
	for name, id := range map[string]int64{"paid": paid, "early": early, "exempt": exempt, "held": held} {
		asking.Go(func() {
			if out, err := store.CancelDue(b.ctx, text(id)); err == nil || !orders.IsUnavailable(err) {
				t.Errorf("%s: %+v, %v; want an error that says that nothing is known", name, out, err)
			}
		})
	}
	asking.Wait()
	if after := b.counts(); after != before {
		t.Errorf("something was written\n %s\n %s", before, after)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'cancelled'"); n != 0 {
		t.Errorf("%d orders were cancelled", n)
	}
	if store.Counters().Retries == 0 {
		t.Error("no retry is counted")
	}
}
