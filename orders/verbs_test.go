package orders_test

import (
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

var update = flag.Bool("update", false, "write the golden files anew")

// noon is where the clock stands in tests that need exact instants. It lies in the range that MariaDB's session clock takes.
var noon = time.Date(2027, 1, 15, 12, 0, 0, 123e6, time.UTC)

// states are the ways an order can be when a verb meets it. Each reserves, sold or released 3 of 10 pieces.
var states = []struct {
	name string
	make func(b *bundle, n orders.NewOrder) int64
}{
	{"due", func(b *bundle, n orders.NewOrder) int64 { return b.placed(n, -time.Second) }},
	{"due_now", func(b *bundle, n orders.NewOrder) int64 { return b.placed(n, 0) }},
	{"soon", func(b *bundle, n orders.NewOrder) int64 { return b.placed(n, time.Second) }},
	{"early", func(b *bundle, n orders.NewOrder) int64 { return b.placed(n, 30*time.Minute) }},
	{"exempt", func(b *bundle, n orders.NewOrder) int64 {
		n.NoDeadline = true
		return b.place(func(o *orders.NewOrder) { *o = n }).ID
	}},
	{"held", func(b *bundle, n orders.NewOrder) int64 { return b.hold(b.placed(n, -time.Second), 10*time.Minute) }},
	{"held_soon", func(b *bundle, n orders.NewOrder) int64 { return b.hold(b.placed(n, -time.Second), time.Second) }},
	{"hold_over", func(b *bundle, n orders.NewOrder) int64 { return b.hold(b.placed(n, -2*time.Second), 0) }},
	{"paid", func(b *bundle, n orders.NewOrder) int64 {
		id := b.placed(n, -time.Second)
		b.pay(id)
		return id
	}},
	{"timed_out", func(b *bundle, n orders.NewOrder) int64 {
		id := b.placed(n, -time.Second)
		b.cancelDue(id)
		return id
	}},
	{"by_hand", func(b *bundle, n orders.NewOrder) int64 {
		id := b.placed(n, 30*time.Minute)
		if _, err := b.store.Cancel(b.ctx, id, "u1", "changed my mind"); err != nil {
			b.t.Fatal(err)
		}
		return id
	}},
	// case JOB-6
	{"unknown", func(b *bundle, n orders.NewOrder) int64 {
		id := b.placed(n, -time.Second)
		b.db.Exec(b.t, "UPDATE orders SET status = 'shipped' WHERE id = ?", id)
		return id
	}},
	{"missing", func(b *bundle, n orders.NewOrder) int64 { return n.ID }},
}

func (b *bundle) placed(n orders.NewOrder, deadline time.Duration) int64 {
	b.t.Helper()
	n.DeadlineAt = noon.Add(deadline)
	return b.place(func(o *orders.NewOrder) { *o = n }).ID
}

// hold puts the cancel of an order off, as a gate before the cancel does.
func (b *bundle) hold(id int64, d time.Duration) int64 {
	b.t.Helper()
	b.db.Exec(b.t, "UPDATE orders SET hold_until = ?, hold_reason = 'the gateway does not know' WHERE id = ?", sqlText(noon.Add(d)), id)
	return id
}

func sqlText(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05.000") }

func notice(id int64, transaction string, amount int64, currency string) orders.Payment {
	return orders.Payment{Gateway: "test", TransactionID: fmt.Sprintf("%s-%d", transaction, id), OrderID: id, Currency: currency, Amount: amount}
}

// verbs are what can be done to an order. The order's own transaction, t-<id>, is the one that paid it in the state paid.
var verbs = []struct {
	name string
	do   func(b *bundle, id int64) string
}{
	{"cancel_due", func(b *bundle, id int64) string {
		out, err := b.store.CancelDue(b.ctx, text(id))
		return answerOf(fmt.Sprintf("%+v", out), err)
	}},
	{"cancel", func(b *bundle, id int64) string {
		out, err := b.store.Cancel(b.ctx, id, "u1", "I found it cheaper")
		return answerOf(fmt.Sprintf("%+v", out), err)
	}},
	{"pay_exact", payOnce("new", 1000, "EUR")},
	{"pay_less", payOnce("new", 999, "EUR")},
	{"pay_more", payOnce("new", 1200, "EUR")},
	{"pay_other_currency", payOnce("new", 1000, "USD")},
	{"pay_repeated", func(b *bundle, id int64) string {
		_, _ = b.store.RecordPayment(b.ctx, notice(id, "t", 1000, "EUR"))
		return payOnce("t", 1000, "EUR")(b, id)
	}},
	{"pay_twice", func(b *bundle, id int64) string {
		_, _ = b.store.RecordPayment(b.ctx, notice(id, "t", 1000, "EUR"))
		return payOnce("new", 1000, "EUR")(b, id)
	}},
	{"pay_conflict", func(b *bundle, id int64) string {
		_, _ = b.store.RecordPayment(b.ctx, notice(id, "t", 1000, "EUR"))
		return payOnce("t", 2000, "EUR")(b, id)
	}},
	{"extend", extendTo(time.Hour)},
	{"extend_again", func(b *bundle, id int64) string {
		_, _ = b.store.ExtendDeadline(b.ctx, id, noon.Add(time.Hour), "support")
		return extendTo(time.Hour)(b, id)
	}},
	{"extend_to_the_past", extendTo(-500 * time.Millisecond)},
	{"shorten", extendTo(-3 * time.Second)},
	{"extend_beyond_cap", extendTo(7*24*time.Hour + time.Millisecond)},
	{"get", func(b *bundle, id int64) string {
		o, err := b.store.Get(b.ctx, id)
		return answerOf(fmt.Sprintf("%s deadline %s hold %s %q paid %s cancelled %s %q", o.Status, offset(o.DeadlineAt), offset(o.HoldUntil), o.HoldReason,
			offset(o.PaidAt), offset(o.CancelledAt), o.CancelReason), err)
	}},
	{"place_again", func(b *bundle, id int64) string {
		o, err := b.store.Place(b.ctx, orders.NewOrder{ID: id, Currency: "EUR", Amount: 7})
		return answerOf(fmt.Sprintf("placed %s", o.Status), err)
	}},
}

func payOnce(transaction string, amount int64, currency string) func(*bundle, int64) string {
	return func(b *bundle, id int64) string {
		r, err := b.store.RecordPayment(b.ctx, notice(id, transaction, amount, currency))
		return answerOf(fmt.Sprintf("%+v", r), err)
	}
}

func extendTo(d time.Duration) func(*bundle, int64) string {
	return func(b *bundle, id int64) string {
		x, err := b.store.ExtendDeadline(b.ctx, id, noon.Add(d), "support")
		return answerOf(fmt.Sprintf("extended %t %s to %s", x.Extended, x.Status, offset(&x.DeadlineAt)), err)
	}
}

func answerOf(result string, err error) string {
	if err == nil {
		return result
	}
	for name, known := range map[string]error{
		"ErrInvalid": orders.ErrInvalid, "ErrNotFound": orders.ErrNotFound, "ErrExists": orders.ErrExists, "ErrPaymentConflict": orders.ErrPaymentConflict,
	} {
		if errors.Is(err, known) {
			return name
		}
	}
	return "error: " + err.Error()
}

// offset writes an instant as its distance from noon.
func offset(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "none"
	}
	return t.Sub(noon).String()
}

// picture is everything that is stored about an order, in one line.
func (b *bundle) picture(id int64, sku string) string {
	b.t.Helper()
	const query = `SELECT COALESCE((SELECT status FROM orders WHERE id = @id), 'no order'),
		(SELECT CONCAT_WS('+', available, reserved, sold) FROM stock WHERE sku = @sku),
		(SELECT GROUP_CONCAT(CONCAT(kind, ' ', quantity) ORDER BY kind SEPARATOR ', ') FROM stock_ledger WHERE order_id = @id),
		(SELECT GROUP_CONCAT(kind ORDER BY id SEPARATOR ', ') FROM order_events WHERE order_id = @id),
		(SELECT GROUP_CONCAT(CONCAT_WS(' ', outcome, amount, currency) ORDER BY transaction_id SEPARATOR ', ') FROM payments WHERE order_id = @id),
		(SELECT GROUP_CONCAT(CONCAT_WS(' ', reason, amount, currency, state) ORDER BY transaction_id SEPARATOR ', ') FROM refunds WHERE order_id = @id),
		(SELECT GROUP_CONCAT(CONCAT(what, ' ', times) ORDER BY what SEPARATOR ', ') FROM parked WHERE ref IN (@text, CONCAT('test:t-', @text))),
		(SELECT state FROM outbox WHERE order_id = @id),
		(SELECT CAST(deliver_at AS CHAR) FROM outbox WHERE order_id = @id),
		(SELECT CAST(available_at AS CHAR) FROM outbox WHERE order_id = @id)`
	names := []string{"", "stock", "ledger", "events", "payments", "refunds", "parked", "outbox", "due", "from"}
	values := make([]sql.NullString, len(names))
	scan := make([]any, len(names))
	for i := range values {
		scan[i] = &values[i]
	}
	text := "'" + fmt.Sprint(id) + "'"
	full := strings.NewReplacer("@id", fmt.Sprint(id), "@text", text, "@sku", "'"+sku+"'").Replace(query)
	if err := b.db.SQL.QueryRowContext(b.ctx, full).Scan(scan...); err != nil {
		b.t.Fatal(err)
	}
	parts := make([]string, len(names))
	for i, v := range values {
		switch {
		case !v.Valid:
			v.String = "none"
		case names[i] == "due" || names[i] == "from":
			when, err := time.Parse("2006-01-02 15:04:05.000", v.String)
			if err != nil {
				b.t.Fatal(err)
			}
			v.String = offset(&when)
		}
		parts[i] = strings.TrimSpace(names[i] + " " + v.String)
	}
	return strings.Join(parts, " | ")
}

// TestEveryStateMeetsEveryVerb holds the whole table of states and verbs against a file that was read line by line: the answer, every
// row that was written, and that the audit finds nothing after each verb.
//
// case DB-1, JOB-6, PAY-6, DB-2
func TestEveryStateMeetsEveryVerb(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b = b.on(b.at(noon, orders.Config{}))
	b.db.Exec(t, "ALTER TABLE orders DROP CONSTRAINT orders_status_known")
	var got strings.Builder
	id := int64(1000)
	for _, verb := range verbs {
		fmt.Fprintf(&got, "\n== %s\n", verb.name)
		for _, state := range states {
			id++
			sku := fmt.Sprintf("tea-%d", id)
			b.stock(sku, 10)
			n := orders.NewOrder{ID: id, Currency: "EUR", Amount: 1000, Items: []orders.Item{{SKU: sku, Quantity: 3, Price: 100}}}
			if state.make(b, n) != id {
				t.Fatalf("%s: another id", state.name)
			}
			before := b.picture(id, sku)
			answer := strings.ReplaceAll(verb.do(b, id), fmt.Sprint(id), "<id>")
			after := b.picture(id, sku)
			if after == before {
				after = "nothing changed"
			}
			fmt.Fprintf(&got, "%s: %s\n    %s\n", state.name, answer, after)
			if state.name == "unknown" {
				// Its state is a violation by itself. Gone, it leaves the rest to the audit.
				for _, table := range []string{"order_items", "stock_ledger", "order_events", "payments", "refunds", "outbox"} {
					b.db.Exec(t, "DELETE FROM "+table+" WHERE order_id = ?", id)
				}
				b.db.Exec(t, "DELETE FROM orders WHERE id = ?", id)
				b.db.Exec(t, "DELETE FROM stock WHERE sku = ?", sku)
			}
		}
		if b.wantClean(); t.Failed() {
			t.Fatalf("after %s", verb.name)
		}
	}
	const file = "testdata/verbs.golden"
	if *update {
		if err := os.WriteFile(file, []byte(got.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	wantLines, gotLines := strings.Split(string(want), "\n"), strings.Split(got.String(), "\n")
	if len(wantLines) != len(gotLines) {
		t.Errorf("%d lines, want %d as in %s", len(gotLines), len(wantLines), file)
	}
	section := ""
	for i := range min(len(wantLines), len(gotLines)) {
		if strings.HasPrefix(wantLines[i], "== ") {
			section = wantLines[i]
		}
		if wantLines[i] != gotLines[i] {
			t.Errorf("%s\n got  %s\n want %s", section, gotLines[i], wantLines[i])
		}
	}
}
