package payments_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/payments"
	"github.com/lapse-orders/lapse/internal/payments/paytest"
	"github.com/lapse-orders/lapse/internal/sign"
	"github.com/lapse-orders/lapse/orders"
)

// answering makes a gateway whose service is h.
func answering(t *testing.T, cfg payments.HTTPConfig, h http.HandlerFunc) *payments.HTTP {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	cfg.URL, cfg.Secret = server.URL, paytest.Secret
	g, err := payments.NewHTTP(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Shut)
	return g
}

// The three calls as they go over the wire; docs/gateway.md shows the same.
func TestTheCallsAreThoseOfTheContract(t *testing.T) {
	t.Parallel()
	var seen []string
	g := answering(t, payments.HTTPConfig{}, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		if err := sign.Check(r.Header.Values(sign.Header), []string{paytest.Secret}, r.URL.Path, body, time.Now()); err != nil {
			t.Errorf("%s: %v", r.URL, err)
		}
		seen = append(seen, r.Method+" "+r.URL.Path+" "+string(body)+" "+r.Header.Get("Idempotency-Key")+" "+r.Header.Get("Content-Type"))
		switch len(seen) {
		case 1:
			fmt.Fprint(w, `{"state":"paid","payment":{"transaction_id":"T-1","currency":"EUR","amount":"990","paid_at":"2026-11-30T15:00:00.5+01:00"},"more":{"than":"needed"}}`)
		case 2:
			fmt.Fprint(w, `{"state":"already_closed"}`)
		default:
			fmt.Fprint(w, `{"state":"done","refund_id":"R-1"}`)
		}
	})
	got, err := g.Status(t.Context(), 17)
	want := payments.Answer{State: payments.StatePaid, Paid: payments.Money{TransactionID: "T-1", Currency: "EUR", Amount: 990, PaidAt: time.Date(2026, 11, 30, 14, 0, 0, 5e8, time.UTC)}}
	if err != nil || !got.Paid.PaidAt.Equal(want.Paid.PaidAt) {
		t.Fatalf("status: %+v, %v", got, err)
	}
	got.Paid.PaidAt = want.Paid.PaidAt
	if got != want {
		t.Errorf("status: %+v, want %+v", got, want)
	}
	if got, err := g.Close(t.Context(), 17); err != nil || got.State != payments.StateAlreadyClosed {
		t.Errorf("close: %+v, %v", got, err)
	}
	refund, err := g.Refund(t.Context(), "the-key", orders.PendingRefund{Gateway: "bank", TransactionID: "T-1", OrderID: 17, Currency: "EUR", Amount: 990, Reason: "late"})
	if err != nil || refund != (payments.RefundAnswer{State: payments.RefundDone, RefundID: "R-1"}) {
		t.Errorf("refund: %+v, %v", refund, err)
	}
	calls := []string{
		`POST /orders/17/status {"order_id":"17"}  application/json`,
		`POST /orders/17/close {"order_id":"17"}  application/json`,
		`POST /orders/17/refunds {"order_id":"17","transaction_id":"T-1","currency":"EUR","amount":"990","reason":"late","idempotency_key":"the-key"} the-key application/json`,
	}
	if strings.Join(seen, "\n") != strings.Join(calls, "\n") {
		t.Errorf("the calls were\n%s\nwant\n%s", strings.Join(seen, "\n"), strings.Join(calls, "\n"))
	}
}

// docs/gateway.md and the code say the same: paths, bodies, and every state.
func TestTheDocumentOfTheContractShowsTheCallsAndEveryState(t *testing.T) {
	t.Parallel()
	content, err := os.ReadFile("../../docs/gateway.md")
	if err != nil {
		t.Fatal(err)
	}
	doc := string(content)
	for _, want := range []string{"/orders/ID/status", "/orders/ID/close", "/orders/ID/refunds", sign.Header, "Idempotency-Key"} {
		if !strings.Contains(doc, want) {
			t.Errorf("docs/gateway.md does not name %s", want)
		}
	}
	for _, s := range []payments.State{payments.StateNone, payments.StateUnpaid, payments.StateInProgress, payments.StatePaid, payments.StateClosed, payments.StateAlreadyClosed, payments.StateRefunded, payments.StateUnknown} {
		if !strings.Contains(doc, "| `"+string(s)+"` |") {
			t.Errorf("docs/gateway.md has no row for the state %s", s)
		}
	}
	for _, s := range []payments.RefundState{payments.RefundDone, payments.RefundPending, payments.RefundRefused} {
		if !strings.Contains(doc, "| `"+string(s)+"` |") {
			t.Errorf("docs/gateway.md has no row for the state %s", s)
		}
	}
	for _, block := range regexp.MustCompile("(?s)```json\n(.*?)\n```").FindAllStringSubmatch(doc, -1) {
		if !json.Valid([]byte(block[1])) {
			t.Errorf("docs/gateway.md has an example that is no JSON: %s", block[1])
		}
	}
	// Its example of a signature.
	m := regexp.MustCompile(`Lapse-Signature: (t=([0-9]+),v1=[0-9a-f]{64})`).FindStringSubmatch(doc)
	if m == nil {
		t.Fatal("docs/gateway.md has no example of a signature")
	}
	var seconds int64
	if _, err := fmt.Sscan(m[2], &seconds); err != nil {
		t.Fatal(err)
	}
	if want := sign.Sign("the gateway's secret", time.Unix(seconds, 0), "/orders/17/close", []byte(`{"order_id":"17"}`)); m[1] != want {
		t.Errorf("the example of docs/gateway.md is %s, want %s", m[1], want)
	}
}

// Answers that are no answers.
func TestAnAnswerThatCannotBeReadIsAnErrorThatShowsItsBeginning(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status int
		body   string
		calls  int64
		want   string
	}{
		"rubbish":    {200, "<html>\x1b[31mlogin</html>", 1, `"<html>\x1b[31mlogin</html>" cannot be read`},
		"empty":      {200, "", 1, "(empty)"},
		"too long":   {200, `{"state":"` + strings.Repeat("x", 70_000) + `"}`, 1, "more than 65536 bytes"},
		"array":      {200, `[]`, 1, "cannot be read"},
		"no such":    {404, `no such order`, 1, `404 Not Found: "no such order"`},
		"redirected": {302, "", 1, "302 Found"},
		"created":    {201, `{"state":"closed"}`, 1, "201 Created"},
		"down":       {503, "later", 2, `503 Service Unavailable: "later"`},
		"too many":   {429, "", 2, "429"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var calls atomic.Int64
			g := answering(t, payments.HTTPConfig{}, func(w http.ResponseWriter, r *http.Request) {
				calls.Add(1)
				if c.status == 302 {
					w.Header().Set("Location", "/elsewhere")
				}
				w.WriteHeader(c.status)
				fmt.Fprint(w, c.body)
			})
			_, err := g.Close(t.Context(), 17)
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "close of order 17") {
				t.Errorf("%v, want an error with %q", err, c.want)
			}
			if n := calls.Load(); n != c.calls {
				t.Errorf("%d calls, want %d", n, c.calls)
			}
		})
	}
}

// A connection that the service cut is no failure: the second try has the answer.
func TestACallIsTriedASecondTimeWhenItsConnectionBreaks(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	g := answering(t, payments.HTTPConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		if calls.Add(1)%2 == 1 {
			panic(http.ErrAbortHandler)
		}
		fmt.Fprint(w, `{"state":"unpaid"}`)
	})
	for range 5 {
		if got, err := g.Status(t.Context(), 17); err != nil || got.State != payments.StateUnpaid {
			t.Errorf("%+v, %v; want unpaid", got, err)
		}
	}
}

// One call at a time finds out whether a gateway that was left alone is back, and each kind of call is left alone by itself.
func TestEachCallIsLeftAloneByItself(t *testing.T) {
	t.Parallel()
	g := answering(t, payments.HTTPConfig{BreakerFailures: 2, BreakerPause: time.Hour}, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/refunds") {
			http.Error(w, "down", http.StatusInternalServerError)
			return
		}
		fmt.Fprint(w, `{"state":"closed"}`)
	})
	for range 2 {
		if _, err := g.Refund(t.Context(), "k", orders.PendingRefund{OrderID: 17}); err == nil || errors.Is(err, payments.ErrNotAsked) {
			t.Errorf("refund: %v, want the service's failure", err)
		}
	}
	if _, err := g.Refund(t.Context(), "k", orders.PendingRefund{OrderID: 17}); !errors.Is(err, payments.ErrNotAsked) {
		t.Errorf("the third refund: %v, want not asked", err)
	}
	if err := g.Ready(); err == nil || !strings.Contains(err.Error(), "refund") {
		t.Errorf("ready: %v, want it to name the refunds", err)
	}
	if got, err := g.Close(t.Context(), 17); err != nil || got.State != payments.StateClosed {
		t.Errorf("close: %+v, %v; want closed", got, err)
	}
}

// A gateway that takes calls and never answers uses up the time of each batch, whose own time ends before the second try does.
func TestAGatewayThatStaysSilentIsLeftAlone(t *testing.T) {
	t.Parallel()
	g := answering(t, payments.HTTPConfig{Timeout: 20 * time.Millisecond, BreakerFailures: 2, BreakerPause: time.Hour}, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // a server sees that its caller has gone only when it has read the body
		<-r.Context().Done()
	})
	eventually(t, "it is left alone", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 40*time.Millisecond)
		defer cancel()
		_, err := g.Status(ctx, 17)
		return errors.Is(err, payments.ErrNotAsked)
	})
}

// Callers that go before the gateway has had its time say nothing about it.
func TestAGatewayIsNotLeftAloneForCallersThatGo(t *testing.T) {
	t.Parallel()
	asked := make(chan struct{}, 1)
	var answers atomic.Bool
	g := answering(t, payments.HTTPConfig{Timeout: limit, BreakerFailures: 2, BreakerPause: time.Hour}, func(w http.ResponseWriter, r *http.Request) {
		if answers.Load() {
			fmt.Fprint(w, `{"state":"unpaid"}`)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body) // a server sees that its caller has gone only when it has read the body
		asked <- struct{}{}
		<-r.Context().Done()
	})
	for range 4 {
		ctx, cancel := context.WithCancel(t.Context())
		go func() { // ends with the call
			<-asked
			cancel()
		}()
		if _, err := g.Status(ctx, 17); err == nil || errors.Is(err, payments.ErrNotAsked) {
			t.Errorf("a call whose caller goes: %v", err)
		}
		cancel()
	}
	answers.Store(true)
	if got, err := g.Status(t.Context(), 17); err != nil || got.State != payments.StateUnpaid {
		t.Errorf("%+v, %v; want unpaid", got, err)
	}
}

func TestAGatewayIsRefusedThatCannotWork(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cfg  payments.HTTPConfig
		want string
	}{
		"no URL":         {payments.HTTPConfig{Secret: paytest.Secret}, "is not http"},
		"a path":         {payments.HTTPConfig{URL: "/pay", Secret: paytest.Secret}, "is not http"},
		"another scheme": {payments.HTTPConfig{URL: "ftp://shop", Secret: paytest.Secret}, "is not http"},
		"a password":     {payments.HTTPConfig{URL: "http://a:b@shop/pay", Secret: paytest.Secret}, "gateway.secret"},
		"a query":        {payments.HTTPConfig{URL: "http://shop/pay?x=1", Secret: paytest.Secret}, "query"},
		"a short secret": {payments.HTTPConfig{URL: "http://shop", Secret: "short"}, "16 characters"},
		"no time":        {payments.HTTPConfig{URL: "http://shop", Secret: paytest.Secret, Timeout: -1}, "positive"},
	} {
		if _, err := payments.NewHTTP(c.cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
	}
	for name, cfg := range map[string]payments.GateConfig{
		"no name": {}, "holds upside down": {Name: "x", HoldMin: time.Hour, HoldMax: time.Minute}, "no time": {Name: "x", DecideWithin: -1}, "no slots": {Name: "x", Concurrency: -1},
	} {
		if _, err := payments.NewGate(&orders.Store{}, &payments.HTTP{}, cfg); err == nil {
			t.Errorf("gate with %s: no error", name)
		}
	}
	for name, cfg := range map[string]payments.WorkerConfig{
		"no name": {}, "pauses upside down": {Name: "x", BackoffMin: time.Hour, BackoffMax: time.Minute}, "no lease": {Name: "x", Lease: -1}, "a large batch": {Name: "x", Batch: 501},
		"no attempts": {Name: "x", MaxAttempts: -1},
	} {
		if _, err := payments.NewWorker(&orders.Store{}, &payments.HTTP{}, cfg); err == nil {
			t.Errorf("worker with %s: no error", name)
		}
	}
}
