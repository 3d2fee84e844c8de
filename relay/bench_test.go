package relay_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/relay"
)

// storedAtOnce is a broker without any time of its own: what remains is the relay and the database.
type storedAtOnce struct{ messages, ids atomic.Int64 }

func (s *storedAtOnce) Ready() error { return nil }

func (s *storedAtOnce) Send(_ context.Context, m relay.Message) (string, error) {
	s.ids.Add(int64(len(m.Keys)))
	return fmt.Sprintf("%032d", s.messages.Add(1)), nil
}

// fillOutbox writes pending rows whose deadlines lie half an hour ahead, perTick of them in each tick.
func fillOutbox(tb testing.TB, db *mysqltest.DB, rows, perTick int) {
	tb.Helper()
	start := time.Now().UTC().Truncate(time.Second).Add(30 * time.Minute)
	const text = "2006-01-02 15:04:05.000"
	for from := 0; from < rows; from += 1000 {
		var q strings.Builder
		q.WriteString("INSERT INTO outbox (order_id, deliver_at, state, available_at, attempts) VALUES ")
		for i := from; i < min(from+1000, rows); i++ {
			if i > from {
				q.WriteByte(',')
			}
			fmt.Fprintf(&q, "(%d, '%s', 'pending', '%s', 0)", 1_000_000_000_000_000_000+i, start.Add(time.Duration(i/perTick)*100*time.Millisecond).Format(text),
				start.Add(-time.Hour+time.Duration(i)*time.Millisecond/10).Format(text))
		}
		if _, err := db.SQL.ExecContext(tb.Context(), q.String()); err != nil {
			tb.Fatal(err)
		}
	}
}

// BenchmarkDrain sends a backlog of 20,000 orders.
func BenchmarkDrain(b *testing.B) {
	const rows = 20_000
	for _, perTick := range []int{500, 50, 5} {
		b.Run(fmt.Sprintf("perTick=%d", perTick), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				db := mysqltest.New(b)
				fillOutbox(b, db, rows, perTick)
				store, err := orders.Open(db.DSN, orders.Config{})
				if err != nil {
					b.Fatal(err)
				}
				var left, marks atomic.Int64
				left.Store(rows)
				marked := make(chan struct{})
				// Counted here and not in the table, which a count would keep busy.
				counting := &outbox{Outbox: store, markSent: func(ctx context.Context, token string, messages []orders.Sent) (int, error) {
					marks.Add(1)
					n, err := store.MarkSent(ctx, token, messages)
					if left.Add(-int64(n)) == 0 {
						close(marked)
					}
					return n, err
				}}
				sender := &storedAtOnce{}
				r, err := relay.New(counting, sender, relay.Config{})
				if err != nil {
					b.Fatal(err)
				}
				ctx, cancel := context.WithCancel(b.Context())
				done := make(chan error, 1)
				b.StartTimer()
				go func() { done <- r.Run(ctx) }() // ended below
				<-marked
				b.StopTimer()
				cancel()
				if err := <-done; err != nil {
					b.Fatal(err)
				}
				if got := sender.ids.Load(); got != rows {
					b.Fatalf("%d orders sent, want %d", got, rows)
				}
				b.ReportMetric(float64(sender.messages.Load()), "messages")
				b.ReportMetric(float64(marks.Load()), "marks")
				_ = store.Close()
				b.StartTimer()
			}
			b.ReportMetric(rows*float64(b.N)/b.Elapsed().Seconds(), "orders/s")
		})
	}
}

// BenchmarkDrainEvents sends a backlog of 5,000 events, one message each: to a broker without any time of its own, and to the real one.
func BenchmarkDrainEvents(b *testing.B) {
	const rows = 5000
	for name, open := range map[string]func(b *testing.B) (relay.Sender, string){
		"no broker": func(*testing.B) (relay.Sender, string) { return &storedAtOnce{}, "order-events" },
		"real broker": func(b *testing.B) (relay.Sender, string) {
			broker := stacktest.Shared(b)
			topic := broker.NewTopic(b, admin.Normal)
			p, err := relay.OpenEventSender(relay.RocketMQ{Endpoints: broker.Endpoints, TLS: rmq.TLS{Disabled: true}}, topic)
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = p.Close(context.WithoutCancel(b.Context())) })
			for p.Ready() != nil {
				select {
				case <-b.Context().Done():
					b.Fatal(p.Ready())
				case <-time.After(10 * time.Millisecond):
				}
			}
			return p, topic
		},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				sender, topic := open(b)
				db := mysqltest.New(b)
				var q strings.Builder
				q.WriteString("INSERT INTO event_outbox (order_id, sequence, type, at, data, state, available_at, attempts) VALUES ")
				for i := range rows {
					if i > 0 {
						q.WriteByte(',')
					}
					fmt.Fprintf(&q, `(%d, 1, 'order.placed', '2026-01-01', '{"order_id":"1","channel":"web","items":[{"sku":"tea","quantity":1,"price":"495"}]}', 'pending', '2026-01-01', 0)`, i+1)
				}
				if _, err := db.SQL.ExecContext(b.Context(), q.String()); err != nil {
					b.Fatal(err)
				}
				store, err := orders.Open(db.DSN, orders.Config{})
				if err != nil {
					b.Fatal(err)
				}
				counting := &countedEvents{Store: store, left: rows, marked: make(chan struct{})}
				r, err := relay.NewEvents(counting, sender, relay.EventsConfig{Topic: topic})
				if err != nil {
					b.Fatal(err)
				}
				ctx, cancel := context.WithCancel(b.Context())
				done := make(chan error, 1)
				b.StartTimer()
				go func() { done <- r.Run(ctx) }() // ended below
				<-counting.marked
				b.StopTimer()
				cancel()
				if err := <-done; err != nil {
					b.Fatal(err)
				}
				if err := store.Close(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.ReportMetric(rows*float64(b.N)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

// countedEvents says when all are marked; there is one relay, so one mark at a time.
type countedEvents struct {
	*orders.Store
	left   int
	marked chan struct{}
}

func (c *countedEvents) MarkOutgoingSent(ctx context.Context, token string, sent []orders.SentOutgoing) (int, error) {
	n, err := c.Store.MarkOutgoingSent(ctx, token, sent)
	if c.left -= n; c.left == 0 {
		close(c.marked)
	}
	return n, err
}
