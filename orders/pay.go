package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"gorm.io/gorm"
)

// Payment is a gateway's notice that money arrived.
type Payment struct {
	// Gateway and TransactionID identify the money: the same pair is the same payment. 1 to 64 characters each, no blanks at the ends.
	Gateway, TransactionID string
	OrderID                int64
	Currency               string
	// Amount in minor units, positive.
	Amount int64
	// PaidAt is the gateway's instant. Default: none. It is stored and decides nothing: a payment counts from its commit here.
	PaidAt time.Time
}

// PaymentOutcome says what the money did.
type PaymentOutcome string

const (
	// PaymentAccepted says that the order became paid by this payment. An excess over the order's amount is refunded.
	PaymentAccepted PaymentOutcome = "accepted"
	// PaymentDuplicate says that the order was paid already by another transaction; this one is refunded.
	PaymentDuplicate PaymentOutcome = "duplicate"
	// PaymentLate says that the order was cancelled already; the payment is refunded.
	PaymentLate PaymentOutcome = "late"
	// PaymentMismatch says that it was another currency, or less than the order's amount; the payment is refunded and the order stays unpaid.
	PaymentMismatch PaymentOutcome = "mismatch"
)

// Reasons of refunds: those of the outcomes, and excess.
const (
	RefundDuplicate = "duplicate"
	RefundLate      = "late"
	RefundMismatch  = "mismatch"
	RefundExcess    = "excess"
)

// PaymentResult is what became of a payment.
type PaymentResult struct {
	Outcome PaymentOutcome
	// Repeated: the same notice was recorded before; nothing was written now, and the outcome is the earlier one.
	Repeated bool
	// Refund is the amount, in minor units, that has to go back; 0: none. RefundReason says why.
	Refund       int64
	RefundReason string
}

// RecordPayment records money that a gateway reports, and decides by the order's locked row: unpaid becomes paid, whatever the deadline
// says; money that cannot stay gets exactly one refund record in the same transaction. The same notice again changes nothing and gives
// the first result. Errors: [ErrInvalid]; [ErrNotFound], so that the gateway asks again (the order may not be committed yet);
// [ErrPaymentConflict], and then the payment is parked. After any other error nothing may be assumed: record it again.
func (s *Store) RecordPayment(ctx context.Context, p Payment) (PaymentResult, error) {
	var result PaymentResult
	err := s.inTx(ctx, p.doing(), func(ctx context.Context, t *txn) (err error) {
		result, err = recordPayment(ctx, t, p)
		return err
	})
	if errors.Is(err, ErrPaymentConflict) {
		if failure := s.Park(ctx, Parked{What: ParkedPayment, Ref: p.Gateway + ":" + p.TransactionID, Reason: err.Error()}); failure != nil {
			// The conflict is final for whoever asked, who would not ask again, and nobody would hear of the money: its text alone is told.
			return PaymentResult{}, fmt.Errorf("record it again, it is not parked: %v: %w", err, failure) //nolint:errorlint // see above
		}
	}
	return result, err
}

// RecordPaymentTx is RecordPayment in the caller's transaction. A conflicting notice is not parked: the caller's rollback would take
// that back.
func (s *Store) RecordPaymentTx(ctx context.Context, tx *gorm.DB, p Payment) (PaymentResult, error) {
	var result PaymentResult
	err := s.joinTx(ctx, tx, p.doing(), func(ctx context.Context, t *txn) (err error) {
		result, err = recordPayment(ctx, t, p)
		return err
	})
	return result, err
}

func (p Payment) doing() string {
	return fmt.Sprintf("record payment %q of gateway %q for order %d", clip(p.TransactionID, maxName), clip(p.Gateway, maxName), p.OrderID)
}

func (p Payment) check() error {
	if err := checkName("gateway", p.Gateway, true); err != nil {
		return err
	}
	if err := checkName("transaction id", p.TransactionID, true); err != nil {
		return err
	}
	if err := checkName("currency", p.Currency, true); err != nil {
		return err
	}
	if len(p.Currency) > maxCurrency {
		return invalid("currency %q has more than %d characters", p.Currency, maxCurrency)
	}
	if p.OrderID <= 0 {
		return invalid("order id %d is not positive", p.OrderID)
	}
	if p.Amount <= 0 {
		return invalid("amount %d is not positive", p.Amount)
	}
	if year := p.PaidAt.UTC().Year(); !p.PaidAt.IsZero() && (year < 1970 || year > 9999) {
		return invalid("paid-at %s is out of range", p.PaidAt)
	}
	return nil
}

func recordPayment(ctx context.Context, t *txn, p Payment) (PaymentResult, error) {
	if err := p.check(); err != nil {
		return PaymentResult{}, err
	}
	found, err := t.lock(ctx, []int64{p.OrderID})
	if err != nil {
		return PaymentResult{}, err
	}
	o, there := found[p.OrderID]
	if !there {
		return PaymentResult{}, fmt.Errorf("order %d: %w", p.OrderID, ErrNotFound)
	}
	result, err := judge(o, p)
	if err != nil {
		return PaymentResult{}, err
	}

	// The insert itself finds out whether the notice is a repetition. To look first, with a lock, would at REPEATABLE READ lock the gap
	// where the row will be, and two payments of a caller at that level would deadlock on each other's gap.
	_, err = t.exec(ctx, "INSERT INTO payments (gateway, transaction_id, order_id, currency, amount, paid_at, received_at, outcome) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
		p.Gateway, p.TransactionID, p.OrderID, p.Currency, p.Amount, at(p.PaidAt), at(t.now), string(result.Outcome))
	if number(err) == errDuplicateKey {
		return t.earlierPayment(ctx, o, p)
	}
	if err != nil {
		return PaymentResult{}, fmt.Errorf("write payment: %w", err)
	}
	if result.Outcome == PaymentAccepted {
		n, err := t.exec(ctx, `UPDATE orders SET status = 'paid', paid_at = ?, hold_until = NULL, hold_reason = NULL WHERE id = ? AND status = 'unpaid'`, at(t.now), p.OrderID)
		if err != nil {
			return PaymentResult{}, fmt.Errorf("mark order %d paid: %w", p.OrderID, err)
		}
		if n != 1 {
			return PaymentResult{}, fmt.Errorf("order %d is locked and did not match: %w", p.OrderID, errAgain)
		}
	}
	if result.Refund > 0 {
		_, err = t.exec(ctx, `INSERT INTO refunds (gateway, transaction_id, order_id, amount, currency, reason, state, attempts, created_at, available_at)
			VALUES (?, ?, ?, ?, ?, ?, 'pending', 0, ?, ?)`, p.Gateway, p.TransactionID, p.OrderID, result.Refund, p.Currency, result.RefundReason, at(t.now), at(t.now))
		if err != nil {
			return PaymentResult{}, fmt.Errorf("write refund: %w", err)
		}
	}

	var sums func() error
	if result.Outcome == PaymentAccepted {
		if sums, err = t.settle(ctx, []int64{p.OrderID}, moveSell); err != nil {
			return PaymentResult{}, err
		}
	}
	events, err := paymentEvents(p, result)
	if err != nil {
		return PaymentResult{}, err
	}
	if err := t.addEvents(ctx, events); err != nil {
		return PaymentResult{}, err
	}
	if result.Outcome == PaymentAccepted {
		paid := orderPaid{Gateway: p.Gateway, TransactionID: p.TransactionID, Paid: FormatID(p.Amount)}
		if err := t.addOutgoing(ctx, []outgoing{{orderID: p.OrderID, kind: OutgoingPaid, data: paid}}); err != nil {
			return PaymentResult{}, err
		}
	}
	if sums != nil {
		err = sums()
	}
	return result, err
}

// judge gives the outcome of a payment that was not recorded before, from the locked row alone.
func judge(o lockedOrder, p Payment) (PaymentResult, error) {
	outcome := PaymentAccepted
	switch {
	case o.status == Cancelled:
		outcome = PaymentLate
	case o.status == Paid:
		outcome = PaymentDuplicate
	case o.status != Unpaid:
		return PaymentResult{}, fmt.Errorf("order %d is in state %q, which this build does not know", p.OrderID, o.status)
	case p.Currency != o.currency || p.Amount < o.amount:
		outcome = PaymentMismatch
	case o.amount == 0:
		// Nothing was owed: the whole payment is an excess, and the order needs none to be fulfilled.
		outcome = PaymentMismatch
	}
	return refundOf(outcome, p.Amount, o.amount), nil
}

// refundOf gives what has to go back of a payment, given its outcome and what the order owed: two facts that never change.
func refundOf(outcome PaymentOutcome, paid, owed int64) PaymentResult {
	result := PaymentResult{Outcome: outcome}
	switch {
	case outcome != PaymentAccepted:
		result.Refund, result.RefundReason = paid, string(outcome)
	case paid > owed:
		result.Refund, result.RefundReason = paid-owed, RefundExcess
	}
	return result
}

// earlierPayment gives the result of the payment that was recorded before under the same gateway and transaction. It reads with a lock,
// since a caller's old snapshot may not show the row; its refund follows from it and is not read.
func (t *txn) earlierPayment(ctx context.Context, o lockedOrder, p Payment) (PaymentResult, error) {
	var orderID, amount int64
	var currency, outcome string
	err := t.QueryRowContext(ctx, "SELECT order_id, currency, amount, outcome FROM payments WHERE gateway = ? AND transaction_id = ? FOR UPDATE", p.Gateway, p.TransactionID).
		Scan(&orderID, &currency, &amount, &outcome)
	if errors.Is(err, sql.ErrNoRows) {
		return PaymentResult{}, fmt.Errorf("the earlier notice is gone: %w", errAgain)
	}
	if err != nil {
		return PaymentResult{}, fmt.Errorf("read the earlier notice: %w", err)
	}
	if orderID != p.OrderID || amount != p.Amount || currency != p.Currency {
		return PaymentResult{}, fmt.Errorf("the earlier one was %d %s for order %d, this one is %d %s for order %d: %w",
			amount, currency, orderID, p.Amount, p.Currency, p.OrderID, ErrPaymentConflict)
	}
	result := refundOf(PaymentOutcome(outcome), amount, o.amount)
	result.Repeated = true
	return result, nil
}

func paymentEvents(p Payment, result PaymentResult) ([]Event, error) {
	var events []Event
	actor := "gateway:" + p.Gateway
	money := map[string]any{"gateway": p.Gateway, "transaction_id": p.TransactionID, "amount": FormatID(p.Amount), "currency": p.Currency}
	if result.Outcome == PaymentAccepted {
		e, err := event(p.OrderID, EventPaid, actor, money)
		if err != nil {
			return nil, err
		}
		events = append(events, e)
	}
	if result.Refund > 0 {
		e, err := event(p.OrderID, EventRefund, actor, map[string]any{
			"gateway": p.Gateway, "transaction_id": p.TransactionID, "refund": FormatID(result.Refund), "of": FormatID(p.Amount), "currency": p.Currency, "reason": result.RefundReason,
		})
		if err != nil {
			return nil, err
		}
		events = append(events, e)
	}
	return events, nil
}
