package orders_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"gorm.io/gorm"

	"github.com/lapse-orders/lapse/orders"
)

// atOnce runs the functions and lets them go at the same instant.
func atOnce(list ...func()) {
	var ready, done sync.WaitGroup
	start := make(chan struct{})
	for _, f := range list {
		ready.Add(1)
		done.Go(func() {
			ready.Done()
			<-start
			f()
		})
	}
	ready.Wait()
	close(start)
	done.Wait()
}

// case PAY-1
func TestPaymentAndCancelAtTheSameInstantHaveOneWinner(t *testing.T) {
	t.Parallel()
	const total, width = 1000, 8
	b := setup(t)
	b.stock("tea", 3*total)
	ids := make([]int64, total)
	if err := b.shop(&gorm.Config{}).Transaction(func(tx *gorm.DB) error {
		for i := range ids {
			n := orders.NewOrder{Currency: "EUR", Amount: 1000, Items: []orders.Item{{SKU: "tea", Quantity: 3, Price: 100}}}
			overdue(&n)
			o, err := b.store.PlaceTx(b.ctx, tx, n)
			if err != nil {
				return err
			}
			ids[i] = o.ID
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}

	var cancelled, accepted, late atomic.Int64
	var pairs sync.WaitGroup
	for w := range width {
		pairs.Go(func() {
			for i := w; i < total; i += width {
				id := ids[i]
				var out []orders.Outcome
				var paid orders.PaymentResult
				var cancelErr, payErr error
				atOnce(
					func() { out, cancelErr = b.store.CancelDue(b.ctx, text(id)) },
					func() { paid, payErr = b.store.RecordPayment(b.ctx, payment(id)) },
				)
				if cancelErr != nil || payErr != nil {
					t.Errorf("order %d: cancel %v, pay %v", id, cancelErr, payErr)
					return
				}
				switch {
				case out[0].Result == orders.ResultCancelled && paid.Outcome == orders.PaymentLate && paid.Refund == 1000:
					cancelled.Add(1)
					late.Add(1)
				case out[0].Result == orders.ResultAlreadyPaid && paid.Outcome == orders.PaymentAccepted && paid.Refund == 0:
					accepted.Add(1)
				default:
					t.Errorf("order %d: cancel says %+v, payment says %+v", id, out[0], paid)
				}
			}
		})
	}
	pairs.Wait()
	t.Logf("%d cancelled and refunded, %d paid", cancelled.Load(), accepted.Load())
	if cancelled.Load()+accepted.Load() != total {
		t.Errorf("%d cancelled and %d paid do not make %d", cancelled.Load(), accepted.Load(), total)
	}
	for what, want := range map[string]int64{
		"orders WHERE status = 'cancelled'":     cancelled.Load(),
		"stock_ledger WHERE kind = 'release'":   cancelled.Load(),
		"refunds":                               late.Load(),
		"stock_ledger WHERE kind = 'sell'":      accepted.Load(),
		"order_events WHERE kind = 'cancelled'": cancelled.Load(),
		"payments WHERE outcome = 'accepted'":   accepted.Load(),
		"order_events WHERE kind = 'paid'":      accepted.Load(),
		"order_events WHERE kind = 'refund'":    late.Load(),
		"orders WHERE status = 'unpaid'":        0,
		"parked":                                0,
		"outbox WHERE lease_token IS NOT NULL":  0,
		"stock WHERE reserved <> 0":             0,
		"stock WHERE available <> 3000 - sold":  0,
		"order_events WHERE kind = 'cancelled' AND order_id IN (SELECT order_id FROM payments WHERE outcome = 'accepted')": 0,
	} {
		if got := b.db.Int(t, "SELECT COUNT(*) FROM "+what); got != want {
			t.Errorf("%d %s, want %d", got, what, want)
		}
	}
	b.wantClean()
}

// case STK-1, STK-2
func TestOrderIsReleasedOnceHoweverManyCancelIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 1000)
	const rounds, messages = 20, 4
	for range rounds {
		id := b.place(overdue, items(orders.Item{SKU: "tea", Quantity: 3, Price: 100})).ID
		results := make([]orders.Result, messages+2)
		var list []func()
		for i := range messages { // two messages, and the scan twice
			list = append(list, func() {
				out, err := b.store.CancelDue(b.ctx, text(id))
				if err != nil {
					t.Error(err)
					return
				}
				results[i] = out[0].Result
			})
		}
		for i := range 2 { // the customer presses twice
			list = append(list, func() {
				out, err := b.store.Cancel(b.ctx, id, "u1", "changed my mind")
				if err != nil {
					t.Error(err)
					return
				}
				results[messages+i] = out.Result
			})
		}
		atOnce(list...)
		slices.Sort(results)
		want := slices.Repeat([]orders.Result{orders.ResultAlreadyCancelled}, len(results)-1)
		if want = append(want, orders.ResultCancelled); !slices.Equal(results, want) {
			t.Errorf("results %v, want one cancelled", results)
		}
		if n := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE order_id = ? AND kind = 'cancelled'", id); n != 1 {
			t.Errorf("%d cancelled events", n)
		}
	}
	b.wantStock("tea", 1000, 0, 0)
	b.wantClean()
}

// case PAY-5
func TestThreeIdenticalNoticesAtOncePayOnceAndAllAreAnswered(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 100)
	for _, late := range []bool{false, true} {
		for range 10 {
			id := b.place(overdue, items(orders.Item{SKU: "tea", Quantity: 1, Price: 1000})).ID
			want := orders.PaymentResult{Outcome: orders.PaymentAccepted}
			if late {
				b.cancelDue(id)
				want = orders.PaymentResult{Outcome: orders.PaymentLate, Refund: 1000, RefundReason: orders.RefundLate}
			}
			var first atomic.Int64
			notify := func() {
				r, err := b.store.RecordPayment(b.ctx, payment(id))
				if err != nil {
					t.Errorf("a repeated notice is answered with %v", err)
					return
				}
				if !r.Repeated {
					first.Add(1)
				}
				if r.Repeated = false; r != want {
					t.Errorf("result %+v, want %+v", r, want)
				}
			}
			atOnce(notify, notify, notify)
			if first.Load() != 1 {
				t.Errorf("%d notices were the first", first.Load())
			}
			if n := b.db.Int(t, "SELECT COUNT(*) FROM payments WHERE order_id = ?", id); n != 1 {
				t.Errorf("%d payments", n)
			}
		}
	}
	b.wantClean()
}

func TestOneTransactionIDForTwoOrdersAtOnceIsOnePaymentAndOneConflict(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 10 {
		var conflicts, accepted atomic.Int64
		one := func() {
			p := payment(b.place().ID)
			p.TransactionID = fmt.Sprintf("shared-%d", i)
			r, err := b.store.RecordPayment(b.ctx, p)
			switch {
			case errors.Is(err, orders.ErrPaymentConflict):
				conflicts.Add(1)
				if orders.IsUnavailable(err) || orders.IsRetryable(err) {
					t.Errorf("a conflict counts as the database's trouble: %v", err)
				}
			case err != nil:
				t.Error(err)
			case r.Outcome == orders.PaymentAccepted:
				accepted.Add(1)
			}
		}
		atOnce(one, one)
		if conflicts.Load() != 1 || accepted.Load() != 1 {
			t.Errorf("%d conflicts, %d accepted", conflicts.Load(), accepted.Load())
		}
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM parked WHERE what = 'payment'"); n != 10 {
		t.Errorf("%d parked payments, want 10", n)
	}
	b.wantClean()
}

func TestLastPieceIsSoldOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("last", 5)
	var placed, refused atomic.Int64
	var list []func()
	for range 20 {
		list = append(list, func() {
			_, err := b.store.Place(b.ctx, orders.NewOrder{Currency: "EUR", Amount: 1, Items: []orders.Item{{SKU: "last", Quantity: 1, Price: 1}}})
			var short *orders.StockError
			switch {
			case err == nil:
				placed.Add(1)
			case errors.As(err, &short) && errors.Is(err, orders.ErrOutOfStock):
				refused.Add(1)
				if short.SKU != "last" || short.Wanted != 1 || short.Available != 0 {
					t.Errorf("%+v", short)
				}
			default:
				t.Error(err)
			}
		})
	}
	atOnce(list...)
	if placed.Load() != 5 || refused.Load() != 15 {
		t.Errorf("%d placed, %d refused", placed.Load(), refused.Load())
	}
	b.wantStock("last", 0, 5, 0)
	b.wantClean()
}

func TestSameIDPlacedAtOnceIsOneOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 1000)
	for i := range 10 {
		var placed, exists atomic.Int64
		one := func() {
			_, err := b.store.Place(b.ctx, orders.NewOrder{ID: int64(i + 1), Currency: "EUR", Amount: 1, Items: []orders.Item{{SKU: "tea", Quantity: 1, Price: 1}}})
			switch {
			case err == nil:
				placed.Add(1)
			case errors.Is(err, orders.ErrExists):
				exists.Add(1)
			default:
				t.Error(err)
			}
		}
		atOnce(one, one, one, one)
		if placed.Load() != 1 || exists.Load() != 3 {
			t.Errorf("%d placed, %d exist", placed.Load(), exists.Load())
		}
	}
	b.wantStock("tea", 990, 10, 0)
	b.wantClean()
}

// case DB-6
func TestCancelsInBatchesBesideLivePaymentsFailForNoCustomer(t *testing.T) {
	t.Parallel()
	b := setupWith(t, orders.Config{MaxOpenConns: 24})
	const skus = 5
	for i := range skus {
		b.stock(fmt.Sprintf("s%d", i), 1_000_000)
	}
	// Items in an order that is not the lock order, of few SKUs that everybody wants.
	lines := func(r *rand.Rand) func(*orders.NewOrder) {
		var list []orders.Item
		for _, i := range r.Perm(skus)[:2] {
			list = append(list, orders.Item{SKU: fmt.Sprintf("s%d", i), Quantity: 1, Price: 1})
		}
		return items(list...)
	}
	var mu sync.Mutex // guards open
	var open []int64
	var work sync.WaitGroup
	fail := func(what string, err error) {
		if err != nil {
			t.Errorf("%s failed for a customer: %v", what, err)
		}
	}
	const perWorker = 60
	var done atomic.Int64
	for w := range 6 { // customers
		work.Go(func() {
			defer done.Add(1)
			r := rand.New(rand.NewPCG(1, uint64(w)))
			for range perWorker {
				n := orders.NewOrder{Currency: "EUR", Amount: 1000, DeadlineAt: time.Now()}
				lines(r)(&n)
				o, err := b.store.Place(b.ctx, n)
				fail("place", err)
				mu.Lock()
				open = append(open, o.ID)
				id := open[r.IntN(len(open))]
				mu.Unlock()
				switch r.IntN(3) {
				case 0, 1:
					_, err = b.store.RecordPayment(b.ctx, payment(id))
					fail("pay", err)
				default:
					_, err = b.store.ExtendDeadline(b.ctx, id, time.Now().Add(time.Hour), "support")
					fail("extend", err)
				}
			}
		})
	}
	for w := range 3 { // the message path twice, and the scan, over the same orders in any order
		work.Go(func() {
			r := rand.New(rand.NewPCG(2, uint64(w)))
			for done.Load() < 6 {
				mu.Lock()
				batch := slices.Clone(open)
				mu.Unlock()
				r.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
				_, err := b.store.CancelDue(b.ctx, text(batch...))
				fail("cancel", err)
			}
		})
	}
	work.Wait()
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders"); n != 6*perWorker {
		t.Errorf("%d orders, want %d", n, 6*perWorker)
	}
	t.Logf("%d transactions were started again, unseen", b.store.Counters().Retries)
	b.wantClean()
}

// TestDeadlockInAnOwnTransactionIsInvisible provokes one for certain: a stranger locks what a cancel needs last, waits until the cancel
// has what the stranger needs next, and asks for it, with more rows changed, so that the cancel is the one that the server gives up.
func TestDeadlockInAnOwnTransactionIsInvisible(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 10)
	o := b.place(overdue, items(orders.Item{SKU: "tea", Quantity: 3, Price: 100}))
	b.deadlock(o.ID, func() {
		if out, err := b.store.CancelDue(b.ctx, text(o.ID)); err != nil || out[0].Result != orders.ResultCancelled {
			t.Errorf("%+v, %v", out, err)
		}
	})
	if n := b.store.Counters().Retries; n < 1 {
		t.Errorf("%d retries are counted", n)
	}
	b.wantStock("tea", 10, 0, 0)
	b.wantClean()
}

// deadlock runs verb, which locks the order and then the stock of "tea", against a transaction that locks them the other way round, and
// returns when both are over. The verb's transaction is the victim: the other one has changed more rows.
func (b *bundle) deadlock(id int64, verb func()) {
	b.t.Helper()
	b.db.Exec(b.t, "CREATE TABLE IF NOT EXISTS ballast (n INT)")
	stranger, err := b.db.SQL.BeginTx(b.ctx, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = stranger.Rollback() }()
	run := func(query string, args ...any) {
		b.t.Helper()
		if _, err := stranger.ExecContext(b.ctx, query, args...); err != nil {
			b.t.Errorf("%s: %v", query, err)
		}
	}
	run("INSERT INTO ballast SELECT 1 FROM (SELECT 1 UNION ALL SELECT 1 UNION ALL SELECT 1 UNION ALL SELECT 1 UNION ALL SELECT 1) a, (SELECT 1 UNION ALL SELECT 1 UNION ALL SELECT 1 UNION ALL SELECT 1 UNION ALL SELECT 1) b, (SELECT 1 UNION ALL SELECT 1 UNION ALL SELECT 1 UNION ALL SELECT 1) c")
	run("SELECT sku FROM stock WHERE sku = 'tea' FOR UPDATE")
	over := make(chan struct{})
	go func() {
		defer close(over)
		verb()
	}()
	b.awaitLockWait()
	run("SELECT id FROM orders WHERE id = ? FOR UPDATE", id)
	if err := stranger.Commit(); err != nil {
		b.t.Error(err)
	}
	<-over
}

// polling keeps two tests from asking MariaDB in turns who waits.
var polling sync.Mutex

// awaitLockWait waits until a transaction of this database waits for a lock.
func (b *bundle) awaitLockWait() {
	b.t.Helper()
	b.awaitLockWaits(1)
}

// awaitLockWaits waits until so many of them do.
func (b *bundle) awaitLockWaits(n int64) {
	b.t.Helper()
	query := `SELECT COUNT(DISTINCT w.REQUESTING_THREAD_ID) FROM performance_schema.data_lock_waits w JOIN performance_schema.threads h ON h.THREAD_ID = w.REQUESTING_THREAD_ID
		WHERE h.PROCESSLIST_DB = DATABASE()`
	if b.isMariaDB() {
		query = `SELECT COUNT(*) FROM information_schema.INNODB_TRX x JOIN information_schema.PROCESSLIST p ON p.ID = x.trx_mysql_thread_id
			WHERE p.DB = DATABASE() AND x.trx_state = 'LOCK WAIT'`
		// The server renews what this table shows only when nobody has looked for 100 ms.
		polling.Lock()
		defer polling.Unlock()
	}
	eventuallyEvery(b.t, 150*time.Millisecond, fmt.Sprintf("%d wait for a lock", n), func() bool { return b.db.Int(b.t, query) >= n })
}

// TestUnknownIDInACancelBlocksNoInsert: at REPEATABLE READ the lock of a missing row is the lock of a gap, and every order that is placed
// falls into the gap behind the last.
func TestUnknownIDInACancelBlocksNoInsert(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := newProxy(t, b.db.DSN)
	through, err := orders.Open(p.dsn, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = through.Close() }()
	locked, goOn := p.standAtCommit()
	last := b.place()
	var cancel sync.WaitGroup
	cancel.Go(func() {
		if _, err := through.CancelDue(b.ctx, text(last.ID+1000)); err != nil {
			t.Error(err)
		}
	})
	<-locked
	ctx, stop := context.WithTimeout(b.ctx, 4*time.Second)
	defer stop()
	if _, err := b.store.Place(ctx, orders.NewOrder{ID: last.ID + 500, Currency: "EUR"}); err != nil {
		t.Errorf("an order was not placed while a cancel of an unknown id was open: %v", err)
	}
	close(goOn)
	cancel.Wait()
}

// TestOpenClaimBlocksNoCheckout: and no second relay either, which takes the rows that the first did not.
func TestOpenClaimBlocksNoCheckout(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first := make([]int64, 4)
	for i := range first {
		first[i] = b.place().ID
	}
	p := newProxy(t, b.db.DSN)
	through, err := orders.Open(p.dsn, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = through.Close() }()
	locked, goOn := p.standAtCommit()
	var relay sync.WaitGroup
	var claim orders.Claim
	relay.Go(func() {
		var err error
		if claim, err = through.ClaimOutbox(b.ctx, 3, time.Minute); err != nil {
			t.Error(err)
		}
	})
	<-locked
	ctx, stop := context.WithTimeout(b.ctx, 4*time.Second)
	defer stop()
	later, err := b.store.Place(ctx, orders.NewOrder{Currency: "EUR", Amount: 1})
	if err != nil {
		t.Errorf("an order was not placed while a claim was open: %v", err)
	}
	second, err := b.store.ClaimOutbox(ctx, 10, time.Minute)
	if err != nil {
		t.Errorf("the second relay had to wait: %v", err)
	}
	close(goOn)
	relay.Wait()
	got := append(claimed(claim), claimed(second)...)
	if want := append(first, later.ID); len(claim.Rows) != 3 || !slices.Equal(got, want) {
		t.Errorf("claimed %v and %v, want the rows of %v, each once, oldest first", claimed(claim), claimed(second), want)
	}
}

func claimed(c orders.Claim) []int64 {
	ids := []int64{}
	for _, r := range c.Rows {
		ids = append(ids, r.OrderID)
	}
	return ids
}

// TestLockWaitThatIsCutOffIsRetried: 1205 names no order's fault, and rolls back its statement only.
func TestLockWaitThatIsCutOffIsRetried(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(overdue)
	hasty := b.open(orders.Config{}, func(c *mysql.Config) { c.Params = map[string]string{"innodb_lock_wait_timeout": "1"} })
	holder, err := b.db.SQL.BeginTx(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := holder.ExecContext(b.ctx, "SELECT 1 FROM orders WHERE id = ? FOR UPDATE", o.ID); err != nil {
		t.Fatal(err)
	}
	var cancel sync.WaitGroup
	cancel.Go(func() {
		if out, err := hasty.CancelDue(b.ctx, text(o.ID)); err != nil || out[0].Result != orders.ResultCancelled {
			t.Errorf("%+v, %v", out, err)
		}
	})
	eventually(t, "a retry is counted", func() bool { return hasty.Counters().Retries > 0 })
	if err := holder.Rollback(); err != nil {
		t.Error(err)
	}
	cancel.Wait()
}

// TestEveryVerbTakesItsLocksInOneOrder looks at the statements as the server got them: orders, payments and their refunds, ledger, outbox,
// events, what is parked, and stock last.
func TestEveryVerbTakesItsLocksInOneOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, sku := range []string{"b", "a", "c"} {
		b.stock(sku, 1000)
	}
	p := newProxy(t, b.db.DSN)
	through, err := orders.Open(p.dsn, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = through.Close() }()
	c := b.on(through)
	line := items(orders.Item{SKU: "c", Quantity: 1, Price: 1}, orders.Item{SKU: "a", Quantity: 1, Price: 1}, orders.Item{SKU: "b", Quantity: 1, Price: 1})
	var ids []int64
	for range 12 {
		ids = append(ids, b.place(overdue, line).ID)
	}
	early := b.place(line).ID
	ranks := []struct {
		table string
		rank  int
	}{{"orders", 1}, {"order_items", 1}, {"payments", 2}, {"refunds", 2}, {"stock_ledger", 3}, {"outbox", 4}, {"order_events", 5}, {"parked", 6}, {"stock", 7}}
	rank := func(statement string) (int, string) {
		for _, word := range strings.FieldsFunc(statement, func(r rune) bool { return r != '_' && (r < 'a' || r > 'z') }) {
			for _, k := range ranks {
				if k.table == word {
					return k.rank, word
				}
			}
		}
		return 0, ""
	}
	for name, verb := range map[string]func(){
		"place":      func() { c.place(line) },
		"cancel due": func() { c.cancelDue(ids[3], early, 5, ids[1], ids[2], ids[0]) },
		"cancel": func() {
			if _, err := through.Cancel(b.ctx, ids[4], "u1", "why not"); err != nil {
				t.Error(err)
			}
		},
		"pay": func() { c.pay(ids[5]) },
		"extend": func() {
			if _, err := through.ExtendDeadline(b.ctx, ids[6], time.Now().Add(time.Hour), "support"); err != nil {
				t.Error(err)
			}
		},
		"adjust": func() { c.stock("a", 5) },
	} {
		p.seen()
		verb()
		last, before := 0, ""
		skus := ""
		for _, s := range p.seen() {
			r, table := rank(s)
			if r == 0 {
				continue
			}
			if name == "pay" && strings.HasPrefix(s, "UPDATE orders") {
				continue // its row is locked since the beginning; the payment's own row has to say first whether this is a repetition
			}
			if r < last {
				t.Errorf("%s touches %s after %s", name, table, before)
			}
			last, before = r, table
			if name == "place" && table == "stock" {
				_, sku, _ := strings.Cut(s, "WHERE sku = ")
				skus += sku[1:2]
			}
		}
		if last == 0 {
			t.Errorf("%s: no statement was seen", name)
		}
		if name == "place" && skus != "abc" {
			t.Errorf("stock is taken in the order %s", skus)
		}
	}
}
