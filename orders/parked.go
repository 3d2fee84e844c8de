package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// What can be parked.
const (
	ParkedMessage = "message"
	ParkedOrder   = "order"
	ParkedPayment = "payment"
)

// States of something parked.
const (
	StateParked    = "parked"    // waits for a person
	StateRetried   = "retried"   // went back to the normal path; what fails there again is parked again
	StateDiscarded = "discarded" // somebody decided, with a reason, that nothing is to be done
)

// maxRef is the width of the column: a payment's gateway and transaction, of 64 characters each, with a colon between them, are told apart.
const maxRef = 136

// MaxParkedBody is how much of a body is kept, in bytes.
const MaxParkedBody = 64 << 10

// Parked is a message, an order or a payment that cannot be handled, kept with its reason until somebody looks.
type Parked struct {
	What   string // ParkedMessage, ParkedOrder, ParkedPayment
	Ref    string // the id of the message, the order, or the payment; longer than 136 characters is cut
	Reason string
	Body   []byte // as it came; more than MaxParkedBody is cut. Default: none
}

var (
	// ErrNotParked is returned by GetParked, RetryParked and DiscardParked where nothing parked has the id.
	ErrNotParked = errors.New("nothing parked has this id")
	// ErrCannotRetry is returned by RetryParked for what no retry can bring on; its text says why. Nothing was written.
	ErrCannotRetry = errors.New("a retry cannot help")
)

// Park sets something aside. Parking the same thing again counts it, with the newest reason, and what was retried or discarded is parked
// once more. An order's story gets an event too, also that of an id without an order: whoever asks what became of it finds the answer. So
// do the stories of the orders of a message that can be read.
func (s *Store) Park(ctx context.Context, p Parked) error {
	return s.inTx(ctx, fmt.Sprintf("park %s %s", p.What, clip(p.Ref, maxRef)), func(ctx context.Context, t *txn) error {
		return t.park(ctx, []Parked{p})
	})
}

func (t *txn) park(ctx context.Context, list []Parked) error {
	for _, p := range list {
		switch p.What {
		case ParkedMessage, ParkedOrder, ParkedPayment:
		default:
			return invalid("cannot park a %q", p.What)
		}
		reason := clip(p.Reason, 1024)
		var body any
		if p.Body != nil {
			body = p.Body[:min(len(p.Body), MaxParkedBody)]
		}
		detail := map[string]any{"reason": reason}
		var ids []int64
		switch p.What {
		case ParkedOrder:
			if id, err := ParseID(p.Ref); err == nil {
				ids = []int64{id}
			}
		case ParkedMessage:
			ids = messageOf(p.Ref, p.Body, detail)
		}
		if err := t.tell(ctx, ids, EventParked, ActorLapse, detail); err != nil {
			return err
		}
		_, err := t.exec(ctx, `INSERT INTO parked (what, ref, reason, body, times, first_at, last_at, state) VALUES (?, ?, ?, ?, 1, ?, ?, 'parked')
			ON DUPLICATE KEY UPDATE reason = ?, times = times + 1, last_at = ?, state = 'parked'`,
			p.What, clip(p.Ref, maxRef), reason, body, at(t.now), at(t.now), reason, at(t.now))
		if err != nil {
			return fmt.Errorf("park %s %s: %w", p.What, clip(p.Ref, maxRef), err)
		}
		t.parked++
	}
	return nil
}

// messageOf names a parked message in the detail of an event, and gives the orders whose it is: those in a timed message, or the one of which an
// outgoing event tells. What cannot be read has no orders.
func messageOf(ref string, body []byte, detail map[string]any) (ids []int64) {
	if event, is := strings.CutPrefix(ref, parkedEvent); is {
		detail["event_id"] = event
		digits, _, _ := strings.Cut(event, "-")
		if id, err := ParseID(digits); err == nil {
			ids = []int64{id}
		}
		return ids
	}
	detail["message_id"] = clip(ref, maxRef)
	ids, _, _ = ordersOf(body)
	return ids
}

// tell adds the same event to the stories of several orders.
func (t *txn) tell(ctx context.Context, ids []int64, kind, actor string, detail any) error {
	events := make([]Event, 0, len(ids))
	for _, id := range ids {
		e, err := event(id, kind, actor, detail)
		if err != nil {
			return err
		}
		events = append(events, e)
	}
	return t.addEvents(ctx, events)
}

// ordersOf reads the orders of a timed message: their ids, sorted, and the texts in it that are no ids of this store.
func ordersOf(body []byte) (ids []int64, foreign []string, err error) {
	e, err := DecodeExpiry(body)
	if err != nil {
		return nil, nil, err
	}
	for _, text := range e.Orders {
		if id, err := ParseID(text); err == nil {
			ids = append(ids, id)
		} else {
			foreign = append(foreign, text)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), foreign, nil
}

// ParkedRow is something parked as it is stored.
type ParkedRow struct {
	ID int64
	Parked
	// Size is the length of the body in bytes. A list has the sizes and leaves the bodies out.
	Size    int64
	Times   int64 // how often it was parked
	FirstAt time.Time
	LastAt  time.Time
	State   string // StateParked, StateRetried, StateDiscarded
	// HandledAt, HandledBy and HandledReason are of the last retry or discard, also once it is parked again. Only a discard has a reason.
	HandledAt     *time.Time
	HandledBy     string
	HandledReason string
}

// ParkedFilter says what of the parked to list. The zero value of each field means its default.
type ParkedFilter struct {
	// What is ParkedMessage, ParkedOrder or ParkedPayment. Default: all.
	What string
	// States to list. Default: StateParked alone.
	States []string
	// Since leaves out what was parked last before this instant. Default: none.
	Since time.Time
	// Reason is a text that the reason has in it, in any case of letters. Default: any.
	Reason string
	// After continues a list behind the last row of the page before. Default: from the newest on.
	After *ParkedRow
	// Limit is the length of a page, 1 to 1,000. Default 100.
	Limit int
}

const parkedColumns = `id, what, ref, reason, COALESCE(LENGTH(body), 0), times, CAST(first_at AS CHAR), CAST(last_at AS CHAR), state,
	CAST(handled_at AS CHAR), COALESCE(handled_by, ''), COALESCE(handled_reason, '')`

func (p *ParkedRow) fields(first, last, handled *instant) []any {
	return []any{&p.ID, &p.What, &p.Ref, &p.Reason, &p.Size, &p.Times, first, last, &p.State, handled, &p.HandledBy, &p.HandledReason}
}

func scanParked(scan func(...any) error) (ParkedRow, error) {
	var p ParkedRow
	var first, last, handled instant
	if err := scan(p.fields(&first, &last, &handled)...); err != nil {
		return ParkedRow{}, err
	}
	p.FirstAt, p.LastAt, p.HandledAt = first.time, last.time, handled.pointer()
	return p, nil
}

// ListParked gives one page of what is parked, what was parked last first, without the bodies. A page shorter than the limit is the last.
func (s *Store) ListParked(ctx context.Context, f ParkedFilter) ([]ParkedRow, error) {
	if f.Limit == 0 {
		f.Limit = 100
	}
	if f.Limit < 1 || f.Limit > 1000 {
		return nil, invalid("list of %d parked things; allowed are 1 to 1000", f.Limit)
	}
	if len(f.States) == 0 {
		f.States = []string{StateParked}
	}
	for _, state := range f.States {
		if state != StateParked && state != StateRetried && state != StateDiscarded {
			return nil, invalid("parked things have no state %q; it is %s, %s or %s", state, StateParked, StateRetried, StateDiscarded)
		}
	}
	if f.What != "" && f.What != ParkedMessage && f.What != ParkedOrder && f.What != ParkedPayment {
		return nil, invalid("nothing parked is a %q; it is %s, %s or %s", f.What, ParkedMessage, ParkedOrder, ParkedPayment)
	}
	var page []ParkedRow
	// One walk along the index for each state; a list of states in one statement would sort the table.
	for _, state := range f.States {
		query := "SELECT " + parkedColumns + " FROM parked FORCE INDEX (parked_by_state) WHERE state = ?"
		args := []any{state}
		if f.After != nil {
			query += " AND last_at <= ? AND (last_at < ? OR id < ?)"
			args = append(args, at(f.After.LastAt), at(f.After.LastAt), f.After.ID)
		}
		if !f.Since.IsZero() {
			query += " AND last_at >= ?"
			args = append(args, at(f.Since))
		}
		if f.What != "" {
			query += " AND what = ?"
			args = append(args, f.What)
		}
		if f.Reason != "" {
			// Not LIKE: a % in somebody's error message is to be found as it stands.
			query += " AND LOCATE(?, reason) > 0"
			args = append(args, f.Reason)
		}
		err := each(ctx, s.db, query+" ORDER BY last_at DESC, id DESC LIMIT ?", append(args, f.Limit), func(rows *sql.Rows) error {
			p, err := scanParked(rows.Scan)
			page = append(page, p)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("list what is parked: %w", err)
		}
	}
	slices.SortFunc(page, func(a, b ParkedRow) int {
		if c := b.LastAt.Compare(a.LastAt); c != 0 {
			return c
		}
		return int(min(max(b.ID-a.ID, -1), 1))
	})
	return page[:min(len(page), f.Limit)], nil
}

// GetParked reads something parked with its body; [ErrNotParked] where nothing has the id.
func (s *Store) GetParked(ctx context.Context, id int64) (ParkedRow, error) {
	p, err := readParked(ctx, s.db, id)
	if err != nil {
		return ParkedRow{}, fmt.Errorf("read parked %d: %w", id, err)
	}
	return p, nil
}

func readParked(ctx context.Context, db executor, id int64) (ParkedRow, error) {
	var body []byte
	p, err := scanParked(func(dest ...any) error {
		return db.QueryRowContext(ctx, "SELECT "+parkedColumns+", body FROM parked WHERE id = ?", id).Scan(append(dest, &body)...)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return ParkedRow{}, ErrNotParked
	}
	p.Body = body
	return p, err
}

// RetriedOrder is what a retry did for one order.
type RetriedOrder struct {
	ID     string
	Result RetryResult
}

// RetryResult says what a retry did for one order.
type RetryResult string

const (
	// RetryResend says that the relay sends a timed message for the order's deadline, at once where it has passed.
	RetryResend RetryResult = "resend"
	// RetryFinal says that the order is paid or cancelled. Nothing was written for it.
	RetryFinal RetryResult = "final"
	// RetryExempt says that the order has no deadline, so that no message cancels it. Nothing was written for it.
	RetryExempt RetryResult = "exempt"
	// RetryNotFound says that there is no such order, or that the id in the message is none of this store's.
	RetryNotFound RetryResult = "not_found"
)

// Retry is what became of a retry.
type Retry struct {
	// Parked is the row as it stands afterwards.
	Parked ParkedRow
	// Done is false where it was retried or discarded before: nothing was written.
	Done bool
	// Orders are those of the order or message that was retried.
	Orders []RetriedOrder
	// Refund says that a refund that was given up is tried again.
	Refund bool
	// Event says that an event that the broker had refused is sent again.
	Event bool
}

// RetryParked gives something parked back to the normal path, in one transaction:
//
//   - an order: its outbox row goes back to pending, so that the relay sends its timed message, and a hold ends;
//   - a message: the same for each order in it. The message itself is never sent again, whatever is in its body;
//   - a message that tells of an order: the relay sends it again, behind those of the order that were sent meanwhile;
//   - a payment whose refund was given up: the refund is tried again.
//
// An order that is paid or cancelled stays as it is, so a retry is harmless. It may be called any number of times, also at once: one of the
// calls does it. Errors: [ErrNotParked]; [ErrCannotRetry] for an order that does not exist, a message that cannot be read, and a payment
// without such a refund.
func (s *Store) RetryParked(ctx context.Context, id int64, actor string) (Retry, error) {
	if err := checkName("actor", actor, true); err != nil {
		return Retry{}, err
	}
	var r Retry
	err := s.inTx(ctx, fmt.Sprintf("retry parked %d", id), func(ctx context.Context, t *txn) error {
		p, err := readParked(ctx, t, id)
		if err != nil {
			return err
		}
		if r = (Retry{Parked: p}); p.State != StateParked {
			return nil
		}
		detail := map[string]any{"parked": id, "reason": p.Reason}
		var tell []int64
		switch p.What {
		case ParkedOrder:
			r.Orders, tell, err = t.retryOrder(ctx, p)
		case ParkedMessage:
			if id, is := strings.CutPrefix(p.Ref, parkedEvent); is {
				order, err := t.retryEvent(ctx, id)
				if err != nil {
					return err
				}
				detail["event_id"], tell, r.Event = id, []int64{order}, true
				break
			}
			detail["message_id"] = p.Ref
			r.Orders, tell, err = t.retryMessage(ctx, p)
		case ParkedPayment:
			detail["payment"] = p.Ref
			r.Refund, tell, err = t.retryPayment(ctx, p)
		default:
			err = fmt.Errorf("%w: this build does not know what a %q is", ErrCannotRetry, p.What)
		}
		if err != nil {
			return err
		}
		if err := t.tell(ctx, tell, EventRetried, actor, detail); err != nil {
			return err
		}
		r.Done = true
		return t.handle(ctx, &r.Parked, StateRetried, actor, "")
	})
	if err != nil {
		return Retry{}, err
	}
	return r, nil
}

// handle moves something parked on. The rows of its orders are locked before it, as when it was parked, so it was read without a lock: the
// condition finds out whether it is still the same.
func (t *txn) handle(ctx context.Context, p *ParkedRow, state, actor, reason string) error {
	var why any
	if reason != "" {
		why = reason
	}
	n, err := t.exec(ctx, "UPDATE parked SET state = ?, handled_at = ?, handled_by = ?, handled_reason = ? WHERE id = ? AND state = 'parked' AND times = ?",
		state, at(t.now), actor, why, p.ID, p.Times)
	if err != nil {
		return fmt.Errorf("mark it %s: %w", state, err)
	}
	if n != 1 {
		return fmt.Errorf("somebody else has dealt with it, or it was parked again: %w", errAgain)
	}
	p.State, p.HandledAt, p.HandledBy, p.HandledReason = state, &t.now, actor, reason
	return nil
}

func (t *txn) retryOrder(ctx context.Context, p ParkedRow) ([]RetriedOrder, []int64, error) {
	id, err := ParseID(p.Ref)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %q is no id of an order; discard it", ErrCannotRetry, clip(p.Ref, maxName))
	}
	done, tell, err := t.resend(ctx, []int64{id})
	if err == nil && done[0].Result == RetryNotFound {
		return nil, nil, fmt.Errorf("%w: there is no order %d; discard it", ErrCannotRetry, id)
	}
	return done, tell, err
}

func (t *txn) retryMessage(ctx context.Context, p ParkedRow) ([]RetriedOrder, []int64, error) {
	if len(p.Body) == 0 {
		return nil, nil, fmt.Errorf("%w: the message has no body, so its orders are not known; discard it", ErrCannotRetry)
	}
	ids, foreign, err := ordersOf(p.Body)
	if errors.Is(err, ErrNewerVersion) {
		return nil, nil, fmt.Errorf("%w: %w; retry it with the lapse of that version", ErrCannotRetry, err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%w: the message cannot be read (%w), so its orders are not known; discard it", ErrCannotRetry, err)
	}
	done, tell, err := t.resend(ctx, ids)
	if err != nil {
		return nil, nil, err
	}
	for _, text := range foreign {
		done = append(done, RetriedOrder{ID: text, Result: RetryNotFound})
	}
	if !slices.ContainsFunc(done, func(o RetriedOrder) bool { return o.Result != RetryNotFound }) {
		return nil, nil, fmt.Errorf("%w: none of the %d orders in the message exists; discard it", ErrCannotRetry, len(done))
	}
	return done, tell, nil
}

// resend makes the relay send timed messages for those of the orders that are unpaid and have a deadline, and gives which these are. A
// hold ends with it: whoever retries wants the question asked again, not waited for.
func (t *txn) resend(ctx context.Context, ids []int64) (done []RetriedOrder, again []int64, err error) {
	var rows []retiming
	for part := range slices.Chunk(ids, maxRows) {
		found, err := t.lock(ctx, part)
		if err != nil {
			return nil, nil, err
		}
		var held []int64
		for _, id := range part {
			o, there := found[id]
			result := RetryResend
			switch {
			case !there:
				result = RetryNotFound
			case o.status == Paid, o.status == Cancelled:
				result = RetryFinal
			case o.status != Unpaid:
				return nil, nil, fmt.Errorf("%w: order %d is in state %q, which this build does not know; retry it with the lapse that does", ErrCannotRetry, id, o.status)
			case !o.deadline.valid:
				result = RetryExempt
			default:
				rows, again = append(rows, retiming{orderID: id, deliverAt: o.deadline.time}), append(again, id)
				if o.holdUntil.valid {
					held = append(held, id)
				}
			}
			done = append(done, RetriedOrder{ID: FormatID(id), Result: result})
		}
		if len(held) == 0 {
			continue
		}
		n, err := t.exec(ctx, "UPDATE orders FORCE INDEX (PRIMARY) SET hold_until = NULL, hold_reason = NULL WHERE id IN ("+marks(len(held))+") AND status = 'unpaid'", anys(held)...)
		if err != nil {
			return nil, nil, fmt.Errorf("end the hold of %d orders: %w", len(held), err)
		}
		if n != int64(len(held)) {
			return nil, nil, fmt.Errorf("end the hold of %d locked orders, %d matched: %w", len(held), n, errAgain)
		}
	}
	return done, again, t.retime(ctx, rows)
}

func (t *txn) retryPayment(ctx context.Context, p ParkedRow) (refund bool, tell []int64, err error) {
	gateway, transaction, orderID, state, err := t.refundOfParked(ctx, p.Ref)
	if err != nil {
		return false, nil, err
	}
	const look = "look at the transaction in the gateway's own records, set right what is wrong there, and discard it with what was decided"
	switch state {
	case "":
		return false, nil, fmt.Errorf("%w: no refund of %q was given up; %s", ErrCannotRetry, clip(p.Ref, maxRef), look)
	case "given_up":
	default:
		return false, nil, fmt.Errorf("%w: the refund of %q is %s, not given up; %s", ErrCannotRetry, clip(p.Ref, maxRef), state, look)
	}
	n, err := t.exec(ctx, `UPDATE refunds SET state = 'pending', attempts = 0, available_at = ?, lease_token = NULL
		WHERE gateway = ? AND transaction_id = ? AND state = 'given_up'`, at(t.now), gateway, transaction)
	if err != nil {
		return false, nil, fmt.Errorf("try the refund of %s again: %w", clip(p.Ref, maxRef), err)
	}
	if n != 1 {
		return false, nil, fmt.Errorf("the refund of %s has moved on: %w", clip(p.Ref, maxRef), errAgain)
	}
	return true, []int64{orderID}, nil
}

// refundOfParked finds the refund of a parked payment, whose ref is its gateway and its transaction with a colon between them. Either may
// have colons of its own, so each is tried. state is empty where there is no refund.
func (t *txn) refundOfParked(ctx context.Context, ref string) (gateway, transaction string, orderID int64, state string, err error) {
	for i := range len(ref) {
		if ref[i] != ':' {
			continue
		}
		gateway, transaction = ref[:i], ref[i+1:]
		err := t.QueryRowContext(ctx, "SELECT order_id, state FROM refunds WHERE gateway = ? AND transaction_id = ?", gateway, transaction).Scan(&orderID, &state)
		if err == nil {
			return gateway, transaction, orderID, state, nil
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return "", "", 0, "", fmt.Errorf("look for the refund of %s: %w", ref, err)
		}
	}
	return "", "", 0, "", nil
}

// DiscardParked records that nothing is to be done about something parked, who decided it and why; the reason is required, at most 255
// characters. It changes nothing else: an unpaid order stays unpaid, and reconcile cancels it when it is overdue. done is false where it was
// retried or discarded before, and nothing was written. Errors: [ErrInvalid], [ErrNotParked].
func (s *Store) DiscardParked(ctx context.Context, id int64, actor, reason string) (row ParkedRow, done bool, err error) {
	if err := checkName("actor", actor, true); err != nil {
		return ParkedRow{}, false, err
	}
	if reason = strings.TrimSpace(reason); reason == "" {
		return ParkedRow{}, false, invalid("the reason of a discard is empty; it stays with what was discarded, for whoever asks later")
	}
	reason = clip(reason, 255)
	err = s.inTx(ctx, fmt.Sprintf("discard parked %d", id), func(ctx context.Context, t *txn) error {
		done = false
		if row, err = readParked(ctx, t, id); err != nil || row.State != StateParked {
			return err
		}
		detail := map[string]any{"parked": id, "reason": reason}
		var tell []int64
		switch row.What {
		case ParkedOrder:
			if id, err := ParseID(row.Ref); err == nil {
				tell = []int64{id}
			}
		case ParkedMessage:
			tell = messageOf(row.Ref, row.Body, detail)
		case ParkedPayment:
			detail["payment"] = row.Ref
			_, _, orderID, state, err := t.refundOfParked(ctx, row.Ref)
			if err != nil {
				return err
			}
			if state != "" {
				tell = []int64{orderID}
			}
		}
		if err := t.tell(ctx, tell, EventDiscarded, actor, detail); err != nil {
			return err
		}
		done = true
		return t.handle(ctx, &row, StateDiscarded, actor, reason)
	})
	if err != nil {
		return ParkedRow{}, false, err
	}
	return row, done, nil
}
