package trial

import (
	"context"
	"time"
)

// pendingTimeout is the deadline of the orders of Pending: longer than it takes to place a million.
const pendingTimeout = time.Hour

// Pending measures what many waiting orders cost: how long placing and sending them takes, how many messages they are, and the memory of
// relay and broker. Errors are those of [Demo].
func Pending(ctx context.Context, cfg BenchConfig) (BenchReport, error) {
	return runBench(ctx, "pending", cfg, func(ctx context.Context, b *bench, r *BenchReport) error {
		for range cfg.Repeat {
			if err := b.stage(ctx, func(ctx context.Context, s *stage) error { return s.pending(ctx, r) }); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *stage) pending(ctx context.Context, r *BenchReport) error {
	if _, err := s.start(ctx, "relay"); err != nil {
		return err
	}
	if err := s.waitReady(ctx); err != nil {
		return err
	}
	n := s.cfg.Orders
	before := s.uses()
	begun := time.Now()
	// The relay's memory is looked at when a fifth is placed, and at the end: it should be the same.
	early := map[string]usage{}
	const parts = 5
	for part := range parts {
		from, to := n*part/parts, n*(part+1)/parts
		err := inParallel(ctx, to-from, callers, func(ctx context.Context, i int) error {
			o := benchOrder(from + i)
			o.Timeout = pendingTimeout
			_, err := s.client.PlaceOrder(ctx, o)
			return err
		})
		if err != nil {
			return err
		}
		if part == 0 {
			early = s.uses()
		}
		s.say("placed %d of %d", to, n)
	}
	placing := time.Since(begun)
	if err := s.awaitSent(ctx, pendingTimeout/2); err != nil {
		return err
	}
	sent := time.Since(begun)
	after := s.uses()
	messages, err := s.count(ctx, "SELECT COUNT(DISTINCT message_id) FROM outbox")
	if err != nil {
		return err
	}
	r.add("placing_seconds", "until the last order was placed", placing.Seconds())
	r.add("placed_per_second", "orders placed a second, 16 callers", float64(n)/placing.Seconds())
	r.add("sent_after_placing_seconds", "from the last order placed to the last message sent", (sent - placing).Seconds())
	r.add("messages", "timed messages", float64(messages))
	r.add("orders_per_message", "orders in a message, on average", float64(n)/float64(messages))
	for _, name := range []string{"broker", "mysql"} {
		if _, seen := after[name]; seen {
			r.add(name+"_before_mb", "resident memory of "+name+" before", megabytes(before[name].now))
			r.add(name+"_after_mb", "resident memory of "+name+" with all orders pending", megabytes(after[name].now))
		}
	}
	if u, seen := after["relay"]; seen {
		r.add("relay_fifth_mb", "resident memory of the relay with a fifth of the orders", megabytes(early["relay"].now))
		r.add("relay_end_mb", "resident memory of the relay with all orders", megabytes(u.now))
		r.add("relay_peak_mb", "its peak", megabytes(u.peak))
	}
	return nil
}
