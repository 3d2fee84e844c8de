package consumer

import (
	"context"
	"database/sql/driver"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
)

func TestOrdersOfSeveralMessagesAreCancelledInOneTransaction(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	var ms []*fakeMessage
	for i := range 10 {
		ms = append(ms, source.expire(t, numbers(1+10*i, 10)...))
	}
	b := setup(t, Config{BatchWait: time.Second, Receivers: 1}, source, store).run(t)
	until(t, "all messages are acknowledged", func() bool { return source.acked(ms...) })
	if calls := store.asked(); len(calls) != 1 || len(calls[0]) != 100 {
		t.Errorf("%d transactions: %v, want one of 100 orders", len(calls), calls)
	}
	if n := metric(t, b.reg, "lapse_outcomes_total", "cancelled"); n != 100 {
		t.Errorf("%v outcomes of cancelled, want 100", n)
	}
	until(t, "nothing is in hand", func() bool { return metric(t, b.reg, "lapse_consumer_in_hand_orders", "") == 0 })
}

func TestABatchIsNotLargerThanBatchOrders(t *testing.T) {
	t.Parallel()
	b := start(t, Config{BatchOrders: 30})
	m := b.source.expire(t, numbers(1, 500)...)
	until(t, "the message is acknowledged", func() bool { return b.source.acked(m) })
	for _, ids := range b.store.asked() {
		if len(ids) > 30 {
			t.Errorf("a transaction of %d orders, want at most 30", len(ids))
		}
	}
	if !b.store.allCancelled(numbers(1, 500)...) {
		t.Error("not every order was asked about")
	}
}

func TestASmallBatchDoesNotWaitForOthers(t *testing.T) {
	t.Parallel()
	b := start(t, Config{BatchWait: 10 * time.Millisecond})
	m := b.source.expire(t, "1")
	until(t, "the message is acknowledged", func() bool { return b.source.acked(m) })
}

func TestAMessageIsAcknowledgedOnlyWhenEachOfItsOrdersHasAnOutcome(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	release := make(chan struct{})
	store.on = func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		if slices.Contains(ids, "250") {
			select {
			case <-release:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		return nil, nil
	}
	m := source.expire(t, numbers(1, 250)...)
	b := setup(t, Config{}, source, store).run(t)
	until(t, "the other orders are cancelled", func() bool { return store.allCancelled(numbers(1, 200)...) })
	during(t, 50*time.Millisecond, "the message is not acknowledged", func() bool { return !source.acked(m) })
	if n := metric(t, b.reg, "lapse_consumer_in_hand_orders", ""); n != 250 {
		t.Errorf("%v orders in hand, want all 250 of the message", n)
	}
	close(release)
	until(t, "the message is acknowledged", func() bool { return source.acked(m) })
}

func TestEveryOutcomeThatEndsAnOrderEndsItsMessage(t *testing.T) {
	t.Parallel()
	for _, result := range orders.Results() {
		t.Run(string(result), func(t *testing.T) {
			t.Parallel()
			source, store := newFakeSource(), newFakeStore()
			store.on = func(_ context.Context, ids []string) ([]orders.Outcome, error) {
				o := orders.Outcome{ID: ids[0], Result: result}
				if result == orders.ResultNotDue || result == orders.ResultHeld {
					o.Remaining = time.Hour // the store has timed it anew
				}
				return []orders.Outcome{o}, nil
			}
			m := source.expire(t, "1")
			b := setup(t, Config{}, source, store).run(t)
			until(t, "the message is acknowledged", func() bool { return source.acked(m) })
			if n := len(store.asked()); n != 1 {
				t.Errorf("the order was asked about %d times, want once", n)
			}
			if n := metric(t, b.reg, "lapse_outcomes_total", string(result)); n != 1 {
				t.Errorf("%v outcomes counted, want 1", n)
			}
			if len(store.parks()) != 0 {
				t.Errorf("parked %v; the store parks what it does not find", store.parks())
			}
		})
	}
}

func TestAnEarlyOrderIsWaitedForAloneAndHoldsNothingUp(t *testing.T) {
	t.Parallel()
	for _, result := range []orders.Result{orders.ResultNotDue, orders.ResultHeld} {
		t.Run(string(result), func(t *testing.T) {
			t.Parallel()
			const early = 1800 * time.Millisecond // under EarlyWait, and long beside what is done meanwhile
			source, store := newFakeSource(), newFakeStore()
			var due atomic.Int64
			store.on = func(_ context.Context, ids []string) ([]orders.Outcome, error) {
				due.CompareAndSwap(0, time.Now().Add(early).UnixNano())
				out := store.usual(ids)
				for i, id := range ids {
					if left := time.Until(time.Unix(0, due.Load())); id == "2" && left > 0 {
						store.set(func() { delete(store.cancelled, "2") })
						out[i] = orders.Outcome{ID: id, Result: result, Remaining: left}
					}
				}
				return out, nil
			}
			first := source.expire(t, "1", "2", "3")
			// One worker, so that an order that is slept for would hold the others up.
			b := setup(t, Config{Workers: 1, BatchOrders: 3, BatchWait: time.Millisecond}, source, store).run(t)
			until(t, "the other orders of the message are cancelled", func() bool { return store.allCancelled("1", "3") })
			second := source.expire(t, "4")
			until(t, "another message is acknowledged", func() bool { return source.acked(second) })
			if time.Now().UnixNano() >= due.Load() {
				t.Fatalf("what comes before took longer than %s: the early order is due already", early)
			}
			if source.acked(first) {
				t.Fatal("the message is acknowledged while one of its orders is not due")
			}
			until(t, "the message of the early order is acknowledged", func() bool { return source.acked(first) })
			if !store.allCancelled("2") {
				t.Error("the early order is not cancelled")
			}
			for i, ids := range store.asked() {
				if i > 0 && slices.Contains(ids, "2") && len(ids) != 1 {
					t.Errorf("asked again about %v, want the early order alone", ids)
				}
			}
			if n := metric(t, b.reg, "lapse_orders_early_total", ""); n < 1 || n > 3 {
				t.Errorf("asked too early %v times, want 1, or a little more", n)
			}
			if n := metric(t, b.reg, "lapse_outcomes_total", string(result)); n != 0 {
				t.Errorf("%v outcomes of %s, want none: the order was cancelled in the end", n, result)
			}
		})
	}
}

func TestACancellerThatIsNeverDueIsNotAskedWithoutAPause(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.on = func(_ context.Context, ids []string) ([]orders.Outcome, error) {
		return []orders.Outcome{{ID: ids[0], Result: orders.ResultNotDue}}, nil
	}
	source.expire(t, "1")
	begun := time.Now()
	setup(t, Config{BatchWait: time.Nanosecond, ShutdownGrace: 20 * time.Millisecond}, source, store).run(t)
	until(t, "it has been asked ten times", func() bool { return len(store.asked()) >= 10 })
	if took := time.Since(begun); took < 9*minEarlyWait {
		t.Errorf("asked ten times within %s, want at least %s", took, 9*minEarlyWait)
	}
}

func TestOnePoisonousOrderIsParkedAndTheOthersAreDone(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.on = failing(errOwn, "137")
	m := source.expire(t, numbers(1, 200)...)
	b := setup(t, Config{GiveUpAfter: time.Hour}, source, store).run(t)
	until(t, "the message is acknowledged", func() bool { return source.acked(m) })
	others := slices.DeleteFunc(numbers(1, 200), func(id string) bool { return id == "137" })
	if !store.allCancelled(others...) {
		t.Error("not every other order is cancelled")
	}
	parks := store.parks()
	if len(parks) != 1 || parks[0].What != orders.ParkedOrder || parks[0].Ref != "137" || !strings.Contains(parks[0].Reason, errOwn.Error()) {
		t.Errorf("parked %+v, want order 137 with its error", parks)
	}
	tries := 0
	for _, ids := range store.asked() {
		if len(ids) == 1 && ids[0] == "137" {
			tries++
		}
	}
	if tries != maxFailures {
		t.Errorf("the order was tried alone %d times, want %d", tries, maxFailures)
	}
	if n := metric(t, b.reg, "lapse_consumer_parked_total", orders.ParkedOrder); n != 1 {
		t.Errorf("%v orders counted as parked, want 1", n)
	}
	if metric(t, b.reg, "lapse_consumer_paused", "") != 0 {
		t.Error("the consumer is paused for the sake of one order")
	}
}

// An error that is not known as the database's own, for every order: nothing is parked while it may pass.
func TestWhatFailsForEveryOrderIsTheDatabasesTrouble(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.on = func(context.Context, []string) ([]orders.Outcome, error) { return nil, errOwn }
	m := source.expire(t, numbers(1, 20)...)
	b := setup(t, Config{GiveUpAfter: time.Hour}, source, store).run(t)
	until(t, "every order has failed alone more often than would park one", func() bool {
		alone := map[string]int{}
		for _, ids := range store.asked() {
			if len(ids) == 1 {
				alone[ids[0]]++
			}
		}
		for _, n := range alone {
			if n <= maxFailures {
				return false
			}
		}
		return len(alone) == 20
	})
	// Nothing else succeeds, so this goes on, and with it the pauses.
	until(t, "it is paused", func() bool { return metric(t, b.reg, "lapse_consumer_paused", "") == 1 })
	store.set(func() { store.on = nil })
	until(t, "the message is acknowledged", func() bool { return source.acked(m) })
	if len(store.parks()) != 0 || !store.allCancelled(numbers(1, 20)...) {
		t.Errorf("parked %v, want every order cancelled and none parked", store.parks())
	}
}

func TestWhatFailsForEveryOrderForLongIsParked(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.on = func(context.Context, []string) ([]orders.Outcome, error) { return nil, errOwn }
	many, one := source.expire(t, numbers(1, 5)...), source.expire(t, "6")
	setup(t, Config{GiveUpAfter: 200 * time.Millisecond, BatchWait: time.Millisecond}, source, store).run(t)
	until(t, "the messages are acknowledged", func() bool { return source.acked(many, one) })
	if n := len(store.parks()); n != 6 {
		t.Errorf("parked %d orders, want 6: %v", n, store.parks())
	}
}

func TestOrdersThatCannotBeParkedStayInHand(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.on, store.parkErr = failing(errOwn, "1"), errOwn
	m, other := source.expire(t, "1"), source.expire(t, "2")
	setup(t, Config{GiveUpAfter: 10 * time.Millisecond}, source, store).run(t)
	until(t, "the other message is acknowledged", func() bool { return source.acked(other) })
	during(t, 100*time.Millisecond, "the message is not acknowledged", func() bool { return !source.acked(m) })
	store.set(func() { store.parkErr = nil })
	until(t, "the message is acknowledged", func() bool { return source.acked(m) })
	if n := len(store.parks()); n != 1 {
		t.Errorf("parked %d orders, want 1", n)
	}
}

func TestALockedOrderIsAskedAgainAndHoldsNothingUp(t *testing.T) {
	t.Parallel()
	for name, locked := range map[string]error{
		"lock wait": fmt.Errorf("cancel: %w", &mysql.MySQLError{Number: 1205, Message: "Lock wait timeout exceeded"}),
		"deadline":  fmt.Errorf("cancel: %w", context.DeadlineExceeded),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			source, store := newFakeSource(), newFakeStore()
			store.on = failing(locked, "7")
			m, other := source.expire(t, numbers(1, 10)...), source.expire(t, numbers(11, 10)...)
			b := setup(t, Config{GiveUpAfter: time.Millisecond}, source, store).run(t)
			until(t, "the other message is acknowledged", func() bool { return source.acked(other) })
			until(t, "the locked order was asked about alone, often", func() bool {
				n := 0
				for _, ids := range store.asked() {
					if len(ids) == 1 && ids[0] == "7" {
						n++
					}
				}
				return n > 2*maxFailures
			})
			if source.acked(m) || len(store.parks()) != 0 {
				t.Errorf("acknowledged: %v, parked: %v, want neither: a lock passes", source.acked(m), store.parks())
			}
			store.set(func() { store.on = nil })
			until(t, "the message is acknowledged", func() bool { return source.acked(m) })
			if n := metric(t, b.reg, "lapse_cancel_retries_total", "locked"); n == 0 {
				t.Error("no retry for a lock is counted")
			}
		})
	}
}

func TestManyLockedOrdersWaitForEachOtherAlone(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	locked := numbers(10, 10)
	var waiting, most atomic.Int64
	store.on = func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		if !slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(locked, id) }) {
			return nil, nil
		}
		n := waiting.Add(1)
		defer waiting.Add(-1)
		most.Store(max(most.Load(), n))
		<-ctx.Done()
		return nil, ctx.Err()
	}
	first := source.expire(t, numbers(1, 30)...)
	b := setup(t, Config{CancelTimeout: 800 * time.Millisecond, ShutdownGrace: time.Second}, source, store).run(t)
	until(t, "the orders that are not locked are cancelled", func() bool { return store.allCancelled(append(numbers(1, 9), numbers(20, 10)...)...) })
	until(t, "each locked order was asked about alone", func() bool {
		alone := map[string]bool{}
		for _, ids := range store.asked() {
			if len(ids) == 1 && slices.Contains(locked, ids[0]) {
				alone[ids[0]] = true
			}
		}
		return len(alone) == len(locked)
	})
	until(t, "the workers are free", func() bool { return waiting.Load() <= 1 })
	most.Store(0)
	for i := range 20 {
		m := source.expire(t, numbers(100+10*i, 10)...)
		until(t, "another message is acknowledged", func() bool { return source.acked(m) })
	}
	if n := most.Load(); n > 1 {
		t.Errorf("%d transactions waited for locks at once, want one beside the workers", n)
	}
	if source.acked(first) {
		t.Error("the message of the locked orders is acknowledged")
	}
	for _, ids := range store.asked() {
		if len(ids) != 30 && len(ids) != 1 && slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(locked, id) }) {
			t.Errorf("asked about %d orders with locked ones among them, want all or one: halves would wait as long as the whole", len(ids))
		}
	}
	b.stop()
	b.ended(t)
}

func TestAnEarlyOrderIsWaitedForAtTheStop(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	due := time.Now().Add(300 * time.Millisecond)
	store.on = func(_ context.Context, ids []string) ([]orders.Outcome, error) {
		if left := time.Until(due); left > 0 {
			return []orders.Outcome{{ID: ids[0], Result: orders.ResultNotDue, Remaining: left}}, nil
		}
		return nil, nil
	}
	m := source.expire(t, "1")
	b := setup(t, Config{}, source, store).run(t)
	until(t, "it has been asked about", func() bool { return len(store.asked()) > 0 })
	b.stop()
	b.ended(t)
	if !source.acked(m) || !store.allCancelled("1") {
		t.Error("the order was not waited for")
	}
}

func TestWhileTheDatabaseIsAwayNothingIsReceivedAndWhatIsInHandStaysHidden(t *testing.T) {
	t.Parallel()
	for name, away := range map[string]error{
		"connection": driver.ErrBadConn,
		"eof":        io.ErrUnexpectedEOF,
		"read-only":  &mysql.MySQLError{Number: 1290, Message: "read-only"}, // case DB-9
		"deadline":   context.DeadlineExceeded,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const invisible = 2 * time.Second // a machine that stalls for a second must not look like a message not renewed
			source, store := newFakeSource(), newFakeStore()
			store.on = func(context.Context, []string) ([]orders.Outcome, error) {
				store.set(func() { store.ready = away })
				return nil, away
			}
			var ms []*fakeMessage
			for i := range 5 {
				ms = append(ms, source.expire(t, numbers(1+i*10, 10)...))
			}
			b := setup(t, Config{Invisible: invisible}, source, store).run(t)
			until(t, "a transaction has failed", func() bool { return metric(t, b.reg, "lapse_cancel_retries_total", "unavailable") >= 1 })
			until(t, "it is paused", func() bool { return metric(t, b.reg, "lapse_consumer_paused", "") == 1 })
			until(t, "the Receives under way have ended", func() bool {
				b.mu.Lock()
				defer b.mu.Unlock()
				return b.reserved == 0
			})
			if err := b.Ready(); err == nil || !strings.Contains(err.Error(), "paused") {
				t.Errorf("ready: %v, want it to say that it is paused", err)
			}
			receives := look(source, func() int { return source.receives })
			source.expire(t, "100")
			// Longer than the messages are hidden for.
			during(t, 2*invisible, "no Receive is issued", func() bool { return look(source, func() int { return source.receives }) == receives })
			store.set(func() { store.on, store.ready = nil, nil })
			until(t, "all messages are acknowledged", func() bool { return source.acked(ms...) })
			until(t, "the message sent meanwhile is done", func() bool { return store.allCancelled("100") })
			if n := source.maxAttempt(); n != 1 {
				t.Errorf("a message was delivered %d times, want 1: they were to be hidden for longer", n)
			}
			if len(store.parks()) != 0 {
				t.Errorf("parked %v", store.parks())
			}
			until(t, "it is ready", func() bool { return b.Ready() == nil })
		})
	}
}

// case DEP-3
func TestNothingIsReceivedBeforeTheDatabaseAnswers(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.ready = io.EOF
	m := source.expire(t, "1")
	b := setup(t, Config{}, source, store).run(t)
	until(t, "the database has been asked a few times", func() bool {
		store.mu.Lock()
		defer store.mu.Unlock()
		return store.readies > 5
	})
	if n := look(source, func() int { return source.receives }); n != 0 {
		t.Errorf("%d Receives, want none", n)
	}
	if err := b.Ready(); err == nil {
		t.Error("it says that it is ready")
	}
	store.set(func() { store.ready = nil })
	until(t, "the message is acknowledged", func() bool { return source.acked(m) })
	if err := b.Ready(); err != nil {
		t.Errorf("ready: %v", err)
	}
}

// case DEP-1
func TestAMessageOfANewerVersionIsLeftToANewerConsumer(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	newer := source.send([]byte(`{"v":2,"when":"later","orders":{}}`))
	extra := source.send([]byte(`{"v":1,"due":"2026-11-30T15:00:01.000Z","orders":["1"],"shard":7}`))
	b := setup(t, Config{NewerVersionDelay: time.Minute}, source, store).run(t)
	until(t, "the message with an additional field is acknowledged", func() bool { return source.acked(extra) })
	until(t, "the newer one is hidden", func() bool {
		return slices.Equal(look(source, func() []time.Duration { return newer.hides }), []time.Duration{time.Minute})
	})
	if source.acked(newer) || len(store.parks()) != 0 {
		t.Errorf("acknowledged: %v, parked: %v, want neither", source.acked(newer), store.parks())
	}
	if n := metric(t, b.reg, "lapse_messages_newer_version_total", ""); n != 1 {
		t.Errorf("%v messages of a newer version counted, want 1", n)
	}
	// The next deliveries.
	for i, want := range []time.Duration{2 * time.Minute, 4 * time.Minute} {
		source.mu.Lock()
		newer.visible = time.Time{}
		source.mu.Unlock()
		until(t, "it is hidden again", func() bool { return look(source, func() int { return len(newer.hides) }) == i+2 })
		if got := look(source, func() time.Duration { return newer.hides[i+1] }); got != want {
			t.Errorf("hidden for %s, want %s", got, want)
		}
	}
}

func TestTheDelayOfANewerVersionDoublesUpToAnHour(t *testing.T) {
	t.Parallel()
	for attempt, want := range map[int]time.Duration{
		0: time.Minute, 1: time.Minute, 2: 2 * time.Minute, 6: 32 * time.Minute, 7: time.Hour, 16: time.Hour, 1 << 20: time.Hour,
	} {
		if got := newerVersionDelay(time.Minute, attempt); got != want {
			t.Errorf("delivery %d: %s, want %s", attempt, got, want)
		}
	}
}

// unreadable are the bodies of case MQ-12, and some more.
func unreadable() map[string][]byte {
	return map[string][]byte{
		"empty":            {},
		"array":            []byte(`[]`),
		"number id":        []byte(`{"v":1,"due":"2026-11-30T15:00:01.000Z","orders":[17]}`),
		"byte order mark":  []byte("\xEF\xBB\xBF" + `{"v":1,"due":"2026-11-30T15:00:01.000Z","orders":["17"]}`),
		"rubbish after it": []byte(`{"v":1,"due":"2026-11-30T15:00:01.000Z","orders":["17"]}x`),
		"invalid UTF-8":    []byte("{\"v\":1,\"due\":\"2026-11-30T15:00:01.000Z\",\"orders\":[\"\xff\"]}"),
		"1 MB":             []byte(`{"v":1,"pad":"` + strings.Repeat("x", 1<<20) + `"}`),
		"gzip":             []byte("\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff\xaa\x56\x2a\x53\xb2\x32\xac\x05\x04\x00\x00\xff\xff"),
		"null":             []byte(`null`),
		"no orders":        []byte(`{"v":1,"due":"2026-11-30T15:00:01.000Z","orders":[]}`),
		"deep":             []byte(strings.Repeat("[", 60000)),
	}
}

// case MQ-12
func TestAnUnreadableMessageIsParkedAndTheNextOneIsDone(t *testing.T) {
	t.Parallel()
	b := start(t, Config{})
	for name, body := range unreadable() {
		bad, good := b.source.send(body), b.source.expire(t, "1")
		until(t, "both messages are acknowledged: "+name, func() bool { return b.source.acked(bad, good) })
		parks := b.store.parks()
		last := parks[len(parks)-1]
		if last.What != orders.ParkedMessage || last.Ref != bad.id || last.Reason == "" || !slices.Equal(last.Body, body) {
			t.Errorf("%s: parked %s %s for %q, %d bytes; want the message with its body", name, last.What, last.Ref, last.Reason, len(last.Body))
		}
	}
	if n := metric(t, b.reg, "lapse_consumer_parked_total", orders.ParkedMessage); int(n) != len(unreadable()) {
		t.Errorf("%v messages counted as parked, want %d", n, len(unreadable()))
	}
}

func TestAnUnreadableMessageIsNotAcknowledgedBeforeItIsParked(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.parkErr = driver.ErrBadConn
	m := source.send([]byte("?"))
	b := setup(t, Config{Invisible: 2 * time.Second}, source, store).run(t)
	until(t, "the message is in hand", func() bool { return metric(t, b.reg, "lapse_consumer_in_hand_orders", "") == 1 })
	during(t, 300*time.Millisecond, "it is not acknowledged", func() bool { return !source.acked(m) })
	store.set(func() { store.parkErr = nil })
	until(t, "it is acknowledged", func() bool { return source.acked(m) })
	if n := len(store.parks()); n != 1 || source.maxAttempt() != 1 {
		t.Errorf("parked %d times after %d deliveries, want once after one", n, source.maxAttempt())
	}
}

// case MQ-14
func TestAPanicIsRetriedThenParkedAndOtherMessagesGoOn(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.on = func(_ context.Context, ids []string) ([]orders.Outcome, error) {
		if slices.Contains(ids, "13") {
			_ = ids[len(ids)] // the kind of mistake that is meant
		}
		return nil, nil
	}
	bad, good := source.expire(t, numbers(10, 10)...), source.expire(t, numbers(100, 10)...)
	b := setup(t, Config{}, source, store).run(t)
	until(t, "both messages are acknowledged", func() bool { return source.acked(bad, good) })
	parks := store.parks()
	if len(parks) != 1 || parks[0].Ref != "13" || !strings.Contains(parks[0].Reason, "panic") {
		t.Errorf("parked %+v, want order 13 for a panic", parks)
	}
	if n := metric(t, b.reg, "lapse_consumer_panics_total", ""); n < maxFailures {
		t.Errorf("%v panics counted, want at least %d", n, maxFailures)
	}
	if n := metric(t, b.reg, "lapse_cancel_retries_total", "panic"); n < maxFailures {
		t.Errorf("%v retries for a panic counted, want at least %d", n, maxFailures)
	}
}

// case MQ-14
func TestAMessageWhoseDecodingPanicsIsRetriedThenParked(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	b := setup(t, Config{}, source, store)
	b.decode = func(body []byte) (orders.Expiry, error) {
		if string(body) == "boom" {
			panic("boom")
		}
		return orders.DecodeExpiry(body)
	}
	bad, good := source.send([]byte("boom")), source.expire(t, "1")
	b.run(t)
	until(t, "the other message is acknowledged", func() bool { return source.acked(good) })
	for n := 1; n < maxDecodePanics; n++ {
		until(t, "it is given back", func() bool { return look(source, func() int { return len(bad.hides) }) == n })
		if len(store.parks()) != 0 {
			t.Fatalf("parked at delivery %d", n)
		}
		source.mu.Lock()
		bad.visible = time.Time{}
		source.mu.Unlock()
	}
	until(t, "it is acknowledged", func() bool { return source.acked(bad) })
	if parks := store.parks(); len(parks) != 1 || string(parks[0].Body) != "boom" {
		t.Errorf("parked %+v, want the message with its body", parks)
	}
}

func TestWhatIsInHandIsBoundedByOrders(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	release := make(chan struct{})
	store.on = func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return nil, ctx.Err()
	}
	// Small ones first, so that large ones are not expected.
	for i := range 300 {
		source.expire(t, fmt.Sprint(1+i))
	}
	b := setup(t, Config{CancelTimeout: 30 * time.Second}, source, store).run(t)
	until(t, "the small ones are in hand", func() bool { return metric(t, b.reg, "lapse_consumer_in_hand_orders", "") == 300 })
	for i := range 100 {
		source.expire(t, numbers(1000+i*500, 500)...)
	}
	until(t, "there is no more room", func() bool { return metric(t, b.reg, "lapse_consumer_in_hand_orders", "") >= 2000 })
	during(t, 200*time.Millisecond, "in hand are 2,000 orders and one message at most", func() bool {
		return metric(t, b.reg, "lapse_consumer_in_hand_orders", "") < 2500
	})
	close(release)
	store.set(func() { store.on = nil })
	// Those given back for want of room come again after a second.
	until(t, "everything is done", func() bool {
		return look(source, func() bool {
			return !slices.ContainsFunc(source.all, func(m *fakeMessage) bool { return m.acked == 0 })
		})
	})
	if n := source.maxAttempt(); n > 2 {
		t.Errorf("a message was delivered %d times, want at most 2", n)
	}
}

func TestAMessageLargerThanTheRoomIsReceivedAlone(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	a, z := source.expire(t, numbers(1, 900)...), source.expire(t, numbers(1000, 900)...)
	setup(t, Config{MaxInHand: 50}, source, store).run(t)
	until(t, "both are acknowledged", func() bool { return source.acked(a, z) })
}

func TestAnIdleConsumerStopsAtOnce(t *testing.T) {
	t.Parallel()
	b := start(t, Config{})
	until(t, "it receives", func() bool { return look(b.source, func() int { return b.source.receives }) > 0 })
	begun := time.Now()
	b.stop()
	b.ended(t)
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("it took %s to stop", took)
	}
	if err := b.Ready(); err == nil {
		t.Error("it says that it is ready")
	}
	if err := b.Run(t.Context()); err == nil {
		t.Error("it can be run twice")
	}
}

// case MQ-17
func TestWhatIsInHandIsFinishedAndAcknowledgedAtTheStop(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	release := make(chan struct{})
	store.on = func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		select {
		case <-release:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		return nil, nil
	}
	m := source.expire(t, numbers(1, 500)...)
	b := setup(t, Config{}, source, store).run(t)
	until(t, "two transactions run", func() bool { return len(store.asked()) == 2 })
	b.stop()
	until(t, "the Receives have ended", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.draining && b.reserved == 0
	})
	late := source.expire(t, "1000")
	close(release)
	b.ended(t)
	if !source.acked(m) || !store.allCancelled(numbers(1, 500)...) {
		t.Error("what was in hand was not finished")
	}
	if look(source, func() int { return late.attempt }) != 0 {
		t.Error("a message was received after the stop")
	}
	if source.maxAttempt() != 1 {
		t.Error("a message was delivered twice")
	}
}

func TestWhatCannotBeFinishedAtTheStopIsGivenBack(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.on = func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		if !slices.Contains(ids, "1") {
			return nil, nil
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	stuck := source.expire(t, "1")
	b := setup(t, Config{ShutdownGrace: 300 * time.Millisecond, BatchOrders: 1}, source, store).run(t)
	until(t, "a transaction runs", func() bool { return len(store.asked()) == 1 })
	done := source.expire(t, "2")
	until(t, "the other is acknowledged", func() bool { return source.acked(done) })
	begun := time.Now()
	b.stop()
	b.ended(t)
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("it took %s to stop, with a grace of 300 ms", took)
	}
	if got := look(source, func() []time.Duration { return stuck.hides }); !slices.Equal(got, []time.Duration{handBackAfter}) {
		t.Errorf("the message was hidden for %v, want %s: visible again", got, handBackAfter)
	}
	if source.acked(stuck) {
		t.Error("it was acknowledged")
	}
}

func TestACancellerThatIgnoresItsContextDoesNotKeepRun(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	release := make(chan struct{})
	store.on = func(context.Context, []string) ([]orders.Outcome, error) {
		<-release
		return nil, nil
	}
	source.expire(t, "1")
	b := setup(t, Config{ShutdownGrace: 50 * time.Millisecond}, source, store)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { b.done <- b.Run(ctx) }()
	until(t, "a transaction runs", func() bool { return len(store.asked()) == 1 })
	cancel()
	select {
	case err := <-b.done:
		if err == nil {
			t.Error("no error, want one that says that something did not end")
		}
	case <-time.After(patience):
		t.Error("Run did not return")
	}
	close(release)
}

func TestAFailedAcknowledgementIsCountedAndTheMessageComesAgain(t *testing.T) {
	t.Parallel()
	for result, refusal := range map[string]error{ackFailed: io.EOF, ackExpired: fmt.Errorf("acknowledge: %w", rmq.ErrHandleExpired)} {
		t.Run(result, func(t *testing.T) {
			t.Parallel()
			source, store := newFakeSource(), newFakeStore()
			source.ackErr = refusal
			m := source.expire(t, "1")
			b := setup(t, Config{Invisible: 150 * time.Millisecond}, source, store).run(t)
			until(t, "it is counted", func() bool { return metric(t, b.reg, "lapse_acks_total", result) >= 1 })
			source.mu.Lock()
			source.ackErr = nil
			source.mu.Unlock()
			until(t, "the message is acknowledged", func() bool { return source.acked(m) })
			if n := metric(t, b.reg, "lapse_messages_redelivered_total", ""); n < 1 {
				t.Errorf("%v redeliveries counted", n)
			}
			if n := metric(t, b.reg, "lapse_outcomes_total", "already_cancelled"); n < 1 {
				t.Errorf("%v orders found cancelled already, want 1 and more", n)
			}
		})
	}
}

func TestAMessageInHandIsRenewedAndAcknowledgedWithItsNewestHandle(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	release := make(chan struct{})
	store.on = func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return nil, ctx.Err()
	}
	m := source.expire(t, "1")
	b := setup(t, Config{Invisible: time.Second}, source, store).run(t)
	until(t, "it has been renewed five times", func() bool { return look(source, func() int { return len(m.hides) }) >= 5 })
	close(release)
	until(t, "it is acknowledged", func() bool { return source.acked(m) })
	if n := source.maxAttempt(); n != 1 {
		t.Errorf("delivered %d times, want once", n)
	}
	if n := metric(t, b.reg, "lapse_renewals_total", renewOK); n < 5 {
		t.Errorf("%v renewals counted, want 5 and more", n)
	}
	b.stop()
	b.ended(t)
	n := look(source, func() int { return len(m.hides) })
	if n > 5+3 {
		t.Errorf("renewed %d times, also after its end", n)
	}
}

func TestNothingIsSaidAboutAMessageAfterItsEnd(t *testing.T) {
	t.Parallel()
	b := setup(t, Config{}, newFakeSource(), newFakeStore())
	m := &message{Delivery: &Delivery{}}
	var said []string
	say := func(what string) func(context.Context) error {
		return func(context.Context) error {
			said = append(said, what)
			return nil
		}
	}
	for _, err := range []error{
		b.call(t.Context(), m, false, say("renewal")),
		b.call(t.Context(), m, true, say("acknowledgement")),
		b.call(t.Context(), m, false, say("late renewal")),
		b.call(t.Context(), m, true, say("second acknowledgement")),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	if want := []string{"renewal", "acknowledgement"}; !slices.Equal(said, want) {
		t.Errorf("said %q, want %q", said, want)
	}
}

func TestAMessageThatOthersHaveIsNotRenewedAnyMore(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.on = func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	source.hideErr = rmq.ErrHandleExpired
	m := source.expire(t, "1")
	b := setup(t, Config{Invisible: 100 * time.Millisecond, MaxInHand: 1, ShutdownGrace: 20 * time.Millisecond}, source, store).run(t)
	until(t, "a renewal is refused", func() bool { return metric(t, b.reg, "lapse_renewals_total", renewFailed) == 1 })
	during(t, 200*time.Millisecond, "there is no further renewal", func() bool { return look(source, func() int { return len(m.hides) }) == 1 })
}

// cases MQ-5 and MQ-6
func TestLatenessIsTheDatabasesAndNeverNegative(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.on = func(_ context.Context, ids []string) ([]orders.Outcome, error) {
		out := make([]orders.Outcome, len(ids))
		for i, id := range ids {
			out[i] = orders.Outcome{ID: id, Result: orders.ResultCancelled, Lateness: 9 * time.Minute}
			if id == "2" {
				out[i].Lateness = -time.Hour
			}
		}
		return out, nil
	}
	m := source.expire(t, "1", "2")
	m.bornAt, m.deliverAt = time.Now().Add(time.Hour), time.Now().Add(time.Hour)
	b := setup(t, Config{}, source, store).run(t)
	until(t, "it is acknowledged", func() bool { return source.acked(m) })
	h := find(t, b.reg, "lapse_cancel_lateness_seconds", "").GetHistogram()
	if h.GetSampleCount() != 2 || h.GetSampleSum() != 540 {
		t.Errorf("lateness: %d orders, %v s; want two with 540 s together: nine minutes, and none", h.GetSampleCount(), h.GetSampleSum())
	}
}

func TestAnOutcomeThatIsNotKnownIsParked(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.on = func(_ context.Context, ids []string) ([]orders.Outcome, error) {
		return []orders.Outcome{{ID: ids[0], Result: "vanished"}}, nil
	}
	m := source.expire(t, "1")
	setup(t, Config{}, source, store).run(t)
	until(t, "it is acknowledged", func() bool { return source.acked(m) })
	if parks := store.parks(); len(parks) != 1 || !strings.Contains(parks[0].Reason, "vanished") {
		t.Errorf("parked %+v, want the order with the outcome named", parks)
	}
}

func TestOutcomesOfTheWrongNumberAreAnError(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.on = func(context.Context, []string) ([]orders.Outcome, error) { return []orders.Outcome{}, nil }
	m := source.expire(t, "1", "2")
	setup(t, Config{GiveUpAfter: 50 * time.Millisecond}, source, store).run(t)
	until(t, "it is acknowledged", func() bool { return source.acked(m) })
	if n := len(store.parks()); n != 2 {
		t.Errorf("parked %d orders, want 2", n)
	}
}

func TestTheSourceIsNamedWhenItIsNotReady(t *testing.T) {
	t.Parallel()
	b := start(t, Config{})
	until(t, "it is ready", func() bool { return b.Ready() == nil })
	b.source.mu.Lock()
	b.source.notReady = io.ErrClosedPipe
	b.source.mu.Unlock()
	if err := b.Ready(); err == nil || !strings.Contains(err.Error(), io.ErrClosedPipe.Error()) {
		t.Errorf("ready: %v, want what the source says", err)
	}
}

func TestEveryLabelIsThereFromTheStart(t *testing.T) {
	t.Parallel()
	b := setup(t, Config{}, newFakeSource(), newFakeStore())
	for _, result := range orders.Results() {
		if n := metric(t, b.reg, "lapse_outcomes_total", string(result)); n != 0 {
			t.Errorf("%s: %v", result, n)
		}
	}
	for name, labels := range map[string][]string{
		"lapse_cancel_retries_total":  {"unavailable", "locked", "failed", "panic"},
		"lapse_consumer_parked_total": {"order", "message"},
		"lapse_acks_total":            {"ok", "expired", "failed"},
		"lapse_renewals_total":        {"ok", "failed"},
	} {
		for _, label := range labels {
			if n := metric(t, b.reg, name, label); n != 0 {
				t.Errorf("%s{%s}: %v", name, label, n)
			}
		}
	}
}

func TestTwoConsumersShareARegisterer(t *testing.T) {
	t.Parallel()
	a := setup(t, Config{}, newFakeSource(), newFakeStore())
	store := newFakeStore()
	c, err := New(store, store, newFakeSource(), Config{Registerer: a.reg})
	if err != nil {
		t.Fatal(err)
	}
	a.metrics.received.Inc()
	c.metrics.received.Inc()
	if n := metric(t, a.reg, "lapse_messages_received_total", ""); n != 2 {
		t.Errorf("%v, want 2", n)
	}
}

type earlyStore struct {
	*fakeStore
	early time.Duration
}

func (s earlyStore) EarlyWait() time.Duration { return s.early }

func TestConfigurationIsRefusedWithTheNameOfWhatIsWrong(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	for want, cfg := range map[string]Config{
		"BatchOrders":       {BatchOrders: 501},
		"BatchWait":         {BatchWait: -1},
		"Workers":           {Workers: -1},
		"MaxInHand":         {MaxInHand: -5},
		"EarlyWait":         {EarlyWait: -1},
		"Receivers":         {Receivers: 1000},
		"MaxMessages":       {MaxMessages: 33},
		"Invisible":         {Invisible: 9 * time.Second},
		"CancelTimeout":     {CancelTimeout: time.Minute},
		"Ackers":            {Ackers: -1},
		"ShutdownGrace":     {ShutdownGrace: -1},
		"NewerVersionDelay": {NewerVersionDelay: 2 * time.Hour},
		"BackoffMin":        {BackoffMin: time.Minute},
		"BackoffMax":        {BackoffMax: -1},
		"GiveUpAfter":       {GiveUpAfter: -1},
	} {
		if _, err := New(store, store, source, cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error that names %s", cfg, err, want)
		}
	}
	if _, err := New(nil, store, source, Config{}); err == nil {
		t.Error("no canceller, and no error")
	}
	if _, err := New(store, store, source, Config{}); err != nil {
		t.Errorf("the defaults: %v", err)
	}
}

// An order that the consumer does not wait for and the store did not time anew would be asked about by nobody.
func TestTheEarlyWaitIsTheCancellersOwn(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	c, err := New(earlyStore{store, 5 * time.Second}, store, source, Config{})
	if err != nil || c.cfg.EarlyWait != 5*time.Second {
		t.Errorf("%v, early wait %s, want the store's 5 s", err, c.cfg.EarlyWait)
	}
	if _, err := New(earlyStore{store, 5 * time.Second}, store, source, Config{EarlyWait: time.Second}); err == nil || !strings.Contains(err.Error(), "EarlyWait") {
		t.Errorf("two different early waits: %v, want an error", err)
	}
}
