package rmq

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are shared by all Producers and Consumers of one registerer.
type metrics struct {
	requests   *prometheus.CounterVec   // method, code
	duration   *prometheus.HistogramVec // method
	reconnects prometheus.Counter
	replaced   prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lapse_rocketmq_requests_total",
			Help: "Requests to RocketMQ by method and by the code of the answer; grpc_* when no server answered.",
		}, []string{"method", "code"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "lapse_rocketmq_request_duration_seconds",
			Help: "Duration of requests to RocketMQ; a ReceiveMessage includes the long poll.",
			// From a loopback answer to the longest poll of the proxy, 20 s.
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20},
		}, []string{"method"}),
		reconnects: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "lapse_rocketmq_reconnects_total",
			Help: "Connections that came back after they were lost.",
		}),
		replaced: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "lapse_rocketmq_connections_replaced_total",
			Help: "Connections given up because they had stopped answering.",
		}),
	}
	if reg == nil {
		return m, nil
	}
	var errs []error
	m.requests = register(reg, m.requests, &errs)
	m.duration = register(reg, m.duration, &errs)
	m.reconnects = register(reg, m.reconnects, &errs)
	m.replaced = register(reg, m.replaced, &errs)
	return m, errors.Join(errs...)
}

// register returns the collector that is registered already, if there is one: a
// process may open several connections with the same registerer.
func register[C prometheus.Collector](reg prometheus.Registerer, c C, errs *[]error) C {
	err := reg.Register(c)
	if err == nil {
		return c
	}
	if are, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if old, ok := are.ExistingCollector.(C); ok {
			return old
		}
	}
	*errs = append(*errs, err)
	return c
}
