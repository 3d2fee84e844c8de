package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"
)

func (a *app) allCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "all",
		Short: "Run API, relay, consumer and reconcile in one process, until told to stop",
		Long: `Runs the API, a relay and a consumer in one process: all that a small shop needs beside its database and its broker.
With a replica named (mysql.dsn_replica) it runs the nightly reconcile, too; with a payment gateway (gateway.url) the
refunds.
There is one set of probes and metrics. Two of these processes on two machines survive the loss of one. When one
part grows, run it as a process of its own; they mix with this one.

After SIGTERM or SIGINT no request and no message is taken any more, what is in hand is finished, the broker's clients
are closed, the databases last. What was placed in the last moment waits in its outbox row for the next relay.

Each part works on the database as its own command does: mysql.dsn_relay, mysql.dsn_consume, mysql.dsn_refund,
mysql.dsn_reconcile, mysql.dsn; and each with a pool of mysql.max_open_conns, so that a rush on the API takes no
connection from the cancels.

/readyz and lapse health answer for the API: they name the broker and the other parts, and do not fail for them, since
orders are placed without a broker. lapse_ready is 0 for what is missing.`,
		Example: `  export LAPSE_MYSQL_DSN='lapse:secret@tcp(db:3306)/lapse' LAPSE_ROCKETMQ_ENDPOINTS=broker:8081
  lapse all
  lapse all --api-addr 127.0.0.1:8000 --config lapse.yaml
  lapse health all`,
		Args: a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			return a.serve(cmd, "all", roleRelay, a.assembleAll)
		}),
	}
	serviceFlags(cmd)
	apiFlag(cmd)
	cmd.Flags().String("group", "", "consumer `group` (key rocketmq.group)")
	return cmd
}

// assembleAll puts the parts of the services together. The service's own store is the relay's, which may see the figures that the metrics
// show; the others get stores of their own.
func (a *app) assembleAll(s *service) (*parts, error) {
	all := &parts{}
	type piece struct {
		name     string
		role     role
		assemble func(*service) (*parts, error)
	}
	pieces := []piece{
		{"relay", roleRelay, assembleRelay},
		{"consume", roleConsume, assembleConsumer},
		{"api", roleAPI, assembleAPI},
	}
	if s.cfg.Gateway.URL != "" {
		pieces = append(pieces, piece{"refund", roleRefund, assembleRefund})
	}
	if s.cfg.MySQL.DSNReplica != "" {
		pieces = append(pieces, piece{"reconcile", roleReconcile, assembleReconcile})
	}
	for _, part := range pieces {
		of := *s
		of.log = s.log.With("part", part.name)
		if part.role != roleRelay {
			store, err := a.open(s.cfg, part.role)
			if err != nil {
				return all, err
			}
			of.store = store
			all.stores = append(all.stores, store)
		}
		p, err := part.assemble(&of)
		if p != nil {
			all.join(p)
		}
		if err != nil {
			return all, fmt.Errorf("%s: %w", part.name, err)
		}
	}
	// What a checkout waits for is the API and its database. Were the process taken away for its broker's sake, no order could be placed, though
	// that never needs the broker.
	for i := range all.checks {
		all.checks[i].optional = all.checks[i].name != checkAPI
	}
	return all, nil
}

// join adds what another service runs. The check of the broker is one for all.
func (p *parts) join(other *parts) {
	p.run = append(p.run, other.run...)
	p.close = append(p.close, other.close...)
	p.pools = append(p.pools, other.pools...)
	if other.open != nil {
		p.open = other.open
	}
	for _, c := range other.checks {
		i := slices.IndexFunc(p.checks, func(known check) bool { return known.name == c.name })
		if i < 0 {
			p.checks = append(p.checks, c)
			continue
		}
		first := p.checks[i].ready
		p.checks[i].ready = func(ctx context.Context) error { return errors.Join(first(ctx), c.ready(ctx)) }
	}
}
