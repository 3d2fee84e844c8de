package orders

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"
)

// Kinds of events. placed begins every order's story; paid and cancelled end it, and each order has at most one of those two.
const (
	EventPlaced        = "placed"
	EventPaid          = "paid"
	EventCancelled     = "cancelled"
	EventExtended      = "extended"      // the deadline was moved
	EventRetimed       = "retimed"       // a timed message came before the deadline; another will be sent
	EventRefund        = "refund"        // money arrived that cannot stay; its reason is in the detail
	EventStockMissing  = "stock_missing" // a stock row was gone, or did not hold the order's pieces, when they were to be moved
	EventParked        = "parked"
	EventHeld          = "held"            // the cancel was put off; until when and why is in the detail
	EventGateway       = "gateway"         // the gateway answered what it was told again and again; the call and the answer are in the detail
	EventRefunded      = "refunded"        // the gateway has given the money back
	EventRefundGivenUp = "refund_given_up" // the money could not be given back; a person has to
	EventRetried       = "retried"         // what was parked went back to the normal path
	EventDiscarded     = "discarded"       // what was parked is left as it is, with a reason
	EventReconciled    = "reconciled"      // reconcile, not a message, cancelled the order; the run and the reason are in the detail
)

// Event is one entry of an order's story.
type Event struct {
	OrderID int64
	At      time.Time
	Kind    string
	Actor   string
	Detail  json.RawMessage // nil: none
}

// Actors of what lapse does by itself. Verbs called by people and gateways carry the caller's own.
const (
	ActorLapse    = "lapse"
	ActorCheckout = "checkout"
)

func event(id int64, kind, actor string, detail any) (Event, error) {
	e := Event{OrderID: id, Kind: kind, Actor: clip(actor, maxName)}
	if detail != nil {
		raw, err := json.Marshal(detail)
		if err != nil {
			return Event{}, fmt.Errorf("encode detail of event %s: %w", kind, err)
		}
		e.Detail = raw
	}
	return e, nil
}

// addEvents appends to the stories of orders, all at the transaction's instant.
func (t *txn) addEvents(ctx context.Context, events []Event) error {
	for len(events) > 0 {
		some := events[:min(len(events), maxRows)]
		events = events[len(some):]
		args := make([]any, 0, 5*len(some))
		for _, e := range some {
			var detail any
			if e.Detail != nil {
				detail = string(e.Detail)
			}
			args = append(args, e.OrderID, at(t.now), e.Kind, e.Actor, detail)
		}
		if _, err := t.exec(ctx, "INSERT INTO order_events (order_id, at, kind, actor, detail) VALUES "+tuples(len(some), 5), args...); err != nil {
			return fmt.Errorf("write events: %w", err)
		}
	}
	return nil
}

// maxRows bounds the rows of one statement. Lists of 1,000 and more are planned otherwise by MariaDB (it makes a join of them).
const maxRows = 500

// Events gives the story of one order, oldest first; an unknown order has none.
func (s *Store) Events(ctx context.Context, id int64) ([]Event, error) {
	return readEvents(ctx, s.db, id)
}

// Text gives a member of the event's detail as text: that of a string, the digits of a number; empty where it has none such.
func (e Event) Text(member string) string {
	var members map[string]json.RawMessage
	if json.Unmarshal(e.Detail, &members) != nil {
		return ""
	}
	var text string
	if raw := members[member]; json.Unmarshal(raw, &text) != nil {
		var n json.Number
		if json.Unmarshal(raw, &n) != nil {
			return ""
		}
		return n.String()
	}
	return text
}

func readEvents(ctx context.Context, db executor, id int64) ([]Event, error) {
	var events []Event
	err := each(ctx, db, "SELECT order_id, CAST(at AS CHAR), kind, actor, CAST(detail AS CHAR) FROM order_events WHERE order_id = ? ORDER BY id", []any{id},
		func(rows *sql.Rows) error {
			var e Event
			var at instant
			var detail sql.NullString
			if err := rows.Scan(&e.OrderID, &at, &e.Kind, &e.Actor, &detail); err != nil {
				return err
			}
			e.At = at.time
			if detail.Valid {
				e.Detail = json.RawMessage(detail.String)
			}
			events = append(events, e)
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("read events of order %d: %w", id, err)
	}
	return events, nil
}
