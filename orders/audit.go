package orders

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// AuditOptions narrows an audit.
type AuditOptions struct {
	// Grace is how long after its deadline an unpaid order is still no violation of I3: the message path needs moments, reconcile a
	// night. Default 1 minute.
	Grace time.Duration
	// Limit bounds the violations that are listed per check; all are counted. Default 100.
	Limit int
	// MinID leaves out orders with smaller ids in the checks that are about single orders; sums over stock are over all orders always.
	// Default: none is left out.
	MinID int64
}

// Violation is one row that breaks an invariant: of an order (OrderID), or of a SKU.
type Violation struct {
	OrderID int64  `json:"order_id,string,omitempty"`
	SKU     string `json:"sku,omitempty"`
	Detail  string `json:"detail"`
}

// Check is the result of one named query of an audit.
type Check struct {
	Invariant  string      `json:"invariant"` // I1 to I6, I8 of the design
	Name       string      `json:"name"`
	Says       string      `json:"says"`       // what the check holds, in a sentence
	Rows       int64       `json:"rows"`       // how many rows were looked at
	Violations int64       `json:"violations"` // 0: it holds
	Examples   []Violation `json:"examples,omitempty"`
}

// auditQuery is one check. rows counts what is looked at; broken selects (order id, SKU, detail) of every violation. Both may name :min,
// the smallest order id looked at, and :late, the instant before which deadlines have to be dealt with.
type auditQuery struct {
	invariant, name, says string
	rows, broken          string
}

// The queries are plain set logic over the tables; they take no locks and may run on a replica.
var auditQueries = []auditQuery{
	{
		"I1", "accepted_payment_is_kept", "every order with an accepted payment is paid, not cancelled",
		"SELECT COUNT(*) FROM payments WHERE outcome = 'accepted' AND order_id >= :min",
		`SELECT o.id, NULL, CONCAT(o.status, ', cancelled at ', COALESCE(o.cancelled_at, 'no time'), ', though payment ', p.gateway, ':', p.transaction_id, ' was accepted at ', p.received_at)
			FROM orders o JOIN payments p ON p.order_id = o.id WHERE o.status <> 'paid' AND p.outcome = 'accepted' AND o.id >= :min`,
	},
	{
		"I1", "paid_by_one_payment", "every paid order has exactly one accepted payment",
		"SELECT COUNT(*) FROM orders WHERE status = 'paid' AND id >= :min",
		`SELECT o.id, NULL, CONCAT('paid with ', COUNT(p.order_id), ' accepted payments')
			FROM orders o LEFT JOIN payments p ON p.order_id = o.id AND p.outcome = 'accepted' WHERE o.status = 'paid' AND o.id >= :min
			GROUP BY o.id HAVING COUNT(p.order_id) <> 1`,
	},
	{
		"I2", "reserved_is_sum_of_unpaid", "per SKU, reserved is the sum over unpaid orders",
		"SELECT COUNT(*) FROM stock",
		`SELECT NULL, s.sku, CONCAT('reserved is ', s.reserved, ', unpaid orders hold ', COALESCE(w.quantity, 0))
			FROM stock s LEFT JOIN (SELECT i.sku, SUM(i.quantity) AS quantity FROM order_items i JOIN orders o ON o.id = i.order_id WHERE o.status = 'unpaid' GROUP BY i.sku) w ON w.sku = s.sku
			WHERE s.reserved <> COALESCE(w.quantity, 0)`,
	},
	{
		"I2", "sold_is_sum_of_paid", "per SKU, sold is the sum over paid orders, those included that were purged and are carried forward in the ledger",
		"SELECT COUNT(*) FROM stock",
		`SELECT NULL, s.sku, CONCAT('sold is ', s.sold, ', paid orders have ', COALESCE(w.quantity, 0), ', carried forward ', COALESCE(c.quantity, 0))
			FROM stock s LEFT JOIN (SELECT i.sku, SUM(i.quantity) AS quantity FROM order_items i JOIN orders o ON o.id = i.order_id WHERE o.status = 'paid' GROUP BY i.sku) w ON w.sku = s.sku
			LEFT JOIN stock_ledger c ON c.order_id = 0 AND c.sku = s.sku AND c.kind = 'sell'
			WHERE s.sold <> COALESCE(w.quantity, 0) + COALESCE(c.quantity, 0)`,
	},
	{
		"I2", "available_is_the_rest", "per limited SKU, available = adjustments - reserved - sold",
		"SELECT COUNT(*) FROM stock WHERE available IS NOT NULL",
		`SELECT NULL, s.sku, CONCAT('available is ', s.available, ', adjustments ', COALESCE(a.quantity, 0), ' - reserved ', s.reserved, ' - sold ', s.sold)
			FROM stock s LEFT JOIN (SELECT sku, SUM(quantity) AS quantity FROM stock_ledger WHERE kind = 'adjust' GROUP BY sku) a ON a.sku = s.sku
			WHERE s.available IS NOT NULL AND s.available <> COALESCE(a.quantity, 0) - s.reserved - s.sold`,
	},
	{
		"I2", "each_move_once", "an order's ledger has reserve for every item, then sell if it is paid and release if it is cancelled, of the same quantity, and nothing else",
		"SELECT COUNT(*) FROM order_items WHERE order_id >= :min",
		`SELECT o.id, i.sku, CONCAT(o.status, ': item ', i.quantity, ', reserve ', COALESCE(r.quantity, 0), ', release ', COALESCE(b.quantity, 0), ', sell ', COALESCE(l.quantity, 0))
			FROM orders o JOIN order_items i ON i.order_id = o.id
			LEFT JOIN stock_ledger r ON r.order_id = i.order_id AND r.sku = i.sku AND r.kind = 'reserve'
			LEFT JOIN stock_ledger b ON b.order_id = i.order_id AND b.sku = i.sku AND b.kind = 'release'
			LEFT JOIN stock_ledger l ON l.order_id = i.order_id AND l.sku = i.sku AND l.kind = 'sell'
			WHERE o.id >= :min AND NOT (COALESCE(r.quantity, 0) = i.quantity
				AND COALESCE(b.quantity, 0) = CASE o.status WHEN 'cancelled' THEN i.quantity ELSE 0 END
				AND COALESCE(l.quantity, 0) = CASE o.status WHEN 'paid' THEN i.quantity ELSE 0 END)
			UNION ALL
			SELECT m.order_id, m.sku, CONCAT(m.kind, ' of ', m.quantity, ' without an item')
			FROM stock_ledger m LEFT JOIN order_items i ON i.order_id = m.order_id AND i.sku = m.sku
			WHERE m.kind <> 'adjust' AND m.order_id >= :min AND m.order_id > 0 AND i.order_id IS NULL`,
	},
	{
		"I3", "overdue_is_cancelled", "no order is unpaid past its deadline, unless it is held or parked",
		"SELECT COUNT(*) FROM orders WHERE deadline_at < :late AND id >= :min",
		`SELECT o.id, NULL, CONCAT('unpaid, its deadline was ', o.deadline_at)
			FROM orders o LEFT JOIN parked p ON p.what = 'order' AND p.ref = CONVERT(o.id USING utf8mb4) COLLATE utf8mb4_bin AND p.state <> 'retried'
			WHERE o.status = 'unpaid' AND o.deadline_at < :late AND o.id >= :min AND (o.hold_until IS NULL OR o.hold_until < :late) AND p.id IS NULL`,
	},
	{
		"I4", "money_has_one_home", "every late, duplicate or mismatched payment is refunded whole, an accepted one by what exceeds the order, and no refund is without its payment",
		"SELECT COUNT(*) FROM payments WHERE order_id >= :min",
		`SELECT p.order_id, NULL, CONCAT('payment ', p.gateway, ':', p.transaction_id, ' (', p.outcome, ') of ', p.amount, ' has a refund of ', COALESCE(r.amount, 0), ' ', COALESCE(r.currency, ''))
			FROM payments p LEFT JOIN orders o ON o.id = p.order_id
			LEFT JOIN refunds r ON r.gateway = p.gateway AND r.transaction_id = p.transaction_id
			WHERE p.order_id >= :min AND NOT (
				(p.outcome <> 'accepted' AND r.amount IS NOT NULL AND r.amount = p.amount AND r.currency = p.currency AND r.order_id = p.order_id)
				OR (p.outcome = 'accepted' AND o.id IS NOT NULL AND p.currency = o.currency AND p.amount - COALESCE(r.amount, 0) = o.amount
					AND (r.amount IS NULL OR r.currency = p.currency AND r.order_id = p.order_id)))
			UNION ALL
			SELECT r.order_id, NULL, CONCAT('refund of ', r.amount, ' for payment ', r.gateway, ':', r.transaction_id, ', which is not there')
			FROM refunds r LEFT JOIN payments p ON p.gateway = r.gateway AND p.transaction_id = r.transaction_id
			WHERE r.order_id >= :min AND p.order_id IS NULL`,
	},
	{
		"I5", "not_before_deadline", "no order was cancelled by timeout before its deadline, or without one",
		"SELECT COUNT(*) FROM orders WHERE CAST(cancel_reason AS BINARY) = 'timeout' AND id >= :min",
		`SELECT id, NULL, CONCAT('cancelled at ', COALESCE(cancelled_at, 'no time'), ', deadline ', COALESCE(deadline_at, 'none'))
			FROM orders WHERE CAST(cancel_reason AS BINARY) = 'timeout' AND id >= :min AND (deadline_at IS NULL OR cancelled_at < deadline_at)`,
	},
	{
		"I6", "outbox_row_exists", "every unpaid order with a deadline has its outbox row",
		"SELECT COUNT(*) FROM orders WHERE status = 'unpaid' AND deadline_at IS NOT NULL AND id >= :min",
		`SELECT o.id, NULL, CONCAT('unpaid, deadline ', o.deadline_at, ', and no outbox row')
			FROM orders o LEFT JOIN outbox b ON b.order_id = o.id WHERE o.status = 'unpaid' AND o.deadline_at IS NOT NULL AND o.id >= :min AND b.order_id IS NULL`,
	},
	{
		"I8", "one_final_event", "every final order has exactly one final event, of its own kind, and an unpaid order none",
		"SELECT COUNT(*) FROM orders WHERE id >= :min",
		`SELECT o.id, NULL, CONCAT(o.status, ' with ', SUM(COALESCE(e.kind = 'paid', 0)), ' paid and ', SUM(COALESCE(e.kind = 'cancelled', 0)), ' cancelled events')
			FROM orders o LEFT JOIN order_events e ON e.order_id = o.id AND e.kind IN ('paid', 'cancelled') WHERE o.id >= :min GROUP BY o.id, o.status
			HAVING SUM(COALESCE(e.kind = 'paid', 0)) <> (o.status = 'paid') OR SUM(COALESCE(e.kind = 'cancelled', 0)) <> (o.status = 'cancelled')`,
	},
	{
		"I8", "state_fits_instants", "the state is one of the three, and fits paid_at, cancelled_at and cancel_reason",
		"SELECT COUNT(*) FROM orders WHERE id >= :min",
		`SELECT id, NULL, CONCAT('state ', status, ', paid_at ', COALESCE(paid_at, 'none'), ', cancelled_at ', COALESCE(cancelled_at, 'none'), ', reason ', COALESCE(cancel_reason, 'none'))
			FROM orders WHERE id >= :min AND NOT ((status = 'unpaid' AND paid_at IS NULL AND cancelled_at IS NULL AND cancel_reason IS NULL)
				OR (status = 'paid' AND paid_at IS NOT NULL AND cancelled_at IS NULL AND cancel_reason IS NULL)
				OR (status = 'cancelled' AND paid_at IS NULL AND cancelled_at IS NOT NULL AND cancel_reason IS NOT NULL))`,
	},
}

// Beginner is a pool or one connection of it: an [sql.DB] or an [sql.Conn].
type Beginner interface {
	BeginTx(ctx context.Context, options *sql.TxOptions) (*sql.Tx, error)
}

// Audit runs every check on db, which may be the primary's pool or a replica's, at one consistent snapshot: the sums would not fit each
// other if orders moved between two queries. It reads whole tables. An error means that the audit could not be made, not that an
// invariant is broken; that is for the caller to see in Violations. Behind a name with several servers give it one connection of the pool.
func Audit(ctx context.Context, db Beginner, options AuditOptions) ([]Check, error) {
	if options.Grace == 0 {
		options.Grace = time.Minute
	}
	if options.Limit == 0 {
		options.Limit = 100
	}
	if options.Grace < 0 || options.Limit < 0 {
		return nil, invalid("audit with grace %s and limit %d; both must be positive", options.Grace, options.Limit)
	}
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("audit: begin: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // nothing was written
	t := &txn{executor: tx}
	if err := t.readNow(ctx); err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	late := t.now.Add(-options.Grace)
	checks := make([]Check, 0, len(auditQueries))
	for _, q := range auditQueries {
		c, err := t.check(ctx, q, options, late)
		if err != nil {
			return nil, fmt.Errorf("audit: check %s: %w", q.name, err)
		}
		checks = append(checks, c)
	}
	return checks, nil
}

func (t *txn) check(ctx context.Context, q auditQuery, options AuditOptions, late time.Time) (Check, error) {
	c := Check{Invariant: q.invariant, Name: q.name, Says: q.says}
	query, args := bind(q.rows, options.MinID, late)
	if err := t.QueryRowContext(ctx, query, args...).Scan(&c.Rows); err != nil {
		return Check{}, err
	}
	query, args = bind(q.broken, options.MinID, late)
	err := t.each(ctx, query, args, func(rows *sql.Rows) error {
		var v Violation
		var id sql.NullInt64
		var sku, detail sql.NullString
		if err := rows.Scan(&id, &sku, &detail); err != nil {
			return err
		}
		if c.Violations++; c.Violations <= int64(options.Limit) {
			v.OrderID, v.SKU, v.Detail = id.Int64, sku.String, detail.String
			c.Examples = append(c.Examples, v)
		}
		return nil
	})
	return c, err
}

// bind replaces the names :min and :late by question marks, in order.
func bind(query string, minID int64, late time.Time) (string, []any) {
	var text []byte
	var args []any
	for i := 0; i < len(query); {
		switch {
		case hasPrefixAt(query, i, ":min"):
			text, args = append(text, '?'), append(args, minID)
			i += len(":min")
		case hasPrefixAt(query, i, ":late"):
			text, args = append(text, '?'), append(args, at(late))
			i += len(":late")
		default:
			text = append(text, query[i])
			i++
		}
	}
	return string(text), args
}

func hasPrefixAt(s string, i int, prefix string) bool {
	return len(s)-i >= len(prefix) && s[i:i+len(prefix)] == prefix
}
