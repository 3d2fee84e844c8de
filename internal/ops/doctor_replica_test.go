package ops

import (
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/migrations"
)

func open(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func execute(t *testing.T, db *sql.DB, statement string) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), statement); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

func isMariaDB(t *testing.T, db *sql.DB) bool {
	t.Helper()
	var version string
	if err := db.QueryRowContext(t.Context(), "SELECT VERSION()").Scan(&version); err != nil {
		t.Fatal(err)
	}
	return strings.Contains(version, "MariaDB")
}

// arrived waits until the replica has a database, and gives the DSN of it there.
func arrived(t *testing.T, replicaAdmin, name string) string {
	t.Helper()
	db := open(t, replicaAdmin)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(time.Minute)
	for {
		var n int
		err := db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM "+name+"."+migrations.Table+" WHERE version_id = ?", migrations.Version).Scan(&n)
		if err == nil && n == 1 {
			return with(t, replicaAdmin, func(c *mysql.Config) { c.DBName = name })
		}
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("the replica has not the tables of %s after a minute: %v", name, err)
		}
	}
}

func TestTheSharedReplicaIsSound(t *testing.T) {
	t.Parallel()
	cfg, db := onDatabase(t)
	cfg.Replica = arrived(t, stacktest.Require(t, "LAPSE_TEST_REPLICA_ADMIN_DSN"), db.Name)
	found := look(t, cfg, "replica.", "mysql.binlog")
	wantWrong(t, found, nil)
	wantSound(t, found, "replica.reachable", "replica.of_primary", "replica.read_only", "mysql.binlog")

	cfg.Replica = ""
	wantNotChecked(t, look(t, cfg, "replica."), "LAPSE_MYSQL_DSN_REPLICA", "replica.reachable", "replica.of_primary", "replica.read_only", "replica.lag")
}

// The account that the stack makes for reading can do all that these checks ask.
func TestTheReadingAccountIsEnoughForTheReplica(t *testing.T) {
	t.Parallel()
	cfg, db := onDatabase(t)
	arrived(t, stacktest.Require(t, "LAPSE_TEST_REPLICA_ADMIN_DSN"), db.Name)
	cfg.Replica = with(t, stacktest.Require(t, "LAPSE_MYSQL_DSN_REPLICA"), func(c *mysql.Config) { c.DBName = db.Name })
	wantSound(t, look(t, cfg, "replica."), "replica.reachable", "replica.of_primary", "replica.read_only")
}

func TestTheWrongServersAreFound(t *testing.T) {
	t.Parallel()
	cfg, db := onDatabase(t)
	replica := arrived(t, stacktest.Require(t, "LAPSE_TEST_REPLICA_ADMIN_DSN"), db.Name)
	// The primary where a replica should be.
	cfg.Replica = db.DSN
	found := look(t, cfg, "replica.")
	wantWrong(t, found, map[string]string{"replica.of_primary": "is the primary itself"})
	wantNotChecked(t, found, "the primary itself", "replica.read_only", "replica.lag")
	// A replica where the primary should be.
	wantWrong(t, look(t, accounts(replica), "mysql."), map[string]string{"mysql.writable": "point mysql.dsn at the primary"})
}

// breakPrimary breaks one setting of a private primary after the other.
func breakPrimary(t *testing.T, s *stacktest.Stack) {
	db := mysqltest.Empty(t, s.MySQLAdminDSN())
	if _, err := migrations.Up(t.Context(), db.SQL); err != nil {
		t.Fatal(err)
	}
	cfg := accounts(db.DSN)
	wantWrong(t, look(t, cfg, "mysql."), nil)
	admin := open(t, s.MySQLAdminDSN())
	for _, c := range []struct{ set, back, check, words string }{
		{"innodb_flush_log_at_trx_commit = 2", "innodb_flush_log_at_trx_commit = 1", "mysql.durability", "innodb_flush_log_at_trx_commit is 2"},
		{"sync_binlog = 0", "sync_binlog = 1", "mysql.durability", "sync_binlog is 0"},
		{"binlog_format = 'STATEMENT'", "binlog_format = 'ROW'", "mysql.binlog", "binlog_format is STATEMENT"},
		{"innodb_doublewrite = DETECT_ONLY", "innodb_doublewrite = DETECT_AND_RECOVER", "mysql.durability", "innodb_doublewrite is DETECT_ONLY"},
		{"read_only = ON", "read_only = OFF", "mysql.writable", "read_only is"},
		{"max_connections = 50", "max_connections = 500", "mysql.connections", "max_connections is 50"},
	} {
		if strings.Contains(c.set, "DETECT_ONLY") && isMariaDB(t, admin) {
			continue // it has no such value
		}
		execute(t, admin, "SET GLOBAL "+c.set)
		wantWrong(t, look(t, cfg, "mysql."), map[string]string{c.check: c.words})
		execute(t, admin, "SET GLOBAL "+c.back)
	}
	wantWrong(t, look(t, cfg, "mysql."), nil)
}

// breakReplica breaks a private replica.
func breakReplica(t *testing.T, s *stacktest.Stack) {
	db := mysqltest.Empty(t, s.MySQLAdminDSN())
	if _, err := migrations.Up(t.Context(), db.SQL); err != nil {
		t.Fatal(err)
	}
	cfg := accounts(db.DSN)
	cfg.Replica = arrived(t, s.ReplicaAdminDSN(), db.Name)
	wantSound(t, look(t, cfg, "replica."), "replica.reachable", "replica.of_primary", "replica.read_only", "replica.lag")

	// Another primary's.
	other, otherDB := onDatabase(t)
	other.Replica = cfg.Replica
	found := look(t, other, "replica.of_primary", "replica.read_only")
	if !isMariaDB(t, otherDB.SQL) { // which numbers transactions without saying whose they are
		wantWrong(t, found, map[string]string{"replica.of_primary": "has executed nothing that"})
	}

	replica := open(t, s.ReplicaAdminDSN())
	stop, start := "STOP REPLICA", "START REPLICA"
	readOnly := "super_read_only"
	if isMariaDB(t, replica) {
		readOnly = "read_only"
	}
	// Stopped, and the primary goes on.
	execute(t, replica, stop)
	execute(t, db.SQL, "CREATE TABLE something (id INT PRIMARY KEY)")
	quick := cfg
	quick.Timeout = 5 * time.Second
	wantWrong(t, look(t, quick, "replica."), map[string]string{"replica.lag": "START REPLICA"})
	execute(t, replica, start)
	wantSound(t, look(t, cfg, "replica."), "replica.lag", "replica.of_primary")
	// Writable, and written to.
	execute(t, replica, "SET GLOBAL "+readOnly+" = OFF")
	wantWrong(t, look(t, cfg, "replica."), map[string]string{"replica.read_only": readOnly + " is OFF"})
	execute(t, replica, "SET GLOBAL read_only = OFF")
	execute(t, replica, "CREATE DATABASE lapse_of_the_replica")
	found = look(t, cfg, "replica.")
	if !isMariaDB(t, replica) {
		wantWrong(t, found, map[string]string{"replica.read_only": "", "replica.of_primary": "somebody has written to it"})
	}
}
