// The scan for overdue orders and the reason why the message path missed one. A scan reads whatever server it is given, usually a replica:
// what it finds is a hint, and CancelDue on the primary decides.

package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// ErrOtherServer is returned by [Scan.Page] and [Scan.Count] when the connection leads to another server than at the scan's start: a proxy or a
// name that was moved. What the other server has was not waited for.
var ErrOtherServer = errors.New("the connection leads to another server than before")

// Overdue is one unpaid order past its deadline, and its place in a scan.
type Overdue struct {
	ID       int64
	Deadline time.Time
}

// Scan reads overdue orders page by page on one connection. It is not safe for concurrent use, as the connection is not.
type Scan struct {
	conn     *sql.Conn
	identity string // a SQL expression
	server   string
}

// NewScan asks the connection which server it leads to; every page is then asked of the same one.
func NewScan(ctx context.Context, conn *sql.Conn) (*Scan, error) {
	var version string
	if err := conn.QueryRowContext(ctx, "SELECT VERSION()").Scan(&version); err != nil {
		return nil, fmt.Errorf("ask for the server's version: %w", err)
	}
	s := &Scan{conn: conn, identity: "@@global.server_uuid"}
	if strings.Contains(version, "MariaDB") {
		// MariaDB has no such id. Two servers differ in their host or, on one host, in the port and the place of their data.
		s.identity = "CONCAT_WS(':', @@hostname, @@port, @@server_id, @@datadir)"
	}
	if err := conn.QueryRowContext(ctx, "SELECT "+s.identity).Scan(&s.server); err != nil {
		return nil, fmt.Errorf("ask for the server's id: %w", err)
	}
	return s, nil
}

// Server is what tells this server from every other: MySQL's server_uuid; on MariaDB host, port, server_id and data directory.
func (s *Scan) Server() string { return s.server }

// maxPage bounds the ids of a page in memory: 16 MB.
const maxPage = 1_000_000

// Page gives up to limit orders that are unpaid with a deadline before until, in the order of deadline and id, that come after a place; a
// zero Overdue is the beginning, one with an id of 0 the first order of its instant. A page that is shorter than limit is the last.
//
// It reads as many index entries as it gives, and a few more; at most twice as many where orders behind the place have its very instant. These are asked
// for by themselves: a condition that also covers what comes later would have them read again from the first of their instant on with every page,
// and the row-value form would be read from the beginning of the index. Instants have whole milliseconds: a parameter with more digits than the
// column would keep MariaDB from using the range.
func (s *Scan) Page(ctx context.Context, after Overdue, until time.Time, limit int) ([]Overdue, error) {
	if limit < 1 || limit > maxPage {
		return nil, invalid("page of %d overdue orders; allowed are 1 to %d", limit, maxPage)
	}
	// The server's id comes with the page itself, also with an empty one: a proxy sends each statement where it likes.
	var server string
	page := make([]Overdue, 0, min(limit, 1000))
	from, comparison := atOrFirst(after.Deadline), ">="
	query, args := "SELECT "+s.identity+", NULL, NULL", []any{}
	part := func(condition string, values ...any) {
		query += " UNION ALL (SELECT NULL, id, CAST(deadline_at AS CHAR) FROM orders FORCE INDEX (orders_by_deadline) WHERE status = 'unpaid' AND " + condition + " ORDER BY deadline_at, id LIMIT ?)"
		args = append(append(args, values...), limit)
	}
	if after.ID > 0 {
		comparison = ">"
		part("deadline_at = ? AND deadline_at < ? AND id > ?", from, at(until), after.ID)
	}
	part("deadline_at "+comparison+" ? AND deadline_at < ?", from, at(until))
	err := each(ctx, s.conn, query, args,
		func(rows *sql.Rows) error {
			var of sql.NullString
			var id sql.NullInt64
			var deadline instant
			if err := rows.Scan(&of, &id, &deadline); err != nil {
				return err
			}
			if of.Valid {
				server = of.String
				return nil
			}
			page = append(page, Overdue{ID: id.Int64, Deadline: deadline.time})
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("read a page of overdue orders: %w", err)
	}
	if server != s.server {
		return nil, fmt.Errorf("read a page of overdue orders from %s: %w: %s", s.server, ErrOtherServer, server)
	}
	// A UNION promises no order.
	slices.SortFunc(page, func(a, b Overdue) int {
		if c := a.Deadline.Compare(b.Deadline); c != 0 {
			return c
		}
		return int(min(max(a.ID-b.ID, -1), 1))
	})
	return page[:min(len(page), limit)], nil
}

// Count gives how many orders the pages from a place on will have. It reads each of their index entries.
func (s *Scan) Count(ctx context.Context, after Overdue, until time.Time) (int64, error) {
	var server string
	var n int64
	from := atOrFirst(after.Deadline)
	err := s.conn.QueryRowContext(ctx, `SELECT `+s.identity+`, (SELECT COUNT(*) FROM orders FORCE INDEX (orders_by_deadline)
		WHERE status = 'unpaid' AND deadline_at < ? AND deadline_at >= ? AND (deadline_at > ? OR id > ?))`,
		at(until), from, from, after.ID).Scan(&server, &n)
	if err != nil {
		return 0, fmt.Errorf("count overdue orders: %w", err)
	}
	if server != s.server {
		return 0, fmt.Errorf("count overdue orders on %s: %w: %s", s.server, ErrOtherServer, server)
	}
	return n, nil
}

// atOrFirst is the first instant that a DATETIME can hold where there is none: NULL would compare as unknown.
func atOrFirst(t time.Time) instant {
	if t.IsZero() {
		t = time.Date(1000, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	return at(t)
}

// Unlocked gives those of some orders whose rows exist and are locked by nobody at this moment. It waits for no lock and keeps none.
func (s *Store) Unlocked(ctx context.Context, ids []int64) ([]int64, error) {
	var free []int64
	err := s.inTx(ctx, fmt.Sprintf("look which of %d orders are locked", len(ids)), func(ctx context.Context, t *txn) error {
		free = nil
		for part := range slices.Chunk(ids, maxRows) {
			err := t.each(ctx, "SELECT id FROM orders FORCE INDEX (PRIMARY) WHERE id IN ("+marks(len(part))+") ORDER BY id FOR UPDATE SKIP LOCKED", anys(part),
				func(rows *sql.Rows) error {
					var id int64
					err := rows.Scan(&id)
					free = append(free, id)
					return err
				})
			if err != nil {
				return err
			}
		}
		return nil
	})
	return free, err
}

// Missed says why the message path did not cancel an order that reconcile had to cancel.
type Missed string

const (
	// MissedNeverSent says that no timed message for the order was sent: its outbox row still waits, or is gone.
	MissedNeverSent Missed = "never_sent"
	// MissedNotReceived says that the timed message was stored by the broker, and no consumer cancelled the order.
	MissedNotReceived Missed = "sent_not_received"
	// MissedParked says that the order, or its outbox row, was set aside.
	MissedParked Missed = "parked"
)

// AllMissed are all values of [Missed], for metrics that want every label from the start.
func AllMissed() []Missed { return []Missed{MissedNeverSent, MissedNotReceived, MissedParked} }

type runKey struct{}

// WithRun says that CancelDue under this context works for a run of reconcile. Each order that it cancels gets an event in the same
// transaction with the run and the reason why the message path missed it, and that reason is in [Outcome.Missed]. It is in the context since
// what a gate does between reconcile and the store has nothing to do with it.
func WithRun(ctx context.Context, run int64) context.Context {
	return context.WithValue(ctx, runKey{}, run)
}

// runOf gives the run that CancelDue works for.
func runOf(ctx context.Context) (run int64, is bool) {
	run, is = ctx.Value(runKey{}).(int64)
	return run, is
}

// reconciled is the detail of the event of that name.
type reconciled struct {
	Run       int64  `json:"run"`
	Missed    Missed `json:"missed"`
	Because   string `json:"because"`
	MessageID string `json:"message_id,omitempty"`
}

// missed reads for orders that are locked, and about to be cancelled for a run, why no message has done it. Plain reads: the reason is for
// people, and a lock on outbox rows would be taken out of order.
func (t *txn) missed(ctx context.Context, run int64, ids []int64) (map[int64]reconciled, error) {
	found := make(map[int64]reconciled, len(ids))
	for _, id := range ids {
		found[id] = reconciled{Run: run, Missed: MissedNeverSent, Because: "its outbox row is gone"}
	}
	err := t.each(ctx, `SELECT order_id, state, attempts, COALESCE(message_id, ''), COALESCE(CAST(sent_at AS CHAR), ''), COALESCE(last_error, '')
		FROM outbox FORCE INDEX (PRIMARY) WHERE order_id IN (`+marks(len(ids))+")", anys(ids),
		func(rows *sql.Rows) error {
			var id int64
			var state, sentAt, lastError string
			var attempts int
			r := reconciled{Run: run}
			if err := rows.Scan(&id, &state, &attempts, &r.MessageID, &sentAt, &lastError); err != nil {
				return err
			}
			switch {
			case state == outboxParked:
				r.Missed, r.Because = MissedParked, lastError
			case state == outboxSent:
				r.Missed, r.Because = MissedNotReceived, fmt.Sprintf("message %s was sent at %s UTC, and no consumer has handled it", r.MessageID, sentAt)
			case lastError != "":
				r.Missed, r.Because = MissedNeverSent, fmt.Sprintf("sending failed %d times, the last time: %s", attempts, lastError)
			default:
				r.Missed, r.Because = MissedNeverSent, "no relay has sent it"
			}
			found[id] = r
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("read outbox rows of %d orders: %w", len(ids), err)
	}
	refs := make([]any, 0, len(ids)+1)
	refs = append(refs, ParkedOrder)
	for _, id := range ids {
		refs = append(refs, FormatID(id))
	}
	err = t.each(ctx, "SELECT ref, reason FROM parked FORCE INDEX (parked_by_ref) WHERE what = ? AND ref IN ("+marks(len(ids))+") AND state = 'parked'", refs,
		func(rows *sql.Rows) error {
			var ref, reason string
			if err := rows.Scan(&ref, &reason); err != nil {
				return err
			}
			id, err := ParseID(ref)
			if err != nil {
				return err
			}
			r := found[id]
			r.Missed, r.Because = MissedParked, reason
			found[id] = r
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("read which of %d orders are parked: %w", len(ids), err)
	}
	return found, nil
}

// StaleOutbox is the check beside [Audit] that no outbox row waits to be sent for longer than age, failed sends and leases included: then no relay
// runs, or the broker refuses, and every order behind it is left to reconcile. It reads db as Audit does, and lists up to limit rows (0: 100).
func StaleOutbox(ctx context.Context, db Beginner, age time.Duration, limit int) (Check, error) {
	if age <= 0 || limit < 0 {
		return Check{}, invalid("check for outbox rows older than %s, up to %d; both must be positive", age, limit)
	}
	if limit == 0 {
		limit = 100
	}
	c := Check{Invariant: "I6", Name: "outbox_row_is_sent", Says: fmt.Sprintf("no outbox row has been waiting to be sent for longer than %s", age)}
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted, ReadOnly: true})
	if err != nil {
		return Check{}, fmt.Errorf("check the age of outbox rows: begin: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // nothing was written
	t := &txn{executor: tx}
	if err := t.readNow(ctx); err != nil {
		return Check{}, fmt.Errorf("check the age of outbox rows: %w", err)
	}
	old := at(t.now.Add(-age))
	err = t.QueryRowContext(ctx, `SELECT COUNT(*), COALESCE(SUM(`+pendingSince+` < ?), 0) FROM outbox FORCE INDEX (outbox_to_do) WHERE state = 'pending'`, old).Scan(&c.Rows, &c.Violations)
	if err != nil {
		return Check{}, fmt.Errorf("count old outbox rows: %w", err)
	}
	// The index alone finds the oldest; only these are then read. After an outage there may be millions.
	err = t.each(ctx, `SELECT b.order_id, CONCAT('waiting since ', o.since, ', ', b.attempts, ' sends failed', COALESCE(CONCAT(', the last: ', b.last_error), ''))
		FROM (SELECT order_id, `+pendingSince+` AS since FROM outbox FORCE INDEX (outbox_to_do) WHERE state = 'pending' AND `+pendingSince+` < ? ORDER BY since, order_id LIMIT ?) o
		JOIN outbox b FORCE INDEX (PRIMARY) ON b.order_id = o.order_id ORDER BY o.since, o.order_id`, []any{old, limit},
		func(rows *sql.Rows) error {
			var v Violation
			if err := rows.Scan(&v.OrderID, &v.Detail); err != nil {
				return err
			}
			c.Examples = append(c.Examples, v)
			return nil
		})
	if err != nil {
		return Check{}, fmt.Errorf("list old outbox rows: %w", err)
	}
	return c, nil
}
