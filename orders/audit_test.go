package orders_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// found gives what an audit found as "check:order" or "check:sku", sorted.
func (b *bundle) found(options orders.AuditOptions) []string {
	b.t.Helper()
	checks, err := orders.Audit(b.ctx, b.db.SQL, options)
	if err != nil {
		b.t.Fatal(err)
	}
	list := []string{}
	for _, c := range checks {
		if int64(len(c.Examples)) != c.Violations {
			b.t.Errorf("%s: %d violations, %d listed", c.Name, c.Violations, len(c.Examples))
		}
		for _, v := range c.Examples {
			if v.Detail == "" {
				b.t.Errorf("%s: %+v says nothing", c.Name, v)
			}
			who := v.SKU
			if v.OrderID != 0 {
				who = fmt.Sprint(v.OrderID)
			}
			list = append(list, c.Name+":"+who)
		}
	}
	slices.Sort(list)
	return list
}

// mix places an order for each way to end, healthy all.
func (b *bundle) mix() {
	b.t.Helper()
	b.stock("tea", 1000)
	if err := b.store.SetUnlimited(b.ctx, "mail"); err != nil {
		b.t.Fatal(err)
	}
	lines := items(orders.Item{SKU: "tea", Quantity: 3, Price: 100}, orders.Item{SKU: "mail", Quantity: 1, Price: 700})
	b.place(lines)
	b.place(noDeadline, lines)
	b.place()
	b.pay(b.place(lines).ID)
	b.pay(b.place(overdue, lines).ID)
	b.cancelDue(b.place(overdue, lines).ID, b.place(overdue).ID, b.place(lines).ID)
	for _, reason := range []string{"changed my mind", "timeouts"} {
		if _, err := b.store.Cancel(b.ctx, b.place(lines).ID, "u1", reason); err != nil {
			b.t.Fatal(err)
		}
	}
	late := b.place(overdue, lines).ID
	b.cancelDue(late)
	twice := b.place(lines).ID
	b.pay(twice)
	for _, p := range []orders.Payment{
		notice(late, "late", 1000, "EUR"), notice(twice, "second", 1000, "EUR"), notice(b.place(lines).ID, "less", 1, "EUR"),
		notice(b.place(lines).ID, "more", 5000, "EUR"), notice(b.place(lines).ID, "usd", 1000, "USD"),
	} {
		if _, err := b.store.RecordPayment(b.ctx, p); err != nil {
			b.t.Fatal(err)
		}
	}
	extended := b.place(overdue, lines).ID
	if _, err := b.store.ExtendDeadline(b.ctx, extended, time.Now().Add(time.Hour), "support"); err != nil {
		b.t.Fatal(err)
	}
	// The excuses of I3.
	held, parked := b.place(overdue).ID, b.place(overdue).ID
	b.db.Exec(b.t, "UPDATE orders SET hold_until = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR, hold_reason = 'asked' WHERE id = ?", held)
	if err := b.store.Park(b.ctx, orders.Parked{What: orders.ParkedOrder, Ref: orders.FormatID(parked), Reason: "tried"}); err != nil {
		b.t.Fatal(err)
	}
}

func TestAuditOfAHealthyMixFindsNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.mix()
	b.wantClean()
	checks, err := orders.Audit(b.ctx, b.db.SQL, orders.AuditOptions{})
	if err != nil {
		t.Fatal(err)
	}
	invariants := map[string]bool{}
	for _, c := range checks {
		invariants[c.Invariant] = true
		if c.Rows == 0 {
			t.Errorf("%s looked at no rows: the mix has nothing for it", c.Name)
		}
		if c.Says == "" {
			t.Errorf("%s says nothing", c.Name)
		}
	}
	for _, want := range []string{"I1", "I2", "I3", "I4", "I5", "I6", "I8"} {
		if !invariants[want] {
			t.Errorf("no check for %s", want)
		}
	}
}

// plants are violations, each in rows of its own; @ stands for the id of an order that the state names.
var plants = []struct {
	name  string
	check string
	order string // how the order is made: unpaid, overdue, paid, cancelled, byhand, late, excess, duplicate
	sku   bool   // the violation is about the order's SKU, not the order
	sql   string
}{
	{"payment accepted on a cancelled order", "accepted_payment_is_kept", "byhand", false,
		"INSERT INTO payments SELECT 'x', '@', id, currency, amount, NULL, created_at, 'accepted' FROM orders WHERE id = @"},
	{"payment accepted, order left unpaid", "accepted_payment_is_kept", "unpaid", false,
		"INSERT INTO payments SELECT 'x', '@', id, currency, amount, NULL, created_at, 'accepted' FROM orders WHERE id = @"},
	{"paid without a payment", "paid_by_one_payment", "paid", false, "DELETE FROM payments WHERE order_id = @"},
	{"paid by two payments", "paid_by_one_payment", "paid", false,
		"INSERT INTO payments SELECT 'x', '@', id, currency, amount, NULL, created_at, 'accepted' FROM orders WHERE id = @"},
	{"reserved too much", "reserved_is_sum_of_unpaid", "unpaid", true, "UPDATE stock SET reserved = reserved + 1, available = available - 1 WHERE sku = 's@'"},
	{"order deleted, its pieces still reserved", "reserved_is_sum_of_unpaid", "bare", true, // case DB-4
		"DELETE o, i, l, e, b FROM orders o JOIN order_items i ON i.order_id = o.id JOIN stock_ledger l ON l.order_id = o.id JOIN order_events e ON e.order_id = o.id JOIN outbox b ON b.order_id = o.id WHERE o.id = @"},
	{"sold too much", "sold_is_sum_of_paid", "paid", true, "UPDATE stock SET sold = sold + 1, available = available - 1 WHERE sku = 's@'"},
	{"available too much", "available_is_the_rest", "unpaid", true, "UPDATE stock SET available = available + 1 WHERE sku = 's@'"},
	{"cancelled, not released", "each_move_once", "cancelled", false, "DELETE FROM stock_ledger WHERE order_id = @ AND kind = 'release'"},
	{"paid, not sold", "each_move_once", "paid", false, "DELETE FROM stock_ledger WHERE order_id = @ AND kind = 'sell'"},
	{"released while unpaid", "each_move_once", "unpaid", false, "INSERT INTO stock_ledger SELECT order_id, sku, 'release', quantity, at FROM stock_ledger WHERE order_id = @"},
	{"sold and released", "each_move_once", "paid", false, "INSERT INTO stock_ledger SELECT order_id, sku, 'release', quantity, at FROM stock_ledger WHERE order_id = @ AND kind = 'sell'"},
	{"released in part", "each_move_once", "cancelled", false, "UPDATE stock_ledger SET quantity = 2 WHERE order_id = @ AND kind = 'release'"},
	{"a move without an item", "each_move_once", "unpaid", false, "INSERT INTO stock_ledger SELECT order_id, 'zzz', 'reserve', 1, at FROM stock_ledger WHERE order_id = @"},
	{"overdue", "overdue_is_cancelled", "overdue", false, "DO 0"},
	{"held until a minute before the last", "overdue_is_cancelled", "overdue", false, "UPDATE orders SET hold_until = UTC_TIMESTAMP(3) - INTERVAL 2 MINUTE WHERE id = @"},
	{"parked, and put back since", "overdue_is_cancelled", "overdue", false,
		"INSERT INTO parked (what, ref, reason, times, first_at, last_at, state) VALUES ('order', '@', 'tried', 1, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3), 'retried')"},
	{"late money kept", "money_has_one_home", "late", false, "DELETE FROM refunds WHERE order_id = @"},
	{"late money refunded in part", "money_has_one_home", "late", false, "UPDATE refunds SET amount = amount - 1 WHERE order_id = @"},
	{"late money refunded in another currency", "money_has_one_home", "late", false, "UPDATE refunds SET currency = 'USD' WHERE order_id = @"},
	{"excess kept", "money_has_one_home", "excess", false, "DELETE FROM refunds WHERE order_id = @"},
	{"excess refunded in another currency", "money_has_one_home", "excess", false, "UPDATE refunds SET currency = 'USD' WHERE order_id = @"},
	{"an order's own money refunded", "money_has_one_home", "paid", false,
		"INSERT INTO refunds SELECT gateway, transaction_id, order_id, amount, currency, 'late', 'pending', 0, received_at, received_at, NULL, NULL, NULL FROM payments WHERE order_id = @"},
	{"duplicate money kept", "money_has_one_home", "duplicate", false, "DELETE FROM refunds WHERE order_id = @"},
	{"less than the price accepted", "money_has_one_home", "paid", false, "UPDATE payments SET amount = amount - 1 WHERE order_id = @"},
	{"a refund of no payment", "money_has_one_home", "unpaid", false,
		"INSERT INTO refunds SELECT 'x', '@', id, 5, currency, 'late', 'pending', 0, created_at, created_at, NULL, NULL, NULL FROM orders WHERE id = @"},
	{"timed out before its deadline", "not_before_deadline", "cancelled", false, "UPDATE orders SET cancelled_at = deadline_at - INTERVAL 1 SECOND WHERE id = @"},
	{"timed out a millisecond early", "not_before_deadline", "cancelled", false, "UPDATE orders SET cancelled_at = deadline_at - INTERVAL 1000 MICROSECOND WHERE id = @"},
	{"timed out without a deadline", "not_before_deadline", "cancelled", false, "UPDATE orders SET deadline_at = NULL WHERE id = @"},
	{"no outbox row", "outbox_row_exists", "unpaid", false, "DELETE FROM outbox WHERE order_id = @"},
	{"cancelled twice", "one_final_event", "cancelled", false, "INSERT INTO order_events (order_id, at, kind, actor) SELECT order_id, at, kind, actor FROM order_events WHERE order_id = @ AND kind = 'cancelled'"},
	{"cancelled in silence", "one_final_event", "cancelled", false, "DELETE FROM order_events WHERE order_id = @ AND kind = 'cancelled'"},
	{"paid in silence", "one_final_event", "paid", false, "DELETE FROM order_events WHERE order_id = @ AND kind = 'paid'"},
	{"an end while unpaid", "one_final_event", "unpaid", false, "INSERT INTO order_events (order_id, at, kind, actor) VALUES (@, UTC_TIMESTAMP(3), 'paid', 'x')"},
	{"paid and cancelled", "one_final_event", "paid", false, "INSERT INTO order_events (order_id, at, kind, actor) VALUES (@, UTC_TIMESTAMP(3), 'cancelled', 'x')"},
	{"paid at no time", "state_fits_instants", "paid", false, "UPDATE orders SET paid_at = NULL WHERE id = @"},
	{"cancelled for no reason", "state_fits_instants", "byhand", false, "UPDATE orders SET cancel_reason = NULL WHERE id = @"},
	{"unpaid, yet cancelled once", "state_fits_instants", "unpaid", false, "UPDATE orders SET cancelled_at = created_at WHERE id = @"},
	{"a state of another build", "state_fits_instants", "plain", false, "UPDATE orders SET status = 'shipped' WHERE id = @"},
}

func (b *bundle) planted(order string) int64 {
	b.t.Helper()
	id := orders.NewID()
	sku := fmt.Sprintf("s%d", id)
	b.stock(sku, 10)
	withID := func(n *orders.NewOrder) { n.ID = id }
	line := items(orders.Item{SKU: sku, Quantity: 3, Price: 100})
	switch order {
	case "unpaid", "bare":
		b.place(withID, line)
	case "plain":
		b.place(withID)
	case "overdue":
		b.place(withID, line, overdue)
	case "byhand":
		b.place(withID, line)
		if _, err := b.store.Cancel(b.ctx, id, "u1", "Timeout was too short for me"); err != nil {
			b.t.Fatal(err)
		}
	case "cancelled", "late":
		b.place(withID, line, overdue)
		b.cancelDue(id)
		if order == "late" {
			b.pay(id)
		}
	case "paid", "duplicate":
		b.place(withID, line)
		b.pay(id)
		if order == "duplicate" {
			if _, err := b.store.RecordPayment(b.ctx, notice(id, "second", 1000, "EUR")); err != nil {
				b.t.Fatal(err)
			}
		}
	case "excess":
		b.place(withID, line)
		if _, err := b.store.RecordPayment(b.ctx, notice(id, "more", 1500, "EUR")); err != nil {
			b.t.Fatal(err)
		}
	default:
		b.t.Fatalf("no order %q", order)
	}
	return id
}

// TestEachAuditQueryFindsItsPlantedViolation plants one after the other, and each audit has to find all that were planted so far and
// nothing else: a check that overlooks, or accuses a neighbour, shows at once.
func TestEachAuditQueryFindsItsPlantedViolation(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.mix()
	b.db.Exec(t, "ALTER TABLE orders DROP CONSTRAINT orders_status_known")
	want := []string{}
	var last int64
	for _, p := range plants {
		last = b.planted(p.order)
		b.db.Exec(t, strings.ReplaceAll(p.sql, "@", fmt.Sprint(last)))
		who := fmt.Sprint(last)
		if p.sku {
			who = "s" + who
		}
		want = append(want, p.check+":"+who)
		slices.Sort(want)
		if got := b.found(orders.AuditOptions{}); !slices.Equal(got, want) {
			t.Fatalf("%s: the audit found\n %s\nwant\n %s", p.name, strings.Join(got, "\n "), strings.Join(want, "\n "))
		}
	}
	for _, v := range b.found(orders.AuditOptions{MinID: last + 1}) {
		if !strings.Contains(v, ":s") {
			t.Errorf("with a larger smallest id the audit still found %s", v)
		}
	}
	for _, v := range b.found(orders.AuditOptions{Grace: 2 * time.Hour}) {
		if strings.HasPrefix(v, "overdue") {
			t.Errorf("with two hours of grace the audit still found %s", v)
		}
	}
	checks, err := orders.Audit(b.ctx, b.db.SQL, orders.AuditOptions{Limit: 2})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range checks {
		if c.Violations > 2 && len(c.Examples) != 2 {
			t.Errorf("%s: %d of %d violations listed, want 2", c.Name, len(c.Examples), c.Violations)
		}
	}
	for _, bad := range []orders.AuditOptions{{Grace: -1}, {Limit: -1}} {
		if _, err := orders.Audit(b.ctx, b.db.SQL, bad); err == nil {
			t.Errorf("audit took %+v", bad)
		}
	}
}
