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
	args := make([]any, 0, 8*len(list))
	for i, e := range list {
		data, err := mergeJSON(orders[i], e.data)
		if err != nil {
			return fmt.Errorf("encode event %s of order %d: %w", e.kind, e.orderID, err)
		}
		args = append(args, e.orderID, orders[i].sequence, e.kind, at(t.now), string(data), outboxPending, at(t.now), 0)
	}
	_, err := t.exec(ctx, "INSERT INTO event_outbox (order_id, sequence, type, at, data, state, available_at, attempts) VALUES "+tuples(len(list), 8), args...)
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
