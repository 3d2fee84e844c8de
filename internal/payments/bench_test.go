package payments_test

import (
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lapse-orders/lapse/internal/payments"
	"github.com/lapse-orders/lapse/internal/payments/paytest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
)

// BenchmarkGate cancels batches of 100 orders, as a consumer does, through a gate whose payment service takes 5 ms for each of the two calls,
// and without one.
func BenchmarkGate(b *testing.B) {
	const batch = 100
	for _, gated := range []bool{true, false} {
		name := map[bool]string{true: "gate", false: "none"}[gated]
		b.Run(name, func(b *testing.B) {
			store, err := orders.Open(mysqltest.New(b).DSN, orders.Config{})
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = store.Close() }()
			service := paytest.Start(b)
			service.Before(paytest.Slow(5*time.Millisecond, paytest.All))
			gateway, err := payments.NewHTTP(payments.HTTPConfig{URL: service.URL, Secret: paytest.Secret})
			if err != nil {
				b.Fatal(err)
			}
			defer gateway.Shut()
			cancel := store.CancelDue
			if gated {
				gate, err := payments.NewGate(store, gateway, payments.GateConfig{Name: gatewayName})
				if err != nil {
					b.Fatal(err)
				}
				cancel = gate.CancelDue
			}
			for b.Loop() {
				b.StopTimer()
				ids := make([]string, batch)
				group, ctx := errgroup.WithContext(b.Context())
				group.SetLimit(8)
				for i := range ids {
					group.Go(func() error {
						o, err := store.Place(ctx, orders.NewOrder{Currency: "EUR", Amount: 1000, DeadlineAt: time.Now().Add(-time.Second)})
						ids[i] = orders.FormatID(o.ID)
						return err
					})
				}
				if err := group.Wait(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				outcomes, err := cancel(b.Context(), ids)
				if err != nil {
					b.Fatal(err)
				}
				for _, o := range outcomes {
					if o.Result != orders.ResultCancelled {
						b.Fatalf("%+v", o)
					}
				}
			}
			b.ReportMetric(float64(batch*b.N)/b.Elapsed().Seconds(), "orders/s")
		})
	}
}
