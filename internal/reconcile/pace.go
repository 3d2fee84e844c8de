// A run goes out of the way: payments come first, and so does the replica, which others read.

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	// How often the servers are asked whether a run is in the way. A look is two tiny queries.
	lookEvery = 500 * time.Millisecond
	// How often during a pause: soon enough that a burst of locks costs little.
	lookAgain = 100 * time.Millisecond
)

// giveWay returns when nobody needs the servers more than this run. It is the dispatcher's, between two batches, when the replica's connection is
// free.
func (u *run) giveWay(ctx context.Context) error {
	if time.Since(u.looked) < lookEvery {
		return nil
	}
	var begun time.Time // of the pause
	for {
		why, err := u.inTheWay(ctx)
		if err != nil {
			return err
		}
		u.looked = time.Now()
		if why == "" {
			if !begun.IsZero() {
				u.paused += time.Since(begun)
				u.metrics.paused.Set(0)
				u.log.Info("reconcile goes on", "run", u.place.id, "after", time.Since(begun).Round(time.Millisecond))
			}
			return nil
		}
		if begun.IsZero() {
			begun = time.Now()
			u.metrics.paused.Set(1)
			u.log.Info("reconcile pauses", "run", u.place.id, "why", why)
		}
		u.show(true)
		if !sleep(ctx, lookAgain) {
			u.metrics.paused.Set(0)
			return cause(ctx, ctx.Err())
		}
	}
}

// inTheWay says why the run should pause, empty: it should not.
func (u *run) inTheWay(ctx context.Context) (string, error) {
	waits, err := u.lockWaits(ctx)
	if err != nil {
		return "", err
	}
	if waits > u.cfg.MaxLockWaits {
		return fmt.Sprintf("%d transactions wait for row locks on the primary, more than %d", waits, u.cfg.MaxLockWaits), nil
	}
	if u.source.primary || u.unwatched {
		return "", nil
	}
	seen, err := u.seen(ctx, u.source)
	u.mu.Lock()
	written := u.beatAt
	u.mu.Unlock()
	lag := written.Sub(seen)
	if err == nil && lag > u.cfg.MaxLag {
		err = fmt.Errorf("%w: it has fallen behind by %s in the middle of run %d", ErrReplica, lag.Round(time.Millisecond), u.place.id)
	}
	switch {
	case err != nil && errors.Is(err, ErrReplica) && u.read:
		// Nothing more is read from it, so what is left of this run need not end with it.
		u.unwatched = true
		u.log.Warn("the replica's lag is not watched any more", "run", u.place.id, "err", err)
		return "", nil
	case err != nil:
		return "", err
	}
	u.metrics.lag.Set(max(lag.Seconds(), 0))
	if lag > u.cfg.PauseLag {
		return fmt.Sprintf("the replica is behind by %s, more than %s", lag.Round(time.Millisecond), u.cfg.PauseLag), nil
	}
	return "", nil
}

// lockWaits is how many transactions wait for a row lock on the primary at this moment. The status needs no right.
func (u *run) lockWaits(ctx context.Context) (int, error) {
	var name string
	var n int
	err := u.patiently(ctx, func() error {
		limited, cancel := context.WithTimeout(ctx, u.cfg.CancelTimeout)
		defer cancel()
		return u.primary.DB().QueryRowContext(limited, "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'").Scan(&name, &n)
	})
	if err != nil {
		if ctx.Err() != nil {
			return 0, cause(ctx, err)
		}
		return 0, fmt.Errorf("ask the primary for its lock waits: %w", err)
	}
	return n, nil
}

// sleep is false when ctx has ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
