package trial

import (
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
)

// databaseStage is a stage on a test's own database, without processes.
func databaseStage(t *testing.T) (*stage, *mysqltest.DB) {
	t.Helper()
	replica := stacktest.Require(t, "LAPSE_MYSQL_DSN_REPLICA")
	db := mysqltest.New(t)
	s := &stage{database: db.Name, reader: db.SQL, bench: &bench{started: time.Now(), display: NewDisplay(t.Output(), func(string) string { return "" }, time.Second)}}
	s.cfg.DSN, s.cfg.DSNMigrate, s.cfg.DSNReplica = stacktest.Require(t, "LAPSE_MYSQL_DSN"), stacktest.Require(t, "LAPSE_MYSQL_DSN_MIGRATE"), replica
	if err := s.fill(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s, db
}

func TestAFilledDatabaseIsAsTheVerbsWouldHaveLeftItOnTheReplicaToo(t *testing.T) {
	t.Parallel()
	s, db := databaseStage(t)
	f := filling{total: 30_000, overdue: 2000, waiting: 1500, ways: 3, now: time.Now().UTC().Truncate(time.Second)} // two chunks
	if _, _, err := s.fillOrders(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	for query, want := range map[string]int64{
		"SELECT COUNT(*) FROM orders":                                                                               30_000,
		"SELECT COUNT(*) FROM orders WHERE status = 'cancelled'":                                                    30_000 - 7500,
		"SELECT COUNT(*) FROM orders WHERE status = 'unpaid'":                                                       7500,
		"SELECT COUNT(*) FROM orders WHERE status = 'unpaid' AND deadline_at < UTC_TIMESTAMP(3)":                    6000,
		"SELECT COUNT(*) FROM orders WHERE status = 'unpaid' AND deadline_at > UTC_TIMESTAMP(3) + INTERVAL 12 HOUR": 1500,
		"SELECT COUNT(*) FROM order_items":                                                                          15_000,
		"SELECT COUNT(*) FROM stock_ledger WHERE kind = 'reserve'":                                                  15_000,
		"SELECT COUNT(*) FROM outbox WHERE state = 'sent'":                                                          7500,
		"SELECT SUM(reserved) FROM stock":                                                                           15_000,
		"SELECT COUNT(DISTINCT sku) FROM order_items":                                                               benchSKUs,
		"SELECT MIN(id) FROM orders WHERE status = 'unpaid'":                                                        f.firstOverdue(),
		"SELECT MIN(id) FROM orders WHERE deadline_at > UTC_TIMESTAMP(3)":                                           f.firstWaiting(),
		"SELECT COUNT(DISTINCT deadline_at) FROM orders WHERE deadline_at < UTC_TIMESTAMP(3) AND status = 'unpaid'": 6000,
	} {
		if got := db.Int(t, query); got != want {
			t.Errorf("%s: %d, want %d", query, got, want)
		}
	}
	for way := range f.ways {
		from, until := f.deadlines(way)
		query := "SELECT COUNT(*) FROM orders WHERE status = 'unpaid' AND deadline_at >= '" + from.Format(layout) + "' AND deadline_at < '" + until.Format(layout) + "'"
		if got := db.Int(t, query); got != 2000 {
			t.Errorf("way %d has %d orders between %s and %s", way, got, from, until)
		}
	}
	checks, err := orders.Audit(t.Context(), db.SQL, orders.AuditOptions{MinID: f.firstOverdue(), Limit: 3})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range checks {
		if want := map[string]int64{"overdue_is_cancelled": 6000}[c.Name]; c.Violations != want {
			t.Errorf("%s: %d violations, want %d: %+v", c.Name, c.Violations, want, c.Examples)
		}
	}
	replica, err := orders.Open(s.dsn(s.cfg.DSNReplica), orders.Config{MaxOpenConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = replica.Close() }()
	var there int
	if err := replica.DB().QueryRowContext(t.Context(), "SELECT COUNT(*) FROM outbox").Scan(&there); err != nil || there != 7500 {
		t.Errorf("the replica has %d outbox rows, %v", there, err)
	}
}
