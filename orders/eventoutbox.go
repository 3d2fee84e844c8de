// Each change of an order's state can be told to the shop's other systems (coupons, points, mail): a row of event_outbox commits with the
// change, and the relay sends it. The sequence of an order's events is counted in the order's own row, which every verb has locked, so that
// it has no gaps and no repetitions, and outlives the rows, which are purged.

package orders

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Types of outgoing events, as they stand in the attribute type of a CloudEvent.
const (
	OutgoingPlaced     = "order.placed"
	OutgoingPaid       = "order.paid"
	OutgoingCancelled  = "order.cancelled"
	OutgoingRefundDone = "refund.done"
)

// outgoing is an event to be told. data has what this type of event has beside the members that all have (see [Outgoing]).
type outgoing struct {
	orderID int64
	kind    string // OutgoingPlaced and its like
	data    any    // a struct or map; nil: nothing beside
}

// RefundDone is what the event refund.done has beside the members that all events have. Amounts are minor units, in decimal.
type RefundDone struct {
	Gateway         string `json:"gateway"`
	TransactionID   string `json:"transaction_id"` // of the payment
	Refund          string `json:"refund"`
	RefundCurrency  string `json:"refund_currency"`
	Reason          string `json:"reason"` // RefundLate and its like
	GatewayRefundID string `json:"gateway_refund_id,omitempty"`
}

// addOutgoing writes events into the outbox of events, or nothing where Config.Events is off. Call it in the transaction that makes the
// change, after the conditional update has matched. The orders must exist, each appears at most once in a call, and the caller has locked them
// ([txn.lock]) before it locked anything else: the order's row counts the sequence, and comes first in the lock order.
//
// Whoever marks a refund done calls it so:
//
//	t.addOutgoing(ctx, []outgoing{{orderID: id, kind: OutgoingRefundDone, data: RefundDone{…}}})
func (t *txn) addOutgoing(ctx context.Context, list []outgoing) error {
	if !t.outgoing || len(list) == 0 {
		return nil
	}
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b outgoing) int { return int(min(max(a.orderID-b.orderID, -1), 1)) })
	for part := range slices.Chunk(list, maxRows) {
		ids := make([]int64, len(part))
		for i, e := range part {
			ids[i] = e.orderID
		}
		n, err := t.exec(ctx, "UPDATE orders FORCE INDEX (PRIMARY) SET event_sequence = event_sequence + 1 WHERE id IN ("+marks(len(ids))+")", anys(ids)...)
		if err != nil {
			return fmt.Errorf("count events of %d orders: %w", len(ids), err)
		}
		if n != int64(len(ids)) {
			return fmt.Errorf("count events of %d orders, %d matched: an order is missing, or named twice", len(ids), n)
		}
		told := make(map[int64]outgoingOrder, len(ids))
		err = t.each(ctx, "SELECT id, event_sequence, channel, payment_method, user_id, currency, amount FROM orders FORCE INDEX (PRIMARY) WHERE id IN ("+marks(len(ids))+") ORDER BY id FOR UPDATE", anys(ids),
			func(rows *sql.Rows) error {
				var o outgoingOrder
				var amount int64
				if err := rows.Scan(&o.id, &o.sequence, &o.Channel, &o.PaymentMethod, &o.UserID, &o.Currency, &amount); err != nil {
					return err
				}
				o.OrderID, o.Amount = FormatID(o.id), FormatID(amount)
				told[o.id] = o
				return nil
			})
		if err != nil {
			return fmt.Errorf("read %d orders of events: %w", len(ids), err)
		}
		orders := make([]outgoingOrder, len(part))
		for i, e := range part {
			orders[i] = told[e.orderID]
		}
		if err := t.insertOutgoing(ctx, part, orders); err != nil {
			return err
		}
	}
	return nil
}

// placedSequence is that of the first event of every order. [txn.insertOrder] writes it.
const placedSequence = 1

// announcePlaced writes the event of an order that was inserted with its sequence.
func (t *txn) announcePlaced(ctx context.Context, o Order) error {
	if !t.outgoing {
		return nil
	}
	items := make([]outgoingItem, len(o.Items))
	for i, it := range o.Items {
		items[i] = outgoingItem{SKU: it.SKU, Quantity: it.Quantity, Price: FormatID(it.Price)}
	}
	return t.insertOutgoing(ctx, []outgoing{{orderID: o.ID, kind: OutgoingPlaced, data: orderPlaced{PayBy: stamp(o.PayBy), DeadlineAt: stamp(o.DeadlineAt), Items: items}}},
		[]outgoingOrder{{
			sequence: placedSequence, OrderID: FormatID(o.ID), Channel: o.Channel, PaymentMethod: o.PaymentMethod,
			UserID: o.UserID, Currency: o.Currency, Amount: FormatID(o.Amount),
		}})
}

func (t *txn) announceCancelled(ctx context.Context, ids []int64, reason, actor string) error {
	list := make([]outgoing, len(ids))
	for i, id := range ids {
		list[i] = outgoing{orderID: id, kind: OutgoingCancelled, data: orderCancelled{Reason: reason, Actor: actor}}
	}
	return t.addOutgoing(ctx, list)
}

// What the events of an order have beside the members that all have.
type (
	orderPlaced struct {
		PayBy      *string        `json:"pay_by"` // null: the order has no deadline
		DeadlineAt *string        `json:"deadline_at"`
		Items      []outgoingItem `json:"items"`
	}
	outgoingItem struct {
		SKU      string `json:"sku"`
		Quantity int64  `json:"quantity"`
		Price    string `json:"price"`
	}
	orderPaid struct {
		Gateway       string `json:"gateway"`
		TransactionID string `json:"transaction_id"`
		Paid          string `json:"paid"` // what arrived; more than amount is refunded
	}
	orderCancelled struct {
		Reason string `json:"reason"` // ReasonTimeout, or the words of whoever cancelled
		Actor  string `json:"actor"`
	}
)

// outgoingLayout is how instants stand in events.
const outgoingLayout = "2006-01-02T15:04:05.000Z"

func stamp(t *time.Time) *string {
	if t == nil {
		return nil
	}
	s := t.UTC().Format(outgoingLayout)
	return &s
}

// outgoingOrder is what every event says of its order.
type outgoingOrder struct {
	id, sequence int64

	OrderID       string `json:"order_id"`
	Channel       string `json:"channel"`
	PaymentMethod string `json:"payment_method"`
	UserID        string `json:"user_id"`
	Currency      string `json:"currency"`
	Amount        string `json:"amount"` // minor units
}

// insertOutgoing writes the rows; orders[i] is that of list[i].
func (t *txn) insertOutgoing(ctx context.Context, list []outgoing, orders []outgoingOrder) error {
	args := make([]any, 0, 9*len(list))
	for i, e := range list {
		data, err := mergeJSON(orders[i], e.data)
		if err != nil {
			return fmt.Errorf("encode event %s of order %d: %w", e.kind, e.orderID, err)
		}
		args = append(args, e.orderID, orders[i].sequence, e.kind, at(t.now), string(data), outboxPending, at(t.now), at(t.now), 0)
	}
	_, err := t.exec(ctx, "INSERT INTO event_outbox (order_id, sequence, type, at, data, state, available_at, pending_since, attempts) VALUES "+tuples(len(list), 9), args...)
	if err != nil {
		return fmt.Errorf("write %d rows of the outbox of events: %w", len(list), err)
	}
	return nil
}

// mergeJSON encodes the members of two values into one object.
func mergeJSON(a, b any) ([]byte, error) {
	first, err := json.Marshal(a)
	if err != nil || b == nil {
		return first, err
	}
	second, err := json.Marshal(b)
	if err != nil || len(second) <= len("{}") {
		return first, err
	}
	return append(append(first[:len(first)-1], ','), second[1:]...), nil
}

// Outgoing is one row of the outbox of events, as it is claimed. Data is a JSON object: order_id, channel, payment_method, user_id, currency
// and amount of the order, and what its type adds.
type Outgoing struct {
	ID       int64 // of the row
	OrderID  int64
	Sequence int64 // of the order's events, from 1
	Type     string
	At       time.Time // of the change, by the database's clock
	Data     json.RawMessage
	Attempts int // earlier sends that failed

	AvailableAt time.Time // since when it could be sent
}

// OutgoingClaim is a set of events that the caller alone may send, until Until by the database's clock. Marks carry the token and match
// nothing once the lease has ended and another has claimed the row.
type OutgoingClaim struct {
	Token      string
	Now, Until time.Time
	Rows       []Outgoing
}

// ClaimOutgoing leases up to limit events whose time has come, oldest first, and skips those that another relay is claiming. Of each order it
// gives the first event that was neither sent nor parked, and no later one: so an order's events are stored by the broker in their sequence. An
// empty claim means that there is nothing to send.
func (s *Store) ClaimOutgoing(ctx context.Context, limit int, lease time.Duration) (OutgoingClaim, error) {
	if limit < 1 || limit > maxClaim || lease <= 0 {
		return OutgoingClaim{}, invalid("claim of %d events for %s; allowed are 1 to %d events and a positive lease", limit, lease, maxClaim)
	}
	var claim OutgoingClaim
	err := s.inTx(ctx, "claim events", func(ctx context.Context, t *txn) error {
		claim = OutgoingClaim{Token: newToken(), Now: t.now, Until: t.now.Add(lease)}
		var ids []int64
		// The look at earlier events takes no locks, and needs none: an order's rows appear in their sequence, and one that is marked sent a
		// moment later only puts its successor off to the next claim.
		err := t.each(ctx, `SELECT e.id, e.order_id, e.sequence, e.type, CAST(e.at AS CHAR), CAST(e.data AS CHAR), e.attempts, CAST(e.available_at AS CHAR)
			FROM event_outbox e FORCE INDEX (event_outbox_to_do) WHERE e.state = 'pending' AND e.available_at <= ? AND NOT EXISTS
				(SELECT 1 FROM event_outbox b FORCE INDEX (event_outbox_by_order) WHERE b.order_id = e.order_id AND b.sequence < e.sequence AND b.state = 'pending')
			ORDER BY e.available_at, e.id LIMIT ? FOR UPDATE SKIP LOCKED`, []any{at(t.now), limit},
			func(rows *sql.Rows) error {
				var e Outgoing
				var when, available instant
				var data string
				if err := rows.Scan(&e.ID, &e.OrderID, &e.Sequence, &e.Type, &when, &data, &e.Attempts, &available); err != nil {
					return err
				}
				e.At, e.AvailableAt, e.Data = when.time, available.time, json.RawMessage(data)
				claim.Rows = append(claim.Rows, e)
				ids = append(ids, e.ID)
				return nil
			})
		if err != nil {
			return fmt.Errorf("select pending events: %w", err)
		}
		slices.Sort(ids)
		for part := range slices.Chunk(ids, maxRows) {
			n, err := t.exec(ctx, "UPDATE event_outbox FORCE INDEX (PRIMARY) SET available_at = ?, lease_token = ? WHERE id IN ("+marks(len(part))+") AND state = 'pending'",
				append([]any{at(claim.Until), claim.Token}, anys(part)...)...)
			if err != nil {
				return fmt.Errorf("lease %d events: %w", len(part), err)
			}
			if n != int64(len(part)) {
				return fmt.Errorf("lease %d locked events, %d matched: %w", len(part), n, errAgain)
			}
		}
		return nil
	})
	if err != nil {
		return OutgoingClaim{}, err
	}
	return claim, nil
}

// SentOutgoing is one event that the broker has stored: its row and its message.
type SentOutgoing struct {
	ID        int64
	MessageID string
}

// MarkOutgoingSent records that the broker has stored these events, and when their rows may be purged. It gives the number of rows that still
// carried the token; the others are sent again.
func (s *Store) MarkOutgoingSent(ctx context.Context, token string, sent []SentOutgoing) (int, error) {
	sent = slices.SortedFunc(slices.Values(sent), func(a, b SentOutgoing) int { return int(min(max(a.ID-b.ID, -1), 1)) })
	var total int
	err := s.inTx(ctx, "mark events sent", func(ctx context.Context, t *txn) error {
		total = 0
		for part := range slices.Chunk(sent, maxRows) {
			ids := make([]int64, len(part))
			args := make([]any, 0, 2*len(part)+2)
			for i, e := range part {
				ids[i] = e.ID
				args = append(args, e.ID, clipID(e.MessageID))
			}
			n, err := t.mark(ctx, outgoingEvents, token, ids,
				"state = 'sent', message_id = CASE id"+strings.Repeat(" WHEN ? THEN ?", len(part))+" END, sent_at = ?, available_at = ?, pending_since = NULL, lease_token = NULL, last_error = NULL",
				append(args, at(t.now), at(t.now.Add(s.cfg.Retention.Events)))...)
			if err != nil {
				return err
			}
			total += n
		}
		return nil
	})
	return total, err
}

// MarkOutgoingRetry gives events back whose send failed: another attempt may be made after pause.
func (s *Store) MarkOutgoingRetry(ctx context.Context, token string, ids []int64, pause time.Duration, cause error) (int, error) {
	return s.mark(ctx, outgoingEvents, "mark events for retry", token, ids, toRetry(pause, cause))
}

// UnclaimOutgoing gives events back that were not tried.
func (s *Store) UnclaimOutgoing(ctx context.Context, token string, ids []int64) (int, error) {
	return s.mark(ctx, outgoingEvents, "give back events", token, ids, toOthers)
}

// ParkOutgoing sets an event aside that the broker refuses for good, with the reason and the body that it refused. The order's later events go
// on without it. It gives 0 where the row no longer carried the token.
func (s *Store) ParkOutgoing(ctx context.Context, token string, e Outgoing, reason string, body []byte) (int, error) {
	var n int
	err := s.inTx(ctx, "park event "+e.EventID(), func(ctx context.Context, t *txn) (err error) {
		n, err = t.mark(ctx, outgoingEvents, token, []int64{e.ID}, "state = 'parked', pending_since = NULL, lease_token = NULL, attempts = attempts + 1, last_error = ?", clip(reason, 1024))
		if err != nil || n == 0 {
			return err
		}
		return t.park(ctx, []Parked{{What: ParkedMessage, Ref: parkedEvent + e.EventID(), Reason: reason, Body: body}})
	})
	return n, err
}

// parkedEvent begins what an event is parked under; its id follows.
const parkedEvent = "event:"

// retryEvent gives a parked event back to the relay, and tells the order whose it is.
func (t *txn) retryEvent(ctx context.Context, id string) (order int64, err error) {
	digits, sequence, _ := strings.Cut(id, "-")
	if order, err = ParseID(digits); err != nil {
		return 0, fmt.Errorf("%w: %q is no event of ours; discard it", ErrCannotRetry, id)
	}
	n, err := t.exec(ctx, "UPDATE event_outbox FORCE INDEX (event_outbox_by_order) SET state = 'pending', available_at = ?, pending_since = ? WHERE order_id = ? AND sequence = ? AND state = 'parked'",
		at(t.now), at(t.now), order, sequence)
	if err != nil {
		return 0, fmt.Errorf("give event %s back to the relay: %w", id, err)
	}
	if n == 0 {
		return 0, fmt.Errorf("%w: event %s does not wait for one; discard it", ErrCannotRetry, id)
	}
	return order, nil
}
