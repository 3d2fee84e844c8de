// Package paytest is a payment service for tests and trials: it keeps orders, pages and money in memory, speaks the contract of
// docs/gateway.md over HTTP, and can be told to fail.
//
// It checks what a real one would (the signature, the key of a refund), and keeps a book of every call, so that a test can say what must not
// have been asked as well as what must.
package paytest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"time"

	"github.com/lapse-orders/lapse/internal/sign"
)

// Secret is what the calls to a [Service] are signed with.
const Secret = "the secret of paytest"

// Payment is money at the service.
type Payment struct {
	TransactionID, Currency string
	Amount                  int64 // minor units
	PaidAt                  time.Time
}

// Refund is money that went back.
type Refund struct {
	Key, OrderID, TransactionID, Currency, Reason string
	Amount                                        int64
	RefundID                                      string
	Calls                                         int // how often it was asked for
}

// Call is one request that arrived.
type Call struct {
	Verb    string // status, close, refund
	OrderID string
}

// Fault is told of every call before it is carried out, and may wait, answer in the service's place, or let it pass: false. It runs
// concurrently, and must return when the request's context ends.
type Fault func(call Call, w http.ResponseWriter, r *http.Request) (answered bool)

// Service is a payment service. Its methods are safe for concurrent use.
type Service struct {
	// URL is where it is.
	URL string

	server *httptest.Server
	mu     sync.Mutex // guards everything below
	states map[string]string
	paid   map[string]Payment
	book   []Call
	moved  map[string]*Refund // by key
	before Fault
	after  Fault
	wrong  []string
}

// TB is the part of testing.TB that Start needs. The demo has a service, too, and no package testing.
type TB interface {
	Helper()
	Cleanup(func())
	Error(args ...any)
}

// Start starts a service that ends with the test. Calls that do not keep to the contract fail the test.
func Start(t TB) *Service {
	t.Helper()
	s := New()
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// New starts a service, on a port of the loopback. Call Close.
func New() *Service {
	s := &Service{states: map[string]string{}, paid: map[string]Payment{}, moved: map[string]*Refund{}}
	s.server = httptest.NewServer(s)
	s.URL = s.server.URL + "/pay"
	return s
}

// Close ends the service. The error lists the calls that did not keep to the contract.
func (s *Service) Close() error {
	s.server.CloseClientConnections()
	s.server.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, w := range s.wrong {
		errs = append(errs, fmt.Errorf("payment service: %s", w))
	}
	return errors.Join(errs...)
}

// Set gives an order a state, as the customer or the bank does. Orders that were never set have none.
func (s *Service) Set(orderID int64, state string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.states[fmt.Sprint(orderID)] = state
}

// Pay lets the customer pay, unless the page is closed: then it is false.
func (s *Service) Pay(orderID int64, p Payment) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := fmt.Sprint(orderID)
	if state := s.states[id]; state == "closed" {
		return false
	}
	s.states[id], s.paid[id] = "paid", p
	return true
}

// State is the state of an order.
func (s *Service) State(orderID int64) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state(fmt.Sprint(orderID))
}

func (s *Service) state(id string) string {
	if state, known := s.states[id]; known {
		return state
	}
	return "none"
}

// Before sets what happens before a call is carried out, and After what happens between that and its answer; nil: nothing.
func (s *Service) Before(f Fault) { s.set(&s.before, f) }

// After is described at Before.
func (s *Service) After(f Fault) { s.set(&s.after, f) }

func (s *Service) set(to *Fault, f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*to = f
}

// Calls is how often a verb was asked for about an order; 0 for the order means any.
func (s *Service) Calls(verb string, orderID int64) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, c := range s.book {
		if c.Verb == verb && (orderID == 0 || c.OrderID == fmt.Sprint(orderID)) {
			n++
		}
	}
	return n
}

// Refunds are the refunds that were made, each once, in no order.
func (s *Service) Refunds() []Refund {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]Refund, 0, len(s.moved))
	for _, r := range s.moved {
		list = append(list, *r)
	}
	return list
}

// Silent is a fault that never answers, for some of the calls.
func Silent(which func(Call) bool) Fault {
	return func(call Call, _ http.ResponseWriter, r *http.Request) bool {
		if !which(call) {
			return false
		}
		wait(r.Context())
		return true
	}
}

// Status is a fault that answers with a status code, for some of the calls.
func Status(code int, which func(Call) bool) Fault {
	return func(call Call, w http.ResponseWriter, _ *http.Request) bool {
		if !which(call) {
			return false
		}
		http.Error(w, http.StatusText(code), code)
		return true
	}
}

// Slow is a fault that keeps some of the calls waiting.
func Slow(d time.Duration, which func(Call) bool) Fault {
	return func(call Call, _ http.ResponseWriter, r *http.Request) bool {
		if which(call) {
			ctx, cancel := context.WithTimeout(r.Context(), d)
			defer cancel()
			wait(ctx)
		}
		return false
	}
}

func wait(ctx context.Context) { <-ctx.Done() }

// All is every call, and Verb those of one verb.
func All(Call) bool { return true }

// Verb is described at All.
func Verb(verb string) func(Call) bool { return func(c Call) bool { return c.Verb == verb } }

// ServeHTTP implements http.Handler.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client is gone
	}
	path := strings.TrimPrefix(r.URL.Path, "/pay")
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	if r.Method != http.MethodPost || len(parts) != 3 || parts[0] != "orders" {
		s.refuse(w, http.StatusNotFound, "%s %s is no call of the contract", r.Method, r.URL.Path)
		return
	}
	if err := sign.Check(r.Header.Values(sign.Header), []string{Secret}, path, body, time.Now()); err != nil {
		s.refuse(w, http.StatusUnauthorized, "%s: %v", path, err)
		return
	}
	var in struct {
		OrderID        string `json:"order_id"`
		TransactionID  string `json:"transaction_id"`
		Currency       string `json:"currency"`
		Amount         string `json:"amount"`
		Reason         string `json:"reason"`
		IdempotencyKey string `json:"idempotency_key"`
	}
	if err := json.Unmarshal(body, &in); err != nil || in.OrderID != parts[1] {
		s.refuse(w, http.StatusBadRequest, "%s: the body is %s (%v)", path, body, err)
		return
	}
	call := Call{Verb: strings.TrimSuffix(parts[2], "s"), OrderID: in.OrderID}
	if parts[2] == "status" {
		call.Verb = "status"
	}
	s.mu.Lock()
	s.book = append(s.book, call)
	before := s.before
	s.mu.Unlock()
	if before != nil && before(call, w, r) {
		return
	}

	var out any
	s.mu.Lock()
	switch call.Verb {
	case "status":
		out = s.answer(in.OrderID, s.state(in.OrderID))
	case "close":
		state := s.state(in.OrderID)
		switch state {
		case "unpaid", "none":
			s.states[in.OrderID] = "closed"
			state = "closed"
		case "closed":
			state = "already_closed"
		}
		out = s.answer(in.OrderID, state)
	case "refund":
		var amount int64
		_, err := fmt.Sscan(in.Amount, &amount)
		made := s.moved[in.IdempotencyKey]
		switch {
		case err != nil || in.IdempotencyKey == "" || r.Header.Get("Idempotency-Key") != in.IdempotencyKey:
			s.wrong = append(s.wrong, fmt.Sprintf("refund with the key %q, header %q, amount %q", in.IdempotencyKey, r.Header.Get("Idempotency-Key"), in.Amount))
		case made == nil:
			made = &Refund{Key: in.IdempotencyKey, OrderID: in.OrderID, TransactionID: in.TransactionID, Currency: in.Currency, Reason: in.Reason, Amount: amount,
				RefundID: fmt.Sprintf("R-%d", len(s.moved)+1)}
			s.moved[in.IdempotencyKey] = made
		case made.Amount != amount || made.TransactionID != in.TransactionID || made.OrderID != in.OrderID:
			s.wrong = append(s.wrong, fmt.Sprintf("the key %s came with another refund: %s", in.IdempotencyKey, body))
		}
		if made == nil {
			out = map[string]any{"state": "refused", "detail": "no key"}
			break
		}
		made.Calls++
		out = map[string]any{"state": "done", "refund_id": made.RefundID}
	default:
		s.wrong = append(s.wrong, "there is no call "+path)
	}
	after := s.after
	s.mu.Unlock()
	if after != nil && after(call, w, r) {
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(out) // the client may be gone
}

// answer is what status and close say. It must be called with mu held.
func (s *Service) answer(id, state string) map[string]any {
	out := map[string]any{"state": state}
	if p, paid := s.paid[id]; paid && state == "paid" {
		payment := map[string]any{"transaction_id": p.TransactionID, "currency": p.Currency, "amount": fmt.Sprint(p.Amount)}
		if !p.PaidAt.IsZero() {
			payment["paid_at"] = p.PaidAt.UTC().Format(time.RFC3339Nano)
		}
		out["payment"] = payment
	}
	return out
}

func (s *Service) refuse(w http.ResponseWriter, code int, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	s.mu.Lock()
	s.wrong = append(s.wrong, text)
	s.mu.Unlock()
	http.Error(w, text, code)
}
