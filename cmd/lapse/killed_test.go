package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/orders"
)

// A consumer is killed again and again, at points between the receive and the acknowledgement of its messages and around them. Each of
// its successors finds some messages done and not acknowledged, some begun, some untouched.
//
// case DEP-2
func TestConsumerKilledAtRandomPointsCancelsAndReleasesOnce(t *testing.T) {
	t.Parallel()
	const lanes, kills, ordersPerKill = 4, 5, 10 // 20 kills, and 50 orders in each lane
	for lane := range lanes {
		t.Run(fmt.Sprint(lane), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			random := rand.New(rand.NewPCG(uint64(lane), 1))
			b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', 1000, 0, 0)")
			environ := b.environ("LAPSE_CONSUMER_BATCH_ORDERS=3", "LAPSE_CONSUMER_WORKERS=1", "LAPSE_CONSUMER_INVISIBLE=10s", "LAPSE_CONSUMER_CANCEL_TIMEOUT=5s")
			var all []int64
			for n := range kills {
				ids := make([]int64, ordersPerKill)
				for i := range ids {
					ids[i] = b.place(t, orders.NewOrder{DeadlineAt: time.Now().Add(-time.Second), Items: []orders.Item{{SKU: "pen", Quantity: 1, Price: 100}}}).ID
				}
				all = append(all, ids...)
				b.message(t, ids[:5]...)
				b.message(t, ids[5:]...)
				consumer := killedAt(t, b, random, environ)
				if code := consumer.wait(t); code != -1 {
					t.Fatalf("consumer %d ends with %d, want a kill", n, code)
				}
				// Lets the invisible time of what it had in hand end at once.
				b.broker.SetSkew(time.Duration(n+1) * 11 * time.Second)
			}
			spawn(t, environ, "consume")
			eventually(t, "everything is acknowledged", func() bool {
				return len(b.broker.Acked(testGroup)) >= 2*kills && len(b.broker.InFlight(testGroup)) == 0
			})
			b.cancelledOnce(t, all...)
		})
	}
}

// killedAt starts a consumer and kills it at a point that random chooses: some time after it was given a message, when one of its
// acknowledgements arrives, or when that has been answered.
func killedAt(t *testing.T, b *bundle, random *rand.Rand, environ []string) *process {
	t.Helper()
	received, acked := make(chan struct{}, 1), make(chan struct{}, 1)
	tell := func(ch chan struct{}) {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
	unreceive := b.broker.Control(lapsetest.ReceiveMessage, func(context.Context, any) (any, error, bool) { tell(received); return nil, nil, false })
	defer unreceive()
	withhold := random.IntN(2) == 0
	unack := b.broker.Control(lapsetest.AckMessage, func(ctx context.Context, _ any) (any, error, bool) {
		tell(acked)
		if withhold {
			<-ctx.Done() // arrived, and never carried out
			return nil, ctx.Err(), true
		}
		return nil, nil, false
	})
	defer unack()
	pause := time.Duration(random.Int64N(int64(60 * time.Millisecond)))
	consumer := spawn(t, environ, "consume")
	if random.IntN(2) == 0 {
		await(t, received, "it receives")
	} else {
		await(t, acked, "it acknowledges")
		pause /= 10
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
	}
	consumer.signal(syscall.SIGKILL)
	return consumer
}
