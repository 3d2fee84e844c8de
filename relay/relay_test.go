package relay_test

import (
	"testing"
	"time"

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
	if late := e.Due.Sub(*o.DeadlineAt); late < 0 || late >= 100*time.Millisecond || e.Due.UnixMilli()%100 != 0 {
		t.Errorf("due %s for the deadline %s; want the next multiple of 100 ms", e.Due, o.DeadlineAt)
	}
	row := b.row(t, o.ID)
	if row.MessageID != sent[0].ID || !row.DeliverAt.Equal(e.Due) || row.Leased || row.Attempts != 0 {
		t.Errorf("outbox row is %+v, want message %s due %s and no lease", row, sent[0].ID, e.Due)
	}
	if err := r.Ready(); err != nil {
		t.Errorf("not ready: %v", err)
	}
}
