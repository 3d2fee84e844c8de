// The row of a run: its lease, its place, and the marker that a replica has to show. Everything here is on the primary, in transactions of one
// row, and each write of a run carries the token of its lease.

package reconcile

import (
	"context"
	crand "crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/orders"
)

// Kinds of runs. Only a full one counts as the run of a night, and only a full one that was interrupted is resumed.
const (
	kindFull    = "full"
	kindPartial = "partial" // with From or Until
	kindDry     = "dry"
)

// ErrLeaseLost is returned by [Reconciler.Run] when the run could not keep its lease: it was held up, or the primary was away, for longer than
// that, and another run may have taken over. What it cancelled stays.
var ErrLeaseLost = errors.New("the lease of the run is lost")

// RunningError is returned by [Reconciler.Run] when another run works, or was killed and its lease has not ended yet.
type RunningError struct {
	RunID int64
	Owner string        // host and process
	For   time.Duration // what is left of its lease, if it does not renew it
}

// Error names the other run.
func (e *RunningError) Error() string {
	return fmt.Sprintf("run %d of %s is at work; if it was killed, its lease ends in %s", e.RunID, e.Owner, e.For.Round(time.Second))
}

// stamp is an instant as it is stored: DATETIME(3), UTC, selected as text, so that no setting of the driver touches it. Zero: NULL.
type stamp struct{ time.Time }

const stampLayout = "2006-01-02 15:04:05.000"

func (s stamp) text() any {
	if s.IsZero() {
		return nil
	}
	return s.UTC().Format(stampLayout)
}

// Scan implements sql.Scanner.
func (s *stamp) Scan(src any) error {
	var text string
	switch v := src.(type) {
	case nil:
		*s = stamp{}
		return nil
	case []byte:
		text = string(v)
	case string:
		text = v
	default:
		return fmt.Errorf("read an instant: unexpected type %T", src)
	}
	t, err := time.ParseInLocation("2006-01-02 15:04:05.999", text, time.UTC)
	if err != nil {
		return fmt.Errorf("read an instant: %w", err)
	}
	s.Time = t
	return nil
}

// place is a run's row as it was begun or taken over.
type place struct {
	id      int64
	token   string
	cutoff  time.Time
	started time.Time
	beat    time.Time // the marker: the newest instant that this run has written
	cursor  orders.Overdue
	counts  Counts
	resumed bool
}

func newToken() string {
	var b [16]byte
	_, _ = crand.Read(b[:]) // never fails (crypto/rand, since Go 1.24)
	return hex.EncodeToString(b[:])
}

func owner() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	return fmt.Sprintf("%s, process %d", host, os.Getpid())
}

// retried runs a transaction of a few rows again when the server says so.
func (r *Reconciler) retried(ctx context.Context, doing string, do func(ctx context.Context, tx *sql.Tx) error) error {
	const attempts = 8
	for n := 1; ; n++ {
		err := r.once(ctx, do)
		if err == nil {
			return nil
		}
		if !orders.IsRetryable(err) || n == attempts {
			return fmt.Errorf("%s: %w", doing, err)
		}
		if !sleep(ctx, time.Duration(rand.Int64N(int64(50*time.Millisecond)))) { //nolint:gosec // jitter needs no secrecy
			return fmt.Errorf("%s: %w", doing, ctx.Err())
		}
	}
}

func (r *Reconciler) once(ctx context.Context, do func(ctx context.Context, tx *sql.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.CancelTimeout)
	defer cancel()
	tx, err := r.primary.DB().BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return fmt.Errorf("begin on the primary: %w", err)
	}
	if err := do(ctx, tx); err != nil {
		_ = tx.Rollback() // fails only where the connection is gone, and the transaction with it
		return err
	}
	return tx.Commit()
}

// begin takes the lease: of a fresh row, with the cut-off of this moment, or of a run that was interrupted and whose lease has ended. The unique
// key on `alone` is what keeps two from beginning together.
func (r *Reconciler) begin(ctx context.Context, kind string, scheduled time.Time) (*place, error) {
	var p *place
	err := r.retried(ctx, "begin a run", func(ctx context.Context, tx *sql.Tx) error {
		p = &place{token: newToken()}
		var now stamp
		if err := tx.QueryRowContext(ctx, "SELECT CAST(UTC_TIMESTAMP(3) AS CHAR)").Scan(&now); err != nil {
			return fmt.Errorf("ask for the time: %w", err)
		}
		p.beat = now.Time
		until := stamp{now.Add(r.cfg.Lease)}

		var other struct {
			id                              int64
			kind, owner                     string
			token                           sql.NullString
			until, started, cutoff, overdue stamp
			cursor                          sql.NullInt64
			counts                          Counts
		}
		c := &other.counts
		err := tx.QueryRowContext(ctx, `SELECT id, kind, COALESCE(owner, 'an unknown process'), lease_token, CAST(lease_until AS CHAR), CAST(started_at AS CHAR), CAST(cutoff_at AS CHAR),
			CAST(cursor_deadline AS CHAR), cursor_order_id, scanned, cancelled, already_paid, held, parked, others, never_sent, sent_not_received, was_parked
			FROM reconcile_runs WHERE alone = 1 FOR UPDATE`).Scan(&other.id, &other.kind, &other.owner, &other.token, &other.until, &other.started, &other.cutoff,
			&other.overdue, &other.cursor, &c.Scanned, &c.Cancelled, &c.AlreadyPaid, &c.Held, &c.Parked, &c.Others, &c.Missed.NeverSent, &c.Missed.SentNotReceived, &c.Missed.Parked)
		switch {
		case errors.Is(err, sql.ErrNoRows):
		case err != nil:
			return fmt.Errorf("look for another run: %w", err)
		case now.Before(other.until.Time):
			return &RunningError{RunID: other.id, Owner: other.owner, For: other.until.Sub(now.Time)}
		case other.kind == kindFull && kind == kindFull:
			p.id, p.started, p.cutoff, p.counts, p.resumed = other.id, other.started.Time, other.cutoff.Time, other.counts, true
			p.cursor = orders.Overdue{ID: other.cursor.Int64, Deadline: other.overdue.Time}
			_, err := tx.ExecContext(ctx, "UPDATE reconcile_runs SET owner = ?, lease_token = ?, lease_until = ?, beat_at = ? WHERE id = ?",
				owner(), p.token, until.text(), now.text(), other.id)
			if err != nil {
				return fmt.Errorf("take over run %d: %w", other.id, err)
			}
			return nil
		default:
			_, err := tx.ExecContext(ctx, `UPDATE reconcile_runs SET state = 'failed', alone = NULL, lease_token = NULL, finished_at = ?,
				last_error = 'interrupted, and a run of another kind came after it' WHERE id = ?`, now.text(), other.id)
			if err != nil {
				return fmt.Errorf("close run %d, which was interrupted: %w", other.id, err)
			}
		}
		p.started, p.cutoff = now.Time, now.Time
		result, err := tx.ExecContext(ctx, `INSERT INTO reconcile_runs (state, alone, kind, owner, scheduled_at, started_at, cutoff_at, beat_at, lease_token, lease_until,
			scanned, cancelled, already_paid, held, parked) VALUES ('running', 1, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0)`,
			kind, owner(), stamp{scheduled}.text(), now.text(), now.text(), now.text(), p.token, until.text())
		if isDuplicate(err) {
			return errBegun
		}
		if err != nil {
			return fmt.Errorf("write the run: %w", err)
		}
		p.id, err = result.LastInsertId()
		return err
	})
	if errors.Is(err, errBegun) {
		return r.begin(ctx, kind, scheduled) // now it is there to be read
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

// errBegun says that another run began in the same moment.
var errBegun = errors.New("another run has begun")

// beat renews the lease, and writes the instant that the replica is asked for.
func (r *Reconciler) beat(ctx context.Context, p *place) (time.Time, error) {
	var now stamp
	err := r.retried(ctx, "renew the lease of the run", func(ctx context.Context, tx *sql.Tx) error {
		if err := tx.QueryRowContext(ctx, "SELECT CAST(UTC_TIMESTAMP(3) AS CHAR)").Scan(&now); err != nil {
			return fmt.Errorf("ask for the time: %w", err)
		}
		return hold(tx.ExecContext(ctx, "UPDATE reconcile_runs SET beat_at = ?, lease_until = ?, lease_beats = lease_beats + 1 WHERE id = ? AND lease_token = ?",
			now.text(), stamp{now.Add(r.cfg.Lease)}.text(), p.id, p.token))
	})
	return now.Time, err
}

// keep stores how far the run is, and what it has done.
func (r *Reconciler) keep(ctx context.Context, p *place, cursor orders.Overdue, c Counts) error {
	return r.retried(ctx, "keep the place of the run", func(ctx context.Context, tx *sql.Tx) error {
		return hold(tx.ExecContext(ctx, "UPDATE reconcile_runs SET cursor_deadline = ?, cursor_order_id = ?, "+setCounts+" WHERE id = ? AND lease_token = ?",
			append([]any{stamp{cursor.Deadline}.text(), cursor.ID}, append(c.args(), p.id, p.token)...)...))
	})
}

// leave gives the lease back and lets the next run resume this one.
func (r *Reconciler) leave(ctx context.Context, p *place) error {
	return r.retried(ctx, "give back the lease of the run", func(ctx context.Context, tx *sql.Tx) error {
		return hold(tx.ExecContext(ctx, "UPDATE reconcile_runs SET lease_until = started_at, lease_beats = lease_beats + 1 WHERE id = ? AND lease_token = ?", p.id, p.token))
	})
}

// finish ends the run for good.
func (r *Reconciler) finish(ctx context.Context, p *place, c Counts, failure error) error {
	state, words := "done", any(nil)
	if failure != nil {
		state, words = "failed", clip(failure.Error(), 1024)
	}
	return r.retried(ctx, "end the run", func(ctx context.Context, tx *sql.Tx) error {
		return hold(tx.ExecContext(ctx, "UPDATE reconcile_runs SET state = ?, last_error = ?, finished_at = UTC_TIMESTAMP(3), alone = NULL, lease_token = NULL, lease_until = NULL, "+setCounts+
			" WHERE id = ? AND lease_token = ?", append([]any{state, words}, append(c.args(), p.id, p.token)...)...))
	})
}

// setCounts is the part of an UPDATE that [Counts.args] fills. lease_beats rises with every write, since the driver reports rows that changed:
// one that was written with what it already had would look like a lease that is lost.
const setCounts = `lease_beats = lease_beats + 1, scanned = ?, cancelled = ?, already_paid = ?, held = ?, parked = ?, others = ?, never_sent = ?, sent_not_received = ?, was_parked = ?`

func (c Counts) args() []any {
	return []any{c.Scanned, c.Cancelled, c.AlreadyPaid, c.Held, c.Parked, c.Others, c.Missed.NeverSent, c.Missed.SentNotReceived, c.Missed.Parked}
}

// hold turns "no row matched" into a lease that is lost.
func hold(result sql.Result, err error) error {
	if err != nil {
		return err
	}
	n, err := result.RowsAffected()
	if err == nil && n != 1 {
		err = ErrLeaseLost
	}
	return err
}

// served says whether a full run has been done for an instant of the schedule: one that was begun for it or a later one, or one by hand after it.
func (r *Reconciler) served(ctx context.Context, at time.Time) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.CancelTimeout)
	defer cancel()
	var n int
	err := r.primary.DB().QueryRowContext(ctx, `SELECT COUNT(*) FROM (SELECT id FROM reconcile_runs FORCE INDEX (reconcile_runs_by_kind)
		WHERE kind = 'full' AND state = 'done' AND (cutoff_at >= ? OR scheduled_at >= ?) LIMIT 1) AS served`, stamp{at}.text(), stamp{at}.text()).Scan(&n)
	if err != nil {
		return false, fmt.Errorf("look for the run of %s: %w", at.Format(time.RFC3339), err)
	}
	return n > 0, nil
}

// isDuplicate tells that a unique key refused the row.
func isDuplicate(err error) bool {
	var my *mysql.MySQLError
	return errors.As(err, &my) && my.Number == 1062
}

// isBehind tells that the server has no such database, table or column: it has not seen the migrations yet, or is another one.
func isBehind(err error) bool {
	var my *mysql.MySQLError
	return errors.As(err, &my) && (my.Number == 1049 || my.Number == 1146 || my.Number == 1054)
}

// clip cuts a text to a number of bytes, and leaves out what is no UTF-8.
func clip(text string, most int) string {
	return strings.ToValidUTF8(text[:min(len(text), most)], "")
}
