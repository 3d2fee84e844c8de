package orders_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/orders"
)

var holdLimits = orders.HoldLimits{Min: 10 * time.Second, Max: 10 * time.Minute, GiveUpAfter: 24 * time.Hour}

// overdueBy makes an order whose deadline passed that long ago.
func overdueBy(d time.Duration) func(*orders.NewOrder) {
	return func(n *orders.NewOrder) { n.DeadlineAt = time.Now().Add(-d) }
}

func (b *bundle) doubt(doubts ...orders.Doubt) []orders.Outcome {
	b.t.Helper()
	outcomes, err := b.store.Hold(b.ctx, doubts, holdLimits)
	if err != nil {
		b.t.Fatal(err)
	}
	return outcomes
}

// kinds are the kinds of an order's events, in order.
func (b *bundle) kinds(id int64) string {
	b.t.Helper()
	events, err := b.store.Events(b.ctx, id)
	if err != nil {
		b.t.Fatal(err)
	}
	var kinds []string
	for _, e := range events {
		kinds = append(kinds, e.Kind)
	}
	return strings.Join(kinds, " ")
}

func TestCheckDueWritesWhatCancelDueWouldButCancelsNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	due, paid, cancelled := b.place(overdue).ID, b.place().ID, b.place(overdue).ID
	b.pay(paid)
	b.cancelDue(cancelled)
	early, exempt, held := b.place().ID, b.place(noDeadline).ID, b.place(overdue).ID
	b.doubt(orders.Doubt{ID: held, Reason: "asked"})
	ids := append(text(due, paid, cancelled, early, exempt, held, 77), "x", orders.FormatID(due))
	outcomes, err := b.store.CheckDue(b.ctx, ids)
	if err != nil {
		t.Fatal(err)
	}
	want := []orders.Result{orders.ResultDue, orders.ResultAlreadyPaid, orders.ResultAlreadyCancelled, orders.ResultNotDue, orders.ResultExempt, orders.ResultHeld,
		orders.ResultNotFound, orders.ResultInvalid, orders.ResultDue}
	for i, o := range outcomes {
		if o.Result != want[i] || o.ID != ids[i] {
			t.Errorf("%s: %+v, want %s", ids[i], o, want[i])
		}
	}
	if got := b.get(due); got.Status != orders.Unpaid || b.kinds(due) != "placed" {
		t.Errorf("the due order is %+v with events %s, want it untouched", got, b.kinds(due))
	}
	if got := b.kinds(early); got != "placed retimed" {
		t.Errorf("the early order has the events %q, want it timed anew", got)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM parked"); n != 2 {
		t.Errorf("%d things are parked, want the id without an order and the id that is none", n)
	}
}

func TestAHeldOrderIsNotCancelledBeforeTheHoldEndsAndItsMessageComesAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, c := range []struct{ overdue, hold time.Duration }{
		{time.Second, 10 * time.Second}, {time.Minute, time.Minute}, {5 * time.Hour, 10 * time.Minute},
	} {
		o := b.place(overdueBy(c.overdue))
		out := b.doubt(orders.Doubt{ID: o.ID, Reason: "the gateway says: in progress"})[0]
		if out.Result != orders.ResultHeld || out.Remaining < c.hold || out.Remaining > c.hold+time.Minute {
			t.Errorf("overdue by %s: %+v, want held for about %s", c.overdue, out, c.hold)
		}
		got := b.get(o.ID)
		if got.HoldUntil == nil || got.HoldReason != "the gateway says: in progress" || got.Status != orders.Unpaid {
			t.Errorf("overdue by %s: the order is %+v", c.overdue, got)
			continue
		}
		row, _, err := b.store.Outbox(b.ctx, o.ID)
		if err != nil || row.State != "pending" || !row.DeliverAt.Equal(*got.HoldUntil) {
			t.Errorf("overdue by %s: the outbox row is %+v, %v; want it pending for %s", c.overdue, row, err, got.HoldUntil)
		}
		if out := b.cancelDue(o.ID)[0]; out.Result != orders.ResultHeld {
			t.Errorf("a cancel during the hold: %+v", out)
		}
		after := b.at(got.HoldUntil.Add(time.Millisecond), orders.Config{})
		if out := b.on(after).cancelDue(o.ID)[0]; out.Result != orders.ResultCancelled {
			t.Errorf("a cancel after the hold: %+v", out)
		}
	}
	b.wantClean()
}

func TestHoldDecidesByTheLockedRow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	paid, cancelled, extended := b.place(overdue).ID, b.place(overdue).ID, b.place(overdue).ID
	b.pay(paid)
	b.cancelDue(cancelled)
	if _, err := b.store.ExtendDeadline(b.ctx, extended, time.Now().Add(time.Hour), "support"); err != nil {
		t.Fatal(err)
	}
	held := b.place(overdue).ID
	first := b.doubt(orders.Doubt{ID: held, Reason: "first"})[0]
	before := b.db.Text(t, "SELECT GROUP_CONCAT(CONCAT_WS(',', id, status, deadline_at, hold_until, hold_reason) ORDER BY id) FROM orders")
	outcomes := b.doubt(orders.Doubt{ID: held, Reason: "second"}, orders.Doubt{ID: extended, Close: true}, orders.Doubt{ID: cancelled, Final: true}, orders.Doubt{ID: paid}, orders.Doubt{ID: 77})
	want := []orders.Result{orders.ResultHeld, orders.ResultNotDue, orders.ResultAlreadyCancelled, orders.ResultAlreadyPaid, orders.ResultNotFound}
	for i, o := range outcomes {
		if o.Result != want[i] {
			t.Errorf("%d: %+v, want %s", i, o, want[i])
		}
	}
	if outcomes[0].Remaining > first.Remaining {
		t.Errorf("the hold was prolonged: %s, then %s", first.Remaining, outcomes[0].Remaining)
	}
	if after := b.db.Text(t, "SELECT GROUP_CONCAT(CONCAT_WS(',', id, status, deadline_at, hold_until, hold_reason) ORDER BY id) FROM orders"); after != before {
		t.Errorf("the orders were\n%s\nand are\n%s", before, after)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM gateway_tasks"); n != 0 {
		t.Errorf("%d tasks, want none", n)
	}
	if _, err := b.store.Hold(b.ctx, nil, orders.HoldLimits{Min: time.Minute, Max: time.Second, GiveUpAfter: time.Hour}); !errors.Is(err, orders.ErrInvalid) {
		t.Errorf("limits upside down: %v", err)
	}
}

func TestAnOrderInDoubtForTooLongIsParkedAndStaysUnpaid(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old, final := b.place(overdueBy(25*time.Hour)).ID, b.place(overdue).ID
	held := b.place(overdueBy(23 * time.Hour))
	b.doubt(orders.Doubt{ID: held.ID, Reason: "asked"})
	// Its hold ends after the day is over.
	late := b.at(time.Now().Add(2*time.Hour), orders.Config{})
	outcomes := slices.Concat(b.doubt(orders.Doubt{ID: old, Reason: "no answer"}, orders.Doubt{ID: final, Reason: "refunded", Final: true}),
		b.on(late).doubt(orders.Doubt{ID: held.ID, Reason: "still none"}))
	for _, o := range outcomes {
		if o.Result != orders.ResultParked || o.Remaining != 0 {
			t.Errorf("%+v, want parked", o)
		}
	}
	for id, reason := range map[int64]string{old: "no answer", final: "refunded", held.ID: "still none"} {
		if got := b.db.Text(t, "SELECT reason FROM parked WHERE what = 'order' AND ref = ?", orders.FormatID(id)); got != reason {
			t.Errorf("order %d is parked because %q, want %q", id, got, reason)
		}
		if o := b.get(id); o.Status != orders.Unpaid || o.HoldUntil != nil || o.HoldReason != "" {
			t.Errorf("order %d is %+v, want it unpaid and not held", id, o)
		}
	}
	b.wantClean()
}

func TestACancelByHandWritesTheTaskThatClosesThePaymentPage(t *testing.T) {
	t.Parallel()
	b := setup(t)
	plain := b.place().ID
	if _, err := b.store.Cancel(b.ctx, plain, "u1", "changed my mind"); err != nil {
		t.Fatal(err)
	}
	b = b.on(b.open(orders.Config{CloseOnCancel: true}, func(*mysql.Config) {}))
	closing, paid, due := b.place().ID, b.place().ID, b.place(overdue).ID
	b.pay(paid)
	b.cancelDue(due) // by message: whoever has a gateway has asked it before
	for _, id := range []int64{closing, closing, paid} {
		if _, err := b.store.Cancel(b.ctx, id, "u1", "changed my mind"); err != nil {
			t.Fatal(err)
		}
	}
	claim, err := b.store.ClaimTasks(b.ctx, 10, time.Minute)
	if err != nil || len(claim.Rows) != 1 || claim.Rows[0] != (orders.Task{OrderID: closing, Kind: orders.TaskClose}) {
		t.Fatalf("claimed %+v, %v; want the task of order %d alone", claim, err, closing)
	}
	b.wantClean()
}

// The gateway did not answer at the deadline, and the shop gives the customer another day: the page must stay open for it.
func TestACloseIsDroppedWhenTheDeadlineIsMoved(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id, other := b.place(overdue).ID, b.place(overdue).ID
	if out := b.doubt(orders.Doubt{ID: id, Reason: "silent", Close: true}, orders.Doubt{ID: other, Reason: "silent", Close: true}); out[0].Result != orders.ResultHeld || out[1].Result != orders.ResultHeld {
		t.Fatalf("held: %+v", out)
	}
	if _, err := b.store.ExtendDeadline(b.ctx, id, time.Now().Add(24*time.Hour), "support"); err != nil {
		t.Fatal(err)
	}
	claim, err := b.store.ClaimTasks(b.ctx, 10, time.Minute)
	if err != nil || len(claim.Rows) != 1 || claim.Rows[0].OrderID != other {
		t.Fatalf("claimed %+v, %v; want the close of the other order alone", claim, err)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM gateway_tasks"); n != 1 {
		t.Errorf("%d tasks are left, want 1", n)
	}
	if got := b.kinds(id); got != "placed held extended gateway" {
		t.Errorf("events %q", got)
	}
}

func TestATaskIsRepeatedUntilItsAnswerIsThere(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.place(overdue).ID
	b.doubt(orders.Doubt{ID: id, Reason: "no answer", Close: true})
	claim, err := b.store.ClaimTasks(b.ctx, 10, time.Minute)
	if err != nil || len(claim.Rows) != 1 {
		t.Fatalf("claimed %+v, %v; want one task", claim, err)
	}
	if again, err := b.store.ClaimTasks(b.ctx, 10, time.Minute); err != nil || len(again.Rows) != 0 {
		t.Errorf("claimed by two: %+v, %v", again, err)
	}
	if held, err := b.store.TaskRetry(b.ctx, claim.Token, claim.Rows[0], time.Hour, errors.New("timed out")); err != nil || !held {
		t.Fatalf("put off: %t, %v", held, err)
	}
	if held, err := b.store.TaskRetry(b.ctx, claim.Token, claim.Rows[0], time.Hour, errors.New("timed out")); err != nil || held {
		t.Errorf("put off without the lease: %t, %v", held, err)
	}
	later := b.on(b.at(time.Now().Add(2*time.Hour), orders.Config{}))
	claim, err = later.store.ClaimTasks(b.ctx, 10, time.Minute)
	if err != nil || len(claim.Rows) != 1 || claim.Rows[0].Attempts != 1 {
		t.Fatalf("after the pause: %+v, %v; want the task with one attempt", claim, err)
	}
	// The task begins anew while somebody works on it: that one's answer does not end it.
	if out := later.doubt(orders.Doubt{ID: id, Reason: "again", Close: true})[0]; out.Result != orders.ResultHeld {
		t.Fatalf("held again: %+v", out)
	}
	if held, err := b.store.TaskDone(b.ctx, claim.Token, claim.Rows[0], "closed"); err != nil || held {
		t.Errorf("ended with a lost lease: %t, %v", held, err)
	}
	if claim, err = later.store.ClaimTasks(b.ctx, 10, time.Minute); err != nil || len(claim.Rows) != 1 || claim.Rows[0].Attempts != 0 {
		t.Fatalf("begun anew: %+v, %v", claim, err)
	}
	if owed, err := b.store.Owed(b.ctx); err != nil || owed.Tasks != 1 {
		t.Errorf("owed: %+v, %v", owed, err)
	}
	if held, err := b.store.TaskDone(b.ctx, claim.Token, claim.Rows[0], "closed"); err != nil || !held {
		t.Fatalf("ended: %t, %v", held, err)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM gateway_tasks"); n != 0 {
		t.Errorf("%d tasks are left", n)
	}
	if got := b.kinds(id); got != "placed held held gateway" {
		t.Errorf("events %q", got)
	}
}

// lateRefund makes a cancelled order whose money came too late.
func (b *bundle) lateRefund() orders.Payment {
	b.t.Helper()
	id := b.place(overdue).ID
	b.cancelDue(id)
	if got := b.pay(id); got.Refund != 1000 {
		b.t.Fatalf("late payment: %+v", got)
	}
	return payment(id)
}

func TestARefundIsClaimedByOneAndDoneOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := b.lateRefund()
	claim, err := b.store.ClaimRefunds(b.ctx, "test", 10, time.Minute)
	want := orders.PendingRefund{Gateway: "test", TransactionID: p.TransactionID, OrderID: p.OrderID, Amount: 1000, Currency: "EUR", Reason: orders.RefundLate}
	if err != nil || len(claim.Rows) != 1 || claim.Rows[0] != want {
		t.Fatalf("claimed %+v, %v; want %+v", claim, err, want)
	}
	if again, err := b.store.ClaimRefunds(b.ctx, "test", 10, time.Minute); err != nil || len(again.Rows) != 0 {
		t.Errorf("claimed by two: %+v, %v", again, err)
	}
	// The lease ends, and another has it: the first one's marks match nothing.
	later := b.on(b.at(time.Now().Add(2*time.Minute), orders.Config{}))
	second, err := later.store.ClaimRefunds(b.ctx, "test", 10, time.Minute)
	if err != nil || len(second.Rows) != 1 {
		t.Fatalf("claimed after the lease: %+v, %v", second, err)
	}
	for what, mark := range map[string]func() (bool, error){
		"done": func() (bool, error) { return b.store.RefundDone(b.ctx, claim.Token, claim.Rows[0], "R1") },
		"put off": func() (bool, error) {
			return b.store.RefundRetry(b.ctx, claim.Token, claim.Rows[0], time.Second, errors.New("x"))
		},
		"given up": func() (bool, error) { return b.store.RefundGivenUp(b.ctx, claim.Token, claim.Rows[0], "x") },
	} {
		if held, err := mark(); err != nil || held {
			t.Errorf("%s with a lost lease: %t, %v", what, held, err)
		}
	}
	if held, err := b.store.RefundDone(b.ctx, second.Token, second.Rows[0], "R1"); err != nil || !held {
		t.Fatalf("done: %t, %v", held, err)
	}
	if held, err := b.store.RefundDone(b.ctx, second.Token, second.Rows[0], "R1"); err != nil || held {
		t.Errorf("done twice: %t, %v", held, err)
	}
	if got := b.db.Text(t, "SELECT CONCAT_WS(' ', state, gateway_refund_id, attempts, lease_token IS NULL) FROM refunds"); got != "done R1 1 1" {
		t.Errorf("the refund is %q", got)
	}
	if got := b.kinds(p.OrderID); got != "placed cancelled refund refunded" {
		t.Errorf("events %q", got)
	}
	b.wantClean()
}

func TestARefundThatIsGivenUpIsParkedWithItsReason(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := b.lateRefund()
	claim, err := b.store.ClaimRefunds(b.ctx, "test", 10, time.Minute)
	if err != nil || len(claim.Rows) != 1 {
		t.Fatalf("claimed %+v, %v", claim, err)
	}
	if held, err := b.store.RefundRetry(b.ctx, claim.Token, claim.Rows[0], time.Hour, errors.New("no connection")); err != nil || !held {
		t.Fatalf("put off: %t, %v", held, err)
	}
	if again, err := b.store.ClaimRefunds(b.ctx, "test", 10, time.Minute); err != nil || len(again.Rows) != 0 {
		t.Errorf("claimed before its pause is over: %+v, %v", again, err)
	}
	later := b.on(b.at(time.Now().Add(2*time.Hour), orders.Config{}))
	if claim, err = later.store.ClaimRefunds(b.ctx, "test", 10, time.Minute); err != nil || len(claim.Rows) != 1 || claim.Rows[0].Attempts != 1 {
		t.Fatalf("claimed %+v, %v; want it with one attempt", claim, err)
	}
	if held, err := later.store.RefundGivenUp(b.ctx, claim.Token, claim.Rows[0], "the account is closed"); err != nil || !held {
		t.Fatalf("given up: %t, %v", held, err)
	}
	if got := b.db.Text(t, "SELECT reason FROM parked WHERE what = 'payment' AND ref = ?", "test:"+p.TransactionID); !strings.Contains(got, "the account is closed") || !strings.Contains(got, "1000 EUR") {
		t.Errorf("parked because %q", got)
	}
	if owed, err := b.store.Owed(b.ctx); err != nil || owed.GivenUpRefund != 1 || owed.Refunds != 0 {
		t.Errorf("owed: %+v, %v", owed, err)
	}
	events, err := b.store.Events(b.ctx, p.OrderID)
	if err != nil {
		t.Fatal(err)
	}
	last := events[len(events)-1]
	if !slices.ContainsFunc(events, func(e orders.Event) bool { return e.Kind == orders.EventRefundGivenUp }) || !json.Valid(last.Detail) {
		t.Errorf("events %+v, want the refund given up", events)
	}
	// Somebody deals with it by hand, and says so: nobody is waited for any longer.
	parked := b.db.Int(t, "SELECT id FROM parked WHERE what = 'payment'")
	if _, done, err := b.store.DiscardParked(b.ctx, parked, "ann", "paid back in cash"); err != nil || !done {
		t.Fatalf("discarded: %t, %v", done, err)
	}
	if owed, err := b.store.Owed(b.ctx); err != nil || owed.GivenUpRefund != 0 {
		t.Errorf("owed after the discard: %+v, %v", owed, err)
	}
	b.wantClean()
}
