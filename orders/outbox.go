package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"
)

// States of an outbox row.
const (
	outboxPending = "pending"
	outboxSent    = "sent"
	outboxParked  = "parked"
)

// An outbox row has two times. available_at says when it may be claimed: a claim, a failed send and a stopping relay move it on, so that of a
// broker that refuses for hours it tells nothing. pending_since says since when the row waits; it is written where the row becomes pending, and
// none of these touch it. It is cleared where the row is done with, so that one that a build without the column makes pending again has its age
// from available_at: that is what NULL means. Both are in the index outbox_to_do, so that the age of what waits is read from the index alone.

// pendingSince gives it, in SQL.
const pendingSince = "COALESCE(pending_since, available_at)"

// addOutbox writes the row that makes the relay send the order's timed message.
func (t *txn) addOutbox(ctx context.Context, id int64, deliverAt time.Time, traceparent string) error {
	var trace any
	if traceparent != "" {
		trace = traceparent
	}
	_, err := t.exec(ctx, `INSERT INTO outbox (order_id, deliver_at, state, available_at, pending_since, attempts, traceparent) VALUES (?, ?, 'pending', ?, ?, 0, ?)`,
		id, at(deliverAt), at(t.now), at(t.now), trace)
	if err != nil {
		return fmt.Errorf("write outbox row of order %d: %w", id, err)
	}
	return nil
}

// retiming is an outbox row that goes back to pending.
type retiming struct {
	orderID   int64
	deliverAt time.Time
	after     time.Duration // how long the relay leaves it alone
}

// resendPause is how long a row waits that goes back because its message came early. Without a pause a broker whose clock runs ahead
// would deliver each new message at once: early, sent, early, sent, as fast as the relay can. Half of what remains, at most a minute,
// ends after a few rounds and cannot make the order late.
func resendPause(remaining time.Duration) time.Duration { return min(remaining/2, time.Minute) }

// retime upserts rows to pending and takes them away from whoever holds a lease: the token is gone, a mark of the holder matches
// nothing. In order of id, as all locks on the outbox.
func (t *txn) retime(ctx context.Context, rows []retiming) error {
	slices.SortFunc(rows, func(a, b retiming) int { return int(min(max(a.orderID-b.orderID, -1), 1)) })
	for _, r := range rows {
		available := at(t.now.Add(r.after))
		_, err := t.exec(ctx, `INSERT INTO outbox (order_id, deliver_at, state, available_at, pending_since, attempts) VALUES (?, ?, 'pending', ?, ?, 0)
			ON DUPLICATE KEY UPDATE deliver_at = ?, state = 'pending', available_at = ?, pending_since = ?, lease_token = NULL, attempts = 0, last_error = NULL`,
			r.orderID, at(r.deliverAt), available, available, at(r.deliverAt), available, available)
		if err != nil {
			return fmt.Errorf("time outbox row of order %d anew: %w", r.orderID, err)
		}
	}
	return nil
}

// Pending is one claimed outbox row.
type Pending struct {
	OrderID     int64
	DeliverAt   time.Time // the instant of the timed message: not before the order's deadline
	AvailableAt time.Time // since when it could be sent
	Attempts    int       // earlier sends that failed
	Traceparent string    // empty: none
}

// Claim is a set of outbox rows that the caller alone may send, until Until by the database's clock. Marks carry the token and match
// nothing once the lease has ended and another relay has claimed the row, or once the row has been timed anew.
type Claim struct {
	Token string
	Now   time.Time // the database's clock at the claim
	Until time.Time
	Rows  []Pending
}

// ClaimOutbox leases up to limit pending rows whose time has come, oldest first, and skips those that another relay is claiming. An
// empty claim means that there is nothing to send. The lease has to be longer than a send may take.
func (s *Store) ClaimOutbox(ctx context.Context, limit int, lease time.Duration) (Claim, error) {
	if limit < 1 || limit > maxClaim || lease <= 0 {
		return Claim{}, invalid("claim of %d rows for %s; allowed are 1 to %d rows and a positive lease", limit, lease, maxClaim)
	}
	var claim Claim
	err := s.inTx(ctx, "claim outbox rows", func(ctx context.Context, t *txn) error {
		claim = Claim{Token: newToken(), Now: t.now, Until: t.now.Add(lease)}
		// Only the ids come out of the index: the locked rows are then read and marked by primary key.
		var ids []int64
		err := t.each(ctx, `SELECT order_id, CAST(deliver_at AS CHAR), CAST(available_at AS CHAR), attempts, traceparent FROM outbox FORCE INDEX (outbox_to_do)
			WHERE state = 'pending' AND available_at <= ? ORDER BY available_at, order_id LIMIT ? FOR UPDATE SKIP LOCKED`, []any{at(t.now), limit},
			func(rows *sql.Rows) error {
				var p Pending
				var deliver, available instant
				var trace sql.NullString
				if err := rows.Scan(&p.OrderID, &deliver, &available, &p.Attempts, &trace); err != nil {
					return err
				}
				p.DeliverAt, p.AvailableAt, p.Traceparent = deliver.time, available.time, trace.String
				claim.Rows = append(claim.Rows, p)
				ids = append(ids, p.OrderID)
				return nil
			})
		if err != nil {
			return fmt.Errorf("select pending rows: %w", err)
		}
		slices.Sort(ids)
		for part := range slices.Chunk(ids, maxRows) {
			args := append([]any{at(claim.Until), claim.Token}, anys(part)...)
			n, err := t.exec(ctx, "UPDATE outbox FORCE INDEX (PRIMARY) SET available_at = ?, lease_token = ? WHERE order_id IN ("+marks(len(part))+") AND state = 'pending'", args...)
			if err != nil {
				return fmt.Errorf("lease %d rows: %w", len(part), err)
			}
			if n != int64(len(part)) {
				return fmt.Errorf("lease %d locked rows, %d matched: %w", len(part), n, errAgain)
			}
		}
		return nil
	})
	if err != nil {
		return Claim{}, err
	}
	return claim, nil
}

// maxClaim bounds a claim: its rows are locked and its ids are in memory.
const maxClaim = 10_000

// Sent is one timed message that the broker has stored: its orders, its id and its due instant.
type Sent struct {
	IDs       []int64
	MessageID string
	Due       time.Time
}

// MarkSent records that these timed messages were stored by the broker, all in one transaction, and sets when their orders' rows may be
// purged. It gives the number of rows that still carried the token; the others were claimed or timed anew meanwhile and will be sent
// again, which is harmless.
//
// Several messages at once since a transaction costs more than its rows: a backlog whose orders hardly share ticks is one of many small
// messages.
func (s *Store) MarkSent(ctx context.Context, token string, messages []Sent) (int, error) {
	var all []int64
	for _, m := range messages {
		all = append(all, m.IDs...)
	}
	slices.Sort(all)
	var total int
	err := s.inTx(ctx, "mark outbox rows sent", func(ctx context.Context, t *txn) error {
		total = 0
		if len(messages) > 1 {
			// Their ids interleave, and locks on the outbox are taken in the order of ids.
			for part := range slices.Chunk(all, maxRows) {
				err := t.each(ctx, "SELECT order_id FROM outbox FORCE INDEX (PRIMARY) WHERE order_id IN ("+marks(len(part))+") ORDER BY order_id FOR UPDATE", anys(part),
					func(*sql.Rows) error { return nil })
				if err != nil {
					return fmt.Errorf("lock %d rows: %w", len(part), err)
				}
			}
		}
		for _, m := range messages {
			n, err := t.mark(ctx, timedMessages, token, m.IDs, "state = 'sent', message_id = ?, sent_at = ?, deliver_at = ?, available_at = ?, pending_since = NULL, lease_token = NULL, last_error = NULL",
				clipID(m.MessageID), at(t.now), at(m.Due), at(t.now.Add(s.cfg.OutboxRetention)))
			if err != nil {
				return err
			}
			total += n
		}
		return nil
	})
	return total, err
}

// MarkRetry gives rows back whose send failed: another attempt may be made after pause.
func (s *Store) MarkRetry(ctx context.Context, token string, ids []int64, pause time.Duration, cause error) (int, error) {
	return s.mark(ctx, timedMessages, "mark outbox rows for retry", token, ids, toRetry(pause, cause))
}

func toRetry(pause time.Duration, cause error) func(now time.Time) (string, []any) {
	return func(now time.Time) (string, []any) {
		return "available_at = ?, lease_token = NULL, attempts = attempts + 1, last_error = ?", []any{at(now.Add(pause)), clip(cause.Error(), 1024)}
	}
}

// Unclaim gives rows back that were not tried (a relay that stops): they are available at once and count no attempt.
func (s *Store) Unclaim(ctx context.Context, token string, ids []int64) (int, error) {
	return s.mark(ctx, timedMessages, "give back outbox rows", token, ids, toOthers)
}

func toOthers(now time.Time) (string, []any) {
	return "available_at = ?, lease_token = NULL", []any{at(now)}
}

// MarkParked sets rows aside whose message the broker refuses for good, with the reason, and parks their orders: the message will not
// come, reconcile cancels them when they are due. The other rows of the claim are not touched.
func (s *Store) MarkParked(ctx context.Context, token string, ids []int64, reason string) (int, error) {
	var total int
	err := s.inTx(ctx, "park outbox rows", func(ctx context.Context, t *txn) error {
		total = 0
		ids = slices.Sorted(slices.Values(ids))
		for part := range slices.Chunk(ids, maxRows) {
			var held []int64
			err := t.each(ctx, "SELECT order_id FROM outbox FORCE INDEX (PRIMARY) WHERE order_id IN ("+marks(len(part))+") AND lease_token = ? ORDER BY order_id FOR UPDATE",
				append(anys(part), token), func(rows *sql.Rows) error {
					var id int64
					err := rows.Scan(&id)
					held = append(held, id)
					return err
				})
			if err != nil {
				return fmt.Errorf("lock %d rows: %w", len(part), err)
			}
			if len(held) == 0 {
				continue
			}
			n, err := t.exec(ctx, "UPDATE outbox FORCE INDEX (PRIMARY) SET state = 'parked', pending_since = NULL, lease_token = NULL, attempts = attempts + 1, last_error = ? WHERE order_id IN ("+marks(len(held))+")",
				append([]any{clip(reason, 1024)}, anys(held)...)...)
			if err != nil {
				return fmt.Errorf("park %d rows: %w", len(held), err)
			}
			total += int(n)
			list := make([]Parked, 0, len(held))
			for _, id := range held {
				list = append(list, Parked{What: ParkedOrder, Ref: FormatID(id), Reason: reason})
			}
			if err := t.park(ctx, list); err != nil {
				return err
			}
		}
		return nil
	})
	return total, err
}

// worklist is a table whose rows are claimed under a lease, worked on outside of any transaction, and marked under the lease's token.
type worklist struct{ table, key string } // key: the column of the primary key

var (
	timedMessages  = worklist{"outbox", "order_id"}
	outgoingEvents = worklist{"event_outbox", "id"}
)

// mark changes leased rows that still carry the token, and gives how many did.
func (s *Store) mark(ctx context.Context, w worklist, doing, token string, ids []int64, set func(now time.Time) (string, []any)) (int, error) {
	var total int
	err := s.inTx(ctx, doing, func(ctx context.Context, t *txn) (err error) {
		assign, values := set(t.now)
		total, err = t.mark(ctx, w, token, ids, assign, values...)
		return err
	})
	return total, err
}

func (t *txn) mark(ctx context.Context, w worklist, token string, ids []int64, assign string, values ...any) (total int, err error) {
	for part := range slices.Chunk(slices.Sorted(slices.Values(ids)), maxRows) {
		args := append(append(slices.Clone(values), anys(part)...), token)
		n, err := t.exec(ctx, "UPDATE "+w.table+" FORCE INDEX (PRIMARY) SET "+assign+" WHERE "+w.key+" IN ("+marks(len(part))+") AND lease_token = ?", args...)
		if err != nil {
			return 0, fmt.Errorf("%d rows: %w", len(part), err)
		}
		total += int(n)
	}
	return total, nil
}

// PurgeOutbox deletes up to limit rows of sent or parked messages whose retention is over and whose order is final or gone, and gives
// how many. The ids are read first without locks and deleted by primary key, so that checkout never waits for it. Rows of orders that
// are still open stay, and are looked at again after another retention.
func (s *Store) PurgeOutbox(ctx context.Context, limit int) (int, error) {
	if limit < 1 || limit > maxClaim {
		return 0, invalid("purge of %d outbox rows; allowed are 1 to %d", limit, maxClaim)
	}
	var total int
	err := s.inTx(ctx, "purge outbox", func(ctx context.Context, t *txn) error {
		var final, open []int64
		for _, state := range []string{outboxSent, outboxParked} {
			err := t.each(ctx, `SELECT b.order_id, o.id IS NULL OR o.status IN ('paid', 'cancelled') FROM outbox b FORCE INDEX (outbox_to_do) LEFT JOIN orders o ON o.id = b.order_id
				WHERE b.state = ? AND b.available_at <= ? ORDER BY b.available_at, b.order_id LIMIT ?`, []any{state, at(t.now), limit - len(final) - len(open)},
				func(rows *sql.Rows) error {
					var id int64
					var done bool
					if err := rows.Scan(&id, &done); err != nil {
						return err
					}
					if done {
						final = append(final, id)
					} else {
						open = append(open, id)
					}
					return nil
				})
			if err != nil {
				return fmt.Errorf("read rows to purge: %w", err)
			}
		}
		slices.Sort(final)
		slices.Sort(open)
		total = 0
		for part := range slices.Chunk(final, maxRows) {
			// The form for several tables is the one that takes an index hint: a scan would wait for rows that a checkout has not committed.
			n, err := t.exec(ctx, "DELETE b FROM outbox b FORCE INDEX (PRIMARY) WHERE b.order_id IN ("+marks(len(part))+") AND b.state <> 'pending'", anys(part)...)
			if err != nil {
				return fmt.Errorf("delete %d rows: %w", len(part), err)
			}
			total += int(n)
		}
		for part := range slices.Chunk(open, maxRows) {
			_, err := t.exec(ctx, "UPDATE outbox FORCE INDEX (PRIMARY) SET available_at = ? WHERE order_id IN ("+marks(len(part))+") AND state <> 'pending'",
				append([]any{at(t.now.Add(s.cfg.OutboxRetention))}, anys(part)...)...)
			if err != nil {
				return fmt.Errorf("keep %d rows of open orders: %w", len(part), err)
			}
		}
		return nil
	})
	return total, err
}

// OutboxRow is the outbox row of one order, as it is stored.
type OutboxRow struct {
	OrderID     int64
	DeliverAt   time.Time
	State       string // pending, sent, parked
	AvailableAt time.Time
	Leased      bool
	Attempts    int
	MessageID   string
	SentAt      *time.Time
	LastError   string
}

// Outbox reads the outbox row of an order; false where there is none (no deadline, or purged).
func (s *Store) Outbox(ctx context.Context, id int64) (OutboxRow, bool, error) {
	return readOutbox(ctx, s.db, id)
}

func readOutbox(ctx context.Context, db executor, id int64) (OutboxRow, bool, error) {
	row := OutboxRow{OrderID: id}
	var deliver, available, sent instant
	var message, lastError sql.NullString
	err := db.QueryRowContext(ctx, `SELECT CAST(deliver_at AS CHAR), state, CAST(available_at AS CHAR), lease_token IS NOT NULL, attempts, message_id, CAST(sent_at AS CHAR), last_error
		FROM outbox WHERE order_id = ?`, id).Scan(&deliver, &row.State, &available, &row.Leased, &row.Attempts, &message, &sent, &lastError)
	if errors.Is(err, sql.ErrNoRows) {
		return OutboxRow{}, false, nil
	}
	if err != nil {
		return OutboxRow{}, false, fmt.Errorf("read outbox row of order %d: %w", id, err)
	}
	row.DeliverAt, row.AvailableAt, row.SentAt = deliver.time, available.time, sent.pointer()
	row.MessageID, row.LastError = message.String, lastError.String
	return row, true, nil
}
