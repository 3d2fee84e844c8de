package ops

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/lapse-orders/lapse/migrations"
)

// needs says which rights each role uses, by table: S to read, I to insert, U to update, D to delete. It is less than deploy/mysql/users.sql
// gives: an account with less than that, but with these, works.
var needs = map[string]map[string]string{
	"api": {
		"orders": "SIU", "order_items": "SI", "stock": "SIU", "stock_ledger": "SI", "payments": "SI", "refunds": "SI", "outbox": "SIU", "event_outbox": "SIU",
		"gateway_tasks": "SIU", "order_events": "SI", "parked": "SIU", "idempotency_keys": "SI", migrations.Table: "S",
	},
	// It purges what is past its retention.
	"relay": {
		"outbox": "SUD", "event_outbox": "SUD", "idempotency_keys": "SD", "orders": "SD", "order_items": "SD", "stock_ledger": "SIUD", "payments": "SD", "refunds": "SD",
		"order_events": "SID", "parked": "SIUD", "gateway_tasks": "S", "reconcile_runs": "SD", migrations.Table: "S",
	},
	"consume": {
		"orders": "SU", "order_items": "S", "stock": "SU", "stock_ledger": "SI", "outbox": "SIU", "event_outbox": "SI", "payments": "SI", "refunds": "SI",
		"gateway_tasks": "SIU", "order_events": "SI", "parked": "SIU", migrations.Table: "S",
	},
	"reconcile": {
		"orders": "SU", "order_items": "S", "stock": "SU", "stock_ledger": "SI", "outbox": "SIU", "event_outbox": "SI", "payments": "SI", "refunds": "SI",
		"gateway_tasks": "SIU", "order_events": "SI", "parked": "SIU", "reconcile_runs": "SIU", migrations.Table: "S",
	},
	// A close that is answered with a payment is recorded as a notice of one is.
	"refund": {
		"refunds": "SIU", "payments": "SI", "orders": "SU", "order_items": "S", "stock": "SU", "stock_ledger": "SI", "gateway_tasks": "SUD", "event_outbox": "SI",
		"order_events": "SI", "parked": "SIU", migrations.Table: "S",
	},
	"read": {
		"orders": "S", "order_items": "S", "stock": "S", "stock_ledger": "S", "payments": "S", "refunds": "S", "outbox": "S", "event_outbox": "S", "gateway_tasks": "S",
		"order_events": "S", "parked": "S", "reconcile_runs": "S", migrations.Table: "S",
	},
}

// columns that an UPDATE may name to ask for the right.
var columns = map[string]string{
	"orders": "status", "stock": "reserved", "stock_ledger": "quantity", "outbox": "state", "event_outbox": "state", "gateway_tasks": "attempts", "parked": "state", "refunds": "state", "reconcile_runs": "state",
}

// rightsChecks is one check for each role, in the order of the deployment.
var rightsChecks = func() []check {
	list := make([]check, 0, len(needs)+1)
	for _, role := range []string{"api", "relay", "consume", "reconcile", "refund", "read", "migrate"} {
		list = append(list, check{
			name: "mysql.rights." + role,
			why:  "With a right too few the role fails at its first use of it, perhaps only when something has to be parked.",
			run: func(ctx context.Context, d *doctor) result {
				for _, a := range d.cfg.Accounts {
					if a.Role == role && a.DSN != "" {
						return d.rights(ctx, a)
					}
				}
				return unchecked("", "no DSN is configured for it")
			},
		})
	}
	return list
}()

func (d *doctor) rights(ctx context.Context, a Account) result {
	const script = "run deploy/mysql/users.sql, or: "
	db, err := d.open(ctx, a)
	if err != nil {
		switch number(err) {
		case 1044, 1045, 1049:
			return wrong("run deploy/mysql/users.sql with the passwords of the DSNs", "%s: %v", a.Key, err)
		}
		return failed("connect with "+a.Key, err)
	}
	// The read account may lead to a replica; all others have to work on the same rows.
	if main, err := d.primary(ctx); err == nil && a.Role != "read" && (main.server != db.server || main.name != db.name) {
		return wrong("let both DSNs name the same database", "%s leads to %s on %s, %s to %s on %s", a.Key, db.name, db.parsed.Addr, main.account.Key, main.name, main.parsed.Addr)
	}
	if a.Role == "migrate" {
		return migrateRights(ctx, db)
	}
	var missing, grants []string
	for _, table := range slices.Sorted(maps.Keys(needs[a.Role])) {
		var lacking []string
		for _, right := range needs[a.Role][table] {
			var verb, statement string
			switch right {
			case 'S':
				verb, statement = "SELECT", "SELECT * FROM "+table+" LIMIT 0"
			case 'I':
				verb, statement = "INSERT", "INSERT INTO "+table+" SELECT * FROM "+table+" WHERE FALSE"
			case 'U':
				verb, statement = "UPDATE", fmt.Sprintf("UPDATE %s SET %s = %s WHERE FALSE", table, columns[table], columns[table])
			case 'D':
				verb, statement = "DELETE", "DELETE FROM "+table+" WHERE FALSE"
			}
			// EXPLAIN asks for the rights of what it explains, and does nothing of it.
			err := tryExplain(ctx, db, statement)
			switch number(err) {
			case 1142, 1143, 1044:
				lacking = append(lacking, verb)
				continue
			case 1146:
				return unchecked("", "table %s is not there, see mysql.schema", table)
			}
			if err != nil {
				return failed("explain "+statement, err)
			}
		}
		if len(lacking) > 0 {
			missing = append(missing, strings.Join(lacking, ", ")+" on "+table)
			grants = append(grants, fmt.Sprintf("GRANT %s ON `%s`.%s TO '%s'@'%%'", strings.Join(lacking, ", "), db.name, table, db.parsed.User))
		}
	}
	if len(missing) > 0 {
		return wrong(script+strings.Join(grants, "; "), "%s lacks %s", db.parsed.User, strings.Join(missing, "; "))
	}
	return sound("%s has what it needs of %d tables", db.parsed.User, len(needs[a.Role]))
}

func tryExplain(ctx context.Context, db *database, statement string) (err error) {
	rows, err := db.QueryContext(ctx, "EXPLAIN "+statement)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() { // only the end tells whether there was an error
	}
	return rows.Err()
}

// migrateRights reads what was granted, since DDL cannot be tried without doing it.
func migrateRights(ctx context.Context, db *database) (r result) {
	// The patterns of grants are those of LIKE.
	rows, err := db.QueryContext(ctx, `SELECT PRIVILEGE_TYPE FROM information_schema.USER_PRIVILEGES WHERE GRANTEE = CONCAT('''', REPLACE(CURRENT_USER(), '@', '''@'''), '''')
		UNION SELECT PRIVILEGE_TYPE FROM information_schema.SCHEMA_PRIVILEGES WHERE GRANTEE = CONCAT('''', REPLACE(CURRENT_USER(), '@', '''@'''), '''') AND DATABASE() LIKE TABLE_SCHEMA`)
	if err != nil {
		return failed("read the grants", err)
	}
	defer func() {
		if err := rows.Close(); err != nil {
			r = failed("read the grants", err)
		}
	}()
	has := map[string]bool{}
	for rows.Next() {
		var right string
		if err := rows.Scan(&right); err != nil {
			return failed("read the grants", err)
		}
		has[right] = true
	}
	if err := rows.Err(); err != nil {
		return failed("read the grants", err)
	}
	var missing []string
	for _, right := range []string{"CREATE", "ALTER", "DROP", "INDEX", "SELECT", "INSERT", "DELETE"} {
		if !has[right] {
			missing = append(missing, right)
		}
	}
	if len(missing) == 0 {
		return sound("%s may change the tables of %s", db.parsed.User, db.name)
	}
	var roles sql.NullString
	if err := db.QueryRowContext(ctx, "SELECT CURRENT_ROLE()").Scan(&roles); err == nil && roles.Valid && roles.String != "NONE" && roles.String != "" {
		return unchecked("", "%s has rights through roles, %s", db.parsed.User, roles.String)
	}
	return wrong(fmt.Sprintf("GRANT ALL PRIVILEGES ON `%s`.* TO '%s'@'%%'", db.name, db.parsed.User), "%s lacks %s on %s", db.parsed.User, strings.Join(missing, ", "), db.name)
}
