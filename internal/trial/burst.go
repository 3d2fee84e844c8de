package trial

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// Burst measures how fast orders are cancelled whose deadlines fall into one second, against two other ways in the same run: one message and one
// transaction for each order, as shops have it today, and the transactions alone, without messages. The three are interleaved.
//
// Errors are those of [Demo].
func Burst(ctx context.Context, cfg BenchConfig) (BenchReport, error) {
	return runBench(ctx, "burst", cfg, burst)
}

// trialShare is the part of the orders that a number of workers is tried with before the best is measured, and trialLeast the fewest.
const (
	trialShare = 10
	trialLeast = 200
)

// burstSpread is the second into which the deadlines fall, trialSpread its share for a trial: orders cannot be cancelled faster than they
// fall due. For the same reason a burst of a few thousand says little of what lapse can do.
const (
	burstSpread = time.Second
	trialSpread = burstSpread / trialShare
)

func burst(ctx context.Context, b *bench, r *BenchReport) error {
	n := b.cfg.Orders
	small := min(max(n/trialShare, trialLeast), n)
	// What the numbers of workers are tried with is part of the report, as figures of one value.
	best, err := bestOf(b.cfg.OneByOneWorkers, func(workers int) (float64, error) {
		got, err := b.burst(ctx, small, trialSpread, oneByOne(workers)...)
		b.say("one by one, %d workers: %.0f orders/s (%d orders)", workers, got.rate, small)
		r.add(fmt.Sprintf("one_by_one_%d_workers_trial", workers), fmt.Sprintf("orders/s, one message and one transaction an order, %d workers, %d orders", workers, small), got.rate)
		return got.rate, err
	})
	if err != nil {
		return err
	}
	quickest, err := bestOf(b.cfg.LimitWorkers, func(workers int) (float64, error) {
		rate, err := b.limit(ctx, small, workers)
		b.say("transactions alone, %d workers: %.0f orders/s (%d orders)", workers, rate, small)
		r.add(fmt.Sprintf("limit_%d_workers_trial", workers), fmt.Sprintf("orders/s, CancelDue alone, %d workers, %d orders", workers, small), rate)
		return rate, err
	})
	if err != nil {
		return err
	}
	for i := range b.cfg.Repeat {
		b.say("repetition %d of %d", i+1, b.cfg.Repeat)
		ours, err := b.burst(ctx, n, burstSpread)
		if err != nil {
			return err
		}
		b.say("lapse: %.0f orders/s in %d messages", ours.rate, ours.messages)
		one, err := b.burst(ctx, n, burstSpread, oneByOne(best)...)
		if err != nil {
			return err
		}
		b.say("one by one, %d workers: %.0f orders/s", best, one.rate)
		limit, err := b.limit(ctx, n, quickest)
		if err != nil {
			return err
		}
		b.say("transactions alone, %d workers: %.0f orders/s", quickest, limit)
		ours.report(r, one.rate, best, limit, quickest)
	}
	return nil
}

// bestOf tries numbers of workers and gives the one with the highest rate. One alone needs no trial.
func bestOf(candidates []int, try func(workers int) (rate float64, err error)) (best int, err error) {
	if len(candidates) == 1 {
		return candidates[0], nil
	}
	most := -1.0
	for _, workers := range candidates {
		rate, err := try(workers)
		if err != nil {
			return 0, err
		}
		if rate > most {
			best, most = workers, rate
		}
	}
	return best, nil
}

// oneByOne is the configuration that makes one message and one transaction of every order. The acknowledgements keep up with the workers.
func oneByOne(workers int) []string {
	return []string{"relay.max_orders_per_message=1", "consumer.batch_orders=1", fmt.Sprintf("consumer.workers=%d", workers), fmt.Sprintf("consumer.ackers=%d", max(workers, 8))}
}

// burstResult is one measured burst.
type burstResult struct {
	rate     float64 // orders a second, from the first to the last commit
	took     time.Duration
	late     []time.Duration // sorted
	messages int
	before   map[string]usage // at the first deadline
	after    map[string]usage // at the last commit
}

func (u burstResult) report(r *BenchReport, oneByOne float64, best int, limit float64, quickest int) {
	r.add("one_by_one_ratio", "lapse against one message and one transaction an order", u.rate/oneByOne).aim(AtLeast, 5)
	r.add("limit_ratio", "lapse against the transactions alone, without messages", u.rate/limit).aim(AtLeast, 0.6)
	r.add("orders_per_second", "lapse: cancelled from the first to the last commit", u.rate)
	r.add("one_by_one_orders_per_second", fmt.Sprintf("one message and one transaction an order, %d workers, the best", best), oneByOne)
	r.add("limit_orders_per_second", fmt.Sprintf("CancelDue alone, %d workers, the best", quickest), limit)
	r.add("lateness_p50_ms", "cancelled_at - deadline_at", millisOf(percentile(u.late, 50)))
	r.add("lateness_p99_ms", "cancelled_at - deadline_at", millisOf(percentile(u.late, 99)))
	r.add("lateness_max_ms", "cancelled_at - deadline_at", millisOf(percentile(u.late, 100)))
	r.add("messages", "timed messages of the burst", float64(u.messages))
	for _, name := range []string{"consume", "relay", "mysql", "broker", "bench"} {
		after, seen := u.after[name]
		before, seenBefore := u.before[name]
		if !seen || !seenBefore {
			continue
		}
		f := r.add(name+"_peak_mb", "peak of the resident memory of "+name+" since its start", megabytes(after.peak))
		if name == "consume" {
			f.aim(AtMost, 150)
		}
		r.add(name+"_cores", "CPU of "+name+" from the first deadline to the last commit: seconds a second", (after.cpu-before.cpu).Seconds()/u.took.Seconds())
	}
}

// burst measures one burst of n orders, with settings for relay and consumer. Placing and sending have to be done before the first
// deadline; where the machine was slower than expected, it is tried again with more time.
func (b *bench) burst(ctx context.Context, n int, spread time.Duration, set ...string) (burstResult, error) {
	var result burstResult
	for lead := b.lead(n, len(set) > 0); ; lead *= 2 {
		late := false
		err := b.stage(ctx, func(ctx context.Context, s *stage) error {
			first, inTime, err := s.prepareBurst(ctx, n, lead, spread, set...)
			if err != nil || !inTime {
				late = !inTime
				return err
			}
			result, err = s.measureBurst(ctx, n, first)
			return err
		})
		switch {
		case err != nil || !late:
			return result, err
		case lead > 10*time.Minute:
			return result, fmt.Errorf("%d orders cannot be placed and sent within %s on this machine; take fewer (--orders)", n, lead)
		}
		b.say("placing took longer than expected; again, with more time")
	}
}

// lead is how long before the first deadline placing begins: what it took before and half as much again, and what one message an order
// takes to send, at least 1,000 a second, if there is one.
func (b *bench) lead(n int, oneByOne bool) time.Duration {
	rate := b.placeRate
	if rate == 0 {
		rate = 500
	}
	d := 2*time.Second + time.Duration(1.5*float64(n)/rate*float64(time.Second))
	if oneByOne {
		d += time.Duration(n) * time.Millisecond
	}
	return d
}

// prepareBurst starts a relay and a consumer, and places n orders; it gives the first deadline, and whether everything was sent before it.
func (s *stage) prepareBurst(ctx context.Context, n int, lead, spread time.Duration, set ...string) (first time.Time, inTime bool, err error) {
	for _, what := range []string{"relay", "consume"} {
		if _, err := s.start(ctx, what, set...); err != nil {
			return first, false, err
		}
	}
	if err := s.waitReady(ctx); err != nil {
		return first, false, err
	}
	// At a whole second: every burst meets the ticks alike.
	first = s.now().Add(lead).Truncate(time.Second).Add(time.Second)
	if err := s.place(ctx, n, first, spread); err != nil {
		return first, false, err
	}
	if err := s.awaitSent(ctx, time.Until(first)+time.Minute); err != nil {
		return first, false, err
	}
	return first, s.now().Before(first), nil
}

// unpaidLeft counts what is not cancelled yet, by the index.
const unpaidLeft = "SELECT COUNT(*) FROM orders WHERE status = 'unpaid'"

func (s *stage) measureBurst(ctx context.Context, n int, first time.Time) (u burstResult, err error) {
	if !waitUntil(ctx, first.Add(-s.ahead)) {
		return u, ctx.Err()
	}
	u.before = s.uses()
	// The pause is a hundredth of what a burst takes, which is then too long by up to that much, never too short.
	last, err := s.awaitNone(ctx, 10*time.Minute, 20*time.Millisecond, "orders are not cancelled", unpaidLeft)
	if err != nil {
		return u, err
	}
	u.after = s.uses()
	begun, late, err := s.cancelled(ctx)
	if err != nil {
		return u, err
	}
	if len(late) != n {
		return u, fmt.Errorf("%w: %d orders were placed and %d cancelled by timeout", ErrBroken, n, len(late))
	}
	u.late, u.took = late, last.Sub(begun)
	u.rate = float64(n) / u.took.Seconds()
	if u.messages, err = s.count(ctx, "SELECT COUNT(DISTINCT message_id) FROM outbox"); err != nil {
		return u, err
	}
	return u, s.audit(ctx)
}

// cancelled gives the first instant of a cancel, and the sorted lateness of all of them.
func (s *stage) cancelled(ctx context.Context) (first time.Time, late []time.Duration, err error) {
	rows, err := ReadRows(ctx, s.reader, "bench", 0)
	if err != nil {
		return first, nil, err
	}
	for _, r := range rows {
		if !r.byTimeout() {
			continue
		}
		late = append(late, r.late())
		if first.IsZero() || r.CancelledAt.Before(first) {
			first = r.CancelledAt
		}
	}
	slices.Sort(late)
	return first, late, nil
}

// audit checks the invariants: a fast cancel that is wrong is no cancel.
func (s *stage) audit(ctx context.Context) error { return s.auditFrom(ctx, 0) }

// auditFrom leaves out the orders with smaller ids than min.
func (s *stage) auditFrom(ctx context.Context, min int64) error {
	checks, err := orders.Audit(ctx, s.reader, orders.AuditOptions{Grace: time.Millisecond, Limit: 1, MinID: min})
	if err != nil {
		return err
	}
	for _, c := range checks {
		if c.Violations > 0 {
			return fmt.Errorf("%w: %s (%s): %d violations", ErrBroken, c.Invariant, c.Name, c.Violations)
		}
	}
	return nil
}

// limit measures the cancel alone: n orders that are due, in batches as the consumer makes them, without any message. They fall due as long
// after they were placed as those of a burst: the database is still writing what was placed, and the burst finds most of that done.
func (b *bench) limit(ctx context.Context, n, workers int) (rate float64, err error) {
	err = b.stage(ctx, func(ctx context.Context, s *stage) error {
		first := s.now().Add(b.lead(n, false)).Truncate(time.Second).Add(time.Second)
		if err := s.place(ctx, n, first, burstSpread); err != nil {
			return err
		}
		var ids []string
		rows, err := ReadRows(ctx, s.reader, "bench", 0)
		if err != nil {
			return err
		}
		sorted := make([]Row, 0, len(rows))
		for _, r := range rows {
			sorted = append(sorted, r)
		}
		slices.SortFunc(sorted, func(x, y Row) int { return x.DeadlineAt.Compare(y.DeadlineAt) })
		for _, r := range sorted {
			ids = append(ids, orders.FormatID(r.ID))
		}
		store, err := orders.Open(s.dsn(b.cfg.DSNConsume), orders.Config{MaxOpenConns: connections})
		if err != nil {
			return err
		}
		defer store.Close() //nolint:errcheck // nothing is under way any more
		if err := warm(ctx, store, workers); err != nil {
			return err
		}
		batches := slices.Collect(slices.Chunk(ids, b.cfg.BatchOrders))
		if !waitUntil(ctx, first.Add(burstSpread+100*time.Millisecond-s.ahead)) {
			return ctx.Err()
		}
		begun := time.Now()
		err = inParallel(ctx, len(batches), workers, func(ctx context.Context, i int) error {
			outcomes, err := store.CancelDue(ctx, batches[i])
			for _, o := range outcomes {
				if o.Result != orders.ResultCancelled {
					return fmt.Errorf("%w: order %s, which is due, was not cancelled: %s", ErrBroken, o.ID, o.Result)
				}
			}
			return err
		})
		rate = float64(n) / time.Since(begun).Seconds()
		return err
	})
	return rate, err
}

// warm opens connections, which the consumer has when a burst comes.
func warm(ctx context.Context, store *orders.Store, n int) error {
	var all sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		all.Go(func() {
			_, err := store.DB().ExecContext(ctx, "DO SLEEP(0.05)") // so long that each needs a connection of its own
			errs[i] = err
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return fmt.Errorf("open %d connections: %w", n, err)
		}
	}
	return nil
}
