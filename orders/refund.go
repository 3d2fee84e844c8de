package orders

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"
)

// PendingRefund is money that has to go back: one for each payment that cannot stay, or can only in part.
type PendingRefund struct {
	Gateway, TransactionID string // of the payment
	OrderID                int64
	Amount                 int64 // minor units
	Currency               string
	Reason                 string // RefundLate and its like
	Attempts               int    // earlier tries that did not end it
}

// Ref is what a refund is parked under.
func (r PendingRefund) Ref() string { return r.Gateway + ":" + r.TransactionID }

// RefundClaim is a set of refunds that the caller alone may make, until Until by the database's clock. As for [Claim], marks carry the token.
type RefundClaim struct {
	Token string
	Until time.Time
	Rows  []PendingRefund
}

// ClaimRefunds leases up to limit pending refunds of payments that came through the gateway and whose time has come, oldest first, and skips
// those that somebody else is claiming. An empty claim means that there is nothing to do; refunds of other gateways are for whoever works for
// those. The lease has to be longer than the work on a refund may take. It is no proof against making one
// twice (a process may be stopped for longer than any lease), which is what the gateway's idempotency key is for.
func (s *Store) ClaimRefunds(ctx context.Context, gateway string, limit int, lease time.Duration) (RefundClaim, error) {
	if gateway == "" {
		return RefundClaim{}, invalid("claim of refunds without the name of their gateway")
	}
	if limit < 1 || limit > maxRows || lease <= 0 {
		return RefundClaim{}, invalid("claim of %d refunds for %s; allowed are 1 to %d and a positive lease", limit, lease, maxRows)
	}
	var claim RefundClaim
	err := s.inTx(ctx, "claim refunds", func(ctx context.Context, t *txn) error {
		claim = RefundClaim{Token: newToken(), Until: t.now.Add(lease)}
		err := t.each(ctx, `SELECT gateway, transaction_id, order_id, amount, currency, reason, attempts FROM refunds FORCE INDEX (refunds_to_do)
			WHERE state = 'pending' AND gateway = ? AND available_at <= ? ORDER BY available_at LIMIT ? FOR UPDATE SKIP LOCKED`, []any{gateway, at(t.now), limit}, func(rows *sql.Rows) error {
			var r PendingRefund
			err := rows.Scan(&r.Gateway, &r.TransactionID, &r.OrderID, &r.Amount, &r.Currency, &r.Reason, &r.Attempts)
			claim.Rows = append(claim.Rows, r)
			return err
		})
		if err != nil {
			return fmt.Errorf("select refunds: %w", err)
		}
		for _, r := range claim.Rows {
			n, err := t.exec(ctx, "UPDATE refunds SET available_at = ?, lease_token = ? WHERE gateway = ? AND transaction_id = ? AND state = 'pending'",
				at(claim.Until), claim.Token, r.Gateway, r.TransactionID)
			if err != nil {
				return fmt.Errorf("lease refund of payment %s: %w", r.Ref(), err)
			}
			if n != 1 {
				return fmt.Errorf("refund of payment %s is locked and did not match: %w", r.Ref(), errAgain)
			}
		}
		return nil
	})
	if err != nil {
		return RefundClaim{}, err
	}
	return claim, nil
}

// RefundDone records that the gateway has made a refund, under its own id, and tells the order's story. It is false where the lease was lost:
// whoever has it finds the refund made.
func (s *Store) RefundDone(ctx context.Context, token string, r PendingRefund, gatewayRefundID string) (bool, error) {
	gatewayRefundID = clip(strings.TrimSpace(gatewayRefundID), maxName)
	held := false
	err := s.inTx(ctx, r.doing("mark done"), func(ctx context.Context, t *txn) error {
		// The order first, as every verb: its row counts the outgoing events.
		found, err := t.lock(ctx, []int64{r.OrderID})
		if err != nil {
			return err
		}
		n, err := t.exec(ctx, `UPDATE refunds SET state = 'done', lease_token = NULL, attempts = attempts + 1, gateway_refund_id = ?, last_error = NULL
			WHERE gateway = ? AND transaction_id = ? AND lease_token = ? AND state = 'pending'`, gatewayRefundID, r.Gateway, r.TransactionID, token)
		if held = n == 1; err != nil || !held {
			return err
		}
		detail := r.detail()
		detail["gateway_refund_id"] = gatewayRefundID
		e, err := event(r.OrderID, EventRefunded, r.actor(), detail)
		if err != nil {
			return err
		}
		if err := t.addEvents(ctx, []Event{e}); err != nil {
			return err
		}
		if _, there := found[r.OrderID]; !there {
			return nil // deleted by somebody, against the rules; the money goes back all the same
		}
		return t.addOutgoing(ctx, []outgoing{{orderID: r.OrderID, kind: OutgoingRefundDone, data: RefundDone{
			Gateway: r.Gateway, TransactionID: r.TransactionID, Refund: FormatID(r.Amount), RefundCurrency: r.Currency, Reason: r.Reason, GatewayRefundID: gatewayRefundID,
		}}})
	})
	return held, err
}

// RefundRetry gives a refund back that was not made, or not surely: another attempt may be made after pause. It is false where the lease was
// lost.
func (s *Store) RefundRetry(ctx context.Context, token string, r PendingRefund, pause time.Duration, cause error) (bool, error) {
	held := false
	err := s.inTx(ctx, r.doing("put off"), func(ctx context.Context, t *txn) error {
		n, err := t.exec(ctx, `UPDATE refunds SET available_at = ?, lease_token = NULL, attempts = attempts + 1, last_error = ?
			WHERE gateway = ? AND transaction_id = ? AND lease_token = ? AND state = 'pending'`, at(t.now.Add(pause)), clip(cause.Error(), 1024), r.Gateway, r.TransactionID, token)
		held = n == 1
		return err
	})
	return held, err
}

// RefundGivenUp sets a refund aside that cannot be made, and parks its payment with the reason: a person has to see to it that the money goes
// back. It is false where the lease was lost.
func (s *Store) RefundGivenUp(ctx context.Context, token string, r PendingRefund, reason string) (bool, error) {
	held := false
	err := s.inTx(ctx, r.doing("give up"), func(ctx context.Context, t *txn) error {
		n, err := t.exec(ctx, `UPDATE refunds SET state = 'given_up', lease_token = NULL, attempts = attempts + 1, last_error = ?
			WHERE gateway = ? AND transaction_id = ? AND lease_token = ? AND state = 'pending'`, clip(reason, 1024), r.Gateway, r.TransactionID, token)
		if held = n == 1; err != nil || !held {
			return err
		}
		detail := r.detail()
		detail["because"] = clip(reason, 1024)
		e, err := event(r.OrderID, EventRefundGivenUp, r.actor(), detail)
		if err != nil {
			return err
		}
		if err := t.addEvents(ctx, []Event{e}); err != nil {
			return err
		}
		return t.park(ctx, []Parked{{What: ParkedPayment, Ref: r.Ref(),
			Reason: fmt.Sprintf("%d %s of order %d (%s) cannot be refunded: %s", r.Amount, r.Currency, r.OrderID, r.Reason, reason)}})
	})
	return held, err
}

func (r PendingRefund) doing(verb string) string {
	return fmt.Sprintf("%s refund of payment %q of gateway %q for order %d", verb, r.TransactionID, r.Gateway, r.OrderID)
}

func (r PendingRefund) actor() string { return "gateway:" + r.Gateway }

func (r PendingRefund) detail() map[string]any {
	return map[string]any{"gateway": r.Gateway, "transaction_id": r.TransactionID, "refund": FormatID(r.Amount), "currency": r.Currency, "reason": r.Reason}
}
