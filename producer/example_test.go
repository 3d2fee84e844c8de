package producer_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/producer"
)

// checkout turns a cart into an order. The cart's row, the order, its reserved stock and the outbox row that makes its timed message be
// sent commit together, or not at all.
func checkout(ctx context.Context, db *gorm.DB, lapse *producer.Client, cartID int64) (orderID int64, err error) {
	for range 3 {
		err = db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			order, err := lapse.PlaceOrderTx(ctx, tx, producer.NewOrder{
				Channel: "web", UserID: "u-1", Currency: "CNY", Amount: 5600,
				Items:   []producer.Item{{SKU: "tea-500g", Quantity: 2, Price: 2800}},
				Timeout: 30 * time.Minute,
			})
			if err != nil {
				return err // out of stock: nothing was written, and gorm rolls the rest back
			}
			orderID = order.ID
			return tx.Exec("UPDATE carts SET order_id = ? WHERE id = ?", order.ID, cartID).Error
		})
		if !producer.IsRetryable(err) {
			return orderID, err
		}
	}
	return 0, err
}

// paymentNotice answers a gateway's callback. On every error the gateway is told to ask again; the same notice again changes nothing.
func paymentNotice(ctx context.Context, lapse *producer.Client, p producer.Payment) string {
	result, err := lapse.RecordPayment(ctx, p)
	if err != nil {
		return "fail"
	}
	if result.Refund > 0 {
		// The order was cancelled, or paid already, or the money does not fit: it goes back, and its record is committed.
		fmt.Printf("refund %d of order %d: %s\n", result.Refund, p.OrderID, result.RefundReason)
	}
	return "success"
}

// A checkout that places orders inside its own transaction.
func Example() {
	var db *gorm.DB // the shop's handle: gorm.Open(mysql.Open(dsn), &gorm.Config{})
	ctx := context.Background()

	run := func() error {
		lapse, err := producer.New(db, producer.Config{Timeout: 30 * time.Minute})
		if err != nil {
			return err
		}
		id, err := checkout(ctx, db, lapse, 7)
		if errors.Is(err, orders.ErrOutOfStock) {
			fmt.Println("sorry, sold out")
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Println("placed", id)
		return nil
	}
	_ = run // the tests run it on a real database
}

// Opening a client dials nothing: a checkout starts whatever is down, and refuses only what can never work.
func ExampleOpen() {
	client, err := producer.Open("shop:secret@tcp(127.0.0.1:3306)/shop", producer.Config{Timeout: 15 * time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("open")
	fmt.Println("closed:", client.Close())

	_, err = producer.Open("shop:secret@tcp(127.0.0.1:3306)/", producer.Config{})
	fmt.Println(err)
	// Output:
	// open
	// closed: <nil>
	// the DSN for 127.0.0.1:3306 names no database; expected user:password@tcp(host:port)/database: invalid argument
}
