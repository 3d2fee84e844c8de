package api

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/lapse-orders/lapse/internal/ops/why"
	"github.com/lapse-orders/lapse/orders"
)

// keyHeader names the request, so that a client can send it again; replayedHeader is on the answer to a repetition.
const (
	keyHeader      = "Idempotency-Key"
	replayedHeader = "Idempotency-Replayed"
)

// maxLines of one order, which is the store's number of SKUs; maxReason is the width of the column, in characters.
const (
	maxLines  = 500
	maxReason = 255
)

func (s *Server) place(c *call) (any, *problem) {
	key, p := idempotencyKey(c.r)
	if p != nil {
		return nil, p
	}
	var req placeRequest
	if p := decode(c.body, &req); p != nil {
		return nil, p
	}
	n, p := req.order()
	if p != nil {
		return nil, p
	}
	if tp := c.r.Header.Get("Traceparent"); traceparent.MatchString(tp) {
		n.Traceparent = tp
	}
	hash, err := req.hash()
	if err != nil {
		return nil, problemOf(err)
	}
	o, repeated, err := s.store.PlaceOnce(c.r.Context(), key, hash, n)
	if err != nil {
		return nil, s.refused("place", err)
	}
	if repeated {
		c.header.Set(replayedHeader, "true")
		s.metrics.outcomes.WithLabelValues("place", "repeated").Inc()
	} else {
		s.metrics.outcomes.WithLabelValues("place", "placed").Inc()
	}
	c.status = http.StatusCreated
	c.header.Set("Location", "/v1/orders/"+orders.FormatID(o.ID))
	return answerOf(o), nil
}

// refused counts and gives the problem of an error of the store.
func (s *Server) refused(verb string, err error) *problem {
	p := problemOf(err)
	s.metrics.outcomes.WithLabelValues(verb, strings.TrimPrefix(p.Type, typePrefix)).Inc()
	return p
}

// traceparent is the W3C header of that name, version 00. What does not look so is not passed on, as the recommendation says.
var traceparent = regexp.MustCompile(`^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)

func idempotencyKey(r *http.Request) (string, *problem) {
	values := r.Header.Values(keyHeader)
	if len(values) != 1 {
		return "", kindMalformed.problem("send one header %s; there are %d", keyHeader, len(values))
	}
	key := values[0]
	bad := len(key) == 0 || len(key) > orders.MaxKey
	for _, b := range []byte(key) {
		bad = bad || b <= ' ' || b > '~'
	}
	if bad {
		return "", kindMalformed.problem("the header %s must have 1 to %d visible ASCII characters", keyHeader, orders.MaxKey)
	}
	return key, nil
}

// hash tells requests apart by what they mean: white space and the order of members do not matter.
func (req placeRequest) hash() ([sha256.Size]byte, error) {
	canonical, err := json.Marshal(req)
	if err != nil {
		return [sha256.Size]byte{}, fmt.Errorf("encode request: %w", err)
	}
	return sha256.Sum256(append([]byte("place 1\n"), canonical...)), nil
}

// order checks what the description says of the body, and leaves what only the store can judge to it.
func (req placeRequest) order() (orders.NewOrder, *problem) {
	var n orders.NewOrder
	if req.Currency == "" {
		return n, kindMalformed.problem("currency is missing")
	}
	if req.Amount == nil {
		return n, kindMalformed.problem("amount is missing")
	}
	n = orders.NewOrder{Channel: req.Channel, PaymentMethod: req.PaymentMethod, UserID: req.UserID, Currency: req.Currency, Amount: int64(*req.Amount), NoDeadline: req.NoDeadline}
	if req.ID != nil {
		n.ID = int64(*req.ID)
	}
	if len(req.Items) > maxLines {
		return n, kindMalformed.problem("there are %d items, more than %d", len(req.Items), maxLines)
	}
	for i, it := range req.Items {
		switch {
		case it.SKU == "":
			return n, kindMalformed.problem("items[%d]: sku is missing", i)
		case it.Quantity < 1 || int64(it.Quantity) > orders.MaxQuantity:
			return n, kindMalformed.problem("items[%d]: quantity is missing, or not from 1 to %d", i, orders.MaxQuantity)
		case it.Price == nil:
			return n, kindMalformed.problem("items[%d]: price is missing", i)
		}
		n.Items = append(n.Items, orders.Item{SKU: it.SKU, Quantity: int64(it.Quantity), Price: int64(*it.Price)})
	}
	if req.DeadlineAt != nil {
		n.DeadlineAt = req.DeadlineAt.Time
	}
	if req.TimeoutSeconds != nil {
		seconds := int64(*req.TimeoutSeconds)
		if seconds < 1 || seconds > math.MaxInt32 {
			return n, kindMalformed.problem("timeout_seconds %d is not from 1 to %d", seconds, math.MaxInt32)
		}
		n.Timeout = time.Duration(seconds) * time.Second
	}
	return n, nil
}

func (s *Server) get(c *call) (any, *problem) {
	o, err := s.store.Get(c.r.Context(), c.id)
	if err != nil {
		return nil, problemOf(err)
	}
	return answerOf(o), nil
}

func (s *Server) events(c *call) (any, *problem) {
	events, err := s.store.Events(c.r.Context(), c.id)
	if err != nil {
		return nil, problemOf(err)
	}
	if len(events) == 0 { // every order has the event of its placing
		return nil, kindUnknownOrder.problem("order %d has no events", c.id)
	}
	answer := eventsAnswer{OrderID: orderID(c.id), Events: make([]eventAnswer, len(events))}
	for i, e := range events {
		answer.Events[i] = eventAnswer{At: instant{e.At}, Kind: e.Kind, Actor: e.Actor, Detail: e.Detail}
	}
	return answer, nil
}

func (s *Server) why(c *call) (any, *problem) {
	story, err := s.store.ReadStory(c.r.Context(), c.id)
	if err != nil {
		return nil, problemOf(err)
	}
	answer := why.Tell(story)
	if story.Order == nil {
		return nil, kindUnknownOrder.problem("%s", answer.Answer)
	}
	return answer, nil
}

func (s *Server) pay(c *call) (any, *problem) {
	if p := s.checkSignature(c.r, c.body); p != nil {
		return nil, p
	}
	var req payRequest
	if p := decode(c.body, &req); p != nil {
		return nil, p
	}
	switch {
	case req.Gateway == "":
		return nil, kindMalformed.problem("gateway is missing")
	case req.TransactionID == "":
		return nil, kindMalformed.problem("transaction_id is missing")
	case req.Currency == "":
		return nil, kindMalformed.problem("currency is missing")
	case req.Amount == nil || *req.Amount == 0:
		return nil, kindMalformed.problem("amount is missing, or not positive")
	}
	payment := orders.Payment{Gateway: req.Gateway, TransactionID: req.TransactionID, OrderID: c.id, Currency: req.Currency, Amount: int64(*req.Amount)}
	if req.PaidAt != nil {
		payment.PaidAt = req.PaidAt.Time
	}
	result, err := s.store.RecordPayment(c.r.Context(), payment)
	if err != nil {
		return nil, s.refused("pay", err)
	}
	outcome := string(result.Outcome)
	if result.Repeated {
		outcome = "repeated"
	}
	s.metrics.outcomes.WithLabelValues("pay", outcome).Inc()
	return payAnswer{Outcome: result.Outcome, Repeated: result.Repeated, Refund: amount(result.Refund), RefundReason: result.RefundReason}, nil
}

func (s *Server) extend(c *call) (any, *problem) {
	var req extendRequest
	if p := decode(c.body, &req); p != nil {
		return nil, p
	}
	if req.DeadlineAt == nil {
		return nil, kindMalformed.problem("deadline_at is missing")
	}
	x, err := s.store.ExtendDeadline(c.r.Context(), c.id, req.DeadlineAt.Time, c.actor)
	if err != nil {
		return nil, s.refused("extend", err)
	}
	if !x.Extended {
		return nil, s.final("extend", c.id, x.Status)
	}
	s.metrics.outcomes.WithLabelValues("extend", "extended").Inc()
	return extendAnswer{OrderID: orderID(c.id), Status: x.Status, DeadlineAt: instant{x.DeadlineAt}}, nil
}

func (s *Server) cancel(c *call) (any, *problem) {
	var req cancelRequest
	if p := decode(c.body, &req); p != nil {
		return nil, p
	}
	if req.Reason == "" {
		return nil, kindMalformed.problem("reason is missing")
	}
	if n := utf8.RuneCountInString(req.Reason); n > maxReason {
		return nil, kindMalformed.problem("reason has %d characters, more than %d", n, maxReason)
	}
	out, err := s.store.Cancel(c.r.Context(), c.id, c.actor, req.Reason)
	if err != nil {
		return nil, s.refused("cancel", err)
	}
	switch out.Result {
	case orders.ResultCancelled, orders.ResultAlreadyCancelled:
		s.metrics.outcomes.WithLabelValues("cancel", string(out.Result)).Inc()
		return cancelAnswer{OrderID: orderID(c.id), Status: orders.Cancelled, Repeated: out.Result == orders.ResultAlreadyCancelled}, nil
	case orders.ResultAlreadyPaid:
		return nil, s.final("cancel", c.id, orders.Paid)
	case orders.ResultNotFound:
		return nil, s.refused("cancel", fmt.Errorf("order %d: %w", c.id, orders.ErrNotFound))
	}
	return nil, s.refused("cancel", fmt.Errorf("cancel order %d: %s", c.id, out.Result))
}

func (s *Server) final(verb string, id int64, status orders.Status) *problem {
	s.metrics.outcomes.WithLabelValues(verb, kindFinal.name).Inc()
	p := kindFinal.problem("order %d is %s", id, status)
	p.OrderStatus = status
	return p
}
