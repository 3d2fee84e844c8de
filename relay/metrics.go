package relay

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are shared by all relays of one registerer.
type metrics struct {
	sentMessages, sentOrders, hops prometheus.Counter
	retried, refused, parked       prometheus.Counter
	lost, givenBack, purged        prometheus.Counter
	sendFailures, claimFailures    prometheus.Counter
	sendSeconds, claimSeconds, lag prometheus.Histogram
	markSeconds, ordersPerMessage  prometheus.Histogram
	inHand, paused                 prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	var errs []error
	counter := func(name, help string) prometheus.Counter {
		return register(reg, prometheus.NewCounter(prometheus.CounterOpts{Name: "lapse_relay_" + name, Help: help}), &errs)
	}
	histogram := func(name, help string, buckets ...float64) prometheus.Histogram {
		return register(reg, prometheus.NewHistogram(prometheus.HistogramOpts{Name: "lapse_relay_" + name, Help: help, Buckets: buckets}), &errs)
	}
	gauge := func(name, help string) prometheus.Gauge {
		return register(reg, prometheus.NewGauge(prometheus.GaugeOpts{Name: "lapse_relay_" + name, Help: help}), &errs)
	}
	// From a loopback answer to the longest send that is allowed by default.
	seconds := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
	m := &metrics{
		sentMessages:  counter("sent_messages_total", "Timed messages that the broker stored."),
		sentOrders:    counter("sent_orders_total", "Orders in the timed messages that the broker stored."),
		hops:          counter("hops_total", "Orders sent for an instant before their deadline, since that lies beyond max_delay."),
		retried:       counter("retried_orders_total", "Orders whose send failed or has an unknown result, and that will be sent again."),
		refused:       counter("refused_messages_total", "Messages that the broker refused for what they are."),
		parked:        counter("parked_orders_total", "Orders parked since the broker refuses their message."),
		lost:          counter("lost_leases_total", "Rows that a mark did not match: the lease had ended, or the row was timed anew."),
		givenBack:     counter("given_back_orders_total", "Claimed orders given back without a send: at a stop, or since the lease came near its end."),
		purged:        counter("purged_rows_total", "Outbox rows deleted after their retention."),
		sendFailures:  counter("send_failures_total", "Sends that failed or have an unknown result; refused messages are not among them."),
		claimFailures: counter("claim_failures_total", "Claims that failed: the database is not available."),
		sendSeconds:   histogram("send_duration_seconds", "Duration of sends to the broker, whatever their result.", seconds...),
		claimSeconds:  histogram("claim_duration_seconds", "Duration of claims that gave rows.", seconds...),
		markSeconds:   histogram("mark_duration_seconds", "Duration of marks in the database.", seconds...),
		lag: histogram("send_lag_seconds", "From the instant from which an order could be sent to the stored message.",
			.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200),
		ordersPerMessage: histogram("orders_per_message", "Orders in one timed message.", 1, 2, 5, 10, 20, 50, 100, 200, 500),
		inHand:           gauge("in_hand_orders", "Claimed orders that are not marked yet."),
		paused:           gauge("paused", "Relays that are paused since sends fail or the sender is not ready."),
	}
	return m, errors.Join(errs...)
}

// register gives the collector that is registered already, if there is one: a process may run several relays.
func register[C prometheus.Collector](reg prometheus.Registerer, c C, errs *[]error) C {
	if reg == nil {
		return c
	}
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
