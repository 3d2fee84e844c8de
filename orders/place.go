package orders

import (
	"context"
	"fmt"
	"time"

	"gorm.io/gorm"
)

// Place commits, in one transaction: the order, its items, the reservation of its stock, the outbox row that makes the relay send its
// timed message, and the first event. It talks to the database only. Errors: [ErrInvalid], [ErrExists], a [StockError]; after any other
// the order may or may not exist (a broken COMMIT), so place it again with the same ID: ErrExists then says that it does.
func (s *Store) Place(ctx context.Context, n NewOrder) (Order, error) {
	var placed Order
	err := s.inTx(ctx, "place order", func(ctx context.Context, t *txn) (err error) {
		placed, err = s.place(ctx, t, n)
		return err
	})
	if err != nil {
		return Order{}, err
	}
	return placed, nil
}

// PlaceTx is Place in the caller's transaction: the order exists when the caller commits, and never if not. No timed message is sent
// for a transaction that is rolled back. For errors see the package documentation.
func (s *Store) PlaceTx(ctx context.Context, tx *gorm.DB, n NewOrder) (Order, error) {
	var placed Order
	err := s.joinTx(ctx, tx, "place order", func(ctx context.Context, t *txn) (err error) {
		placed, err = s.place(ctx, t, n)
		return err
	})
	if err != nil {
		return Order{}, err
	}
	return placed, nil
}

func (s *Store) place(ctx context.Context, t *txn, n NewOrder) (Order, error) {
	items, err := sumItems(n.Items)
	if err != nil {
		return Order{}, err
	}
	deadline, err := s.checkNew(n, t.now)
	if err != nil {
		return Order{}, err
	}
	o := Order{
		ID: n.ID, Channel: n.Channel, UserID: n.UserID, Currency: n.Currency, Amount: n.Amount,
		Status: Unpaid, DeadlineAt: deadline.pointer(), CreatedAt: t.now, Items: items,
	}
	if err := t.insertOrder(ctx, &o, deadline); err != nil {
		return Order{}, err
	}
	if len(items) > 0 {
		args := make([]any, 0, 4*len(items))
		moves := make([]move, 0, len(items))
		for _, it := range items {
			args = append(args, o.ID, it.SKU, it.Quantity, it.Price)
			moves = append(moves, move{orderID: o.ID, sku: it.SKU, kind: moveReserve, quantity: it.Quantity})
		}
		if _, err := t.exec(ctx, "INSERT INTO order_items (order_id, sku, quantity, price) VALUES "+tuples(len(items), 4), args...); err != nil {
			return Order{}, fmt.Errorf("write items of order %d: %w", o.ID, err)
		}
		if err := t.addMoves(ctx, moves); err != nil {
			return Order{}, err
		}
	}
	if deadline.valid {
		if err := t.addOutbox(ctx, o.ID, deadline.time, n.Traceparent); err != nil {
			return Order{}, err
		}
	}
	e, err := event(o.ID, EventPlaced, ActorCheckout, map[string]any{"deadline_at": o.DeadlineAt, "amount": FormatID(o.Amount), "currency": o.Currency})
	if err != nil {
		return Order{}, err
	}
	if err := t.addEvents(ctx, []Event{e}); err != nil {
		return Order{}, err
	}
	return o, t.reserve(ctx, items)
}

// insertOrder writes the order row. An id of ours that is taken already is drawn again; the failed statement left nothing behind.
func (t *txn) insertOrder(ctx context.Context, o *Order, deadline instant) error {
	given := o.ID != 0
	for {
		if !given {
			o.ID = NewID()
		}
		_, err := t.exec(ctx, `INSERT INTO orders (id, channel, user_id, currency, amount, status, deadline_at, created_at)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?)`, o.ID, o.Channel, o.UserID, o.Currency, o.Amount, string(Unpaid), deadline, at(t.now))
		switch {
		case err == nil:
			return nil
		case number(err) != errDuplicateKey:
			return fmt.Errorf("write order %d: %w", o.ID, err)
		case given:
			return fmt.Errorf("write order %d: %w", o.ID, ErrExists)
		}
	}
}

// checkNew refuses what can never be placed and gives the deadline; an invalid instant means that there is none.
func (s *Store) checkNew(n NewOrder, now time.Time) (instant, error) {
	if n.ID < 0 {
		return instant{}, invalid("order id %d is negative", n.ID)
	}
	if n.Amount < 0 {
		return instant{}, invalid("amount %d is negative", n.Amount)
	}
	for _, f := range []struct {
		what, is string
		required bool
	}{{"channel", n.Channel, false}, {"user id", n.UserID, false}, {"currency", n.Currency, true}} {
		if err := checkName(f.what, f.is, f.required); err != nil {
			return instant{}, err
		}
	}
	if len(n.Currency) > maxCurrency {
		return instant{}, invalid("currency %q has more than %d characters", n.Currency, maxCurrency)
	}
	switch {
	case n.Timeout < 0:
		return instant{}, invalid("timeout %s is negative", n.Timeout)
	case n.NoDeadline && (n.Timeout != 0 || !n.DeadlineAt.IsZero()):
		return instant{}, invalid("an order without deadline was given one (timeout %s, deadline %s)", n.Timeout, n.DeadlineAt)
	case n.Timeout != 0 && !n.DeadlineAt.IsZero():
		return instant{}, invalid("both a timeout (%s) and a deadline (%s) were given; give one", n.Timeout, n.DeadlineAt)
	case n.NoDeadline:
		return instant{}, nil
	}
	timeout := n.Timeout
	if timeout == 0 {
		timeout = s.cfg.Timeout
	}
	deadline := now.Add(timeout)
	if !n.DeadlineAt.IsZero() {
		deadline = n.DeadlineAt.UTC()
		if deadline.Year() < 1970 {
			return instant{}, invalid("deadline %s lies before 1970", deadline)
		}
	}
	if farthest := now.Add(s.cfg.MaxLifetime); deadline.After(farthest) {
		return instant{}, invalid("deadline %s is later than %s after placing, the longest that is allowed (orders.max_lifetime)", deadline.Format(time.RFC3339Nano), s.cfg.MaxLifetime)
	}
	return at(deadline.Truncate(time.Millisecond)), nil
}

// maxCurrency is the width of the column.
const maxCurrency = 16
