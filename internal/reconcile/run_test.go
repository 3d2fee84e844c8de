package reconcile_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/internal/reconcile"
	"github.com/lapse-orders/lapse/orders"
)

// No message is ever sent here, as if the broker had lost them all.
//
// case MQ-7
func TestEveryOrderThatTheMessagesMissedIsCancelledHoweverOld(t *testing.T) {
	t.Parallel()
	b := setup(t)
	if err := b.store.AdjustStock(b.ctx, orders.NewID(), "tea", 100); err != nil {
		t.Fatal(err)
	}
	tea := func(n *orders.NewOrder) { n.Items = []orders.Item{{SKU: "tea", Quantity: 2, Price: 500}} }
	ago := func(d time.Duration) func(*orders.NewOrder) {
		return func(n *orders.NewOrder) { n.DeadlineAt = time.Now().Add(-d) }
	}
	var missed []int64
	for _, age := range []time.Duration{6 * time.Minute, time.Hour, 25 * time.Hour, 40 * 24 * time.Hour, 3 * 365 * 24 * time.Hour} {
		missed = append(missed, b.place(tea, ago(age)))
	}
	slices.Sort(missed)
	untouched := map[string]int64{
		"the message path still has its time": b.place(tea, ago(4*time.Minute)),
		"not due":                             b.place(tea, ago(-time.Hour)),
		"without a deadline":                  b.place(tea, func(n *orders.NewOrder) { n.DeadlineAt, n.NoDeadline = time.Time{}, true }),
		"paid":                                b.place(tea, ago(time.Hour)),
	}
	b.pay(untouched["paid"])

	report := b.run(b.reconciler(), reconcile.Options{Audit: true})

	b.wantOnce(missed)
	for why, id := range untouched {
		if got := b.db.Text(t, "SELECT status FROM orders WHERE id = ?", id); got != map[bool]string{true: "paid", false: "unpaid"}[why == "paid"] {
			t.Errorf("%s: it is %s", why, got)
		}
	}
	want := reconcile.Counts{Scanned: 5, Cancelled: 5, Missed: reconcile.MissedCounts{NeverSent: 5}}
	if report.Counts != want || report.Kind != "full" || report.Resumed || report.Primary || report.Violations() != 0 || len(report.Audit) < 12 {
		t.Errorf("report %+v\nwant the counts %+v, and an audit without findings", report, want)
	}
	if uuid := b.serverOf(b.replica); report.Server != uuid {
		t.Errorf("server %q was scanned, want the replica %q", report.Server, uuid)
	}
	if got := b.db.Text(t, "SELECT CONCAT_WS(' ', state, alone, lease_token, scanned, cancelled, never_sent, cutoff_at = started_at, finished_at >= started_at) FROM reconcile_runs"); got != "done 5 5 5 1 1" {
		t.Errorf("the run's row is %q", got)
	}
	b.wantClean()
	if again := b.run(b.reconciler(), reconcile.Options{}); again.Counts != (reconcile.Counts{}) {
		t.Errorf("the next run did %+v, want nothing", again.Counts)
	}
}

// case DB-16
func TestEqualDeadlinesAtAPageEdgeAreNeitherSkippedNorTakenTwice(t *testing.T) {
	t.Parallel()
	b := setup(t)
	// 2,500 orders; by deadline, the 901st to the 1,100th are equal. The ids run against the deadlines, but among equal ones.
	b.plant(10_000, 2500, func(i int) string {
		if nth := 2500 - i; nth > 900 && nth <= 1100 {
			return "'2026-01-01 00:15:00.000'"
		} else if nth <= 900 {
			return fmt.Sprintf("'2026-01-01 00:00:00.000' + INTERVAL %d SECOND", nth)
		} else {
			return fmt.Sprintf("'2026-01-02 00:00:00.000' + INTERVAL %d SECOND", nth)
		}
	})
	asked := map[string]int{}
	var mu sync.Mutex
	r := b.reconcilerOf(cancelFunc(func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		mu.Lock()
		for _, id := range ids {
			asked[id]++
		}
		mu.Unlock()
		return b.store.CancelDue(ctx, ids)
	}), func(c *reconcile.Config) { c.Page = 1000 })
	report := b.run(r, reconcile.Options{Total: true})
	if report.Scanned != 2500 || report.Cancelled != 2500 || len(asked) != 2500 {
		t.Errorf("report %+v, %d orders were asked for; want 2,500", report.Counts, len(asked))
	}
	for id, n := range asked {
		if n != 1 {
			t.Errorf("order %s was asked for %d times", id, n)
		}
	}
	ids := make([]int64, 2500)
	for i := range ids {
		ids[i] = int64(10_000 + i)
	}
	b.wantOnce(ids)
}

func TestEachCancelSaysWhyNoMessageDidIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	fresh, refused, sent, rejected, poison, gone := b.place(), b.place(), b.place(), b.place(), b.place(), b.place()
	outbox := func(id int64, set string) { b.db.Exec(t, "UPDATE outbox SET "+set+" WHERE order_id = ?", id) }
	outbox(refused, "attempts = 7, last_error = 'no route to broker'")
	outbox(sent, "state = 'sent', message_id = 'M1', sent_at = '2026-01-02 03:04:05.678'")
	outbox(poison, "state = 'sent', message_id = 'M2', sent_at = '2026-01-02 03:04:05.678'")
	claim, err := b.store.ClaimOutbox(b.ctx, 100, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := b.store.MarkParked(b.ctx, claim.Token, []int64{rejected}, "40012: the keys are too long"); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	if err := b.store.Park(b.ctx, orders.Parked{What: orders.ParkedOrder, Ref: orders.FormatID(poison), Reason: "cancelling it failed 3 times"}); err != nil {
		t.Fatal(err)
	}
	b.db.Exec(t, "DELETE FROM outbox WHERE order_id = ?", gone)

	reg := prometheus.NewRegistry()
	report := b.run(b.reconciler(func(c *reconcile.Config) { c.Registerer = reg }), reconcile.Options{})

	want := map[int64][2]string{
		fresh:    {"never_sent", "no relay has sent it"},
		refused:  {"never_sent", "sending failed 7 times, the last time: no route to broker"},
		sent:     {"sent_not_received", "message M1 was sent at 2026-01-02 03:04:05.678 UTC, and no consumer has handled it"},
		rejected: {"parked", "40012: the keys are too long"},
		poison:   {"parked", "cancelling it failed 3 times"},
		gone:     {"never_sent", "its outbox row is gone"},
	}
	for id, w := range want {
		var detail struct {
			Run             int64
			Missed, Because string
		}
		text := b.db.Text(t, "SELECT detail FROM order_events WHERE order_id = ? AND kind = 'reconciled'", id)
		if err := json.Unmarshal([]byte(text), &detail); err != nil || detail.Run != report.RunID || detail.Missed != w[0] || detail.Because != w[1] {
			t.Errorf("order %d: %s, %v; want run %d and %q", id, text, err, report.RunID, w)
		}
	}
	if m := (reconcile.MissedCounts{NeverSent: 3, SentNotReceived: 1, Parked: 2}); report.Missed != m || report.Cancelled != 6 {
		t.Errorf("report %+v, want 6 cancelled, missed %+v", report.Counts, m)
	}
	got := gathered(t, reg)
	for name, want := range map[string]float64{
		"lapse_reconcile_cancelled_total": 6, "lapse_reconcile_missed_total never_sent": 3, "lapse_reconcile_missed_total sent_not_received": 1,
		"lapse_reconcile_missed_total parked": 2, "lapse_reconcile_runs_total done": 1, "lapse_reconcile_outcomes_total cancelled": 6, "lapse_reconcile_parked_total": 0,
	} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
	if !strings.Contains(b.log.String(), `"level":"WARN","msg":"reconcile had to cancel orders: the message path missed them"`) {
		t.Errorf("no warning in the log\n%s", b.log)
	}
}

// gathered gives the values of a registry by name and labels.
func gathered(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			values[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return values
}

// case JOB-1
// case JOB-2
func TestOfRunsStartedTogetherOneWorks(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 500)
	var asked atomic.Int64
	hold := make(chan struct{})
	canceller := cancelFunc(func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		<-hold // until every other run was refused
		asked.Add(int64(len(ids)))
		return b.store.CancelDue(ctx, ids)
	})
	const runs = 8
	results := make(chan error, runs)
	for range runs {
		r := b.reconcilerOf(canceller)
		go func() {
			_, err := r.Run(b.ctx, reconcile.Options{})
			results <- err
		}()
	}
	for range runs - 1 {
		err := <-results
		var other *reconcile.RunningError
		if !errors.As(err, &other) || other.RunID == 0 || !strings.Contains(other.Owner, "process") || other.For <= 0 || other.For > time.Minute+10*time.Second {
			t.Fatalf("a second run ends with %v, want the other run's name", err)
		}
	}
	close(hold)
	if err := <-results; err != nil {
		t.Errorf("the run that was first: %v", err)
	}
	if n := asked.Load(); n != int64(len(ids)) {
		t.Errorf("%d orders were asked for, want each once: %d", n, len(ids))
	}
	b.wantOnce(ids)
	if n := b.db.Int(t, "SELECT COUNT(*) FROM reconcile_runs"); n != 1 {
		t.Errorf("%d runs were written, want 1", n)
	}
}

// case JOB-2
func TestARunThatLostItsLeaseStopsAndTheNextDoesTheRest(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 1000)
	first := make(chan struct{})
	var once sync.Once
	r := b.reconcilerOf(cancelFunc(func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		outcomes, err := b.store.CancelDue(ctx, ids)
		once.Do(func() { close(first) })
		return outcomes, err
	}), func(c *reconcile.Config) { c.Rate, c.Batch, c.Page = 100, 10, 50 }) // ten seconds, if nobody stopped it
	result := make(chan error, 1)
	go func() {
		_, err := r.Run(b.ctx, reconcile.Options{})
		result <- err
	}()
	<-first
	b.db.Exec(t, "UPDATE reconcile_runs SET lease_token = REPEAT('f', 32), lease_until = UTC_TIMESTAMP(3) WHERE alone = 1")
	if err := <-result; !errors.Is(err, reconcile.ErrLeaseLost) {
		t.Errorf("the run ends with %v, want %v", err, reconcile.ErrLeaseLost)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'unpaid'"); n == 0 {
		t.Error("it went on to the end without its lease")
	}
	if got := b.db.Text(t, "SELECT state FROM reconcile_runs"); got != "running" {
		t.Errorf("it wrote %q into a row that is another's", got)
	}
	report := b.run(b.reconciler(), reconcile.Options{})
	if !report.Resumed {
		t.Errorf("the next run is %+v, want it to resume", report)
	}
	b.run(b.reconciler(), reconcile.Options{})
	b.wantOnce(ids)
}

// case JOB-8
// case JOB-9
func TestARunThatIsToldToStopIsResumedAtItsPlaceAndKeepsItsRateWhilePaymentsComeIn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 900)
	// By deadline the last ones are first, so these are among the last that are looked at.
	paid := []int64{ids[0], ids[1], ids[2]}
	asked := map[string]int{}
	var mu sync.Mutex
	stop, cancel := context.WithCancel(b.ctx)
	defer cancel()
	canceller := cancelFunc(func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		mu.Lock()
		for _, id := range ids {
			asked[id]++
		}
		if len(asked) >= 350 {
			cancel()
		}
		mu.Unlock()
		return b.store.CancelDue(ctx, ids)
	})
	slow := func(c *reconcile.Config) { c.Page, c.Batch, c.Rate = 100, 20, 500 }
	begun := time.Now()
	first, err := b.reconcilerOf(canceller, slow).Run(stop, reconcile.Options{})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("the run ends with %v, want context.Canceled", err)
	}
	if least := time.Duration(first.Scanned-20) * time.Second / 500; time.Since(begun) < least {
		t.Errorf("%d orders took %s at 500 a second, want at least %s", first.Scanned, time.Since(begun), least)
	}
	if first.Scanned < 350 || first.Scanned > 450 {
		t.Errorf("it was stopped after %d orders, want some 350", first.Scanned)
	}
	for _, id := range paid {
		if got := b.pay(id); got.Outcome != orders.PaymentAccepted {
			t.Errorf("a payment between is %s", got.Outcome)
		}
	}
	// What came due after the cut-off is not the resumed run's.
	b.db.Exec(t, "UPDATE reconcile_runs SET cutoff_at = cutoff_at - INTERVAL 30 MINUTE")
	later := int64(5000)
	b.plant(later, 1, func(int) string { return "UTC_TIMESTAMP(3) - INTERVAL 20 MINUTE" })

	second := b.run(b.reconcilerOf(canceller, slow), reconcile.Options{})

	if second.RunID != first.RunID || !second.Resumed || second.Scanned != 897 || second.Cancelled != 897 || !second.Cutoff.Equal(first.Cutoff.Add(-30*time.Minute)) {
		t.Errorf("the second run is %+v; want run %d resumed, at its cut-off, with 897 orders in all", second, first.RunID)
	}
	if len(asked) != 897 || slices.Max(slices.Collect(maps.Values(asked))) != 1 {
		t.Errorf("%d orders were asked for, the most one %d times; want 897, each once", len(asked), slices.Max(slices.Collect(maps.Values(asked))))
	}
	third := b.run(b.reconcilerOf(canceller), reconcile.Options{})
	if third.Resumed || third.Scanned != 1 || third.Cancelled != 1 {
		t.Errorf("the third run is %+v; want the one order that came due since", third)
	}
	b.wantOnce(ids[3:])
	b.wantClean()
}

// case JOB-10
func TestOneOrderThatCannotBeCancelledIsParkedAndNoNightIsStuckOnIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 10_000)
	bad := ids[len(ids)-3] // the third by deadline
	b.db.Exec(t, fmt.Sprintf("CREATE TRIGGER refuse BEFORE UPDATE ON orders FOR EACH ROW BEGIN IF NEW.id = %d THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'this one never'; END IF; END", bad))
	for night := 1; night <= 2; night++ {
		report := b.run(b.reconciler(), reconcile.Options{})
		want := reconcile.Counts{Scanned: 10_000, Cancelled: 9_999, Parked: 1, Missed: reconcile.MissedCounts{SentNotReceived: 9_999}}
		if night == 2 {
			want = reconcile.Counts{Scanned: 1, Parked: 1}
		}
		if report.Counts != want {
			t.Errorf("night %d: %+v, want %+v", night, report.Counts, want)
		}
		if got := b.db.Text(t, "SELECT CONCAT(ref, ' ', state, ' ', times, ' ', reason) FROM parked"); !strings.HasPrefix(got, fmt.Sprintf("%d parked %d reconcile run %d: cancelling it failed 3 times", bad, night, report.RunID)) || !strings.Contains(got, "this one never") {
			t.Errorf("night %d: parked is %q", night, got)
		}
		if report := b.run(b.reconciler(), reconcile.Options{DryRun: true, Audit: true}); report.Violations() != 0 {
			t.Errorf("night %d: an order that is parked with its reason is a finding: %+v", night, report.Audit)
		}
	}
	b.db.Exec(t, "DROP TRIGGER refuse")
	if report := b.run(b.reconciler(), reconcile.Options{}); report.Cancelled != 1 || report.Missed.Parked != 1 {
		t.Errorf("the night after it was mended: %+v", report.Counts)
	}
	b.wantOnce(ids)
}

func TestARunEndsInsteadOfParkingEverything(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.overdue(1, 300)
	r := b.reconcilerOf(cancelFunc(func(context.Context, []string) ([]orders.Outcome, error) { panic("a bug") }), func(c *reconcile.Config) { c.Batch, c.Workers = 5, 64 })
	report, err := r.Run(b.ctx, reconcile.Options{})
	if err == nil || !strings.Contains(err.Error(), "a bug") || !strings.Contains(err.Error(), "in a row") {
		t.Errorf("the run ends with %v, want an error that names the failure", err)
	}
	if report.Parked < reconcile.MaxParkedInRow || report.Parked == 300 {
		t.Errorf("%d orders were parked, want an end soon after %d", report.Parked, reconcile.MaxParkedInRow)
	}
	if got := b.db.Text(t, "SELECT CONCAT(state, ' ', last_error) FROM reconcile_runs"); !strings.HasPrefix(got, "failed ") || !strings.Contains(got, "a bug") {
		t.Errorf("the run's row says %q", got)
	}
}

func TestALockedOrderIsLeftForTheEndAndParkedIfItStaysLocked(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 300)
	tx, err := b.db.SQL.BeginTx(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(b.ctx, "SELECT id FROM orders WHERE id = ? FOR UPDATE", ids[250]); err != nil {
		t.Fatal(err)
	}
	report := b.run(b.reconciler(func(c *reconcile.Config) { c.CancelTimeout = 6 * time.Second }), reconcile.Options{})
	if report.Cancelled != 299 || report.Parked != 1 || report.Scanned != 300 {
		t.Errorf("report %+v, want 299 cancelled and one parked", report.Counts)
	}
	if got := b.db.Text(t, "SELECT CONCAT(ref, ' ', reason) FROM parked"); !strings.Contains(got, "locked by somebody") || !strings.HasPrefix(got, fmt.Sprint(ids[250], " ")) {
		t.Errorf("parked is %q", got)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if report := b.run(b.reconciler(), reconcile.Options{}); report.Cancelled != 1 {
		t.Errorf("once it is free: %+v", report.Counts)
	}
	b.wantOnce(ids)
}

// The stock of one order in each batch is locked. It is a good deal of time until batch after batch has been cut off, and none of the others may pay
// for that.
func TestOrdersBesideOneOverLockedStockAreCancelledAndNotParked(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 240)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', 100, 4, 0)")
	for i := 30; i < len(ids); i += 60 { // one in each batch
		b.db.Exec(t, "INSERT INTO order_items (order_id, sku, quantity, price) VALUES (?, 'pen', 1, 100)", ids[i])
		b.db.Exec(t, "INSERT INTO stock_ledger (order_id, sku, kind, quantity, at) VALUES (?, 'pen', 'reserve', 1, UTC_TIMESTAMP(3))", ids[i])
	}
	tx, err := b.db.SQL.BeginTx(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(b.ctx, "SELECT sku FROM stock WHERE sku = 'pen' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	report := b.run(b.reconciler(func(c *reconcile.Config) { c.Batch, c.CancelTimeout = 60, 8*time.Second }), reconcile.Options{})
	if report.Cancelled != 236 || report.Parked != 4 || report.Scanned != 240 {
		t.Errorf("report %+v, want 236 cancelled and the 4 over the locked stock parked", report.Counts)
	}
}

func TestAHeldOrderWaitsForItsHold(t *testing.T) {
	t.Parallel()
	b := setup(t)
	held := b.place()
	b.db.Exec(t, "UPDATE orders SET hold_until = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR, hold_reason = 'the gateway does not know' WHERE id = ?", held)
	report := b.run(b.reconciler(), reconcile.Options{Audit: true})
	if report.Counts != (reconcile.Counts{Scanned: 1, Held: 1}) || report.Violations() != 0 {
		t.Errorf("report %+v, want one held, and no finding", report)
	}
	b.db.Exec(t, "UPDATE orders SET hold_until = UTC_TIMESTAMP(3) WHERE id = ?", held)
	if report := b.run(b.reconciler(), reconcile.Options{}); report.Cancelled != 1 {
		t.Errorf("after the hold: %+v", report.Counts)
	}
}

func TestADryRunAndBoundsOfDeadlines(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i, day := range []string{"2026-03-01", "2026-03-02", "2026-03-03", "2026-03-04"} {
		b.plant(int64(i+1), 1, func(int) string { return "'" + day + " 00:00:00.000'" })
	}
	from, until := instantOf(t, "2026-03-02T00:00:00Z"), instantOf(t, "2026-03-04T00:00:00Z")
	unpaid := func() string {
		return b.db.Text(t, "SELECT GROUP_CONCAT(id ORDER BY id) FROM orders WHERE status = 'unpaid'")
	}

	if r := b.run(b.reconciler(), reconcile.Options{DryRun: true, Total: true}); r.Scanned != 4 || r.Kind != "dry" || r.Cancelled != 0 || unpaid() != "1,2,3,4" {
		t.Errorf("a dry run: %+v, unpaid %s", r, unpaid())
	}
	if r := b.run(b.reconciler(), reconcile.Options{DryRun: true, From: until}); r.Scanned != 1 || unpaid() != "1,2,3,4" {
		t.Errorf("a dry run of a part: %+v, unpaid %s", r, unpaid())
	}
	if r := b.run(b.reconciler(), reconcile.Options{From: from, Until: until}); r.Cancelled != 2 || r.Kind != "partial" || unpaid() != "1,4" {
		t.Errorf("from %s until %s: %+v, unpaid %s", from, until, r, unpaid())
	}
	if _, err := b.reconciler().Run(b.ctx, reconcile.Options{From: until, Until: from}); err == nil {
		t.Error("bounds the wrong way round are taken")
	}
	if r := b.run(b.reconciler(), reconcile.Options{Until: from}); r.Cancelled != 1 || unpaid() != "4" {
		t.Errorf("until %s: %+v, unpaid %s", from, r, unpaid())
	}
}

func instantOf(t *testing.T, text string) time.Time {
	t.Helper()
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		t.Fatal(err)
	}
	return at
}

func TestARunPausesWhileTransactionsWaitForLocks(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 100)
	wanted := b.place(func(n *orders.NewOrder) { n.DeadlineAt = time.Now().Add(time.Hour) })
	// One holds a row that eight payments want.
	lock, err := b.db.SQL.BeginTx(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Rollback() }()
	if _, err := lock.ExecContext(b.ctx, "SELECT id FROM orders WHERE id = ? FOR UPDATE", wanted); err != nil {
		t.Fatal(err)
	}
	shop := b.openStore(b.db.DSN)
	var waiting sync.WaitGroup
	for i := range 8 {
		waiting.Go(func() {
			p := orders.Payment{Gateway: "test", TransactionID: fmt.Sprint(i), OrderID: wanted, Currency: "EUR", Amount: 1000}
			if _, err := shop.RecordPayment(b.ctx, p); err != nil {
				t.Errorf("a payment that had to wait: %v", err)
			}
		})
	}
	eventually(t, "payments wait for locks", func() bool {
		return b.db.Int(t, "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND info LIKE '%FROM orders FORCE INDEX (PRIMARY)%FOR UPDATE'") >= 8
	})
	paused := make(chan struct{})
	var once sync.Once
	result := make(chan reconcile.Report, 1)
	go func() {
		result <- b.run(b.reconciler(func(c *reconcile.Config) { c.MaxLockWaits = 5 }), reconcile.Options{Progress: func(p reconcile.Progress) {
			if p.Paused {
				once.Do(func() { close(paused) })
			}
		}})
	}()
	<-paused
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'cancelled'"); n != 0 {
		t.Errorf("%d orders were cancelled while payments waited", n)
	}
	if err := lock.Rollback(); err != nil {
		t.Fatal(err)
	}
	waiting.Wait()
	if report := <-result; report.Cancelled != 100 || report.Paused <= 0 {
		t.Errorf("report %+v, want 100 cancelled after a pause", report)
	}
	b.wantOnce(ids)
}

func TestFindingsOfTheAuditAreListed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.place()
	broken := b.place(func(n *orders.NewOrder) { n.DeadlineAt = time.Now().Add(time.Hour) })
	b.db.Exec(t, "UPDATE orders SET status = 'paid', paid_at = UTC_TIMESTAMP(3) WHERE id = ?", broken)
	stuck := b.place(func(n *orders.NewOrder) { n.DeadlineAt = time.Now().Add(time.Hour) })
	b.db.Exec(t, "UPDATE outbox SET pending_since = UTC_TIMESTAMP(3) - INTERVAL 16 MINUTE, attempts = 9, last_error = 'broker away' WHERE order_id = ?", stuck)
	reg := prometheus.NewRegistry()
	report := b.run(b.reconciler(func(c *reconcile.Config) { c.Registerer = reg }), reconcile.Options{Audit: true})
	found := map[string]int64{}
	for _, c := range report.Audit {
		if c.Violations > 0 {
			found[c.Name] = c.Examples[0].OrderID
		}
	}
	want := map[string]int64{"paid_by_one_payment": broken, "one_final_event": broken, "outbox_row_is_sent": stuck}
	if !maps.Equal(found, want) || report.Violations() != 3 {
		t.Errorf("found %v, want %v", found, want)
	}
	if got := gathered(t, reg); got["lapse_reconcile_audit_violations outbox_row_is_sent"] != 1 || got["lapse_reconcile_audit_violations not_before_deadline"] != 0 {
		t.Errorf("metrics %v", got)
	}
	if !strings.Contains(b.log.String(), "an invariant is broken") {
		t.Errorf("the log does not tell\n%s", b.log)
	}
}

func TestAConfigurationThatCannotWorkIsRefused(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, change := range map[string]func(*reconcile.Config){
		"OnLag": func(c *reconcile.Config) { c.OnLag = "ignore" }, "Page": func(c *reconcile.Config) { c.Page = -1 }, "Batch": func(c *reconcile.Config) { c.Batch = 501 },
		"Workers": func(c *reconcile.Config) { c.Workers = 65 }, "Rate": func(c *reconcile.Config) { c.Rate = -5 }, "Grace": func(c *reconcile.Config) { c.Grace = -time.Second },
		"Lease": func(c *reconcile.Config) { c.Lease = time.Millisecond }, "schedule": func(c *reconcile.Config) { c.Schedule = "at night" },
		"zone": func(c *reconcile.Config) { c.Timezone = "Mars/Olympus" },
	} {
		cfg := reconcile.Config{}
		change(&cfg)
		if _, err := reconcile.New(b.store, b.store, b.replica, cfg); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, want an error that names it", name, err)
		}
	}
	if _, err := reconcile.New(b.store, b.store, nil, reconcile.Config{}); err == nil {
		t.Error("no replica is taken without a word")
	}
}

// The times are scaled down: a grace of a second, and a run every 300 ms. The message path's lateness is measured beside it by lapse bench steady and in
// every demo.
//
// case JOB-5
func TestAloneReconcileIsLateByItsGraceAndItsIntervalAndTheReadmeSaysSo(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const grace, interval = time.Second, 300 * time.Millisecond
	b.plant(1, 40, func(i int) string { return fmt.Sprintf("UTC_TIMESTAMP(3) + INTERVAL %d MICROSECOND", 50_000*i) })
	r := b.reconciler(func(c *reconcile.Config) { c.Grace = grace })
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var longest time.Duration // of a run
	var before time.Time
	for b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'unpaid'") > 0 {
		begun := time.Now()
		if !before.IsZero() {
			longest = max(longest, begun.Sub(before))
		}
		before = begun
		b.run(r, reconcile.Options{})
		longest = max(longest, time.Since(begun))
		<-tick.C
	}
	lateness := func(aggregate string) time.Duration {
		return time.Duration(b.db.Int(t, "SELECT "+aggregate+"(TIMESTAMPDIFF(MICROSECOND, deadline_at, cancelled_at)) FROM orders")) * time.Microsecond
	}
	least, most := lateness("MIN"), lateness("MAX")
	t.Logf("late by %s to %s, at a grace of %s and runs up to %s apart", least, most, grace, longest)
	if least < grace || most > grace+2*longest+interval {
		t.Errorf("late by %s to %s; want at least the grace, %s, and at most what lies between two runs more", least, most, grace)
	}
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"up to a day and `reconcile.grace` after its\ndeadline", "lateness p50"} {
		if !strings.Contains(string(text), part) {
			t.Errorf("the README does not say %q", part)
		}
	}
}
