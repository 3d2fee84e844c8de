package trial

import (
	"strings"
	"testing"

	"github.com/lapse-orders/lapse/internal/payments/paytest"
	"github.com/lapse-orders/lapse/orders"
)

// refunded gives two orders with a refund each, which were made, and one without; and what an earlier run had left.
func refunded() (rows map[int64]Row, made []paytest.Refund) {
	const late = orders.PaymentLate
	rows = map[int64]Row{
		11: {ID: 11, Payments: map[string]PaymentRow{"11-1": {Amount: 100, Outcome: late, Refund: 100, RefundState: "done"}}},
		12: {ID: 12, Payments: map[string]PaymentRow{"12-1": {Amount: 130, Refund: 30, RefundState: "done"}}},
		13: {ID: 13, Payments: map[string]PaymentRow{"13-1": {Amount: 100}}},
	}
	made = []paytest.Refund{
		{OrderID: "12", TransactionID: "12-1", Amount: 30, Calls: 2},
		{OrderID: "11", TransactionID: "11-1", Amount: 100, Calls: 1},
		{OrderID: "5", TransactionID: "5-1", Amount: 7, Calls: 1},
	}
	return rows, made
}

func TestTheRefundsAreHeldAgainstWhatThePaymentServiceGaveBack(t *testing.T) {
	t.Parallel()
	rows, made := refunded()
	c, m := compareMoneyBack(rows, 10, made)
	if c.Violations != 0 || c.Rows != 2 || c.Invariant != "I4" || *m != (MoneyBack{Refunds: 2, Amount: 130, Calls: 3}) {
		t.Errorf("%+v, %+v", c, *m)
	}
	payment := func(id int64, transaction string, change func(*PaymentRow)) func(map[int64]Row, *[]paytest.Refund) {
		return func(rows map[int64]Row, _ *[]paytest.Refund) {
			p := rows[id].Payments[transaction]
			change(&p)
			rows[id].Payments[transaction] = p
		}
	}
	for name, test := range map[string]struct {
		change func(map[int64]Row, *[]paytest.Refund)
		order  int64
		says   string
	}{
		"not made":           {func(_ map[int64]Row, m *[]paytest.Refund) { *m = (*m)[1:] }, 12, "the payment service has not made it"},
		"made and pending":   {payment(11, "11-1", func(p *PaymentRow) { p.RefundState = "pending" }), 11, "was made, and is pending"},
		"of another amount":  {payment(11, "11-1", func(p *PaymentRow) { p.Refund = 99 }), 11, "a refund of 99 for payment 11-1, and 100 went back"},
		"made twice":         {func(_ map[int64]Row, m *[]paytest.Refund) { *m = append(*m, (*m)[0]) }, 12, "went back, once more"},
		"made for no refund": {payment(11, "11-1", func(p *PaymentRow) { p.Refund = 0 }), 11, "there is no such refund"},
		"made for no payment": {func(_ map[int64]Row, m *[]paytest.Refund) {
			*m = append(*m, paytest.Refund{OrderID: "13", TransactionID: "13-2", Amount: 1})
		}, 13, "there is no such refund"},
	} {
		rows, made := refunded()
		test.change(rows, &made)
		c, _ := compareMoneyBack(rows, 10, made)
		if c.Violations != 1 || c.Examples[0].OrderID != test.order || !strings.Contains(c.Examples[0].Detail, test.says) {
			t.Errorf("%s: %+v", name, c)
		}
	}
}
