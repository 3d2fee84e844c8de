package orders

import (
	"context"
	"fmt"
)

// What can be parked.
const (
	ParkedMessage = "message"
	ParkedOrder   = "order"
	ParkedPayment = "payment"
)

// MaxParkedBody is how much of a body is kept, in bytes.
const MaxParkedBody = 64 << 10

// Parked is a message, an order or a payment that cannot be handled, kept with its reason until somebody looks.
type Parked struct {
	What   string // ParkedMessage, ParkedOrder, ParkedPayment
	Ref    string // the id of the message, the order, or the payment; longer than 128 characters is cut
	Reason string
	Body   []byte // as it came; more than MaxParkedBody is cut. Default: none
}

// Park sets something aside. Parking the same thing again counts it, with the newest reason. An order's story gets an event too, also
// that of an id without an order: whoever asks what became of it finds the answer.
func (s *Store) Park(ctx context.Context, p Parked) error {
	return s.inTx(ctx, fmt.Sprintf("park %s %s", p.What, clip(p.Ref, 128)), func(ctx context.Context, t *txn) error {
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
		if p.What == ParkedOrder {
			if id, err := ParseID(p.Ref); err == nil {
				e, err := event(id, EventParked, ActorLapse, map[string]any{"reason": reason})
				if err != nil {
					return err
				}
				if err := t.addEvents(ctx, []Event{e}); err != nil {
					return err
				}
			}
		}
		_, err := t.exec(ctx, `INSERT INTO parked (what, ref, reason, body, times, first_at, last_at, state) VALUES (?, ?, ?, ?, 1, ?, ?, 'parked')
			ON DUPLICATE KEY UPDATE reason = ?, times = times + 1, last_at = ?, state = 'parked'`,
			p.What, clip(p.Ref, 128), reason, body, at(t.now), at(t.now), reason, at(t.now))
		if err != nil {
			return fmt.Errorf("park %s %s: %w", p.What, clip(p.Ref, 128), err)
		}
		t.parked++
	}
	return nil
}
