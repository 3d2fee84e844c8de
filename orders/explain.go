package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Plan is how the database would answer one statement of ours: which index it takes, and which one the statement was written for.
type Plan struct {
	Statement string // claim, cancel, mark, page
	Table     string
	Access    string // as EXPLAIN says: range, ref, index, ALL, …
	Rows      int64  // how many the database expects to read
	Key       string // the index that it takes; empty: none
	Index     string // the one that it should take
	byID      bool   // it names the rows that it wants
}

// Sound says that the statement reads what it needs, through the index that it was written for. An index that is read from end to end is no
// better than a table; but of a few rows the database does that without harm, where they are not named.
func (p Plan) Sound() bool {
	return p.Key == p.Index && p.Access != "ALL" && (p.Access != "index" || !p.byID && p.Rows < 1000)
}

// Plans explains the statements whose cost must not grow with the tables, with as many ids as they ever have. It executes none of them.
func Plans(ctx context.Context, db *sql.DB) ([]Plan, error) {
	ids := make([]any, maxRows)
	for i := range ids {
		ids[i] = int64(i+1) << 20 // apart from one another: neighbours are one range
	}
	var plans []Plan
	for _, q := range []struct {
		name, index, statement string
		args                   []any
	}{
		{"claim", "outbox_to_do", `SELECT order_id FROM outbox FORCE INDEX (outbox_to_do) WHERE state = 'pending' AND available_at <= UTC_TIMESTAMP(3)
			ORDER BY available_at, order_id LIMIT 5000 FOR UPDATE SKIP LOCKED`, nil},
		{"cancel", "PRIMARY", "SELECT id, status FROM orders FORCE INDEX (PRIMARY) WHERE id IN (" + marks(len(ids)) + ") ORDER BY id FOR UPDATE", ids},
		{"mark", "PRIMARY", "UPDATE outbox FORCE INDEX (PRIMARY) SET available_at = UTC_TIMESTAMP(3) WHERE order_id IN (" + marks(len(ids)) + ") AND lease_token = ''", ids},
		{"page", "orders_by_deadline", `SELECT id FROM orders FORCE INDEX (orders_by_deadline) WHERE status = 'unpaid' AND deadline_at < UTC_TIMESTAMP(3)
			AND deadline_at >= '2000-01-01' AND (deadline_at > '2000-01-01' OR id > 0) ORDER BY deadline_at, id LIMIT 1000`, nil},
	} {
		rows, err := explain(ctx, db, q.statement, q.args)
		if err != nil {
			return nil, fmt.Errorf("explain the %s: %w", q.name, err)
		}
		for _, row := range rows {
			n, _ := strconv.ParseInt(row["rows"], 10, 64) // NULL where there is nothing to read
			plans = append(plans, Plan{Statement: q.name, Table: row["table"], Access: row["type"], Rows: n, Key: row["key"], Index: q.index, byID: len(q.args) > 0})
		}
	}
	return plans, nil
}

// explain gives the rows of an EXPLAIN by column; their columns differ between the servers.
func explain(ctx context.Context, db *sql.DB, statement string, args []any) (_ []map[string]string, err error) {
	var version string
	if err := db.QueryRowContext(ctx, "SELECT VERSION()").Scan(&version); err != nil {
		return nil, err
	}
	verb := "EXPLAIN FORMAT=TRADITIONAL " // MySQL 9 would draw a tree
	if strings.Contains(version, "MariaDB") {
		verb = "EXPLAIN "
	}
	rows, err := db.QueryContext(ctx, verb+statement, args...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	columns, err := rows.Columns()
	if err != nil {
		return nil, err
	}
	var all []map[string]string
	for rows.Next() {
		values := make([]sql.NullString, len(columns))
		scan := make([]any, len(columns))
		for i := range values {
			scan[i] = &values[i]
		}
		if err := rows.Scan(scan...); err != nil {
			return nil, err
		}
		row := map[string]string{}
		for i, c := range columns {
			row[c] = values[i].String
		}
		all = append(all, row)
	}
	return all, rows.Err()
}
