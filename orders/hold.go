package orders

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// The gateway is asked outside any transaction, so a cancel that passes it has two halves: what is due is found out first, and cancelled
// when the answers are there. The second half decides by the locked rows again, so what changes in between changes the outcome, never the
// rule.

const (
	// ResultDue is given by [Store.CheckDue] alone, and says that CancelDue would cancel the order.
	ResultDue Result = "due"
	// ResultParked says that the cancel was given up: nobody could find out whether the order is paid. It is parked with the reason, and
	// stays unpaid until somebody, or the next reconcile, asks again.
	ResultParked Result = "parked"
)

// CheckDue does for these orders all that [Store.CancelDue] does, but for the cancel itself: those that it would cancel have the outcome due,
// and nothing was written for them. The others need no gateway, and their outcomes are final. A deadline that passes after this call is
// therefore met by the next one, which no order can slip through unasked.
func (s *Store) CheckDue(ctx context.Context, ids []string) ([]Outcome, error) {
	return s.dueOrders(ctx, "look at", ids, true)
}

// Doubt is a due order whose cancel cannot be decided now.
type Doubt struct {
	ID int64
	// Reason is kept with the order. Longer than 255 characters is cut.
	Reason string
	// Close says that the gateway was told to close the order's payment page and gave no answer: it is told again until it does, by a task
	// that commits with the hold.
	Close bool
	// Final says that asking again would not help: the order is parked at once.
	Final bool
}

// HoldLimits bound how long orders are held. All must be positive.
type HoldLimits struct {
	// Min and Max bound one hold.
	Min, Max time.Duration
	// GiveUpAfter is how long after its deadline an order is no longer held, but parked.
	GiveUpAfter time.Duration
}

// Hold puts the cancel of due orders off, with a reason, and times their outbox rows anew, so that a message comes again when the hold ends.
// A hold is as long as the order is overdue, within the limits, so that the pauses double without a counter. An order that is overdue for
// longer than GiveUpAfter is parked instead. The locked rows decide: an order that was paid, cancelled or extended meanwhile has the outcome
// that [Store.CancelDue] would give, and is left alone. Outcomes come in the order of the doubts; an id must not be there twice.
func (s *Store) Hold(ctx context.Context, doubts []Doubt, limits HoldLimits) ([]Outcome, error) {
	if limits.Min <= 0 || limits.Max < limits.Min || limits.GiveUpAfter <= 0 {
		return nil, invalid("hold orders for %s to %s, giving up after %s; each must be positive, and the first not above the second", limits.Min, limits.Max, limits.GiveUpAfter)
	}
	sorted := slices.SortedFunc(slices.Values(doubts), func(a, b Doubt) int { return int(min(max(a.ID-b.ID, -1), 1)) })
	results := make(map[int64]Outcome, len(doubts))
	for batch := range slices.Chunk(sorted, maxBatch) {
		var part map[int64]Outcome
		err := s.inTx(ctx, fmt.Sprintf("hold %d orders", len(batch)), func(ctx context.Context, t *txn) (err error) {
			part, err = t.hold(ctx, batch, limits)
			return err
		})
		if err != nil {
			return nil, err
		}
		for id, o := range part {
			results[id] = o
		}
	}
	outcomes := make([]Outcome, len(doubts))
	for i, d := range doubts {
		outcomes[i] = results[d.ID]
	}
	return outcomes, nil
}

// hold is Hold in one transaction, of doubts that are sorted by id.
func (t *txn) hold(ctx context.Context, doubts []Doubt, limits HoldLimits) (map[int64]Outcome, error) {
	ids := make([]int64, len(doubts))
	for i, d := range doubts {
		ids[i] = d.ID
	}
	found, err := t.lock(ctx, ids)
	if err != nil {
		return nil, err
	}
	outcomes := make(map[int64]Outcome, len(doubts))
	var later []retiming
	var toClose []int64
	var events []Event
	var parked []Parked
	for _, d := range doubts {
		o, there := found[d.ID]
		if !there {
			outcomes[d.ID] = Outcome{ID: FormatID(d.ID), Result: ResultNotFound}
			continue
		}
		out := decide(o, t.now)
		if out.Result != ResultCancelled {
			// Whoever extended or held it meanwhile has timed its outbox row.
			outcomes[d.ID] = out
			continue
		}
		if d.Close {
			toClose = append(toClose, d.ID)
		}
		overdue := out.Lateness
		out.Lateness = 0
		var until instant
		var reason any
		if d.Final || overdue >= limits.GiveUpAfter {
			out.Result = ResultParked
			parked = append(parked, Parked{What: ParkedOrder, Ref: FormatID(d.ID), Reason: d.Reason})
		} else {
			out.Result, out.Remaining = ResultHeld, min(max(overdue, limits.Min), limits.Max)
			until, reason = at(t.now.Add(out.Remaining)), clip(d.Reason, 255)
			later = append(later, retiming{orderID: d.ID, deliverAt: until.time, after: resendPause(out.Remaining)})
			e, err := event(d.ID, EventHeld, ActorLapse, map[string]any{"reason": reason, "until": until.time})
			if err != nil {
				return nil, err
			}
			events = append(events, e)
		}
		outcomes[d.ID] = out
		if out.Result == ResultParked && !o.holdUntil.valid {
			continue // there is no hold to take away
		}
		n, err := t.exec(ctx, `UPDATE orders SET hold_until = ?, hold_reason = ? WHERE id = ? AND status = 'unpaid' AND deadline_at <= ?`, until, reason, d.ID, at(t.now))
		if err != nil {
			return nil, fmt.Errorf("hold order %d: %w", d.ID, err)
		}
		if n != 1 {
			return nil, fmt.Errorf("order %d is locked and did not match: %w", d.ID, errAgain)
		}
	}
	if err := t.retime(ctx, later); err != nil {
		return nil, err
	}
	if err := t.addTasks(ctx, toClose, TaskClose); err != nil {
		return nil, err
	}
	if err := t.addEvents(ctx, events); err != nil {
		return nil, err
	}
	return outcomes, t.park(ctx, parked)
}
