package relay_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/relay"
)

func TestStoppingRelayFinishesWhatIsUnderWayAndGivesTheRestBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 5 {
		b.place(t, orders.NewOrder{Timeout: time.Hour + time.Duration(i)*time.Second})
	}
	sending, wake := make(chan struct{}), make(chan struct{})
	var once sync.Once
	r := start(t, b.store, senderFunc(func(ctx context.Context, _ relay.Message) (string, error) {
		once.Do(func() { close(sending) })
		select {
		case <-wake:
			return "stored", nil
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}), relay.Config{Linger: -1, Lease: 4 * limit, SendTimeout: limit, StopTimeout: limit, Senders: 1})
	select {
	case <-sending:
	case <-time.After(limit):
		t.Fatal("nothing is sent")
	}
	eventually(t, "all are claimed", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE lease_token IS NOT NULL") == 5 })
	stopped := make(chan struct{})
	go func() { // ended by wake
		defer close(stopped)
		r.stop()
	}()
	// Others may have them at once, while one send is still under way.
	eventually(t, "four are given back", func() bool {
		return b.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE state = 'pending' AND lease_token IS NULL AND attempts = 0 AND available_at <= UTC_TIMESTAMP(3)") == 4
	})
	if err := r.Ready(); !errors.Is(err, relay.ErrStopped) {
		t.Errorf("Ready during the stop says %v, want ErrStopped", err)
	}
	close(wake)
	<-stopped
	if sent := b.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE state = 'sent' AND message_id = 'stored'"); sent != 1 {
		t.Errorf("%d rows are marked sent, want the one that was under way", sent)
	}
	if n := r.metric(t, "in_hand_orders"); n != 0 {
		t.Errorf("%v orders are in hand after the stop", n)
	}
	if err := r.Ready(); !errors.Is(err, relay.ErrStopped) {
		t.Errorf("Ready after the stop says %v, want ErrStopped", err)
	}
}

func TestRowsOfAClaimThatTheStopOvertookAreGivenBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.place(t, orders.NewOrder{})
	claiming, wake := make(chan struct{}), make(chan struct{})
	var once sync.Once
	store := &outbox{Outbox: b.store, claim: func(ctx context.Context, n int, lease time.Duration) (orders.Claim, error) {
		c, err := b.store.ClaimOutbox(ctx, n, lease)
		once.Do(func() {
			close(claiming)
			<-wake
		})
		return c, err
	}}
	s := &storedAtOnce{}
	r := start(t, store, s, relay.Config{Linger: -1})
	<-claiming
	stopped := make(chan struct{})
	go func() { // ended by wake
		defer close(stopped)
		r.stop()
	}()
	eventually(t, "the relay stops", func() bool { return errors.Is(r.Ready(), relay.ErrStopped) })
	close(wake)
	<-stopped
	if n := b.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE state = 'pending' AND lease_token IS NULL AND attempts = 0"); n != 1 || s.messages.Load() != 0 {
		t.Errorf("%d rows were given back and %d messages sent, want 1 and none", n, s.messages.Load())
	}
}

func TestStopIsBoundedWhenASendHangs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.place(t, orders.NewOrder{})
	sending := make(chan struct{}, 1)
	r := start(t, b.store, senderFunc(func(ctx context.Context, _ relay.Message) (string, error) {
		sending <- struct{}{}
		<-ctx.Done()
		return "", ctx.Err()
	}), relay.Config{Linger: -1, Lease: 4 * limit, SendTimeout: limit, StopTimeout: 50 * time.Millisecond})
	select {
	case <-sending:
	case <-time.After(limit):
		t.Fatal("nothing is sent")
	}
	before := time.Now()
	r.stop()
	if took := time.Since(before); took > limit/2 {
		t.Errorf("the stop took %s; it has 50 ms, the send would have taken %s", took, limit)
	}
}

func TestRelayRunsOnceAtATimeAndAgainAfterwards(t *testing.T) {
	t.Parallel()
	b := setup(t)
	s := &storedAtOnce{}
	r := start(t, b.store, s, relay.Config{})
	eventually(t, "the relay runs", func() bool { return r.Ready() == nil })
	if err := r.Run(t.Context()); !errors.Is(err, relay.ErrRunning) {
		t.Errorf("a second Run says %v, want ErrRunning", err)
	}
	r.stop()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }() // ended by cancel
	b.place(t, orders.NewOrder{})
	b.awaitState(t, "sent", 1)
	cancel()
	if err := <-done; err != nil {
		t.Errorf("run again: %v", err)
	}
}

func TestRelaysShareARegisterer(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	for range 2 {
		if _, err := relay.New(&outbox{}, &storedAtOnce{}, relay.Config{Registerer: reg}); err != nil {
			t.Fatal(err)
		}
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if len(families) < 10 {
		t.Errorf("%d metrics are registered", len(families))
	}
	taken := prometheus.NewRegistry()
	taken.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "lapse_relay_sent_orders_total"}))
	if _, err := relay.New(&outbox{}, &storedAtOnce{}, relay.Config{Registerer: taken}); err == nil {
		t.Error("a name that is taken by another kind of metric is no error")
	}
}
