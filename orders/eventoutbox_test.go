package orders_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"gorm.io/gorm"

	"github.com/lapse-orders/lapse/orders"
)

// told gives every event of the outbox in the order of writing, as "order sequence type".
func (b *bundle) told() []string {
	b.t.Helper()
	text := b.db.Text(b.t, "SELECT COALESCE(GROUP_CONCAT(order_id, ' ', sequence, ' ', type ORDER BY id SEPARATOR '\n'), '') FROM event_outbox")
	if text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

func (b *bundle) claimEvents(limit int, lease time.Duration) orders.OutgoingClaim {
	b.t.Helper()
	c, err := b.store.ClaimOutgoing(b.ctx, limit, lease)
	if err != nil {
		b.t.Fatal(err)
	}
	return c
}

func eventIDs(c orders.OutgoingClaim) []string {
	ids := []string{}
	for _, e := range c.Rows {
		ids = append(ids, e.EventID())
	}
	return ids
}

// sendEvents marks the claimed events sent.
func (b *bundle) sendEvents(c orders.OutgoingClaim) int {
	b.t.Helper()
	var sent []orders.SentOutgoing
	for _, e := range c.Rows {
		sent = append(sent, orders.SentOutgoing{ID: e.ID, MessageID: "M" + e.EventID()})
	}
	n, err := b.store.MarkOutgoingSent(b.ctx, c.Token, sent)
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// refundAll makes every pending refund of a gateway.
func (b *bundle) refundAll(gateway string) {
	b.t.Helper()
	claim, err := b.store.ClaimRefunds(b.ctx, gateway, 100, time.Minute)
	if err != nil {
		b.t.Fatal(err)
	}
	for i, r := range claim.Rows {
		if done, err := b.store.RefundDone(b.ctx, claim.Token, r, fmt.Sprintf("R-%d", i+1)); err != nil || !done {
			b.t.Fatalf("refund %s done: %t, %v", r.Ref(), done, err)
		}
	}
}

// case STK-2, STK-3: coupons and points live behind the event, which every path writes once.
func TestEveryChangeOfStateIsToldOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b = b.on(b.at(noon, orders.Config{Events: true}))
	b.stock("tea", 100)
	withTea := items(orders.Item{SKU: "tea", Quantity: 1, Price: 1})
	free := func(n *orders.NewOrder) { n.Amount = 0 }
	due := func(n *orders.NewOrder) { n.DeadlineAt = noon }
	paid, message, byHand, late := b.place(withTea), b.place(withTea, due), b.place(withTea), b.place(withTea, due)
	nothing := b.place(free)

	for range 3 { // the second and third time nothing changes
		if r, err := b.store.RecordPayment(b.ctx, notice(paid.ID, "first", 1500, "EUR")); err != nil || r.Outcome != orders.PaymentAccepted {
			t.Fatalf("%+v, %v", r, err)
		}
		b.cancelDue(paid.ID, message.ID, late.ID, nothing.ID)
		if _, err := b.store.Cancel(b.ctx, byHand.ID, "u1", "changed my mind"); err != nil {
			t.Fatal(err)
		}
		for id, n := range map[int64]orders.Payment{paid.ID: notice(paid.ID, "second", 1000, "EUR"), late.ID: notice(late.ID, "late", 1000, "EUR"), nothing.ID: notice(nothing.ID, "for nothing", 1, "EUR")} {
			if r, err := b.store.RecordPayment(b.ctx, n); err != nil || r.Outcome == orders.PaymentAccepted {
				t.Fatalf("order %d: %+v, %v", id, r, err)
			}
		}
		b.refundAll("test")
	}

	want := map[int64][]string{
		paid.ID:    {orders.OutgoingPlaced, orders.OutgoingPaid, orders.OutgoingRefundDone, orders.OutgoingRefundDone}, // an excess and a duplicate
		message.ID: {orders.OutgoingPlaced, orders.OutgoingCancelled},
		byHand.ID:  {orders.OutgoingPlaced, orders.OutgoingCancelled},
		late.ID:    {orders.OutgoingPlaced, orders.OutgoingCancelled, orders.OutgoingRefundDone},
		nothing.ID: {orders.OutgoingPlaced, orders.OutgoingRefundDone},
	}
	got := map[int64][]string{}
	for _, line := range b.told() {
		var id int64
		var sequence int
		var kind string
		if _, err := fmt.Sscan(line, &id, &sequence, &kind); err != nil {
			t.Fatal(err)
		}
		if got[id] = append(got[id], kind); sequence != len(got[id]) {
			t.Errorf("%q: the sequence has a gap or a repetition", line)
		}
	}
	if !maps.EqualFunc(got, want, slices.Equal[[]string]) {
		t.Errorf("told %v\nwant %v", got, want)
	}
	b.wantClean()
}

func TestNothingIsToldWhereEventsAreOffOrTheChangeIsRolledBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place()
	b.pay(o.ID)
	silent, silentToo := b.place(overdue), b.place()
	b.cancelDue(silent.ID)
	if got := b.told(); got != nil {
		t.Errorf("events are off, and told are %v", got)
	}

	loud := b.on(b.open(orders.Config{Events: true}, func(*mysql.Config) {}))
	shop := b.shop(&gorm.Config{})
	rolledBack := errors.New("the shop thinks better of it")
	err := shop.Transaction(func(tx *gorm.DB) error {
		n, err := loud.store.PlaceTx(b.ctx, tx, orders.NewOrder{Currency: "EUR", Amount: 1000})
		if err != nil {
			return err
		}
		if _, err := loud.store.RecordPaymentTx(b.ctx, tx, payment(n.ID)); err != nil {
			return err
		}
		if _, err := loud.store.CancelTx(b.ctx, tx, silentToo.ID, "u1", "changed my mind"); err != nil {
			return err
		}
		return rolledBack
	})
	if !errors.Is(err, rolledBack) {
		t.Fatal(err)
	}
	if got := b.told(); got != nil {
		t.Errorf("it was rolled back, and told are %v", got)
	}
	// An order that was placed in silence begins with what it tells first.
	loud.pay(silentToo.ID)
	if want := []string{fmt.Sprintf("%d 1 order.paid", silentToo.ID)}; !slices.Equal(b.told(), want) {
		t.Errorf("told %v, want %v", b.told(), want)
	}
}

// TestEventsCommitWithACallersTransaction: at both isolation levels, with an old snapshot, and in sessions that change what row counts mean.
func TestEventsCommitWithACallersTransaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	loud := b.on(b.open(orders.Config{Events: true}, func(*mysql.Config) {}))
	for i, level := range []string{"READ COMMITTED", "REPEATABLE READ"} {
		shop := b.shop(&gorm.Config{PrepareStmt: true}, param("clientFoundRows", "true"), param("sql_safe_updates", "1"))
		tx := shop.Begin()
		for _, statement := range []string{"SELECT COUNT(*) FROM orders", "SELECT 1"} {
			if i == 1 && tx.Exec(statement).Error != nil {
				t.Fatal(tx.Error)
			}
		}
		o := loud.place() // after the snapshot
		if _, err := loud.store.RecordPaymentTx(b.ctx, tx, payment(o.ID)); err != nil {
			t.Fatalf("%s: %v", level, err)
		}
		n, err := loud.store.PlaceTx(b.ctx, tx, orders.NewOrder{Currency: "EUR", Amount: 1})
		if err != nil {
			t.Fatalf("%s: %v", level, err)
		}
		if _, err := loud.store.CancelTx(b.ctx, tx, n.ID, "u1", "no"); err != nil {
			t.Fatalf("%s: %v", level, err)
		}
		if err := tx.Commit().Error; err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{fmt.Sprintf("%d 2 order.paid", o.ID), fmt.Sprintf("%d 1 order.placed", n.ID), fmt.Sprintf("%d 2 order.cancelled", n.ID)} {
			if !slices.Contains(b.told(), want) {
				t.Errorf("%s: no %q among %v", level, want, b.told())
			}
		}
	}
}

// TestClaimGivesAnOrdersEventsOneAfterTheOther: the next is given when the one before it is sent or parked, whoever claims.
func TestClaimGivesAnOrdersEventsOneAfterTheOther(t *testing.T) {
	t.Parallel()
	b := setupWith(t, orders.Config{Events: true})
	one, two := b.place(), b.place()
	b.pay(one.ID)
	b.pay(two.ID)
	id := func(o orders.Order, sequence int) string { return fmt.Sprintf("%d-%d", o.ID, sequence) }

	first := b.claimEvents(1, time.Minute)
	second := b.claimEvents(10, time.Minute)
	third := b.claimEvents(10, time.Minute)
	if got, want := [][]string{eventIDs(first), eventIDs(second), eventIDs(third)}, [][]string{{id(one, 1)}, {id(two, 1)}, {}}; !reflect.DeepEqual(got, want) {
		t.Fatalf("claimed %v, want %v", got, want)
	}
	e := first.Rows[0]
	if e.OrderID != one.ID || e.Sequence != 1 || e.Type != orders.OutgoingPlaced || !e.At.Equal(one.CreatedAt) || e.Attempts != 0 {
		t.Errorf("%+v", e)
	}
	// Put off, it still stands before the next one.
	b.wantMarked("retry", 1)(b.store.MarkOutgoingRetry(b.ctx, first.Token, []int64{e.ID}, time.Hour, errors.New("no broker")))
	if got := eventIDs(b.claimEvents(10, time.Minute)); len(got) != 0 {
		t.Errorf("claimed %v while the first event of the order waits", got)
	}
	b.db.Exec(t, "UPDATE event_outbox SET available_at = UTC_TIMESTAMP(3) WHERE id = ?", e.ID)
	again := b.claimEvents(10, time.Minute)
	if got := eventIDs(again); !slices.Equal(got, []string{id(one, 1)}) || again.Rows[0].Attempts != 1 {
		t.Fatalf("claimed %+v", again.Rows)
	}
	// Parked, it stands before nothing any more, and is told of.
	b.wantMarked("parked", 1)(b.store.ParkOutgoing(b.ctx, again.Token, again.Rows[0], "too large", []byte("{}")))
	b.wantMarked("sent", 1)(b.sendEvents(second), nil)
	if got, want := eventIDs(b.claimEvents(10, time.Minute)), []string{id(one, 2), id(two, 2)}; !slices.Equal(got, want) {
		t.Errorf("claimed %v, want %v", got, want)
	}
	if got, want := b.db.Text(t, "SELECT CONCAT_WS(' ', what, ref, reason, body, state) FROM parked"), "message event:"+id(one, 1)+" too large {} parked"; got != want {
		t.Errorf("parked %q, want %q", got, want)
	}
}

// Other systems never hear of it, so whoever asks what became of the order has to.
func TestTheStoryTellsOfAnEventThatIsParkedAndDiscarded(t *testing.T) {
	t.Parallel()
	b := setupWith(t, orders.Config{Events: true})
	o := b.place()
	c := b.claimEvents(1, time.Minute)
	b.wantMarked("parked", 1)(b.store.ParkOutgoing(b.ctx, c.Token, c.Rows[0], "too large", []byte("{}")))
	story, err := b.store.ReadStory(b.ctx, o.ID)
	if err != nil || len(story.Parked) != 1 || story.Parked[0].Ref != fmt.Sprintf("event:%d-1", o.ID) {
		t.Fatalf("parked in the story: %+v, %v", story.Parked, err)
	}
	if _, done, err := b.store.DiscardParked(b.ctx, story.Parked[0].ID, "ann", "the listener knows"); err != nil || !done {
		t.Fatalf("discarded: %t, %v", done, err)
	}
	if got := b.kinds(o.ID); got != "placed parked discarded" {
		t.Errorf("events %q", got)
	}
}

func TestParkedEventIsSentAgainWhenSomebodyRetriesIt(t *testing.T) {
	t.Parallel()
	b := setupWith(t, orders.Config{Events: true})
	o := b.place()
	b.pay(o.ID)
	c := b.claimEvents(1, time.Minute)
	b.wantMarked("parked", 1)(b.store.ParkOutgoing(b.ctx, c.Token, c.Rows[0], "too large", []byte("{}")))
	parked := b.db.Int(t, "SELECT id FROM parked")
	for _, first := range []bool{true, false} {
		r, err := b.store.RetryParked(b.ctx, parked, "operator")
		if err != nil || r.Done != first || r.Event != first || r.Parked.State != orders.StateRetried {
			t.Errorf("%+v, %v; want done %t", r, err, first)
		}
	}
	again := b.claimEvents(10, time.Minute)
	if got, want := eventIDs(again), []string{fmt.Sprintf("%d-1", o.ID)}; !slices.Equal(got, want) {
		t.Errorf("claimed %v, want %v", got, want)
	}
	events, err := b.store.Events(b.ctx, o.ID)
	if err != nil || events[len(events)-1].Kind != orders.EventRetried || events[len(events)-1].Actor != "operator" {
		t.Errorf("the story ends with %+v, %v", events, err)
	}
	// Parked once more, and its row purged with nobody looking: there is nothing to send.
	b.wantMarked("parked", 1)(b.store.ParkOutgoing(b.ctx, again.Token, again.Rows[0], "too large", []byte("{}")))
	b.db.Exec(t, "DELETE FROM event_outbox")
	if _, err := b.store.RetryParked(b.ctx, parked, "operator"); !errors.Is(err, orders.ErrCannotRetry) {
		t.Errorf("without its row: %v", err)
	}
}

func TestMarksOfAnEventMatchOnlyUnderItsLease(t *testing.T) {
	t.Parallel()
	b := setupWith(t, orders.Config{Events: true})
	o := b.place()
	old := b.claimEvents(10, time.Minute)
	b.db.Exec(t, "UPDATE event_outbox SET available_at = UTC_TIMESTAMP(3)") // the lease has ended
	held := b.claimEvents(10, time.Minute)
	if len(old.Rows) != 1 || len(held.Rows) != 1 || old.Token == held.Token {
		t.Fatalf("%+v, then %+v", old, held)
	}
	e := old.Rows[0]
	b.wantMarked("sent, of another", 0)(b.sendEvents(old), nil)
	b.wantMarked("retry, of another", 0)(b.store.MarkOutgoingRetry(b.ctx, old.Token, []int64{e.ID}, 0, errors.New("x")))
	b.wantMarked("unclaim, of another", 0)(b.store.UnclaimOutgoing(b.ctx, old.Token, []int64{e.ID}))
	b.wantMarked("parked, of another", 0)(b.store.ParkOutgoing(b.ctx, old.Token, e, "x", nil))
	if n := b.db.Int(t, "SELECT COUNT(*) FROM parked"); n != 0 {
		t.Errorf("%d rows are parked under a lease that was lost", n)
	}
	b.wantMarked("unclaim", 1)(b.store.UnclaimOutgoing(b.ctx, held.Token, []int64{e.ID}))
	c := b.claimEvents(10, time.Minute)
	b.wantMarked("sent", 1)(b.sendEvents(c), nil)
	b.wantMarked("sent twice", 0)(b.sendEvents(c), nil)
	got := b.db.Text(t, "SELECT CONCAT_WS(' ', state, message_id, attempts, lease_token IS NULL, TIMESTAMPDIFF(DAY, sent_at, available_at)) FROM event_outbox")
	if want := fmt.Sprintf("sent M%d-1 0 1 7", o.ID); got != want {
		t.Errorf("the row is %q, want %q", got, want)
	}
	for limit, lease := range map[int]time.Duration{0: time.Second, 10_001: time.Second, 1: 0} {
		if _, err := b.store.ClaimOutgoing(b.ctx, limit, lease); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("claim of %d for %s: %v", limit, lease, err)
		}
	}
}

// TestClaimOfEventsReadsWhatItGives: neither what was sent before nor the number of orders makes it slower, and a checkout that holds its rows does
// not make it wait.
func TestClaimOfEventsReadsWhatItGives(t *testing.T) {
	t.Parallel()
	b := setupWith(t, orders.Config{Events: true})
	const digit = "(SELECT 0 AS n UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9)"
	b.db.Exec(t, `INSERT INTO event_outbox (order_id, sequence, type, at, data, state, available_at, attempts)
		SELECT 1 + a.n + 10*b.n + 100*c.n + 1000*d.n, 1 + e.n, 'order.placed', UTC_TIMESTAMP(3), '{}', 'sent', UTC_TIMESTAMP(3) + INTERVAL 1 DAY, 0
		FROM `+digit+" a, "+digit+" b, "+digit+" c, "+digit+" d, (SELECT 0 AS n UNION ALL SELECT 1) e")
	b.db.Exec(t, "UPDATE event_outbox SET state = 'pending', available_at = UTC_TIMESTAMP(3) WHERE order_id <= 300")
	b.db.Exec(t, "ANALYZE TABLE event_outbox")

	open, err := b.db.SQL.BeginTx(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Rollback() }()
	if _, err := open.ExecContext(b.ctx, "UPDATE event_outbox SET attempts = 1 WHERE order_id = 7 AND sequence = 1"); err != nil {
		t.Fatal(err)
	}

	one := b.open(orders.Config{Events: true, MaxOpenConns: 1}, func(*mysql.Config) {})
	reads := func() (n int64) {
		rows, err := one.DB().QueryContext(b.ctx, "SHOW SESSION STATUS LIKE 'Handler_read%'")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = rows.Close() }()
		for rows.Next() {
			var name string
			var value int64
			if err := rows.Scan(&name, &value); err != nil {
				t.Fatal(err)
			}
			n += value
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := reads()
	claim, err := one.ClaimOutgoing(b.ctx, 100, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	cost := reads() - before
	if len(claim.Rows) != 100 || slices.Contains(eventIDs(claim), "7-1") || slices.Contains(eventIDs(claim), "7-2") {
		t.Errorf("claimed %d: %v", len(claim.Rows), eventIDs(claim))
	}
	// 100 rows claimed of some 200 looked at, each with a look at the one before it, then the update; the counters read their own table too.
	if cost > 2000 {
		t.Errorf("%d rows were read for a claim of 100 among 20,000", cost)
	}
}

func TestOutgoingEventsAreAsDocumented(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../docs/events-v1.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource(orders.OutgoingSchema, doc); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile(orders.OutgoingSchema) // found by its $id
	if err != nil {
		t.Fatal(err)
	}

	// What docs/events.md tells, done.
	b := setup(t)
	b.stock("tea-100g", 10)
	cfg := policies(t, "method=wallet grace=5m")
	cfg.Events = true
	b = b.on(b.at(noon, cfg))
	first := b.place(func(n *orders.NewOrder) {
		*n = orders.NewOrder{ID: 179500000000000001, Channel: "web", PaymentMethod: "wallet", UserID: "u-1", Currency: "EUR", Amount: 990, Items: []orders.Item{{SKU: "tea-100g", Quantity: 2, Price: 495}}}
	})
	if _, err := b.store.RecordPayment(b.ctx, orders.Payment{Gateway: "bank", TransactionID: "T-1", OrderID: first.ID, Currency: "EUR", Amount: 1000}); err != nil {
		t.Fatal(err)
	}
	b.refundAll("bank")
	b.place(func(n *orders.NewOrder) {
		*n = orders.NewOrder{ID: 179500000000000002, Channel: "web", UserID: "u-2", Currency: "EUR", Amount: 500}
	})
	b.on(b.at(noon.Add(30*time.Minute), cfg)).cancelDue(179500000000000002)
	made := map[string][]byte{}
	late := b.on(b.at(noon.Add(time.Hour), cfg))
	for claim := late.claimEvents(10, time.Minute); len(claim.Rows) > 0; claim = late.claimEvents(10, time.Minute) {
		for _, e := range claim.Rows {
			body, err := e.CloudEvent("/lapse")
			if err != nil {
				t.Fatal(err)
			}
			made[e.EventID()] = body
		}
		late.sendEvents(claim)
	}
	if len(made) != 5 {
		t.Errorf("%d events, want 5", len(made))
	}
	validate := func(body []byte) error {
		v, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
		if err != nil {
			return err
		}
		return schema.Validate(v)
	}
	for id, body := range made {
		if err := validate(body); err != nil {
			t.Errorf("event %s does not fit the schema: %v\n%s", id, err, body)
		}
	}

	page, err := os.ReadFile("../docs/events.md")
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(string(page), "```json\n")[1:]
	if len(parts) != 4 {
		t.Errorf("docs/events.md has %d examples, want one of each type", len(parts))
	}
	for _, part := range parts {
		example, _, _ := strings.Cut(part, "```")
		if err := validate([]byte(example)); err != nil {
			t.Errorf("this example does not fit the schema: %v\n%s", err, example)
		}
		var want, got map[string]any
		if err := json.Unmarshal([]byte(example), &want); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(made[fmt.Sprint(want["id"])], &got); err != nil {
			t.Fatalf("no such event as the example %v: %v", want["id"], err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("the event is %v\nthe example %v", got, want)
		}
	}

	// A schema that lets everything pass would be of no use.
	good := string(made["179500000000000001-1"])
	for _, spoil := range [][2]string{
		{`"amount": "990"`, `"amount": 990`}, {`"amount":"990"`, `"amount":990`}, {`"order.placed"`, `"order.lost"`}, {`"0000000001"`, `"1"`}, {`"specversion":"1.0"`, `"specversion":"0.3"`},
		{`"items"`, `"lines"`}, {`"pay_by"`, `"paid_by"`}, {`12:00:00.123Z`, `12:00:00Z`},
	} {
		if bad := strings.Replace(good, spoil[0], spoil[1], 1); bad != good && validate([]byte(bad)) == nil {
			t.Errorf("the schema takes %s for %s", spoil[1], spoil[0])
		}
	}
}

// TestSequencesHaveNoGapsWhenPaymentsAndCancelsRace: whoever wins, the order is told of once, and its number is the next.
func TestSequencesHaveNoGapsWhenPaymentsAndCancelsRace(t *testing.T) {
	t.Parallel()
	b := setupWith(t, orders.Config{Events: true})
	const n = 60
	var ids []int64
	for range n {
		ids = append(ids, b.place(overdue).ID)
	}
	var verbs []func()
	for _, id := range ids {
		verbs = append(verbs, func() {
			if _, err := b.store.RecordPayment(b.ctx, payment(id)); err != nil {
				t.Error(err)
			}
		})
	}
	for part := range slices.Chunk(ids, 20) {
		verbs = append(verbs, func() {
			if _, err := b.store.CancelDue(b.ctx, text(part...)); err != nil {
				t.Error(err)
			}
		})
	}
	atOnce(verbs...)
	b.refundAll("test")
	late := b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'cancelled'")
	for what, query := range map[string]string{
		"orders with another number of events than they count": "SELECT COUNT(*) FROM orders o WHERE event_sequence <> (SELECT COUNT(*) FROM event_outbox e WHERE e.order_id = o.id)",
		"orders whose events do not end with their number":     "SELECT COUNT(*) FROM orders o WHERE event_sequence <> (SELECT MAX(sequence) FROM event_outbox e WHERE e.order_id = o.id)",
		"orders told to have ended otherwise": `SELECT COUNT(*) FROM orders o WHERE NOT EXISTS
			(SELECT 1 FROM event_outbox e WHERE e.order_id = o.id AND e.sequence = 2 AND e.type = CONCAT('order.', o.status))`,
	} {
		if got := b.db.Int(t, query); got != 0 {
			t.Errorf("%d %s", got, what)
		}
	}
	if got := b.db.Int(t, "SELECT COUNT(*) FROM event_outbox"); got != 2*n+late {
		t.Errorf("%d events, want %d: %d orders were cancelled and their money given back", got, 2*n+late, late)
	}
	b.wantClean()
}
