// Everything that is said to the broker about a message in hand: hide it for longer, acknowledge it, give it back.

package consumer

import (
	"context"
	"errors"
	"sync"
	"time"
)

const (
	// callTime bounds one request about a message. The broker's client has a shorter limit of its own.
	callTime = 5 * time.Second
	// handBackTime is what the end of the grace is kept for: one round of requests.
	handBackTime = 2 * time.Second
	// handBackAfter is when a message that is given back shows again; the broker adds two to three seconds.
	handBackAfter = time.Second
	// renewAtOnce bounds the renewals that are under way at once.
	renewAtOnce = 16
)

// acknowledge is one acker. It ends with ctx.
func (c *Consumer) acknowledge(ctx context.Context) {
	for {
		select {
		case m := <-c.acks:
			err := c.call(ctx, m, true, func(ctx context.Context) error { return c.source.Ack(ctx, m.Delivery) })
			result := ackOK
			switch {
			case errors.Is(err, ErrHandleExpired):
				result = ackExpired
			case err != nil:
				result = ackFailed
			}
			c.metrics.acks.WithLabelValues(result).Inc()
			if err != nil {
				c.log.Debug("a message was not acknowledged and comes again", "message", m.MessageID, "err", err)
			}
			c.drop(m)
		case <-ctx.Done():
			return
		}
	}
}

// call makes one request about a message, unless the last one has been made. The last one is never followed by another.
func (c *Consumer) call(ctx context.Context, m *message, last bool, f func(context.Context) error) error {
	m.call.Lock()
	defer m.call.Unlock()
	if m.over {
		return nil
	}
	m.over = last
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	return c.guarded("call the broker", func() error { return f(ctx) })
}

// renew hides the messages in hand for longer before their time ends, with at least four tries. It ends with ctx.
func (c *Consumer) renew(ctx context.Context) {
	ticker := time.NewTicker(max(c.cfg.Invisible/10, time.Millisecond))
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		var due []*message
		c.mu.Lock()
		for m := range c.messages {
			if !m.lost && time.Until(m.hidden) < c.cfg.Invisible/2 {
				due = append(due, m)
			}
		}
		c.mu.Unlock()
		c.forEach(due, func(m *message) { c.renewOne(ctx, m) })
	}
}

func (c *Consumer) renewOne(ctx context.Context, m *message) {
	until := time.Now().Add(c.cfg.Invisible)
	err := c.call(ctx, m, false, func(ctx context.Context) error {
		return c.source.ChangeInvisible(ctx, m.Delivery, c.cfg.Invisible)
	})
	if ctx.Err() != nil {
		return
	}
	c.mu.Lock()
	switch {
	case err == nil:
		m.hidden = until
	case errors.Is(err, ErrHandleExpired), time.Now().After(m.hidden):
		// Others get it. What is under way for it here goes on: whoever comes second finds nothing to do.
		m.lost = true
	}
	lost := m.lost
	c.mu.Unlock()
	result := renewOK
	if err != nil {
		result = renewFailed
		c.log.Debug("a message in hand was not renewed", "message", m.MessageID, "lost", lost, "err", err)
	}
	c.metrics.renewals.WithLabelValues(result).Inc()
}

// hide puts a message that is not in hand off, and is the last that is said about it. When it fails, the message comes again after
// the time it was received for.
func (c *Consumer) hide(ctx context.Context, m *message, d time.Duration) {
	err := c.call(ctx, m, true, func(ctx context.Context) error { return c.source.ChangeInvisible(ctx, m.Delivery, d) })
	if err != nil {
		c.log.Debug("a message was not put off; it comes again all the same", "message", m.MessageID, "err", err)
	}
}

// handBackAll makes visible what is still in hand at the end, and says how many messages that were.
func (c *Consumer) handBackAll() int {
	c.mu.Lock()
	left := make([]*message, 0, len(c.messages))
	for m := range c.messages {
		left = append(left, m)
	}
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), handBackTime)
	defer cancel()
	c.forEach(left, func(m *message) {
		c.metrics.handedBack.Inc()
		c.hide(ctx, m, handBackAfter)
		c.drop(m)
	})
	return len(left)
}

// forEach calls f for messages, several at once, and waits.
func (c *Consumer) forEach(ms []*message, f func(*message)) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, renewAtOnce)
	for _, m := range ms {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			f(m)
		})
	}
	wg.Wait()
}
