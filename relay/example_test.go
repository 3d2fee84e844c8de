package relay_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/relay"
)

// A service that has the database and a way to the broker runs a relay beside its own work, instead of "lapse relay".
func Example() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()

	// Both dial in the background: the service starts whether or not database and broker are up.
	store, err := orders.Open("shop:secret@tcp(mysql:3306)/shop", orders.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	sender, err := relay.OpenSender(relay.RocketMQ{Endpoints: "rocketmq-proxy:8081"}, "order-timeout")
	if err != nil {
		return err
	}
	// Not with ctx: it has ended by then, and the last sends are over when Run has returned.
	defer func() { err = errors.Join(err, sender.Close(context.Background())) }()

	r, err := relay.New(store, sender, relay.Config{Logger: slog.Default()})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// WithDefaults shows what a relay works with.
func ExampleConfig_WithDefaults() {
	c := relay.Config{MaxOrdersPerMessage: 100}.WithDefaults()
	fmt.Println(c.Topic, c.Tick, c.MaxOrdersPerMessage, c.Lease)
	// Output: order-timeout 100ms 100 30s
}
