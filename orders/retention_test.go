package orders_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

const retained = 100 * 24 * time.Hour

// later gives the bundle when the retention of everything that ended at noon is over.
func (b *bundle) later() *bundle {
	b.t.Helper()
	return b.on(b.at(noon.Add(retained+14*24*time.Hour), orders.Config{Retention: orders.Retention{Orders: retained}}))
}

// purgeOrders makes a whole round and gives the number of orders that went.
func (b *bundle) purgeOrders(limit int) (total int) {
	b.t.Helper()
	var at orders.PurgeCursor
	for ended := false; !ended; {
		var n int
		var err error
		if n, at, ended, err = b.store.PurgeOrders(b.ctx, at, limit); err != nil {
			b.t.Fatal(err)
		}
		total += n
	}
	return total
}

// sent marks every outbox row sent and purges what can go, as relays do in the days after.
func (b *bundle) sent() {
	b.t.Helper()
	b.db.Exec(b.t, "UPDATE outbox SET state = 'sent', available_at = ?", sqlText(noon))
	if _, err := b.store.PurgeOutbox(b.ctx, 500); err != nil {
		b.t.Fatal(err)
	}
}

func TestPurgedOrdersLeaveNothingButTheSumsOfTheStock(t *testing.T) {
	t.Parallel()
	b := setup(t)
	shop := b.on(b.at(noon, orders.Config{Events: true}))
	shop.stock("tea", 1000)
	if err := shop.store.SetUnlimited(b.ctx, "mail"); err != nil {
		t.Fatal(err)
	}
	withTea := func(n int64) func(*orders.NewOrder) {
		return items(orders.Item{SKU: "tea", Quantity: n, Price: 1}, orders.Item{SKU: "mail", Quantity: 1, Price: 1})
	}
	due := func(n *orders.NewOrder) { n.DeadlineAt = noon }
	var final, open []int64
	for i := range 3 {
		paid, transfer := shop.place(withTea(1)), shop.place(withTea(10), noDeadline)
		timedOut, byHand, never := shop.place(withTea(100), due), shop.place(withTea(5)), shop.place(withTea(7), noDeadline)
		for _, p := range []orders.Payment{notice(paid.ID, "t", 1500, "EUR"), notice(transfer.ID, "t", 1000, "EUR"), notice(transfer.ID, "again", 1000, "EUR"), notice(never.ID, "little", 1, "EUR")} {
			if _, err := shop.store.RecordPayment(b.ctx, p); err != nil {
				t.Fatal(err)
			}
		}
		shop.cancelDue(timedOut.ID)
		if _, err := shop.store.RecordPayment(b.ctx, notice(timedOut.ID, "late", 1000, "EUR")); err != nil {
			t.Fatal(err)
		}
		if _, err := shop.store.Cancel(b.ctx, byHand.ID, "u1", "changed my mind"); err != nil {
			t.Fatal(err)
		}
		final = append(final, paid.ID, transfer.ID, timedOut.ID, byHand.ID)
		open = append(open, never.ID)
		if i == 0 { // the reference of an adjustment may be the id of an order
			if err := shop.store.AdjustStock(b.ctx, paid.ID, "tea", 50); err != nil {
				t.Fatal(err)
			}
		}
	}
	shop.refundAll("test")
	for claim := shop.claimEvents(100, time.Minute); len(claim.Rows) > 0; claim = shop.claimEvents(100, time.Minute) {
		shop.sendEvents(claim)
	}
	kept := map[int64]string{}
	for _, id := range open {
		kept[id] = b.dump(id)
	}
	shop.wantStock("tea", 1050-3*18, 3*7, 3*11)
	shop.wantClean()

	early := b.on(b.at(noon.Add(retained), orders.Config{Retention: orders.Retention{Orders: retained}}))
	early.sent()
	if n := early.purgeOrders(100); n != 0 {
		t.Errorf("%d orders went before their time", n)
	}
	off := b.on(b.at(noon.Add(10*retained), orders.Config{}))
	if n := off.purgeOrders(100); n != 0 {
		t.Errorf("%d orders went though orders are kept for ever", n)
	}
	later := b.later()
	for round, want := range []int{len(final), 0} {
		if n := later.purgeOrders(5); n != want {
			t.Errorf("round %d: %d orders went, want %d", round+1, n, want)
		}
		later.wantStock("tea", 1050-3*18, 3*7, 3*11)
		later.wantClean()
	}
	for _, id := range final {
		if left := b.dump(id); strings.Contains(strings.ReplaceAll(left, "kind=adjust", ""), "kind=") || strings.Contains(left, "status=") {
			t.Errorf("of order %d is left\n%s", id, left)
		}
		if _, err := later.store.RecordPayment(b.ctx, notice(id, "t", 1000, "EUR")); !errors.Is(err, orders.ErrNotFound) {
			t.Errorf("a notice about order %d: %v", id, err)
		}
	}
	for _, id := range open {
		if got := b.dump(id); got != kept[id] {
			t.Errorf("an open order was touched\n%s\n%s", kept[id], got)
		}
	}
	want := fmt.Sprintf("orders 3, order_items 6, stock_ledger %d, payments 3, refunds 3, outbox 0, event_outbox 6, order_events 9, parked 0", 2+2+6)
	if got := b.counts(); !strings.HasPrefix(got, want) { // carried forward, adjusted, reserved
		t.Errorf("left are %s\nwant %s", got, want)
	}
	// What was carried forward goes on: another paid order is purged on top of it.
	more := later.place(withTea(2), noDeadline)
	later.pay(more.ID)
	muchLater := b.on(b.at(noon.Add(3*retained), orders.Config{Retention: orders.Retention{Orders: retained}}))
	if n := muchLater.purgeOrders(100); n != 1 {
		t.Errorf("%d orders went, want 1", n)
	}
	muchLater.wantClean()
}

func TestAnOrderStaysWholeAsLongAsAnythingNeedsIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	shop := b.on(b.at(noon, orders.Config{}))
	shop.stock("tea", 1000)
	later := b.later()
	cases := map[string]struct {
		need, free string // statements, with the order's id for @ and "; " between them
	}{
		"an outbox row":            {"INSERT INTO outbox (order_id, deliver_at, state, available_at, attempts) VALUES (@, '2027-01-01', 'pending', '2027-01-01', 0)", "DELETE FROM outbox WHERE order_id = @"},
		"a refund to be made":      {"UPDATE refunds SET state = 'pending' WHERE order_id = @", "UPDATE refunds SET state = 'done' WHERE order_id = @"},
		"a refund given up":        {"UPDATE refunds SET state = 'given_up' WHERE order_id = @; INSERT INTO parked (what, ref, reason, times, first_at, last_at, state) VALUES ('payment', 'test:second-@', 'x', 1, '2027-01-01', '2027-01-01', 'parked')", "UPDATE parked SET state = 'discarded' WHERE ref = 'test:second-@'"},
		"a call to the gateway":    {"INSERT INTO gateway_tasks (order_id, kind, attempts, created_at, available_at) VALUES (@, 'close', 0, '2027-01-01', '2027-01-01')", "DELETE FROM gateway_tasks WHERE order_id = @"},
		"an event to be sent":      {"INSERT INTO event_outbox (order_id, sequence, type, at, data, state, available_at, attempts) VALUES (@, 1, 'order.paid', '2027-01-01', '{}', 'pending', '2027-01-01', 0)", "UPDATE event_outbox SET state = 'sent' WHERE order_id = @"},
		"an event that is parked":  {"INSERT INTO event_outbox (order_id, sequence, type, at, data, state, available_at, attempts) VALUES (@, 1, 'order.paid', '2027-01-01', '{}', 'parked', '2027-01-01', 0); INSERT INTO parked (what, ref, reason, times, first_at, last_at, state) VALUES ('message', 'event:@-1', 'x', 1, '2027-01-01', '2027-01-01', 'parked')", "UPDATE parked SET state = 'discarded' WHERE ref = 'event:@-1'"},
		"that it is parked":        {"INSERT INTO parked (what, ref, reason, times, first_at, last_at, state) VALUES ('order', '@', 'x', 1, '2027-01-01', '2027-01-01', 'parked')", "UPDATE parked SET state = 'discarded' WHERE ref = '@'"},
		"a payment that is parked": {"INSERT INTO parked (what, ref, reason, times, first_at, last_at, state) VALUES ('payment', 'test:second-@', 'x', 1, '2027-01-01', '2027-01-01', 'parked')", "UPDATE parked SET state = 'retried' WHERE ref = 'test:second-@'"},
		"that it ended lately":     {"UPDATE orders SET paid_at = '2027-05-01' WHERE id = @", "UPDATE orders SET paid_at = '2027-01-15' WHERE id = @"},
		"a deadline that was late": {"UPDATE orders SET deadline_at = '2027-05-01' WHERE id = @", "UPDATE orders SET deadline_at = '2027-01-15' WHERE id = @"},
	}
	ids := map[string]int64{}
	for name, c := range cases {
		o := shop.place(items(orders.Item{SKU: "tea", Quantity: 1, Price: 1}))
		shop.pay(o.ID)
		if _, err := shop.store.RecordPayment(b.ctx, notice(o.ID, "second", 1000, "EUR")); err != nil {
			t.Fatal(err)
		}
		ids[name] = o.ID
		_ = c
	}
	shop.refundAll("test")
	later.sent()
	for name, c := range cases {
		for statement := range strings.SplitSeq(c.need, "; ") {
			b.db.Exec(t, strings.ReplaceAll(statement, "@", fmt.Sprint(ids[name])))
		}
	}
	before := map[string]string{}
	for name, id := range ids {
		before[name] = b.dump(id)
	}
	// More of them than fit a page, so that they must not hold up what comes behind them either.
	last := shop.place(items(orders.Item{SKU: "tea", Quantity: 1, Price: 1}))
	shop.pay(last.ID)
	later.sent()
	b.db.Exec(t, "INSERT IGNORE INTO outbox (order_id, deliver_at, state, available_at, attempts) VALUES (?, '2027-01-01', 'pending', '2027-01-01', 0)", ids["an outbox row"])
	if n := later.purgeOrders(3); n != 1 {
		t.Errorf("%d orders went, want the one that nothing needs", n)
	}
	for name, id := range ids {
		if got := b.dump(id); got != before[name] && name != "an outbox row" {
			t.Errorf("%s: the order was touched\n%s\n%s", name, before[name], got)
		}
	}
	for name, c := range cases {
		b.db.Exec(t, strings.ReplaceAll(c.free, "@", fmt.Sprint(ids[name])))
		if n := later.purgeOrders(100); n != 1 {
			t.Errorf("%s: %d orders went when nothing needed it any longer, want 1", name, n)
		}
		later.wantClean()
	}
}

// TestAPurgeKeepsNobodyWaiting: it passes over an order that a payment holds, and while it stands before its commit, orders of the same SKUs are
// placed, paid and cancelled.
func TestAPurgeKeepsNobodyWaiting(t *testing.T) {
	t.Parallel()
	b := setup(t)
	shop := b.on(b.at(noon, orders.Config{}))
	shop.stock("tea", 1000)
	tea := items(orders.Item{SKU: "tea", Quantity: 1, Price: 1})
	var old []int64
	for range 4 {
		o := shop.place(tea)
		shop.pay(o.ID)
		old = append(old, o.ID)
	}
	later := b.later()
	later.sent()
	held, err := b.db.SQL.BeginTx(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Rollback() }()
	if _, err := held.ExecContext(b.ctx, "SELECT id FROM orders WHERE id = ? FOR UPDATE", old[1]); err != nil {
		t.Fatal(err)
	}

	p := newProxy(t, b.db.DSN, param("timestamp", stopped(noon.Add(retained+14*24*time.Hour))))
	through, err := orders.Open(p.dsn, orders.Config{Retention: orders.Retention{Orders: retained}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = through.Close() }()
	standing, goOn := p.standAtCommit()
	var purge sync.WaitGroup
	var purged int
	purge.Go(func() {
		var err error
		if purged, _, _, err = through.PurgeOrders(b.ctx, orders.PurgeCursor{}, 100); err != nil {
			t.Error(err)
		}
	})
	select {
	case <-standing:
	case <-b.ctx.Done():
		t.Fatal("the purge waits for the order that is held")
	}
	ctx, stop := context.WithTimeout(b.ctx, 4*time.Second) // less than a lock wait
	defer stop()
	live := later
	live.ctx = ctx
	for range 3 {
		paid, cancelled := live.place(tea, noDeadline), live.place(tea, func(n *orders.NewOrder) { n.DeadlineAt = noon })
		if r := live.pay(paid.ID); r.Outcome != orders.PaymentAccepted {
			t.Errorf("%+v", r)
		}
		if out := live.cancelDue(cancelled.ID); out[0].Result != orders.ResultCancelled {
			t.Errorf("%+v", out)
		}
	}
	if _, err := live.store.ClaimOutbox(ctx, 100, time.Minute); err != nil {
		t.Errorf("a claim beside the purge: %v", err)
	}
	close(goOn)
	purge.Wait()
	if purged != 3 {
		t.Errorf("%d orders went, want all but the one that was held", purged)
	}
	if err := held.Rollback(); err != nil {
		t.Fatal(err)
	}
	later.ctx = b.ctx
	if n := later.purgeOrders(100); n != 1 {
		t.Errorf("%d orders went afterwards, want 1", n)
	}
	later.wantClean()
}

// TestPurgesAtOncePurgeEachOrderOnce: what they carry forward adds up, whoever came first.
func TestPurgesAtOncePurgeEachOrderOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	shop := b.on(b.at(noon, orders.Config{}))
	shop.stock("tea", 1000)
	shop.stock("cup", 1000)
	for range 40 {
		o := shop.place(items(orders.Item{SKU: "tea", Quantity: 1, Price: 1}, orders.Item{SKU: "cup", Quantity: 2, Price: 1}))
		shop.pay(o.ID)
	}
	later := b.later()
	later.sent()
	counts := make([]int, 4)
	var verbs []func()
	for i := range counts {
		verbs = append(verbs, func() { counts[i] = b.later().purgeOrders(3) })
	}
	atOnce(verbs...)
	if total := counts[0] + counts[1] + counts[2] + counts[3]; total+later.purgeOrders(100) != 40 {
		t.Errorf("%v orders went, want 40 in all", counts)
	}
	later.wantStock("tea", 960, 0, 40)
	later.wantStock("cup", 920, 0, 80)
	later.wantClean()
}

func TestEventsThatWereSentGoAfterTheirRetention(t *testing.T) {
	t.Parallel()
	b := setupWith(t, orders.Config{Events: true})
	for range 3 {
		b.place()
	}
	b.sendEvents(b.claimEvents(1, time.Minute))
	b.sendEvents(b.claimEvents(1, time.Minute))
	purge := func(want int) {
		t.Helper()
		if n, err := b.store.PurgeOutgoing(b.ctx, 500); err != nil || n != want {
			t.Errorf("%d rows went, %v; want %d", n, err, want)
		}
	}
	purge(0)
	b.db.Exec(t, "UPDATE event_outbox SET available_at = UTC_TIMESTAMP(3) - INTERVAL 1 SECOND") // that of the row that waits, too
	purge(2)
	purge(0)
	if n := b.db.Int(t, "SELECT COUNT(*) FROM event_outbox WHERE state = 'pending'"); n != 1 {
		t.Errorf("%d events still wait, want 1", n)
	}
}

func TestParkedRowsGoWhenTheyWereDealtWith(t *testing.T) {
	t.Parallel()
	b := setup(t)
	unpaid, paid := b.place(overdue), b.place()
	b.pay(paid.ID)
	const gone = 987654321
	park := func(what, ref, state string, days int) string {
		b.db.Exec(t, "INSERT INTO parked (what, ref, reason, times, first_at, last_at, state) VALUES (?, ?, 'x', 1, '2020-01-01', UTC_TIMESTAMP(3) - INTERVAL ? DAY, ?)", what, ref, days, state)
		return what + " " + ref
	}
	want := []string{
		park(orders.ParkedMessage, "M1", orders.StateParked, 1000),
		park(orders.ParkedMessage, "M2", orders.StateRetried, 89),
		park(orders.ParkedOrder, orders.FormatID(unpaid.ID), orders.StateDiscarded, 1000), // it is why the order may be unpaid past its deadline
	}
	park(orders.ParkedMessage, "M3", orders.StateRetried, 91)
	park(orders.ParkedPayment, "bank:1", orders.StateDiscarded, 91)
	park(orders.ParkedOrder, orders.FormatID(paid.ID), orders.StateRetried, 91)
	park(orders.ParkedOrder, fmt.Sprint(gone), orders.StateDiscarded, 91)
	park(orders.ParkedOrder, "no id at all", orders.StateDiscarded, 91)
	b.db.Exec(t, "INSERT INTO order_events (order_id, at, kind, actor) VALUES (?, UTC_TIMESTAMP(3) - INTERVAL 91 DAY, 'parked', 'lapse')", gone)
	b.wantClean()
	for _, n := range []int{5, 0} {
		if got, err := b.store.PurgeParked(b.ctx, 500); err != nil || got != n {
			t.Errorf("%d rows went, %v; want %d", got, err, n)
		}
		b.wantClean()
	}
	got := strings.Split(b.db.Text(t, "SELECT GROUP_CONCAT(what, ' ', ref ORDER BY id SEPARATOR '\n') FROM parked"), "\n")
	if !slices.Equal(got, want) {
		t.Errorf("left are %q, want %q", got, want)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE order_id = ?", gone); n != 0 {
		t.Errorf("an order that does not exist has %d events left", n)
	}
	if events, err := b.store.Events(b.ctx, paid.ID); err != nil || len(events) != 2 {
		t.Errorf("an order that exists has %d events left, want 2; %v", len(events), err)
	}
}

func TestReconcileRunsGoExceptTheLastNightThatWasDone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	run := func(state, kind string, days int) {
		b.db.Exec(t, `INSERT INTO reconcile_runs (state, kind, started_at, finished_at, cutoff_at, scanned, cancelled, already_paid, held, parked)
			VALUES (?, ?, '2020-01-01', IF(? = 'running', NULL, UTC_TIMESTAMP(3) - INTERVAL ? DAY), '2020-01-01', 0, 0, 0, 0, 0)`, state, kind, state, days)
	}
	run("done", "full", 300)
	run("failed", "full", 250)
	run("done", "full", 200) // the last that was done
	run("failed", "full", 150)
	run("running", "full", 0)
	for _, n := range []int{2, 0} {
		if got, err := b.store.PurgeRuns(b.ctx, 500); err != nil || got != n {
			t.Errorf("%d runs went, %v; want %d", got, err, n)
		}
	}
	run("done", "full", 10)
	if got, err := b.store.PurgeRuns(b.ctx, 500); err != nil || got != 2 {
		t.Errorf("%d runs went when a later night was done, %v; want 2", got, err)
	}
}

func TestPurgesRefuseOtherThan1To500(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, purge := range map[string]func(limit int) error{
		"orders": func(n int) error { _, _, _, err := b.store.PurgeOrders(b.ctx, orders.PurgeCursor{}, n); return err },
		"events": func(n int) error { _, err := b.store.PurgeOutgoing(b.ctx, n); return err },
		"parked": func(n int) error { _, err := b.store.PurgeParked(b.ctx, n); return err },
		"runs":   func(n int) error { _, err := b.store.PurgeRuns(b.ctx, n); return err },
	} {
		for _, n := range []int{0, 501} {
			if err := purge(n); !errors.Is(err, orders.ErrInvalid) {
				t.Errorf("%s, %d at a time: %v", name, n, err)
			}
		}
	}
}
