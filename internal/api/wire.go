package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// amount is money in minor units, as a string: JSON numbers end at 2^53 in most clients.
type amount int64

// maxDigits of an amount that is sent: what every 64-bit number can hold, and a regular expression can say.
const maxDigits = 18

// MarshalJSON implements json.Marshaler.
func (a amount) MarshalJSON() ([]byte, error) {
	return []byte(`"` + strconv.FormatInt(int64(a), 10) + `"`), nil
}

// UnmarshalJSON implements json.Unmarshaler. One amount has one spelling.
func (a *amount) UnmarshalJSON(data []byte) error {
	digits, isString := unquote(data)
	n, err := strconv.ParseInt(digits, 10, 64)
	if !isString || err != nil || n < 0 || len(digits) > maxDigits || strconv.FormatInt(n, 10) != digits {
		return fmt.Errorf("%s is not an amount: write minor units as a string of 1 to %d digits, such as \"5600\"", clip(data), maxDigits)
	}
	*a = amount(n)
	return nil
}

// orderID is the id of an order, as a string.
type orderID int64

// MarshalJSON implements json.Marshaler.
func (o orderID) MarshalJSON() ([]byte, error) { return amount(o).MarshalJSON() }

// UnmarshalJSON implements json.Unmarshaler.
func (o *orderID) UnmarshalJSON(data []byte) error {
	text, isString := unquote(data)
	id, err := orders.ParseID(text)
	if !isString || err != nil {
		return fmt.Errorf("%s is not an order id: write a string of digits, from \"1\" to \"%d\"", clip(data), int64(math.MaxInt64))
	}
	*o = orderID(id)
	return nil
}

// count is a whole number. 3.0 and 3e0 are the number 3 in JSON, and some clients write them.
type count int64

// UnmarshalJSON implements json.Unmarshaler.
func (c *count) UnmarshalJSON(data []byte) error {
	if n, err := strconv.ParseInt(string(data), 10, 64); err == nil {
		*c = count(n)
		return nil
	}
	f, err := strconv.ParseFloat(string(data), 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return fmt.Errorf("%s is not a whole number", clip(data))
	}
	*c = count(f)
	return nil
}

// instant is a point in time. It is written in UTC with milliseconds, which is what is stored.
type instant struct{ time.Time }

// MarshalJSON implements json.Marshaler.
func (i instant) MarshalJSON() ([]byte, error) {
	return []byte(i.UTC().Format(`"2006-01-02T15:04:05.000Z"`)), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (i *instant) UnmarshalJSON(data []byte) error {
	text, isString := unquote(data)
	t, err := time.Parse(time.RFC3339Nano, text)
	if !isString || err != nil {
		return fmt.Errorf("%s is not a time: write it as \"2026-11-30T15:00:00Z\"", clip(data))
	}
	if t.IsZero() {
		// What a client's library writes for a time that was never set would count as none given.
		return fmt.Errorf("%s is what an unset time looks like: leave the field out", clip(data))
	}
	i.Time = t.UTC().Truncate(time.Millisecond)
	return nil
}

func instantOf(t *time.Time) *instant {
	if t == nil {
		return nil
	}
	return &instant{*t}
}

func unquote(data []byte) (text string, isString bool) {
	if !bytes.HasPrefix(data, []byte(`"`)) {
		return "", false
	}
	return text, json.Unmarshal(data, &text) == nil
}

// clip keeps what a client sent from filling its own error.
func clip(data []byte) string {
	const longest = 64
	if len(data) > longest {
		return string(bytes.ToValidUTF8(data[:longest], nil)) + "…"
	}
	return string(data)
}

// placeRequest is the body of POST /v1/orders. Its canonical encoding is hashed: a member that is added later needs omitempty, so that
// requests without it keep their hash.
type placeRequest struct {
	ID             *orderID      `json:"id,omitempty"`
	Channel        string        `json:"channel,omitempty"`
	PaymentMethod  string        `json:"payment_method,omitempty"`
	UserID         string        `json:"user_id,omitempty"`
	Currency       string        `json:"currency"`
	Amount         *amount       `json:"amount"`
	Items          []itemRequest `json:"items,omitempty"`
	TimeoutSeconds *count        `json:"timeout_seconds,omitempty"`
	DeadlineAt     *instant      `json:"deadline_at,omitempty"`
	NoDeadline     bool          `json:"no_deadline,omitempty"`
}

type itemRequest struct {
	SKU      string  `json:"sku"`
	Quantity count   `json:"quantity"`
	Price    *amount `json:"price"`
}

type payRequest struct {
	Gateway       string   `json:"gateway"`
	TransactionID string   `json:"transaction_id"`
	Currency      string   `json:"currency"`
	Amount        *amount  `json:"amount"`
	PaidAt        *instant `json:"paid_at,omitempty"`
}

type extendRequest struct {
	DeadlineAt *instant `json:"deadline_at"`
}

type cancelRequest struct {
	Reason string `json:"reason"`
}

type orderAnswer struct {
	ID            orderID       `json:"id"`
	Channel       string        `json:"channel"`
	PaymentMethod string        `json:"payment_method"`
	UserID        string        `json:"user_id"`
	Currency      string        `json:"currency"`
	Amount        amount        `json:"amount"`
	Status        orders.Status `json:"status"`
	PayBy         *instant      `json:"pay_by"`
	DeadlineAt    *instant      `json:"deadline_at"`
	HoldUntil     *instant      `json:"hold_until,omitempty"`
	HoldReason    string        `json:"hold_reason,omitempty"`
	CreatedAt     instant       `json:"created_at"`
	PaidAt        *instant      `json:"paid_at,omitempty"`
	CancelledAt   *instant      `json:"cancelled_at,omitempty"`
	CancelReason  string        `json:"cancel_reason,omitempty"`
	Items         []itemAnswer  `json:"items"`
}

type itemAnswer struct {
	SKU      string `json:"sku"`
	Quantity int64  `json:"quantity"`
	Price    amount `json:"price"`
}

func answerOf(o orders.Order) orderAnswer {
	a := orderAnswer{
		ID: orderID(o.ID), Channel: o.Channel, PaymentMethod: o.PaymentMethod, UserID: o.UserID, Currency: o.Currency, Amount: amount(o.Amount), Status: o.Status,
		PayBy: instantOf(o.PayBy), DeadlineAt: instantOf(o.DeadlineAt), HoldUntil: instantOf(o.HoldUntil), HoldReason: o.HoldReason, CreatedAt: instant{o.CreatedAt},
		PaidAt: instantOf(o.PaidAt), CancelledAt: instantOf(o.CancelledAt), CancelReason: o.CancelReason, Items: make([]itemAnswer, len(o.Items)),
	}
	for i, it := range o.Items {
		a.Items[i] = itemAnswer{SKU: it.SKU, Quantity: it.Quantity, Price: amount(it.Price)}
	}
	return a
}

type eventsAnswer struct {
	OrderID orderID       `json:"order_id"`
	Events  []eventAnswer `json:"events"`
}

type eventAnswer struct {
	At     instant         `json:"at"`
	Kind   string          `json:"kind"`
	Actor  string          `json:"actor"`
	Detail json.RawMessage `json:"detail,omitempty"`
}

type payAnswer struct {
	Outcome      orders.PaymentOutcome `json:"outcome"`
	Repeated     bool                  `json:"repeated"`
	Refund       amount                `json:"refund"`
	RefundReason string                `json:"refund_reason,omitempty"`
}

type extendAnswer struct {
	OrderID    orderID       `json:"order_id"`
	Status     orders.Status `json:"status"`
	DeadlineAt instant       `json:"deadline_at"`
}

type cancelAnswer struct {
	OrderID  orderID       `json:"order_id"`
	Status   orders.Status `json:"status"`
	Repeated bool          `json:"repeated"`
}
