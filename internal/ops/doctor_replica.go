package ops

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

func (d *doctor) openReplica(ctx context.Context) (*database, error) {
	return d.open(ctx, Account{Role: "replica", Key: "mysql.dsn_replica", DSN: d.cfg.Replica})
}

// both gives primary and replica, or the result of a check that cannot have them.
func (d *doctor) both(ctx context.Context) (primary, replica *database, not *result) {
	var r result
	if d.cfg.Replica == "" {
		r = unchecked("set LAPSE_MYSQL_DSN_REPLICA", "mysql.dsn_replica is not set")
		return nil, nil, &r
	}
	replica, err := d.follower(ctx)
	if err != nil {
		r = unchecked("", "the replica does not answer, see replica.reachable")
		return nil, nil, &r
	}
	if primary, err = d.primary(ctx); err != nil {
		r = unchecked("", "the database does not answer, see mysql.reachable")
		return nil, nil, &r
	}
	return primary, replica, nil
}

// onReplica makes a check of one that needs replica and primary.
//
// Nothing is said of a replica that is the primary itself, but that: to mend its missing read-only would stop the shop.
func onReplica(run func(ctx context.Context, d *doctor, primary, replica *database) result) func(context.Context, *doctor) result {
	return func(ctx context.Context, d *doctor) result {
		primary, replica, r := d.both(ctx)
		if r != nil {
			return *r
		}
		if primary.server == replica.server {
			return unchecked("", "it is the primary itself, see replica.of_primary")
		}
		return run(ctx, d, primary, replica)
	}
}

var replicaChecks = []check{
	{
		name: "replica.reachable",
		why:  "Reconcile reads the replica, so that the nightly scan costs the checkout nothing.",
		run: func(ctx context.Context, d *doctor) result {
			if d.cfg.Replica == "" {
				return unchecked("set LAPSE_MYSQL_DSN_REPLICA", "mysql.dsn_replica is not set")
			}
			db, err := d.follower(ctx)
			if err != nil {
				return wrong("set LAPSE_MYSQL_DSN_REPLICA to user:password@tcp(host:port)/database of the replica, with an account that may read there", "%v", err)
			}
			return sound("%s at %s as %s", db.name, db.parsed.Addr, db.parsed.User)
		},
	},
	{
		name: "replica.of_primary",
		why:  "A replica of another primary, or of none, shows orders that are not there: the nightly scan would find nothing.",
		run: func(ctx context.Context, d *doctor) result {
			const fix = "point mysql.dsn_replica at a replica of the server in mysql.dsn; there: SHOW REPLICA STATUS"
			primary, replica, r := d.both(ctx)
			switch {
			case r != nil:
				return *r
			case primary.server == replica.server:
				return wrong(fix, "%s is the primary itself", replica.parsed.Addr)
			}
			// First what the replica has executed, then what the primary has: in between, only the primary can have gone on.
			had, err := executed(ctx, replica)
			if err != nil {
				return failed("ask the replica what it has executed", err)
			}
			if primary.mariaDB {
				if had == "" {
					return wrong(fix, "%s follows nobody", replica.parsed.Addr)
				}
				return sound("%s follows, at %s", replica.parsed.Addr, had)
			}
			if primary.global["gtid_mode"] != "ON" {
				return unchecked("gtid_mode = ON and enforce_gtid_consistency = ON under [mysqld] on both", "gtid_mode is %s on the primary: where the replica's rows come from cannot be seen", primary.global["gtid_mode"])
			}
			var subset, shares bool
			err = primary.QueryRowContext(ctx, "SELECT GTID_SUBSET(?, @@global.gtid_executed), LOCATE(@@global.server_uuid, ?) > 0", had, had).Scan(&subset, &shares)
			if err != nil {
				return failed("compare what both have executed", err)
			}
			if !shares {
				return wrong(fix, "%s has executed nothing that %s wrote", replica.parsed.Addr, primary.parsed.Addr)
			}
			if !subset {
				return wrong("rebuild the replica from the primary, and keep it super_read_only", "%s has transactions that %s has not: somebody has written to it", replica.parsed.Addr, primary.parsed.Addr)
			}
			return sound("%s has executed what %s wrote, and nothing else", replica.parsed.Addr, primary.parsed.Addr)
		},
	},
	{
		name: "replica.read_only",
		why:  "What somebody writes to a replica the primary never learns, and replication stops at the first conflict.",
		run: onReplica(func(_ context.Context, _ *doctor, _, replica *database) result {
			name := "super_read_only"
			if replica.mariaDB {
				name = "read_only"
			}
			if v := replica.global[name]; v == "0" || v == "OFF" {
				return wrong("on the replica: "+replica.persist(name, "ON"), "%s is %s", name, v)
			}
			return sound("%s", name)
		}),
	},
	{
		name: "replica.lag",
		why:  "Reconcile waits until the replica has what the primary had at its start, up to reconcile.max_lag, and fails otherwise.",
		run: onReplica(func(ctx context.Context, d *doctor, primary, replica *database) result {
			const fix = "on the replica: SHOW REPLICA STATUS; START REPLICA if it has stopped"
			now, err := executed(ctx, primary)
			if err != nil {
				return failed("ask the primary what it has executed", err)
			}
			if now == "" {
				return unchecked("gtid_mode = ON and enforce_gtid_consistency = ON under [mysqld] on both", "the primary numbers no transactions")
			}
			before, err := executed(ctx, replica)
			if err != nil {
				return failed("ask the replica what it has executed", err)
			}
			limit := d.cfg.MaxLag
			if deadline, ok := ctx.Deadline(); ok {
				limit = min(limit, time.Until(deadline)-2*time.Second)
			}
			begun := time.Now()
			wait := "SELECT WAIT_FOR_EXECUTED_GTID_SET(?, ?)"
			if replica.mariaDB {
				wait = "SELECT MASTER_GTID_WAIT(?, ?)"
			}
			var late sql.NullInt64
			err = replica.QueryRowContext(ctx, wait, now, limit.Seconds()).Scan(&late)
			took := time.Since(begun).Round(time.Millisecond)
			switch {
			case err != nil && !errors.Is(err, context.DeadlineExceeded):
				return failed("wait for the replica", err)
			case err != nil || late.Int64 != 0:
				if after, err := executed(ctx, replica); err == nil && after == before {
					return wrong(fix, "it stands still: for %s it has executed nothing of what the primary had before", took)
				}
				if took < d.cfg.MaxLag {
					return unchecked("lapse doctor --set doctor.timeout="+(d.cfg.MaxLag+10*time.Second).String(), "after %s it had not what the primary had before, but comes nearer; reconcile.max_lag is %s", took, d.cfg.MaxLag)
				}
				return wrong(fix, "after %s it had not what the primary had before; reconcile.max_lag is %s", took, d.cfg.MaxLag)
			}
			return sound("%s after the question it had all that the primary had", took)
		}),
	},
}

// executed gives the transactions that a server has executed, as its flavour numbers them.
func executed(ctx context.Context, db *database) (string, error) {
	variable := "@@global.gtid_executed"
	if db.mariaDB {
		variable = "@@global.gtid_current_pos"
	}
	var set string
	err := db.QueryRowContext(ctx, "SELECT "+variable).Scan(&set)
	return set, err
}
