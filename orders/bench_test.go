package orders_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
)

// fullExpiry is the largest message that a relay makes.
func fullExpiry() orders.Expiry {
	e := orders.Expiry{Due: time.Date(2026, 11, 30, 15, 0, 1, 0, time.UTC)}
	for range 500 {
		e.Orders = append(e.Orders, orders.FormatID(orders.NewID()))
	}
	return e
}

func BenchmarkEncodeExpiryOf500Orders(b *testing.B) {
	e := fullExpiry()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := orders.EncodeExpiry(e); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecodeExpiryOf500Orders(b *testing.B) {
	body, err := orders.EncodeExpiry(fullExpiry())
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := orders.DecodeExpiry(body); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCancelDue cancels due orders of two items, of 1,000 SKUs, in transactions of several sizes, one after the other; once telling of each.
// What several workers make of it shows `lapse bench burst`.
func BenchmarkCancelDue(b *testing.B) {
	db := mysqltest.New(b)
	stores := map[bool]*orders.Store{}
	for _, events := range []bool{false, true} {
		store, err := orders.Open(db.DSN, orders.Config{Events: events})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = store.Close() })
		stores[events] = store
	}
	db.Exec(b, "INSERT INTO stock (sku, available, reserved, sold) SELECT CONCAT('sku-', LPAD(a.n + 10 * b.n + 100 * c.n, 4, '0')), 1000000000, 0, 0 FROM "+
		digits("a")+", "+digits("b")+", "+digits("c"))
	placed := 0
	for _, c := range []struct {
		size   int
		events bool
	}{{1, false}, {10, false}, {100, false}, {100, true}, {500, false}} {
		size, store := c.size, stores[c.events]
		name := fmt.Sprintf("orders=%d", size)
		if c.events {
			name += "/events"
		}
		b.Run(name, func(b *testing.B) {
			done := 0
			for b.Loop() {
				b.StopTimer()
				ids := make([]string, size)
				for i := range ids {
					o, err := store.Place(b.Context(), orders.NewOrder{Channel: "web", UserID: "u1", Currency: "EUR", Amount: 1000, DeadlineAt: time.Now().Add(-time.Hour),
						Items: []orders.Item{{SKU: fmt.Sprintf("sku-%04d", placed%1000), Quantity: 1}, {SKU: fmt.Sprintf("sku-%04d", (placed*7+1)%1000), Quantity: 2}}})
					if err != nil {
						b.Fatal(err)
					}
					placed++
					ids[i] = orders.FormatID(o.ID)
				}
				b.StartTimer()
				outcomes, err := store.CancelDue(b.Context(), ids)
				if err != nil {
					b.Fatal(err)
				}
				for _, o := range outcomes {
					if o.Result != orders.ResultCancelled {
						b.Fatalf("order %s: %s", o.ID, o.Result)
					}
				}
				done += size
			}
			b.ReportMetric(float64(done)/b.Elapsed().Seconds(), "orders/s")
		})
	}
}
