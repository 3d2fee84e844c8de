package orders

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Status is the state of an order. Every change goes from unpaid to one of the two others, which are final.
type Status string

const (
	// Unpaid is the state of a placed order: its stock is reserved, money may arrive, the deadline may pass.
	Unpaid Status = "unpaid"
	// Paid is final: an accepted payment was committed while the order was unpaid. Its stock is sold.
	Paid Status = "paid"
	// Cancelled is final: by timeout, or by hand. Its stock has been released; money that still arrives is refunded.
	Cancelled Status = "cancelled"
)

// ReasonTimeout is the cancel reason of an order that was unpaid at its deadline. The rule about deadlines (invariant I5) holds for
// this reason alone: a cancel by hand may come at any time.
const ReasonTimeout = "timeout"

// Item is one line of an order. Price is in minor units (cents), of one piece. Of one SKU an order has 1 to [MaxQuantity] pieces.
type Item struct {
	SKU      string `json:"sku"`
	Quantity int64  `json:"quantity"`
	Price    int64  `json:"price"`
}

// Order is one order as it is stored. All instants are UTC with milliseconds.
type Order struct {
	ID            int64      `json:"id,string"`
	Channel       string     `json:"channel"`
	PaymentMethod string     `json:"payment_method"`
	UserID        string     `json:"user_id"`
	Currency      string     `json:"currency"`
	Amount        int64      `json:"amount,string"`
	Status        Status     `json:"status"`
	PayBy         *time.Time `json:"pay_by"`      // what the customer is told: the deadline less the grace of its policy; nil: no deadline
	DeadlineAt    *time.Time `json:"deadline_at"` // nil: never cancelled by timeout
	HoldUntil     *time.Time `json:"hold_until,omitempty"`
	HoldReason    string     `json:"hold_reason,omitempty"`
	CreatedAt     time.Time  `json:"created_at"`
	PaidAt        *time.Time `json:"paid_at,omitempty"`
	CancelledAt   *time.Time `json:"cancelled_at,omitempty"`
	CancelReason  string     `json:"cancel_reason,omitempty"`
	Items         []Item     `json:"items"`
}

// Lateness is how long after its deadline the order was cancelled; false where it was not cancelled or has no deadline.
func (o Order) Lateness() (time.Duration, bool) {
	if o.CancelledAt == nil || o.DeadlineAt == nil {
		return 0, false
	}
	return o.CancelledAt.Sub(*o.DeadlineAt), true
}

// promise sets the deadline, and what the customer is told of it.
func (o *Order) promise(deadline instant, grace time.Duration) {
	o.DeadlineAt, o.PayBy = deadline.pointer(), nil
	if deadline.valid {
		o.PayBy = at(deadline.time.Add(-grace)).pointer()
	}
}

// NewOrder is what a checkout places.
type NewOrder struct {
	// ID is the caller's own id, 1 to 2^63-1. Default: one of [NewID].
	ID int64
	// Channel, PaymentMethod, UserID: at most 64 characters each, no blanks at their ends. The first two choose the [Policy]. Default: empty.
	Channel, PaymentMethod, UserID string
	// Currency is required, by convention the ISO 4217 code; compared byte by byte with that of a payment.
	Currency string
	// Amount in minor units, not negative. With 0 there is nothing to pay: the order never becomes paid (a payment of it is a mismatch and
	// refunded whole), so it has no deadline unless Timeout or DeadlineAt names one, whatever the policies say.
	Amount int64
	// Items may be empty. The same SKU on two lines is summed; the two lines must then have one price.
	Items []Item
	// Timeout is the time from the transaction's instant to the deadline. Default: that of the [Policy] that fits, with its grace; without
	// one, the Store's timeout (30 minutes). Negative is an error.
	Timeout time.Duration
	// DeadlineAt, where it is set, is the deadline itself, cut to milliseconds; one in the past is due at once. Setting it
	// together with Timeout is an error.
	DeadlineAt time.Time
	// NoDeadline makes an order that is never cancelled by timeout.
	NoDeadline bool
	// Traceparent (W3C) travels with the timed message. Default: none.
	Traceparent string
}

var (
	// ErrInvalid is in the chain of every error that says that an argument can never be accepted. Nothing was written.
	ErrInvalid = errors.New("invalid argument")
	// ErrNotFound is returned by the verbs that need an order, when there is none of that id.
	ErrNotFound = errors.New("no such order")
	// ErrExists is returned by Place when an order with the caller's id is already there.
	ErrExists = errors.New("order exists already")
	// ErrKeyReused is returned by PlaceOnce when the idempotency key belongs to another request. Nothing was written.
	ErrKeyReused = errors.New("idempotency key was used for another request")
	// ErrOutOfStock is in the chain of a [StockError]: less is available than was ordered.
	ErrOutOfStock = errors.New("out of stock")
	// ErrUnknownSKU is in the chain of a [StockError]: the table stock has no such SKU.
	ErrUnknownSKU = errors.New("unknown SKU")
	// ErrPaymentConflict is returned by RecordPayment when a notice repeats a transaction id with another order, amount or
	// currency. The notice is parked; the first one stays as it is.
	ErrPaymentConflict = errors.New("payment notice contradicts an earlier one of the same transaction")
	// ErrNoTransaction is returned by the …Tx functions when the handle is not inside a transaction.
	ErrNoTransaction = errors.New("not inside a transaction")
)

// StockError is returned by Place when stock cannot be reserved. Nothing was written.
type StockError struct {
	SKU       string
	Wanted    int64
	Available int64
	unknown   bool
}

func (e *StockError) Error() string {
	if e.unknown {
		return fmt.Sprintf("reserve %d of %q: %s", e.Wanted, e.SKU, ErrUnknownSKU)
	}
	return fmt.Sprintf("reserve %d of %q, %d available: %s", e.Wanted, e.SKU, e.Available, ErrOutOfStock)
}

// Unwrap gives [ErrOutOfStock] or [ErrUnknownSKU].
func (e *StockError) Unwrap() error {
	if e.unknown {
		return ErrUnknownSKU
	}
	return ErrOutOfStock
}

// ParseID reads an order id in canonical decimal form: digits without sign, blanks or leading zeros, 1 to 9223372036854775807.
// Anything else is an error, so that one order has one spelling.
func ParseID(text string) (int64, error) {
	if text == "" || text[0] < '1' || text[0] > '9' {
		return 0, fmt.Errorf("order id %q is not a canonical decimal from 1 to %d: %w", text, int64(math.MaxInt64), ErrInvalid)
	}
	id, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("order id %q is not a canonical decimal from 1 to %d: %w", text, int64(math.MaxInt64), ErrInvalid)
	}
	return id, nil
}

// FormatID is the inverse of [ParseID].
func FormatID(id int64) string { return strconv.FormatInt(id, 10) }

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, ErrInvalid)...)
}

// maxName bounds the ids of the outside world; the columns hold 64 characters.
const maxName = 64

// checkName refuses what Go and MySQL could compare differently. The columns are binary-collated, but that collation ignores
// blanks at the end, and without strict mode MySQL would cut a longer text in silence.
func checkName(what, s string, required bool) error {
	switch {
	case s == "" && required:
		return invalid("%s is empty", what)
	case !utf8.ValidString(s):
		return invalid("%s %q is not valid UTF-8", what, s)
	case utf8.RuneCountInString(s) > maxName:
		return invalid("%s %q has more than %d characters", what, s, maxName)
	case strings.TrimFunc(s, unicode.IsSpace) != s:
		return invalid("%s %q begins or ends with a blank", what, s)
	case strings.ContainsFunc(s, unicode.IsControl):
		return invalid("%s %q has a control character", what, s)
	}
	return nil
}

// sumItems adds the lines of each SKU and sorts them: stock is locked in that order by every verb.
func sumItems(items []Item) ([]Item, error) {
	bySKU := make(map[string]Item, len(items))
	for _, it := range items {
		if err := checkName("sku", it.SKU, true); err != nil {
			return nil, err
		}
		if it.Quantity <= 0 {
			return nil, invalid("quantity %d of %q is not positive", it.Quantity, it.SKU)
		}
		if it.Price < 0 {
			return nil, invalid("price %d of %q is negative", it.Price, it.SKU)
		}
		sum, seen := bySKU[it.SKU]
		if seen && sum.Price != it.Price {
			return nil, invalid("two lines of %q have the prices %d and %d; one SKU has one price", it.SKU, sum.Price, it.Price)
		}
		if it.Quantity > MaxQuantity-sum.Quantity {
			return nil, invalid("the quantities of %q add up to more than %d", it.SKU, MaxQuantity)
		}
		sum.SKU, sum.Price = it.SKU, it.Price
		sum.Quantity += it.Quantity
		bySKU[it.SKU] = sum
	}
	if len(bySKU) > maxItems {
		return nil, invalid("the order has %d SKUs, more than %d", len(bySKU), maxItems)
	}
	sums := make([]Item, 0, len(bySKU))
	for _, it := range bySKU {
		sums = append(sums, it)
	}
	slices.SortFunc(sums, func(a, b Item) int { return strings.Compare(a.SKU, b.SKU) })
	return sums, nil
}

// maxItems keeps the IN lists of one order below 1,000, the length from which MariaDB rewrites them into a join.
const maxItems = 500

// MaxQuantity is how much of one SKU an order may have. A counter of stock that is not limited would run full otherwise, and fail whatever comes
// after: also the payment of the order that filled it. It also keeps a slip, such as a barcode in the wrong member, from becoming a reservation.
const MaxQuantity int64 = 1_000_000_000

// clip cuts a text to n characters, so that a column can hold it in every sql_mode.
//
// It may end in a character that an ASCII column does not take; see [clipID].
func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// clipID makes of a broker's message id what an ASCII column can hold: one that could not be written would keep its rows from ever being
// marked sent.
func clipID(s string) string {
	s = strings.Map(func(r rune) rune {
		if r > unicode.MaxASCII { // also what stands for bytes that are no UTF-8
			return '?'
		}
		return r
	}, s)
	return s[:min(len(s), maxName)]
}
