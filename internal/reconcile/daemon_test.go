package reconcile_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/reconcile"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/orders"
)

// loop runs a daemon until the test ends, or stop is called.
func (b *bundle) loop(r *reconcile.Reconciler) (stop func()) {
	b.t.Helper()
	ctx, cancel := context.WithCancel(b.ctx)
	done := make(chan error, 1)
	go func() { done <- r.Loop(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				b.t.Errorf("the loop ends with %v", err)
			}
		})
	}
	b.t.Cleanup(stop)
	return stop
}

func (b *bundle) runs(state string) int64 {
	b.t.Helper()
	return b.db.Int(b.t, "SELECT COUNT(*) FROM reconcile_runs WHERE state = ?", state)
}

// case JOB-3
func TestMissedNightsAreCaughtUpAtTheStartOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, `INSERT INTO reconcile_runs (state, started_at, finished_at, cutoff_at, scheduled_at, scanned, cancelled, already_paid, held, parked)
		VALUES ('done', UTC_TIMESTAMP(3) - INTERVAL 4 DAY, UTC_TIMESTAMP(3) - INTERVAL 4 DAY, UTC_TIMESTAMP(3) - INTERVAL 4 DAY, UTC_TIMESTAMP(3) - INTERVAL 4 DAY, 0, 0, 0, 0, 0)`)
	b.plant(1, 30, func(i int) string { return fmt.Sprintf("UTC_TIMESTAMP(3) - INTERVAL %d DAY - INTERVAL 10 MINUTE", i%4) })
	var asked atomic.Int64
	stop := b.loop(b.reconcilerOf(b.asked(&asked)))
	eventually(t, "a run is done", func() bool { return b.runs("done") == 2 })
	stop()
	// Another start in the same night, and two at once.
	for range 2 {
		b.loop(b.reconcilerOf(b.asked(&asked)))
	}
	third := b.loop(b.reconcilerOf(b.asked(&asked)))
	third()
	if n := b.db.Int(t, "SELECT COUNT(*) FROM reconcile_runs"); n != 2 || asked.Load() != 30 {
		t.Errorf("%d runs and %d orders asked for; want the one that was there, one more, and each order once", n, asked.Load())
	}
	ids := make([]int64, 30)
	for i := range ids {
		ids[i] = int64(i + 1)
	}
	b.wantOnce(ids)
}

// The clock of the schedule stands a moment before a midnight, and passes it while the run is at work.
//
// case JOB-8
func TestTheClockPassingMidnightEndsNoRunAndBeginsAnother(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 20)
	// The next full hour, as the midnight of some zone.
	midnight := time.Now().UTC().Truncate(time.Hour).Add(time.Hour)
	zone := fmt.Sprintf("Etc/GMT+%d", midnight.Hour())
	if midnight.Hour() > 12 {
		zone = fmt.Sprintf("Etc/GMT-%d", 24-midnight.Hour())
	}
	var ahead atomic.Int64
	ahead.Store(int64(time.Until(midnight) - time.Hour))
	passed := make(chan struct{})
	r := b.reconcilerOf(cancelFunc(func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		<-passed
		return b.store.CancelDue(ctx, ids)
	}), func(c *reconcile.Config) { c.Schedule, c.Timezone, c.Batch = "@daily", zone, 5 })
	r.SetClock(func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }, 5*time.Millisecond)
	b.loop(r)
	eventually(t, "the run of the day before works", func() bool { return b.runs("running") == 1 })
	cutoff := b.db.Text(t, "SELECT cutoff_at FROM reconcile_runs")
	ahead.Store(int64(time.Until(midnight) + 3*time.Second))
	later := int64(5000)
	// Overdue by now, and not at the cut-off.
	b.plant(later, 1, func(int) string {
		return "(SELECT MAX(cutoff_at) FROM reconcile_runs) - INTERVAL 299999000 MICROSECOND"
	})
	close(passed)
	eventually(t, "the run of the new day is done, too", func() bool { return b.runs("done") == 2 })
	if got := b.db.Text(t, "SELECT CONCAT(cutoff_at, ' ', cancelled) FROM reconcile_runs ORDER BY id LIMIT 1"); got != cutoff+" 20" {
		t.Errorf("the first run has %q, want its cut-off %s to the end, and 20 orders", got, cutoff)
	}
	if got := b.db.Text(t, "SELECT GROUP_CONCAT(TIMESTAMPDIFF(HOUR, ?, scheduled_at) ORDER BY id) FROM reconcile_runs", midnight.Format("2006-01-02 15:04:05")); got != "-24,0" {
		t.Errorf("the runs serve the midnights %q from the new one, want -24,0", got)
	}
	b.wantOnce(ids)
	b.wantOnce([]int64{later})
}

// case JOB-1
func TestOfTwoDaemonsOneMakesTheRunAndTheOtherTakesOverWhenItDies(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 40)
	quick := func(c *reconcile.Config) { c.Lease, c.RetryAfter = time.Second, 20*time.Millisecond }
	begun := make(chan struct{})
	var once sync.Once
	// The first one hangs in the middle of its run; then it is cut off from the primary, and its lease ends.
	doomed := b.openStore(b.db.DSN)
	var r *reconcile.Reconciler
	{
		hanging := cancelFunc(func(ctx context.Context, _ []string) ([]orders.Outcome, error) {
			once.Do(func() { close(begun) })
			<-ctx.Done()
			return nil, ctx.Err()
		})
		mine := *b
		mine.store = doomed
		r = mine.reconcilerOf(hanging, quick)
	}
	b.loop(r)
	<-begun
	var asked atomic.Int64
	b.loop(b.reconcilerOf(b.asked(&asked), quick))
	eventually(t, "the second one was told", func() bool { return strings.Contains(b.log.String(), "another reconcile is at work") })
	if asked.Load() != 0 {
		t.Error("the second one worked beside the first")
	}
	if err := doomed.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second one takes over", func() bool { return b.runs("done") >= 1 })
	b.wantOnce(ids)
}

// settled waits until the daemon has looked at its clock again and again, and so at whether a run is to be repeated.
func (b *bundle) settled(what string, looks *atomic.Int64, cond func() bool) {
	b.t.Helper()
	eventually(b.t, what, cond)
	from := looks.Load()
	eventually(b.t, "the daemon has looked again", func() bool { return looks.Load() >= from+20 })
}

// The primary's pool cuts off what takes long, and a snapshot that stays open there makes every claim slower.
func TestANightOnThePrimaryIsDoneOnceAndNotAudited(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.replica = nil
	ids := b.overdue(1, 20)
	var looks atomic.Int64
	r := b.reconciler(func(c *reconcile.Config) { c.OnLag, c.RetryAfter = reconcile.OnLagPrimary, time.Millisecond })
	r.SetClock(func() time.Time { looks.Add(1); return time.Now() }, time.Millisecond)
	stop := b.loop(r)
	b.settled("a run is done", &looks, func() bool { return b.runs("done") >= 1 })
	stop()
	if n := b.db.Int(t, "SELECT COUNT(*) FROM reconcile_runs"); n != 1 {
		t.Errorf("%d runs, want one", n)
	}
	if !strings.Contains(b.log.String(), "the audit is left out") {
		t.Errorf("the log does not say that there was no audit\n%s", b.log)
	}
	b.wantOnce(ids)
	report := b.run(b.reconciler(func(c *reconcile.Config) { c.OnLag = reconcile.OnLagPrimary }), reconcile.Options{Audit: true})
	if report.Audit != nil || !strings.Contains(report.NotAudited, "the primary was scanned") {
		t.Errorf("report %+v, want no audit and the reason", report)
	}
}

func TestAnAuditThatFailsRepeatsNoRun(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 20)
	dsn, err := mysql.ParseDSN(stacktest.Require(t, "LAPSE_MYSQL_DSN_REPLICA"))
	if err != nil {
		t.Fatal("LAPSE_MYSQL_DSN_REPLICA cannot be read")
	}
	dsn.DBName, dsn.InterpolateParams = b.db.Name, true
	connector, err := mysql.NewConnector(dsn)
	if err != nil {
		t.Fatal(err)
	}
	b.replica = sql.OpenDB(&impatient{connector})
	t.Cleanup(func() { _ = b.replica.Close() })
	var looks atomic.Int64
	r := b.reconciler(func(c *reconcile.Config) { c.RetryAfter = time.Millisecond })
	r.SetClock(func() time.Time { looks.Add(1); return time.Now() }, time.Millisecond)
	stop := b.loop(r)
	b.settled("the audit has failed", &looks, func() bool { return strings.Contains(b.log.String(), "the audit failed; the run itself is done") })
	stop()
	if all, done := b.db.Int(t, "SELECT COUNT(*) FROM reconcile_runs"), b.runs("done"); all != 1 || done != 1 {
		t.Errorf("%d runs, %d of them done; want one, done", all, done)
	}
	b.wantOnce(ids)
	report, err := b.reconciler().Run(b.ctx, reconcile.Options{Audit: true})
	if !errors.Is(err, reconcile.ErrAudit) || !errors.Is(err, errImpatient) || report.Kind != "full" {
		t.Errorf("a run by hand: %+v, %v; want %v", report, err, reconcile.ErrAudit)
	}
}

// impatient makes connections that cut off every transaction, which is what an audit is, and nothing else on a replica.
type impatient struct{ driver.Connector }

var errImpatient = errors.New("the read timed out")

// Connect implements driver.Connector.
func (c *impatient) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &impatientConn{switchingConn{Conn: conn, other: conn, pages: new(atomic.Int64)}}, nil
}

type impatientConn struct{ switchingConn }

// BeginTx implements driver.ConnBeginTx.
func (*impatientConn) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) {
	return nil, errImpatient
}

// Close implements driver.Conn.
func (c *impatientConn) Close() error { return c.Conn.Close() }
