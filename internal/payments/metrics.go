package payments

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/orders"
)

// Why a call has no answer, as metrics say it.
const (
	failureNoAnswer = "no_answer" // time-out, connection, 5xx
	failureRefused  = "refused"   // 4xx, or an answer that cannot be read
	failureNotAsked = "not_asked" // the gateway is left alone
)

// callMetrics are those of a gateway.
type callMetrics struct {
	answers  *prometheus.CounterVec
	failures *prometheus.CounterVec
	duration *prometheus.HistogramVec
	left     *prometheus.GaugeVec
}

func newCallMetrics(registerer prometheus.Registerer) (*callMetrics, error) {
	m := &callMetrics{
		answers:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_gateway_answers_total", Help: "Answers of the payment gateway, by call and state."}, []string{"call", "state"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_gateway_failures_total", Help: "Calls to the payment gateway without an answer, by call and reason: no_answer, refused, not_asked (it is left alone for a while)."}, []string{"call", "reason"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "lapse_gateway_call_seconds", Help: "How long calls to the payment gateway took, a second try included.",
			Buckets: prometheus.ExponentialBuckets(0.002, 2, 13)}, []string{"call"}),
		left: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "lapse_gateway_left_alone", Help: "1 while the payment gateway is left alone since its last calls failed, by call."}, []string{"call"}),
	}
	err := errors.Join(shared(registerer, &m.answers), shared(registerer, &m.failures), shared(registerer, &m.duration), shared(registerer, &m.left))
	for _, call := range []string{callStatus, callClose, callRefund} {
		m.left.WithLabelValues(call)
		m.duration.WithLabelValues(call)
		for _, reason := range []string{failureNoAnswer, failureRefused, failureNotAsked} {
			m.failures.WithLabelValues(call, reason)
		}
	}
	return m, err
}

func (m *callMetrics) open(call string, open bool) {
	v := 0.0
	if open {
		v = 1
	}
	m.left.WithLabelValues(call).Set(v)
}

// shared registers a collector, or takes the one that is registered: the parts of lapse all have a gateway each.
func shared[C prometheus.Collector](registerer prometheus.Registerer, c *C) error {
	if registerer == nil {
		return nil
	}
	err := registerer.Register(*c)
	var known prometheus.AlreadyRegisteredError
	if errors.As(err, &known) {
		if existing, ok := known.ExistingCollector.(C); ok {
			*c = existing
			return nil
		}
	}
	return err
}

// gateMetrics are those of a gate.
type gateMetrics struct {
	doubts *prometheus.CounterVec
	found  *prometheus.CounterVec
}

func newGateMetrics(registerer prometheus.Registerer) (*gateMetrics, error) {
	m := &gateMetrics{
		doubts: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_gate_doubts_total", Help: "Due orders for which the gateway had no answer that allows a cancel, by what became of them: held, parked, or settled by somebody else meanwhile."}, []string{"result"}),
		found:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_gate_payments_total", Help: "Payments that no notice had told and the gateway did when it was asked before a cancel, by outcome."}, []string{"outcome"}),
	}
	err := errors.Join(shared(registerer, &m.doubts), shared(registerer, &m.found))
	m.doubts.WithLabelValues(string(orders.ResultHeld))
	m.doubts.WithLabelValues(string(orders.ResultParked))
	m.found.WithLabelValues(string(orders.PaymentAccepted))
	return m, err
}

// What became of a row that a worker had claimed, as metrics say it.
const (
	resultDone      = "done"
	resultRetry     = "retry"      // no answer, or none that ends it: tried again
	resultGivenUp   = "given_up"   // parked
	resultLost      = "lease_lost" // somebody else has it
	resultNotMarked = "not_marked" // the database failed: done again when the lease ends
)

// workerMetrics are those of a worker.
type workerMetrics struct {
	results *prometheus.CounterVec
	pending *prometheus.GaugeVec
	oldest  *prometheus.GaugeVec
	givenUp prometheus.Gauge
}

func newWorkerMetrics(registerer prometheus.Registerer) (*workerMetrics, error) {
	m := &workerMetrics{
		results: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_refund_worker_results_total", Help: "Refunds and tasks that the worker has claimed, by kind (refund, task) and what became of them: done, retry, given_up, lease_lost, not_marked."}, []string{"kind", "result"}),
		pending: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "lapse_gateway_owed", Help: "Refunds that have to be made, and tasks that the gateway has not answered, by kind."}, []string{"kind"}),
		oldest:  prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "lapse_gateway_owed_oldest_seconds", Help: "How old the oldest of them is, by kind; 0: there is none."}, []string{"kind"}),
		givenUp: prometheus.NewGauge(prometheus.GaugeOpts{Name: "lapse_refunds_given_up", Help: "Refunds that were given up, and wait for a person."}),
	}
	err := errors.Join(shared(registerer, &m.results), shared(registerer, &m.pending), shared(registerer, &m.oldest), shared(registerer, &m.givenUp))
	for _, kind := range []string{kindRefund, kindTask} {
		for _, result := range []string{resultDone, resultRetry, resultGivenUp} {
			m.results.WithLabelValues(kind, result)
		}
	}
	return m, err
}

func (m *workerMetrics) set(o orders.Owed) {
	m.pending.WithLabelValues(kindRefund).Set(float64(o.Refunds))
	m.pending.WithLabelValues(kindTask).Set(float64(o.Tasks))
	m.oldest.WithLabelValues(kindRefund).Set(o.OldestRefund.Seconds())
	m.oldest.WithLabelValues(kindTask).Set(o.OldestTask.Seconds())
	m.givenUp.Set(float64(o.GivenUpRefund))
}
