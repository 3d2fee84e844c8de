package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	// How often a service looks whether it can work. A probe gets the last answer, so that no number of probes is a load on the database.
	lookEvery = time.Second
	// What a look may take: less than the time-outs of common probes, which would otherwise never learn the reason.
	lookTimeout = 2 * time.Second
)

// check is one thing that a service needs.
type check struct {
	name string
	// ready is nil, or what is missing. It returns when ctx ends.
	ready func(ctx context.Context) error
	// loop says that it is the work itself, which needs everything before it.
	loop bool
	// optional says that it is shown and measured, and decides nothing: without it the service does the work that it is asked for.
	optional bool
}

const (
	checkDatabase = "database"
	checkBroker   = "broker"
	checkAPI      = "api"
	starting      = "starting" // what is missing before the first look
)

// readiness is the answer of /readyz.
type readiness struct {
	Ready   bool      `json:"ready"`
	Service string    `json:"service"`
	Version string    `json:"version"`
	Checks  []checked `json:"checks"`
}

// checked is one of its checks.
type checked struct {
	Name     string `json:"name"`
	Ready    bool   `json:"ready"`
	Missing  string `json:"missing,omitempty"`
	Optional bool   `json:"optional,omitempty"` // ready decides nothing
}

// watch looks again and again whether a service can work, and says so in the log when that changes.
type watch struct {
	service string
	checks  []check
	log     *slog.Logger
	gauge   *prometheus.GaugeVec
	// worked says that everything was there once; only look uses it.
	worked bool

	mu   sync.Mutex
	last readiness // guarded by mu
}

func newWatch(service string, checks []check, log *slog.Logger, reg prometheus.Registerer) (*watch, error) {
	w := &watch{service: service, checks: checks, log: log,
		gauge: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "lapse_ready", Help: "1 where the service has what it needs, by what that is."}, []string{"check"}),
	}
	w.last = readiness{Service: service, Version: readBuild().Version}
	for _, c := range checks {
		w.gauge.WithLabelValues(c.name).Set(0)
		w.last.Checks = append(w.last.Checks, checked{Name: c.name, Missing: starting, Optional: c.optional})
	}
	return w, reg.Register(w.gauge)
}

// run looks until ctx ends; from then on the service is not ready: it takes no more work.
func (w *watch) run(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		w.look(ctx)
		select {
		case <-ctx.Done():
			w.set(func(checked) string { return "stopping" })
			return
		case <-tick.C:
		}
	}
}

func (w *watch) look(ctx context.Context) {
	missing := make(map[string]string, len(w.checks))
	var names []string
	for _, c := range w.checks {
		ctx, cancel := context.WithTimeout(ctx, lookTimeout)
		err := c.ready(ctx)
		cancel()
		if err == nil {
			continue
		}
		missing[c.name] = err.Error()
		if c.loop && len(names) > 0 {
			missing[c.name] = "waits for the " + strings.Join(names, " and the ") // whose reasons it would only repeat
		}
		names = append(names, c.name)
	}
	if ctx.Err() != nil {
		return // what failed now says nothing
	}
	before, now := w.set(func(c checked) string { return missing[c.Name] })
	if slices.EqualFunc(before.Checks, now.Checks, func(a, b checked) bool {
		return a.Ready == b.Ready && (a.Missing == starting) == (b.Missing == starting)
	}) {
		return
	}
	switch why, down := missing[checkDatabase]; {
	case len(names) == 0:
		w.worked = true
		w.log.Info("ready")
	case down:
		w.log.Warn("not ready", "missing", strings.Join(names, ","), "err", why)
	case !w.worked:
		// Every start takes its second or two, in which one thing comes after the other: nothing to warn of.
		w.log.Info("waiting", "for", strings.Join(names, ","))
	case now.Ready:
		w.log.Warn("ready, without a part", "missing", strings.Join(names, ","))
	default:
		// The parts have logged their own reasons.
		w.log.Warn("not ready", "missing", strings.Join(names, ","))
	}
}

// set stores what is missing of each check, and gives the answer before and after.
func (w *watch) set(missing func(checked) string) (before, now readiness) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before = w.last
	now = readiness{Ready: true, Service: before.Service, Version: before.Version}
	for _, c := range before.Checks {
		text := missing(c)
		value := 1.0
		if text != "" {
			now.Ready, value = now.Ready && c.Optional && text != starting, 0
		}
		w.gauge.WithLabelValues(c.Name).Set(value)
		now.Checks = append(now.Checks, checked{Name: c.Name, Ready: text == "", Missing: text, Optional: c.Optional})
	}
	w.last = now
	return before, now
}

// ServeHTTP answers /readyz.
func (w *watch) ServeHTTP(resp http.ResponseWriter, _ *http.Request) {
	w.mu.Lock()
	last := w.last
	w.mu.Unlock()
	resp.Header().Set("Content-Type", "application/json")
	if !last.Ready {
		resp.WriteHeader(http.StatusServiceUnavailable)
	}
	enc := json.NewEncoder(resp)
	enc.SetIndent("", "  ")
	_ = enc.Encode(last) // the client has gone
}

// web is what a service serves.
type web struct {
	servers []*http.Server
	done    sync.WaitGroup
}

// serveWeb listens at addr, and for profiles at pprofAddr unless that is empty. It fails where it cannot listen: a service that nobody
// can look at is not one.
func serveWeb(ctx context.Context, addr, pprofAddr string, ready http.Handler, reg *prometheus.Registry, log *slog.Logger) (*web, error) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.Handle("GET /readyz", ready)
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelError)}))
	s := &web{}
	if err := s.listen(ctx, "http", addr, mux, 30*time.Second, log); err != nil {
		return nil, err
	}
	if pprofAddr == "" {
		return s, nil
	}
	// A listener of its own, always on the loopback: /metrics may be open to a network, profiles may not.
	profiles := http.NewServeMux()
	profiles.HandleFunc("/debug/pprof/", pprof.Index)
	profiles.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	profiles.HandleFunc("/debug/pprof/profile", pprof.Profile)
	profiles.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	profiles.HandleFunc("/debug/pprof/trace", pprof.Trace)
	if err := s.listen(ctx, "pprof", pprofAddr, profiles, 0, log); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// listen serves h. No write time-out (0) for profiles, which take as long as was asked for.
func (s *web) listen(ctx context.Context, what, addr string, h http.Handler, write time.Duration, log *slog.Logger) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		key := map[string]string{"http": "http.addr", "pprof": "http.pprof"}[what]
		// With its code: a failed listen is a net.Error, as a database that is not there is.
		return codeError{fmt.Errorf("serve %s: %w; another address is set by the key %s", what, err, key), exitFailed}
	}
	server := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      write,
		IdleTimeout:       time.Minute,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	s.servers = append(s.servers, server)
	log.Info("serving "+what, "addr", l.Addr().String())
	s.done.Go(func() { // ended by close
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("serving "+what+" ended", "err", err)
		}
	})
	return nil
}

// close ends what is served, and the requests that are still under way.
func (s *web) close() {
	for _, server := range s.servers {
		_ = server.Close() // the listener is gone either way
	}
	s.done.Wait()
}
