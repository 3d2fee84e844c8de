package relay

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// instantOutbox has rows without end, and none of its verbs takes any time: what the real one hides by being slow shows here.
type instantOutbox struct{ id atomic.Int64 }

func (o *instantOutbox) ClaimOutbox(_ context.Context, limit int, lease time.Duration) (orders.Claim, error) {
	now := time.Now()
	c := orders.Claim{Token: fmt.Sprint(o.id.Add(1)), Now: now, Until: now.Add(lease)}
	for range limit {
		c.Rows = append(c.Rows, orders.Pending{OrderID: o.id.Add(1), DeliverAt: now.Add(-time.Hour)})
	}
	return c, nil
}

func (o *instantOutbox) MarkSent(_ context.Context, _ string, messages []orders.Sent) (int, error) {
	total := 0
	for _, m := range messages {
		total += len(m.IDs)
	}
	return total, nil
}

func (o *instantOutbox) MarkRetry(_ context.Context, _ string, ids []int64, _ time.Duration, _ error) (int, error) {
	return len(ids), nil
}

func (o *instantOutbox) MarkParked(_ context.Context, _ string, ids []int64, _ string) (int, error) {
	return len(ids), nil
}

func (o *instantOutbox) Unclaim(_ context.Context, _ string, ids []int64) (int, error) {
	return len(ids), nil
}

func (o *instantOutbox) PurgeOutbox(context.Context, int) (int, error) { return 0, nil }

// moodySender stores some, fails some, and is not ready some of the time. It tells when it has been called often enough.
type moodySender struct {
	n       atomic.Int64
	enough  int64
	reached chan struct{}
}

func (s *moodySender) call() int64 {
	n := s.n.Add(1)
	if n == s.enough {
		close(s.reached)
	}
	return n
}

func (s *moodySender) Send(context.Context, Message) (string, error) {
	if s.call()%7 == 0 {
		return "", errors.New("not this time")
	}
	return "stored", nil
}

func (s *moodySender) Ready() error {
	if s.call()%50 == 0 {
		return errors.New("not this time")
	}
	return nil
}

func TestRelayStopsAtAnyMoment(t *testing.T) {
	t.Parallel()
	for i := range 300 {
		s := &moodySender{enough: int64(i) + 1, reached: make(chan struct{})}
		r, err := New(&instantOutbox{}, s, Config{ClaimLimit: 10, MaxOrdersPerMessage: 3, BackoffMin: time.Millisecond, BackoffMax: time.Millisecond, PauseMax: time.Millisecond, StopTimeout: time.Duration(i%2)*time.Second + time.Nanosecond})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }() // ended by cancel
		<-s.reached
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("run %d does not stop", i)
		}
	}
}
