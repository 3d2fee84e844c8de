// What is in hand: every received message from its Receive to the end of its acknowledgement, and what is still to be done for it.
//
// A message with open tasks is in Consumer.messages; each of its open tasks is in exactly one place: ready, waiting, or a worker's
// hands. It leaves when its acknowledgement has been tried, or when it is handed back at the end.

package consumer

import (
	"container/heap"
	"context"
	"math"
	"sync"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// message is one received message.
type message struct {
	*Delivery
	orders int // its share of Consumer.inHand

	open   int       // tasks not ended; guarded by Consumer.mu
	hidden time.Time // until when others do not see it, by our clock; guarded by Consumer.mu
	lost   bool      // others have seen it, or will: renewing is over; guarded by Consumer.mu

	// call is held during Ack and ChangeInvisible: a renewal that came after the acknowledgement could bring the message back.
	call sync.Mutex
	over bool // no further call; guarded by call
}

// task is one thing to be done for a message: an order to ask about, or something to park.
type task struct {
	m    *message
	id   string         // of the order
	park *orders.Parked // to be parked; nil: to be asked about

	since time.Time // when it became ready
	at    time.Time // while it waits: until when

	// alone keeps an order that has failed alone out of the batches of others.
	alone    bool
	slow     bool      // it was locked when it was asked about alone: left to the slow worker
	waits    int       // how often it was locked
	failures int       // how often it failed alone
	failing  time.Time // when the first batch began that failed with it
}

// isSlow says which queue the task belongs to. Parking waits for no order's lock.
func (t *task) isSlow() bool { return t.slow && t.park == nil }

// taskHeap has the soonest task first.
type taskHeap []*task

func (h taskHeap) Len() int           { return len(h) }
func (h taskHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h taskHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }

// Push implements heap.Interface.
func (h *taskHeap) Push(t any) { *h = append(*h, t.(*task)) }

// Pop implements heap.Interface.
func (h *taskHeap) Pop() any {
	old := *h
	t := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return t
}

// reserve waits until messages may be received, and says how many: as many as are expected to fit into what is free, shared fairly
// among the receivers. The room is theirs until accept or release. Zero messages: ctx has ended.
func (c *Consumer) reserve(ctx context.Context) (messages, room int) {
	for {
		c.mu.Lock()
		each := max(1, int(math.Ceil(c.guess)))
		n := min(max(c.cfg.MaxInHand/(each*c.cfg.Receivers), 1), c.cfg.MaxMessages)
		taken := c.inHand + c.reserved
		// A message that is larger than everything may still come, but alone.
		if c.paused == nil && ctx.Err() == nil && (taken == 0 || taken+n*each <= c.cfg.MaxInHand) {
			c.reserved += n * each
			c.mu.Unlock()
			return n, n * each
		}
		changed := c.changed
		c.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, 0
		}
	}
}

// take gives up the reserved room and takes messages in hand, each with its tasks. It returns those for which there is no room: they
// turned out larger than the ones before.
func (c *Consumer) take(room int, got [][]*task) (surplus []*message) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reserved -= room
	for _, tasks := range got {
		m := tasks[0].m
		m.orders = len(tasks)
		// Up at once, so that too many are not asked for a second time; down slowly.
		n := float64(m.orders)
		c.guess = max(n, c.guess+(n-c.guess)/64)
		if c.inHand >= c.cfg.MaxInHand {
			surplus = append(surplus, m)
			continue
		}
		m.open = m.orders
		m.hidden = now.Add(c.cfg.Invisible)
		c.inHand += m.orders
		c.metrics.inHand.Add(float64(m.orders))
		c.messages[m] = struct{}{}
		for _, t := range tasks {
			t.since = now
		}
		c.ready = append(c.ready, tasks...)
	}
	c.wake()
	return surplus
}

// next waits for something to do: a batch of orders, or one task that stands alone; for the slow worker, one of the locked orders. Nil:
// nothing more is to be begun.
func (c *Consumer) next(slow bool) []*task {
	for {
		c.mu.Lock()
		now := time.Now()
		for len(c.waiting) > 0 && !c.waiting[0].at.After(now) {
			t := heap.Pop(&c.waiting).(*task)
			t.since = now
			if t.isSlow() {
				c.slow = append(c.slow, t)
			} else {
				c.ready = append(c.ready, t)
			}
			c.wake() // whoever finds it here need not be the one to do it
		}
		if c.stopped {
			c.mu.Unlock()
			return nil
		}
		var wait time.Duration
		switch {
		case c.paused != nil:
			// Until it is over.
		case slow && len(c.slow) > 0:
			t := c.slow[0]
			c.slow = c.slow[1:]
			c.mu.Unlock()
			return []*task{t}
		case slow:
		case len(c.ready) > 0:
			n := c.batch()
			if wait = time.Until(c.ready[0].since.Add(c.cfg.BatchWait)); n > 0 && (wait <= 0 || n == c.cfg.BatchOrders || c.draining) {
				tasks := c.pop(n)
				c.mu.Unlock()
				return tasks
			}
			if n == 0 {
				tasks := c.pop(1)
				c.mu.Unlock()
				return tasks
			}
		}
		if len(c.waiting) > 0 && c.paused == nil {
			if w := max(time.Until(c.waiting[0].at), time.Millisecond); wait <= 0 || w < wait {
				wait = w
			}
		}
		changed := c.changed
		c.mu.Unlock()
		if wait <= 0 {
			<-changed
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// batch counts the orders at the front of ready that may be asked about together, 0 if the first task stands alone. It must be
// called with mu held.
func (c *Consumer) batch() int {
	n := 0
	for n < len(c.ready) && n < c.cfg.BatchOrders && c.ready[n].park == nil && !c.ready[n].alone {
		n++
	}
	return n
}

// pop takes the first n tasks of ready. It must be called with mu held.
func (c *Consumer) pop(n int) []*task {
	tasks := append([]*task(nil), c.ready[:n]...)
	clear(c.ready[:n])
	c.ready = c.ready[n:]
	if len(c.ready) == 0 {
		c.ready = nil
	}
	return tasks
}

// putBack returns tasks to the front of the queue that they belong to, which is one and the same for all of them.
func (c *Consumer) putBack(tasks []*task) {
	c.set(func() {
		queue := &c.ready
		if tasks[0].isSlow() {
			queue = &c.slow
		}
		*queue = append(append([]*task(nil), tasks...), *queue...)
	})
}

// later puts a task off.
func (c *Consumer) later(t *task, d time.Duration) {
	t.at = time.Now().Add(d)
	c.wait([]*task{t})
}

// wait puts tasks off until their instants.
func (c *Consumer) wait(tasks []*task) {
	if len(tasks) == 0 {
		return
	}
	c.set(func() {
		for _, t := range tasks {
			heap.Push(&c.waiting, t)
		}
	})
}

// end ends tasks; a message whose last task ends is on its way to be acknowledged.
func (c *Consumer) end(tasks []*task) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range tasks {
		if t.m.open--; t.m.open == 0 {
			c.acks <- t.m // never blocks, see acks
		}
	}
}

// drop takes a message out of hand.
func (c *Consumer) drop(m *message) {
	c.set(func() {
		if _, there := c.messages[m]; !there {
			return
		}
		delete(c.messages, m)
		c.inHand -= m.orders
		c.metrics.inHand.Sub(float64(m.orders))
	})
}
