package mysqltest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"os"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/migrations"
)

const (
	// EnvDSN names a user who may create databases, as user:password@tcp(host:port)/. "scripts/stack env" prints it.
	EnvDSN = "LAPSE_TEST_MYSQL_ADMIN_DSN"
	// EnvRequired set to 1 turns a skip for want of the servers into a failure: a green run must not mean "skipped".
	EnvRequired = "LAPSE_TEST_REQUIRE_STACK"
)

// DB is one database of a test.
type DB struct {
	// Name of the database, and DSN of an administrator in it. The DSN has no options but those that AdminDSN had.
	Name, DSN string
	// SQL is a small pool of that user for arranging and looking; it is closed with the test.
	SQL *sql.DB
}

// AdminDSN gives the DSN of [EnvDSN]. Where it is not set the test is skipped, or failed if [EnvRequired] says so.
func AdminDSN(t testing.TB) string {
	t.Helper()
	dsn := os.Getenv(EnvDSN)
	if dsn == "" {
		const say = EnvDSN + ` is not set; bring the servers up and set it: scripts/stack up && eval "$(scripts/stack env)"`
		if os.Getenv(EnvRequired) == "1" {
			t.Fatal(say)
		}
		t.Skip(say)
	}
	return dsn
}

// New makes a database with lapse's tables, empty.
func New(t testing.TB) *DB {
	t.Helper()
	db := Empty(t, AdminDSN(t))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := migrations.Up(ctx, db.SQL); err != nil {
		t.Fatalf("migrate %s: %v", db.Name, err)
	}
	return db
}

// Empty makes a database without tables on the server of the given administrator's DSN.
func Empty(t testing.TB, adminDSN string) *DB {
	t.Helper()
	cfg, err := mysql.ParseDSN(adminDSN)
	if err != nil {
		t.Fatalf("%s cannot be read: %v", EnvDSN, err)
	}
	var b [6]byte
	_, _ = rand.Read(b[:])
	db := &DB{Name: "lapse_test_" + hex.EncodeToString(b[:])}

	cfg.DBName = ""
	admin, err := sql.Open("mysql", cfg.FormatDSN())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := admin.ExecContext(ctx, "CREATE DATABASE "+db.Name+" CHARACTER SET utf8mb4"); err != nil {
		t.Fatalf("create database %s at %s: %v", db.Name, cfg.Addr, err)
	}
	t.Cleanup(func() {
		// t.Context is over by now. A server that a test has ended takes its databases with it.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if _, err := admin.ExecContext(ctx, "DROP DATABASE IF EXISTS "+db.Name); err != nil {
			t.Logf("drop database %s: %v", db.Name, err)
		}
		if err := admin.Close(); err != nil {
			t.Logf("close: %v", err)
		}
	})

	cfg.DBName = db.Name
	db.DSN = cfg.FormatDSN()
	if db.SQL, err = sql.Open("mysql", db.DSN); err != nil {
		t.Fatal(err)
	}
	db.SQL.SetMaxOpenConns(4)
	t.Cleanup(func() { _ = db.SQL.Close() })
	return db
}

// Exec runs a statement that has to work and gives the number of rows it touched.
func (db *DB) Exec(t testing.TB, query string, args ...any) int64 {
	t.Helper()
	result, err := db.SQL.ExecContext(t.Context(), query, args...)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	n, err := result.RowsAffected()
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// Int reads one number.
func (db *DB) Int(t testing.TB, query string, args ...any) int64 {
	t.Helper()
	var n sql.NullInt64
	if err := db.SQL.QueryRowContext(t.Context(), query, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n.Int64
}

// Text reads one text; NULL is empty.
func (db *DB) Text(t testing.TB, query string, args ...any) string {
	t.Helper()
	var s sql.NullString
	if err := db.SQL.QueryRowContext(t.Context(), query, args...).Scan(&s); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return s.String
}
