package orders

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"gorm.io/gorm"
)

// MaxKey is the length of an idempotency key in bytes, at most.
const MaxKey = 128

// PlaceOnce is Place for callers that cannot know whether their last try arrived. The key, 1 to 128 visible ASCII characters, stands for
// one request, and request is a hash of what was asked. Key and order commit together: of concurrent calls with one key, one places the
// order and the others give the same answer, with repeated true. The answer to a repetition is the first one, from what never changes:
// unpaid, with the deadline of the beginning, whatever has become of the order since. An order that was refused leaves no key behind.
//
// Errors: those of Place, and [ErrKeyReused]; [ErrNotFound] where the order of the key has been deleted.
func (s *Store) PlaceOnce(ctx context.Context, key string, request [32]byte, n NewOrder) (placed Order, repeated bool, err error) {
	err = s.inTx(ctx, "place order", func(ctx context.Context, t *txn) (err error) {
		placed, repeated, err = s.placeOnce(ctx, t, key, request, n)
		return err
	})
	if err != nil {
		return Order{}, false, err
	}
	return placed, repeated, nil
}

// PlaceOnceTx is PlaceOnce in the caller's transaction.
func (s *Store) PlaceOnceTx(ctx context.Context, tx *gorm.DB, key string, request [32]byte, n NewOrder) (placed Order, repeated bool, err error) {
	err = s.joinTx(ctx, tx, "place order", func(ctx context.Context, t *txn) (err error) {
		placed, repeated, err = s.placeOnce(ctx, t, key, request, n)
		return err
	})
	if err != nil {
		return Order{}, false, err
	}
	return placed, repeated, nil
}

func (s *Store) placeOnce(ctx context.Context, t *txn, key string, request [32]byte, n NewOrder) (Order, bool, error) {
	if err := checkKey(key); err != nil {
		return Order{}, false, err
	}
	given := n.ID != 0
	if !given {
		n.ID = NewID()
	}
	// The key comes before everything else: whoever has the same one waits here, with no other lock in hand, until it is committed or gone.
	_, err := t.exec(ctx, "INSERT INTO idempotency_keys (idempotency_key, request_hash, order_id, created_at) VALUES (?, ?, ?, ?)", key, request[:], n.ID, at(t.now))
	if number(err) == errDuplicateKey {
		o, err := t.placedBefore(ctx, key, request)
		return o, true, err
	}
	if err != nil {
		return Order{}, false, fmt.Errorf("write idempotency key: %w", err)
	}
	o, err := s.place(ctx, t, n)
	if !given && errors.Is(err, ErrExists) {
		return Order{}, false, fmt.Errorf("the id %d was drawn twice: %w", n.ID, errAgain)
	}
	return o, false, err
}

func checkKey(key string) error {
	if len(key) == 0 || len(key) > MaxKey {
		return invalid("the idempotency key has %d characters; 1 to %d are allowed", len(key), MaxKey)
	}
	for i := range len(key) {
		if key[i] <= ' ' || key[i] > '~' {
			return invalid("the idempotency key %q has other than visible ASCII characters", key)
		}
	}
	return nil
}

// placedBefore gives the answer that the first request with the key got. It reads with shared locks: an old snapshot of the caller's may
// not show the rows, and the failed insert holds such a lock on the key already, so that two who asked for more would deadlock.
func (t *txn) placedBefore(ctx context.Context, key string, request [32]byte) (Order, error) {
	var hash []byte
	var o Order
	err := t.QueryRowContext(ctx, "SELECT request_hash, order_id FROM idempotency_keys WHERE idempotency_key = ? LOCK IN SHARE MODE", key).Scan(&hash, &o.ID)
	if errors.Is(err, sql.ErrNoRows) {
		return Order{}, fmt.Errorf("the idempotency key is gone: %w", errAgain)
	}
	if err != nil {
		return Order{}, fmt.Errorf("read idempotency key: %w", err)
	}
	if !bytes.Equal(hash, request[:]) {
		return Order{}, fmt.Errorf("key %q belongs to order %d: %w", key, o.ID, ErrKeyReused)
	}

	o.Status, o.Items = Unpaid, []Item{}
	var created instant
	var grace int64
	err = t.QueryRowContext(ctx, "SELECT channel, payment_method, user_id, currency, amount, grace_ms, CAST(created_at AS CHAR) FROM orders WHERE id = ? LOCK IN SHARE MODE", o.ID).
		Scan(&o.Channel, &o.PaymentMethod, &o.UserID, &o.Currency, &o.Amount, &grace, &created)
	if errors.Is(err, sql.ErrNoRows) {
		return Order{}, fmt.Errorf("order %d of the idempotency key: %w", o.ID, ErrNotFound)
	}
	if err != nil {
		return Order{}, fmt.Errorf("read order %d: %w", o.ID, err)
	}
	o.CreatedAt = created.time
	err = t.each(ctx, "SELECT sku, quantity, price FROM order_items WHERE order_id = ? ORDER BY sku LOCK IN SHARE MODE", []any{o.ID}, func(rows *sql.Rows) error {
		var it Item
		if err := rows.Scan(&it.SKU, &it.Quantity, &it.Price); err != nil {
			return err
		}
		o.Items = append(o.Items, it)
		return nil
	})
	if err != nil {
		return Order{}, fmt.Errorf("read items of order %d: %w", o.ID, err)
	}
	// The deadline of the beginning: the order's own may have been extended.
	var detail string
	err = t.QueryRowContext(ctx, "SELECT CAST(detail AS CHAR) FROM order_events WHERE order_id = ? AND kind = ? ORDER BY id LIMIT 1 LOCK IN SHARE MODE", o.ID, EventPlaced).Scan(&detail)
	if err != nil {
		return Order{}, fmt.Errorf("read how order %d was placed: %w", o.ID, err)
	}
	var first struct {
		DeadlineAt *time.Time `json:"deadline_at"`
	}
	if err := json.Unmarshal([]byte(detail), &first); err != nil {
		return Order{}, fmt.Errorf("read how order %d was placed: %w", o.ID, err)
	}
	var deadline instant
	if first.DeadlineAt != nil {
		deadline = at(*first.DeadlineAt)
	}
	o.promise(deadline, time.Duration(grace)*time.Millisecond)
	return o, nil
}

// PurgeKeys deletes up to limit (1 to 500) idempotency keys whose retention is over, the oldest first, and gives how many. The keys are read
// first without locks and deleted by primary key, so that nobody who places an order waits for it.
func (s *Store) PurgeKeys(ctx context.Context, limit int) (int, error) {
	if limit < 1 || limit > maxRows {
		return 0, invalid("purge of %d idempotency keys; allowed are 1 to %d", limit, maxRows)
	}
	var total int64
	err := s.inTx(ctx, "purge idempotency keys", func(ctx context.Context, t *txn) error {
		before := at(t.now.Add(-s.cfg.KeyRetention))
		var old []string
		err := t.each(ctx, "SELECT idempotency_key FROM idempotency_keys FORCE INDEX (idempotency_keys_by_age) WHERE created_at < ? ORDER BY created_at LIMIT ?", []any{before, limit},
			func(rows *sql.Rows) error {
				var key string
				if err := rows.Scan(&key); err != nil {
					return err
				}
				old = append(old, key)
				return nil
			})
		if err != nil || len(old) == 0 {
			total = 0
			return err
		}
		slices.Sort(old) // two relays that purge at once take the same order
		total, err = t.exec(ctx, "DELETE k FROM idempotency_keys k FORCE INDEX (PRIMARY) WHERE k.idempotency_key IN ("+marks(len(old))+") AND k.created_at < ?", append(anys(old), before)...)
		return err
	})
	return int(total), err
}
