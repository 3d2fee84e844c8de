package api

import (
	"cmp"
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/orders"
)

// OpenAPI is the description of the API, OpenAPI 3.1 in YAML; the server gives it out at /openapi.yaml.
//
//go:embed openapi.yaml
var OpenAPI []byte

// Store is what the API needs of the orders; *orders.Store has it.
type Store interface {
	PlaceOnce(ctx context.Context, key string, request [32]byte, n orders.NewOrder) (placed orders.Order, repeated bool, err error)
	Get(ctx context.Context, id int64) (orders.Order, error)
	Events(ctx context.Context, id int64) ([]orders.Event, error)
	ReadStory(ctx context.Context, id int64) (orders.Story, error)
	RecordPayment(ctx context.Context, p orders.Payment) (orders.PaymentResult, error)
	ExtendDeadline(ctx context.Context, id int64, until time.Time, actor string) (orders.Extension, error)
	Cancel(ctx context.Context, id int64, actor, reason string) (orders.Outcome, error)
}

// Config has the settings of a [Server]. The zero value of each field means its default.
type Config struct {
	// Tokens that may ask. Default: none, and everybody who reaches the server may do everything; [Listen] then takes the loopback only.
	Tokens []Token
	// PaymentSecrets, of which any signs a payment notice. Default: none, and notices need no signature.
	PaymentSecrets []string
	// MaxBody is the length of a body in bytes, at most. Default 256 KiB: an order of 500 SKUs has some 70.
	MaxBody int
	// MaxInFlight is the number of requests worked on at once; more are answered 503 at once. Default 128.
	MaxInFlight int
	// RequestTimeout bounds the work on one request, waiting for the database included. Default 10 s.
	RequestTimeout time.Duration
	// ReadTimeout bounds the arrival of one request. Default 10 s.
	ReadTimeout time.Duration
	// IdleTimeout is how long a connection is kept on which nothing is asked. Default 1 min.
	IdleTimeout time.Duration
	// StopTimeout is how long requests that are under way have to be finished when the server is told to stop. Default 15 s.
	StopTimeout time.Duration
	// Logger takes one line a request: at level debug what went well, info what was refused, warn and error what failed. Default: off.
	Logger *slog.Logger
	// Registerer takes the metrics lapse_api_…. Default: off.
	Registerer prometheus.Registerer

	now func() time.Time // for the window of signatures
}

// WithDefaults gives the configuration with every zero field replaced by its default.
func (c Config) WithDefaults() Config {
	c.MaxBody = cmp.Or(c.MaxBody, 256<<10)
	c.MaxInFlight = cmp.Or(c.MaxInFlight, 128)
	c.RequestTimeout = cmp.Or(c.RequestTimeout, 10*time.Second)
	c.ReadTimeout = cmp.Or(c.ReadTimeout, 10*time.Second)
	c.IdleTimeout = cmp.Or(c.IdleTimeout, time.Minute)
	c.StopTimeout = cmp.Or(c.StopTimeout, 15*time.Second)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.now == nil {
		c.now = time.Now
	}
	return c
}

func (c Config) validate() error {
	if c.MaxBody < 0 || c.MaxInFlight < 0 {
		return fmt.Errorf("api.Config: MaxBody is %d, MaxInFlight %d; they must be positive", c.MaxBody, c.MaxInFlight)
	}
	for _, d := range []struct {
		name string
		is   time.Duration
	}{{"RequestTimeout", c.RequestTimeout}, {"ReadTimeout", c.ReadTimeout}, {"IdleTimeout", c.IdleTimeout}, {"StopTimeout", c.StopTimeout}} {
		if d.is < 0 {
			return fmt.Errorf("api.Config.%s is %s; it must be positive", d.name, d.is)
		}
	}
	return nil
}

// Server answers the API. It is safe for concurrent use.
type Server struct {
	store   Store
	cfg     Config
	mux     *http.ServeMux
	metrics *metrics
	slots   chan struct{} // one for each request under way
	serving atomic.Bool
}

// New makes a server on the orders of store. It listens nowhere; see [Server.Serve].
func New(store Store, cfg Config) (*Server, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Server{store: store, cfg: cfg, mux: http.NewServeMux(), slots: make(chan struct{}, cfg.MaxInFlight)}
	byPath := map[string]map[string]endpoint{}
	for _, e := range s.endpoints() {
		if byPath[e.path] == nil {
			byPath[e.path] = map[string]endpoint{}
		}
		byPath[e.path][e.method] = e
	}
	for p, methods := range byPath {
		// Registered without a method: the mux's own answer to a wrong one is no problem+json.
		s.mux.HandleFunc(p, func(w http.ResponseWriter, r *http.Request) { s.dispatch(w.(*response), r, methods) })
	}
	s.mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		w.(*response).fail(kindNoSuchPath.problem("the paths are described at /openapi.yaml"))
	})
	var err error
	s.metrics, err = newMetrics(slices.Collect(maps.Keys(byPath)), cfg.Registerer)
	return s, err
}

// Listen opens addr (host:port) for a server with these tokens. Without tokens an address that is not of the loopback is an error that
// [ErrOpen] is in the chain of: whoever reached it could cancel every order.
func Listen(ctx context.Context, addr string, tokens []Token) (net.Listener, error) {
	if err := CheckAddr(addr, tokens); err != nil {
		return nil, err
	}
	return (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
}

// ErrOpen is returned by CheckAddr and Listen for an API that would be open to a network without a token.
var ErrOpen = errors.New("without tokens the API is served on the loopback only")

// CheckAddr tells whether [Listen] would refuse the address.
func CheckAddr(addr string, tokens []Token) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("address of the API: %w", err)
	}
	if len(tokens) == 0 && !isLoopback(host) {
		return fmt.Errorf("address %s of the API: %w", addr, ErrOpen)
	}
	return nil
}

func isLoopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// maxHeader bounds the header of a request: a token, a key, a signature and what proxies add are below 4 KiB.
const maxHeader = 16 << 10

// Serve answers on l until ctx ends; then it takes no new request, and returns when those under way are answered. After StopTimeout it cuts
// them off and returns an error. It closes l.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	server := &http.Server{
		Handler:           s,
		ReadHeaderTimeout: min(5*time.Second, s.cfg.ReadTimeout),
		ReadTimeout:       s.cfg.ReadTimeout,
		// From the end of the header: the body, the work, and some time for a slow reader.
		WriteTimeout:   s.cfg.ReadTimeout + s.cfg.RequestTimeout + 5*time.Second,
		IdleTimeout:    s.cfg.IdleTimeout,
		MaxHeaderBytes: maxHeader,
		ErrorLog:       slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelDebug),
	}
	ended := make(chan error, 1)
	s.serving.Store(true)
	go func() { ended <- server.Serve(l) }() // ends with Shutdown, or when the listener breaks
	select {
	case err := <-ended:
		s.serving.Store(false)
		return errors.Join(fmt.Errorf("serve the API: %w", err), server.Close())
	case <-ctx.Done():
	}
	s.serving.Store(false)
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.StopTimeout)
	defer cancel()
	err := server.Shutdown(limited)
	if err != nil {
		err = errors.Join(fmt.Errorf("stop the API: requests were cut off that were not answered within %s; their clients ask again: %w", s.cfg.StopTimeout, err), server.Close())
	}
	if failed := <-ended; !errors.Is(failed, http.ErrServerClosed) {
		err = errors.Join(err, fmt.Errorf("serve the API: %w", failed))
	}
	return err
}

// Ready is nil while requests are taken.
func (s *Server) Ready() error {
	if !s.serving.Load() {
		return errors.New("the API is not served")
	}
	return nil
}

// endpoint is one thing that can be asked.
type endpoint struct {
	method, path string
	scope        Scope // empty: open to everybody
	do           func(*call) (any, *problem)
}

// call is one request that may ask what it asks. do gives the body of the answer; status and header are set here.
type call struct {
	r      *http.Request
	id     int64 // of the order in the path
	actor  string
	body   []byte // of a POST
	status int    // 200
	header http.Header
}

func (s *Server) endpoints() []endpoint {
	return []endpoint{
		{http.MethodPost, "/v1/orders", ScopePlace, s.place},
		{http.MethodGet, "/v1/orders/{id}", ScopeRead, s.get},
		{http.MethodGet, "/v1/orders/{id}/events", ScopeRead, s.events},
		{http.MethodGet, "/v1/orders/{id}/why", ScopeRead, s.why},
		{http.MethodPost, "/v1/orders/{id}/payments", ScopePay, s.pay},
		{http.MethodPost, "/v1/orders/{id}/extend", ScopePlace, s.extend},
		{http.MethodPost, "/v1/orders/{id}/cancel", ScopePlace, s.cancel},
		{http.MethodGet, "/openapi.yaml", "", nil},
	}
}

// response is the writer of one request. It is written once, when everything is known, so that a failure in between is still a problem.
type response struct {
	http.ResponseWriter
	route  string // as in the metrics; empty: none
	id     string // of the request
	status int    // 0: nothing was written
	cause  error
}

// Unwrap is for http.ResponseController.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *response) send(status int, contentType string, body []byte) {
	w.status = status
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client has gone
}

func (w *response) fail(p *problem) {
	p.RequestID, w.cause = w.id, p.cause
	for name, value := range p.header {
		w.Header().Set(name, value)
	}
	body, err := json.Marshal(p)
	if err != nil {
		panic(err) // a problem is texts and numbers
	}
	w.send(p.Status, "application/problem+json", append(body, '\n'))
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	out := &response{ResponseWriter: w, id: requestID(r)}
	head := w.Header()
	head.Set("X-Request-Id", out.id)
	head.Set("Cache-Control", "no-store")
	head.Set("X-Content-Type-Options", "nosniff")
	s.metrics.inFlight.Inc()
	defer func() {
		s.metrics.inFlight.Dec()
		if v := recover(); v != nil {
			stack := debug.Stack()
			s.cfg.Logger.Error("panic in a request", "request_id", out.id, "panic", v, "stack", string(stack))
			if out.status != 0 {
				panic(http.ErrAbortHandler) // the answer is broken off, which the client sees
			}
			out.fail(kindInternal.problem("the server's log has the reason under the request's id; nothing may be assumed about the request, so send it again with the same key"))
		}
		s.done(r, out, time.Since(start))
	}()
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	default:
		out.fail(kindOverloaded.problem("%d requests are under way, the most that this server takes; send the same one again", s.cfg.MaxInFlight).with("Retry-After", "1"))
		return
	}
	if len(s.cfg.Tokens) == 0 && !isLoopback(hostOf(r)) {
		// A page in a browser on this host can make a name of its own lead to the loopback. It cannot make it be one of these names.
		out.fail(kindMisdirected.problem("ask 127.0.0.1 or localhost, or configure tokens; the request was for %q", r.Host))
		return
	}
	if r.URL.Path != path.Clean("/"+r.URL.Path) {
		// The mux would redirect to the clean path, which makes a GET of some clients' POST.
		out.fail(kindNoSuchPath.problem("the paths are described at /openapi.yaml"))
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), s.cfg.RequestTimeout)
	defer cancel()
	s.mux.ServeHTTP(out, r.WithContext(ctx))
}

func hostOf(r *http.Request) string {
	if host, _, err := net.SplitHostPort(r.Host); err == nil {
		return host
	}
	return strings.Trim(r.Host, "[]")
}

// statusClientGone is nginx's number for a client that did not wait for its answer. It is in the metrics only; nobody gets it.
const statusClientGone = 499

// done counts and logs one request.
func (s *Server) done(r *http.Request, w *response, took time.Duration) {
	status := w.status
	if r.Context().Err() != nil && status >= http.StatusInternalServerError {
		status = statusClientGone // the error is the end of the request, not the server's
	}
	s.metrics.count(w.route, r.Method, status, took)
	level := slog.LevelDebug
	switch {
	case status == http.StatusInternalServerError:
		level = slog.LevelError
	case status > http.StatusInternalServerError:
		level = slog.LevelWarn
	case status >= http.StatusBadRequest:
		level = slog.LevelInfo
	}
	attrs := []slog.Attr{slog.String("request_id", w.id), slog.String("method", r.Method), slog.String("path", r.URL.Path), slog.Int("status", status), slog.Duration("took", took)}
	if w.cause != nil {
		attrs = append(attrs, slog.Any("err", w.cause))
	}
	s.cfg.Logger.LogAttrs(r.Context(), level, "request", attrs...)
}

// requestID takes over the client's id of the request, where it is one that a log can bear, or makes one.
func requestID(r *http.Request) string {
	if id := r.Header.Get("X-Request-Id"); id != "" && len(id) <= 64 && strings.Trim(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.") == "" {
		return id
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand, since Go 1.24)
	return hex.EncodeToString(b[:])
}

// dispatch does everything that is the same for each endpoint of a path.
func (s *Server) dispatch(w *response, r *http.Request, methods map[string]endpoint) {
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet // net/http keeps the body back
	}
	e, known := methods[method]
	for _, any := range methods {
		w.route = any.path
	}
	if !known {
		allowed := slices.Sorted(maps.Keys(methods))
		if slices.Contains(allowed, http.MethodGet) {
			allowed = append(allowed, http.MethodHead)
		}
		list := strings.Join(allowed, ", ")
		w.fail(kindMethod.problem("%s is not among the methods of this path: %s", r.Method, list).with("Allow", list))
		return
	}
	if e.do == nil {
		w.send(http.StatusOK, "application/yaml", OpenAPI)
		return
	}
	c := &call{r: r, status: http.StatusOK, header: w.Header()}
	var p *problem
	if c.actor, p = s.authorize(r, e.scope); p != nil {
		w.fail(p)
		return
	}
	if text := r.PathValue("id"); strings.Contains(e.path, "{id}") {
		id, err := orders.ParseID(text)
		if err != nil {
			w.fail(kindUnknownOrder.problem("no order can have the id %s", clip([]byte(fmt.Sprintf("%q", text)))))
			return
		}
		c.id = id
	}
	if e.method == http.MethodPost {
		if c.body, p = s.read(w, r); p != nil {
			w.fail(p)
			return
		}
	}
	answer, p := e.do(c)
	if p != nil {
		w.fail(p)
		return
	}
	body, err := json.Marshal(answer)
	if err != nil {
		p := kindInternal.problem("the answer cannot be encoded")
		p.cause = err
		w.fail(p)
		return
	}
	w.send(c.status, "application/json", append(body, '\n'))
}

// read takes the body of a request.
func (s *Server) read(w *response, r *http.Request) ([]byte, *problem) {
	media, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	charset, given := params["charset"]
	if err != nil || media != "application/json" || given && !strings.EqualFold(charset, "utf-8") || r.Header.Get("Content-Encoding") != "" {
		return nil, kindMediaType.problem("send Content-Type: application/json, in UTF-8 and not compressed").with("Accept-Post", "application/json")
	}
	tooLarge := kindTooLarge.problem("the body has more than %d bytes (api.max_body)", s.cfg.MaxBody)
	if r.ContentLength > int64(s.cfg.MaxBody) {
		return nil, tooLarge.with("Connection", "close")
	}
	body, err := io.ReadAll(http.MaxBytesReader(w.ResponseWriter, r.Body, int64(s.cfg.MaxBody)))
	var exceeded *http.MaxBytesError
	var slow net.Error
	switch {
	case err == nil:
		return body, nil
	case errors.As(err, &exceeded):
		return nil, tooLarge
	case errors.As(err, &slow) && slow.Timeout():
		return nil, kindTimeout.problem("the request did not arrive within %s", s.cfg.ReadTimeout).with("Connection", "close")
	}
	return nil, kindMalformed.problem("the body cannot be read: %s", err)
}
