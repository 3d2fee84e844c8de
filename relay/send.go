package relay

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
)

// send sends what the hub hands out.
func (r *Relay) send(work context.Context, h *hub) {
	for m := range h.out {
		var o outcome
		r.deliver(work, m, &o, h.marks)
		o.probe = m.probe
		h.outcomes <- o
	}
}

// deliver sends a message and hands its rows to the markers, each row once. A refused message is halved until what is refused stands
// alone.
func (r *Relay) deliver(work context.Context, m *message, o *outcome, marks chan<- mark) {
	settle := func(rows []row, as func([]row) mark) {
		for _, part := range byLease(rows) {
			marks <- as(part)
		}
	}
	// Once a send has failed, the rest of a message that is being halved would fail too.
	if o.err != nil || !time.Now().Before(m.startBy()) || work.Err() != nil {
		r.metrics.givenBack.Add(float64(len(m.rows)))
		settle(m.rows, r.unclaim)
		return
	}
	wire, err := r.encode(m)
	refused := err != nil // by ourselves: it can never be sent either
	var id string
	if err == nil {
		o.tried = true
		id, err = r.sendOnce(work, wire)
		refused = rmq.IsRefusedMessage(err)
	}
	switch {
	case err == nil:
		r.countSent(m)
		settle(m.rows, func(part []row) mark { return r.sent(part, id, m.due) })
	case refused && len(m.rows) > 1:
		r.metrics.refused.Inc()
		half := len(m.rows) / 2
		r.deliver(work, &message{due: m.due, rows: m.rows[:half]}, o, marks)
		r.deliver(work, &message{due: m.due, rows: m.rows[half:]}, o, marks)
	case refused:
		r.metrics.refused.Inc()
		r.cfg.Logger.Error("timed message is refused for good, its order is parked", "order", m.rows[0].OrderID, "due", m.due, "err", err)
		settle(m.rows, func(part []row) mark { return r.park(part, err) })
	default:
		r.metrics.sendFailures.Inc()
		r.metrics.retried.Add(float64(len(m.rows)))
		o.err = err
		settle(m.rows, func(part []row) mark { return r.retry(part, err) })
	}
}

func (r *Relay) sendOnce(work context.Context, m Message) (string, error) {
	ctx, cancel := context.WithTimeout(work, r.cfg.SendTimeout)
	defer cancel()
	start := time.Now()
	id, err := r.sender.Send(ctx, m)
	r.metrics.sendSeconds.Observe(time.Since(start).Seconds())
	return id, err
}

// encode makes the wire form of a message.
func (r *Relay) encode(m *message) (Message, error) {
	ids := make([]string, len(m.rows))
	for i, row := range m.rows {
		ids[i] = orders.FormatID(row.OrderID)
	}
	body, err := orders.EncodeExpiry(orders.Expiry{Due: m.due, Orders: ids})
	if err != nil {
		return Message{}, err
	}
	wire := Message{Topic: r.cfg.Topic, Body: body, Keys: ids, DeliverAt: m.due}
	// A message of many orders belongs to many traces, and continuing one of them would show the others' work in it: only an order that
	// is alone takes its trace along. The outbox rows keep all of them.
	if len(m.rows) == 1 && isTraceparent(m.rows[0].Traceparent) {
		wire.Properties = map[string]string{"traceparent": m.rows[0].Traceparent}
	}
	return wire, nil
}

// isTraceparent lets pass what looks like a W3C traceparent of any version: a property with other characters may be refused by the
// broker, and a trace is no reason to lose the alarm.
func isTraceparent(s string) bool {
	return s != "" && len(s) <= 64 && strings.Trim(s, "0123456789abcdef-") == "" && strings.Count(s, "-") >= 3
}

func (r *Relay) countSent(m *message) {
	r.metrics.sentMessages.Inc()
	r.metrics.sentOrders.Add(float64(len(m.rows)))
	r.metrics.ordersPerMessage.Observe(float64(len(m.rows)))
	var lag time.Duration // of the order that waited longest
	for _, row := range m.rows {
		if row.hop {
			r.metrics.hops.Inc()
		}
		if !row.AvailableAt.IsZero() {
			lag = max(lag, row.lease.now.Sub(row.AvailableAt)+time.Since(row.lease.claimedAt))
		}
	}
	r.metrics.lag.Observe(lag.Seconds())
}

// mark is a change of rows of one lease that still has to be written.
type mark struct {
	what  string
	lease *lease
	rows  int
	sent  []orders.Sent                          // of messages that were sent: marked together with others of the lease
	write func(ctx context.Context) (int, error) // of all others
}

func idsOf(rows []row) []int64 {
	ids := make([]int64, len(rows))
	for i, r := range rows {
		ids[i] = r.OrderID
	}
	return ids
}

func (r *Relay) sent(rows []row, messageID string, due time.Time) mark {
	l, ids := rows[0].lease, idsOf(rows)
	return mark{what: "sent", lease: l, rows: len(ids), sent: []orders.Sent{{IDs: ids, MessageID: messageID, Due: due}}}
}

func (r *Relay) unclaim(rows []row) mark {
	l, ids := rows[0].lease, idsOf(rows)
	return mark{what: "not sent", lease: l, rows: len(ids), write: func(ctx context.Context) (int, error) { return r.store.Unclaim(ctx, l.token, ids) }}
}

func (r *Relay) park(rows []row, cause error) mark {
	l, ids := rows[0].lease, idsOf(rows)
	reason := fmt.Sprintf("the broker refuses the order's timed message for good: %v", cause)
	return mark{what: "parked", lease: l, rows: len(ids), write: func(ctx context.Context) (int, error) {
		n, err := r.store.MarkParked(ctx, l.token, ids, reason)
		r.metrics.parked.Add(float64(n))
		return n, err
	}}
}

// retry gives rows back for another attempt, each after the pause that its own attempts ask for: orders that share a message only this
// time must not share its history.
func (r *Relay) retry(rows []row, cause error) mark {
	l, n := rows[0].lease, len(rows)
	byAttempts := make(map[int][]int64, 1)
	for _, row := range rows {
		byAttempts[row.Attempts] = append(byAttempts[row.Attempts], row.OrderID)
	}
	return mark{what: "to be sent again", lease: l, rows: n, write: func(ctx context.Context) (int, error) {
		total := 0
		for attempts, ids := range byAttempts {
			matched, err := r.store.MarkRetry(ctx, l.token, ids, backoff(r.cfg.BackoffMin, r.cfg.BackoffMax, attempts+1), cause)
			if err != nil {
				return total, err
			}
			total += matched
			delete(byAttempts, attempts)
		}
		return total, nil
	}}
}

// maxMarked bounds the rows that are marked in one transaction: the store locks them in one statement, and gives 500 ids to a list.
const maxMarked = 500

// mark writes marks. Messages that wait for their mark are marked together, as far as they are of one lease: a transaction costs more than
// its rows, and a backlog of small messages would be bound by the commits.
func (r *Relay) mark(work context.Context, h *hub) {
	var next *mark // of another kind or lease than those before it
	for {
		var m mark
		if next != nil {
			m, next = *next, nil
		} else {
			var more bool
			if m, more = <-h.marks; !more {
				return
			}
		}
		for next == nil && m.sent != nil && m.rows < maxMarked {
			another, there := waiting(h.marks)
			switch {
			case !there:
			case another.sent != nil && another.lease == m.lease && m.rows+another.rows <= maxMarked:
				m.rows += another.rows
				m.sent = append(m.sent, another.sent...)
				continue
			default:
				next = &another
			}
			break
		}
		r.settle(work, m)
		h.settled <- m.rows
	}
}

// waiting takes a mark that is there already.
func waiting(marks <-chan mark) (m mark, there bool) {
	select {
	case m, there = <-marks:
	default:
	}
	return m, there
}

// settle writes a mark. One that fails is written again as long as the lease lasts: without it the orders would be sent once more.
func (r *Relay) settle(work context.Context, m mark) {
	ctx, cancel := context.WithDeadline(work, m.lease.until)
	defer cancel()
	for failures := 0; ; {
		start := time.Now()
		n, err := r.write(ctx, m)
		r.metrics.markSeconds.Observe(time.Since(start).Seconds())
		if err == nil {
			// After an error the first try may have been committed, and then nothing is left to match.
			if lost := m.rows - n; lost > 0 && failures == 0 {
				r.metrics.lost.Add(float64(lost))
				r.cfg.Logger.Info("rows were no longer leased by this relay; they are sent again", "orders", lost, "of", m.rows, "mark", m.what)
			}
			return
		}
		failures++
		if !sleep(ctx, backoff(r.cfg.BackoffMin, r.cfg.PauseMax, failures)) {
			r.cfg.Logger.Warn("mark was not written before the lease ended; the orders are sent again", "orders", m.rows, "mark", m.what, "err", err)
			return
		}
	}
}

func (r *Relay) write(ctx context.Context, m mark) (int, error) {
	if m.sent != nil {
		return r.store.MarkSent(ctx, m.lease.token, m.sent)
	}
	return m.write(ctx)
}
