package relay_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"gorm.io/driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/relay"
)

func TestPlacedOrderBecomesATimedMessageDueAtItsDeadline(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := start(t, b.store, b.sender(t), relay.Config{})
	o := b.place(t, orders.NewOrder{})
	b.awaitState(t, "sent", 1)

	sent := b.broker.Sent(topic)
	if len(sent) != 1 {
		t.Fatalf("%d messages were sent, want 1", len(sent))
	}
	e := expiryOf(t, sent[0])
	if len(e.Orders) != 1 || e.Orders[0] != orders.FormatID(o.ID) {
		t.Errorf("the message is of orders %v, want %d", e.Orders, o.ID)
	}
	if want := ceil(*o.DeadlineAt); !e.Due.Equal(want) {
		t.Errorf("due %s for the deadline %s; want the next tick, %s", e.Due, o.DeadlineAt, want)
	}
	row := b.row(t, o.ID)
	if row.MessageID != sent[0].ID || !row.DeliverAt.Equal(e.Due) || row.Leased || row.Attempts != 0 {
		t.Errorf("outbox row is %+v, want message %s due %s and no lease", row, sent[0].ID, e.Due)
	}
	if err := r.Ready(); err != nil {
		t.Errorf("not ready: %v", err)
	}
	for name, want := range map[string]float64{
		"sent_messages_total": 1, "sent_orders_total": 1, "send_duration_seconds": 1, "orders_per_message": 1, "send_lag_seconds": 1,
		"lost_leases_total": 0, "retried_orders_total": 0, "hops_total": 0, "paused": 0,
	} {
		if got := r.metric(t, name); got != want {
			t.Errorf("metric %s is %v, want %v", name, got, want)
		}
	}
	eventually(t, "nothing is in hand", func() bool { return r.metric(t, "in_hand_orders") == 0 })
}

func TestRolledBackOrderIsNeverSent(t *testing.T) {
	t.Parallel()
	// case PRD-1
	b := setup(t)
	start(t, b.store, b.sender(t), relay.Config{})
	db, err := gorm.Open(mysql.New(mysql.Config{DSN: b.db.DSN, Conn: b.db.SQL}), &gorm.Config{Logger: logger.Discard})
	if err != nil {
		t.Fatal(err)
	}
	tx := db.WithContext(t.Context()).Begin()
	// Due already: were it visible to the relay at all, it would be sent at once.
	gone, err := b.store.PlaceTx(t.Context(), tx, orders.NewOrder{Currency: "EUR", DeadlineAt: time.Now().Add(-time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	// While that transaction is open others are placed and sent: the relay has looked past its row.
	first := b.place(t, orders.NewOrder{DeadlineAt: time.Now().Add(-time.Minute)})
	b.awaitState(t, "sent", 1)
	if err := tx.Rollback().Error; err != nil {
		t.Fatal(err)
	}
	second := b.place(t, orders.NewOrder{DeadlineAt: time.Now().Add(-time.Minute)})
	b.awaitState(t, "sent", 2)
	want := []string{orders.FormatID(first.ID), orders.FormatID(second.ID)}
	if got := b.sentIDs(t); !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v and not the rolled back %d", got, want, gone.ID)
	}
}

func TestDueIsTheDeadlineAndNotCountedFromTheSend(t *testing.T) {
	t.Parallel()
	// case MQ-10
	b := setup(t)
	placed := b.place(t, orders.NewOrder{Timeout: 30 * time.Minute})
	// As if the order had been placed 20 s ago and nothing had run since.
	b.db.Exec(t, "UPDATE orders SET created_at = created_at - INTERVAL 20 SECOND, deadline_at = deadline_at - INTERVAL 20 SECOND")
	b.db.Exec(t, "UPDATE outbox SET available_at = available_at - INTERVAL 20 SECOND, deliver_at = deliver_at - INTERVAL 20 SECOND")
	start(t, b.store, b.sender(t), relay.Config{})
	b.awaitState(t, "sent", 1)
	if got, want := b.broker.Sent(topic)[0].DeliverAt, ceil(placed.DeadlineAt.Add(-20*time.Second)); !got.Equal(want) {
		t.Errorf("delivery time is %s, want the deadline's tick, %s", got, want)
	}
}

func TestOrdersOfOneTickShareAMessageAndOthersDoNot(t *testing.T) {
	t.Parallel()
	b := setup(t)
	tick := time.Now().UTC().Truncate(time.Second).Add(time.Hour)
	var want []string
	for i := range 7 {
		o := b.place(t, orders.NewOrder{DeadlineAt: tick.Add(time.Duration(i)*16*time.Millisecond + time.Millisecond)}) // 1 to 97 ms after it
		want = append(want, orders.FormatID(o.ID))
	}
	other := b.place(t, orders.NewOrder{DeadlineAt: tick.Add(101 * time.Millisecond)})
	r := start(t, b.store, b.sender(t), relay.Config{MaxOrdersPerMessage: 5})
	b.awaitState(t, "sent", 8)

	byDue := map[time.Time][]string{}
	for _, m := range b.broker.Sent(topic) {
		e := expiryOf(t, m)
		if len(e.Orders) > 5 {
			t.Errorf("%d orders are in one message, the limit is 5", len(e.Orders))
		}
		byDue[e.Due] = append(byDue[e.Due], e.Orders...)
	}
	shared, alone := tick.Add(100*time.Millisecond), tick.Add(200*time.Millisecond)
	got := slices.Sorted(slices.Values(byDue[shared]))
	if len(byDue) != 2 || !slices.Equal(got, slices.Sorted(slices.Values(want))) || !slices.Equal(byDue[alone], []string{orders.FormatID(other.ID)}) {
		t.Errorf("orders by due: %v; want %v at %s and %d at %s", byDue, want, shared, other.ID, alone)
	}
	if n := r.metric(t, "sent_messages_total"); n != 3 {
		t.Errorf("%v messages were sent, want 3: 5 orders and 2 of one tick, 1 of another", n)
	}
}

func TestFarOrderWaitsForOthersAndUrgentOneDoesNot(t *testing.T) {
	t.Parallel()
	b := setup(t)
	deadline := time.Now().UTC().Truncate(time.Second).Add(2 * time.Hour)
	far := b.place(t, orders.NewOrder{DeadlineAt: deadline})
	// A linger that cannot end within the test: what is sent was not kept waiting by it.
	r := start(t, b.store, b.sender(t), relay.Config{Linger: time.Hour, Lease: 3 * time.Hour, MaxOrdersPerMessage: 2})
	eventually(t, "the far order is claimed", func() bool { return b.row(t, far.ID).Leased })
	near := b.place(t, orders.NewOrder{Timeout: 3 * time.Second})
	b.awaitState(t, "sent", 1)
	if row := b.row(t, near.ID); row.State != "sent" {
		t.Fatalf("the order that is due in 3 s is %s", row.State)
	}
	if row := b.row(t, far.ID); row.State != "pending" || !row.Leased {
		t.Fatalf("the far order is %+v, want it to wait for others", row)
	}
	// A message that is full has nothing to wait for.
	b.place(t, orders.NewOrder{DeadlineAt: deadline})
	b.awaitState(t, "sent", 3)
	if n := r.metric(t, "sent_messages_total"); n != 2 {
		t.Errorf("%v messages were sent, want 2", n)
	}
}

func TestMessageOfABigOrderIsSmall(t *testing.T) {
	t.Parallel()
	// case PRD-8
	b := setup(t)
	n := orders.NewOrder{UserID: strings.Repeat("u", 64), Channel: strings.Repeat("c", 64), Traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
	for i := range 400 {
		sku := fmt.Sprintf("%s%03d", strings.Repeat("s", 60), i)
		b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES (?, NULL, 0, 0)", sku)
		n.Items = append(n.Items, orders.Item{SKU: sku, Quantity: 1, Price: 1})
	}
	b.place(t, n)
	start(t, b.store, b.sender(t), relay.Config{})
	b.awaitState(t, "sent", 1)
	m := b.broker.Sent(topic)[0]
	size := len(m.Body)
	for _, k := range m.Keys {
		size += len(k)
	}
	for k, v := range m.Properties {
		size += len(k) + len(v)
	}
	if size >= 1024 {
		t.Errorf("the message has %d bytes, want less than 1 KB", size)
	}
}

func TestTraceTravelsWithAnOrderThatIsAlone(t *testing.T) {
	t.Parallel()
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	b := setup(t)
	at := time.Now().UTC().Truncate(time.Second).Add(time.Hour)
	alone := b.place(t, orders.NewOrder{DeadlineAt: at, Traceparent: trace})
	odd := b.place(t, orders.NewOrder{DeadlineAt: at.Add(time.Minute), Traceparent: "no trace at all"})
	for range 2 {
		b.place(t, orders.NewOrder{DeadlineAt: at.Add(2 * time.Minute), Traceparent: trace})
	}
	start(t, b.store, b.sender(t), relay.Config{})
	b.awaitState(t, "sent", 4)
	for _, m := range b.broker.Sent(topic) {
		want := ""
		if m.Keys[0] == orders.FormatID(alone.ID) {
			want = trace
		}
		if got := m.Properties["traceparent"]; got != want {
			t.Errorf("message of %v (alone %d, odd %d) has traceparent %q, want %q", m.Keys, alone.ID, odd.ID, got, want)
		}
	}
}

func TestDeadlineBeyondTheBrokersReachHops(t *testing.T) {
	t.Parallel()
	b := setup(t)
	// So that what arrives early by more than 100 ms is timed anew, and not waited for.
	b.store = openStore(t, b.db.DSN, orders.Config{EarlyWait: 100 * time.Millisecond})
	r := start(t, b.store, b.sender(t), relay.Config{MaxDelay: time.Second})
	eventually(t, "the relay is ready", func() bool { return r.Ready() == nil })
	o := b.place(t, orders.NewOrder{Timeout: 6 * time.Second})
	id := orders.FormatID(o.ID)

	// The test is the consumer: each message is taken when it is due.
	handled := 0
	var result orders.Result
	eventually(t, "the order is cancelled", func() bool {
		sent := b.broker.Sent(topic)
		if handled == len(sent) || sent[handled].DeliverAt.After(time.Now()) {
			return false
		}
		m := sent[handled]
		if reach := m.DeliverAt.Sub(m.BornAt); reach > time.Second {
			t.Errorf("message %d is for %s after it was sent, the broker takes 1 s", handled, reach)
		}
		outcomes, err := b.store.CancelDue(t.Context(), []string{id})
		if err != nil {
			t.Fatal(err)
		}
		if outcomes[0].Result == orders.ResultNotDue && outcomes[0].Remaining <= 100*time.Millisecond {
			return false // early by little: the consumer asks again
		}
		handled++
		result = outcomes[0].Result
		return result != orders.ResultNotDue
	})
	if result != orders.ResultCancelled {
		t.Errorf("result is %s, want cancelled", result)
	}
	got, err := b.store.Get(t.Context(), o.ID)
	if err != nil {
		t.Fatal(err)
	}
	if lateness, _ := got.Lateness(); lateness < 0 || lateness > 10*time.Second {
		t.Errorf("cancelled %s after its deadline", lateness)
	}
	if hops := r.metric(t, "hops_total"); hops < 2 || hops != float64(handled-1) {
		t.Errorf("%v hops and %d messages, want at least 2 hops and one message more", hops, handled)
	}
}

func TestOnlyRowsOfFinalOrdersArePurged(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.store = openStore(t, b.db.DSN, orders.Config{OutboxRetention: 20 * time.Millisecond})
	r := start(t, b.store, b.sender(t), relay.Config{PurgeInterval: 20 * time.Millisecond})
	open := b.place(t, orders.NewOrder{})
	paid := b.place(t, orders.NewOrder{})
	cancelled := b.place(t, orders.NewOrder{DeadlineAt: time.Now().Add(-time.Second)})
	b.awaitState(t, "sent", 3)
	if _, err := b.store.RecordPayment(t.Context(), orders.Payment{Gateway: "g", TransactionID: "1", OrderID: paid.ID, Currency: "EUR", Amount: 100}); err != nil {
		t.Fatal(err)
	}
	if got := b.cancelDue(t, orders.FormatID(cancelled.ID)); got[0] != orders.ResultCancelled {
		t.Fatalf("cancel: %v", got)
	}
	b.awaitState(t, "sent", 1)
	eventually(t, "two rows are counted", func() bool { return r.metric(t, "purged_rows_total") == 2 })
	if row := b.row(t, open.ID); row.State != "sent" {
		t.Errorf("the open order's row is %+v", row)
	}
	// It goes as soon as the order is final.
	if _, err := b.store.Cancel(t.Context(), open.ID, "test", "no longer wanted"); err != nil {
		t.Fatal(err)
	}
	b.awaitState(t, "sent", 0)
}
