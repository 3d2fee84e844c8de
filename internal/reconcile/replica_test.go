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
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/migrations"
	"github.com/lapse-orders/lapse/orders"
)

// asked is a canceller that counts.
func (b *bundle) asked(n *atomic.Int64) reconcile.Canceller {
	return cancelFunc(func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		n.Add(int64(len(ids)))
		return b.store.CancelDue(ctx, ids)
	})
}

// refused makes a run that has to end with ErrReplica, and holds that nothing was asked of the primary.
func (b *bundle) refused(t *testing.T, names string, change ...func(*reconcile.Config)) {
	t.Helper()
	var asked atomic.Int64
	report, err := b.reconcilerOf(b.asked(&asked), change...).Run(b.ctx, reconcile.Options{Audit: true})
	if !errors.Is(err, reconcile.ErrReplica) || !strings.Contains(err.Error(), names) {
		t.Errorf("the run ends with %v, want ErrReplica with %q", err, names)
	}
	if report.Counts != (reconcile.Counts{}) || asked.Load() != 0 || report.Audit != nil {
		t.Errorf("report %+v, %d orders asked for; want nothing read and nothing done", report, asked.Load())
	}
	if got := b.db.Text(t, "SELECT CONCAT(state, ' ', last_error) FROM reconcile_runs ORDER BY id DESC LIMIT 1"); !strings.HasPrefix(got, "failed ") || !strings.Contains(got, names) {
		t.Errorf("the run's row says %q", got)
	}
}

// inMariaDB writes a statement about replication in MariaDB's words.
var inMariaDB = strings.NewReplacer("CHANGE REPLICATION SOURCE TO SOURCE_", "CHANGE MASTER TO MASTER_", "REPLICA", "SLAVE")

func within(d time.Duration) func(*reconcile.Config) {
	return func(c *reconcile.Config) { c.MaxLag = d }
}

// One stack of its own for all that breaks a replica: the shared one is everybody's. The parts run one after the other.
//
// case DB-7
// case DB-8
func TestAReplicaThatCannotBeReliedOn(t *testing.T) {
	t.Parallel()
	// The shared server is the stranger below.
	strangerDSN := mysqltest.AdminDSN(t)
	stack := stacktest.Private(t, stacktest.Options{Parts: []stacktest.Part{stacktest.MySQL, stacktest.Replica}})
	admin, err := sql.Open("mysql", stack.ReplicaAdminDSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = admin.Close() })
	var version string
	if err := admin.QueryRowContext(t.Context(), "SELECT VERSION()").Scan(&version); err != nil {
		t.Fatal(err)
	}
	maria := strings.Contains(version, "MariaDB")
	on := func(t *testing.T) *bundle {
		t.Helper()
		t.Cleanup(func() { // for the next part, if this one fails in the middle
			start := "START REPLICA"
			if maria {
				start = inMariaDB.Replace(start)
			}
			if _, err := admin.ExecContext(context.WithoutCancel(t.Context()), start); err != nil {
				t.Logf("%s: %v", start, err)
			}
		})
		return setupOn(t, stack.MySQLAdminDSN(), stack.Getenv("LAPSE_MYSQL_DSN_RECONCILE"), stack.Getenv("LAPSE_MYSQL_DSN_REPLICA"))
	}
	replication := func(t *testing.T, statement string) {
		t.Helper()
		if maria {
			statement = inMariaDB.Replace(statement)
		}
		if _, err := admin.ExecContext(t.Context(), statement); err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}

	t.Run("stopped", func(t *testing.T) {
		b := on(t)
		id := b.place()
		replication(t, "STOP REPLICA SQL_THREAD")
		b.refused(t, "its replication has stopped", within(300*time.Millisecond))
		if got := b.db.Text(t, "SELECT status FROM orders WHERE id = ?", id); got != "unpaid" {
			t.Errorf("the order is %s", got)
		}

		// The primary is scanned where that is allowed, at its own rate.
		more := b.overdue(1, 60)
		begun := time.Now()
		report := b.run(b.reconciler(within(300*time.Millisecond), func(c *reconcile.Config) { c.OnLag, c.PrimaryRate, c.Batch = reconcile.OnLagPrimary, 50, 10 }), reconcile.Options{Audit: true})
		if !report.Primary || report.Cancelled != 61 || report.Violations() != 0 || report.Server != b.serverOf(b.db.SQL) {
			t.Errorf("report %+v, want 61 cancelled from the primary", report)
		}
		if took := time.Since(begun); took < time.Second {
			t.Errorf("61 orders at 50 a second took %s", took)
		}
		b.wantOnce(more)
		replication(t, "START REPLICA SQL_THREAD")
	})

	t.Run("behind by less than the limit", func(t *testing.T) {
		b := on(t)
		id := b.place()
		replication(t, "STOP REPLICA SQL_THREAD")
		result := make(chan error, 1)
		var report reconcile.Report
		go func() {
			var err error
			report, err = b.reconciler().Run(b.ctx, reconcile.Options{})
			result <- err
		}()
		eventually(t, "the run waits", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM reconcile_runs") == 1 })
		replication(t, "START REPLICA SQL_THREAD")
		if err := <-result; err != nil {
			t.Fatal(err)
		}
		if report.Cancelled != 1 || report.Lag <= 0 {
			t.Errorf("report %+v, want one order and the lag", report)
		}
		b.wantOnce([]int64{id})
	})

	t.Run("behind by more than the limit, and then by less", func(t *testing.T) {
		b := on(t)
		id := b.place()
		delay := func(seconds string) {
			replication(t, "STOP REPLICA") // MariaDB wants both threads stopped
			replication(t, "CHANGE REPLICATION SOURCE TO SOURCE_DELAY = "+seconds)
			replication(t, "START REPLICA")
		}
		delay("3")
		b.refused(t, "it lags by more", within(500*time.Millisecond))
		report := b.run(b.reconciler(), reconcile.Options{})
		if report.Cancelled != 1 || report.Lag < 2*time.Second {
			t.Errorf("report %+v, want one order, and a lag of some 3 s", report)
		}
		b.wantOnce([]int64{id})
		delay("0")
	})

	t.Run("applies transactions in an order of its own", func(t *testing.T) {
		b := on(t)
		if b.isMariaDB() {
			return // it has no such setting
		}
		id := b.place()
		for _, order := range []string{"OFF", "ON"} {
			replication(t, "STOP REPLICA SQL_THREAD")
			replication(t, "SET GLOBAL replica_preserve_commit_order = "+order)
			replication(t, "START REPLICA SQL_THREAD")
			if order == "OFF" {
				b.refused(t, "replica_preserve_commit_order is off")
			}
		}
		b.run(b.reconciler(), reconcile.Options{})
		b.wantOnce([]int64{id})
	})

	t.Run("stale about a payment", func(t *testing.T) {
		b := on(t)
		paid, unpaid := b.place(), b.place()
		var once sync.Once
		stop := reconcile.Options{Progress: func(reconcile.Progress) {
			once.Do(func() { // the marker has come, no page was read
				replication(t, "STOP REPLICA SQL_THREAD")
				b.pay(paid)
			})
		}}
		events := func() string {
			return b.db.Text(t, "SELECT GROUP_CONCAT(kind ORDER BY id) FROM order_events WHERE order_id = ?", paid)
		}
		report := b.run(b.reconciler(), stop)
		if report.Counts != (reconcile.Counts{Scanned: 2, Cancelled: 1, AlreadyPaid: 1, Missed: reconcile.MissedCounts{NeverSent: 1}}) {
			t.Errorf("report %+v, want one cancelled and one paid", report.Counts)
		}
		if got := b.db.Text(t, "SELECT status FROM orders WHERE id = ?", paid); got != "paid" || events() != "placed,paid" {
			t.Errorf("the paid order is %s, with the events %s", got, events())
		}
		replication(t, "START REPLICA SQL_THREAD")
		b.wantOnce([]int64{unpaid})
		b.wantClean()
	})

	t.Run("falls behind in the middle", func(t *testing.T) {
		b := on(t)
		ids := b.overdue(1, 200)
		paused := make(chan struct{})
		var halt, tell sync.Once
		result := make(chan error, 1)
		var report reconcile.Report
		go func() {
			var err error
			report, err = b.reconciler(func(c *reconcile.Config) {
				c.PauseLag, c.Page, c.Batch, c.Rate = 1500*time.Millisecond, 50, 5, 50
			}).Run(b.ctx, reconcile.Options{Progress: func(p reconcile.Progress) {
				if p.Scanned > 0 {
					halt.Do(func() { replication(t, "STOP REPLICA SQL_THREAD") })
				}
				if p.Paused {
					tell.Do(func() { close(paused) })
				}
			}})
			result <- err
		}()
		<-paused
		if n := b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'unpaid'"); n == 0 {
			t.Error("it went on to the end though the replica fell behind")
		}
		replication(t, "START REPLICA SQL_THREAD")
		if err := <-result; err != nil || report.Cancelled != 200 || report.Paused <= 0 {
			t.Errorf("report %+v, %v; want 200 cancelled after a pause", report, err)
		}
		b.wantOnce(ids)
	})

	t.Run("falls behind for good", func(t *testing.T) {
		b := on(t)
		ids := b.overdue(1, 200)
		var halt sync.Once
		report, err := b.reconciler(within(2*time.Second), func(c *reconcile.Config) {
			c.PauseLag, c.Page, c.Batch, c.Rate = time.Second, 50, 5, 50
		}).Run(b.ctx, reconcile.Options{Progress: func(p reconcile.Progress) {
			if p.Scanned > 0 {
				halt.Do(func() { replication(t, "STOP REPLICA SQL_THREAD") })
			}
		}})
		if !errors.Is(err, reconcile.ErrReplica) || report.Cancelled == 0 || report.Cancelled == 200 {
			t.Errorf("report %+v, %v; want ErrReplica in the middle", report, err)
		}
		replication(t, "START REPLICA SQL_THREAD")
		b.run(b.reconciler(), reconcile.Options{})
		b.wantOnce(ids)
	})

	t.Run("another server", func(t *testing.T) {
		b := on(t)
		b.place()
		stranger := mysqltest.Empty(t, strangerDSN)
		if _, err := migrations.Up(b.ctx, stranger.SQL); err != nil {
			t.Fatal(err)
		}
		b.replica = stranger.SQL
		b.refused(t, "it knows no run at all", within(300*time.Millisecond))
		// A row of the same number in the history of its own does not make it one.
		stranger.Exec(t, "INSERT INTO reconcile_runs (id, state, started_at, cutoff_at, beat_at, lease_token, scanned, cancelled, already_paid, held, parked) "+
			"VALUES (2, 'running', '2026-01-01', '2026-01-01', '2036-01-01', REPEAT('0', 32), 0, 0, 0, 0, 0)")
		b.refused(t, "the newest run that it knows is 2 of 2026-01-01", within(300*time.Millisecond))
	})

	// Last: it ends the server.
	t.Run("down at the start, and back", func(t *testing.T) {
		b := on(t)
		id := b.place()
		stack.Stop(t, stacktest.Replica)
		ctx, stop := context.WithCancel(b.ctx)
		defer stop()
		ended := make(chan error, 1)
		r := b.reconciler(func(c *reconcile.Config) { c.RetryAfter = 50 * time.Millisecond })
		go func() { ended <- r.Loop(ctx) }()
		eventually(t, "several runs have failed", func() bool {
			return b.db.Int(t, "SELECT COUNT(*) FROM reconcile_runs WHERE state = 'failed'") >= 3
		})
		if err := r.Ready(b.ctx); !errors.Is(err, reconcile.ErrReplica) {
			t.Errorf("without a replica it is ready: %v", err)
		}
		if got := b.db.Text(t, "SELECT status FROM orders WHERE id = ?", id); got != "unpaid" {
			t.Errorf("the order is %s", got)
		}
		stack.Start(t, stacktest.Replica)
		eventually(t, "the order is cancelled", func() bool {
			return b.db.Text(t, "SELECT status FROM orders WHERE id = ?", id) == "cancelled"
		})
		eventually(t, "ready", func() bool { return r.Ready(b.ctx) == nil })
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the loop ends with %v", err)
		}
	})
}

func TestThePrimaryItselfIsNoReplica(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.place()
	b.replica = b.openStore(b.db.DSN).DB()
	b.refused(t, "it is the primary itself")
	report := b.run(b.reconciler(func(c *reconcile.Config) { c.OnLag = reconcile.OnLagPrimary }), reconcile.Options{})
	if report.Cancelled != 1 || !report.Primary {
		t.Errorf("report %+v, want one order from the primary", report)
	}
	b.replica = nil
	b.place()
	if report := b.run(b.reconciler(func(c *reconcile.Config) { c.OnLag = reconcile.OnLagPrimary }), reconcile.Options{}); report.Cancelled != 1 || !report.Primary {
		t.Errorf("without a replica: %+v, want one order from the primary", report)
	}
}

func TestALostConnectionEndsTheRunAndTheNextDoesTheRest(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 300)
	admin, err := sql.Open("mysql", stacktest.Require(t, "LAPSE_TEST_REPLICA_ADMIN_DSN"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = admin.Close() })
	var once sync.Once
	report, err := b.reconciler(func(c *reconcile.Config) { c.Page, c.Batch = 50, 10 }).Run(b.ctx, reconcile.Options{Progress: func(p reconcile.Progress) {
		if p.Scanned == 0 {
			return
		}
		once.Do(func() {
			for _, id := range connections(t, admin, b.db.Name) {
				if _, err := admin.ExecContext(b.ctx, fmt.Sprintf("KILL %d", id)); err != nil {
					t.Logf("kill: %v", err) // gone meanwhile
				}
			}
		})
	}})
	if !errors.Is(err, reconcile.ErrReplica) || report.Cancelled == 0 || report.Cancelled == 300 {
		t.Errorf("report %+v, %v; want ErrReplica in the middle", report, err)
	}
	b.run(b.reconciler(), reconcile.Options{})
	b.wantOnce(ids)
}

// connections gives the ids of the connections to a database. A replica's appliers, which work for all tests, show the database of what they apply.
func connections(t *testing.T, admin *sql.DB, database string) (open []int64) {
	t.Helper()
	rows, err := admin.QueryContext(t.Context(), "SELECT id FROM information_schema.processlist WHERE db = ? AND user <> 'system user'", database)
	if err != nil {
		t.Error(err)
		return nil
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			t.Error(err)
		}
		open = append(open, id)
	}
	if err := rows.Err(); err != nil {
		t.Error(err)
	}
	return open
}

// A proxy may send each statement where it likes. This one sends the third page to another server, which has nothing overdue: believed, it would end
// the night early.
func TestAnotherServerInTheMiddleOfARunEndsIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(1, 300)
	empty := mysqltest.New(t) // on the primary: another server than the replica
	dsn, err := mysql.ParseDSN(stacktest.Require(t, "LAPSE_MYSQL_DSN_REPLICA"))
	if err != nil {
		t.Fatal(err)
	}
	dsn.DBName, dsn.InterpolateParams = b.db.Name, true
	elsewhere, err := mysql.ParseDSN(empty.DSN)
	if err != nil {
		t.Fatal(err)
	}
	elsewhere.InterpolateParams = true
	one, err := mysql.NewConnector(dsn)
	if err != nil {
		t.Fatal(err)
	}
	two, err := mysql.NewConnector(elsewhere)
	if err != nil {
		t.Fatal(err)
	}
	p := &switching{Connector: one, other: two}
	proxied := sql.OpenDB(p)
	t.Cleanup(func() { _ = proxied.Close() })
	b.replica = proxied

	report, err := b.reconciler(func(c *reconcile.Config) { c.Page = 50 }).Run(b.ctx, reconcile.Options{})

	if !errors.Is(err, reconcile.ErrReplica) || !errors.Is(err, orders.ErrOtherServer) {
		t.Errorf("the run ends with %v, want ErrReplica and ErrOtherServer", err)
	}
	if report.Cancelled != 100 || p.pages.Load() != 3 {
		t.Errorf("report %+v after %d pages, want the orders of two", report.Counts, p.pages.Load())
	}
	if rest := b.run(setupReplica(b), reconcile.Options{}); rest.Cancelled != 200 {
		t.Errorf("the next run: %+v, want the other 200", rest.Counts)
	}
	b.wantOnce(ids)
}

// setupReplica gives a reconciler on the real replica again.
func setupReplica(b *bundle) *reconcile.Reconciler {
	b.replica = b.openStore(stacktest.Require(b.t, "LAPSE_MYSQL_DSN_REPLICA")).DB()
	return b.reconciler()
}

// switching makes connections that lead to one server, and from the third page on to another.
type switching struct {
	driver.Connector
	other driver.Connector
	pages atomic.Int64
}

// Connect implements driver.Connector.
func (s *switching) Connect(ctx context.Context) (driver.Conn, error) {
	one, err := s.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	two, err := s.other.Connect(ctx)
	if err != nil {
		return nil, errors.Join(err, one.Close())
	}
	return &switchingConn{Conn: one, other: two, pages: &s.pages}, nil
}

type switchingConn struct {
	driver.Conn
	other driver.Conn
	pages *atomic.Int64
}

// QueryContext implements driver.QueryerContext.
func (c *switchingConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	conn := c.Conn
	if strings.Contains(query, "UNION ALL") && c.pages.Add(1) >= 3 {
		conn = c.other
	}
	return conn.(driver.QueryerContext).QueryContext(ctx, query, args)
}

// ExecContext implements driver.ExecerContext.
func (c *switchingConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, query, args)
}

// CheckNamedValue implements driver.NamedValueChecker.
func (c *switchingConn) CheckNamedValue(v *driver.NamedValue) error {
	return c.Conn.(driver.NamedValueChecker).CheckNamedValue(v)
}

// Close implements driver.Conn.
func (c *switchingConn) Close() error { return errors.Join(c.Conn.Close(), c.other.Close()) }

// A name may stand for several replicas. The connection that showed the marker is the one whose server is audited.
func TestTheAuditStaysOnTheServerThatShowedTheMarker(t *testing.T) {
	t.Parallel()
	b := setup(t)
	broken := b.place(func(n *orders.NewOrder) { n.DeadlineAt = time.Now().Add(time.Hour) })
	b.db.Exec(t, "UPDATE orders SET status = 'paid', paid_at = UTC_TIMESTAMP(3) WHERE id = ?", broken)
	elsewhere, err := mysql.ParseDSN(mysqltest.New(t).DSN) // with no orders
	if err != nil {
		t.Fatal(err)
	}
	here, err := mysql.ParseDSN(stacktest.Require(t, "LAPSE_MYSQL_DSN_REPLICA"))
	if err != nil {
		t.Fatal("LAPSE_MYSQL_DSN_REPLICA cannot be read")
	}
	here.DBName = b.db.Name
	several := &spreading{}
	for i, dsn := range []*mysql.Config{here, elsewhere} {
		if several.to[i], err = mysql.NewConnector(dsn); err != nil {
			t.Fatal(err)
		}
	}
	b.replica = sql.OpenDB(several)
	t.Cleanup(func() { _ = b.replica.Close() })
	if report := b.run(b.reconciler(), reconcile.Options{Audit: true}); report.Violations() == 0 {
		t.Errorf("report %+v, want the finding of the server that was scanned", report.Audit)
	}
}

// spreading makes its first connection to one server and all others to another.
type spreading struct {
	to   [2]driver.Connector
	made atomic.Int64
}

// Connect implements driver.Connector.
func (s *spreading) Connect(ctx context.Context) (driver.Conn, error) {
	return s.to[min(s.made.Add(1)-1, 1)].Connect(ctx)
}

// Driver implements driver.Connector.
func (s *spreading) Driver() driver.Driver { return s.to[0].Driver() }
