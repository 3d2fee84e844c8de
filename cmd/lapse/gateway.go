package main

import (
	"context"
	"time"

	"github.com/lapse-orders/lapse/internal/payments"
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
	if s.cfg.Gateway.URL == "" {
		return s.store, nil
	}
	gateway, err := payments.NewHTTP(s.gatewayConfig())
	if err != nil {
		return nil, err
	}
	gate, err := payments.NewGate(s.store, gateway, s.gateConfig())
	if err != nil {
		return nil, err
	}
	s.log.Info("the payment gateway is asked before a cancel", "gateway", s.cfg.Gateway.Name, "url", s.cfg.Gateway.URL)
	return gate, nil
}

func (s *service) gatewayConfig() payments.HTTPConfig {
	c := s.cfg.Gateway
	return payments.HTTPConfig{
		URL:             c.URL,
		Secret:          c.Secret,
		Timeout:         c.Timeout,
		BreakerFailures: c.BreakerFailures,
		BreakerPause:    c.BreakerPause,
		Connections:     c.Concurrency,
		Registerer:      s.reg,
	}
}

func (s *service) gateConfig() payments.GateConfig {
	c := s.cfg.Gateway
	return payments.GateConfig{
		Name:         c.Name,
		DecideWithin: c.DecideWithin,
		Concurrency:  c.Concurrency,
		HoldMin:      c.HoldMin,
		HoldMax:      c.HoldMax,
		GiveUpAfter:  c.GiveUpAfter,
		Logger:       s.log,
		Registerer:   s.reg,
	}
}
