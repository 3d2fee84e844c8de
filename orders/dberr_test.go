package orders_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/migrations"
	"github.com/lapse-orders/lapse/orders"
)

func TestErrorsOfTheDatabaseAreToldFromThoseOfAnOrder(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		number               uint16
		retryable, available bool
	}{
		{1213, true, false}, {1205, true, false}, {1020, true, false},
		{1290, false, false}, {1792, false, false}, {1836, false, false}, // read-only
		{2006, false, false}, {2013, false, false}, {9001, false, false}, // a proxy's
		{1040, false, false}, {1129, false, false}, {1203, false, false}, {1226, false, false}, // connections
		{1021, false, false}, {1030, false, false}, {1041, false, false}, {1114, false, false}, {1206, false, false}, // space
		{1044, false, false}, {1045, false, false}, {1142, false, false}, {1143, false, false}, {1227, false, false}, {1698, false, false}, // rights
		{1049, false, false}, {1054, false, false}, {1146, false, false}, {1364, false, false}, // schema
		{1053, false, false}, {1317, false, false}, {1927, false, false}, {1969, false, false}, {3024, false, false}, {4031, false, false}, // ended
		{1047, false, false}, {1180, false, false}, {3100, false, false}, {3101, false, false}, // clusters
		// Of the order: rows, values, constraints, triggers.
		{1062, false, true}, {1048, false, true}, {1264, false, true}, {1292, false, true}, {1366, false, true}, {1406, false, true}, {1451, false, true},
		{1452, false, true}, {1644, false, true}, {1690, false, true}, {3140, false, true}, {3819, false, true}, {4025, false, true}, {50001, false, true},
	} {
		err := fmt.Errorf("cancel 3 orders: %w", &mysql.MySQLError{Number: c.number})
		if got := orders.IsRetryable(err); got != c.retryable {
			t.Errorf("%d: retryable %t", c.number, got)
		}
		if got := orders.IsUnavailable(err); got == c.available {
			t.Errorf("%d: unavailable %t", c.number, got)
		}
	}
	for _, err := range []error{
		driver.ErrBadConn, mysql.ErrInvalidConn, mysql.ErrMalformPkt, mysql.ErrPktSync, sql.ErrConnDone, sql.ErrTxDone, io.EOF, io.ErrUnexpectedEOF,
		context.DeadlineExceeded, context.Canceled, &net.OpError{Op: "dial", Err: errors.New("refused")}, &net.DNSError{Name: "db"},
	} {
		if !orders.IsUnavailable(fmt.Errorf("x: %w", err)) {
			t.Errorf("%v: not unavailable", err)
		}
		if orders.IsRetryable(err) {
			t.Errorf("%v: retryable", err)
		}
	}
	for _, err := range []error{nil, errors.New("x"), orders.ErrInvalid, orders.ErrNotFound, orders.ErrExists, orders.ErrPaymentConflict, &orders.StockError{}} {
		if orders.IsUnavailable(err) || orders.IsRetryable(err) {
			t.Errorf("%v: unavailable %t, retryable %t", err, orders.IsUnavailable(err), orders.IsRetryable(err))
		}
	}
}

// TestBrokenCommitHasAnUnknownResultAndTheSecondCallTells breaks the connection before, and after, the server has the COMMIT.
func TestBrokenCommitHasAnUnknownResultAndTheSecondCallTells(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 100)
	p := newProxy(t, b.db.DSN)
	through, err := orders.Open(p.dsn, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = through.Close() }()
	line := []orders.Item{{SKU: "tea", Quantity: 1, Price: 1}}
	for name, cut := range map[string]verdict{"before": cutBefore, "after": cutAfter} {
		done := cut == cutAfter
		broken := func(verb string, err error) {
			t.Helper()
			if err == nil || !orders.IsUnavailable(err) || orders.IsRetryable(err) {
				t.Errorf("%s, cut %s the commit: %v, want an error that says nothing is known", verb, name, err)
			}
		}
		// The verb runs into the cut; then again, without.
		cutting := func() {
			p.on(func(statement string) verdict {
				if statement == "COMMIT" {
					return cut
				}
				return pass
			})
		}
		id := orders.NewID()
		n := orders.NewOrder{ID: id, Currency: "EUR", Amount: 1000, Items: line}
		overdue(&n)
		cutting()
		_, err := through.Place(b.ctx, n)
		broken("place", err)
		p.on(nil)
		_, err = through.Place(b.ctx, n)
		if done != errors.Is(err, orders.ErrExists) || !done && err != nil {
			t.Errorf("placed again after a cut %s the commit: %v", name, err)
		}

		cutting()
		_, err = through.CancelDue(b.ctx, text(id))
		broken("cancel", err)
		p.on(nil)
		out, err := through.CancelDue(b.ctx, text(id))
		want := map[bool]orders.Result{true: orders.ResultAlreadyCancelled, false: orders.ResultCancelled}[done]
		if err != nil || out[0].Result != want {
			t.Errorf("cancelled again after a cut %s the commit: %+v, %v; want %s", name, out, err, want)
		}

		cutting()
		_, err = through.RecordPayment(b.ctx, payment(id))
		broken("pay", err)
		p.on(nil)
		r, err := through.RecordPayment(b.ctx, payment(id))
		if err != nil || r.Repeated != done || r.Outcome != orders.PaymentLate || r.Refund != 1000 {
			t.Errorf("paid again after a cut %s the commit: %+v, %v", name, r, err)
		}

		cutting()
		err = through.AdjustStock(b.ctx, id, "tea", 5)
		broken("adjust", err)
		p.on(nil)
		if err := through.AdjustStock(b.ctx, id, "tea", 5); err != nil {
			t.Error(err)
		}

		o := b.place()
		until := time.Now().Add(time.Hour)
		cutting()
		_, err = through.ExtendDeadline(b.ctx, o.ID, until, "support")
		broken("extend", err)
		p.on(nil)
		x, err := through.ExtendDeadline(b.ctx, o.ID, until, "support")
		if err != nil || !x.Extended {
			t.Errorf("extended again after a cut %s the commit: %+v, %v", name, x, err)
		}
		if n := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE order_id = ? AND kind = 'extended'", o.ID); n != 1 {
			t.Errorf("%d extensions", n)
		}

		cutting()
		_, err = through.ClaimOutbox(b.ctx, 10, time.Minute)
		broken("claim", err)
		p.on(nil)
	}
	b.wantStock("tea", 110, 0, 0)
	b.wantClean()
}

// TestConnectionThatBreaksAnywhereLeavesAllOrNothing cuts at every statement of a cancel in turn.
func TestConnectionThatBreaksAnywhereLeavesAllOrNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 100)
	p := newProxy(t, b.db.DSN)
	for cutAt := int64(1); ; cutAt++ {
		o := b.place(overdue, items(orders.Item{SKU: "tea", Quantity: 1, Price: 1}))
		before := b.dump(o.ID)
		through, err := orders.Open(p.dsn, orders.Config{})
		if err != nil {
			t.Fatal(err)
		}
		var n atomic.Int64
		p.on(func(string) verdict {
			if n.Add(1) == cutAt {
				return cutBefore
			}
			return pass
		})
		out, err := through.CancelDue(b.ctx, text(o.ID))
		p.on(nil)
		if closeErr := through.Close(); closeErr != nil {
			t.Error(closeErr)
		}
		if n.Load() < cutAt {
			if err != nil || out[0].Result != orders.ResultCancelled {
				t.Errorf("%+v, %v", out, err)
			}
			if cutAt < 8 {
				t.Errorf("only %d statements were seen", n.Load())
			}
			break
		}
		if err == nil { // the connection was new, and database/sql took another
			continue
		}
		if !orders.IsUnavailable(err) {
			t.Errorf("cut at statement %d: %v is not the database's trouble", cutAt, err)
		}
		if after := b.dump(o.ID); after != before {
			t.Errorf("cut at statement %d:\n%s\nbefore\n%s", cutAt, after, before)
		}
		if out, err := b.store.CancelDue(b.ctx, text(o.ID)); err != nil || out[0].Result != orders.ResultCancelled {
			t.Errorf("afterwards: %+v, %v", out, err)
		}
	}
	b.wantStock("tea", 100, 0, 0)
	b.wantClean()
}

// TestConflictThatCouldNotBeParkedIsAskedForAgain: a gateway does not repeat a notice that was refused for good, so a conflict is told once it is
// parked, and not before.
func TestConflictThatCouldNotBeParkedIsAskedForAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	one, two := b.place().ID, b.place().ID
	b.pay(one)
	other := payment(one)
	other.OrderID = two
	p := newProxy(t, b.db.DSN)
	through, err := orders.Open(p.dsn, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = through.Close() }()
	var begun atomic.Int64
	p.on(func(statement string) verdict {
		if statement == "START TRANSACTION" && begun.Add(1) > 1 {
			return cutBefore
		}
		return pass
	})
	result, err := through.RecordPayment(b.ctx, other)
	if !orders.IsUnavailable(err) || errors.Is(err, orders.ErrPaymentConflict) || result != (orders.PaymentResult{}) {
		t.Errorf("%+v, %v; want an error that says that nothing is known", result, err)
	}
	if begun.Load() < 2 {
		t.Errorf("%d transactions began; parking was not tried", begun.Load())
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM parked"); n != 0 {
		t.Errorf("%d rows are parked by a transaction that never began", n)
	}
	p.on(nil)
	if result, err := through.RecordPayment(b.ctx, other); !errors.Is(err, orders.ErrPaymentConflict) || orders.IsUnavailable(err) {
		t.Errorf("recorded again: %+v, %v", result, err)
	}
	if got, want := b.db.Text(t, "SELECT CONCAT_WS(' ', what, ref, times, state) FROM parked"), fmt.Sprintf("payment test:t-%d 1 parked", one); got != want {
		t.Errorf("parked is %q, want %q", got, want)
	}
	b.wantClean()
}

// TestOneOrderThatAlwaysFailsIsItsOwnTrouble: the consumer halves a batch for such an error and pauses for the others.
func TestOneOrderThatAlwaysFailsIsItsOwnTrouble(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 100)
	line := items(orders.Item{SKU: "tea", Quantity: 1, Price: 1})
	good, poison, good2 := b.place(overdue, line).ID, b.place(overdue, line).ID, b.place(overdue, line).ID
	b.db.Exec(t, fmt.Sprintf(`CREATE TRIGGER poison BEFORE UPDATE ON orders FOR EACH ROW
		BEGIN IF NEW.id = %d THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'poison'; END IF; END`, poison))
	before := b.counts()
	out, err := b.store.CancelDue(b.ctx, text(good, poison, good2))
	if err == nil || orders.IsUnavailable(err) || orders.IsRetryable(err) {
		t.Errorf("%+v, %v; want an error of the order's own", out, err)
	}
	if after := b.counts(); after != before {
		t.Errorf("the batch failed and left something behind\n %s\n %s", before, after)
	}
	if out := b.cancelDue(good, good2); out[0].Result != orders.ResultCancelled || out[1].Result != orders.ResultCancelled {
		t.Errorf("without it: %+v", out)
	}
	if _, err := b.store.CancelDue(b.ctx, text(poison)); err == nil || orders.IsUnavailable(err) {
		t.Errorf("alone: %v", err)
	}
	b.db.Exec(t, "DROP TRIGGER poison")
	b.cancelDue(poison)
	b.wantStock("tea", 100, 0, 0)
	b.wantClean()
}

// case DB-12
func TestOrderWithAZeroDateIsNotCancelledAndIsItsOwnTrouble(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, column := range []string{"deadline_at", "created_at"} {
		o, good := b.place(overdue), b.place(overdue)
		conn, err := b.db.SQL.Conn(b.ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, statement := range []string{"SET SESSION sql_mode = ''", fmt.Sprintf("UPDATE orders SET %s = '0000-00-00' WHERE id = %d", column, o.ID), "SET SESSION sql_mode = DEFAULT"} {
			if _, err := conn.ExecContext(b.ctx, statement); err != nil {
				t.Fatal(err)
			}
		}
		_ = conn.Close()
		if _, err := b.store.CancelDue(b.ctx, text(o.ID, good.ID)); err == nil || orders.IsUnavailable(err) {
			t.Errorf("zero %s: %v, want an error of the order's own", column, err)
		}
		if got := b.db.Text(t, "SELECT status FROM orders WHERE id = ?", o.ID); got != "unpaid" {
			t.Errorf("zero %s: %s", column, got)
		}
		if out := b.cancelDue(good.ID); out[0].Result != orders.ResultCancelled {
			t.Errorf("its neighbour: %+v", out)
		}
	}
}

func TestDatabaseThatCannotBeReachedIsUnavailableAndSaysNoPassword(t *testing.T) {
	t.Parallel()
	b := setup(t)
	lis, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := lis.Addr().String()
	_ = lis.Close()
	silent, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	for name, change := range map[string]func(*mysql.Config){
		"refused":          func(c *mysql.Config) { c.Addr = refused },
		"unknown host":     func(c *mysql.Config) { c.Addr = "nowhere.invalid:3306" },
		"silent":           func(c *mysql.Config) { c.Addr = silent.Addr().String(); c.ReadTimeout = 200 * time.Millisecond },
		"wrong password":   func(c *mysql.Config) { c.Passwd = "xsecretx" },
		"unknown database": func(c *mysql.Config) { c.DBName = "lapse_test_no_such" },
		"bad certificate":  func(c *mysql.Config) { c.TLSConfig = "true" },
		"no such setting":  param("no_such_variable", "1"),
	} {
		store := b.open(orders.Config{DialTimeout: 2 * time.Second}, change)
		ctx, cancel := context.WithTimeout(b.ctx, 20*time.Second)
		_, err := store.CancelDue(ctx, []string{"1"})
		if !orders.IsUnavailable(err) {
			t.Errorf("%s: %v is taken for the order's trouble", name, err)
		}
		ready := store.Ready(ctx)
		cancel()
		if !orders.IsUnavailable(ready) {
			t.Errorf("%s: ready says %v", name, ready)
		}
		for _, e := range []error{err, ready} {
			if e != nil && strings.Contains(e.Error(), "xsecretx") {
				t.Errorf("%s: the password is in %q", name, e)
			}
		}
	}
	ctx, cancel := context.WithCancel(b.ctx)
	cancel()
	if _, err := b.store.CancelDue(ctx, []string{"1"}); !orders.IsUnavailable(err) || !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// case DB-9
func TestReadOnlyDatabaseIsUnavailableAndTheConnectionIsGivenUp(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(overdue)
	readOnly := "1"
	p := newProxy(t, b.db.DSN, param("transaction_read_only", readOnly))
	if b.isMariaDB() {
		p = newProxy(t, b.db.DSN, param("tx_read_only", readOnly))
	}
	store, err := orders.Open(p.dsn, orders.Config{MaxOpenConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	for range 2 {
		p.seen()
		if _, err := store.CancelDue(b.ctx, text(o.ID)); !orders.IsUnavailable(err) {
			t.Errorf("1792: %v", err)
		}
		// The name may lead to the writer by the next time: each attempt begins with a connection of its own.
		if first := p.seen()[0]; !strings.HasPrefix(first, "SET ") {
			t.Errorf("the read-only connection was used again: %q", first)
		}
	}
	if out := b.cancelDue(o.ID); out[0].Result != orders.ResultCancelled {
		t.Errorf("on the writer: %+v", out)
	}
}

// case DB-9
func TestReplicaInPlaceOfThePrimaryIsUnavailable(t *testing.T) {
	t.Parallel()
	b := setup(t)
	admin := os.Getenv("LAPSE_TEST_REPLICA_ADMIN_DSN")
	if admin == "" {
		t.Log("no replica: the read-only session of the test above has to do")
		return
	}
	parsed, err := mysql.ParseDSN(admin)
	if err != nil {
		t.Fatal(err)
	}
	replica := func(user, password, database string) *orders.Store {
		return b.open(orders.Config{MaxOpenConns: 1}, func(c *mysql.Config) {
			c.Addr, c.User, c.Passwd, c.DBName = parsed.Addr, user, password, database
		})
	}
	system := b.open(orders.Config{MaxOpenConns: 2}, func(c *mysql.Config) {
		c.Addr, c.User, c.Passwd, c.DBName = parsed.Addr, parsed.User, parsed.Passwd, "mysql"
	})
	if err := system.Ready(b.ctx); !orders.IsUnavailable(err) || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("ready on a replica: %v", err)
	}
	user, password := parsed.User, parsed.Passwd
	if b.isMariaDB() {
		// There is no super_read_only: administrators may write on a replica, also an account, which nobody else hears of.
		user, password = strings.TrimPrefix(b.db.Name, "lapse_test_"), "writer"
		conn, err := system.DB().Conn(b.ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, statement := range []string{
			"SET sql_log_bin = 0", "CREATE USER '" + user + "'@'%' IDENTIFIED BY '" + password + "'",
			"GRANT SELECT, INSERT, UPDATE ON `lapse%`.* TO '" + user + "'@'%'",
		} {
			if _, err := conn.ExecContext(b.ctx, statement); err != nil {
				t.Fatal(err)
			}
		}
		t.Cleanup(func() {
			if _, err := conn.ExecContext(context.WithoutCancel(b.ctx), "DROP USER '"+user+"'@'%'"); err != nil {
				t.Error(err)
			}
			_ = conn.Close()
		})
	}
	// A replica that is busy with other tests may take long to have our database: any that has our tables will do, until it goes.
	eventuallyEvery(t, 100*time.Millisecond, "the replica has a database with our tables", func() bool {
		var database string
		err := system.DB().QueryRowContext(b.ctx, `SELECT TABLE_SCHEMA FROM information_schema.TABLES WHERE TABLE_NAME = 'parked' AND TABLE_SCHEMA LIKE 'lapse%'
			ORDER BY CREATE_TIME DESC LIMIT 1`).Scan(&database)
		if errors.Is(err, sql.ErrNoRows) {
			return false
		}
		if err != nil {
			t.Fatal(err)
		}
		store := replica(user, password, database)
		defer func() { _ = store.Close() }()
		_, placing := store.Place(b.ctx, orders.NewOrder{Currency: "EUR"})
		_, cancelling := store.CancelDue(b.ctx, []string{"1"}) // unknown, so it is parked: a write
		for _, err := range []error{placing, cancelling} {
			var gone *mysql.MySQLError
			if errors.As(err, &gone) && (gone.Number == 1146 || gone.Number == 1049) {
				return false
			}
			if !orders.IsUnavailable(err) || !errors.Is(err, driver.ErrBadConn) {
				t.Errorf("a write on a replica: %v; want unavailable, and the connection given up", err)
			}
		}
		return true
	})
}

func TestReadySaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	if err := b.store.Ready(b.ctx); err != nil {
		t.Errorf("ready: %v", err)
	}
	empty := mysqltest.Empty(t, mysqltest.AdminDSN(t))
	store, err := orders.Open(empty.DSN, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	wants := func(what string, err error, says ...string) {
		t.Helper()
		if !orders.IsUnavailable(err) {
			t.Errorf("%s: %v is not unavailable", what, err)
			return
		}
		for _, s := range says {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%s: %q does not say %q", what, err, s)
			}
		}
	}
	wants("no tables", store.Ready(b.ctx), "lapse migrate up")
	_, err = store.CancelDue(b.ctx, []string{"1"})
	wants("cancel without tables", err)

	b.db.Exec(t, "UPDATE "+migrations.Table+" SET is_applied = 0 WHERE version_id = ?", migrations.Version)
	older := b.db.Int(t, "SELECT MAX(version_id) FROM "+migrations.Table+" WHERE is_applied")
	wants("older schema", b.store.Ready(b.ctx), fmt.Sprint(older), fmt.Sprint(migrations.Version), "lapse migrate up")
	b.db.Exec(t, "UPDATE "+migrations.Table+" SET is_applied = 1")
	b.db.Exec(t, "INSERT INTO "+migrations.Table+" (version_id, is_applied) VALUES (?, 1)", migrations.Version+1)
	if err := b.store.Ready(b.ctx); err != nil {
		t.Errorf("on the next schema: %v", err)
	}
}

func TestOpenRefusesWhatCannotWorkAndDialsNothing(t *testing.T) {
	t.Parallel()
	for dsn, says := range map[string]string{
		"":                                  "names no database",
		"root:xsecretx@tcp(127.0.0.1:1)/":   "names no database",
		"root:xsecretx@tcp(127.0.0.1:1":     "user:password",
		"mysql://root:xsecretx@127.0.0.1/x": "user:password",
		"root:xsecretx@tcp(127.0.0.1:1)/x?tls=foo": "user:password",
	} {
		store, err := orders.Open(dsn, orders.Config{})
		if err == nil {
			_ = store.Close()
			t.Errorf("%q was taken", dsn)
			continue
		}
		if !errors.Is(err, orders.ErrInvalid) || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "xsecretx") {
			t.Errorf("%q: %v", dsn, err)
		}
	}
	const good = "root:x@tcp(127.0.0.1:1)/x"
	for name, cfg := range map[string]orders.Config{
		"Timeout": {Timeout: -1}, "MaxLifetime": {MaxLifetime: -1}, "EarlyWait": {EarlyWait: -1}, "OutboxRetention": {OutboxRetention: -1},
		"DialTimeout": {DialTimeout: -1}, "IOTimeout": {IOTimeout: -1}, "MaxOpenConns": {MaxOpenConns: -1}, "longer than MaxLifetime": {Timeout: 8 * 24 * time.Hour},
	} {
		if _, err := orders.Open(good, cfg); !errors.Is(err, orders.ErrInvalid) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Nobody listens there, and it is no error until somebody asks.
	store, err := orders.Open(good, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if store.Timeout() != 30*time.Minute || store.DB().Stats().MaxOpenConnections != 16 || store.DB().Stats().OpenConnections != 0 {
		t.Errorf("timeout %s, pool %+v", store.Timeout(), store.DB().Stats())
	}
	if err := store.Close(); err != nil {
		t.Error(err)
	}
}

func TestSessionsOfAStoreAreItsOwnWhateverTheDSNSays(t *testing.T) {
	t.Parallel()
	b := setup(t)
	store := b.open(orders.Config{}, func(c *mysql.Config) {
		c.ParseTime, c.Loc = true, time.FixedZone("Asia/Shanghai", 8*3600)
		param("time_zone", "'+08:00'")(c)
		param("sql_mode", "''")(c)
		if b.isMariaDB() {
			param("tx_isolation", "'SERIALIZABLE'")(c)
		} else {
			param("transaction_isolation", "'SERIALIZABLE'")(c)
		}
	})
	isolation := "@@transaction_isolation"
	if b.isMariaDB() {
		isolation = "@@tx_isolation"
	}
	var level, zone, mode string
	var wait int
	if err := store.DB().QueryRowContext(b.ctx, "SELECT "+isolation+", @@time_zone, @@sql_mode, @@innodb_lock_wait_timeout").Scan(&level, &zone, &mode, &wait); err != nil {
		t.Fatal(err)
	}
	if level != "READ-COMMITTED" || zone != "+00:00" || !strings.Contains(mode, "STRICT_ALL_TABLES") || wait != 5 {
		t.Errorf("isolation %s, zone %s, mode %s, lock wait %d", level, zone, mode, wait)
	}
	if err := store.Ready(b.ctx); err != nil {
		t.Error(err)
	}
}
