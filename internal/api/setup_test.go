package api

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/legacy"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	placeToken = "place-0123456789abcdef"
	payToken   = "pay-0123456789abcdef"
	readToken  = "read-0123456789abcdef"
	allToken   = "all-0123456789abcdef"
	theTokens  = "checkout place " + placeToken + "; gateway pay " + payToken + "; desk read " + readToken + "; shop place,pay,read " + allToken
)

// bundle is an API on a database of its own.
type bundle struct {
	db     *mysqltest.DB
	store  *orders.Store
	server *Server
	reg    *prometheus.Registry
	log    *output
	http   *httptest.Server
	client *http.Client
	// token is sent with every request; empty: none.
	token string
}

func setup(t *testing.T, change ...func(*Config)) *bundle {
	t.Helper()
	b := &bundle{db: mysqltest.New(t)}
	var err error
	if b.store, err = orders.Open(b.db.DSN, orders.Config{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.store.Close() })
	b.serve(t, b.store, change...)
	return b
}

// serve starts the server on any store. Tokens: those above, unless changed.
func (b *bundle) serve(t *testing.T, store Store, change ...func(*Config)) {
	t.Helper()
	tokens, err := ParseTokens(theTokens)
	if err != nil {
		t.Fatal(err)
	}
	b.token, b.reg, b.log = allToken, prometheus.NewRegistry(), new(output)
	cfg := Config{Tokens: tokens, Registerer: b.reg, Logger: slog.New(slog.NewJSONHandler(b.log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	for _, c := range change {
		c(&cfg)
	}
	if b.server, err = New(store, cfg); err != nil {
		t.Fatal(err)
	}
	b.http = httptest.NewServer(b.server)
	b.client = b.http.Client()
	t.Cleanup(func() {
		b.client.CloseIdleConnections()
		b.http.Close()
	})
}

// output is written by the server and read by the test.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// described is openapi.yaml, and finds the operation of a request.
var described = sync.OnceValues(func() (routers.Router, error) {
	// Names and descriptions beside $ref are allowed since 3.1; the loader knows.
	doc, err := openapi3.NewLoader().LoadFromData(OpenAPI)
	if err != nil {
		return nil, err
	}
	if err := doc.Validate(context.Background()); err != nil {
		return nil, err
	}
	openapi3filter.RegisterBodyDecoder("application/yaml", func(body io.Reader, _ http.Header, _ *openapi3.SchemaRef, _ openapi3filter.EncodingFn) (any, error) {
		text, err := io.ReadAll(body)
		return string(text), err
	})
	return legacy.NewRouter(doc)
})

// answer is what the server said.
type answer struct {
	status int
	header http.Header
	body   string
}

// request is one request; see bundle.do.
type request struct {
	method, path string
	body         string
	header       map[string]string
	// offSchema says that the description does not allow the request. It must then be refused; a request that is allowed may be.
	offSchema bool
	// anyBody keeps the body from being checked: it is no JSON, or was declared as something else.
	anyBody bool
}

// do sends a request and holds request and answer against openapi.yaml.
func (b *bundle) do(t testing.TB, req request) answer {
	t.Helper()
	var body io.Reader
	if req.method == http.MethodPost {
		body = strings.NewReader(req.body)
	}
	r, err := http.NewRequestWithContext(t.Context(), req.method, b.http.URL+req.path, body)
	if err != nil {
		t.Fatal(err)
	}
	if b.token != "" {
		r.Header.Set("Authorization", "Bearer "+b.token)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	for name, value := range req.header {
		r.Header.Set(name, value)
		if value == "" {
			r.Header.Del(name)
		}
	}
	resp, err := b.client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // it was read
	content, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	a := answer{resp.StatusCode, resp.Header, string(content)}
	a.hold(t, req, r)
	return a
}

// hold compares with the description.
func (a answer) hold(t testing.TB, req request, r *http.Request) {
	t.Helper()
	router, err := described()
	if err != nil {
		t.Fatal(err)
	}
	what := req.method + " " + req.path + " " + req.body
	if a.header.Get("X-Request-Id") == "" || a.header.Get("Cache-Control") != "no-store" || a.header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("%s: the header lacks what every answer has: %v", what, a.header)
	}
	if a.status >= 400 {
		a.problem(t)
	}
	if req.method == http.MethodHead {
		return // is described as the GET without the body
	}
	r.URL.Scheme, r.URL.Host = "", ""
	route, params, err := router.FindRoute(r)
	if err != nil {
		if a.status != http.StatusNotFound && a.status != http.StatusMethodNotAllowed {
			t.Errorf("%s: it is not described (%v), and the answer is %d", what, err, a.status)
		}
		return
	}
	r.Body = io.NopCloser(strings.NewReader(req.body))
	in := &openapi3filter.RequestValidationInput{Request: r, PathParams: params, Route: route,
		Options: &openapi3filter.Options{AuthenticationFunc: openapi3filter.NoopAuthenticationFunc, IncludeResponseStatus: true}}
	if !req.anyBody {
		switch err := openapi3filter.ValidateRequest(t.Context(), in); {
		case err != nil && !req.offSchema:
			t.Errorf("%s: the request is not as described: %v", what, err)
		case err == nil && req.offSchema:
			t.Errorf("%s: the description allows the request, and the test says that it does not", what)
		}
	}
	if (req.offSchema || req.anyBody) && a.status < 400 {
		t.Errorf("%s: the answer is %d to a request that is not as described", what, a.status)
	}
	err = openapi3filter.ValidateResponse(t.Context(), &openapi3filter.ResponseValidationInput{RequestValidationInput: in, Status: a.status,
		Header: a.header, Body: io.NopCloser(strings.NewReader(a.body)), Options: in.Options})
	if err != nil && a.status != http.StatusMethodNotAllowed {
		t.Errorf("%s: the answer is not as described: %v\n%d %s", what, err, a.status, a.body)
	}
}

// problem gives the error in an answer.
func (a answer) problem(t testing.TB) problem {
	t.Helper()
	var p problem
	dec := json.NewDecoder(strings.NewReader(a.body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&p); err != nil {
		t.Errorf("%d %s is no problem: %v", a.status, a.body, err)
	}
	if p.Status != a.status || a.header.Get("Content-Type") != "application/problem+json" || p.RequestID != a.header.Get("X-Request-Id") || p.Title == "" {
		t.Errorf("the problem %s does not fit its answer: %d %v", a.body, a.status, a.header)
	}
	if (a.status == http.StatusServiceUnavailable) != (a.header.Get("Retry-After") != "") {
		t.Errorf("%d has the Retry-After %q", a.status, a.header.Get("Retry-After"))
	}
	return p
}

// kind is the last part of the problem's type; empty for an answer that is none.
func (a answer) kind(t testing.TB) string {
	t.Helper()
	if a.status < 400 {
		return ""
	}
	return strings.TrimPrefix(a.problem(t).Type, typePrefix)
}

func (a answer) decode(t testing.TB, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(a.body), into); err != nil {
		t.Fatalf("%d %s: %v", a.status, a.body, err)
	}
}

// key is an idempotency key that nothing else has.
func key() string { return "k-" + strconv.FormatInt(orders.NewID(), 10) }

// placeWith sends one request to place an order.
func (b *bundle) placeWith(t testing.TB, key, body string) answer {
	t.Helper()
	return b.do(t, request{method: http.MethodPost, path: "/v1/orders", body: body, header: map[string]string{keyHeader: key}})
}

// place places an order that must be accepted.
func (b *bundle) place(t testing.TB, body string) orderAnswer {
	t.Helper()
	a := b.placeWith(t, key(), body)
	if a.status != http.StatusCreated {
		t.Fatalf("place %s: %d %s", body, a.status, a.body)
	}
	var o orderAnswer
	a.decode(t, &o)
	return o
}

func (b *bundle) post(t testing.TB, o orderAnswer, verb, body string) answer {
	t.Helper()
	return b.do(t, request{method: http.MethodPost, path: pathOf(o) + "/" + verb, body: body})
}

func (b *bundle) get(t testing.TB, path string) answer {
	t.Helper()
	return b.do(t, request{method: http.MethodGet, path: path})
}

func pathOf(o orderAnswer) string { return "/v1/orders/" + orders.FormatID(int64(o.ID)) }

// limit is how long a test waits for what has to happen; only a failing test takes so long.
const limit = 30 * time.Second

// eventually waits until cond is true, and fails the test if that takes longer than limit.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("after %s still not: %s", limit, what)
		}
	}
}
