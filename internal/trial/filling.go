// The database of the bench of reconcile: millions of orders as the verbs would have left them, made by the server itself. All of it goes
// through the binlog, since the replica has to have it, too.

package trial

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// filling says what a filled database has. Ids count from 1: first the old orders, then the overdue ones of all ways in turn, then those that
// wait for their payment.
type filling struct {
	total   int
	overdue int // of each way
	waiting int
	ways    int
	now     time.Time // by the database's clock, a whole second
}

// fillAmount is the amount of each order.
const fillAmount = 1000

// overdueSpan is the time over which the deadlines of one way's orders are spread.
const overdueSpan = time.Hour

func (f filling) old() int { return f.total - f.ways*f.overdue - f.waiting }

// firstOverdue is the smallest id that is not an old order's.
func (f filling) firstOverdue() int64 { return int64(f.old()) + 1 }

// firstWaiting is the id of the first order that waits for its payment.
func (f filling) firstWaiting() int64 { return int64(f.total-f.waiting) + 1 }

// deadlines gives the bounds of the deadlines of a way's orders: from <= deadline < until. Each way has a day of its own.
func (f filling) deadlines(way int) (from, until time.Time) {
	from = f.now.Add(-time.Duration(f.ways-way) * 24 * time.Hour)
	return from, from.Add(overdueSpan)
}

// fillChunk is how many orders one transaction of the filling makes: the replica applies a transaction when it is committed, so that large
// ones would keep it idle at first and behind at the end.
const fillChunk = 20_000

// fillOrders makes the orders and gives how long that took, and how much later the replica had them.
//
// The old orders are cancelled, and stand for all that is final: they make the table and its indexes as large as they are. They have no items,
// which nobody reads: they would only make the filling longer. An overdue order has two items, its reservation and an outbox row whose message
// was sent, and so has one that waits for its payment.
func (s *stage) fillOrders(ctx context.Context, f filling) (took, behind time.Duration, err error) {
	owner, err := orders.Open(s.dsn(s.cfg.DSNMigrate), orders.Config{MaxOpenConns: 2})
	if err != nil {
		return 0, 0, err
	}
	defer owner.Close() //nolint:errcheck // nothing is under way any more
	begun := time.Now()
	db := owner.DB()
	if err := statements(ctx, db, "CREATE TABLE numbers (i INT PRIMARY KEY)", "INSERT INTO numbers SELECT "+digitsTo(fillChunk)); err != nil {
		return 0, 0, err
	}
	chunks := (f.total + fillChunk - 1) / fillChunk
	err = inParallel(ctx, chunks, 2, func(ctx context.Context, chunk int) error {
		first := chunk*fillChunk + 1
		return f.fill(ctx, db, first, min(first+fillChunk-1, f.total))
	})
	if err != nil {
		return 0, 0, fmt.Errorf("make %d orders: %w", f.total, err)
	}
	err = statements(ctx, db, `UPDATE stock s JOIN (SELECT sku, SUM(quantity) AS quantity FROM order_items GROUP BY sku) w ON w.sku = s.sku
			SET s.reserved = s.reserved + w.quantity, s.available = s.available - w.quantity`,
		"DROP TABLE numbers", "ANALYZE TABLE orders, order_items, stock, stock_ledger, outbox, order_events", "CREATE TABLE filled (i INT PRIMARY KEY)")
	if err != nil {
		return 0, 0, err
	}
	took = time.Since(begun)
	s.say("filled %d orders in %s; waiting for the replica", f.total, took.Round(time.Second))
	begun = time.Now()
	err = s.awaitReplica(ctx, "filled")
	return took, time.Since(begun), err
}

// fill makes the orders of the ids from first to last, in one transaction.
func (f filling) fill(ctx context.Context, db *sql.DB, first, last int) error {
	from := "FROM numbers WHERE i < " + fmt.Sprint(last-first+1) + " ORDER BY i"
	id := fmt.Sprintf("(%d + i)", first)
	// Of the overdue orders, the k-th of each way, and the way.
	nth := fmt.Sprintf("(%s - %d)", id, f.firstOverdue())
	k, way := fmt.Sprintf("FLOOR(%s / %d)", nth, f.ways), fmt.Sprintf("(%s %% %d)", nth, f.ways)
	oldest, _ := f.deadlines(0)
	start := "TIMESTAMP'" + oldest.UTC().Format(layout) + "'"
	deadline := fmt.Sprintf(`CASE WHEN %[1]s < %[2]d THEN %[3]s - INTERVAL %[1]s SECOND
		WHEN %[1]s < %[4]d THEN %[3]s + INTERVAL %[5]s DAY + INTERVAL FLOOR(%[6]s * %[7]d / %[8]d) * 1000 MICROSECOND
		ELSE %[3]s + INTERVAL %[9]d DAY END`,
		id, f.firstOverdue(), start, f.firstWaiting(), way, k, overdueSpan.Milliseconds(), f.overdue, f.ways+1)
	isOld := fmt.Sprintf("%s < %d", id, f.firstOverdue())
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // nothing is left after a commit
	all := []string{"INSERT INTO orders (id, channel, user_id, currency, amount, status, deadline_at, created_at, cancelled_at, cancel_reason) SELECT " + strings.Join([]string{
		id, "'bench'", "CONCAT('customer-', i)", "'" + currency + "'", fmt.Sprint(fillAmount), "IF(" + isOld + ", 'cancelled', 'unpaid')", deadline, start,
		"IF(" + isOld + ", " + start + ", NULL)", "IF(" + isOld + ", 'by hand', NULL)"}, ", ") + " " + from}
	if int64(last) >= f.firstOverdue() {
		between := fmt.Sprintf(" BETWEEN %d AND %d", max(int64(first), f.firstOverdue()), last)
		all = append(all,
			// Two different ones out of a thousand, at random but the same each time.
			fmt.Sprintf(`INSERT INTO order_items (order_id, sku, quantity, price)
				SELECT id, CONCAT('sku-', LPAD((CRC32(id) + n * (1 + CRC32(id + 0.5) %% %[1]d)) %% %[2]d, 4, '0')), 1, %[3]d
				FROM orders, (SELECT 0 AS n UNION ALL SELECT 1) two WHERE id %[4]s ORDER BY id, n`, benchSKUs-1, benchSKUs, fillAmount/2, between),
			"INSERT INTO stock_ledger (order_id, sku, kind, quantity, at) SELECT order_id, sku, 'reserve', quantity, "+start+" FROM order_items WHERE order_id"+between+" ORDER BY order_id, sku",
			`INSERT INTO outbox (order_id, deliver_at, state, available_at, attempts, message_id, sent_at) SELECT id, deadline_at, 'sent', `+start+` + INTERVAL 30 DAY, 0, CONCAT('message-', id), `+start+
				" FROM orders WHERE id"+between+" ORDER BY id")
	}
	for _, statement := range all {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return fmt.Errorf("%.60s…: %w", statement, err)
		}
	}
	return tx.Commit()
}

// digitsTo selects the numbers from 0 to n-1.
func digitsTo(n int) string {
	const digit = "(SELECT 0 AS n UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9)"
	var sum, from []string
	for place := range int(math.Ceil(math.Log10(float64(n)))) {
		sum = append(sum, fmt.Sprintf("%d * d%d.n", int(math.Pow10(place)), place))
		from = append(from, fmt.Sprintf("%s d%d", digit, place))
	}
	number := strings.Join(sum, " + ")
	return fmt.Sprintf("%s FROM %s WHERE %s < %d", number, strings.Join(from, ", "), number, n)
}

func statements(ctx context.Context, db *sql.DB, all ...string) error {
	for _, statement := range all {
		if _, err := db.ExecContext(ctx, statement); err != nil {
			return fmt.Errorf("%.60s…: %w", statement, err)
		}
	}
	return nil
}

// replicaWithin bounds the waiting for the replica, which applies what two sessions wrote with one thread in the worst case.
const replicaWithin = 30 * time.Minute

// awaitReplica waits until the replica has a table, and with it everything that was committed before.
func (s *stage) awaitReplica(ctx context.Context, table string) error {
	ctx, cancel := context.WithTimeout(ctx, replicaWithin)
	defer cancel()
	for {
		err := s.replicaHas(ctx, table)
		if err == nil {
			return nil
		}
		if !waitUntil(ctx, time.Now().Add(100*time.Millisecond)) {
			return errors.Join(fmt.Errorf("the replica does not show what was written on the primary: %w", err), ctx.Err())
		}
	}
}

func (s *stage) replicaHas(ctx context.Context, table string) error {
	replica, err := orders.Open(s.dsn(s.cfg.DSNReplica), orders.Config{MaxOpenConns: 1})
	if err != nil {
		return err
	}
	defer replica.Close() //nolint:errcheck // only read
	var n int
	return replica.DB().QueryRowContext(ctx, "SELECT COUNT(*) FROM "+table).Scan(&n)
}
