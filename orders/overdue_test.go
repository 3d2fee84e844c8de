package orders_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// scan opens a scan on a connection of its own.
func (b *bundle) scan() (*orders.Scan, *sql.Conn) {
	b.t.Helper()
	conn, err := b.db.SQL.Conn(b.ctx)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = conn.Close() })
	s, err := orders.NewScan(b.ctx, conn)
	if err != nil {
		b.t.Fatal(err)
	}
	return s, conn
}

// rowsRead gives how many rows and index entries a session has read since its last FLUSH STATUS.
func (b *bundle) rowsRead(conn *sql.Conn, what func()) int64 {
	b.t.Helper()
	if _, err := conn.ExecContext(b.ctx, "FLUSH STATUS"); err != nil {
		b.t.Fatal(err)
	}
	what()
	rows, err := conn.QueryContext(b.ctx, "SHOW SESSION STATUS LIKE 'Handler_read%'")
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	var sum int64
	for rows.Next() {
		var name string
		var n int64
		if err := rows.Scan(&name, &n); err != nil {
			b.t.Fatal(err)
		}
		sum += n
	}
	if err := rows.Err(); err != nil {
		b.t.Fatal(err)
	}
	return sum
}

// 20,000 orders, 250 of them overdue. Rows read follow the overdue ones of a page, not the table and not the pages before: on the first page, in the
// middle among equal deadlines, on the last one, and on one that is empty. The cut-off has digits that the column has not.
//
// case DB-11
func TestAPageReadsTheRowsThatItGives(t *testing.T) {
	t.Parallel()
	b := setup(t)
	now := time.Now().UTC().Truncate(time.Second)
	long := now.Add(-time.Hour)
	for begin := 0; begin < 20_000; begin += 1000 {
		var rows []string
		for i := begin; i < begin+1000; i++ {
			status, deadline := "unpaid", now.Add(time.Duration(i)*time.Second)
			switch {
			case i < 250: // overdue, from the 51st to the 150th at the same instant
				deadline = long.Add(time.Duration(min(max(i, 50), 150)+max(i-150, 0)) * time.Second)
				if i >= 50 && i < 150 {
					deadline = long.Add(50 * time.Second)
				}
			case i%2 == 0:
				status, deadline = "paid", now.Add(-time.Duration(i)*time.Minute)
			}
			rows = append(rows, fmt.Sprintf("(%d, 'web', 'u1', 'EUR', 1, '%s', '%s', '2026-01-01')", i+1, status, deadline.Format("2006-01-02 15:04:05")))
		}
		b.db.Exec(t, "INSERT INTO orders (id, channel, user_id, currency, amount, status, deadline_at, created_at) VALUES "+strings.Join(rows, ", "))
	}
	b.db.Exec(t, "ANALYZE TABLE orders")
	scan, conn := b.scan()
	cutoff := now.Add(-time.Minute + 123456789*time.Nanosecond)
	var after orders.Overdue
	var all []int64
	for {
		var page []orders.Overdue
		read := b.rowsRead(conn, func() {
			var err error
			if page, err = scan.Page(b.ctx, after, cutoff, 40); err != nil {
				t.Fatal(err)
			}
		})
		// Some for the union and the ends of the ranges.
		most := int64(len(page) + 6)
		if after.Deadline.Equal(long.Add(50 * time.Second)) {
			most = 2*40 + 6
		}
		if read > most {
			t.Errorf("a page of %d orders behind %+v read %d rows, want at most %d", len(page), after, read, most)
		}
		for _, o := range page {
			all = append(all, o.ID)
		}
		if len(page) > 0 {
			after = page[len(page)-1]
		}
		if len(page) < 40 {
			break
		}
	}
	if len(all) != 250 || !slices.IsSorted(all) || len(slices.Compact(slices.Clone(all))) != 250 {
		t.Errorf("%d orders were found, want each of 250 once, in order", len(all))
	}
	read := b.rowsRead(conn, func() {
		if page, err := scan.Page(b.ctx, after, cutoff, 40); err != nil || len(page) != 0 {
			t.Errorf("behind the end: %v, %v", page, err)
		}
	})
	if read > 6 {
		t.Errorf("an empty page read %d rows", read)
	}
	if n, err := scan.Count(b.ctx, orders.Overdue{}, cutoff); err != nil || n != 250 {
		t.Errorf("count is %d, %v", n, err)
	}
	if n, err := scan.Count(b.ctx, orders.Overdue{ID: 100, Deadline: long.Add(50 * time.Second)}, cutoff); err != nil || n != 150 {
		t.Errorf("count behind the 100th is %d, %v; want 150", n, err)
	}
	for _, limit := range []int{0, -1, 1_000_001} {
		if _, err := scan.Page(b.ctx, after, cutoff, limit); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("a page of %d: %v, want ErrInvalid", limit, err)
		}
	}
}

func TestACancelForARunLeavesItsReasonAndOneForAMessageDoesNot(t *testing.T) {
	t.Parallel()
	b := setup(t)
	byRun, byMessage, paid := b.place(overdue).ID, b.place(overdue).ID, b.place(overdue).ID
	b.pay(paid)
	b.cancelDue(byMessage)
	outcomes, err := b.store.CancelDue(orders.WithRun(b.ctx, 42), text(byRun, byMessage, paid, 77))
	if err != nil {
		t.Fatal(err)
	}
	if outcomes[0].Missed != orders.MissedNeverSent || outcomes[1].Missed != "" || outcomes[2].Missed != "" || outcomes[3].Result != orders.ResultNotFound {
		t.Errorf("outcomes %+v", outcomes)
	}
	story := func(id int64) string {
		return b.db.Text(t, "SELECT GROUP_CONCAT(kind ORDER BY id) FROM order_events WHERE order_id = ?", id)
	}
	if story(byRun) != "placed,reconciled,cancelled" || story(byMessage) != "placed,cancelled" || story(paid) != "placed,paid" {
		t.Errorf("stories %s; %s; %s", story(byRun), story(byMessage), story(paid))
	}
	if got := b.db.Text(t, "SELECT reason FROM parked WHERE ref = '77'"); !strings.Contains(got, "reconcile run 42 read this order") {
		t.Errorf("an order that is gone is parked with %q", got)
	}
	b.wantClean()
}

func TestUnlockedLeavesOutWhatIsLockedAndWaitsForNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	free, locked := b.place(overdue).ID, b.place(overdue).ID
	tx, err := b.db.SQL.BeginTx(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(b.ctx, "SELECT id FROM orders WHERE id = ? FOR UPDATE", locked); err != nil {
		t.Fatal(err)
	}
	quick, cancel := context.WithTimeout(b.ctx, 4*time.Second) // less than a lock wait
	defer cancel()
	if got, err := b.store.Unlocked(quick, []int64{free, locked, 77}); err != nil || !slices.Equal(got, []int64{free}) {
		t.Errorf("unlocked are %v, %v; want %d alone", got, err, free)
	}
	if out := b.cancelDue(free); out[0].Result != orders.ResultCancelled {
		t.Errorf("after the look the order is %+v", out[0])
	}
}

func TestOldOutboxRowsAreFound(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old, sent := b.place(), b.place()
	b.place()
	b.db.Exec(t, "UPDATE outbox SET pending_since = UTC_TIMESTAMP(3) - INTERVAL 20 MINUTE, attempts = 3, last_error = 'no broker' WHERE order_id IN (?, ?)", old.ID, sent.ID)
	b.db.Exec(t, "UPDATE outbox SET state = 'sent' WHERE order_id = ?", sent.ID)
	for _, c := range []struct {
		age  time.Duration
		want []int64
	}{{15 * time.Minute, []int64{old.ID}}, {time.Hour, nil}} {
		check, err := orders.StaleOutbox(b.ctx, b.db.SQL, c.age, 0)
		if err != nil {
			t.Fatal(err)
		}
		var found []int64
		for _, v := range check.Examples {
			found = append(found, v.OrderID)
			if !strings.Contains(v.Detail, "3 sends failed, the last: no broker") {
				t.Errorf("detail %q", v.Detail)
			}
		}
		if !slices.Equal(found, c.want) || check.Violations != int64(len(c.want)) || check.Rows != 2 {
			t.Errorf("older than %s: %+v, want %v of 2 rows", c.age, check, c.want)
		}
	}
	if _, err := orders.StaleOutbox(b.ctx, b.db.SQL, 0, 0); !errors.Is(err, orders.ErrInvalid) {
		t.Errorf("an age of 0: %v, want ErrInvalid", err)
	}
}

// TestRowsThatTheBrokerRefusesForLongAreFound: a relay whose broker refuses tries one row after the other, oldest first, and gives back what it does
// not try. Each time moves the row's available_at, so that no row is available for long; all of them have waited all the time.
func TestRowsThatTheBrokerRefusesForLongAreFound(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cfg := orders.Config{Events: true}
	at := func(d time.Duration) *bundle { return b.on(b.at(noon.Add(d), cfg)) }
	later := func(n *orders.NewOrder) { n.DeadlineAt = noon.Add(2 * time.Hour) }
	var ids []int64
	for i := range 3 {
		ids = append(ids, at(time.Duration(i)*time.Second).place(later).ID)
	}
	const outage = 20 * time.Minute
	refused := errors.New("no broker")
	for d := time.Minute; d < outage; d += time.Minute {
		now := at(d)
		probe := now.claim(1, 30*time.Second)
		now.wantMarked("retry", 1)(now.store.MarkRetry(b.ctx, probe.Token, claimed(probe), 30*time.Second, refused))
		rest := now.claim(9, 30*time.Second)
		now.wantMarked("unclaim", 2)(now.store.Unclaim(b.ctx, rest.Token, claimed(rest)))
		events := now.claimEvents(2, 30*time.Second)
		now.wantMarked("retry of an event", 1)(now.store.MarkOutgoingRetry(b.ctx, events.Token, []int64{events.Rows[0].ID}, 30*time.Second, refused))
		now.wantMarked("unclaim of an event", 1)(now.store.UnclaimOutgoing(b.ctx, events.Token, []int64{events.Rows[1].ID}))
	}
	now := at(outage)
	wantAges := func(when string, outbox, events time.Duration) {
		t.Helper()
		st, err := now.store.Stats(b.ctx)
		if err != nil || st.OutboxOldest != outbox || st.EventsOldest != events {
			t.Errorf("%s: outbox %s, events %s, %v; want %s and %s", when, st.OutboxOldest, st.EventsOldest, err, outbox, events)
		}
	}
	wantOld := func(age time.Duration, want ...int64) {
		t.Helper()
		check, err := orders.StaleOutbox(b.ctx, now.store.DB(), age, 2)
		if err != nil {
			t.Fatal(err)
		}
		var listed []int64
		for _, v := range check.Examples {
			listed = append(listed, v.OrderID)
		}
		if check.Violations != int64(len(want)) || !slices.Equal(listed, want[:min(len(want), 2)]) {
			t.Errorf("older than %s: %+v, want %v", age, check, want)
		}
	}
	wantAges("refused", outage, outage)
	wantOld(15*time.Minute, ids...)
	wantOld(outage-time.Second, ids[0])
	wantOld(outage)
	c, e := now.claim(9, time.Minute), now.claimEvents(9, time.Minute)
	wantAges("leased", outage, outage)
	wantOld(15*time.Minute, ids...)

	// What is sent does not wait, and what goes back to pending waits from its new instant on; so does what a build without the column puts back.
	now.wantMarked("sent", 3)(now.store.MarkSent(b.ctx, c.Token, []orders.Sent{{IDs: claimed(c), MessageID: "m", Due: noon.Add(time.Hour)}}))
	now.wantMarked("events sent", 3)(now.sendEvents(e), nil)
	wantAges("sent", 0, 0)
	if out := now.cancelDue(ids[0]); out[0].Result != orders.ResultNotDue {
		t.Errorf("%+v", out)
	}
	wantAges("left alone for a minute", 0, 0)
	b.db.Exec(t, "UPDATE outbox SET state = 'pending', available_at = ? WHERE order_id = ?", sqlText(noon.Add(outage)), ids[1])
	now = at(outage + 3*time.Minute)
	wantAges("put back by an older build", 3*time.Minute, 0)
	wantOld(150*time.Second, ids[1])
	b.db.Exec(t, "UPDATE outbox SET state = 'sent' WHERE order_id = ?", ids[1])
	wantAges("a hop", 2*time.Minute, 0)

	// What was parked waits from the retry on.
	c = now.claim(9, time.Minute)
	now.wantMarked("parked", 1)(now.store.MarkParked(b.ctx, c.Token, ids[:1], "refused"))
	wantAges("parked", 0, 0)
	if _, err := now.store.RetryParked(b.ctx, b.db.Int(t, "SELECT id FROM parked"), "ann"); err != nil {
		t.Fatal(err)
	}
	now = at(outage + 4*time.Minute)
	wantAges("retried", time.Minute, 0)
}
