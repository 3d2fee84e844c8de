package consumer_test

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/lapse-orders/lapse/consumer"
	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/orders"
)

// bookings is a shop's own table, in place of lapse's. In a database, CancelDue is one transaction around a conditional update:
// UPDATE … WHERE id IN (…) AND state = 'open' AND deadline <= now.
type bookings struct {
	mu       sync.Mutex
	deadline map[string]time.Time // of the open ones
	done     chan string
}

func (b *bookings) CancelDue(_ context.Context, ids []string) ([]orders.Outcome, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	outcomes := make([]orders.Outcome, len(ids))
	for i, id := range ids {
		deadline, open := b.deadline[id]
		switch left := deadline.Sub(now); {
		case !open:
			outcomes[i] = orders.Outcome{ID: id, Result: orders.ResultAlreadyCancelled}
		case left > 0:
			outcomes[i] = orders.Outcome{ID: id, Result: orders.ResultNotDue, Remaining: left}
		default:
			delete(b.deadline, id)
			outcomes[i] = orders.Outcome{ID: id, Result: orders.ResultCancelled, Lateness: -left}
			b.done <- id
		}
	}
	return outcomes, nil
}

func (b *bookings) Park(_ context.Context, p orders.Parked) error {
	fmt.Println("parked", p.What, p.Ref)
	return nil
}

func (b *bookings) Ready(context.Context) error { return nil }

// A consumer inside another program, with a table of its own. The broker is the one for tests.
func Example() {
	broker, err := lapsetest.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer broker.Close()
	broker.CreateTopic("booking-timeout", lapsetest.Delay, 8)
	broker.CreateGroup("booking-timeout-cg", 16)

	table := &bookings{deadline: map[string]time.Time{"b-17": time.Now().Add(-time.Second)}, done: make(chan string, 1)}
	source, err := consumer.Connect(consumer.RocketMQ{Endpoints: broker.Endpoint(), TLS: consumer.TLS{Disabled: true}},
		"booking-timeout-cg", "booking-timeout")
	if err != nil {
		fmt.Println(err)
		return
	}
	c, err := consumer.New(table, table, source, consumer.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}

	ctx, stop := context.WithCancel(context.Background()) // in a program: signal.NotifyContext
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()

	body, err := orders.EncodeExpiry(orders.Expiry{Due: time.Now().Truncate(time.Millisecond), Orders: []string{"b-17"}})
	if err != nil {
		fmt.Println(err)
	}
	if _, err := broker.Inject("booking-timeout", body, time.Time{}); err != nil {
		fmt.Println(err)
	}
	fmt.Println("cancelled", <-table.done)

	stop()
	fmt.Println("stopped:", <-ended)
	fmt.Println("closed:", source.Close(context.Background()))
	// Output:
	// cancelled b-17
	// stopped: <nil>
	// closed: <nil>
}
