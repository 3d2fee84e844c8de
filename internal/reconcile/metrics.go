package reconcile

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/orders"
)

// How a run ended, as a label.
const (
	resultDone        = "done"
	resultFailed      = "failed"
	resultReplica     = "replica"     // the replica could not be relied on
	resultSkipped     = "skipped"     // another run was at work
	resultInterrupted = "interrupted" // told to stop; the next one resumes it
)

type metrics struct {
	runs, outcomes, missed    *prometheus.CounterVec // result, result, why
	cancelled, parked         prometheus.Counter
	lag, paused, done, length prometheus.Gauge
	violations                *prometheus.GaugeVec // check
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	var errs []error
	m := &metrics{
		runs:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_reconcile_runs_total", Help: "Runs of reconcile by how they ended."}, []string{"result"}),
		outcomes:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_reconcile_outcomes_total", Help: "Orders that reconcile found overdue on the replica, by what became of them on the primary."}, []string{"result"}),
		missed:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_reconcile_missed_total", Help: "Orders that reconcile cancelled, by the reason why no message did."}, []string{"why"}),
		cancelled:  prometheus.NewCounter(prometheus.CounterOpts{Name: "lapse_reconcile_cancelled_total", Help: "Orders that reconcile had to cancel: each is one that the message path missed."}),
		parked:     prometheus.NewCounter(prometheus.CounterOpts{Name: "lapse_reconcile_parked_total", Help: "Orders that could not be cancelled and were parked by reconcile."}),
		lag:        prometheus.NewGauge(prometheus.GaugeOpts{Name: "lapse_reconcile_replica_lag_seconds", Help: "How far the replica was behind when a run last looked."}),
		paused:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "lapse_reconcile_paused", Help: "1 while a run waits because of lock waits on the primary or the replica's lag."}),
		done:       prometheus.NewGauge(prometheus.GaugeOpts{Name: "lapse_reconcile_last_success_timestamp_seconds", Help: "When a full run was last done by this process; 0: none yet."}),
		length:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "lapse_reconcile_last_duration_seconds", Help: "How long the last run took."}),
		violations: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "lapse_reconcile_audit_violations", Help: "Rows that broke an invariant in the last audit, by check."}, []string{"check"}),
	}
	// From the start, so that a rate is right from the first one on.
	for _, result := range []string{resultDone, resultFailed, resultReplica, resultSkipped, resultInterrupted} {
		m.runs.WithLabelValues(result)
	}
	for _, result := range orders.Results() {
		m.outcomes.WithLabelValues(string(result))
	}
	for _, why := range orders.AllMissed() {
		m.missed.WithLabelValues(string(why))
	}
	if reg != nil {
		for _, c := range []prometheus.Collector{m.runs, m.outcomes, m.missed, m.cancelled, m.parked, m.lag, m.paused, m.done, m.length, m.violations} {
			errs = append(errs, reg.Register(c))
		}
	}
	return m, errors.Join(errs...)
}

// observe counts and logs how a run ended.
func (u *run) observe(rep Report, err error) {
	log := u.log.With("run", rep.RunID)
	u.metrics.length.Set(rep.Duration.Seconds())
	for _, c := range rep.Audit {
		u.metrics.violations.WithLabelValues(c.Name).Set(float64(c.Violations))
		if c.Violations > 0 {
			log.Error("an invariant is broken", "check", c.Name, "says", c.Says, "violations", c.Violations, "first", c.Examples[0])
		}
	}
	attrs := []any{"kind", rep.Kind, "scanned", rep.Scanned, "cancelled", rep.Cancelled, "already_paid", rep.AlreadyPaid, "held", rep.Held, "parked", rep.Parked,
		"others", rep.Others, "duration", rep.Duration, "lag", rep.Lag}
	if errors.Is(err, ErrAudit) {
		if !errors.Is(err, context.Canceled) {
			log.Error("the audit failed; the run itself is done", "err", err)
		}
		err = nil
	}
	switch {
	case err == nil:
		u.metrics.runs.WithLabelValues(resultDone).Inc()
		if rep.Kind == kindFull {
			u.metrics.done.SetToCurrentTime()
		}
		if rep.Cancelled > 0 {
			log.Warn("reconcile had to cancel orders: the message path missed them", append(attrs,
				"never_sent", rep.Missed.NeverSent, "sent_not_received", rep.Missed.SentNotReceived, "were_parked", rep.Missed.Parked)...)
			return
		}
		log.Info("reconcile is done", attrs...)
	case errors.Is(err, ErrReplica):
		u.metrics.runs.WithLabelValues(resultReplica).Inc()
		log.Error("reconcile failed", append(attrs, "err", err)...)
	case errors.Is(err, context.Canceled):
		u.metrics.runs.WithLabelValues(resultInterrupted).Inc()
		log.Info("reconcile was told to stop; the next run goes on from here", attrs...)
	default:
		u.metrics.runs.WithLabelValues(resultFailed).Inc()
		log.Error("reconcile failed", append(attrs, "err", err)...)
	}
}
