package orders

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode"

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
	deadline, grace, err := s.checkNew(n, t.now)
	if err != nil {
		return Order{}, err
	}
	o := Order{
		ID: n.ID, Channel: n.Channel, PaymentMethod: n.PaymentMethod, UserID: n.UserID, Currency: n.Currency, Amount: n.Amount,
		Status: Unpaid, CreatedAt: t.now, Items: items,
	}
	o.promise(deadline, grace)
	if err := t.insertOrder(ctx, &o, deadline, grace); err != nil {
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
	if err := t.announcePlaced(ctx, o); err != nil {
		return Order{}, err
	}
	return o, t.reserve(ctx, items)
}

// insertOrder writes the order row. An id of ours that is taken already is drawn again; the failed statement left nothing behind.
func (t *txn) insertOrder(ctx context.Context, o *Order, deadline instant, grace time.Duration) error {
	given := o.ID != 0
	sequence := 0
	if t.outgoing {
		sequence = placedSequence
	}
	for {
		if !given {
			o.ID = NewID()
		}
		_, err := t.exec(ctx, `INSERT INTO orders (id, channel, payment_method, user_id, currency, amount, status, deadline_at, grace_ms, event_sequence, created_at)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			o.ID, o.Channel, o.PaymentMethod, o.UserID, o.Currency, o.Amount, string(Unpaid), deadline, grace.Milliseconds(), sequence, at(t.now))
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

// checkNew refuses what can never be placed and gives the deadline, and how much of the time before it is grace; an invalid instant means that
// there is no deadline.
func (s *Store) checkNew(n NewOrder, now time.Time) (deadline instant, grace time.Duration, err error) {
	if n.ID < 0 {
		return instant{}, 0, invalid("order id %d is negative", n.ID)
	}
	if n.Amount < 0 {
		return instant{}, 0, invalid("amount %d is negative", n.Amount)
	}
	for _, f := range []struct {
		what, is string
		required bool
	}{{"channel", n.Channel, false}, {"payment method", n.PaymentMethod, false}, {"user id", n.UserID, false}, {"currency", n.Currency, true}, {"traceparent", n.Traceparent, false}} {
		if err := checkName(f.what, f.is, f.required); err != nil {
			return instant{}, 0, err
		}
	}
	if strings.ContainsFunc(n.Traceparent, func(r rune) bool { return r > unicode.MaxASCII }) {
		return instant{}, 0, invalid("traceparent %q has characters that are not ASCII", n.Traceparent)
	}
	if len(n.Currency) > maxCurrency {
		return instant{}, 0, invalid("currency %q has more than %d characters", n.Currency, maxCurrency)
	}
	switch {
	case n.Timeout < 0:
		return instant{}, 0, invalid("timeout %s is negative", n.Timeout)
	case n.NoDeadline && (n.Timeout != 0 || !n.DeadlineAt.IsZero()):
		return instant{}, 0, invalid("an order without deadline was given one (timeout %s, deadline %s)", n.Timeout, n.DeadlineAt)
	case n.Timeout != 0 && !n.DeadlineAt.IsZero():
		return instant{}, 0, invalid("both a timeout (%s) and a deadline (%s) were given; give one", n.Timeout, n.DeadlineAt)
	case n.NoDeadline:
		return instant{}, 0, nil
	}
	end := now.Add(n.Timeout)
	switch {
	case !n.DeadlineAt.IsZero():
		end = n.DeadlineAt.UTC()
		if end.Year() < 1970 {
			return instant{}, 0, invalid("deadline %s lies before 1970", end)
		}
	case n.Timeout == 0 && n.Amount == 0:
		return instant{}, 0, nil // nothing will ever be paid for it, so it must not be cancelled as unpaid
	case n.Timeout == 0:
		p := s.cfg.policyOf(n.Channel, n.PaymentMethod)
		if p.Never {
			return instant{}, 0, nil
		}
		end, grace = now.Add(p.Timeout+p.Grace), p.Grace
	}
	if farthest := now.Add(s.cfg.MaxLifetime); end.After(farthest) {
		return instant{}, 0, invalid("deadline %s is later than %s after placing, the longest that is allowed (orders.max_lifetime)", end.Format(time.RFC3339Nano), s.cfg.MaxLifetime)
	}
	return at(end.Truncate(time.Millisecond)), grace, nil
}

// maxCurrency is the width of the column.
const maxCurrency = 16
