package orders_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

func (b *bundle) claim(limit int, lease time.Duration) orders.Claim {
	b.t.Helper()
	c, err := b.store.ClaimOutbox(b.ctx, limit, lease)
	if err != nil {
		b.t.Fatal(err)
	}
	return c
}

func (b *bundle) row(id int64) orders.OutboxRow {
	b.t.Helper()
	row, there, err := b.store.Outbox(b.ctx, id)
	if err != nil || !there {
		b.t.Fatalf("outbox row of %d: there %t, %v", id, there, err)
	}
	return row
}

func (b *bundle) wantMarked(what string, want int) func(int, error) {
	return func(n int, err error) {
		b.t.Helper()
		if err != nil || n != want {
			b.t.Errorf("%s: %d rows, %v; want %d", what, n, err, want)
		}
	}
}

func TestClaimTakesTheOldestFirstAndEachRowOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	later, first := b.on(b.at(noon.Add(time.Second), orders.Config{})), b.on(b.at(noon, orders.Config{}))
	young := later.place().ID
	old, old2 := first.place(func(n *orders.NewOrder) { n.Traceparent = "00-abc-def-01" }).ID, first.place().ID
	if c := first.claim(10, time.Minute); !slices.Equal(claimed(c), []int64{old, old2}) {
		t.Errorf("at noon: %v, want %v: the third cannot be sent before it is there", claimed(c), []int64{old, old2})
	}
	third := b.on(b.at(noon.Add(2*time.Minute), orders.Config{}))
	c := third.claim(2, 30*time.Second)
	if want := []int64{young, old}; !slices.Equal(claimed(c), want) {
		t.Errorf("claimed %v, want %v: waiting since noon and a second, and since noon and a minute", claimed(c), want)
	}
	if p := c.Rows[1]; p.Traceparent != "00-abc-def-01" || !p.DeliverAt.Equal(noon.Add(30*time.Minute)) || p.Attempts != 0 {
		t.Errorf("%+v", p)
	}
	if c.Token == "" || !c.Now.Equal(noon.Add(2*time.Minute)) || !c.Until.Equal(c.Now.Add(30*time.Second)) {
		t.Errorf("%+v", c)
	}
	if c := third.claim(10, time.Minute); !slices.Equal(claimed(c), []int64{old2}) {
		t.Errorf("the rest is %v, want %v", claimed(c), old2)
	}
	if c := third.claim(10, time.Minute); len(c.Rows) != 0 {
		t.Errorf("claimed twice: %v", claimed(c))
	}
	for _, bad := range []struct {
		limit int
		lease time.Duration
	}{{0, time.Second}, {-1, time.Second}, {10_001, time.Second}, {1, 0}, {1, -1}} {
		if _, err := b.store.ClaimOutbox(b.ctx, bad.limit, bad.lease); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

func TestMarksOfALeaseThatEndedMatchNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := func(d time.Duration) *bundle { return b.on(b.at(noon.Add(d), orders.Config{})) }
	id := at(0).place().ID
	first := at(0).claim(1, 30*time.Second)
	if c := at(29*time.Second+999*time.Millisecond).claim(1, time.Minute); len(c.Rows) != 0 {
		t.Error("claimed while it was leased")
	}
	second := at(30*time.Second).claim(1, 30*time.Second)
	if !slices.Equal(claimed(second), []int64{id}) || second.Token == first.Token {
		t.Fatalf("not claimed after the lease ended: %+v", second)
	}
	ids := []int64{id}
	b.wantMarked("sent", 0)(b.store.MarkSent(b.ctx, first.Token, []orders.Sent{{IDs: ids, MessageID: "m1", Due: noon}}))
	b.wantMarked("retry", 0)(b.store.MarkRetry(b.ctx, first.Token, ids, time.Second, errors.New("x")))
	b.wantMarked("unclaim", 0)(b.store.Unclaim(b.ctx, first.Token, ids))
	b.wantMarked("parked", 0)(b.store.MarkParked(b.ctx, first.Token, ids, "x"))
	b.wantMarked("sent", 1)(at(31*time.Second).store.MarkSent(b.ctx, second.Token, []orders.Sent{{IDs: ids, MessageID: "m2", Due: noon.Add(30 * time.Minute)}}))
	b.wantMarked("sent again", 0)(b.store.MarkSent(b.ctx, second.Token, []orders.Sent{{IDs: ids, MessageID: "m3", Due: noon}}))
	row := b.row(id)
	if row.State != "sent" || row.MessageID != "m2" || row.Leased || !row.SentAt.Equal(noon.Add(31*time.Second)) || !row.AvailableAt.Equal(noon.Add(48*time.Hour+31*time.Second)) {
		t.Errorf("%+v", row)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM parked"); n != 0 {
		t.Errorf("%d parked by a relay that had lost its lease", n)
	}
}

func TestMarksOfARowThatWasTimedAnewMatchNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := func(d time.Duration) *bundle { return b.on(b.at(noon.Add(d), orders.Config{})) }
	extended, early := at(0).place().ID, at(0).place().ID
	c := at(0).claim(2, 30*time.Second)
	if _, err := at(time.Second).store.ExtendDeadline(b.ctx, extended, noon.Add(time.Hour), "support"); err != nil {
		t.Fatal(err)
	}
	if out := at(time.Second).cancelDue(early)[0]; out.Result != orders.ResultNotDue {
		t.Fatal(out)
	}
	b.wantMarked("sent", 0)(b.store.MarkSent(b.ctx, c.Token, []orders.Sent{{IDs: []int64{extended, early}, MessageID: "m1", Due: noon.Add(30 * time.Minute)}}))
	row := b.row(extended)
	if row.State != "pending" || row.Leased || !row.DeliverAt.Equal(noon.Add(time.Hour)) || !row.AvailableAt.Equal(noon.Add(time.Second)) || row.MessageID != "" {
		t.Errorf("extended: %+v", row)
	}
	if again := at(time.Second).claim(9, time.Minute); !slices.Equal(claimed(again), []int64{extended}) || !again.Rows[0].DeliverAt.Equal(noon.Add(time.Hour)) {
		t.Errorf("%+v", again)
	}
	if row := b.row(early); row.State != "pending" || !row.AvailableAt.Equal(noon.Add(61*time.Second)) || !row.DeliverAt.Equal(noon.Add(30*time.Minute)) {
		t.Errorf("early: %+v", row)
	}
}

func TestFailedSendWaitsItsPauseAndCounts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := func(d time.Duration) *bundle { return b.on(b.at(noon.Add(d), orders.Config{})) }
	one, two, three := at(0).place().ID, at(0).place().ID, at(0).place().ID
	c := at(0).claim(3, 30*time.Second)
	b.wantMarked("retry", 1)(at(time.Second).store.MarkRetry(b.ctx, c.Token, []int64{one}, 5*time.Second, errors.New("the broker\xff said 'no'")))
	b.wantMarked("unclaim", 1)(at(time.Second).store.Unclaim(b.ctx, c.Token, []int64{two}))
	b.wantMarked("park", 1)(at(time.Second).store.MarkParked(b.ctx, c.Token, []int64{three}, "refused: 40012"))
	if row := b.row(one); row.Attempts != 1 || row.LastError != "the broker\uFFFD said 'no'" || row.State != "pending" || row.Leased || !row.AvailableAt.Equal(noon.Add(6*time.Second)) {
		t.Errorf("retry: %+v", row)
	}
	if row := b.row(two); row.Attempts != 0 || row.Leased || !row.AvailableAt.Equal(noon.Add(time.Second)) {
		t.Errorf("unclaimed: %+v", row)
	}
	if row := b.row(three); row.Attempts != 1 || row.State != "parked" || row.LastError != "refused: 40012" || row.Leased {
		t.Errorf("parked: %+v", row)
	}
	if got := b.db.Text(t, "SELECT GROUP_CONCAT(CONCAT_WS(' ', what, ref, reason)) FROM parked"); got != fmt.Sprintf("order %d refused: 40012", three) {
		t.Error(got)
	}
	if c := at(5*time.Second).claim(9, time.Minute); !slices.Equal(claimed(c), []int64{two}) {
		t.Errorf("after 5 s: %v, want %d: one still waits, three is parked", claimed(c), two)
	}
	if c := at(6*time.Second).claim(9, time.Minute); !slices.Equal(claimed(c), []int64{one}) || c.Rows[0].Attempts != 1 {
		t.Errorf("after 6 s: %+v", c)
	}
	// A parked order is cancelled all the same when somebody asks, and its row, timed anew, is sent again.
	if _, err := at(0).store.ExtendDeadline(b.ctx, three, noon.Add(time.Hour), "support"); err != nil {
		t.Fatal(err)
	}
	if row := b.row(three); row.State != "pending" || row.Attempts != 0 || row.LastError != "" {
		t.Errorf("%+v", row)
	}
}

func TestSeveralMessagesAreMarkedTogetherEachWithItsOwnIDAndDue(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var ids []int64
	for range 4 {
		ids = append(ids, b.on(b.at(noon, orders.Config{})).place().ID)
	}
	slices.Sort(ids)
	now := b.on(b.at(noon.Add(time.Second), orders.Config{}))
	c := now.claim(9, 30*time.Second)
	if _, err := now.store.ExtendDeadline(b.ctx, ids[3], noon.Add(time.Hour), "support"); err != nil {
		t.Fatal(err)
	}
	// Their ids interleave, and the last order was timed anew meanwhile.
	one := orders.Sent{IDs: []int64{ids[2], ids[0]}, MessageID: "m1", Due: noon.Add(30 * time.Minute)}
	two := orders.Sent{IDs: []int64{ids[3], ids[1]}, MessageID: "m2", Due: noon.Add(31 * time.Minute)}
	b.wantMarked("sent", 3)(now.store.MarkSent(b.ctx, c.Token, []orders.Sent{one, two}))
	for i, want := range []orders.Sent{one, two, one} {
		if row := b.row(ids[i]); row.State != "sent" || row.MessageID != want.MessageID || !row.DeliverAt.Equal(want.Due) || row.Leased {
			t.Errorf("order %d: %+v, want it in message %s, due %s", i, row, want.MessageID, want.Due)
		}
	}
	if row := b.row(ids[3]); row.State != "pending" || row.MessageID != "" || !row.DeliverAt.Equal(noon.Add(time.Hour)) {
		t.Errorf("timed anew: %+v", row)
	}
	b.wantMarked("nothing", 0)(now.store.MarkSent(b.ctx, c.Token, nil))
}

func TestTwoRelaysClaimEveryRowOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const total = 400
	b.db.Exec(t, `INSERT INTO outbox (order_id, deliver_at, state, available_at, attempts)
		SELECT 1 + a.n + 10 * b.n + 100 * c.n, UTC_TIMESTAMP(3), 'pending', UTC_TIMESTAMP(3), 0 FROM `+digits("a")+", "+digits("b")+", "+digits("c")+" WHERE c.n < 4")
	var mu sync.Mutex // guards sent
	var sent []int64
	var relays sync.WaitGroup
	for range 3 {
		relays.Go(func() {
			for {
				c, err := b.store.ClaimOutbox(b.ctx, 23, time.Minute)
				if err != nil {
					t.Error(err)
					return
				}
				if len(c.Rows) == 0 {
					return
				}
				n, err := b.store.MarkSent(b.ctx, c.Token, []orders.Sent{{IDs: claimed(c), MessageID: "m", Due: time.Now()}})
				if err != nil || n != len(c.Rows) {
					t.Errorf("%d of %d marked, %v", n, len(c.Rows), err)
				}
				mu.Lock()
				sent = append(sent, claimed(c)...)
				mu.Unlock()
			}
		})
	}
	relays.Wait()
	slices.Sort(sent)
	if len(sent) != total || len(slices.Compact(sent)) != total {
		t.Errorf("%d claims of %d rows", len(sent), total)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE state <> 'sent' OR lease_token IS NOT NULL"); n != 0 {
		t.Errorf("%d rows are not marked", n)
	}
}

func TestPurgeTakesOnlyWhatIsFinalAndOver(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := func(d time.Duration) *bundle {
		return b.on(b.at(noon.Add(d), orders.Config{OutboxRetention: time.Hour}))
	}
	n := func(id int64) func(*orders.NewOrder) {
		return func(n *orders.NewOrder) { n.ID, n.DeadlineAt = id, noon.Add(time.Minute) }
	}
	for id := range int64(7) {
		at(0).place(n(id + 1))
	}
	at(0).place(n(8)) // never sent
	c := at(0).claim(7, time.Minute)
	b.wantMarked("sent", 6)(at(0).store.MarkSent(b.ctx, c.Token, []orders.Sent{{IDs: []int64{1, 2, 3, 4, 5, 6}, MessageID: "m", Due: noon.Add(time.Minute)}}))
	b.wantMarked("parked", 1)(at(0).store.MarkParked(b.ctx, c.Token, []int64{7}, "refused"))
	at(0).pay(1)
	at(time.Minute).cancelDue(2, 7, 8)
	b.db.Exec(t, "DELETE FROM orders WHERE id = 3") // 4, 5, 6 stay unpaid
	left := func(want ...int64) {
		t.Helper()
		got := b.db.Text(t, "SELECT GROUP_CONCAT(order_id ORDER BY order_id SEPARATOR ' ') FROM outbox")
		if fmt.Sprint(want) != "["+got+"]" {
			t.Errorf("left are %s, want %v", got, want)
		}
	}
	b.wantMarked("purge in time", 0)(at(59*time.Second).store.PurgeOutbox(b.ctx, 100))
	left(1, 2, 3, 4, 5, 6, 7, 8)
	b.wantMarked("purge", 1)(at(time.Hour).store.PurgeOutbox(b.ctx, 1))
	left(2, 3, 4, 5, 6, 7, 8)
	b.wantMarked("purge", 3)(at(time.Hour).store.PurgeOutbox(b.ctx, 100))
	left(4, 5, 6, 8)
	if row := b.row(4); !row.AvailableAt.Equal(noon.Add(2 * time.Hour)) {
		t.Errorf("an open order's row is looked at again at %s, want after another retention", row.AvailableAt)
	}
	b.wantMarked("purge again", 0)(at(time.Hour).store.PurgeOutbox(b.ctx, 100))
	at(time.Minute).cancelDue(4)
	b.wantMarked("purge later", 1)(at(2*time.Hour).store.PurgeOutbox(b.ctx, 100))
	left(5, 6, 8)
	for _, limit := range []int{0, -1, 10_001} {
		if _, err := b.store.PurgeOutbox(b.ctx, limit); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("limit %d: %v", limit, err)
		}
	}
}

// TestPurgeWaitsForNoCheckout: nor does any checkout wait for a purge.
func TestPurgeWaitsForNoCheckout(t *testing.T) {
	t.Parallel()
	b := setup(t)
	done := b.place(overdue).ID
	c := b.claim(1, time.Minute)
	b.wantMarked("sent", 1)(b.store.MarkSent(b.ctx, c.Token, []orders.Sent{{IDs: []int64{done}, MessageID: "m", Due: noon}}))
	b.pay(done)
	b.db.Exec(t, "UPDATE outbox SET available_at = '2026-01-01'")
	p := newProxy(t, b.db.DSN)
	through, err := orders.Open(p.dsn, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = through.Close() }()
	// A checkout stands before its commit, its rows written; the purge goes through all the same. Then the other way round.
	for _, standing := range []func() error{
		func() error {
			_, err := through.Place(b.ctx, orders.NewOrder{ID: done + 1, Currency: "EUR"})
			return err
		},
		func() error {
			_, err := through.PurgeOutbox(b.ctx, 10)
			return err
		},
	} {
		locked, goOn := p.standAtCommit()
		var other sync.WaitGroup
		other.Go(func() {
			if err := standing(); err != nil {
				t.Error(err)
			}
		})
		<-locked
		begun := time.Now()
		if _, err := b.store.PurgeOutbox(b.ctx, 10); err != nil {
			t.Error(err)
		}
		if _, err := b.store.Place(b.ctx, orders.NewOrder{Currency: "EUR"}); err != nil {
			t.Error(err)
		}
		if waited := time.Since(begun); waited > 4*time.Second || b.store.Counters().Retries > 0 {
			t.Errorf("waited %s, %d retries", waited, b.store.Counters().Retries)
		}
		close(goOn)
		other.Wait()
		p.on(nil)
	}
}

// TestEarlyMessagesEndAfterAFewRounds: a broker whose clock runs ahead delivers each new message at once. The pause before the next
// shrinks with what remains, so that the rounds end, and the last is not late.
func TestEarlyMessagesEndAfterAFewRounds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.on(b.at(noon, orders.Config{})).place().ID
	now, rounds := noon, 0
	for {
		out := b.on(b.at(now, orders.Config{})).cancelDue(id)[0]
		if out.Result != orders.ResultNotDue {
			t.Fatalf("%+v", out)
		}
		if out.Remaining <= 2*time.Second { // the consumer waits that long by itself
			break
		}
		rounds++
		row := b.row(id)
		if row.State != "pending" || !row.DeliverAt.Equal(noon.Add(30*time.Minute)) || !row.AvailableAt.After(now) || !row.AvailableAt.Before(noon.Add(30*time.Minute)) {
			t.Fatalf("round %d at %s: %+v", rounds, now.Sub(noon), row)
		}
		now = row.AvailableAt
		c := b.on(b.at(now, orders.Config{})).claim(1, time.Minute)
		if _, err := b.store.MarkSent(b.ctx, c.Token, []orders.Sent{{IDs: claimed(c), MessageID: "m", Due: row.DeliverAt}}); err != nil {
			t.Fatal(err)
		}
	}
	if rounds > 36 {
		t.Errorf("%d rounds for 30 minutes", rounds)
	}
	t.Logf("%d rounds", rounds)
}

func TestStatsShowWhatWaits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stats := func() orders.Stats {
		t.Helper()
		st, err := b.store.Stats(b.ctx)
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	if st := stats(); st.OutboxPending != 0 || st.OutboxOldest != 0 || st.Overdue != 0 || st.Parked != 0 || st.HistoryList < 0 {
		t.Errorf("empty: %+v", st)
	}
	overdueID := b.place(overdue).ID
	b.place(noDeadline)
	held := b.place(overdue).ID
	b.place()
	b.db.Exec(t, "UPDATE orders SET hold_until = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR WHERE id = ?", held)
	b.db.Exec(t, "UPDATE outbox SET pending_since = UTC_TIMESTAMP(3) - INTERVAL 90 SECOND WHERE order_id = ?", held)
	if st := stats(); st.OutboxPending != 3 || st.OutboxOldest < 89*time.Second || st.OutboxOldest > 5*time.Minute || st.Overdue != 1 {
		t.Errorf("%+v", st)
	}
	c := b.claim(10, time.Minute)
	if st := stats(); st.OutboxPending != 3 || st.OutboxOldest < 89*time.Second {
		t.Errorf("all leased, and none sent: %+v", st)
	}
	if _, err := b.store.MarkSent(b.ctx, c.Token, []orders.Sent{{IDs: claimed(c), MessageID: "m", Due: noon}}); err != nil {
		t.Fatal(err)
	}
	b.cancelDue(overdueID, 5)
	if st := stats(); st.OutboxPending != 0 || st.OutboxOldest != 0 || st.Overdue != 0 || st.Parked != 1 {
		t.Errorf("%+v", st)
	}
}
