package payments

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// State is what the gateway says about the payment of an order.
type State string

// The states of the contract. A word that is none of them is taken as unknown.
const (
	StateNone          State = "none"           // no payment page was ever opened for the order
	StateUnpaid        State = "unpaid"         // a page was opened and can still be paid
	StateInProgress    State = "in_progress"    // the customer is paying, or the bank has not decided: ask again
	StatePaid          State = "paid"           // with the payment
	StateClosed        State = "closed"         // nothing was paid, and nothing can be any more
	StateAlreadyClosed State = "already_closed" // as closed; the answer to a second close
	StateRefunded      State = "refunded"       // money came and went back
	StateUnknown       State = "unknown"        // the gateway cannot tell now: ask again
)

// Money is a payment as the gateway has it.
type Money struct {
	TransactionID string
	Currency      string
	Amount        int64     // minor units
	PaidAt        time.Time // zero: not told
}

// Answer is what the gateway says about an order.
type Answer struct {
	State State
	Paid  Money // where State is paid
	// Detail is the gateway's own word for people, or the state as it came where it is unknown.
	Detail string
}

// RefundState is what became of a refund.
type RefundState string

// The states of a refund.
const (
	RefundDone    RefundState = "done"    // made, or accepted for good
	RefundPending RefundState = "pending" // under way: ask again with the same key
	RefundRefused RefundState = "refused" // it will never be made; a person has to see to it
)

// RefundAnswer is what the gateway says about a refund.
type RefundAnswer struct {
	State    RefundState
	RefundID string // the gateway's own id, of a refund that is done
	Detail   string
}

// Gateway is the shop's payment service. Its methods are called concurrently and return when their context ends. An error means that there is
// no answer: the call may or may not have arrived, unless it is [ErrNotAsked]. All three may be repeated.
type Gateway interface {
	// Status says what became of an order's payment, and changes nothing.
	Status(ctx context.Context, orderID int64) (Answer, error)
	// Close sees to it that the order cannot be paid any more, and says what it found.
	Close(ctx context.Context, orderID int64) (Answer, error)
	// Refund gives money back, once for each key.
	Refund(ctx context.Context, key string, r orders.PendingRefund) (RefundAnswer, error)
}

// ErrNotAsked is in the chain of errors that say that nothing was sent: the gateway has failed so often that it is left alone for a while.
var ErrNotAsked = errors.New("the gateway was not asked")

// RefundKey is the idempotency key of the refund of a payment: always the same for the same payment, so that no process has to remember that
// it has asked. It has 64 characters of a-f and 0-9.
func RefundKey(gateway, transactionID string) string {
	// The ids have no control characters (orders checks them), so the zero byte separates them.
	sum := sha256.Sum256([]byte("lapse refund\x00" + gateway + "\x00" + transactionID))
	return hex.EncodeToString(sum[:])
}
