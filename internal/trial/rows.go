package trial

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// Row is what the database has about one order of a run.
type Row struct {
	ID          int64
	Status      orders.Status
	Amount      int64
	DeadlineAt  time.Time // zero: none
	CancelledAt time.Time // zero: not cancelled
	Reason      string    // of the cancel
	SetAside    bool      // held or parked, with a reason
	Cancels     int       // events that say cancelled
	Payments    map[string]PaymentRow
	Reconciled  *ReconciledOrder // nil: reconcile did not cancel it
}

// PaymentRow is one payment of an order, by transaction id, and its refund.
type PaymentRow struct {
	Amount       int64
	Outcome      orders.PaymentOutcome
	Refund       int64 // 0: none
	RefundReason string
	RefundState  string // pending, done, given_up
}

// byTimeout reports whether the order was cancelled at its deadline.
func (r Row) byTimeout() bool {
	return r.Status == orders.Cancelled && r.Reason == orders.ReasonTimeout
}

// byMessage reports whether a message had the order cancelled at its deadline.
func (r Row) byMessage() bool { return r.byTimeout() && r.Reconciled == nil }

// late is the lateness of a cancelled order.
func (r Row) late() time.Duration { return r.CancelledAt.Sub(r.DeadlineAt) }

// layout is how MySQL writes a DATETIME(3).
const layout = "2006-01-02 15:04:05.999"

// ReadRows reads everything about the orders of a run, at one consistent snapshot. minID is smaller than every order id of it: there is no
// key on the channel, and the ids of a run are the newest of the table.
func ReadRows(ctx context.Context, db *sql.DB, run string, minID int64) (map[int64]Row, error) {
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("read the orders of the run: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // nothing was written
	rows := map[int64]Row{}
	err = each(ctx, tx, `SELECT o.id, o.status, o.amount, COALESCE(CAST(o.deadline_at AS CHAR), ''), COALESCE(CAST(o.cancelled_at AS CHAR), ''), COALESCE(o.cancel_reason, ''),
			o.hold_until IS NOT NULL OR EXISTS (SELECT 1 FROM parked p WHERE p.what = 'order' AND p.ref = CAST(o.id AS CHAR) COLLATE utf8mb4_bin),
			(SELECT COUNT(*) FROM order_events e WHERE e.order_id = o.id AND e.kind = 'cancelled')
		FROM orders o WHERE o.id >= ? AND o.channel = ?`, []any{minID, run}, func(scan *sql.Rows) error {
		var r Row
		var deadline, cancelled string
		if err := scan.Scan(&r.ID, &r.Status, &r.Amount, &deadline, &cancelled, &r.Reason, &r.SetAside, &r.Cancels); err != nil {
			return err
		}
		var errs [2]error
		r.DeadlineAt, errs[0] = parse(deadline)
		r.CancelledAt, errs[1] = parse(cancelled)
		r.Payments = map[string]PaymentRow{}
		rows[r.ID] = r
		return errors.Join(errs[:]...)
	})
	if err != nil {
		return nil, fmt.Errorf("read the orders of the run: %w", err)
	}
	err = each(ctx, tx, `SELECT p.order_id, p.transaction_id, p.amount, p.outcome, COALESCE(r.amount, 0), COALESCE(r.reason, ''), COALESCE(r.state, '')
		FROM payments p LEFT JOIN refunds r ON r.gateway = p.gateway AND r.transaction_id = p.transaction_id
		WHERE p.order_id >= ? AND p.gateway = ?`, []any{minID, gateway}, func(scan *sql.Rows) error {
		var id int64
		var transaction string
		var p PaymentRow
		if err := scan.Scan(&id, &transaction, &p.Amount, &p.Outcome, &p.Refund, &p.RefundReason, &p.RefundState); err != nil {
			return err
		}
		if r, ours := rows[id]; ours {
			r.Payments[transaction] = p
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the payments of the run: %w", err)
	}
	err = each(ctx, tx, "SELECT order_id, detail FROM order_events WHERE kind = ? AND order_id >= ?", []any{orders.EventReconciled, minID}, func(scan *sql.Rows) error {
		var o ReconciledOrder
		var text []byte
		if err := scan.Scan(&o.ID, &text); err != nil {
			return err
		}
		var detail struct {
			Run     int64
			Missed  orders.Missed
			Because string
		}
		if err := json.Unmarshal(text, &detail); err != nil {
			return fmt.Errorf("the detail of an event of order %d: %w", o.ID, err)
		}
		o.run, o.Missed, o.Because = detail.Run, detail.Missed, detail.Because
		if r, ours := rows[o.ID]; ours {
			r.Reconciled = &o
			rows[o.ID] = r
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read which orders of the run were reconciled: %w", err)
	}
	return rows, nil
}

func parse(text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	t, err := time.ParseInLocation(layout, text, time.UTC)
	if err != nil {
		return time.Time{}, fmt.Errorf("read instant %q: %w", text, err)
	}
	return t, nil
}

// queryer is a pool or a transaction.
type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func each(ctx context.Context, db queryer, query string, args []any, scan func(*sql.Rows) error) (err error) {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// Counts is the state of a run's orders at one moment.
type Counts struct {
	Unpaid, Paid, ByTimeout, ByHand int64
	// Mean and Max lateness of those cancelled by timeout.
	Mean, Max time.Duration
}

// ReadCounts counts the orders of a run.
func ReadCounts(ctx context.Context, db *sql.DB, run string, minID int64) (Counts, error) {
	var c Counts
	var mean, worst sql.NullFloat64
	err := db.QueryRowContext(ctx, `SELECT COUNT(CASE WHEN status = 'unpaid' THEN 1 END), COUNT(CASE WHEN status = 'paid' THEN 1 END),
			COUNT(CASE WHEN cancel_reason = 'timeout' THEN 1 END), COUNT(CASE WHEN status = 'cancelled' AND cancel_reason <> 'timeout' THEN 1 END),
			AVG(CASE WHEN cancel_reason = 'timeout' THEN TIMESTAMPDIFF(MICROSECOND, deadline_at, cancelled_at) END),
			MAX(CASE WHEN cancel_reason = 'timeout' THEN TIMESTAMPDIFF(MICROSECOND, deadline_at, cancelled_at) END)
		FROM orders WHERE id >= ? AND channel = ?`, minID, run).Scan(&c.Unpaid, &c.Paid, &c.ByTimeout, &c.ByHand, &mean, &worst)
	if err != nil {
		return Counts{}, fmt.Errorf("count the orders of the run: %w", err)
	}
	c.Mean = time.Duration(mean.Float64) * time.Microsecond
	c.Max = time.Duration(worst.Float64) * time.Microsecond
	return c, nil
}

// ClockAhead measures how far the database's clock is ahead of this process's, to about half of a round trip: the best of a few tries.
func ClockAhead(ctx context.Context, db *sql.DB) (time.Duration, error) {
	var ahead time.Duration
	best := time.Duration(-1)
	for range 5 {
		var text string
		before := time.Now()
		if err := db.QueryRowContext(ctx, "SELECT CAST(UTC_TIMESTAMP(3) AS CHAR)").Scan(&text); err != nil {
			return 0, fmt.Errorf("ask the database for the time: %w", err)
		}
		took := time.Since(before)
		now, err := parse(text)
		if err != nil {
			return 0, fmt.Errorf("ask the database for the time: %w", err)
		}
		if best < 0 || took < best {
			best, ahead = took, now.Sub(before.Add(took/2))
		}
	}
	return ahead, nil
}
