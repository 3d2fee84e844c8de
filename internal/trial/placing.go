package trial

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Placing measures what the outbox row costs a checkout: the same transaction with and without it, alternating order by order, with the
// broker up, down, and during a burst. An order without a deadline is the one without a row: nothing else of its transaction differs.
// Errors are those of [Demo].
//
// The broker that is down is an address where nothing listens, given to the relay: the servers are others' as well. A checkout does not
// know the broker, so that the relay is all through which it could be felt.
func Placing(ctx context.Context, cfg BenchConfig) (BenchReport, error) {
	return runBench(ctx, "place", cfg, placing)
}

func placing(ctx context.Context, b *bench, r *BenchReport) error {
	for i := range b.cfg.Repeat {
		b.say("repetition %d of %d: the broker is up and down by turns", i+1, b.cfg.Repeat)
		up, down, err := b.placeUpAndDown(ctx)
		if err != nil {
			return err
		}
		b.say("during a burst")
		busy, err := b.placeInBurst(ctx)
		if err != nil {
			return err
		}
		p99 := func(p placed) float64 { return millisOf(percentile(p.with, 99)) }
		without := func(p placed) float64 { return millisOf(percentile(p.without, 99)) }
		r.add("place_p99_ratio", "p99 of placing with the outbox row against without", p99(up)/without(up)).aim(AtMost, 1.3)
		r.add("place_down_p99_ratio", "p99 of placing with the broker down against up", p99(down)/p99(up)).aim(AtMost, 1)
		r.add("place_burst_p99_ratio", "p99 of placing during a burst of cancels against without one", p99(busy)/p99(up))
		r.add("place_p50_ms", "with the outbox row", millisOf(percentile(up.with, 50)))
		r.add("place_p99_ms", "with the outbox row", p99(up))
		r.add("place_without_p50_ms", "without the outbox row", millisOf(percentile(up.without, 50)))
		r.add("place_without_p99_ms", "without the outbox row", without(up))
		r.add("place_down_p99_ms", "with the outbox row, the broker down", p99(down))
		r.add("place_burst_p99_ms", fmt.Sprintf("with the outbox row, while %d orders are cancelled", b.cfg.Orders), p99(busy))
		r.add("place_burst_orders", "orders placed meanwhile, with the outbox row", float64(len(busy.with)))
	}
	return nil
}

// placed is how long placing took, sorted.
type placed struct{ with, without []time.Duration }

// turns is how often the broker is up and down in one repetition: what happens on the machine meanwhile meets both.
const turns = 5

// placeUpAndDown places so many orders of either kind with a relay that reaches its broker, and as many with one that does not, by turns.
func (b *bench) placeUpAndDown(ctx context.Context) (up, down placed, err error) {
	nowhere, err := freeAddr()
	if err != nil {
		return up, down, err
	}
	err = b.stage(ctx, func(ctx context.Context, s *stage) error {
		n := 2 * max(b.cfg.Orders/turns, 1)
		for range turns {
			got, err := s.placeBeside(ctx, n)
			if err != nil {
				return err
			}
			up.append(got)
			if got, err = s.placeBeside(ctx, n, "rocketmq.endpoints="+nowhere); err != nil {
				return err
			}
			down.append(got)
		}
		return nil
	})
	return up, down, err
}

// placeBeside places n orders while a relay runs, which is killed then.
func (s *stage) placeBeside(ctx context.Context, n int, relaySet ...string) (placed, error) {
	s.all = nil
	relay, err := s.start(ctx, "relay", relaySet...)
	if err != nil {
		return placed{}, err
	}
	if len(relaySet) == 0 {
		err = s.waitReady(ctx)
	} else {
		err = awaitListening(ctx, relay.addr) // it cannot become ready, and has to be running all the same
	}
	if err != nil {
		return placed{}, err
	}
	p, err := s.placeAlternating(ctx, n, nil)
	return p, errors.Join(err, s.crew.kill(relay))
}

func (p *placed) append(more placed) {
	p.with, p.without = append(p.with, more.with...), append(p.without, more.without...)
	slices.Sort(p.with)
	slices.Sort(p.without)
}

// awaitListening waits until somebody listens.
func awaitListening(ctx context.Context, addr string) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	var dialer net.Dialer
	for {
		conn, err := dialer.DialContext(ctx, "tcp", addr)
		if err == nil {
			return conn.Close()
		}
		if !waitUntil(ctx, time.Now().Add(20*time.Millisecond)) {
			return fmt.Errorf("the relay does not start: %w", err)
		}
	}
}

// placeInBurst places orders while a burst of as many is cancelled.
func (b *bench) placeInBurst(ctx context.Context) (p placed, err error) {
	for lead := b.lead(b.cfg.Orders, false); ; lead *= 2 {
		late := false
		err := b.stage(ctx, func(ctx context.Context, s *stage) error {
			first, inTime, err := s.prepareBurst(ctx, b.cfg.Orders, lead, burstSpread)
			if err != nil || !inTime {
				late = !inTime
				return err
			}
			if !waitUntil(ctx, first.Add(-s.ahead)) {
				return ctx.Err()
			}
			over := make(chan struct{})
			var ended error
			go func() { // ends with the burst, or with ctx
				defer close(over)
				// The ones that are placed meanwhile have their deadlines later.
				_, ended = s.awaitNone(ctx, 10*time.Minute, 20*time.Millisecond, "orders are not cancelled",
					"SELECT COUNT(*) FROM orders WHERE status = 'unpaid' AND deadline_at <= '"+first.Add(burstSpread).Format(layout)+"'")
			}()
			p, err = s.placeAlternating(ctx, 1_000_000, over)
			<-over
			return cmp.Or(err, ended)
		})
		if err != nil || !late {
			return p, err
		}
	}
}

// placeAlternating places n orders, or until over is closed, every second one with an outbox row.
func (s *stage) placeAlternating(ctx context.Context, n int, over <-chan struct{}) (placed, error) {
	var mu sync.Mutex // guards p
	var p placed
	var ended atomic.Bool
	begun := time.Now()
	err := inParallel(ctx, n, callers, func(ctx context.Context, i int) error {
		select {
		case <-over:
			ended.Store(true)
		default:
		}
		if ended.Load() {
			return nil
		}
		o := benchOrder(i)
		with := i%2 == 0
		if with {
			o.Timeout = time.Hour
		} else {
			o.NoDeadline = true
		}
		start := time.Now()
		_, err := s.client.PlaceOrder(ctx, o)
		took := time.Since(start)
		mu.Lock()
		defer mu.Unlock()
		if with {
			p.with = append(p.with, took)
		} else {
			p.without = append(p.without, took)
		}
		return err
	})
	if err != nil {
		return p, fmt.Errorf("place orders: %w", err)
	}
	s.placeRate = float64(len(p.with)+len(p.without)) / time.Since(begun).Seconds()
	slices.Sort(p.with)
	slices.Sort(p.without)
	return p, nil
}
