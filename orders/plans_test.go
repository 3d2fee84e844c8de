package orders_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/orders"
)

const (
	manyOrders = 200_000
	manySKUs   = 1000
	manyDue    = 4000 // orders 1 to manyDue are unpaid and overdue
)

// fill makes 200,000 orders with two items each, of 1,000 SKUs, as the verbs would have left them: the first are overdue, then 36,000
// wait for their deadline, and of the rest each third is paid and the others are cancelled. The plans of a small table say nothing
// about those of a large one.
func (b *bundle) fill() {
	b.t.Helper()
	conn, err := b.db.SQL.Conn(b.ctx)
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	run := func(query string) {
		b.t.Helper()
		if _, err := conn.ExecContext(b.ctx, query); err != nil {
			b.t.Fatalf("%.120s: %v", query, err)
		}
	}
	run("SET SESSION unique_checks = 0")
	n := "a.n + 10 * b.n + 100 * c.n + 1000 * d.n + 10000 * e.n + 100000 * f.n"
	run("CREATE TABLE numbers (i BIGINT PRIMARY KEY)")
	run("INSERT INTO numbers SELECT 1 + " + n + " FROM " + digits("f") + " STRAIGHT_JOIN " + digits("e") + " STRAIGHT_JOIN " + digits("d") + " STRAIGHT_JOIN " + digits("c") +
		" STRAIGHT_JOIN " + digits("b") + " STRAIGHT_JOIN " + digits("a") + fmt.Sprintf(" WHERE %s < %d", n, manyOrders))
	const status = "CASE WHEN i <= 40000 THEN 'unpaid' WHEN i % 3 = 0 THEN 'paid' ELSE 'cancelled' END"
	run(fmt.Sprintf(`INSERT INTO orders (id, channel, user_id, currency, amount, status, deadline_at, created_at, paid_at, cancelled_at, cancel_reason)
		SELECT i, 'web', CONCAT('u', i), 'EUR', 1000, %s, IF(i <= %d, UTC_TIMESTAMP(3) - INTERVAL (600000000 - 1000 * i) MICROSECOND, UTC_TIMESTAMP(3) + INTERVAL i SECOND), UTC_TIMESTAMP(3),
		IF(i > 40000 AND i %% 3 = 0, UTC_TIMESTAMP(3), NULL), IF(i > 40000 AND i %% 3 <> 0, UTC_TIMESTAMP(3), NULL), IF(i > 40000 AND i %% 3 <> 0, 'by hand', NULL)
		FROM numbers ORDER BY i`, status, manyDue))
	sku := fmt.Sprintf("CONCAT('sku-', LPAD((i * 7 + k.n * 13) %% %d, 4, '0'))", manySKUs)
	two := "(SELECT 0 AS n UNION ALL SELECT 1) k"
	run("INSERT INTO order_items SELECT i, " + sku + ", 1, 500 FROM numbers, " + two + " ORDER BY i")
	run("INSERT INTO stock_ledger SELECT order_id, sku, 'reserve', quantity, UTC_TIMESTAMP(3) FROM order_items ORDER BY order_id, sku")
	run("INSERT INTO stock_ledger SELECT i.order_id, i.sku, IF(o.status = 'paid', 'sell', 'release'), i.quantity, UTC_TIMESTAMP(3) FROM order_items i JOIN orders o ON o.id = i.order_id WHERE o.status <> 'unpaid' ORDER BY 1, 2")
	run("INSERT INTO stock SELECT i.sku, 1000000, SUM(IF(o.status = 'unpaid', quantity, 0)), SUM(IF(o.status = 'paid', quantity, 0)) FROM order_items i JOIN orders o ON o.id = i.order_id GROUP BY i.sku")
	run(fmt.Sprintf(`INSERT INTO outbox (order_id, deliver_at, state, available_at, attempts)
		SELECT id, deadline_at, IF(id <= %d OR id > 40000, 'sent', 'pending'), IF(id <= 4000, UTC_TIMESTAMP(3) + INTERVAL 1 DAY, UTC_TIMESTAMP(3) + INTERVAL IF(id < 10000, -5, 60) SECOND), 0 FROM orders ORDER BY id`, manyDue))
	// Most refunds are done; most tasks wait for their time.
	run("INSERT INTO refunds (gateway, transaction_id, order_id, amount, currency, reason, state, attempts, created_at, available_at) SELECT 'test', CONCAT('t', i), i, 1000, 'EUR', 'late', IF(i <= 41000, 'pending', 'done'), 0, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3) - INTERVAL 5 SECOND FROM numbers WHERE i > 40000 AND i <= 80000")
	run("INSERT INTO gateway_tasks (order_id, kind, attempts, created_at, available_at) SELECT i, 'close', 0, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3) + INTERVAL IF(i <= 41000, -5, 60) SECOND FROM numbers WHERE i > 40000 AND i <= 60000")
	for _, table := range []string{"orders", "order_items", "stock_ledger", "stock", "outbox", "refunds", "gateway_tasks"} {
		run("ANALYZE TABLE " + table)
	}
}

// plan is one row of EXPLAIN.
type plan struct{ table, access, key string }

func (b *bundle) explain(statement string) []plan {
	b.t.Helper()
	verb := "EXPLAIN FORMAT=TRADITIONAL " // a newer MySQL draws a tree by default, which has no columns to look at
	if b.isMariaDB() {
		verb = "EXPLAIN "
	}
	rows, err := b.db.SQL.QueryContext(b.ctx, verb+statement)
	if err != nil {
		b.t.Fatalf("explain %.200s: %v", statement, err)
	}
	defer func() { _ = rows.Close() }()
	columns, err := rows.Columns()
	if err != nil || !slices.Contains(columns, "key") {
		b.t.Fatalf("EXPLAIN gives the columns %v: %v", columns, err)
	}
	var plans []plan
	for rows.Next() {
		values := make([]sql.NullString, len(columns))
		scan := make([]any, len(columns))
		var p plan
		for i := range values {
			scan[i] = &values[i]
		}
		if err := rows.Scan(scan...); err != nil {
			b.t.Fatal(err)
		}
		for i, c := range columns {
			switch c {
			case "table":
				p.table = values[i].String
			case "type":
				p.access = values[i].String
			case "key":
				p.key = values[i].String
			}
		}
		plans = append(plans, p)
	}
	if err := rows.Err(); err != nil {
		b.t.Fatal(err)
	}
	return plans
}

// TestPlansOnAFullDatabase lets the verbs run and explains each statement that they sent, as the server got it, with 1, 100 and 500 ids.
// Every table of ours has to be entered through the index that the statement was written for.
//
// case DB-14
func TestPlansOnAFullDatabase(t *testing.T) {
	t.Parallel()
	b := setup(t)
	// These rows are of no use to a replica, and one that had missed some of them would stop at the first change to one: no session of
	// this test writes to the binlog.
	unlogged, err := mysql.ParseDSN(b.db.DSN)
	if err != nil {
		t.Fatal(err)
	}
	unlogged.Params = map[string]string{"sql_log_bin": "0"}
	b.db.DSN = unlogged.FormatDSN()
	logged := b.db.SQL
	if b.db.SQL, err = sql.Open("mysql", b.db.DSN); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = logged.Close() }()
	// The build alone takes longer than other tests on a slow disk.
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	b.ctx = ctx
	begun := time.Now()
	b.fill()
	t.Logf("filled in %s", time.Since(begun).Round(100*time.Millisecond))
	p := newProxy(t, b.db.DSN)
	store, err := orders.Open(p.dsn, orders.Config{MaxOpenConns: 1, Retention: orders.Retention{Orders: 24 * time.Hour}}) // one session, for its counters
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	reads := func() (n int64) {
		t.Helper()
		rows, err := store.DB().QueryContext(b.ctx, "SHOW SESSION STATUS LIKE 'Handler_read%'")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = rows.Close() }()
		for rows.Next() {
			var name string
			var value int64
			if err := rows.Scan(&name, &value); err != nil {
				t.Fatal(err)
			}
			n += value
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		return n
	}

	next := int64(1)
	take := func(n int64) []int64 {
		ids := make([]int64, n)
		for i := range ids {
			ids[i] = next
			next++
		}
		return ids
	}
	var claim orders.Claim
	var refunds orders.RefundClaim
	var tasks orders.TaskClaim
	var parked []orders.ParkedRow
	type verb struct {
		name  string
		ids   int64
		reads int64 // at most so many rows are read
		do    func(ids []int64) error
	}
	// fresh verbs work on orders that none has touched.
	fresh := map[string]bool{"cancel due": true, "check due": true, "hold": true, "cancel by hand": true, "pay": true, "extend": true, "get": true, "retry a parked message": true}
	cancelAll := func(ids []int64) error {
		out, err := store.CancelDue(b.ctx, text(ids...))
		for _, o := range out {
			if o.Result != orders.ResultCancelled {
				return fmt.Errorf("%+v", o)
			}
		}
		return err
	}
	verbs := []verb{
		{"cancel due", 1, 100, cancelAll},
		{"cancel due", 100, 60 * 100, cancelAll},
		{"cancel due", 500, 40 * 500, cancelAll},
		{"cancel due that are final", 500, 5 * 500, func([]int64) error {
			ids := make([]int64, 500)
			for i := range ids {
				ids[i] = int64(100_000 + 17*i)
			}
			_, err := store.CancelDue(b.ctx, text(ids...))
			return err
		}},
		{"cancel due that do not exist", 500, 5 * 500, func([]int64) error {
			ids := make([]int64, 500)
			for i := range ids {
				ids[i] = int64(manyOrders + 1 + i)
			}
			_, err := store.CancelDue(b.ctx, text(ids...))
			return err
		}},
		{"cancel due that are not due", 100, 10 * 100, func([]int64) error {
			ids := make([]int64, 100)
			for i := range ids {
				ids[i] = int64(20_000 + i)
			}
			_, err := store.CancelDue(b.ctx, text(ids...))
			return err
		}},
		{"check due", 500, 5 * 500, func(ids []int64) error {
			out, err := store.CheckDue(b.ctx, text(ids...))
			for _, o := range out {
				if o.Result != orders.ResultDue {
					return fmt.Errorf("%+v", o)
				}
			}
			return err
		}},
		{"hold", 100, 15 * 100, func(ids []int64) error {
			doubts := make([]orders.Doubt, len(ids))
			for i, id := range ids {
				doubts[i] = orders.Doubt{ID: id, Reason: "asked", Close: true}
			}
			out, err := store.Hold(b.ctx, doubts, holdLimits)
			for _, o := range out {
				if o.Result != orders.ResultHeld {
					return fmt.Errorf("%+v", o)
				}
			}
			return err
		}},
		{"claim refunds", 16, 10 * 16, func([]int64) (err error) {
			refunds, err = store.ClaimRefunds(b.ctx, "test", 16, time.Minute)
			if len(refunds.Rows) != 16 {
				return fmt.Errorf("%d claimed", len(refunds.Rows))
			}
			return err
		}},
		{"refund done", 1, 20, func([]int64) error {
			_, err := store.RefundDone(b.ctx, refunds.Token, refunds.Rows[0], "R")
			return err
		}},
		{"refund retry", 1, 20, func([]int64) error {
			_, err := store.RefundRetry(b.ctx, refunds.Token, refunds.Rows[1], time.Minute, errors.New("x"))
			return err
		}},
		{"refund given up", 1, 20, func([]int64) error {
			_, err := store.RefundGivenUp(b.ctx, refunds.Token, refunds.Rows[2], "x")
			return err
		}},
		{"claim tasks", 16, 10 * 16, func([]int64) (err error) {
			tasks, err = store.ClaimTasks(b.ctx, 16, time.Minute)
			if len(tasks.Rows) != 16 {
				return fmt.Errorf("%d claimed", len(tasks.Rows))
			}
			return err
		}},
		{"task done", 1, 20, func([]int64) error {
			_, err := store.TaskDone(b.ctx, tasks.Token, tasks.Rows[0], "closed")
			return err
		}},
		{"task retry", 1, 20, func([]int64) error {
			_, err := store.TaskRetry(b.ctx, tasks.Token, tasks.Rows[1], time.Minute, errors.New("x"))
			return err
		}},
		{"cancel by hand", 1, 100, func(ids []int64) error {
			_, err := store.Cancel(b.ctx, ids[0], "u1", "why not")
			return err
		}},
		{"pay", 1, 100, func(ids []int64) error {
			_, err := store.RecordPayment(b.ctx, payment(ids[0]))
			return err
		}},
		{"extend", 1, 100, func(ids []int64) error {
			_, err := store.ExtendDeadline(b.ctx, ids[0], time.Now().Add(time.Hour), "support")
			return err
		}},
		{"place", 1, 1000, func([]int64) error {
			n := orders.NewOrder{Currency: "EUR", Amount: 1}
			for i := range 100 {
				n.Items = append(n.Items, orders.Item{SKU: fmt.Sprintf("sku-%04d", i), Quantity: 1})
			}
			_, err := store.Place(b.ctx, n)
			return err
		}},
		{"get", 1, 100, func(ids []int64) error {
			_, err := store.Get(b.ctx, ids[0])
			return err
		}},
		{"claim", 1, 100, func([]int64) (err error) {
			claim, err = store.ClaimOutbox(b.ctx, 1, time.Minute)
			return err
		}},
		{"claim", 500, 6 * 500, func([]int64) (err error) {
			claim, err = store.ClaimOutbox(b.ctx, 500, time.Minute)
			if len(claim.Rows) != 500 {
				return fmt.Errorf("%d claimed", len(claim.Rows))
			}
			return err
		}},
		{"mark sent", 300, 4 * 300, func([]int64) error {
			n, err := store.MarkSent(b.ctx, claim.Token, []orders.Sent{{IDs: claimed(claim)[:300], MessageID: "m", Due: time.Now()}})
			if n != 300 {
				return fmt.Errorf("%d marked", n)
			}
			return err
		}},
		{"mark retry", 100, 4 * 100, func([]int64) error {
			_, err := store.MarkRetry(b.ctx, claim.Token, claimed(claim)[300:400], time.Minute, errors.New("x"))
			return err
		}},
		{"mark parked", 100, 10 * 100, func([]int64) error {
			_, err := store.MarkParked(b.ctx, claim.Token, claimed(claim)[400:], "x")
			return err
		}},
		{"list parked", 50, 5 * 50, func([]int64) (err error) {
			parked, err = store.ListParked(b.ctx, orders.ParkedFilter{Limit: 50})
			if len(parked) != 50 {
				return fmt.Errorf("%d listed", len(parked))
			}
			return err
		}},
		{"list parked in any state, the second page", 50, 8 * 50, func([]int64) (err error) {
			_, err = store.ListParked(b.ctx, orders.ParkedFilter{Limit: 50, After: &parked[49], States: []string{orders.StateParked, orders.StateRetried, orders.StateDiscarded}})
			return err
		}},
		{"retry parked", 1, 60, func([]int64) error {
			r, err := store.RetryParked(b.ctx, parked[0].ID, "ann")
			if !r.Done {
				return fmt.Errorf("%+v", r)
			}
			return err
		}},
		{"retry a parked message", 100, 15 * 100, func(ids []int64) error {
			body, err := orders.EncodeExpiry(orders.Expiry{Due: noon, Orders: text(ids...)})
			if err != nil {
				return err
			}
			if err := store.Park(b.ctx, orders.Parked{What: orders.ParkedMessage, Ref: "m", Reason: "x", Body: body}); err != nil {
				return err
			}
			r, err := store.RetryParked(b.ctx, b.db.Int(t, "SELECT id FROM parked WHERE what = 'message' AND ref = 'm'"), "ann")
			if len(r.Orders) != 100 {
				return fmt.Errorf("%+v", r)
			}
			return err
		}},
		{"discard parked", 1, 30, func([]int64) error {
			_, _, err := store.DiscardParked(b.ctx, parked[1].ID, "ann", "x")
			return err
		}},
		{"read story", 1, 100, func([]int64) error {
			id, err := orders.ParseID(parked[2].Ref)
			if err != nil {
				return err
			}
			s, err := store.ReadStory(b.ctx, id)
			if s.Order == nil || len(s.Parked) != 1 {
				return fmt.Errorf("%+v", s)
			}
			return err
		}},
		{"purge", 500, 8 * 500, func([]int64) error {
			b.db.Exec(t, "UPDATE outbox SET available_at = '2026-01-01' WHERE state = 'sent' AND order_id > 190000")
			n, err := store.PurgeOutbox(b.ctx, 500)
			if n != 500 {
				return fmt.Errorf("%d purged", n)
			}
			return err
		}},
		{"purge orders", 100, 60 * 100, func([]int64) error {
			b.db.Exec(t, "UPDATE orders SET deadline_at = '2026-01-01', paid_at = '2026-01-01' WHERE status = 'paid' AND id BETWEEN 190001 AND 200000")
			b.db.Exec(t, "DELETE FROM outbox WHERE order_id BETWEEN 190001 AND 200000")
			b.db.Exec(t, "INSERT INTO payments (gateway, transaction_id, order_id, currency, amount, received_at, outcome) SELECT 'fill', CONCAT('f', id), id, 'EUR', 1000, created_at, 'accepted' FROM orders WHERE status = 'paid' AND id BETWEEN 100001 AND 200000")
			b.db.Exec(t, "INSERT INTO event_outbox (order_id, sequence, type, at, data, state, available_at, attempts) SELECT i, 1, 'order.placed', UTC_TIMESTAMP(3), '{}', 'sent', UTC_TIMESTAMP(3), 0 FROM numbers WHERE i > 170000")
			b.db.Exec(t, "INSERT INTO order_events (order_id, at, kind, actor) SELECT i, UTC_TIMESTAMP(3), 'placed', 'checkout' FROM numbers WHERE i > 170000")
			b.db.Exec(t, "ANALYZE TABLE payments, event_outbox, order_events")
			n, _, ended, err := store.PurgeOrders(b.ctx, orders.PurgeCursor{}, 100)
			if n != 100 || ended {
				return fmt.Errorf("%d purged, ended %t", n, ended)
			}
			return err
		}},
		{"purge orders, the second page", 100, 60 * 100, func([]int64) error {
			_, next, _, err := store.PurgeOrders(b.ctx, orders.PurgeCursor{}, 1)
			if err != nil {
				return err
			}
			n, _, _, err := store.PurgeOrders(b.ctx, next, 100)
			if n != 100 {
				return fmt.Errorf("%d purged", n)
			}
			return err
		}},
		{"purge parked", 1, 1000, func([]int64) error {
			b.db.Exec(t, "UPDATE parked SET state = 'discarded', last_at = '2026-01-01', handled_at = '2026-01-01' WHERE id = ?", parked[5].ID)
			_, err := store.PurgeParked(b.ctx, 500)
			return err
		}},
		// Counting what waits reads what waits, from the index.
		{"stats", 0, 45_000, func([]int64) error {
			_, err := store.Stats(b.ctx)
			return err
		}},
		{"old outbox rows", 0, 85_000, func([]int64) error {
			_, err := orders.StaleOutbox(b.ctx, store.DB(), time.Second, 100)
			return err
		}},
		// The shape of a page of the nightly scan.
		{"page", 1000, 1100, func([]int64) error {
			const page = "SELECT id, deadline_at FROM orders FORCE INDEX (orders_by_deadline) WHERE status = 'unpaid' AND deadline_at >= ? AND (deadline_at > ? OR id > ?) AND deadline_at < ? ORDER BY deadline_at, id LIMIT 1000"
			var deadline string
			if err := store.DB().QueryRowContext(b.ctx, "SELECT CAST(deadline_at AS CHAR) FROM orders WHERE id = 2000").Scan(&deadline); err != nil {
				return err
			}
			rows, err := store.DB().QueryContext(b.ctx, page, deadline, deadline, 2000, sqlText(time.Now()))
			if err != nil {
				return err
			}
			defer func() { _ = rows.Close() }()
			n := 0
			for rows.Next() {
				n++
			}
			if err := rows.Err(); err != nil {
				return err
			}
			if n != 1000 {
				return fmt.Errorf("a page of %d", n)
			}
			return nil
		}},
	}
	for _, v := range verbs {
		var ids []int64
		if fresh[v.name] {
			ids = take(v.ids)
		}
		before := reads()
		p.seen()
		if err := v.do(ids); err != nil {
			t.Errorf("%s of %d: %v", v.name, v.ids, err)
			continue
		}
		statements := p.seen()
		if n := reads() - before; n > v.reads {
			t.Errorf("%s of %d reads %d rows, want at most %d", v.name, v.ids, n, v.reads)
		} else {
			t.Logf("%s of %d reads %d rows", v.name, v.ids, n)
		}
		explained := 0
		for _, s := range statements {
			if !strings.HasPrefix(s, "SELECT") && !strings.HasPrefix(s, "UPDATE") && !strings.HasPrefix(s, "DELETE") || strings.Contains(s, "information_schema") {
				continue
			}
			for _, got := range b.explain(s) {
				explained++
				wanted := false
				switch got.table {
				case "", "<derived2>", "m":
					wanted = true // no table of ours
				case "orders", "o", "order_items", "stock_ledger", "stock", "s", "payments", "parked":
					wanted = got.key == "PRIMARY" || got.key == "orders_by_deadline" || got.key == "parked_by_state"
					wanted = wanted || got.key == "payments_by_order" || got.key == "parked_by_ref"
				case "d", "i": // what is purged, and its items
					wanted = got.key == "PRIMARY"
				case "p", "k":
					wanted = got.key == "PRIMARY" || got.key == "payments_by_order" || got.key == "parked_by_ref" || got.key == "parked_by_state"
				case "event_outbox":
					wanted = got.key == "PRIMARY" || got.key == "event_outbox_by_order" || got.key == "event_outbox_to_do"
				case "order_events":
					wanted = got.key == "order_events_by_order"
				case "outbox", "b":
					wanted = got.key == "PRIMARY" || got.key == "outbox_to_do"
				case "refunds":
					wanted = got.key == "PRIMARY" || got.key == "refunds_to_do" || got.key == "refunds_by_order"
				case "gateway_tasks":
					wanted = got.key == "PRIMARY" || got.key == "gateway_tasks_to_do"
				default: // <union2,3> and the like: rows that the statement brings along
					wanted = strings.HasPrefix(got.table, "<")
				}
				switch got.access {
				case "ALL", "index":
					wanted = got.table == "" || got.table == "m" || strings.HasPrefix(got.table, "<")
				}
				if !wanted {
					t.Errorf("%s of %d: %s is read by %s on %q\n%.300s", v.name, v.ids, got.table, got.access, got.key, s)
				}
			}
		}
		if explained == 0 {
			t.Errorf("%s of %d: nothing to explain in %q", v.name, v.ids, statements)
		}
	}
	begun = time.Now()
	checks, err := orders.Audit(b.ctx, b.db.SQL, orders.AuditOptions{MinID: manyOrders + 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range checks {
		if c.Violations != 0 && c.Name != "available_is_the_rest" { // the pieces were not adjusted in
			t.Errorf("%s: %d, %+v", c.Name, c.Violations, c.Examples[0])
		}
	}
	t.Logf("audited in %s", time.Since(begun).Round(100*time.Millisecond))
}
