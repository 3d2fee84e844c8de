// Which orders share a message. The invariants, held by the tests: no order is in a message that is due before its own deliver-at,
// except on a hop; none is due later than the tick that it would have had alone, except among orders that are overdue already; no
// message has more than the limit; every order that goes in comes out once.

package relay

import (
	"cmp"
	"container/heap"
	"slices"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// lease is one claim as this process sees it. The instants but now are of the local monotonic clock and count from before the database
// was asked, so that they lie earlier than what the database has.
type lease struct {
	token     string
	now       time.Time // the database's clock at the claim
	claimedAt time.Time
	startBy   time.Time // no send is started later
	until     time.Time // no mark makes sense later
}

// row is one claimed outbox row.
type row struct {
	orders.Pending
	lease *lease
	hop   bool // comes early on purpose
}

// message is a timed message to be.
type message struct {
	due     time.Time
	rows    []row
	flushAt time.Time // while it may still gather rows
	probe   bool      // decides whether a paused relay goes on
}

// startBy is the earliest of the leases in it.
func (m *message) startBy() time.Time {
	by := m.rows[0].lease.startBy
	for _, r := range m.rows[1:] {
		if r.lease != m.rows[0].lease && r.lease.startBy.Before(by) {
			by = r.lease.startBy
		}
	}
	return by
}

// byLease splits rows by their claim, since a mark carries one token.
func byLease(rows []row) [][]row {
	var parts [][]row
	at := make(map[*lease]int, 1)
	for _, r := range rows {
		i, known := at[r.lease]
		if !known {
			i = len(parts)
			at[r.lease] = i
			parts = append(parts, nil)
		}
		parts[i] = append(parts[i], r)
	}
	return parts
}

// coalescer gathers rows into messages. It belongs to one goroutine.
type coalescer struct {
	tick, linger, maxDelay time.Duration
	limit                  int
	open                   map[int64]*message // by due, in milliseconds since the epoch; overdueKey: all that are overdue
	earliest               time.Time          // no message in open has an earlier flushAt; zero: open is empty
}

const overdueKey = -1 << 63

func newCoalescer(c Config) *coalescer {
	return &coalescer{tick: c.Tick, linger: max(c.Linger, 0), maxDelay: c.MaxDelay, limit: c.MaxOrdersPerMessage, open: make(map[int64]*message)}
}

// floorTick and ceilTick round to a multiple of tick since the Unix epoch, as the broker does. (Truncate counts from year 1, which
// differs for ticks that do not divide a day.)
func floorTick(t time.Time, tick time.Duration) time.Time {
	ms, n := t.UnixMilli(), tick.Milliseconds()
	rest := ms % n
	if rest < 0 {
		rest += n
	}
	return time.UnixMilli(ms - rest).UTC()
}

func ceilTick(t time.Time, tick time.Duration) time.Time {
	if down := floorTick(t, tick); down.Before(t) {
		return down.Add(tick)
	}
	return t.UTC()
}

// dueOf gives the due of an order that is to be delivered at deliverAt, and the message it belongs to.
func (c *coalescer) dueOf(deliverAt, now time.Time) (due time.Time, key int64, hop bool) {
	due = ceilTick(deliverAt, c.tick)
	if !due.After(now) {
		return due, overdueKey, false
	}
	if farthest := now.Add(c.maxDelay); deliverAt.After(farthest) {
		// Rounded down, so that the hops of one tick share a message and none is beyond what the broker takes.
		due, hop = floorTick(farthest, c.tick), true
	}
	return due, due.UnixMilli(), hop
}

// add puts a row into the message of its due and gives that message when it is full. now is the database's clock; clock is the local
// one, from which the linger counts.
func (c *coalescer) add(r row, now, clock time.Time) (full *message) {
	due, key, hop := c.dueOf(r.DeliverAt, now)
	m := c.open[key]
	if m == nil {
		// A linger of many seconds must not reach into the time that sending takes.
		m = &message{due: due, flushAt: clock.Add(max(0, min(c.linger, due.Sub(now)-urgent)))}
		c.open[key] = m
		if c.earliest.IsZero() || m.flushAt.Before(c.earliest) {
			c.earliest = m.flushAt
		}
	}
	// Among overdue orders the latest tick is the due: it has passed for all of them.
	if due.After(m.due) {
		m.due = due
	}
	r.hop = hop
	m.rows = append(m.rows, r)
	if len(m.rows) < c.limit {
		return nil
	}
	delete(c.open, key)
	return m
}

// flush gives the messages that have gathered for long enough, or all of them, soonest due first.
func (c *coalescer) flush(clock time.Time, all bool) []*message {
	if !all && (c.earliest.IsZero() || c.earliest.After(clock)) {
		return nil // the usual case, without a look at each of them
	}
	var out []*message
	c.earliest = time.Time{}
	for key, m := range c.open {
		if all || !m.flushAt.After(clock) {
			out = append(out, m)
			delete(c.open, key)
		} else if c.earliest.IsZero() || m.flushAt.Before(c.earliest) {
			c.earliest = m.flushAt
		}
	}
	slices.SortFunc(out, func(a, b *message) int { return a.due.Compare(b.due) })
	return out
}

// next is the earliest instant at which flush may have something to give; zero where nothing gathers.
func (c *coalescer) next() time.Time { return c.earliest }

// queue has the messages that wait for a sender, soonest due first: in a backlog the orders that fall due now must not wait for those
// of next week. Among equals the order of arrival is kept.
type queue struct {
	items []queued
	count int64
}

type queued struct {
	*message
	seq int64
}

func (q *queue) push(m *message) {
	q.count++
	heap.Push((*byDue)(q), queued{m, q.count})
}

func (q *queue) pop() *message { return heap.Pop((*byDue)(q)).(queued).message }

func (q *queue) head() *message {
	if len(q.items) == 0 {
		return nil
	}
	return q.items[0].message
}

// removeIf takes messages out and gives their rows.
func (q *queue) removeIf(gone func(*message) bool) []row {
	var rows []row
	q.items = slices.DeleteFunc(q.items, func(i queued) bool {
		if !gone(i.message) {
			return false
		}
		rows = append(rows, i.rows...)
		return true
	})
	heap.Init((*byDue)(q))
	return rows
}

// byDue is the queue as container/heap wants it.
type byDue queue

func (b *byDue) Len() int { return len(b.items) }
func (b *byDue) Less(i, j int) bool {
	x, y := b.items[i], b.items[j]
	return cmp.Or(x.due.Compare(y.due), cmp.Compare(x.seq, y.seq)) < 0
}
func (b *byDue) Swap(i, j int) { b.items[i], b.items[j] = b.items[j], b.items[i] }
func (b *byDue) Push(x any)    { b.items = append(b.items, x.(queued)) }
func (b *byDue) Pop() any {
	last := len(b.items) - 1
	x := b.items[last]
	b.items[last] = queued{} // lets the message go
	b.items = b.items[:last]
	return x
}
