package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

const (
	// maxFailures is how often an order fails alone, while others succeed, before it is parked. More than once, since not every
	// error that passes by itself is known by its number.
	maxFailures = 3
	// aloneShare is the part of CancelTimeout that an order gets which is asked about alone, for it may be locked: an eighth of 10 s is
	// some seventy times what such a transaction takes.
	aloneShare = 8
	// minEarlyWait keeps a canceller that answers "not due, in 0 s" from being asked without a pause.
	minEarlyWait = 5 * time.Millisecond
)

// work is one worker: it cancels batches of orders and parks what is to be parked; or, if slow, asks about the orders that were found
// locked, so that these, however many they are, wait for each other alone. It ends when next has nothing more.
func (c *Consumer) work(ctx context.Context, slow bool) {
	for tasks := c.next(slow); tasks != nil; tasks = c.next(slow) {
		if tasks[0].park != nil {
			c.park(ctx, tasks[0])
		} else {
			c.cancel(ctx, tasks)
		}
	}
}

// cancel asks about a batch of orders. What fails is halved until the failing orders stand alone. What is locked is not halved, since
// each half would wait as long as the whole before it: every order of it is asked about alone, with less time.
func (c *Consumer) cancel(ctx context.Context, batch []*task) {
	type failure struct {
		t   *task
		err error
	}
	var alone []failure
	begun := time.Now()
	parts := [][]*task{batch}
	for len(parts) > 0 {
		part := parts[len(parts)-1]
		outcomes, err := c.ask(ctx, part)
		if err == nil {
			parts = parts[:len(parts)-1]
			c.mu.Lock()
			c.succeeded, c.pauses = time.Now(), 0
			c.mu.Unlock()
			c.settle(part, outcomes)
			continue
		}
		if ctx.Err() != nil {
			return // the end: Run hands the messages back
		}
		away, stuck := c.judge(ctx, err)
		if away {
			c.metrics.retries.WithLabelValues(retryUnavailable).Inc()
			c.pause(err)
			for _, p := range parts { // each to the front, so that the current one, the last, is the first again
				c.putBack(p)
			}
			break
		}
		c.metrics.retries.WithLabelValues(retryReason(err, stuck)).Inc()
		parts = parts[:len(parts)-1]
		switch {
		case stuck && len(part) == 1:
			c.locked(part[0], err)
			continue
		case stuck:
			for _, t := range part {
				t.alone = true
			}
			c.putBack(part)
			continue
		case len(part) == 1:
			alone = append(alone, failure{part[0], err})
			continue
		}
		parts = append(parts, part[len(part)/2:], part[:len(part)/2])
	}

	// Not one of several orders succeeded: that is hardly the orders' fault.
	all := len(batch) > 1 && len(alone) == len(batch)
	if all {
		c.pause(alone[0].err)
	}
	for _, f := range alone {
		t := f.t
		t.slow = false
		t.failures++
		if t.failing.IsZero() {
			t.failing = begun
		}
		if c.isPoison(t) {
			t.park = &orders.Parked{What: orders.ParkedOrder, Ref: t.id,
				Reason: fmt.Sprintf("cancelling it failed %d times, in message %s: %v", t.failures, t.m.MessageID, f.err)}
			c.putBack([]*task{t})
			continue
		}
		t.alone = !all // when everything failed, they are asked together again: one success does them all
		c.later(t, c.backoff(t.failures))
	}
}

// locked puts off an order whose rows somebody else has locked. It is asked about for as long as that lasts, and never parked.
func (c *Consumer) locked(t *task, err error) {
	if t.waits++; t.waits == maxFailures {
		c.log.Warn("an order cannot be cancelled: its rows are locked or too slow; asking again", "order", t.id, "err", err)
	}
	t.alone, t.slow = true, true
	c.later(t, c.backoff(t.waits))
}

// ask has one transaction of orders cancelled.
func (c *Consumer) ask(ctx context.Context, part []*task) (outcomes []orders.Outcome, err error) {
	ids := make([]string, len(part))
	for i, t := range part {
		ids[i] = t.id
	}
	timeout := c.cfg.CancelTimeout
	if part[0].alone && !part[0].slow {
		timeout /= aloneShare
	}
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	begun := time.Now()
	err = c.guarded("cancel", func() (err error) {
		outcomes, err = c.canceller.CancelDue(within, ids)
		return err
	})
	c.metrics.batchDuration.Observe(time.Since(begun).Seconds())
	c.metrics.batchOrders.Observe(float64(len(ids)))
	if err == nil && len(outcomes) != len(ids) {
		err = fmt.Errorf("cancel %d orders: the canceller gave %d outcomes", len(ids), len(outcomes))
	}
	return outcomes, err
}

// judge says whether the database is the trouble, and otherwise whether the orders are locked or slow rather than wrong. A transaction
// that waited too long for a lock looks like a database that does not answer; the database tells the two apart.
func (c *Consumer) judge(ctx context.Context, err error) (away, stuck bool) {
	if !orders.IsUnavailable(err) {
		return false, false
	}
	if !orders.IsRetryable(err) && !errors.Is(err, context.DeadlineExceeded) {
		return true, false
	}
	if c.probe(ctx) != nil {
		return true, false
	}
	return false, true
}

// isPoison says whether a failing order is to be parked: others succeed beside it, or it has failed for long.
func (c *Consumer) isPoison(t *task) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return t.failures >= maxFailures && c.succeeded.After(t.failing) || time.Since(t.failing) >= c.cfg.GiveUpAfter
}

// settle goes through the outcomes of a transaction.
func (c *Consumer) settle(part []*task, outcomes []orders.Outcome) {
	ended := make([]*task, 0, len(part))
	var early []*task
	now := time.Now()
	for i, t := range part {
		o := outcomes[i]
		switch o.Result {
		case orders.ResultNotDue, orders.ResultHeld:
			if o.Remaining <= c.cfg.EarlyWait {
				c.metrics.early.Inc()
				// A locked order may have been asked alone; from here on it is an order like any other.
				t.alone, t.slow, t.failures, t.failing = false, false, 0, time.Time{}
				t.at = now.Add(max(o.Remaining, minEarlyWait))
				early = append(early, t)
				continue
			}
		case orders.ResultCancelled:
			c.metrics.lateness.Observe(max(o.Lateness, 0).Seconds())
		case orders.ResultAlreadyPaid, orders.ResultAlreadyCancelled, orders.ResultExempt, orders.ResultNotFound, orders.ResultInvalid, orders.ResultParked:
		default:
			t.park = &orders.Parked{What: orders.ParkedOrder, Ref: t.id,
				Reason: fmt.Sprintf("the canceller gave the outcome %q, which this build does not know", o.Result)}
			c.putBack([]*task{t})
			continue
		}
		c.metrics.outcomes.WithLabelValues(string(o.Result)).Inc()
		ended = append(ended, t)
	}
	c.end(ended)
	c.wait(early)
}

// park keeps an order or a message, and ends its task.
func (c *Consumer) park(ctx context.Context, t *task) {
	within, cancel := context.WithTimeout(ctx, c.cfg.CancelTimeout)
	defer cancel()
	err := c.guarded("park", func() error { return c.parker.Park(within, *t.park) })
	switch {
	case err == nil:
		c.metrics.parked.WithLabelValues(t.park.What).Inc()
		c.log.Error("parked", "what", t.park.What, "ref", t.park.Ref, "reason", t.park.Reason, "message", t.m.MessageID)
		c.end([]*task{t})
	case ctx.Err() != nil:
	default:
		if away, _ := c.judge(ctx, err); away {
			c.pause(err)
			c.putBack([]*task{t})
			return
		}
		t.failures++
		c.log.Error("cannot be parked; the message stays in hand", "what", t.park.What, "ref", t.park.Ref, "err", err)
		c.later(t, c.backoff(t.failures))
	}
}
