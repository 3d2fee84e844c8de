package main

import (
	"context"
	"log/slog"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/lapse-orders/lapse/orders"
)

const (
	sampleEvery   = 5 * time.Second
	sampleTimeout = 3 * time.Second
	// A sample older than this is not shown: figures of a database that cannot be asked any more are no figures. Three samples.
	sampleStale = 3 * sampleEvery
)

func newRegistry() (*prometheus.Registry, error) {
	reg := prometheus.NewRegistry()
	b := readBuild()
	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: "lapse_build_info", Help: "1; the build is in the labels.",
		ConstLabels: prometheus.Labels{"version": b.Version, "revision": b.Revision, "goversion": runtime.Version()}})
	info.Set(1)
	for _, c := range []prometheus.Collector{
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		info,
	} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return reg, nil
}

// sampler shows what the database holds. The database is asked beside the scrapes and not in them: several Prometheus servers, or an
// impatient person, must not become a load on it, and a scrape must not wait for a database that is down.
type sampler struct {
	stats    func(context.Context) (orders.Stats, error)
	counters func() orders.Counters
	log      *slog.Logger
	now      func() time.Time

	mu     sync.Mutex
	last   orders.Stats // guarded by mu, as the next two
	at     time.Time
	failed float64
}

// newSampler shows the figures that the first of the stores reads, and the counters of all.
func newSampler(log *slog.Logger, stores ...*orders.Store) *sampler {
	counters := func() (sum orders.Counters) {
		for _, store := range stores {
			c := store.Counters()
			sum.Retries += c.Retries
			sum.StockMissing += c.StockMissing
			sum.Parked += c.Parked
		}
		return sum
	}
	return &sampler{stats: stores[0].Stats, counters: counters, log: log, now: time.Now}
}

// run samples until ctx ends.
func (s *sampler) run(ctx context.Context) {
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for {
		s.sample(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (s *sampler) sample(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, sampleTimeout)
	defer cancel()
	stats, err := s.stats(limited)
	if ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.failed++
		// At debug level: that the database is down is said once, by the readiness.
		s.log.Debug("the figures of the database cannot be read", "err", err)
		return
	}
	s.last, s.at = stats, s.now()
}

var (
	descOutbox    = prometheus.NewDesc("lapse_outbox_pending_rows", "Outbox rows that still have to be sent.", nil, nil)
	descOldest    = prometheus.NewDesc("lapse_outbox_oldest_seconds", "How long the oldest pending outbox row has been waiting to be sent, failed sends included; 0: none waits.", nil, nil)
	descEvents    = prometheus.NewDesc("lapse_events_pending_rows", "Events of orders that still have to be sent.", nil, nil)
	descEventAge  = prometheus.NewDesc("lapse_events_oldest_seconds", "How long the oldest pending event has been waiting to be sent, failed sends included; 0: none waits.", nil, nil)
	descOverdue   = prometheus.NewDesc("lapse_orders_overdue", "Unpaid orders past their deadline by more than a second, and not held.", nil, nil)
	descParked    = prometheus.NewDesc("lapse_parked_rows", "Messages, orders and payments set aside that nobody has dealt with.", nil, nil)
	descHistory   = prometheus.NewDesc("lapse_innodb_history_list_length", "Length of InnoDB's history list; absent where the account lacks the PROCESS right. It grows while an old snapshot is kept open, and each claim gets slower with it.", nil, nil)
	descSampled   = prometheus.NewDesc("lapse_database_sample_timestamp_seconds", "When the figures of the database were read; they are absent when that is long ago.", nil, nil)
	descUnsampled = prometheus.NewDesc("lapse_database_sample_errors_total", "Looks at the figures of the database that failed.", nil, nil)
	descRetries   = prometheus.NewDesc("lapse_transaction_retries_total", "Transactions started again after a deadlock, a lock wait or rows that changed.", nil, nil)
	descMissing   = prometheus.NewDesc("lapse_stock_missing_total", "Stock rows that were gone when an order's stock was to be moved.", nil, nil)
	descStored    = prometheus.NewDesc("lapse_parked_total", "Messages, orders and payments that this process has parked.", nil, nil)
)

// Describe implements prometheus.Collector.
func (s *sampler) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descOutbox, descOldest, descEvents, descEventAge, descOverdue, descParked, descHistory, descSampled, descUnsampled, descRetries, descMissing, descStored} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (s *sampler) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64) { ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v) }
	counter := func(d *prometheus.Desc, v float64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v)
	}
	c := s.counters()
	counter(descRetries, float64(c.Retries))
	counter(descMissing, float64(c.StockMissing))
	counter(descStored, float64(c.Parked))

	s.mu.Lock()
	last, at, failed := s.last, s.at, s.failed
	s.mu.Unlock()
	counter(descUnsampled, failed)
	if at.IsZero() {
		return
	}
	gauge(descSampled, float64(at.UnixMilli())/1000)
	if s.now().Sub(at) > sampleStale {
		return
	}
	gauge(descOutbox, float64(last.OutboxPending))
	gauge(descOldest, last.OutboxOldest.Seconds())
	gauge(descEvents, float64(last.EventsPending))
	gauge(descEventAge, last.EventsOldest.Seconds())
	gauge(descOverdue, float64(last.Overdue))
	gauge(descParked, float64(last.Parked))
	if last.HistoryList >= 0 {
		gauge(descHistory, float64(last.HistoryList))
	}
}
