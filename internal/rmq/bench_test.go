package rmq

import (
	"context"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/lapsetest"
)

// What the way through the official client and the link costs, on an endpoint
// that costs little: a few times what a real broker can take.
func BenchmarkSendReceiveAck(b *testing.B) {
	broker := lapsetest.Start(b)
	broker.CreateTopic("t", lapsetest.Delay, 8)
	broker.CreateGroup("g", 16)
	p, c, err := openBoth(Config{Endpoints: broker.Endpoint(), TLS: TLS{Disabled: true}}, "g", "t")
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := closeBoth(ctx, p, c); err != nil {
			b.Error(err)
		}
	}()
	m := Message{Topic: "t", Body: make([]byte, 11<<10), DeliverAt: time.Now()} // 500 ids
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := p.Send(b.Context(), m); err != nil {
				b.Error(err)
				return
			}
			ds, err := c.Receive(b.Context(), 1, 10*time.Second)
			if err != nil {
				b.Error(err)
				return
			}
			for _, d := range ds {
				if err := c.Ack(b.Context(), d); err != nil {
					b.Error(err)
				}
			}
		}
	})
}
