package api

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/lapse-orders/lapse/orders"
)

// typePrefix and the name of a kind make the type of a problem. It is a name and leads nowhere: the kinds are explained in openapi.yaml.
const typePrefix = "urn:lapse:problem:"

// kind is a sort of problem. Names are part of the contract, as clients branch on them; titles are for people.
type kind struct {
	name   string
	status int
	title  string
}

var (
	kindMalformed       = kind{"malformed", http.StatusBadRequest, "The request is not as the API description says"}
	kindUnauthenticated = kind{"unauthenticated", http.StatusUnauthorized, "A valid bearer token is needed"}
	kindBadSignature    = kind{"bad-signature", http.StatusUnauthorized, "The payment notice is not signed as it must be"}
	kindForbidden       = kind{"forbidden", http.StatusForbidden, "The token's scopes do not allow this"}
	kindNoSuchPath      = kind{"no-such-path", http.StatusNotFound, "There is nothing at this path"}
	kindUnknownOrder    = kind{"unknown-order", http.StatusNotFound, "There is no such order"}
	kindMethod          = kind{"method-not-allowed", http.StatusMethodNotAllowed, "The path has no such method"}
	kindTimeout         = kind{"request-timeout", http.StatusRequestTimeout, "The request's body did not arrive in time"}
	kindOutOfStock      = kind{"out-of-stock", http.StatusConflict, "Less is available than was ordered"}
	kindExists          = kind{"order-exists", http.StatusConflict, "An order of this id exists already"}
	kindFinal           = kind{"order-final", http.StatusConflict, "The order is paid or cancelled, which is final"}
	kindPayment         = kind{"payment-conflict", http.StatusConflict, "The notice contradicts an earlier one of the same transaction"}
	kindTooLarge        = kind{"body-too-large", http.StatusRequestEntityTooLarge, "The body is too large"}
	kindMediaType       = kind{"unsupported-media-type", http.StatusUnsupportedMediaType, "The body must be application/json"}
	kindMisdirected     = kind{"misdirected", http.StatusMisdirectedRequest, "A server without tokens answers only to names of the loopback"}
	kindKeyReused       = kind{"idempotency-key-reused", http.StatusUnprocessableEntity, "The idempotency key was used for another request"}
	kindUnknownSKU      = kind{"unknown-sku", http.StatusUnprocessableEntity, "There is no such SKU"}
	kindInvalid         = kind{"invalid", http.StatusUnprocessableEntity, "The request can never be accepted"}
	kindInternal        = kind{"internal", http.StatusInternalServerError, "Something went wrong in the server"}
	kindOverloaded      = kind{"overloaded", http.StatusServiceUnavailable, "Too many requests are under way"}
	kindUnavailable     = kind{"database-unavailable", http.StatusServiceUnavailable, "The database is not available"}
)

// kinds is every kind; openapi.yaml explains the same ones.
var kinds = []kind{
	kindMalformed, kindUnauthenticated, kindBadSignature, kindForbidden, kindNoSuchPath, kindUnknownOrder, kindMethod, kindTimeout, kindOutOfStock,
	kindExists, kindFinal, kindPayment, kindTooLarge, kindMediaType, kindMisdirected, kindKeyReused, kindUnknownSKU, kindInvalid, kindInternal,
	kindOverloaded, kindUnavailable,
}

// retryAfter is what is said with a 503, in seconds: long enough that a fleet of clients is no load on a database that comes back.
const retryAfter = "2"

// problem is an answer that is an error: application/problem+json of RFC 9457.
type problem struct {
	Type      string `json:"type"`
	Title     string `json:"title"`
	Status    int    `json:"status"`
	Detail    string `json:"detail,omitempty"`
	RequestID string `json:"request_id"`
	// With out-of-stock and unknown-sku, the first SKU that is short; Available only with the former.
	SKU       string  `json:"sku,omitempty"`
	Available *amount `json:"available,omitempty"`
	// With order-final.
	OrderStatus orders.Status `json:"order_status,omitempty"`

	header map[string]string
	cause  error // for the log
}

func (k kind) problem(format string, args ...any) *problem {
	return &problem{Type: typePrefix + k.name, Title: k.title, Status: k.status, Detail: fmt.Sprintf(format, args...)}
}

func (p *problem) with(header, value string) *problem {
	if p.header == nil {
		p.header = map[string]string{}
	}
	p.header[header] = value
	return p
}

// problemOf turns an error of the store into the answer. What the database said is for the log: it can name hosts, accounts and statements.
func problemOf(err error) *problem {
	var short *orders.StockError
	switch {
	case errors.Is(err, orders.ErrNotFound):
		return kindUnknownOrder.problem("%s", err)
	case errors.Is(err, orders.ErrExists):
		return kindExists.problem("%s", err)
	case errors.Is(err, orders.ErrKeyReused):
		return kindKeyReused.problem("%s", err)
	case errors.Is(err, orders.ErrPaymentConflict):
		return kindPayment.problem("%s", orders.ErrPaymentConflict)
	case errors.As(err, &short) && errors.Is(err, orders.ErrUnknownSKU):
		p := kindUnknownSKU.problem("%s", short)
		p.SKU = short.SKU
		return p
	case errors.As(err, &short):
		p := kindOutOfStock.problem("%s", short)
		p.SKU, p.Available = short.SKU, (*amount)(&short.Available)
		return p
	case errors.Is(err, orders.ErrInvalid):
		return kindInvalid.problem("%s", err)
	case orders.IsUnavailable(err):
		p := kindUnavailable.problem("send the same request again, with the same key; nothing may be assumed about this one").with("Retry-After", retryAfter)
		p.cause = err
		return p
	}
	p := kindInternal.problem("the server's log has the reason under the request's id; nothing may be assumed about the request, so send it again with the same key")
	p.cause = err
	return p
}
