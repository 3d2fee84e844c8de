package orders_test

import (
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/orders"
)

func (b *bundle) story(id int64) orders.Story {
	b.t.Helper()
	s, err := b.store.ReadStory(b.ctx, id)
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

// The account that may only read finds everything: order, outbox row, events, payments, refunds, tasks, and what is parked of each sort.
func TestTheStoryHasAllThatIsKnownOfAnOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(func(n *orders.NewOrder) { n.DeadlineAt = time.Now().Add(-time.Minute) })
	c := b.claim(1, time.Minute)
	b.wantMarked("sent", 1)(b.store.MarkSent(b.ctx, c.Token, []orders.Sent{{IDs: []int64{o.ID}, MessageID: "m2", Due: *o.DeadlineAt}}))
	b.parkMessage("m1", orders.FormatID(o.ID))                                                             // an earlier one, which the events name
	b.park(orders.Parked{What: orders.ParkedMessage, Ref: "m2", Reason: "a dead letter", Body: []byte{1}}) // the outbox row's, unreadable
	b.parkMessage("m3", orders.FormatID(orders.NewID()))                                                   // another order's
	b.parkOrder(o.ID)
	b.cancelDue(o.ID)
	late := payment(o.ID)
	late.PaidAt = time.Now().Add(-time.Hour).UTC().Truncate(time.Millisecond)
	if _, err := b.store.RecordPayment(b.ctx, late); err != nil {
		t.Fatal(err)
	}
	b.park(orders.Parked{What: orders.ParkedPayment, Ref: late.Gateway + ":" + late.TransactionID})
	b.db.Exec(t, "UPDATE refunds SET state = 'done', attempts = 2, gateway_refund_id = 'R1'")
	b.db.Exec(t, "INSERT INTO gateway_tasks (order_id, kind, attempts, created_at, available_at, last_error) VALUES (?, 'close', 3, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3), 'time-out')", o.ID)

	dsn := os.Getenv("LAPSE_MYSQL_DSN_READ")
	parsed, err := mysql.ParseDSN(dsn)
	if err != nil || dsn == "" {
		t.Fatalf(`LAPSE_MYSQL_DSN_READ is %q: eval "$(scripts/stack env)"`, dsn)
	}
	reader := b.on(b.open(orders.Config{}, func(c *mysql.Config) { c.User, c.Passwd = parsed.User, parsed.Passwd }))
	s := reader.story(o.ID)
	switch {
	case s.Order == nil || s.Order.Status != orders.Cancelled || s.Order.CancelledAt == nil || !s.Order.DeadlineAt.Equal(*o.DeadlineAt):
		t.Errorf("the order is %+v", s.Order)
	case s.Outbox == nil || s.Outbox.State != "sent" || s.Outbox.MessageID != "m2":
		t.Errorf("the outbox row is %+v", s.Outbox)
	case len(s.Payments) != 1 || s.Payments[0].Outcome != orders.PaymentLate || !s.Payments[0].PaidAt.Equal(late.PaidAt) || s.Payments[0].Amount != 1000:
		t.Errorf("the payments are %+v", s.Payments)
	case len(s.Refunds) != 1 || s.Refunds[0].State != "done" || s.Refunds[0].GatewayRefundID != "R1" || s.Refunds[0].Attempts != 2 || s.Refunds[0].Reason != orders.RefundLate:
		t.Errorf("the refunds are %+v", s.Refunds)
	case len(s.Tasks) != 1 || s.Tasks[0].Kind != orders.TaskClose || s.Tasks[0].Attempts != 3 || s.Tasks[0].LastError != "time-out":
		t.Errorf("the tasks are %+v", s.Tasks)
	case s.ReadOnly || s.Now.Before(s.Refunds[0].CreatedAt):
		t.Errorf("read-only %t, now %s", s.ReadOnly, s.Now)
	}
	var parked, kinds []string
	for _, p := range s.Parked {
		parked = append(parked, p.What+" "+p.Ref)
	}
	for _, e := range s.Events {
		kinds = append(kinds, e.Kind)
	}
	if got, want := strings.Join(parked, ", "), "order "+orders.FormatID(o.ID)+", message m1, message m2, payment "+late.Gateway+":"+late.TransactionID; got != want {
		t.Errorf("parked are %s, want %s", got, want)
	}
	if got := strings.Join(kinds, " "); got != "placed parked parked cancelled refund" {
		t.Errorf("the events are %s", got)
	}
	// It has no right to write, and the story asks for none.
	if err := reader.store.Park(b.ctx, orders.Parked{What: orders.ParkedOrder, Ref: "1", Reason: "x"}); err == nil {
		t.Error("the account that reads can write")
	}

	if s := reader.story(orders.NewID()); s.Order != nil || s.Outbox != nil || len(s.Events)+len(s.Parked) != 0 {
		t.Errorf("the story of no order is %+v", s)
	}
	if err := b.store.Park(b.ctx, orders.Parked{What: orders.ParkedOrder, Ref: "77", Reason: "x"}); err != nil {
		t.Fatal(err)
	}
	if s := reader.story(77); s.Order != nil || len(s.Events) != 1 || len(s.Parked) != 1 {
		t.Errorf("the story of an id that is parked is %+v", s)
	}
	_ = reader.store.Close()
	if _, err := reader.store.ReadStory(b.ctx, o.ID); err == nil || !strings.Contains(err.Error(), "read story of order "+orders.FormatID(o.ID)) || errors.Is(err, orders.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

// Whatever happens meanwhile, the parts of a story fit each other, and nothing in it is later than its instant.
func TestTheStoryIsOfOneInstant(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(func(n *orders.NewOrder) { n.Timeout = time.Minute })
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() { // ends with stop
		until := *o.DeadlineAt
		for {
			select {
			case <-stop:
				return
			default:
			}
			until = until.Add(time.Second)
			if _, err := b.store.ExtendDeadline(b.ctx, o.ID, until, "ann"); err != nil {
				t.Error(err)
				return
			}
		}
	})
	seen := map[time.Time]bool{}
	eventually(t, "ten different instants were read", func() bool {
		s := b.story(o.ID)
		deadline := *s.Order.DeadlineAt
		seen[deadline] = true
		last := s.Events[len(s.Events)-1]
		if last.Kind == orders.EventExtended && last.Text("to") != deadline.Format(time.RFC3339Nano) || !s.Outbox.DeliverAt.Equal(deadline) || last.At.After(s.Now) {
			t.Errorf("the deadline is %s, the last event %s at %s, the outbox row for %s, now %s", deadline, last.Detail, last.At, s.Outbox.DeliverAt, s.Now)
		}
		return len(seen) >= 10 || t.Failed()
	})
	close(stop)
	wg.Wait()
}

func TestAStoryFromAReadOnlyServerSaysSo(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place()
	admin := os.Getenv("LAPSE_TEST_REPLICA_ADMIN_DSN")
	if admin == "" {
		t.Log("no replica: no server here takes no writes")
		return
	}
	parsed, err := mysql.ParseDSN(admin)
	if err != nil {
		t.Fatal(err)
	}
	replica := b.on(b.open(orders.Config{}, func(c *mysql.Config) { c.User, c.Passwd, c.Addr = parsed.User, parsed.Passwd, parsed.Addr }))
	eventually(t, "the replica has the order", func() bool {
		s, err := replica.store.ReadStory(b.ctx, o.ID)
		return err == nil && s.Order != nil && s.ReadOnly
	})
}
