package relay_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/relay"
)

// The tests of this file run on the real broker.

// realSetup gives a store, a sender to a topic of the test's own, and that topic.
func realSetup(t *testing.T) (*bundle, *stacktest.Broker, relay.Sender, string) {
	t.Helper()
	broker := stacktest.Shared(t)
	b := &bundle{db: mysqltest.New(t)}
	b.store = openStore(t, b.db.DSN, orders.Config{})
	topic := broker.NewTopic(t, admin.Delay)
	return b, broker, openSender(t, relay.RocketMQ{Endpoints: broker.Endpoints, TLS: rmq.TLS{Disabled: true}}, topic), topic
}

// receive hands over messages, and acknowledges them, until enough says so.
func receive(t *testing.T, broker *stacktest.Broker, topic string, enough func(*rmq.Delivery) bool) {
	t.Helper()
	c, err := rmq.NewConsumer(rmq.Config{Endpoints: broker.Endpoints, TLS: rmq.TLS{Disabled: true}}, broker.NewGroup(t, 16), topic)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), limit)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Errorf("close the consumer: %v", err)
		}
	}()
	eventually(t, "the consumer is ready", func() bool { return c.Ready() == nil }, func() any { return c.Ready() })
	ctx, cancel := context.WithTimeout(t.Context(), 2*limit)
	defer cancel()
	for {
		ds, err := c.Receive(ctx, 16, 30*time.Second)
		if ctx.Err() != nil {
			t.Fatalf("not all messages came within %s, the last error: %v", 2*limit, err)
		}
		done := false
		for _, d := range ds {
			done = enough(d) || done
			if err := c.Ack(ctx, d); err != nil {
				t.Errorf("ack: %v", err)
			}
		}
		if done {
			return
		}
	}
}

func TestRealBrokerDeliversEveryOrderAtItsDeadlineAndNotBefore(t *testing.T) {
	t.Parallel()
	b, broker, sender, topic := realSetup(t)
	deadlines := map[string]time.Time{}
	base := time.Now().UTC().Add(5 * time.Second)
	for i := range 60 {
		// Three to a tick, two ticks in the past.
		o := b.place(t, orders.NewOrder{DeadlineAt: base.Add(time.Duration(i)*34*time.Millisecond - 200*time.Millisecond)})
		deadlines[orders.FormatID(o.ID)] = *o.DeadlineAt
	}
	r := start(t, b.store, sender, relay.Config{Topic: topic})
	b.awaitState(t, "sent", 60)

	cancelled := 0
	receive(t, broker, topic, func(d *rmq.Delivery) bool {
		now := time.Now()
		e, err := orders.DecodeExpiry(d.Body)
		if err != nil {
			t.Fatalf("message %s: %v", d.MessageID, err)
		}
		if !e.Due.Equal(d.DeliverAt) || now.Before(e.Due) {
			t.Errorf("message due %s, with delivery time %s, came at %s", e.Due, d.DeliverAt, now)
		}
		for _, id := range e.Orders {
			// On a busy machine an order may be overdue when it is sent, and then shares a message with others that are.
			want := ceil(deadlines[id])
			if overdue := !want.After(d.BornAt) && e.Due.After(want) && !e.Due.After(d.BornAt); !e.Due.Equal(want) && !overdue {
				t.Errorf("order %s is in a message due %s and sent %s, want due %s", id, e.Due, d.BornAt, want)
			}
		}
		for i, result := range b.cancelDue(t, e.Orders...) {
			switch result {
			case orders.ResultCancelled:
				cancelled++
			case orders.ResultAlreadyCancelled: // at least once
			default:
				t.Errorf("order %s, delivered at its due: %s", e.Orders[i], result)
			}
		}
		return cancelled == len(deadlines)
	})
	if n := r.metric(t, "sent_messages_total"); n >= 60 {
		t.Errorf("%v messages for 60 orders: nothing was coalesced", n)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'cancelled' AND cancelled_at >= deadline_at"); n != 60 {
		t.Errorf("%d of 60 orders are cancelled and not before their deadline", n)
	}
}

func TestRealBrokerTakesTheLargestMessages(t *testing.T) {
	t.Parallel()
	b, broker, sender, topic := realSetup(t)
	// Ids of 19 digits, 500 to a message: as large as a message gets.
	fillOutbox(t, b.db, 1500, 1500)
	b.db.Exec(t, "UPDATE outbox SET deliver_at = UTC_TIMESTAMP(3) + INTERVAL 4 SECOND")
	r := start(t, b.store, sender, relay.Config{Topic: topic})
	b.awaitState(t, "sent", 1500)
	if n := r.metric(t, "sent_messages_total"); n != 3 {
		t.Errorf("%v messages for 1,500 orders of one instant, want 3", n)
	}
	got := map[string]bool{}
	receive(t, broker, topic, func(d *rmq.Delivery) bool {
		e, err := orders.DecodeExpiry(d.Body)
		if err != nil {
			t.Fatalf("message %s of %d bytes: %v", d.MessageID, len(d.Body), err)
		}
		for _, id := range e.Orders {
			got[id] = true
		}
		return len(got) == 1500
	})
}

func TestRealBrokerRefusesWhatIsTooFarAwayAndTakesTheHop(t *testing.T) {
	t.Parallel()
	b, _, sender, topic := realSetup(t)
	far := b.place(t, orders.NewOrder{Timeout: 25 * time.Hour})
	near := b.place(t, orders.NewOrder{Timeout: 10 * time.Minute})
	r := start(t, b.store, sender, relay.Config{Topic: topic, MaxDelay: 30 * time.Hour})
	b.awaitState(t, "parked", 1)
	b.awaitState(t, "sent", 1)
	r.stop()
	if row := b.row(t, far.ID); row.State != "parked" || !strings.Contains(row.LastError, "40012") {
		t.Errorf("the far order's row is %+v, want it parked with the broker's code", row)
	}
	if row := b.row(t, near.ID); row.State != "sent" {
		t.Errorf("the near order's row is %+v", row)
	}

	hopping := b.place(t, orders.NewOrder{Timeout: 25 * time.Hour})
	hopper := start(t, b.store, sender, relay.Config{Topic: topic})
	b.awaitState(t, "sent", 2)
	row := b.row(t, hopping.ID)
	if away := time.Until(row.DeliverAt); away > 23*time.Hour+50*time.Minute || away < 23*time.Hour+49*time.Minute {
		t.Errorf("the hop is %s away, want 23h50m", away)
	}
	if n := hopper.metric(t, "hops_total"); n != 1 {
		t.Errorf("%v hops are counted, want 1", n)
	}
}

func TestRealTopicOfTheWrongTypeIsNamed(t *testing.T) {
	t.Parallel()
	// case MQ-9
	broker := stacktest.Shared(t)
	b := &bundle{db: mysqltest.New(t)}
	b.store = openStore(t, b.db.DSN, orders.Config{})
	topic := broker.NewTopic(t, admin.Normal)
	r := start(t, b.store, openSender(t, relay.RocketMQ{Endpoints: broker.Endpoints, TLS: rmq.TLS{Disabled: true}}, topic), relay.Config{Topic: topic})
	o := b.place(t, orders.NewOrder{})
	eventually(t, "the relay names the topic, its type and the fix", func() bool {
		said := fmt.Sprint(r.Ready())
		return strings.Contains(said, topic) && strings.Contains(said, "NORMAL") && strings.Contains(said, "message.type=DELAY")
	}, func() any { return r.Ready() })
	if row := b.row(t, o.ID); row.Leased || row.Attempts != 0 {
		t.Errorf("the row is %+v, want it untouched", row)
	}
}
