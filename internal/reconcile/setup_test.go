package reconcile_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/lapse-orders/lapse/internal/reconcile"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/migrations"
	"github.com/lapse-orders/lapse/orders"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// limit is how long a test waits for what has to happen; only a failing test takes so long. The shared replica applies what all tests write, and may be
// behind by half a minute.
const limit = 2 * time.Minute

// bundle is a database of the test's own on the primary, and its copy on the replica, each with the account that reconcile has there.
type bundle struct {
	t       testing.TB
	ctx     context.Context
	db      *mysqltest.DB // root, on the primary
	store   *orders.Store
	replica *sql.DB
	log     *output
}

// setup uses the shared stack. It fails, and says so loudly, when the shared replica does not follow: every test would fail then, and none of
// them for a fault of its own.
func setup(t testing.TB) *bundle {
	t.Helper()
	return setupOn(t, mysqltest.AdminDSN(t), stacktest.Require(t, "LAPSE_MYSQL_DSN_RECONCILE"), stacktest.Require(t, "LAPSE_MYSQL_DSN_REPLICA"))
}

func setupOn(t testing.TB, adminDSN, reconcileDSN, replicaDSN string) *bundle {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*limit)
	t.Cleanup(cancel)
	b := &bundle{t: t, ctx: ctx, db: mysqltest.Empty(t, adminDSN), log: new(output)}
	if _, err := migrations.Up(ctx, b.db.SQL); err != nil {
		t.Fatal(err)
	}
	b.store = b.openStore(reconcileDSN)
	b.replica = b.openStore(replicaDSN).DB()
	eventually(t, "the shared replica follows the primary (look at SHOW REPLICA STATUS there: a test that writes past the binlog stops it for all)", func() bool {
		var n int
		return b.replica.QueryRowContext(ctx, "SELECT COUNT(*) FROM reconcile_runs").Scan(&n) == nil
	})
	return b
}

// openStore opens the test's database with the account of another DSN.
func (b *bundle) openStore(dsn string) *orders.Store {
	b.t.Helper()
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		b.t.Fatal(err)
	}
	cfg.DBName = b.db.Name
	store, err := orders.Open(cfg.FormatDSN(), orders.Config{MaxOpenConns: 8})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = store.Close() })
	return store
}

// reconciler makes one with limits that suit a test on a busy machine; change may alter them.
func (b *bundle) reconciler(change ...func(*reconcile.Config)) *reconcile.Reconciler {
	b.t.Helper()
	return b.reconcilerOf(b.store, change...)
}

func (b *bundle) reconcilerOf(c reconcile.Canceller, change ...func(*reconcile.Config)) *reconcile.Reconciler {
	b.t.Helper()
	cfg := reconcile.Config{
		Rate: 1_000_000, MaxLag: limit, PauseLag: limit, Timezone: "UTC", MaxLockWaits: 1000,
		Logger: slog.New(slog.NewJSONHandler(b.log, nil)),
	}
	for _, f := range change {
		f(&cfg)
	}
	r, err := reconcile.New(b.store, c, b.replica, cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

// run makes one run that has to succeed.
func (b *bundle) run(r *reconcile.Reconciler, options reconcile.Options) reconcile.Report {
	b.t.Helper()
	report, err := r.Run(b.ctx, options)
	if err != nil {
		b.t.Fatalf("run: %v\nlog:\n%s", err, b.log)
	}
	return report
}

// overdue plants n unpaid orders without items, with ids from first on, that are overdue by an hour and a number of seconds of their own, the last
// one the longest; and the outbox rows of timed messages that were sent. Placing them one by one would take the time of the whole test.
func (b *bundle) overdue(first int64, n int) []int64 {
	b.t.Helper()
	ids := make([]int64, n)
	for i := range ids {
		ids[i] = first + int64(i)
	}
	b.plant(first, n, func(i int) string { return fmt.Sprintf("UTC_TIMESTAMP(3) - INTERVAL %d SECOND", 3600+i) })
	return ids
}

// plant writes n unpaid orders, each with the deadline of a SQL expression.
func (b *bundle) plant(first int64, n int, deadline func(i int) string) {
	b.t.Helper()
	tx, err := b.db.SQL.BeginTx(b.ctx, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	for begin := 0; begin < n; begin += 500 {
		var rows, messages []string
		for i := begin; i < min(begin+500, n); i++ {
			id := first + int64(i)
			rows = append(rows, fmt.Sprintf("(%d, 'web', 'u1', 'EUR', 1000, 'unpaid', %s, UTC_TIMESTAMP(3) - INTERVAL 2 DAY)", id, deadline(i)))
			messages = append(messages, fmt.Sprintf("(%d, UTC_TIMESTAMP(3), 'sent', UTC_TIMESTAMP(3) + INTERVAL 2 DAY, 0, 'M%d', UTC_TIMESTAMP(3))", id, id))
		}
		for _, query := range []string{
			"INSERT INTO orders (id, channel, user_id, currency, amount, status, deadline_at, created_at) VALUES " + strings.Join(rows, ", "),
			"INSERT INTO outbox (order_id, deliver_at, state, available_at, attempts, message_id, sent_at) VALUES " + strings.Join(messages, ", "),
		} {
			if _, err := tx.ExecContext(b.ctx, query); err != nil {
				b.t.Fatalf("plant orders: %v", err)
			}
		}
	}
	if err := tx.Commit(); err != nil {
		b.t.Fatal(err)
	}
}

// place places an order through the SDK's own verb; change may alter it first.
func (b *bundle) place(change ...func(*orders.NewOrder)) int64 {
	b.t.Helper()
	n := orders.NewOrder{Channel: "web", UserID: "u1", Currency: "EUR", Amount: 1000, DeadlineAt: time.Now().Add(-time.Hour)}
	for _, c := range change {
		c(&n)
	}
	o, err := b.store.Place(b.ctx, n)
	if err != nil {
		b.t.Fatal(err)
	}
	return o.ID
}

func (b *bundle) pay(id int64) orders.PaymentResult {
	b.t.Helper()
	result, err := b.store.RecordPayment(b.ctx, orders.Payment{Gateway: "test", TransactionID: fmt.Sprint(id), OrderID: id, Currency: "EUR", Amount: 1000})
	if err != nil {
		b.t.Fatal(err)
	}
	return result
}

// wantOnce fails unless of these orders each is cancelled, by one event.
func (b *bundle) wantOnce(ids []int64) {
	b.t.Helper()
	low, high := ids[0], ids[len(ids)-1]
	if n := b.db.Int(b.t, "SELECT COUNT(*) FROM orders WHERE id BETWEEN ? AND ? AND status = 'cancelled'", low, high); n != int64(len(ids)) {
		b.t.Errorf("%d of %d orders are cancelled", n, len(ids))
	}
	for _, kind := range []string{"cancelled", "reconciled"} {
		n := b.db.Int(b.t, "SELECT COUNT(*) FROM order_events WHERE order_id BETWEEN ? AND ? AND kind = ?", low, high, kind)
		distinct := b.db.Int(b.t, "SELECT COUNT(DISTINCT order_id) FROM order_events WHERE order_id BETWEEN ? AND ? AND kind = ?", low, high, kind)
		if n != int64(len(ids)) || distinct != n {
			b.t.Errorf("%d orders have %d events %s of %d orders; want one each", len(ids), n, kind, distinct)
		}
	}
}

// wantClean fails for every violation that the audit finds on the primary.
func (b *bundle) wantClean() {
	b.t.Helper()
	checks, err := orders.Audit(b.ctx, b.db.SQL, orders.AuditOptions{Grace: 5 * time.Minute})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, c := range checks {
		if c.Violations != 0 {
			b.t.Errorf("%s %s: %d violations, the first: %+v", c.Invariant, c.Name, c.Violations, c.Examples[0])
		}
	}
}

// eventually waits until cond is true, and fails the test if that takes longer than limit.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("after %s still not: %s", limit, what)
		}
	}
}

// output is a log that is written and read at once.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// cancelFunc is a canceller made of a function.
type cancelFunc func(ctx context.Context, ids []string) ([]orders.Outcome, error)

func (f cancelFunc) CancelDue(ctx context.Context, ids []string) ([]orders.Outcome, error) {
	return f(ctx, ids)
}

// isMariaDB tells which of the two servers the tests run on.
func (b *bundle) isMariaDB() bool {
	b.t.Helper()
	return strings.Contains(b.db.Text(b.t, "SELECT VERSION()"), "MariaDB")
}

// serverOf asks a server for its id, as a scan knows it.
func (b *bundle) serverOf(db *sql.DB) string {
	b.t.Helper()
	conn, err := db.Conn(b.ctx)
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	scan, err := orders.NewScan(b.ctx, conn)
	if err != nil {
		b.t.Fatal(err)
	}
	if !b.isMariaDB() {
		if uuid := scan.Server(); len(uuid) != 36 {
			b.t.Errorf("the server's id is %q, want its server_uuid", uuid)
		}
	}
	return scan.Server()
}
