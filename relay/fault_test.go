package relay_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"

	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/relay"
)

func TestOrdersPlacedWhileTheBrokerIsDownAreDueAtTheirOriginalDeadlines(t *testing.T) {
	t.Parallel()
	// case PRD-4 (the broker is away altogether)
	b := setup(t)
	r := start(t, b.store, b.sender(t), relay.Config{})
	eventually(t, "the relay is ready", func() bool { return r.Ready() == nil })
	b.broker.Stop()

	want := map[string]time.Time{}
	for i := range 30 {
		o := b.place(t, orders.NewOrder{Timeout: 30*time.Minute + time.Duration(i)*37*time.Millisecond})
		want[orders.FormatID(o.ID)] = ceil(*o.DeadlineAt)
	}
	eventually(t, "the relay says why it is not ready", func() bool {
		err := r.Ready()
		return err != nil && strings.Contains(err.Error(), b.broker.Endpoint())
	}, func() any { return r.Ready() })
	if n := b.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE state = 'pending'"); n != 30 {
		t.Fatalf("%d rows are pending while the broker is down, want 30", n)
	}
	if err := b.broker.Resume(); err != nil {
		t.Fatal(err)
	}
	b.awaitState(t, "sent", 30)
	for _, m := range b.broker.Sent(topic) {
		e := expiryOf(t, m)
		for _, id := range e.Orders {
			if !e.Due.Equal(want[id]) {
				t.Errorf("order %s is due %s, want %s", id, e.Due, want[id])
			}
			delete(want, id)
		}
	}
	if len(want) > 0 {
		t.Errorf("not sent: %v", want)
	}
	eventually(t, "the relay is ready again", func() bool { return r.Ready() == nil }, func() any { return r.Ready() })
}

func TestFlowControlIsAnsweredByGrowingPauses(t *testing.T) {
	t.Parallel()
	// case PRD-4
	const refusals, low = 5, 50 * time.Millisecond
	b := setup(t)
	var mu sync.Mutex
	var calls []time.Time
	b.broker.Control(lapsetest.SendMessage, func(context.Context, any) (any, error, bool) {
		mu.Lock()
		defer mu.Unlock()
		calls = append(calls, time.Now())
		return nil, nil, false
	})
	b.broker.FailNext(lapsetest.SendMessage, refusals, v2.Code_TOO_MANY_REQUESTS)
	r := start(t, b.store, b.sender(t), relay.Config{BackoffMin: low})
	o := b.place(t, orders.NewOrder{})
	b.awaitState(t, "sent", 1)

	mu.Lock()
	defer mu.Unlock()
	if len(calls) != refusals+1 {
		t.Fatalf("%d sends, want %d refused and one more", len(calls), refusals)
	}
	for i := 1; i < len(calls); i++ {
		// Jitter takes at most a half; the upper bound depends on the machine.
		if gap, least := calls[i].Sub(calls[i-1]), low/2<<(i-1); gap < least {
			t.Errorf("send %d came %s after the one before, want at least %s", i+1, gap, least)
		}
	}
	sent := b.broker.Sent(topic)
	if len(sent) != 1 || !sent[0].DeliverAt.Equal(ceil(*o.DeadlineAt)) {
		t.Errorf("sent %d messages, the first due %s; want 1 due %s", len(sent), sent[0].DeliverAt, ceil(*o.DeadlineAt))
	}
	if row := b.row(t, o.ID); row.Attempts != refusals {
		t.Errorf("%d attempts are counted, want %d", row.Attempts, refusals)
	}
	if got := r.metric(t, "send_failures_total"); got != refusals {
		t.Errorf("%v failures are counted, want %d", got, refusals)
	}
}

func TestOutboxDrainsInOrderAfterAnOutage(t *testing.T) {
	t.Parallel()
	// case PRD-5
	b := setup(t)
	full := b.broker.FailNext(lapsetest.SendMessage, 1<<30, v2.Code_INTERNAL_SERVER_ERROR)
	cfg := relay.Config{Senders: 1, Linger: -1, BackoffMin: 20 * time.Millisecond, PauseMax: 200 * time.Millisecond}
	count, outage := 60, time.Duration(0) // until some sends have failed
	if os.Getenv("LAPSE_TEST_FULL") == "1" {
		count, outage, cfg.PauseMax = 1000, 10*time.Minute, 5*time.Second // the case, taken literally
	}
	r := start(t, b.store, b.sender(t), cfg)
	var placed []string
	for i := range count {
		o := b.place(t, orders.NewOrder{Timeout: 30*time.Minute + time.Duration(i)*100*time.Millisecond})
		placed = append(placed, orders.FormatID(o.ID))
	}
	eventually(t, "several sends have failed", func() bool { return r.metric(t, "send_failures_total") >= 5 })
	select {
	case <-time.After(outage):
	case <-t.Context().Done():
	}
	full()
	b.awaitState(t, "sent", int64(count))
	failures := b.db.Int(t, "SELECT SUM(attempts) FROM outbox")
	if failures > int64(count)/2 {
		t.Errorf("%d attempts were made while the broker was full, want few: the relay as a whole has to pause", failures)
	}
	// A row whose send failed waits for its own pause, and the message that finds the broker well again may be any; all the others leave in
	// the order of their placing.
	var untried []string
	for _, id := range b.sentIDs(t)[1:] {
		n, err := orders.ParseID(id)
		if err != nil {
			t.Fatal(err)
		}
		if b.row(t, n).Attempts == 0 {
			untried = append(untried, id)
		}
	}
	if len(untried) < count/2 {
		t.Errorf("only %d of %d rows were spared an attempt", len(untried), count)
	}
	if !slices.IsSortedFunc(untried, func(x, y string) int { return slices.Index(placed, x) - slices.Index(placed, y) }) {
		t.Errorf("sent %v, placed %v", untried, placed)
	}
}

func TestMessageWhoseAnswerIsLostIsSentAgainAndCancelsOnce(t *testing.T) {
	t.Parallel()
	// case PRD-3
	b := setup(t)
	b.broker.LoseNext(lapsetest.SendMessage, 1)
	o := b.place(t, orders.NewOrder{DeadlineAt: time.Now().Add(-time.Second)})
	start(t, b.store, b.sender(t), relay.Config{})
	b.awaitState(t, "sent", 1)
	id := orders.FormatID(o.ID)
	if got := b.sentIDs(t); !slices.Equal(got, []string{id, id}) {
		t.Fatalf("the broker has messages of %v, want two of %s", got, id)
	}
	if first, second := b.cancelDue(t, id), b.cancelDue(t, id); first[0] != orders.ResultCancelled || second[0] != orders.ResultAlreadyCancelled {
		t.Errorf("the two messages: %s, %s; want cancelled, already_cancelled", first[0], second[0])
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE order_id = ? AND kind = 'cancelled'", o.ID); n != 1 {
		t.Errorf("%d events of a cancel, want 1", n)
	}
}

// refuseOrder makes the broker refuse each message that carries the order, for good, and count those refusals.
func refuseOrder(b *bundle, id string) *atomic.Int64 {
	var n atomic.Int64
	b.broker.Control(lapsetest.SendMessage, func(_ context.Context, req any) (any, error, bool) {
		for _, m := range req.(*v2.SendMessageRequest).GetMessages() {
			if slices.Contains(m.GetSystemProperties().GetKeys(), id) {
				n.Add(1)
				return v2.Code_MESSAGE_PROPERTIES_TOO_LARGE, nil, true
			}
		}
		return nil, nil, false
	})
	return &n
}

func TestRefusedOrderIsParkedAloneAndTheOthersAreSent(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := time.Now().UTC().Truncate(time.Second).Add(time.Hour)
	var ids []string
	for range 20 {
		ids = append(ids, orders.FormatID(b.place(t, orders.NewOrder{DeadlineAt: at}).ID))
	}
	bad := ids[13]
	refusals := refuseOrder(b, bad)
	r := start(t, b.store, b.sender(t), relay.Config{})
	b.awaitState(t, "parked", 1)
	b.awaitState(t, "sent", 19)

	sent := b.sentIDs(t)
	slices.Sort(sent)
	want := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return id == bad })
	slices.Sort(want)
	if !slices.Equal(sent, want) {
		t.Errorf("sent %v, want all but %s, each once", sent, bad)
	}
	n, err := orders.ParseID(bad)
	if err != nil {
		t.Fatal(err)
	}
	if row := b.row(t, n); row.State != "parked" || !strings.Contains(row.LastError, "43101") {
		t.Errorf("the refused order's row is %+v, want it parked with the code", row)
	}
	if what := b.db.Text(t, "SELECT CONCAT(what, ' ', ref) FROM parked WHERE reason LIKE '%43101%'"); what != "order "+bad {
		t.Errorf("parked is %q, want order %s", what, bad)
	}
	// 20, 10, 5, 2 or 3, 1 or 2, 1: halving, not one by one.
	if got := refusals.Load(); got > 6 {
		t.Errorf("%d refusals, want at most 6", got)
	}
	for name, want := range map[string]float64{"parked_orders_total": 1, "refused_messages_total": float64(refusals.Load()), "retried_orders_total": 0, "send_failures_total": 0} {
		if got := r.metric(t, name); got != want {
			t.Errorf("metric %s is %v, want %v", name, got, want)
		}
	}
}

func TestRefusalDoesNotPauseTheRelay(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(t, orders.NewOrder{DeadlineAt: time.Now().Add(-time.Minute)})
	refuseOrder(b, orders.FormatID(o.ID))
	// A pause would outlast the test.
	r := start(t, b.store, b.sender(t), relay.Config{BackoffMin: time.Hour, BackoffMax: time.Hour, PauseMax: time.Hour})
	b.awaitState(t, "parked", 1)
	b.place(t, orders.NewOrder{DeadlineAt: time.Now().Add(-time.Minute)})
	b.awaitState(t, "sent", 1)
	if err := r.Ready(); err != nil {
		t.Errorf("not ready: %v", err)
	}
}

func TestFailureDuringHalvingGivesTheRestBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := time.Now().UTC().Truncate(time.Second).Add(time.Hour)
	for range 8 {
		b.place(t, orders.NewOrder{DeadlineAt: at})
	}
	// The whole is refused, its first half fails otherwise, so does the probe after it, and from then on everything is taken.
	var calls atomic.Int64
	b.broker.Control(lapsetest.SendMessage, func(context.Context, any) (any, error, bool) {
		switch calls.Add(1) {
		case 1:
			return v2.Code_MESSAGE_PROPERTIES_TOO_LARGE, nil, true
		case 2, 3:
			return v2.Code_TOO_MANY_REQUESTS, nil, true
		}
		return nil, nil, false
	})
	start(t, b.store, b.sender(t), relay.Config{BackoffMin: 20 * time.Millisecond})
	b.awaitState(t, "sent", 8)
	// The probe is one order: of the second half, or of the first.
	if spared := b.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE attempts = 0"); spared != 3 && spared != 4 {
		t.Errorf("%d orders had no attempt, want the second half, 4, less the probe", spared)
	}
	sent := b.sentIDs(t)
	slices.Sort(sent)
	if len(sent) != 8 || len(slices.Compact(sent)) != 8 {
		t.Errorf("sent %v, want each of 8 once", sent)
	}
}

func TestNothingIsClaimedWhileTheSenderIsNotReady(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var claims atomic.Int64
	store := &outbox{Outbox: b.store, claim: func(ctx context.Context, limit int, lease time.Duration) (orders.Claim, error) {
		claims.Add(1)
		return b.store.ClaimOutbox(ctx, limit, lease)
	}}
	s := &gatedSender{}
	s.setReady(errors.New("the topic does not exist"))
	r := start(t, store, s, relay.Config{BackoffMin: 5 * time.Millisecond})
	o := b.place(t, orders.NewOrder{})
	eventually(t, "the relay has asked the sender many times", func() bool { return s.asked.Load() >= 20 })
	if row := b.row(t, o.ID); claims.Load() != 0 || row.Leased || row.Attempts != 0 {
		t.Errorf("%d claims were made and the row is %+v; want none, and the row untouched", claims.Load(), row)
	}
	if err := r.Ready(); err == nil || !strings.Contains(err.Error(), "the topic does not exist") {
		t.Errorf("Ready says %v, want the sender's reason", err)
	}
	if r.metric(t, "paused") != 1 {
		t.Error("the gauge does not show the pause")
	}
	s.setReady(nil)
	b.awaitState(t, "sent", 1)
	eventually(t, "the relay is ready", func() bool { return r.Ready() == nil && r.metric(t, "paused") == 0 })
}

// gatedSender stores everything, and is ready when it is told to be.
type gatedSender struct {
	storedAtOnce
	asked atomic.Int64
	mu    sync.Mutex // guards err
	err   error
}

func (s *gatedSender) setReady(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

func (s *gatedSender) Ready() error {
	s.asked.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func TestRelayWaitsForTheDatabaseAndSaysSo(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var down atomic.Bool
	var claims atomic.Int64
	down.Store(true)
	store := &outbox{Outbox: b.store, claim: func(ctx context.Context, limit int, lease time.Duration) (orders.Claim, error) {
		claims.Add(1)
		if down.Load() {
			return orders.Claim{}, errors.New("claim outbox rows: connection refused")
		}
		return b.store.ClaimOutbox(ctx, limit, lease)
	}}
	r := start(t, store, &storedAtOnce{}, relay.Config{BackoffMin: 5 * time.Millisecond, PauseMax: 20 * time.Millisecond})
	b.place(t, orders.NewOrder{})
	eventually(t, "several claims failed", func() bool { return claims.Load() >= 5 })
	if err := r.Ready(); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("Ready says %v, want the database's error", err)
	}
	down.Store(false)
	b.awaitState(t, "sent", 1)
	eventually(t, "the relay is ready", func() bool { return r.Ready() == nil }, func() any { return r.Ready() })
	if n := r.metric(t, "claim_failures_total"); n < 5 {
		t.Errorf("%v failed claims are counted, want at least 5", n)
	}
}

func TestMarkThatFailsIsWrittenAgainInsteadOfTheMessageBeingSentAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var marks atomic.Int64
	store := &outbox{Outbox: b.store}
	store.markSent = func(ctx context.Context, token string, messages []orders.Sent) (int, error) {
		if n := marks.Add(1); n <= 3 {
			return 0, fmt.Errorf("mark %d: connection lost", n)
		}
		return b.store.MarkSent(ctx, token, messages)
	}
	s := &storedAtOnce{}
	r := start(t, store, s, relay.Config{BackoffMin: 5 * time.Millisecond})
	b.place(t, orders.NewOrder{})
	b.awaitState(t, "sent", 1)
	if n := s.messages.Load(); n != 1 || r.metric(t, "lost_leases_total") != 0 {
		t.Errorf("%d messages were sent and %v leases counted as lost, want 1 and 0", n, r.metric(t, "lost_leases_total"))
	}
}

func TestRelayWithNothingLeftToSendIsNotPausedForEver(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(t, orders.NewOrder{})
	refuse := senderFunc(func(context.Context, relay.Message) (string, error) { return "", errors.New("no route to the broker") })
	r := start(t, b.store, refuse, relay.Config{BackoffMin: 5 * time.Millisecond, BackoffMax: 50 * time.Millisecond})
	eventually(t, "the relay says why it is paused", func() bool { return strings.Contains(fmt.Sprint(r.Ready()), "no route") })
	// Another relay has sent it.
	b.db.Exec(t, "UPDATE outbox SET state = 'sent', lease_token = NULL WHERE order_id = ?", o.ID)
	eventually(t, "the relay is ready", func() bool { return r.Ready() == nil && r.metric(t, "paused") == 0 }, func() any { return r.Ready() })
}
