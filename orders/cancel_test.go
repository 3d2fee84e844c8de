package orders_test

import (
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
