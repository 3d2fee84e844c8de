package main

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/reconcile"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
)

// reconciling is a database on the shared primary and its replica, with the accounts that reconcile has there.
func reconciling(t *testing.T) (b *bundle, environ []string) {
	t.Helper()
	db := mysqltest.New(t)
	b = &bundle{db: db}
	var err error
	if b.store, err = orders.Open(db.DSN, orders.Config{MaxOpenConns: 4}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.store.Close() })
	environ = []string{"LAPSE_HTTP_ADDR=127.0.0.1:0", "LAPSE_LOG_FORMAT=json", "LAPSE_RECONCILE_RATE=1000000", "LAPSE_RECONCILE_MAX_LAG=3m", "LAPSE_RECONCILE_PAUSE_LAG=3m", "LAPSE_RECONCILE_MAX_LOCK_WAITS=1000"}
	for _, name := range []string{"LAPSE_MYSQL_DSN_RECONCILE", "LAPSE_MYSQL_DSN_REPLICA"} {
		dsn, err := mysql.ParseDSN(stacktest.Require(t, name))
		if err != nil {
			t.Fatalf("%s cannot be read", name)
		}
		dsn.DBName = db.Name
		environ = append(environ, name+"="+dsn.FormatDSN())
	}
	return b, environ
}

// overdue plants n orders that have been overdue for an hour and more, with a piece of stock each.
func (b *bundle) overdue(t *testing.T, n int) []int64 {
	t.Helper()
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', 1000 - ?, ?, 0)", n, n)
	b.db.Exec(t, "INSERT INTO stock_ledger (order_id, sku, kind, quantity, at) VALUES (1, 'pen', 'adjust', 1000, UTC_TIMESTAMP(3))")
	ids := make([]int64, n)
	var rows, items, moves []string
	for i := range ids {
		ids[i] = int64(1000 + i)
		rows = append(rows, fmt.Sprintf("(%d, 'web', 'u1', 'EUR', 100, 'unpaid', UTC_TIMESTAMP(3) - INTERVAL %d SECOND, UTC_TIMESTAMP(3) - INTERVAL 1 DAY)", ids[i], 3600+i))
		items = append(items, fmt.Sprintf("(%d, 'pen', 1, 100)", ids[i]))
		moves = append(moves, fmt.Sprintf("(%d, 'pen', 'reserve', 1, UTC_TIMESTAMP(3))", ids[i]))
	}
	b.db.Exec(t, "INSERT INTO orders (id, channel, user_id, currency, amount, status, deadline_at, created_at) VALUES "+strings.Join(rows, ", "))
	b.db.Exec(t, "INSERT INTO order_items (order_id, sku, quantity, price) VALUES "+strings.Join(items, ", "))
	b.db.Exec(t, "INSERT INTO stock_ledger (order_id, sku, kind, quantity, at) VALUES "+strings.Join(moves, ", "))
	b.db.Exec(t, "INSERT INTO outbox (order_id, deliver_at, state, available_at, attempts) SELECT id, deadline_at, 'pending', deadline_at, 0 FROM orders")
	b.replicated(t)
	return ids
}

// replicated waits until the shared replica has the test's orders. It applies what all tests write, and may be behind by more than other waits take.
func (b *bundle) replicated(t *testing.T) {
	t.Helper()
	dsn, err := mysql.ParseDSN(stacktest.Require(t, "LAPSE_MYSQL_DSN_REPLICA"))
	if err != nil {
		t.Fatal("LAPSE_MYSQL_DSN_REPLICA cannot be read")
	}
	dsn.DBName = b.db.Name
	replica, err := sql.Open("mysql", dsn.FormatDSN())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = replica.Close() }()
	want, got := b.db.Int(t, "SELECT COUNT(*) FROM outbox"), int64(-1)
	begun := time.Now()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		if err = replica.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM outbox").Scan(&got); err == nil && got == want {
			return
		}
		if time.Since(begun) > 3*limit {
			t.Fatalf("the shared replica does not follow: it has %d of %d orders, %v. Look at SHOW REPLICA STATUS there: a test that writes past the binlog stops it for all", got, want, err)
		}
	}
}

// A process is killed with its third page done. Started again it says that a run is at work, until the lease has ended; then it goes on from
// the fourth page.
//
// case JOB-8
func TestReconcileKilledAfterItsThirdPageIsResumed(t *testing.T) {
	t.Parallel()
	b, environ := reconciling(t)
	ids := b.overdue(t, 500)
	slow := append(environ, "LAPSE_RECONCILE_PAGE=50", "LAPSE_RECONCILE_BATCH=10", "LAPSE_RECONCILE_RATE=200", "LAPSE_RECONCILE_LEASE=10s")
	p := spawn(t, slow, "reconcile", "--once")
	eventually(t, "the third page is done", func() bool { return b.db.Int(t, "SELECT COALESCE(SUM(scanned), 0) FROM reconcile_runs") >= 150 })
	p.signal(syscall.SIGKILL)
	if code := p.wait(t); code != -1 {
		t.Fatalf("it ends with %d, want a kill", code)
	}
	done := b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'cancelled'")
	kept := b.db.Int(t, "SELECT scanned FROM reconcile_runs")
	if done < kept || done >= int64(len(ids)) {
		t.Fatalf("%d orders are cancelled, %d of them in pages that were kept", done, kept)
	}
	if code, stdout, stderr := lapse(t, environ, "reconcile", "--once"); code != exitDone || stdout != "" || !strings.Contains(stderr, "another reconcile is running: run 1 of ") {
		t.Errorf("beside a lease: exit code %d, stdout %q, stderr %q; want 0 and a word", code, stdout, stderr)
	}
	b.db.Exec(t, "UPDATE reconcile_runs SET lease_until = UTC_TIMESTAMP(3)")

	// One that came due since, and is not the resumed run's.
	b.db.Exec(t, "UPDATE reconcile_runs SET cutoff_at = cutoff_at - INTERVAL 10 MINUTE")
	b.db.Exec(t, `INSERT INTO orders (id, channel, user_id, currency, amount, status, deadline_at, created_at)
		VALUES (900, 'web', 'u1', 'EUR', 100, 'unpaid', UTC_TIMESTAMP(3) - INTERVAL 10 MINUTE, UTC_TIMESTAMP(3) - INTERVAL 1 DAY)`)
	b.db.Exec(t, "INSERT INTO outbox (order_id, deliver_at, state, available_at, attempts) VALUES (900, UTC_TIMESTAMP(3), 'sent', UTC_TIMESTAMP(3), 0)")

	code, stdout, stderr := lapse(t, environ, "reconcile", "--once", "--json", "--audit")

	var got struct {
		reconcile.Report
		Violations int64
		Before     []reconcile.Report `json:"resumed_runs"`
	}
	if err := json.Unmarshal([]byte(stdout), &got); err != nil {
		t.Fatalf("exit code %d, stdout is not one object: %v\n%s\n%s", code, err, stdout, stderr)
	}
	// What was cancelled of the fourth page before the kill is found nowhere any more.
	if len(got.Before) != 1 || !got.Before[0].Resumed || got.Before[0].RunID != 1 || got.Before[0].Scanned != kept+int64(len(ids))-done {
		t.Errorf("exit code %d, stderr %s, resumed %+v; want run 1 at order %d", code, stderr, got.Before, kept)
	}
	// The outbox rows of the killed run's orders were never sent: that is the one finding, and it ends nothing early.
	if code != exitInvariant || got.Resumed || got.Cancelled != 1 || got.Violations != 500 {
		t.Errorf("exit code %d, report %+v, %d findings; want 4, a run for the order that came due since, and the 500 outbox rows", code, got.Report, got.Violations)
	}
	b.cancelledOnce(t, ids...)
	if code, stdout, stderr := lapse(t, environ, "reconcile", "--once"); code != exitDone || !strings.Contains(stdout, "scanned           0\n") {
		t.Errorf("the next run: exit code %d, stdout %q, stderr %q", code, stdout, stderr)
	}
}

func TestReconcileOnceSaysWhatItDid(t *testing.T) {
	t.Parallel()
	b, environ := reconciling(t)
	ids := b.overdue(t, 3)
	code, stdout, stderr := lapse(t, environ, "reconcile", "--once", "--dry-run")
	if code != exitDone || !strings.Contains(stdout, "(dry) is done") || !strings.Contains(stdout, "  scanned           3\n") || strings.Contains(stdout, "cancelled") {
		t.Errorf("dry run: exit code %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	code, stdout, stderr = lapse(t, environ, "reconcile", "--once", "--from", "2000-01-01", "--until", "2000-01-02 12:00", "--on-lag", "primary", "--rate", "100")
	if code != exitDone || !strings.Contains(stdout, "(partial) is done") || !strings.Contains(stdout, "  cancelled         0\n") {
		t.Errorf("a part: exit code %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	code, stdout, stderr = lapse(t, environ, "reconcile", "--once")
	if code != exitDone || !strings.Contains(stdout, "  cancelled         3   missed by the message path: 3 never sent, 0 sent and not received, 0 parked\n") || !strings.Contains(stdout, "read from      the replica ") {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	if !strings.Contains(stderr, `"level":"WARN","msg":"reconcile had to cancel orders`) {
		t.Errorf("no warning: %q", stderr)
	}
	b.cancelledOnce(t, ids...)
	b.db.Exec(t, "UPDATE orders SET cancelled_at = deadline_at - INTERVAL 1 SECOND WHERE id = ?", ids[0])
	b.db.Exec(t, "UPDATE outbox SET state = 'sent'")
	code, stdout, stderr = lapse(t, environ, "reconcile", "--once", "--audit")
	if code != exitInvariant || !strings.Contains(stdout, "I5 not_before_deadline: 1; it should hold that") || !strings.Contains(stdout, fmt.Sprintf("order %d: cancelled at", ids[0])) {
		t.Errorf("findings: exit code %d, stdout %q, stderr %q", code, stdout, stderr)
	}
}

func TestReconcileNeedsItsReplica(t *testing.T) {
	t.Parallel()
	b, environ := reconciling(t)
	b.overdue(t, 1)
	without := append([]string{}, environ...)
	for i, v := range without {
		if strings.HasPrefix(v, "LAPSE_MYSQL_DSN_REPLICA=") {
			without[i] = "X=y"
		}
	}
	nowhere := append(append([]string{}, environ...), "LAPSE_MYSQL_DSN_REPLICA=u:p@tcp(127.0.0.1:1)/d")
	itself := append(append([]string{}, environ...), "LAPSE_MYSQL_DSN_REPLICA="+b.db.DSN)
	for _, c := range []struct {
		name    string
		environ []string
		args    []string
		code    int
		says    string
	}{
		{"none named", without, nil, exitUsage, "LAPSE_MYSQL_DSN_REPLICA"},
		{"none named, as a service", without, []string{"-service"}, exitUsage, "LAPSE_MYSQL_DSN_REPLICA"},
		{"not there", nowhere, nil, exitMissing, "the replica cannot be relied on"},
		{"the primary itself", itself, nil, exitMissing, "it is the primary itself"},
		{"an unknown time", environ, []string{"--from", "yesterday"}, exitUsage, `"yesterday" is no time`},
		{"nothing between", environ, []string{"--from", "2026-01-02", "--until", "2026-01-01"}, exitUsage, "is not before"},
		{"once only", environ, []string{"-service", "--dry-run"}, exitUsage, "--dry-run goes with --once"},
		{"an audit after a dry run", environ, []string{"--dry-run", "--audit"}, exitUsage, "--audit does not go with --dry-run, --from or --until"},
		{"an audit after a part", environ, []string{"--from", "2026-01-01", "--audit"}, exitUsage, "--audit does not go with"},
		{"an audit before an instant", environ, []string{"--until", "2026-01-01", "--audit"}, exitUsage, "--audit does not go with"},
		{"a rate of nothing", environ, []string{"--rate", "0"}, exitUsage, "reconcile.rate"},
		{"an unknown way", environ, []string{"--on-lag", "hope"}, exitUsage, "reconcile.on_lag"},
	} {
		args := append([]string{"reconcile", "--once"}, c.args...)
		if len(c.args) > 0 && c.args[0] == "-service" {
			args = append([]string{"reconcile"}, c.args[1:]...)
		}
		if code, stdout, stderr := lapse(t, c.environ, args...); code != c.code || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: exit code %d, stdout %q, stderr %q; want %d and %q", c.name, code, stdout, stderr, c.code, c.says)
		}
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status <> 'unpaid'"); n != 0 {
		t.Error("an order was cancelled")
	}
}

func TestReconcileAsAServiceCatchesUpAndIsReady(t *testing.T) {
	t.Parallel()
	b, environ := reconciling(t)
	ids := b.overdue(t, 20)
	b.db.Exec(t, "UPDATE outbox SET state = 'sent'")
	p := spawn(t, environ, "reconcile")
	p.ready(t)
	eventually(t, "the run that was missed is done", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM reconcile_runs WHERE state = 'done'") == 1 })
	b.cancelledOnce(t, ids...)
	eventually(t, "the metrics show it", func() bool {
		status, body := p.get(t, "/metrics")
		return status == http.StatusOK && strings.Contains(body, "\nlapse_reconcile_cancelled_total 20\n") && strings.Contains(body, `lapse_reconcile_runs_total{result="done"} 1`) &&
			strings.Contains(body, `lapse_reconcile_missed_total{why="sent_not_received"} 20`) && strings.Contains(body, `lapse_reconcile_audit_violations{check="money_has_one_home"} 0`)
	})
	if code, _, stderr := lapse(t, []string{"LAPSE_HTTP_ADDR=" + p.addr(t)}, "health", "reconcile"); code != exitDone {
		t.Errorf("health: %d, %s", code, stderr)
	}
	p.signal(syscall.SIGTERM)
	if code := p.wait(t); code != exitDone {
		t.Errorf("it ends with %d, want 0", code)
	}
}

func TestAllRunsReconcileWhereAReplicaIsNamed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.overdue(t, 5)
	b.db.Exec(t, "UPDATE outbox SET state = 'sent', available_at = UTC_TIMESTAMP(3) + INTERVAL 1 DAY") // as if the broker had lost their messages
	replica, err := mysql.ParseDSN(stacktest.Require(t, "LAPSE_MYSQL_DSN_REPLICA"))
	if err != nil {
		t.Fatal("LAPSE_MYSQL_DSN_REPLICA cannot be read")
	}
	replica.DBName = b.db.Name
	p := start(t, b.environ("LAPSE_API_ADDR=127.0.0.1:0", "LAPSE_MYSQL_DSN_REPLICA="+replica.FormatDSN()), "all")
	p.ready(t)
	eventually(t, "reconcile has done what the messages missed", func() bool {
		return b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'unpaid'") == 0
	})
	b.cancelledOnce(t, ids...)
	if n := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE kind = 'reconciled'"); n != int64(len(ids)) {
		t.Errorf("%d orders were cancelled by reconcile, want %d", n, len(ids))
	}
	p.signal(syscall.SIGTERM)
	if code := p.wait(t); code != exitDone {
		t.Errorf("it ends with %d, want 0", code)
	}
}

func TestTheBarFitsTheTerminal(t *testing.T) {
	t.Parallel()
	p := reconcile.Progress{Counts: reconcile.Counts{Scanned: 50, Cancelled: 48, AlreadyPaid: 1, Held: 1}, Total: 200, Elapsed: 65 * time.Second}
	if got, want := barLine(p, 120), "[██████████░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░] 50/200, cancelled 48, paid 1, held 1, parked 0  1m5s"; got != want {
		t.Errorf("the bar is\n%s\nwant\n%s", got, want)
	}
	p.Paused = true
	for width := range 130 {
		if n := len([]rune(barLine(p, width))); n > max(width-1, 0) {
			t.Errorf("%d characters on a terminal of %d", n, width)
		}
	}
	var out output
	b := &bar{w: &out}
	b.style.Width = 80
	b.show(p)
	fmt.Fprint(b, "a line of the log\n")
	b.erase()
	if got := out.String(); !strings.HasPrefix(got, "\r[") || !strings.HasSuffix(got, "\r\x1b[Ka line of the log\n") {
		t.Errorf("the log is written over: %q", got)
	}
}
