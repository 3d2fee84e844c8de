package reconcile_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/reconcile"
)

// BenchmarkRun cancels 10,000 orders with two items each, of 1,000 SKUs, read from the real replica, as fast as it can. The numbers of workers are the
// default and its neighbours.
func BenchmarkRun(b *testing.B) {
	for _, workers := range []int{1, 2, 4} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			const orders = 10_000
			var lag time.Duration
			s := setup(b)
			for i := range b.N {
				b.StopTimer()
				first := int64(1 + i*orders)
				s.overdue(first, orders)
				items := "SELECT id, LPAD(MOD(id * 7 + n * 13, 1000), 4, 'sku') AS sku FROM orders JOIN (SELECT 0 AS n UNION ALL SELECT 1) AS two WHERE id >= ?"
				for _, query := range []string{
					"INSERT INTO order_items (order_id, sku, quantity, price) SELECT id, sku, 1, 500 FROM (" + items + ") AS t",
					"INSERT INTO stock_ledger (order_id, sku, kind, quantity, at) SELECT id, sku, 'reserve', 1, UTC_TIMESTAMP(3) FROM (" + items + ") AS t",
				} {
					s.db.Exec(b, query, first)
				}
				s.db.Exec(b, "INSERT INTO stock (sku, available, reserved, sold) SELECT sku, 0, COUNT(*), 0 FROM order_items WHERE order_id >= ? GROUP BY sku ON DUPLICATE KEY UPDATE reserved = reserved + 20", first)
				r := s.reconciler(func(c *reconcile.Config) { c.Workers = workers })
				b.StartTimer()
				report := s.run(r, reconcile.Options{})
				lag += report.Lag
				if report.Cancelled != orders {
					b.Fatalf("report %+v, want %d cancelled", report.Counts, orders)
				}
			}
			b.ReportMetric(orders*float64(b.N)/b.Elapsed().Seconds(), "orders/s")
			b.ReportMetric(lag.Seconds()/float64(b.N), "lag-s")
		})
	}
}
