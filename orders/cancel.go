package orders

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"gorm.io/gorm"
)

// Result says what became of one order in a cancel.
type Result string

const (
	// ResultCancelled says that this call cancelled the order and released its stock.
	ResultCancelled Result = "cancelled"
	// ResultAlreadyPaid says that the order is final, and nothing was written.
	ResultAlreadyPaid Result = "already_paid"
	// ResultAlreadyCancelled says that the order is final, and nothing was written.
	ResultAlreadyCancelled Result = "already_cancelled"
	// ResultNotDue says that the deadline lies ahead, by Outcome.Remaining.
	ResultNotDue Result = "not_due"
	// ResultExempt says that the order has no deadline.
	ResultExempt Result = "exempt"
	// ResultHeld says that the cancel is put off, for Outcome.Remaining.
	ResultHeld Result = "held"
	// ResultNotFound says that there is no order of that id. Parked.
	ResultNotFound Result = "not_found"
	// ResultInvalid says that the id is none of this store's, or the order is in a state that this build does not know. Parked.
	ResultInvalid Result = "invalid"
)

// Results are all values of [Result], for metrics that want every label from the start.
func Results() []Result {
	return []Result{ResultCancelled, ResultAlreadyPaid, ResultAlreadyCancelled, ResultNotDue, ResultExempt, ResultHeld, ResultNotFound, ResultInvalid, ResultParked}
}

// Outcome is the result for one order. Remaining is set for not due and held: up to the store's EarlyWait nothing was written, and
// whoever asked asks again after it; with more, the order's outbox row has been timed anew and another message will come.
type Outcome struct {
	ID        string
	Result    Result
	Remaining time.Duration
	// Lateness is how long after its deadline a cancelled order was cancelled, by the database's clock.
	Lateness time.Duration
	// Missed says, of an order that was cancelled for a run of reconcile, why no message did it. Empty without [WithRun].
	Missed Missed
}

// maxBatch is the number of orders in one transaction of CancelDue. Statements with 1,000 ids and more are planned otherwise by
// MariaDB, and a payment waits for the whole batch that holds its order.
const maxBatch = 500

// CancelDue cancels, of the orders with these ids, those that are unpaid and whose deadline has passed, and gives their stock back in
// the same transaction. It is safe to call with anything, any number of times, from any number of processes: the conditional update
// matches an order once. Outcomes come in the order of the ids, repeated ids included; an outcome of cancelled appears once.
//
// An error means that nothing may be assumed about any of the ids: ask again. More than 500 ids are worked on in several
// transactions; the earlier ones stay committed.
func (s *Store) CancelDue(ctx context.Context, ids []string) ([]Outcome, error) {
	return s.dueOrders(ctx, "cancel", ids, false)
}

// dueOrders is CancelDue, or, with checkOnly, CheckDue.
func (s *Store) dueOrders(ctx context.Context, verb string, ids []string, checkOnly bool) ([]Outcome, error) {
	asked := make([]int64, 0, len(ids))
	bad := map[string]string{}
	for _, text := range ids {
		id, err := ParseID(text)
		if err != nil {
			bad[text] = err.Error()
			continue
		}
		asked = append(asked, id)
	}
	slices.Sort(asked)
	asked = slices.Compact(asked)

	results := make(map[int64]Outcome, len(asked))
	for batch := range slices.Chunk(asked, maxBatch) {
		var part map[int64]Outcome
		err := s.inTx(ctx, fmt.Sprintf("%s %d due orders", verb, len(batch)), func(ctx context.Context, t *txn) (err error) {
			part, err = s.cancelDue(ctx, t, batch, checkOnly)
			return err
		})
		if err != nil {
			return nil, err
		}
		for id, o := range part {
			results[id] = o
		}
	}
	if len(bad) > 0 {
		err := s.inTx(ctx, "park invalid order ids", func(ctx context.Context, t *txn) error {
			list := make([]Parked, 0, len(bad))
			for _, text := range slices.Sorted(maps.Keys(bad)) {
				list = append(list, Parked{What: ParkedOrder, Ref: text, Reason: bad[text]})
			}
			return t.park(ctx, list)
		})
		if err != nil {
			return nil, err
		}
	}

	outcomes := make([]Outcome, len(ids))
	told := make(map[int64]bool, len(asked))
	for i, text := range ids {
		if _, isBad := bad[text]; isBad {
			outcomes[i] = Outcome{ID: text, Result: ResultInvalid}
			continue
		}
		id, _ := ParseID(text) // parsed above
		o := results[id]
		if o.Result == ResultCancelled && told[id] {
			o = Outcome{ID: o.ID, Result: ResultAlreadyCancelled}
		}
		told[id] = true
		outcomes[i] = o
	}
	return outcomes, nil
}

// lockedOrder is what a decision needs of an order whose row is locked.
type lockedOrder struct {
	id        int64
	status    Status
	currency  string
	amount    int64
	deadline  instant
	holdUntil instant
	created   instant
}

// lock locks orders by id, in id order, and gives those that exist. No condition beside the ids: one on the status would be answered
// through a secondary index at some list lengths, in another lock order. FORCE INDEX since the optimizer leaves the primary key for
// lists of some hundred ids.
func (t *txn) lock(ctx context.Context, ids []int64) (map[int64]lockedOrder, error) {
	found := make(map[int64]lockedOrder, len(ids))
	err := t.each(ctx, `SELECT id, status, currency, amount, CAST(deadline_at AS CHAR), CAST(hold_until AS CHAR), CAST(created_at AS CHAR)
		FROM orders FORCE INDEX (PRIMARY) WHERE id IN (`+marks(len(ids))+`) ORDER BY id FOR UPDATE`, anys(ids),
		func(rows *sql.Rows) error {
			var o lockedOrder
			if err := rows.Scan(&o.id, &o.status, &o.currency, &o.amount, &o.deadline, &o.holdUntil, &o.created); err != nil {
				return err
			}
			found[o.id] = o
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("lock %d orders: %w", len(ids), err)
	}
	return found, nil
}

// decide gives the outcome of a cancel at now, from the locked row alone.
func decide(o lockedOrder, now time.Time) Outcome {
	out := Outcome{ID: FormatID(o.id)}
	switch {
	case o.status == Paid:
		out.Result = ResultAlreadyPaid
	case o.status == Cancelled:
		out.Result = ResultAlreadyCancelled
	case o.status != Unpaid:
		out.Result = ResultInvalid
	case !o.deadline.valid:
		out.Result = ResultExempt
	case now.Before(o.deadline.time):
		out.Result, out.Remaining = ResultNotDue, o.deadline.time.Sub(now)
	case o.holdUntil.valid && now.Before(o.holdUntil.time):
		out.Result, out.Remaining = ResultHeld, o.holdUntil.time.Sub(now)
	default:
		out.Result, out.Lateness = ResultCancelled, now.Sub(o.deadline.time)
	}
	return out
}

func (s *Store) cancelDue(ctx context.Context, t *txn, ids []int64, checkOnly bool) (map[int64]Outcome, error) {
	found, err := t.lock(ctx, ids)
	if err != nil {
		return nil, err
	}
	run, forRun := runOf(ctx)
	named := "a timed message names"
	if forRun {
		named = fmt.Sprintf("reconcile run %d read", run)
	}
	outcomes := make(map[int64]Outcome, len(ids))
	var due []int64
	var later []retiming
	var parked []Parked
	for _, id := range ids {
		o, there := found[id]
		if !there {
			outcomes[id] = Outcome{ID: FormatID(id), Result: ResultNotFound}
			parked = append(parked, Parked{What: ParkedOrder, Ref: FormatID(id),
				Reason: named + " this order, and there is none: its outbox row was committed with it, so it was deleted, or the message is not ours"})
			continue
		}
		out := decide(o, t.now)
		if checkOnly && out.Result == ResultCancelled {
			out = Outcome{ID: out.ID, Result: ResultDue}
		}
		outcomes[id] = out
		switch {
		case out.Result == ResultCancelled:
			due = append(due, id)
		case out.Result == ResultInvalid:
			parked = append(parked, Parked{What: ParkedOrder, Ref: FormatID(id),
				Reason: fmt.Sprintf("order is in state %q, which this build does not know; it cancels only %q", o.status, Unpaid)})
		case out.Remaining > s.cfg.EarlyWait:
			later = append(later, retiming{orderID: id, deliverAt: t.now.Add(out.Remaining), after: resendPause(out.Remaining)})
		}
	}
	var sums func() error
	if len(due) > 0 {
		if sums, err = t.cancelLocked(ctx, due, ReasonTimeout); err != nil {
			return nil, err
		}
	}
	if err := t.retime(ctx, later); err != nil {
		return nil, err
	}
	events := make([]Event, 0, 2*len(due)+len(later))
	if forRun && len(due) > 0 {
		why, err := t.missed(ctx, run, due)
		if err != nil {
			return nil, err
		}
		for _, id := range due {
			e, err := event(id, EventReconciled, ActorLapse, why[id])
			if err != nil {
				return nil, err
			}
			events = append(events, e)
			out := outcomes[id]
			out.Missed = why[id].Missed
			outcomes[id] = out
		}
	}
	for _, id := range due {
		e, err := event(id, EventCancelled, ActorLapse, map[string]any{"reason": ReasonTimeout, "lateness_ms": outcomes[id].Lateness.Milliseconds()})
		if err != nil {
			return nil, err
		}
		events = append(events, e)
	}
	for _, r := range later {
		e, err := event(r.orderID, EventRetimed, ActorLapse, map[string]any{"result": outcomes[r.orderID].Result, "deliver_at": r.deliverAt})
		if err != nil {
			return nil, err
		}
		events = append(events, e)
	}
	if err := t.addEvents(ctx, events); err != nil {
		return nil, err
	}
	if err := t.announceCancelled(ctx, due, ReasonTimeout, ActorLapse); err != nil {
		return nil, err
	}
	if err := t.park(ctx, parked); err != nil {
		return nil, err
	}
	if sums != nil {
		err = sums()
	}
	return outcomes, err
}

// cancelLocked is the conditional update of orders that are locked and decided, and their ledger rows. The conditions repeat the
// decision: the statement has to be right by itself. The returned function releases the stock and runs last.
func (t *txn) cancelLocked(ctx context.Context, ids []int64, reason string) (sums func() error, err error) {
	query := `UPDATE orders FORCE INDEX (PRIMARY) SET status = 'cancelled', cancelled_at = ?, cancel_reason = ?, hold_until = NULL, hold_reason = NULL
		WHERE id IN (` + marks(len(ids)) + `) AND status = 'unpaid'`
	args := append([]any{at(t.now), clip(reason, 255)}, anys(ids)...)
	if reason == ReasonTimeout {
		query += " AND deadline_at <= ? AND (hold_until IS NULL OR hold_until <= ?)"
		args = append(args, at(t.now), at(t.now))
	}
	n, err := t.exec(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("cancel %d orders: %w", len(ids), err)
	}
	if n != int64(len(ids)) {
		return nil, fmt.Errorf("cancel %d locked orders, %d matched: %w", len(ids), n, errAgain)
	}
	return t.settle(ctx, ids, moveRelease)
}

// Cancel cancels one unpaid order by hand, whatever its deadline, and releases its stock exactly as CancelDue does. actor and reason
// are stored; both are required, and the reason must not be [ReasonTimeout]. The outcome is cancelled, already paid, already cancelled,
// not found, or invalid for a state that this build does not know; none of them is an error.
func (s *Store) Cancel(ctx context.Context, id int64, actor, reason string) (Outcome, error) {
	var out Outcome
	err := s.inTx(ctx, fmt.Sprintf("cancel order %d", id), func(ctx context.Context, t *txn) (err error) {
		out, err = s.cancelByHand(ctx, t, id, actor, reason)
		return err
	})
	return out, err
}

// CancelTx is Cancel in the caller's transaction.
func (s *Store) CancelTx(ctx context.Context, tx *gorm.DB, id int64, actor, reason string) (Outcome, error) {
	var out Outcome
	err := s.joinTx(ctx, tx, fmt.Sprintf("cancel order %d", id), func(ctx context.Context, t *txn) (err error) {
		out, err = s.cancelByHand(ctx, t, id, actor, reason)
		return err
	})
	return out, err
}

func (s *Store) cancelByHand(ctx context.Context, t *txn, id int64, actor, reason string) (Outcome, error) {
	if err := checkName("actor", actor, true); err != nil {
		return Outcome{}, err
	}
	if plain := strings.TrimSpace(reason); plain == "" || strings.EqualFold(plain, ReasonTimeout) {
		return Outcome{}, invalid("reason %q of a cancel by hand; give your own words (%q is kept for deadlines)", reason, ReasonTimeout)
	}
	out := Outcome{ID: FormatID(id)}
	found, err := t.lock(ctx, []int64{id})
	if err != nil {
		return Outcome{}, err
	}
	o, there := found[id]
	switch {
	case !there:
		out.Result = ResultNotFound
	case o.status == Paid:
		out.Result = ResultAlreadyPaid
	case o.status == Cancelled:
		out.Result = ResultAlreadyCancelled
	case o.status != Unpaid:
		out.Result = ResultInvalid
	default:
		out.Result = ResultCancelled
	}
	if out.Result != ResultCancelled {
		return out, nil
	}
	sums, err := t.cancelLocked(ctx, []int64{id}, reason)
	if err != nil {
		return Outcome{}, err
	}
	if s.cfg.CloseOnCancel {
		if err := t.addTasks(ctx, []int64{id}, TaskClose); err != nil {
			return Outcome{}, err
		}
	}
	e, err := event(id, EventCancelled, actor, map[string]any{"reason": clip(reason, 255)})
	if err != nil {
		return Outcome{}, err
	}
	if err := t.addEvents(ctx, []Event{e}); err != nil {
		return Outcome{}, err
	}
	if err := t.announceCancelled(ctx, []int64{id}, clip(reason, 255), actor); err != nil {
		return Outcome{}, err
	}
	return out, sums()
}
