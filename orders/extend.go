package orders

import (
	"context"
	"fmt"
	"time"

	"gorm.io/gorm"
)

// Extension is what became of a wish for more time.
type Extension struct {
	// Extended is false where the order was final: Status says which.
	Extended   bool
	Status     Status
	DeadlineAt time.Time // as it stands afterwards; zero where the order has none
}

// ExtendDeadline moves the deadline of an unpaid order to until (cut to milliseconds) and times its outbox row anew; a timed message
// that is on its way finds the order not due. An order that is overdue but not cancelled yet may still be extended. Errors:
// [ErrNotFound]; [ErrInvalid] where until is not later than the present deadline and than now, lies beyond the order's MaxLifetime, or
// the order has no deadline. The same until again is no error and changes nothing.
func (s *Store) ExtendDeadline(ctx context.Context, id int64, until time.Time, actor string) (Extension, error) {
	var x Extension
	err := s.inTx(ctx, fmt.Sprintf("extend deadline of order %d", id), func(ctx context.Context, t *txn) (err error) {
		x, err = s.extend(ctx, t, id, until, actor)
		return err
	})
	return x, err
}

// ExtendDeadlineTx is ExtendDeadline in the caller's transaction.
func (s *Store) ExtendDeadlineTx(ctx context.Context, tx *gorm.DB, id int64, until time.Time, actor string) (Extension, error) {
	var x Extension
	err := s.joinTx(ctx, tx, fmt.Sprintf("extend deadline of order %d", id), func(ctx context.Context, t *txn) (err error) {
		x, err = s.extend(ctx, t, id, until, actor)
		return err
	})
	return x, err
}

func (s *Store) extend(ctx context.Context, t *txn, id int64, until time.Time, actor string) (Extension, error) {
	if err := checkName("actor", actor, true); err != nil {
		return Extension{}, err
	}
	until = until.UTC().Truncate(time.Millisecond)
	found, err := t.lock(ctx, []int64{id})
	if err != nil {
		return Extension{}, err
	}
	o, there := found[id]
	if !there {
		return Extension{}, fmt.Errorf("order %d: %w", id, ErrNotFound)
	}
	if o.status != Unpaid {
		return Extension{Status: o.status, DeadlineAt: o.deadline.time}, nil
	}
	farthest := o.created.time.Add(s.cfg.MaxLifetime)
	switch {
	case !o.deadline.valid:
		return Extension{}, invalid("order %d has no deadline to extend", id)
	case until.Equal(o.deadline.time):
		return Extension{Extended: true, Status: Unpaid, DeadlineAt: until}, nil
	case until.Before(o.deadline.time):
		return Extension{}, invalid("%s is earlier than the deadline of order %d, %s; a deadline that was promised is not shortened", until.Format(time.RFC3339Nano), id, o.deadline.time.Format(time.RFC3339Nano))
	case !until.After(t.now):
		return Extension{}, invalid("%s lies in the past; the database's clock says %s", until.Format(time.RFC3339Nano), t.now.Format(time.RFC3339Nano))
	case until.After(farthest):
		return Extension{}, invalid("%s is later than order %d may live, %s (orders.max_lifetime is %s)", until.Format(time.RFC3339Nano), id, farthest.Format(time.RFC3339Nano), s.cfg.MaxLifetime)
	}
	n, err := t.exec(ctx, "UPDATE orders SET deadline_at = ? WHERE id = ? AND status = 'unpaid' AND deadline_at < ?", at(until), id, at(until))
	if err != nil {
		return Extension{}, err
	}
	if n != 1 {
		return Extension{}, fmt.Errorf("order %d is locked and did not match: %w", id, errAgain)
	}
	if err := t.retime(ctx, []retiming{{orderID: id, deliverAt: until}}); err != nil {
		return Extension{}, err
	}
	e, err := event(id, EventExtended, actor, map[string]any{"from": o.deadline.time, "to": until})
	if err != nil {
		return Extension{}, err
	}
	return Extension{Extended: true, Status: Unpaid, DeadlineAt: until}, t.addEvents(ctx, []Event{e})
}
