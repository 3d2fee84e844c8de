package payments

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sony/gobreaker/v2"

	"github.com/lapse-orders/lapse/internal/sign"
	"github.com/lapse-orders/lapse/orders"
)

// HTTPConfig has the settings of a gateway that is reached over HTTP. The zero value of each field means its default.
type HTTPConfig struct {
	// URL is where the payment service is: http or https, without query. Required.
	URL string
	// Secret signs the calls, 16 characters or more. Required.
	Secret string
	// Timeout cuts off one try of one call. Default 2 s.
	Timeout time.Duration
	// BreakerFailures is how many calls of a kind have to fail in a row for the gateway to be left alone. Default 10.
	BreakerFailures int
	// BreakerPause is for how long; then one call tries. Default 5 s.
	BreakerPause time.Duration
	// Connections bounds the connections to the service. Default 32.
	Connections int
	// Registerer gets the metrics lapse_gateway_*. Several gateways of a process may share one. Default: nil, off.
	Registerer prometheus.Registerer
}

// WithDefaults fills in what is not set.
func (c HTTPConfig) WithDefaults() HTTPConfig {
	if c.Timeout == 0 {
		c.Timeout = 2 * time.Second
	}
	if c.BreakerFailures == 0 {
		c.BreakerFailures = 10
	}
	if c.BreakerPause == 0 {
		c.BreakerPause = 5 * time.Second
	}
	if c.Connections == 0 {
		c.Connections = 32
	}
	return c
}

func (c HTTPConfig) validate() error {
	if err := CheckURL(c.URL); err != nil {
		return fmt.Errorf("gateway URL %q %w", c.URL, err)
	}
	switch {
	case len(c.Secret) < sign.MinSecret:
		return fmt.Errorf("the gateway's secret has less than %d characters", sign.MinSecret)
	case c.Timeout <= 0 || c.BreakerPause <= 0:
		return fmt.Errorf("gateway timeout %s and breaker pause %s must be positive", c.Timeout, c.BreakerPause)
	case c.BreakerFailures < 1 || c.Connections < 1:
		return fmt.Errorf("gateway breaker failures %d and connections %d must be positive", c.BreakerFailures, c.Connections)
	}
	return nil
}

// CheckURL refuses what is no URL of a payment service. The error continues a sentence that begins with the URL.
func CheckURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https"):
		return errors.New("is not http://host[:port]/path or https://host[:port]/path")
	case u.User != nil:
		return errors.New("has a name and password in it; calls are signed with gateway.secret")
	case u.RawQuery != "" || u.Fragment != "":
		return errors.New("has a query or fragment; the paths of the calls are added to its end")
	}
	return nil
}

const (
	// tries of one call. The second is for what passes by itself: a connection that the service closed as idle, one instance of several that
	// is gone. More would only take the time of other orders; whoever asked comes again.
	tries = 2
	// retryPause is how long at most the second try waits.
	retryPause = 100 * time.Millisecond
	// maxAnswer bounds what is read of an answer; one of the contract has some hundred bytes.
	maxAnswer = 64 << 10
	// maxDetail bounds what is kept of the gateway's words, in characters.
	maxDetail = 200
)

// The calls, as metrics and errors name them; status and close are the last part of their paths.
const (
	callStatus = "status"
	callClose  = "close"
	callRefund = "refund"
)

// HTTP is a [Gateway] that is reached over HTTP, by the contract of docs/gateway.md. It is safe for concurrent use.
type HTTP struct {
	cfg      HTTPConfig
	base     string
	client   *http.Client
	breakers map[string]*gobreaker.CircuitBreaker[reply]
	metrics  *callMetrics
	now      func() time.Time
}

// NewHTTP makes a gateway; it dials nothing. The errors are those of the configuration.
func NewHTTP(cfg HTTPConfig) (*HTTP, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	m, err := newCallMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("register metrics of the gateway: %w", err)
	}
	h := &HTTP{cfg: cfg, base: strings.TrimRight(cfg.URL, "/"), metrics: m, now: time.Now, breakers: map[string]*gobreaker.CircuitBreaker[reply]{}}
	h.client = &http.Client{
		Transport: &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           (&net.Dialer{Timeout: cfg.Timeout, KeepAlive: 30 * time.Second}).DialContext,
			TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12},
			ForceAttemptHTTP2:     true,
			MaxConnsPerHost:       cfg.Connections,
			MaxIdleConnsPerHost:   cfg.Connections,
			IdleConnTimeout:       30 * time.Second,
			TLSHandshakeTimeout:   cfg.Timeout,
			ResponseHeaderTimeout: cfg.Timeout,
		},
		// A signed call goes where it was configured to go, and nowhere else.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	for _, call := range []string{callStatus, callClose, callRefund} {
		// One for each call: refunds that fail must hold up no cancel.
		h.breakers[call] = gobreaker.NewCircuitBreaker[reply](gobreaker.Settings{
			Name:        call,
			Timeout:     cfg.BreakerPause,
			ReadyToTrip: func(c gobreaker.Counts) bool { return int64(c.ConsecutiveFailures) >= int64(cfg.BreakerFailures) },
			IsExcluded:  func(err error) bool { return errors.As(err, new(cutOffError)) },
			IsSuccessful: func(err error) bool {
				// What the service refuses says nothing about the next call.
				return err == nil || errors.As(err, new(refusedError))
			},
			OnStateChange: func(call string, _, to gobreaker.State) { m.open(call, to != gobreaker.StateClosed) },
		})
	}
	return h, nil
}

// Shut closes the connections that are not in use. The gateway can still be used afterwards.
func (h *HTTP) Shut() { h.client.CloseIdleConnections() }

// Ready is nil unless the gateway has failed so often that it is left alone; then it says so.
func (h *HTTP) Ready() error {
	var errs []error
	for _, call := range []string{callStatus, callClose, callRefund} {
		if h.breakers[call].State() == gobreaker.StateOpen {
			errs = append(errs, fmt.Errorf("the gateway is left alone for up to %s: the last calls of %s have failed", h.cfg.BreakerPause, call))
		}
	}
	return errors.Join(errs...)
}

// Status implements Gateway.
func (h *HTTP) Status(ctx context.Context, orderID int64) (Answer, error) {
	return h.about(ctx, callStatus, orderID)
}

// Close implements Gateway.
func (h *HTTP) Close(ctx context.Context, orderID int64) (Answer, error) {
	return h.about(ctx, callClose, orderID)
}

// orderBody is the body of status and close.
type orderBody struct {
	OrderID string `json:"order_id"`
}

// refundBody is the body of refund.
type refundBody struct {
	OrderID        string `json:"order_id"`
	TransactionID  string `json:"transaction_id"`
	Currency       string `json:"currency"`
	Amount         string `json:"amount"`
	Reason         string `json:"reason"`
	IdempotencyKey string `json:"idempotency_key"`
}

// reply is every answer. Unknown members are passed over, so that a service may tell more.
type reply struct {
	State    string       `json:"state"`
	Payment  *paymentBody `json:"payment"`
	RefundID string       `json:"refund_id"`
	Detail   string       `json:"detail"`
}

type paymentBody struct {
	TransactionID string `json:"transaction_id"`
	Currency      string `json:"currency"`
	Amount        string `json:"amount"`
	PaidAt        string `json:"paid_at"`
}

func (h *HTTP) about(ctx context.Context, call string, orderID int64) (Answer, error) {
	id := orders.FormatID(orderID)
	r, err := h.call(ctx, call, "/orders/"+id+"/"+call, "", orderBody{OrderID: id})
	if err != nil {
		return Answer{}, fmt.Errorf("%s of order %s at the gateway: %w", call, id, err)
	}
	a := Answer{State: State(r.State), Detail: cut(r.Detail)}
	switch a.State {
	case StateNone, StateUnpaid, StateInProgress, StateClosed, StateAlreadyClosed, StateRefunded, StateUnknown:
	case StatePaid:
		if a.Paid, err = r.Payment.money(); err != nil {
			return Answer{}, fmt.Errorf("%s of order %s at the gateway: it says paid, and %w", call, id, err)
		}
	default:
		a = Answer{State: StateUnknown, Detail: fmt.Sprintf("the state %q is none of the contract", cut(r.State))}
	}
	h.metrics.answers.WithLabelValues(call, string(a.State)).Inc()
	return a, nil
}

// Refund implements Gateway.
func (h *HTTP) Refund(ctx context.Context, key string, p orders.PendingRefund) (RefundAnswer, error) {
	id := orders.FormatID(p.OrderID)
	r, err := h.call(ctx, callRefund, "/orders/"+id+"/refunds", key, refundBody{
		OrderID: id, TransactionID: p.TransactionID, Currency: p.Currency, Amount: strconv.FormatInt(p.Amount, 10), Reason: p.Reason, IdempotencyKey: key,
	})
	if err != nil {
		return RefundAnswer{}, fmt.Errorf("refund of payment %s of order %s at the gateway: %w", p.Ref(), id, err)
	}
	a := RefundAnswer{State: RefundState(r.State), RefundID: r.RefundID, Detail: cut(r.Detail)}
	switch a.State {
	case RefundDone, RefundPending, RefundRefused:
	default:
		return RefundAnswer{}, fmt.Errorf("refund of payment %s of order %s at the gateway: the state %q is none of the contract", p.Ref(), id, cut(r.State))
	}
	h.metrics.answers.WithLabelValues(callRefund, string(a.State)).Inc()
	return a, nil
}

// refusedError is an answer that another try would not change.
type refusedError struct{ error }

func (e refusedError) Unwrap() error { return e.error }

// cutOffError is a call that the caller did not wait for, and of which no try had failed by then. It says nothing about the gateway.
type cutOffError struct{ error }

func (e cutOffError) Unwrap() error { return e.error }

// call makes one call, with a second try where the first may have failed by accident.
func (h *HTTP) call(ctx context.Context, call, path, key string, body any) (reply, error) {
	begun := time.Now()
	payload, err := json.Marshal(body)
	if err != nil {
		return reply{}, fmt.Errorf("encode the call: %w", err)
	}
	r, err := h.breakers[call].Execute(func() (r reply, err error) {
		for try := 1; ; try++ {
			tried := time.Now()
			r, err = h.once(ctx, path, key, payload)
			if err == nil || errors.As(err, new(refusedError)) {
				return r, err
			}
			// The time of one try is up before that of the caller, who has none left for the second: a gateway that takes calls and stays
			// silent has failed, and has to be left alone as one that refuses them.
			silent := time.Since(tried) >= h.cfg.Timeout
			switch {
			case ctx.Err() != nil && try == 1 && !silent:
				return reply{}, cutOffError{err}
			case ctx.Err() != nil, try == tries:
				return reply{}, err
			}
			pause := time.NewTimer(rand.N(retryPause)) //nolint:gosec // jitter needs no secrecy
			select {
			case <-ctx.Done():
				pause.Stop()
				return reply{}, err
			case <-pause.C:
			}
		}
	})
	switch {
	case errors.Is(err, gobreaker.ErrOpenState), errors.Is(err, gobreaker.ErrTooManyRequests):
		h.metrics.failures.WithLabelValues(call, failureNotAsked).Inc()
		return reply{}, fmt.Errorf("%w: it has failed %d times in a row, and is tried again within %s", ErrNotAsked, h.cfg.BreakerFailures, h.cfg.BreakerPause)
	case errors.As(err, new(refusedError)):
		h.metrics.failures.WithLabelValues(call, failureRefused).Inc()
	case err != nil:
		h.metrics.failures.WithLabelValues(call, failureNoAnswer).Inc()
	}
	h.metrics.duration.WithLabelValues(call).Observe(time.Since(begun).Seconds())
	return r, err
}

// once is one try.
func (h *HTTP) once(ctx context.Context, path, key string, payload []byte) (reply, error) {
	ctx, cancel := context.WithTimeout(ctx, h.cfg.Timeout)
	defer cancel()
	// POST also for what only reads: nothing on the way may answer it from a cache.
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.base+path, bytes.NewReader(payload))
	if err != nil {
		return reply{}, refusedError{fmt.Errorf("make the request: %w", err)}
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json")
	req.Header.Set(sign.Header, sign.Sign(h.cfg.Secret, h.now(), path, payload))
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	resp, err := h.client.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close() //nolint:errcheck // it was read
	content, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return reply{}, fmt.Errorf("read the answer: %w", err)
	}
	switch status := resp.StatusCode; {
	case status == http.StatusOK:
	case status >= 500, status == http.StatusTooManyRequests, status == http.StatusRequestTimeout, status == http.StatusTooEarly:
		return reply{}, fmt.Errorf("it answers %s: %s", resp.Status, excerpt(content))
	default:
		return reply{}, refusedError{fmt.Errorf("it answers %s: %s", resp.Status, excerpt(content))}
	}
	if len(content) > maxAnswer {
		return reply{}, refusedError{fmt.Errorf("its answer has more than %d bytes", maxAnswer)}
	}
	var r reply
	if err := json.Unmarshal(content, &r); err != nil {
		return reply{}, refusedError{fmt.Errorf("its answer %s cannot be read: %w", excerpt(content), err)}
	}
	return r, nil
}

// money reads a payment. What is missing or malformed is an error: money must not be guessed.
func (p *paymentBody) money() (Money, error) {
	if p == nil {
		return Money{}, errors.New("does not say which payment")
	}
	m := Money{TransactionID: p.TransactionID, Currency: p.Currency}
	var err error
	if m.Amount, err = strconv.ParseInt(p.Amount, 10, 64); err != nil || m.Amount <= 0 || strconv.FormatInt(m.Amount, 10) != p.Amount {
		return Money{}, fmt.Errorf("the amount %q is not a positive number of minor units", cut(p.Amount))
	}
	if p.TransactionID == "" || p.Currency == "" {
		return Money{}, errors.New("transaction_id or currency is missing")
	}
	if p.PaidAt != "" {
		if m.PaidAt, err = time.Parse(time.RFC3339Nano, p.PaidAt); err != nil {
			return Money{}, fmt.Errorf("paid_at %q is not a time as 2026-11-30T15:00:00Z", cut(p.PaidAt))
		}
	}
	return m, nil
}

// excerpt shows the beginning of an answer. It is quoted, since it comes from outside and ends in logs and on terminals.
func excerpt(content []byte) string {
	if len(bytes.TrimSpace(content)) == 0 {
		return "(empty)"
	}
	return strconv.Quote(cut(string(content[:min(len(content), 4*maxDetail)])))
}

func cut(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if utf8.RuneCountInString(s) <= maxDetail {
		return s
	}
	return string([]rune(s)[:maxDetail-1]) + "…"
}
