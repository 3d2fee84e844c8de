package relay_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/relay"
)

func TestTwoRelaysSendEveryRowOnce(t *testing.T) {
	t.Parallel()
	const rows = 3000
	b := setup(t)
	fillOutbox(t, b.db, rows, 7)
	var mu sync.Mutex
	sent := map[string]int{}
	both := make(chan struct{}) // closed when each of the two has a message in hand
	var first [2]sync.Once
	var arrived atomic.Int64
	for i := range 2 {
		store := openStore(t, b.db.DSN, orders.Config{})
		// What one may have in hand is a fraction of all rows, so that neither can finish before the other has begun.
		start(t, store, senderFunc(func(ctx context.Context, m relay.Message) (string, error) {
			first[i].Do(func() {
				if arrived.Add(1) == 2 {
					close(both)
				}
			})
			select {
			case <-both:
			case <-ctx.Done():
				return "", ctx.Err()
			}
			mu.Lock()
			defer mu.Unlock()
			for _, id := range m.Keys {
				sent[id]++
			}
			return fmt.Sprintf("relay %d", i), nil
		}), relay.Config{ClaimLimit: 100})
	}
	b.awaitState(t, "sent", rows)
	mu.Lock()
	defer mu.Unlock()
	if len(sent) != rows {
		t.Errorf("%d orders were sent, want %d", len(sent), rows)
	}
	for id, times := range sent {
		if times != 1 {
			t.Errorf("order %s was sent %d times", id, times)
		}
	}
	for i := range 2 {
		if n := b.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE message_id = ?", fmt.Sprintf("relay %d", i)); n == 0 {
			t.Errorf("relay %d sent nothing", i)
		}
	}
}

func TestRelayThatWasStoppedForLongerThanItsLeaseMarksNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(t, orders.NewOrder{})
	// The database's lease ends long before the relay thinks so, as for a process that was not scheduled for that time.
	store := &outbox{Outbox: b.store, claim: func(ctx context.Context, limit int, _ time.Duration) (orders.Claim, error) {
		return b.store.ClaimOutbox(ctx, limit, 300*time.Millisecond)
	}}
	sending, wake := make(chan struct{}), make(chan struct{})
	var once sync.Once
	slow := start(t, store, senderFunc(func(ctx context.Context, _ relay.Message) (string, error) {
		once.Do(func() { close(sending) })
		select {
		case <-wake:
			return "slow", nil
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}), relay.Config{Linger: -1, Lease: 4 * limit, SendTimeout: limit, MaxInHand: 1, ClaimLimit: 1})
	select {
	case <-sending:
	case <-time.After(limit):
		t.Fatal("the first relay sends nothing")
	}
	other := &storedAtOnce{}
	start(t, b.store, other, relay.Config{Linger: -1})
	b.awaitState(t, "sent", 1)
	close(wake)
	eventually(t, "the lost lease is counted", func() bool { return slow.metric(t, "lost_leases_total") == 1 })
	if row := b.row(t, o.ID); row.State != "sent" || row.MessageID == "slow" {
		t.Errorf("the row is %+v, want it as the second relay left it", row)
	}
}

func TestNoSendEndsNearTheEndOfItsLease(t *testing.T) {
	t.Parallel()
	const lease, timeout = 3 * time.Second, 400 * time.Millisecond
	b := setup(t)
	var ids []int64
	for i := range 12 {
		ids = append(ids, b.place(t, orders.NewOrder{Timeout: time.Hour + time.Duration(i)*time.Second}).ID)
	}
	var mu sync.Mutex
	until := map[string]time.Time{} // by the database's clock, which is this machine's
	store := &outbox{Outbox: b.store, claim: func(ctx context.Context, limit int, l time.Duration) (orders.Claim, error) {
		c, err := b.store.ClaimOutbox(ctx, limit, l)
		mu.Lock()
		defer mu.Unlock()
		for _, row := range c.Rows {
			until[orders.FormatID(row.OrderID)] = c.Until
		}
		return c, err
	}}
	// Every send takes as long as it may, and there is one sender: twelve sends of 400 ms do not fit into a lease of 3 s. They all succeed,
	// so the relay has no other reason than the lease to give rows back.
	var ended atomic.Int64
	r := start(t, store, senderFunc(func(ctx context.Context, m relay.Message) (string, error) {
		<-ctx.Done()
		mu.Lock()
		left := time.Until(until[m.Keys[0]])
		mu.Unlock()
		// A sixth of the lease is kept free; half of that is left to a busy machine.
		if left < lease/12 {
			t.Errorf("a send ended %s before its lease, want at least %s", left, lease/12)
		}
		ended.Add(1)
		return "stored", nil
	}), relay.Config{Linger: -1, Lease: lease, SendTimeout: timeout, Senders: 1})
	b.awaitState(t, "sent", 12)
	if n := r.metric(t, "given_back_orders_total"); n == 0 {
		t.Error("no row was given back, so nothing came near the end of its lease")
	}
	if n := ended.Load(); n != int64(len(ids)) {
		t.Errorf("%d sends for %d orders", n, len(ids))
	}
	if n := r.metric(t, "lost_leases_total"); n != 0 {
		t.Errorf("%v leases were lost", n)
	}
}

func TestDeadlineExtendedWhileTheRelayHoldsTheRowIsSentAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(t, orders.NewOrder{Timeout: time.Hour})
	sending, wake := make(chan struct{}), make(chan struct{})
	var once sync.Once
	var mu sync.Mutex
	var dues []time.Time
	r := start(t, b.store, senderFunc(func(ctx context.Context, m relay.Message) (string, error) {
		once.Do(func() {
			close(sending)
			select {
			case <-wake:
			case <-ctx.Done():
			}
		})
		mu.Lock()
		defer mu.Unlock()
		dues = append(dues, m.DeliverAt)
		return fmt.Sprint("message ", len(dues)), nil
	}), relay.Config{Linger: -1, Lease: 4 * limit, SendTimeout: limit, Senders: 1})
	select {
	case <-sending:
	case <-time.After(limit):
		t.Fatal("nothing is sent")
	}
	until := o.DeadlineAt.Add(30 * time.Minute)
	if x, err := b.store.ExtendDeadline(t.Context(), o.ID, until, "test"); err != nil || !x.Extended {
		t.Fatalf("extend: %+v, %v", x, err)
	}
	close(wake)
	b.awaitState(t, "sent", 1)
	mu.Lock()
	defer mu.Unlock()
	if len(dues) != 2 || !dues[0].Equal(ceil(*o.DeadlineAt)) || !dues[1].Equal(ceil(until)) {
		t.Errorf("messages are due %v, want %s and %s", dues, ceil(*o.DeadlineAt), ceil(until))
	}
	if row := b.row(t, o.ID); row.MessageID != "message 2" || !row.DeliverAt.Equal(ceil(until)) {
		t.Errorf("the row is %+v, want it marked with the second message", row)
	}
	if n := r.metric(t, "lost_leases_total"); n != 1 {
		t.Errorf("%v lost leases are counted, want 1: the first mark matched nothing", n)
	}
}

func TestRelayThatDiesBetweenSendAndMarkLeavesTheRowToTheNext(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(t, orders.NewOrder{DeadlineAt: time.Now().Add(-time.Second)})
	reached := make(chan struct{}, 16)
	store := &outbox{Outbox: b.store, markSent: func(ctx context.Context, _ string, _ []orders.Sent) (int, error) {
		reached <- struct{}{}
		<-ctx.Done()
		return 0, errors.New("the process is gone")
	}}
	sender := b.sender(t)
	dying := start(t, store, sender, relay.Config{Lease: 3 * time.Second, SendTimeout: time.Second, StopTimeout: 10 * time.Millisecond})
	select {
	case <-reached:
	case <-time.After(limit):
		t.Fatal("nothing was sent")
	}
	dying.stop()
	if row := b.row(t, o.ID); row.State != "pending" || !row.Leased {
		t.Fatalf("the row is %+v, want it pending under the dead relay's lease", row)
	}
	start(t, b.store, sender, relay.Config{})
	b.awaitState(t, "sent", 1)

	id := orders.FormatID(o.ID)
	messages := b.broker.Sent(topic)
	if len(messages) != 2 {
		t.Fatalf("%d messages, want 2", len(messages))
	}
	if gap := messages[1].StoredAt.Sub(messages[0].StoredAt); gap < 2*time.Second {
		t.Errorf("the second relay sent %s after the first, within its lease", gap)
	}
	if first, second := b.cancelDue(t, id), b.cancelDue(t, id); first[0] != orders.ResultCancelled || second[0] != orders.ResultAlreadyCancelled {
		t.Errorf("the two messages: %s, %s; want cancelled, already_cancelled", first[0], second[0])
	}
}

func TestRelayThatCannotSendLeavesUrgentOrdersToTheOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const rows = 200
	fillOutbox(t, b.db, rows, 1)
	b.db.Exec(t, "UPDATE outbox SET deliver_at = UTC_TIMESTAMP(3) + INTERVAL 3 SECOND")
	// Its lease outlasts the test, and its pauses grow so fast that a dozen probes fit into it: what the other one sends was given back.
	cut := senderFunc(func(context.Context, relay.Message) (string, error) { return "", errors.New("no route to the broker") })
	start(t, b.store, cut, relay.Config{Lease: 4 * limit, MaxOrdersPerMessage: 1, BackoffMin: 5 * time.Millisecond, PauseMax: time.Hour})
	eventually(t, "the first relay has failed", func() bool { return b.db.Int(t, "SELECT SUM(attempts) FROM outbox") > 0 })
	start(t, b.store, &storedAtOnce{}, relay.Config{})
	b.awaitState(t, "sent", rows)
}

func TestRowsInHandAreBounded(t *testing.T) {
	t.Parallel()
	const rows, most = 2000, 250
	b := setup(t)
	fillOutbox(t, b.db, rows, 3)
	var inHand atomic.Int64
	store := &outbox{Outbox: b.store}
	store.claim = func(ctx context.Context, limit int, lease time.Duration) (orders.Claim, error) {
		c, err := b.store.ClaimOutbox(ctx, limit, lease)
		if n := inHand.Add(int64(len(c.Rows))); n > most {
			t.Errorf("%d rows are in hand, the most is %d", n, most)
		}
		return c, err
	}
	store.markSent = func(ctx context.Context, token string, messages []orders.Sent) (int, error) {
		n, err := b.store.MarkSent(ctx, token, messages)
		if err == nil {
			for _, m := range messages {
				inHand.Add(-int64(len(m.IDs)))
			}
		}
		return n, err
	}
	// The linger outlasts the test: messages leave when no more can be claimed, and do not block the way.
	start(t, store, &storedAtOnce{}, relay.Config{ClaimLimit: 100, MaxInHand: most, Linger: time.Minute, Lease: time.Hour, Markers: 8})
	b.awaitState(t, "sent", rows)
}

func TestRelayThatLostItsConnectionLeavesUrgentOrdersToTheOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const rows = 20
	fillOutbox(t, b.db, rows, 1)
	b.db.Exec(t, "UPDATE outbox SET deliver_at = UTC_TIMESTAMP(3) + INTERVAL 3 SECOND")
	// One message is under way when the connection goes, and stays so; the lease outlasts the test.
	sending := make(chan struct{}, 1)
	cut := &cutSender{gatedSender: &gatedSender{}, sending: sending}
	start(t, b.store, cut, relay.Config{Lease: 4 * limit, SendTimeout: limit, StopTimeout: time.Millisecond, MaxOrdersPerMessage: 1, Senders: 1, BackoffMin: 5 * time.Millisecond})
	select {
	case <-sending:
	case <-time.After(limit):
		t.Fatal("nothing is sent")
	}
	cut.setReady(errors.New("connection lost"))
	start(t, b.store, &storedAtOnce{}, relay.Config{})
	b.awaitState(t, "sent", rows-1)
}

// cutSender hangs in every send.
type cutSender struct {
	*gatedSender
	sending chan struct{}
}

func (s *cutSender) Send(ctx context.Context, _ relay.Message) (string, error) {
	s.sending <- struct{}{}
	<-ctx.Done()
	return "", ctx.Err()
}
