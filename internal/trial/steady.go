package trial

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/lapse-orders/lapse/consumer"
	"github.com/lapse-orders/lapse/orders"
)

// steadyTimeout is from placing to the deadline in Steady: more than the relay needs to send, and little enough that the bench is short.
const steadyTimeout = 5 * time.Second

// Steady measures the lateness of orders that fall due at a constant rate, and the time from the broker's tick to the return of the commit.
// For the latter the consumer runs in this process; the relay is a process of its own. Errors are those of [Demo].
func Steady(ctx context.Context, cfg BenchConfig) (BenchReport, error) {
	cfg.Orders = int(cfg.Rate * cfg.Duration.Seconds())
	return runBench(ctx, "steady", cfg, func(ctx context.Context, b *bench, r *BenchReport) error {
		for i := range cfg.Repeat {
			b.say("repetition %d of %d: %g orders/s for %s", i+1, cfg.Repeat, cfg.Rate, cfg.Duration)
			if err := b.stage(ctx, func(ctx context.Context, s *stage) error { return s.steady(ctx, r) }); err != nil {
				return err
			}
		}
		return nil
	})
}

// timedStore is a store that remembers when the transaction that cancelled an order had returned.
type timedStore struct {
	*orders.Store
	mu       sync.Mutex // guards returned
	returned map[string]time.Time
}

func (t *timedStore) CancelDue(ctx context.Context, ids []string) ([]orders.Outcome, error) {
	out, err := t.Store.CancelDue(ctx, ids)
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, o := range out {
		if o.Result == orders.ResultCancelled {
			t.returned[o.ID] = now
		}
	}
	return out, err
}

func (s *stage) steady(ctx context.Context, r *BenchReport) error {
	if _, err := s.start(ctx, "relay"); err != nil {
		return err
	}
	store, stop, err := s.consumeHere(ctx)
	if err != nil {
		return err
	}
	placed := time.Now()
	err = func() error {
		if err := s.waitReady(ctx); err != nil {
			return err
		}
		placed = time.Now()
		var all sync.WaitGroup
		defer all.Wait()
		failed := make(chan error, 1)
		for i := range s.cfg.Orders {
			if !waitUntil(ctx, placed.Add(time.Duration(float64(i)/s.cfg.Rate*float64(time.Second)))) {
				return ctx.Err()
			}
			all.Go(func() {
				o := benchOrder(i)
				o.Timeout = steadyTimeout
				if _, err := s.client.PlaceOrder(ctx, o); err != nil {
					select {
					case failed <- err:
					default: // one is enough
					}
				}
			})
			select {
			case err := <-failed:
				return fmt.Errorf("place orders: %w", err)
			default:
			}
		}
		_, err := s.awaitNone(ctx, steadyTimeout+time.Minute, 200*time.Millisecond, "orders are not cancelled", unpaidLeft)
		return err
	}()
	used := s.uses()
	if err := stop(); err != nil {
		return err
	}
	if err != nil {
		return err
	}
	_, late, err := s.cancelled(ctx)
	if err != nil {
		return err
	}
	if len(late) != s.cfg.Orders {
		return fmt.Errorf("%w: %d orders were placed and %d cancelled by timeout", ErrBroken, s.cfg.Orders, len(late))
	}
	lag, err := s.commitLag(ctx, store)
	if err != nil {
		return err
	}
	r.add("lateness_p99_ms", "cancelled_at - deadline_at", millisOf(percentile(late, 99))).aim(AtMost, 350)
	r.add("lateness_p50_ms", "cancelled_at - deadline_at", millisOf(percentile(late, 50)))
	r.add("lateness_max_ms", "cancelled_at - deadline_at", millisOf(percentile(late, 100)))
	r.add("commit_lag_p50_ms", "from the tick after the deadline to the return of the commit", millisOf(percentile(lag, 50)))
	r.add("commit_lag_p99_ms", "from the tick after the deadline to the return of the commit", millisOf(percentile(lag, 99)))
	r.add("commit_lag_max_ms", "from the tick after the deadline to the return of the commit", millisOf(percentile(lag, 100)))
	for _, name := range []string{"relay", "bench"} {
		if u, seen := used[name]; seen {
			r.add(name+"_peak_mb", "peak of the resident memory of "+name+map[string]string{"bench": ", which has the consumer in it"}[name], megabytes(u.peak))
		}
	}
	return s.audit(ctx)
}

// consumeHere runs a consumer in this process. Call stop when it is done.
func (s *stage) consumeHere(ctx context.Context) (_ *timedStore, stop func() error, err error) {
	store, err := orders.Open(s.dsn(s.cfg.DSNConsume), orders.Config{MaxOpenConns: connections})
	if err != nil {
		return nil, nil, err
	}
	source, err := consumer.Connect(s.cfg.RocketMQ, s.group, s.topic)
	if err != nil {
		_ = store.Close()
		return nil, nil, err
	}
	timed := &timedStore{Store: store, returned: make(map[string]time.Time, s.cfg.Orders)}
	c, err := consumer.New(timed, store, source, consumer.Config{BatchOrders: s.cfg.BatchOrders})
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	stop = func() error {
		cancel()
		err := <-ended
		closing, done := context.WithTimeout(context.WithoutCancel(ctx), endWithin)
		defer done()
		return errors.Join(err, source.Close(closing), store.Close())
	}
	if err != nil {
		ended <- nil
		return nil, nil, errors.Join(err, stop())
	}
	go func() { ended <- c.Run(ctx) }() // ends with stop
	ready, done := context.WithTimeout(ctx, readyWithin)
	defer done()
	for c.Ready() != nil {
		if !waitUntil(ready, time.Now().Add(20*time.Millisecond)) {
			return nil, nil, errors.Join(fmt.Errorf("what the consumer needs is %w: %w", ErrMissing, c.Ready()), stop())
		}
	}
	return timed, stop, nil
}

// commitLag gives, sorted, how long after the tick of its deadline each order's commit had returned.
func (s *stage) commitLag(ctx context.Context, store *timedStore) ([]time.Duration, error) {
	rows, err := ReadRows(ctx, s.reader, "bench", 0)
	if err != nil {
		return nil, err
	}
	store.mu.Lock()
	defer store.mu.Unlock()
	lag := make([]time.Duration, 0, len(rows))
	for id, r := range rows {
		at, known := store.returned[orders.FormatID(id)]
		if !known {
			return nil, fmt.Errorf("%w: order %d was cancelled by somebody else", ErrBroken, id)
		}
		lag = append(lag, at.Add(s.ahead).Sub(tickAfter(r.DeadlineAt, s.cfg.Tick)))
	}
	slices.Sort(lag)
	return lag, nil
}

// tickAfter gives the tick at which the broker fires for a deadline: the next multiple since the Unix epoch.
func tickAfter(t time.Time, tick time.Duration) time.Time {
	ms := tick.Milliseconds()
	return time.UnixMilli((t.UnixMilli() + ms - 1) / ms * ms).UTC()
}
