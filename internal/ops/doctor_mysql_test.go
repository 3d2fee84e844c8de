package ops

import (
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/migrations"
	"github.com/lapse-orders/lapse/orders"
)

func TestASoundDatabaseHasNothingWrong(t *testing.T) {
	t.Parallel()
	cfg, _ := onDatabase(t)
	found := look(t, cfg, "mysql.", "clock.database")
	wantWrong(t, found, nil)
	wantSound(t, found, slices.Collect(maps.Keys(found))...)
}

// Each row breaks one thing of a session, on a real server behind a proxy or by the DSN, and just that is found.
func TestWhatIsWrongWithASessionIsFound(t *testing.T) {
	t.Parallel()
	rewritten := func(oldnew ...string) func(*testing.T, string) string {
		return func(t *testing.T, dsn string) string { return behind(t, dsn, false, oldnew...) }
	}
	param := func(name, value string) func(*testing.T, string) string {
		return func(t *testing.T, dsn string) string {
			return with(t, dsn, func(c *mysql.Config) { c.Params[name] = value })
		}
	}
	shanghai, err := time.LoadLocation("Asia/Shanghai")
	if err != nil {
		t.Fatal(err)
	}
	_, db := onDatabase(t)
	for name, tc := range map[string]struct {
		change func(*testing.T, string) string
		want   map[string]string
	}{
		"too old":           {rewritten("VERSION()", "'5.7.44-log'"), map[string]string{"mysql.version": "MySQL 5.7.44"}},
		"another isolation": {rewritten("READ COMMITTED", "REPEATABLE READ"), map[string]string{"mysql.isolation": "REPEATABLE-READ"}},
		"another time zone": {rewritten("'+00:00'", "'+08:00'"), map[string]string{"mysql.time_zone": "+08:00"}},
		"not strict":        {rewritten("STRICT_ALL_TABLES", "HIGH_NOT_PRECEDENCE"), map[string]string{"mysql.sql_mode": "not strict"}},
		"sessions reset":    {func(t *testing.T, dsn string) string { return behind(t, dsn, true) }, map[string]string{"mysql.session": `after "ROLLBACK"`}},
		"client found rows": {func(t *testing.T, dsn string) string {
			return with(t, dsn, func(c *mysql.Config) { c.ClientFoundRows = true })
		}, map[string]string{"mysql.found_rows": "mysql.dsn"}},
		"closed when idle":      {param("wait_timeout", "60"), map[string]string{"mysql.wait_timeout": "60 s"}},
		"ranges have no memory": {param("range_optimizer_max_mem_size", "1"), map[string]string{"mysql.plans": "the cancel reads orders by access"}},
		"clock an hour behind":  {param("timestamp", fmt.Sprint(time.Now().Add(-time.Hour).Unix())), map[string]string{"clock.database": "behind"}},
		"clock an hour ahead":   {param("timestamp", fmt.Sprint(time.Now().Add(time.Hour).Unix())), map[string]string{"clock.database": "ahead"}},
		"not at all, options galore": {func(t *testing.T, dsn string) string {
			return with(t, dsn, func(c *mysql.Config) {
				c.ParseTime, c.Loc, c.InterpolateParams, c.MultiStatements = true, shanghai, true, true
				c.Params["transaction_isolation"] = "'REPEATABLE-READ'"
				c.Params["time_zone"], c.Params["sql_mode"] = "'+08:00'", "''"
			})
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if strings.Contains(db.Text(t, "SELECT VERSION()"), "MariaDB") && name == "ranges have no memory" {
				t.Skip("MariaDB has no range_optimizer_max_mem_size")
			}
			wantWrong(t, look(t, accounts(tc.change(t, db.DSN)), "mysql.", "clock.database"), tc.want)
		})
	}
}

func TestVersionsAreJudgedByFlavour(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]Verdict{
		"8.0.11": Sound, "9.7.4-2": Sound, "5.7.44-log": Wrong, "10.6.12-MariaDB": Sound, "10.5.27-MariaDB": Wrong, "11.4.2-MariaDB-1:11.4.2": Sound,
		"5.5.5-10.11.6-MariaDB": Sound, "8.0.11-TiDB-v7.5.0": Wrong, "unknown": NotChecked, "8.4.0-azure": Sound,
	} {
		if got := judgeVersion(version); got.verdict != want || !strings.Contains(got.found, version) {
			t.Errorf("%s is %q: %s; want %q", version, got.verdict, got.found, want)
		}
	}
}

func TestAnOlderSchemaIsFoundWithWhatIsPending(t *testing.T) {
	t.Parallel()
	cfg, db := onDatabase(t)
	all, err := migrations.Status(t.Context(), db.SQL)
	if err != nil {
		t.Fatal(err)
	}
	last := all[len(all)-1]
	db.Exec(t, "DELETE FROM "+migrations.Table+" WHERE version_id = ?", last.Version)
	wantWrong(t, look(t, cfg, "mysql.s"), map[string]string{"mysql.schema": last.Name})

	db.Exec(t, "INSERT INTO "+migrations.Table+" (version_id, is_applied) VALUES (?, TRUE), (?, TRUE)", last.Version, last.Version+1)
	found := look(t, cfg, "mysql.schema")
	wantSound(t, found, "mysql.schema")
	if !strings.Contains(found["mysql.schema"].Found, "newer build") {
		t.Errorf("a newer schema: %s", found["mysql.schema"].Found)
	}

	empty := mysqltest.Empty(t, mysqltest.AdminDSN(t))
	found = look(t, accounts(empty.DSN), "mysql.")
	wantWrong(t, found, map[string]string{"mysql.schema": "no tables of lapse"})
	wantNotChecked(t, found, "mysql.schema", "mysql.indexes", "mysql.plans", "mysql.rights.api")
	// An account with rights on some other tables only is told apart from that by the server alone.
	db.Exec(t, "CREATE TABLE other (id INT PRIMARY KEY)")
	wantWrong(t, look(t, accounts(account(t, db, "SELECT ON $DB.other")), "mysql.schema"), map[string]string{"mysql.schema": "may read"})
}

func TestAMissingAndAnInvisibleIndexAreFoundAndMended(t *testing.T) {
	t.Parallel()
	cfg, db := onDatabase(t)
	invisible, word := "ALTER TABLE orders ALTER INDEX orders_by_deadline INVISIBLE", "invisible"
	if strings.Contains(db.Text(t, "SELECT VERSION()"), "MariaDB") {
		invisible, word = "ALTER TABLE orders ALTER INDEX orders_by_deadline IGNORED", "ignored"
	}
	for statement, words := range map[string]string{
		"ALTER TABLE outbox DROP KEY outbox_to_do": "outbox.outbox_to_do is missing",
		invisible: "orders.orders_by_deadline is " + word,
	} {
		db.Exec(t, statement)
		found := look(t, cfg, "mysql.")
		wantWrong(t, found, map[string]string{"mysql.indexes": words})
		wantNotChecked(t, found, "mysql.indexes", "mysql.plans") // the statement fails
		db.Exec(t, found["mysql.indexes"].Fix)
		wantSound(t, look(t, cfg, "mysql."), "mysql.indexes", "mysql.plans")
	}
}

func TestAnOldTransactionIsFoundWithItsConnection(t *testing.T) {
	t.Parallel()
	cfg, db := onDatabase(t)
	// Others' transactions on the shared server are no matter of this test: ours is to be the oldest, or one as old.
	cfg.OldSnapshot = time.Second
	tx, err := db.SQL.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	var n int
	if err := tx.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM orders").Scan(&n); err != nil {
		t.Fatal(err)
	}
	for limit := time.Now().Add(time.Minute); ; {
		f := look(t, cfg, "mysql.snapshots")["mysql.snapshots"]
		if f.Verdict == Wrong && strings.Contains(f.Fix, "KILL ") {
			break
		}
		if time.Now().After(limit) {
			t.Fatalf("an open transaction is %q: %s", f.Verdict, f.Found)
		}
	}
	cfg.OldSnapshot = 24 * time.Hour
	wantSound(t, look(t, cfg, "mysql.snapshots"), "mysql.snapshots")
	// Without the right to look it says so, and with which right it would.
	blind := accounts(account(t, db, "SELECT ON $DB.*"))
	wantNotChecked(t, look(t, blind, "mysql.snapshots"), "GRANT PROCESS", "mysql.snapshots")
	// One account of several that has it is enough.
	blind.Accounts[1] = Account{Role: "relay", Key: "mysql.dsn_relay", DSN: db.DSN}
	wantSound(t, look(t, blind, "mysql.snapshots"), "mysql.snapshots")
}

func TestPoolsAreHeldAgainstTheServersLimit(t *testing.T) {
	t.Parallel()
	cfg, db := onDatabase(t)
	cfg.Orders = orders.Config{MaxOpenConns: 10_000}
	wantWrong(t, look(t, cfg, "mysql."), map[string]string{"mysql.connections": "may take 60000"})
	limited := account(t, db, "ALL ON $DB.*")
	parsed, err := mysql.ParseDSN(limited)
	if err != nil {
		t.Fatal(err)
	}
	db.Exec(t, "ALTER USER '"+parsed.User+"'@'%' WITH MAX_USER_CONNECTIONS 20")
	found := look(t, accounts(limited), "mysql.connections")
	wantWrong(t, found, map[string]string{"mysql.connections": "an account may have 20"})
}

func TestEachRoleIsAskedForItsRights(t *testing.T) {
	t.Parallel()
	cfg, db := onDatabase(t)
	verbs := map[rune]string{'S': "SELECT", 'I': "INSERT", 'U': "UPDATE", 'D': "DELETE"}
	for role, tables := range needs {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			var grants []string
			for table, rights := range tables {
				for _, right := range rights {
					grants = append(grants, verbs[right]+" ON $DB."+table)
				}
			}
			slices.Sort(grants)
			cfg := cfg
			cfg.Accounts = slices.Clone(cfg.Accounts)
			set := func(dsn string) {
				for i := range cfg.Accounts {
					if cfg.Accounts[i].Role == role {
						cfg.Accounts[i] = Account{Role: role, Key: "mysql.dsn_" + role, DSN: dsn}
					}
				}
			}
			// Just these are enough.
			set(account(t, db, grants...))
			wantSound(t, look(t, cfg, "mysql.rights."+role), "mysql.rights."+role)
			// One less is told, with the GRANT that mends it.
			less, gone := grants[1:], grants[0]
			dsn := account(t, db, less...)
			set(dsn)
			found := look(t, cfg, "mysql.rights")
			verb, table, _ := strings.Cut(strings.ReplaceAll(gone, "$DB.", ""), " ON ")
			wantWrong(t, found, map[string]string{"mysql.rights." + role: verb + " on " + table})
			_, fix, _ := strings.Cut(found["mysql.rights."+role].Fix, "or: ")
			db.Exec(t, fix)
			wantSound(t, look(t, cfg, "mysql.rights."+role), "mysql.rights."+role)
		})
	}
	t.Run("migrate", func(t *testing.T) {
		t.Parallel()
		cfg := cfg
		cfg.Accounts = slices.Clone(cfg.Accounts)
		last := len(cfg.Accounts) - 1
		cfg.Accounts[last].DSN = account(t, db, "ALL ON $DB.*")
		wantSound(t, look(t, cfg, "mysql.rights.migrate"), "mysql.rights.migrate")
		cfg.Accounts[last].DSN = account(t, db, "SELECT, INSERT, UPDATE, DELETE, CREATE, INDEX, DROP ON $DB.*")
		wantWrong(t, look(t, cfg, "mysql.rights"), map[string]string{"mysql.rights.migrate": "lacks ALTER"})
	})
	t.Run("wrong password", func(t *testing.T) {
		t.Parallel()
		cfg := cfg
		cfg.Accounts = slices.Clone(cfg.Accounts)
		cfg.Accounts[1].DSN = with(t, account(t, db, "ALL ON $DB.*"), func(c *mysql.Config) { c.Passwd = "hunter2" })
		found := look(t, cfg, "mysql.rights")
		wantWrong(t, found, map[string]string{"mysql.rights.relay": "Access denied"})
		if strings.Contains(fmt.Sprint(found), "hunter2") {
			t.Error("it shows a password")
		}
	})
	t.Run("another database", func(t *testing.T) {
		t.Parallel()
		cfg := cfg
		cfg.Accounts = slices.Clone(cfg.Accounts)
		cfg.Accounts[2].DSN = mysqltest.New(t).DSN
		wantWrong(t, look(t, cfg, "mysql.rights"), map[string]string{"mysql.rights.consume": "leads to"})
	})
}

// The accounts that the stack and Compose make (deploy/mysql/users.sql) have what the doctor asks for.
func TestTheShippedAccountsHaveTheirRights(t *testing.T) {
	t.Parallel()
	cfg, db := onDatabase(t) // its name has the prefix that they may use
	n := 0
	for i, a := range cfg.Accounts {
		variable := map[string]string{"api": "LAPSE_MYSQL_DSN", "relay": "LAPSE_MYSQL_DSN_RELAY", "consume": "LAPSE_MYSQL_DSN_CONSUME", "reconcile": "LAPSE_MYSQL_DSN_RECONCILE",
			"refund": "LAPSE_MYSQL_DSN_REFUND", "read": "LAPSE_MYSQL_DSN_READ", "migrate": "LAPSE_MYSQL_DSN_MIGRATE"}[a.Role]
		if variable == "" {
			continue
		}
		n++
		cfg.Accounts[i].DSN = with(t, stacktest.Require(t, variable), func(c *mysql.Config) { c.DBName = db.Name })
	}
	found := look(t, cfg, "mysql.")
	wantWrong(t, found, nil)
	wantSound(t, found, "mysql.rights.api", "mysql.rights.relay", "mysql.rights.consume", "mysql.rights.reconcile", "mysql.rights.refund", "mysql.rights.read", "mysql.rights.migrate", "mysql.snapshots")
	if n < 7 {
		t.Errorf("%d accounts were looked at", n)
	}
}

func TestADatabaseThatIsNotThereIsOneCrossAndHoldsUpNothing(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ addr, words string }{"closed": {closed(t), "connection refused"}, "deaf": {deaf(t), "LAPSE_MYSQL_DSN"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := accounts(dsnAt(tc.addr))
			cfg.Replica = dsnAt(tc.addr)
			cfg.Timeout = 2 * time.Second
			found := look(t, cfg, "mysql.", "replica.", "clock.database")
			wantWrong(t, found, map[string]string{"mysql.reachable": tc.words, "replica.reachable": ""})
			for name, f := range found {
				if f.Verdict == Sound {
					t.Errorf("%s is sound: %s", name, f.Found)
				}
			}
			if strings.Contains(fmt.Sprint(found), "secret") {
				t.Error("it shows a password")
			}
		})
	}
	t.Run("not named", func(t *testing.T) {
		t.Parallel()
		found := look(t, accounts(""), "mysql.", "replica.")
		wantWrong(t, found, map[string]string{"mysql.reachable": "no DSN is configured"})
	})
	t.Run("no such database", func(t *testing.T) {
		t.Parallel()
		_, db := onDatabase(t)
		cfg := accounts(with(t, db.DSN, func(c *mysql.Config) { c.DBName = "lapse_no_such" }))
		found := look(t, cfg, "mysql.reachable")
		wantWrong(t, found, map[string]string{"mysql.reachable": "CREATE DATABASE"})
	})
}

func TestEveryTableThatARoleUpdatesHasAColumnToAskFor(t *testing.T) {
	t.Parallel()
	for role, tables := range needs {
		for table, rights := range tables {
			if strings.Contains(rights, "U") && columns[table] == "" {
				t.Errorf("%s updates %s, and no column of it is named to ask for the right", role, table)
			}
		}
	}
}
