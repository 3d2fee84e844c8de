package api

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/go-sql-driver/mysql"
	dto "github.com/prometheus/client_model/go"

	"github.com/lapse-orders/lapse/internal/sign"
	"github.com/lapse-orders/lapse/orders"
)

func TestTheSameRequestWithTheSameKeyGetsTheFirstAnswer(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('tea', 10, 0, 0)")
	k := key()
	first := b.placeWith(t, k, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":2,"price":"1"}],"deadline_at":"2026-01-01T00:00:00Z"}`)
	var o orderAnswer
	first.decode(t, &o)
	b.post(t, o, "extend", `{"deadline_at":"`+time.Now().UTC().Add(time.Hour).Format(time.RFC3339)+`"}`)
	b.post(t, o, "cancel", `{"reason":"x"}`)
	for _, same := range []string{
		`{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":2,"price":"1"}],"deadline_at":"2026-01-01T00:00:00Z"}`,
		` { "deadline_at" : "2026-01-01T08:00:00.000+08:00", "amount":"\u0035","items":[{"price":"1","quantity":2e0,"sku":"\u0074ea"}],"currency":"EUR", "no_deadline":false } ` + "\n",
	} {
		a := b.placeWith(t, k, same)
		if a.status != first.status || a.body != first.body || a.header.Get("Location") != first.header.Get("Location") || a.header.Get(replayedHeader) != "true" {
			t.Errorf("%s: %d %s %v, want %s", same, a.status, a.body, a.header, first.body)
		}
	}
	for _, other := range []string{
		`{"currency":"EUR","amount":"6","items":[{"sku":"tea","quantity":2,"price":"1"}],"deadline_at":"2026-01-01T00:00:00Z"}`,
		`{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":2,"price":"1"}]}`,
		`{"currency":"EUR","amount":"5","items":[],"deadline_at":"2026-01-01T00:00:00Z"}`,
		`{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":2,"price":"1"}],"deadline_at":"2026-01-01T00:00:00.001Z"}`,
		`{"channel":"a","currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":2,"price":"1"}],"deadline_at":"2026-01-01T00:00:00Z"}`,
	} {
		if a := b.placeWith(t, k, other); a.status != http.StatusUnprocessableEntity || a.kind(t) != "idempotency-key-reused" {
			t.Errorf("%s: %d %s", other, a.status, a.body)
		}
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders"); n != 1 {
		t.Errorf("there are %d orders, want 1", n)
	}
}

func TestConcurrentRequestsWithOneKeyPlaceOneOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('tea', 1000, 0, 0)")
	const keys, callers = 10, 16
	for range keys {
		k := key()
		bodies := make(chan string, callers)
		replayed := make(chan string, callers)
		var all sync.WaitGroup
		for range callers {
			all.Go(func() {
				a := b.placeWith(t, k, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":2,"price":"1"}]}`)
				bodies <- fmt.Sprint(a.status, a.body)
				replayed <- a.header.Get(replayedHeader)
			})
		}
		all.Wait()
		close(bodies)
		close(replayed)
		first, fresh := <-bodies, 0
		for other := range bodies {
			if other != first {
				t.Errorf("one caller got %s, another %s", first, other)
			}
		}
		for r := range replayed {
			if r == "" {
				fresh++
			}
		}
		if fresh != 1 || !strings.HasPrefix(first, "201") {
			t.Errorf("%d answers are no repetition, want 1; they are %s", fresh, first)
		}
	}
	if n, reserved := b.db.Int(t, "SELECT COUNT(*) FROM orders"), b.db.Int(t, "SELECT reserved FROM stock"); n != keys || reserved != 2*keys {
		t.Errorf("%d orders reserve %d, want %d and %d", n, reserved, keys, 2*keys)
	}
}

func TestEveryScopeOpensItsEndpointsAndNoOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, e := range b.server.endpoints() {
		if e.do == nil {
			continue
		}
		for token, scopes := range map[string][]Scope{
			placeToken: {ScopePlace}, payToken: {ScopePay}, readToken: {ScopeRead}, allToken: {ScopePlace, ScopePay, ScopeRead},
			"": nil, "all-0123456789abcdeF": nil, allToken + "x": nil, allToken[1:]: nil,
		} {
			b.token = token
			// What is allowed goes on and meets an order that is not there, or a body that is empty.
			a := b.do(t, request{method: e.method, path: strings.ReplaceAll(e.path, "{id}", "1"), header: map[string]string{keyHeader: key()}, anyBody: true})
			want := "unknown-order"
			switch {
			case scopes == nil:
				want = "unauthenticated"
			case !slices.Contains(scopes, e.scope):
				want = "forbidden"
			case e.method == http.MethodPost:
				want = "malformed"
			}
			if got := a.kind(t); got != want {
				t.Errorf("%s %s with the token %q: %d %s, want %s", e.method, e.path, token, a.status, got, want)
			}
			if challenge := a.header.Get("WWW-Authenticate"); strings.HasPrefix(challenge, `Bearer realm="lapse"`) != (want == "unauthenticated" || want == "forbidden") {
				t.Errorf("%s has the challenge %q", want, challenge)
			}
		}
	}
	b.token = ""
	for _, header := range []string{"Basic " + allToken, "Bearer", "Bearer ", allToken, "bearer\t" + allToken} {
		if a := b.do(t, request{method: http.MethodGet, path: "/v1/orders/1", header: map[string]string{"Authorization": header}}); a.status != http.StatusUnauthorized {
			t.Errorf("Authorization %q: %d", header, a.status)
		}
	}
	if a := b.do(t, request{method: http.MethodGet, path: "/v1/orders/1", header: map[string]string{"Authorization": "bearer " + allToken}}); a.status != http.StatusNotFound {
		t.Errorf("the scheme in small letters: %d, want 404", a.status)
	}
	if a := b.get(t, "/openapi.yaml"); a.status != http.StatusOK || a.body != string(OpenAPI) || a.header.Get("Content-Type") != "application/yaml" {
		t.Errorf("the description without a token: %d %v", a.status, a.header)
	}
	if strings.Contains(b.log.String(), "0123456789abcde") {
		t.Error("the log has a token in it")
	}
}

func TestWithoutTokensOnlyNamesOfTheLoopbackAreAnswered(t *testing.T) {
	t.Parallel()
	b := setup(t, func(c *Config) { c.Tokens = nil })
	b.token = ""
	o := b.place(t, `{"currency":"EUR","amount":"5"}`)
	b.post(t, o, "cancel", `{"reason":"x"}`)
	if got := b.db.Text(t, "SELECT actor FROM order_events WHERE kind = 'cancelled'"); got != "api" {
		t.Errorf("the actor is %q", got)
	}
	for host, want := range map[string]int{"localhost": 404, "localhost:9880": 404, "[::1]:9880": 404, "127.0.0.1": 404, "127.8.8.8:1": 404, "rebound.example": 421, "rebound.example:9880": 421, "10.0.0.1": 421, "localhost.example": 421} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.http.URL+"/v1/orders/1", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		resp, err := b.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("Host %s: %d, want %d", host, resp.StatusCode, want)
		}
	}
	for addr, open := range map[string]bool{"127.0.0.1:0": false, "[::1]:80": false, "localhost:0": false, "0.0.0.0:0": true, ":0": true, "[::]:0": true, "10.0.0.1:0": true, "shop.example:0": true} {
		if err := CheckAddr(addr, nil); errors.Is(err, ErrOpen) != open {
			t.Errorf("%s without tokens: %v", addr, err)
		}
		if err := CheckAddr(addr, []Token{{}}); err != nil {
			t.Errorf("%s with a token: %v", addr, err)
		}
	}
	if l, err := Listen(t.Context(), ":0", nil); !errors.Is(err, ErrOpen) {
		t.Errorf("listening everywhere without tokens: %v, %v", l, err)
	}
}

func TestTokensAreReadStrictly(t *testing.T) {
	t.Parallel()
	sum, other := sha256.Sum256([]byte("0123456789abcdef")), sha256.Sum256([]byte("0123456789abcdeF"))
	got, err := ParseTokens("# who may ask\n\n a  place,read\t0123456789abcdef \r\nb pay sha256:" + hex.EncodeToString(other[:]) + ";c_-9 read 0123456789abcdefg;")
	if err != nil || len(got) != 3 || got[0].Name != "a" || !slices.Equal(got[0].Scopes, []Scope{ScopePlace, ScopeRead}) || got[0].Hash != sum || got[1].Hash != other || got[2].Hash == sum {
		t.Errorf("%+v, %v", got, err)
	}
	for text, want := range map[string]string{
		"": "no token", "# only words": "no token", "a place": "2 words", "a place x y": "4 words", "A place 0123456789abcdef": "a name", "a place 0123456789abcde": "16 characters",
		"a place, 0123456789abcdef": "scopes", "a admin 0123456789abcdef": "scopes", "a read sha256:0123": "64 hexadecimal", "a read 0123456789abcdef;a pay 0123456789abcdeF": "twice", "a read 0123456789abcdef;b place 0123456789abcdef": "that of a",
		strings.Repeat("a", 33) + " read 0123456789abcdef": "a name",
	} {
		if _, err := ParseTokens(text); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "0123") {
			t.Errorf("%q: %v, want %q and no token", text, err, want)
		}
	}
	if secrets, err := ParseSecrets(" 0123456789abcdef \r\n\nfedcba9876543210\n"); err != nil || !slices.Equal(secrets, []string{"0123456789abcdef", "fedcba9876543210"}) {
		t.Errorf("%q, %v", secrets, err)
	}
	for _, text := range []string{"", "\n", "0123456789abcde"} {
		if _, err := ParseSecrets(text); err == nil {
			t.Errorf("the secrets %q are taken", text)
		}
	}
}

func TestAPaymentNoticeMustBeSignedJustNow(t *testing.T) {
	t.Parallel()
	const secret, old = "0123456789abcdef", "fedcba9876543210"
	now := time.Date(2026, 11, 30, 15, 0, 0, 0, time.UTC)
	b := setup(t, func(c *Config) {
		c.PaymentSecrets = []string{secret, old}
		c.now = func() time.Time { return now }
	})
	o := b.place(t, `{"currency":"EUR","amount":"5"}`)
	id := orders.FormatID(int64(o.ID))
	body := `{"gateway":"bank","transaction_id":"T","currency":"EUR","amount":"5"}`
	// The signature is one that openssl makes: printf '1796050800.42.{}' | openssl dgst -sha256 -hmac 0123456789abcdef
	if got, want := sign.Sign(secret, now, "42", []byte("{}")), "t=1796050800,v1=507ac40b4dcdbcb4fe5b5c63210f115d483de17f89c524aac7f70fbde5985dff"; got != want {
		t.Errorf("the signature is %s, want %s", got, want)
	}
	good := sign.Sign(secret, now, id, []byte(body))
	for _, tc := range []struct {
		name, signature, body string
		takes                 bool
	}{
		{"none", "", body, false},
		{"good", good, body, true},
		{"with another version", good + ",v2=abc", body, true},
		{"in another order", good[13:] + "," + good[:12], body, true},
		{"by the other secret", sign.Sign(old, now, id, []byte(body)), body, true},
		{"by an unknown secret", sign.Sign("0123456789abcdeF", now, id, []byte(body)), body, false},
		{"for another order", sign.Sign(secret, now, "1"+id, []byte(body)), body, false},
		{"for another body", good, body + " ", false},
		{"for another time", strings.Replace(good, "t=1", "t=2", 1), body, false},
		{"5 minutes old", sign.Sign(secret, now.Add(-5*time.Minute), id, []byte(body)), body, true},
		{"older", sign.Sign(secret, now.Add(-5*time.Minute-time.Second), id, []byte(body)), body, false},
		{"5 minutes ahead", sign.Sign(secret, now.Add(5*time.Minute), id, []byte(body)), body, true},
		{"farther ahead", sign.Sign(secret, now.Add(5*time.Minute+time.Second), id, []byte(body)), body, false},
		{"without time", good[13:], body, false},
		{"without signature", good[:12], body, false},
		{"cut", good[:len(good)-2], body, false},
		{"no hexadecimal", good[:len(good)-2] + "zz", body, false},
		{"rubbish", "yes", body, false},
	} {
		a := b.do(t, request{method: http.MethodPost, path: pathOf(o) + "/payments", body: tc.body, header: map[string]string{sign.Header: tc.signature}})
		if tc.takes != (a.status == http.StatusOK) || !tc.takes && a.kind(t) != "bad-signature" {
			t.Errorf("%s: %d %s", tc.name, a.status, a.body)
		}
	}
	// A signature is no token, and what is not signed is not looked at.
	a := b.do(t, request{method: http.MethodPost, path: pathOf(o) + "/payments", body: "rubbish", anyBody: true})
	if a.kind(t) != "bad-signature" {
		t.Errorf("rubbish without signature: %s", a.body)
	}
	b.token = ""
	a = b.do(t, request{method: http.MethodPost, path: pathOf(o) + "/payments", body: body, header: map[string]string{sign.Header: good}})
	if a.kind(t) != "unauthenticated" {
		t.Errorf("a signature without token: %s", a.body)
	}
	if strings.Contains(b.log.String(), secret) {
		t.Error("the log has the secret in it")
	}
}

// stub is a store whose reading is the test's; nothing else of it is asked.
type stub struct {
	Store
	get func(ctx context.Context, id int64) (orders.Order, error)
}

func (s stub) Get(ctx context.Context, id int64) (orders.Order, error) { return s.get(ctx, id) }

func withStub(t *testing.T, get func(context.Context, int64) (orders.Order, error), change ...func(*Config)) *bundle {
	t.Helper()
	b := &bundle{}
	b.serve(t, stub{get: get}, change...)
	return b
}

func TestWhatFailsInTheServerIsAProblemWithoutItsReason(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		err    error
		panics bool
		kind   string
		status int
	}{
		"the database is down":      {err: &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused to s3cr3t-host")}, kind: "database-unavailable", status: 503},
		"the database is read-only": {err: &mysql.MySQLError{Number: 1290, Message: "s3cr3t"}, kind: "database-unavailable", status: 503},
		"a deadlock every time":     {err: &mysql.MySQLError{Number: 1213, Message: "s3cr3t"}, kind: "database-unavailable", status: 503},
		"a statement is wrong":      {err: &mysql.MySQLError{Number: 1064, Message: "s3cr3t"}, kind: "internal", status: 500},
		"anything":                  {err: errors.New("s3cr3t"), kind: "internal", status: 500},
		"a panic":                   {panics: true, kind: "internal", status: 500},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := withStub(t, func(context.Context, int64) (orders.Order, error) {
				if tc.panics {
					panic("s3cr3t")
				}
				return orders.Order{}, tc.err
			})
			a := b.do(t, request{method: http.MethodGet, path: "/v1/orders/1", header: map[string]string{"X-Request-Id": "mine-1"}})
			if a.status != tc.status || a.kind(t) != tc.kind || a.header.Get("X-Request-Id") != "mine-1" {
				t.Errorf("%d %s %v", a.status, a.body, a.header)
			}
			if strings.Contains(a.body, "s3cr3t") {
				t.Errorf("the client gets the reason: %s", a.body)
			}
			if log := b.log.String(); !strings.Contains(log, "s3cr3t") || !strings.Contains(log, `"request_id":"mine-1"`) {
				t.Errorf("the log has not got the reason under the request's id: %s", log)
			}
		})
	}
}

func TestADatabaseThatIsNotThereIsAnswered503(t *testing.T) {
	t.Parallel()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	store, err := orders.Open("u:s3cr3t@tcp("+addr+")/shop", orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	b := &bundle{}
	b.serve(t, store)
	for _, req := range []request{
		{method: http.MethodPost, path: "/v1/orders", body: `{"currency":"EUR","amount":"5"}`, header: map[string]string{keyHeader: "k"}},
		{method: http.MethodGet, path: "/v1/orders/1"},
		{method: http.MethodGet, path: "/v1/orders/1/events"},
		{method: http.MethodPost, path: "/v1/orders/1/payments", body: `{"gateway":"bank","transaction_id":"T","currency":"EUR","amount":"5"}`},
		{method: http.MethodPost, path: "/v1/orders/1/extend", body: `{"deadline_at":"2030-01-01T00:00:00Z"}`},
		{method: http.MethodPost, path: "/v1/orders/1/cancel", body: `{"reason":"x"}`},
	} {
		a := b.do(t, req)
		if a.kind(t) != "database-unavailable" || strings.Contains(a.body, addr) {
			t.Errorf("%s %s: %d %s", req.method, req.path, a.status, a.body)
		}
	}
}

func TestARequestThatTakesTooLongIsAnswered503(t *testing.T) {
	t.Parallel()
	b := withStub(t, func(ctx context.Context, _ int64) (orders.Order, error) {
		<-ctx.Done()
		return orders.Order{}, ctx.Err()
	}, func(c *Config) { c.RequestTimeout = 20 * time.Millisecond })
	if a := b.get(t, "/v1/orders/1"); a.kind(t) != "database-unavailable" {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestAClientThatDoesNotWaitIsNoFaultOfTheServer(t *testing.T) {
	t.Parallel()
	asked := make(chan struct{}, 1)
	b := withStub(t, func(ctx context.Context, _ int64) (orders.Order, error) {
		asked <- struct{}{}
		<-ctx.Done()
		return orders.Order{}, ctx.Err()
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, b.http.URL+"/v1/orders/1", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+allToken)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if resp, err := b.client.Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	<-asked
	cancel()
	<-done
	eventually(t, "it is counted as 499", func() bool {
		return b.metric(t, "lapse_api_requests_total", "code", "499", "route", "/v1/orders/{id}") == 1
	})
}

func TestMoreThanTheLimitInFlightAreTurnedAwayAtOnce(t *testing.T) {
	t.Parallel()
	asked, free := make(chan struct{}), make(chan struct{})
	b := withStub(t, func(_ context.Context, id int64) (orders.Order, error) {
		asked <- struct{}{}
		<-free
		return orders.Order{ID: id, Currency: "EUR", Status: orders.Unpaid}, nil
	}, func(c *Config) { c.MaxInFlight = 2 })
	var held sync.WaitGroup
	for range 2 {
		held.Go(func() {
			if a := b.get(t, "/v1/orders/1"); a.status != http.StatusOK {
				t.Errorf("%d %s", a.status, a.body)
			}
		})
		<-asked
	}
	if got := b.metric(t, "lapse_api_requests_in_flight"); got != 2 {
		t.Errorf("%v are in flight by the metrics, want 2", got)
	}
	for range 3 {
		if a := b.get(t, "/v1/orders/1"); a.kind(t) != "overloaded" || a.header.Get("Retry-After") != "1" {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	close(free)
	held.Wait()
	go func() { <-asked }()
	if a := b.get(t, "/v1/orders/1"); a.status != http.StatusOK {
		t.Errorf("after it: %d %s", a.status, a.body)
	}
}

func TestABodyThatDoesNotArriveIsGivenUp(t *testing.T) {
	t.Parallel()
	b := &bundle{}
	b.serve(t, stub{}, func(c *Config) { c.ReadTimeout = 100 * time.Millisecond })
	stop := b.run(t)
	defer func() { _ = stop() }()
	for _, tc := range []struct{ name, sent, want string }{
		{"half a body", "POST /v1/orders HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + allToken + "\r\nIdempotency-Key: k\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{", "HTTP/1.1 408 "},
		{"half a header", "POST /v1/orders HTTP/1.1\r\nHost: x\r\n", ""},
		{"a header that is too large", "GET /v1/orders/1 HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 32<<10) + "\r\n\r\n", "HTTP/1.1 431 "},
		{"a body that says that it is too large", "POST /v1/orders HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + allToken + "\r\nIdempotency-Key: k\r\nContent-Type: application/json\r\nContent-Length: 999999999\r\n\r\n", "HTTP/1.1 413 "},
	} {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", b.http.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, tc.sent); err != nil {
			t.Fatal(err)
		}
		said, err := io.ReadAll(conn)
		_ = conn.Close()
		var reset *net.OpError
		if err != nil && (!errors.As(err, &reset) || reset.Timeout()) {
			t.Errorf("%s: the server does not give up: %v", tc.name, err)
		}
		if !strings.HasPrefix(string(said), tc.want) {
			t.Errorf("%s: the answer is %q, want %q", tc.name, said, tc.want)
		}
	}
}

// run serves as the binary does, with its time-outs, on a listener that takes the place of the bundle's. stop tells it to stop and gives
// what Serve returned.
func (b *bundle) run(t *testing.T) (stop func() error) {
	t.Helper()
	l, err := Listen(t.Context(), "127.0.0.1:0", b.server.cfg.Tokens)
	if err != nil {
		t.Fatal(err)
	}
	b.http.Close()
	b.http.URL, b.http.Listener = "http://"+l.Addr().String(), l
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- b.server.Serve(ctx, l) }() // ended by stop
	eventually(t, "it is ready", func() bool { return b.server.Ready() == nil })
	return sync.OnceValue(func() error {
		cancel()
		b.client.CloseIdleConnections()
		return <-ended
	})
}

func TestAStopAnswersWhatIsUnderWay(t *testing.T) {
	t.Parallel()
	asked, free := make(chan struct{}), make(chan struct{})
	b := withStub(t, func(_ context.Context, id int64) (orders.Order, error) {
		asked <- struct{}{}
		<-free
		return orders.Order{ID: id, Currency: "EUR", Status: orders.Unpaid}, nil
	})
	stop := b.run(t)
	var got answer
	var all sync.WaitGroup
	all.Go(func() { got = b.get(t, "/v1/orders/7") })
	<-asked
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	eventually(t, "no request is taken any more", func() bool {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", b.http.Listener.Addr().String())
		if err == nil {
			_ = conn.Close()
		}
		return err != nil && b.server.Ready() != nil
	})
	select {
	case err := <-stopped:
		t.Fatalf("it has stopped with a request under way: %v", err)
	default:
	}
	close(free)
	all.Wait()
	if got.status != http.StatusOK || !strings.Contains(got.body, `"id":"7"`) {
		t.Errorf("the request that was under way got %d %s", got.status, got.body)
	}
	if err := <-stopped; err != nil {
		t.Errorf("the stop: %v", err)
	}
}

func TestAStopThatTakesTooLongCutsOff(t *testing.T) {
	t.Parallel()
	asked, over := make(chan struct{}), make(chan struct{})
	b := withStub(t, func(ctx context.Context, _ int64) (orders.Order, error) {
		close(asked)
		<-ctx.Done() // ends as the connection is closed
		close(over)
		return orders.Order{}, ctx.Err()
	}, func(c *Config) { c.StopTimeout = 50 * time.Millisecond })
	stop := b.run(t)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", b.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // the server has closed it
	if _, err := io.WriteString(conn, "GET /v1/orders/1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+allToken+"\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	<-asked
	if err := stop(); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "cut off") {
		t.Errorf("the stop: %v", err)
	}
	<-over
}

// metric sums the series of a metric with these labels, given as name, value, name, value.
func (b *bundle) metric(t testing.TB, name string, labels ...string) float64 {
	t.Helper()
	families, err := b.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			matches := true
			for i := 0; i < len(labels); i += 2 {
				matches = matches && slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetName() == labels[i] && l.GetValue() == labels[i+1] })
			}
			if matches {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

func TestMetricsTellRoutesAndOutcomesAndNoIDs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(t, `{"id":"4711471147114711","currency":"EUR","amount":"5"}`)
	b.get(t, pathOf(o))
	b.get(t, "/v1/orders/4711471147114712")
	b.get(t, "/4711471147114711")
	b.do(t, request{method: "M4711471147114711", path: pathOf(o)})
	b.post(t, o, "payments", `{"gateway":"bank","transaction_id":"T","currency":"EUR","amount":"5"}`)
	b.post(t, o, "payments", `{"gateway":"bank","transaction_id":"T","currency":"EUR","amount":"5"}`)
	b.post(t, o, "cancel", `{"reason":"x"}`)
	for _, want := range []struct {
		value  float64
		labels []string
	}{
		{1, []string{"route", "/v1/orders", "method", "POST", "code", "201"}},
		{1, []string{"route", "/v1/orders/{id}", "method", "GET", "code", "200"}},
		{1, []string{"route", "/v1/orders/{id}", "method", "GET", "code", "404"}},
		{1, []string{"route", "/v1/orders/{id}", "method", "other", "code", "405"}},
		{1, []string{"route", "other", "code", "404"}},
		{2, []string{"route", "/v1/orders/{id}/payments", "code", "200"}},
		{1, []string{"route", "/v1/orders/{id}/cancel", "code", "409"}},
	} {
		if got := b.metric(t, "lapse_api_requests_total", want.labels...); got != want.value {
			t.Errorf("requests of %v are %v, want %v", want.labels, got, want.value)
		}
	}
	for _, want := range [][]string{{"verb", "place", "outcome", "placed"}, {"verb", "pay", "outcome", "accepted"}, {"verb", "pay", "outcome", "repeated"}, {"verb", "cancel", "outcome", "order-final"}} {
		if got := b.metric(t, "lapse_api_outcomes_total", want...); got != 1 {
			t.Errorf("outcomes of %v are %v, want 1", want, got)
		}
	}
	if got := b.metric(t, "lapse_api_request_duration_seconds", "route", "/v1/orders/{id}"); got != 3 {
		t.Errorf("%v durations of /v1/orders/{id}, want 3", got)
	}
	families, err := b.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if strings.Contains(f.String(), "47114711") {
			t.Errorf("an id is in a label: %s", f)
		}
	}
}

func TestEveryAnswerHasTheRequestsIDAsTheLogDoes(t *testing.T) {
	t.Parallel()
	b := withStub(t, func(_ context.Context, id int64) (orders.Order, error) {
		return orders.Order{ID: id, Currency: "EUR", Status: orders.Unpaid}, nil
	})
	for sent, kept := range map[string]bool{"": false, "abc-1.2_3": true, strings.Repeat("x", 64): true, strings.Repeat("x", 65): false, "a b": false, `a"b`: false, "a{}": false} {
		a := b.do(t, request{method: http.MethodGet, path: "/v1/orders/1", header: map[string]string{"X-Request-Id": sent}})
		id := a.header.Get("X-Request-Id")
		if (id == sent) != kept || id == "" {
			t.Errorf("the id %q is answered as %q", sent, id)
		}
		eventually(t, "the log has it", func() bool { return strings.Contains(b.log.String(), `"request_id":"`+id+`"`) })
	}
	seen := map[string]bool{}
	for range 100 {
		seen[b.get(t, "/v1/orders/1").header.Get("X-Request-Id")] = true
	}
	if len(seen) != 100 {
		t.Errorf("100 requests have %d ids", len(seen))
	}
}

func TestTheDescriptionAndTheServerNameTheSame(t *testing.T) {
	t.Parallel()
	b := withStub(t, nil)
	text := string(OpenAPI)
	for _, k := range kinds {
		uri := typePrefix + k.name
		if !strings.Contains(text, fmt.Sprintf("| `%s` | %d |", uri, k.status)) {
			t.Errorf("the table of the description lacks %s with %d", uri, k.status)
		}
		if !strings.Contains(text, "            - "+uri+"\n") {
			t.Errorf("the type %s is not among the values of the description", uri)
		}
	}
	if n := strings.Count(text, "| `"+typePrefix); n != len(kinds) {
		t.Errorf("the table has %d types, the server %d", n, len(kinds))
	}
	if n := strings.Count(text, "            - "+typePrefix); n != len(kinds) {
		t.Errorf("the values have %d types, the server %d", n, len(kinds))
	}
	paths := 0
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "  /") {
			paths++
		}
	}
	described := map[string]bool{}
	for _, e := range b.server.endpoints() {
		described[e.path] = true
		if !strings.Contains(text, "\n  "+e.path+":\n") {
			t.Errorf("%s is not described", e.path)
		}
		if e.scope != "" && !strings.Contains(text, "- bearer: ["+string(e.scope)+"]") {
			t.Errorf("the scope %s is not described", e.scope)
		}
	}
	if paths != len(described) {
		t.Errorf("%d paths are described, the server has %d", paths, len(described))
	}
}

func TestAWrongConfigurationIsRefused(t *testing.T) {
	t.Parallel()
	for _, cfg := range []Config{{MaxBody: -1}, {MaxInFlight: -1}, {RequestTimeout: -1}, {ReadTimeout: -1}, {IdleTimeout: -1}, {StopTimeout: -1}} {
		if _, err := New(stub{}, cfg); err == nil {
			t.Errorf("%+v is taken", cfg)
		}
	}
}

func FuzzDecodeTakesOnlyWhatItCanWriteAgain(f *testing.F) {
	for _, seed := range []string{`{"currency":"EUR","amount":"5"}`, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":2e0,"price":"1"}],"deadline_at":"2026-01-01T00:00:00+08:00"}`,
		`{"a":null}`, `{"amount":"05"}`, `[]`, `{"currency":"EUR","currency":"EUR"}`, `{"items":[{}]}`, "{\"currency\":\"\xff\"}"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var first, again placeRequest
		if decode(body, &first) != nil {
			return
		}
		if !json.Valid(body) || !utf8.Valid(body) {
			t.Errorf("%q is taken", body)
		}
		hash, err := first.hash()
		if err != nil {
			t.Fatal(err)
		}
		canonical, err := json.Marshal(first)
		if err != nil {
			t.Fatal(err)
		}
		if first.Amount == nil {
			return // is refused afterwards; it would be written as null
		}
		for _, it := range first.Items {
			if it.Price == nil {
				return
			}
		}
		if p := decode(canonical, &again); p != nil {
			t.Fatalf("%s, made of %q, is refused: %s", canonical, body, p.Detail)
		}
		if other, err := again.hash(); err != nil || other != hash {
			t.Errorf("%q and %s mean the same and have two hashes (%v)", body, canonical, err)
		}
	})
}

// The wire is read once more without the client of the standard library: a HEAD has no body, and an answer is whole.
func TestAnAnswerIsWholeAndAConnectionIsKept(t *testing.T) {
	t.Parallel()
	b := withStub(t, func(_ context.Context, id int64) (orders.Order, error) {
		return orders.Order{ID: id, Currency: "EUR", Status: orders.Unpaid}, nil
	})
	stop := b.run(t)
	defer func() { _ = stop() }()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", b.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // it was read
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(conn)
	for _, method := range []string{"GET", "HEAD", "GET"} {
		if _, err := fmt.Fprintf(conn, "%s /v1/orders/1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n", method, allToken); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(in, &http.Request{Method: method})
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || (len(body) == 0) != (method == "HEAD") || resp.Close {
			t.Errorf("%s: %d %q, %v", method, resp.StatusCode, body, err)
		}
	}
}
