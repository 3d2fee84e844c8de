package consumer

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"time"
)

// pause stops receiving and asking until the database answers again. The messages in hand are renewed meanwhile.
func (c *Consumer) pause(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return
	}
	if c.paused == nil {
		c.since = time.Now()
		c.metrics.paused.Inc()
		c.log.Warn("paused: the database does not take work", "err", err)
		c.wake()
	}
	c.paused = err
}

// keep ends pauses: it asks the database, at once at the start and with a growing pause otherwise. It ends with ctx.
func (c *Consumer) keep(ctx context.Context) {
	c.metrics.paused.Inc()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.paused != nil {
			c.metrics.paused.Dec()
		}
	}()
	for first := true; ; first = false {
		c.mu.Lock()
		paused, changed := c.paused, c.changed
		if paused != nil && !first {
			c.pauses++
		}
		tries := c.pauses
		c.mu.Unlock()
		if paused == nil {
			select {
			case <-changed:
				continue
			case <-ctx.Done():
				return
			}
		}
		if !first && !sleep(ctx, c.backoff(tries)) {
			return
		}
		err := c.probe(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			c.pause(err)
			if first {
				c.log.Warn("waiting for the database", "err", err)
			}
			continue
		}
		c.set(func() {
			c.paused = nil
			c.metrics.paused.Dec()
			c.log.Info("the database takes work", "after", time.Since(c.since).Round(time.Millisecond))
		})
	}
}

// probe asks whether the database takes work.
func (c *Consumer) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.CancelTimeout)
	defer cancel()
	return c.guarded("ask whether the database is ready", func() error { return c.parker.Ready(ctx) })
}

// backoff is the pause after the n-th failure in a row: doubling from BackoffMin up to BackoffMax, of which a random half.
func (c *Consumer) backoff(n int) time.Duration {
	d := c.cfg.BackoffMin
	for i := 1; i < n && d < c.cfg.BackoffMax; i++ {
		d *= 2
	}
	d = min(d, c.cfg.BackoffMax)
	return d/2 + time.Duration(rand.Int64N(int64(d/2)+1)) //nolint:gosec // jitter needs no secrecy
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

// panicError is what a panic of a canceller, a parker, a source or the decoder has been turned into.
type panicError struct {
	doing string
	value any
}

// Error names the value; the stack is in the log.
func (e *panicError) Error() string { return fmt.Sprintf("%s: panic: %v", e.doing, e.value) }

// guarded calls f; a panic in it becomes an error, so that one message cannot end the process.
func (c *Consumer) guarded(doing string, f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			c.metrics.panics.Inc()
			c.log.Error("panic", "doing", doing, "value", fmt.Sprint(v), "stack", string(debug.Stack()))
			err = &panicError{doing: doing, value: v}
		}
	}()
	return f()
}
