package orders_test

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/orders"
)

// lateness is in the story of a cancel by timeout only.
var lateness = regexp.MustCompile(`,? ?"lateness_ms": ?1000,? ?`)

// case STK-3, DB-5
func TestEveryPathToACancelGivesTheSameBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b = b.on(b.at(noon, orders.Config{}))
	paths := []struct {
		name   string
		cancel func(id int64) (orders.Outcome, error)
	}{
		{"message", func(id int64) (orders.Outcome, error) {
			out, err := b.store.CancelDue(b.ctx, text(id))
			return out[0], err
		}},
		{"scan", func(id int64) (orders.Outcome, error) { // among others, as the nightly scan asks
			out, err := b.store.CancelDue(b.ctx, text(1, 2, 3, id))
			return out[3], err
		}},
		{"by hand", func(id int64) (orders.Outcome, error) { return b.store.Cancel(b.ctx, id, "u1", "changed my mind") }},
	}
	if err := b.store.SetUnlimited(b.ctx, "mail"); err != nil {
		t.Fatal(err)
	}
	var want string
	for i, p := range paths {
		sku, id := fmt.Sprintf("tea%d", i), int64(555001+i)
		b.stock(sku, 10)
		b.hold(b.placed(orders.NewOrder{ID: id, Currency: "EUR", Amount: 1, Items: []orders.Item{{SKU: sku, Quantity: 3, Price: 1}, {SKU: "mail", Quantity: 2, Price: 1}}}, -time.Second), 0)
		out, err := p.cancel(id)
		if err != nil || out.Result != orders.ResultCancelled {
			t.Fatalf("%s: %+v, %v", p.name, out, err)
		}
		b.wantStock(sku, 10, 0, 0)
		got := lateness.ReplaceAllString(b.dump(id), "")
		got = strings.NewReplacer(sku, "<sku>", "actor=lapse", "actor=<actor>", "actor=u1", "actor=<actor>", "timeout", "<reason>", "changed my mind", "<reason>").Replace(got)
		if want == "" {
			want = got
			for _, part := range []string{"cancelled_at=2027-01-15 12:00:00.123", "kind=cancelled", "kind=release quantity=3"} {
				if !strings.Contains(got, part) {
					t.Errorf("no %q in\n%s", part, got)
				}
			}
			if strings.Contains(got, "hold_") { // case DB-2
				t.Errorf("the hold was not cleared\n%s", got)
			}
		}
		if got != want {
			t.Errorf("%s leaves\n%s\nthe message leaves\n%s", p.name, got, want)
		}
	}
	st, err := b.store.GetStock(b.ctx, "mail")
	if err != nil || st.Available != nil || st.Reserved != 0 {
		t.Errorf("%s, %v", describe(st), err)
	}
	b.wantClean()
}

// case STK-4
func TestNothingAboutItsItemsKeepsAnOrderFromBeingCancelled(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*mysql.Config){"own session": func(*mysql.Config) {}, "safe updates": param("sql_safe_updates", "1")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			nothingKeepsAnOrder(t, b.on(b.open(orders.Config{}, change)))
		})
	}
}

func nothingKeepsAnOrder(t *testing.T, b *bundle) {
	t.Helper()
	for _, sku := range []string{"tea", "oil", "gone", "again"} {
		b.stock(sku, 10)
	}
	line := func(skus ...string) func(*orders.NewOrder) {
		var list []orders.Item
		for _, sku := range skus {
			list = append(list, orders.Item{SKU: sku, Quantity: 3, Price: 1})
		}
		return items(list...)
	}
	plain, bare := b.place(overdue, line("tea")).ID, b.place(overdue).ID
	partly, wholly := b.place(overdue, line("tea", "gone", "oil")).ID, b.place(overdue, line("gone")).ID
	anew := b.place(overdue, line("again", "tea")).ID
	sold := b.place(line("gone", "again")).ID
	b.db.Exec(t, "DELETE FROM stock WHERE sku IN ('gone', 'again')")
	// Deleted and made anew: it holds nothing of what was reserved before.
	b.db.Exec(t, "DELETE FROM stock_ledger WHERE sku = 'again' AND kind = 'adjust'")
	b.stock("again", 5)

	for _, o := range b.cancelDue(plain, bare, partly, wholly, anew) {
		if o.Result != orders.ResultCancelled {
			t.Errorf("%+v", o)
		}
	}
	b.pay(sold)
	b.wantStock("tea", 10, 0, 0)
	b.wantStock("oil", 10, 0, 0)
	b.wantStock("again", 5, 0, 0)
	if n := b.store.Counters().StockMissing; n != 4 { // two SKUs in the cancel, two in the payment
		t.Errorf("%d missing stock rows are counted, want 4", n)
	}
	got := b.db.Text(t, "SELECT GROUP_CONCAT(CONCAT(order_id, ' ', CAST(detail AS CHAR)) ORDER BY id SEPARATOR '\n') FROM order_events WHERE kind = 'stock_missing'")
	if lines := strings.Split(got, "\n"); len(lines) != 5 {
		t.Errorf("%d events tell of it, want 5:\n%s", len(lines), got)
	}
	for _, id := range []int64{partly, wholly, anew, sold} {
		if !strings.Contains(got, fmt.Sprint(id)) {
			t.Errorf("no event of order %d in\n%s", id, got)
		}
	}
	if strings.Contains(got, fmt.Sprint(plain)) {
		t.Errorf("an order whose stock is there is told of:\n%s", got)
	}
	// The sums of the SKU that was made anew follow the rows that are there; nothing else is off.
	for _, v := range b.found(orders.AuditOptions{}) {
		if v != "sold_is_sum_of_paid:again" {
			t.Error(v)
		}
	}
}

// case STK-5
func TestUnlimitedStockStaysUnlimited(t *testing.T) {
	t.Parallel()
	b := setup(t)
	if err := b.store.SetUnlimited(b.ctx, "mail"); err != nil {
		t.Fatal(err)
	}
	line := items(orders.Item{SKU: "mail", Quantity: 2, Price: 1})
	want := func(reserved, sold int64) {
		t.Helper()
		if st, err := b.store.GetStock(b.ctx, "mail"); err != nil || st.Available != nil || st.Reserved != reserved || st.Sold != sold {
			t.Errorf("%s, %v; want unlimited, reserved %d, sold %d", describe(st), err, reserved, sold)
		}
	}
	late, paid := b.place(overdue, line).ID, b.place(line).ID
	want(4, 0)
	b.cancelDue(late)
	b.pay(paid)
	want(0, 2)
	if err := errors.Join(b.store.AdjustStock(b.ctx, 1, "mail", 5), b.store.AdjustStock(b.ctx, 2, "mail", -5), b.store.SetUnlimited(b.ctx, "mail")); err != nil {
		t.Error(err)
	}
	want(0, 2)
	b.wantClean()
}

func TestRepeatedLinesAreSummedAndReservedOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 5)
	o := b.place(overdue, items(orders.Item{SKU: "tea", Quantity: 2, Price: 7}, orders.Item{SKU: "tea", Quantity: 3, Price: 7}))
	if len(o.Items) != 1 || o.Items[0] != (orders.Item{SKU: "tea", Quantity: 5, Price: 7}) {
		t.Errorf("%+v", o.Items)
	}
	b.wantStock("tea", 0, 5, 0)
	_, err := b.store.Place(b.ctx, orders.NewOrder{Currency: "EUR", Items: []orders.Item{{SKU: "tea", Quantity: 1, Price: 7}}})
	var short *orders.StockError
	if !errors.As(err, &short) || !errors.Is(err, orders.ErrOutOfStock) || short.Available != 0 || short.Wanted != 1 {
		t.Errorf("%v", err)
	}
	b.cancelDue(o.ID)
	b.wantStock("tea", 5, 0, 0)
	// Either half would fit, the sum does not.
	_, err = b.store.Place(b.ctx, orders.NewOrder{Currency: "EUR", Items: []orders.Item{{SKU: "tea", Quantity: 3, Price: 7}, {SKU: "tea", Quantity: 3, Price: 7}}})
	if !errors.As(err, &short) || short.Wanted != 6 || short.Available != 5 {
		t.Errorf("%v", err)
	}
	_, err = b.store.Place(b.ctx, orders.NewOrder{Currency: "EUR", Items: []orders.Item{{SKU: "teA", Quantity: 1, Price: 7}}})
	if !errors.Is(err, orders.ErrUnknownSKU) || errors.Is(err, orders.ErrOutOfStock) {
		t.Errorf("another case is another SKU: %v", err)
	}
	b.wantStock("tea", 5, 0, 0)
	b.wantClean()
}

// TestSKUsOfAllKindsInOneBatch: lengths, scripts and cases beside each other, in one statement that sums them.
func TestSKUsOfAllKindsInOneBatch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	skus := []string{"a", "A", "ä", "á", "a b", "a-b", "茶", strings.Repeat("茶", 64), strings.Repeat("x", 64), "🍵", "'", "\"", "\\", "%", "_", "ß", "ss", "0", "00", "1e3", "NULL", "a\u00a0b"}
	var list []orders.Item
	for i, sku := range skus {
		b.stock(sku, 100)
		list = append(list, orders.Item{SKU: sku, Quantity: int64(i + 1), Price: 1})
	}
	first, second, paid := b.place(overdue, items(list...)).ID, b.place(overdue, items(list[3:8]...)).ID, b.place(items(list...)).ID
	for i, sku := range skus {
		n := int64(i + 1)
		twice := 2 * n
		if i >= 3 && i < 8 {
			twice = 3 * n
		}
		b.wantStock(sku, 100-twice, twice, 0)
	}
	b.cancelDue(first, second)
	b.pay(paid)
	for i, sku := range skus {
		b.wantStock(sku, 100-int64(i+1), 0, int64(i+1))
	}
	b.wantClean()
}

func TestAdjustmentHappensOnceAndNotBelowZero(t *testing.T) {
	t.Parallel()
	b := setup(t)
	adjust := func(ref int64, delta int64) error { return b.store.AdjustStock(b.ctx, ref, "tea", delta) }
	var short *orders.StockError
	if err := adjust(1, -1); !errors.Is(err, orders.ErrUnknownSKU) {
		t.Errorf("%v", err)
	}
	if err := errors.Join(adjust(1, 10), adjust(1, 10), adjust(2, -4), adjust(2, -4), adjust(3, 0)); err != nil {
		t.Fatal(err)
	}
	b.wantStock("tea", 6, 0, 0)
	if err := adjust(4, -7); !errors.As(err, &short) || short.Available != 6 || short.Wanted != 7 {
		t.Errorf("%v", err)
	}
	if err := adjust(4, -6); err != nil { // the refused one has left no trace of its reference
		t.Error(err)
	}
	b.wantStock("tea", 0, 0, 0)
	for _, err := range []error{adjust(0, 1), adjust(-1, 1), adjust(9, math.MinInt64), b.store.AdjustStock(b.ctx, 9, "", 1), b.store.AdjustStock(b.ctx, 9, " x", 1), b.store.SetUnlimited(b.ctx, "x ")} {
		if !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("%v", err)
		}
	}
	if _, err := b.store.GetStock(b.ctx, "none"); !errors.Is(err, orders.ErrUnknownSKU) {
		t.Errorf("%v", err)
	}
	// One reference for several SKUs: a delivery.
	if err := errors.Join(b.store.AdjustStock(b.ctx, 1, "oil", 3), adjust(5, 1)); err != nil {
		t.Error(err)
	}
	b.wantStock("oil", 3, 0, 0)
	one := func() {
		if err := adjust(77, 5); err != nil {
			t.Error(err)
		}
	}
	atOnce(one, one, one)
	b.wantStock("tea", 6, 0, 0)
	b.wantClean()
}

// case DB-3
func TestNewOrderIsUnpaidWhateverIsLeftOut(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o, err := b.store.Place(b.ctx, orders.NewOrder{Currency: "EUR"})
	if err != nil {
		t.Fatal(err)
	}
	got := b.get(o.ID)
	if got.Status != orders.Unpaid || got.Amount != 0 || got.Channel != "" || got.UserID != "" || len(got.Items) != 0 || got.Items == nil || got.DeadlineAt != nil {
		t.Errorf("%+v", got)
	}
	// Nothing was owed, so it is not cancelled as unpaid, and nothing can pay it: money for it goes back.
	r, err := b.store.RecordPayment(b.ctx, notice(o.ID, "t", 5, "EUR"))
	if want := (orders.PaymentResult{Outcome: orders.PaymentMismatch, Refund: 5, RefundReason: orders.RefundMismatch}); err != nil || r != want {
		t.Errorf("%+v, %v", r, err)
	}
	b.wantClean()
}

func TestParkedThingIsCountedNotRepeated(t *testing.T) {
	t.Parallel()
	b := setup(t)
	park := func(p orders.Parked) {
		t.Helper()
		if err := b.store.Park(b.ctx, p); err != nil {
			t.Error(err)
		}
	}
	body := []byte("\x00\xff'\\" + strings.Repeat("x", 70<<10))
	for i := range 3 {
		park(orders.Parked{What: orders.ParkedMessage, Ref: "m1", Reason: fmt.Sprintf("attempt %d", i), Body: body})
	}
	park(orders.Parked{What: orders.ParkedOrder, Ref: "m1", Reason: "the same name, another kind"})
	park(orders.Parked{What: orders.ParkedMessage, Ref: strings.Repeat("茶", 200), Reason: strings.Repeat("茶", 2000)})
	park(orders.Parked{What: orders.ParkedMessage, Ref: "\xff\xfe", Reason: "\xff"})
	if got := b.db.Text(t, "SELECT CONCAT_WS(' ', times, reason, LENGTH(body), HEX(LEFT(body, 4)), state) FROM parked WHERE what = 'message' AND ref = 'm1'"); got != "3 attempt 2 65536 00FF275C parked" {
		t.Error(got)
	}
	if err := b.store.Park(b.ctx, orders.Parked{What: "shop", Ref: "1"}); !errors.Is(err, orders.ErrInvalid) {
		t.Errorf("%v", err)
	}
	if n := b.store.Counters().Parked; n != 6 {
		t.Errorf("%d parked are counted, want 6", n)
	}
	st, err := b.store.Stats(b.ctx)
	if err != nil || st.Parked != 4 {
		t.Errorf("%+v, %v", st, err)
	}
	events, err := b.store.Events(b.ctx, 12345)
	if err != nil || len(events) != 0 {
		t.Errorf("%+v, %v", events, err)
	}
	park(orders.Parked{What: orders.ParkedOrder, Ref: "12345", Reason: "no such order"})
	if events, err = b.store.Events(b.ctx, 12345); err != nil || len(events) != 1 || events[0].Kind != orders.EventParked || events[0].Actor != orders.ActorLapse {
		t.Errorf("%+v, %v", events, err)
	}
}
