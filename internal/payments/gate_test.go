package payments_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/payments"
	"github.com/lapse-orders/lapse/internal/payments/paytest"
	"github.com/lapse-orders/lapse/orders"
)

// What a payment service may say about a due order, and what becomes of the order. The words of the usual gateways stand beside those of the
// contract that a service turns them into, see docs/gateway.md.
//
// case PAY-4
func TestWhatTheGatewaySaysDecidesWhatBecomesOfADueOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	g := b.gate(t, payments.GateConfig{})
	for _, c := range []struct {
		name, state string
		fault       paytest.Fault
		want        orders.Result
		status      orders.Status
		closes      int
		reason      string
	}{
		{name: "NOTPAY", state: "unpaid", want: orders.ResultCancelled, status: orders.Cancelled, closes: 1},
		{name: "CLOSED", state: "closed", want: orders.ResultCancelled, status: orders.Cancelled},
		{name: "NOT_EXIST", state: "none", want: orders.ResultCancelled, status: orders.Cancelled, closes: 1},
		{name: "SUCCESS", state: "paid", want: orders.ResultAlreadyPaid, status: orders.Paid},
		{name: "USERPAYING", state: "in_progress", want: orders.ResultHeld, status: orders.Unpaid, reason: "in_progress"},
		{name: "REFUND", state: "refunded", want: orders.ResultParked, status: orders.Unpaid},
		{name: "unknown", state: "unknown", want: orders.ResultHeld, status: orders.Unpaid, reason: "unknown"},
		{name: "a word of no contract", state: "FOO\x1b[2J", want: orders.ResultHeld, status: orders.Unpaid, reason: `"FOO\x1b[2J" is none of the contract`},
		{name: "no state", state: "", want: orders.ResultHeld, status: orders.Unpaid, reason: "none of the contract"},
		{name: "5xx", state: "unpaid", fault: paytest.Status(502, paytest.All), want: orders.ResultHeld, status: orders.Unpaid, reason: "502"},
		{name: "4xx", state: "unpaid", fault: paytest.Status(404, paytest.All), want: orders.ResultHeld, status: orders.Unpaid, reason: "404"},
	} {
		id := b.place(t)
		b.service.Set(id, c.state)
		if c.state == "paid" {
			b.service.Pay(id, money(id))
		}
		b.service.Before(c.fault)
		out := cancel(t, g, id)[0]
		b.service.Before(nil)
		o := b.get(t, id)
		if out.Result != c.want || o.Status != c.status {
			t.Errorf("%s: %+v, the order is %s; want %s, %s", c.name, out, o.Status, c.want, c.status)
		}
		if held := o.HoldUntil != nil; held != (c.want == orders.ResultHeld) || !strings.Contains(o.HoldReason, c.reason) {
			t.Errorf("%s: held until %v because %q, want because of %q", c.name, o.HoldUntil, o.HoldReason, c.reason)
		}
		if strings.ContainsRune(o.HoldReason, '\x1b') {
			t.Errorf("%s: the gateway's words are kept as they came: %q", c.name, o.HoldReason)
		}
		if n := b.service.Calls("close", id); n != c.closes {
			t.Errorf("%s: close was called %d times, want %d", c.name, n, c.closes)
		}
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM parked WHERE what = 'order'"); n != 1 {
		t.Errorf("%d orders are parked, want the refunded one", n)
	}
	b.wantClean(t)
}

// Only what would be cancelled is asked about.
func TestTheGatewayIsNotAskedAboutOrdersThatAreNotDue(t *testing.T) {
	t.Parallel()
	b := setup(t)
	g := b.gate(t, payments.GateConfig{})
	paid, cancelled, held := b.place(t), b.place(t), b.place(t)
	if _, err := b.store.RecordPayment(t.Context(), notice(paid)); err != nil {
		t.Fatal(err)
	}
	if _, err := b.store.Cancel(t.Context(), cancelled, "u1", "changed my mind"); err != nil {
		t.Fatal(err)
	}
	if _, err := b.store.Hold(t.Context(), []orders.Doubt{{ID: held}}, orders.HoldLimits{Min: time.Minute, Max: time.Minute, GiveUpAfter: time.Hour}); err != nil {
		t.Fatal(err)
	}
	soon := b.place(t, func(n *orders.NewOrder) { n.DeadlineAt = time.Now().Add(time.Second) })
	never := b.place(t, func(n *orders.NewOrder) { n.DeadlineAt, n.NoDeadline = time.Time{}, true })
	due := b.place(t)
	outcomes := cancel(t, g, paid, cancelled, held, soon, never, 77, due, due)
	want := []orders.Result{orders.ResultAlreadyPaid, orders.ResultAlreadyCancelled, orders.ResultHeld, orders.ResultNotDue, orders.ResultExempt, orders.ResultNotFound,
		orders.ResultCancelled, orders.ResultAlreadyCancelled}
	for i, o := range outcomes {
		if o.Result != want[i] {
			t.Errorf("outcome %d: %+v, want %s", i, o, want[i])
		}
	}
	if all, of := b.service.Calls("status", 0), b.service.Calls("status", due); all != 1 || of != 1 {
		t.Errorf("%d orders were asked about, the due one %d times; want 1 and 1", all, of)
	}
	if all := b.service.Calls("close", 0); all != 1 {
		t.Errorf("%d pages were closed, want that of the due one", all)
	}
}

// An order whose deadline passes between the look at its row and the cancel is not slipped through unasked.
func TestAnOrderThatBecomesDueWhileOthersAreAskedAboutIsNotCancelledUnasked(t *testing.T) {
	t.Parallel()
	b := setup(t)
	deadline := time.Now().Add(time.Second)
	soon := b.place(t, func(n *orders.NewOrder) { n.DeadlineAt = deadline })
	due := b.place(t)
	b.service.Before(func(paytest.Call, http.ResponseWriter, *http.Request) bool {
		eventually(t, "the other deadline has passed", func() bool {
			return b.db.Int(t, "SELECT deadline_at < UTC_TIMESTAMP(3) FROM orders WHERE id = ?", soon) == 1
		})
		return false
	})
	g := b.gate(t, payments.GateConfig{})
	if out := cancel(t, g, soon, due); out[0].Result != orders.ResultNotDue || out[1].Result != orders.ResultCancelled {
		t.Errorf("outcomes %+v, want not due and cancelled", out)
	}
	if o := b.get(t, soon); o.Status != orders.Unpaid || b.service.Calls("status", soon) != 0 {
		t.Errorf("the order is %s, want it unpaid and not asked about", o.Status)
	}
}

// case PAY-2, PAY-3
func TestAPageIsClosedOnceAndASecondCloseIsNoFailure(t *testing.T) {
	t.Parallel()
	b := setup(t)
	g := b.gate(t, payments.GateConfig{})
	id := b.place(t)
	b.service.Set(id, "unpaid")
	if out := cancel(t, g, id)[0]; out.Result != orders.ResultCancelled {
		t.Fatalf("%+v, want cancelled", out)
	}
	// Its message comes again.
	if out := cancel(t, g, id)[0]; out.Result != orders.ResultAlreadyCancelled {
		t.Errorf("the second message: %+v, want already cancelled", out)
	}
	if n := b.service.Calls("close", id); n != 1 {
		t.Errorf("close was called %d times, want once", n)
	}
	// One whose process died between close and commit, and whose gateway says unpaid to status until the day's end.
	again := b.place(t)
	b.service.Set(again, "closed")
	b.service.Before(func(call paytest.Call, w http.ResponseWriter, _ *http.Request) bool {
		if call.Verb != "status" {
			return false
		}
		fmt.Fprint(w, `{"state":"unpaid"}`)
		return true
	})
	if out := cancel(t, g, again)[0]; out.Result != orders.ResultCancelled || b.service.Calls("close", again) != 1 {
		t.Errorf("already closed: %+v after %d closes, want cancelled after one", out, b.service.Calls("close", again))
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM gateway_tasks"); n != 0 {
		t.Errorf("%d tasks, want none", n)
	}
	b.wantClean(t)
}

// The close gets no answer: nobody knows whether the page is open, so the order is not cancelled, and the close is repeated until it is answered.
//
// case PAY-2
func TestACloseWithoutAnAnswerHoldsTheOrderAndIsRepeated(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		// after happens when the service is back, before it is asked again.
		after func(b *bundle, id int64)
		want  orders.Status
	}{
		{"nobody paid", func(*bundle, int64) {}, orders.Cancelled},
		{"the customer paid meanwhile", func(b *bundle, id int64) { b.service.Pay(id, money(id)) }, orders.Paid},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := setupWith(t, payments.HTTPConfig{BreakerFailures: 1000})
			g := b.gate(t, payments.GateConfig{HoldMin: time.Millisecond, HoldMax: time.Millisecond})
			id := b.place(t)
			b.service.Set(id, "unpaid")
			b.service.Before(func(call paytest.Call, _ http.ResponseWriter, _ *http.Request) bool {
				if call.Verb == "close" {
					panic(http.ErrAbortHandler) // the connection ends, and nobody knows what was done
				}
				return false
			})
			if out := cancel(t, g, id)[0]; out.Result != orders.ResultHeld || b.get(t, id).Status != orders.Unpaid {
				t.Fatalf("%+v, the order is %s; want held and unpaid", out, b.get(t, id).Status)
			}
			stop := b.work(t, payments.WorkerConfig{BackoffMin: time.Millisecond, BackoffMax: 5 * time.Millisecond})
			eventually(t, "the close is repeated", func() bool { return b.service.Calls("close", id) > 5 })
			if n := b.db.Int(t, "SELECT COUNT(*) FROM gateway_tasks WHERE order_id = ?", id); n != 1 {
				t.Errorf("%d tasks while the close has no answer, want 1", n)
			}
			c.after(b, id)
			b.service.Before(nil)
			eventually(t, "the close has its answer", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM gateway_tasks") == 0 })
			stop()
			// The message that the hold has promised.
			cancel(t, g, id)
			if o := b.get(t, id); o.Status != c.want {
				t.Errorf("the order is %s, want %s", o.Status, c.want)
			}
			if got := b.service.State(id); c.want == orders.Cancelled && got != "closed" {
				t.Errorf("the order is cancelled and its page is %s", got)
			}
			if n := b.db.Int(t, "SELECT COUNT(*) FROM refunds"); n != 0 {
				t.Errorf("%d refunds, want none", n)
			}
			b.wantClean(t)
		})
	}
}

// A cancel by hand asks nobody. The page is closed afterwards, for as long as that takes; money that came in meanwhile goes back, once.
//
// case PAY-2
func TestThePageOfAnOrderCancelledByHandIsClosedUntilTheGatewayAnswers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	open, paid := b.place(t), b.place(t)
	b.service.Set(open, "unpaid")
	b.service.Set(paid, "in_progress")
	b.service.Before(paytest.Status(503, paytest.Verb("close")))
	for _, id := range []int64{open, paid} {
		if _, err := b.store.Cancel(t.Context(), id, "u1", "changed my mind"); err != nil {
			t.Fatal(err)
		}
	}
	b.work(t, payments.WorkerConfig{BackoffMin: time.Millisecond, BackoffMax: 5 * time.Millisecond})
	eventually(t, "close is tried", func() bool { return b.service.Calls("close", open) > 2 && b.service.Calls("close", paid) > 2 })
	b.service.Before(nil)
	eventually(t, "the open page is closed", func() bool { return b.service.State(open) == "closed" })
	if !b.service.Pay(paid, money(paid)) {
		t.Fatal("the page whose payment is in progress was closed")
	}
	eventually(t, "the money has gone back", func() bool { return len(b.service.Refunds()) == 1 })
	eventually(t, "nothing is left to do", func() bool {
		return b.db.Int(t, "SELECT (SELECT COUNT(*) FROM gateway_tasks) + (SELECT COUNT(*) FROM refunds WHERE state <> 'done')") == 0
	})
	r := b.service.Refunds()[0]
	if r.OrderID != fmt.Sprint(paid) || r.Amount != 1000 || r.TransactionID != money(paid).TransactionID || r.Reason != orders.RefundLate {
		t.Errorf("refunded %+v", r)
	}
	for _, id := range []int64{open, paid} {
		if o := b.get(t, id); o.Status != orders.Cancelled {
			t.Errorf("order %d is %s, want cancelled", id, o.Status)
		}
	}
	b.wantClean(t)
}

// The gateway turns to paid at each of the instants between the first question and the commit.
func TestAPaymentBetweenStatusCloseAndCommitWins(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		set  func(b *bundle, id int64)
		// notified says that the shop hears of it from the gateway's notice.
		notified bool
	}{
		{"after status, before close", func(b *bundle, id int64) {
			b.service.After(func(call paytest.Call, _ http.ResponseWriter, _ *http.Request) bool {
				if call.Verb == "status" {
					b.service.Pay(id, money(id))
				}
				return false
			})
		}, false},
		{"its notice between close and commit", func(b *bundle, id int64) {
			b.service.After(func(call paytest.Call, _ http.ResponseWriter, r *http.Request) bool {
				if call.Verb == "close" {
					if _, err := b.store.RecordPayment(r.Context(), notice(id)); err != nil {
						panic(err)
					}
				}
				return false
			})
		}, true},
		{"its notice between status and close", func(b *bundle, id int64) {
			b.service.After(func(call paytest.Call, _ http.ResponseWriter, r *http.Request) bool {
				if call.Verb == "status" {
					b.service.Pay(id, money(id))
					if _, err := b.store.RecordPayment(r.Context(), notice(id)); err != nil {
						panic(err)
					}
				}
				return false
			})
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			id := b.place(t)
			b.service.Set(id, "unpaid")
			c.set(b, id)
			if out := cancel(t, b.gate(t, payments.GateConfig{}), id)[0]; out.Result != orders.ResultAlreadyPaid {
				t.Errorf("%+v, want already paid", out)
			}
			if o := b.get(t, id); o.Status != orders.Paid {
				t.Errorf("the order is %s, want paid", o.Status)
			}
			if n := b.db.Int(t, "SELECT COUNT(*) FROM refunds"); n != 0 {
				t.Errorf("%d refunds, want none", n)
			}
			if found := b.metric(t, "lapse_gate_payments_total", nil); (found == 1) == c.notified {
				t.Errorf("%v payments were found by asking, notified: %t", found, c.notified)
			}
			b.wantClean(t)
		})
	}
}

// The last instant: the answers are there, and the cancel and the payment's notice go for the row together.
func TestOfACancelAndAPaymentAtTheCommitOneWinsAndTheOtherIsRefunded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const n = 60
	ids := make([]int64, n)
	for i := range ids {
		ids[i] = b.place(t)
		b.service.Set(ids[i], "unpaid")
	}
	closed := make(chan struct{})
	var count atomic.Int64
	b.service.After(func(call paytest.Call, _ http.ResponseWriter, _ *http.Request) bool {
		if call.Verb == "close" && count.Add(1) == n {
			close(closed)
		}
		return false
	})
	var wg sync.WaitGroup
	for part := range 6 {
		wg.Go(func() {
			<-closed
			for _, id := range ids[part*10 : part*10+10] {
				if _, err := b.store.RecordPayment(t.Context(), notice(id)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	outcomes := cancel(t, b.gate(t, payments.GateConfig{}), ids...)
	wg.Wait()
	for i, id := range ids {
		o := b.get(t, id)
		refunds := b.db.Int(t, "SELECT COUNT(*) FROM refunds WHERE order_id = ?", id)
		switch {
		case o.Status == orders.Paid && outcomes[i].Result == orders.ResultAlreadyPaid && refunds == 0:
		case o.Status == orders.Cancelled && outcomes[i].Result == orders.ResultCancelled && refunds == 1:
		default:
			t.Errorf("order %d is %s with %d refunds, its outcome %s", id, o.Status, refunds, outcomes[i].Result)
		}
	}
	b.wantClean(t)
}

// Money that is not what the order costs goes back whole and does not keep the order.
func TestAnOrderPaidWithTheWrongAmountIsCancelledAndItsMoneyRefunded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.place(t)
	p := money(id)
	p.Amount = 10
	b.service.Pay(id, p)
	if out := cancel(t, b.gate(t, payments.GateConfig{}), id)[0]; out.Result != orders.ResultCancelled {
		t.Errorf("%+v, want cancelled", out)
	}
	if got := b.db.Text(t, "SELECT CONCAT_WS(' ', amount, reason, state) FROM refunds WHERE order_id = ?", id); got != "10 mismatch pending" {
		t.Errorf("the refund is %q", got)
	}
	b.wantClean(t)
}

// A payment that cannot be true is not taken for one, nor for none.
func TestAPaymentThatCannotBeRecordedHoldsTheOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	g := b.gate(t, payments.GateConfig{})
	var ids []int64
	for name, payment := range map[string]string{
		"none": `null`, "no transaction": `{"currency":"EUR","amount":"1000"}`, "no currency": `{"transaction_id":"x","amount":"1000"}`,
		"a number": `{"transaction_id":"x","currency":"EUR","amount":1000}`, "nothing": `{"transaction_id":"x","currency":"EUR","amount":"0"}`,
		"not a time": `{"transaction_id":"x","currency":"EUR","amount":"1000","paid_at":"now"}`, "a blank": `{"transaction_id":"x ","currency":"EUR","amount":"1000"}`,
	} {
		id := b.place(t)
		ids = append(ids, id)
		b.service.Before(func(_ paytest.Call, w http.ResponseWriter, _ *http.Request) bool {
			fmt.Fprintf(w, `{"state":"paid","payment":%s}`, payment)
			return true
		})
		if out := cancel(t, g, id)[0]; out.Result != orders.ResultHeld {
			t.Errorf("%s: %+v, want held", name, out)
		}
	}
	// One that contradicts what was recorded.
	known, id := b.place(t), b.place(t)
	b.service.Before(nil)
	if _, err := b.store.RecordPayment(t.Context(), notice(known)); err != nil {
		t.Fatal(err)
	}
	b.service.Pay(id, money(known))
	if out := cancel(t, g, id)[0]; out.Result != orders.ResultHeld || !strings.Contains(b.get(t, id).HoldReason, "was recorded before with another order") {
		t.Errorf("another order's transaction: %+v because %q, want held", out, b.get(t, id).HoldReason)
	}
	for _, id := range append(ids, id) {
		if o := b.get(t, id); o.Status != orders.Unpaid {
			t.Errorf("order %d is %s, want unpaid", id, o.Status)
		}
	}
}

// A gateway that is silent, slow or failing about one order keeps no other order waiting, and no message in hand.
func TestAnOrderWithoutAnAnswerIsHeldAndTheOthersAreNotSlowed(t *testing.T) {
	t.Parallel()
	const within = 8 * time.Second
	for name, fault := range map[string]func(paytest.Call) paytest.Fault{
		"silent": func(c paytest.Call) paytest.Fault {
			return paytest.Silent(func(o paytest.Call) bool { return o.OrderID == c.OrderID })
		},
		"slow": func(c paytest.Call) paytest.Fault {
			return paytest.Slow(within, func(o paytest.Call) bool { return o.OrderID == c.OrderID })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// A try takes longer than all may, so that the bound of the batch is what ends it.
			b := setupWith(t, payments.HTTPConfig{Timeout: limit})
			g := b.gate(t, payments.GateConfig{DecideWithin: within})
			ids := make([]int64, 20)
			for i := range ids {
				ids[i] = b.place(t)
			}
			b.service.Before(fault(paytest.Call{OrderID: fmt.Sprint(ids[7])}))
			done := make(chan []orders.Outcome, 1)
			begun := time.Now()
			go func() { done <- cancel(t, g, ids...) }() // ends with the bound
			eventually(t, "the others are cancelled", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'cancelled'") == 19 })
			select {
			case <-done:
				t.Error("the batch had ended before the others were seen cancelled: they waited for the one")
			default:
			}
			outcomes := <-done
			if took := time.Since(begun); took > within+limit/2 {
				t.Errorf("the batch took %s, its bound is %s", took, within)
			}
			for i, o := range outcomes {
				want := orders.ResultCancelled
				if i == 7 {
					want = orders.ResultHeld
				}
				if o.Result != want {
					t.Errorf("order %d: %+v, want %s", i, o, want)
				}
			}
			b.wantClean(t)
		})
	}
}

// The caller's deadline is kept: half of it is left for what follows the calls.
func TestACallersShorterDeadlineIsEnoughToHold(t *testing.T) {
	t.Parallel()
	b := setupWith(t, payments.HTTPConfig{Timeout: limit})
	b.service.Before(paytest.Silent(paytest.All))
	g := b.gate(t, payments.GateConfig{DecideWithin: limit, Concurrency: 1})
	ids := []string{orders.FormatID(b.place(t)), orders.FormatID(b.place(t)), orders.FormatID(b.place(t))}
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	outcomes, err := g.CancelDue(ctx, ids)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range outcomes {
		if o.Result != orders.ResultHeld {
			t.Errorf("%+v, want held", o)
		}
	}
	if n := b.service.Calls("status", 0); n != 1 {
		t.Errorf("%d calls at once, want 1", n)
	}
}

// One after the other, a gateway that is down would take the time of every batch. After some failures it is left alone.
func TestAGatewayThatIsDownIsLeftAloneUntilItIsBack(t *testing.T) {
	t.Parallel()
	b := setupWith(t, payments.HTTPConfig{BreakerFailures: 3, BreakerPause: 100 * time.Millisecond})
	g := b.gate(t, payments.GateConfig{Concurrency: 1, HoldMin: time.Millisecond, HoldMax: time.Millisecond})
	b.service.Before(paytest.Status(500, paytest.All))
	ids := make([]int64, 20)
	for i := range ids {
		ids[i] = b.place(t)
	}
	for _, o := range cancel(t, g, ids...) {
		if o.Result != orders.ResultHeld {
			t.Errorf("%+v, want held", o)
		}
	}
	if b.metric(t, "lapse_gateway_failures_total", map[string]string{"call": "status", "reason": "not_asked"}) == 0 {
		t.Error("every order was asked about; the gateway was not left alone")
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM gateway_tasks"); n != 0 {
		t.Errorf("%d closes are to be repeated though none was sent", n)
	}
	b.service.Before(nil)
	eventually(t, "the gateway is asked again and the orders are cancelled", func() bool {
		cancel(t, g, ids...)
		return b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'cancelled'") == 20
	})
	if err := b.gateway.Ready(); err != nil {
		t.Errorf("after its recovery: %v", err)
	}
	b.wantClean(t)
}

// What the database cannot do is an error of the batch, as without a gate: nothing is held for it.
func TestAnErrorOfTheDatabaseIsTheBatchs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.place(t)
	down := errors.New("the database is down")
	for name, store := range map[string]*brokenStore{
		"check":  {Store: b.store, check: down},
		"cancel": {Store: b.store, cancel: down},
	} {
		g := b.gate(t, payments.GateConfig{}, store)
		if _, err := g.CancelDue(t.Context(), []string{orders.FormatID(id)}); !errors.Is(err, down) {
			t.Errorf("%s: %v, want the error of the database", name, err)
		}
	}
	b.service.Set(id, "in_progress")
	if _, err := b.gate(t, payments.GateConfig{}, &brokenStore{Store: b.store, hold: down}).CancelDue(t.Context(), []string{orders.FormatID(id)}); !errors.Is(err, down) {
		t.Errorf("hold: %v, want the error of the database", err)
	}
	b.service.Pay(id, money(id))
	if _, err := b.gate(t, payments.GateConfig{}, &brokenStore{Store: b.store, record: down}).CancelDue(t.Context(), []string{orders.FormatID(id)}); !errors.Is(err, down) {
		t.Errorf("record: %v, want the error of the database", err)
	}
	if o := b.get(t, id); o.Status != orders.Unpaid || o.HoldUntil != nil {
		t.Errorf("the order is %+v, want it untouched", o)
	}
}

// brokenStore fails at some verbs.
type brokenStore struct {
	payments.Store
	check, cancel, hold, record error
}

func (s *brokenStore) CheckDue(ctx context.Context, ids []string) ([]orders.Outcome, error) {
	if s.check != nil {
		return nil, s.check
	}
	return s.Store.CheckDue(ctx, ids)
}

func (s *brokenStore) CancelDue(ctx context.Context, ids []string) ([]orders.Outcome, error) {
	if s.cancel != nil {
		return nil, s.cancel
	}
	return s.Store.CancelDue(ctx, ids)
}

func (s *brokenStore) Hold(ctx context.Context, doubts []orders.Doubt, limits orders.HoldLimits) ([]orders.Outcome, error) {
	if s.hold != nil {
		return nil, s.hold
	}
	return s.Store.Hold(ctx, doubts, limits)
}

func (s *brokenStore) RecordPayment(ctx context.Context, p orders.Payment) (orders.PaymentResult, error) {
	if s.record != nil {
		return orders.PaymentResult{}, s.record
	}
	return s.Store.RecordPayment(ctx, p)
}
