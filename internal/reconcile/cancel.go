package reconcile

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

const (
	// maxFailures is how often an order fails alone before it is parked. More than once, since not every error that passes by itself is known
	// by its number.
	maxFailures = 3
	// maxParkedInRow ends a run: so many orders in a row with not one cancelled between them are hardly the orders' fault, and parking them
	// all would hide what is.
	maxParkedInRow = 100
	// maxAside bounds the orders in memory whose rows were locked; 16 bytes each.
	maxAside = 10_000
	// asideShare is the part of CancelTimeout that orders get which were found locked: a quarter of 10 s is a hundred times what such a
	// transaction takes, and all those whose stock stays locked wait for it one after the other.
	asideShare = 4
	// asideTime is how long at least orders are tried that were found locked, at the end of a run, and twice CancelTimeout where that is longer. A
	// session of ours that was cut off keeps its locks until its own wait for one is over, 5 s.
	asideTime = 8 * time.Second
	// asideAlone is how long at most the orders are then tried each alone, before those that are left are parked: of a batch over one locked stock
	// row most orders are free, and take some 20 ms. It is enough for 120 that are not, at a quarter of 10 s each.
	asideAlone = 5 * time.Minute
	// lockWait is how long a session of ours that was cut off keeps what it has locked.
	lockWait = 5 * time.Second
	// asidePause lies between two tries.
	asidePause = 200 * time.Millisecond
	// Pauses while the primary is away, doubling, of which a random half. They end with the lease, and when the run is told to stop.
	backoffMin = 100 * time.Millisecond
	backoffMax = 5 * time.Second
)

// cancel has a batch cancelled on the primary. What fails is halved until the failing orders stand alone, and these are parked. What is locked is
// put aside for the end of the run, whole: each half would wait as long as the whole before it. When ctx ends, the transaction under way is
// finished, and nothing is waited for any more.
func (u *run) cancel(ctx context.Context, batch []orders.Overdue, timeout time.Duration) {
	failures, waits := 0, 0
	for parts := [][]orders.Overdue{batch}; len(parts) > 0 && u.failed() == nil; {
		part := parts[len(parts)-1]
		outcomes, err := u.askFor(u.work, part, timeout)
		if err == nil {
			parts, failures, waits = parts[:len(parts)-1], 0, 0
			u.settle(part, outcomes)
			continue
		}
		if u.work.Err() != nil {
			return // the lease is lost: the orders are another run's
		}
		away, locked := u.judge(ctx, err)
		switch {
		case away:
			waits++
			if waits == 1 {
				u.log.Warn("reconcile waits for the primary", "run", u.place.id, "err", err)
			}
			if !sleep(ctx, backoff(waits)) {
				u.abandon()
				return
			}
		case locked:
			parts = parts[:len(parts)-1]
			u.putAside(part)
		case len(part) > 1:
			parts = append(parts[:len(parts)-1], part[len(part)/2:], part[:len(part)/2])
		case failures+1 < maxFailures:
			failures++
			if !sleep(ctx, backoff(failures)) {
				u.abandon()
				return
			}
		default:
			parts, failures = parts[:len(parts)-1], 0
			if !u.park(ctx, part[0], fmt.Sprintf("cancelling it failed %d times: %v", maxFailures, err)) {
				u.abandon()
				return
			}
			u.parkedOne(part[0], err)
		}
	}
}

// abandon says that a batch was left before its end, since the run was told to stop.
func (u *run) abandon() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.left = true
}

// askFor has one transaction of orders cancelled.
func (u *run) askFor(ctx context.Context, part []orders.Overdue, timeout time.Duration) (outcomes []orders.Outcome, err error) {
	ids := make([]string, len(part))
	for i, o := range part {
		ids[i] = orders.FormatID(o.ID)
	}
	ctx, cancel := context.WithTimeout(orders.WithRun(ctx, u.place.id), timeout)
	defer cancel()
	// A panic over one order must not end the run, or every night would end there.
	defer func() {
		if v := recover(); v != nil {
			u.log.Error("panic", "doing", "cancel", "run", u.place.id, "value", fmt.Sprint(v), "stack", string(debug.Stack()))
			outcomes, err = nil, fmt.Errorf("cancel %d orders: panic: %v", len(ids), v)
		}
	}()
	outcomes, err = u.canceller.CancelDue(ctx, ids)
	if err == nil && len(outcomes) != len(ids) {
		err = fmt.Errorf("cancel %d orders: the canceller gave %d outcomes", len(ids), len(outcomes))
	}
	return outcomes, err
}

// judge says whether the primary is the trouble, and otherwise whether the orders are locked rather than wrong. A transaction that waited too long
// for a lock looks like a database that does not answer; the database tells the two apart.
func (u *run) judge(ctx context.Context, err error) (away, locked bool) {
	if !orders.IsUnavailable(err) {
		return false, false
	}
	if !orders.IsRetryable(err) && !errors.Is(err, context.DeadlineExceeded) {
		return true, false
	}
	ctx, cancel := context.WithTimeout(ctx, u.cfg.CancelTimeout)
	defer cancel()
	if u.primary.Ready(ctx) != nil {
		return true, false
	}
	return false, true
}

// settle counts what became of the orders of a transaction.
func (u *run) settle(part []orders.Overdue, outcomes []orders.Outcome) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.counts.Scanned += int64(len(part))
	for _, o := range outcomes {
		u.metrics.outcomes.WithLabelValues(string(o.Result)).Inc()
		switch o.Result {
		case orders.ResultCancelled:
			u.inRow = 0
			u.counts.Cancelled++
			u.metrics.cancelled.Inc()
			switch o.Missed {
			case orders.MissedNotReceived:
				u.counts.Missed.SentNotReceived++
			case orders.MissedParked:
				u.counts.Missed.Parked++
			default:
				u.counts.Missed.NeverSent++
			}
			if o.Missed != "" {
				u.metrics.missed.WithLabelValues(string(o.Missed)).Inc()
			}
		case orders.ResultAlreadyPaid:
			u.counts.AlreadyPaid++
		case orders.ResultHeld:
			u.counts.Held++
		case orders.ResultInvalid, orders.ResultParked: // parked by the store, or by the gate
			u.counts.Parked++
			u.metrics.parked.Inc()
		default:
			u.counts.Others++
		}
	}
}

func (u *run) putAside(part []orders.Overdue) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.aside)+len(part) > maxAside {
		if u.failure == nil {
			u.failure = fmt.Errorf("more than %d orders cannot be cancelled since their rows are locked; look for a transaction that was left open on the primary", maxAside)
		}
		return
	}
	u.aside = append(u.aside, part...)
	u.log.Warn("orders are locked; they are tried again at the end of the run", "run", u.place.id, "orders", len(part), "first", part[0].ID)
}

// tryAside asks for the orders that were locked again and again, in ever smaller batches; when the time for that is over, for each alone; and parks
// those that stay locked.
func (u *run) tryAside(ctx context.Context) error {
	begun := time.Now()
	var alone time.Time // when each was begun to be tried alone
	for size := u.cfg.Batch; ; size = max(size/2, 1) {
		u.mu.Lock()
		left := u.aside
		u.aside = nil
		u.mu.Unlock()
		if len(left) == 0 {
			return nil
		}
		late := time.Since(begun) > max(asideTime, 2*u.cfg.CancelTimeout)
		if late && alone.IsZero() {
			// The batches that were cut off last may still lock their orders.
			if !sleep(ctx, lockWait) {
				return cause(ctx, ctx.Err())
			}
			size, alone = 1, time.Now()
		} else if late {
			for _, o := range left {
				if !u.park(ctx, o, "its rows, or those of its stock, are locked by somebody: look for a transaction that was left open on the primary") {
					return cause(ctx, ctx.Err())
				}
				u.count(func(c *Counts) { c.Scanned++; c.Parked++ })
			}
			return nil
		}
		for batch := range slices.Chunk(left, size) {
			if !alone.IsZero() && time.Since(alone) > asideAlone {
				u.mu.Lock()
				u.aside = append(u.aside, batch...)
				u.mu.Unlock()
				continue
			}
			if err := u.limiter.WaitN(ctx, len(batch)); err != nil {
				return cause(ctx, err)
			}
			free, err := u.free(ctx, batch)
			if err != nil {
				return err
			}
			if len(free) > 0 {
				u.cancel(ctx, free, u.cfg.CancelTimeout/asideShare)
			}
			u.show(false)
		}
		if !sleep(ctx, asidePause) {
			return cause(ctx, ctx.Err())
		}
	}
}

// free gives those of a batch whose rows nobody has locked at this moment, and puts the others aside again.
func (u *run) free(ctx context.Context, batch []orders.Overdue) ([]orders.Overdue, error) {
	ids := make([]int64, len(batch))
	for i, o := range batch {
		ids[i] = o.ID
	}
	var unlocked []int64
	err := u.patiently(ctx, func() (err error) {
		within, cancel := context.WithTimeout(u.work, u.cfg.CancelTimeout)
		defer cancel()
		unlocked, err = u.primary.Unlocked(within, ids)
		return err
	})
	if err != nil {
		return nil, err
	}
	var free, locked []orders.Overdue
	for _, o := range batch {
		if slices.Contains(unlocked, o.ID) {
			free = append(free, o)
		} else {
			locked = append(locked, o)
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.aside = append(u.aside, locked...)
	return free, nil
}

// park sets an order aside that cannot be cancelled, so that the run goes on. The next run tries it again. False: ctx ended before it was done.
func (u *run) park(ctx context.Context, o orders.Overdue, why string) bool {
	id, reason := orders.FormatID(o.ID), fmt.Sprintf("reconcile run %d: %s", u.place.id, why)
	for n := 1; ; n++ {
		within, cancel := context.WithTimeout(u.work, u.cfg.CancelTimeout)
		err := u.primary.Park(within, orders.Parked{What: orders.ParkedOrder, Ref: id, Reason: reason})
		cancel()
		if err == nil {
			break
		}
		u.log.Warn("an order cannot be parked; trying again", "run", u.place.id, "order", id, "err", err)
		if !sleep(ctx, backoff(n)) {
			return false
		}
	}
	u.log.Error("parked", "what", orders.ParkedOrder, "ref", id, "reason", reason)
	u.metrics.parked.Inc()
	return true
}

// parkedOne counts an order that was parked for a failure of its own, and ends the run when it is one of too many.
func (u *run) parkedOne(o orders.Overdue, failure error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.counts.Scanned++
	u.counts.Parked++
	if u.inRow++; u.inRow == maxParkedInRow && u.failure == nil {
		u.failure = fmt.Errorf("%d orders in a row could not be cancelled, which is hardly theirs; the last, %d: %w", maxParkedInRow, o.ID, failure)
	}
}

// patiently does one thing on the primary until the primary is there to do it, and gives up when ctx ends, which it does with the lease.
func (u *run) patiently(ctx context.Context, do func() error) error {
	for n := 1; ; n++ {
		err := do()
		if err == nil || !orders.IsUnavailable(err) || ctx.Err() != nil {
			return err
		}
		if n == 1 {
			u.log.Warn("reconcile waits for the primary", "run", u.place.id, "err", err)
		}
		if !sleep(ctx, backoff(n)) {
			return cause(ctx, err)
		}
	}
}

// failed is why the run has to end, or nil.
func (u *run) failed() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.failure
}

// backoff is the pause after the n-th failure in a row.
func backoff(n int) time.Duration {
	d := backoffMin
	for i := 1; i < n && d < backoffMax; i++ {
		d *= 2
	}
	d = min(d, backoffMax)
	return d/2 + time.Duration(rand.Int64N(int64(d/2)+1)) //nolint:gosec // jitter needs no secrecy
}
