package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// maxDecodePanics is the delivery at which a message whose decoding panics is parked. Decoding has no state, so the retries are for
// what lies outside: memory, a build with a fault that another replica has not.
const maxDecodePanics = 3

// receive is one receiver: it takes messages in hand while there is room and the database answers. It begins no Receive after the end of
// ctx, but lets the one under way run to its own end, or that of hard: what the broker hands out for it is ours by then, and would come to
// others seconds late.
func (c *Consumer) receive(ctx, hard context.Context) {
	failures := 0
	for {
		n, room := c.reserve(ctx)
		if n == 0 {
			return
		}
		var ds []*Delivery
		err := c.guarded("receive", func() (err error) {
			ds, err = c.source.Receive(hard, n, c.cfg.Invisible)
			return err
		})
		// Messages that come with an error have been handed to us all the same.
		c.accept(ctx, room, ds)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			if c.deaf.Swap(false) {
				c.log.Info("messages are received again")
			}
			failures = 0
			continue
		}
		failures++
		// The wait for the first connection is no failure, and has been logged as what it is.
		if !errors.Is(err, ErrNotReady) {
			c.metrics.receiveErrors.Inc()
			if !c.deaf.Swap(true) {
				c.log.Warn("messages cannot be received", "err", err)
			}
		}
		if !sleep(ctx, c.backoff(failures)) {
			return
		}
	}
}

// accept takes received messages in hand, for the room that was reserved for them. It puts off those of a newer version.
func (c *Consumer) accept(ctx context.Context, room int, ds []*Delivery) {
	got := make([][]*task, 0, len(ds))
	var newer, broken []*message
	for _, d := range ds {
		c.metrics.received.Inc()
		if d.Attempt > 1 {
			c.metrics.redelivered.Inc()
		}
		m := &message{Delivery: d}
		var e orders.Expiry
		err := c.guarded("decode", func() (err error) {
			e, err = c.decode(d.Body)
			return err
		})
		var panicked *panicError
		switch {
		case err == nil:
			tasks := make([]*task, len(e.Orders))
			for i, id := range e.Orders {
				tasks[i] = &task{m: m, id: id}
			}
			got = append(got, tasks)
		case errors.Is(err, orders.ErrNewerVersion):
			newer = append(newer, m)
		case errors.As(err, &panicked) && d.Attempt < maxDecodePanics:
			broken = append(broken, m)
		default:
			got = append(got, []*task{{m: m, park: &orders.Parked{
				What: orders.ParkedMessage, Ref: d.MessageID, Reason: fmt.Sprintf("unreadable message of topic %s: %v", d.Topic, err),
				Body: append([]byte{}, d.Body...), // also an empty one is a body
			}}})
		}
	}
	surplus := c.take(room, got)
	c.metrics.handedBack.Add(float64(len(surplus)))
	// Without the end of ctx: the messages are ours to put where others find them.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTime)
	defer cancel()
	c.forEach(newer, func(m *message) {
		c.metrics.newer.Inc()
		d := newerVersionDelay(c.cfg.NewerVersionDelay, m.Attempt)
		c.log.Warn("message of a newer version: left to a newer consumer of the group",
			"message", m.MessageID, "topic", m.Topic, "attempt", m.Attempt, "hidden_for", d)
		c.hide(ctx, m, d)
	})
	c.forEach(append(broken, surplus...), func(m *message) { c.hide(ctx, m, handBackAfter) })
}

// newerVersionDelay doubles with the deliveries, up to an hour.
func newerVersionDelay(first time.Duration, attempt int) time.Duration {
	d := first
	for range attempt - 1 {
		if d *= 2; d >= maxNewerVersionDelay {
			return maxNewerVersionDelay
		}
	}
	return d
}
