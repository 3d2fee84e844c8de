package reconcile

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// source is the one connection that the pages of a run are read over.
type source struct {
	conn    *sql.Conn
	scan    *orders.Scan
	primary bool // it is the primary that is scanned
}

func (s *source) close() {
	if s.conn != nil {
		_ = s.conn.Close() // it goes back to its pool
	}
}

// ask does one thing on the connection, for no longer than within. What fails there is the replica's trouble.
func (s *source) ask(ctx context.Context, within time.Duration, do func(context.Context) error) error {
	limited, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	err := do(limited)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return cause(ctx, err)
	case s.primary:
		return err
	}
	return fmt.Errorf("%w: %w", ErrReplica, err)
}

// pin takes a connection out of a pool and asks whose it is.
func pin(ctx context.Context, db *sql.DB, within time.Duration) (_ *source, err error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	s := &source{conn: conn}
	if s.scan, err = orders.NewScan(ctx, conn); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// open gives what the run reads: the replica, once it shows the run's marker, or the primary where that is allowed.
func (u *run) open(ctx context.Context) (*source, error) {
	var trouble error
	if u.replica != nil {
		s, err := u.openReplica(ctx)
		if err == nil {
			return s, nil
		}
		if ctx.Err() != nil {
			return nil, cause(ctx, err)
		}
		if !errors.Is(err, ErrReplica) || u.cfg.OnLag != OnLagPrimary {
			return nil, err
		}
		trouble = err
	}
	s, err := pin(ctx, u.primary.DB(), u.cfg.CancelTimeout)
	if err != nil {
		return nil, fmt.Errorf("scan the primary: %w", err)
	}
	s.primary = true
	u.log.Warn("the primary is scanned instead of a replica", "run", u.place.id, "rate", min(u.cfg.Rate, u.cfg.PrimaryRate), "why", whyPrimary(trouble))
	return s, nil
}

func whyPrimary(trouble error) string {
	if trouble == nil {
		return "no replica is named"
	}
	return trouble.Error()
}

func (u *run) openReplica(ctx context.Context) (_ *source, err error) {
	p, err := pin(ctx, u.primary.DB(), u.cfg.CancelTimeout)
	if err != nil {
		return nil, fmt.Errorf("ask the primary for its id: %w", err)
	}
	defer p.close()
	begun := time.Now()
	s, err := pin(ctx, u.replica, u.cfg.ReadTimeout)
	for isBehind(err) && time.Since(begun) < u.cfg.MaxLag && sleep(ctx, markerPauseMax) {
		s, err = pin(ctx, u.replica, u.cfg.ReadTimeout) // a database that was just made comes over like everything else
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrReplica, err)
	}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.scan.Server() == p.scan.Server() {
		return nil, fmt.Errorf("%w: it is the primary itself, %s; name a replica of it, or let the primary be scanned (on_lag primary)", ErrReplica, s.scan.Server())
	}
	if err := u.inOrder(ctx, s); err != nil {
		return nil, err
	}
	if err := u.await(ctx, s, u.showsBeat); err != nil {
		return nil, err
	}
	u.lag = time.Since(begun)
	u.metrics.lag.Set(u.lag.Seconds())
	return s, nil
}

// Pauses between two looks at the replica for the marker. A replica in good order shows it within milliseconds.
const (
	markerPauseMin = 5 * time.Millisecond
	markerPauseMax = 200 * time.Millisecond
)

// inOrder refuses a replica that shows transactions in another order than the primary committed them: with several appliers and
// replica_preserve_commit_order off the marker may be there before an order that is older. MariaDB has no such setting: within a domain it keeps
// the order.
func (u *run) inOrder(ctx context.Context, s *source) error {
	appliers, keeps := 0, true
	err := s.ask(ctx, u.cfg.ReadTimeout, func(ctx context.Context) (err error) {
		// Each of the two has an older name; a server lists those that it knows.
		rows, err := s.conn.QueryContext(ctx, `SHOW GLOBAL VARIABLES WHERE Variable_name IN
			('replica_preserve_commit_order', 'slave_preserve_commit_order', 'replica_parallel_workers', 'slave_parallel_workers')`)
		if err != nil {
			return fmt.Errorf("ask in what order it applies transactions: %w", err)
		}
		defer func() { err = errors.Join(err, rows.Close()) }()
		for rows.Next() {
			var name, value string
			if err := rows.Scan(&name, &value); err != nil {
				return err
			}
			if strings.HasSuffix(name, "_order") {
				keeps = value == "ON" || value == "1"
			} else if appliers, err = strconv.Atoi(value); err != nil {
				return fmt.Errorf("read %s: %w", name, err)
			}
		}
		return rows.Err()
	})
	if err == nil && appliers > 1 && !keeps {
		err = fmt.Errorf("%w: it has %d appliers and replica_preserve_commit_order is off, so that what it shows may lack something older; set it ON there, or replica_parallel_workers to 1", ErrReplica, appliers)
	}
	return err
}

// await waits up to MaxLag until the replica shows what this run has written on the primary. Transactions are shown in the order of their
// commits, so what was committed before is there, too.
func (u *run) await(ctx context.Context, s *source, shows func(context.Context, *source) (bool, error)) error {
	pause := markerPauseMin
	for begun := time.Now(); ; {
		there, err := shows(ctx, s)
		if err != nil || there {
			return err
		}
		if time.Since(begun) >= u.cfg.MaxLag {
			return u.behind(ctx, s)
		}
		if !sleep(ctx, min(pause, max(u.cfg.MaxLag-time.Since(begun), time.Millisecond))) {
			return cause(ctx, ctx.Err())
		}
		pause = min(2*pause, markerPauseMax)
	}
}

// showsBeat says whether the replica shows the beat that the run began with, or a later one.
func (u *run) showsBeat(ctx context.Context, s *source) (bool, error) {
	seen, err := u.seen(ctx, s)
	return err == nil && !seen.IsZero() && !seen.Before(u.place.beat), err
}

// showsEnd says whether the replica shows that this run is done. It showed the token of the run before, so it is no stranger's row.
func (u *run) showsEnd(ctx context.Context, s *source) (done bool, err error) {
	err = s.ask(ctx, u.cfg.ReadTimeout, func(ctx context.Context) error {
		err := s.conn.QueryRowContext(ctx, "SELECT state = 'done' FROM reconcile_runs WHERE id = ?", u.place.id).Scan(&done)
		if err != nil {
			return fmt.Errorf("look for the end of run %d: %w", u.place.id, err)
		}
		return nil
	})
	return done, err
}

// seen is the newest beat of this run that the replica shows; zero: none. The token tells this run's row from one of the same number on a server
// that has a history of its own.
func (u *run) seen(ctx context.Context, s *source) (time.Time, error) {
	var at stamp
	err := s.ask(ctx, u.cfg.ReadTimeout, func(ctx context.Context) error {
		err := s.conn.QueryRowContext(ctx, "SELECT CAST(beat_at AS CHAR) FROM reconcile_runs WHERE id = ? AND lease_token = ?", u.place.id, u.place.token).Scan(&at)
		if errors.Is(err, sql.ErrNoRows) || isBehind(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("look for the marker of run %d: %w", u.place.id, err)
		}
		return nil
	})
	return at.Time, err
}

// behind is the error for a replica without the marker, with what can be known of it.
func (u *run) behind(ctx context.Context, s *source) error {
	var newest sql.NullInt64
	var begun stamp
	known := "it has no table reconcile_runs as this build needs it"
	err := s.ask(ctx, u.cfg.ReadTimeout, func(ctx context.Context) error {
		return s.conn.QueryRowContext(ctx, "SELECT id, CAST(started_at AS CHAR) FROM reconcile_runs ORDER BY id DESC LIMIT 1").Scan(&newest, &begun)
	})
	switch {
	case err == nil:
		known = fmt.Sprintf("the newest run that it knows is %d of %s", newest.Int64, begun.Format(time.RFC3339))
	case errors.Is(err, sql.ErrNoRows):
		known = "it knows no run at all"
	case !isBehind(err):
		return err
	}
	return fmt.Errorf("%w: it does not show what run %d wrote on the primary, though it was given %s; it lags by more, its replication has stopped, or it is no replica of this primary "+
		"(server %s; %s). Look at SHOW REPLICA STATUS there", ErrReplica, u.place.id, u.cfg.MaxLag, s.scan.Server(), known)
}
