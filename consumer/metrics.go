package consumer

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/orders"
)

// Values of the labels.
const (
	ackOK, ackExpired, ackFailed = "ok", "expired", "failed"
	renewOK, renewFailed         = "ok", "failed"

	retryUnavailable, retryStuck, retryFailed, retryPanic = "unavailable", "locked", "failed", "panic"
)

func retryReason(err error, stuck bool) string {
	var panicked *panicError
	switch {
	case errors.As(err, &panicked):
		return retryPanic
	case stuck:
		return retryStuck
	}
	return retryFailed
}

type metrics struct {
	received, redelivered, receiveErrors prometheus.Counter
	newer, handedBack, early, panics     prometheus.Counter
	outcomes, retries, parked            *prometheus.CounterVec // result, reason, what
	acks, renewals                       *prometheus.CounterVec // result
	lateness, batchOrders, batchDuration prometheus.Histogram
	paused, inHand                       prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	r := &registering{to: reg}
	m := &metrics{
		received:      r.counter("lapse_messages_received_total", "Timed messages received, redeliveries included."),
		redelivered:   r.counter("lapse_messages_redelivered_total", "Timed messages received that had been delivered before. Duplicates after a broker's crash are not among them: they come with attempt 1."),
		receiveErrors: r.counter("lapse_receive_errors_total", "Receives that failed, once the connection to RocketMQ had been made."),
		newer:         r.counter("lapse_messages_newer_version_total", "Deliveries of messages of a newer version, left to a newer consumer."),
		handedBack:    r.counter("lapse_messages_handed_back_total", "Messages made visible again undone: for want of room, or at the end."),
		early:         r.counter("lapse_orders_early_total", "Orders whose message came a little before they were due, and that were waited for."),
		panics:        r.counter("lapse_consumer_panics_total", "Panics that were turned into errors."),
		outcomes:      r.vec("lapse_outcomes_total", "Orders of timed messages by what became of them.", "result"),
		retries:       r.vec("lapse_cancel_retries_total", "Transactions of cancels that failed and were tried again, whole or halved, by reason.", "reason"),
		parked:        r.vec("lapse_consumer_parked_total", "Orders and messages parked by the consumer. Orders not found or with invalid ids are parked by the store, and are outcomes.", "what"),
		acks:          r.vec("lapse_acks_total", "Acknowledgements by result; a message that was not acknowledged comes again.", "result"),
		renewals:      r.vec("lapse_renewals_total", "Messages in hand hidden for longer, by result.", "result"),
		lateness: r.histogram("lapse_cancel_lateness_seconds", "From the deadline to the cancel, by the database's clock.",
			[]float64{.05, .1, .15, .2, .3, .5, .75, 1, 1.5, 2, 3, 5, 10, 30, 60, 300, 600, 1800, 3600, 86400}),
		batchOrders: r.histogram("lapse_cancel_batch_orders", "Orders in one transaction of cancels.",
			[]float64{1, 2, 5, 10, 20, 50, 75, 100, 200, 350, 500}),
		batchDuration: r.histogram("lapse_cancel_batch_seconds", "Duration of one transaction of cancels.",
			[]float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}),
		paused: r.gauge("lapse_consumer_paused", "1 while no message is received because the database does not take work."),
		inHand: r.gauge("lapse_consumer_in_hand_orders", "Orders of messages that are received and not yet acknowledged."),
	}
	// From the start, so that a rate is right from the first one on.
	for _, result := range orders.Results() {
		m.outcomes.WithLabelValues(string(result))
	}
	for _, reason := range []string{retryUnavailable, retryStuck, retryFailed, retryPanic} {
		m.retries.WithLabelValues(reason)
	}
	for _, what := range []string{orders.ParkedMessage, orders.ParkedOrder} {
		m.parked.WithLabelValues(what)
	}
	for _, result := range []string{ackOK, ackExpired, ackFailed} {
		m.acks.WithLabelValues(result)
	}
	for _, result := range []string{renewOK, renewFailed} {
		m.renewals.WithLabelValues(result)
	}
	return m, errors.Join(r.errs...)
}

// registering makes collectors and registers them; one that is registered already is shared.
type registering struct {
	to   prometheus.Registerer
	errs []error
}

func register[C prometheus.Collector](r *registering, c C) C {
	if r.to == nil {
		return c
	}
	err := r.to.Register(c)
	if are, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if old, ok := are.ExistingCollector.(C); ok {
			return old
		}
	}
	if err != nil {
		r.errs = append(r.errs, err)
	}
	return c
}

func (r *registering) counter(name, help string) prometheus.Counter {
	return register(r, prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help}))
}

func (r *registering) vec(name, help, label string) *prometheus.CounterVec {
	return register(r, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label}))
}

func (r *registering) histogram(name, help string, buckets []float64) prometheus.Histogram {
	return register(r, prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}))
}

func (r *registering) gauge(name, help string) prometheus.Gauge {
	return register(r, prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help}))
}
