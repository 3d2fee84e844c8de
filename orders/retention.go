// What goes after a time, and what stays. An order goes whole or not at all: each check of the audit holds rows of several tables against
// each other, so payments, ledger and story cannot go alone without making it fail, or blind. What remains of a paid order is what it sold,
// carried forward in one row per SKU of the ledger (order 0), so that the sums of the stock still have their proof.
//
// Ids are read first without locks, rows are deleted by primary key in small transactions, and a locked order is passed over: nobody who pays
// or places waits for a purge.

package orders

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Retention says how long rows are kept that nothing needs any longer. Outbox rows and idempotency keys have settings of their own in
// [Config].
type Retention struct {
	// Orders is how long an order is kept after its end and its deadline, whichever is later, with everything that belongs to it: items,
	// ledger, payments, refunds, events. Default 0: for ever.
	Orders time.Duration
	// Events is how long the row of an outgoing event is kept that was sent. Default 7 days.
	Events time.Duration
	// Parked is how long a parked row is kept after somebody has dealt with it. Default 90 days.
	Parked time.Duration
	// Runs is how long a reconcile run that has ended is kept. Default 90 days.
	Runs time.Duration
}

// carriedID is the order of the ledger's rows that carry forward what purged orders sold. No order has it: ids begin at 1.
const carriedID = 0

// PurgeCursor is a place in a purge of orders; the zero value is its beginning.
type PurgeCursor struct {
	section  int // of purgeSections
	deadline time.Time
	id       int64
}

// purgeSections are the parts of the index that final orders stand in.
var purgeSections = []struct {
	status   Status
	deadline bool
}{{Paid, true}, {Paid, false}, {Cancelled, true}, {Cancelled, false}}

// PurgeOrders looks at up to limit (1 to 500) final orders from the cursor on and deletes, whole, those whose end and deadline are longer ago
// than Config.Retention.Orders. It gives how many it deleted and where to go on; ended says that all were looked at. With a retention of 0 it
// does nothing.
//
// An order stays as long as anything needs it: its outbox row is there (see [Store.PurgeOutbox]), a refund is not done, a call to the gateway
// is still to be made, an outgoing event is not sent, or it or a payment of it is parked. So does one that somebody has locked.
//
// A notice about a purged order gets [ErrNotFound], as for one that never was: the retention has to be longer than a gateway repeats its
// notices and a customer may ask for money back.
func (s *Store) PurgeOrders(ctx context.Context, from PurgeCursor, limit int) (purged int, next PurgeCursor, ended bool, err error) {
	if limit < 1 || limit > maxRows {
		return 0, from, false, invalid("purge of %d orders; allowed are 1 to %d", limit, maxRows)
	}
	if s.cfg.Retention.Orders == 0 {
		return 0, from, true, nil
	}
	err = s.inTx(ctx, "purge orders", func(ctx context.Context, t *txn) error {
		purged, next, ended = 0, from, false
		before := t.now.Add(-s.cfg.Retention.Orders)
		old, seen, last, err := t.finalOrders(ctx, from, before, limit)
		if err != nil {
			return fmt.Errorf("read final orders: %w", err)
		}
		next = last
		if seen < limit {
			next = PurgeCursor{section: from.section + 1}
			ended = next.section == len(purgeSections)
		}
		ids, err := t.unneeded(ctx, old, before)
		if err != nil || len(ids) == 0 {
			return err
		}
		purged = len(ids)
		return t.deleteOrders(ctx, ids)
	})
	if err != nil {
		return 0, from, false, err
	}
	return purged, next, ended, nil
}

// finalOrders reads one page of a section by keyset: those to be purged, how many rows it looked at, and the last of them.
func (t *txn) finalOrders(ctx context.Context, from PurgeCursor, before time.Time, limit int) (old []int64, seen int, last PurgeCursor, err error) {
	section := purgeSections[from.section]
	query := "SELECT id, CAST(deadline_at AS CHAR), COALESCE(paid_at, cancelled_at) < ? FROM orders FORCE INDEX (orders_by_deadline) WHERE status = ? AND "
	args := []any{at(before), string(section.status)}
	if section.deadline {
		if from.deadline.IsZero() {
			from.deadline = time.Unix(0, 0)
		}
		query += "deadline_at < ? AND deadline_at >= ? AND (deadline_at > ? OR id > ?) ORDER BY deadline_at, id LIMIT ?"
		args = append(args, at(before), at(from.deadline), at(from.deadline), from.id, limit)
	} else {
		query += "deadline_at IS NULL AND id > ? ORDER BY id LIMIT ?"
		args = append(args, from.id, limit)
	}
	last = from
	err = t.each(ctx, query, args, func(rows *sql.Rows) error {
		var id int64
		var deadline instant
		var past bool
		if err := rows.Scan(&id, &deadline, &past); err != nil {
			return err
		}
		seen++
		last.deadline, last.id = deadline.time, id
		if past {
			old = append(old, id)
		}
		return nil
	})
	return old, seen, last, err
}

// unneeded locks orders, passing over those that are locked, and gives those that may go.
func (t *txn) unneeded(ctx context.Context, ids []int64, before time.Time) ([]int64, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	slices.Sort(ids)
	var locked []int64
	err := t.each(ctx, `SELECT id, status IN ('paid', 'cancelled') AND COALESCE(paid_at, cancelled_at) < ? AND (deadline_at IS NULL OR deadline_at < ?)
		FROM orders FORCE INDEX (PRIMARY) WHERE id IN (`+marks(len(ids))+") ORDER BY id FOR UPDATE SKIP LOCKED", append([]any{at(before), at(before)}, anys(ids)...),
		func(rows *sql.Rows) error {
			var id int64
			var still bool
			if err := rows.Scan(&id, &still); err != nil {
				return err
			}
			if still {
				locked = append(locked, id)
			}
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("lock %d orders: %w", len(ids), err)
	}
	if len(locked) == 0 {
		return nil, nil
	}
	// From here on no payment of theirs can come, and no row of theirs turns from done to open.
	refs := make([]any, len(locked))
	for i, id := range locked {
		refs[i] = FormatID(id)
	}
	in := " IN (" + marks(len(locked)) + ")"
	// A refund that was given up and an event that the broker refused are needed for as long as they are parked: until somebody has retried or
	// discarded them.
	query := `SELECT order_id FROM outbox WHERE order_id` + in + `
		UNION SELECT order_id FROM gateway_tasks WHERE order_id` + in + `
		UNION SELECT order_id FROM refunds FORCE INDEX (refunds_by_order) WHERE order_id` + in + ` AND state = 'pending'
		UNION SELECT order_id FROM event_outbox FORCE INDEX (event_outbox_by_order) WHERE order_id` + in + ` AND state = 'pending'
		UNION SELECT event_outbox.order_id FROM event_outbox FORCE INDEX (event_outbox_by_order)
			JOIN parked k FORCE INDEX (parked_by_ref) ON k.what = 'message' AND k.ref = CONCAT('` + parkedEvent + `', event_outbox.order_id, '-', event_outbox.sequence) AND k.state = 'parked'
			WHERE event_outbox.order_id` + in + ` AND event_outbox.state = 'parked'
		UNION SELECT p.order_id FROM payments p FORCE INDEX (payments_by_order)
			JOIN parked k FORCE INDEX (parked_by_ref) ON k.what = 'payment' AND k.ref = CONCAT(p.gateway, ':', p.transaction_id) AND k.state = 'parked' WHERE p.order_id` + in + `
		UNION SELECT CAST(ref AS SIGNED) FROM parked FORCE INDEX (parked_by_ref) WHERE what = 'order' AND ref` + in + ` AND state = 'parked'`
	var args []any
	for range strings.Count(query, in) - 1 {
		args = append(args, anys(locked)...)
	}
	needed := map[int64]bool{}
	err = t.each(ctx, query, append(args, refs...), func(rows *sql.Rows) error {
		var id int64
		err := rows.Scan(&id)
		needed[id] = true
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read which of %d orders are needed: %w", len(locked), err)
	}
	return slices.DeleteFunc(locked, func(id int64) bool { return needed[id] }), nil
}

// deleteOrders deletes locked orders with everything that belongs to them.
func (t *txn) deleteOrders(ctx context.Context, ids []int64) error {
	in := " IN (" + marks(len(ids)) + ")"
	var money [][2]string
	err := t.each(ctx, "SELECT gateway, transaction_id FROM payments FORCE INDEX (payments_by_order) WHERE order_id"+in+" ORDER BY gateway, transaction_id", anys(ids),
		func(rows *sql.Rows) error {
			var m [2]string
			err := rows.Scan(&m[0], &m[1])
			money = append(money, m)
			return err
		})
	if err != nil {
		return fmt.Errorf("read payments to purge: %w", err)
	}
	for _, m := range money {
		for _, table := range []string{"payments", "refunds"} {
			if _, err := t.exec(ctx, "DELETE FROM "+table+" WHERE gateway = ? AND transaction_id = ?", m[0], m[1]); err != nil {
				return fmt.Errorf("delete from %s: %w", table, err)
			}
		}
	}
	if err := t.carryForward(ctx, ids); err != nil {
		return err
	}
	// An adjustment may have the id of an order for its reference; available is computed from all of them.
	for _, d := range []struct{ table, where string }{
		{"stock_ledger", "order_id" + in + " AND kind <> 'adjust'"},
		{"order_items", "order_id" + in},
	} {
		// The form for several tables is the one that takes an index hint.
		if _, err := t.exec(ctx, "DELETE d FROM "+d.table+" d FORCE INDEX (PRIMARY) WHERE d."+d.where, anys(ids)...); err != nil {
			return fmt.Errorf("delete from %s: %w", d.table, err)
		}
	}
	refs := make([]string, len(ids))
	for i, id := range ids {
		refs[i] = FormatID(id)
	}
	for _, d := range []struct {
		table, query string
		args         []any
	}{
		{"order_events", "SELECT id FROM order_events FORCE INDEX (order_events_by_order) WHERE order_id" + in, anys(ids)},
		{"event_outbox", "SELECT id FROM event_outbox FORCE INDEX (event_outbox_by_order) WHERE order_id" + in, anys(ids)},
		{"parked", "SELECT id FROM parked FORCE INDEX (parked_by_ref) WHERE what = 'order' AND ref" + in, anys(refs)},
	} {
		rows, err := t.readIDs(ctx, d.query, d.args...)
		if err == nil {
			_, err = t.deleteByID(ctx, d.table, rows, "")
		}
		if err != nil {
			return fmt.Errorf("purge %s: %w", d.table, err)
		}
	}
	n, err := t.deleteByID(ctx, "orders", ids, " AND d.status <> 'unpaid'")
	if err == nil && n != len(ids) {
		err = fmt.Errorf("%d of %d locked orders matched: %w", n, len(ids), errAgain)
	}
	return err
}

// carryForward adds what paid orders sold to the row of the ledger that stands for all that were purged before.
func (t *txn) carryForward(ctx context.Context, ids []int64) error {
	type sale struct {
		sku      string
		quantity int64
	}
	var sold []sale
	err := t.each(ctx, `SELECT i.sku, SUM(i.quantity) FROM orders o FORCE INDEX (PRIMARY) JOIN order_items i FORCE INDEX (PRIMARY) ON i.order_id = o.id
		WHERE o.id IN (`+marks(len(ids))+") AND o.status = 'paid' GROUP BY i.sku ORDER BY i.sku", anys(ids),
		func(rows *sql.Rows) error {
			var s sale
			err := rows.Scan(&s.sku, &s.quantity)
			sold = append(sold, s)
			return err
		})
	if err != nil {
		return fmt.Errorf("read what %d orders sold: %w", len(ids), err)
	}
	for _, s := range sold {
		_, err := t.exec(ctx, "INSERT INTO stock_ledger (order_id, sku, kind, quantity, at) VALUES (?, ?, ?, ?, ?) ON DUPLICATE KEY UPDATE quantity = quantity + ?, at = ?",
			carriedID, s.sku, moveSell, s.quantity, at(t.now), s.quantity, at(t.now))
		if err != nil {
			return fmt.Errorf("carry forward %d of %q: %w", s.quantity, s.sku, err)
		}
	}
	return nil
}

func (t *txn) readIDs(ctx context.Context, query string, args ...any) (ids []int64, err error) {
	err = t.each(ctx, query, args, func(rows *sql.Rows) error {
		var id int64
		err := rows.Scan(&id)
		ids = append(ids, id)
		return err
	})
	return ids, err
}

// deleteByID deletes rows by a primary key named id, in its order; also is a further condition on d, or empty.
func (t *txn) deleteByID(ctx context.Context, table string, ids []int64, also string, args ...any) (total int, err error) {
	slices.Sort(ids)
	for part := range slices.Chunk(ids, maxRows) {
		n, err := t.exec(ctx, "DELETE d FROM "+table+" d FORCE INDEX (PRIMARY) WHERE d.id IN ("+marks(len(part))+")"+also, append(anys(part), args...)...)
		if err != nil {
			return 0, fmt.Errorf("delete %d rows of %s: %w", len(part), table, err)
		}
		total += int(n)
	}
	return total, nil
}

// PurgeOutgoing deletes up to limit (1 to 500) rows of events that were sent, whose retention is over, and gives how many.
func (s *Store) PurgeOutgoing(ctx context.Context, limit int) (int, error) {
	return s.purge(ctx, "purge sent events", limit, func(ctx context.Context, t *txn) (int, error) {
		ids, err := t.readIDs(ctx, "SELECT id FROM event_outbox FORCE INDEX (event_outbox_to_do) WHERE state = 'sent' AND available_at <= ? ORDER BY available_at, id LIMIT ?", at(t.now), limit)
		if err != nil {
			return 0, err
		}
		return t.deleteByID(ctx, "event_outbox", ids, " AND d.state = 'sent'")
	})
}

// PurgeParked deletes up to limit (1 to 500) parked rows that were retried or discarded longer ago than the retention, and gives how many. What
// still waits for a person stays, and so does what excuses an order for being unpaid past its deadline. With the row of an order that does
// not exist goes the story of that id, which nothing else would take along.
func (s *Store) PurgeParked(ctx context.Context, limit int) (int, error) {
	return s.purge(ctx, "purge parked rows", limit, func(ctx context.Context, t *txn) (int, error) {
		before := at(t.now.Add(-s.cfg.Retention.Parked))
		var ids, gone []int64
		for _, state := range []string{StateRetried, StateDiscarded} {
			err := t.each(ctx, `SELECT p.id, p.what = 'order' AND o.id IS NULL, p.ref FROM parked p FORCE INDEX (parked_by_state)
				LEFT JOIN orders o ON p.what = 'order' AND o.id = CAST(p.ref AS UNSIGNED)
				WHERE p.state = ? AND p.last_at < ? AND (p.handled_at IS NULL OR p.handled_at < ?) AND (o.id IS NULL OR o.status <> 'unpaid') LIMIT ?`,
				[]any{state, before, before, limit - len(ids)},
				func(rows *sql.Rows) error {
					var id int64
					var orphan bool
					var ref string
					if err := rows.Scan(&id, &orphan, &ref); err != nil {
						return err
					}
					ids = append(ids, id)
					if order, err := strconv.ParseInt(ref, 10, 64); orphan && err == nil {
						gone = append(gone, order)
					}
					return nil
				})
			if err != nil {
				return 0, err
			}
		}
		if len(gone) > 0 {
			events, err := t.readIDs(ctx, `SELECT e.id FROM order_events e FORCE INDEX (order_events_by_order) LEFT JOIN orders o ON o.id = e.order_id
				WHERE e.order_id IN (`+marks(len(gone))+") AND o.id IS NULL AND e.at < ?", append(anys(gone), before)...)
			if err == nil {
				_, err = t.deleteByID(ctx, "order_events", events, "")
			}
			if err != nil {
				return 0, fmt.Errorf("purge events of orders that do not exist: %w", err)
			}
		}
		return t.deleteByID(ctx, "parked", ids, " AND d.state <> 'parked' AND d.last_at < ?", before)
	})
}

// PurgeRuns deletes up to limit (1 to 500) reconcile runs that ended longer ago than the retention, and gives how many. The last night that was
// done stays, since the next one is planned from it, and so does what runs or waits to be resumed.
func (s *Store) PurgeRuns(ctx context.Context, limit int) (int, error) {
	return s.purge(ctx, "purge reconcile runs", limit, func(ctx context.Context, t *txn) (int, error) {
		ids, err := t.readIDs(ctx, `SELECT id FROM reconcile_runs WHERE state <> 'running' AND alone IS NULL AND finished_at < ?
			AND id < (SELECT MAX(id) FROM reconcile_runs WHERE state = 'done' AND kind = 'full') ORDER BY id LIMIT ?`, at(t.now.Add(-s.cfg.Retention.Runs)), limit)
		if err != nil {
			return 0, err
		}
		return t.deleteByID(ctx, "reconcile_runs", ids, "")
	})
}

func (s *Store) purge(ctx context.Context, doing string, limit int, do func(context.Context, *txn) (int, error)) (total int, err error) {
	if limit < 1 || limit > maxRows {
		return 0, invalid("%s: %d at a time; allowed are 1 to %d", doing, limit, maxRows)
	}
	err = s.inTx(ctx, doing, func(ctx context.Context, t *txn) (err error) {
		total, err = do(ctx, t)
		return err
	})
	return total, err
}
