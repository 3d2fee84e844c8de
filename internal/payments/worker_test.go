package payments_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/internal/payments"
	"github.com/lapse-orders/lapse/internal/payments/paytest"
	"github.com/lapse-orders/lapse/orders"
)

// owe makes n cancelled orders whose money came too late.
func (b *bundle) owe(t *testing.T, n int) []orders.Payment {
	t.Helper()
	list := make([]orders.Payment, n)
	for i := range list {
		id := b.place(t)
		if _, err := b.store.CancelDue(t.Context(), []string{orders.FormatID(id)}); err != nil {
			t.Fatal(err)
		}
		list[i] = notice(id)
		if got, err := b.store.RecordPayment(t.Context(), list[i]); err != nil || got.Refund != 1000 {
			t.Fatalf("late payment: %+v, %v", got, err)
		}
	}
	return list
}

func (b *bundle) refundsIn(t *testing.T, state string) int {
	t.Helper()
	return int(b.db.Int(t, "SELECT COUNT(*) FROM refunds WHERE state = ?", state))
}

// Money that cannot stay: late, twice, too much, another currency. Each goes back once, with two workers at it.
func TestEveryPaymentThatCannotStayEndsInOneRefund(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.owe(t, 20)
	want := map[string]int64{orders.RefundLate: 20 * 1000}
	pay := func(id int64, transaction string, amount int64, currency string) {
		t.Helper()
		for range 2 { // every notice comes twice
			if _, err := b.store.RecordPayment(t.Context(), orders.Payment{Gateway: gatewayName, TransactionID: transaction, OrderID: id, Currency: currency, Amount: amount}); err != nil {
				t.Fatal(err)
			}
		}
	}
	twice, more, less, other := b.place(t), b.place(t), b.place(t), b.place(t)
	pay(twice, "first", 1000, "EUR")
	pay(twice, "second", 1000, "EUR")
	pay(more, "more", 1500, "EUR")
	pay(less, "less", 10, "EUR")
	pay(other, "other", 1000, "USD")
	want[orders.RefundDuplicate], want[orders.RefundExcess], want[orders.RefundMismatch] = 1000, 500, 1010
	for range 2 {
		b.work(t, payments.WorkerConfig{})
	}
	eventually(t, "all are done", func() bool { return b.refundsIn(t, "done") == 24 })
	got := map[string]int64{}
	for _, r := range b.service.Refunds() {
		got[r.Reason] += r.Amount
		if r.Calls != 1 {
			t.Errorf("refund %+v was asked for %d times by workers that all live", r, r.Calls)
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("refunded %v, want %v", got, want)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM refunds WHERE gateway_refund_id LIKE 'R-%'"); n != 24 {
		t.Errorf("%d refunds have the gateway's id, want 24", n)
	}
	if n := b.db.Int(t, "SELECT COUNT(DISTINCT order_id) FROM order_events WHERE kind = 'refunded'"); n != 24 {
		t.Errorf("%d orders tell of their refund, want 24", n)
	}
	b.wantClean(t)
}

// The call arrives and its answer does not: the refund may have been made. Whoever asks again sends the same key.
func TestARefundWhoseAnswerWasLostIsAskedForAgainWithTheSameKey(t *testing.T) {
	t.Parallel()
	b := setupWith(t, payments.HTTPConfig{Timeout: 200 * time.Millisecond})
	b.owe(t, 3)
	var lost atomic.Int64
	b.service.After(func(_ paytest.Call, _ http.ResponseWriter, r *http.Request) bool {
		if lost.Add(1) > 9 {
			return false
		}
		<-r.Context().Done()
		return true
	})
	b.work(t, payments.WorkerConfig{BackoffMin: time.Millisecond, BackoffMax: 5 * time.Millisecond})
	eventually(t, "all are done", func() bool { return b.refundsIn(t, "done") == 3 })
	list := b.service.Refunds()
	if len(list) != 3 {
		t.Errorf("%d refunds were made, want 3", len(list))
	}
	asked := 0
	for _, r := range list {
		asked += r.Calls
		if r.Key != payments.RefundKey(gatewayName, r.TransactionID) {
			t.Errorf("the key of %s is %s", r.TransactionID, r.Key)
		}
	}
	if asked <= 3 {
		t.Errorf("%d calls for 3 refunds; no answer was lost", asked)
	}
	b.wantClean(t)
}

func TestTheKeyOfARefundIsThatOfItsPaymentAlone(t *testing.T) {
	t.Parallel()
	key := payments.RefundKey("bank", "T-1")
	// Pinned: a new version that made other keys would make refunds twice.
	if want := "e04dee1eea39f5cccec05aff46b2c112d4f4a4494ffb0e70111560fda7095aad"; key != want {
		t.Errorf("the key is %s, want %s", key, want)
	}
	for _, other := range [][2]string{{"bank", "T-2"}, {"bankT", "-1"}, {"", "bankT-1"}, {"BANK", "T-1"}} {
		if payments.RefundKey(other[0], other[1]) == key {
			t.Errorf("%q has the same key", other)
		}
	}
}

// What the gateway says about a refund.
func TestARefundThatCannotBeMadeIsParkedAndOneThatIsUnderWayIsAskedForAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	list := b.owe(t, 3)
	refused, pending, odd := fmt.Sprint(list[0].OrderID), fmt.Sprint(list[1].OrderID), fmt.Sprint(list[2].OrderID)
	var asked atomic.Int64
	b.service.Before(func(call paytest.Call, w http.ResponseWriter, _ *http.Request) bool {
		switch call.OrderID {
		case refused:
			fmt.Fprint(w, `{"state":"refused","detail":"the account is closed"}`)
		case pending:
			if asked.Add(1) > 3 {
				return false
			}
			fmt.Fprint(w, `{"state":"pending"}`)
		case odd:
			fmt.Fprint(w, `{"state":"maybe"}`)
		}
		return true
	})
	b.work(t, payments.WorkerConfig{BackoffMin: time.Millisecond, BackoffMax: 5 * time.Millisecond, MaxAttempts: 6})
	eventually(t, "each has its end", func() bool { return b.refundsIn(t, "done") == 1 && b.refundsIn(t, "given_up") == 2 })
	for id, want := range map[string]string{refused: "the gateway refuses it: the account is closed", odd: `tried 6 times, the last time: refund of payment`} {
		got := b.db.Text(t, "SELECT p.reason FROM parked p JOIN refunds r ON p.ref = CONCAT(r.gateway, ':', r.transaction_id) WHERE p.what = 'payment' AND r.order_id = ?", id)
		if !strings.Contains(got, want) || !strings.Contains(got, "1000 EUR") {
			t.Errorf("the refund of order %s is parked because %q, want because %q", id, got, want)
		}
	}
	if n := b.db.Int(t, "SELECT attempts FROM refunds WHERE order_id = ?", pending); n != 4 {
		t.Errorf("the pending refund was done after %d attempts, want 4", n)
	}
	if n := b.metric(t, "lapse_refund_worker_results_total", map[string]string{"kind": "refund", "result": "given_up"}); n != 2 {
		t.Errorf("%v refunds given up are counted, want 2", n)
	}
	// A person has cleared it up with the bank, and puts it back.
	b.service.Before(nil)
	b.db.Exec(t, "UPDATE refunds SET state = 'pending', attempts = 0, available_at = UTC_TIMESTAMP(3) WHERE state = 'given_up'")
	eventually(t, "they are made after all", func() bool { return b.refundsIn(t, "done") == 3 })
	b.wantClean(t)
}

// Money of another gateway must not be asked of this one, nor given up by its worker: two gateways share a database.
func TestARefundIsLeftToTheWorkerOfItsGateway(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.place(t)
	if _, err := b.store.RecordPayment(t.Context(), orders.Payment{Gateway: "other", TransactionID: "1", OrderID: id, Currency: "EUR", Amount: 1200}); err != nil {
		t.Fatal(err)
	}
	b.owe(t, 1) // later, and made before it
	b.work(t, payments.WorkerConfig{})
	eventually(t, "its own refund is made, and the other one is counted", func() bool {
		return b.refundsIn(t, "done") == 1 && b.metric(t, "lapse_gateway_owed", map[string]string{"kind": "refund"}) == 1
	})
	if n := b.db.Int(t, "SELECT COUNT(*) FROM refunds WHERE gateway = 'other' AND state = 'pending' AND attempts = 0 AND lease_token IS NULL"); n != 1 {
		t.Error("the refund of the other gateway was touched")
	}
	if n := b.service.Calls("refund", id); n != 0 {
		t.Errorf("the gateway was asked %d times for money that another has", n)
	}
	b.work(t, payments.WorkerConfig{Name: "other", Registerer: prometheus.NewRegistry()})
	eventually(t, "the other one's worker makes it", func() bool { return b.refundsIn(t, "done") == 2 })
	b.wantClean(t)
}

// A worker that is stopped finishes what it has in hand.
func TestAWorkerThatIsStoppedFinishesWhatItHasInHand(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.owe(t, 2)
	arrived, free := make(chan struct{}, 2), make(chan struct{})
	b.service.Before(func(_ paytest.Call, _ http.ResponseWriter, r *http.Request) bool {
		arrived <- struct{}{}
		select {
		case <-free:
		case <-r.Context().Done():
		}
		return false
	})
	w, err := payments.NewWorker(b.store, b.gateway, payments.WorkerConfig{Name: gatewayName, Poll: 5 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(t.Context())
	defer end()
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }() // ends with ctx
	for range 2 {
		select {
		case <-arrived:
		case <-time.After(limit):
			t.Fatal("the refunds are not asked for")
		}
	}
	end()
	close(free)
	if err := <-done; err != nil {
		t.Errorf("it ends with %v", err)
	}
	if n := b.refundsIn(t, "done"); n != 2 {
		t.Errorf("%d refunds are done, want both", n)
	}
}

// What the gateway says of the money is refused for good: it is the money of another order, or none that can be written.
func TestACloseWhoseMoneyCannotBeRecordedEndsAndIsParkedOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	payer, other, odd, good := b.place(t), b.place(t), b.place(t), b.place(t)
	if _, err := b.store.RecordPayment(t.Context(), notice(payer)); err != nil {
		t.Fatal(err)
	}
	b.service.Pay(other, money(payer))
	unnamed := money(odd)
	unnamed.TransactionID = " blank"
	b.service.Pay(odd, unnamed)
	for _, id := range []int64{other, odd, good} {
		if _, err := b.store.Cancel(t.Context(), id, "u1", "changed my mind"); err != nil {
			t.Fatal(err)
		}
	}
	b.work(t, payments.WorkerConfig{BackoffMin: time.Millisecond, BackoffMax: 5 * time.Millisecond})
	eventually(t, "every task has its end", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM gateway_tasks") == 0 })
	for id, want := range map[int64]string{other: "paid (conflict): record payment", odd: "paid (invalid): record payment", good: "closed"} {
		got := b.db.Text(t, "SELECT COALESCE(GROUP_CONCAT(JSON_UNQUOTE(JSON_EXTRACT(detail, '$.answer'))), '') FROM order_events WHERE kind = 'gateway' AND order_id = ?", id)
		if !strings.HasPrefix(got, want) || strings.Count(got, "record payment") > 1 {
			t.Errorf("order %d: the gateway's answer is %q, want %q", id, got, want)
		}
		if n := b.service.Calls("close", id); n != 1 {
			t.Errorf("order %d: the gateway was told %d times, want once", id, n)
		}
	}
	got := b.db.Text(t, "SELECT GROUP_CONCAT(CONCAT_WS(' ', what, ref, times, state) ORDER BY what DESC) FROM parked")
	if want := fmt.Sprintf("payment %s:%s 1 parked,order %d 1 parked", gatewayName, money(payer).TransactionID, odd); got != want {
		t.Errorf("parked is %q, want %q", got, want)
	}
	if reason := b.db.Text(t, "SELECT reason FROM parked WHERE what = 'order'"); !strings.Contains(reason, "the gateway reports a payment that cannot be recorded") || !strings.Contains(reason, "blank") {
		t.Errorf("the order is parked because %q", reason)
	}
	eventually(t, "two are counted as given up", func() bool {
		return b.metric(t, "lapse_refund_worker_results_total", map[string]string{"kind": "task", "result": "given_up"}) == 2
	})
	b.wantClean(t)
}

// The database is away, and back.
func TestAWorkerGoesOnWhenTheDatabaseIsBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.owe(t, 1)
	ledger := &flaky{Ledger: b.store}
	ledger.down.Store(true)
	w, err := payments.NewWorker(ledger, b.gateway, payments.WorkerConfig{Name: gatewayName, Poll: 5 * time.Millisecond, BackoffMin: 5 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Ready(); !errors.Is(err, payments.ErrStopped) {
		t.Errorf("before it runs: %v", err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }() // ends with ctx
	eventually(t, "it says what is missing", func() bool { return errors.Is(w.Ready(), errAway) })
	if err := w.Run(ctx); !errors.Is(err, payments.ErrRunning) {
		t.Errorf("run twice: %v", err)
	}
	ledger.down.Store(false)
	eventually(t, "it is ready", func() bool { return w.Ready() == nil })
	eventually(t, "the refund is done", func() bool { return b.refundsIn(t, "done") == 1 })
	stop()
	if err := <-done; err != nil {
		t.Errorf("it ends with %v", err)
	}
}

var errAway = errors.New("the database is away")

// flaky is a ledger whose claims fail while it is down.
type flaky struct {
	payments.Ledger
	down atomic.Bool
}

func (f *flaky) ClaimRefunds(ctx context.Context, gateway string, limit int, lease time.Duration) (orders.RefundClaim, error) {
	if f.down.Load() {
		return orders.RefundClaim{}, errAway
	}
	return f.Ledger.ClaimRefunds(ctx, gateway, limit, lease)
}

func (f *flaky) ClaimTasks(ctx context.Context, limit int, lease time.Duration) (orders.TaskClaim, error) {
	if f.down.Load() {
		return orders.TaskClaim{}, errAway
	}
	return f.Ledger.ClaimTasks(ctx, limit, lease)
}

// What is owed can be seen.
func TestWhatIsOwedIsMeasured(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.owe(t, 2)
	if _, err := b.store.Cancel(t.Context(), b.place(t), "u1", "changed my mind"); err != nil {
		t.Fatal(err)
	}
	b.db.Exec(t, "UPDATE refunds SET created_at = created_at - INTERVAL 1 HOUR, available_at = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR")
	b.service.Before(paytest.Status(503, paytest.All))
	b.work(t, payments.WorkerConfig{})
	eventually(t, "the gauges show it", func() bool {
		age := b.metric(t, "lapse_gateway_owed_oldest_seconds", map[string]string{"kind": "refund"})
		return b.metric(t, "lapse_gateway_owed", map[string]string{"kind": "refund"}) == 2 && b.metric(t, "lapse_gateway_owed", map[string]string{"kind": "task"}) == 1 && age >= 3600 && age < 7200
	})
}
