package api

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics has bounded labels only: routes are patterns, never paths, and what a client can make up is "other".
type metrics struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
	outcomes *prometheus.CounterVec
	inFlight prometheus.Gauge
}

// other is the label of what this server does not know.
const other = "other"

func newMetrics(routes []string, registerer prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_api_requests_total", Help: "Requests answered, by route, method and code; 499: the client did not wait."}, []string{"route", "method", "code"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "lapse_api_request_duration_seconds", Help: "Time from the header of a request to its answer, by route.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14)}, []string{"route"}),
		outcomes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_api_outcomes_total",
			Help: "What became of requests that were understood, by verb and outcome."}, []string{"verb", "outcome"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{Name: "lapse_api_requests_in_flight", Help: "Requests under way."}),
	}
	for _, route := range append(routes, other) {
		m.duration.WithLabelValues(route)
	}
	if registerer == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.requests, m.duration, m.outcomes, m.inFlight} {
		if err := registerer.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics of the API: %w", err)
		}
	}
	return m, nil
}

var knownMethods = []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions}

func (m *metrics) count(route, method string, status int, took time.Duration) {
	if route == "" {
		route = other
	}
	if !slices.Contains(knownMethods, method) {
		method = other
	}
	m.requests.WithLabelValues(route, method, strconv.Itoa(status)).Inc()
	m.duration.WithLabelValues(route).Observe(took.Seconds())
}
