package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

// Get reads one order with its items, at one consistent instant; [ErrNotFound] where there is none.
func (s *Store) Get(ctx context.Context, id int64) (_ Order, err error) {
	tx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true})
	if err != nil {
		return Order{}, fmt.Errorf("read order %d: %w", id, err)
	}
	defer func() { _ = tx.Rollback() }() // nothing was written
	o, err := readOrder(ctx, tx, id)
	if err != nil {
		return Order{}, fmt.Errorf("read order %d: %w", id, err)
	}
	err = each(ctx, tx, "SELECT sku, quantity, price FROM order_items WHERE order_id = ? ORDER BY sku", []any{id}, func(rows *sql.Rows) error {
		var it Item
		if err := rows.Scan(&it.SKU, &it.Quantity, &it.Price); err != nil {
			return err
		}
		o.Items = append(o.Items, it)
		return nil
	})
	if err != nil {
		return Order{}, fmt.Errorf("read items of order %d: %w", id, err)
	}
	return o, nil
}

// readOrder reads an order without its items; [ErrNotFound] where there is none.
func readOrder(ctx context.Context, db executor, id int64) (Order, error) {
	o := Order{ID: id, Items: []Item{}}
	var deadline, hold, created, paid, cancelled instant
	var holdReason, cancelReason sql.NullString
	var grace int64
	err := db.QueryRowContext(ctx, `SELECT channel, payment_method, user_id, currency, amount, status, CAST(deadline_at AS CHAR), grace_ms, CAST(hold_until AS CHAR), hold_reason,
		CAST(created_at AS CHAR), CAST(paid_at AS CHAR), CAST(cancelled_at AS CHAR), cancel_reason FROM orders WHERE id = ?`, id).
		Scan(&o.Channel, &o.PaymentMethod, &o.UserID, &o.Currency, &o.Amount, &o.Status, &deadline, &grace, &hold, &holdReason, &created, &paid, &cancelled, &cancelReason)
	if errors.Is(err, sql.ErrNoRows) {
		return Order{}, ErrNotFound
	}
	if err != nil {
		return Order{}, err
	}
	o.promise(deadline, time.Duration(grace)*time.Millisecond)
	o.HoldUntil, o.PaidAt, o.CancelledAt = hold.pointer(), paid.pointer(), cancelled.pointer()
	o.CreatedAt, o.HoldReason, o.CancelReason = created.time, holdReason.String, cancelReason.String
	return o, nil
}
