package migrations_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/migrations"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func setup(t *testing.T) (context.Context, *mysqltest.DB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx, mysqltest.Empty(t, mysqltest.AdminDSN(t))
}

// schema is the definition of every table of ours, and of none when all is taken back.
func schema(t *testing.T, db *mysqltest.DB) map[string]string {
	t.Helper()
	rows, err := db.SQL.QueryContext(t.Context(), "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME <> ?", migrations.Table)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	var names []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	tables := map[string]string{}
	for _, name := range names {
		var again, text string
		if err := db.SQL.QueryRowContext(t.Context(), "SHOW CREATE TABLE "+name).Scan(&again, &text); err != nil {
			t.Fatal(err)
		}
		tables[name] = text
	}
	return tables
}

var fileName = regexp.MustCompile(`^(\d{5})_[a-z_]+\.sql$`)

// TestEveryFileIsOneStatementEachWay: DDL is not transactional, so a file of two could fail between them.
func TestEveryFileIsOneStatementEachWay(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("sql/*")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	slices.Sort(files)
	newest := 0
	for _, file := range files {
		m := fileName.FindStringSubmatch(filepath.Base(file))
		if m == nil {
			t.Fatalf("%s: the name is not of the form 00001_what_it_does.sql", file)
		}
		n, err := strconv.Atoi(m[1])
		if err != nil || n <= newest {
			t.Errorf("%s: its number is not above %d, that of the file before", file, newest)
		}
		newest = n
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, body, ok := strings.Cut(string(raw), "-- +goose Up\n")
		up, down, ok2 := strings.Cut(body, "-- +goose Down\n")
		if !ok || !ok2 {
			t.Fatalf("%s: no two parts", file)
		}
		for part, text := range map[string]string{"up": up, "down": down} {
			if strings.Contains(text, "+goose") {
				t.Errorf("%s, %s: an annotation in it; a statement needs none", file, part)
			}
			if n := strings.Count(text, ";\n"); n != 1 || !strings.HasSuffix(strings.TrimSpace(text), ";") {
				t.Errorf("%s, %s: %d statements, want 1", file, part, n)
			}
		}
	}
	if newest != migrations.Version {
		t.Errorf("Version is %d, the newest file is %d", migrations.Version, newest)
	}
}

// embedded gives the numbers of all migrations, oldest first, and how many of them make a table.
func embedded(t *testing.T) (numbers []int64, tables int) {
	t.Helper()
	files, err := filepath.Glob("sql/*")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	slices.Sort(files)
	for _, file := range files {
		n, err := strconv.ParseInt(filepath.Base(file)[:5], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		numbers = append(numbers, n)
		tables += strings.Count(string(raw), "\nCREATE TABLE ")
	}
	return numbers, tables
}

func TestUpDownUpEndsWhereItBegan(t *testing.T) {
	t.Parallel()
	ctx, db := setup(t)
	numbers, tables := embedded(t)
	all := len(numbers)
	status := func() (applied, pending int) {
		t.Helper()
		list, err := migrations.Status(ctx, db.SQL)
		if err != nil {
			t.Fatal(err)
		}
		for i, m := range list {
			if m.Version != numbers[i] || m.Name == "" {
				t.Errorf("status %d: %+v", i, m)
			}
			if m.At.IsZero() {
				pending++
			} else {
				if age := time.Since(m.At); age < -time.Minute || age > 5*time.Minute {
					t.Errorf("%s was applied %s ago", m.Name, age)
				}
				applied++
			}
		}
		return applied, pending
	}
	if applied, pending := status(); applied != 0 || pending != all {
		t.Errorf("before: %d applied, %d pending", applied, pending)
	}
	names, err := migrations.Up(ctx, db.SQL)
	if err != nil || len(names) != all || !slices.IsSorted(names) || !strings.HasPrefix(names[0], "00001_") {
		t.Fatal(names, err)
	}
	if applied, pending := status(); applied != all || pending != 0 {
		t.Errorf("after: %d applied, %d pending", applied, pending)
	}
	first := schema(t, db)
	if len(first) != tables {
		t.Errorf("%d tables", len(first))
	}
	for name, text := range first {
		if !strings.Contains(text, "ENGINE=InnoDB") {
			t.Errorf("%s is not InnoDB: %s", name, text)
		}
		if strings.Contains(strings.ToLower(text), "timestamp") {
			t.Errorf("%s has a time that moves by itself or ends in 2038: %s", name, text)
		}
	}
	if names, err := migrations.Up(ctx, db.SQL); err != nil || len(names) != 0 {
		t.Errorf("up again: %v, %v", names, err)
	}
	if names, err := migrations.Down(ctx, db.SQL, numbers[all-3]); err != nil || len(names) != 2 {
		t.Errorf("down by two: %v, %v", names, err)
	}
	if applied, pending := status(); applied != all-2 || pending != 2 {
		t.Errorf("after down by two: %d applied, %d pending", applied, pending)
	}
	if names, err := migrations.Down(ctx, db.SQL, 0); err != nil || len(names) != all-2 {
		t.Errorf("down: %v, %v", names, err)
	}
	if left := schema(t, db); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if _, err := migrations.Up(ctx, db.SQL); err != nil {
		t.Fatal(err)
	}
	for name, text := range schema(t, db) {
		if text != first[name] {
			t.Errorf("%s\n%s\nfirst\n%s", name, text, first[name])
		}
	}
}

func TestTwoDeploymentsAtOnceMigrateOnce(t *testing.T) {
	t.Parallel()
	ctx, db := setup(t)
	var mu sync.Mutex // guards total
	total := 0
	var deployments sync.WaitGroup
	for range 3 {
		deployments.Go(func() {
			pool, err := sql.Open("mysql", db.DSN)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = pool.Close() }()
			names, err := migrations.Up(ctx, pool)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			total += len(names)
			mu.Unlock()
		})
	}
	deployments.Wait()
	if numbers, _ := embedded(t); total != len(numbers) {
		t.Errorf("%d migrations were applied, want %d", total, len(numbers))
	}
}

func TestLockOfAnotherMigrationIsWaitedForAndNamed(t *testing.T) {
	t.Parallel()
	ctx, db := setup(t)
	other, err := db.SQL.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	var got int
	if err := other.QueryRowContext(ctx, "SELECT GET_LOCK(LEFT(CONCAT('lapse.migrate.', DATABASE()), 64), 0)").Scan(&got); err != nil || got != 1 {
		t.Fatal(got, err)
	}
	short, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	// The read timeout of a DSN is shorter than the wait may be.
	pool, err := sql.Open("mysql", db.DSN+"?readTimeout=10s")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = pool.Close() }()
	if _, err := migrations.Up(short, pool); !errors.Is(err, migrations.ErrLocked) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "PROCESSLIST") {
		t.Errorf("%v", err)
	}
	if left := schema(t, db); len(left) != 0 {
		t.Errorf("migrated without the lock: %v", left)
	}
	done := make(chan error, 1)
	go func() {
		_, err := migrations.Up(ctx, pool)
		done <- err
	}()
	if _, err := other.ExecContext(ctx, "DO RELEASE_LOCK(LEFT(CONCAT('lapse.migrate.', DATABASE()), 64))"); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Errorf("after the lock was free: %v", err)
	}
}

func TestFailedFileIsNamedAndCanBeRunAgain(t *testing.T) {
	t.Parallel()
	ctx, db := setup(t)
	db.Exec(t, "CREATE TABLE stock (mine INT)") // a shop's own, in the way of the third file
	names, err := migrations.Up(ctx, db.SQL)
	if err == nil {
		t.Fatal(names)
	}
	for _, want := range []string{"00003_create_stock.sql", "2 were done", "run it again", "already exists"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	list, err := migrations.Status(ctx, db.SQL)
	if err != nil || list[1].At.IsZero() || !list[2].At.IsZero() {
		t.Errorf("%+v, %v", list, err)
	}
	db.Exec(t, "DROP TABLE stock")
	numbers, _ := embedded(t)
	if names, err := migrations.Up(ctx, db.SQL); err != nil || len(names) != len(numbers)-2 {
		t.Errorf("again: %v, %v", names, err)
	}
}

// TestNewerSchemaIsLeftAsItIs: during a deployment the binary of version N runs on schema N+1.
func TestNewerSchemaIsLeftAsItIs(t *testing.T) {
	t.Parallel()
	ctx, db := setup(t)
	if _, err := migrations.Up(ctx, db.SQL); err != nil {
		t.Fatal(err)
	}
	db.Exec(t, "INSERT INTO "+migrations.Table+" (version_id, is_applied) VALUES (?, 1)", migrations.Version+1)
	if names, err := migrations.Up(ctx, db.SQL); err != nil || len(names) != 0 {
		t.Errorf("up: %v, %v", names, err)
	}
	list, err := migrations.Status(ctx, db.SQL)
	numbers, tables := embedded(t)
	if err != nil || len(list) != len(numbers)+1 || list[len(numbers)].Version != migrations.Version+1 || list[len(numbers)].Name != "(of a newer build)" {
		t.Errorf("status: %+v, %v", list, err)
	}
	// An older binary must not take back what it knows nothing about, nor what that rests on.
	if names, err := migrations.Down(ctx, db.SQL, 0); err == nil {
		t.Errorf("down took back %v under a newer schema", names)
	} else if !strings.Contains(err.Error(), fmt.Sprint(migrations.Version+1)) {
		t.Errorf("down: %v does not name version %d", err, migrations.Version+1)
	}
	if left := schema(t, db); len(left) != tables {
		t.Errorf("%d tables are left, want %d", len(left), tables)
	}
}

func TestPoolOfOneIsRefusedInsteadOfWaitingForItself(t *testing.T) {
	t.Parallel()
	ctx, db := setup(t)
	db.SQL.SetMaxOpenConns(1)
	if _, err := migrations.Up(ctx, db.SQL); err == nil || !strings.Contains(err.Error(), "allow the pool two") {
		t.Errorf("%v", err)
	}
}

// TestShopsOwnGooseIsLeftAlone: a shop may keep its migrations in the same database, with the same tool.
func TestShopsOwnGooseIsLeftAlone(t *testing.T) {
	t.Parallel()
	ctx, db := setup(t)
	db.Exec(t, "CREATE TABLE goose_db_version (id INT PRIMARY KEY, version_id BIGINT, is_applied BOOLEAN, tstamp TIMESTAMP NULL)")
	db.Exec(t, "INSERT INTO goose_db_version VALUES (1, 9999, 1, NULL)")
	numbers, _ := embedded(t)
	if names, err := migrations.Up(ctx, db.SQL); err != nil || len(names) != len(numbers) {
		t.Errorf("%v, %v", names, err)
	}
	if n := db.Int(t, "SELECT COUNT(*) FROM goose_db_version WHERE version_id = 9999"); n != 1 {
		t.Error("the shop's own table was touched")
	}
}
