package main

import (
	"context"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// canceller is what cancels due orders on behalf of a service: the store itself, or, with a payment gateway configured, the gate around it.
// Messages and reconcile go through the same one, so that no path cancels an order that the gateway knows to be paid.
type canceller interface {
	CancelDue(ctx context.Context, ids []string) ([]orders.Outcome, error)
	EarlyWait() time.Duration
}

// canceller gives what this service cancels through, working on its own store.
func (s *service) canceller() (canceller, error) {
	return s.store, nil
}
