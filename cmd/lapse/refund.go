package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/internal/payments"
)

func (a *app) refundCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "refund",
		Short: "Give back what must not stay, through the payment gateway, until told to stop",
		Long: `Makes the refunds of late, duplicate, excess and mismatched payments through the shop's payment service (gateway.url,
see docs/gateway.md), and repeats closes of payment pages that got no answer. Payments under another name than
gateway.name are left to the refund process that has it. It runs until SIGTERM or SIGINT. Several may run; they share
the refunds. Each refund carries a key of its own, so that a process killed between any two steps makes none twice. What
cannot be made is parked after refund.max_attempts.

It works on the database as mysql.dsn_refund; without it, as mysql.dsn. It needs no broker.`,
		Example: `  export LAPSE_MYSQL_DSN='lapse:secret@tcp(db:3306)/lapse'
  export LAPSE_GATEWAY_URL=https://pay.example.com/lapse LAPSE_GATEWAY_NAME=bank LAPSE_GATEWAY_SECRET_FILE=/run/secrets/gateway
  lapse refund
  lapse health refund`,
		Args: a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			return a.serve(cmd, "refund", roleRefund, assembleRefund)
		}),
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	webFlags(cmd)
	return cmd
}

func assembleRefund(s *service) (*parts, error) {
	if s.cfg.Gateway.URL == "" {
		return nil, configProblem("there is no payment gateway to refund through: set gateway.url, gateway.name and gateway.secret (LAPSE_GATEWAY_URL, LAPSE_GATEWAY_NAME, LAPSE_GATEWAY_SECRET_FILE)")
	}
	gateway, err := payments.NewHTTP(s.gatewayConfig())
	if err != nil {
		return nil, err
	}
	worker, err := payments.NewWorker(s.store, gateway, s.refundConfig())
	if err != nil {
		return nil, err
	}
	p := &parts{
		run: []func(context.Context) error{func(ctx context.Context) error {
			defer gateway.Shut()
			return worker.Run(ctx)
		}},
		checks: []check{{name: "refund", ready: func(context.Context) error { return worker.Ready() }, loop: true}},
	}
	if s.name == "refund" {
		// Not in lapse all: its API takes the notices of payments, and must not be taken away because the gateway cannot be asked.
		p.checks = append([]check{{name: "gateway", ready: func(context.Context) error { return gateway.Ready() }}}, p.checks...)
	}
	return p, nil
}

func (s *service) refundConfig() payments.WorkerConfig {
	c := s.cfg.Refund
	return payments.WorkerConfig{
		Name:        s.cfg.Gateway.Name,
		Batch:       c.Batch,
		Lease:       c.Lease,
		Poll:        c.Poll,
		BackoffMin:  c.BackoffMin,
		BackoffMax:  c.BackoffMax,
		MaxAttempts: c.MaxAttempts,
		StopTimeout: s.drain(),
		Logger:      s.log,
		Registerer:  s.reg,
	}
}
