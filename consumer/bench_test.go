package consumer

import (
	"context"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// instant is a source of messages of 500 orders each, and a store in which all of them are cancelled at once: what remains is the
// consumer's own work.
type instant struct {
	body []byte
	left chan struct{} // one for each message
	done chan struct{} // one for each acknowledgement
}

func (s *instant) Receive(ctx context.Context, limit int, _ time.Duration) ([]*Delivery, error) {
	var out []*Delivery
	for len(out) < limit {
		select {
		case <-s.left:
			out = append(out, &Delivery{MessageID: "m", Body: s.body, Attempt: 1})
			continue
		default:
		}
		if len(out) > 0 {
			break
		}
		select {
		case <-s.left:
			out = append(out, &Delivery{MessageID: "m", Body: s.body, Attempt: 1})
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return out, nil
}

func (s *instant) Ack(context.Context, *Delivery) error {
	s.done <- struct{}{}
	return nil
}

func (s *instant) ChangeInvisible(context.Context, *Delivery, time.Duration) error { return nil }

func (s *instant) Ready() error { return nil }

func BenchmarkMessagesOf500Orders(b *testing.B) {
	ids := make([]string, 500)
	for i := range ids {
		ids[i] = orders.FormatID(orders.NewID())
	}
	source := &instant{body: expiry(b, ids...), left: make(chan struct{}, b.N), done: make(chan struct{}, b.N)}
	for range b.N {
		source.left <- struct{}{}
	}
	all := canceller(func(_ context.Context, ids []string) ([]orders.Outcome, error) {
		out := make([]orders.Outcome, len(ids))
		for i, id := range ids {
			out[i] = orders.Outcome{ID: id, Result: orders.ResultCancelled}
		}
		return out, nil
	})
	c, err := New(all, newFakeStore(), source, Config{})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	b.ReportAllocs()
	b.ResetTimer()
	go func() { ended <- c.Run(ctx) }()
	for range b.N {
		<-source.done
	}
	b.StopTimer()
	b.ReportMetric(float64(500*b.N)/b.Elapsed().Seconds(), "orders/s")
	cancel()
	if err := <-ended; err != nil {
		b.Fatal(err)
	}
}
