package main

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/orders"
)

// retention deletes what has been kept for long enough. The relay runs it, since its account may delete and that of the API may not.
type retention struct {
	store    *orders.Store
	interval time.Duration
	batch    int
	log      *slog.Logger
	purged   *prometheus.CounterVec
}

func newRetention(s *service) (*retention, error) {
	r := &retention{store: s.store, interval: s.cfg.Retention.Interval, batch: s.cfg.Retention.Batch, log: s.log,
		purged: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_retention_purged_total", Help: "Rows deleted after their retention, by what: orders (each with all that belongs to it), events, parked, runs."}, []string{"what"}),
	}
	for _, what := range []string{"orders", "events", "parked", "runs"} {
		r.purged.WithLabelValues(what)
	}
	return r, s.reg.Register(r.purged)
}

// run makes a round in every interval, until ctx ends. Not at the start and with jitter: several relays would look at the same rows.
func (r *retention) run(ctx context.Context) error {
	for pause(ctx, r.interval/2+rand.N(r.interval/2+1)) { //nolint:gosec // jitter needs no secrecy
		r.round(ctx)
	}
	return nil
}

// round deletes everything that may go.
func (r *retention) round(ctx context.Context) {
	var from orders.PurgeCursor
	for _, p := range []struct {
		what  string
		purge func(context.Context) (n int, ended bool, err error)
	}{
		{"events", r.until(r.store.PurgeOutgoing)},
		{"parked", r.until(r.store.PurgeParked)},
		{"runs", r.until(r.store.PurgeRuns)},
		{"orders", func(ctx context.Context) (n int, ended bool, err error) {
			n, from, ended, err = r.store.PurgeOrders(ctx, from, r.batch)
			return n, ended, err
		}},
	} {
		total := 0
		for ended := false; !ended; {
			start := time.Now()
			n, end, err := p.purge(ctx)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				r.log.Warn("old rows were not purged, will be tried again", "what", p.what, "err", err)
				break
			}
			total += n
			r.purged.WithLabelValues(p.what).Add(float64(n))
			// A rest as long as the work: whoever pays has the database for himself at least half of the time.
			if ended = end; !ended && !pause(ctx, time.Since(start)) {
				return
			}
		}
		if total > 0 {
			r.log.Info("purged old rows", "what", p.what, "rows", total)
		}
	}
}

// until ends at the first batch that is not full.
func (r *retention) until(purge func(context.Context, int) (int, error)) func(context.Context) (int, bool, error) {
	return func(ctx context.Context) (int, bool, error) {
		n, err := purge(ctx, r.batch)
		return n, n < r.batch, err
	}
}

// pause reports whether d has passed before ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
