// The consumer over the wire: the real client against the embedded broker, and a real MySQL.

package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"

	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/orders"
)

// canceller is a Canceller made of a function.
type canceller func(ctx context.Context, ids []string) ([]orders.Outcome, error)

func (f canceller) CancelDue(ctx context.Context, ids []string) ([]orders.Outcome, error) {
	return f(ctx, ids)
}

// case MQ-1
func TestDuplicatesInAnyOrderCancelEachOrderOnce(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	ids := w.place(t, 100, overdue())
	r := startReplica(t, w.store, w.options(Config{})).ready(t)
	var messages []string
	for _, id := range ids {
		messages = append(messages, w.expire(t, id))
	}
	var again []string
	for _, m := range messages {
		for range rand.IntN(3) {
			again = append(again, m)
		}
	}
	rand.Shuffle(len(again), func(i, j int) { again[i], again[j] = again[j], again[i] })
	for _, m := range again {
		if w.broker.Duplicate(wireTopic, m) != 1 {
			t.Fatalf("message %s was not duplicated", m)
		}
	}
	until(t, "everything is acknowledged", func() bool { return len(w.broker.Acked(wireGroup)) == len(messages)+len(again) })
	w.wantCancelledOnce(t, ids)
	if n := metric(t, r.reg, "lapse_outcomes_total", "cancelled"); n != 100 {
		t.Errorf("%v outcomes of cancelled, want 100", n)
	}
	if n := metric(t, r.reg, "lapse_outcomes_total", "already_cancelled"); int(n) != len(again) {
		t.Errorf("%v outcomes of already cancelled, want %d", n, len(again))
	}
}

// case MQ-2
func TestOneMessageInThreeConsumersAtOnceReleasesOnce(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	ids := w.place(t, 3, overdue())
	m := w.expire(t, ids...)
	w.broker.Duplicate(wireTopic, m)
	w.broker.Duplicate(wireTopic, m)

	// Each waits until all three are about to cancel; in its one worker, so it cannot have taken two.
	var met sync.WaitGroup
	met.Add(3)
	var sum atomic.Int64
	for range 3 {
		store := openStore(t, w.db.DSN)
		var first sync.Once
		o := w.options(Config{Workers: 1, MaxInHand: 1, Receivers: 1})
		o.canceller = canceller(func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
			first.Do(met.Done)
			met.Wait()
			out, err := store.CancelDue(ctx, ids)
			for _, o := range out {
				if o.Result == orders.ResultCancelled {
					sum.Add(1)
				}
			}
			return out, err
		})
		startReplica(t, store, o)
	}
	until(t, "there are three acknowledgements", func() bool { return w.acked(m) == 3 })
	w.wantCancelledOnce(t, ids)
	if sum.Load() != 3 {
		t.Errorf("%d outcomes of cancelled in all, want 3", sum.Load())
	}
}

// case MQ-3
func TestWhatFailsAlwaysIsTriedABoundedNumberOfTimesWithGrowingPauses(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	id := w.place(t, 1, overdue())[0]
	var mu sync.Mutex
	var at []time.Time
	o := w.options(Config{BackoffMin: 40 * time.Millisecond, BackoffMax: time.Minute, GiveUpAfter: time.Second})
	o.canceller = canceller(func(context.Context, []string) ([]orders.Outcome, error) {
		mu.Lock()
		defer mu.Unlock()
		at = append(at, time.Now())
		return nil, errOwn
	})
	m := w.expire(t, id)
	r := startReplica(t, w.store, o)
	until(t, "the message is acknowledged", func() bool { return w.acked(m) == 1 })
	r.stop()

	for i := range len(at) - 1 {
		pause, least := at[i+1].Sub(at[i]), (20*time.Millisecond)<<i // half of the backoff is jitter
		if pause < least {
			t.Errorf("pause %d is %s, want at least %s", i+1, pause, least)
		}
	}
	// 20+40+…: the sixth pause at the latest ends after a second.
	if n := len(at); n < maxFailures || n > 7 {
		t.Errorf("tried %d times, want %d to 7", n, maxFailures)
	}
	if w.parked(t, orders.ParkedOrder, id) != 1 {
		t.Error("the order is not parked")
	}
	if n := len(w.broker.Sent("")); n != 1 {
		t.Errorf("%d messages were stored, want 1: no copies", n)
	}
	if n := r.source.maxAttempt.Load(); n != 1 {
		t.Errorf("delivered %d times, want once", n)
	}
}

// case MQ-12
func TestUnreadableBodiesOfEveryKindAreParkedAndTheNextMessageIsDoneWithinASecond(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	r := startReplica(t, w.store, w.options(Config{})).ready(t)
	bodies := unreadable()
	bodies["id is a JSON number"] = []byte(`{"v":1,"due":"2026-11-30T15:00:01.000Z","orders":[9223372036854775808]}`)
	good := w.place(t, len(bodies), overdue())
	for name, body := range bodies {
		bad := w.send(t, body)
		begun := time.Now()
		last := w.expire(t, good[0])
		until(t, "both are acknowledged: "+name, func() bool { return w.acked(bad) == 1 && w.acked(last) == 1 })
		if took := time.Since(begun); took > time.Second {
			t.Errorf("%s: the good message behind it took %s, want at most 1 s", name, took)
		}
		if w.cancelled(t, good[:1]) != 1 {
			t.Errorf("%s: the good message did not cancel its order", name)
		}
		good = good[1:]
		if n := w.db.Int(t, "SELECT COUNT(*) FROM parked WHERE what = 'message' AND ref = ? AND body = ?", bad, body[:min(len(body), orders.MaxParkedBody)]); n != 1 {
			t.Errorf("%s: not parked with its body", name)
		}
	}
	if n := metric(t, r.reg, "lapse_consumer_parked_total", "message"); int(n) != len(bodies) {
		t.Errorf("%v messages counted as parked, want %d", n, len(bodies))
	}
	if n := r.source.maxAttempt.Load(); n != 1 {
		t.Errorf("a message was delivered %d times, want once", n)
	}
	w.wantSound(t)
}

// case MQ-12: ids that the codec lets through and our store does not know as its own.
func TestIdsThatAreNoneAreParkedAndTheRestOfTheMessageIsDone(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	good := w.place(t, 2, overdue())
	startReplica(t, w.store, w.options(Config{}))
	bad := []string{"-1", "1e3", "9223372036854775808", "007", "0", "abc"}
	m := w.expire(t, slices.Concat(good[:1], bad, good[1:])...)
	until(t, "the message is acknowledged", func() bool { return w.acked(m) == 1 })
	w.wantCancelledOnce(t, good)
	for _, id := range bad {
		if w.parked(t, orders.ParkedOrder, id) != 1 {
			t.Errorf("id %q is not parked", id)
		}
	}
}

// case MQ-13
func TestADatabaseErrorAcknowledgesNothingAndTheOrderIsCancelledLater(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	ids := w.place(t, 20, overdue())
	r := startReplica(t, w.store, w.options(Config{})).ready(t)
	// As after a migration gone wrong: the server answers, and every statement fails.
	w.db.Exec(t, "RENAME TABLE orders TO elsewhere")
	m := w.expire(t, ids...)
	until(t, "it has failed a few times", func() bool { return metric(t, r.reg, "lapse_cancel_retries_total", "unavailable") > 3 })
	if n := len(w.broker.Acked(wireGroup)); n != 0 {
		t.Errorf("%d messages are acknowledged, want none", n)
	}
	if n := w.db.Int(t, "SELECT COUNT(*) FROM parked"); n != 0 {
		t.Errorf("%d things are parked, want none", n)
	}
	w.db.Exec(t, "RENAME TABLE elsewhere TO orders")
	until(t, "the message is acknowledged", func() bool { return w.acked(m) == 1 })
	w.wantCancelledOnce(t, ids)
	if n := r.source.maxAttempt.Load(); n != 1 {
		t.Errorf("delivered %d times, want once", n)
	}
}

// case MQ-21
func TestOneFailingMessageOfABatchDoesNotDecideOverTheOthers(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	ids := w.place(t, 3, overdue())
	w.poison(t, ids[1])
	var messages []string
	for _, id := range ids {
		messages = append(messages, w.expire(t, id))
	}
	startReplica(t, w.store, w.options(Config{BatchWait: 500 * time.Millisecond}))
	until(t, "all are acknowledged", func() bool { return w.acked(messages[0])+w.acked(messages[1])+w.acked(messages[2]) == 3 })
	if n := w.cancelled(t, ids[:1]) + w.cancelled(t, ids[2:]); n != 2 {
		t.Fatalf("%d of the two good orders are cancelled", n)
	}
	if w.cancelled(t, ids[1:2]) != 0 || w.parked(t, orders.ParkedOrder, ids[1]) != 1 {
		t.Fatal("the failing order is not parked")
	}
	w.cure(t)
	if n := w.broker.Duplicate(wireTopic); n != 3 {
		t.Fatalf("%d messages were delivered again, want 3", n)
	}
	w.wantCancelledOnce(t, ids)
}

// case PRD-2
func TestAMessageForAnOrderThatNeverExistedIsAcknowledgedAndCounted(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	id := orders.FormatID(orders.NewID())
	r := startReplica(t, w.store, w.options(Config{}))
	m := w.expire(t, id)
	until(t, "it is acknowledged", func() bool { return w.acked(m) == 1 })
	if n := metric(t, r.reg, "lapse_outcomes_total", "not_found"); n != 1 {
		t.Errorf("%v outcomes of not found, want 1", n)
	}
	if w.parked(t, orders.ParkedOrder, id) != 1 {
		t.Error("it is not parked")
	}
	if n := r.source.maxAttempt.Load(); n != 1 {
		t.Errorf("delivered %d times, want once", n)
	}
}

// case DEP-1
func TestANewerVersionReachesANewerConsumerOfTheGroup(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	ids := w.place(t, 3, overdue())
	old := startReplica(t, w.store, w.options(Config{NewerVersionDelay: time.Second})).ready(t)
	extra := w.send(t, []byte(`{"v":1,"due":"2026-11-30T15:00:01.000Z","orders":["`+ids[0]+`"],"region":{"name":"eu"}}`))
	newer := w.send(t, []byte(`{"v":2,"cancel":"`+ids[1]+`"}`))
	until(t, "the old consumer has put the newer message off", func() bool { return metric(t, old.reg, "lapse_messages_newer_version_total", "") >= 1 })
	until(t, "the message with an additional field is acknowledged", func() bool { return w.acked(extra) == 1 })
	if w.acked(newer) != 0 || w.parked(t, orders.ParkedMessage, newer) != 0 {
		t.Fatal("the old consumer has done away with a message that it cannot read")
	}
	o := w.options(Config{NewerVersionDelay: time.Second})
	o.prepare = func(c *Consumer) {
		c.decode = func(body []byte) (orders.Expiry, error) {
			e, err := orders.DecodeExpiry(body)
			var v2 struct{ Cancel string }
			if errors.Is(err, orders.ErrNewerVersion) && json.Unmarshal(body, &v2) == nil {
				return orders.Expiry{Orders: []string{v2.Cancel}}, nil
			}
			return e, err
		}
	}
	startReplica(t, w.store, o)
	// As long as both are there each takes its turn, as in a rolling upgrade; the old one leaves at its end.
	until(t, "the newer consumer is registered", func() bool { return len(w.broker.Clients()) == 2 })
	old.stop()
	until(t, "the newer message is acknowledged", func() bool { return w.acked(newer) == 1 })
	first := w.expire(t, ids[2])
	until(t, "a message of version 1 is acknowledged", func() bool { return w.acked(first) == 1 })
	w.wantCancelledOnce(t, ids)
}

func TestOnePoisonousOrderAmongFiveHundredIsParked(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	ids := w.place(t, 500, overdue())
	bad := ids[237]
	w.poison(t, bad)
	m := w.expire(t, ids...)
	r := startReplica(t, w.store, w.options(Config{}))
	until(t, "the message is acknowledged", func() bool { return w.acked(m) == 1 })
	others := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return id == bad })
	w.wantCancelledOnce(t, others)
	if reason := w.db.Text(t, "SELECT reason FROM parked WHERE what = 'order' AND ref = ?", bad); !strings.Contains(reason, "poisonous") {
		t.Errorf("parked with reason %q, want the database's error in it", reason)
	}
	if n := metric(t, r.reg, "lapse_consumer_parked_total", "order"); n != 1 {
		t.Errorf("%v orders counted as parked, want 1", n)
	}
	if status := w.db.Text(t, "SELECT status FROM orders WHERE id = ?", bad); status != "unpaid" {
		t.Errorf("the poisonous order is %s", status)
	}
}

func TestAMessageFromABrokerWhoseClockIsAheadWaitsForTheDatabases(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	w.broker.SetSkew(time.Second)
	r := startReplica(t, w.store, w.options(Config{})).ready(t)
	deadline := time.Now().Add(6 * time.Second).Truncate(time.Millisecond)
	ids := w.place(t, 20, deadline)
	id, err := w.broker.Inject(wireTopic, expiry(t, ids...), deadline)
	if err != nil {
		t.Fatal(err)
	}
	until(t, "the message is acknowledged", func() bool { return w.acked(id) == 1 })
	w.wantCancelledOnce(t, ids) // I5 is part of the audit
	if n := metric(t, r.reg, "lapse_orders_early_total", ""); n < 20 {
		t.Errorf("%v orders were waited for, want each of the 20", n)
	}
	h := find(t, r.reg, "lapse_cancel_lateness_seconds", "").GetHistogram()
	if h.GetSampleCount() != 20 || h.GetSampleSum() > 20*2 {
		t.Errorf("%d orders were %.3f s late together, want 20 with a moment each", h.GetSampleCount(), h.GetSampleSum())
	}
	if n := r.source.maxAttempt.Load(); n != 1 {
		t.Errorf("delivered %d times, want once", n)
	}
}

func TestAMessageEarlyByFarIsTimedAnewAndAcknowledged(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	deadline := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	far, near := w.place(t, 1, deadline), w.place(t, 1, overdue())
	claim, err := w.store.ClaimOutbox(t.Context(), 10, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	var sent []int64
	for _, p := range claim.Rows {
		sent = append(sent, p.OrderID)
	}
	if _, err := w.store.MarkSent(t.Context(), claim.Token, []orders.Sent{{IDs: sent, MessageID: "hop", Due: time.Now().Truncate(time.Millisecond)}}); err != nil {
		t.Fatal(err)
	}
	m := w.expire(t, far[0], near[0])
	r := startReplica(t, w.store, w.options(Config{}))
	until(t, "it is acknowledged", func() bool { return w.acked(m) == 1 })
	w.wantCancelledOnce(t, near)
	if n := w.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE order_id = ? AND state = 'pending' AND lease_token IS NULL AND ABS(TIMESTAMPDIFF(MICROSECOND, deliver_at, ?)) < 1000",
		far[0], deadline.UTC().Format("2006-01-02 15:04:05.000")); n != 1 {
		t.Error("its outbox row has not gone back to pending, due at the deadline")
	}
	if n := metric(t, r.reg, "lapse_outcomes_total", "not_due"); n != 1 {
		t.Errorf("%v outcomes of not due, want 1", n)
	}
	if w.cancelled(t, far) != 0 {
		t.Error("an order is cancelled an hour before its deadline")
	}
}

// A handle that a renewal has replaced answers OK to an acknowledgement, and the message comes back.
func TestARenewedMessageIsAcknowledgedWithItsNewestHandle(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	ids := w.place(t, 1, overdue())
	release := make(chan struct{})
	// 10 s is the broker's minimum; the first renewal comes after half of it.
	o := w.options(Config{Invisible: 10 * time.Second, CancelTimeout: 9 * time.Second})
	o.canceller = canceller(func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		select {
		case <-release:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		return w.store.CancelDue(ctx, ids)
	})
	m := w.expire(t, ids...)
	r := startReplica(t, w.store, o)
	until(t, "the message has been renewed", func() bool { return metric(t, r.reg, "lapse_renewals_total", "ok") >= 1 })
	close(release)
	until(t, "it is acknowledged", func() bool { return w.acked(m) == 1 })
	if !w.drained() {
		t.Error("the message is still in flight")
	}
	w.wantCancelledOnce(t, ids)
	if n := r.source.maxAttempt.Load(); n != 1 {
		t.Errorf("delivered %d times, want once", n)
	}
}

func TestARefusedAcknowledgementIsCountedAndHarmless(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	ids := w.place(t, 5, overdue())
	r := startReplica(t, w.store, w.options(Config{Invisible: 10 * time.Second, CancelTimeout: 5 * time.Second})).ready(t)
	w.broker.FailNext(lapsetest.AckMessage, 1, v2.Code_INVALID_RECEIPT_HANDLE)
	m := w.expire(t, ids...)
	until(t, "the refusal is counted", func() bool { return metric(t, r.reg, "lapse_acks_total", "expired") == 1 })
	until(t, "the message came again and is acknowledged", func() bool { return w.acked(m) == 1 })
	w.wantCancelledOnce(t, ids)
	if n := metric(t, r.reg, "lapse_outcomes_total", "already_cancelled"); n != 5 {
		t.Errorf("%v outcomes of already cancelled, want 5", n)
	}
	if n := metric(t, r.reg, "lapse_messages_redelivered_total", ""); n != 1 {
		t.Errorf("%v redeliveries, want 1", n)
	}
}

func TestABrokerThatComesBackIsUsedAgain(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	ids := w.place(t, 10, overdue())
	r := startReplica(t, w.store, w.options(Config{})).ready(t)
	w.expire(t, ids[:5]...)
	until(t, "the first message is done", func() bool { return w.cancelled(t, ids[:5]) == 5 })
	w.broker.Stop()
	until(t, "a Receive fails", func() bool { return metric(t, r.reg, "lapse_receive_errors_total", "") > 0 })
	if err := w.broker.Resume(); err != nil {
		t.Fatal(err)
	}
	w.expire(t, ids[5:]...)
	w.wantCancelledOnce(t, ids)
}

func TestPaidOrdersAreLeftAlone(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	ids := w.place(t, 2, overdue())
	paid, err := orders.ParseID(ids[0])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.store.RecordPayment(t.Context(), orders.Payment{Gateway: "bank", TransactionID: "t1", OrderID: paid, Currency: "EUR", Amount: 1000, PaidAt: time.Now()}); err != nil {
		t.Fatal(err)
	}
	r := startReplica(t, w.store, w.options(Config{}))
	m := w.expire(t, ids...)
	until(t, "it is acknowledged", func() bool { return w.acked(m) == 1 })
	w.wantCancelledOnce(t, ids[1:])
	if n := metric(t, r.reg, "lapse_outcomes_total", "already_paid"); n != 1 || w.cancelled(t, ids[:1]) != 0 {
		t.Errorf("%v outcomes of already paid, want 1, and the order kept", n)
	}
}

// An order whose row somebody else has locked, as a payment under way or a forgotten session does.
func TestALockedRowHoldsUpOnlyItsOwnOrder(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	ids := w.place(t, 50, overdue())
	tx, err := w.db.SQL.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() //nolint:errcheck // ended below
	var locked string
	if err := tx.QueryRowContext(t.Context(), "SELECT id FROM orders WHERE id = "+ids[20]+" FOR UPDATE").Scan(&locked); err != nil {
		t.Fatal(err)
	}
	// The store waits for a lock of a row for 1 s, several times, until the transaction is cut off.
	store := openStore(t, w.db.DSN+"?innodb_lock_wait_timeout=1")
	r := startReplica(t, store, w.options(Config{CancelTimeout: 4 * time.Second}))
	m := w.expire(t, ids...)
	others := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return id == locked })
	until(t, fmt.Sprintf("all but order %s are cancelled", locked), func() bool { return w.cancelled(t, others) == len(others) })
	if n := metric(t, r.reg, "lapse_cancel_retries_total", "locked"); n == 0 {
		t.Error("no retry for a lock is counted")
	}
	if w.acked(m) != 0 || w.parked(t, orders.ParkedOrder, locked) != 0 {
		t.Error("the message is done with, and the locked order is not cancelled")
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	until(t, "the message is acknowledged", func() bool { return w.acked(m) == 1 })
	w.wantCancelledOnce(t, ids)
}
