package ops

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/migrations"
	"github.com/lapse-orders/lapse/orders"
)

// database is a server that answers: its pool, with the sessions that lapse works in, and what it says of itself.
type database struct {
	*sql.DB
	account Account
	parsed  *mysql.Config
	version string
	mariaDB bool
	server  string            // its identity
	name    string            // of the database in it
	global  map[string]string // variables by lower-case name
	session map[string]string // of a session of lapse
}

func (d *doctor) openPrimary(ctx context.Context) (*database, error) {
	for _, a := range d.cfg.Accounts {
		if a.Role != "migrate" && a.Role != "read" && a.DSN != "" {
			return d.open(ctx, a)
		}
	}
	return nil, errors.New("no DSN is configured")
}

// open connects as an account and reads the variables. The session is lapse's own.
func (d *doctor) open(ctx context.Context, a Account) (*database, error) {
	cfg := d.cfg.Orders
	cfg.MaxOpenConns = 8
	store, err := orders.Open(a.DSN, cfg)
	if err != nil {
		return nil, err
	}
	d.onEnd(func() { _ = store.Close() })
	db := &database{DB: store.DB(), account: a}
	if db.parsed, err = mysql.ParseDSN(a.DSN); err != nil {
		return nil, errors.New("the DSN cannot be read") // orders.Open has read it; the driver's error may repeat the password
	}
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close() //nolint:errcheck // it goes back to the pool
	if err := conn.QueryRowContext(ctx, "SELECT VERSION(), DATABASE()").Scan(&db.version, &db.name); err != nil {
		return nil, err
	}
	db.mariaDB = strings.Contains(db.version, "MariaDB")
	if db.global, err = variables(ctx, conn, "GLOBAL"); err != nil {
		return nil, err
	}
	if db.session, err = variables(ctx, conn, "SESSION"); err != nil {
		return nil, err
	}
	db.server = db.global["server_uuid"]
	if db.server == "" { // MariaDB has none
		db.server = strings.Join([]string{db.global["hostname"], db.global["port"], db.global["server_id"], db.global["datadir"]}, ":")
	}
	return db, nil
}

func variables(ctx context.Context, conn *sql.Conn, scope string) (_ map[string]string, err error) {
	rows, err := conn.QueryContext(ctx, "SHOW "+scope+" VARIABLES")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	all := map[string]string{}
	for rows.Next() {
		var name string
		var value sql.NullString
		if err := rows.Scan(&name, &value); err != nil {
			return nil, err
		}
		all[strings.ToLower(name)] = value.String
	}
	return all, rows.Err()
}

// onPrimary makes a check of one that needs the primary.
func onPrimary(run func(ctx context.Context, d *doctor, db *database) result) func(context.Context, *doctor) result {
	return func(ctx context.Context, d *doctor) result {
		db, err := d.primary(ctx)
		if err != nil {
			return unchecked("", "the database does not answer, see mysql.reachable")
		}
		return run(ctx, d, db)
	}
}

// failed is the result of a check whose question got no answer.
func failed(doing string, err error) result { return unchecked("", "%s: %v", doing, err) }

func number(err error) uint16 {
	if my, ok := errors.AsType[*mysql.MySQLError](err); ok {
		return my.Number
	}
	return 0
}

// persist is the statement that sets a global variable for good.
func (db *database) persist(name, value string) string {
	if db.mariaDB {
		return fmt.Sprintf("SET GLOBAL %s = %s; and %s = %s under [mysqld] in its configuration file", name, value, name, strings.Trim(value, "'"))
	}
	return fmt.Sprintf("SET PERSIST %s = %s", name, value)
}

func isOn(v string) bool {
	return v == "1" || strings.EqualFold(v, "ON") || strings.EqualFold(v, "YES")
}

var mysqlChecks = slices.Concat([]check{
	{
		name: "mysql.reachable",
		why:  "Nothing works without the database: orders cannot be placed, paid or cancelled.",
		run: func(ctx context.Context, d *doctor) result {
			db, err := d.primary(ctx)
			if err == nil {
				return sound("%s at %s as %s", db.name, db.parsed.Addr, db.parsed.User)
			}
			fix := "set LAPSE_MYSQL_DSN to user:password@tcp(host:port)/database; 'lapse config' shows what is in effect"
			switch number(err) {
			case 1044, 1045:
				fix = "run deploy/mysql/users.sql with the passwords of the DSNs"
			case 1049:
				fix = "CREATE DATABASE, then: lapse migrate up"
			}
			return wrong(fix, "%v", err)
		},
	},
	{
		name: "mysql.version",
		why:  "lapse needs SKIP LOCKED, CHECK constraints and instants with milliseconds that behave as in MySQL 8.0 or MariaDB 10.6.",
		run: onPrimary(func(_ context.Context, _ *doctor, db *database) result {
			return judgeVersion(db.version)
		}),
	},
	{
		name: "mysql.writable",
		why:  "On a read-only server orders are neither placed nor cancelled: services wait until it takes writes.",
		run: onPrimary(func(_ context.Context, _ *doctor, db *database) result {
			for _, name := range []string{"super_read_only", "read_only", "innodb_read_only"} {
				if v := db.global[name]; v != "" && v != "0" && !strings.EqualFold(v, "OFF") {
					return wrong("point "+db.account.Key+" at the primary; if this is it: SET GLOBAL "+name+" = OFF", "%s is %s on %s", name, v, db.parsed.Addr)
				}
			}
			return sound("it takes writes")
		}),
	},
	{
		name: "mysql.schema",
		why:  "A binary works on its own schema version and on the next one. On an older one its statements fail.",
		run: onPrimary(func(ctx context.Context, _ *doctor, db *database) result {
			const fix = "lapse migrate up"
			all, err := migrations.Status(ctx, db.DB)
			switch {
			case number(err) == 1142 || number(err) == 1143:
				return wrong(fix, "%s has no tables of lapse that %s may read", db.name, db.parsed.User)
			case err != nil:
				return failed("ask for the schema version", err)
			}
			var pending []string
			at := int64(0)
			for _, m := range all {
				if m.At.IsZero() {
					pending = append(pending, m.Name)
				} else {
					at = max(at, m.Version)
				}
			}
			switch {
			case len(pending) == len(all):
				return wrong(fix, "%s has no tables of lapse", db.name)
			case len(pending) > 0:
				return wrong(fix, "version %d, this build needs %d; pending: %s", at, migrations.Version, strings.Join(pending, ", "))
			case at > migrations.Version:
				return sound("version %d, made by a newer build; this one was made for %d", at, migrations.Version)
			}
			return sound("version %d", at)
		}),
	},
	{
		name: "mysql.indexes",
		why:  "Statements name the index that they were written for: without it they fail, and one that is invisible counts as missing.",
		run:  onPrimary(checkIndexes),
	},
	{
		name: "mysql.plans",
		why:  "A plan that leaves its index reads the whole table, locks what it reads, and makes every claim and cancel wait for every checkout.",
		run: onPrimary(func(ctx context.Context, _ *doctor, db *database) result {
			plans, err := orders.Plans(ctx, db.DB)
			if n := number(err); n == 1146 || n == 1176 || n == 1142 || n == 1054 {
				return unchecked("", "%v; see mysql.schema, mysql.indexes and the rights", err)
			}
			if err != nil {
				return failed("explain", err)
			}
			var bad []string
			for _, p := range plans {
				if !p.Sound() {
					bad = append(bad, fmt.Sprintf("the %s reads %s by access %s on index %q, want %s", p.Statement, p.Table, p.Access, p.Key, p.Index))
				}
			}
			if len(bad) > 0 {
				return wrong("look at optimizer_switch and range_optimizer_max_mem_size, in the DSN too; then: ANALYZE TABLE orders, outbox", "%s", strings.Join(bad, "; "))
			}
			return sound("%d statements are answered from their index", len(plans))
		}),
	},
	{
		name: "mysql.isolation",
		why:  "At REPEATABLE READ an open claim blocks the insert of outbox rows, and one unknown id in a cancel blocks all inserts behind it.",
		run: onPrimary(func(_ context.Context, _ *doctor, db *database) result {
			level := db.session["transaction_isolation"]
			if level == "" {
				level = db.session["tx_isolation"]
			}
			if level != "READ-COMMITTED" {
				return wrong("let the proxy before the database pass SET SESSION on, or connect to the database itself", "sessions of lapse are at %s, though they ask for READ-COMMITTED", level)
			}
			return sound("READ-COMMITTED")
		}),
	},
	{
		name: "mysql.time_zone",
		why:  "Every instant is UTC, from UTC_TIMESTAMP(3). In a session of another zone whoever reads or defaults by NOW() is hours off.",
		run: onPrimary(func(_ context.Context, _ *doctor, db *database) result {
			server := db.global["time_zone"]
			if server == "SYSTEM" {
				server += " (" + db.global["system_time_zone"] + ")"
			}
			if zone := db.session["time_zone"]; zone != "+00:00" {
				return wrong("let the proxy before the database pass SET SESSION on, or connect to the database itself", "sessions of lapse are in %s, though they ask for +00:00", zone)
			}
			return sound("+00:00 in sessions of lapse; the server's own is %s", server)
		}),
	},
	{
		name: "mysql.sql_mode",
		why:  "Without strict mode MySQL cuts what does not fit and stores it: an amount or an id that is silently another.",
		run: onPrimary(func(_ context.Context, _ *doctor, db *database) result {
			mode := db.session["sql_mode"]
			if !strings.Contains(mode, "STRICT_ALL_TABLES") && !strings.Contains(mode, "STRICT_TRANS_TABLES") {
				return wrong("let the proxy before the database pass SET SESSION on, or connect to the database itself", "sessions of lapse have %q, which is not strict", mode)
			}
			return sound("strict")
		}),
	},
	{
		name: "mysql.session",
		why:  "A proxy that resets sessions, or changes connections within one, takes isolation, zone and strict mode away between two statements.",
		run:  onPrimary(checkSession),
	},
	{
		name: "mysql.found_rows",
		why:  "clientFoundRows counts rows that were found, not changed. lapse is right with both; a conditional update of yours on that DSN is not.",
		run: onPrimary(func(_ context.Context, d *doctor, _ *database) result {
			var with []string
			for _, a := range d.cfg.Accounts {
				if parsed, err := mysql.ParseDSN(a.DSN); err == nil && parsed.ClientFoundRows {
					with = append(with, a.Key)
				}
			}
			if len(with) > 0 {
				return wrong("take clientFoundRows=true out of the DSN", "on in %s", strings.Join(with, ", "))
			}
			return sound("off: row counts are rows changed")
		}),
	},
	{
		name: "mysql.durability",
		why:  "With less, a power loss forgets commits that were acknowledged: payments that the gateway was told about.",
		run: onPrimary(func(_ context.Context, _ *doctor, db *database) result {
			var bad, fixes []string
			want := func(name, value string, ok bool) {
				if !ok {
					bad = append(bad, name+" is "+db.global[name])
					fixes = append(fixes, db.persist(name, value))
				}
			}
			want("innodb_flush_log_at_trx_commit", "1", db.global["innodb_flush_log_at_trx_commit"] == "1")
			want("sync_binlog", "1", !isOn(db.global["log_bin"]) || db.global["sync_binlog"] == "1")
			if v := db.global["innodb_doublewrite"]; v == "0" || strings.EqualFold(v, "OFF") || strings.EqualFold(v, "DETECT_ONLY") {
				bad = append(bad, "innodb_doublewrite is "+v)
				fixes = append(fixes, "innodb_doublewrite = ON under [mysqld], and a restart")
			}
			if len(bad) > 0 {
				return wrong(strings.Join(fixes, "; "), "%s", strings.Join(bad, ", "))
			}
			return sound("each commit is on the disk, in the redo log and in the binlog")
		}),
	},
	{
		name: "mysql.binlog",
		why:  "At READ COMMITTED only row format is allowed to write, and a replica that reconcile can wait for needs GTIDs.",
		run: onPrimary(func(_ context.Context, d *doctor, db *database) result {
			format, gtid := db.global["binlog_format"], db.global["gtid_mode"]
			switch {
			case !isOn(db.global["log_bin"]) && d.cfg.Replica != "":
				return wrong("log_bin = binlog under [mysqld], and a restart", "log_bin is off, so that no replica can follow")
			case !isOn(db.global["log_bin"]):
				return sound("off: no replica can follow, and there is none")
			case format != "" && format != "ROW":
				return wrong(db.persist("binlog_format", "'ROW'")+"; then restart the services", "binlog_format is %s", format)
			case d.cfg.Replica != "" && !db.mariaDB && gtid != "ON":
				return wrong("gtid_mode = ON and enforce_gtid_consistency = ON under [mysqld] on primary and replica", "gtid_mode is %s", gtid)
			}
			if db.mariaDB {
				return sound("row format")
			}
			return sound("row format, GTIDs %s", strings.ToLower(gtid))
		}),
	},
	{
		name: "mysql.snapshots",
		why:  "While an old snapshot is open (a dump, a forgotten BEGIN), each claim of the relay reads through all that changed since.",
		run:  checkSnapshots,
	},
	{
		name: "mysql.connections",
		why:  "Each process has a pool. With more of them than the server allows, checkouts are refused in the rush, not before.",
		run: onPrimary(func(ctx context.Context, d *doctor, db *database) result {
			var name string
			var inUse int
			if err := db.QueryRowContext(ctx, "SHOW GLOBAL STATUS LIKE 'Threads_connected'").Scan(&name, &inUse); err != nil {
				return failed("count connections", err)
			}
			pool := d.cfg.Orders.WithDefaults().MaxOpenConns
			// The least that a deployment has: two each of api, relay and consume, so that one of each may be replaced.
			need := 2 * 3 * pool
			if limit, err := strconv.Atoi(db.global["max_connections"]); err == nil && need > limit {
				return wrong(db.persist("max_connections", strconv.Itoa(need+100))+"; or a smaller mysql.max_open_conns", "max_connections is %d; two each of api, relay and consume may take %d (mysql.max_open_conns is %d)", limit, need, pool)
			}
			if limit, err := strconv.Atoi(db.session["max_user_connections"]); err == nil && limit > 0 && 2*pool > limit {
				return wrong("ALTER USER … WITH MAX_USER_CONNECTIONS "+strconv.Itoa(2*pool)+"; or a smaller mysql.max_open_conns", "an account may have %d connections; two processes of one role may take %d", limit, 2*pool)
			}
			return sound("%s allowed, %d in use; two each of api, relay and consume may take %d", db.global["max_connections"], inUse, need)
		}),
	},
	{
		name: "mysql.wait_timeout",
		why:  "A server that closes idle connections before the pool gives them up breaks the first statement after each pause.",
		run: onPrimary(func(_ context.Context, _ *doctor, db *database) result {
			seconds, err := strconv.Atoi(db.session["wait_timeout"])
			if err != nil {
				return failed("read wait_timeout", err)
			}
			if timeout := time.Duration(seconds) * time.Second; timeout <= orders.ConnLifetime {
				return wrong(db.persist("wait_timeout", "28800")+"; and no wait_timeout in the DSN", "wait_timeout is %d s, the pool keeps connections for %s", seconds, orders.ConnLifetime)
			}
			return sound("%d s; the pool gives connections up after %s", seconds, orders.ConnLifetime)
		}),
	},
}, rightsChecks)

// judgeVersion takes what VERSION() says.
func judgeVersion(version string) result {
	flavour, least := "MySQL", [2]int{8, 0}
	switch {
	case strings.Contains(version, "MariaDB"):
		flavour, least = "MariaDB", [2]int{10, 6}
	case strings.Contains(version, "TiDB"):
		return wrong("use MySQL 8.0 or newer, or MariaDB 10.6 or newer", "%s: it has no SKIP LOCKED and other locks", version)
	}
	var major, minor int
	// MariaDB before 11 puts 5.5.5- before its own number for old replicas.
	if _, err := fmt.Sscanf(strings.TrimPrefix(version, "5.5.5-"), "%d.%d", &major, &minor); err != nil {
		return unchecked("", "%q is no version that can be read", version)
	}
	if major < least[0] || major == least[0] && minor < least[1] {
		return wrong("use MySQL 8.0 or newer, or MariaDB 10.6 or newer", "%s %s", flavour, version)
	}
	return sound("%s %s", flavour, version)
}

func checkIndexes(ctx context.Context, _ *doctor, db *database) (r result) {
	want, err := migrations.Indexes()
	if err != nil {
		return failed("read the migrations", err)
	}
	usable := "IS_VISIBLE = 'YES'"
	if db.mariaDB {
		usable = "IGNORED = 'NO'"
	}
	rows, err := db.QueryContext(ctx, "SELECT DISTINCT TABLE_NAME, INDEX_NAME, "+usable+" FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = DATABASE()")
	if err != nil {
		return failed("read the indexes", err)
	}
	defer func() {
		if err := rows.Close(); err != nil {
			r = failed("read the indexes", err)
		}
	}()
	have := map[string]bool{}
	tables := map[string]bool{}
	for rows.Next() {
		var table, index string
		var usable bool
		if err := rows.Scan(&table, &index, &usable); err != nil {
			return failed("read the indexes", err)
		}
		tables[table] = true
		have[table+"."+index] = usable
	}
	if err := rows.Err(); err != nil {
		return failed("read the indexes", err)
	}
	var missing, fixes []string
	n := 0
	for _, table := range slices.Sorted(maps.Keys(want)) {
		if !tables[table] {
			return unchecked("", "table %s is not there, see mysql.schema", table)
		}
		for _, index := range want[table] {
			n++
			usable, there := have[table+"."+index.Name]
			switch {
			case !there:
				missing = append(missing, table+"."+index.Name+" is missing")
				fixes = append(fixes, "ALTER TABLE "+table+" ADD "+index.Definition)
			case !usable && db.mariaDB:
				missing = append(missing, table+"."+index.Name+" is ignored")
				fixes = append(fixes, "ALTER TABLE "+table+" ALTER INDEX "+index.Name+" NOT IGNORED")
			case !usable:
				missing = append(missing, table+"."+index.Name+" is invisible")
				fixes = append(fixes, "ALTER TABLE "+table+" ALTER INDEX "+index.Name+" VISIBLE")
			}
		}
	}
	if len(missing) > 0 {
		return wrong(strings.Join(fixes, "; "), "%s", strings.Join(missing, ", "))
	}
	return sound("all %d indexes of %d tables", n, len(want))
}

// checkSession leaves a mark in a session and looks whether it stays there, over statements and the end of a transaction.
func checkSession(ctx context.Context, _ *doctor, db *database) result {
	conn, err := db.Conn(ctx)
	if err != nil {
		return failed("connect", err)
	}
	defer conn.Close() //nolint:errcheck // it goes back to the pool
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand, since Go 1.24)
	mark := hex.EncodeToString(b[:])
	var first, id int64
	if err := conn.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&first); err != nil {
		return failed("ask for the connection", err)
	}
	for _, statement := range []string{"SET @lapse_doctor = '" + mark + "'", "DO 0", "START TRANSACTION READ ONLY", "ROLLBACK"} {
		if _, err := conn.ExecContext(ctx, statement); err != nil {
			return failed(statement, err)
		}
		var got sql.NullString
		if err := conn.QueryRowContext(ctx, "SELECT CONNECTION_ID(), @lapse_doctor").Scan(&id, &got); err != nil {
			return failed("look for the mark", err)
		}
		const fix = "turn multiplexing and session resets off in the proxy (pool_mode session), or connect to the database itself"
		if id != first {
			return wrong(fix, "one session was on connections %d and %d of the server", first, id)
		}
		if got.String != mark {
			return wrong(fix, "a session forgot what it was set to, after %q", statement)
		}
	}
	return sound("a session keeps its connection and its settings")
}

// checkSnapshots needs the right PROCESS, which the relay's account has for its metric.
func checkSnapshots(ctx context.Context, d *doctor) result {
	if _, err := d.primary(ctx); err != nil {
		return unchecked("", "the database does not answer, see mysql.reachable")
	}
	accounts := slices.Clone(d.cfg.Accounts)
	slices.SortStableFunc(accounts, func(a, b Account) int {
		rank := map[string]int{"relay": -1, "read": 1} // read may lead to a replica
		return rank[a.Role] - rank[b.Role]
	})
	last := unchecked("", "no DSN is configured")
	for _, a := range accounts {
		if a.DSN == "" || a.Role == "read" || a.Role == "migrate" {
			continue
		}
		r, right := snapshots(ctx, d, a)
		if right {
			return r
		}
		last = r
	}
	return last
}

// snapshots is false where the account lacks the right to look.
func snapshots(ctx context.Context, d *doctor, a Account) (r result, right bool) {
	parsed, err := mysql.ParseDSN(a.DSN)
	if err != nil {
		return unchecked("", "the DSN of %s cannot be read", a.Key), true
	}
	// Transactions are listed with the server's local time.
	if parsed.Params == nil {
		parsed.Params = map[string]string{}
	}
	parsed.Params["time_zone"] = "'SYSTEM'"
	parsed.Timeout = d.cfg.Orders.WithDefaults().DialTimeout
	parsed.Logger = &mysql.NopLogger{}
	connector, err := mysql.NewConnector(parsed)
	if err != nil {
		return unchecked("", "the DSN of %s is not usable", a.Key), true
	}
	db := sql.OpenDB(connector)
	defer db.Close() //nolint:errcheck // nothing was written
	var age, thread sql.NullInt64
	// SYSDATE is the clock that no session can set.
	err = db.QueryRowContext(ctx, `SELECT TIMESTAMPDIFF(SECOND, trx_started, SYSDATE()), trx_mysql_thread_id FROM information_schema.INNODB_TRX
		WHERE trx_mysql_thread_id > 0 ORDER BY trx_started LIMIT 1`).Scan(&age, &thread)
	if number(err) == 1227 || number(err) == 1142 {
		return unchecked(fmt.Sprintf("GRANT PROCESS ON *.* TO '%s'", parsed.User), "the account of %s lacks the right PROCESS", a.Key), false
	}
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return failed("list open transactions", err), true
	}
	var history int64
	err = db.QueryRowContext(ctx, "SELECT count FROM information_schema.INNODB_METRICS WHERE name = 'trx_rseg_history_len'").Scan(&history)
	if err != nil {
		return failed("read the length of the history list", err), true
	}
	if oldest := time.Duration(age.Int64) * time.Second; oldest >= d.cfg.OldSnapshot {
		return wrong(fmt.Sprintf("KILL %d, if it is forgotten; make dumps on the replica", thread.Int64), "connection %d has had a transaction open for %s; the history list has %d entries", thread.Int64, oldest, history), true
	}
	return sound("the oldest open transaction is %d s old; the history list has %d entries", age.Int64, history), true
}
