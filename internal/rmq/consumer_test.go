package rmq

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"

	"github.com/lapse-orders/lapse/lapsetest"
)

func writeFile(t *testing.T, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func inject(t *testing.T, b *bundle, bodies ...string) {
	t.Helper()
	for _, body := range bodies {
		if _, err := b.Inject(b.topic, []byte(body), time.Now()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNothingToReceiveIsNotAnError(t *testing.T) {
	t.Parallel()
	b := setup(t, lapsetest.WithPollLimit(100*time.Millisecond))
	c := b.consumer(t)
	ds, err := c.Receive(t.Context(), 32, 10*time.Second)
	if ds != nil || err != nil {
		t.Errorf("received %v, %v, want nil, nil", ds, err)
	}
}

func TestReceiveRefusesWhatTheServerWould(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.consumer(t)
	for _, bad := range []struct {
		n         int
		invisible time.Duration
	}{{0, 10 * time.Second}, {-1, 10 * time.Second}, {1, 9 * time.Second}, {1, 13 * time.Hour}} {
		if _, err := c.Receive(t.Context(), bad.n, bad.invisible); err == nil {
			t.Errorf("receive(%d, %s) was accepted", bad.n, bad.invisible)
		}
	}
	if n := b.Calls(lapsetest.ReceiveMessage); n != 0 {
		t.Errorf("%d requests were made", n)
	}
}

func TestCancelledReceiveReturnsAtOnceAndLosesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.consumer(t)
	for round := range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		calls := b.Calls(lapsetest.ReceiveMessage)
		done := make(chan error, 1)
		go func() { _, err := c.Receive(ctx, 1, 10*time.Second); done <- err }()
		if round == 0 {
			eventually(t, 5*time.Second, "the poll is under way", func() bool { return b.Calls(lapsetest.ReceiveMessage) > calls })
		}
		cancel()
		select {
		case err := <-done:
			if !errors.Is(err, context.Canceled) {
				t.Errorf("receive: %v, want context.Canceled", err)
			}
		case <-time.After(300 * time.Millisecond):
			t.Fatal("the cancelled Receive has not returned")
		}
	}
	if n := b.Calls(lapsetest.ReceiveMessage); n != 1 {
		t.Errorf("five cancelled Receives made %d polls, want 1", n)
	}
	inject(t, b, "x") // goes to the poll that nobody waits for
	eventually(t, 5*time.Second, "the poll pops it", func() bool { return len(b.InFlight(b.group)) == 1 })
	ds, err := c.Receive(within(t, time.Second), 1, 10*time.Second)
	if err != nil || len(ds) != 1 || ds[0].Attempt != 1 {
		t.Fatalf("received %v, %v, want the message of the cancelled poll", ds, err)
	}
	if err := c.Ack(t.Context(), ds[0]); err != nil {
		t.Error(err)
	}
}

func TestAdoptedPollReturnsNoMoreThanAskedFor(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.consumer(t)
	inject(t, b, "a", "b", "c")
	ctx, cancel := context.WithCancel(t.Context())
	hold := make(chan struct{})
	b.Control(lapsetest.ReceiveMessage, func(ctx context.Context, _ any) (any, error, bool) {
		select {
		case <-hold:
		case <-ctx.Done():
		}
		return nil, nil, false
	})
	done := make(chan struct{})
	go func() { defer close(done); _, _ = c.Receive(ctx, 32, 10*time.Second) }()
	eventually(t, 5*time.Second, "the poll is under way", func() bool { return b.Calls(lapsetest.ReceiveMessage) == 1 })
	cancel()
	<-done
	got := make(map[string]bool)
	first := make(chan []*Delivery, 1)
	go func() { ds, _ := c.Receive(within(t, 5*time.Second), 1, 10*time.Second); first <- ds }()
	close(hold)
	ds := <-first
	for len(ds) > 0 && len(got) < 3 {
		if len(ds) != 1 {
			t.Fatalf("received %d messages, asked for 1", len(ds))
		}
		got[string(ds[0].Body)] = true
		if len(got) == 3 {
			break
		}
		var err error
		if ds, err = c.Receive(within(t, 5*time.Second), 1, 10*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	if len(got) != 3 {
		t.Errorf("received %v, want all three", got)
	}
	if n := b.Calls(lapsetest.ReceiveMessage); n > 3 {
		t.Errorf("%d polls", n)
	}
}

func TestCloseGivesBackWhatWasReceivedForNobody(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c, err := NewConsumer(b.config(t), b.group, b.topic)
	if err != nil {
		t.Fatal(err)
	}
	awaitReady(t, 10*time.Second, c.Ready)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _, _ = c.Receive(ctx, 1, time.Hour) }()
	eventually(t, 5*time.Second, "the poll is under way", func() bool { return b.Calls(lapsetest.ReceiveMessage) == 1 })
	cancel()
	<-done
	inject(t, b, "x")
	eventually(t, 5*time.Second, "the poll pops it", func() bool { return len(b.InFlight(b.group)) == 1 })
	if err := c.Close(within(t, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	d := receiveOne(t, b.consumer(t), 5*time.Second) // an hour later otherwise
	if string(d.Body) != "x" || d.Attempt != 2 {
		t.Errorf("received %+v", d)
	}
}

// case MQ-16
func TestCloseWaitsForThePollAndNoLonger(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c, err := NewConsumer(b.config(t), b.group, b.topic)
	if err != nil {
		t.Fatal(err)
	}
	awaitReady(t, 10*time.Second, c.Ready)
	done := make(chan error, 1)
	go func() { _, err := c.Receive(context.Background(), 1, 10*time.Second); done <- err }()
	eventually(t, 5*time.Second, "the poll is under way", func() bool { return b.Calls(lapsetest.ReceiveMessage) == 1 })
	start := time.Now()
	if err := c.Close(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > 9*time.Second {
		t.Errorf("close took %s", took)
	}
	if err := <-done; !errors.Is(err, ErrClosed) {
		t.Errorf("the Receive that was waiting: %v, want ErrClosed", err)
	}
	t.Logf("close during a long poll took %s", time.Since(start).Round(time.Millisecond))
}

func TestCloseInAHurryCutsThePollOff(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c, err := NewConsumer(b.config(t), b.group, b.topic)
	if err != nil {
		t.Fatal(err)
	}
	awaitReady(t, 10*time.Second, c.Ready)
	go func() { _, _ = c.Receive(context.Background(), 1, 10*time.Second) }() // ends with Close
	eventually(t, 5*time.Second, "the poll is under way", func() bool { return b.Calls(lapsetest.ReceiveMessage) == 1 })
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	if err := c.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("close: %v, want context.DeadlineExceeded", err)
	}
	if took := time.Since(start); took > 300*time.Millisecond {
		t.Errorf("close took %s", took)
	}
	if err := c.Close(within(t, 3*time.Second)); err != nil {
		t.Errorf("the rest took too long: %v", err)
	}
}

func TestMessageComesAgainAfterItsInvisibleTime(t *testing.T) {
	t.Parallel()
	clock := lapsetest.NewClock(time.Now())
	b := setup(t, lapsetest.WithClock(clock))
	c := b.consumer(t)
	if _, err := b.Inject(b.topic, []byte("x"), clock.Now()); err != nil {
		t.Fatal(err)
	}
	clock.Advance(time.Second)
	first := receiveOne(t, c, 5*time.Second)
	clock.Advance(11 * time.Second)
	second := receiveOne(t, c, 5*time.Second)
	if second.MessageID != first.MessageID || second.Attempt != 2 {
		t.Errorf("received %+v, want %s again", second, first.MessageID)
	}
	// The refused acknowledgement is seen.
	err := c.Ack(t.Context(), first)
	if !errors.Is(err, ErrHandleExpired) {
		t.Errorf("ack with the expired handle: %v, want ErrHandleExpired", err)
	}
	if code, _ := Code(err); code != 40013 {
		t.Errorf("code %d, want 40013", code)
	}
	if err := c.ChangeInvisible(t.Context(), first, time.Minute); !errors.Is(err, ErrHandleExpired) {
		t.Errorf("change with the expired handle: %v, want ErrHandleExpired", err)
	}
	if err := c.Ack(t.Context(), second); err != nil {
		t.Error(err)
	}
}

func TestRefusedAckIsAnError(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.consumer(t)
	inject(t, b, "x")
	d := receiveOne(t, c, 5*time.Second)
	b.FailNext(lapsetest.AckMessage, 1, v2.Code_INTERNAL_SERVER_ERROR)
	if code, _ := Code(c.Ack(t.Context(), d)); code != 50001 {
		t.Errorf("code %d, want 50001", code)
	}
	b.LoseNext(lapsetest.AckMessage, 1)
	if err := c.Ack(t.Context(), d); !IsUnavailable(err) {
		t.Errorf("ack with a lost answer: %v, want unavailable", err)
	}
	if err := c.Ack(t.Context(), d); err != nil { // twice is fine
		t.Error(err)
	}
}

func TestNewestHandleIsUsed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.consumer(t)
	inject(t, b, "x")
	d := receiveOne(t, c, 5*time.Second)
	for range 3 {
		if err := c.ChangeInvisible(t.Context(), d, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	// A refused or lost change leaves the handle as it was.
	b.FailNext(lapsetest.ChangeInvisibleDuration, 1, v2.Code_INTERNAL_SERVER_ERROR)
	if code, _ := Code(c.ChangeInvisible(t.Context(), d, time.Minute)); code != 50001 {
		t.Errorf("code %d, want 50001", code)
	}
	if err := c.Ack(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	// With a replaced handle the answer is OK as well, but the message stays.
	if n := len(b.InFlight(b.group)); n != 0 || len(b.Acked(b.group)) != 1 {
		t.Errorf("%d in flight, %d acknowledged, want 0 and 1", n, len(b.Acked(b.group)))
	}
}

func TestOneDeliveryMayBeRenewedAndAcknowledgedAtTheSameTime(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.consumer(t)
	inject(t, b, "x")
	d := receiveOne(t, c, 5*time.Second)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() { _ = c.ChangeInvisible(t.Context(), d, time.Minute) })
	}
	wg.Wait()
	if err := c.Ack(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if n := len(b.InFlight(b.group)); n != 0 {
		t.Errorf("%d in flight, want 0", n)
	}
}

func TestManyReceiversAtOnceGetEverything(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p, c := b.producer(t), b.consumer(t)
	const receivers, messages = 40, 200 // above the client's limit of 20
	ctx, stop := context.WithCancel(within(t, 20*time.Second))
	defer stop()
	var mu sync.Mutex
	got := make(map[string]int)
	var wg sync.WaitGroup
	for range receivers {
		wg.Go(func() {
			for ctx.Err() == nil {
				ds, err := c.Receive(ctx, 8, 10*time.Second)
				if err != nil && ctx.Err() == nil {
					t.Errorf("receive: %v", err)
					return
				}
				for _, d := range ds {
					if err := c.Ack(context.WithoutCancel(ctx), d); err != nil {
						t.Errorf("ack: %v", err)
					}
					mu.Lock()
					got[string(d.Body)]++
					if len(got) == messages {
						stop()
					}
					mu.Unlock()
				}
			}
		})
	}
	for i := range messages {
		if _, err := p.Send(t.Context(), timed(b.topic, strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
	if len(got) != messages {
		t.Errorf("received %d of %d messages", len(got), messages)
	}
}
